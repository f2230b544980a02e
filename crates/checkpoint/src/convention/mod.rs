//! Conventions: what each producer calls its tensors, which way round it stores scales, and what its
//! configuration says. Only here are scales inverted and names given meaning.
//!
//! A checkpoint's convention is declared by its `config.json`, `hf_quant_config.json`, file metadata or file
//! type, or named by the caller. It is never guessed from tensor names and never taken from `recipe.yaml`.

pub mod auto_round;
pub mod comfyui;
pub mod compressed_tensors;
pub mod deepseek;
pub mod fp8_mxfp4;
pub mod gguf;
pub mod gpt_oss;
pub mod mlx;
pub mod modelopt;
pub mod quark;
pub mod torchao;
mod transforms;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use dualgemm_formats::scalar::{e2m1, e4m3};
use dualgemm_formats::{BlockFormat, GlobalScale};
use serde_json::{Map, Value};

use crate::error::list;
use crate::scheme::{Pattern, Scheme, Schemes, Transform};
use crate::{Dtype, Error, GateUpOrder, TensorFiles, json};

/// What a tensor is to its module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Role {
    Weight,
    BlockScale,
    TensorScale,
    InputScale,
    Bias,
    /// Something that changes the weights' meaning and is not handled.
    Transform,
}

impl Role {
    pub(crate) const ALL: [Self; 6] =
        [Self::Weight, Self::BlockScale, Self::TensorScale, Self::InputScale, Self::Bias, Self::Transform];
}

/// Which way round a producer stores tensor scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleSense {
    /// `value = code · block scale · scale`.
    Multiplier,
    /// `value = code · block scale / scale`.
    Divisor,
    /// `value = code · block scale · scale / 2688`: the magnitude of the largest code under the largest block scale.
    Amax,
}

impl ScaleSense {
    pub(crate) fn scale(self, held: f32) -> GlobalScale {
        match self {
            Self::Multiplier => GlobalScale::multiplier(held),
            Self::Divisor => GlobalScale::divisor(held),
            Self::Amax => GlobalScale::multiplier(held / (e2m1::MAX * e4m3::MAX)),
        }
    }
}

