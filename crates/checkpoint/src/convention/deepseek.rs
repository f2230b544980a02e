//! DeepSeek-V4: experts in 4 bits beside other layers in fp8.
//!
//! Their own files have mxfp4, `X.weight` I8 `[out, in / 2]` and `X.scale` F8_E8M0 `[out, in / 32]`: `config.json` declares
//! fp8 for everything and names the type of the experts in `expert_dtype`, `fp4` if it is not there. Those that ModelOpt
//! made nvfp4 of have its names. They are in `quantized_layers`; without that list, `moe_quant_algo` is what all experts
//! are but for those in `ignore`. What is left out, as the experts of `mtp` are, stays as it was.
//!
//! Source: `vllm/models/deepseek_v4` of <https://github.com/vllm-project/vllm>, for nvfp4 its pull requests 42209 and 49133
//! and <https://github.com/sgl-project/sglang/pull/25820>

use dualgemm_formats::BlockFormat;
use serde_json::Value;

use super::modelopt::{self, algorithm};
use super::{Convention, ELSEWHERE, Evidence, Role, ScaleSense};
use crate::Error;
use crate::model_field;
use crate::scheme::{Input, Pattern, Scheme, Schemes};

/// DeepSeek's convention.
pub const CONVENTION: Convention = Convention {
    name: "deepseek",
    doc: "DeepSeek-V4: experts in mxfp4, weight I8 and scale F8_E8M0, or in nvfp4 by ModelOpt's names, beside fp8",
    sense: ScaleSense::Multiplier,
    needs_tensor_scale: true,
    fused_order: None,
    suffixes: &[
        (".weight_scale_2", Role::TensorScale),
        (".weight_scale", Role::BlockScale),
        (".input_scale", Role::InputScale),
        (".pre_quant_scale", Role::Transform),
        (".scale", Role::BlockScale),
        (".bias", Role::Bias),
        (".weight", Role::Weight),
    ],
    harmless: &[ELSEWHERE],
    detect,
    schemes,
};

/// Endings in DeepSeek's own files.
const NATIVE: &[(&str, Role)] =
    &[(".scale", Role::BlockScale), (".bias", Role::Bias), (".weight", Role::Weight)];

/// `model_type` of the models whose experts are in fp4 where `expert_dtype` does not say otherwise.
const FAMILIES: [&str; 2] = ["deepseek_v4", "deepseek_v41"];

/// Key of what ModelOpt made of the experts.
const ALGORITHM: &str = "moe_quant_algo";

fn detect(evidence: &Evidence<'_>) -> Option<String> {
    let method = evidence.method_is("fp8").or_else(|| evidence.method_is("deepseek_v4_fp8"))?;
    let (file, config) = evidence.config()?;
    if config.get(ALGORITHM).is_some_and(Value::is_string) {
        return Some(format!("{ALGORITHM} in {}", file.display()));
    }
    match expert_dtype(evidence) {
        Some(dtype) => (dtype == "fp4").then(|| format!("expert_dtype in {}", file.display())),
        None => {
            let model = &evidence.files.config()?.value;
            model_field(model, "model_type")
                .is_some_and(|t| FAMILIES.iter().any(|f| t == f))
                .then_some(method)
        }
    }
}

fn expert_dtype<'e>(evidence: &'e Evidence<'_>) -> Option<&'e Value> {
    let of_model = evidence.files.config().and_then(|json| model_field(&json.value, "expert_dtype"));
    of_model.or_else(|| evidence.config()?.1.get("expert_dtype"))
}

fn schemes(evidence: &Evidence<'_>) -> Result<Schemes, Error> {
    let experts = || Pattern::Glob("*.experts.*".into());
    let declared = modelopt::declared(evidence);
    let groups = declared.iter().find(|(_, c)| c.get("config_groups").is_some()).map(|(_, config)| *config);
    let lists = |(_, config): &&(_, &Value)| config.get("quantized_layers").is_some_and(|l| !l.is_null());
    let mut rules = Vec::new();
    if let Some((file, config)) = declared.iter().find(lists) {
        rules = modelopt::layer_rules(file, config, groups)?;
        rules.iter_mut().for_each(|(_, scheme)| scheme.names = Some(modelopt::SUFFIXES));
    } else if let Some(&(file, config)) =
        declared.iter().find(|(_, c)| c.get(ALGORITHM).is_some_and(Value::is_string))
    {
        let scheme = algorithm(&config[ALGORITHM], config.get("group_size"), file, ALGORITHM);
        let scheme = scheme.map(|scheme| Scheme { names: Some(modelopt::SUFFIXES), ..scheme });
        let ignored = modelopt::ignored(file, config)?.into_iter().map(|(pattern, _)| pattern).collect();
        rules.push((Pattern::But(Box::new(experts()), ignored), Scheme::or_refused(scheme)));
    }
    if expert_dtype(evidence).is_none_or(|dtype| dtype == "fp4") {
        let native = Scheme::blocks(BlockFormat::Mxfp4, Input::Ignored);
        rules.push((experts(), Scheme { names: Some(NATIVE), ..native }));
    }
    Ok(Schemes::new(rules, Scheme::other("fp8 in blocks of 128 by 128")))
}
