//! `estimate`: what the fused kernel should take on a B200, with the arithmetic, beside the speed of light and the best
//! that was published. Nothing here is measured.

use std::fmt;

use anyhow::Context as _;
use clap::Args;
use dualgemm::formats::BlockFormat;
use dualgemm::gemm::{AFormat, DualGemmDesc};
use dualgemm::strategies::blackwell::{EXCHANGE, EXCHANGE_US, Estimate, FILL, LAUNCH_US, MEMORY, MULTIPLY};
use dualgemm_bench::Shape;
use dualgemm_bench::challenge::{RANKED, Ranked};
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::registry::KERNELS;
use dualgemm_kernels::sm100a::config::Config;
use serde::Serialize;

use super::bench::shape;
use super::{Verdict, ptx};
use crate::report::{Output, Table};

/// The kernel is to stay below this many times the speed of light, launch cost aside.
const GOAL: f64 = 1.35;

/// Arguments of `estimate`.
#[derive(Debug, Args)]
pub struct EstimateArgs {
    /// Tokens, features and K; may be given several times. Without it, the ranked shapes of the GPU MODE task.
    #[arg(long, value_name = "MxNxK", value_parser = shape)]
    pub shape: Vec<Shape>,
    /// Tile and pipeline, see `ptx --list`; without it, the best by the estimate.
    #[arg(long, value_name = "NAME")]
    pub config: Option<String>,
    /// Print the table as Markdown.
    #[arg(long)]
    pub markdown: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    m: usize,
    n: usize,
    k: usize,
    #[serde(flatten)]
    estimate: Estimate,
    kernel_us: f64,
    /// With what every launch costs in the task's harness.
    total_us: f64,
    /// Of a ranked shape.
    #[serde(skip_serializing_if = "Option::is_none")]
    speed_of_light_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    best_public_us: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    card: &'static str,
    measured: bool,
    launch_us: f64,
    shapes: Vec<Row>,
    #[serde(skip)]
    markdown: bool,
}

/// A heading, whether text has room for the column, and what a row says there.
type Column = (&'static str, bool, fn(&Row) -> String);

const COLUMNS: [Column; 16] = [
    ("M, N, K", true, |r| format!("{}x{}x{}", r.m, r.n, r.k)),
    ("tile", true, |r| r.estimate.kernel.trim_start_matches("sm100a_fused_").into()),
    ("CTAs", true, |r| r.estimate.ctas.to_string()),
    ("waves", false, |r| r.estimate.waves.to_string()),
    ("steps", true, |r| format!("{} of {}", r.estimate.steps, r.estimate.step_k)),
    ("bytes per step", false, |r| r.estimate.step_bytes.to_string()),
    ("fill, ns", true, |r| format!("{:.0}", r.estimate.fill_ns)),
    ("products, clk", false, |r| r.estimate.multiply_clocks.to_string()),
    ("products, ns", true, |r| format!("{:.0}", r.estimate.multiply_ns)),
    ("exchange, µs", true, |r| format!("{:.1}", r.estimate.exchange_us)),
    ("TMEM columns", false, |r| r.estimate.tmem_columns.to_string()),
    ("kernel, µs", true, |r| format!("{:.1}", r.kernel_us)),
    ("light, µs", true, |r| or_none(r.speed_of_light_us, 1)),
    ("× light", true, |r| or_none(r.speed_of_light_us.map(|light| r.kernel_us / light), 2)),
    ("with launch, µs", true, |r| format!("{:.1}", r.total_us)),
    ("best public, µs", true, |r| or_none(r.best_public_us, 1)),
];

fn or_none(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_string(), |value| format!("{value:.digits$}"))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.markdown {
            let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
            writeln!(f, "{}", line(COLUMNS.map(|(heading, ..)| heading.into()).into()))?;
            writeln!(f, "{}", "|---".repeat(COLUMNS.len()) + "|")?;
            let cells = |row: &Row| COLUMNS.map(|(.., cell)| cell(row)).into();
            return self.shapes.iter().try_for_each(|row| writeln!(f, "{}", line(cells(row))));
        }
        writeln!(f, "{}: estimates, nothing here was measured", self.card)?;
        // What fits a terminal; JSON and Markdown have the rest.
        let shown = || COLUMNS.iter().filter(|(_, shown, _)| *shown);
        let mut table = Table::new(&shown().map(|(heading, ..)| *heading).collect::<Vec<_>>());
        self.shapes.iter().for_each(|row| table.row(shown().map(|(.., cell)| cell(row))));
        write!(
            f,
            "{table}\
             fill = bytes / {FILL} B/ns; products = 4 · 128 · columns · K of a step / {MULTIPLY} FLOP/ns\n\
             kernel = the larger of waves · steps · the larger of both and all bytes / {MEMORY} B/ns, and the exchange;\n\
             \x20 beside a 16-bit A products take four times as long, and a step no less than widening its weights\n\
             exchange of CTAs that split K = {EXCHANGE_US} µs + bytes of sums / {EXCHANGE} B/ns; with launch adds {LAUNCH_US} µs,\n\
             \x20 what the task's harness times besides; light is the task's speed of light, a bound that it states\n"
        )?;
        for row in &self.shapes {
            let Some((light, best)) = row.speed_of_light_us.zip(row.best_public_us) else { continue };
            let Row { m, n, k, kernel_us, total_us, .. } = row;
            let (goal, than) =
                (GOAL * light, if *total_us < best { "faster than" } else { "not faster than" });
            let within = if *kernel_us <= goal { "within" } else { "over" };
            writeln!(
                f,
                "{m}x{n}x{k}: {kernel_us:.2} µs: {within} the goal of {goal:.2} µs ({GOAL} × the light of {light:.2}); {total_us:.1} µs with \
                 launch, {than} the best public {best:.1} µs"
            )?;
        }
        Ok(())
    }
}

