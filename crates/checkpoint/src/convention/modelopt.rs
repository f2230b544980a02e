//! NVIDIA ModelOpt: `X.weight` U8, `X.weight_scale` F8_E4M3, `X.weight_scale_2` F32 multiplier,
//! `X.input_scale` F32 multiplier.
//!
//! Experts that stay one parameter are `X` itself, with `X_weight_scale` and so on. The algorithm is in
//! `hf_quant_config.json` (`quantization.quant_algo`) and in `config.json` (`quantization_config.quant_algo`);
//! `MIXED_PRECISION` names one per module. Where both files, or `quant_algo` and `config_groups`, say what blocks
//! are, each is held to what the algorithm means; modules that the files disagree on are refused. An algorithm that is not
//! known refuses its own modules. Where nothing says that activations have a scale, or `activation_scheme` is `dynamic`
//! (<https://github.com/vllm-project/vllm/pull/49715>), they need none.
//!
//! Source: `modelopt/torch/export/{quant_utils,convert_hf_config}.py` of
//! <https://github.com/NVIDIA/Model-Optimizer>

use std::path::Path;

use dualgemm_formats::BlockFormat;
use serde_json::{Value, json};

use super::compressed_tensors::group_rules;
use super::{
    Convention, ELSEWHERE, Evidence, Role, ScaleSense, config_error, fits, left_out, object, strings,
};
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
    harmless: &[ELSEWHERE],
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
/// `quant_method` as ModelOpt writes it, and as vLLM and SGLang have it where it says more.
const METHODS: [&str; 3] = ["modelopt", "modelopt_fp4", "modelopt_mixed"];
const MIXED: &str = "MIXED_PRECISION";

fn detect(evidence: &Evidence<'_>) -> Option<String> {
    if let Some(why) = METHODS.iter().find_map(|method| evidence.method_is(method)) {
        return Some(why);
    }
    // Exports before `quantization_config` existed declare themselves in this file alone.
    let json = evidence.files.hf_quant_config()?;
    let quantized = json.value.pointer("/quantization/quant_algo").is_some_and(|a| !a.is_null());
    (quantized && evidence.method().is_none()).then(|| format!("quant_algo in {}", json.path.display()))
}

fn schemes(evidence: &Evidence<'_>) -> Result<Schemes, Error> {
    let declared = declared(evidence);
    let has = |config: &Value, key| config.get(key).is_some_and(|a| !a.is_null());
    let groups = declared.iter().find(|(_, config)| has(config, "config_groups")).map(|(_, config)| *config);
    let named: Vec<_> = declared.iter().filter(|(_, config)| has(config, "quant_algo")).collect();
    let dynamic = declared.iter().any(|(_, config)| config["activation_scheme"] == "dynamic");
    let mut found = Vec::new();
    for &&(file, config) in &named {
        // One of two files may leave the list of layers to the other.
        let lists = |config: &Value| has(config, "quantized_layers");
        let elsewhere = named.iter().any(|(_, other)| lists(other));
        if config["quant_algo"] == MIXED && !lists(config) && elsewhere {
            continue;
        }
        let (mut rules, mut otherwise) = config_schemes(file, config, groups)?;
        if dynamic {
            rules.iter_mut().for_each(|(_, scheme)| scheme.input = Input::Ignored);
            otherwise.input = Input::Ignored;
        }
        found.push(Schemes::new(rules, otherwise).said_by(file));
    }
    let nvfp4 = json!({ "quant_algo": "NVFP4" });
    let algorithms = named.first().map_or(&nvfp4, |(_, config)| config);
    for &(file, config) in &declared {
        let faults = check_groups(file, config, if has(config, "quant_algo") { config } else { algorithms })?;
        found.push(Schemes::new(faults, Scheme::float("no group of `config_groups`")));
    }
    if named.is_empty() {
        // It was named by the caller for a lone file: the names say the rest.
        found.insert(0, Schemes::new(Vec::new(), Scheme::blocks(BlockFormat::Nvfp4, Input::Optional)));
    }
    let repeated = found.split_off(1);
    Ok(found.remove(0).with_repeated(repeated))
}

