//! `Checkpoint`: opened once, for the many weights that a model takes from it, and asked what it has before anything is read.

use std::sync::Arc;

use dualgemm::checkpoint::{Checkpoint as Files, MlpKind};
use dualgemm_cli::layer::{Layer, features_per_run};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error;
use crate::facts::linear_of;
use crate::options::LayerOptions;
use crate::pool;

/// A checkpoint whose files are open.
#[pyclass(module = "dualgemm", frozen)]
pub struct Checkpoint {
    pub files: Arc<Files>,
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

/// Reads gate, up and down and checks them as packing does: H, N and K.
fn check_mlp(layer: &Layer<'_>) -> anyhow::Result<(usize, usize, usize)> {
    layer.activation()?;
    let run = features_per_run(layer.k());
    for first in (0..layer.n()).step_by(run) {
        layer.features(first..layer.n().min(first + run))?.check()?;
    }
    let (down, _) = linear_of(layer.down()?);
    down.check()?;
    Ok((down.n(), layer.n(), layer.k()))
}

#[pymethods]
impl Checkpoint {
    #[new]
    #[pyo3(signature = (path, **reading))]
    fn new(py: Python<'_>, path: &Bound<'_, PyAny>, reading: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let options = LayerOptions::of(None, reading)?;
        Ok(Self { files: options.open(py, path)? })
    }

    /// Where it is.
    #[getter]
    fn path(&self) -> std::path::PathBuf {
        self.files.files().root().into()
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

    /// Reads a linear layer and checks it as packing does: N, K and whether it has a bias.
    fn _check_linear(&self, py: Python<'_>, module: &str) -> PyResult<(usize, usize, bool)> {
        self.ask(py, |files| {
            let (linear, _) = linear_of(files.linear(module)?);
            linear.check()?;
            files.files().release_pages();
            Ok((linear.n(), linear.k(), linear.bias.is_some()))
        })
    }

    /// The same of a gated MLP, of the shared expert or of all routed experts of a layer: how many, H, N and K.
    fn _check_mlp(&self, py: Python<'_>, layer: usize, kind: &str) -> PyResult<(usize, usize, usize, usize)> {
        let options = LayerOptions::numbered(layer, kind == "shared");
        self.ask(py, |files| {
            if kind != "experts" {
                let (h, n, k) = check_mlp(&options.layer_of(files, None)?)?;
                files.files().release_pages();
                return Ok((1, h, n, k));
            }
            let ids = files.experts(layer)?.ids().to_vec();
            let mut shape = (0, 0, 0);
            for &expert in &ids {
                shape = check_mlp(&options.layer_of(files, Some(expert))?)?;
                files.files().release_pages();
            }
            Ok((ids.len(), shape.0, shape.1, shape.2))
        })
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
