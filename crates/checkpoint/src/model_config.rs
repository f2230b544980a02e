//! What a model's configuration says of its MLPs, whichever file carries it: `config.json` beside the tensors, the
//! metadata of a safetensors file that stands alone, or the metadata of a GGUF file.
//!
//! Flow: [`TensorFiles`](crate::TensorFiles) reads it as one JSON object, `write` puts it where the output has room.
//! Without it the activation of a model would be lost on the way, and silu be computed for gelu.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::convention::{METADATA_CONFIG, SHORT_CONFIG};
use crate::families::{Absent, COMMON_KEYS, Family, Function, OAI, model_types, says_nothing, speaks};
use crate::gguf::GgufValue;
use crate::{Error, JsonFile, json};

/// Key of the safetensors metadata that carries a `config.json`.
const METADATA: &str = "config.json";
pub(crate) const ARCHITECTURE: &str = "general.architecture";
/// Entry of GGUF's metadata that says that a file holds the gated MLPs of a model alone.
pub(crate) const CONTENTS: &str = "dualgemm.contents";
/// Numbers of element types in GGUF's metadata.
const F32: u32 = 6;
/// Where configurations of several models have the language model's, before their own entries.
const LANGUAGE_MODEL: [&str; 4] =
    ["/text_config", "/llm_config", "/language_config", "/thinker_config/text_config"];
/// GGUF's name of the function.
const GGUF_ACTIVATION: &str = "hidden_activation";

/// The parts of a configuration that are about the language model, the one that counts first.
pub(crate) fn parts(config: &Value) -> impl Iterator<Item = &Value> {
    LANGUAGE_MODEL.iter().filter_map(|path| config.pointer(path)).chain([config])
}

/// An entry of a configuration, that of the language model where there are several parts; null is no entry.
pub fn model_field<'c>(config: &'c Value, key: &str) -> Option<&'c Value> {
    parts(config).find_map(|part| part.get(key).filter(|value| !value.is_null()))
}

/// Refuses a part for the language model that is no object, and a type of model that is no name: either would pass for none at
/// all, and what it says would be lost.
pub(crate) fn check_parts(config: &JsonFile) -> Result<(), Error> {
    let all = || parts(&config.value).filter(|part| !part.is_null());
    let part = all().find(|part| !part.is_object()).map(|part| ("text_config", part, "an object"));
    let mut types = all().filter_map(|part| part.get("model_type"));
    let name = types.find(|name| !name.is_string() && !name.is_null());
    let name = name.map(|name| ("model_type", name, "the name of a type of model"));
    let Some((key, found, valid)) = part.or(name) else { return Ok(()) };
    let (file, key, valid) = (config.path.clone(), key.into(), valid.into());
    Err(Error::Config { file, key, found: found.to_string(), valid })
}

/// How configurations say how many routed experts each layer has.
pub(crate) const EXPERT_COUNT: [&str; 4] =
    ["num_experts", "num_local_experts", "n_routed_experts", "expert_count"];

/// How many routed experts each layer has, where the configuration gives one number for all of them.
pub(crate) fn expert_count(config: &Value) -> Option<usize> {
    let count = EXPERT_COUNT.iter().find_map(|key| model_field(config, key))?.as_u64()?;
    usize::try_from(count).ok()
}

/// How configurations say how many experts each token has; in GGUF metadata the last, behind the architecture.
pub const EXPERTS_PER_TOKEN: [&str; 7] = [
    "num_experts_per_tok",
    "experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
    "expert_used_count",
];

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
    let value = json::object(text.as_bytes(), file, &format!("__metadata__.{METADATA}"))?;
    Ok(Some(JsonFile { path: file.into(), value }))
}