/// The configurations in ModelOpt's form, and the files that they are in.
pub(super) fn declared<'e>(evidence: &'e Evidence<'_>) -> Vec<(&'e Path, &'e Value)> {
    let legacy = evidence.files.hf_quant_config();
    let legacy = legacy.and_then(|j| Some((j.path.as_path(), j.value.get("quantization")?)));
    evidence.config().into_iter().chain(legacy).collect()
}

type Rules = Vec<(Pattern, Scheme)>;

/// What a configuration says of modules by name, and of the others.
fn config_schemes(file: &Path, config: &Value, groups: Option<&Value>) -> Result<(Rules, Scheme), Error> {
    let mut rules = ignored(file, config)?;
    let algo = &config["quant_algo"];
    if algo.as_str() != Some(MIXED) {
        let otherwise = algorithm(algo, config.get("group_size"), file, "quant_algo");
        let otherwise = otherwise.map(|scheme| match is_weight_only(groups, None) {
            true => Scheme { input: Input::Ignored, ..scheme },
            false => scheme,
        });
        return Ok((rules, Scheme::or_refused(otherwise)));
    }
    match (config.get("quantized_layers"), config.get("config_groups")) {
        // Some files have the groups alone.
        (None | Some(Value::Null), Some(groups @ Value::Object(_))) => {
            rules.extend(group_rules(groups, None, file)?);
            Ok((rules, Scheme::float("no target of `config_groups` matches it")))
        }
        _ => {
            rules.extend(layer_rules(file, config, groups)?);
            Ok((rules, Scheme::float("not in `quantized_layers`")))
        }
    }
}

/// Modules that are left out.
pub(super) fn ignored(file: &Path, config: &Value) -> Result<Rules, Error> {
    left_out((file, config), ["ignore", "exclude_modules"], |name, _| Ok(Pattern::Glob(name.into())))
}

pub(super) fn layer_rules(file: &Path, config: &Value, groups: Option<&Value>) -> Result<Rules, Error> {
    let layers = config.get("quantized_layers").unwrap_or(&Value::Null);
    let layers = object(layers, file, "quantized_layers", "an object of module name to quant_algo")?;
    let mut layers: Vec<_> = layers.iter().collect();
    // The most specific name first: `…mlp.experts` and `…mlp.experts.3.up_proj` may both be there.
    layers.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
    let rule = |(name, layer): (&String, &Value)| {
        let key = format!("quantized_layers.{name}.quant_algo");
        let algo = layer.get("quant_algo").unwrap_or(&Value::Null);
        let mut scheme = Scheme::or_refused(algorithm(algo, layer.get("group_size"), file, &key));
        if is_weight_only(groups, Some(name)) {
            scheme.input = Input::Ignored;
        }
        (Pattern::Glob(name.clone()), scheme)
    };
    Ok(layers.into_iter().map(rule).collect())
}

/// Whether activations have no stored scale although the algorithm is one that quantizes them: every group of the module
/// (of the model, where there are no layers) is without `input_activations`
/// (<https://github.com/vllm-project/vllm/pull/54427>).
fn is_weight_only(groups: Option<&Value>, layer: Option<&str>) -> bool {
    let groups = groups.and_then(|config| config["config_groups"].as_object());
    let of_layer = |group: &&Value| match layer {
        None => true,
        Some(layer) => group["targets"].as_array().is_some_and(|names| names.iter().any(|n| n == layer)),
    };
    let mut inputs =
        groups.into_iter().flat_map(|g| g.values()).filter(of_layer).map(|g| &g["input_activations"]);
    inputs.next().is_some_and(Value::is_null) && inputs.all(Value::is_null)
}

