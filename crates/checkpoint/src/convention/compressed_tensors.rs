//! compressed-tensors and llm-compressor: `X.weight_packed` U8, `X.weight_scale`, `X.weight_global_scale` F32
//! divisor, `X.input_global_scale` F32 divisor.
//!
//! `config.json` holds groups of targets, each with its own format. A module takes the first target that matches
//! its name; the class `Linear` is looked at only after every name and pattern, as the loaders of this format
//! do. `nvfp4-pack-quantized` has blocks of 16, `mxfp4-pack-quantized` blocks of 32 with ue8m0 scales and no
//! tensor scale.
//!
//! Source: `src/compressed_tensors/compressors/nvfp4` and `quantization/quant_scheme.py` of
//! <https://github.com/vllm-project/compressed-tensors>

use std::path::Path;

use dualgemm_formats::BlockFormat;
use serde_json::Value;

use super::{
    Convention, ELSEWHERE, Evidence, FP8_INPUTS, Harmless, Role, ScaleSense, config_error, left_out, object,
    strings,
};
use crate::Error;
use crate::scheme::{Input, Pattern, Scheme, Schemes};

/// The compressed-tensors convention.
pub const CONVENTION: Convention = Convention {
    name: "compressed-tensors",
    doc: "llm-compressor: weight_packed, weight_scale, weight_global_scale and input_global_scale, tensor scales as divisors",
    sense: ScaleSense::Divisor,
    needs_tensor_scale: true,
    fused_order: None,
    suffixes: SUFFIXES,
    harmless: &[ELSEWHERE, FP8_INPUTS, SHAPES],
    // Mistral's files spell it with an underscore.
    detect: |evidence| METHODS.iter().find_map(|method| evidence.method_is(method)),
    schemes,
};

/// Endings of tensor names, which AutoRound shares.
pub(super) const SUFFIXES: &[(&str, Role)] = &[
    (".weight_global_scale", Role::TensorScale),
    (".weight_scale", Role::BlockScale),
    (".input_global_scale", Role::InputScale),
    (".weight_packed", Role::Weight),
    (".weight_zero_point", Role::Transform),
    (".bias", Role::Bias),
    (".weight", Role::Weight),
    ("_weight_global_scale", Role::TensorScale),
    ("_weight_scale", Role::BlockScale),
    ("_input_global_scale", Role::InputScale),
    ("_weight_packed", Role::Weight),
    ("_bias", Role::Bias),
    // Experts in one tensor, as some files of Qwen3 VL have them.
    ("_global_scale", Role::TensorScale),
    ("_scale", Role::BlockScale),
    ("_packed", Role::Weight),
];

/// What is written beside a weight of any format.
pub(super) const SHAPES: &[Harmless] = &[(".weight_shape", "repeats the shape of the weight")];

const METHODS: [&str; 2] = ["compressed-tensors", "compressed_tensors"];

/// `format` of the whole file or of a group, and the block format it means.
const FORMATS: &[(&str, Option<BlockFormat>)] = &[
    ("nvfp4-pack-quantized", Some(BlockFormat::Nvfp4)),
    ("mxfp4-pack-quantized", Some(BlockFormat::Mxfp4)),
    ("mixed-precision", None),
    ("float-quantized", None),
    ("mxfp8-quantized", None),
    ("int-quantized", None),
    ("naive-quantized", None),
    ("pack-quantized", None),
    ("dense", None),
];

fn schemes(evidence: &Evidence<'_>) -> Result<Schemes, Error> {
    let by_names = || Scheme::blocks(BlockFormat::Nvfp4, Input::Optional);
    let Some((file, config)) = evidence.config() else {
        return Ok(Schemes::new(Vec::new(), by_names()));
    };
    let mut rules = left_out((file, config), ["ignore"], |name, key| Pattern::target(name, file, key))?;
    let format = config.get("format").filter(|f| !f.is_null());
    let otherwise = match (config.get("config_groups"), format) {
        (Some(groups), _) => {
            rules.extend(group_rules(groups, format, file)?);
            Scheme::float("no target of `config_groups` matches it")
        }
        (None, None) => by_names(),
        // Files that have been edited may have lost their groups.
        (None, Some(format)) => {
            Scheme::or_refused(declared_format(format, file, "format").map(|declared| match declared {
                Some(block) => Scheme::blocks(block, Input::Optional),
                None => Scheme::other(format!("format {format}")),
            }))
        }
    };
    Ok(Schemes::new(rules, otherwise))
}

