//! What callers say in words: targets, activations, orders of gate and up, and the keywords of
//! `Weights.from_checkpoint`.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dualgemm::Target;
use dualgemm::checkpoint::{Checkpoint, GateUpOrder, NibbleOrder};
use dualgemm::gemm::Activation;
use dualgemm_cli::args::LayerArgs;
use dualgemm_cli::layer::{self, InputScales, Layer};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{self, Kind, facade, refuse};
use crate::facts::Facts;
use crate::operand::layout;
use crate::pool;

/// A target from anything whose text is its name, as torch devices are: cpu, cuda, cuda:N, or sim:ARCH.
pub fn device_target(device: Option<&Bound<'_, PyAny>>) -> PyResult<Target> {
    let Some(device) = device else { return Ok(Target::default()) };
    device.str()?.extract::<String>()?.parse().map_err(|e: dualgemm::Error| facade(e))
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
pub fn count(name: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
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
    /// A keyword that says how to read a file, if there is one.
    reading: Option<String>,
    pub rank: usize,
    pub world: usize,
    pub target: Target,
}

impl LayerOptions {
    /// From keywords; an unknown one is a `TypeError`.
    pub fn of(layer: Option<&Bound<'_, PyAny>>, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let layer = layer.map(|layer| count("layer", layer)).transpose()?;
        let mut this = Self::numbered(0, false);
        this.layer.layer = layer;
        for (key, value) in keywords.into_iter().flatten() {
            this.set(&key.extract::<String>()?, &value)?;
        }
        let given = |key| keywords.is_some_and(|keywords| keywords.contains(key).unwrap_or(false));
        if this.world > 1 && !given("rank") {
            refuse!(
                Argument,
                "rank is needed where world is {}; valid are 0 to {}",
                this.world,
                this.world - 1
            );
        }
        Ok(this)
    }

    pub fn numbered(layer: usize, shared_expert: bool) -> Self {
        let layer = LayerArgs { layer: Some(layer), shared_expert, ..LayerArgs::default() };
        Self { layer, activation: None, reading: None, rank: 0, world: 1, target: Target::default() }
    }

    pub fn of_module(keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        for key in keywords.into_iter().flat_map(|keywords| keywords.keys()) {
            let key: String = key.extract()?;
            if matches!(key.as_str(), "expert" | "shared_expert" | "activation") {
                return Err(PyTypeError::new_err(format!("unexpected keyword argument '{key}'")));
            }
        }
        Self::of(None, keywords)
    }

    fn set(&mut self, key: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let text = || value.extract::<String>();
        let read = &mut self.layer.read;
        if !matches!(key, "device" | "rank" | "world" | "shared_expert" | "expert") && !value.is_none() {
            self.reading = Some(key.into());
        }
        match key {
            // None is the default of those that have no other.
            "device" | "expert" | "activation" | "gate_up_order" | "nibble_order" | "scale_layout"
                if value.is_none() => {}
            "device" => self.target = device_target(Some(value))?,
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
                    "lo-hi" => NibbleOrder::LoHi,
                    "hi-lo" => NibbleOrder::HiLo,
                    other => {
                        refuse!(Argument, "nibble_order `{other}` is unknown; valid are lo-hi, hi-lo");
                    }
                })
            }
            "scale_layout" => read.scale_layout = Some(layout(&text()?)?),
            _ => return Err(PyTypeError::new_err(format!("unexpected keyword argument '{key}'"))),
        }
        Ok(())
    }

    /// Opens the checkpoint, unless it is a `dualgemm.Checkpoint`, which is open.
    pub fn open(&self, py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<Arc<Checkpoint>> {
        if let Ok(opened) = path.cast::<crate::checkpoint::Checkpoint>() {
            return match &self.reading {
                None => Ok(opened.get().files.clone()),
                Some(key) => Err(Kind::Argument.raise(format!(
                    "{key} says how to read a file; it belongs where the Checkpoint is made"
                ))),
            };
        }
        self.open_at(py, &path.extract::<PathBuf>()?)
    }

    pub fn open_at(&self, py: Python<'_>, path: &Path) -> PyResult<Arc<Checkpoint>> {
        let opened = pool::run(py, || layer::open(path, &self.layer.read, self.activation))?;
        opened.map(Arc::new).map_err(facade)
    }

    /// The same way to read, of the MLPs alone whose names start so.
    pub fn within(&self, name: String) -> Self {
        let mut layer = self.layer.clone();
        layer.read.within = Some(name);
        Self { layer, target: self.target.clone(), reading: None, ..*self }
    }

    /// Hands the opened checkpoint to `use_it`, with the GIL released.
    pub fn with_checkpoint<R: Send>(
        &self,
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        use_it: impl FnOnce(&Checkpoint) -> anyhow::Result<R> + Send,
    ) -> PyResult<R> {
        let checkpoint = self.open(py, path)?;
        pool::run(py, || use_it(&checkpoint))?.map_err(|error| error::failure(&error.into()))
    }

    /// Hands the layer and this rank's features to `use_it`.
    pub fn with_layer<R: Send>(
        &self,
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        use_it: impl FnOnce(&Layer<'_>, Range<usize>) -> anyhow::Result<R> + Send,
    ) -> PyResult<R> {
        self.with_checkpoint(py, path, |checkpoint| {
            let layer = Layer::of(checkpoint, &self.layer)?;
            let features = layer.shard(self.rank, self.world)?;
            use_it(&layer, features)
        })
    }

    /// An expert of the layer, or its MLP.
    pub fn layer_of<'c>(
        &self,
        checkpoint: &'c Checkpoint,
        expert: Option<usize>,
    ) -> anyhow::Result<Layer<'c>> {
        Layer::of(checkpoint, &LayerArgs { expert, ..self.layer.clone() })
    }
}

/// What is known of `n` features of gate and up.
pub fn facts_of(layer: &Layer<'_>, n: usize) -> Facts {
    let source = layer.source();
    Facts::found(&[&source.gate, &source.up], n, input_scale_of(layer))
}

/// Scales of activations are optional: weights can be used without, and `static` says so then.
pub fn input_scale_of(layer: &Layer<'_>) -> Option<f32> {
    layer.input_scales().ok().flatten().map(InputScales::used)
}
