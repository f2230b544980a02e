//! `quantize IN OUT`: the linear layers of a model in safetensors to nvfp4 as one producer does it, named as that producer
//! names them; everything else is copied. What stays in floats, and which layers share a tensor scale, is as the
//! producers' own tools have it ([`linear`]). Experts in tensors of three dimensions are taken apart, or kept so, as these do
//! ([`FusedExperts`](dualgemm::checkpoint::FusedExperts)).
//!
//! | producer | a tensor `M.weight` (or `M`) becomes |
//! |---|---|
//! | modelopt | `M.weight`, `M.weight_scale`, `M.weight_scale_2` (multiplier) |
//! | compressed-tensors | `M.weight_packed`, `M.weight_scale`, `M.weight_global_scale` (divisor) |
//! | te | as compressed-tensors: Transformer Engine has no file format, but a divisor |
//! | torchao | `M._weight_qdata`, `M._weight_scale`, `M._weight_per_tensor_scale` (multiplier) |
//! | ggml | one tensor of type 40 if OUT ends in `.gguf`, else as modelopt with a tensor scale of 1 |
//!
//! OUT declares the convention, so that `run` and `validate` read it without being told.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use dualgemm::checkpoint::write::{self, LinearOut, Model};
use dualgemm::checkpoint::{Dtype, FloatWeight, TensorFiles, TensorOut, linear, model_field, safetensors};
use dualgemm::formats::quantize::{quantize_group, relative_l2};
use dualgemm::formats::{FloatMatrix, FloatType, GlobalScale, Producer, QuantizedMatrix, Search, gguf};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Value, json};

mod choice;

use super::Verdict;
use crate::args::{Names, WriteArgs, named};
use crate::calibration::Calibration;
use crate::files::{is_no_input, writable_model};
use crate::report::{Output, Table, counted, grouped, span, starred, times};
use choice::{Choice, groups};

/// Arguments of `quantize`.
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// Safetensors file, or directory of them, with float tensors.
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// What to write: a directory or a .safetensors file; a .gguf file with --producer ggml.
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Whose arithmetic and naming to follow.
    #[arg(long, value_name = "NAME", value_parser = named(PRODUCERS))]
    pub producer: Producer,
    /// Choose each block's scale by least squared error instead of by the producer's rule.
    ///
    /// The tensor scale is the producer's, or one that lets block scales reach 256 instead of 448, where that errs less
    /// and no block loses by it.
    #[arg(long, value_name = "HOW", value_parser = named(SEARCHES))]
    pub search: Option<Search>,
    /// Give each tensor its own tensor scale, instead of one to q, k and v and one to gate and up.
    ///
    /// ModelOpt and llm-compressor share them, and vLLM applies one scale to each of these sets: with separate scales
    /// its results are wrong.
    #[arg(long)]
    pub separate_scales: bool,
    /// Copy tensors whose name contains this text instead of quantizing them; may be repeated.
    #[arg(long, value_name = "TEXT")]
    pub skip: Vec<String>,
    /// Add input scales from this file, which dualgemm.calibrate of the Python package writes.
    ///
    /// With input scales, activations can be quantized too (W4A4).
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Write only the gated MLPs to a GGUF file. llama.cpp does not load such a file.
    #[arg(long)]
    pub mlp_only: bool,
    #[command(flatten)]
    pub write: WriteArgs,
}

const PRODUCERS: Names<Producer> = &[
    ("modelopt", Producer::ModelOpt, "NVIDIA ModelOpt"),
    ("compressed-tensors", Producer::CompressedTensors, "llm-compressor"),
    ("torchao", Producer::Torchao, "torchao, to a .safetensors file without input scales"),
    ("te", Producer::Te, "Transformer Engine, named as compressed-tensors"),
    ("ggml", Producer::Ggml, "llama.cpp, to a .gguf file or named as modelopt"),
];
const SEARCHES: Names<Search> =
    &[("mse", Search::Mse, "least squared error over all block scales, \"four over six\" among them")];

