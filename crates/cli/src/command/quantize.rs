//! `quantize IN OUT`: every 2-D float tensor of a safetensors file to nvfp4 as one producer does it, named as that
//! producer names it; everything else is copied.
//!
//! | producer | a tensor `M.weight` (or `M`) becomes |
//! |---|---|
//! | modelopt | `M.weight`, `M.weight_scale`, `M.weight_scale_2` (multiplier) |
//! | compressed-tensors | `M.weight_packed`, `M.weight_scale`, `M.weight_global_scale` (divisor) |
//! | te | as compressed-tensors: Transformer Engine has no file format, but a divisor |
//! | torchao | `M._weight_qdata`, `M._weight_scale`, `M._weight_per_tensor_scale` (multiplier) |
//! | ggml | one tensor of type 40 under its old name if OUT ends in `.gguf`, else as modelopt with a tensor scale of 1 |
//!
//! OUT declares the convention, so that `run` and `validate` read it without being told.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::Args;
use dualgemm::checkpoint::write::{self, LinearOut, Model};
use dualgemm::checkpoint::{Dtype, TensorFiles, TensorOut, TensorView, gguf, safetensors};
use dualgemm::formats::quantize::{quantize_group, relative_l2};
use dualgemm::formats::{FloatMatrix, FloatType, Producer, QuantizedMatrix, Search};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Value, json};

use super::Verdict;
use crate::files::{is_no_input, writable_model};
use crate::report::{Output, Table};

/// Arguments of `quantize`.
#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// Safetensors file, or directory of them, with float tensors.
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// What to write: a .safetensors file; a directory where the producer's convention has one; a .gguf file with
    /// --producer ggml.
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Whose arithmetic and naming to follow.
    #[arg(long, value_parser = parse_producer)]
    pub producer: Producer,
    /// Choose each block's scale by least squared error instead of by the producer's rule. The tensor scale is the
    /// producer's, or one that lets block scales reach 256 instead of 448, where that errs less and no block loses by it.
    #[arg(long, value_enum)]
    pub search: Option<SearchArg>,
    /// Give the gate and up projection of a layer one tensor scale, that of the larger of both, as ModelOpt and
    /// llm-compressor do when they export.
    #[arg(long)]
    pub share_gate_up: bool,
    /// Copy tensors whose name contains this text instead of quantizing them; may be repeated.
    #[arg(long, value_name = "TEXT")]
    pub skip: Vec<String>,
}

/// Spellings of the searches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SearchArg {
    /// Least squared error over all block scales, "four over six" among them.
    Mse,
}

fn parse_producer(name: &str) -> Result<Producer, String> {
    let names = || Producer::ALL.map(Producer::name).join(", ");
    Producer::ALL.into_iter().find(|p| p.name() == name).ok_or_else(|| format!("valid are {}", names()))
}

#[derive(Debug, Serialize)]
struct Report {
    input: PathBuf,
    output: PathBuf,
    producer: Producer,
    search: Search,
    tensors: Vec<TensorReport>,
    copied: Vec<String>,
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
    non_finite: usize,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table =
            Table::new(&["tensor", "shape", "tensor scale", "rel L2 plain", "rel L2", "not finite"]);
        for t in &self.tensors {
            table.row([
                t.name.clone(),
                format!("{:?}", t.shape),
                format!("{:e}", t.tensor_scale),
                format!("{:.5}", t.rel_l2_plain),
                format!("{:.5}", t.rel_l2),
                t.non_finite.to_string(),
            ]);
        }
        let (quantized, copied) = (self.tensors.len(), self.copied.len());
        writeln!(f, "{quantized} tensors quantized as {} does, {copied} copied", self.producer)?;
        write!(f, "{table}written to {}", self.output.display())
    }
}

