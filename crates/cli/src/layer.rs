//! One MLP of a checkpoint, as the arguments name it.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, bail};
use dualgemm::checkpoint::{
    BadInputScale, Checkpoint, Error, GateUpSource, Linear, MlpKind, NibbleOrder, OpenOptions,
    hidden_activation, model_field,
};
use dualgemm::formats::{self, BlockFormat, GlobalScale};
use dualgemm::gemm::{Activation, Epilogue, GateUp};
use dualgemm::{PackedWeights, Plan};
use serde_json::Value;

use crate::args::{EpilogueArgs, LayerArgs, NibbleOrderArg, ReadArgs};

/// Bytes of weights that are read at a time: little beside the weights of a layer, much beside the cost of letting
/// go of pages.
const RUN_BYTES: usize = 1 << 20;

/// Opens a checkpoint as the arguments say it is to be read.
pub fn open(path: &Path, args: &ReadArgs) -> Result<Checkpoint, Error> {
    let options = OpenOptions {
        convention: args.convention.clone(),
        nibble_order: match args.nibble_order {
            NibbleOrderArg::LoHi => NibbleOrder::LoHi,
            NibbleOrderArg::HiLo => NibbleOrder::HiLo,
        },
        gate_up_order: args.gate_up_order,
        scale_layout: args.scale_layout.map(Into::into),
        within: args.within.clone(),
        bad_input_scale: match args.unusable_input_scale_is_one {
            true => BadInputScale::One,
            false => BadInputScale::Refuse,
        },
    };
    Checkpoint::open(path, &options)
}

/// The scales by which gate and up expect A to be quantized, multipliers.
#[derive(Debug, Clone, Copy)]
pub struct InputScales {
    /// Of the gate projection.
    pub gate: f32,
    /// Of the up projection.
    pub up: f32,
}

impl InputScales {
    /// The scale for both, which read the same A: where they were calibrated differently it is the larger one, under
    /// which neither saturates.
    pub fn used(self) -> f32 {
        self.gate.max(self.up)
    }
}

impl fmt::Display for InputScales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gate, up } = self;
        match gate.total_cmp(up) {
            Ordering::Equal => write!(f, "{gate:e} (static)"),
            Ordering::Greater => {
                write!(f, "{gate:e} of gate (static; the larger of two, that of up is {up:e})")
            }
            Ordering::Less => write!(f, "{up:e} of up (static; the larger of two, that of gate is {gate:e})"),
        }
    }
}

/// Gate and up of a layer, found and not yet read.
#[derive(Debug)]
pub struct Layer<'c> {
    /// Number of the layer.
    pub number: usize,
    checkpoint: &'c Checkpoint,
    which: Which,
    source: GateUpSource<'c>,
}

/// Which MLP of a layer.
#[derive(Debug, Clone, Copy)]
enum Which {
    Dense,
    Shared,
    Expert(usize),
}

impl<'c> Layer<'c> {
    /// The MLP that the arguments name.
    pub fn of(checkpoint: &'c Checkpoint, args: &LayerArgs) -> anyhow::Result<Self> {
        let number = match (args.layer, checkpoint.layers().as_slice()) {
            (Some(layer), _) => layer,
            (None, &[only]) => only,
            (None, []) => {
                let within = args.read.within.as_ref();
                let within = within.map_or(String::new(), |name| format!(" whose name starts with `{name}`"));
                bail!("{}: has no gated MLP{within}; see inspect", checkpoint.files().root().display())
            }
            (None, layers) => bail!("--layer: is needed; {} layers have a gated MLP", layers.len()),
        };
        let (which, source) = match (args.expert, args.shared_expert) {
            (None, false) => (Which::Dense, checkpoint.gate_up_source(number)?),
            (None, true) => (Which::Shared, checkpoint.shared_gate_up_source(number)?),
            (Some(expert), _) => (Which::Expert(expert), checkpoint.experts(number)?.gate_up_source(expert)?),
        };
        Ok(Self { number, checkpoint, which, source })
    }

