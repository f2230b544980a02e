//! What the driver says, in words.

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};
use dualgemm_device::{Arch, DeviceInfo, Error};

/// A driver call's failure as an error that names the call and the driver's own words.
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), Error> {
    result.result().map_err(|error| explain(call, error))
}

/// The error of a failed call.
pub(crate) fn explain(call: &'static str, error: DriverError) -> Error {
    let text = |t: Result<&std::ffi::CStr, DriverError>| {
        t.map_or_else(|_| format!("error {}", error.0 as u32), |t| t.to_string_lossy().into_owned())
    };
    let reason = format!("{}: {}", text(error.error_name()), text(error.error_string()));
    match error.0 {
        // What a kernel did wrong is reported by whichever call comes next.
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUresult::CUDA_ERROR_INVALID_PC
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_ASSERT
        | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
        | CUresult::CUDA_ERROR_LAUNCH_FAILED => {
            Error::Kernel(format!("a kernel failed before {call}: {reason}; this device must be opened anew"))
        }
        _ => Error::Driver { call, reason },
    }
}

/// Loads and starts the driver; once per process is enough, more does no harm.
pub(crate) fn init() -> Result<(), Error> {
    if !is_installed() {
        return Err(Error::Driver {
            call: "loading the CUDA driver",
            reason: "libcuda.so was not found; it comes with NVIDIA's driver".into(),
        });
    }
    cudarc::driver::result::init().map_err(|error| explain("cuInit", error))
}

/// Whether the driver library is there. cudarc says so only if it loads the library itself; a program that another crate
/// made link to it starts only where it is.
fn is_installed() -> bool {
    ["libcuda.so.1", "libcuda.so", "nvcuda.dll"].iter().any(|name| {
        // SAFETY: NVIDIA's driver may be loaded at any time; its initialization asks nothing of the program.
        unsafe { libloading::Library::new(*name) }.is_ok()
    })
}

pub(crate) fn info(device: sys::CUdevice) -> Result<DeviceInfo, Error> {
    use CUdevice_attribute as A;
    let attribute = |attribute: CUdevice_attribute| -> Result<u32, Error> {
        let mut value = 0;
        // SAFETY: `value` outlives the call, `device` came from cuDeviceGet.
        let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
        check("cuDeviceGetAttribute", result).map(|()| value.max(0) as u32)
    };
    // SAFETY: `device` came from cuDeviceGet.
    let memory = unsafe { cudarc::driver::result::device::total_mem(device) };
    Ok(DeviceInfo {
        name: cudarc::driver::result::device::get_name(device).map_err(|e| explain("cuDeviceGetName", e))?,
        arch: Arch {
            major: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        },
        sm_count: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_cta: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shared_per_sm: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        registers_per_sm: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
        l2_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
        memory_bytes: memory.map_err(|e| explain("cuDeviceTotalMem", e))? as u64,
    })
}
