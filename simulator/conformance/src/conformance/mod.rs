//! Conformance cases: PTX modules that say how they are launched, on what, and what comes out.
//!
//! The head of a module is lines that start with `//!`:
//!
//! ```text
//! //! row add_int sub_int                      rows of the instruction table that the case covers
//! //! launch k grid 1 block 512 cluster 1 shared 0   a launch; its arguments follow in parameter order
//! //! in f32 edges 0 512                       a buffer: type, generator, seed, elements (see `data`)
//! //! inout u32 bits 3 64 = #0123456789abcdef  a buffer that is compared afterwards
//! //! out u32 64 = #0123456789abcdef           a zeroed buffer that is compared
//! //! out f32 512 = #0123456789abcdef within 2 1e-7   other devices may differ by 2 ulp or by 1e-7
//! //! bytes u32 iota 0 32                      an array passed by value
//! //! u32 7                                    a number
//! //! map 1 f16 dims 64 64 strides 128 box 64 8 steps 1 1 swizzle B128 fill Zero   tensor map of argument 1
//! //! map 1 f16 dims 8 9 9 strides 16 144 box 8 32 steps 1 1 1 lower -1 upper -1   the same in im2col mode
//! ```
//!
//! What is expected is written as the 64-bit FNV-1a hash of the bytes. Expected results were computed by the simulator
//! and certified by a card, see [`record`] and `benchmarks/record/`; those of chips that were not at hand are computed by what
//! generates the case.

use dualgemm_device::{Args, Device, DevicePtr, Error as DeviceError, LaunchSpec};
use dualgemm_ptx::layout::{Interleave, L2Promotion, OutOfBounds, Swizzle, TensorDataType, TensorMap};

mod compare;
pub mod data;
mod header;
pub mod record;
pub mod report;

pub use compare::{Difference, Tolerance, compare};

/// Why a case could not be read or run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// The head of a module is not well-formed; lines count from 1.
    #[error("{case}, line {line}: {reason}")]
    Header { case: String, line: usize, reason: String },
    /// What is generated and what is recorded do not go together.
    #[error("{case}: {reason}")]
    Record { case: String, reason: String },
    /// The device refused or failed.
    #[error("{case}, launch {launch}: {source}")]
    Device { case: String, launch: usize, source: DeviceError },
}

/// A conformance case.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// `family/row`.
    pub name: String,
    /// The whole text, which is also what the device loads.
    pub ptx: String,
    /// The rows of the instruction table that it covers.
    pub rows: Vec<String>,
    /// How a card agreed with what is expected, which, and when: `equal H100 2026-11-28`.
    pub certified: Option<String>,
    /// What to launch, in order.
    pub launches: Vec<Launch>,
}

impl Case {
    /// The `.target` of the module, such as `sm_90a`.
    pub fn target(&self) -> &str {
        let line = self.ptx.lines().find_map(|l| l.strip_prefix(".target "));
        line.map_or("", str::trim)
    }

    /// Whether a card of compute capability `major`.x can run it.
    pub fn runs_on(&self, major: u32) -> bool {
        let target = self.target().trim_start_matches("sm_");
        let number: u32 = target.trim_end_matches(['a', 'f']).parse().unwrap_or(u32::MAX);
        if target.ends_with(['a', 'f']) { number / 10 == major } else { number / 10 <= major }
    }
}

/// One launch of a case.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The kernel.
    pub kernel: String,
    /// CTAs in x.
    pub grid: u32,
    /// Threads per CTA.
    pub block: u32,
    /// CTAs of a cluster.
    pub cluster: u32,
    /// Dynamic shared memory, bytes.
    pub shared: u32,
    /// The arguments in parameter order.
    pub arguments: Vec<Argument>,
}

/// One argument of a launch.
#[derive(Debug, Clone, PartialEq)]
pub enum Argument {
    /// Device memory; the kernel gets its address.
    Buffer(Buffer),
    /// Bytes by value.
    Bytes(data::Data),
    /// A number.
    U32(u32),
    /// A tensor map over the buffer of an earlier argument.
    Map {
        /// Which argument, from 0.
        buffer: usize,
        /// The map, its address counted from the start of the buffer.
        map: TensorMap,
    },
}