/// What an algorithm makes of a module.
pub(super) fn algorithm(
    algo: &Value,
    group_size: Option<&Value>,
    file: &Path,
    key: &str,
) -> Result<Scheme, Error> {
    // ModelOpt writes names that it has no spelling for in its own lowercase: `mxfp4`, `fp8_pb_wo`.
    let is = |name: &str| algo.as_str().is_some_and(|algo| algo.eq_ignore_ascii_case(name));
    let known = ALGORITHMS.iter().find(|(name, _)| is(name)).ok_or_else(|| {
        config_error(file, key, algo, crate::error::list(ALGORITHMS.iter().map(|(name, _)| name)))
    })?;
    let Some((format, input)) = known.1 else {
        return Ok(Scheme::other(format!("quant_algo {}", known.0)));
    };
    said_fits(group_size, &json!(format.block_len()), format, file, || {
        key.replace("quant_algo", "group_size")
    })?;
    Ok(Scheme::blocks(format, input))
}

/// A value that an algorithm fixes; absent and null are left open.
fn said_fits(
    found: Option<&Value>,
    valid: &Value,
    format: BlockFormat,
    file: &Path,
    key: impl FnOnce() -> String,
) -> Result<(), Error> {
    found
        .filter(|found| !found.is_null())
        .map_or(Ok(()), |found| fits(found, valid.clone(), format, file, key))
}

/// ModelOpt repeats in `config_groups` what `quant_algo` means: both must say the same. `algorithms` is the configuration
/// that names the algorithm. Where they do not, the modules of the group are refused.
fn check_groups(file: &Path, config: &Value, algorithms: &Value) -> Result<Rules, Error> {
    let Some(groups) = config.get("config_groups").filter(|groups| !groups.is_null()) else {
        return Ok(Vec::new());
    };
    let mut faults = Vec::new();
    for (name, group) in object(groups, file, "config_groups", "an object of groups")? {
        let key = format!("config_groups.{name}");
        object(group, file, &key, "an object with `weights` and `targets`")?;
        let targets = strings(group, "targets", file)?;
        // Early exports name no targets, and have one algorithm.
        for target in if targets.is_empty() { vec!["Linear"] } else { targets } {
            let Some(algo) = algorithm_of(algorithms, target) else { continue };
            if let Err(fault) = check_group(file, &key, group, algo) {
                let pattern = Pattern::target(target, file, &format!("{key}.targets"))?;
                faults.push((pattern, Scheme::or_refused(Err(fault))));
            }
        }
    }
    Ok(faults)
}

fn check_group(file: &Path, group_key: &str, group: &Value, algo: &Value) -> Result<(), Error> {
    let scheme = algorithm(algo, None, file, "quant_algo")?;
    let Weights::Blocks(format) = scheme.weights else { return Ok(()) };
    // Activations of NVFP4_AWQ are nvfp4, but ModelOpt writes 8 bits for them.
    let of_input = (scheme.input == Input::Required && algo != "NVFP4_AWQ").then_some("input_activations");
    for part in std::iter::once("weights").chain(of_input) {
        let Some(args) = group.get(part).filter(|args| !args.is_null()) else { continue };
        let key = format!("{group_key}.{part}");
        object(args, file, &key, "an object with `num_bits`, `type` and `group_size`")?;
        let values = [
            ("num_bits", json!(4)),
            ("type", json!("float")),
            ("group_size", json!(format.block_len())),
            ("symmetric", json!(true)),
        ];
        // Activations are quantized here, and symmetrically.
        for (field, valid) in values.iter().filter(|(field, _)| *field != "symmetric" || part == "weights") {
            said_fits(args.get(field), valid, format, file, || format!("{key}.{field}"))?;
        }
    }
    Ok(())
}

/// The algorithm of a target: a module where there are several algorithms, else a class of modules.
fn algorithm_of<'v>(config: &'v Value, target: &str) -> Option<&'v Value> {
    let algo = &config["quant_algo"];
    if algo == MIXED { config.get("quantized_layers")?.get(target)?.get("quant_algo") } else { Some(algo) }
}
