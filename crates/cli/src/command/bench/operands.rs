//! Operands of a shape, drawn with a seed, and their measurement on a processor.

use std::time::Duration;

use anyhow::bail;
use dualgemm::check::{RowSample, bounded_runs, mixture_rows, mlp_rows};
use dualgemm::cpu::CpuOptions;
use dualgemm::formats::{BlockFormat, FloatType, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{
    AFormat, AOperand, Bounded, DualGemmDesc, GateUp, GatedMlp, Linear, MlpDesc, OutFormat, OutScale,
    RouterWeights,
};
use dualgemm::{MixtureDesc, MlpPlan, PackedMlp, Target};
use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_bench::report::Subject;
use dualgemm_bench::{Protocol, Roofline, Row, Shape};

use super::{BenchArgs, CacheArg, REFERENCE_BUDGET};
use crate::args::{AFormatArg, OpArg, OutFormatArg};
use crate::computation::{Desc, Packed, Planned, Routed};
use crate::machine::{self, Machine};
use crate::result::OwnedResult;
use crate::routing::OwnedRouting;
use crate::tolerance::{Statement, Tolerance};

/// Weights that take turns when cold: several times the last-level cache of the machines that this runs on.
const BEYOND_CACHES: usize = 192 << 20;
/// Routings of a mixture that take turns.
const ROUTINGS: u64 = 4;
/// Seed of the operands.
const SEED: u64 = 1;
/// Mean square of a generated nvfp4 value before its tensor scale: 8.56 of the codes, a third of the block scales.
const MEAN_SQUARE: f32 = 2.85;
/// Tensor scale of a re-quantized C.
const OUT_SCALE: f32 = 1e-2;

/// Gate and up of a shape, or a linear layer.
pub(in crate::command) fn product(
    Shape { m, n, k }: Shape,
    a: AFormatArg,
    out: OutFormatArg,
) -> DualGemmDesc {
    let a = match a {
        AFormatArg::F32 => AFormat::F32,
        AFormatArg::F16 => AFormat::F16,
        AFormatArg::Bf16 => AFormat::Bf16,
        AFormatArg::Nvfp4 => AFormat::Nvfp4,
    };
    DualGemmDesc { out: out_format(out), ..DualGemmDesc::new(m, n, k, a, BlockFormat::Nvfp4) }
}

fn out_format(out: OutFormatArg) -> OutFormat {
    match out {
        OutFormatArg::F32 => OutFormat::F32,
        OutFormatArg::F16 => OutFormat::F16,
        OutFormatArg::Bf16 => OutFormat::Bf16,
        OutFormatArg::Nvfp4 => {
            OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale: OutScale::Static(OUT_SCALE) }
        }
    }
}

/// The operation on a shape.
pub(super) fn desc(args: &BenchArgs, shape: Shape, a: AFormatArg) -> Desc {
    let (product, out) = (product(shape, a, args.out_dtype), out_format(args.out_dtype));
    let mlp = || {
        let between = out_format(args.between.unwrap_or(OutFormatArg::Bf16));
        MlpDesc::new(DualGemmDesc { out: between, ..product }, shape.k, BlockFormat::Nvfp4, out)
    };
    match args.op {
        OpArg::GateUp => Desc::Product(product),
        OpArg::Linear => {
            let linear = DualGemmDesc::linear(shape.m, shape.n, shape.k, product.a, product.b);
            Desc::Product(DualGemmDesc { out, ..linear })
        }
        OpArg::Mlp => Desc::Mlp(mlp()),
        OpArg::Moe => {
            let (experts, top_k) = (args.experts.into(), args.top_k.into());
            let routed = MixtureDesc { mlp: mlp(), experts, top_k, router: RouterWeights::Output };
            Desc::Mixture { routed, shared: None }
        }
    }
}

fn matrix(inputs: &mut Inputs, name: &str, n: usize, k: usize) -> anyhow::Result<QuantizedMatrix<'static>> {
    // A has unit variance, so products have it too: no format of C overflows or loses its small values.
    let scale = GlobalScale::multiplier((MEAN_SQUARE * k as f32).powf(-0.5));
    Ok(inputs.quantized(name, BlockFormat::Nvfp4, (n, k), (CodeSet::Full, ScaleSet::Unit), scale)?)
}

/// Gate and up of a shape.
pub(in crate::command) fn weights(shape: Shape) -> anyhow::Result<GateUp<'static>> {
    gate_up(&mut Inputs::seeded(SEED), shape)
}

fn gate_up(inputs: &mut Inputs, Shape { n, k, .. }: Shape) -> anyhow::Result<GateUp<'static>> {
    Ok(GateUp::new(matrix(inputs, "gate", n, k)?, matrix(inputs, "up", n, k)?))
}

