//! The ways in which the operation is put together, each selectable by itself. To add one, write a file and add a row
//! to [`STRATEGIES`].

pub mod baseline;
pub mod cached_scales;
pub mod cuda_graph;
pub mod fp8;
pub mod fused;
pub mod fused_epilogue;
mod launched;
pub mod library;
pub mod library_nvfp4;
pub mod native;
mod one_product;
pub mod parallel_streams;
pub mod plain;
pub mod portable;
mod requantize;
mod scaled;
pub mod warpwise;

use std::fmt::Debug;
use std::sync::Arc;

use dualgemm_device::{DeviceInfo, Stream};
use dualgemm_formats::FloatType;
use dualgemm_gemm::{DualGemmDesc, Operation, OutFormat};
use dualgemm_kernels::parts::rows::Out;

use crate::{DeviceCall, DeviceExperts, DeviceWeights, Error, Gpu, GpuPlan, GroupedCall, WeightForm};

/// How calls reach the card when their speed is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launches {
    /// One by one, as an eager program makes them.
    Eager,
    /// Recorded beforehand and replayed.
    Recorded,
}

/// What is rounded between the operands and C: how far C may be from the reference besides its own format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Nothing: operands are multiplied as they are, sums and the activation are f32.
    Nothing,
    /// Gate and up, to 16 bits.
    Products,
    /// A and the weights, to e4m3.
    Operands,
}

/// A way to put the operation together.
pub trait Strategy: Debug + Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// What it does, in one line.
    fn doc(&self) -> &'static str;

    /// The order in which it reads weights of gate and up.
    fn weight_form(&self) -> WeightForm;

    /// What it rounds on the way.
    fn rounding(&self) -> Rounding {
        Rounding::Nothing
    }

    /// Whether plans may take it without being asked to, and the tuner tries it unnamed. Such round nothing, and weights in
    /// one form serve all of them that a kind of card has: rows of codes with 128x4 scales are packed once where packed ones
    /// are read. The others are there to be compared with: they run if they are named.
    fn automatic(&self) -> bool {
        false
    }

    /// Whether it computes this operation.
    fn takes(&self, op: Operation) -> bool {
        op == Operation::GateUp
    }

    /// Names of the kernels for a problem with rows in about `groups` groups, 1 if in one.
    ///
    /// # Errors
    /// The reason why there are none.
    fn kernels_for(
        &self,
        desc: &DualGemmDesc,
        groups: usize,
        info: &DeviceInfo,
    ) -> Result<Vec<String>, Error> {
        if !self.takes(desc.op) {
            let reason = format!("{}; it computes gate and up", desc.op);
            return Err(Error::Unsupported { strategy: self.name(), reason });
        }
        if groups > 1 { self.grouped_kernels(desc, groups, info) } else { self.kernels(desc, info) }
    }

    /// Whether it needs NVIDIA's library.
    fn needs_library(&self) -> bool {
        false
    }

    /// How its calls are made when they are measured.
    fn launches(&self) -> Launches {
        Launches::Recorded
    }

    /// Names of the kernels that fit the problem; empty if there is only one way.
    ///
    /// # Errors
    /// If it cannot take the problem, or not on this kind of device: the reason.
    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error>;

    /// What the cost model expects of a kernel, µs, for rows in about `groups` groups, 1 if in one; none where it does not
    /// model it.
    fn estimate_us(&self, desc: &DualGemmDesc, groups: usize, info: &DeviceInfo, kernel: &str)
    -> Option<f64>;

    /// As [`kernels`](Self::kernels), those that take rows in about `groups` groups, each with weights of its own, at
    /// once.
    ///
    /// # Errors
    /// If it has none, or none for the problem: the reason.
    fn grouped_kernels(
        &self,
        desc: &DualGemmDesc,
        groups: usize,
        info: &DeviceInfo,
    ) -> Result<Vec<String>, Error> {
        let _ = (desc, info);
        let reason = format!("{groups} groups of rows; it takes one pair of weights a call");
        Err(Error::Unsupported { strategy: self.name(), reason })
    }

    /// Loads kernels and takes memory.
    ///
    /// # Errors
    /// If the machine lacks what the plan asks for, or memory.
    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error>;
}

/// A strategy with its kernels loaded and its memory taken: calls allocate nothing, wait for nothing and can be
/// recorded into a graph.
///
/// Calls share scratch memory, so they must be ordered: all on one stream, or streams made to wait for each other.
pub trait Prepared: Debug + Send + Sync {
    /// What must happen once for weights before calls with them are recorded. Does nothing the second time.
    fn warm(&self, weights: &Arc<DeviceWeights>) -> Result<(), Error> {
        let _ = weights;
        Ok(())
    }

    /// One call.
    ///
    /// # Safety
    /// Until it has ended, the operands of the call are live memory of the plan's GPU, as large as the problem and the call
    /// make them; nobody writes A meanwhile, or uses C or the scratch memory of another call.
    ///
    /// # Errors
    /// If an operand does not fit or is misaligned; what the device says of a launch.
    unsafe fn run(
        &self,
        call: &DeviceCall,
        weights: &Arc<DeviceWeights>,
        stream: Stream,
    ) -> Result<(), Error>;