/// What each group says of its targets; `format` is that of the whole file. Classes come last. What a group says that
/// cannot be used refuses its own targets.
pub(super) fn group_rules(
    groups: &Value,
    format: Option<&Value>,
    file: &Path,
) -> Result<Vec<(Pattern, Scheme)>, Error> {
    let (mut rules, mut classes) = (Vec::new(), Vec::new());
    for (name, group) in object(groups, file, "config_groups", "an object of groups")? {
        let key = format!("config_groups.{name}");
        let scheme = Scheme::or_refused(group_scheme(group, format, file, &key));
        let targets = strings(group, "targets", file)?;
        if targets.is_empty() {
            let found = group.get("targets").unwrap_or(&Value::Null);
            return Err(config_error(file, format!("{key}.targets"), found, "at least one target"));
        }
        for target in targets {
            let pattern = Pattern::target(target, file, &format!("{key}.targets"))?;
            let rules = if matches!(pattern, Pattern::Linear) { &mut classes } else { &mut rules };
            rules.push((pattern, scheme.clone()));
        }
    }
    rules.append(&mut classes);
    Ok(rules)
}

/// The block format that a `format` means, if it is one.
fn declared_format(format: &Value, file: &Path, key: &str) -> Result<Option<BlockFormat>, Error> {
    let known = FORMATS.iter().find(|(name, _)| format.as_str() == Some(name));
    known.map(|(_, block)| *block).ok_or_else(|| {
        config_error(file, key, format, crate::error::list(FORMATS.iter().map(|(name, _)| name)))
    })
}

fn group_scheme(group: &Value, format: Option<&Value>, file: &Path, key: &str) -> Result<Scheme, Error> {
    let weights = &group["weights"];
    let format = group.get("format").filter(|f| !f.is_null()).or(format.filter(|f| !f.is_null()));
    let declared = match format {
        None => None,
        Some(format) => declared_format(format, file, &format!("{key}.format"))?,
    };
    let four_bit_float = |args: &Value| args["num_bits"] == 4 && args["type"] == "float";
    if !four_bit_float(weights) {
        if weights.is_null() || declared.is_some() {
            let valid = "num_bits 4 and type float";
            return Err(config_error(file, format!("{key}.weights"), weights, valid));
        }
        return Ok(Scheme::other(format!("{} bits of type {}", weights["num_bits"], weights["type"])));
    }
    let size = &weights["group_size"];
    let found = BlockFormat::ALL.into_iter().find(|f| size.as_u64() == Some(f.block_len() as u64));
    let block = found.filter(|&f| declared.is_none_or(|d| d == f)).ok_or_else(|| {
        let valid = declared.map_or("16 (nvfp4) or 32 (mxfp4)".to_string(), |d| d.block_len().to_string());
        config_error(file, format!("{key}.weights.group_size"), size, valid)
    })?;
    if weights["symmetric"] == false {
        return Err(config_error(file, format!("{key}.weights.symmetric"), &weights["symmetric"], "true"));
    }
    // A byte tensor could be read as either.
    let valid: &[&str] = match block {
        BlockFormat::Nvfp4 => &["torch.float8_e4m3fn"],
        BlockFormat::Mxfp4 => &["torch.uint8", "torch.float8_e8m0fnu"],
    };
    let scales = &weights["scale_dtype"];
    if !scales.is_null() && !valid.iter().any(|name| scales == name) {
        let valid = format!("{} for {block}", crate::error::list(valid));
        return Err(config_error(file, format!("{key}.weights.scale_dtype"), scales, valid));
    }
    // `dynamic: "local"` keeps a tensor scale in the file; `true` computes it for each input.
    let input = &group["input_activations"];
    let stored = four_bit_float(input) && input["dynamic"] != true && block == BlockFormat::Nvfp4;
    Ok(Scheme::blocks(block, if stored { Input::Required } else { Input::Ignored }))
}
