//! Which tensor scales a result rests on, and where each comes from: a part of the reports of `run` and `verify`.

use std::fmt;

use dualgemm::checkpoint::{GateUpSource, ScaleOrigin};
use dualgemm::formats::{GlobalScale, GlobalScaleSource};
use dualgemm::gemm::{AOperand, QuantizeA};
use serde::Serialize;

/// The scales of the three operands.
#[derive(Debug, Serialize)]
pub struct Scales {
    /// Of gate.
    pub gate: Scale,
    /// Of up.
    pub up: Scale,
    /// Of A; none where A stays floats.
    pub a: Option<InputScale>,
}

/// A tensor scale of weights.
#[derive(Debug, Serialize)]
pub struct Scale {
    /// The multiplier.
    value: f32,
    from: ScaleOrigin,
}

/// The tensor scale that quantizes A.
#[derive(Debug, Serialize)]
pub struct InputScale {
    /// The multiplier; none where each A has its own.
    pub value: Option<f32>,
    /// Where it comes from.
    pub from: String,
}

impl Scales {
    /// Those of a layer on an A before it is quantized.
    pub fn of(layer: &GateUpSource<'_>, a: &AOperand<'_>, quantize: QuantizeA) -> Self {
        let ((gate, up), (gate_from, up_from)) = (layer.tensor_scales(), layer.tensor_scales_from());
        let scale =
            |scale: GlobalScale, from: &ScaleOrigin| Scale { value: scale.value(), from: from.clone() };
        let a = match (a, quantize) {
            (AOperand::Quantized(a), _) => {
                Some(InputScale { value: Some(a.global_scale().value()), from: "the input's own".into() })
            }
            (_, QuantizeA::No) => None,
            (_, QuantizeA::Dynamic) => {
                Some(InputScale { value: None, from: "dynamic: the largest value of A".into() })
            }
            (_, QuantizeA::Static(value)) => {
                Some(InputScale { value: Some(value), from: static_from(layer, value) })
            }
        };
        Self { gate: scale(gate, gate_from), up: scale(up, up_from), a }
    }
}

/// Whose scale it is that quantizes A: gate's, unless only up's has that value.
fn static_from(layer: &GateUpSource<'_>, value: f32) -> String {
    let (Ok(Some((gate, up))), Some((gate_from, up_from))) =
        (layer.input_scales(), layer.input_scales_from())
    else {
        return "the checkpoint".into();
    };
    let (scale, from) = if gate.value() == value { (gate, gate_from) } else { (up, up_from) };
    match scale.source() {
        GlobalScaleSource::Absent => format!("--unusable-input-scale-is-one, instead of {from}"),
        GlobalScaleSource::Multiplier | GlobalScaleSource::Divisor(_) => from.to_string(),
    }
}

impl fmt::Display for Scale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.from {
            ScaleOrigin::Tensor { .. } => write!(f, "tensor scale {:e}, {}", self.value, self.from),
            ScaleOrigin::One(_) => write!(f, "tensor scale {}", self.from),
        }
    }
}

impl fmt::Display for InputScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.value {
            Some(value) => write!(f, "tensor scale {value:e}, {}", self.from),
            None => write!(f, "tensor scale {}", self.from),
        }
    }
}