#[derive(Debug, Serialize)]
struct Report {
    input: PathBuf,
    output: PathBuf,
    producer: Producer,
    search: Search,
    tensors: Vec<TensorReport>,
    copied: Vec<String>,
    /// Linear layers among the copied ones, and why they are.
    kept: Vec<Kept>,
    /// Names of tensors that OUT has no room for.
    left_out: Vec<String>,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Kept {
    name: String,
    why: String,
}

#[derive(Debug, Serialize)]
struct TensorReport {
    name: String,
    shape: [usize; 2],
    /// Type of the floats.
    dtype: FloatType,
    /// A multiplier, whichever way round the producer stores it.
    tensor_scale: f32,
    /// As the file holds it: a divisor in some conventions.
    tensor_scale_held: f32,
    rel_l2: f64,
    rel_l2_plain: f64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without a search both errors are one.
        let shown = if self.search == Search::Plain { 4 } else { 5 };
        let mut table = Table::new(&["tensor", "shape", "tensor scale", "rel L2", "rel L2 plain"][..shown]);
        // A line for all experts of a projection, with the largest errors.
        for ((name, shape), tensors) in grouped(&self.tensors, |t| (starred(&t.name, 1), t.shape)) {
            let error = |of: fn(&TensorReport) -> f64| {
                let most = tensors.iter().map(|t| of(t)).fold(0.0, f64::max);
                format!("{}{most:.5}", if tensors.len() > 1 { "≤ " } else { "" })
            };
            let row = [
                times(if tensors.len() > 1 { &name } else { &tensors[0].name }, tensors.len()),
                format!("{shape:?}"),
                span(tensors.iter().map(|t| t.tensor_scale)),
                error(|t| t.rel_l2),
                error(|t| t.rel_l2_plain),
            ];
            table.row(row.into_iter().take(shown));
        }
        let (quantized, copied) = (self.tensors.len(), self.copied.len());
        writeln!(f, "{} quantized as {} does, {copied} copied", counted(quantized, "tensor"), self.producer)?;
        let is_left_out = |kept: &Kept| self.left_out.contains(&kept.name);
        for ((name, why, left_out), kept) in
            grouped(&self.kept, |kept| (starred(&kept.name, 0), &kept.why, is_left_out(kept)))
        {
            let name = if kept.len() > 1 { &name } else { &kept[0].name };
            let what = if left_out { "left out" } else { "kept in floats" };
            writeln!(f, "{what}: {}, {why}", times(name, kept.len()))?;
        }
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        if !self.left_out.is_empty() {
            writeln!(f, "left out, gated MLPs only: {}", counted(self.left_out.len(), "tensor"))?;
        }
        write!(f, "{table}written to {}", self.output.display())
    }
}

/// Quantizes and writes.
pub fn run(args: &QuantizeArgs, output: &Output) -> anyhow::Result<Verdict> {
    let form = Form::of(args)?;
    let calibration = args.calibration.as_deref().map(Calibration::read).transpose()?;
    let files = TensorFiles::open(&args.input)?;
    is_no_input("OUT", &args.out, files.paths().chain([args.input.as_path()]))?;
    if files.gguf_metadata().is_some() {
        bail!("{}: is a GGUF file; a safetensors file with float tensors is needed", args.input.display());
    }
    linear::check_floats(&files)?;
    check_layout(&files)?;
    let search = args.search.unwrap_or(Search::Plain);
    let Choice { chosen, copied, kept } = Choice::of(&files, &args.skip, form);
    if chosen.is_empty() {
        let but = if args.skip.is_empty() { "" } else { " but for those to skip" };
        let input = args.input.display();
        let kept: String =
            kept.iter().take(1).map(|Kept { name, why }| format!(" ({name} is kept: {why})")).collect();
        bail!(
            "{input}: holds no linear layer to quantize{but}; 2-D tensors of F32, F16 or BF16 are needed, of whole \
             blocks of {}{kept}",
            form.block()
        );
    }
    let unused = args.skip.iter().filter(|text| files.tensors().all(|t| !t.name.contains(*text)));
    let mut notes: Vec<String> = unused
        .map(|text| format!("--skip {text}: no tensor of {} has that in its name", args.input.display()))
        .collect();
    if files.config().is_none() {
        notes.push(NO_CONFIG.into());
    }
    writable_model(&args.out, args.write)?;
    let groups = groups(chosen, args.separate_scales);
    let bar = output.progress("quantize", groups.len());
    let quantize = |group: &Vec<FloatWeight<'_>>| {
        let done = quantize_one_group(group, args.producer, search, calibration.as_ref());
        bar.inc(1);
        done
    };
    let done = groups.par_iter().map(quantize).collect::<anyhow::Result<Vec<_>>>()?;
    bar.finish_and_clear();
    let (linears, tensors): (Vec<_>, Vec<_>) = done.into_iter().flatten().unzip();
    let mut copied_names: Vec<_> = copied.iter().map(|t| t.name.clone()).collect();
    let left_out = form.write(args, linears, copied, &files)?;
    let out: HashSet<&str> = left_out.iter().map(String::as_str).collect();
    copied_names.retain(|name| !out.contains(name.as_str()));
    let tensors = tensors.into_iter().filter(|t| !out.contains(module(&t.name))).collect();
    output.emit(&Report {
        input: args.input.clone(),
        output: args.out.clone(),
        producer: args.producer,
        search,
        tensors,
        copied: copied_names,
        kept,
        left_out,
        notes,
    })?;
    Ok(Verdict::Right)
}

