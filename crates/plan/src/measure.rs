//! The stopwatch for cards, and what a card can do at most.
//!
//! Weights come from memory, as in a real decoder: several copies of all operands take turns, more than the L2 cache
//! holds. Calls are replayed from a graph (or made one by one, where a strategy is measured for what that costs): 8 ms
//! of rest, about 2.5 ms untimed, about 2.5 ms timed by the GPU's own clock, nine times; the median counts.

use std::sync::Arc;
use std::time::Duration;

use dualgemm_bench::Timing;
use dualgemm_cuda::{Cuda, HalfType};
use dualgemm_device::{Device, Stream};
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AFormat, AOperand, DualGemmDesc, GateUp, OutFormat};
use dualgemm_kernels::probe::Read;
use half::f16;

use crate::{Buffer, DeviceWeights, Error, Gpu, GpuPlan, Launches, Operands, Rounding};

/// Bytes of weights that take turns: several times the L2 cache of any card.
const ROTATE: usize = 220 << 20;
/// Rest before each measurement: clocks and power recover.
const REST: Duration = Duration::from_millis(8);
/// Microseconds of calls in one replay.
const REPLAY_US: f64 = 2500.0;

/// How often to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Protocol {
    /// Timed replays; the median counts.
    pub replays: usize,
    /// Rest before each.
    pub rest: Duration,
}

impl Default for Protocol {
    fn default() -> Self {
        Self { replays: 9, rest: REST }
    }
}

impl Protocol {
    /// One replay, to see that everything works.
    pub const SMOKE: Self = Self { replays: 1, rest: Duration::ZERO };
}

/// Operands of one problem, and some rows of C in f64.
#[derive(Debug)]
pub struct Problem<'a> {
    /// The problem.
    pub desc: DualGemmDesc,
    /// B1 and B2.
    pub weights: &'a GateUp<'a>,
    /// A, as it is given.
    pub a: &'a AOperand<'a>,
    /// Rows of C that are compared; none to compare nothing.
    pub rows: Vec<usize>,
    /// Those rows by the reference, one after the other.
    pub want: Vec<f64>,
}

impl Problem<'_> {
    fn name(&self) -> String {
        format!("{}x{}x{}", self.desc.m, self.desc.n, self.desc.k)
    }
}

/// The largest relative L2 error that a right result has: rounding to the formats on the way, with room.
///
/// # Errors
/// If a plan from elsewhere names a strategy that this build does not have.
pub fn bound(plan: &GpuPlan) -> Result<f64, Error> {
    let rounding = plan.strategy()?.rounding();
    let exact = rounding == Rounding::Nothing;
    Ok(match plan.desc.out {
        // Each operand of e4m3 is off by 2.6 % on average, and C of random operands by 4 to 6 %; where sums cancel it is
        // more (a third of C, if rows are sine waves). A lost scale or half of K is far beyond.
        _ if rounding == Rounding::Operands => 0.25,
        OutFormat::F32 if exact => 1e-4,
        OutFormat::F32 | OutFormat::F16 if plan.desc.a_compute() != AFormat::Bf16 || exact => 1e-3,
        OutFormat::F32 | OutFormat::F16 | OutFormat::Bf16 => 1e-2,
        OutFormat::Nvfp4 { .. } => 0.15,
    })
}

/// How many copies of so many bytes do not stay in a card's cache.
pub fn copies(bytes: usize) -> usize {
    let least = if bytes >= 2 * ROTATE { 1 } else { 2 };
    ROTATE.div_ceil(bytes.max(1)).clamp(least, 64)
}

/// A plan's time and error.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// What was measured.
    pub plan: GpuPlan,
    /// Per call.
    pub timing: Timing,
    /// Relative L2 error on the problem's rows; none if it has none.
    pub rel_l2: Option<f64>,
    /// Microseconds to load kernels and take memory.
    pub prepare_us: f64,
}

/// Copies of a problem's weights and operands that take turns, for plans of one weight order.
#[derive(Debug)]
pub struct Sets {
    weights: Vec<Arc<DeviceWeights>>,
    operands: Vec<Operands>,
}

impl Sets {
    /// Copies the operands to the device often enough that they do not stay in its cache.
    pub fn new(gpu: &'static Gpu, problem: &Problem<'_>, plan: &GpuPlan) -> Result<Self, Error> {
        let first = DeviceWeights::upload(gpu, problem.weights, plan.weight_form()?)?;
        let copies = copies(first.bytes());
        let mut weights = vec![Arc::new(first)];
        for _ in 1..copies {
            weights.push(Arc::new(weights[0].duplicate(gpu)?));
        }
        let operands = (0..copies).map(|_| {
            let operands = Operands::new(gpu, &problem.desc, plan.a_scale_layout)?;
            operands.write_a(problem.a)?;
            Ok::<_, Error>(operands)
        });
        Ok(Self { operands: operands.collect::<Result<_, _>>()?, weights })
    }
}

