//! One MLP of a checkpoint, as the arguments name it.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use anyhow::bail;
use dualgemm::checkpoint::{
    BadInputScale, Checkpoint, Error, GateUpSource, LinearSource, OpenOptions, Stated, Which,
};
use dualgemm::formats::GlobalScale;
use dualgemm::gemm::{AFormat, Activation, Epilogue, GateUp};
use dualgemm::{PackedWeights, Plan};

use crate::args::{EpilogueArgs, LayerArgs, ReadArgs};

/// Opens a checkpoint as the arguments say; an activation overrides what the checkpoint states.
pub fn open(path: &Path, args: &ReadArgs, activation: Option<Activation>) -> Result<Checkpoint, Error> {
    let options = OpenOptions {
        convention: args.convention.clone(),
        nibble_order: args.nibble_order,
        gate_up_order: args.gate_up_order,
        scale_layout: args.scale_layout,
        within: args.within.clone(),
        bad_input_scale: match args.unusable_input_scale_is_one {
            true => BadInputScale::One,
            false => BadInputScale::Refuse,
        },
        activation,
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

impl<'c> Layer<'c> {
    /// The MLP that the arguments name.
    pub fn of(checkpoint: &'c Checkpoint, args: &LayerArgs) -> anyhow::Result<Self> {
        let which = match (args.expert, args.shared_expert) {
            (None, false) => Which::Dense,
            (None, true) => Which::Shared,
            (Some(expert), _) => Which::Expert(expert),
        };
        Ok(Self::at(checkpoint, number(checkpoint, args)?, which)?)
    }

    /// That MLP of a layer.
    pub fn at(checkpoint: &'c Checkpoint, number: usize, which: Which) -> Result<Self, Error> {
        Ok(Self { number, checkpoint, which, source: checkpoint.gate_up_source(number, which)? })
    }

    /// Features (N) of each half.
    pub fn n(&self) -> usize {
        self.source.n()
    }

    /// Elements per feature (K).
    pub fn k(&self) -> usize {
        self.source.k()
    }

    /// Format of both halves.
    pub fn format(&self) -> AFormat {
        self.source.format()
    }

    /// The activation of the MLP, and what says so.
    pub fn activation(&self) -> Result<Stated, Error> {
        self.checkpoint.activation(self.number, self.which.kind())
    }

    /// Checks that the MLP is no more than gate, up and down.
    pub fn check_whole(&self) -> Result<(), Error> {
        self.checkpoint.check_whole(self.number, self.which.kind())
    }

    /// Both halves, read.
    pub fn weights(&self) -> Result<GateUp<'c>, Error> {
        self.features(0..self.n())
    }

    /// Some features of both halves, read.
    pub fn features(&self, features: Range<usize>) -> Result<GateUp<'c>, Error> {
        self.source.features(features)
    }

    /// The scales by which A may be quantized.
    pub fn input_scales(&self) -> Result<Option<InputScales>, Error> {
        let scales = self.source.input_scales()?;
        Ok(scales.map(|(gate, up)| InputScales { gate: gate.value(), up: up.value() }))
    }

    /// Gate and up as they were found.
    pub fn source(&self) -> &GateUpSource<'c> {
        &self.source
    }

    /// The down projection that follows, not read.
    pub fn down(&self) -> Result<LinearSource<'c>, Error> {
        self.checkpoint.down_source(self.number, self.which)
    }

    /// The scale by which the down projection expects C to be quantized, a multiplier. None if nothing says so, as in a part
    /// of a checkpoint, which may have no down projection.
    pub fn output_scale(&self) -> Result<Option<f32>, Error> {
        if !self.checkpoint.has_down(self.number, self.which) {
            return Ok(None);
        }
        Ok(self.down()?.input_scale()?.map(GlobalScale::value))
    }

    /// The features of one rank of a tensor-parallel group. They are columns of the down projection, whose blocks are
    /// never split.
    pub fn shard(&self, rank: usize, ranks: usize) -> anyhow::Result<Range<usize>> {
        let down = format!("the down projection of layer {}", self.number);
        Ok(self.source.gate.block_format()?.shard(&down, self.n(), rank, ranks)?)
    }

    /// Brings some features into the order of the kernels, a run of them at a time, and lets go of what was read.
    /// `progress` is told how many are done.
    pub fn prepack(
        &self,
        plan: &Plan,
        features: Range<usize>,
        progress: impl Fn(usize),
    ) -> Result<PackedWeights, dualgemm::Error> {
        plan.prepack_source(&self.source, features, progress)
    }
}

/// The layer that the arguments name, or the only one.
pub fn number(checkpoint: &Checkpoint, args: &LayerArgs) -> anyhow::Result<usize> {
    match (args.layer, checkpoint.layers().as_slice()) {
        (Some(layer), _) => Ok(layer),
        (None, &[only]) => Ok(only),
        (None, []) => {
            let within = args.read.within.as_ref();
            let within = within.map_or(String::new(), |name| format!(" whose name starts with `{name}`"));
            bail!("{}: has no gated MLP{within}; see inspect", checkpoint.files().root().display())
        }
        (None, layers) => bail!("--layer: is needed; {} layers have a gated MLP", layers.len()),
    }
}

/// The epilogue of a layer: its activation, and what the arguments ask for.
pub fn epilogue(layer: &Layer<'_>, args: &EpilogueArgs) -> Result<(Epilogue, Stated), Error> {
    let stated = layer.activation()?;
    let round_gate_up_to_bf16 = args.round_gate_up_to_bf16;
    let epilogue = Epilogue { activation: stated.activation, round_gate_up_to_bf16, ..Epilogue::default() };
    Ok((epilogue, stated))
}
