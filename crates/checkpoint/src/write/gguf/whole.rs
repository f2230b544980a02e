//! A whole model of a family that llama.cpp knows, under llama.cpp's names and in its order.
//!
//! llama.cpp rotates neighbouring elements of q and k in models of the Llama family, Hugging Face's code those half a head
//! apart: the rows of both are put in the other order. Norms and biases are f32 there, other floats stay as they are.
//!
//! Sources: `gguf-py/gguf/{constants,tensor_mapping}.py` and `convert_hf_to_gguf.py` of
//! <https://github.com/ggml-org/llama.cpp>

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use super::hparams::Hparams;
use super::push_group;
use crate::error::list;
use crate::write::{Model, WeightPart};
use crate::{Dtype, Error, TensorData, TensorOut};

/// A family of models that can be written whole.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    /// Whether q and k are in llama.cpp's order of rotation.
    rotated: bool,
    /// Modules of a layer that may have a bias, by llama.cpp's names.
    biases: &'static [&'static str],
    /// Modules of each layer beside [`LAYER`].
    more: &'static [&'static str],
}

const ALL_BIASES: &[&str] = &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];

const FAMILIES: &[Family] = &[
    Family { model_type: "llama", architecture: "llama", rotated: true, biases: ALL_BIASES, more: &[] },
    Family { model_type: "mistral", architecture: "llama", rotated: true, biases: ALL_BIASES, more: &[] },
    Family {
        model_type: "qwen2",
        architecture: "qwen2",
        rotated: false,
        biases: &["attn_q", "attn_k", "attn_v"],
        more: &[],
    },
    Family {
        model_type: "qwen3",
        architecture: "qwen3",
        rotated: false,
        biases: &[],
        more: &["attn_q_norm", "attn_k_norm"],
    },
];

/// Modules of a layer: Hugging Face's name and llama.cpp's.
const LAYER: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];
const MORE: &[(&str, &str)] = &[("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm")];
const MODEL: &[(&str, &str)] =
    &[("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];

impl Family {
    /// The family of a model, and its configuration.
    pub(super) fn of<'m>(model: &'m Model<'_>, path: &Path) -> Result<(&'static Self, &'m Value), Error> {
        let found = model.config.as_ref().and_then(|config| Some((config, config.get("model_type")?)));
        let Some((config, name)) = found else {
            let found = "a whole model without a config.json that names its type as GGUF";
            return Err(refused(path, found.into()));
        };
        match FAMILIES.iter().find(|family| name == family.model_type) {
            Some(family) => Ok((family, config)),
            None => Err(refused(path, format!("a whole model of type {name} as GGUF"))),
        }
    }

    /// llama.cpp's name of a module, without a suffix.
    fn name(&self, module: &str) -> Option<String> {
        if let Some((_, name)) = MODEL.iter().find(|(theirs, _)| *theirs == module) {
            return Some((*name).into());
        }
        let (layer, part) = module.strip_prefix("model.layers.")?.split_once('.')?;
        let layer: usize = layer.parse().ok()?;
        let more = MORE.iter().filter(|(_, name)| self.more.contains(name));
        let (_, name) = LAYER.iter().chain(more).find(|(theirs, _)| *theirs == part)?;
        Some(format!("blk.{layer}.{name}"))
    }

    fn heads(&self, name: &str, hparams: &Hparams) -> Option<usize> {
        let heads = match name.rsplit('.').next() {
            Some("attn_q") => hparams.heads,
            Some("attn_k") => hparams.kv_heads,
            _ => return None,
        };
        self.rotated.then_some(heads)
    }
}

fn refused(path: &Path, found: String) -> Error {
    let known = "llama, mistral, qwen2 and qwen3 are, with the tensors of these models and no others; of other models \
                 the gated MLPs can be written, if asked for (--mlp-only)";
    Error::Unsupported { module: path.display().to_string(), found, supported: known }
}

pub(super) fn tensors<'m>(
    path: &Path,
    model: &'m Model<'_>,
    family: &Family,
    hparams: &Hparams,
) -> Result<Vec<TensorOut<'m>>, Error> {
    if let Some(foreign) = &model.foreign {
        return Err(foreign.clone());
    }
    let mut tensors = Vec::new();
    for linear in &model.linears {
        let name = family.name(&linear.module).ok_or_else(|| unknown(path, &linear.module))?;
        let part = match family.heads(&name, hparams) {
            Some(heads) => {
                check_heads(path, &linear.module, linear.weight.rows(), heads)?;
                WeightPart::GgufHeads(heads)
            }
            None => WeightPart::GgufBlocks,
        };
        let mut skipped = Vec::new();
        push_group(&mut tensors, &mut skipped, &name, &[(None, linear)], &BTreeMap::new(), part, path)?;
    }
    for tensor in &model.others {
        // Frequencies that the configuration gives, and a head that is the embedding.
        let computed = tensor.name.ends_with("rotary_emb.inv_freq");
        if computed || (hparams.tied && tensor.name == "lm_head.weight") {
            continue;
        }
        tensors.push(float(path, tensor, family, hparams)?);
    }
    check_whole(path, &tensors, family, hparams)?;
    check_biases(path, &tensors)?;
    if let Some(factors) = &hparams.rope_factors {
        tensors.push(TensorOut::floats("rope_freqs.weight", [factors.len()], factors));
    }
    Ok(tensors)
}

