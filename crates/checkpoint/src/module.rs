//! From tensor names to modules, and from modules to the gated MLPs of a model's layers.
//!
//! | naming style | example |
//! |---|---|
//! | Hugging Face | `model.layers.I.mlp.{gate,up,down,gate_up}_proj` |
//! | Mixtral | `model.layers.I.block_sparse_moe.experts.E.{w1,w3,w2}` |
//! | Granite | `model.layers.I.{block_sparse_moe,shared_mlp}.{input,output}_linear`, experts in one tensor |
//! | HunYuan | `model.layers.I.mlp.{gate_and_up,down}_proj` |
//! | Llama | `layers.I.feed_forward.{w1,w3,w2}` |
//! | Step | `model.layers.I.{moe,share_expert}.{gate,up,down}_proj`, experts in one tensor |
//! | MLX | `model.layers.I.mlp.switch_mlp.{gate,up,down}_proj`, experts in one tensor |
//! | GGUF | `blk.I.ffn_{gate,up,down,gate_up}`, `…_exps`, `…_shexp` |

use std::collections::BTreeMap;

use crate::TensorFiles;
use crate::convention::{Convention, Role};

/// What a module is in a gated MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Projection {
    Gate,
    Up,
    GateUp,
    Down,
}

dualgemm_formats::named! {
    /// Which of a layer's MLPs.
    #[derive(PartialOrd, Ord, serde::Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum MlpKind {
        /// The layer's one MLP.
        Dense = "dense MLP",
        /// The expert that every token goes through.
        Shared = "shared expert",
        /// The routed experts.
        Experts = "experts",
    }
}

/// One MLP of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The layer's one MLP.
    Dense,
    /// The expert that every token goes through.
    Shared,
    /// A routed expert.
    Expert(usize),
}

impl Which {
    /// Which of a layer's MLPs it is, or is one of.
    pub fn kind(self) -> MlpKind {
        match self {
            Self::Dense => Dense,
            Self::Shared => Shared,
            Self::Expert(_) => Experts,
        }
    }
}

use MlpKind::{Dense, Experts, Shared};
use Projection::{Down, Gate, GateUp, Up};

/// Last part of a module name, what it is, and the kind of MLP where the name says it.
const PROJECTIONS: &[(&str, Projection, Option<MlpKind>)] = &[
    ("gate_proj", Gate, None),
    ("up_proj", Up, None),
    ("down_proj", Down, None),
    ("gate_up_proj", GateUp, None),
    ("w1", Gate, None),
    ("w3", Up, None),
    ("w2", Down, None),
    ("w13", GateUp, None),
    ("gate_and_up_proj", GateUp, None),
    ("input_linear", GateUp, None),
    ("output_linear", Down, None),
    ("ffn_gate", Gate, None),
    ("ffn_up", Up, None),
    ("ffn_down", Down, None),
    ("ffn_gate_up", GateUp, None),
    ("ffn_gate_exps", Gate, Some(Experts)),
    ("ffn_up_exps", Up, Some(Experts)),
    ("ffn_down_exps", Down, Some(Experts)),
    ("ffn_gate_up_exps", GateUp, Some(Experts)),
    ("ffn_gate_shexp", Gate, Some(Shared)),
    ("ffn_up_shexp", Up, Some(Shared)),
    ("ffn_down_shexp", Down, Some(Shared)),
];

/// Parts of a name that say that routed experts follow, the last of them next to the number of one.
pub(crate) const ROUTED: &[&str] = &["block_sparse_moe", "experts", "local_experts", "moe", "switch_mlp"];
/// How the part of a name starts that says that it is of the shared expert.
pub(crate) const SHARED: &[&str] = &["shared_expert", "share_expert", "shared_mlp"];

