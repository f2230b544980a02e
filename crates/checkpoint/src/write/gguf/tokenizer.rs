//! The tokenizer of a model as metadata: byte-level BPE from `tokenizer.json`.
//!
//! llama.cpp splits text by a rule of its own for each model that it knows by name. The name comes from the rule that
//! `tokenizer.json` spells out; a rule that is not in the table is refused, as text would be cut otherwise than in training.
//!
//! Sources: `get_vocab_base_pre` of `convert_hf_to_gguf.py`, `src/llama-vocab.cpp` of
//! <https://github.com/ggml-org/llama.cpp>

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Error;
use crate::gguf::GgufValue;

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
/// Numbers of GGUF's types.
const I32: u32 = 5;
const STRING: u32 = 8;

/// Regular expressions that split text, and llama.cpp's names of them.
const SPLITS: &[(&str, &str)] = &[
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "tekken",
    ),
];

/// Reads JSON files beside a model.
struct Files<'f> {
    beside: &'f [PathBuf],
}

impl Files<'_> {
    fn path(&self, name: &str) -> Option<&Path> {
        self.beside.iter().map(PathBuf::as_path).find(|p| p.file_name().is_some_and(|n| n == name))
    }

    fn text(&self, name: &str) -> Result<Option<String>, Error> {
        let read = |path| std::fs::read_to_string(path).map_err(|e| Error::io(path, "read", e));
        self.path(name).map(read).transpose()
    }

    fn json(&self, name: &str) -> Result<Value, Error> {
        let (Some(path), Some(text)) = (self.path(name), self.text(name)?) else { return Ok(Value::Null) };
        serde_json::from_str(&text).map_err(|e| fault(path, "the file", format!("not JSON ({e})"), "JSON"))
    }
}

fn fault(file: &Path, key: &str, found: impl Into<String>, valid: &str) -> Error {
    Error::Config { file: file.into(), key: key.into(), found: found.into(), valid: valid.into() }
}

/// The metadata of the tokenizer beside a model of `vocabulary` rows. Without a tokenizer the file says so, and takes
/// numbers of tokens alone. Fails if the tokenizer is of a kind that is not written here.
pub(super) fn metadata(
    beside: &[PathBuf],
    config: &Value,
    vocabulary: usize,
) -> Result<Vec<(String, GgufValue)>, Error> {
    let files = Files { beside };
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let Some(path) = files.path("tokenizer.json") else {
        if let Some(other) =
            ["tokenizer.model", "vocab.json", "tekken.json"].iter().find_map(|n| files.path(n))
        {
            return Err(fault(
                other,
                "the tokenizer",
                "without a tokenizer.json",
                "a tokenizer.json beside the model for GGUF",
            ));
        }
        return Ok(vec![(key("model"), GgufValue::String("none".into()))]);
    };
    let json = files.json("tokenizer.json")?;
    let settings = files.json("tokenizer_config.json")?;
    let split = split_name(&json, path)?;
    let vocab = Vocabulary::read(&json, path, vocabulary)?;
    let mut out = vec![
        (key("model"), GgufValue::String("gpt2".into())),
        (key("pre"), GgufValue::String(split.into())),
        (key("tokens"), strings(&vocab.tokens)),
        (key("token_type"), integers(&vocab.types)),
        (key("merges"), strings(&merges(&json, path)?)),
    ];
    for (kind, name) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
        let text = settings.get(format!("{kind}_token")).map(|t| t.get("content").unwrap_or(t));
        let named = text.and_then(Value::as_str).and_then(|text| vocab.ids.get(text).copied());
        // Several ends: the first is that of a text.
        let of_config = config.get(format!("{kind}_token_id")).map(|id| id.get(0).unwrap_or(id));
        let id = named.or_else(|| usize::try_from(of_config?.as_u64()?).ok());
        if let Some(id) = id.filter(|id| *id < vocabulary) {
            out.push((key(&format!("{name}_token_id")), GgufValue::U32(id as u32)));
        }
    }
    let adds = |kind: &str| settings.get(format!("add_{kind}_token")).and_then(Value::as_bool);
    let bos = adds("bos").unwrap_or_else(|| starts_with_special(&json));
    out.push((key("add_bos_token"), GgufValue::Bool(bos)));
    out.push((key("add_eos_token"), GgufValue::Bool(adds("eos").unwrap_or(false))));
    // Tokens of text are not preceded by a space of their own here.
    out.push((key("add_space_prefix"), GgufValue::Bool(false)));
    let template = match files.text("chat_template.jinja")? {
        None => settings.get("chat_template").and_then(Value::as_str).map(str::to_owned),
        found => found,
    };
    out.extend(template.map(|text| ("tokenizer.chat_template".into(), GgufValue::String(text))));
    Ok(out)
}