/// The architecture that a GGUF file names, and the entries about its activation. `otherwise` is the architecture of a
/// model that names none. What is not understood is carried too, so that it is refused there as it is here.
pub fn to_gguf(config: Option<&Value>, otherwise: &str) -> (String, Vec<(String, GgufValue)>) {
    let Some(config) = config else { return (otherwise.into(), vec![text(ARCHITECTURE, otherwise)]) };
    let family = Family::of_types(model_types(config));
    let written =
        family.and_then(|family| family.architectures.iter().chain(family.model_types).next().copied());
    // What only GGUF has by that name is another family.
    let own = || model_types(config).next().filter(|name| Family::of_architecture(name).is_none());
    let architecture = written.or_else(own).unwrap_or(otherwise);
    let mut entries = vec![text(ARCHITECTURE, architecture)];
    let function = activation_name(config, family);
    entries.extend(function.map(|name| text(&format!("{architecture}.{GGUF_ACTIVATION}"), &name)));
    let limits = family.map_or(&[][..], |family| family.limits);
    let ignored = family.map_or(&[][..], |family| family.ignored);
    for (key, value) in parts(config).filter_map(Value::as_object).flatten() {
        let name = gguf_name(family, architecture, key);
        let limit = limits.iter().any(|limit| limit.key == *key);
        let numbers = OAI.iter().any(|(keys, _)| keys.contains(&key.as_str()));
        let explained = numbers || family.is_some_and(|family| family.explains(key));
        let nothing = if explained { value.is_null() && !limit } else { says_nothing(value) };
        let no_effect = nothing || COMMON_KEYS.iter().chain(ignored).any(|known| known == key);
        if speaks(key, value) && !no_effect && !entries.iter().any(|(entry, _)| *entry == name) {
            entries.push((name, to_value(value, limit)));
        }
    }
    for limit in limits {
        // A GGUF file without the entry would mean another limit.
        let name = gguf_name(family, architecture, limit.key);
        if let (Absent::Is(number), false) = (limit.absent, entries.iter().any(|(entry, _)| *entry == name)) {
            entries.push((name, GgufValue::F32(number)));
        }
    }
    (architecture.into(), entries)
}

/// What a configuration calls its function, also that of single layers. Several names in one are none.
fn activation_name(config: &Value, family: Option<&Family>) -> Option<String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let at = |key: &&str| {
        let (first, rest) = key.split_once('.').unwrap_or((key, ""));
        let path = if rest.is_empty() { String::new() } else { format!("/{}", rest.replace('.', "/")) };
        Some(text(model_field(config, first)?.pointer(&path).filter(|value| !value.is_null())?))
    };
    let blocks = model_field(config, "block_configs").and_then(Value::as_array);
    let of_block = |block: &Value| Some(text(block.pointer("/ffn/hidden_act")?));
    let mut names: Vec<String> = blocks.into_iter().flatten().filter_map(of_block).collect();
    match family {
        Some(family) => {
            // Layers without a name of their own have the family's.
            let others = || Some(family.implied()?.name().to_owned()).filter(|_| blocks.is_some());
            names.extend(family.activation_keys().iter().find_map(at).or_else(others));
        }
        None => names.extend(COMMON_KEYS.iter().filter_map(at)),
    }
    names.dedup();
    Some(names.join(" and ")).filter(|names| !names.is_empty())
}

fn text(key: &str, value: &str) -> (String, GgufValue) {
    (key.into(), GgufValue::String(value.into()))
}

/// What GGUF calls an entry of a configuration.
pub(crate) fn gguf_name(family: Option<&Family>, architecture: &str, key: &str) -> String {
    let limit = family.and_then(|family| family.limits.iter().find(|limit| limit.key == key));
    let name = match limit {
        Some(limit) => limit.gguf,
        None if family.map_or(COMMON_KEYS, Family::activation_keys).contains(&key) => GGUF_ACTIVATION,
        None => key,
    };
    format!("{architecture}.{name}")
}

/// A value of a configuration in GGUF, numbers of limits in the type that llama.cpp reads. What GGUF has no type for
/// becomes text, so that it is refused and not lost.
fn to_value(value: &Value, limit: bool) -> GgufValue {
    // llama.cpp has 0 where there is no limit.
    let number = |number: &Value| number.as_f64().or_else(|| number.is_null().then_some(0.0));
    match (value, number(value)) {
        (_, Some(number)) if limit => GgufValue::F32(number as f32),
        (Value::Number(_), Some(number)) => GgufValue::F64(number),
        (Value::Bool(set), _) => GgufValue::Bool(*set),
        (Value::String(text), _) => GgufValue::String(text.clone()),
        (Value::Array(all), _) if all.iter().all(|element| number(element).is_some()) => {
            let bytes = all.iter().filter_map(number).flat_map(|number| (number as f32).to_le_bytes());
            GgufValue::Array { element: F32, len: all.len() as u64, bytes: bytes.collect() }
        }
        _ => GgufValue::String(value.to_string()),
    }
}

