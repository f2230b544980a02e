//! Intel AutoRound in its own format: compressed-tensors' names and divisors under another configuration.
//!
//! `config.json` holds `bits`, `data_type` and `group_size` of all modules and, in `extra_config`, what differs for
//! modules by name or regular expression.
//!
//! Source: `auto_round/export/export_to_autoround/qlinear_fp.py` of <https://github.com/intel/auto-round>

use std::path::Path;

use dualgemm_formats::BlockFormat;
use serde_json::Value;

use super::compressed_tensors::{SHAPES, SUFFIXES};
use super::{Convention, ELSEWHERE, Evidence, FP8_INPUTS, ScaleSense, config_error, fits, object};
use crate::Error;
use crate::scheme::{Input, Pattern, Scheme, Schemes};

/// AutoRound's convention.
pub const CONVENTION: Convention = Convention {
    name: "auto-round",
    doc: "Intel AutoRound: compressed-tensors' names and divisors, nvfp4 and mxfp4",
    sense: ScaleSense::Divisor,
    needs_tensor_scale: true,
    fused_order: None,
    suffixes: SUFFIXES,
    harmless: &[ELSEWHERE, FP8_INPUTS, SHAPES],
    detect: |evidence| evidence.method_is("auto-round"),
    schemes,
};

fn schemes(evidence: &Evidence<'_>) -> Result<Schemes, Error> {
    let Some((file, config)) = evidence.config() else {
        return Ok(Schemes::new(Vec::new(), Scheme::blocks(BlockFormat::Nvfp4, Input::Optional)));
    };
    // Names go before regular expressions, which match anywhere in a name, as AutoRound's loader has it.
    let (mut rules, mut patterns) = (Vec::new(), Vec::new());
    if let Some(modules) = config.get("extra_config").filter(|modules| !modules.is_null()) {
        for (name, module) in object(modules, file, "extra_config", "an object of module names")? {
            let key = format!("extra_config.{name}");
            let scheme = Scheme::or_refused(scheme(&[module, config], file, &format!("{key}.")));
            // A dot is in every name.
            if name.contains(['*', '+', '?', '^', '$', '\\', '(', '[', '{', '|']) {
                patterns.push((Pattern::target(&format!("re:.*(?:{name})"), file, &key)?, scheme));
            } else {
                rules.push((Pattern::Under(name.clone()), scheme));
            }
        }
    }
    rules.append(&mut patterns);
    let otherwise = Scheme::or_refused(scheme(&[config], file, ""));
    Ok(Schemes::new(rules, otherwise))
}

/// How types start that are not in 4-bit blocks, or not with as many bits as are said: `auto_round/data_type` of AutoRound.
const OTHERS: [&str; 6] = ["int", "fp", "float", "bf", "mx_", "nv_fp"];

/// What the first of `levels` that says something says.
fn scheme(levels: &[&Value], file: &Path, key: &str) -> Result<Scheme, Error> {
    let get = |field| levels.iter().find_map(|level| level.get(field)).unwrap_or(&Value::Null);
    let (bits, data_type) = (get("bits"), get("data_type").as_str().unwrap_or("int"));
    if bits.as_u64().is_some_and(|bits| bits >= 16) {
        return Ok(Scheme::float(format!("{key}bits is {bits}")));
    }
    let format = match (bits.as_u64(), data_type) {
        (Some(4), mx) if mx.starts_with("mx_fp") => BlockFormat::Mxfp4,
        (Some(4), nv) if nv.starts_with("nv_fp") => BlockFormat::Nvfp4,
        _ if OTHERS.iter().any(|start| data_type.starts_with(start)) => {
            return Ok(Scheme::other(format!("{bits} bits of type {data_type}")));
        }
        _ => {
            let valid = format!("nv_fp, mx_fp, or a type that starts with {}", crate::error::list(OTHERS));
            return Err(config_error(file, format!("{key}data_type"), get("data_type"), valid));
        }
    };
    fits(get("group_size"), format.block_len(), format, file, || format!("{key}group_size"))?;
    let nvfp4_input = format == BlockFormat::Nvfp4 && *get("act_bits") == 4;
    Ok(Scheme::blocks(format, if nvfp4_input { Input::Optional } else { Input::Ignored }))
}
