//! Numbers of `config.json` beside the tensors: sizes, layers, experts. Loaders make their layers by these numbers; here the
//! tensors alone decide what is computed, and each number that they contradict is one finding.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::Finding;
use crate::families::{Owner, owner};
use crate::model_config::{EXPERT_COUNT, model_field, parts};
use crate::module::{Mlp, MlpKind, Projection};
use crate::{Checkpoint, Error, JsonFile};

/// Parts of the entries that say how many features lie between up and down. Some families have several for one kind of MLP.
const BETWEEN: [&str; 4] = ["intermediate", "ffn", "ff_dim", "expert_dim"];
/// Where one of these is there, the family computes that number from others.
const COMPUTED: [&str; 3] = ["block_auto_adjust_ff_dim", "block_configs", "use_double_wide_mlp"];
/// Parts of the entries that count layers that predict further tokens. Files may have them or not.
const FURTHER: [&str; 2] = ["nextn", "mtp"];

impl Checkpoint {
    pub(super) fn check_numbers(&self, findings: &mut Vec<Finding>) {
        let Some(config) = self.files().config() else { return };
        let file = config.path.display();
        let mut number = |keys: &[&'static str]| {
            number(config, keys).unwrap_or_else(|e| {
                findings.push(Finding::from(&e));
                None
            })
        };
        let hidden = number(&["hidden_size"]);
        let between = number(&["intermediate_size"]);
        let of_experts = number(&["moe_intermediate_size"]).or(between);
        let (layers, experts) = (number(&["num_hidden_layers"]), number(&EXPERT_COUNT));
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
            // One that is missing is another finding.
            && let Some((path, count)) = ours().find_map(|mlp| {
                let count = self.expert_ids(mlp).len();
                (mlp.kind == MlpKind::Experts && count > stated.1).then_some((&mlp.path, count))
            })
        {
            add("expert-count", stated, format!("`{path}` has {count} experts"));
        }
        let further = entries().filter(|(key, _)| FURTHER.iter().any(|part| key.contains(part)));
        let further = further.filter_map(|(_, value)| value.as_u64()).fold(0, u64::saturating_add);
        let fits = |stated: u64, count| (stated..=stated.saturating_add(further)).contains(&count);
        let counts = self.layers_of(ours());
        if let Some(stated) = layers.filter(|_| self.is_within(""))
            && let Some((path, count)) = counts.iter().next()
            && !counts.values().any(|&count| fits(stated.1 as u64, count as u64))
        {
            add("layer-count", stated, format!("there are {count} `{path}N`"));
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
