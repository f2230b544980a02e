//! `Checkpoint`: opened once, for the many weights that a model takes from it, and asked what it has before anything is read.

use std::path::PathBuf;
use std::sync::Arc;

use dualgemm::checkpoint::{Checkpoint as Files, MlpKind};
use dualgemm::plan::features_per_run;
use dualgemm_cli::layer::Layer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::decode;
use crate::error;
use crate::experts::common;
use crate::facts::{Facts, linear_input_scale};
use crate::mlp::MlpFacts;
use crate::options::{self, LayerOptions};
use crate::packed::of_keywords;
use crate::pool;

/// A checkpoint whose files are open.
#[pyclass(module = "dualgemm", frozen)]
pub struct Checkpoint {
    pub files: Arc<Files>,
    /// As it was opened.
    options: LayerOptions,
    reading: Py<PyDict>,
    /// Where it is for other processes.
    absolute: PathBuf,
}

impl Checkpoint {
    fn ask<R: Send>(
        &self,
        py: Python<'_>,
        question: impl FnOnce(&Files) -> anyhow::Result<R> + Send,
    ) -> PyResult<R> {
        pool::run(py, || question(&self.files))?.map_err(|error| error::failure(&error.into()))
    }
}

/// Gate, up and down as they were found: what is known of them, and whether gate and up, and down, have a bias.
type Found = (MlpFacts, [bool; 2]);

/// Reads gate, up and down and checks them as packing does.
fn check_mlp(layer: &Layer<'_>) -> anyhow::Result<Found> {
    let activation = layer.activation()?.activation;
    let (n, run) = (layer.n(), features_per_run(layer.k()));
    for at in (0..n).step_by(run) {
        layer.features(at..n.min(at + run))?.check()?;
    }
    let down = layer.down()?;
    down.read()?.check()?;
    let has_bias = [layer.source().gate.bias.is_some(), down.bias.is_some()];
    let gate_up = options::facts_of(layer, n);
    let down = Facts::found(&[&down], down.rows(), linear_input_scale(&down));
    Ok((MlpFacts { gate_up, down, activation }, has_bias))
}

#[pymethods]
impl Checkpoint {
    #[new]
    #[pyo3(signature = (path, **reading))]
    fn new(py: Python<'_>, path: &Bound<'_, PyAny>, reading: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let options = LayerOptions::of(None, reading)?;
        let files = options.open(py, path)?;
        let absolute = std::path::absolute(files.files().root())?;
        Ok(Self { files, options, reading: of_keywords(py, reading)?.unbind(), absolute })
    }

    /// The same files, of whose MLPs only those are there whose names start so.
    fn _within(&self, py: Python<'_>, name: String) -> PyResult<Self> {
        let reading = self.reading.bind(py).copy()?;
        reading.set_item("within", &name)?;
        let options = self.options.within(name);
        let files = options.open_at(py, self.files.files().root())?;
        Ok(Self { files, options, reading: reading.unbind(), absolute: self.absolute.clone() })
    }

    /// Where it is.
    #[getter]
    fn path(&self) -> PathBuf {
        self.files.files().root().into()
    }

    /// The files that hold the tensors.
    fn _paths(&self) -> Vec<PathBuf> {
        self.files.files().paths().map(Into::into).collect()
    }

