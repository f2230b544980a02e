//! GPUs as targets: which there are, and how a plan for one runs on operands in the host's memory.

#[cfg(feature = "sim")]
use std::collections::BTreeMap;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;
#[cfg(feature = "sim")]
use std::sync::{Mutex, PoisonError};

use dualgemm_bench::Timing;
use dualgemm_device::{Device as _, Stream};
use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::{AFormat, AOperand, DualGemmDesc, OutFormat, OutputMut, QuantizeA};
use dualgemm_plan::{
    Buffer, DeviceCall, DeviceExperts, DeviceWeights, Gpu, GpuPlan, GroupedCall, Launches, Operands,
    Prepared, measure,
};
#[cfg(feature = "sim")]
use dualgemm_sim::Card;

use crate::{Error, PackedExperts, PackedWeights, Rows};

/// A GPU by name: `cuda:0` is the first card, `sim:sm_90a` a simulated one.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum GpuId {
    /// The NVIDIA GPU of that number.
    Cuda(i32),
    /// A simulated GPU.
    #[cfg(feature = "sim")]
    Sim(SimArch),
}

#[cfg(feature = "sim")]
dualgemm_formats::named! {
    /// Architectures that the simulator has a card of.
    #[derive(PartialOrd, Ord)]
    pub enum SimArch {
        /// Hopper (H100).
        Sm90a = "sm_90a",
        /// Blackwell (B200).
        Sm100a = "sm_100a",
        /// Blackwell Ultra (B300).
        Sm103a = "sm_103a",
        /// Blackwell workstation (RTX PRO 6000).
        Sm120a = "sm_120a",
        /// DGX Spark (GB10).
        Sm121a = "sm_121a",
    }
}

#[cfg(feature = "sim")]
impl SimArch {
    /// The simulated card, made the first time and then kept.
    fn open(self) -> &'static Gpu {
        static SIMULATED: Mutex<BTreeMap<SimArch, &'static Gpu>> = Mutex::new(BTreeMap::new());
        let mut open = SIMULATED.lock().unwrap_or_else(PoisonError::into_inner);
        let config = || dualgemm_sim::Config::default().card(self.card());
        open.entry(self).or_insert_with(|| Gpu::of(Arc::new(dualgemm_sim::Gpu::new(config()))))
    }

    /// The simulator's card of it.
    pub fn card(self) -> Card {
        match self {
            Self::Sm90a => Card::H100,
            Self::Sm100a => Card::B200,
            Self::Sm103a => Card::B300,
            Self::Sm120a => Card::RtxPro6000,
            Self::Sm121a => Card::Gb10,
        }
    }
}

impl GpuId {
    /// The GPU, opened the first time and then kept.
    ///
    /// # Errors
    /// If there is no driver or no such card.
    pub fn open(&self) -> Result<&'static Gpu, Error> {
        match self {
            Self::Cuda(ordinal) => Ok(Gpu::cuda(*ordinal).map_err(dualgemm_plan::Error::from)?),
            #[cfg(feature = "sim")]
            Self::Sim(arch) => Ok(arch.open()),
        }
    }
}

impl std::fmt::Display for GpuId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            #[cfg(feature = "sim")]
            Self::Sim(arch) => write!(f, "sim:{}", arch.name()),
        }
    }
}

impl From<GpuId> for String {
    fn from(id: GpuId) -> Self {
        id.to_string()
    }
}

impl FromStr for GpuId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let unknown = || {
            #[cfg(feature = "sim")]
            let simulated = SimArch::ALL.map(|arch| format!(", sim:{}", arch.name())).concat();
            #[cfg(not(feature = "sim"))]
            let simulated = " (this build has no simulator: feature `sim`)";
            Error::NoTarget { found: text.into(), valid: format!("cuda, cuda:N{simulated}") }
        };
        match text.split_once(':').unwrap_or((text, "")) {
            ("cuda", "") => Ok(Self::Cuda(0)),
            // Digits only: drivers count cards from 0.
            ("cuda", ordinal) => match ordinal.parse() {
                Ok(ordinal @ 0..) => Ok(Self::Cuda(ordinal)),
                _ => Err(unknown()),
            },
            #[cfg(feature = "sim")]
            ("sim", arch) => SimArch::by_name(arch).map(Self::Sim).ok_or_else(unknown),
            _ => Err(unknown()),
        }
    }
}

