//! Families of models as data: what the configuration of each says about its gated MLPs.
//!
//! | file | what |
//! |---|---|
//! | `table.rs` | the rows, one per family |
//! | `activation.rs` | which activation an MLP has, read as the row of its family says, and where that is stated |
//! | `trunk.rs` | which MLPs are the language model's, told by their names |
//! | `words.rs` | entries that speak of an activation, whoever wrote them |
//!
//! Flow: [`Checkpoint::activation`](crate::Checkpoint::activation) finds the row by `model_type`, or by
//! `general.architecture` in GGUF. Of a family without a row nothing is assumed: either the configuration names the
//! activation in plain words, or whoever asks has to.

mod activation;
mod table;
mod trunk;
mod words;

pub use activation::{Origin, Stated};
pub(crate) use activation::{Said, no_configuration};
pub(crate) use trunk::{Owner, owner};
pub(crate) use words::{inner, says_nothing, speaks};

use serde_json::Value;

use crate::model_config::parts;
use crate::module::MlpKind;
use crate::{GateUpOrder, JsonFile};

/// Entries that name an activation in most configurations.
pub(crate) const COMMON_KEYS: &[&str] = &["hidden_act", "hidden_activation"];
/// Numbers of the gpt-oss activation: slope, what is added to up, limit; each with its usual value.
pub(crate) const OAI: [(&[&str], f32); 3] =
    [(&["swiglu_alpha", "hidden_act_alpha"], 1.702), (&["swiglu_beta"], 1.0), (&["swiglu_limit"], 7.0)];

/// Model types and architectures of GGUF whose MLPs have up and down alone, or that have no MLPs.
#[rustfmt::skip]
const NO_GATE: [&[&str]; 2] = [
    &[
        "bert", "bloom", "codegen", "falcon", "falcon_mamba", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
        "mamba", "mamba2", "nemotron", "nemotron_h", "opt", "persimmon", "phi", "rwkv", "starcoder2",
    ],
    &[
        "bert", "bloom", "falcon", "gpt2", "gptj", "gptneox", "mamba", "mamba2", "nemotron", "nemotron_h",
        "nemotron_h_moe", "phi2", "rwkv6", "rwkv7", "starcoder", "starcoder2",
    ],
];

/// A function of gate and up, before limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// `silu(g) · u`.
    Silu,
    /// `g · sigmoid(alpha · g) · (u + beta)` with the numbers of [`OAI`].
    Oai,
    /// `gelu(g) · u`, by the tanh approximation.
    GeluTanh,
    /// `relu(g) · u`.
    Relu,
    /// `relu(g)² · u`.
    Relu2,
}

impl Shape {
    /// What a configuration calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Oai => "swigluoai",
            Self::GeluTanh => "gelu_pytorch_tanh",
            Self::Relu => "relu",
            Self::Relu2 => "relu2",
        }
    }

    /// The function that goes by a name in every family. `gelu` is not one: it is the exact function in Hugging Face's code.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "silu" | "swish" | "swiglu" => Self::Silu,
            "swigluoai" => Self::Oai,
            "gelu_pytorch_tanh" | "gelu_new" | "gelu_tanh" | "gelu_fast" => Self::GeluTanh,
            "relu" => Self::Relu,
            "relu2" => Self::Relu2,
            _ => return None,
        })
    }
}

/// Where a family has its function from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Function {
    /// The first of these entries names it.
    Named {
        /// Entries, the one that decides first. Parts of a path are separated by dots.
        keys: &'static [&'static str],
        /// The function where there is no entry.
        otherwise: Option<Shape>,
        /// Names that mean another function in this family than elsewhere.
        also: &'static [(&'static str, Shape)],
    },
    /// The family's code has it built in.
    Fixed {
        shape: Shape,
        /// What its configurations may call it.
        names: &'static [&'static str],
    },
    /// It cannot be computed here: what it is.
    Missing(&'static str),
}

impl Function {
    fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Named { keys, .. } => keys,
            Self::Fixed { .. } | Self::Missing(_) => COMMON_KEYS,
        }
    }
}

/// When gate is limited: before silu (DeepSeek-V4), or its silu is (Step).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clamp {
    Before,
    After,
}

/// What holds where an entry with a limit is missing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Absent {
    NoLimit,
    /// The family's own limit.
    Is(f32),
    /// The next row of limits for this kind of MLP decides.
    Next,
    /// The file cannot be understood.
    Refused,
}

