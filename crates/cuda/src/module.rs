//! Modules made from PTX text, and the kernels in them.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUfunction_attribute, CUjit_option, CUresult};
use dualgemm_device::{Args, Error};

use crate::driver::check;

/// Bytes of message that the driver's assembler may write.
const LOG_BYTES: usize = 16 << 10;

/// A loaded module and the kernels looked up in it so far.
#[derive(Debug)]
pub(crate) struct Module {
    handle: sys::CUmodule,
    functions: Vec<Arc<Function>>,
    /// How many parameters each kernel has. The driver tells their sizes, but not their number.
    params: Vec<(String, usize)>,
}

// SAFETY: driver handles are plain numbers; the driver itself is thread-safe.
unsafe impl Send for Module {}
// SAFETY: shared references change nothing, and the driver is thread-safe.
unsafe impl Sync for Module {}

impl Module {
    /// Assembles PTX for the current context's device.
    pub(crate) fn load(ptx: &str) -> Result<Self, Error> {
        let text = CString::new(ptx).map_err(|e| {
            Error::Load(format!("the text has a NUL byte at offset {}; PTX is plain text", e.nul_position()))
        })?;
        let mut log = vec![0u8; LOG_BYTES];
        let mut options =
            [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG_BYTES as *mut c_void];
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text is NUL-terminated; both option arrays have the length given; the log buffer is as long
        // as its size option says and outlives the call.
        let result = unsafe {
            sys::cuModuleLoadDataEx(
                &mut handle,
                text.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if result == CUresult::CUDA_SUCCESS {
            return Ok(Self { handle, functions: Vec::new(), params: param_counts(ptx) });
        }
        let said = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy).unwrap_or_default();
        let why = check("cuModuleLoadDataEx", result).expect_err("not a success").to_string();
        let line = |key: &str| {
            ptx.lines()
                .map(str::trim)
                .find(|line| line.starts_with(key))
                .unwrap_or("no such line")
                .to_string()
        };
        let hint = match result {
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                format!("; the driver is older than this PTX ({}): install a newer one", line(".version"))
            }
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_INVALID_PTX => {
                "; this GPU or this driver lacks something that the kernel is written for".into()
            }
            _ => String::new(),
        };
        Err(Error::Load(format!("{why} ({}){hint}: {}", line(".target"), said.trim())))
    }

    /// Position of a kernel among those looked up.
    pub(crate) fn function(&mut self, name: &str) -> Result<u32, Error> {
        if let Some(index) = self.functions.iter().position(|known| known.name == name) {
            return Ok(index as u32);
        }
        let no_function = |available: String| Error::NoFunction { name: name.into(), available };
        let c_name = CString::new(name).map_err(|_| no_function(String::new()))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name NUL-terminated, the result outlives the call.
        let result = unsafe { sys::cuModuleGetFunction(&mut function, self.handle, c_name.as_ptr()) };
        if result == CUresult::CUDA_ERROR_NOT_FOUND {
            return Err(no_function(self.kernel_names()?.join(", ")));
        }
        check("cuModuleGetFunction", result)?;
        let params = self.params.iter().find(|(known, _)| known == name).map_or(0, |(_, count)| *count);
        self.functions.push(Arc::new(Function::new(name, function, params)?));
        Ok(self.functions.len() as u32 - 1)
    }

    /// The kernel at a position that [`function`](Self::function) gave out.
    pub(crate) fn get(&self, index: u32) -> Option<Arc<Function>> {
        self.functions.get(index as usize).cloned()
    }