    /// Features (N) of each half.
    pub fn n(&self) -> usize {
        self.source.n()
    }

    /// Elements per feature (K).
    pub fn k(&self) -> usize {
        self.source.k()
    }

    /// Block format of both halves.
    pub fn format(&self) -> BlockFormat {
        self.source.format()
    }

    /// Both halves, read.
    pub fn weights(&self) -> Result<GateUp<'c>, Error> {
        self.features(0..self.n())
    }

    /// Some features of both halves, read.
    pub fn features(&self, features: Range<usize>) -> Result<GateUp<'c>, Error> {
        Ok(dualgemm::weights(self.source.features(features)?))
    }

    /// The scales by which A may be quantized.
    pub fn input_scales(&self) -> Result<Option<InputScales>, Error> {
        let scales = self.source.input_scales()?;
        Ok(scales.map(|(gate, up)| InputScales { gate: gate.value(), up: up.value() }))
    }

    /// The down projection that follows.
    pub fn down(&self) -> Result<Linear<'c>, Error> {
        match self.which {
            Which::Dense => self.checkpoint.down(self.number),
            Which::Shared => self.checkpoint.shared_down(self.number),
            Which::Expert(expert) => self.checkpoint.experts(self.number)?.down(expert),
        }
    }

    /// The scale by which the down projection expects C to be quantized, a multiplier. None if nothing says so, as in a part
    /// of a checkpoint, which may have no down projection.
    pub fn output_scale(&self) -> Result<Option<f32>, Error> {
        let (kind, expert) = match self.which {
            Which::Dense => (MlpKind::Dense, None),
            Which::Shared => (MlpKind::Shared, None),
            Which::Expert(expert) => (MlpKind::Experts, Some(expert)),
        };
        if !self.checkpoint.has_down(self.number, kind, expert) {
            return Ok(None);
        }
        Ok(self.down()?.input_scale()?.map(GlobalScale::value))
    }

    /// The features of one rank of a tensor-parallel group. They are columns of the down projection, whose blocks are
    /// never split.
    pub fn shard(&self, rank: usize, ranks: usize) -> Result<Range<usize>, formats::Error> {
        let (n, tensor) = (self.n(), || format!("the down projection of layer {}", self.number));
        if rank >= ranks {
            return Err(formats::Error::ShardRank { tensor: tensor(), rank, ranks });
        }
        if ranks > 1 && !n.is_multiple_of(ranks * self.format().block_len()) {
            return Err(formats::Error::ShardSplitsBlock {
                tensor: tensor(),
                k: n,
                ranks,
                format: self.format(),
            });
        }
        let features = n / ranks;
        Ok(rank * features..(rank + 1) * features)
    }

    /// How many features of gate and up [`prepack`](Self::prepack) and the reference hold in memory at a time.
    pub fn features_per_run(&self) -> usize {
        // Whole panels of the kernels, whole tiles of block scales and whole periods of alternating rows.
        const MULTIPLE: usize = 128;
        let bytes_per_feature = self.k() + self.k() / 8;
        (RUN_BYTES / bytes_per_feature).max(1).next_multiple_of(MULTIPLE)
    }

    /// Brings some features into the order of the kernels, a run of them at a time, and lets go of what was read.
    /// `progress` is told how many are done.
    pub fn prepack(
        &self,
        plan: &Plan,
        features: Range<usize>,
        progress: impl Fn(usize),
    ) -> Result<PackedWeights, dualgemm::Error> {
        let (run, end) = (self.features_per_run(), features.end);
        let packed = plan.prepack_runs(features.clone().step_by(run).map(|first| {
            self.checkpoint.files().release_pages();
            progress(first - features.start);
            Ok(self.features(first..end.min(first + run))?)
        }))?;
        self.checkpoint.files().release_pages();
        Ok(packed)
    }
}