/// Where some MLPs of a family have their limit: one number, or one per layer; null and 0 are no limit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) kinds: &'static [MlpKind],
    pub(crate) key: &'static str,
    /// The entry in GGUF, after the architecture.
    pub(crate) gguf: &'static str,
    /// Whether a configuration has one per layer.
    pub(crate) list: bool,
    pub(crate) absent: Absent,
    pub(crate) absent_in_gguf: Absent,
    /// What holds in layers that predict further tokens, where there is one limit per layer.
    pub(crate) in_mtp: Absent,
    /// Whether a negative number is no limit either.
    pub(crate) negative: bool,
}

/// A number, or one per layer, that changes an MLP in a way that is not implemented, unless it is the neutral one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neutral {
    pub(crate) key: &'static str,
    /// Which element, where it is not that of the layer.
    pub(crate) at: Option<usize>,
    pub(crate) neutral: f64,
    /// The first numbers of a file without the entry; further ones are neutral.
    pub(crate) absent: &'static [f64],
    /// Whether it changes what comes after the activation, and so whole MLPs alone.
    pub(crate) after: bool,
}

/// What the output of a mixture is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sum {
    /// Routed experts times the router's weights, and the shared one.
    Plain,
    /// The weights multiply what goes into the routed experts.
    WeighsInputs,
    /// The router weighs the shared expert, too: by what.
    WeighsShared(&'static str),
}

/// A family of models.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// Its `model_type`s; the first is what GGUF's architecture becomes.
    pub model_types: &'static [&'static str],
    /// Its names in GGUF; the first is written.
    pub architectures: &'static [&'static str],
    pub(crate) function: Function,
    pub(crate) clamp: Clamp,
    pub(crate) limits: &'static [Limit],
    pub(crate) neutral: &'static [Neutral],
    pub(crate) sum: Sum,
    /// Entries that speak of an activation and have no effect on the MLPs.
    pub(crate) ignored: &'static [&'static str],
    /// Orders of rows that the family defines, by the last part of a fused module's name. Without one, as in the `plain`
    /// row of Qwen3-MoE, floats to be quantized have transformers' order, see `fused_experts.rs`.
    pub(crate) fused: &'static [(&'static str, GateUpOrder)],
    /// Whether `ffn_up` of GGUF holds the gate rows, then the up rows, where there is no `ffn_gate`.
    pub(crate) fused_up: bool,
    /// Public code that says so.
    pub source: &'static str,
}

impl Family {
    /// Every family.
    pub const ALL: &'static [Self] = table::FAMILIES;

    /// What reports call it.
    pub fn name(&self) -> &'static str {
        self.model_types.first().or(self.architectures.first()).copied().unwrap_or("unknown")
    }

    /// What is computed, in one line.
    pub fn doc(&self) -> String {
        let function = match self.function {
            Function::Named { keys, otherwise, .. } => {
                let otherwise = otherwise.map_or("none", Shape::name);
                format!("`{}`, or {otherwise}", keys.join("`, `"))
            }
            Function::Fixed { shape, .. } => shape.name().into(),
            Function::Missing(what) => format!("not implemented: {what}"),
        };
        let order = match self.clamp {
            Clamp::Before => "before silu",
            Clamp::After => "after silu",
        };
        let limits = self.limits.iter().map(|limit| {
            let kinds: Vec<String> = limit.kinds.iter().map(MlpKind::to_string).collect();
            format!("; `{}` limits {} {order}", limit.key, kinds.join(", "))
        });
        let neutral = self.neutral.iter().map(|n| {
            let of = if n.after { " in whole MLPs" } else { "" };
            let at = n.at.map_or(String::new(), |at| format!("[{at}]"));
            format!("; `{}{at}` other than {} is refused{of}", n.key, n.neutral)
        });
        let fused = self.fused.iter().map(|(name, order)| format!("; `{name}` is {order}"));
        let up = self.fused_up.then(|| "; a lone `ffn_up` is gate-up".to_owned());
        let sum = match self.sum {
            Sum::Plain => None,
            Sum::WeighsInputs => Some("; the router's weights multiply what goes into experts".to_owned()),
            Sum::WeighsShared(what) => Some(format!("; mixtures without their shared expert alone: {what}")),
        };
        limits.chain(neutral).chain(fused).chain(up).chain(sum).fold(function, |doc, more| doc + &more)
    }

    /// The function where no entry names one.
    pub(crate) fn implied(&self) -> Option<Shape> {
        match self.function {
            Function::Named { otherwise, .. } => otherwise,
            Function::Fixed { shape, .. } => Some(shape),
            Function::Missing(_) => None,
        }
    }

    /// The entries that name the function.
    pub(crate) fn activation_keys(&self) -> &'static [&'static str] {
        self.function.keys()
    }

    /// The entry of them that stands at the top.
    pub(crate) fn activation_key(&self) -> &'static str {
        self.function.keys().iter().find(|key| !key.contains('.')).unwrap_or(&COMMON_KEYS[0])
    }

    /// The family of a GGUF architecture. One that llama.cpp does not have goes by its `model_type` there.
    pub(crate) fn of_architecture(name: &str) -> Option<&'static Self> {
        let own = |family: &&Self| family.architectures.is_empty() && family.model_types.contains(&name);
        let known = Self::ALL.iter().find(|family| family.architectures.contains(&name));
        known.or_else(|| Self::ALL.iter().find(own))
    }

    /// The family of a configuration, that of its language model first. Mistral's own files have no `model_type` and are
    /// known by their name.
    pub(crate) fn of_config(config: &JsonFile) -> Option<&'static Self> {
        let file = config.path.file_name().and_then(|name| name.to_str());
        let by_name = file.filter(|name| *name == "params.json");
        Self::of_types(model_types(&config.value).chain(by_name))
    }

    pub(crate) fn of_types<'t>(types: impl Iterator<Item = &'t str>) -> Option<&'static Self> {
        // Some call themselves what GGUF calls them.
        let known = |family: &Self, name: &str| {
            let in_gguf = !family.model_types.is_empty() && family.architectures.contains(&name);
            in_gguf || family.model_types.contains(&name)
        };
        types.into_iter().find_map(|name| Self::ALL.iter().find(|family| known(family, name)))
    }

    /// The order of a fused module, where the family defines it.
    pub(crate) fn fused_order(&self, module: &str) -> Option<GateUpOrder> {
        let last = module.rsplit('.').next()?;
        self.fused.iter().find(|(name, _)| *name == last).map(|(_, order)| *order)
    }
}

