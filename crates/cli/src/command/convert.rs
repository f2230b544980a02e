//! `convert IN OUT --to CONVENTION`: a checkpoint in another convention, no code or block scale changed.
//!
//! A tensor scale stays bit for bit where both conventions store it the same way round; otherwise its reciprocal is
//! written, which is within one unit in the last place of f32.

use std::fmt;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use dualgemm::checkpoint::write::{self, WriteReport};
use serde::Serialize;

use super::Verdict;
use crate::args::ReadArgs;
use crate::report::{Output, counted};
use crate::{files, layer};

/// Arguments of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Directory, .safetensors, .safetensors.index.json or .gguf file.
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// What to write: a new directory or a .safetensors file, a .gguf file for gguf.
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Convention to write: modelopt, compressed-tensors or gguf.
    #[arg(long, value_name = "CONVENTION")]
    pub to: write::Output,
    /// Write the gated MLPs alone, where the rest cannot be written: to GGUF, of models that are not of the Llama, Mistral,
    /// Qwen2 or Qwen3 family; from GGUF. Biases go with them, and a norm or a scale in an MLP is an error. Engines do not load
    /// such a file.
    #[arg(long)]
    pub mlp_only: bool,
    #[command(flatten)]
    pub read: ReadArgs,
}

#[derive(Debug, Serialize)]
struct Report {
    input: PathBuf,
    from: &'static str,
    to: write::Output,
    /// Quantized layers that were written.
    linears: usize,
    /// Those that the output cannot hold; their names are in `skipped`.
    #[serde(skip)]
    skipped_linears: usize,
    #[serde(flatten)]
    written: WriteReport,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, linears, skipped_linears, written, .. } = self;
        let files: Vec<String> = written.files.iter().map(|file| file.display().to_string()).collect();
        write!(
            f,
            "{}: {from} to {}, {}, ",
            self.input.display(),
            to.name(),
            counted(*linears, "quantized layer")
        )?;
        write!(f, "{} in {}", counted(written.tensors, "tensor"), files.join(", "))?;
        match written.skipped.as_slice() {
            [] => Ok(()),
            skipped => {
                let counts =
                    [(skipped.len() - skipped_linears, "tensor"), (*skipped_linears, "quantized layer")];
                let counts: Vec<String> =
                    counts.iter().filter(|(n, _)| *n != 0).map(|&(n, what)| counted(n, what)).collect();
                let (counts, names) = (counts.join(" and "), skipped.join(", "));
                write!(f, "\ngated MLPs only, which engines do not load; left out: {counts}: {names}")
            }
        }
    }
}

/// Converts.
pub fn run(args: &ConvertArgs, output: &Output) -> anyhow::Result<Verdict> {
    let checkpoint = layer::open(&args.input, &args.read, None)?;
    let is_gguf = checkpoint.files().gguf_metadata().is_some();
    if is_gguf && !args.mlp_only {
        bail!(
            "{}: of a GGUF file the gated MLPs alone are read; --mlp-only writes them",
            args.input.display()
        );
    }
    if args.mlp_only && args.to != write::Output::Gguf && !is_gguf {
        bail!("--mlp-only is for conversions to and from GGUF; {} holds every tensor", args.to.name());
    }
    let read = checkpoint.files().paths().chain([args.input.as_path()]);
    files::is_no_input("OUT", &args.out, read)?;
    files::writable_model(&args.out)?;
    let model = write::Model { mlp_only: args.mlp_only, ..checkpoint.export(args.to)? };
    let written = write::write(&args.out, args.to, &model)?;
    let skipped_linears = model.linears.iter().filter(|l| written.skipped.contains(&l.module)).count();
    output.emit(&Report {
        input: args.input.clone(),
        from: checkpoint.convention().name,
        to: args.to,
        linears: model.linears.len() - skipped_linears,
        skipped_linears,
        written,
    })?;
    Ok(Verdict::Right)
}
