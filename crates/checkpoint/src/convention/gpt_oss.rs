//! gpt-oss: experts in one parameter of mxfp4, `X_blocks` U8 `[experts, rows, k / 32, 16]`, `X_scales` U8
//! `[experts, rows, k / 32]`, `X_bias`; gate and up rows alternate.
//!
//! Source: `src/transformers/integrations/mxfp4.py` and `models/gpt_oss` of
//! <https://github.com/huggingface/transformers>

use dualgemm_formats::BlockFormat;

use super::{Convention, ELSEWHERE, Role, ScaleSense, left_out};
use crate::GateUpOrder;
use crate::scheme::{Input, Pattern, Scheme, Schemes};

/// The convention of gpt-oss checkpoints.
pub const CONVENTION: Convention = Convention {
    name: "gpt-oss",
    doc: "gpt-oss: experts in one mxfp4 parameter, _blocks and _scales, alternating gate and up rows with biases",
    sense: ScaleSense::Multiplier,
    needs_tensor_scale: false,
    // The model's own code takes every second row of `gate_up_proj`, from 0 for gate and from 1 for up.
    fused_order: Some(GateUpOrder::GateUpRows),
    suffixes: &[
        ("_blocks", Role::Weight),
        ("_scales", Role::BlockScale),
        ("_bias", Role::Bias),
        (".bias", Role::Bias),
        (".weight", Role::Weight),
    ],
    harmless: &[ELSEWHERE],
    detect: |evidence| evidence.method_is("mxfp4"),
    schemes: |evidence| {
        let mut rules = Vec::new();
        if let Some(config) = evidence.config() {
            rules = left_out(config, ["modules_to_not_convert"], |name, _| Ok(Pattern::Glob(name.into())))?;
        }
        Ok(Schemes::new(rules, Scheme::blocks(BlockFormat::Mxfp4, Input::Ignored)))
    },
};