/// What a configuration calls its models, the language model first.
pub(crate) fn model_types(config: &Value) -> impl Iterator<Item = &str> {
    parts(config).filter_map(|part| part.get("model_type").and_then(Value::as_str))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Whether it is silu unless its configuration names another function, with nothing more to it.
    fn is_plain(family: &Family) -> bool {
        let silu = matches!(
            family.function,
            Function::Named { keys: COMMON_KEYS, otherwise: Some(Shape::Silu), also: [] }
        );
        silu && family.limits.is_empty()
            && family.neutral.is_empty()
            && family.sum == Sum::Plain
            && family.fused.is_empty()
            && !family.fused_up
    }

    #[test]
    fn no_name_is_in_two_rows_and_every_row_says_where_it_is_from() {
        let (mut types, mut architectures) = (BTreeSet::new(), BTreeSet::new());
        for family in Family::ALL {
            assert!(family.model_types.iter().all(|name| types.insert(*name)), "{}", family.name());
            assert!(family.architectures.iter().all(|name| architectures.insert(*name)), "{}", family.name());
            assert!(family.source.contains('/'), "{}", family.name());
            assert_ne!(family.name(), "unknown");
        }
    }

    #[test]
    fn limits_of_every_kind_end_in_a_row_that_decides() {
        for family in Family::ALL {
            for kind in [MlpKind::Dense, MlpKind::Shared, MlpKind::Experts] {
                let last = family.limits.iter().rfind(|limit| limit.kinds.contains(&kind));
                let decides = |l: &Limit| l.absent != Absent::Next && l.absent_in_gguf != Absent::Next;
                assert!(last.is_none_or(decides), "{}: {kind}", family.name());
            }
        }
    }

    #[test]
    fn the_documents_list_every_family() {
        const FORMATS: &str = include_str!("../../../../docs/formats.md");
        let cell = |names: &[&str]| names.join(", ");
        for family in Family::ALL.iter().filter(|family| !is_plain(family)) {
            let (types, architectures) = (cell(family.model_types), cell(family.architectures));
            let row = format!("| {types} | {architectures} | {} | {} |", family.doc(), family.source);
            assert!(FORMATS.contains(&row), "docs/formats.md lacks the row\n{row}");
        }
        let plain = |names: fn(&Family) -> &[&'static str]| {
            let all: BTreeSet<&str> =
                Family::ALL.iter().filter(|f| is_plain(f)).flat_map(names).copied().collect();
            all.into_iter().collect::<Vec<_>>().join(", ")
        };
        for line in [plain(|f| f.model_types), plain(|f| f.architectures)] {
            assert!(FORMATS.lines().any(|l| l == line), "docs/formats.md lacks the line\n{line}");
        }
    }
}
