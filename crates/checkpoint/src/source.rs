//! Linear layers, gate and up among them: found and checked first, read all at once or a run of features at a time.
//!
//! GGUF blocks, alternating rows, transposed experts and swapped nibbles cannot be borrowed from the file; taking a
//! run at a time keeps the copies small.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use dualgemm_formats::{BlockFormat, FloatType, GlobalScale, QuantizedMatrix};
use dualgemm_gemm::{AFormat, GateUp, Linear, Weight};

use crate::convention::Role;
use crate::gate_up::{GateUpOrder, Half};
use crate::module::{Mlp, Projection};
use crate::packed::Stored;
use crate::{Checkpoint, Error, TensorView};

/// Where a scale comes from.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(untagged)]
pub enum ScaleOrigin {
    /// A tensor and the file that holds it.
    #[expect(missing_docs, reason = "said above")]
    Tensor { tensor: String, file: PathBuf },
    /// No tensor: the scale is 1, and this says why.
    One(String),
}

impl fmt::Display for ScaleOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor { tensor, file } => write!(f, "`{tensor}` in {}", file.display()),
            Self::One(why) => f.write_str(why),
        }
    }
}

/// A weight as the files have it.
#[derive(Debug, Clone)]
enum Held<'a> {
    Blocks(Stored<'a>),
    /// A matrix.
    Floats(TensorView<'a>, FloatType),
}

/// A linear layer of a checkpoint, found and not yet read; or gate or up of an MLP, which is one.
#[derive(Debug, Clone)]
pub struct LinearSource<'a> {
    checkpoint: &'a Checkpoint,
    held: Held<'a>,
    expert: Option<usize>,
    /// Which rows of a fused weight it is.
    half: Option<(GateUpOrder, Half)>,
    /// The tensor scale.
    pub tensor_scale: GlobalScale,
    /// Where the tensor scale comes from.
    pub tensor_scale_from: ScaleOrigin,
    /// A value for each row.
    pub bias: Option<Vec<f32>>,
    input: Result<Option<GlobalScale>, Error>,
    /// Where the tensor scale of the activations comes from; `None` if it is not stored.
    pub input_scale_from: Option<ScaleOrigin>,
}

impl<'a> LinearSource<'a> {
    /// Number of rows, a row per output feature.
    pub fn rows(&self) -> usize {
        let rows = match &self.held {
            Held::Blocks(stored) => stored.rows,
            Held::Floats(weight, _) => weight.shape[0],
        };
        if self.half.is_some() { rows / 2 } else { rows }
    }

    /// Elements per row, the input features.
    pub fn k(&self) -> usize {
        match &self.held {
            Held::Blocks(stored) => stored.k,
            Held::Floats(weight, _) => weight.shape[1],
        }
    }

    /// Format of the elements.
    pub fn format(&self) -> AFormat {
        match &self.held {
            Held::Blocks(stored) => stored.format.into(),
            Held::Floats(_, float) => (*float).into(),
        }
    }

    /// What error messages call it.
    pub fn name(&self) -> String {
        match (&self.held, self.half) {
            (Held::Floats(weight, _), _) => weight.name.into(),
            (Held::Blocks(stored), Some((_, half))) => stored.half_name(self.expert, half),
            (Held::Blocks(stored), None) => stored.name(self.expert),
        }
    }

    /// Tensor scale of the activations that go into this layer, whichever way the file stores it; `None` if the
    /// checkpoint has none (weights only).
    ///
    /// # Errors
    /// If the checkpoint declares one and it is missing or unusable. The weight can be used regardless.
    pub fn input_scale(&self) -> Result<Option<GlobalScale>, Error> {
        self.input.clone()
    }