/// What the metadata of a GGUF file says, as a configuration would say it. What its family implies is left to the table,
/// unless only GGUF has the family.
pub(crate) fn from_gguf(metadata: &[(String, GgufValue)]) -> Option<Value> {
    let get = |key: &str| metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value);
    let architecture = get(ARCHITECTURE)?.as_str()?;
    let family = Family::of_architecture(architecture);
    let model_type = family.and_then(|family| family.model_types.first().copied()).unwrap_or(architecture);
    let mut config = Map::new();
    config.insert("model_type".into(), model_type.into());
    if let Some((Function::Fixed { shape, .. }, [])) = family.map(|f| (f.function, f.model_types)) {
        config.insert(COMMON_KEYS[0].into(), shape.name().into());
    }
    let of_model = |entry: &'_ str| Some(entry.strip_prefix(architecture)?.strip_prefix('.')?.to_owned());
    for (entry, value) in metadata {
        let Some(name) = of_model(entry) else { continue };
        let limit = family.and_then(|family| family.limits.iter().find(|limit| limit.gguf == name));
        let key = match limit {
            Some(limit) => limit.key,
            None if name == GGUF_ACTIVATION => family.map_or(COMMON_KEYS[0], Family::activation_key),
            None => name.as_str(),
        };
        let value = from_value(value);
        if limit.is_some() || speaks(key, &value) {
            // llama.cpp has one for each layer where the model has one for all.
            let one = value
                .as_array()
                .filter(|all| limit.is_some_and(|l| !l.list) && all.windows(2).all(|w| w[0] == w[1]));
            let value = one.and_then(|all| all.first()).cloned().unwrap_or(value);
            match config.get(key) {
                // Two entries for one that do not agree: neither is taken.
                Some(other) if *other != value => {
                    let both = format!("{other} and {value}").replace('"', "");
                    config.insert(key.into(), both.into())
                }
                _ => config.insert(key.into(), value),
            };
        }
    }
    for limit in family.map_or(&[][..], |family| family.limits) {
        // A configuration without the entry would mean another limit.
        if limit.absent_in_gguf == Absent::NoLimit && matches!(limit.absent, Absent::Is(_)) {
            config.entry(limit.key).or_insert(Value::Null);
        }
    }
    Some(Value::Object(config))
}