fn last_part(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

/// Whether the last part of a name is one of a gated MLP's projections.
pub(crate) fn ends_in_projection(module: &str) -> bool {
    PROJECTIONS.iter().any(|(name, ..)| *name == last_part(module))
}

/// Where a module stands in a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// The MLP's name: what its modules have in common, without an expert's number.
    pub(crate) path: String,
    pub(crate) layer: usize,
    pub(crate) kind: MlpKind,
    /// Number of the expert where each has modules of its own; `None` also for experts in one tensor.
    pub(crate) expert: Option<usize>,
    pub(crate) projection: Projection,
}

impl Place {
    /// Reads a module name. A name without a number is of layer 0: a file that holds one MLP.
    pub(crate) fn parse(module: &str) -> Option<Self> {
        // A layer that adapters were put beside, which are chosen at run time (Phi-4-multimodal).
        let module = module.strip_suffix(".base_layer").unwrap_or(module);
        let (parent, last) = module.rsplit_once('.').unwrap_or(("", module));
        let &(_, projection, fixed) = PROJECTIONS.iter().find(|(name, ..)| *name == last)?;
        let parts: Vec<&str> = parent.split('.').filter(|p| !p.is_empty()).collect();
        // `self_attn.gate_proj` scales the output of attention (Trinity).
        if parts.iter().any(|p| p.contains("attn") || *p == "attention") {
            return None;
        }
        // A number that counts no layers and no experts, as -1 or 2⁶⁴, would be taken for a name, and its layer for 0.
        let is_number = |p: &str| {
            let digits = p.strip_prefix('-').unwrap_or(p);
            !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
        };
        if parts.iter().any(|p| is_number(p) && p.parse::<usize>().is_err()) {
            return None;
        }
        let number = |i: usize| parts.get(i).and_then(|p| p.parse::<usize>().ok());
        let experts = parts.iter().rposition(|p| ROUTED.contains(p));
        let expert_at = experts.map(|i| i + 1).filter(|&i| number(i).is_some());
        // Kimi-Linear's dense MLPs go by the name of the block; of its projections alone Granite's hold all experts.
        let of_block = |i: usize| parts[i] == "block_sparse_moe" && !last.ends_with("_linear");
        let experts = experts.filter(|&i| expert_at.is_some() || !of_block(i));
        let layer_at = (0..parts.len()).find(|&i| number(i).is_some() && Some(i) != expert_at);
        let kind = fixed.unwrap_or(if parts.iter().any(|p| SHARED.iter().any(|s| p.starts_with(s))) {
            // Below `moe`, too.
            Shared
        } else if experts.is_some() {
            Experts
        } else {
            Dense
        });
        let path: Vec<&str> =
            parts.iter().enumerate().filter(|(i, _)| Some(*i) != expert_at).map(|(_, p)| *p).collect();
        Some(Self {
            path: path.join("."),
            layer: layer_at.and_then(number).unwrap_or(0),
            kind,
            expert: expert_at.and_then(number),
            projection,
        })
    }
}

/// The tensors of one module, by role.
#[derive(Debug, Default)]
pub(crate) struct Module {
    tensors: BTreeMap<Role, String>,
    /// Tensors under the name of its weight that are none of these and not known to be harmless.
    pub(crate) unknown: Vec<String>,
}

impl Module {
    pub(crate) fn get(&self, role: Role) -> Option<&str> {
        self.tensors.get(&role).map(String::as_str)
    }

    pub(crate) fn tensors(&self) -> impl Iterator<Item = &str> {
        self.tensors.values().map(String::as_str)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    pub(crate) path: String,
    pub(crate) layer: usize,
    pub(crate) kind: MlpKind,
    modules: BTreeMap<(Option<usize>, Projection), String>,
}

impl Mlp {
    /// The module of an expert (`None`: of the MLP itself, or of all experts in one tensor).
    pub(crate) fn module(&self, expert: Option<usize>, projection: Projection) -> Option<&str> {
        self.modules.get(&(expert, projection)).map(String::as_str)
    }

    /// Numbers of the experts that have modules of their own.
    pub(crate) fn experts(&self) -> Vec<usize> {
        let mut experts: Vec<usize> = self.modules.keys().filter_map(|(e, _)| *e).collect();
        experts.dedup();
        experts
    }