/// A of a problem.
pub(in crate::command) fn activations(desc: &DualGemmDesc) -> anyhow::Result<AOperand<'static>> {
    let mut inputs = Inputs::seeded(SEED + 1);
    Ok(match desc.a {
        AFormat::F32 => AOperand::Float(inputs.floats("A", FloatType::F32, desc.m, desc.k)?),
        AFormat::F16 => AOperand::Float(inputs.floats("A", FloatType::F16, desc.m, desc.k)?),
        AFormat::Bf16 => AOperand::Float(inputs.floats("A", FloatType::Bf16, desc.m, desc.k)?),
        AFormat::Nvfp4 | AFormat::Mxfp4 => {
            let sets = (CodeSet::Full, ScaleSet::Unit);
            let scale = GlobalScale::multiplier(MEAN_SQUARE.powf(-0.5));
            AOperand::Quantized(inputs.quantized("A", BlockFormat::Nvfp4, (desc.m, desc.k), sets, scale)?)
        }
    })
}

/// Sets of packed weights that take turns.
fn sets(desc: &Desc, cache: CacheArg) -> usize {
    match cache {
        CacheArg::Cold => BEYOND_CACHES.div_ceil(packed_bytes(desc) as usize).max(1),
        CacheArg::Warm => 1,
    }
}

/// Bytes of all weights of a problem, packed.
fn packed_bytes(desc: &Desc) -> f64 {
    desc.packed_bytes(match desc {
        Desc::Mixture { routed, .. } => Routed { rows: 0, experts: routed.experts },
        _ => Routed::default(),
    })
}

/// Bytes of memory that a problem which was checked takes at least: weights and their packs, A in f32 as it is drawn and as
/// the kernels take it, C.
pub(super) fn memory(desc: &Desc, cache: CacheArg) -> f64 {
    let (first, last) = (desc.first(), desc.last());
    let (m, top_k) = (first.m as f64, if let Desc::Mixture { routed, .. } = desc { routed.top_k } else { 1 });
    let between = if desc.between().is_some() { m * top_k as f64 * first.n as f64 * 2.0 } else { 0.0 };
    packed_bytes(desc) * (1 + sets(desc, cache)) as f64
        + m * first.k as f64 * 8.0
        + m * last.n as f64 * 2.0
        + between
}