/// One producer's convention.
#[derive(Debug)]
pub struct Convention {
    /// Name, as given on a command line.
    pub name: &'static str,
    /// What it is and who writes it.
    pub doc: &'static str,
    /// Which way round tensor scales are stored.
    pub sense: ScaleSense,
    /// Whether an nvfp4 weight without a tensor scale is a fault; without one the scale is 1.
    pub(crate) needs_tensor_scale: bool,
    /// Order of a fused gate/up tensor where the format itself fixes it.
    pub(crate) fused_order: Option<GateUpOrder>,
    /// Endings of tensor names; those that start with `_` or are empty belong to parameters without a `.weight`.
    pub(crate) suffixes: &'static [(&'static str, Role)],
    /// Endings of further tensor names under a weight's, and why they change nothing for it.
    pub(crate) harmless: &'static [&'static [Harmless]],
    /// Says what declares this convention, if anything does.
    pub(crate) detect: fn(&Evidence<'_>) -> Option<String>,
    schemes: fn(&Evidence<'_>) -> Result<Schemes, Error>,
}

/// Ending of a tensor name and why such a tensor changes nothing for the weight that it lies under.
pub(crate) type Harmless = (&'static str, &'static str);

/// What belongs to other parts of a model than to the linear layer whose name it carries, whoever writes it.
pub(crate) const ELSEWHERE: &[Harmless] = &[
    ("k_proj.k_scale", "scales keys on their way into the cache"),
    ("v_proj.v_scale", "scales values on their way into the cache"),
    ("k_proj.k_bias", "shifts keys on their way into the cache"),
    ("v_proj.v_bias", "shifts values on their way into the cache"),
    ("k_proj.output_scale", "the older name of k_scale"),
    ("v_proj.output_scale", "the older name of v_scale"),
    ("k_proj.output_quantizer.scale", "Quark's older name of k_scale"),
    ("v_proj.output_quantizer.scale", "Quark's older name of v_scale"),
    ("gate.e_score_correction_bias", "is added to a router's scores once they are there"),
];
/// What compressed-tensors, AutoRound and Quark say of activations in fp8.
pub(crate) const FP8_INPUTS: &[Harmless] = &[(".input_scale", "scales activations in fp8, not weights")];

/// Every convention, in the order in which they are listed to people.
pub const CONVENTIONS: &[&Convention] = &[
    &modelopt::CONVENTION,
    &compressed_tensors::CONVENTION,
    &torchao::CONVENTION,
    &gguf::CONVENTION,
    &comfyui::CONVENTION,
    &gpt_oss::CONVENTION,
    &deepseek::CONVENTION,
    &fp8_mxfp4::CONVENTION,
    &quark::CONVENTION,
    &auto_round::CONVENTION,
    &mlx::CONVENTION,
];

impl Convention {
    /// The convention of that name.
    pub fn named(name: &str) -> Result<&'static Self, Error> {
        CONVENTIONS.iter().copied().find(|c| c.name == name).ok_or_else(|| Error::Name {
            what: "convention",
            found: name.into(),
            valid: names(),
        })
    }

    /// What the files say of each module under this convention.
    pub(crate) fn schemes(&self, evidence: &Evidence<'_>) -> Result<Schemes, Error> {
        Ok((self.schemes)(evidence)?.with_transforms(evidence.transforms()))
    }

    /// Splits a tensor name into module and role.
    pub(crate) fn split<'n>(&self, tensor: &'n str) -> Option<(&'n str, Role)> {
        self.suffixes.iter().find_map(|&(suffix, role)| {
            let module = tensor.strip_suffix(suffix).filter(|m| !m.is_empty())?;
            (suffix.starts_with('.') || crate::module::ends_in_projection(module)).then_some((module, role))
        })
    }

    /// Whether a tensor under a weight's name is known to change nothing for it.
    pub(crate) fn is_harmless(&self, tensor: &str) -> bool {
        self.harmless.iter().copied().flatten().any(|(ending, _)| tensor.ends_with(ending))
    }

    /// The name a tensor of that role would have.
    pub(crate) fn tensor_name(
        &self,
        module: &str,
        weight: Option<&str>,
        role: Role,
        scheme: &Scheme,
    ) -> String {
        // Parameters without `.weight` take the endings without a dot.
        let dotted = weight != Some(module);
        let names = scheme.names.unwrap_or(self.suffixes);
        let suffix = names.iter().find(|(s, r)| *r == role && s.starts_with('.') == dotted);
        format!("{module}{}", suffix.map_or("", |(s, _)| s))
    }

    /// The convention that the files declare. Fails if nothing declares one, or several things declare different ones.
    pub(crate) fn detect(evidence: &Evidence<'_>) -> Result<&'static Self, Error> {
        let found: Vec<(&'static Self, String)> =
            CONVENTIONS.iter().filter_map(|&c| (c.detect)(evidence).map(|why| (c, why))).collect();
        let fault =
            |found| Err(Error::Convention { file: evidence.files.root().into(), found, valid: names() });
        match found.as_slice() {
            [(convention, _)] => Ok(convention),
            [] => match evidence.method() {
                Some((file, method)) => fault(format!(
                    "{} declares quant_method {method}, which no convention has",
                    file.display()
                )),
                None => match float_weights(evidence.files) {
                    Some(dtype) => Err(Error::Floats { file: evidence.files.root().into(), dtype }),
                    None => fault(format!(
                        "no config.json, hf_quant_config.json or file metadata declares how it is quantized{}",
                        hint(evidence.files)
                    )),
                },
            },
            several => {
                let all = list(several.iter().map(|(c, why)| format!("{} ({why})", c.name)));
                fault(format!("declares several conventions: {all}"))
            }
        }
    }
}

fn names() -> String {
    list(CONVENTIONS.iter().map(|c| c.name))
}

/// What the tensors look like: a hint for a person, never a decision.
fn hint(files: &TensorFiles) -> String {
    let distinctive = [
        ("modelopt", ".weight_scale_2"),
        ("compressed-tensors", ".weight_packed"),
        ("torchao", "._weight_qdata"),
    ];
    let found = distinctive.iter().find_map(|(name, suffix)| {
        files.tensors().find(|t| t.name.ends_with(suffix)).map(|t| (name, t.name))
    });
    found.map_or(String::new(), |(name, tensor)| format!(" (`{tensor}` looks like {name})"))
}

/// The type of the first weight, if all are floats.
fn float_weights(files: &TensorFiles) -> Option<Dtype> {
    let mut weights = files.tensors().filter(|t| t.name.contains("weight")).peekable();
    let first = weights.peek()?.dtype;
    weights.all(|t| t.dtype.is_float()).then_some(first)
}

/// Everything that may declare a convention.
pub(crate) struct Evidence<'a> {
    pub(crate) files: &'a TensorFiles,
    /// `quantization_config` of `config.json` (`quantization` where Mistral or MLX wrote it), or of the file metadata of a
    /// lone file.
    config: Option<(PathBuf, Cow<'a, Value>)>,
}

/// Key of the file metadata that carries a `quantization_config` in a file that stands alone.
pub(crate) const METADATA_CONFIG: &str = "quantization_config";
/// What Mistral and MLX call it.
pub(crate) const SHORT_CONFIG: &str = "quantization";

/// What a configuration says of quantization, and what its part for the language model says. transformers and vLLM read the
/// second only where the first is absent, and so does this crate.
pub(crate) fn quantization(config: &Value) -> [Option<&Value>; 2] {
    fn of(part: &Value) -> Option<&Value> {
        let entry = |key| part.get(key).filter(|entry: &&Value| !entry.is_null());
        entry(METADATA_CONFIG).or_else(|| entry(SHORT_CONFIG))
    }
    [of(config), config.get("text_config").and_then(of)]
}

impl<'a> Evidence<'a> {
    pub(crate) fn new(files: &'a TensorFiles) -> Result<Self, Error> {
        let mut config = None;
        // A file that describes itself is not described by what happens to lie beside it.
        if let Some(text) = files.metadata().get(METADATA_CONFIG) {
            let key = format!("__metadata__.{METADATA_CONFIG}");
            let value = json::object(text.as_bytes(), files.root(), &key)?;
            config = Some((files.root().to_path_buf(), Cow::Owned(value)));
        } else if let Some(json) = files.config() {
            let [model, language_model] = quantization(&json.value);
            config = model.or(language_model).map(|value| (json.path.clone(), Cow::Borrowed(value)));
        }
        Ok(Self { files, config })
    }

    /// The quantization configuration and the file it is in.
    pub(crate) fn config(&self) -> Option<(&Path, &Value)> {
        self.config.as_ref().map(|(path, value)| (path.as_path(), value.as_ref()))
    }

    /// What says that the files are quantized, whichever way.
    pub(crate) fn declared(&self) -> Option<String> {
        let by_config = || Some(format!("`{METADATA_CONFIG}` in {}", self.config()?.0.display()));
        let by_file = || Some(self.files.hf_quant_config()?.path.display().to_string());
        by_config().or_else(by_file)
    }

    pub(crate) fn method(&self) -> Option<(&Path, &Value)> {
        let (path, config) = self.config()?;
        config.get("quant_method").map(|m| (path, m))
    }

    /// Says where the configuration names this method, if it does.
    pub(crate) fn method_is(&self, method: &str) -> Option<String> {
        let (path, value) = self.method()?;
        (value.as_str() == Some(method)).then(|| format!("quant_method in {}", path.display()))
    }

    /// What the model does to the inputs and outputs of modules at run time.
    fn transforms(&self) -> Vec<Transform> {
        modelopt::declared(self).into_iter().flat_map(|(file, config)| transforms::of(config, file)).collect()
    }

    /// An entry of the safetensors metadata.
    pub(crate) fn metadata(&self, key: &str) -> Option<&'a str> {
        self.files.metadata().get(key).map(String::as_str)
    }
}

