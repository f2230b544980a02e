//! The ways in which the operation is put together, each selectable by itself. To add one, add a row to [`STRATEGIES`]: one
//! of a fused kernel is a constant in `kernel.rs`, one around NVIDIA's library in `library.rs`.

mod kernel;
mod launched;
mod library;
mod operands;
mod requantize;

use std::fmt::Debug;
use std::sync::Arc;

use dualgemm_device::{DeviceInfo, Stream};
use dualgemm_gemm::{DualGemmDesc, Operation};

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

/// What is said of a strategy, whatever the problem.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    name: &'static str,
    doc: &'static str,
    form: WeightForm,
    rounding: Rounding,
    automatic: bool,
    needs_library: bool,
    /// Whether it computes linear layers too.
    linear: bool,
    /// Whether it takes rows in groups.
    groups: bool,
}

impl Facts {
    /// One that is compared with: gate and up of one problem, nothing rounded.
    const fn new(name: &'static str, doc: &'static str, form: WeightForm) -> Self {
        let (automatic, needs_library, linear, groups) = (false, false, false, false);
        Self { name, doc, form, rounding: Rounding::Nothing, automatic, needs_library, linear, groups }
    }
}

/// A way to put the operation together.
pub trait Strategy: Debug + Sync {
    /// What is said of it, whatever the problem.
    fn facts(&self) -> &Facts;

    /// Names of the kernels that fit a problem that it computes.
    ///
    /// # Errors
    /// The reason why there are none.
    fn fitting(&self, desc: &DualGemmDesc, groups: usize, info: &DeviceInfo) -> Result<Vec<String>, Error>;

    /// What the cost model expects of a kernel, µs, for rows in about `groups` groups, 1 if in one; none where it does not
    /// model it.
    fn estimate_us(&self, desc: &DualGemmDesc, groups: usize, info: &DeviceInfo, kernel: &str)
    -> Option<f64>;

    /// Loads kernels and takes memory.
    ///
    /// # Errors
    /// If the machine lacks what the plan asks for, or memory.
    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error>;

    /// Its name on the command line.
    fn name(&self) -> &'static str {
        self.facts().name
    }

    /// What it does, in one line.
    fn doc(&self) -> &'static str {
        self.facts().doc
    }

    /// The order in which it reads weights of gate and up.
    fn weight_form(&self) -> WeightForm {
        self.facts().form
    }

    /// What it rounds on the way.
    fn rounding(&self) -> Rounding {
        self.facts().rounding
    }

    /// Whether plans may take it without being asked to, and the tuner tries it unnamed. Such round nothing, and weights in
    /// one form serve all of them that a kind of card has: rows of codes with 128x4 scales are packed once where packed ones
    /// are read. The others are there to be compared with: they run if they are named.
    fn automatic(&self) -> bool {
        self.facts().automatic
    }

    /// Whether it needs NVIDIA's library.
    fn needs_library(&self) -> bool {
        self.facts().needs_library
    }

    /// How its calls are made when they are measured.
    fn launches(&self) -> Launches {
        if self.needs_library() { Launches::Eager } else { Launches::Recorded }
    }

    /// What refuses a problem.
    fn unsupported(&self, reason: String) -> Error {
        Error::Unsupported { strategy: self.name(), reason }
    }

    /// Names of the kernels for a problem with rows in about `groups` groups, each with weights of its own, that one launch
    /// takes; 1 if in one.
    ///
    /// # Errors
    /// If it cannot take the problem, or not on this kind of device: the reason.
    fn kernels(&self, desc: &DualGemmDesc, groups: usize, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        if desc.op == Operation::Linear && !self.facts().linear {
            return Err(self.unsupported(format!("{}; it computes gate and up", desc.op)));
        }
        if groups > 1 && !self.facts().groups {
            let reason = format!("{groups} groups of rows; it takes one pair of weights a call");
            return Err(self.unsupported(reason));
        }
        if groups > 1 && desc.out.is_dynamic() {
            let reason = "a dynamic scale of C would count rows of no group; use a static one";
            return Err(self.unsupported(reason.into()));
        }
        self.fitting(desc, groups.max(1), info)
    }
}

/// A strategy with its kernels loaded and its memory taken: calls allocate nothing, wait for nothing and can be
/// recorded into a graph.
///
/// Calls share scratch memory, so they must be ordered: all on one stream, or streams made to wait for each other.
pub trait Prepared: Debug + Send + Sync {
    /// What must happen once for weights before calls with them are recorded. Does nothing the second time.
    fn warm(&self, weights: &Arc<DeviceWeights>) -> Result<(), Error>;

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

    /// As [`warm`](Self::warm), for calls on rows in groups, or on choices.
    ///
    /// # Errors
    /// As there, and if the plan is for one pair of weights a call.
    fn warm_grouped(&self, experts: &Arc<DeviceExperts>, choices: bool) -> Result<(), Error> {
        let _ = (experts, choices);
        Err(one_group())
    }

    /// Whether calls on rows in groups may be on [choices](GroupedCall::choices) as a router makes them.
    fn takes_choices(&self) -> bool {
        false
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
    let takers: Vec<&str> = STRATEGIES.iter().filter(|s| s.facts().groups).map(|s| s.name()).collect();
    Error::OneGroup { takers: takers.join(", ") }
}

/// Every strategy, in the order in which tables show them.
pub const STRATEGIES: &[&dyn Strategy] = &[
    &library::BASELINE,
    &library::CACHED_SCALES,
    &library::PARALLEL_STREAMS,
    &library::CUDA_GRAPH,
    &library::NVFP4,
    &kernel::FUSED_EPILOGUE,
    &kernel::FUSED,
    &kernel::PERSISTENT,
    &kernel::STREAM_K,
    &kernel::DECODE,
    &kernel::WAVES,
    &kernel::WARPWISE,
    &kernel::PLAIN,
    &kernel::PORTABLE,
    &kernel::NATIVE,
    &kernel::FP8,
];

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
            "stream-k",
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

    #[test]
    fn a_plan_for_one_pair_names_those_that_take_groups() {
        let takers = "fused, persistent, decode, warpwise, portable, native";
        assert!(one_group().to_string().contains(takers), "{}", one_group());
    }
}
