//! What a model's configuration says of its MLPs, whichever file carries it: `config.json` beside the tensors, the
//! metadata of a safetensors file that stands alone, or the metadata of a GGUF file.
//!
//! Flow: [`TensorFiles`](crate::TensorFiles) reads it as one JSON object, `write` puts it where the output has room.
//! Without it the activation of a model would be lost on the way, and silu be computed for gelu.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::convention::{METADATA_CONFIG, SHORT_CONFIG};
use crate::gguf::GgufValue;
use crate::{Error, JsonFile};

/// Key of the safetensors metadata that carries a `config.json`.
const METADATA: &str = "config.json";
const ARCHITECTURE: &str = "general.architecture";
const STEP: &str = "step35";
/// Architectures whose name is not the `model_type` of their configuration: GGUF's and Hugging Face's.
const RENAMED: [(&str, &str); 3] = [("gpt-oss", "gpt_oss"), (STEP, "step3p5"), ("deepseek4", "deepseek_v4")];
/// Numbers of the activation that have one name in both.
const NUMBERS: [&str; 3] = ["swiglu_limit", "swiglu_alpha", "swiglu_beta"];
/// Lists of numbers of the activation, under their own names but for those that llama.cpp has others for.
const LISTS: [&str; 4] =
    ["swiglu_limits", "swiglu_limits_shared", "activation_sparsity_pattern", "mlp_multipliers"];
/// Limits by layer, Step's names and llama.cpp's, which says with them what `swiglu_limit` does of other models.
const LIMITS: [(&str, &str); 2] =
    [("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")];
/// Number of the type f32 in GGUF's metadata.
const F32: u32 = 6;

/// An entry of a configuration, that of the language model where there are several parts; null is no entry.
pub fn model_field<'c>(config: &'c Value, key: &str) -> Option<&'c Value> {
    let text = config.get("text_config").and_then(|text| text.get(key)).filter(|value| !value.is_null());
    text.or_else(|| config.get(key)).filter(|value| !value.is_null())
}

/// The entry that names the activation of the MLPs.
pub fn hidden_activation(config: &Value) -> Option<&Value> {
    model_field(config, "hidden_act").or_else(|| model_field(config, "hidden_activation"))
}

/// How many routed experts each layer has, where the configuration gives one number for all of them.
pub(crate) fn expert_count(config: &Value) -> Option<usize> {
    let counts = ["num_experts", "num_local_experts", "n_routed_experts"];
    let count = counts.iter().find_map(|key| model_field(config, key))?.as_u64()?;
    usize::try_from(count).ok()
}

/// The entry of a safetensors file's metadata that carries a configuration, but for what says how it is quantized.
pub fn to_metadata(config: &Value) -> (String, String) {
    let mut config = config.clone();
    if let Some(entries) = config.as_object_mut() {
        entries.retain(|key, _| ![METADATA_CONFIG, SHORT_CONFIG].contains(&key.as_str()));
    }
    (METADATA.into(), config.to_string())
}

/// The configuration in the metadata of a safetensors file, if there is one.
pub(crate) fn from_metadata(
    metadata: &BTreeMap<String, String>,
    file: &Path,
) -> Result<Option<JsonFile>, Error> {
    let Some(text) = metadata.get(METADATA) else { return Ok(None) };
    match serde_json::from_str::<Value>(text) {
        Ok(value) if value.is_object() => Ok(Some(JsonFile { path: file.into(), value })),
        found => Err(Error::Config {
            file: file.into(),
            key: format!("__metadata__.{METADATA}"),
            found: found.map_or_else(|e| format!("not JSON ({e})"), |_| "not an object".into()),
            valid: "a JSON object".into(),
        }),
    }
}

