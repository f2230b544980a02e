//! What callers say in words: targets, activations, orders of gate and up, and the keywords of
//! `Weights.from_checkpoint`.

use std::ops::Range;
use std::path::Path;

use dualgemm::checkpoint::GateUpOrder;
use dualgemm::formats::ScaleLayout;
use dualgemm::gemm::Activation;
use dualgemm::{GpuOptions, Target};
use dualgemm_cli::args::{self, LayerArgs, NibbleOrderArg, ReadArgs};
use dualgemm_cli::layer::{self, Layer};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{self, Kind, facade};
use crate::operand::layout;
use crate::pool;

/// A target by name: cpu, cuda, cuda:N, or sim:ARCH.
fn target(name: &str) -> PyResult<Target> {
    match name {
        "cpu" => Ok(Target::default()),
        name => Ok(Target::Gpu(name.parse().map_err(|e: dualgemm::Error| facade(e))?, GpuOptions::default())),
    }
}

/// A target from anything whose text is its name, as torch devices are.
pub fn device_target(device: Option<&Bound<'_, PyAny>>) -> PyResult<Target> {
    device.map_or_else(|| Ok(Target::default()), |device| target(&device.str()?.extract::<String>()?))
}

/// An order of gate and up in one matrix, by name.
pub fn order(name: &str) -> PyResult<GateUpOrder> {
    name.parse().map_err(|error: dualgemm::checkpoint::Error| Kind::Argument.raise(error.to_string()))
}

/// An activation by name, with its numbers after a colon.
pub fn activation(name: &str) -> PyResult<Activation> {
    name.parse().map_err(|error: dualgemm::gemm::Error| Kind::Argument.raise(error.to_string()))
}

/// A number from 0.
fn count(name: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    value.extract().map_err(|error: PyErr| {
        if !error.is_instance_of::<PyOverflowError>(value.py()) {
            return error;
        }
        Kind::Argument.raise(format!("{name} is {value}; a number from 0 is needed"))
    })
}

/// Where in a checkpoint a layer is and how to read the checkpoint: the keywords of `Weights.from_checkpoint`.
pub struct LayerOptions {
    layer: LayerArgs,
    activation: Option<Activation>,
    rank: usize,
    world: usize,
    pub target: Target,
}

impl LayerOptions {
    /// From keywords; an unknown one is a `TypeError`.
    pub fn of(layer: Option<&Bound<'_, PyAny>>, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let read = ReadArgs {
            convention: None,
            gate_up_order: None,
            nibble_order: None,
            scale_layout: None,
            within: None,
            unusable_input_scale_is_one: false,
        };
        let layer = layer.map(|layer| count("layer", layer)).transpose()?;
        let mut this = Self {
            layer: LayerArgs { layer, expert: None, shared_expert: false, read },
            activation: None,
            rank: 0,
            world: 1,
            target: Target::default(),
        };
        for (key, value) in keywords.into_iter().flatten() {
            this.set(&key.extract::<String>()?, &value)?;
        }
        Ok(this)
    }

    fn set(&mut self, key: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let text = || value.extract::<String>();
        let read = &mut self.layer.read;
        match key {
            // None is the default of those that have no other.
            "device" | "expert" | "activation" | "gate_up_order" | "nibble_order" | "scale_layout"
                if value.is_none() => {}
            "device" => self.target = target(&value.str()?.extract::<String>()?)?,
            "rank" => self.rank = count(key, value)?,
            "world" => self.world = count(key, value)?,
            "shared_expert" => self.layer.shared_expert = value.extract()?,
            "unusable_input_scale_is_one" => read.unusable_input_scale_is_one = value.extract()?,
            "expert" => self.layer.expert = Some(count(key, value)?),
            "convention" => read.convention = value.extract()?,
            "within" => read.within = value.extract()?,
            "activation" => self.activation = Some(activation(&text()?)?),
            "gate_up_order" => read.gate_up_order = Some(order(&text()?)?),
            "nibble_order" => {
                read.nibble_order = Some(match text()?.as_str() {
                    "lo-hi" => NibbleOrderArg::LoHi,
                    "hi-lo" => NibbleOrderArg::HiLo,
                    other => {
                        let message = format!("nibble_order `{other}` is unknown; valid are lo-hi, hi-lo");
                        return Err(Kind::Argument.raise(message));
                    }
                })
            }
            "scale_layout" => {
                read.scale_layout = Some(match layout(&text()?)? {
                    ScaleLayout::Linear => args::ScaleLayoutArg::Linear,
                    ScaleLayout::Sf128x4 => args::ScaleLayoutArg::Sf128x4,
                    ScaleLayout::Sf8x4 => args::ScaleLayoutArg::Sf8x4,
                });
            }
            _ => return Err(PyTypeError::new_err(format!("unexpected keyword argument '{key}'"))),
        }
        Ok(())
    }

    /// Opens the checkpoint and hands the layer and this rank's features to `use_it`, with the GIL released.
    pub fn with_layer<R: Send>(
        &self,
        py: Python<'_>,
        path: &Path,
        use_it: impl FnOnce(&Layer<'_>, Range<usize>) -> anyhow::Result<R> + Send,
    ) -> PyResult<R> {
        let result = pool::run(py, || {
            let checkpoint = layer::open(path, &self.layer.read, self.activation)?;
            let layer = Layer::of(&checkpoint, &self.layer)?;
            let features = layer.shard(self.rank, self.world)?;
            use_it(&layer, features)
        })?;
        result.map_err(|error| error::failure(&error.into()))
    }

    /// The rank and how many there are.
    pub fn rank(&self) -> (usize, usize) {
        (self.rank, self.world)
    }
}