/// Prepares a plan, checks its results and times it.
///
/// # Errors
/// If this is no card, the plan does not run, or its result is wrong.
pub fn measure(
    gpu: &'static Gpu,
    problem: &Problem<'_>,
    plan: &GpuPlan,
    sets: &Sets,
    protocol: Protocol,
) -> Result<Measured, Error> {
    let card = card(gpu)?;
    let start = std::time::Instant::now();
    let prepared = plan.prepare(gpu)?;
    let prepare_us = start.elapsed().as_secs_f64() * 1e6;
    sets.weights.iter().try_for_each(|weights| prepared.warm(weights))?;
    let count = sets.weights.len();
    let a_scale = Operands::a_scale(problem.a);
    let run = |i: usize| {
        let i = i % count;
        let call = sets.operands[i].call(problem.desc.m, a_scale);
        // SAFETY: the operands are the problem's, on this device, and outlive what is timed.
        unsafe { prepared.run(&call, &sets.weights[i], Stream::Own) }
    };
    (0..count).try_for_each(run)?;
    let mut rel_l2 = None;
    if !problem.rows.is_empty() {
        // The first and the last copy: one that reads another's operands shows.
        for operands in [&sets.operands[0], &sets.operands[count - 1]] {
            let error = operands.rel_l2(&problem.rows, &problem.want)?;
            if error.is_nan() || error > bound(plan)? {
                let kernel = format!("{} by {}", plan.strategy, plan.kernel);
                return Err(Error::Wrong { kernel, problem: problem.name(), rel_l2: error });
            }
            rel_l2 = Some(error);
        }
    }
    let timing = time(card, plan.strategy()?.launches(), count, protocol, run)?;
    Ok(Measured { plan: plan.clone(), timing, rel_l2, prepare_us })
}

/// Times `run(i)`, which launches call i on the device's own stream; `turns` calls use different memory.
///
/// # Errors
/// What `run` reports; the failure of a kernel.
pub fn time<E: From<dualgemm_device::Error>>(
    card: &Cuda,
    launches: Launches,
    turns: usize,
    protocol: Protocol,
    run: impl Fn(usize) -> Result<(), E>,
) -> Result<Timing, E> {
    let once = card.time_us(|| (0..turns).try_for_each(&run))? / turns as f64;
    let calls = ((REPLAY_US / once.max(1.0)) as usize).clamp(turns, 400);
    let all = || (0..calls).try_for_each(&run);
    let graph = match launches {
        Launches::Eager => None,
        Launches::Recorded => Some(card.record(all)?),
    };
    let replay = || match &graph {
        // SAFETY: `run`, which vouches for its launches, and so its operands are still here.
        Some(graph) => Ok(unsafe { graph.replay() }?),
        None => all(),
    };
    let mut times = Vec::with_capacity(protocol.replays);
    for _ in 0..protocol.replays.max(1) {
        std::thread::sleep(protocol.rest);
        replay()?;
        times.push(card.time_us(replay)? / calls as f64);
    }
    Ok(Timing::from_times(times))
}

fn card(gpu: &Gpu) -> Result<&Arc<Cuda>, Error> {
    gpu.card().ok_or_else(|| {
        let reason = format!("{} has no clock", gpu.info().name);
        Error::Device(dualgemm_device::Error::Driver { call: "measuring", reason })
    })
}

/// What a card can do at most.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CardLimits {
    /// Bytes read from memory per second.
    pub bytes_per_s: f64,
    /// f16 multiplications and additions per second, f32 sums.
    pub flops_per_s: f64,
    /// What the second was measured with.
    pub flops_by: String,
}

