//! NVIDIA ModelOpt: `X.weight` U8, `X.weight_scale` F8_E4M3, `X.weight_scale_2` F32 multiplier,
//! `X.input_scale` F32 multiplier.
//!
//! Experts that stay one parameter are `X` itself, with `X_weight_scale` and so on. The algorithm is in
//! `hf_quant_config.json` (`quantization.quant_algo`) and in `config.json` (`quantization_config.quant_algo`);
//! `MIXED_PRECISION` names one per module. Where both files, or `quant_algo` and `config_groups`, say what blocks
//! are, each is held to what the algorithm means.
//!
//! Source: `modelopt/torch/export/{quant_utils,convert_hf_config}.py` of
//! <https://github.com/NVIDIA/Model-Optimizer>

use std::path::Path;

use dualgemm_formats::BlockFormat;
use serde_json::{Value, json};

use super::{Convention, Evidence, Role, ScaleSense, config_error, object, strings};
use crate::Error;
use crate::scheme::{Input, Pattern, Scheme, Schemes, Weights};

/// ModelOpt's convention.
pub const CONVENTION: Convention = Convention {
    name: "modelopt",
    doc: "NVIDIA ModelOpt: weight, weight_scale, weight_scale_2 and input_scale, tensor scales as multipliers",
    sense: ScaleSense::Multiplier,
    needs_tensor_scale: true,
    fused_order: None,
    suffixes: SUFFIXES,
    detect,
    schemes,
};

/// Endings of ModelOpt's tensor names, which ComfyUI shares.
pub(super) const SUFFIXES: &[(&str, Role)] = &[
    (".weight_scale_2", Role::TensorScale),
    (".weight_scale", Role::BlockScale),
    (".input_scale", Role::InputScale),
    (".pre_quant_scale", Role::Transform),
    (".svdquant_lora_a", Role::Transform),
    (".svdquant_lora_b", Role::Transform),
    (".bias", Role::Bias),
    (".weight", Role::Weight),
    ("_weight_scale_2", Role::TensorScale),
    ("_weight_scale", Role::BlockScale),
    ("_input_scale", Role::InputScale),
    ("_pre_quant_scale", Role::Transform),
    ("_bias", Role::Bias),
    ("", Role::Weight),
];

/// What each `quant_algo` makes of weights and activations. W4A8 activations are fp8: their `input_scale` is
/// not one of nvfp4 and is left alone.
const ALGORITHMS: &[(&str, Option<(BlockFormat, Input)>)] = &[
    ("NVFP4", Some((BlockFormat::Nvfp4, Input::Required))),
    ("W4A16_NVFP4", Some((BlockFormat::Nvfp4, Input::Ignored))),
    ("NVFP4_AWQ", Some((BlockFormat::Nvfp4, Input::Required))),
    ("NVFP4_SVD", Some((BlockFormat::Nvfp4, Input::Required))),
    ("W4A8_NVFP4_FP8", Some((BlockFormat::Nvfp4, Input::Ignored))),
    ("W4A8_MXFP4_FP8", Some((BlockFormat::Mxfp4, Input::Ignored))),
    ("MXFP4", Some((BlockFormat::Mxfp4, Input::Ignored))),
    ("MXFP8", None),
    ("FP8", None),
    ("FP8_PER_CHANNEL_PER_TOKEN", None),
    ("FP8_PB_WO", None),
    ("INT4_AWQ", None),
    ("W4A16_AWQ", None),
    ("W4A8_AWQ", None),
    ("INT8_SQ", None),
    ("W8A8_SQ_PER_CHANNEL", None),
    ("W8A16", None),
    ("FP8_PB_REAL", None),
];
const MIXED: &str = "MIXED_PRECISION";

fn detect(evidence: &Evidence<'_>) -> Option<String> {
    if let Some(why) = evidence.method_is("modelopt").or_else(|| evidence.method_is("modelopt_fp4")) {
        return Some(why);
    }
    // Exports before `quantization_config` existed declare themselves in this file alone.
    let json = evidence.files.hf_quant_config()?;
    let quantized = json.value.pointer("/quantization/quant_algo").is_some_and(|a| !a.is_null());
    (quantized && evidence.method().is_none()).then(|| format!("quant_algo in {}", json.path.display()))
}

fn schemes(evidence: &Evidence<'_>) -> Result<Schemes, Error> {
    let legacy = evidence.files.hf_quant_config();
    let legacy = legacy.and_then(|j| Some((j.path.as_path(), j.value.get("quantization")?)));
    let declared: Vec<(&Path, &Value)> = evidence.config().into_iter().chain(legacy).collect();
    let has_algo = |config: &Value| config.get("quant_algo").is_some_and(|a| !a.is_null());
    let mut found = Vec::new();
    for &(file, config) in declared.iter().filter(|(_, config)| has_algo(config)) {
        found.push(config_schemes(file, config)?);
    }
    let nvfp4 = json!({ "quant_algo": "NVFP4" });
    let algorithms =
        declared.iter().find(|(_, config)| has_algo(config)).map_or(&nvfp4, |(_, config)| config);
    for (file, config) in declared {
        check_groups(file, config, if has_algo(config) { config } else { algorithms })?;
    }
    // Without an algorithm it was named by the caller for a lone file: the names say the rest.
    let by_names = || Schemes::new(Vec::new(), Scheme::blocks(BlockFormat::Nvfp4, Input::Optional));
    Ok(found.into_iter().next().unwrap_or_else(by_names))
}

