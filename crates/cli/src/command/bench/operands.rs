//! Operands of a shape, drawn with a seed, and their measurement: of every operation on a processor, and on a GPU of those
//! that are not gate and up alone.

use std::time::Duration;

use dualgemm::check::{Reference, RowSample};
use dualgemm::cpu::limits;
use dualgemm::formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{
    AFormat, AOperand, Bounded, DualGemmDesc, GateUp, GatedMlp, Linear, Operation, OutFormat, OutScale,
    RouterWeights,
};
use dualgemm::layer::{LayerCall, LayerShape};
use dualgemm::{AnyDesc, AnyPlan, AnyWeights, Error, OwnedMatrix, Target};
use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_bench::report::Subject;
use dualgemm_bench::{Protocol, Roofline, Row, Shape};

use super::{BenchArgs, CacheArg, REFERENCE_BUDGET};
use crate::args::{self, OpArg};
use crate::computation::{Costs as _, Routed, kernels};
use crate::machine;
use crate::result::matrix_of;
use crate::routing::OwnedRouting;
use crate::tolerance::{Statement, Tolerance};

/// The most weights that take turns when cold: a pack has a size of its own however little is in it, and the smallest would
/// take gigabytes.
const MOST_SETS: usize = 1 << 14;
/// Routings of a mixture that take turns.
const ROUTINGS: u64 = 4;
/// Seed of the operands.
const SEED: u64 = 1;
/// Mean square of a generated nvfp4 value before its tensor scale: 8.56 of the codes, a third of the block scales.
const MEAN_SQUARE: f32 = 2.85;
/// Tensor scale of a re-quantized C.
const OUT_SCALE: f32 = 1e-2;

/// Gate and up of a shape.
pub(in crate::command) fn product(Shape { m, n, k }: Shape, a: AFormat, out: AFormat) -> DualGemmDesc {
    DualGemmDesc { out: out_format(out), ..DualGemmDesc::new(m, n, k, a, BlockFormat::Nvfp4) }
}

fn out_format(out: AFormat) -> OutFormat {
    args::out_format(out, ScaleLayout::Linear, OutScale::Static(OUT_SCALE))
}

/// The operation on a shape.
pub(super) fn desc(args: &BenchArgs, shape: Shape, a: AFormat) -> AnyDesc {
    let Shape { m, n, k } = shape;
    let (experts, top_k) = args.mixture();
    let layer = LayerShape {
        op: if args.op == OpArg::Linear { Operation::Linear } else { Operation::GateUp },
        down: matches!(args.op, OpArg::Mlp | OpArg::Moe).then_some((k, AFormat::Nvfp4)),
        experts: (args.op == OpArg::Moe).then_some((experts, RouterWeights::Output)),
        ..LayerShape::gate_up(n, k, BlockFormat::Nvfp4)
    };
    let between = out_format(args.between.unwrap_or(AFormat::Bf16));
    layer.describe(&LayerCall { between, top_k, ..LayerCall::new(m, a, out_format(args.out_dtype)) })
}

fn matrix(inputs: &mut Inputs, name: &str, n: usize, k: usize) -> anyhow::Result<QuantizedMatrix<'static>> {
    // A has unit variance, so products have it too: no format of C overflows or loses its small values.
    let scale = GlobalScale::multiplier((MEAN_SQUARE * k as f32).powf(-0.5));
    Ok(inputs.quantized(name, BlockFormat::Nvfp4, (n, k), (CodeSet::Full, ScaleSet::Unit), scale)?)
}

pub(in crate::command) fn weights(shape: Shape) -> anyhow::Result<GateUp<'static>> {
    gate_up(&mut Inputs::seeded(SEED), shape)
}

fn gate_up(inputs: &mut Inputs, Shape { n, k, .. }: Shape) -> anyhow::Result<GateUp<'static>> {
    Ok(GateUp::new(matrix(inputs, "gate", n, k)?, matrix(inputs, "up", n, k)?))
}