/// The architecture that a GGUF file names, and the entries about it that the metadata has room for. `otherwise` is the
/// architecture of a model that names none.
pub fn to_gguf(config: Option<&Value>, otherwise: &str) -> (String, Vec<(String, GgufValue)>) {
    let field = |key| config.and_then(|config| model_field(config, key));
    let model_type = field("model_type").and_then(Value::as_str).unwrap_or(otherwise);
    let renamed = RENAMED.iter().find(|(_, name)| *name == model_type);
    let architecture = renamed.map_or(model_type, |(name, _)| name).to_owned();
    let mut entries = vec![(ARCHITECTURE.into(), GgufValue::String(architecture.clone()))];
    if let Some(act) = config.and_then(hidden_activation).and_then(Value::as_str) {
        entries.push((format!("{architecture}.hidden_activation"), GgufValue::String(act.into())));
    }
    for name in NUMBERS {
        if let Some(number) = field(name).and_then(Value::as_f64) {
            entries.push((format!("{architecture}.{name}"), GgufValue::F64(number)));
        }
    }
    for name in LISTS {
        if let Some(list) = field(name).and_then(Value::as_array) {
            // llama.cpp has 0 where there is no limit.
            let bytes = list.iter().flat_map(|number| (number.as_f64().unwrap_or(0.0) as f32).to_le_bytes());
            let array = GgufValue::Array { element: F32, len: list.len() as u64, bytes: bytes.collect() };
            entries.push((list_key(&architecture, name), array));
        }
    }
    (architecture, entries)
}

/// What the metadata of a GGUF file says, as a configuration would say it. Most architectures imply their activation.
pub(crate) fn from_gguf(metadata: &[(String, GgufValue)]) -> Option<Value> {
    let get = |key: &str| metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value);
    let architecture = get(ARCHITECTURE)?.as_str()?;
    let renamed = RENAMED.iter().find(|(name, _)| *name == architecture);
    let mut config = Map::new();
    config.insert("model_type".into(), renamed.map_or(architecture, |(_, name)| name).into());
    // `LLM_FFN_GELU` of llama.cpp is gelu by tanh; its other gated MLPs are silu but for gpt-oss, which is known by name, and
    // MiniMax-M3.
    let implied =
        (architecture.starts_with("gemma") || architecture == "grok").then_some("gelu_pytorch_tanh");
    let implied = implied.or((architecture == "minimax-m3").then_some("swigluoai"));
    let implied = implied.or(renamed.map(|_| "silu"));
    if architecture == "gemma3n" {
        // llama.cpp has this built in: the first ten layers are sparse.
        config.insert("activation_sparsity_pattern".into(), json!(vec![0.95; 10]));
    }
    let list = |key: &str| get(key).map_or_else(Vec::new, numbers);
    for name in LISTS {
        let list = list(&list_key(architecture, name));
        if !list.is_empty() {
            config.insert(name.into(), json!(list));
        }
    }
    let of_others = LIMITS.iter().filter(|_| architecture != STEP);
    let mut of_others: Vec<f32> =
        of_others.flat_map(|(_, key)| list(&format!("{architecture}.{key}"))).collect();
    // Other models have one limit for all layers; what has several is left to be refused.
    of_others.dedup();
    match of_others.as_slice() {
        [] | [0.0] => None,
        [limit] => config.insert("swiglu_limit".into(), json!(limit)),
        several => config.insert("swiglu_limit".into(), json!(several)),
    };
    let named = get(&format!("{architecture}.hidden_activation")).and_then(GgufValue::as_str);
    if let Some(act) = named.or(implied) {
        config.insert("hidden_act".into(), act.into());
    }
    for name in NUMBERS {
        match get(&format!("{architecture}.{name}")) {
            Some(GgufValue::F64(number)) => config.insert(name.into(), (*number).into()),
            Some(GgufValue::F32(number)) => config.insert(name.into(), f64::from(*number).into()),
            _ => None,
        };
    }
    Some(Value::Object(config))
}

