//! ComfyUI: ModelOpt's names with block scales stored in 128x4 order and the even element of each byte in the high nibble.
//!
//! Layers are declared one by one: a `X.comfy_quant` tensor of JSON bytes, `{"format": "nvfp4"}`, or
//! `_quantization_metadata` in the file metadata, `{"layers": {"X": {"format": "nvfp4"}}}` or one `format` for
//! all. Rows are stored padded with zeros to a multiple of 16.
//!
//! Source: `comfy/{float,ops,quant_ops}.py` of <https://github.com/comfyanonymous/ComfyUI>, `comfy_kitchen/tensor/nvfp4.py`
//! of <https://github.com/Comfy-Org/comfy-kitchen>

use std::path::Path;

use dualgemm_formats::{BlockFormat, ScaleLayout};
use serde_json::Value;

use super::modelopt::SUFFIXES;
use super::{Convention, ELSEWHERE, Evidence, ScaleSense, config_error};
use crate::scheme::{Input, Pattern, Scheme, Schemes};
use crate::{Error, NibbleOrder};

/// ComfyUI's convention.
pub const CONVENTION: Convention = Convention {
    name: "comfyui",
    doc: "ComfyUI: ModelOpt's names, block scales in 128x4 order on disk, even elements in high nibbles",
    sense: ScaleSense::Multiplier,
    needs_tensor_scale: true,
    fused_order: None,
    suffixes: SUFFIXES,
    harmless: &[ELSEWHERE, &[(MARKER, "names the format of its layer, which is read")]],
    detect,
    schemes,
};

const METADATA: &str = "_quantization_metadata";
const MARKER: &str = ".comfy_quant";

fn detect(evidence: &Evidence<'_>) -> Option<String> {
    if evidence.metadata(METADATA).is_some() {
        return Some(format!("`{METADATA}` in the file metadata"));
    }
    evidence.files.tensors().find(|t| t.name.ends_with(MARKER)).map(|t| format!("tensor `{}`", t.name))
}

fn schemes(evidence: &Evidence<'_>) -> Result<Schemes, Error> {
    let file = evidence.files.root();
    let not_json = |key: &str, e: serde_json::Error| Error::Config {
        file: file.into(),
        key: key.into(),
        found: format!("not JSON ({e})"),
        valid: r#"{"format": "nvfp4"}"#.into(),
    };
    let mut rules = Vec::new();
    let mut otherwise = Scheme::float("not declared in the file metadata");
    for t in evidence.files.tensors() {
        if let Some(module) = t.name.strip_suffix(MARKER) {
            let value: Value = serde_json::from_slice(t.bytes).map_err(|e| not_json(t.name, e))?;
            rules.push((Pattern::Under(module.into()), scheme(&value, file, t.name)));
        }
    }
    if let Some(text) = evidence.metadata(METADATA) {
        let value: Value = serde_json::from_str(text).map_err(|e| not_json(METADATA, e))?;
        match &value["layers"] {
            Value::Object(layers) => rules.extend(layers.iter().map(|(name, layer)| {
                (Pattern::Under(name.clone()), scheme(layer, file, &format!("{METADATA}.layers.{name}")))
            })),
            Value::Null if value.get("format").is_some() => otherwise = scheme(&value, file, METADATA),
            other => {
                return Err(config_error(file, format!("{METADATA}.layers"), other, "an object of layers"));
            }
        }
    } else if rules.is_empty() {
        // Named by the caller for a file without declarations.
        otherwise = nvfp4();
    }
    Ok(Schemes::new(rules, otherwise))
}

fn nvfp4() -> Scheme {
    Scheme {
        scale_layout: ScaleLayout::Sf128x4,
        nibble_order: NibbleOrder::HiLo,
        ..Scheme::blocks(BlockFormat::Nvfp4, Input::Optional)
    }
}

/// How formats start that are not in 4-bit blocks: `comfy/quant_ops.py`.
const OTHERS: [&str; 4] = ["float8_", "int8", "mxfp8", "int4"];

fn scheme(layer: &Value, file: &Path, key: &str) -> Scheme {
    let format = &layer["format"];
    match format.as_str() {
        Some("nvfp4") => nvfp4(),
        Some(other) if OTHERS.iter().any(|start| other.starts_with(start)) => {
            Scheme::other(format!("format {format}"))
        }
        _ => {
            let valid = format!("nvfp4, or one that starts with {}", crate::error::list(OTHERS));
            Scheme::or_refused(Err(config_error(file, format!("{key}.format"), format, valid)))
        }
    }
}
