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
use crate::args::{ReadArgs, WriteArgs, read_with};
use crate::report::{Output, counted, grouped, starred, times};
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
    /// Write only the gated MLPs, with their biases. Engines do not load such a file.
    ///
    /// GGUF files of families other than Llama, Mistral, Qwen2 and Qwen3, and whatever is read from GGUF, can be written
    /// only so. A norm or a scale in an MLP is an error.
    #[arg(long)]
    pub mlp_only: bool,
    #[command(flatten)]
    pub write: WriteArgs,
    #[command(flatten)]
    pub read: ReadArgs,
}

#[derive(Debug, Serialize)]
struct Report {
    input: PathBuf,
    from: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    overrides: Vec<String>,
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
        let (input, read) = (self.input.display(), read_with(&self.overrides));
        let (linears, tensors) = (counted(*linears, "quantized layer"), counted(written.tensors, "tensor"));
        write!(f, "{input}: {from}{read} to {}, {linears}, {tensors} in", to.name())?;
        written.files.iter().try_for_each(|file| write!(f, "\n  {}", file.display()))?;
        if written.skipped.is_empty() {
            return Ok(());
        }
        let counts =
            [(written.skipped.len() - skipped_linears, "tensor"), (*skipped_linears, "quantized layer")];
        let counts = counts.into_iter().filter(|(n, _)| *n != 0).map(|(n, what)| counted(n, what));
        let counts = counts.collect::<Vec<_>>().join(" and ");
        write!(f, "\ngated MLPs only, which engines do not load; left out: {counts}:")?;
        // Layers of a model have the same names.
        let names = grouped(&written.skipped, |name| starred(name, 0));
        let name = |(starred, names): &(String, Vec<&String>)| match names.as_slice() {
            [one] => one.to_string(),
            several => times(starred, several.len()),
        };
        names.iter().try_for_each(|names| write!(f, "\n  {}", name(names)))
    }
}

pub fn run(args: &ConvertArgs, output: &Output) -> anyhow::Result<Verdict> {
    if args.read.within.is_some() {
        bail!("--within: chooses among MLPs; convert writes every layer");
    }
    let checkpoint = layer::open(&args.input, &args.read, None)?;
    let is_gguf = checkpoint.files().gguf_metadata().is_some();
    if is_gguf && !args.mlp_only {
        bail!(
            "{}: a whole model is not converted from GGUF, its gated MLPs alone are; add --mlp-only",
            args.input.display()
        );
    }
    if args.mlp_only && args.to != write::Output::Gguf && !is_gguf {
        bail!("--mlp-only is for conversions to and from GGUF; {} holds every tensor", args.to.name());
    }
    let read = checkpoint.files().paths().chain([args.input.as_path()]);
    files::is_no_input("OUT", &args.out, read)?;
    files::writable_model(&args.out, args.write)?;
    let model = write::Model { mlp_only: args.mlp_only, ..checkpoint.export(args.to)? };
    let written = write::write(&args.out, args.to, &model)?;
    let skipped_linears = model.linears.iter().filter(|l| written.skipped.contains(&l.module)).count();
    output.emit(&Report {
        input: args.input.clone(),
        from: checkpoint.convention().name,
        overrides: args.read.overrides(),
        to: args.to,
        linears: model.linears.len() - skipped_linears,
        skipped_linears,
        written,
    })?;
    Ok(Verdict::Right)
}
