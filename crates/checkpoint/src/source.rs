//! Gate and up of one MLP: found and checked first, read all at once or a run of features at a time.
//!
//! GGUF blocks, alternating rows, transposed experts and swapped nibbles cannot be borrowed from the file; taking a
//! run at a time keeps the copies small.

use std::ops::Range;
use std::path::Path;

use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix};

use crate::convention::Role;
use crate::gate_up::{GateUpOrder, Half};
use crate::module::{Mlp, Projection};
use crate::packed::{Packed, Stored};
use crate::{Checkpoint, Error};

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

/// Gate and up of a layer or expert, found in the files and not yet read.
#[derive(Debug, Clone)]
pub struct GateUpSource<'a> {
    file: &'a Path,
    weights: Weights<'a>,
    expert: Option<usize>,
    n: usize,
    bias: Option<(Vec<f32>, Vec<f32>)>,
    input: InputScales,
}

#[derive(Debug, Clone)]
enum Weights<'a> {
    Separate { gate: (Stored<'a>, GlobalScale), up: (Stored<'a>, GlobalScale) },
    Fused { both: Stored<'a>, global: GlobalScale, order: GateUpOrder },
}

impl<'a> GateUpSource<'a> {
    /// Features (N) of each half.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Elements per feature (K).
    pub fn k(&self) -> usize {
        self.stored().k
    }

    /// Block format of both halves.
    pub fn format(&self) -> BlockFormat {
        self.stored().format
    }

    /// Tensor scales of the activations; see [`GateUp::input_scales`].
    ///
    /// # Errors
    /// As there.
    pub fn input_scales(&self) -> Result<Option<(GlobalScale, GlobalScale)>, Error> {
        self.input.clone()
    }

    /// What error messages call gate and up.
    pub fn names(&self) -> (String, String) {
        match &self.weights {
            Weights::Separate { gate: (gate, _), up: (up, _) } => {
                (gate.name(self.expert), up.name(self.expert))
            }
            Weights::Fused { both, .. } => {
                (both.half_name(self.expert, Half::Gate), both.half_name(self.expert, Half::Up))
            }
        }
    }

    /// Tensor scales of gate and up.
    pub fn tensor_scales(&self) -> (GlobalScale, GlobalScale) {
        match &self.weights {
            Weights::Separate { gate: (_, gate), up: (_, up) } => (*gate, *up),
            Weights::Fused { global, .. } => (*global, *global),
        }
    }

    /// Whether gate and up have biases.
    pub fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    fn stored(&self) -> &Stored<'a> {
        match &self.weights {
            Weights::Separate { gate: (stored, _), .. } | Weights::Fused { both: stored, .. } => stored,
        }
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
        assert!(features.end <= self.n, "features {features:?} of {}", self.n);
        let (gate, up) = match &self.weights {
            Weights::Separate { gate, up } => {
                let half = |(stored, global): &(Stored<'a>, GlobalScale)| {
                    stored.packed_rows(self.expert, *global, features.clone())
                };
                (half(gate), half(up))
            }
            Weights::Fused { both, global, order } => {
                let half = |half| both.half_rows(self.expert, *global, (*order, half), features.clone());
                (half(Half::Gate), half(Half::Up))
            }
        };
        let matrix = |half: Packed<'a>| half.matrix(self.file);
        let part = |bias: &Vec<f32>| bias[features.clone()].to_vec();
        let bias = self.bias.as_ref().map(|(gate, up)| (part(gate), part(up)));
        Ok(GateUp { gate: matrix(gate)?, up: matrix(up)?, bias, input: self.input.clone() })
    }
}

impl Checkpoint {
    /// Gate and up of an MLP or of one of its experts, read.
    pub(crate) fn gate_up_of(&self, mlp: &Mlp, expert: Option<usize>) -> Result<GateUp<'_>, Error> {
        let source = self.source_of(mlp, expert)?;
        source.features(0..source.n)
    }

    /// Gate and up of an MLP or of one of its experts, found and checked against each other.
    pub(crate) fn source_of(&self, mlp: &Mlp, expert: Option<usize>) -> Result<GateUpSource<'_>, Error> {
        let own = mlp.own(expert);
        let file = self.files().root();
        if let Some(module) = mlp.module(own, Projection::GateUp) {
            let both = self.stored(module)?;
            let order = self.fused_order().ok_or_else(|| Error::FusedOrder {
                tensor: both.weight_name().into(),
                valid: GateUpOrder::names(),
            })?;
            both.check_order(order)?;
            let global = self.checked_scale(module, &both, expert)?;
            let n = both.rows / 2;
            let bias = self.bias(module, &both, expert)?.map(|bias| {
                let half = |half| (0..n).map(|r| bias[order.fused_row(half, r, n)]).collect();
                (half(Half::Gate), half(Half::Up))
            });
            let input = self.input_scale(module, &both, expert).map(|scale| scale.map(|s| (s, s)));
            return Ok(GateUpSource {
                file,
                weights: Weights::Fused { both, global, order },
                expert,
                n,
                bias,
                input,
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
        let n = gate.rows;
        let gate = (gate.clone(), self.checked_scale(gate_module, &gate, expert)?);
        let up = (up.clone(), self.checked_scale(up_module, &up, expert)?);
        Ok(GateUpSource { file, weights: Weights::Separate { gate, up }, expert, n, bias, input })
    }
}
