//! GGUF: `blk.N.ffn_gate.weight` in block types 40 (NVFP4) and 39 (MXFP4), `.scale` and `.input_scale` F32
//! multipliers, both optional; merged experts `ffn_gate_exps` are `[experts, rows, k]`. Some converters call the first
//! `.weight.scale`.
//!
//! Source: `ggml/src/ggml-common.h` and `conversion/base.py` of <https://github.com/ggml-org/llama.cpp>; `.weight.scale`:
//! <https://github.com/Luce-Org/lucebox/pull/146>

use super::{Convention, Role, ScaleSense};
use crate::GateUpOrder;
use crate::scheme::{Scheme, Schemes};

/// The GGUF convention.
pub const CONVENTION: Convention = Convention {
    name: "gguf",
    doc: "llama.cpp: NVFP4 (type 40) and MXFP4 (type 39) blocks, .scale and .input_scale as multipliers",
    sense: ScaleSense::Multiplier,
    needs_tensor_scale: false,
    // `ffn_gate_up_exps` is gate rows, then up rows, for every architecture.
    fused_order: Some(GateUpOrder::GateUp),
    suffixes: &[
        (".weight", Role::Weight),
        (".weight.scale", Role::TensorScale),
        (".scale", Role::TensorScale),
        (".input_scale", Role::InputScale),
        (".bias", Role::Bias),
    ],
    harmless: &[],
    detect: |evidence| evidence.files.gguf_metadata().map(|_| "a GGUF file".into()),
    schemes: |_| Ok(Schemes::new(Vec::new(), Scheme::by_type())),
};