    /// Some rows of the weight. What lies in the file as it is needed is borrowed.
    ///
    /// # Errors
    /// If the range is empty, or the matrix breaks a rule of its format.
    ///
    /// # Panics
    /// If `rows` reaches past [`rows`](Self::rows).
    pub fn weight(&self, rows: Range<usize>) -> Result<Weight<'a>, Error> {
        match &self.held {
            Held::Blocks(_) => self.blocks(rows).map(Weight::Blocks),
            Held::Floats(weight, _) => {
                let rows = weight.float_rows(rows, self.rows(), self.k())?;
                Ok(Weight::Floats(weight.name.into(), rows))
            }
        }
    }

    /// The same of a weight in 4 bits.
    ///
    /// # Errors
    /// As there, and if it is in floats.
    ///
    /// # Panics
    /// As there.
    pub fn blocks(&self, rows: Range<usize>) -> Result<QuantizedMatrix<'a>, Error> {
        assert!(rows.end <= self.rows(), "rows {rows:?} of {}", self.rows());
        let stored = self.stored()?;
        let read = match self.half {
            Some(half) => stored.half(self.expert, self.tensor_scale, half, rows),
            None => stored.matrix(self.name(), self.expert, self.tensor_scale, rows),
        };
        read.map_err(|source| Error::Format { file: self.file().into(), source })
    }

    fn stored(&self) -> Result<&Stored<'a>, Error> {
        match &self.held {
            Held::Blocks(stored) => Ok(stored),
            Held::Floats(weight, float) => {
                Err(Error::NotQuantized { module: weight.name.into(), why: format!("it is in {float}") })
            }
        }
    }

    /// Format of the blocks.
    ///
    /// # Errors
    /// If the weight is in floats.
    pub fn block_format(&self) -> Result<BlockFormat, Error> {
        Ok(self.stored()?.format)
    }

    /// Some features: these rows with their part of the bias, as [`weight`](Self::weight) reads them.
    pub fn features(&self, features: Range<usize>) -> Result<Linear<'a>, Error> {
        Ok(Linear { bias: self.bias_of(features.clone()), weight: self.weight(features)? })
    }

    fn bias_of(&self, features: Range<usize>) -> Option<Cow<'a, [f32]>> {
        self.bias.as_ref().map(|bias| bias[features].to_vec().into())
    }

    /// All features.
    pub fn read(&self) -> Result<Linear<'a>, Error> {
        self.features(0..self.rows())
    }

    pub(crate) fn file(&self) -> &'a Path {
        self.checkpoint.files().root()
    }

    /// Lets go of the pages of the files that reading has brought into memory.
    pub(crate) fn release(&self) {
        let release = |name| self.checkpoint.files().release_tensor(name);
        match &self.held {
            Held::Blocks(stored) => stored.tensors().for_each(release),
            Held::Floats(weight, _) => release(weight.name),
        }
    }
}

/// Gate and up of a layer or expert, found in the files and not yet read: of one shape and format, and both or neither with a
/// bias.
#[derive(Debug, Clone)]
pub struct GateUpSource<'a> {
    /// The projection that goes through the activation.
    pub gate: LinearSource<'a>,
    /// The projection that multiplies it.
    pub up: LinearSource<'a>,
}

impl<'a> GateUpSource<'a> {
    /// Features (N) of each half.
    pub fn n(&self) -> usize {
        self.gate.rows()
    }

    /// Elements per feature (K).
    pub fn k(&self) -> usize {
        self.gate.k()
    }

    /// Format of both halves.
    pub fn format(&self) -> AFormat {
        self.gate.format()
    }

    /// Tensor scales of the activations, as gate and as up were calibrated; `None` if the checkpoint has none
    /// (weights only).
    ///
    /// # Errors
    /// If the checkpoint declares them and one is missing or unusable. The weights can be used regardless.
    pub fn input_scales(&self) -> Result<Option<(GlobalScale, GlobalScale)>, Error> {
        Ok(self.gate.input_scale()?.zip(self.up.input_scale()?))
    }

    /// Some features of both halves, with their biases, as [`LinearSource::weight`] reads them.
    pub fn features(&self, features: Range<usize>) -> Result<GateUp<'a>, Error> {
        let [gate_bias, up_bias] = [&self.gate, &self.up].map(|half| half.bias_of(features.clone()));
        let (gate, up) = (self.gate.blocks(features.clone())?, self.up.blocks(features)?);
        Ok(GateUp { gate, up, gate_bias, up_bias })
    }

    /// Lets go of the pages of the files that reading has brought into memory.
    pub fn release(&self) {
        self.gate.release();
        self.up.release();
    }

    /// All features.
    pub fn read(&self) -> Result<GateUp<'a>, Error> {
        self.features(0..self.n())
    }
}

