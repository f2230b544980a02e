//! What every kind of weights is to Python: packed, somewhere, of a shape; and how each is run.

use std::path::PathBuf;
use std::sync::OnceLock;

use dualgemm::gemm::{AFormat, OutFormat, OutScale, Routing};
use dualgemm::{DeviceRouting, Launchers, LayerCall, PackedLayer};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::array::Place;
use crate::checkpoint::Checkpoint;
use crate::destination::Destination;
use crate::error::Kind;
use crate::operand::Source;
use crate::runners::{self, Product, Weights};
use crate::{device, number};

/// Weights in the order of the kernels, made once and shared by every call and thread: what `Weights`, `Linear`, `Mlp` and
/// `Experts` have in common.
#[pyclass(module = "dualgemm", frozen, weakref, subclass)]
pub struct Packed {
    pub layer: PackedLayer,
    number: i64,
    pub launchers: Launchers,
    origin: OnceLock<Origin>,
}

/// What `from_checkpoint` was called with, by which another process makes the same weights.
struct Origin {
    arguments: Py<PyTuple>,
    keywords: Py<PyDict>,
}

/// Keywords of a call, to be kept.
pub fn of_keywords<'py>(
    py: Python<'py>,
    keywords: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyDict>> {
    keywords.map_or_else(|| Ok(PyDict::new(py)), |keywords| keywords.copy())
}

/// A router's choices.
pub enum Choices {
    /// In this machine's memory, `[tokens, top_k]` of both.
    Here(Vec<i32>, Vec<f32>),
    /// In the memory of a GPU.
    OnDevice(DeviceRouting),
}

/// The arrays of a call; the stream is for those on a GPU.
pub struct Call<'a, 'py> {
    pub source: &'a Source<'py>,
    pub out: &'a mut Destination<'py>,
    pub stream: u64,
    /// Of a mixture, and whether results are added to what `out` holds.
    pub choices: Option<(Choices, bool)>,
}

impl Packed {
    pub fn new(layer: PackedLayer) -> Self {
        let (number, launchers, origin) = (number::next(), Launchers::default(), OnceLock::new());
        Self { layer, number, launchers, origin }
    }

    /// Says where weights come from: a path or a `Checkpoint`, then the layer or the module, and keywords.
    pub fn came_from(
        weights: &Bound<'_, PyAny>,
        path: &Bound<'_, PyAny>,
        which: Option<&Bound<'_, PyAny>>,
        keywords: Bound<'_, PyDict>,
    ) -> PyResult<()> {
        let py = weights.py();
        let path = match path.is_instance_of::<Checkpoint>() {
            true => path.clone(),
            // Other processes may be elsewhere.
            false => std::path::absolute(path.extract::<PathBuf>()?)?.into_pyobject(py)?.into_any(),
        };
        let arguments = PyTuple::new(py, [Some(&path), which])?.unbind();
        let origin = Origin { arguments, keywords: keywords.unbind() };
        // They were made just now.
        let _ = weights.cast::<Self>()?.get().origin.set(origin);
        Ok(())
    }

    /// Computes C `[rows of A, N]`, where A is. `settings` says how, for so many rows and the formats of A and C. Returns the
    /// tensor scale of a re-quantized C where it is known.
    pub fn compute(
        &self,
        py: Python<'_>,
        call: Call<'_, '_>,
        settings: impl Fn(usize, AFormat, OutFormat) -> LayerCall + Sync,
    ) -> PyResult<Option<f32>> {
        let PackedLayer { weights, target, shape } = &self.layer;
        let describe = |m, a, out| shape.describe(&settings(m, a, out));
        if call.source.place() != Place::Cpu {
            device::run(py, self, &call, &describe)?;
            return Ok(match call.out {
                Destination::Nvfp4 { scale: OutScale::Static(scale), .. } => Some(*scale),
                _ => None,
            });
        }
        let operand = call.source.operand("a")?;
        call.out.check(call.source, operand.rows(), shape.ends().0)?;
        let desc = describe(operand.rows(), AFormat::of(&operand), call.out.format());
        let c = call.out.output()?;
        let (routing, add) = match &call.choices {
            Some((Choices::Here(ids, weights), add)) => (Some(Routing { ids, weights }), *add),
            _ => (None, false),
        };
        let by = Weights::Packed(weights, routing);
        runners::run(py, Product::Packed(desc), target, |runner| runner.run(&operand, &by, (c, add)))
    }
}

#[pymethods]
impl Packed {
    /// Features out and in.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        self.layer.shape.ends()
    }

    /// Where the weights are and the product is computed: cpu, cuda:N or sim:ARCH.
    #[getter]
    fn device(&self) -> String {
        self.layer.target.to_string()
    }

    /// Bytes that the packed weights take.
    #[getter]
    fn nbytes(&self) -> usize {
        self.layer.weights.bytes()
    }

    /// The number by which graphs of torch know these weights.
    #[getter]
    fn _number(this: &Bound<'_, Self>) -> PyResult<i64> {
        number::enter(this.as_any(), this.get().number)
    }

    /// Weights from a checkpoint are read again where they are unpickled.
    fn __reduce__<'py>(this: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, class) = (this.py(), this.get_type());
        let Some(Origin { arguments, keywords }) = this.get().origin.get() else {
            return Err(Kind::Unsupported.raise(format!(
                "{}: made of tensors, which it does not keep; weights from a checkpoint alone can be pickled",
                class.name()?
            )));
        };
        let again = py.import("dualgemm._ops")?.getattr("from_checkpoint")?;
        Ok((again, PyTuple::new(py, [class.as_any(), arguments.bind(py), keywords.bind(py)])?))
    }

    /// Weights never change: a copy is the same.
    fn __copy__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __deepcopy__(this: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        this
    }
}
