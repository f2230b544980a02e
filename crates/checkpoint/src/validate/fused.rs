//! Scales of layers that engines read as one, and modules that loaders do not find as the configuration declares them.
//!
//! A model breaks these rules in every layer or in none: each makes one finding, with a count and the worst of all.

use std::collections::BTreeMap;

use dualgemm_formats::GlobalScale;

use super::{Finding, RULES};
use crate::Checkpoint;
use crate::convention::Role;
use crate::linear::{Kept, Set, fused, kept, linear_weight};
use crate::module::Place;
use crate::scheme::{Input, Weights};

/// Conventions whose loaders take one tensor scale for what they fuse, and read linear layers alone.
const LOADED: [&str; 2] = ["modelopt", "compressed-tensors"];

/// Scales of layers that are read as one, and are not the same.
struct Difference {
    module: String,
    what: String,
    scales: [GlobalScale; 2],
    ratio: f64,
    then: String,
}

/// Differences by rule.
#[derive(Default)]
pub(super) struct Differences(BTreeMap<&'static str, Vec<Difference>>);

impl Differences {
    /// Compares the scales of some layers: the smallest and the largest are named. `layers` says whose they are.
    pub(super) fn compare(
        &mut self,
        rule: &'static str,
        module: &str,
        (what, layers): (&str, &str),
        scales: &[GlobalScale],
        then: impl FnOnce() -> String,
    ) {
        let order = |a: &&GlobalScale, b: &&GlobalScale| a.exact().total_cmp(&b.exact());
        let (Some(least), Some(most)) = (scales.iter().min_by(order), scales.iter().max_by(order)) else {
            return;
        };
        if least.value() == most.value() {
            return;
        }
        // Of two, in the order of the file.
        let scales = if let &[first, second] = scales { [first, second] } else { [*least, *most] };
        self.0.entry(rule).or_default().push(Difference {
            module: module.into(),
            what: format!("{what} of {layers}"),
            scales,
            ratio: most.exact() / least.exact(),
            then: then(),
        });
    }

    pub(super) fn into_findings(mut self, findings: &mut Vec<Finding>) {
        for rule in RULES.iter().map(|rule| rule.id) {
            let all = self.0.remove(rule).unwrap_or_default();
            let Some(worst) = all.iter().reduce(|a, b| if b.ratio > a.ratio { b } else { a }) else {
                continue;
            };
            let Difference { module, what, scales: [a, b], ratio, then } = worst;
            let (a, b) = (a.held(), b.held());
            let of_all = match all.len() {
                1 => String::new(),
                n => format!("; the worst of {n} sets of layers"),
            };
            let ratio = if *ratio < 1e4 { format!("{ratio:.4}") } else { format!("{ratio:.1e}") };
            let message = format!("{module}: {what} differ, {a} and {b} (x{ratio}); {then}{of_all}");
            findings.push(Finding::new(rule, module, format!("{a} and {b}"), message));
        }
    }
}

impl Checkpoint {
    fn is_loaded_by_engines(&self) -> bool {
        LOADED.contains(&self.convention().name)
    }

    /// What becomes of tensor scales that differ.
    pub(super) fn then_tensor_scales(&self) -> String {
        let engines = ", but vLLM takes one for all of them: quantize again from floats, with one scale for what is fused \
                       (`dualgemm quantize` gives them one)";
        format!("each is kept here{}", if self.is_loaded_by_engines() { engines } else { "" })
    }

    /// Tensor scales of what is fused outside of MLPs: q, k and v.
    pub(super) fn check_fused(&self, differences: &mut Differences) {
        if !self.is_loaded_by_engines() {
            return;
        }
        let mut sets: BTreeMap<Set<'_>, Vec<(&str, GlobalScale)>> = BTreeMap::new();
        for name in self.index().modules.keys() {
            let Some(key) = fused(name).filter(|_| Place::parse(name).is_none()) else { continue };
            // What cannot be read has been found at its module.
            let scale = self.stored(name).and_then(|stored| self.checked_scale(name, &stored, None));
            if let Ok(scale) = scale {
                sets.entry(key).or_default().push((name, scale));
            }
        }
        for ((_, names), members) in sets {
            let scales: Vec<GlobalScale> = members.iter().map(|(_, scale)| *scale).collect();
            let what = ("tensor scales", &*names.join(", "));
            differences
                .compare("halves-tensor-scale", members[0].0, what, &scales, || self.then_tensor_scales());
        }
    }

    /// Modules that loaders take for something else than the file holds.
    pub(super) fn check_declared(&self, findings: &mut Vec<Finding>) {
        if !self.is_loaded_by_engines() {
            return;
        }
        let (mut promised, mut unexplained) = (Vec::new(), Vec::new());
        for (name, module) in &self.index().modules {
            let Some(weight) = module.get(Role::Weight).and_then(|tensor| self.files().get(tensor)) else {
                continue;
            };
            let scheme = self.scheme(name);
            let found = || findings.iter().any(|f| f.tensor == *name);
            let as_float = matches!(scheme.weights, Weights::Blocks(_) | Weights::Float(_));
            if weight.dtype.is_8_bit_float() && weight.shape.len() > 1 && as_float && !found() {
                unexplained.push((name, weight.dtype));
            }
            // Without a configuration that says so, nothing is promised.
            let Weights::Blocks(format) = &scheme.weights else { continue };
            let what = kept(name);
            if self.is_packed_module(name) && what == Some(Kept::Embedding) {
                let message = format!(
                    "{name}: is an embedding in {format}; loaders of {} read embeddings as floats alone, and leave this \
                     one as it was made",
                    self.convention().name
                );
                findings.push(Finding::new("declared", name, format.to_string(), message));
            }
            let head = what == Some(Kept::Head) && self.convention().name == "compressed-tensors";
            let linear = linear_weight(weight.name, weight.dtype, weight.shape).is_some();
            if scheme.input != Input::Optional && linear && (what.is_none() || head) {
                promised.push((name, weight.dtype, format));
            }
        }
        let more = |others: usize| match others {
            0 => String::new(),
            n => format!(" ({n} more like it)"),
        };
        if let [(name, dtype), others @ ..] = unexplained.as_slice() {
            let more = more(others.len());
            let message =
                format!("{name}: is {dtype}, and nothing in the configuration says how to scale it{more}");
            findings.push(Finding::new("declared", *name, dtype.to_string(), message));
        }
        if let [(name, dtype, format), others @ ..] = promised.as_slice() {
            let more = more(others.len());
            let message = format!(
                "{name}: is {dtype}, but the configuration says {format}; what stays in floats must be named in `ignore`{more}"
            );
            findings.push(Finding::new("declared", *name, dtype.to_string(), message));
        }
    }
}