    /// Who names and scales as it does.
    #[getter]
    fn convention(&self) -> &'static str {
        self.files.convention().name
    }

    /// Names of the modules whose weights are in 4 bits.
    fn modules(&self) -> Vec<String> {
        self.files.quantized_modules().map(Into::into).collect()
    }

    /// Gated MLPs in 4 bits: layer, kind (dense, shared or experts) and what the names of their modules begin with.
    fn mlps(&self) -> Vec<(usize, &'static str, String)> {
        let kind = |kind| match kind {
            MlpKind::Dense => "dense",
            MlpKind::Shared => "shared",
            MlpKind::Experts => "experts",
        };
        let mlps = self.files.mlps().into_iter().filter(|mlp| mlp.quantized);
        mlps.map(|mlp| (mlp.layer, kind(mlp.kind), mlp.path)).collect()
    }

    /// Reads a linear layer and checks it and how what goes in is quantized, as packing and running do: N, K and whether it
    /// has a bias.
    fn _check_linear(
        &self,
        py: Python<'_>,
        module: &str,
        quantize_a: &Bound<'_, PyAny>,
    ) -> PyResult<(usize, usize, bool)> {
        let (facts, has_bias) = self.ask(py, |files| {
            let source = files.linear_source(module)?;
            source.read()?.check()?;
            files.files().release_pages();
            let facts = Facts::found(&[&source], source.rows(), linear_input_scale(&source));
            Ok((facts, source.bias.is_some()))
        })?;
        facts.quantize("quantize_a", quantize_a)?;
        Ok((facts.n, facts.k, has_bias))
    }

    /// Whether a linear layer has a bias; its weight is not read.
    fn _has_bias(&self, py: Python<'_>, module: &str) -> PyResult<bool> {
        self.ask(py, |files| Ok(files.linear_source(module)?.bias.is_some()))
    }

    /// Decodes the weight of a linear layer into an array `[N, K]` of floats.
    fn _decode(&self, py: Python<'_>, module: &str, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let matrix = self.ask(py, |files| Ok(files.linear(module)?.weight.into_owned()))?;
        decode(py, &matrix, out)
    }

    /// The model's configuration as JSON, where the files have one.
    fn _config(&self) -> Option<String> {
        self.files.files().config().map(|json| json.value.to_string())
    }

    /// The activation of an MLP by name.
    fn _activation(&self, py: Python<'_>, layer: usize, kind: &str) -> PyResult<String> {
        let kind = match kind {
            "experts" => MlpKind::Experts,
            "shared" => MlpKind::Shared,
            _ => MlpKind::Dense,
        };
        self.ask(py, |files| Ok(files.activation(layer, kind)?.activation.to_string()))
    }

    /// Reads and checks a gated MLP, the shared expert or all routed experts of a layer as `_check_linear` does: how many, H,
    /// N and K, and whether gate and up, and down, have a bias.
    fn _check_mlp(
        &self,
        py: Python<'_>,
        layer: usize,
        kind: &str,
        quantize_a: &Bound<'_, PyAny>,
        quantize_hidden: &Bound<'_, PyAny>,
    ) -> PyResult<(usize, [usize; 3], [bool; 2])> {
        let options = LayerOptions::numbered(layer, kind == "shared");
        let found = self.ask(py, |files| {
            let experts = if kind == "experts" {
                files.check_whole(layer, MlpKind::Experts)?;
                files.experts(layer)?.into_iter().map(Some).collect()
            } else {
                options.layer_of(files, None)?.check_whole()?;
                vec![None]
            };
            let checked = experts.into_iter().map(|expert| {
                let found = check_mlp(&options.layer_of(files, expert)?);
                files.files().release_pages();
                found
            });
            checked.collect::<anyhow::Result<Vec<Found>>>()
        })?;
        for (facts, _) in &found {
            facts.quantize(quantize_a, quantize_hidden)?;
        }
        let (count, biases) = (found.len(), [0, 1].map(|of| found.iter().any(|(_, has_bias)| has_bias[of])));
        let all = found.into_iter().map(|(facts, _)| facts).collect();
        let MlpFacts { gate_up, down, .. } = common(all).map_err(error::facade)?;
        Ok((count, [down.n, gate_up.n, gate_up.k], biases))
    }

    /// Its path and how it is read; it is opened again where it is unpickled.
    fn __reduce__<'py>(this: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (PathBuf,))> {
        let (class, own) = (this.get_type(), this.get());
        let partial = this.py().import("functools")?.getattr("partial")?;
        let again = partial.call((class,), Some(own.reading.bind(this.py())))?;
        Ok((again, (own.absolute.clone(),)))
    }

    /// Files are read and never change: a copy is the same.
    fn __copy__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __deepcopy__(this: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        this
    }

    fn __repr__(&self) -> String {
        let (path, modules) = (self.path(), self.files.quantized_modules().count());
        format!(
            "<dualgemm.Checkpoint {}: {}, {modules} modules in 4 bits>",
            path.display(),
            self.convention()
        )
    }
}
