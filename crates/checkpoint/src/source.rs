//! Gate and up of one MLP: found and checked first, read all at once or a run of features at a time.
//!
//! GGUF blocks, alternating rows, transposed experts and swapped nibbles cannot be borrowed from the file; taking a
//! run at a time keeps the copies small.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix};

use crate::convention::Role;
use crate::gate_up::{GateUpOrder, Half};
use crate::module::{Mlp, Projection};
use crate::packed::Stored;
use crate::{Checkpoint, Error};

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

type InputScales = Result<Option<(GlobalScale, GlobalScale)>, Error>;

/// Gate and up of a layer or expert, each with scales of its own.
#[derive(Debug, Clone)]
pub struct GateUp<'a> {
    /// `[n, k]`: the projection that goes through the activation.
    pub gate: QuantizedMatrix<'a>,
    /// `[n, k]`: the projection that multiplies it.
    pub up: QuantizedMatrix<'a>,
    /// Biases of gate and up, `n` each.
    pub bias: Option<(Vec<f32>, Vec<f32>)>,
    input: InputScales,
}

impl GateUp<'_> {
    /// Tensor scales of the activations, as gate and as up were calibrated; `None` if the checkpoint has none
    /// (weights only).
    ///
    /// # Errors
    /// If the checkpoint declares them and one is missing or unusable. The weights can be used regardless.
    pub fn input_scales(&self) -> Result<Option<(GlobalScale, GlobalScale)>, Error> {
        self.input.clone()
    }
}

/// One matrix of a checkpoint, found and not yet read.
#[derive(Debug, Clone)]
pub struct MatrixSource<'a> {
    checkpoint: &'a Checkpoint,
    stored: Stored<'a>,
    expert: Option<usize>,
    tensor_scale: GlobalScale,
    tensor_scale_from: ScaleOrigin,
    /// Which rows of a fused weight it is.
    half: Option<(GateUpOrder, Half)>,
}

impl<'a> MatrixSource<'a> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        if self.half.is_some() { self.stored.rows / 2 } else { self.stored.rows }
    }

    /// Elements per row.
    pub fn k(&self) -> usize {
        self.stored.k
    }

    /// Block format.
    pub fn format(&self) -> BlockFormat {
        self.stored.format
    }

    /// The tensor scale.
    pub fn tensor_scale(&self) -> GlobalScale {
        self.tensor_scale
    }

    /// Where the tensor scale comes from.
    pub fn tensor_scale_from(&self) -> &ScaleOrigin {
        &self.tensor_scale_from
    }

    /// What error messages call it.
    pub fn name(&self) -> String {
        match self.half {
            Some((_, half)) => self.stored.half_name(self.expert, half),
            None => self.stored.name(self.expert),
        }
    }

    /// Some rows. Codes that lie in the file as they are needed are borrowed.
    ///
    /// # Errors
    /// If the range is empty, or the matrix breaks a rule of its format.
    ///
    /// # Panics
    /// If `rows` reaches past [`rows`](Self::rows).
    pub fn read(&self, rows: Range<usize>) -> Result<QuantizedMatrix<'a>, Error> {
        assert!(rows.end <= self.rows(), "rows {rows:?} of {}", self.rows());
        let packed = match self.half {
            Some(half) => self.stored.half_rows(self.expert, self.tensor_scale, half, rows),
            None => self.stored.packed_rows(self.expert, self.tensor_scale, rows),
        };
        packed.matrix(self.file())
    }

    pub(crate) fn file(&self) -> &'a Path {
        self.checkpoint.files().root()
    }

    /// Lets go of the pages of the files that reading has brought into memory.
    pub(crate) fn release(&self) {
        self.stored.tensors().for_each(|name| self.checkpoint.files().release_tensor(name));
    }
}

