//! Writing checkpoints: ModelOpt, compressed-tensors, GGUF, with their configuration files.
//!
//! Everything is written under a temporary name, synced and renamed; an error leaves nothing behind. A tensor
//! scale that a file held in the target's own sense is written back bit for bit; otherwise its reciprocal is.

pub mod atomic;

pub use crate::model_config::{to_gguf as config_to_gguf, to_metadata as config_to_metadata};

mod activations;
mod beside;
mod compressed_tensors;
mod export;
pub(crate) mod gguf;
mod kv_cache;
mod modelopt;
mod tensor;
mod weight;

pub use activations::write_activations;
pub use beside::beside;
pub use kv_cache::KvCache;
pub use tensor::{TensorData, TensorOut};
pub(crate) use weight::rotated_rows;
pub use weight::{WeightOut, WeightPart};

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use dualgemm_formats::{GlobalScale, GlobalScaleSource};
use serde_json::{Value, json};

use crate::convention::{METADATA_CONFIG, SHORT_CONFIG};
use crate::error::list;
use crate::module::Place;
use crate::safetensors::write_to;
use crate::{Dtype, Error, LinearSource};

/// One quantized linear layer to write.
#[derive(Debug, Clone)]
pub struct LinearOut<'a> {
    /// Name of the module, as in `model.layers.0.mlp.gate_proj`.
    pub module: String,
    /// `[out, in]`.
    pub weight: WeightOut<'a>,
    /// How many experts the weight holds one below the other, where ModelOpt's convention keeps them in one parameter.
    pub experts: Option<usize>,
    /// Tensor scale of the activations.
    pub input_scale: Option<GlobalScale>,
    /// `out` values, where the bias is not among the other tensors.
    pub bias: Option<Vec<f32>>,
}

impl<'a> LinearOut<'a> {
    /// A layer of a checkpoint under this name, its bias included.
    pub(crate) fn of(module: String, source: LinearSource<'a>) -> Result<Self, Error> {
        let (input_scale, bias) = (source.input_scale()?, source.bias.clone());
        let format = source.block_format()?;
        let weight = WeightOut::Stored(source.into(), format);
        Ok(Self { module, weight, experts: None, input_scale, bias })
    }
}

/// What is written: quantized layers, everything else, and the model's configuration.
#[derive(Debug, Clone, Default)]
pub struct Model<'a> {
    /// Quantized layers.
    pub linears: Vec<LinearOut<'a>>,
    /// Tensors that are written as they are.
    pub others: Vec<TensorOut<'a>>,
    /// `config.json`, whose `quantization_config` is replaced.
    pub config: Option<Value>,
    /// Names of tensors of the source that this model leaves out.
    pub skipped: Vec<String>,
    /// The first module among the other tensors that is quantized in a way that no configuration written here declares.
    /// A file of MLPs alone leaves it out with the rest.
    pub foreign: Option<Error>,
    /// Where the model comes from, for messages; without it they name what is written.
    pub source: Option<PathBuf>,
    /// Files that are copied beside safetensors in a directory, and whose tokenizer a GGUF file takes; see [`beside`].
    pub beside: Vec<PathBuf>,
    /// The number format of the KV cache; GGUF declares none.
    pub kv_cache: KvCache,
    /// Write a model without what the output has no room for, or what is not read: of GGUF, the gated MLPs alone. Without
    /// this, that is an error.
    pub mlp_only: bool,
}

dualgemm_formats::named! {
    /// A convention that can be written.
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Output {
        /// A directory with `config.json` and `hf_quant_config.json`, or one `.safetensors` file.
        Modelopt = "modelopt",
        /// A directory with `config.json`, or one `.safetensors` file.
        CompressedTensors = "compressed-tensors",
        /// One `.gguf` file.
        Gguf = "gguf",
    }
}

