//! Which tensors are quantized, and what the others are.

use std::collections::{BTreeMap, BTreeSet};

use dualgemm::checkpoint::{FloatWeight, FusedExperts, TensorFiles, TensorOut, TensorView, linear};

use super::{Form, Kept, module};

/// What becomes of the tensors of a model.
#[derive(Default)]
pub(super) struct Choice<'a> {
    pub(super) chosen: Vec<FloatWeight<'a>>,
    /// Written as they are, and biases of experts taken apart.
    pub(super) copied: Vec<TensorOut<'a>>,
    /// Weights among the copied tensors, and why they are.
    pub(super) kept: Vec<Kept>,
}

impl<'a> Choice<'a> {
    pub(super) fn of(files: &'a TensorFiles, skip: &[String], form: Form) -> Self {
        let mut choice = Self::default();
        let (experts, left) = FusedExperts::all(files);
        let mut of_experts: BTreeSet<&str> = left.iter().map(|(tensor, _)| tensor.name).collect();
        choice
            .kept
            .extend(left.iter().map(|(tensor, why)| Kept { name: tensor.name.into(), why: why.clone() }));
        choice.copied.extend(left.iter().map(|(tensor, _)| TensorOut::from(tensor)));
        for experts in &experts {
            of_experts.extend(experts.weights().map(|t| t.name));
            of_experts.extend(experts.biases().map(|t| t.name));
            choice.add_experts(experts, skip, form);
        }
        for tensor in files.tensors().filter(|t| !of_experts.contains(t.name)) {
            if choice.takes(&tensor, skip, form) {
                choice.chosen.push(tensor.into());
            } else {
                choice.copied.push(TensorOut::from(&tensor));
            }
        }
        choice
    }

    fn add_experts(&mut self, experts: &FusedExperts<'a>, skip: &[String], form: Form) {
        let together = form.is_modelopt() && experts.stays_one_in_modelopt();
        let weights = if together { experts.together().into() } else { experts.apart() };
        let skipped = experts.weights().iter().find_map(|t| skipped(t.name, skip));
        let why = skipped.or_else(|| form.no_experts().map(str::to_owned));
        let why = why.or_else(|| weights.iter().find_map(|w| form.misfit(w.k())));
        if together || why.is_some() {
            self.copied.extend(experts.biases().map(TensorOut::from));
        } else {
            self.copied.extend(experts.biases_apart());
        }
        match why {
            Some(why) => {
                let kept = |t: &&TensorView<'_>| Kept { name: t.name.into(), why: why.clone() };
                self.kept.extend(experts.weights().iter().map(kept));
                self.copied.extend(experts.weights().map(TensorOut::from));
            }
            None => self.chosen.extend(weights),
        }
    }

    /// Whether a tensor is quantized; a linear layer that is not is added to those that are kept.
    fn takes(&mut self, t: &TensorView<'_>, skip: &[String], form: Form) -> bool {
        let Some(module) = linear::linear_weight(t.name, t.dtype, t.shape) else {
            // Looks like one and is not.
            let embedding = t.dtype.is_float() && linear::kept(t.name) == Some(linear::Kept::Embedding);
            if embedding && t.shape.len() == 2 {
                self.kept.push(Kept { name: t.name.into(), why: linear::Kept::Embedding.to_string() });
            }
            return false;
        };
        let why = skipped(t.name, skip)
            .or_else(|| linear::kept(module).map(|what| what.to_string()))
            .or_else(|| form.misfit(t.shape[1]));
        let chosen = why.is_none();
        self.kept.extend(why.map(|why| Kept { name: t.name.into(), why }));
        chosen
    }
}

fn skipped(name: &str, skip: &[String]) -> Option<String> {
    skip.iter().find(|part| name.contains(*part)).map(|part| format!("--skip {part}"))
}

/// Tensors that get one tensor scale: each alone, or those that engines read as one.
pub(super) fn groups(weights: Vec<FloatWeight<'_>>, separate: bool) -> Vec<Vec<FloatWeight<'_>>> {
    let mut groups: Vec<Vec<FloatWeight<'_>>> = Vec::new();
    let mut known: BTreeMap<_, usize> = BTreeMap::new();
    for weight in weights {
        let key = linear::fused(module(&weight.name)).filter(|_| !separate);
        match key.map(|(parent, names)| (parent.to_owned(), names)) {
            Some(key) => match known.get(&key) {
                Some(&at) => groups[at].push(weight),
                None => {
                    known.insert(key, groups.len());
                    groups.push(vec![weight]);
                }
            },
            None => groups.push(vec![weight]),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use dualgemm::checkpoint::Dtype;

    use super::*;

    fn view<'a>(name: &'a str, shape: &'a [usize], bytes: &'a [u8]) -> TensorView<'a> {
        TensorView { name, dtype: Dtype::F32, shape, bytes }
    }

    #[test]
    fn only_what_engines_fuse_shares() {
        let (shape, bytes) = ([1, 16], [0u8; 64]);
        let names = [
            "l.0.gate_proj.weight",
            "l.0.up_proj.weight",
            "l.1.gate_proj.weight",
            "l.0.down_proj.weight",
            "l.0.attn.q_proj.weight",
            "l.0.attn.k_proj.weight",
            "l.0.attn.v_proj.weight",
            "l.0.attn.o_proj.weight",
        ];
        let views = || names.map(|name| FloatWeight::from(view(name, &shape, &bytes))).to_vec();
        let sizes = |separate| groups(views(), separate).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(sizes(false), [2, 1, 1, 3, 1]);
        assert_eq!(sizes(true), [1; 8]);
    }
}
