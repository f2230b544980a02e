//! `bench --device cuda`: every strategy asked for on every shape, against what the card can do at most.
//!
//! The protocol is that of [`measure`]: weights from memory, calls replayed from a graph, results compared with the f64
//! reference before they are timed.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;

use anyhow::Context as _;
use dualgemm::check::{Reference, RowSample};
use dualgemm::device::Device as _;
use dualgemm::gemm::{AOperand, DualGemmDesc, GateUp};
use dualgemm::strategies::measure::{self, CardLimits, Problem, Protocol, Sets};
use dualgemm::strategies::{Error, Gpu, GpuOptions, GpuPlan, STRATEGIES, WeightForm, strategy};
use dualgemm::{AnyDesc, GpuId, Target};
use dualgemm_bench::report::{NamedRoofline, Subject};
use dualgemm_bench::{Report, Roofline, Row, Shape};
use serde_json::json;

use super::operands::{self, activations, weights};
use super::{BenchArgs, REFERENCE_BUDGET};
use crate::args::OpArg;
use crate::command::Verdict;
use crate::machine;
use crate::report::Output;

/// Operands of one shape and format of A, and the rows that results are compared on.
pub(in crate::command) struct Operands {
    desc: DualGemmDesc,
    a: AOperand<'static>,
    rows: Vec<usize>,
    want: Vec<f64>,
}

impl Operands {
    pub(in crate::command) fn new(
        desc: DualGemmDesc,
        weights: &GateUp<'static>,
        check: bool,
    ) -> anyhow::Result<Self> {
        let a = activations(&desc)?;
        let sample = RowSample::within(desc.m, desc.flops() / desc.m as f64 / 2.0, REFERENCE_BUDGET, 1);
        let want = match check {
            true => Reference::new(&a, &sample).values(&desc.epilogue, weights)?,
            false => Vec::new(),
        };
        let rows = if check { sample.rows().to_vec() } else { Vec::new() };
        Ok(Self { desc, a, rows, want })
    }

    pub(in crate::command) fn problem<'p>(&'p self, weights: &'p GateUp<'static>) -> Problem<'p> {
        let (rows, want) = (self.rows.clone(), self.want.clone());
        Problem { desc: self.desc, weights, a: &self.a, rows, want }
    }
}

/// The strategies that are asked for; none is whatever is known to be the fastest.
fn strategies(asked: &[String]) -> Result<Vec<Option<&'static str>>, Error> {
    match asked {
        [one] if one == "all" => Ok(STRATEGIES.iter().map(|s| Some(s.name())).collect()),
        names => names
            .iter()
            .map(|name| if name == "auto" { Ok(None) } else { strategy(name).map(|s| Some(s.name())) })
            .collect(),
    }
}