/// A metadata value as a configuration has it. A number that JSON has no word for becomes text, so that it is refused and
/// not taken for nothing.
pub(crate) fn from_value(value: &GgufValue) -> Value {
    let number = |number: f64| if number.is_finite() { json!(number) } else { json!(number.to_string()) };
    match value {
        GgufValue::F32(x) => number(f64::from(*x)),
        GgufValue::F64(x) => number(*x),
        GgufValue::String(text) => json!(text),
        GgufValue::Bool(set) => json!(set),
        GgufValue::U8(x) => json!(x),
        GgufValue::I8(x) => json!(x),
        GgufValue::U16(x) => json!(x),
        GgufValue::I16(x) => json!(x),
        GgufValue::U32(x) => json!(x),
        GgufValue::I32(x) => json!(x),
        GgufValue::U64(x) => json!(x),
        GgufValue::I64(x) => json!(x),
        GgufValue::Array { element, bytes, .. } => {
            let size = GgufValue::min_len(*element).unwrap_or(1);
            let numbers =
                bytes.chunks_exact(size).map(|b| Some(from_value(&GgufValue::number(*element, b)?)));
            let other = || json!(format!("an array of {}", GgufValue::type_name(*element)));
            numbers.collect::<Option<Value>>().unwrap_or_else(other)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through_gguf(config: &Value) -> Value {
        from_gguf(&to_gguf(Some(config), "unknown").1).unwrap()
    }

    #[test]
    fn activations_survive_gguf() {
        for config in [
            json!({ "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh" }),
            json!({ "model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0 }),
            json!({ "model_type": "own", "hidden_act": "relu2" }),
            json!({ "model_type": "own", "hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_beta": 0.5 }),
            json!({ "model_type": "own", "hidden_act": "silu", "my_swiglu_limit": "seven" }),
            json!({ "model_type": "own", "swiglu_limits": [7.0, 8.0] }),
            json!({ "model_type": "falcon_h1", "hidden_act": "silu", "mlp_multipliers": [0.75, 0.5] }),
            json!({ "model_type": "gemma3n_text", "hidden_activation": "gelu_pytorch_tanh", "activation_sparsity_pattern": [0.5, 0.0] }),
            json!({ "model_type": "step3p5", "hidden_act": "silu", "swiglu_limits": [0.0, 7.5], "swiglu_limits_shared": [16.0] }),
            json!({ "model_type": "bailing_hybrid", "hidden_act": "silu", "expert_swiglu_limit_list": [0.0, 4.0] }),
            json!({ "model_type": "deepseek_v4", "hidden_act": "silu", "swiglu_limit": 10.0 }),
            json!({ "model_type": "hy_v4", "hidden_act": "silu", "swiglu_limit": 10.0 }),
            json!({ "model_type": "kimi_k3", "hidden_act": "situ", "activation_situ_beta": 2.0 }),
        ] {
            assert_eq!(through_gguf(&config), config);
        }
        let parts = json!({ "model_type": "gemma3", "text_config": { "model_type": "gemma3_text", "hidden_activation": "x" } });
        assert_eq!(through_gguf(&parts), json!({ "model_type": "gemma3_text", "hidden_activation": "x" }));
        // What has no effect is not carried where it would have one, and two names stay two.
        let both = json!({ "model_type": "gemma2", "hidden_act": "gelu", "hidden_activation": "gelu_new" });
        assert_eq!(through_gguf(&both)["hidden_activation"], "gelu_new");
        let two = json!({ "hidden_act": "silu", "hidden_activation": "relu" });
        assert_eq!(through_gguf(&two), json!({ "model_type": "unknown", "hidden_act": "silu and relu" }));
        let odd = json!({ "model_type": "llama", "hidden_act": 5, "swiglu_limits": [1, "x"] });
        assert_eq!(
            through_gguf(&odd),
            json!({ "model_type": "llama", "hidden_act": "5", "swiglu_limits": "[1,\"x\"]" })
        );
        // Where a configuration says nothing, its family does, and another thing than in GGUF.
        assert_eq!(through_gguf(&json!({ "model_type": "hy_v4" }))["swiglu_limit"], 10.0);
        assert_eq!(
            through_gguf(&json!({ "model_type": "hy_v4", "swiglu_limit": null }))["swiglu_limit"],
            0.0
        );
        assert_eq!(to_gguf(None, "unknown").1, [text(ARCHITECTURE, "unknown")]);
    }

    #[test]
    fn architectures_become_families() {
        let of = |name: &str| from_gguf(&[text(ARCHITECTURE, name)]).unwrap();
        assert_eq!(of("gpt-oss"), json!({ "model_type": "gpt_oss" }));
        assert_eq!(of("qwen3moe"), json!({ "model_type": "qwen3_moe" }));
        assert_eq!(of("foo"), json!({ "model_type": "foo" }));
        // A configuration of theirs without a limit would mean 10.
        assert_eq!(of("glm5-next"), json!({ "model_type": "glm5_next_text", "swiglu_limit": null }));
        // Only GGUF has the family.
        assert_eq!(of("spark2_5"), json!({ "model_type": "spark2_5", "hidden_act": "gelu_pytorch_tanh" }));
        assert_eq!(from_gguf(&[]), None);
    }

    #[test]
    fn limits_are_read_in_every_form() {
        let of = |limit: GgufValue| {
            let metadata = [text(ARCHITECTURE, "deepseek4"), ("deepseek4.swiglu_clamp_exp".into(), limit)];
            from_gguf(&metadata).unwrap()["swiglu_limit"].clone()
        };
        let array = |element, bytes: Vec<u8>, size: usize| GgufValue::Array {
            element,
            len: (bytes.len() / size) as u64,
            bytes,
        };
        let f32s = |all: &[f32]| array(F32, all.iter().flat_map(|x| x.to_le_bytes()).collect(), 4);
        assert_eq!(of(f32s(&[10.0, 10.0])), json!(10.0));
        assert_eq!(of(f32s(&[0.0, 10.0])), json!([0.0, 10.0]));
        assert_eq!(of(GgufValue::F32(10.0)), json!(10.0));
        assert_eq!(of(GgufValue::F64(2.5)), json!(2.5));
        assert_eq!(of(GgufValue::U32(7)), json!(7));
        let f64s = [0.5f64, 2.5].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(of(array(12, f64s, 8)), json!([0.5, 2.5]));
        assert_eq!(of(array(5, [0i32, 4].iter().flat_map(|x| x.to_le_bytes()).collect(), 4)), json!([0, 4]));
        // None of these is a limit, and none may pass for no limit.
        assert_eq!(of(f32s(&[f32::NAN, 1.0])), json!(["NaN", 1.0]));
        assert_eq!(of(GgufValue::F32(f32::INFINITY)), json!("inf"));
        assert_eq!(of(array(8, vec![0; 8], 8)), json!("an array of string"));
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