impl TryFrom<String> for GpuId {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

/// What packed weights are: their GPU, their format, and `[n, k]` of each half.
struct Packed {
    gpu: &'static Gpu,
    shape: (BlockFormat, usize, usize),
}

impl Packed {
    fn of(weights: &DeviceWeights) -> Self {
        Self { gpu: weights.gpu(), shape: (weights.format(), weights.n(), weights.k()) }
    }

    fn of_experts(experts: &DeviceExperts) -> Self {
        Self { gpu: experts.gpu(), shape: (experts.format(), experts.n(), experts.k()) }
    }
}

/// A plan for a GPU with its kernels and its memory.
#[derive(Debug)]
pub struct GpuRunner {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    a_scale_layout: ScaleLayout,
    prepared: Box<dyn Prepared>,
    launches: Launches,
    /// Whether one launch takes rows in groups.
    grouped: bool,
    /// Room on the device for operands of the host, and for the first rows of groups; made when the first come.
    operands: Option<Operands>,
    rows: Option<Buffer>,
}

impl GpuRunner {
    pub(crate) fn new(gpu: &'static Gpu, plan: &GpuPlan) -> Result<Self, Error> {
        let (prepared, launches) = (plan.prepare(gpu)?, plan.strategy()?.launches());
        let (desc, a_scale_layout, grouped) = (plan.desc, plan.a_scale_layout, plan.groups > 1);
        Ok(Self { gpu, desc, a_scale_layout, prepared, launches, grouped, operands: None, rows: None })
    }

    pub(crate) fn warm_experts(&self, experts: &PackedExperts, choices: bool) -> Result<(), Error> {
        let experts = experts.on_gpu()?;
        self.check_weights(&Packed::of_experts(experts))?;
        Ok(self.prepared.warm_grouped(experts, choices)?)
    }

    pub(crate) fn takes_choices(&self) -> bool {
        self.prepared.takes_choices()
    }

    pub(crate) fn warm(&self, weights: &PackedWeights) -> Result<(), Error> {
        let weights = weights.on_gpu()?;
        self.check_weights(&Packed::of(weights))?;
        Ok(self.prepared.warm(weights)?)
    }

    /// Checks that weights are in this GPU's memory and the plan's.
    fn check_weights(&self, weights: &Packed) -> Result<(), Error> {
        let (own, desc) = (self.gpu, &self.desc);
        // An address says nothing on another GPU, where a kernel that followed it would break the context.
        if !std::ptr::eq(weights.gpu, own) {
            let name = |gpu: &Gpu| gpu.info().name.clone();
            return Err(Error::operand(
                "the weights",
                format!("in the memory of another GPU ({})", name(weights.gpu)),
                format!("those packed for the plan's ({})", name(own)),
            ));
        }
        let ((format, n, k), expected) = (weights.shape, (desc.b, desc.n, desc.k));
        if (format.into(), n, k) != expected {
            let text = |(format, n, k): (AFormat, usize, usize)| format!("{format} [{n}, {k}]");
            return Err(Error::operand("the weights", text((format.into(), n, k)), text(expected)));
        }
        Ok(())
    }

    /// Checks that weights and rows are the plan's.
    fn check(&self, m: usize, weights: &Packed) -> Result<(), Error> {
        self.check_weights(weights)?;
        let desc = &self.desc;
        if m == 0 || m > desc.m {
            return Err(Error::operand("A", format!("[{m}, {}]", desc.k), format!("1 to {} rows", desc.m)));
        }
        Ok(())
    }

