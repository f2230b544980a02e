//! What quantization configurations of any producer say of transforms that the model applies at run time, which its weights
//! expect: rotations of inputs above all.
//!
//! Whatever stands under a key that names one, and is not known to leave the inputs of linear layers as they are, counts as
//! one, values of a wrong type included.
//!
//! Sources: `transform/` of <https://github.com/vllm-project/compressed-tensors>, `algorithms/transforms` of
//! <https://github.com/intel/auto-round>, `RotationConfig` in `quark/torch/quantization/config/config.py` of AMD Quark

use std::path::Path;

use serde_json::Value;

use super::strings;
use crate::Error;
use crate::families::says_nothing;
use crate::scheme::{Pattern, Transform};

/// Parts of the keys that name transforms.
const KEYS: [&str; 7] =
    ["rotat", "hadamard", "spinquant", "quarot", "svdquant", "transform_config", "algo_config"];
/// Algorithms of Quark that leave all they do in the weights.
const IN_WEIGHTS: [&str; 7] = ["awq", "gptq", "gptaq", "qronos", "autoround", "smooth", "autosmoothquant"];
/// What Quark and AutoRound call the rotations R1 to R4.
const ROTATIONS: [&str; 3] = ["rotation", "spinquant", "quarot"];
/// How these rotations were made and where: of no effect where none is applied at run time.
#[rustfmt::skip]
const SETTINGS: [&str; 27] = [
    "rotation_size", "random_r1", "random_r2", "random_r3", "random_r4", "trainable",
    "trainable_rotation", "trainable_smooth", "train_smooth", "smooth_positions", "scaling_layers",
    "backbone", "model_decoder_layers", "v_proj", "o_proj", "self_attn", "mlp", "online_config",
    "head_dim", "hidden_size", "intermediate_size", "iters", "lr", "smooth_lr", "batch_size",
    "fuse_rmsnorm", "untie_embeddings",
];
/// Locations of compressed-tensors that are in the weights, and those that are inside of attention.
const ELSEWHERE: [&str; 4] = ["weight_input", "weight_output", "k_cache", "q_attn"];

/// The transforms that a quantization configuration states, wherever in it.
pub(super) fn of(config: &Value, file: &Path) -> Vec<Transform> {
    let mut found = Found { file, transforms: Vec::new() };
    found.search(config, "");
    found.transforms
}

struct Found<'f> {
    file: &'f Path,
    transforms: Vec<Transform>,
}