/// Gate and up of a layer or expert, found in the files and not yet read.
#[derive(Debug, Clone)]
pub struct GateUpSource<'a> {
    pub(crate) gate: MatrixSource<'a>,
    pub(crate) up: MatrixSource<'a>,
    pub(crate) bias: Option<(Vec<f32>, Vec<f32>)>,
    input: InputScales,
    input_from: Option<(ScaleOrigin, ScaleOrigin)>,
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

    /// Block format of both halves.
    pub fn format(&self) -> BlockFormat {
        self.gate.format()
    }

    /// Tensor scales of the activations; see [`GateUp::input_scales`].
    pub fn input_scales(&self) -> Result<Option<(GlobalScale, GlobalScale)>, Error> {
        self.input.clone()
    }

    /// Gate and up.
    pub fn matrices(&self) -> [&MatrixSource<'a>; 2] {
        [&self.gate, &self.up]
    }

    /// What error messages call gate and up.
    pub fn names(&self) -> (String, String) {
        (self.gate.name(), self.up.name())
    }

    /// Tensor scales of gate and up.
    pub fn tensor_scales(&self) -> (GlobalScale, GlobalScale) {
        (self.gate.tensor_scale(), self.up.tensor_scale())
    }

    /// Where the tensor scales of gate and up come from.
    pub fn tensor_scales_from(&self) -> (&ScaleOrigin, &ScaleOrigin) {
        (self.gate.tensor_scale_from(), self.up.tensor_scale_from())
    }

    /// Where the tensor scales of the activations come from, as gate and as up were calibrated; `None` if one of them is
    /// not stored.
    pub fn input_scales_from(&self) -> Option<(&ScaleOrigin, &ScaleOrigin)> {
        self.input_from.as_ref().map(|(gate, up)| (gate, up))
    }

    /// Whether gate and up have biases.
    pub fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// Some features of both halves, with their biases. Rows of codes that lie in the file as they are needed are
    /// borrowed.
    ///
    /// # Errors
    /// If the range is empty, or a tensor breaks a rule of its format.
    ///
    /// # Panics
    /// If `features` reaches past [`n`](Self::n).
    pub fn features(&self, features: Range<usize>) -> Result<GateUp<'a>, Error> {
        let part = |bias: &Vec<f32>| bias[features.clone()].to_vec();
        Ok(GateUp {
            gate: self.gate.read(features.clone())?,
            up: self.up.read(features.clone())?,
            bias: self.bias.as_ref().map(|(gate, up)| (part(gate), part(up))),
            input: self.input.clone(),
        })
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
            let both = self.stored(module)?;
            let order = self.fused_order(module).ok_or_else(|| Error::FusedOrder {
                tensor: both.weight_name().into(),
                valid: GateUpOrder::names(),
            })?;
            both.check_order(order)?;
            let tensor_scale = self.checked_scale(module, &both, expert)?;
            let n = both.rows / 2;
            let bias = self.bias(module, &both, expert)?.map(|bias| {
                let half = |half| (0..n).map(|r| bias[order.fused_row(half, r, n)]).collect();
                (half(Half::Gate), half(Half::Up))
            });
            let input = self.input_scale(module, &both, expert).map(|scale| scale.map(|s| (s, s)));
            let half = |half| MatrixSource {
                checkpoint: self,
                stored: both.clone(),
                expert,
                tensor_scale,
                tensor_scale_from: self.tensor_scale_from(module, &both),
                half: Some((order, half)),
            };
            let (gate, up) = (half(Half::Gate), half(Half::Up));
            return Ok(GateUpSource {
                gate,
                up,
                bias,
                input,
                input_from: self.input_scales_from(module, module),
            });
        }
        let module =
            |projection| mlp.module(own, projection).ok_or_else(|| self.missing_module(mlp, own, projection));
        let (gate_module, up_module) = (module(Projection::Gate)?, module(Projection::Up)?);
        let (gate, up) = (self.stored(gate_module)?, self.stored(up_module)?);
        let bias = match (self.bias(gate_module, &gate, expert)?, self.bias(up_module, &up, expert)?) {
            (Some(gate), Some(up)) => Some((gate, up)),
            (None, None) => None,
            (gate, _) => {
                let module = if gate.is_some() { up_module } else { gate_module };
                return Err(self.missing(module, Role::Bias, "its sibling has one; it"));
            }
        };
        let input = self.input_scale(gate_module, &gate, expert).and_then(|gate_scale| {
            match (gate_scale, self.input_scale(up_module, &up, expert)?) {
                (Some(gate), Some(up)) => Ok(Some((gate, up))),
                (None, None) => Ok(None),
                (Some(_), None) => Err(self.missing(up_module, Role::InputScale, up_module)),
                (None, Some(_)) => Err(self.missing(gate_module, Role::InputScale, gate_module)),
            }
        });
        let shape = |s: &Stored<'_>| format!("{} [{}, {}]", s.format, s.rows, s.k);
        if shape(&gate) != shape(&up) {
            return Err(Error::HalvesDiffer {
                gate_shape: shape(&gate),
                up_shape: shape(&up),
                gate: gate.name(expert),
                up: up.name(expert),
            });
        }
        let gate = self.whole(gate_module, gate, expert)?;
        let up = self.whole(up_module, up, expert)?;
        Ok(GateUpSource { gate, up, bias, input, input_from: self.input_scales_from(gate_module, up_module) })
    }

    /// A stored weight, or that of an expert, as it is.
    pub(crate) fn whole<'s>(
        &'s self,
        module: &str,
        stored: Stored<'s>,
        expert: Option<usize>,
    ) -> Result<MatrixSource<'s>, Error> {
        let tensor_scale = self.checked_scale(module, &stored, expert)?;
        let tensor_scale_from = self.tensor_scale_from(module, &stored);
        Ok(MatrixSource { checkpoint: self, stored, expert, tensor_scale, tensor_scale_from, half: None })
    }

    pub(crate) fn scale_tensor(&self, module: &str, role: Role) -> Option<ScaleOrigin> {
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

    fn input_scales_from(&self, gate: &str, up: &str) -> Option<(ScaleOrigin, ScaleOrigin)> {
        let of = |module| self.scale_tensor(module, Role::InputScale);
        Some((of(gate)?, of(up)?))
    }
}