impl FromStr for Output {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Self::by_name(s).ok_or_else(|| Error::Name {
            what: "output convention",
            found: s.into(),
            valid: list(Self::ALL.map(Self::name)),
        })
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct WriteReport {
    /// Files, under their final names.
    pub files: Vec<PathBuf>,
    /// Number of tensors.
    pub tensors: usize,
    /// Names of tensors that the output cannot hold and that were left out.
    pub skipped: Vec<String>,
}

/// Writes a model. A path that ends in `.safetensors` becomes one file that carries its configuration in its
/// metadata; any other path becomes a directory, which must be new or empty. GGUF takes a `.gguf` path.
///
/// # Errors
/// If a block scale is NaN or negative, the convention cannot hold the model or declare all of it, the path does not fit
/// it, or the system refuses. Nothing is left behind then.
pub fn write(path: &Path, output: Output, model: &Model<'_>) -> Result<WriteReport, Error> {
    if let (false, [first, ..]) = (model.mlp_only, model.skipped.as_slice()) {
        return Err(Error::Unsupported {
            module: path.display().to_string(),
            found: format!(
                "a model without `{first}` and {} other tensors that are not read",
                model.skipped.len() - 1
            ),
            supported: "of a GGUF file the gated MLPs can be written, if asked for (`mlp_only`, on the command line --mlp-only)",
        });
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = model.linears.iter().find(|l| !seen.insert(&l.module)) {
        return Err(Error::header(
            path,
            "writable",
            format!("module `{}` twice", twice.module),
            "distinct names",
        ));
    }
    let fits =
        |l: &LinearOut<'_>, experts| output == Output::Modelopt && l.weight.rows().is_multiple_of(experts);
    let misfit = |l: &&LinearOut<'_>| l.experts.is_some_and(|experts| experts == 0 || !fits(l, experts));
    if let Some(linear) = model.linears.iter().find(misfit) {
        let (experts, rows) = (linear.experts.unwrap_or(0), linear.weight.rows());
        return Err(Error::Unsupported {
            module: format!("{}: {}", path.display(), linear.module),
            found: format!("one parameter of {rows} rows for {experts} experts in {}", output.name()),
            supported: "in ModelOpt's convention a number of experts that divides the rows is",
        });
    }
    let ends_in = |ending| path.extension().is_some_and(|e| e == ending);
    let wrong_ending = |found, valid| Err(Error::Path { file: path.into(), found, valid });
    match output {
        Output::Gguf if ends_in("gguf") => gguf::write(path, model),
        Output::Gguf => wrong_ending("does not end in .gguf".into(), "GGUF output needs a name that does"),
        Output::Modelopt | Output::CompressedTensors if ends_in("gguf") => wrong_ending(
            format!("ends in .gguf, which {} cannot be", output.name()),
            "give a directory or a .safetensors file",
        ),
        Output::Modelopt => {
            write_hf(path, model, modelopt::describe(model, model.source.as_deref().unwrap_or(path))?)
        }
        Output::CompressedTensors => write_hf(path, model, compressed_tensors::describe(model)?),
    }
}

/// What a safetensors convention makes of a model.
struct Described<'a> {
    tensors: Vec<TensorOut<'a>>,
    quantization_config: Value,
    files: Vec<(&'static str, Value)>,
}

fn write_hf<'m>(
    path: &Path,
    model: &'m Model<'_>,
    mut described: Described<'m>,
) -> Result<WriteReport, Error> {
    if let Some(foreign) = &model.foreign {
        return Err(foreign.clone());
    }
    described.tensors.extend(model.others.iter().cloned());
    let mut metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let tensors = described.tensors.len();
    let mut files = Vec::new();
    if path.extension().is_some_and(|e| e == "safetensors") {
        metadata.insert(METADATA_CONFIG.into(), described.quantization_config.to_string());
        metadata.extend(model.config.as_ref().map(config_to_metadata));
        write_to(path, &described.tensors, &metadata)?;
        files.push(path.to_path_buf());
    } else {
        let mut config = model.config.clone().unwrap_or_else(|| json!({}));
        if let Some(entries) = config.as_object_mut() {
            entries.remove(SHORT_CONFIG);
        }
        config["quantization_config"] = described.quantization_config;
        described.files.insert(0, ("config.json", config));
        let out = atomic::AtomicDir::create(path)?;
        let write = || -> Result<Vec<PathBuf>, Error> {
            write_to(&out.dir().join("model.safetensors"), &described.tensors, &metadata)?;
            for (name, value) in &described.files {
                let mut file = atomic::AtomicFile::create(&out.dir().join(name))?;
                let text = format!("{value:#}\n");
                std::io::Write::write_all(&mut file, text.as_bytes())
                    .map_err(|e| Error::io(path.join(name), "write", e))?;
                file.commit()?;
            }
            beside::copy(&model.beside, out.dir(), path)
        };
        let beside = write().map_err(|e| out.renamed(e))?;
        files.push(path.join("model.safetensors"));
        files.extend(described.files.iter().map(|(name, _)| path.join(name)));
        files.extend(beside);
        out.commit()?;
    }
    Ok(WriteReport { files, tensors, skipped: model.skipped.clone() })
}

/// Codes and block scales, which all safetensors conventions store alike.
fn push_weight<'m>(out: &mut Vec<TensorOut<'m>>, linear: &'m LinearOut<'_>, codes: &str, scale_dtype: Dtype) {
    let (module, w) = (&linear.module, &linear.weight);
    let mut push = |name, dtype, columns, part| {
        out.push(TensorOut::of_weights(format!("{module}{name}"), dtype, [w.rows(), columns], part, vec![w]));
    };
    push(codes, Dtype::U8, w.k() / 2, WeightPart::Codes);
    push(".weight_scale", scale_dtype, w.blocks(), WeightPart::Scales);
    if let Some(bias) = &linear.bias {
        out.push(TensorOut::floats(format!("{module}.bias"), [bias.len()], bias));
    }
}

/// A scale as a divisor: the file's own number where it held one.
fn divisor(scale: GlobalScale, tensor: &str) -> Result<f32, Error> {
    let value = match scale.source() {
        GlobalScaleSource::Divisor(held) => held,
        GlobalScaleSource::Multiplier | GlobalScaleSource::Absent => 1.0 / scale.value(),
    };
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(Error::ScaleValue {
        tensor: tensor.into(),
        what: "the reciprocal of a tensor scale",
        value: scale.value(),
    })
}

/// Names of the modules that stay in float: two-dimensional weights, experts that are one parameter, and the output head,
/// which may be tied to the embedding and so have no tensor of its own. Readers take a name for all modules below it.
fn float_modules(model: &Model<'_>) -> Vec<String> {
    let mut names: BTreeSet<String> = model
        .others
        .iter()
        .filter(|t| t.dtype.is_float())
        .filter_map(|t| match t.shape.len() {
            2 => t.name.strip_suffix(".weight"),
            3 => Place::parse(t.name.strip_suffix(".weight").unwrap_or(&t.name))
                .and_then(|_| t.name.strip_suffix(".weight").or(Some(&t.name))),
            _ => None,
        })
        .map(str::to_owned)
        .collect();
    if !model.linears.iter().any(|l| l.module == "lm_head" || l.module.starts_with("lm_head.")) {
        names.insert("lm_head".into());
    }
    names.into_iter().collect()
}