impl Found<'_> {
    fn add(&mut self, targets: Vec<Pattern>, ignore: Vec<Pattern>, what: impl Into<String>) {
        self.transforms.push(Transform { targets, ignore, what: what.into() });
    }

    /// Something that is not understood concerns every linear layer.
    fn add_unknown(&mut self, key: &str, value: &Value) {
        const SHOWN: usize = 80;
        let text = value.to_string();
        let shown: String = text.chars().take(SHOWN).collect();
        let more = if shown.len() < text.len() { "…" } else { "" };
        self.add(vec![Pattern::Linear], Vec::new(), format!("{key}: {shown}{more}"));
    }

    fn search(&mut self, value: &Value, path: &str) {
        match value {
            Value::Object(entries) => {
                for (key, value) in entries {
                    let at = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    // Names and patterns of modules are no keys.
                    let is_key = !key.contains(['.', '*']);
                    let key = key.to_ascii_lowercase();
                    if is_key && KEYS.iter().any(|part| key.contains(part)) {
                        self.judge(&key, value, &at);
                    } else {
                        self.search(value, &at);
                    }
                }
            }
            Value::Array(items) => items.iter().for_each(|item| self.search(item, path)),
            _ => {}
        }
    }

    fn judge(&mut self, key: &str, value: &Value, at: &str) {
        if says_nothing(value) {
            return;
        }
        match key {
            "transform_config" => self.transform_config(value, at),
            // AutoRound applies R1 at run time unless it says otherwise.
            "rotation_config" | "spinquant_config" => self.rotations(value, at, true),
            "algo_config" => match value {
                Value::Array(all) => all.iter().for_each(|algorithm| self.algorithm(algorithm, at)),
                one => self.algorithm(one, at),
            },
            _ => self.add_unknown(at, value),
        }
    }

    fn algorithm(&mut self, algorithm: &Value, at: &str) {
        let is_one_of = |names: &[&str]| names.iter().any(|name| algorithm["name"] == *name);
        if is_one_of(&ROTATIONS) {
            self.rotations(algorithm, at, false);
        } else if !is_one_of(&IN_WEIGHTS) && !says_nothing(algorithm) {
            self.add_unknown(at, algorithm);
        }
    }

    /// R1 to R4: R1 and R2 are in the weights, but for an R1 that is applied to inputs; R3 is inside of attention; R4 is
    /// applied to the input of the down projection.
    fn rotations(&mut self, config: &Value, at: &str, online_by_default: bool) {
        const ONLINE: &str = "online_r1_rotation";
        let Some(fields) = config.as_object() else { return self.add_unknown(at, config) };
        let linear = || vec![Pattern::Linear];
        for (field, value) in fields {
            let key = format!("{at}.{field}");
            match (field.as_str(), value) {
                (_, Value::Null | Value::Bool(false)) | ("r1" | "r2" | "r3", Value::Bool(true)) => {}
                ("r4", Value::Bool(true)) => {
                    let down = ["*down_proj", "*.w2"].map(|glob| Pattern::Glob(glob.into()));
                    self.add(down.into(), Vec::new(), key);
                }
                (ONLINE, Value::Bool(true)) => self.add(linear(), Vec::new(), key),
                ("name" | "algorithm", name) if ROTATIONS.iter().any(|known| name == known) => {}
                (setting, _) if SETTINGS.contains(&setting) => {}
                _ => self.add_unknown(&key, value),
            }
        }
        if online_by_default && !fields.contains_key(ONLINE) && config["r1"] != false {
            self.add(linear(), Vec::new(), format!("{at}.{ONLINE}: true where it is not said"));
        }
    }

    /// Groups of compressed-tensors. Each lists what it is applied to.
    fn transform_config(&mut self, config: &Value, at: &str) {
        let Some(entries) = config.as_object() else { return self.add_unknown(at, config) };
        for (entry, value) in entries.iter().filter(|(_, value)| !says_nothing(value)) {
            let at = format!("{at}.{entry}");
            match value.as_object().filter(|_| entry == "config_groups") {
                Some(groups) => {
                    groups.iter().for_each(|(name, group)| self.group(group, &format!("{at}.{name}")));
                }
                None => self.add_unknown(&at, value),
            }
        }
    }

    fn group(&mut self, group: &Value, at: &str) {
        let applied = match (group, group.get("apply")) {
            (Value::Object(_), None | Some(Value::Null)) => return,
            (_, Some(Value::Array(applied))) => applied,
            _ => return self.add_unknown(at, group),
        };
        for apply in applied {
            if ELSEWHERE.iter().any(|location| apply["location"] == *location) {
                continue;
            }
            let known = ["input", "output"].iter().any(|location| apply["location"] == *location);
            let patterns = |part| -> Result<Vec<Pattern>, Error> {
                let names = strings(apply, part, self.file)?.into_iter();
                names.map(|name| Pattern::target(name, self.file, at)).collect()
            };
            match (patterns("targets"), patterns("ignore")) {
                (Ok(targets), Ok(ignore)) if !targets.is_empty() => {
                    let unknown = format!("{at}.apply.location: {}", apply["location"]);
                    self.add(targets, ignore, if known { at.into() } else { unknown });
                }
                _ => self.add_unknown(&format!("{at}.apply"), apply),
            }
        }
    }
}