/// A configuration value that cannot be used.
pub(crate) fn config_error(
    file: &Path,
    key: impl Into<String>,
    found: &Value,
    valid: impl Into<String>,
) -> Error {
    Error::Config { file: file.into(), key: key.into(), found: found.to_string(), valid: valid.into() }
}

pub(super) fn object<'v>(
    value: &'v Value,
    file: &Path,
    key: &str,
    valid: &str,
) -> Result<&'v Map<String, Value>, Error> {
    value.as_object().ok_or_else(|| config_error(file, key, value, valid))
}

/// A value that a format fixes.
pub(super) fn fits(
    found: &Value,
    valid: impl Into<Value>,
    format: BlockFormat,
    file: &Path,
    key: impl FnOnce() -> String,
) -> Result<(), Error> {
    let valid = valid.into();
    if *found == valid {
        return Ok(());
    }
    Err(config_error(file, key(), found, format!("{valid} for {format}")))
}

/// What the lists under some keys leave in floats; `pattern` makes one of a name.
pub(super) fn left_out<const N: usize>(
    (file, config): (&Path, &Value),
    keys: [&str; N],
    pattern: impl Fn(&str, &str) -> Result<Pattern, Error>,
) -> Result<Vec<(Pattern, Scheme)>, Error> {
    let mut rules = Vec::new();
    for key in keys {
        for name in strings(config, key, file)? {
            rules.push((pattern(name, key)?, Scheme::float(format!("`{name}` in `{key}`"))));
        }
    }
    Ok(rules)
}

/// A list of strings; absent and null are empty.
pub(super) fn strings<'v>(config: &'v Value, key: &str, file: &Path) -> Result<Vec<&'v str>, Error> {
    let value = match config.get(key) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(value) => value,
    };
    let strings = value.as_array().and_then(|a| a.iter().map(Value::as_str).collect());
    strings.ok_or_else(|| config_error(file, key, value, "a list of strings"))
}
