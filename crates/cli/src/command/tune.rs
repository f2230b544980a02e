//! `tune --shapes NAME,…`: measures the kernels of every strategy on a GPU and remembers the fastest.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use dualgemm::device::Device as _;
use dualgemm::gemm::AFormat;
use dualgemm::strategies::measure::Protocol;
use dualgemm::strategies::{Strategy, choices, strategy, tune};
use serde_json::json;

use super::Verdict;
use super::bench::{self, gpu::Operands, operands};
use crate::args::{DeviceArg, FORMATS, named};
use crate::failure::Unsupported;
use crate::report::{Listing, Output};

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
    /// Strategies to try, comma-separated; without it, all that plans take unasked.
    ///
    /// What is found about others counts for plans that name them.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub strategy: Vec<String>,
    /// Seconds for each shape; no new candidate starts after that.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub budget: u64,
    /// Only measure; remember nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// Measures and remembers.
pub fn run(args: &TuneArgs, output: &Output) -> anyhow::Result<Verdict> {
    let DeviceArg::Gpu(id) = &args.device else {
        bail!(
            "--device cpu: processors have one kernel for each problem, so nothing is tuned; cuda or cuda:N is needed"
        )
    };
    let named: Vec<&'static dyn Strategy> =
        args.strategy.iter().map(|name| strategy(name)).collect::<Result<_, _>>()?;
    let shapes = bench::parse_shapes(&args.shapes)?;
    let gpu = crate::gpu::open_timed(id, "kernels are tuned on the card that will run them")?;
    let (device, driver) = (&gpu.info().name, gpu.driver());
    let mut text = format!("{device}, driver {driver}\n");
    let (mut problems, mut found, mut right) = (Vec::new(), Vec::new(), true);
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
                what: format!("--shapes {shape}: none of the kernels that can be tuned takes {desc}"),
                instead: "`dualgemm doctor` says which strategies can run here, and why".into(),
            }
            .into());
        }
        found.extend(tuned.choices());
        let mut candidates = Listing::new(&["strategy", "kernel", "µs", "expected", "rel L2"]);
        for tune::Outcome { strategy, kernel, expected_us, measured } in &tuned.outcomes {
            let (done, failure) = (measured.as_ref().ok(), measured.as_ref().err().map(ToString::to_string));
            let (median_us, rel_l2) = (done.map(|m| m.timing.median_us), done.and_then(|m| m.rel_l2));
            right &= failure.is_none();
            let cells = [
                strategy.to_string(),
                kernel.clone(),
                median_us.map_or("-".into(), |us| format!("{us:.2}")),
                format!("{expected_us:.1}"),
                rel_l2.map_or_else(|| failure.clone().unwrap_or("-".into()), |e| format!("{e:.1e}")),
            ];
            let object = json!({ "strategy": strategy, "kernel": kernel, "expected_us": expected_us,
                "median_us": median_us, "rel_l2": rel_l2, "failure": failure });
            candidates.row(object, cells);
        }
        // Left out by the cost model, and for lack of time.
        let (pruned, skipped) = (tuned.pruned, tuned.skipped);
        text += &format!("\n{shape}: {pruned} left out by the model, {skipped} for lack of time\n");
        text += &candidates.table.to_string();
        problems.push(json!({ "m": shape.m, "n": shape.n, "k": shape.k, "candidates": candidates.rows,
            "pruned": pruned, "skipped": skipped }));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let remembered =
        if args.dry_run || found.is_empty() { None } else { Some(choices::remember(gpu, &found)?) };
    let remembered = remembered.map(|path| path.display().to_string());
    text += &format!("loading all kernels took {:.1} s\n", gpu.load_us() as f64 * 1e-6);
    text.extend(remembered.iter().map(|path| format!("remembered in {path}")));
    let document = json!({ "device": device, "driver": driver, "problems": problems, "remembered": remembered,
        "load_us": gpu.load_us() });
    output.say(&document, &text)?;
    Ok(right.into())
}