/// A of a problem.
pub(in crate::command) fn activations(desc: &DualGemmDesc) -> anyhow::Result<AOperand<'static>> {
    let mut inputs = Inputs::seeded(SEED + 1);
    Ok(match desc.a.float_type() {
        Some(float) => AOperand::Float(inputs.floats("A", float, desc.m, desc.k)?),
        None => {
            let sets = (CodeSet::Full, ScaleSet::Unit);
            let scale = GlobalScale::multiplier(MEAN_SQUARE.powf(-0.5));
            AOperand::Quantized(inputs.quantized("A", BlockFormat::Nvfp4, (desc.m, desc.k), sets, scale)?)
        }
    })
}

/// Sets of packed weights that take turns.
fn sets(desc: &AnyDesc, cache: CacheArg) -> usize {
    match cache {
        CacheArg::Cold => limits::beyond_caches().div_ceil(packed_bytes(desc) as usize).clamp(1, MOST_SETS),
        CacheArg::Warm => 1,
    }
}

/// Bytes of all weights of a problem, packed.
fn packed_bytes(desc: &AnyDesc) -> f64 {
    desc.packed_bytes(match desc {
        AnyDesc::Mixture(desc) => Routed { rows: 0, experts: desc.experts },
        _ => Routed::default(),
    })
}