/// Key of one of [`LISTS`].
fn list_key(architecture: &str, name: &str) -> String {
    let of_step = LIMITS.iter().find(|(limits, _)| architecture == STEP && *limits == name);
    format!("{architecture}.{}", of_step.map_or(name, |(_, key)| key))
}

/// The elements of an array of f32.
fn numbers(value: &GgufValue) -> Vec<f32> {
    match value {
        GgufValue::Array { element: F32, bytes, .. } => {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through_gguf(config: Value) -> Value {
        from_gguf(&to_gguf(Some(&config), "llama").1).unwrap()
    }

    #[test]
    fn activations_survive_gguf() {
        for config in [
            json!({ "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh" }),
            json!({ "model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0 }),
            json!({ "model_type": "own", "hidden_act": "relu2" }),
            json!({ "model_type": "own", "hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_beta": 0.5 }),
            json!({ "model_type": "own", "swiglu_limits": [7.0, 7.0] }),
            json!({ "model_type": "falcon_h1", "hidden_act": "silu", "mlp_multipliers": [0.75, 0.5] }),
            json!({ "model_type": "gemma3n_text", "hidden_act": "gelu_pytorch_tanh", "activation_sparsity_pattern": [0.5, 0.0] }),
            json!({ "model_type": "step3p5", "hidden_act": "silu", "swiglu_limits": [0.0, 7.5], "swiglu_limits_shared": [16.0] }),
        ] {
            assert_eq!(through_gguf(config.clone()), config);
        }
        let parts = json!({ "model_type": "gemma3", "text_config": { "model_type": "gemma3_text", "hidden_activation": "x" } });
        assert_eq!(through_gguf(parts), json!({ "model_type": "gemma3_text", "hidden_act": "x" }));
    }

    #[test]
    fn architectures_imply_activations() {
        let of = |name: &str| from_gguf(&[(ARCHITECTURE.into(), GgufValue::String(name.into()))]).unwrap();
        assert_eq!(of("gemma3n")["hidden_act"], "gelu_pytorch_tanh");
        assert_eq!(of("gemma3n")["activation_sparsity_pattern"][9], 0.95);
        assert_eq!(of("gpt-oss"), json!({ "model_type": "gpt_oss", "hidden_act": "silu" }));
        assert_eq!(of("qwen3moe"), json!({ "model_type": "qwen3moe" }));
        assert_eq!(of("minimax-m3")["hidden_act"], "swigluoai");
        assert_eq!(from_gguf(&[]), None);
    }

    #[test]
    fn limits_by_layer_are_one_limit_where_the_model_has_one() {
        let of = |limits: &[f32]| {
            let bytes = limits.iter().flat_map(|limit| limit.to_le_bytes()).collect();
            let array = GgufValue::Array { element: F32, len: limits.len() as u64, bytes };
            let name = GgufValue::String("deepseek4".into());
            let metadata = [(ARCHITECTURE.into(), name), ("deepseek4.swiglu_clamp_exp".into(), array)];
            from_gguf(&metadata).unwrap()["swiglu_limit"].clone()
        };
        assert_eq!(of(&[10.0, 10.0]), json!(10.0));
        assert_eq!(of(&[0.0, 0.0]), Value::Null);
        assert_eq!(of(&[0.0, 10.0]), json!([0.0, 10.0]));
    }

    #[test]
    fn a_lone_file_carries_all_but_the_quantization() {
        let (key, text) =
            to_metadata(&json!({ "hidden_act": "relu2", "quantization_config": {}, "quantization": {} }));
        let read = |text: &str| {
            from_metadata(&BTreeMap::from([(key.clone(), text.into())]), Path::new("a.safetensors"))
        };
        assert_eq!(read(&text).unwrap().unwrap().value, json!({ "hidden_act": "relu2" }));
        let message = read("[1]").unwrap_err().to_string();
        assert!(message.starts_with("a.safetensors: __metadata__.config.json is not an object"), "{message}");
        assert!(read("{").unwrap_err().to_string().contains("not JSON"));
    }
}