fn unknown(path: &Path, tensor: &str) -> Error {
    refused(path, format!("a whole model with `{tensor}` as GGUF"))
}

/// A tensor of floats, under its new name.
fn float<'m>(
    path: &Path,
    tensor: &TensorOut<'m>,
    family: &Family,
    hparams: &Hparams,
) -> Result<TensorOut<'m>, Error> {
    let TensorData::Bytes(bytes) = &tensor.data else { return Err(unknown(path, &tensor.name)) };
    let (module, suffix) = tensor.name.rsplit_once('.').ok_or_else(|| unknown(path, &tensor.name))?;
    let name = family.name(module).ok_or_else(|| unknown(path, &tensor.name))?;
    let last = name.rsplit('.').next().unwrap_or_default();
    let dimensions = if suffix == "bias" || last.ends_with("_norm") { 1 } else { 2 };
    let known = suffix == "weight" || (suffix == "bias" && family.biases.contains(&last));
    if !known || !tensor.dtype.is_float() || tensor.shape.len() != dimensions {
        let found = format!("{} of {} {:?}", tensor.name, tensor.dtype, tensor.shape);
        return Err(unknown(path, &found));
    }
    if name == "token_embd" && tensor.shape[0] != hparams.vocabulary {
        return Err(Error::Config {
            file: path.into(),
            key: "`vocab_size` of the model's configuration".into(),
            found: hparams.vocabulary.to_string(),
            valid: format!("{}, the rows of {}", tensor.shape[0], tensor.name),
        });
    }
    let mut out = TensorOut { name: format!("{name}.{suffix}"), ..tensor.clone() };
    if dimensions == 1 {
        let view = crate::TensorView { name: &tensor.name, dtype: tensor.dtype, shape: &tensor.shape, bytes };
        out = TensorOut::floats(out.name, tensor.shape.clone(), &view.to_f32("a norm or bias")?);
    }
    if let Some(heads) = family.heads(&name, hparams) {
        let rows = tensor.shape[0];
        check_heads(path, &tensor.name, rows, heads)?;
        if let TensorData::Bytes(bytes) = out.data {
            out.data = TensorData::Heads { bytes, rows, heads };
        }
    }
    Ok(out)
}

fn check_heads(path: &Path, name: &str, rows: usize, heads: usize) -> Result<(), Error> {
    if heads > 0 && rows > 0 && rows.is_multiple_of(2 * heads) {
        return Ok(());
    }
    Err(Error::header(
        path,
        "writable",
        format!("{rows} rows of `{name}` for {heads} heads"),
        "an even number of rows for each head, as config.json counts them",
    ))
}

/// llama.cpp stops where an NVFP4 projection of an MLP has a tensor scale and a bias (`build_ffn` of `llama-graph.cpp`).
fn check_biases(path: &Path, tensors: &[TensorOut<'_>]) -> Result<(), Error> {
    let names: BTreeSet<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    let of_mlp = |t: &&TensorOut<'_>| {
        let stem = t.name.strip_suffix(".weight").filter(|stem| stem.contains(".ffn_"));
        let has = |stem: &str, suffix| names.contains(format!("{stem}.{suffix}").as_str());
        t.dtype.ggml_id() == Some(Dtype::GGML_NVFP4)
            && stem.is_some_and(|stem| has(stem, "scale") && has(stem, "bias"))
    };
    match tensors.iter().find(of_mlp) {
        Some(t) => Err(Error::Unsupported {
            module: path.display().to_string(),
            found: format!("`{}` in NVFP4 with a tensor scale and a bias", t.name),
            supported: "llama.cpp loads NVFP4 projections of an MLP with one of the two; `quantize --producer ggml` \
                        writes no tensor scales",
        }),
        None => Ok(()),
    }
}

/// llama.cpp refuses a file that lacks a tensor or has one more: better that here.
fn check_whole(
    path: &Path,
    tensors: &[TensorOut<'_>],
    family: &Family,
    hparams: &Hparams,
) -> Result<(), Error> {
    let names: BTreeSet<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    let of_layer = |layer| {
        let more = family.more.iter().copied();
        LAYER.iter().map(|(_, name)| *name).chain(more).map(move |name| format!("blk.{layer}.{name}.weight"))
    };
    let whole = ["token_embd.weight", "output_norm.weight"].map(String::from).into_iter();
    let head = (!hparams.tied).then(|| "output.weight".into());
    let needed = whole.chain(head).chain((0..hparams.layers).flat_map(of_layer));
    let missing: Vec<String> = needed.filter(|name| !names.contains(name.as_str())).collect();
    if !missing.is_empty() {
        return Err(refused(path, format!("a model without {} as GGUF", list(missing))));
    }
    let beyond = |name: &&str| {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        layer.is_some_and(|layer| layer >= hparams.layers)
    };
    match names.iter().find(|name| beyond(name)) {
        Some(name) => Err(refused(path, format!("`{name}` beside {} layers as GGUF", hparams.layers))),
        None => Ok(()),
    }
}
