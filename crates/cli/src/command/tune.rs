//! `tune --shapes NAME,…`: measures the kernels of every strategy on a GPU and remembers the fastest.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use dualgemm::device::Device as _;
use dualgemm::gemm::AFormat;
use dualgemm::strategies::measure::Protocol;
use dualgemm::strategies::{Strategy, choices, strategy, tune};
use serde::Serialize;

use super::Verdict;
use super::bench::{self, gpu::Operands, operands};
use crate::args::{DeviceArg, FORMATS, named};
use crate::failure::Unsupported;
use crate::report::{Output, Table};

/// Arguments of `tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// Shape sets (challenge, decode, prefill, llama) or single shapes as MxNxK, comma-separated.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "challenge,decode,prefill")]
    pub shapes: Vec<String>,
    /// Format of A.
    #[arg(long, value_name = "FORMAT", default_value = "nvfp4", value_parser = named(FORMATS))]
    pub a_format: AFormat,
    /// Format of C.
    #[arg(long, value_name = "FORMAT", default_value = "f16", value_parser = named(FORMATS))]
    pub out_dtype: AFormat,
    /// The GPU: cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "cuda")]
    pub device: DeviceArg,
    /// Strategies to try, comma-separated; without it, all that plans take unasked. What is found about others counts for
    /// plans that name them.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub strategy: Vec<String>,
    /// Seconds for each shape; no new candidate starts after that.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub budget: u64,
    /// Only measure; remember nothing.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    driver: String,
    problems: Vec<ProblemReport>,
    /// Where it was written.
    remembered: Option<PathBuf>,
    load_us: u64,
}

#[derive(Debug, Serialize)]
struct ProblemReport {
    m: usize,
    n: usize,
    k: usize,
    candidates: Vec<Candidate>,
    /// Left out by the cost model, and for lack of time.
    pruned: usize,
    skipped: usize,
}

#[derive(Debug, Serialize)]
struct Candidate {
    strategy: &'static str,
    kernel: String,
    expected_us: f64,
    median_us: Option<f64>,
    rel_l2: Option<f64>,
    failure: Option<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, driver {}", self.device, self.driver)?;
        for p in &self.problems {
            let (pruned, skipped) = (p.pruned, p.skipped);
            writeln!(
                f,
                "\n{}x{}x{}: {pruned} left out by the model, {skipped} for lack of time",
                p.m, p.n, p.k
            )?;
            let mut table = Table::new(&["strategy", "kernel", "µs", "expected", "rel L2"]);
            for c in &p.candidates {
                table.row([
                    c.strategy.into(),
                    c.kernel.clone(),
                    c.median_us.map_or("-".into(), |us| format!("{us:.2}")),
                    format!("{:.1}", c.expected_us),
                    c.rel_l2.map_or_else(|| c.failure.clone().unwrap_or("-".into()), |e| format!("{e:.1e}")),
                ]);
            }
            write!(f, "{table}")?;
        }
        writeln!(f, "loading all kernels took {:.1} s", self.load_us as f64 * 1e-6)?;
        match &self.remembered {
            Some(path) => writeln!(f, "remembered in {}", path.display()),
            None => Ok(()),
        }
    }
}

/// Measures and remembers.
pub fn run(args: &TuneArgs, output: &Output) -> anyhow::Result<Verdict> {
    let DeviceArg::Gpu(id) = &args.device else { bail!("--device cpu: a processor has nothing to tune") };
    let named: Vec<&'static dyn Strategy> =
        args.strategy.iter().map(|name| strategy(name)).collect::<Result<_, _>>()?;
    let shapes = bench::parse_shapes(&args.shapes)?;
    let gpu = crate::gpu::open_timed(id, "kernels are tuned on the card that runs them")?;
    let (mut problems, mut found) = (Vec::new(), Vec::new());
    let bar = output.progress("tune", shapes.len());
    for shape in shapes {
        let desc = operands::product(shape, args.a_format, args.out_dtype);
        desc.check()?;
        let weights = operands::weights(shape)?;
        let operands = Operands::new(desc, &weights, true)?;
        let chosen = (!named.is_empty()).then_some(named.as_slice());
        let budget = Duration::from_secs(args.budget);
        let tuned = tune::tune(gpu, &operands.problem(&weights), chosen, budget, Protocol::default())?;
        if tuned.outcomes.is_empty() {
            return Err(Unsupported {
                what: format!("{shape}: no kernel that can be tuned takes {desc}"),
                instead: "`dualgemm doctor` says which strategies can run here, and why".into(),
            }
            .into());
        }
        found.extend(tuned.choices());
        let candidates = tuned.outcomes.iter().map(|o| Candidate {
            strategy: o.strategy,
            kernel: o.kernel.clone(),
            expected_us: o.expected_us,
            median_us: o.measured.as_ref().ok().map(|m| m.timing.median_us),
            rel_l2: o.measured.as_ref().ok().and_then(|m| m.rel_l2),
            failure: o.measured.as_ref().err().map(ToString::to_string),
        });
        problems.push(ProblemReport {
            m: shape.m,
            n: shape.n,
            k: shape.k,
            candidates: candidates.collect(),
            pruned: tuned.pruned,
            skipped: tuned.skipped,
        });
        bar.inc(1);
    }
    bar.finish_and_clear();
    let remembered =
        if args.dry_run || found.is_empty() { None } else { Some(choices::remember(gpu, &found)?) };
    let right = problems.iter().all(|p| p.candidates.iter().all(|c| c.failure.is_none()));
    let (device, driver, load_us) = (gpu.info().name.clone(), gpu.driver().into(), gpu.load_us());
    output.emit(&Report { device, driver, problems, remembered, load_us })?;
    Ok(right.into())
}
