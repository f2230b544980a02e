//! MiMo-V2 and Ling-3: routed experts in mxfp4 beside other layers in fp8, `X.weight` U8 `[out, in / 2]` and ue8m0 scales
//! `[out, in / 32]`, `X.weight_scale` U8 (MiMo) or `X.weight_scale_inv` F8_E8M0 (Ling), which are multipliers too.
//!
//! `config.json` declares fp8 for everything and mxfp4 for the experts, as `store_dtype` (MiMo) or
//! `routed_experts_quant_method` (Ling).
//!
//! Source: <https://github.com/sgl-project/sglang/pull/27946>, <https://github.com/vllm-project/vllm/pull/57784> (MiMo),
//! <https://github.com/vllm-project/vllm/pull/52114>, `bailing_moe_v3.py` of vLLM (Ling)

use std::path::Path;

use dualgemm_formats::BlockFormat;
use serde_json::Value;

use super::{Convention, ELSEWHERE, Evidence, Role, ScaleSense, config_error, fits, left_out};
use crate::Error;
use crate::scheme::{Input, Pattern, Scheme, Schemes};

/// The convention of fp8 files with experts in mxfp4.
pub const CONVENTION: Convention = Convention {
    name: "fp8-mxfp4",
    doc: "MiMo and Ling: routed experts in mxfp4, weight and weight_scale or weight_scale_inv, beside fp8",
    sense: ScaleSense::Multiplier,
    needs_tensor_scale: false,
    fused_order: None,
    suffixes: &[
        (".weight_scale", Role::BlockScale),
        (".weight_scale_inv", Role::BlockScale),
        (".bias", Role::Bias),
        (".weight", Role::Weight),
    ],
    harmless: &[ELSEWHERE],
    detect: |evidence| {
        evidence.method_is("fp8")?;
        declaration(evidence).map(|(file, key, _)| format!("{key} in {}", file.display()))
    },
    schemes,
};

/// Keys that name the format of the experts, and those of its group size.
const KEYS: [(&str, &str); 2] =
    [("store_dtype", "mxfp4_block_size"), ("routed_experts_quant_method", "routed_experts_group_size")];

/// File, key and value of what says how the experts are stored.
fn declaration<'e>(evidence: &'e Evidence<'_>) -> Option<(&'e Path, &'static str, &'e Value)> {
    let (file, config) = evidence.config()?;
    KEYS.iter().find_map(|&(key, _)| Some((file, key, config.get(key).filter(|v| !v.is_null())?)))
}

fn schemes(evidence: &Evidence<'_>) -> Result<Schemes, Error> {
    let mut rules = Vec::new();
    if let Some(config) = evidence.config() {
        let keys = ["ignored_layers", "modules_to_not_convert"];
        rules = left_out(config, keys, |name, _| Ok(Pattern::Under(name.into())))?;
    }
    let experts = Scheme::or_refused(experts(evidence));
    rules.push((Pattern::Glob("*.experts.*".into()), experts));
    Ok(Schemes::new(rules, Scheme::other("fp8")))
}

fn experts(evidence: &Evidence<'_>) -> Result<Scheme, Error> {
    if let Some((file, key, value)) = declaration(evidence)
        && !value.as_str().is_some_and(|method| method.eq_ignore_ascii_case("mxfp4"))
    {
        return Err(config_error(file, key, value, "\"mxfp4\""));
    }
    let format = BlockFormat::Mxfp4;
    if let Some((file, config)) = evidence.config() {
        for (_, key) in KEYS {
            if let Some(size) = config.get(key).filter(|size| !size.is_null()) {
                fits(size, format.block_len(), format, file, || key.into())?;
            }
        }
    }
    Ok(Scheme::blocks(format, Input::Ignored))
}