const NO_CONFIG: &str = "the source has no config.json, so the result does not say which activation its MLPs have: pass --activation to run \
     and validate";

/// Models whose linear layers are stored as `[in, out]`: those of transformers that have `Conv1D`.
const TRANSPOSED: [&str; 5] = ["gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"];

/// Blocks run along K, which is the last dimension in every other model.
fn check_layout(files: &TensorFiles) -> anyhow::Result<()> {
    let Some(config) = files.config() else { return Ok(()) };
    let found = model_field(&config.value, "model_type").and_then(Value::as_str);
    if let Some(found) = found.filter(|found| TRANSPOSED.contains(found)) {
        bail!(
            "{}: model_type is {found}, whose layers are Conv1D [in, out]; loaders of 4-bit weights take linear layers \
             [out, in]",
            config.path.display()
        );
    }
    Ok(())
}

/// The module of a weight.
fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// A weight in 4 bits, and what belongs to it.
struct Quantized {
    matrix: QuantizedMatrix<'static>,
    /// Type of the floats.
    dtype: FloatType,
    experts: Option<usize>,
    input_scale: Option<GlobalScale>,
}

/// Quantizes tensors under one tensor scale and measures what that loses.
fn quantize_one_group(
    group: &[FloatWeight<'_>],
    producer: Producer,
    search: Search,
    calibration: Option<&Calibration>,
) -> anyhow::Result<Vec<(Quantized, TensorReport)>> {
    let floats = group.iter().map(FloatWeight::floats).collect::<Result<Vec<_>, _>>()?;
    for (weight, x) in group.iter().zip(&floats) {
        check_finite(&weight.name, x)?;
    }
    let named: Vec<(&str, &FloatMatrix<'_>)> = group.iter().map(|t| t.name.as_str()).zip(&floats).collect();
    let found = quantize_group(&named, producer, search)?;
    let plain = match search {
        Search::Plain => None,
        Search::Mse => Some(quantize_group(&named, producer, Search::Plain)?),
    };
    let done = |(index, matrix): (usize, QuantizedMatrix<'static>)| {
        let (weight, x) = (&group[index], &floats[index]);
        let (dtype, rel_l2) = (x.float_type(), relative_l2(&matrix, x));
        let report = TensorReport {
            name: matrix.name().into(),
            shape: [matrix.rows(), matrix.k()],
            dtype,
            tensor_scale: matrix.global_scale().value(),
            tensor_scale_held: matrix.global_scale().held(),
            rel_l2,
            rel_l2_plain: plain.as_ref().map_or(rel_l2, |plain| relative_l2(&plain[index], x)),
        };
        let input_scale = calibration.map(|c| c.input_scale(&weight.inputs, producer)).transpose()?;
        Ok((Quantized { matrix, dtype, experts: weight.experts, input_scale }, report))
    };
    found.into_iter().enumerate().map(done).collect()
}

/// A code of NaN or infinity would be some other number.
fn check_finite(name: &str, x: &FloatMatrix<'_>) -> anyhow::Result<()> {
    let Some((row, col)) = x.not_finite() else { return Ok(()) };
    let value = x.value(row, col);
    bail!(
        "{name}: element [{row}, {col}] is {value}; weights to quantize must be finite (--skip copies a tensor)"
    )
}

/// How OUT is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// As a checkpoint of a convention: a .safetensors file, a directory or a .gguf file.
    Checkpoint(write::Output),
    Torchao,
}

impl Form {
    fn of(args: &QuantizeArgs) -> anyhow::Result<Self> {
        let out = args.out.display();
        if args.mlp_only && args.out.extension().is_none_or(|e| e != "gguf") {
            bail!("--mlp-only is for .gguf files; {out} holds every tensor");
        }
        Ok(match (args.producer, args.out.extension().and_then(|e| e.to_str())) {
            (Producer::Ggml, Some("gguf")) => Self::Checkpoint(write::Output::Gguf),
            (_, Some("gguf")) => bail!("{out}: .gguf is written with --producer ggml only; use .safetensors"),
            (Producer::ModelOpt | Producer::Ggml, _) => Self::Checkpoint(write::Output::Modelopt),
            (Producer::CompressedTensors | Producer::Te, _) => {
                Self::Checkpoint(write::Output::CompressedTensors)
            }
            (Producer::Torchao, _) if args.calibration.is_some() => {
                bail!(
                    "--calibration: torchao's files hold no input scale; valid with it are the other producers"
                )
            }
            (Producer::Torchao, Some("safetensors")) => Self::Torchao,
            (Producer::Torchao, _) => bail!("{out}: torchao tensors are written to a .safetensors file only"),
        })
    }

    fn is_modelopt(self) -> bool {
        self == Self::Checkpoint(write::Output::Modelopt)
    }

    /// What K has to be a multiple of.
    fn block(self) -> usize {
        if self == Self::Checkpoint(write::Output::Gguf) { gguf::BLOCK_ELEMENTS } else { 16 }
    }

    /// Why a weight of this K stays in floats, if it does.
    fn misfit(self, k: usize) -> Option<String> {
        let block = self.block();
        (!k.is_multiple_of(block)).then(|| format!("K is {k}, which is no multiple of {block}"))
    }

    /// Why experts in tensors of three dimensions stay in floats, if they do.
    fn no_experts(self) -> Option<&'static str> {
        (self == Self::Torchao).then_some("experts in one tensor, which torchao's NVFP4 does not quantize")
    }

    /// Writes, and returns the names of the tensors that there is no room for.
    fn write(
        self,
        args: &QuantizeArgs,
        quantized: Vec<Quantized>,
        others: Vec<TensorOut<'_>>,
        files: &TensorFiles,
    ) -> anyhow::Result<Vec<String>> {
        let config = files.config().map(|json| &json.value);
        match self {
            Self::Checkpoint(convention) => {
                let linear = |Quantized { matrix, experts, input_scale, .. }| LinearOut {
                    module: module(matrix.name()).into(),
                    weight: matrix.into(),
                    experts,
                    input_scale,
                    bias: None,
                };
                let model = Model {
                    linears: quantized.into_iter().map(linear).collect(),
                    others,
                    config: config.cloned(),
                    source: Some(args.input.clone()),
                    beside: write::beside(files)?,
                    mlp_only: args.mlp_only,
                    ..Model::default()
                };
                Ok(write::write(&args.out, convention, &model)?.skipped)
            }
            Self::Torchao => {
                let weights: Vec<_> = quantized.iter().map(|done| (&done.matrix, done.dtype)).collect();
                let mut tensors: Vec<TensorOut<'_>> =
                    weights.iter().flat_map(|(matrix, _)| torchao_tensors(matrix)).collect();
                let mut metadata = torchao_metadata(&weights, &others);
                metadata.extend(config.map(write::config_to_metadata));
                tensors.extend(others);
                safetensors::write_to(&args.out, &tensors, &metadata)?;
                Ok(Vec::new())
            }
        }
    }
}

