//! Launches laid out for the driver once: starting one looks nothing up, checks nothing and allocates nothing.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use dualgemm_device::{Error, LaunchSpec, Stream};
use smallvec::SmallVec;

use crate::Cuda;
use crate::driver::check;
use crate::module::Function;

/// What a launch asks for beside its grid: a cluster, an early start.
pub(crate) type Attributes = SmallVec<[sys::CUlaunchAttribute; 2]>;

/// The attributes of a launch, as the driver wants them.
pub(crate) fn attributes(spec: &LaunchSpec) -> Attributes {
    let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
    let mut attributes = Attributes::new();
    if spec.cluster != [1, 1, 1] {
        let [x, y, z] = spec.cluster;
        let dims = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
        attributes.push(attribute(
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            sys::CUlaunchAttributeValue { clusterDim: dims },
        ));
    }
    if spec.programmatic {
        attributes.push(attribute(
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        ));
    }
    attributes
}

/// Where the bytes of each argument are.
pub(crate) fn pointers(spec: &LaunchSpec) -> SmallVec<[*mut c_void; 24]> {
    spec.args.iter().map(|arg| arg.bytes().as_ptr().cast_mut().cast()).collect()
}

/// Hands a launch to the driver, in the current context.
///
/// # Safety
/// The kernel belongs to the current context, `pointers` has one pointer for each of its parameters, to as many bytes as
/// that has, and `stream` is a stream of the context.
pub(crate) unsafe fn start(
    function: &Function,
    spec: &LaunchSpec,
    attributes: &[sys::CUlaunchAttribute],
    pointers: &[*mut c_void],
    stream: sys::CUstream,
) -> Result<(), Error> {
    let config = sys::CUlaunchConfig {
        gridDimX: spec.grid[0],
        gridDimY: spec.grid[1],
        gridDimZ: spec.grid[2],
        blockDimX: spec.block[0],
        blockDimY: spec.block[1],
        blockDimZ: spec.block[2],
        sharedMemBytes: spec.dynamic_shared,
        hStream: stream,
        attrs: attributes.as_ptr().cast_mut(),
        numAttrs: attributes.len() as u32,
    };
    let pointers = pointers.as_ptr().cast_mut();
    // SAFETY: the caller vouches for the handles and the arguments; the driver only reads what it is given, and before it
    // returns.
    let result = unsafe { sys::cuLaunchKernelEx(&config, function.handle(), pointers, std::ptr::null_mut()) };
    match result {
        sys::CUresult::CUDA_ERROR_INVALID_VALUE | sys::CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE => {
            Err(Error::Launch {
                kernel: function.name().into(),
                reason: format!(
                    "the driver refuses grid {:?}, block {:?}, cluster {:?}, {} bytes of dynamic shared memory",
                    spec.grid, spec.block, spec.cluster, spec.dynamic_shared
                ),
            })
        }
        other => check("cuLaunchKernelEx", other),
    }
}

/// A launch with everything that the driver asks for; see [`Cuda::ready`].
pub struct ReadyLaunch {
    function: Arc<Function>,
    attributes: Attributes,
    /// Into the arguments of `spec`.
    pointers: Box<[*mut c_void]>,
    /// Shared, although nobody else has it: what is behind an `Arc` stays where it is and may be pointed at.
    spec: Arc<LaunchSpec>,
    /// Keeps the kernel loaded.
    cuda: Arc<Cuda>,
}

impl std::fmt::Debug for ReadyLaunch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadyLaunch").field("spec", &self.spec).finish_non_exhaustive()
    }
}

// SAFETY: the pointers are read only, and what they point at belongs to the launch.
unsafe impl Send for ReadyLaunch {}
// SAFETY: nothing changes once it is made.
unsafe impl Sync for ReadyLaunch {}

impl Cuda {
    /// Checks a launch and lays it out for the driver, to be started as often as wanted.
    ///
    /// # Errors
    /// [`Error::Launch`] if the arguments do not fit the kernel, [`Error::BadHandle`] for a kernel that this GPU does not
    /// have.
    pub fn ready(self: &Arc<Self>, spec: LaunchSpec) -> Result<ReadyLaunch, Error> {
        self.enter()?;
        let function = self.checked_kernel(&spec)?;
        let (attributes, spec) = (attributes(&spec), Arc::new(spec));
        let pointers = pointers(&spec).into_vec().into();
        Ok(ReadyLaunch { function, attributes, pointers, spec, cuda: self.clone() })
    }

    /// Starts launches one after the other on a stream; as [`launch_on`](dualgemm_device::Device::launch_on) each, at
    /// less cost for the host.
    ///
    /// # Safety
    /// As there, for each.
    ///
    /// # Errors
    /// As there, and [`Error::BadHandle`] for launches made ready on another GPU.
    pub unsafe fn start(&self, stream: Stream, launches: &[ReadyLaunch]) -> Result<(), Error> {
        self.enter()?;
        let handle = self.context().stream(stream);
        for launch in launches {
            if !std::ptr::eq(Arc::as_ptr(&launch.cuda), self) {
                return Err(Error::BadHandle { what: "launch" });
            }
            let ReadyLaunch { function, attributes, pointers, spec, .. } = launch;
            // SAFETY: the kernel is one of this context's, which was entered; `ready` checked that the arguments are what
            // it declares, and they live as long as the launch. The caller vouches for the rest.
            unsafe { start(function, spec, attributes, pointers, handle) }?;
        }
        Ok(())
    }
}