fn config_schemes(file: &Path, config: &Value) -> Result<Schemes, Error> {
    let mut rules = Vec::new();
    for key in ["ignore", "exclude_modules"] {
        for name in strings(config, key, file)? {
            rules.push((Pattern::Glob(name.into()), Scheme::float(format!("`{name}` in `{key}`"))));
        }
    }
    let algo = &config["quant_algo"];
    if algo.as_str() != Some(MIXED) {
        let otherwise = algorithm(algo, config.get("group_size"), file, "quant_algo")?;
        return Ok(Schemes::new(rules, otherwise));
    }
    let layers = config.get("quantized_layers").unwrap_or(&Value::Null);
    let layers = object(layers, file, "quantized_layers", "an object of module name to quant_algo")?;
    let mut layers: Vec<_> = layers.iter().collect();
    // The most specific name first: `…mlp.experts` and `…mlp.experts.3.up_proj` may both be there.
    layers.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
    for (name, layer) in layers {
        let key = format!("quantized_layers.{name}.quant_algo");
        let algo = layer.get("quant_algo").unwrap_or(&Value::Null);
        let scheme = algorithm(algo, layer.get("group_size"), file, &key)?;
        rules.push((Pattern::Glob(name.clone()), scheme));
    }
    Ok(Schemes::new(rules, Scheme::float("not in `quantized_layers`")))
}

fn algorithm(algo: &Value, group_size: Option<&Value>, file: &Path, key: &str) -> Result<Scheme, Error> {
    // ModelOpt writes names that it has no spelling for in its own lowercase: `mxfp4`, `fp8_pb_wo`.
    let is = |name: &str| algo.as_str().is_some_and(|algo| algo.eq_ignore_ascii_case(name));
    let known = ALGORITHMS.iter().find(|(name, _)| is(name)).ok_or_else(|| {
        config_error(file, key, algo, crate::error::list(ALGORITHMS.iter().map(|(name, _)| name)))
    })?;
    let Some((format, input)) = known.1 else {
        return Ok(Scheme::other(format!("quant_algo {}", known.0)));
    };
    fits(group_size, &json!(format.block_len()), format, file, || key.replace("quant_algo", "group_size"))?;
    Ok(Scheme::blocks(format, input))
}

/// A value that an algorithm fixes; absent and null are left open.
fn fits(
    found: Option<&Value>,
    valid: &Value,
    format: BlockFormat,
    file: &Path,
    key: impl FnOnce() -> String,
) -> Result<(), Error> {
    match found {
        Some(found) if !found.is_null() && found != valid => {
            Err(config_error(file, key(), found, format!("{valid} for {format}")))
        }
        _ => Ok(()),
    }
}

/// ModelOpt repeats in `config_groups` what `quant_algo` means: both must say the same. `algorithms` is the configuration
/// that names the algorithm.
fn check_groups(file: &Path, config: &Value, algorithms: &Value) -> Result<(), Error> {
    let Some(groups) = config.get("config_groups").filter(|groups| !groups.is_null()) else { return Ok(()) };
    for (name, group) in object(groups, file, "config_groups", "an object of groups")? {
        let group_key = format!("config_groups.{name}");
        object(group, file, &group_key, "an object with `weights` and `targets`")?;
        let targets = strings(group, "targets", file)?;
        // Early exports name no targets, and have one algorithm.
        let targets = if targets.is_empty() { vec!["Linear"] } else { targets };
        for algo in targets.into_iter().filter_map(|target| algorithm_of(algorithms, target)) {
            let scheme = algorithm(algo, None, file, "quant_algo")?;
            let Weights::Blocks(format) = scheme.weights else { continue };
            // Activations of NVFP4_AWQ are nvfp4, but ModelOpt writes 8 bits for them.
            let of_input =
                (scheme.input == Input::Required && algo != "NVFP4_AWQ").then_some("input_activations");
            for part in std::iter::once("weights").chain(of_input) {
                let Some(args) = group.get(part).filter(|args| !args.is_null()) else { continue };
                let key = format!("{group_key}.{part}");
                object(args, file, &key, "an object with `num_bits`, `type` and `group_size`")?;
                let valid = [json!(4), json!("float"), json!(format.block_len())];
                for (field, valid) in ["num_bits", "type", "group_size"].iter().zip(&valid) {
                    fits(args.get(field), valid, format, file, || format!("{key}.{field}"))?;
                }
            }
        }
    }
    Ok(())
}

/// The algorithm of a target: a module where there are several algorithms, else a class of modules.
fn algorithm_of<'v>(config: &'v Value, target: &str) -> Option<&'v Value> {
    let algo = &config["quant_algo"];
    if algo == MIXED { config.get("quantized_layers")?.get(target)?.get("quant_algo") } else { Some(algo) }
}