/// A buffer argument.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// What it holds before the launch.
    pub data: data::Data,
    /// [`hash`] of what it must hold afterwards, where that is looked at.
    pub expected: Option<u64>,
    /// How far another device may be from the expected result; bit for bit if `None`.
    pub tolerance: Option<Tolerance>,
}

/// 64-bit FNV-1a <http://www.isthe.com/chongo/tech/comp/fnv/>.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// The compared buffers of a run: (launch, argument, bytes), in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome(pub Vec<(usize, usize, Vec<u8>)>);

impl Outcome {
    /// Whether every buffer is what the case expects, bit for bit.
    pub fn is_expected(&self, case: &Case) -> bool {
        self.0.iter().all(|(launch, argument, bytes)| {
            let Argument::Buffer(b) = &case.launches[*launch].arguments[*argument] else { return false };
            b.expected == Some(hash(bytes))
        })
    }
}

/// The case of a text with its head.
///
/// # Errors
/// [`Error::Header`].
pub fn load(name: &str, ptx: &str) -> Result<Case, Error> {
    header::parse(name, ptx)
}

/// Every case, generated, in the order of names.
///
/// # Errors
/// [`Error::Record`] if a text is not the one recorded.
pub fn load_all() -> Result<Vec<Case>, Error> {
    record::Records::parse(record::RECORDED)?.complete(crate::generate::drafts())
}

/// Runs a case and returns what its compared buffers hold.
///
/// # Errors
/// [`Error::Device`] if the device refuses the module or a launch, or a kernel fails.
pub fn run(device: &dyn Device, case: &Case) -> Result<Outcome, Error> {
    let fail = |launch| {
        let case = case.name.clone();
        move |source| Error::Device { case: case.clone(), launch, source }
    };
    let module = device.load(&case.ptx).map_err(fail(0))?;
    let mut outcome = Outcome::default();
    for (i, launch) in case.launches.iter().enumerate() {
        run_launch(device, module, launch, i, &mut outcome).map_err(fail(i))?;
    }
    Ok(outcome)
}

fn run_launch(
    device: &dyn Device,
    module: dualgemm_device::ModuleId,
    launch: &Launch,
    number: usize,
    outcome: &mut Outcome,
) -> Result<(), DeviceError> {
    let function = device.function(module, &launch.kernel)?;
    let mut buffers = vec![DevicePtr::NULL; launch.arguments.len()];
    let mut args = Args::new();
    for (i, argument) in launch.arguments.iter().enumerate() {
        args = match argument {
            Argument::Buffer(b) => {
                let bytes = b.data.bytes();
                buffers[i] = device.alloc(bytes.len())?;
                device.copy_to(buffers[i], &bytes)?;
                args.ptr(buffers[i])
            }
            Argument::Bytes(data) => args.bytes(&data.bytes(), 16),
            Argument::U32(value) => args.u32(*value),
            Argument::Map { buffer, map } => {
                let address = buffers[*buffer].0.wrapping_add(map.address);
                args.tensor_map(device.tensor_map(&TensorMap { address, ..map.clone() })?)
            }
        };
    }
    let spec = LaunchSpec::new(function, [launch.grid, 1, 1], [launch.block, 1, 1])
        .cluster([launch.cluster, 1, 1])
        .dynamic_shared(launch.shared)
        .args(args);
    // SAFETY: the file names buffers that were allocated here, as large as its kernel needs.
    unsafe { device.launch(&spec) }?;
    device.synchronize()?;
    for (i, argument) in launch.arguments.iter().enumerate() {
        let Argument::Buffer(b) = argument else { continue };
        if b.expected.is_some() {
            let mut bytes = vec![0; b.data.len()];
            device.copy_from(&mut bytes, buffers[i])?;
            outcome.0.push((number, i, bytes));
        }
        device.free(buffers[i])?;
    }
    Ok(())
}

/// A map with the settings that results do not depend on filled in.
fn tensor_map(data_type: TensorDataType, swizzle: Swizzle, out_of_bounds: OutOfBounds) -> TensorMap {
    TensorMap {
        data_type,
        address: 0,
        dims: Vec::new(),
        strides: Vec::new(),
        box_dims: Vec::new(),
        element_strides: Vec::new(),
        interleave: Interleave::None,
        swizzle,
        l2_promotion: L2Promotion::None,
        out_of_bounds,
        im2col: None,
    }
}