/// Bytes of memory that a problem which was checked takes at least: weights and their packs, A in f32 as it is drawn and as
/// the kernels take it, C.
pub(super) fn memory(desc: &AnyDesc, cache: CacheArg) -> f64 {
    let (first, last) = (desc.first(), desc.last());
    let m = first.m as f64;
    let between = if desc.between().is_some() { m * desc.top_k() as f64 * first.n as f64 * 2.0 } else { 0.0 };
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
    pub(super) fn new(desc: &AnyDesc, shape: Shape) -> anyhow::Result<Self> {
        let mut inputs = Inputs::seeded(SEED);
        let mlp = |inputs: &mut Inputs| -> anyhow::Result<GatedMlp<'static>> {
            let gate_up = gate_up(inputs, shape)?;
            Ok(GatedMlp { gate_up, down: Linear::new(matrix(inputs, "down", shape.k, shape.n)?) })
        };
        let mut routings = Vec::new();
        let weights = match desc {
            AnyDesc::Product(desc) if desc.op == Operation::Linear => {
                Weights::Linear(Linear::new(matrix(&mut inputs, "linear", shape.n, shape.k)?))
            }
            AnyDesc::Product(_) => Weights::GateUp(gate_up(&mut inputs, shape)?),
            AnyDesc::Mlp(_) => Weights::Mlp(mlp(&mut inputs)?),
            AnyDesc::Mixture(desc) => {
                let numbers: Vec<usize> = (0..desc.experts).collect();
                let draw = |seed| OwnedRouting::seeded(shape.m, &numbers, desc.top_k, seed);
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

    fn pack(&self, plan: &AnyPlan) -> Result<AnyWeights, Error> {
        Ok(match (&self.weights, plan) {
            (Weights::GateUp(weights), AnyPlan::Product(plan)) => AnyWeights::Product(plan.prepack(weights)?),
            (Weights::Linear(weights), AnyPlan::Product(plan)) => AnyWeights::Product(plan.prepack(weights)?),
            (Weights::Mlp(weights), AnyPlan::Mlp(plan)) => AnyWeights::Mlp(plan.prepack(weights)?),
            (Weights::Mixture(experts), AnyPlan::Mixture(plan)) => {
                AnyWeights::Mixture(plan.prepack(experts.iter().cloned().map(Ok::<_, Error>), None)?)
            }
            _ => unreachable!("the plan is made of these operands' description"),
        })
    }

    /// `device` and how it is driven are what reports call them.
    pub(super) fn measure(
        &self,
        args: &BenchArgs,
        desc: &AnyDesc,
        target: &Target,
        [device, driver, strategy]: [String; 3],
        roofline: &Roofline,
    ) -> anyhow::Result<Row> {
        let plan = crate::gpu::supported(AnyPlan::new(desc, target))?;
        // A GPU makes its own copies of them.
        let count = if matches!(target, Target::Cpu(_)) { sets(desc, args.cache) } else { 1 };
        let sets = vec![self.pack(&plan)?; count];
        let a = activations(desc.first())?;
        let mut c = OwnedMatrix::of_c("C", desc.last())?;
        let mut running = plan.runner()?;
        let protocol = if args.smoke || !matches!(target, Target::Cpu(_)) {
            Protocol::SMOKE
        } else {
            Protocol { budget: Duration::from_secs_f64(args.budget), ..Protocol::default() }
        };
        let (m, n) = (desc.last().m, desc.last().n);
        let routing = |run: usize| self.routings.get(run % ROUTINGS as usize);
        let mut last = 0;
        let timing = protocol.measure(|run| {
            last = run;
            let routing = routing(run).map(OwnedRouting::as_ref);
            let scale = running.run(&a, &sets[run % sets.len()], routing, (c.output(m, n), false))?;
            c.set_global_scale(scale);
            Ok::<_, Error>(())
        })?;
        let rel_l2 = match args.no_check {
            true => None,
            false => Some(self.check(&plan, desc, (&a, routing(last)), &c)?),
        };
        let routings: Vec<_> = self.routings.iter().map(OwnedRouting::as_ref).collect();
        // Checked before it is timed, as gate and up are.
        let timing = running.time(&a, &sets[0], &routings)?.unwrap_or(timing);
        let commit = machine::COMMIT.into();
        let (kernel, threads) = (kernels(&plan), plan.products().0.threads());
        let subject = Subject { device, driver, commit, strategy, kernel, threads };
        let op = match desc {
            AnyDesc::Mixture(desc) => format!("moe {} of {}", desc.top_k, desc.experts),
            _ => args.op.name().into(),
        };
        let shown = DualGemmDesc { out: desc.last().out, ..*desc.first() };
        let row = Row::of(subject, (&op, &shown, desc.work(self.routed())), roofline, timing, rel_l2);
        Ok(Row { between: desc.between().map(|between| between.name().into()), ..row })
    }

    /// The relative L2 error on some rows; a wrong result ends the benchmark.
    fn check(
        &self,
        plan: &AnyPlan,
        desc: &AnyDesc,
        (a, routing): (&AOperand<'_>, Option<&OwnedRouting>),
        c: &OwnedMatrix,
    ) -> anyhow::Result<f64> {
        let (first, last) = (desc.first(), desc.last());
        let sample = RowSample::within(first.m, desc.multiplications_per_row(), REFERENCE_BUDGET, 1);
        let of = Reference::new(a, &sample);
        let want: Vec<Bounded> = match (&self.weights, desc, routing) {
            (Weights::GateUp(weights), _, _) => of.bounded(&last.epilogue, weights)?,
            (Weights::Linear(weights), _, _) => {
                of.runs(&last.epilogue, last.n, &|run| Ok(weights.features(run)?))?
            }
            (Weights::Mlp(weights), AnyDesc::Mlp(desc), _) => of.mlp(desc, weights)?,
            (Weights::Mixture(experts), AnyDesc::Mixture(desc), Some(routing)) => {
                of.mixture(desc, routing.as_ref(), (experts, None))?
            }
            _ => unreachable!("the description is these operands'"),
        };
        let c = matrix_of(c, (last.m, last.n))?;
        let comparison = c.compare(&want, &sample)?;
        let tolerance = Tolerance::of_plan(plan, c.format())?;
        if !tolerance.holds(&comparison) {
            let (kernel, rel_l2) = (kernels(plan), comparison.rel_l2);
            let problem = format!("{}x{}x{}", first.m, first.n, first.k);
            let wrong = dualgemm::strategies::Error::Wrong { kernel, problem, rel_l2 };
            let statement =
                Statement { found: &comparison, tolerance: &tolerance, compared: format!(", {sample}") };
            return Err(anyhow::Error::new(Error::Gpu(wrong)).context(statement.to_string()));
        }
        Ok(comparison.rel_l2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiny_weights_take_turns_in_little_memory() {
        let of = |n, k| {
            let desc = product(Shape::new(1, n, k), AFormat::Nvfp4, AFormat::F16);
            sets(&AnyDesc::Product(desc), CacheArg::Cold)
        };
        assert_eq!([of(1, 16), of(4096, 4096)], [MOST_SETS, 11]);
    }
}
