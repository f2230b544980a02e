//! Numbers of `config.json`, or of a GGUF file's metadata, beside the tensors: sizes, layers, experts. Loaders make their layers
//! by these numbers; here the tensors alone decide what is computed, and each number that they contradict is one finding.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::Finding;
use crate::families::{Owner, owner};
use crate::model_config::{ARCHITECTURE, CONTENTS, EXPERT_COUNT, from_value, model_field, parts};
use crate::module::{Mlp, MlpKind, Projection};
use crate::{Checkpoint, Error, JsonFile, TensorView};

/// Parts of the entries that say how many features lie between up and down. Some families have several for one kind of MLP.
const BETWEEN: [&str; 5] = ["intermediate", "ffn", "ff_dim", "expert_dim", "feed_forward"];
/// Where one of these is there, the family computes that number from others.
const COMPUTED: [&str; 3] = ["block_auto_adjust_ff_dim", "block_configs", "use_double_wide_mlp"];
/// Parts of the entries that count layers that predict further tokens. Files may have them or not.
const FURTHER: [&str; 2] = ["nextn", "mtp"];

impl Checkpoint {
    /// `config.json`, or the metadata of a GGUF file without the architecture's name, where 0 says nothing.
    fn numbers(&self) -> Option<Cow<'_, JsonFile>> {
        let config = self.files().config()?;
        let Some(metadata) = self.files().gguf_metadata() else { return Some(Cow::Borrowed(config)) };
        let architecture = metadata.iter().find(|(key, _)| key == ARCHITECTURE)?.1.as_str()?;
        let own = |key: &str| Some(key.strip_prefix(architecture)?.strip_prefix('.')?.to_owned());
        let entries = metadata.iter().filter(|(_, value)| value.as_u64() != Some(0));
        let value = entries.filter_map(|(key, value)| Some((own(key)?, from_value(value)))).collect();
        Some(Cow::Owned(JsonFile { path: config.path.clone(), value }))
    }

    pub(super) fn check_numbers(&self, findings: &mut Vec<Finding>) {
        let Some(config) = self.numbers() else { return };
        let file = config.path.display();
        let mut number = |keys: &[&'static str]| {
            number(&config, keys).unwrap_or_else(|e| {
                findings.push(Finding::from(&e));
                None
            })
        };
        let hidden = number(&["hidden_size", "embedding_length"]);
        let between = number(&["intermediate_size", "feed_forward_length"]);
        let of_experts = number(&["moe_intermediate_size", "expert_feed_forward_length"]).or(between);
        let layers = number(&["num_hidden_layers", "block_count"]);
        let experts = number(&EXPERT_COUNT);
        let entries = || parts(&config.value).filter_map(Value::as_object).flatten();
        let has = |part: &str| entries().any(|(key, _)| key.contains(part));

        let mut add = |rule, (key, value): (&str, usize), tensors: String| {
            let message = format!("{file}: {key} is {value}, but {tensors}");
            findings.push(Finding::new(rule, format!("{file}: {key}"), value.to_string(), message));
        };
        let ours = || self.index().mlps.iter().filter(|mlp| !matches!(owner(&mlp.path), Owner::Unknown(_)));
        // Routed experts may lie behind a projection to fewer features.
        let of_model = |mlp: &&Mlp| mlp.kind != MlpKind::Experts || !has("latent");
        let sizes = |mlp| self.sizes(mlp);
        if let Some(stated) = hidden
            && let Some((name, k, _)) = ours().filter(of_model).filter_map(sizes).find(|s| s.1 != stated.1)
        {
            add("hidden-size", stated, format!("the K of `{name}` is {k}"));
        }
        let mut known: BTreeSet<u64> = BTreeSet::new();
        for (_, value) in entries().filter(|(key, _)| BETWEEN.iter().any(|part| key.contains(part))) {
            let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            known.extend(values.iter().filter_map(Value::as_u64));
        }
        for (stated, kind) in [(between, MlpKind::Dense), (of_experts, MlpKind::Experts)] {
            // Arctic's MLP beside its experts has the model's hidden size.
            let counted = |mlp: &&Mlp| mlp.kind == kind && !mlp.path.ends_with("residual_mlp");
            let of_kind = || ours().filter(counted).filter_map(sizes);
            if let Some(stated) = stated.filter(|_| !COMPUTED.iter().any(|key| has(key)))
                && let Some((name, _, n)) = of_kind().find(|s| !known.contains(&(s.2 as u64)))
            {
                add("intermediate-size", stated, format!("the N of `{name}` is {n}"));
            }
        }
        if let Some(stated) = experts
            // One that is missing beside others is another finding.
            && let Some((path, count)) = ours().find_map(|mlp| {
                let count = self.expert_ids(mlp).len();
                let too_few = count < stated.1 && count > 0 && mlp.of_all_experts().is_some();
                let differs = count > stated.1 || too_few;
                (mlp.kind == MlpKind::Experts && differs).then_some((&mlp.path, count))
            })
        {
            add("expert-count", stated, format!("`{path}` has {count} experts"));
        }
        let further = entries().filter(|(key, _)| FURTHER.iter().any(|part| key.contains(part)));
        let further = further.filter_map(|(_, value)| value.as_u64()).fold(0, u64::saturating_add);
        // GGUF counts them among its own.
        let metadata = self.files().gguf_metadata();
        let fewer = metadata.map_or(0, |_| further);
        let is_part = metadata.is_some_and(|entries| entries.iter().any(|(key, _)| key == CONTENTS));
        let fits = |stated: u64, count| {
            (stated.saturating_sub(fewer)..=stated.saturating_add(further)).contains(&count)
        };
        let counts = self.layers_of(ours());
        if let Some(stated) = layers.filter(|_| self.is_within("") && !is_part)
            && let Some((path, count)) = counts.iter().next()
            && !counts.values().any(|&count| fits(stated.1 as u64, count as u64))
        {
            add("layer-count", stated, format!("there are {count} `{path}N`"));
        }
        let get = |key: &str| config.value.get(format!("attention.{key}"));
        // None also where each layer has its own.
        let number = |key, otherwise| get(key).map_or(otherwise, Value::as_u64);
        // Some have heads of two sizes.
        let Some(heads) = number("head_count", None).filter(|_| !has("_swa")) else { return };
        let usual = hidden.map(|(_, hidden)| hidden as u64 / heads);
        for (name, counted, length, axis) in [
            ("attn_k", "head_count_kv", "key_length", 0),
            ("attn_v", "head_count_kv", "value_length", 0),
            ("attn_output", "head_count", "value_length", 1),
        ] {
            let (Some(count), Some(each)) = (number(counted, Some(heads)), number(length, usual)) else {
                continue;
            };
            let size = count.saturating_mul(each);
            let ending = format!(".{name}.weight");
            let odd = |t: &TensorView<'_>| {
                let ours = t.name.starts_with("blk.") && t.name.ends_with(&ending);
                ours && t.shape.len() == 2 && t.shape[axis] as u64 != size
            };
            if let Some(tensor) = self.files().tensors().find(odd) {
                let (counted, what) = (format!("attention.{counted}"), ["rows", "columns"][axis]);
                let (name, found) = (tensor.name, tensor.shape[axis]);
                let tensors = format!("`{name}` has {found} {what}, and {length} is {each}");
                add("attention-size", (&counted, count as usize), tensors);
            }
        }
    }

    /// A module of gate, and K and N of its MLP, or of the first expert that can be read.
    pub(super) fn sizes<'a>(&self, mlp: &'a Mlp) -> Option<(&'a str, usize, usize)> {
        let experts = mlp.experts().into_iter().map(Some).chain([None]);
        let mut gates = experts.flat_map(|e| {
            [(Projection::Gate, 1), (Projection::GateUp, 2)].map(|(p, of)| Some((mlp.module(e, p)?, of)))
        });
        gates.find_map(|gate| {
            let (name, of) = gate?;
            let stored = self.is_packed_module(name).then(|| self.stored(name).ok())??;
            Some((name, stored.k, stored.rows / of))
        })
    }

    /// What comes before the number of a layer in the names of these MLPs, and how many layers have such names.
    fn layers_of<'a>(&'a self, mlps: impl Iterator<Item = &'a Mlp>) -> BTreeMap<&'a str, usize> {
        let layer_at = |name: &str, skip: usize| {
            let rest = name.get(skip..)?;
            let end = rest.find('.').unwrap_or(rest.len());
            rest[..end].parse::<usize>().ok()
        };
        let before = |mlp: &'a Mlp| {
            let mut starts = mlp.path.match_indices('.').map(|(at, _)| at + 1);
            let at = starts.find(|&at| layer_at(&mlp.path, at).is_some())?;
            Some(&mlp.path[..at])
        };
        let befores: BTreeSet<&str> = mlps.filter_map(before).collect();
        let count = |before: &str| {
            let numbered = self.files().tensors().filter(|t| t.name.starts_with(before));
            numbered.filter_map(|t| layer_at(t.name, before.len())).collect::<BTreeSet<_>>().len()
        };
        befores.into_iter().map(|before| (before, count(before))).collect()
    }
}

/// The first of these entries that is there and is one number for all layers.
fn number<'k>(config: &JsonFile, keys: &[&'k str]) -> Result<Option<(&'k str, usize)>, Error> {
    let entry = keys.iter().find_map(|key| Some((*key, model_field(&config.value, key)?)));
    let Some((key, found)) = entry.filter(|(_, value)| !value.is_array() && !value.is_object()) else {
        return Ok(None);
    };
    // A dense model of a family that has experts, too.
    let least = usize::from(keys != EXPERT_COUNT);
    match found.as_u64().and_then(|value| usize::try_from(value).ok()).filter(|&value| value >= least) {
        Some(value) => Ok(Some((key, value))),
        None => Err(Error::Config {
            file: config.path.clone(),
            key: key.into(),
            found: found.to_string(),
            valid: "a positive integer".into(),
        }),
    }
}