/// The three tensors of a torchao `NVFP4Tensor`, flattened.
fn torchao_tensors<'m>(m: &'m QuantizedMatrix<'_>) -> [TensorOut<'m>; 3] {
    let (module, parameter) = m.name().rsplit_once('.').unwrap_or(("", m.name()));
    let dot = if module.is_empty() { "" } else { "." };
    let name = |part: &str| format!("{module}{dot}_{parameter}_{part}");
    [
        TensorOut::new(name("qdata"), Dtype::U8, [m.rows(), m.k() / 2], m.codes()),
        TensorOut::new(name("scale"), Dtype::F8E4m3, [m.rows(), m.blocks()], m.scales()),
        TensorOut::scalar(name("per_tensor_scale"), &[], m.global_scale().value()),
    ]
}

/// What torchao's reader needs to put its tensors together again: weights with the type of the floats, to which it
/// dequantizes, and the others.
fn torchao_metadata(
    weights: &[(&QuantizedMatrix<'_>, FloatType)],
    copied: &[TensorOut<'_>],
) -> BTreeMap<String, String> {
    let quantized = |dtype: FloatType| {
        let dtype = match dtype {
            FloatType::F32 => "float32",
            FloatType::F16 => "float16",
            FloatType::Bf16 => "bfloat16",
        };
        json!({
            "_type": "NVFP4Tensor",
            "_data": {
                "block_size": 16,
                "orig_dtype": { "_type": "torch.dtype", "_data": dtype },
                "is_swizzled_scales": false,
                "use_triton_kernel": false,
                "act_quant_kwargs": null,
            },
            "_tensor_data_names": ["qdata", "scale", "per_tensor_scale"],
        })
    };
    let entries = weights.iter().map(|&(m, dtype)| (m.name(), quantized(dtype).to_string()));
    let plain = copied.iter().map(|t| (t.name.as_str(), json!({ "_type": "Tensor" }).to_string()));
    let mut metadata: BTreeMap<String, String> =
        entries.chain(plain).map(|(name, entry)| (name.to_string(), entry)).collect();
    let names: Vec<&String> = metadata.keys().collect();
    metadata.insert("tensor_names".into(), json!(names).to_string());
    metadata
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The very entry that torchao 0.18 writes: without one of the fields it cannot make the tensor.
    #[test]
    fn torchao_finds_every_field_of_its_tensor() {
        let x = FloatMatrix::F32(dualgemm::formats::Matrix::new("x", 1, 16, vec![1.0; 16]).unwrap());
        let q = dualgemm::formats::quantize("m.weight", &x, Producer::Torchao, Search::Plain).unwrap();
        let metadata = torchao_metadata(&[(&q, FloatType::Bf16)], &[]);
        let entry: Value = serde_json::from_str(&metadata["m.weight"]).unwrap();
        let theirs = json!({
            "_type": "NVFP4Tensor",
            "_data": {
                "is_swizzled_scales": false,
                "use_triton_kernel": false,
                "act_quant_kwargs": null,
                "block_size": 16,
                "orig_dtype": { "_type": "torch.dtype", "_data": "bfloat16" }
            },
            "_tensor_data_names": ["qdata", "scale", "per_tensor_scale"]
        });
        assert_eq!(entry, theirs);
    }

    #[test]
    fn torchao_flattens_under_the_module() {
        let x = [1.0f32; 16];
        let x = FloatMatrix::F32(dualgemm::formats::Matrix::new("x", 1, 16, &x[..]).unwrap());
        let names = |name| {
            let q = dualgemm::formats::quantize(name, &x, Producer::Torchao, Search::Plain).unwrap();
            torchao_tensors(&q).map(|t| t.name)
        };
        assert_eq!(names("m.weight"), ["m._weight_qdata", "m._weight_scale", "m._weight_per_tensor_scale"]);
        assert_eq!(names("w")[0], "_w_qdata");
    }
}