/// Quantizes and writes.
pub fn run(args: &QuantizeArgs, output: &Output) -> anyhow::Result<Verdict> {
    let form = Form::of(args)?;
    let files = TensorFiles::open(&args.input)?;
    is_no_input("OUT", &args.out, files.paths().chain([args.input.as_path()]))?;
    if files.gguf_metadata().is_some() {
        bail!("{}: is a GGUF file; a safetensors file with float tensors is needed", args.input.display());
    }
    let search = args.search.map_or(Search::Plain, |SearchArg::Mse| Search::Mse);
    let skipped = |t: &TensorView<'_>| args.skip.iter().any(|part| t.name.contains(part));
    let (chosen, copied): (Vec<TensorView<'_>>, Vec<_>) =
        files.tensors().partition(|t| t.dtype.is_float() && t.shape.len() == 2 && !skipped(t));
    if chosen.is_empty() {
        let but = if args.skip.is_empty() { "" } else { " but for those to skip" };
        let input = args.input.display();
        bail!("{input}: holds no 2-D float tensor to quantize{but}; F32, F16 or BF16 is needed");
    }
    if let Some(nothing) = args.skip.iter().find(|text| files.tensors().all(|t| !t.name.contains(*text))) {
        bail!("--skip {nothing}: no tensor of {} has that in its name", args.input.display());
    }
    writable_model(&args.out)?;
    let groups = groups(chosen, args.share_gate_up);
    let bar = output.progress("quantize", groups.len());
    let quantized: Vec<(QuantizedMatrix<'static>, TensorReport)> = groups
        .par_iter()
        .map(|group| {
            let done = quantize_one_group(group, args.producer, search);
            bar.inc(1);
            done
        })
        .collect::<anyhow::Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect();
    bar.finish_and_clear();
    let (matrices, tensors): (Vec<_>, Vec<_>) = quantized.into_iter().unzip();
    let dtypes: Vec<FloatType> = tensors.iter().map(|t: &TensorReport| t.dtype).collect();
    form.write(args, matrices, &dtypes, &copied, files.config().map(|json| &json.value))?;
    output.emit(&Report {
        input: args.input.clone(),
        output: args.out.clone(),
        producer: args.producer,
        search,
        tensors,
        copied: copied.iter().map(|t| t.name.to_string()).collect(),
    })?;
    Ok(Verdict::Right)
}

/// Tensors that get one tensor scale: each alone, or gate and up of a layer together.
fn groups(tensors: Vec<TensorView<'_>>, share_gate_up: bool) -> Vec<Vec<TensorView<'_>>> {
    const PAIRS: [(&str, &str); 3] = [("gate_proj", "up_proj"), ("w1", "w3"), ("ffn_gate", "ffn_up")];
    let key = |name: &str| -> String {
        let fold = |part| PAIRS.iter().find(|pair| pair.1 == part).map_or(part, |pair| pair.0);
        name.split('.').map(fold).collect::<Vec<_>>().join(".")
    };
    let mut groups: Vec<(String, Vec<TensorView<'_>>)> = Vec::new();
    for tensor in tensors {
        let key = if share_gate_up { key(tensor.name) } else { tensor.name.into() };
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, group)) => group.push(tensor),
            None => groups.push((key, vec![tensor])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Quantizes tensors under one tensor scale and measures what that loses.
fn quantize_one_group(
    group: &[TensorView<'_>],
    producer: Producer,
    search: Search,
) -> anyhow::Result<Vec<(QuantizedMatrix<'static>, TensorReport)>> {
    let floats = group.iter().map(TensorView::float_matrix).collect::<Result<Vec<_>, _>>()?;
    let named: Vec<(&str, &FloatMatrix<'_>)> = group.iter().map(|t| t.name).zip(&floats).collect();
    let found = quantize_group(&named, producer, search)?;
    let plain = match search {
        Search::Plain => None,
        Search::Mse => Some(quantize_group(&named, producer, Search::Plain)?),
    };
    let report = |index: usize, q: &QuantizedMatrix<'_>| {
        let x = &floats[index];
        let rel_l2 = relative_l2(q, x);
        TensorReport {
            name: q.name().into(),
            shape: [q.rows(), q.k()],
            dtype: x.float_type(),
            tensor_scale: q.global_scale().value(),
            tensor_scale_held: q.global_scale().held(),
            rel_l2,
            rel_l2_plain: plain.as_ref().map_or(rel_l2, |plain| relative_l2(&plain[index], x)),
            non_finite: (0..x.rows())
                .map(|row| (0..x.cols()).filter(|&col| !x.value(row, col).is_finite()).count())
                .sum(),
        }
    };
    let reports: Vec<_> = found.iter().enumerate().map(|(index, q)| report(index, q)).collect();
    Ok(found.into_iter().zip(reports).collect())
}

/// How OUT is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// As a checkpoint of a convention: a .safetensors file or a directory.
    Checkpoint(write::Output),
    Torchao,
    Gguf,
}

impl Form {
    fn of(args: &QuantizeArgs) -> anyhow::Result<Self> {
        let out = args.out.display();
        Ok(match (args.producer, args.out.extension().and_then(|e| e.to_str())) {
            (Producer::Ggml, Some("gguf")) => Self::Gguf,
            (_, Some("gguf")) => bail!("{out}: .gguf is written with --producer ggml only; use .safetensors"),
            (Producer::ModelOpt | Producer::Ggml, _) => Self::Checkpoint(write::Output::Modelopt),
            (Producer::CompressedTensors | Producer::Te, _) => {
                Self::Checkpoint(write::Output::CompressedTensors)
            }
            (Producer::Torchao, Some("safetensors")) => Self::Torchao,
            (Producer::Torchao, _) => bail!("{out}: torchao tensors are written to a .safetensors file only"),
        })
    }

    fn write(
        self,
        args: &QuantizeArgs,
        matrices: Vec<QuantizedMatrix<'_>>,
        dtypes: &[FloatType],
        copied: &[TensorView<'_>],
        config: Option<&Value>,
    ) -> anyhow::Result<()> {
        let others: Vec<TensorOut<'_>> = copied.iter().map(TensorOut::from).collect();
        match self {
            Self::Checkpoint(convention) => {
                let linear = |weight: QuantizedMatrix<'static>| LinearOut {
                    module: weight.name().strip_suffix(".weight").unwrap_or(weight.name()).into(),
                    weight: weight.into(),
                    input_scale: None,
                    bias: None,
                };
                let linears = matrices.into_iter().map(|m| linear(m.into_owned())).collect();
                let model = Model { linears, others, config: config.cloned(), ..Model::default() };
                write::write(&args.out, convention, &model)?;
            }
            Self::Torchao => {
                let mut tensors: Vec<TensorOut<'_>> = matrices.iter().flat_map(torchao_tensors).collect();
                let mut metadata = torchao_metadata(&matrices, dtypes, copied);
                metadata.extend(config.map(write::config_to_metadata));
                tensors.extend(others);
                safetensors::write_to(&args.out, &tensors, &metadata)?;
            }
            Self::Gguf => {
                let dtype =
                    Dtype::from_ggml(Dtype::GGML_NVFP4).context("this build knows no GGUF NVFP4 type")?;
                let mut tensors = Vec::new();
                for m in &matrices {
                    let bytes = dualgemm::formats::gguf::from_matrix(m)?;
                    tensors.push(TensorOut::new(m.name(), dtype, [m.rows(), m.k()], bytes));
                }
                tensors.extend(others);
                let (_, metadata) = write::config_to_gguf(config, "unknown");
                gguf::write_to(&args.out, &metadata, &tensors)?;
            }
        }
        Ok(())
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

/// What torchao's reader needs to put its tensors together again; `dtypes` are those of the floats, to which it
/// dequantizes.
fn torchao_metadata(
    matrices: &[QuantizedMatrix<'_>],
    dtypes: &[FloatType],
    copied: &[TensorView<'_>],
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
    let entries = matrices.iter().zip(dtypes).map(|(m, &dtype)| (m.name(), quantized(dtype).to_string()));
    let plain = copied.iter().map(|t| (t.name, json!({ "_type": "Tensor" }).to_string()));
    let mut metadata: BTreeMap<String, String> =
        entries.chain(plain).map(|(name, entry)| (name.to_string(), entry)).collect();
    let names: Vec<&String> = metadata.keys().collect();
    metadata.insert("tensor_names".into(), json!(names).to_string());
    metadata
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view<'a>(name: &'a str, shape: &'a [usize], bytes: &'a [u8]) -> TensorView<'a> {
        TensorView { name, dtype: Dtype::F32, shape, bytes }
    }

    #[test]
    fn only_gate_and_up_of_one_layer_share() {
        let (shape, bytes) = ([1, 16], [0u8; 64]);
        let names =
            ["l.0.gate_proj.weight", "l.0.up_proj.weight", "l.1.gate_proj.weight", "l.0.down_proj.weight"];
        let views = || names.map(|name| view(name, &shape, &bytes)).to_vec();
        let sizes = |shared| groups(views(), shared).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(sizes(true), [2, 1, 1]);
        assert_eq!(sizes(false), [1, 1, 1, 1]);
    }

    /// The very entry that torchao 0.18 writes: without one of the fields it cannot make the tensor.
    #[test]
    fn torchao_finds_every_field_of_its_tensor() {
        let x = FloatMatrix::F32(dualgemm::formats::Matrix::new("x", 1, 16, vec![1.0; 16]).unwrap());
        let q = dualgemm::formats::quantize("m.weight", &x, Producer::Torchao, Search::Plain).unwrap();
        let metadata = torchao_metadata(&[q], &[FloatType::Bf16], &[]);
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