/// Measures, reports, writes.
pub(super) fn run(
    args: &BenchArgs,
    id: &GpuId,
    shapes: &[Shape],
    plot_file: Option<&Path>,
    output: &Output,
) -> anyhow::Result<Verdict> {
    let gpu = crate::gpu::open_timed(id, crate::gpu::PROCESSOR)?;
    // Names are checked before anything takes time.
    let wanted = strategies(&args.strategy)?;
    let protocol = if args.smoke { Protocol::SMOKE } else { Protocol::default() };
    let limits = measure::limits(gpu, protocol)?;
    let roofline = Roofline { flops_per_s: limits.flops_per_s, bytes_per_s: limits.bytes_per_s };
    let (mut rows, mut left_out) = (Vec::new(), Vec::new());
    let bar = output.progress("bench", shapes.len() * args.a_format.len() * wanted.len());
    for &shape in shapes {
        let descs = args.a_format.iter().map(|&a| operands::desc(args, shape, a)).collect::<Vec<_>>();
        descs.iter().try_for_each(AnyDesc::check).with_context(|| format!("--shapes {shape}"))?;
        let Some(first) = descs.first() else { continue };
        let operands = match args.op {
            OpArg::GateUp => None,
            _ => Some(operands::Operands::new(first, shape)?),
        };
        let weights = weights(shape)?;
        for desc in &descs {
            let pair = match operands {
                Some(_) => None,
                None => Some(Operands::new(*desc.first(), &weights, !args.no_check)?),
            };
            let problem = pair.as_ref().map(|operands| operands.problem(&weights));
            let mut sets: HashMap<WeightForm, Sets> = HashMap::new();
            for &name in &wanted {
                bar.inc(1);
                let row = match (&operands, &problem) {
                    (Some(operands), _) => {
                        let options = GpuOptions { strategy: name.map(Into::into), ..GpuOptions::default() };
                        let names =
                            [gpu.info().name.clone(), gpu.driver().into(), name.unwrap_or("auto").into()];
                        operands.measure(args, desc, &Target::Gpu(id.clone(), options), names, &roofline)
                    }
                    (None, Some(problem)) => one(gpu, problem, name, &mut sets, (protocol, &roofline)),
                    (None, None) => continue,
                };
                match row {
                    Ok(row) => rows.push(row),
                    Err(reason) if wanted.len() > 1 && !is_wrong(&reason) => {
                        let strategy = name.unwrap_or("auto");
                        left_out.push(format!("{shape} A {}, {strategy}: {reason}", desc.first().a));
                    }
                    Err(reason) => return Err(reason),
                }
            }
        }
    }
    bar.finish_and_clear();
    let report = Report::new(vec![NamedRoofline { name: "f16".into(), roofline }], rows);
    super::keep(args, plot_file, &report)?;
    tell(gpu, limits, &report, &left_out, output)?;
    Ok(Verdict::Right)
}

/// Prints what was measured, and what was not.
fn tell(
    gpu: &Gpu,
    limits: CardLimits,
    report: &Report,
    left_out: &[String],
    output: &Output,
) -> anyhow::Result<()> {
    // From the first kernel's text to the last one loaded.
    let load_us = gpu.load_us();
    let mut document = json!(report);
    document["limits"] = json!(limits);
    document["left_out"] = json!(left_out);
    document["load_us"] = load_us.into();
    let CardLimits { bytes_per_s, flops_per_s, flops_by } = limits;
    let (read, rate) = (bytes_per_s * 1e-9, flops_per_s * 1e-12);
    let mut text = format!("{}, driver {}\n", gpu.info().name, gpu.driver());
    text += &format!("measured limits: {read:.0} GB/s read, {rate:.0} TFLOP/s in f16 ({flops_by})\n");
    text += &report.to_card_table();
    text.extend(left_out.iter().map(|line| format!("left out: {line}\n")));
    text += &format!("loading all kernels took {:.1} s\n", load_us as f64 * 1e-6);
    output.say(&document, &text)
}

/// A wrong result ends the benchmark, whatever else there is to measure.
fn is_wrong(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(dualgemm::Error::Gpu(Error::Wrong { .. })))
}

/// Gate and up: strategies, which are many, share weights in the memory of the card.
fn one(
    gpu: &'static Gpu,
    problem: &Problem<'_>,
    name: Option<&str>,
    sets: &mut HashMap<WeightForm, Sets>,
    (protocol, roofline): (Protocol, &Roofline),
) -> anyhow::Result<Row> {
    let mut measure = || {
        let options = GpuOptions { strategy: name.map(Into::into), ..GpuOptions::default() };
        let plan = GpuPlan::new(&problem.desc, gpu, &options)?;
        let form = plan.weight_form()?;
        let sets = match sets.entry(form) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(room) => room.insert(Sets::new(gpu, problem, &plan)?),
        };
        let measured = measure::measure(gpu, problem, &plan, sets, protocol)?;
        Ok(Row::new(subject(gpu, name, &plan), &problem.desc, roofline, measured.timing, measured.rel_l2))
    };
    crate::gpu::supported(measure())
}

fn subject(gpu: &Gpu, name: Option<&str>, plan: &GpuPlan) -> Subject {
    Subject {
        device: gpu.info().name.clone(),
        driver: gpu.driver().into(),
        commit: machine::COMMIT.into(),
        strategy: name.map_or_else(|| format!("auto ({})", plan.strategy), Into::into),
        kernel: plan.kernel.clone(),
        threads: 0,
    }
}
