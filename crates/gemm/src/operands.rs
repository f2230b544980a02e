//! The tensors of one call. All borrow; nothing here copies weights or activations.

use std::borrow::Cow;
use std::ops::Range;

use dualgemm_formats::{Float, FloatMatrix, FloatType, QuantizedMatrix, match_floats};
use half::{bf16, f16};

use crate::{Error, Operation};

/// The activation matrix A, `[m, k]`.
#[derive(Debug, Clone, PartialEq)]
pub enum AOperand<'a> {
    /// f32, f16 or bf16, used as they are.
    Float(FloatMatrix<'a>),
    /// Already quantized.
    Quantized(QuantizedMatrix<'a>),
}

impl AOperand<'_> {
    /// Rows (M).
    pub fn rows(&self) -> usize {
        match self {
            Self::Float(a) => a.rows(),
            Self::Quantized(a) => a.rows(),
        }
    }

    /// Elements per row (K).
    pub fn k(&self) -> usize {
        match self {
            Self::Float(a) => a.cols(),
            Self::Quantized(a) => a.k(),
        }
    }

    /// Value of an element, tensor scale included.
    ///
    /// # Panics
    /// If there is no such element.
    pub fn value(&self, row: usize, k: usize) -> f64 {
        match self {
            Self::Float(a) => f64::from(a.value(row, k)),
            Self::Quantized(a) => a.value(row, k),
        }
    }
}

/// The two weight matrices of a gated MLP, both `[n, k]`, each with a tensor scale of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct GateUp<'a> {
    /// B1, whose product goes through the activation function.
    pub gate: QuantizedMatrix<'a>,
    /// B2, whose product multiplies it.
    pub up: QuantizedMatrix<'a>,
    /// Added to the gate product after all scales, `[n]`.
    pub gate_bias: Option<Cow<'a, [f32]>>,
    /// Added to the up product after all scales, `[n]`.
    pub up_bias: Option<Cow<'a, [f32]>>,
}

impl<'a> GateUp<'a> {
    /// A pair without biases.
    pub fn new(gate: QuantizedMatrix<'a>, up: QuantizedMatrix<'a>) -> Self {
        Self { gate, up, gate_bias: None, up_bias: None }
    }

    /// Features (N) of each half.
    pub fn n(&self) -> usize {
        self.gate.rows()
    }

    /// Elements per row (K).
    pub fn k(&self) -> usize {
        self.gate.k()
    }

    /// Some features of both halves; codes are borrowed.
    ///
    /// # Errors
    /// If the range is empty or reaches past N.
    pub fn features(&self, range: Range<usize>) -> Result<GateUp<'_>, Error> {
        Ok(GateUp {
            gate: self.gate.slice_rows(range.clone())?,
            up: self.up.slice_rows(range.clone())?,
            gate_bias: bias_of(&self.gate_bias, range.clone()),
            up_bias: bias_of(&self.up_bias, range),
        })
    }

    /// Checks what one matrix alone cannot: that both halves have one shape and format, that biases have N
    /// values, and that no block scale is NaN or negative.
    ///
    /// # Errors
    /// Names the tensor and the rule.
    pub fn check(&self) -> Result<(), Error> {
        let (gate, up) = (&self.gate, &self.up);
        if (gate.rows(), gate.k(), gate.format()) != (up.rows(), up.k(), up.format()) {
            return Err(Error::HalvesDiffer {
                gate: format!("{} is {} [{}, {}]", gate.name(), gate.format(), gate.rows(), gate.k()),
                up: format!("{} is {} [{}, {}]", up.name(), up.format(), up.rows(), up.k()),
            });
        }
        check_matrix(gate, &self.gate_bias)?;
        check_matrix(up, &self.up_bias)
    }
}

fn bias_of<'s>(bias: &'s Option<Cow<'_, [f32]>>, range: Range<usize>) -> Option<Cow<'s, [f32]>> {
    bias.as_ref().map(|bias| bias[range].into())
}