/// Whether the tokenizer itself puts a special token before a text.
fn starts_with_special(json: &Value) -> bool {
    let steps = json.pointer("/post_processor/processors").and_then(Value::as_array);
    let own = json.get("post_processor");
    let mut steps = steps.into_iter().flatten().chain(own);
    steps.any(|step| step.pointer("/single/0/SpecialToken").is_some())
}

/// llama.cpp's name of the rule by which text is split.
fn split_name(json: &Value, path: &Path) -> Result<&'static str, Error> {
    let pre = json.get("pre_tokenizer").unwrap_or(&Value::Null);
    let steps = match pre.get("pretokenizers").and_then(Value::as_array) {
        Some(steps) => steps.iter().collect(),
        None => vec![pre],
    };
    let is = |step: &Value, kind: &str| step["type"] == kind;
    let byte_level = steps.iter().find(|step| is(step, "ByteLevel"));
    let regex = steps.iter().find_map(|step| step.pointer("/pattern/Regex")?.as_str());
    let digits = steps.iter().any(|step| is(step, "Digits") && step["individual_digits"] == true);
    let others =
        steps.iter().filter(|step| !["ByteLevel", "Split", "Digits"].iter().any(|k| is(step, k))).count();
    let found = match (byte_level, regex, digits) {
        (Some(step), None, false) if step["use_regex"] != false => Some("gpt-2"),
        (Some(step), None, true) if step["use_regex"] != false => Some("smollm"),
        (Some(_), Some(regex), false) => {
            SPLITS.iter().find(|(known, _)| *known == regex).map(|(_, name)| *name)
        }
        _ => None,
    };
    found.filter(|_| others == 0 && json["model"]["type"] == "BPE").ok_or_else(|| {
        let valid = "byte-level BPE split as by GPT-2, SmolLM, Llama 3, Qwen2 or Tekken, for GGUF";
        fault(path, "pre_tokenizer", pre.to_string(), valid)
    })
}

struct Vocabulary {
    tokens: Vec<String>,
    types: Vec<i32>,
    ids: BTreeMap<String, usize>,
}

impl Vocabulary {
    fn read(json: &Value, path: &Path, rows: usize) -> Result<Self, Error> {
        let vocab = json.pointer("/model/vocab").and_then(Value::as_object);
        let vocab =
            vocab.ok_or_else(|| fault(path, "model.vocab", "missing", "an object of token to number"))?;
        let added = json.get("added_tokens").and_then(Value::as_array);
        // Rows of the embedding that no token has.
        let mut this = Self {
            tokens: (0..rows).map(|id| format!("[PAD{id}]")).collect(),
            types: vec![UNUSED; rows],
            ids: BTreeMap::new(),
        };
        let of_vocab = vocab.iter().map(|(token, id)| (token.as_str(), id, NORMAL));
        let of_added = added.into_iter().flatten().filter_map(|token| {
            let text = token["content"].as_str()?;
            let special = token["special"] == true || looks_special(text);
            Some((text, &token["id"], if special { CONTROL } else { USER_DEFINED }))
        });
        for (token, id, kind) in of_vocab.chain(of_added) {
            let at = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|&id| id < rows);
            let Some(at) = at else {
                let valid = format!("a number below {rows}, the rows of the embedding");
                return Err(fault(path, &format!("token `{token}`"), id.to_string(), &valid));
            };
            (this.tokens[at], this.types[at]) = (token.into(), kind);
            this.ids.insert(token.into(), at);
        }
        Ok(this)
    }
}

/// Tokens that models mean as special without saying so.
fn looks_special(token: &str) -> bool {
    [("<|", "|>"), ("<｜", "｜>")]
        .iter()
        .any(|(open, close)| token.starts_with(open) && token.ends_with(close))
}

fn merges(json: &Value, path: &Path) -> Result<Vec<String>, Error> {
    let all = json.pointer("/model/merges").and_then(Value::as_array);
    let text = |merge: &Value| match merge {
        Value::String(pair) => Some(pair.clone()),
        pair => Some(format!("{} {}", pair.get(0)?.as_str()?, pair.get(1)?.as_str()?)),
    };
    let merges = all.and_then(|all| all.iter().map(text).collect());
    merges.ok_or_else(|| fault(path, "model.merges", "missing or no list", "a list of pairs of tokens"))
}

fn strings(all: &[String]) -> GgufValue {
    let mut bytes = Vec::new();
    for text in all {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    GgufValue::Array { element: STRING, len: all.len() as u64, bytes }
}

fn integers(all: &[i32]) -> GgufValue {
    let bytes = all.iter().flat_map(|n| n.to_le_bytes()).collect();
    GgufValue::Array { element: I32, len: all.len() as u64, bytes }
}