/// Measures a card's limits: a kernel that only reads, and a large product of values that nvfp4 has (data of more bits
/// takes more power, and cards that are limited by it then run slower).
///
/// # Errors
/// If this is no card, or memory is lacking.
pub fn limits(gpu: &'static Gpu, protocol: Protocol) -> Result<CardLimits, Error> {
    const READ: usize = 1 << 30;
    let card = card(gpu)?;
    let (zeros, out, kernel) = (Buffer::zeroed(gpu, READ)?, Buffer::new(gpu, 4)?, Read::new(gpu)?);
    let read = kernel.spec(zeros.ptr(), READ, out.ptr());
    // SAFETY: `zeros` has the bytes that are read, `out` the word that is written.
    let launch = |_| Ok::<_, Error>(unsafe { gpu.launch(&read) }?);
    let took = time(card, Launches::Recorded, 1, protocol, launch)?;
    let bytes_per_s = READ as f64 / took.median_us * 1e6;
    drop(zeros);
    let (flops_per_s, flops_by) = match gpu.blas() {
        Ok(blas) => {
            const SIDE: usize = 8192;
            let mut product = blas.matmul(HalfType::F16, (SIDE, SIDE, SIDE), 32 << 20)?;
            let values = nvfp4_values(SIDE * SIDE);
            let [a, b] = [Buffer::of(gpu, &values)?, Buffer::of(gpu, &values)?];
            let (c, workspace) = (Buffer::new(gpu, SIDE * SIDE * 2)?, Buffer::new(gpu, 32 << 20)?);
            let operands = [a.ptr(), b.ptr(), c.ptr()];
            // SAFETY: the buffers above are as large as the product wants them.
            unsafe { product.choose(operands, None, workspace.ptr()) }?;
            let run = |_| {
                // SAFETY: the same.
                unsafe { product.launch(Stream::Own, 1e-3, operands, None, workspace.ptr()) }?;
                Ok::<_, Error>(())
            };
            let took = time(card, Launches::Recorded, 2, protocol, run)?;
            (2.0 * (SIDE as f64).powi(3) / took.p10_us * 1e6, format!("{blas:?}, 8192 x 8192 x 8192"))
        }
        Err(reason) => {
            tracing::info!("{reason}; the fused kernel's own rate is the limit");
            return own_limit(gpu, bytes_per_s, protocol);
        }
    };
    Ok(CardLimits { bytes_per_s, flops_per_s, flops_by })
}

/// Without the library: the fused kernel on a product that it does best.
fn own_limit(gpu: &'static Gpu, bytes_per_s: f64, protocol: Protocol) -> Result<CardLimits, Error> {
    let (m, n, k) = (8192, 4096, 8192);
    let desc =
        DualGemmDesc { out: OutFormat::F16, ..DualGemmDesc::new(m, n, k, AFormat::F16, BlockFormat::Nvfp4) };
    let half = |name: &'static str, turn: u8| {
        let codes =
            (0..n * k / 2).map(|i| (i as u8).wrapping_mul(73).rotate_left(3) ^ turn).collect::<Vec<u8>>();
        let scales = vec![0x38u8; n * k / 16];
        let one = GlobalScale::ONE;
        QuantizedMatrix::new(name, BlockFormat::Nvfp4, n, k, codes, scales, ScaleLayout::Linear, one)
    };
    let weights = GateUp::new(half("gate", 0)?, half("up", 0x5A)?);
    let values =
        nvfp4_values(m * k).as_chunks().0.iter().map(|&bytes| f16::from_le_bytes(bytes)).collect::<Vec<_>>();
    let a = AOperand::Float(FloatMatrix::F16(dualgemm_formats::Matrix::new("A", m, k, values)?));
    let problem = Problem { desc, weights: &weights, a: &a, rows: Vec::new(), want: Vec::new() };
    let plan = GpuPlan::new(&desc, gpu, &crate::GpuOptions::default())?;
    let sets = Sets::new(gpu, &problem, &plan)?;
    let measured = measure(gpu, &problem, &plan, &sets, protocol)?;
    let flops_per_s = desc.flops() / measured.timing.p10_us * 1e6;
    Ok(CardLimits { bytes_per_s, flops_per_s, flops_by: format!("{}, 8192 x 4096 x 8192", plan.kernel) })
}

/// Halves that are nvfp4 codes with block scales between ½ and 1, in no particular order.
fn nvfp4_values(count: usize) -> Vec<u8> {
    const CODES: [f32; 16] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    // A period of some primes' length, so that neighbouring rows differ.
    let mut state = 1u32;
    let period: Vec<u8> = (0..65_521)
        .flat_map(|i| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let scale = 0.5 + (i / 16 % 8) as f32 / 16.0;
            f16::from_f32(CODES[(state >> 28) as usize] * scale).to_le_bytes()
        })
        .collect();
    period.into_iter().cycle().take(2 * count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_gpu_has_no_clock() {
        let gpu = Gpu::of(Arc::new(dualgemm_sim::Gpu::new(dualgemm_sim::Config::default())));
        let message = limits(gpu, Protocol::SMOKE).unwrap_err().to_string();
        assert!(message.contains("has no clock"), "{message}");
    }
}
