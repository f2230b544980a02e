//! `export --target gpumode`: kernels with their launches as one file that runs elsewhere, without this program.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use dualgemm::formats::BlockFormat;
use dualgemm::gemm::{AFormat, DualGemmDesc};
use dualgemm_bench::Shape;
use dualgemm_export::gpumode::{self, ARCHES, Submission};
use dualgemm_kernels::registry::seen_on;
use dualgemm_ptx::Target;
use serde_json::{Value, json};

use super::Verdict;
use super::bench::shape;
use crate::args::WriteArgs;
use crate::files::{writable, write_whole};
use crate::report::Output;

/// Arguments of `export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// What the file is for.
    #[arg(long, value_enum)]
    pub target: ExportTarget,
    /// Architecture: sm_100a, the task's, or sm_90a, to try it on a Hopper card.
    #[arg(long, value_name = "ARCH", default_value = "sm_100a")]
    pub arch: String,
    /// A shape beside those of the task's ranking and tests; may be given several times.
    #[arg(long, value_name = "MxNxK", value_parser = shape)]
    pub shape: Vec<Shape>,
    /// The file to write.
    #[arg(short, long, value_name = "FILE", default_value = "submission.py")]
    pub output: PathBuf,
    #[command(flatten)]
    pub write: WriteArgs,
}

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExportTarget {
    /// The GPU MODE task nvfp4_dual_gemm: a submission.py with custom_kernel.
    Gpumode,
}

/// Writes the file.
pub fn run(args: &ExportArgs, output: &Output) -> anyhow::Result<Verdict> {
    let ExportTarget::Gpumode = args.target;
    let target = ARCHES.into_iter().find(|target| target.as_str() == args.arch);
    let Some(target) = target else {
        bail!(
            "--arch {}: nothing is exported for it; valid are {}",
            args.arch,
            ARCHES.map(Target::as_str).join(", ")
        );
    };
    writable(&args.output, args.write)?;
    for shape in &args.shape {
        let &Shape { m, n, k } = shape;
        let desc = DualGemmDesc::new(m, n, k, AFormat::Nvfp4, BlockFormat::Nvfp4);
        desc.check().with_context(|| format!("--shape {shape}"))?;
        if !k.is_multiple_of(32) {
            bail!(
                "--shape {shape}: K is {k}; rows of codes start at multiples of 16 bytes, so K is a multiple of 32"
            );
        }
        if [m, n, k].iter().any(|&size| size > i32::MAX as usize) {
            bail!("--shape {shape}: sizes are at most 2147483647");
        }
    }
    let mut shapes = gpumode::shapes();
    shapes.extend(&args.shape);
    let Submission { python, recording, shapes } = gpumode::submission(target, &shapes)?;
    write_whole(&args.output, python.as_bytes())?;
    let ran_on_silicon = shapes.iter().all(|s| !seen_on(&s.config).is_empty());
    let (file, kernels, bytes) = (args.output.display().to_string(), recording.kernels.len(), python.len());
    let count = shapes.len();
    let row = |s: gpumode::ShapeLaunches| {
        let (Shape { m, n, k }, kernel, launches) = (s.shape, s.config, s.launches.len());
        let text = format!("  {:<16} {kernel}, launches: {launches}\n", s.shape.to_string());
        (json!({ "m": m, "n": n, "k": k, "kernel": kernel, "launches": launches }), text)
    };
    let (shapes, lines): (Vec<Value>, String) = shapes.into_iter().map(row).unzip();
    let mut text =
        format!("{file}: {kernels} kernels for {}, {count} shapes, {bytes} bytes\n{lines}", args.arch);
    if !ran_on_silicon {
        text += "these kernels are simulated and assembled, not yet run on silicon\n";
    }
    let document = json!({ "file": file, "arch": args.arch, "bytes": bytes, "kernels": kernels,
        "ran_on_silicon": ran_on_silicon, "shapes": shapes });
    output.say(&document, &text)?;
    Ok(Verdict::Right)
}
