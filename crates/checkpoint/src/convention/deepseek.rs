//! DeepSeek-V4: experts in mxfp4 beside other layers in fp8, `X.weight` I8 `[out, in / 2]` and `X.scale` F8_E8M0
//! `[out, in / 32]`.
//!
//! `config.json` declares fp8 for everything and names the type of the experts in `expert_dtype`.
//!
//! Source: `vllm/models/deepseek_v4` of <https://github.com/vllm-project/vllm>

use dualgemm_formats::BlockFormat;

use super::{Convention, Evidence, Role, ScaleSense};
use crate::model_field;
use crate::scheme::{Input, Pattern, Scheme, Schemes};

/// DeepSeek's convention.
pub const CONVENTION: Convention = Convention {
    name: "deepseek",
    doc: "DeepSeek-V4: experts in mxfp4, weight I8 and scale F8_E8M0, declared by expert_dtype",
    sense: ScaleSense::Multiplier,
    needs_tensor_scale: false,
    fused_order: None,
    suffixes: &[(".scale", Role::BlockScale), (".bias", Role::Bias), (".weight", Role::Weight)],
    detect,
    schemes: |_| {
        let experts = Scheme::blocks(BlockFormat::Mxfp4, Input::Ignored);
        let rules = vec![(Pattern::Glob("*.experts.*".into()), experts)];
        Ok(Schemes::new(rules, Scheme::other("fp8 in blocks of 128 by 128")))
    },
};

fn detect(evidence: &Evidence<'_>) -> Option<String> {
    let json = evidence.files.config()?;
    let expert =
        model_field(&json.value, "expert_dtype").or_else(|| evidence.config()?.1.get("expert_dtype"))?;
    (expert == "fp4" && evidence.method_is("fp8").is_some())
        .then(|| format!("expert_dtype in {}", json.path.display()))
}
