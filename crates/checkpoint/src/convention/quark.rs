//! AMD Quark: `X.weight` U8 and `X.weight_scale` U8 (ue8m0) for mxfp4; for nvfp4 F8_E4M3 with `X.weight_scale_2` and
//! `X.input_scale_2`, F32 multipliers. Older exports call mxfp4's scales `X.weight_quantizer.scale`.
//!
//! `config.json` holds one quantization for all modules, patterns of names with another, and names that are left out.
//! A list of two is a quantization whose scales are quantized by the second.
//!
//! Source: `vllm/model_executor/layers/quantization/quark` of <https://github.com/vllm-project/vllm>, for the older names
//! <https://github.com/amd/Quark/issues/44>

use std::path::Path;

use dualgemm_formats::BlockFormat;
use serde_json::Value;

use super::{Convention, ELSEWHERE, Evidence, FP8_INPUTS, Role, ScaleSense, config_error, left_out, object};
use crate::Error;
use crate::scheme::{Input, Pattern, Scheme, Schemes};

/// Quark's convention.
pub const CONVENTION: Convention = Convention {
    name: "quark",
    doc: "AMD Quark: weight and weight_scale, mxfp4, or nvfp4 with weight_scale_2 and input_scale_2 as multipliers",
    sense: ScaleSense::Multiplier,
    needs_tensor_scale: true,
    fused_order: None,
    suffixes: &[
        (".weight_scale_2", Role::TensorScale),
        (".weight_scale", Role::BlockScale),
        (".weight_quantizer.scale", Role::BlockScale),
        (".input_scale_2", Role::InputScale),
        (".bias", Role::Bias),
        (".weight", Role::Weight),
    ],
    harmless: &[ELSEWHERE, FP8_INPUTS],
    detect: |evidence| evidence.method_is("quark"),
    schemes,
};

/// Types of Quark, `quark/torch/quantization/config/type.py`, that are not in 4-bit blocks.
const OTHERS: &[&str] = &[
    "fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "int8", "uint8", "int4", "uint4", "int3", "int2",
    "int16", "uint16", "int32", "uint32", "mx", "mx6", "mx9", "bfp16", "bfloat16", "float16",
];

fn schemes(evidence: &Evidence<'_>) -> Result<Schemes, Error> {
    let Some((file, config)) = evidence.config() else {
        return Ok(Schemes::new(Vec::new(), Scheme::blocks(BlockFormat::Mxfp4, Input::Ignored)));
    };
    let mut rules = left_out((file, config), ["exclude"], |name, key| match name.strip_prefix("re:") {
        Some(_) => Pattern::target(name, file, key),
        None => Ok(Pattern::Glob(name.into())),
    })?;
    if let Some(layers) = config.get("layer_quant_config").filter(|layers| !layers.is_null()) {
        for (name, layer) in object(layers, file, "layer_quant_config", "an object of patterns")? {
            let scheme = Scheme::or_refused(scheme(layer, file, &format!("layer_quant_config.{name}")));
            rules.push((Pattern::Glob(name.clone()), scheme));
        }
    }
    // Of classes there is one that matters; a class of another model's own may be made of linear layers.
    if let Some(types) = config.get("layer_type_quant_config").filter(|types| !types.is_null()) {
        for (class, layer) in object(types, file, "layer_type_quant_config", "an object of classes")? {
            let key = format!("layer_type_quant_config.{class}");
            let scheme = match class.as_str() {
                "Conv2d" | "ConvTranspose2d" => continue,
                "Linear" => scheme(layer, file, &key),
                _ => Err(config_error(file, key, layer, "Linear, Conv2d or ConvTranspose2d as a class")),
            };
            rules.push((Pattern::Linear, Scheme::or_refused(scheme)));
        }
    }
    let global = scheme(&config["global_quant_config"], file, "global_quant_config");
    let otherwise = Scheme::or_refused(global);
    Ok(Schemes::new(rules, otherwise))
}

fn scheme(config: &Value, file: &Path, key: &str) -> Result<Scheme, Error> {
    let levels = |part: &str| match &config[part] {
        Value::Array(levels) => levels.iter().collect(),
        Value::Null => Vec::new(),
        one => vec![one],
    };
    let weight = levels("weight");
    let Some(first) = weight.first() else {
        return Ok(Scheme::float(format!("no `weight` in `{key}`")));
    };
    let dtype = &first["dtype"];
    if dtype != "fp4" {
        if OTHERS.iter().any(|name| dtype == name) {
            return Ok(Scheme::other(format!("dtype {dtype}")));
        }
        let valid = crate::error::list(std::iter::once(&"fp4").chain(OTHERS));
        return Err(config_error(file, format!("{key}.weight.dtype"), dtype, valid));
    }
    let format = match (weight.as_slice(), first["group_size"].as_u64()) {
        ([one], Some(32)) if one["scale_format"] == "e8m0" => BlockFormat::Mxfp4,
        ([_, scales], Some(16)) if scales["dtype"] == "fp8_e4m3" => BlockFormat::Nvfp4,
        _ => {
            let valid =
                "fp4 in groups of 32 with scale_format e8m0, or in groups of 16 with scales in fp8_e4m3";
            return Err(config_error(file, format!("{key}.weight"), &config["weight"], valid));
        }
    };
    // The tensor scale of the activations is in the file where the second level is static.
    let stored = matches!(levels("input_tensors").as_slice(), [_, scales] if scales["is_dynamic"] != true);
    let stored = stored && format == BlockFormat::Nvfp4;
    Ok(Scheme::blocks(format, if stored { Input::Required } else { Input::Ignored }))
}