    fn kernel_names(&self) -> Result<Vec<String>, Error> {
        let mut count = 0;
        // SAFETY: the module is loaded, the result outlives the call.
        check("cuModuleGetFunctionCount", unsafe { sys::cuModuleGetFunctionCount(&mut count, self.handle) })?;
        let mut functions = vec![std::ptr::null_mut(); count as usize];
        // SAFETY: the array holds `count` handles.
        let result = unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, self.handle) };
        check("cuModuleEnumerateFunctions", result)?;
        functions
            .into_iter()
            .map(|function| {
                let mut name: *const c_char = std::ptr::null();
                // SAFETY: the handle came from the driver; the name lives as long as the module.
                check("cuFuncGetName", unsafe { sys::cuFuncGetName(&mut name, function) })?;
                // SAFETY: the driver returns a NUL-terminated name.
                Ok(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
            })
            .collect()
    }

    /// Address and size of a global variable.
    pub(crate) fn symbol(&self, name: &str) -> Result<(sys::CUdeviceptr, usize), Error> {
        let no_symbol = || Error::NoSymbol {
            name: name.into(),
            available: "the driver does not list them; see the .global lines of the PTX".into(),
        };
        let c_name = CString::new(name).map_err(|_| no_symbol())?;
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: the module is loaded, the name NUL-terminated, the results outlive the call.
        let result =
            unsafe { sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, self.handle, c_name.as_ptr()) };
        if result == CUresult::CUDA_ERROR_NOT_FOUND {
            return Err(no_symbol());
        }
        check("cuModuleGetGlobal", result).map(|()| (address, bytes))
    }

    /// Gives the module back to the driver, whose context must be current.
    pub(crate) fn unload(self) {
        // SAFETY: loaded once, unloaded once. A failure here (a dead context) leaves nothing to do.
        let _ = unsafe { sys::cuModuleUnload(self.handle) };
    }
}

/// The kernels of a PTX text and how many parameters each has: `.entry NAME ( .param ..., .param ... )`.
fn param_counts(ptx: &str) -> Vec<(String, usize)> {
    let entries = ptx.split(".entry").skip(1);
    let entry = |text: &str| {
        let end = text.find('{').unwrap_or(text.len());
        let (name, list) = text[..end].split_once('(').unwrap_or((&text[..end], ""));
        let list = list.split(')').next().unwrap_or_default();
        (name.trim().to_string(), list.matches(".param").count())
    };
    entries.map(entry).collect()
}

/// A kernel, with what launches are checked against: asked of the driver once.
#[derive(Debug)]
pub(crate) struct Function {
    name: String,
    handle: sys::CUfunction,
    params: Vec<usize>,
    /// Dynamic shared memory that launches may ask for so far.
    shared: Mutex<u32>,
}

// SAFETY: driver handles are plain numbers; the driver itself is thread-safe.
unsafe impl Send for Function {}
// SAFETY: the one thing that changes is behind a mutex, and the driver is thread-safe.
unsafe impl Sync for Function {}

impl Function {
    fn new(name: &str, handle: sys::CUfunction, params: usize) -> Result<Self, Error> {
        let size = |index: usize| {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: the handle came from the driver, the results outlive the call.
            let result = unsafe { sys::cuFuncGetParamInfo(handle, index, &mut offset, &mut size) };
            check("cuFuncGetParamInfo", result).map(|()| size)
        };
        let params = (0..params).map(size).collect::<Result<_, _>>()?;
        // What every kernel may have without being asked for.
        Ok(Self { name: name.into(), handle, params, shared: Mutex::new(48 << 10) })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn handle(&self) -> sys::CUfunction {
        self.handle
    }

    /// Checks the arguments of a launch against what the kernel declares.
    pub(crate) fn check_arguments(&self, args: &Args) -> Result<(), Error> {
        let error = |reason: String| Error::Launch { kernel: self.name.clone(), reason };
        if args.len() != self.params.len() {
            let (given, wanted) = (args.len(), self.params.len());
            return Err(error(format!("{given} arguments were given; the kernel has {wanted} parameters")));
        }
        for (index, (arg, &size)) in args.iter().zip(&self.params).enumerate() {
            let (kind, bytes) = (arg.kind(), arg.bytes().len());
            if bytes != size {
                return Err(error(format!(
                    "argument {index} is a {kind} of {bytes} bytes; the parameter has {size}"
                )));
            }
        }
        Ok(())
    }

    /// Lets the kernel use as much dynamic shared memory as a launch asks for (above 48 KiB it must be asked for).
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<(), Error> {
        let mut allowed = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes <= *allowed {
            return Ok(());
        }
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the handle came from the driver.
        check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(self.handle, attribute, bytes as i32)
        })?;
        *allowed = bytes;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_counted_for_every_kernel_exact() {
        let text = ".visible .entry a(\n\t.param .u64 .ptr .global .align 16 x,\n\t.param .align 64 .b8 map[128]\n)\n\
                    .reqntid 128, 1, 1\n{\n\tld.param.u64 %rd0, [x];\n\tret;\n}\n.visible .entry b()\n{\n\tret;\n}\n\
                    .entry c\n{\n\tret;\n}\n";
        let want = [("a", 2), ("b", 0), ("c", 0)].map(|(name, count)| (name.to_string(), count));
        assert_eq!(param_counts(text), want);
    }
}