fn check_matrix(matrix: &QuantizedMatrix<'_>, bias: &Option<Cow<'_, [f32]>>) -> Result<(), Error> {
    matrix.check_scales()?;
    let Some(bias) = bias else { return Ok(()) };
    if bias.len() != matrix.rows() {
        return Err(Error::BiasLen { tensor: matrix.name().into(), found: bias.len(), n: matrix.rows() });
    }
    match bias.iter().position(|value| !value.is_finite()) {
        Some(at) => Err(Error::operand(
            format!("{}: element {at} of its bias", matrix.name()),
            bias[at].to_string(),
            "finite numbers",
        )),
        None => Ok(()),
    }
}

/// The weights of a linear layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear<'a> {
    /// `[n, k]`: a row for each feature of C.
    pub weight: QuantizedMatrix<'a>,
    /// Added after all scales, `[n]`.
    pub bias: Option<Cow<'a, [f32]>>,
}

impl<'a> Linear<'a> {
    /// A layer without bias.
    pub fn new(weight: QuantizedMatrix<'a>) -> Self {
        Self { weight, bias: None }
    }

    /// Features (N).
    pub fn n(&self) -> usize {
        self.weight.rows()
    }

    /// Elements per row (K).
    pub fn k(&self) -> usize {
        self.weight.k()
    }

    /// Some features; codes are borrowed.
    ///
    /// # Errors
    /// If the range is empty or reaches past N.
    pub fn features(&self, range: Range<usize>) -> Result<Linear<'_>, Error> {
        Ok(Linear { weight: self.weight.slice_rows(range.clone())?, bias: bias_of(&self.bias, range) })
    }

    /// Checks that the bias has N values and that no block scale is NaN or negative.
    ///
    /// # Errors
    /// Names the tensor and the rule.
    pub fn check(&self) -> Result<(), Error> {
        check_matrix(&self.weight, &self.bias)
    }
}

/// The weights of either operation.
#[derive(Debug, Clone, Copy)]
pub enum WeightRef<'w> {
    /// A pair.
    GateUp(&'w GateUp<'w>),
    /// A single matrix.
    Linear(&'w Linear<'w>),
}

impl<'w> From<&'w GateUp<'_>> for WeightRef<'w> {
    fn from(weights: &'w GateUp<'_>) -> Self {
        Self::GateUp(weights)
    }
}

impl<'w> From<&'w Linear<'_>> for WeightRef<'w> {
    fn from(weights: &'w Linear<'_>) -> Self {
        Self::Linear(weights)
    }
}

impl<'w> WeightRef<'w> {
    /// What they are for.
    pub fn op(self) -> Operation {
        match self {
            Self::GateUp(_) => Operation::GateUp,
            Self::Linear(_) => Operation::Linear,
        }
    }

    /// Gate, or the only matrix. The other one has its format and shape.
    pub fn first(self) -> &'w QuantizedMatrix<'w> {
        match self {
            Self::GateUp(pair) => &pair.gate,
            Self::Linear(layer) => &layer.weight,
        }
    }

    /// Checks the rules of [`GateUp::check`] or [`Linear::check`].
    ///
    /// # Errors
    /// As there.
    pub fn check(self) -> Result<(), Error> {
        match self {
            Self::GateUp(pair) => pair.check(),
            Self::Linear(layer) => layer.check(),
        }
    }
}

/// Where C, `[m, n]` row-major, is written.
#[derive(Debug)]
pub enum OutputMut<'a> {
    /// `m · n` values.
    F32(&'a mut [f32]),
    /// `m · n` values.
    F16(&'a mut [f16]),
    /// `m · n` values.
    Bf16(&'a mut [bf16]),
    /// C re-quantized as the A operand of the down projection.
    Nvfp4 {
        /// `m · n / 2` bytes, the even feature in the low nibble.
        codes: &'a mut [u8],
        /// Scale bytes in the layout that the description asks for, padding included (it is zeroed).
        scales: &'a mut [u8],
    },
}

impl OutputMut<'_> {
    /// Type and number of the values, if they are floats.
    pub fn floats(&self) -> Option<(FloatType, usize)> {
        fn of<T: Float>(c: &[T]) -> (FloatType, usize) {
            (T::TYPE, c.len())
        }
        Some(match_floats!(self, Self(c) => of(c), Self::Nvfp4 { .. } => return None))
    }
}