/// The weights of a problem.
enum Weights {
    GateUp(GateUp<'static>),
    Linear(Linear<'static>),
    Mlp(GatedMlp<'static>),
    Mixture(Vec<Option<GatedMlp<'static>>>),
}

/// The weights of a problem, and the routings that take turns.
pub(super) struct Operands {
    weights: Weights,
    routings: Vec<OwnedRouting>,
}

impl Operands {
    pub(super) fn new(desc: &Desc, shape: Shape) -> anyhow::Result<Self> {
        let mut inputs = Inputs::seeded(SEED);
        let mlp = |inputs: &mut Inputs| -> anyhow::Result<GatedMlp<'static>> {
            let gate_up = gate_up(inputs, shape)?;
            Ok(GatedMlp { gate_up, down: Linear::new(matrix(inputs, "down", shape.k, shape.n)?) })
        };
        let mut routings = Vec::new();
        let weights = match desc {
            Desc::Product(desc) if desc.op == dualgemm::gemm::Operation::Linear => {
                Weights::Linear(Linear::new(matrix(&mut inputs, "linear", shape.n, shape.k)?))
            }
            Desc::Product(_) => Weights::GateUp(gate_up(&mut inputs, shape)?),
            Desc::Mlp(_) => Weights::Mlp(mlp(&mut inputs)?),
            Desc::Mixture { routed, .. } => {
                let numbers: Vec<usize> = (0..routed.experts).collect();
                let draw = |seed| OwnedRouting::seeded(shape.m, &numbers, routed.top_k, seed);
                routings = (0..ROUTINGS).map(draw).collect::<Result<_, _>>()?;
                Weights::Mixture(
                    numbers.iter().map(|_| Ok(Some(mlp(&mut inputs)?))).collect::<anyhow::Result<_>>()?,
                )
            }
        };
        Ok(Self { weights, routings })
    }

    /// What the routings come to, on average.
    pub(super) fn routed(&self) -> Routed {
        let all: Vec<Routed> = self.routings.iter().map(OwnedRouting::routed).collect();
        let mean = |of: fn(&Routed) -> usize| all.iter().map(of).sum::<usize>() / all.len().max(1);
        Routed { rows: mean(|r| r.rows), experts: mean(|r| r.experts) }
    }

    fn pack(&self, planned: &Planned) -> anyhow::Result<Packed> {
        let mlp = |plan: &MlpPlan, mlp: &GatedMlp<'_>| plan.prepack(mlp);
        Ok(match (&self.weights, planned) {
            (Weights::GateUp(weights), Planned::Product(plan)) => Packed::Product(plan.prepack(weights)?),
            (Weights::Linear(weights), Planned::Product(plan)) => Packed::Product(plan.prepack(weights)?),
            (Weights::Mlp(weights), Planned::Mlp(plan)) => Packed::Mlp(mlp(plan, weights)?),
            (Weights::Mixture(experts), Planned::Mixture { routed: plan, .. }) => {
                let pack = |expert: &Option<GatedMlp<'_>>| {
                    expert.as_ref().map(|weights| mlp(&plan.mlp, weights)).transpose()
                };
                let routed: Result<Vec<Option<PackedMlp>>, _> = experts.iter().map(pack).collect();
                Packed::Mixture { routed: routed?, shared: None }
            }
            _ => unreachable!("the plan is made of these operands' description"),
        })
    }

    pub(super) fn measure(&self, args: &BenchArgs, desc: &Desc, roofline: &Roofline) -> anyhow::Result<Row> {
        let options = CpuOptions { isa: args.isa, ..CpuOptions::default() };
        let planned = Planned::new(desc, &Target::Cpu(options))?;
        let sets = vec![self.pack(&planned)?; sets(desc, args.cache)];
        let a = activations(desc.first())?;
        let mut c = OwnedResult::zeroed(desc.last());
        let mut running = planned.runner()?;
        let protocol = if args.smoke {
            Protocol::SMOKE
        } else {
            Protocol { budget: Duration::from_secs_f64(args.budget), ..Protocol::default() }
        };
        let routing = |run: usize| self.routings.get(run % ROUTINGS as usize);
        let mut last = 0;
        let timing = protocol.measure(|run| {
            last = run;
            let routing = routing(run).map(OwnedRouting::as_ref);
            running.run(&a, &sets[run % sets.len()], routing, &mut c)
        })?;
        let rel_l2 = match args.no_check {
            true => None,
            false => Some(self.check(&planned, desc, (&a, routing(last)), &c)?),
        };
        let subject = Subject {
            device: Machine::detect().cpu_model,
            driver: String::new(),
            commit: machine::COMMIT.into(),
            strategy: "fused".into(),
            kernel: planned.kernel(),
            threads: planned.threads(),
        };
        let op = match desc {
            Desc::Mixture { routed, .. } => format!("moe {} of {}", routed.top_k, routed.experts),
            _ => args.op.name().into(),
        };
        let shown = DualGemmDesc { out: desc.last().out, ..*desc.first() };
        Ok(Row::of(subject, (&op, &shown, desc.work(self.routed())), roofline, timing, rel_l2))
    }

    /// The relative L2 error on some rows; a wrong result ends the benchmark.
    fn check(
        &self,
        planned: &Planned,
        desc: &Desc,
        (a, routing): (&AOperand<'_>, Option<&OwnedRouting>),
        c: &OwnedResult,
    ) -> anyhow::Result<f64> {
        let (first, last) = (desc.first(), desc.last());
        let sample = RowSample::within(first.m, desc.multiplications_per_row(), REFERENCE_BUDGET, 1);
        let want: Vec<Bounded> = match (&self.weights, desc, routing) {
            (Weights::GateUp(weights), _, _) => {
                let features = |run| Ok(weights.features(run)?);
                bounded_runs(&last.epilogue, a, &sample, last.n, &features, &|_| {})?
            }
            (Weights::Linear(weights), _, _) => {
                let features = |run| Ok(weights.features(run)?);
                bounded_runs(&last.epilogue, a, &sample, last.n, &features, &|_| {})?
            }
            (Weights::Mlp(weights), Desc::Mlp(desc), _) => mlp_rows(desc, a, &sample, weights, &|_| {})?,
            (Weights::Mixture(experts), Desc::Mixture { routed, .. }, Some(routing)) => {
                mixture_rows(routed, a, &sample, routing.as_ref(), experts, &|_| {})?
            }
            _ => unreachable!("the description is these operands'"),
        };
        let c = c.as_matrix(last.m, last.n)?;
        let comparison = c.compare(&want, &sample)?;
        let tolerance = Tolerance::bounded(c.format(), &last.epilogue);
        if !tolerance.holds(&comparison) {
            bail!(
                "{} on {}x{}x{} is wrong; please report it: {}",
                planned.kernel(),
                first.m,
                first.n,
                first.k,
                Statement { found: &comparison, tolerance: &tolerance, compared: sample.to_string() }
            );
        }
        Ok(comparison.rel_l2)
    }
}