    /// As [`warm`](Self::warm), for calls on rows in groups.
    ///
    /// # Errors
    /// As there, and if the plan is for one pair of weights a call.
    fn warm_grouped(&self, experts: &Arc<DeviceExperts>) -> Result<(), Error> {
        let _ = experts;
        Err(one_group())
    }

    /// One call on rows in groups, each with weights of its own.
    ///
    /// # Safety
    /// As [`run`](Self::run); the first rows are there, one more than there are experts, ascending to M at most.
    ///
    /// # Errors
    /// As [`run`](Self::run), and if the plan is for one pair of weights a call.
    unsafe fn run_grouped(
        &self,
        call: &GroupedCall,
        experts: &Arc<DeviceExperts>,
        stream: Stream,
    ) -> Result<(), Error> {
        let _ = (call, experts, stream);
        Err(one_group())
    }
}

pub(crate) fn one_group() -> Error {
    let [grid, persistent, decode] =
        [fused::Fused::GRID, fused::Fused::PERSISTENT, fused::Fused::DECODE].map(|s| s.name());
    let others = [warpwise::Warpwise.name(), native::Native.name(), portable::Portable.name()];
    let takers = [[grid, persistent, decode], others].concat();
    Error::OneGroup { takers: takers.join(", ") }
}

/// Every strategy, in the order in which tables show them.
pub const STRATEGIES: &[&dyn Strategy] = &[
    &baseline::BASELINE,
    &cached_scales::CACHED_SCALES,
    &parallel_streams::PARALLEL_STREAMS,
    &cuda_graph::CUDA_GRAPH,
    &library_nvfp4::LibraryNvfp4,
    &fused_epilogue::FusedEpilogue,
    &fused::Fused::GRID,
    &fused::Fused::PERSISTENT,
    &fused::Fused::STREAM_K,
    &fused::Fused::DECODE,
    &fused::Fused::WAVES,
    &warpwise::Warpwise,
    &plain::Plain,
    &portable::Portable,
    &native::Native,
    &fp8::Fp8,
];

/// Refuses what is not Hopper, for kernels of `sm_90a`.
fn require_sm90a(strategy: &'static str, info: &DeviceInfo) -> Result<(), Error> {
    if (info.arch.major, info.arch.minor) == (9, 0) {
        return Ok(());
    }
    let reason = format!("its kernel is for sm_90a; this is {}, {}", info.name, info.arch);
    Err(Error::Unsupported { strategy, reason })
}

/// The kernels of `menu` for a problem, if they can make its C; they do not round gate and up.
///
/// # Errors
/// If the problem asks for something else.
fn kernels_for_c<C>(
    strategy: &'static str,
    desc: &DualGemmDesc,
    menu: impl IntoIterator<Item = C>,
    name: impl Fn(&C, Out) -> Option<String>,
) -> Result<Vec<String>, Error> {
    let unsupported = |reason| Err(Error::Unsupported { strategy, reason });
    if desc.epilogue.round_gate_up_to_bf16 {
        return unsupported("it does not round gate and up to bf16".into());
    }
    let rows = launched::rows_of(desc);
    if let Err(error) = rows.check(desc.n) {
        return unsupported(error.to_string());
    }
    Ok(menu.into_iter().filter_map(|config| name(&config, rows.out)).collect())
}

/// The float type of C, if it is one.
fn float_out(out: OutFormat) -> Option<FloatType> {
    match out {
        OutFormat::F32 => Some(FloatType::F32),
        OutFormat::F16 => Some(FloatType::F16),
        OutFormat::Bf16 => Some(FloatType::Bf16),
        OutFormat::Nvfp4 { .. } => None,
    }
}

/// The strategy of that name.
pub fn strategy(name: &str) -> Result<&'static dyn Strategy, Error> {
    STRATEGIES.iter().copied().find(|s| s.name() == name).ok_or_else(|| Error::NoStrategy {
        found: name.into(),
        valid: STRATEGIES.iter().map(|s| s.name()).collect::<Vec<_>>().join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn those_taken_unasked_round_nothing_and_share_one_form_of_weights() {
        for s in STRATEGIES.iter().filter(|s| s.automatic()) {
            assert_eq!(s.rounding(), Rounding::Nothing, "{}", s.name());
            // A card takes either form, not both: that of Hopper's kernels or that of Blackwell's.
            assert!(matches!(s.weight_form(), WeightForm::Packed | WeightForm::Atoms), "{}", s.name());
            assert!(!s.needs_library(), "{}", s.name());
        }
        let named: Vec<&str> = STRATEGIES.iter().filter(|s| !s.automatic()).map(|s| s.name()).collect();
        let want = [
            "baseline",
            "cached-scales",
            "parallel-streams",
            "cuda-graph",
            "library-nvfp4",
            "fused-epilogue",
            "plain",
            "fp8",
        ];
        assert_eq!(named, want);
    }

    #[test]
    fn names_are_unique_and_found() {
        for s in STRATEGIES {
            assert_eq!(strategy(s.name()).unwrap().name(), s.name());
            assert!(!s.doc().is_empty());
        }
        assert_eq!(STRATEGIES.iter().map(|s| s.name()).collect::<HashSet<_>>().len(), STRATEGIES.len());
        let message = strategy("fast").unwrap_err().to_string();
        assert!(message.starts_with("no strategy is called \"fast\"; there are baseline, "), "{message}");
    }
}