    /// # Safety
    /// As [`Runner::run_device`](crate::Runner::run_device).
    pub(crate) unsafe fn run_device(
        &self,
        call: &DeviceCall,
        weights: &PackedWeights,
        stream: Stream,
    ) -> Result<(), Error> {
        let weights = weights.on_gpu()?;
        self.check(call.m, &Packed::of(weights))?;
        // SAFETY: the caller vouches for the call; the weights were checked.
        Ok(unsafe { self.prepared.run(call, weights, stream) }?)
    }

    /// # Safety
    /// As [`Runner::run_device_grouped`](crate::Runner::run_device_grouped).
    pub(crate) unsafe fn run_device_grouped(
        &self,
        call: &GroupedCall,
        experts: &PackedExperts,
        stream: Stream,
    ) -> Result<(), Error> {
        let experts = experts.on_gpu()?;
        self.check(call.call.m, &Packed::of_experts(experts))?;
        // SAFETY: the caller vouches for the call; the weights were checked.
        Ok(unsafe { self.prepared.run_grouped(call, experts, stream) }?)
    }

    pub(crate) fn run(
        &mut self,
        a: &AOperand<'_>,
        groups: &[Rows<'_>],
        mut c: OutputMut<'_>,
    ) -> Result<Option<f32>, Error> {
        let single = matches!(groups, [Rows { first: 0, count, .. }] if *count == a.rows());
        let mut at_once = None;
        if !single {
            check_order(a.rows(), groups)?;
            at_once = self.at_once(groups);
            if at_once.is_none() {
                self.check_apart()?;
            }
        }
        if self.operands.is_none() {
            self.operands = Some(Operands::new(self.gpu, &self.desc, self.a_scale_layout)?);
        }
        let Some(operands) = &self.operands else { return Ok(None) };
        let rows: Vec<Range<usize>> = groups.iter().map(|rows| rows.first..rows.first + rows.count).collect();
        operands.write_rows(a, &rows)?;
        let (a_scale, mut scale) = (Operands::a_scale(a), None);
        if let Some((experts, first_rows)) = at_once {
            let bytes: Vec<u8> = first_rows.into_iter().flat_map(|row| (row as u32).to_le_bytes()).collect();
            let rows = match self.rows.take().filter(|rows| rows.bytes() >= bytes.len()) {
                Some(rows) => rows,
                None => Buffer::new(self.gpu, bytes.len()).map_err(dualgemm_plan::Error::from)?,
            };
            rows.write(&bytes).map_err(dualgemm_plan::Error::from)?;
            let call = GroupedCall {
                call: operands.call(a.rows(), a_scale),
                rows: rows.ptr(),
                settled: false,
                choices: None,
            };
            self.rows = Some(rows);
            self.check(a.rows(), &Packed::of_experts(&experts))?;
            // SAFETY: the call is on this runner's operands, which are the plan's.
            unsafe { self.prepared.run_grouped(&call, &experts, Stream::Own) }?;
            for rows in groups.iter().filter(|rows| rows.count > 0) {
                operands.read_c(rows.first, rows.count, &mut c)?;
            }
            return Ok(None);
        }
        for rows in groups.iter().filter(|rows| rows.count > 0) {
            let call = operands.call_on(rows.first, rows.count, a_scale);
            // SAFETY: the call is on this runner's operands, which are the plan's.
            unsafe { self.run_device(&call, rows.weights, Stream::Own) }?;
        }
        for rows in groups.iter().filter(|rows| rows.count > 0) {
            scale = operands.read_c(rows.first, rows.count, &mut c)?;
        }
        Ok(scale)
    }

    /// The time of a call on the operands of the last run, weights from memory; none if the device has no clock.
    pub(crate) fn time(&self, a: &AOperand<'_>, weights: &PackedWeights) -> Result<Option<Timing>, Error> {
        let (Some(card), Some(operands)) = (self.gpu.card(), &self.operands) else { return Ok(None) };
        let mut sets = vec![weights.on_gpu()?.clone()];
        self.check(a.rows(), &Packed::of(&sets[0]))?;
        for _ in 1..measure::copies(sets[0].bytes()) {
            sets.push(Arc::new(sets[0].duplicate(self.gpu)?));
        }
        sets.iter().try_for_each(|weights| self.prepared.warm(weights))?;
        let call = operands.call(a.rows(), Operands::a_scale(a));
        // SAFETY: the call is on this runner's operands, which are the plan's.
        let run = |i: usize| unsafe { self.prepared.run(&call, &sets[i % sets.len()], Stream::Own) };
        Ok(Some(measure::time(card, self.launches, sets.len(), measure::Protocol::default(), run)?))
    }

    /// The experts that groups belong to and where the rows of each begin, and one more, if one launch can take them.
    fn at_once(&self, groups: &[Rows<'_>]) -> Option<(Arc<DeviceExperts>, Vec<usize>)> {
        let floats = !matches!(self.desc.out, OutFormat::Nvfp4 { .. });
        if !self.grouped || !floats {
            return None;
        }
        let mut experts: Option<&Arc<DeviceExperts>> = None;
        let (mut first_rows, mut end) = (Vec::new(), 0);
        for rows in groups.iter().filter(|rows| rows.count > 0) {
            let PackedWeights::Gpu(weights) = rows.weights else { return None };
            let (of, index) = weights.expert()?;
            if of.id() != experts.get_or_insert(of).id() || index < first_rows.len() {
                return None;
            }
            // Experts in between have no rows. Rows of nobody count as the group's before, and are not copied back.
            first_rows.resize(index + 1, rows.first);
            end = rows.first + rows.count;
        }
        let experts = experts?;
        first_rows.resize(experts.count() + 1, end);
        Some((experts.clone(), first_rows))
    }

    /// Refuses what groups that take turns cannot share.
    fn check_apart(&self) -> Result<(), Error> {
        let linear = self.a_scale_layout == ScaleLayout::Linear || self.desc.a.block_format().is_none();
        let reason = match (self.desc.quantize_a, self.desc.out) {
            (QuantizeA::Dynamic, _) => "a dynamic scale of A would differ between them; use a static scale",
            (_, OutFormat::Nvfp4 { .. }) => {
                "an nvfp4 C is not put together from them; use a float C, or a static scale of C and run_device_grouped"
            }
            _ if !linear => "scales of A are cut by rows; plan with GpuOptions::a_scale_layout linear",
            _ => return Ok(()),
        };
        Err(Error::GroupsOnGpu { reason })
    }
}

/// Groups follow one another.
fn check_order(m: usize, groups: &[Rows<'_>]) -> Result<(), Error> {
    let mut end = 0;
    for rows in groups {
        let last = rows.first.saturating_add(rows.count);
        if rows.first < end || last > m {
            return Err(Error::operand(
                "a group",
                format!("rows {} to {last}", rows.first),
                format!("rows from {end} to {m}, in order"),
            ));
        }
        end = last;
    }
    Ok(())
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_found_by_the_names_that_they_print() {
        for id in [GpuId::Cuda(0), GpuId::Cuda(3), GpuId::Sim(SimArch::Sm90a)] {
            assert_eq!(id.to_string().parse::<GpuId>().unwrap(), id);
            let text = serde_json::to_string(&id).unwrap();
            assert_eq!(serde_json::from_str::<GpuId>(&text).unwrap(), id);
        }
        assert_eq!("cuda".parse::<GpuId>().unwrap(), GpuId::Cuda(0));
        for bad in ["", "gpu", "cuda:x", "cuda:-1", "sim", "sim:sm_10"] {
            let message = bad.parse::<GpuId>().unwrap_err().to_string();
            assert!(message.contains("cuda, cuda:N, sim:sm_90a"), "{message}");
        }
    }
}
