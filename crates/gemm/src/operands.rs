//! The tensors of one call. All borrow; nothing here copies weights or activations.

use std::borrow::Cow;

use dualgemm_formats::{FloatMatrix, QuantizedMatrix};
use half::{bf16, f16};

use crate::Error;

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
        for (half, bias) in [(gate, &self.gate_bias), (up, &self.up_bias)] {
            half.check_scales()?;
            if let Some(bias) = bias.as_ref().filter(|bias| bias.len() != half.rows()) {
                return Err(Error::BiasLen { tensor: half.name().into(), found: bias.len(), n: half.rows() });
            }
        }
        Ok(())
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