/// The problem that a shape is, if a kernel could take it.
fn check(shape: Shape, config: Option<&Config>) -> anyhow::Result<()> {
    let Shape { m, n, k } = shape;
    let b = config.map_or(BlockFormat::Nvfp4, |config| config.formats.weights());
    let a = if b == BlockFormat::Mxfp4 { AFormat::Mxfp4 } else { AFormat::Nvfp4 };
    DualGemmDesc::new(m, n, k, a, b).check().with_context(|| format!("--shape {shape}"))?;
    // The least tile of all; a launch counts CTAs in 31 bits.
    let tiles = m.div_ceil(8).checked_mul(n.div_ceil(64));
    if [m, n, k].iter().any(|&size| size > i32::MAX as usize) || tiles.is_none_or(|t| t > i32::MAX as usize) {
        anyhow::bail!("--shape {shape}: no launch is that large; sizes and tiles are counted in 31 bits");
    }
    if let Some(config) = config {
        let stages = k.div_ceil(config.stage_k() as usize);
        if config.split_k as usize > stages {
            let (name, split) = (config.name(), config.split_k);
            anyhow::bail!("--config {name}: {split} CTAs split K; {shape} has work for {stages}");
        }
        if !config.takes(m, k) {
            let (name, tokens) = (config.name(), config.tile_tokens());
            anyhow::bail!("--config {name}: a tile of {tokens} tokens holds all of them; {shape} has {m}");
        }
    }
    Ok(())
}

pub fn run(args: &EstimateArgs, output: &Output) -> anyhow::Result<Verdict> {
    let ranked = RANKED.map(|ranked| ranked.shape);
    let shapes = if args.shape.is_empty() { &ranked[..] } else { &args.shape };
    let sm100a = KERNELS.iter().filter(|kernel| kernel.arch.as_str() == "sm_100a");
    args.config.iter().try_for_each(|config| ptx::check_config(config, sm100a.clone()))?;
    let named = args.config.as_deref().map(Config::named).transpose()?;
    let row = |&shape: &Shape| -> anyhow::Result<Row> {
        check(shape, named.as_ref())?;
        let Shape { m, n, k } = shape;
        let estimate = match &named {
            Some(config) => Estimate::new(config, (m, n, k))?,
            None => Estimate::best(Formats::NVFP4, (m, n, k))?.1,
        };
        let ranked = RANKED.iter().find(|ranked| ranked.shape == shape);
        Ok(Row {
            m,
            n,
            k,
            kernel_us: estimate.kernel_us(),
            total_us: estimate.total_us(),
            estimate,
            speed_of_light_us: ranked.map(|Ranked { speed_of_light_us, .. }| *speed_of_light_us),
            best_public_us: ranked.map(|Ranked { best_public_us, .. }| *best_public_us),
        })
    };
    output.emit(&Report {
        card: "B200",
        measured: false,
        launch_us: LAUNCH_US,
        shapes: shapes.iter().map(row).collect::<anyhow::Result<_>>()?,
        markdown: args.markdown,
    })?;
    Ok(Verdict::Right)
}
