//! The linear layers of a checkpoint, compactly: layers that have the same ones are told of together.

use std::collections::BTreeMap;
use std::fmt;

use dualgemm::checkpoint::ModuleInfo;

use crate::report::{starred, times};

/// What a layer has: by format and shape, the names below the layer, with how many experts have one.
type Layer = BTreeMap<String, BTreeMap<String, usize>>;

/// The linear layers, by what their names begin with.
#[derive(Debug, Default)]
pub struct Matrices {
    layers: BTreeMap<(String, usize), Layer>,
    /// Those of no layer.
    alone: Vec<(String, String)>,
}

impl Matrices {
    /// Puts modules together.
    pub fn of(modules: &[ModuleInfo]) -> Self {
        let mut this = Self::default();
        for module in modules {
            let format = format!("{} {:?}", module.format, module.shape);
            let name = starred(&module.name, 1);
            let Some((above, number, below)) = split(&name) else {
                this.alone.push((name, format));
                continue;
            };
            let layer = this.layers.entry((above.into(), number)).or_default();
            *layer.entry(format).or_default().entry(below.into()).or_default() += 1;
        }
        this
    }
}

/// The name above a layer's number, the number, and the name below it.
fn split(name: &str) -> Option<(&str, usize, &str)> {
    let mut at = 0;
    for part in name.split('.') {
        let end = at + part.len();
        if let (Ok(number), Some(below)) = (part.parse(), name.get(end + 1..)) {
            return Some((name[..at].trim_end_matches('.'), number, below));
        }
        at = end + 1;
    }
    None
}

impl fmt::Display for Matrices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut layers = self.layers.iter().peekable();
        while let Some(((above, first), layer)) = layers.next() {
            let mut last = *first;
            while let Some(((_, next), _)) =
                layers.next_if(|((other, next), same)| (other, *next, *same) == (above, last + 1, layer))
            {
                last = *next;
            }
            match last == *first {
                true => writeln!(f, "matrices of {above}.{first}")?,
                false => writeln!(f, "matrices of {above}.{first} to {last}, each")?,
            }
            for (format, names) in layer {
                let names: Vec<_> = names.iter().map(|(name, count)| times(name, *count)).collect();
                writeln!(f, "  {format:<24} {}", names.join(", "))?;
            }
        }
        self.alone.iter().try_for_each(|(name, format)| writeln!(f, "{name:<26} {format}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_have_the_same_matrices_are_one() {
        let module = |name: &str, format: &str, shape: [usize; 2]| ModuleInfo {
            name: name.into(),
            format: format.into(),
            shape: shape.into(),
        };
        let mut modules = vec![module("lm_head", "bf16", [64, 32])];
        for layer in [0, 1, 2, 4, 11] {
            modules.push(module(&format!("model.layers.{layer}.self_attn.q_proj"), "bf16", [32, 32]));
            for expert in 0..layer.clamp(1, 2) {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.down_proj");
                modules.push(module(&name, "nvfp4", [32, 64]));
            }
        }
        let found = Matrices::of(&modules).to_string();
        let expected = "\
matrices of model.layers.0 to 1, each
  bf16 [32, 32]            self_attn.q_proj
  nvfp4 [32, 64]           mlp.experts.*.down_proj
matrices of model.layers.2
  bf16 [32, 32]            self_attn.q_proj
  nvfp4 [32, 64]           mlp.experts.*.down_proj (2)
matrices of model.layers.4
  bf16 [32, 32]            self_attn.q_proj
  nvfp4 [32, 64]           mlp.experts.*.down_proj (2)
matrices of model.layers.11
  bf16 [32, 32]            self_attn.q_proj
  nvfp4 [32, 64]           mlp.experts.*.down_proj (2)
lm_head                    bf16 [64, 32]
";
        assert_eq!(found, expected);
    }
}
