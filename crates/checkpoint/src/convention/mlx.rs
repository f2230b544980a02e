//! MLX: `X.weight` U32 of eight codes each, the first in the lowest bits, and `X.scales` U8; mxfp4, and nvfp4, whose
//! experts may have `X.global_scale`, the largest magnitude of each.
//!
//! `config.json` holds `mode`, `bits` and `group_size` of all modules, and entries under a module's name for those that
//! differ, with `global_scale` where there is one. What has no scales was left in float.
//!
//! Source: `mlx/nn/layers/quantized.py` of <https://github.com/ml-explore/mlx>, `mlx_lm/{utils,models/switch_layers}.py` of
//! <https://github.com/ml-explore/mlx-lm>

use std::path::Path;

use dualgemm_formats::BlockFormat;
use serde_json::Value;

use super::{Convention, ELSEWHERE, Evidence, Role, ScaleSense, config_error, fits};
use crate::Error;
use crate::scheme::{Input, Pattern, Scheme, Schemes};

/// MLX's convention.
pub const CONVENTION: Convention = Convention {
    name: "mlx",
    doc: "MLX: weight U32 of eight codes each and scales U8, mxfp4 or nvfp4, of experts also global_scale, an amax",
    sense: ScaleSense::Amax,
    needs_tensor_scale: false,
    fused_order: None,
    suffixes: &[
        (".global_scale", Role::TensorScale),
        (".scales", Role::BlockScale),
        (".bias", Role::Bias),
        (".weight", Role::Weight),
    ],
    harmless: &[ELSEWHERE],
    detect,
    schemes,
};

/// Modes that are not in 4-bit blocks; `affine` is what has no mode, and integers.
const OTHERS: [&str; 2] = ["affine", "mxfp8"];
/// What each of the others means.
const MODES: &[(&str, BlockFormat)] = &[("mxfp4", BlockFormat::Mxfp4), ("nvfp4", BlockFormat::Nvfp4)];

fn detect(evidence: &Evidence<'_>) -> Option<String> {
    let (file, config) = evidence.config().filter(|(_, config)| config.get("quant_method").is_none())?;
    let mut levels = std::iter::once(config).chain(config.as_object()?.values());
    let known = levels.any(|level| MODES.iter().any(|(mode, _)| level["mode"] == **mode));
    known.then(|| format!("mode in {}", file.display()))
}

fn schemes(evidence: &Evidence<'_>) -> Result<Schemes, Error> {
    let Some((file, config)) = evidence.config() else {
        return Ok(Schemes::new(Vec::new(), Scheme::blocks(BlockFormat::Mxfp4, Input::Ignored)));
    };
    let mut rules = Vec::new();
    for (name, level) in config.as_object().into_iter().flatten() {
        let scheme = match level {
            Value::Object(_) => Scheme::or_refused(scheme(level, file, &format!("quantization.{name}"))),
            Value::Bool(false) => Scheme::float(format!("`{name}` is false in `quantization`")),
            _ => continue,
        };
        rules.push((Pattern::Under(name.clone()), scheme));
    }
    Ok(Schemes::new(rules, Scheme::or_refused(scheme(config, file, "quantization"))))
}

fn scheme(level: &Value, file: &Path, key: &str) -> Result<Scheme, Error> {
    let Some((_, format)) = MODES.iter().find(|(mode, _)| level["mode"] == **mode) else {
        let mode = &level["mode"];
        if mode.is_null() || OTHERS.iter().any(|name| mode == name) {
            return Ok(Scheme::other(format!("mode {mode}, {} bits", level["bits"])));
        }
        let valid = crate::error::list(MODES.iter().map(|(name, _)| name).chain(&OTHERS));
        return Err(config_error(file, format!("{key}.mode"), mode, valid));
    };
    for (field, valid) in [("bits", 4), ("group_size", format.block_len())] {
        fits(&level[field], valid, *format, file, || format!("{key}.{field}"))?;
    }
    let needs_tensor_scale = level["global_scale"] == true;
    Ok(Scheme { needs_tensor_scale, ..Scheme::blocks(*format, Input::Ignored) })
}