    /// The expert to ask [`module`](Self::module) for: none where all experts are in one tensor.
    pub(crate) fn own(&self, expert: Option<usize>) -> Option<usize> {
        expert.filter(|_| !self.experts().is_empty())
    }

    /// The module that holds gate, or gate and up, of all experts in one tensor.
    pub(crate) fn of_all_experts(&self) -> Option<&str> {
        self.module(None, Gate).or_else(|| self.module(None, GateUp))
    }

    /// Whether gate and up are one tensor.
    pub(crate) fn is_fused(&self) -> bool {
        self.modules.keys().any(|(_, p)| *p == GateUp)
    }

    pub(crate) fn modules(&self) -> impl Iterator<Item = &str> {
        self.modules.values().map(String::as_str)
    }
}

/// Modules by name, and the MLPs they form by layer.
#[derive(Debug)]
pub(crate) struct ModuleIndex {
    pub(crate) modules: BTreeMap<String, Module>,
    pub(crate) mlps: Vec<Mlp>,
    /// Name of an MLP without a gate, where there is one.
    pub(crate) ungated: Option<String>,
    /// Tensors that belong to no module of the convention.
    pub(crate) others: Vec<String>,
}

impl ModuleIndex {
    /// Groups tensor names. With `within`, only MLPs whose name starts with it are listed.
    pub(crate) fn new(files: &TensorFiles, convention: &Convention, within: Option<&str>) -> Self {
        let (modules, others) = group(files, convention);
        let mut mlps: BTreeMap<(usize, String, MlpKind), Mlp> = BTreeMap::new();
        for (name, module) in &modules {
            // Scales without a weight still say that there was to be one.
            let has_weight = module.get(Role::Weight).or(module.get(Role::BlockScale)).is_some();
            let Some(place) = Place::parse(name).filter(|_| has_weight) else { continue };
            if within.is_some_and(|w| !name.starts_with(w)) {
                continue;
            }
            mlps.entry((place.layer, place.path.clone(), place.kind))
                .or_insert_with(|| Mlp {
                    path: place.path,
                    layer: place.layer,
                    kind: place.kind,
                    modules: BTreeMap::new(),
                })
                .modules
                .insert((place.expert, place.projection), name.clone());
        }
        // A gated MLP has a gate: an MLP with `up_proj` and `down_proj` alone is not one.
        let gated = |m: &Mlp| m.modules.keys().any(|(_, p)| matches!(p, Gate | GateUp));
        if files.gguf_metadata().and(files.family()).is_some_and(|family| family.fused_up) {
            for mlp in mlps.values_mut().filter(|mlp| !gated(mlp)) {
                let both = mlp.modules.remove(&(None, Up));
                mlp.modules.extend(both.map(|name| ((None, GateUp), name)));
            }
        }
        let (mlps, ungated): (Vec<Mlp>, Vec<Mlp>) = mlps.into_values().partition(gated);
        Self { modules, mlps, ungated: ungated.into_iter().next().map(|mlp| mlp.path), others }
    }
}

fn holds_4_bits(files: &TensorFiles, tensor: &str) -> bool {
    files.get(tensor).is_some_and(|t| t.dtype.holds_4_bits())
}

/// Modules by name, and the tensors that belong to none. What lies under the name of a 4-bit weight and is not understood
/// stays with its module, so that it is not passed over.
fn group(files: &TensorFiles, convention: &Convention) -> (BTreeMap<String, Module>, Vec<String>) {
    let mut modules: BTreeMap<String, Module> = BTreeMap::new();
    let (mut others, mut seconds) = (Vec::new(), Vec::new());
    for t in files.tensors() {
        let Some((name, role)) = convention.split(t.name) else {
            others.push(t.name.to_owned());
            continue;
        };
        let module = modules.entry(name.into()).or_default();
        let Some(first) = module.tensors.insert(role, t.name.into()) else { continue };
        // `weight_packed` and the float `weight` that it was made from side by side: the packed one is the weight.
        let packed = [&*first, t.name].map(|tensor| holds_4_bits(files, tensor));
        let second = if packed[0] || !packed[1] {
            module.tensors.insert(role, first);
            t.name.to_owned()
        } else {
            first
        };
        if role != Role::Weight || packed[0] == packed[1] {
            module.unknown.push(second.clone());
        }
        seconds.push(second);
    }
    // The nearest module above by name: a part of the name ends there, or an ending without a dot begins.
    let owner = |name: &str, boundary: &[char]| {
        let known = |at: usize| modules.get_key_value(&name[..at]).map(|(owner, _)| owner.clone());
        let mut ends = name.rmatch_indices(boundary).map(|(at, _)| at);
        ends.find_map(|at| known(at).filter(|m| name[at..].starts_with('.') || ends_in_projection(m)))
    };
    let mut unknown: Vec<(String, String)> =
        others.iter().filter_map(|t| Some((owner(t, &['.', '_'])?, t.clone()))).collect();
    for (name, module) in &modules {
        if let Some(owner) = owner(name, &['.']) {
            unknown.extend(module.tensors().map(|t| (owner.clone(), t.to_owned())));
        }
    }
    for (owner, tensor) in unknown {
        if !convention.is_harmless(&tensor) {
            modules.entry(owner).or_default().unknown.push(tensor);
        }
    }
    others.append(&mut seconds);
    (modules, others)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_count_no_layer_are_no_place() {
        for layer in ["-1", "18446744073709551616"] {
            assert!(Place::parse(&format!("model.layers.{layer}.mlp.gate_proj")).is_none());
            assert!(Place::parse(&format!("model.layers.0.mlp.experts.{layer}.gate_proj")).is_none());
        }
    }

    #[test]
    fn names_of_every_style_are_placed() {
        // The path of the MLP, the rest of the name, layer, kind, expert, projection.
        for row in [
            "model.layers.3.mlp .gate_proj 3 Dense - Gate",
            "layers.7.feed_forward .w2 7 Dense - Down",
            "model.layers.1.block_sparse_moe.experts .12.w3 1 Experts 12 Up",
            "model.layers.2.mlp.experts .gate_up_proj 2 Experts - GateUp",
            "model.layers.2.mlp.shared_experts .up_proj 2 Shared - Up",
            "blk.5 .ffn_gate 5 Dense - Gate",
            "blk.5 .ffn_gate_exps 5 Experts - Gate",
            "blk.5 .ffn_down_shexp 5 Shared - Down",
            "experts .4.w1 0 Experts 4 Gate",
            "model.layers.3.mlp .gate_up_proj.base_layer 3 Dense - GateUp",
            "model.layers.3.moe .up_proj 3 Experts - Up",
            "model.layers.3.moe.experts .1.up_proj 3 Experts 1 Up",
            "model.layers.3.share_expert .gate_proj 3 Shared - Gate",
            "model.layers.0.mlp.shared_mlp .down_proj 0 Shared - Down",
            "model.layers.3.moe.shared_experts .up_proj 3 Shared - Up",
            " gate_proj 0 Dense - Gate",
            "model.layers.2.block_sparse_moe .input_linear 2 Experts - GateUp",
            "model.layers.0.block_sparse_moe .gate_proj 0 Dense - Gate",
            "model.layers.2.shared_mlp .output_linear 2 Shared - Down",
            "model.layers.4.mlp .gate_and_up_proj 4 Dense - GateUp",
        ] {
            let mut parts = row.split(' ');
            let name: String = parts.by_ref().take(2).collect();
            let Place { path, layer, kind, expert, projection, .. } = Place::parse(&name).unwrap();
            let (rest, expert) = (&name[path.len()..], expert.map_or("-".into(), |e| e.to_string()));
            assert_eq!(format!("{path} {rest} {layer} {kind:?} {expert} {projection:?}"), row);
        }
        for name in [
            "model.layers.0.mlp.gate",
            "model.norm",
            "lm_head",
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.self_attn.gate_proj",
            "",
        ] {
            assert_eq!(Place::parse(name), None, "{name}");
        }
    }
}
