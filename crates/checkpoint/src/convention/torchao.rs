//! torchao `NVFP4Tensor`, flattened into safetensors: `{module}._weight_qdata`, `._weight_scale`,
//! `._weight_per_tensor_scale`, `._weight_act_per_tensor_scale`, all multipliers.
//!
//! The file metadata describes each weight under its unflattened name:
//! `{"_type": "NVFP4Tensor", "_data": {"block_size": 16, "is_swizzled_scales": …}, …}`.
//!
//! Source: `torchao/prototype/{mx_formats/nvfp4_tensor.py,safetensors}` of <https://github.com/pytorch/ao>

use std::path::Path;

use dualgemm_formats::{BlockFormat, ScaleLayout};
use serde_json::Value;

use super::{Convention, ELSEWHERE, Evidence, Role, ScaleSense, config_error};
use crate::Error;
use crate::scheme::{Input, Pattern, Scheme, Schemes};

/// torchao's convention.
pub const CONVENTION: Convention = Convention {
    name: "torchao",
    doc: "torchao NVFP4Tensor: _weight_qdata, _weight_scale (linear or 128x4) and per-tensor scales as multipliers",
    sense: ScaleSense::Multiplier,
    needs_tensor_scale: false,
    fused_order: None,
    suffixes: &[
        ("._weight_qdata", Role::Weight),
        ("._weight_scale", Role::BlockScale),
        ("._weight_per_tensor_scale", Role::TensorScale),
        ("._weight_act_per_tensor_scale", Role::InputScale),
        (".bias", Role::Bias),
        (".weight", Role::Weight),
    ],
    harmless: &[ELSEWHERE],
    detect,
    schemes,
};

const TYPE: &str = "NVFP4Tensor";

fn detect(evidence: &Evidence<'_>) -> Option<String> {
    evidence.method_is("torchao").or_else(|| {
        let (name, _) = weights(evidence).find(|(_, v)| v["_type"] == TYPE)?;
        Some(format!("metadata of `{name}`"))
    })
}

/// Metadata entries that describe a tensor.
fn weights<'e>(evidence: &'e Evidence<'_>) -> impl Iterator<Item = (&'e str, Value)> {
    evidence.files.metadata().iter().filter_map(|(name, text)| {
        let value: Value = serde_json::from_str(text).ok()?;
        value.get("_type").is_some().then_some((name.as_str(), value))
    })
}

fn schemes(evidence: &Evidence<'_>) -> Result<Schemes, Error> {
    let file = evidence.files.root();
    let mut rules = Vec::new();
    for (name, value) in weights(evidence) {
        let Some(module) = name.strip_suffix(".weight") else { continue };
        let scheme = Scheme::or_refused(scheme(name, &value, file));
        rules.push((Pattern::Under(module.into()), scheme));
    }
    let otherwise = if rules.is_empty() {
        Scheme::blocks(BlockFormat::Nvfp4, Input::Optional)
    } else {
        Scheme::float("not described in the metadata")
    };
    Ok(Schemes::new(rules, otherwise))
}

/// What the metadata of a weight says.
fn scheme(name: &str, value: &Value, file: &Path) -> Result<Scheme, Error> {
    match value["_type"].as_str() {
        Some("Tensor") => return Ok(Scheme::float("a plain tensor in the metadata")),
        Some(TYPE) => {}
        _ => return Ok(Scheme::other(format!("tensor type {}", value["_type"]))),
    }
    let data = &value["_data"];
    let size = &data["block_size"];
    if size.as_u64() != Some(16) {
        return Err(config_error(file, format!("metadata {name} block_size"), size, "16"));
    }
    let swizzled = match &data["is_swizzled_scales"] {
        Value::Null => false,
        Value::Bool(b) => *b,
        other => {
            let key = format!("metadata {name} is_swizzled_scales");
            return Err(config_error(file, key, other, "true or false"));
        }
    };
    // Which of its tensors are there is the weight's choice.
    let parts = value["_tensor_data_names"].as_array();
    let needs_tensor_scale = parts.is_some_and(|parts| parts.iter().any(|part| part == "per_tensor_scale"));
    let scale_layout = if swizzled { ScaleLayout::Sf128x4 } else { ScaleLayout::Linear };
    // Activations are quantized with a scale of their own at run time; a stored one is optional.
    Ok(Scheme { scale_layout, needs_tensor_scale, ..Scheme::blocks(BlockFormat::Nvfp4, Input::Optional) })
}