/// The epilogue that the arguments ask for, or that the checkpoint's configuration names for a layer, and where it comes
/// from.
pub fn epilogue(layer: &Layer<'_>, args: &EpilogueArgs) -> anyhow::Result<(Epilogue, &'static str)> {
    let (activation, from) = match args.activation {
        Some(activation) => (activation, "as asked"),
        None => match layer.checkpoint.files().config() {
            Some(config) => {
                let beside = config.path.ends_with("config.json");
                let from = if beside { "from config.json" } else { "from the file's metadata" };
                let named = named_activation(&config.value, layer.number, layer.which)
                    .with_context(|| format!("{}", config.path.display()))?;
                named.map_or((Activation::Silu, "by default"), |activation| (activation, from))
            }
            None => (Activation::Silu, "by default"),
        },
    };
    let round_gate_up_to_bf16 = args.round_gate_up_to_bf16;
    Ok((Epilogue { activation, round_gate_up_to_bf16, ..Epilogue::default() }, from))
}

/// What a configuration says about the activation of an MLP, if anything.
fn named_activation(config: &Value, layer: usize, which: Which) -> anyhow::Result<Option<Activation>> {
    let field = |key| model_field(config, key);
    let positive = |key: &str, limit: &Value| {
        let number = limit.as_f64().map(|limit| limit as f32);
        number.filter(|limit| *limit > 0.0 && limit.is_finite()).with_context(|| {
            format!("{key} is {limit}; a positive number is needed, or --activation to override it")
        })
    };
    // Gemma 3n keeps the largest gates of some layers alone; Falcon-H1 scales its gate.
    let others = [
        (
            "activation_sparsity_pattern",
            field("activation_sparsity_pattern").and_then(|all| all.get(layer)),
            0.0,
        ),
        ("mlp_multipliers", field("mlp_multipliers").and_then(|all| all.get(0)), 1.0),
    ];
    for (key, number, none) in others {
        if let Some(number) = number.filter(|number| number.as_f64() != Some(none)) {
            bail!(
                "{key} has {number} for layer {layer}, which is not implemented; --activation overrides it"
            );
        }
    }
    // Step has a limit for each layer, which is null or 0 where there is none.
    let by_layer = match which {
        Which::Expert(_) => "swiglu_limits",
        Which::Dense | Which::Shared => "swiglu_limits_shared",
    };
    let limits = field(by_layer).and_then(|limits| limits.get(layer));
    if let Some(limit) = limits.filter(|limit| !limit.is_null() && limit.as_f64() != Some(0.0)) {
        let limit = positive(&format!("{by_layer}[{layer}]"), limit)?;
        return Ok(Some(Activation::SwigluStep { limit }));
    }
    let limit = field("swiglu_limit").map(|limit| positive("swiglu_limit", limit)).transpose()?;
    // Whoever limits it and says no more means silu.
    let silu = Value::from("silu");
    let Some(name) = hidden_activation(config).or(limit.and(Some(&silu))) else { return Ok(None) };
    // MiniMax-M3 names the function, which transformers saves as silu; the slope stays.
    let number = |key| field(key).and_then(Value::as_f64).map(|number| number as f32);
    let alpha = number("swiglu_alpha");
    let oai = alpha.is_some() || field("model_type").and_then(Value::as_str) == Some("gpt_oss");
    Ok(Some(match (name.as_str(), limit) {
        (Some("silu" | "swish" | "swigluoai"), _) if oai || name == "swigluoai" => {
            let (alpha, beta) = (alpha.unwrap_or(1.702), number("swiglu_beta").unwrap_or(1.0));
            Activation::SwigluOai { alpha, beta, limit: limit.unwrap_or(7.0) }
        }
        (Some("silu" | "swish"), Some(limit)) => Activation::ClampedSilu { limit },
        (Some("silu" | "swish"), None) => Activation::Silu,
        (Some("gelu_pytorch_tanh" | "gelu_new"), _) => Activation::GeluTanh,
        (Some("relu2"), _) => Activation::Relu2,
        _ => bail!("hidden_act is {name}, which is not implemented; --activation overrides it"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn activations_are_read_from_the_configuration() {
        let named = |config| named_activation(&config, 0, Which::Dense).unwrap();
        assert_eq!(named(json!({ "hidden_act": "silu" })), Some(Activation::Silu));
        assert_eq!(
            named(json!({ "text_config": { "hidden_activation": "gelu_pytorch_tanh" } })),
            Some(Activation::GeluTanh)
        );
        assert_eq!(
            named(json!({ "model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0 })),
            Some(Activation::SWIGLU_OAI)
        );
        let minimax = json!({ "hidden_act": "swigluoai", "swiglu_limit": 6.0 });
        let oai = |alpha| Some(Activation::SwigluOai { alpha, beta: 1.0, limit: 6.0 });
        assert_eq!(named(minimax), oai(1.702));
        let saved =
            json!({ "text_config": { "hidden_act": "silu", "swiglu_limit": 6.0, "swiglu_alpha": 1.5 } });
        assert_eq!(named(saved), oai(1.5));
        assert_eq!(
            named(json!({ "hidden_act": "silu", "swiglu_limit": 10.0 })),
            Some(Activation::ClampedSilu { limit: 10.0 })
        );
        assert_eq!(
            named(json!({ "model_type": "own", "swiglu_limit": 10.0 })),
            Some(Activation::ClampedSilu { limit: 10.0 })
        );
        assert_eq!(named(json!({ "hidden_size": 576 })), None);
        assert!(named_activation(&json!({ "hidden_act": "gelu" }), 0, Which::Dense).is_err());
        for limit in [json!(0), json!(-7.0), json!(1e300), json!("7")] {
            let config = json!({ "hidden_act": "silu", "swiglu_limit": limit });
            let message = named_activation(&config, 0, Which::Dense).unwrap_err().to_string();
            assert!(message.starts_with(&format!("swiglu_limit is {limit}; a positive number")), "{message}");
        }
    }

    #[test]
    fn what_else_is_done_to_gates_is_refused() {
        let of = |config: Value, layer| named_activation(&config, layer, Which::Dense);
        let gemma = json!({ "text_config": {
            "hidden_activation": "gelu_pytorch_tanh", "activation_sparsity_pattern": [0.95, 0.0] } });
        let message = of(gemma.clone(), 0).unwrap_err().to_string();
        assert_eq!(
            message,
            "activation_sparsity_pattern has 0.95 for layer 0, which is not implemented; --activation overrides it"
        );
        assert_eq!(of(gemma, 1).unwrap(), Some(Activation::GeluTanh));
        let falcon = |gate| json!({ "hidden_act": "silu", "mlp_multipliers": [gate, 0.5] });
        assert!(of(falcon(0.88), 3).is_err());
        assert_eq!(of(falcon(1.0), 3).unwrap(), Some(Activation::Silu));
    }

    #[test]
    fn limits_by_layer_are_those_of_the_layer_and_of_its_kind() {
        let config = json!({ "swiglu_limits": [null, 0.0, 7.0, -1.0], "swiglu_limits_shared": [0, 0, 16.0] });
        let named = |layer, which| named_activation(&config, layer, which);
        let step = |limit| Some(Activation::SwigluStep { limit });
        assert_eq!(named(2, Which::Expert(0)).unwrap(), step(7.0));
        assert_eq!(named(2, Which::Shared).unwrap(), step(16.0));
        assert_eq!(named(2, Which::Dense).unwrap(), step(16.0));
        for layer in [0, 1, 4] {
            assert_eq!(named(layer, Which::Expert(0)).unwrap(), None);
        }
        let message = named(3, Which::Expert(0)).unwrap_err().to_string();
        assert!(message.starts_with("swiglu_limits[3] is -1.0; a positive number"), "{message}");
    }
}