impl Checkpoint {
    /// Gate and up of an MLP or of one of its experts, found and checked against each other.
    pub(crate) fn source_of(&self, mlp: &Mlp, expert: Option<usize>) -> Result<GateUpSource<'_>, Error> {
        let own = mlp.own(expert);
        if let Some(module) = mlp.module(own, Projection::GateUp) {
            let stored = self.stored(module)?;
            let order = self.fused_order(module).ok_or_else(|| Error::FusedOrder {
                tensor: stored.weight_name().into(),
                valid: GateUpOrder::names(),
            })?;
            stored.check_order(order)?;
            let both = self.found(module, stored, expert)?;
            let n = both.rows() / 2;
            let of = |half| {
                let row = |row| order.fused_row(half, row, n);
                let bias = both.bias.as_ref().map(|bias| (0..n).map(|i| bias[row(i)]).collect());
                LinearSource { half: Some((order, half)), bias, ..both.clone() }
            };
            return Ok(GateUpSource { gate: of(Half::Gate), up: of(Half::Up) });
        }
        let module =
            |projection| mlp.module(own, projection).ok_or_else(|| self.missing_module(mlp, own, projection));
        let (gate_module, up_module) = (module(Projection::Gate)?, module(Projection::Up)?);
        let (gate, up) = (self.stored(gate_module)?, self.stored(up_module)?);
        let (mut gate, mut up) = (self.found(gate_module, gate, expert)?, self.found(up_module, up, expert)?);
        if gate.bias.is_some() != up.bias.is_some() {
            let (module, other) =
                if gate.bias.is_some() { (up_module, gate_module) } else { (gate_module, up_module) };
            return Err(self.missing(module, Role::Bias, &format!("`{other}`, which has a bias,")));
        }
        match (&gate.input, &up.input) {
            (Ok(Some(_)), Ok(None)) => up.input = Err(self.missing(up_module, Role::InputScale, up_module)),
            (Ok(None), Ok(Some(_))) => {
                gate.input = Err(self.missing(gate_module, Role::InputScale, gate_module));
            }
            _ => {}
        }
        let shape = |of: &LinearSource<'_>| format!("{} [{}, {}]", of.format(), of.rows(), of.k());
        if shape(&gate) != shape(&up) {
            return Err(Error::HalvesDiffer {
                gate_shape: shape(&gate),
                up_shape: shape(&up),
                gate: gate.name(),
                up: up.name(),
            });
        }
        Ok(GateUpSource { gate, up })
    }

    /// A quantized module, or that of an expert, before it is read.
    pub(crate) fn layer_source(
        &self,
        module: &str,
        expert: Option<usize>,
    ) -> Result<LinearSource<'_>, Error> {
        self.found(module, self.stored(module)?, expert)
    }

    /// The same of a module that may be in floats.
    pub(crate) fn source_in_any_format(
        &self,
        module: &str,
        expert: Option<usize>,
    ) -> Result<LinearSource<'_>, Error> {
        let Some((weight, float)) = self.in_floats(module)? else { return self.layer_source(module, expert) };
        Ok(LinearSource {
            checkpoint: self,
            expert,
            half: None,
            tensor_scale: GlobalScale::ONE,
            tensor_scale_from: ScaleOrigin::One(format!("1, by format ({float})")),
            bias: self.bias(module, (None, weight.shape[0]), expert)?,
            input: Ok(None),
            input_scale_from: None,
            held: Held::Floats(weight, float),
        })
    }

    fn found<'s>(
        &'s self,
        module: &str,
        stored: Stored<'s>,
        expert: Option<usize>,
    ) -> Result<LinearSource<'s>, Error> {
        Ok(LinearSource {
            checkpoint: self,
            expert,
            half: None,
            tensor_scale: self.checked_scale(module, &stored, expert)?,
            tensor_scale_from: self.tensor_scale_from(module, &stored),
            bias: self.bias(module, (stored.experts, stored.rows), expert)?,
            input: self.input_scale(module, &stored, expert),
            input_scale_from: self.scale_tensor(module, Role::InputScale),
            held: Held::Blocks(stored),
        })
    }

    fn scale_tensor(&self, module: &str, role: Role) -> Option<ScaleOrigin> {
        let tensor = self.index().modules.get(module)?.get(role)?;
        Some(ScaleOrigin::Tensor { tensor: tensor.into(), file: self.files().file_of(tensor)?.into() })
    }

    fn tensor_scale_from(&self, module: &str, stored: &Stored<'_>) -> ScaleOrigin {
        self.scale_tensor(module, Role::TensorScale).unwrap_or_else(|| {
            ScaleOrigin::One(match stored.format {
                BlockFormat::Mxfp4 => "1, by format (mxfp4)".into(),
                BlockFormat::Nvfp4 => {
                    format!("1, absent: the {} convention needs none here", self.convention().name)
                }
            })
        })
    }
}
