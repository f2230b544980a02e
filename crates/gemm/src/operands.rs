//! The tensors of one call. All borrow; nothing here copies weights or activations.

use std::borrow::Cow;
use std::ops::Range;

use dualgemm_formats::{
    BlockFormat, Float, FloatMatrix, FloatType, GlobalScale, QuantizedMatrix, match_floats,
};
use half::{bf16, f16};

use crate::{AFormat, Error, Operation};

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
        for (matrix, bias) in [(gate, &self.gate_bias), (up, &self.up_bias)] {
            matrix.check_scales()?;
            check_bias(matrix.name(), matrix.rows(), bias)?;
        }
        Ok(())
    }
}

fn bias_of<'s>(bias: &'s Option<Cow<'_, [f32]>>, range: Range<usize>) -> Option<Cow<'s, [f32]>> {
    bias.as_ref().map(|bias| bias[range].into())
}

fn check_bias(tensor: &str, n: usize, bias: &Option<Cow<'_, [f32]>>) -> Result<(), Error> {
    let Some(bias) = bias else { return Ok(()) };
    if bias.len() != n {
        return Err(Error::BiasLen { tensor: tensor.into(), found: bias.len(), n });
    }
    match bias.iter().position(|value| !value.is_finite()) {
        Some(at) => Err(Error::operand(
            format!("{tensor}: element {at} of its bias"),
            bias[at].to_string(),
            "finite numbers",
        )),
        None => Ok(()),
    }
}

/// A matrix of weights, `[n, k]`.
#[derive(Debug, Clone, PartialEq)]
pub enum Weight<'a> {
    /// In 4 bits.
    Blocks(QuantizedMatrix<'a>),
    /// In floats, by this name.
    Floats(Cow<'a, str>, FloatMatrix<'a>),
}

impl<'a> From<QuantizedMatrix<'a>> for Weight<'a> {
    fn from(matrix: QuantizedMatrix<'a>) -> Self {
        Self::Blocks(matrix)
    }
}

impl<'a> Weight<'a> {
    /// What messages call it.
    pub fn name(&self) -> &str {
        match self {
            Self::Blocks(w) => w.name(),
            Self::Floats(name, _) => name,
        }
    }

    /// Format of the elements.
    pub fn format(&self) -> AFormat {
        match self {
            Self::Blocks(w) => w.format().into(),
            Self::Floats(_, w) => w.float_type().into(),
        }
    }

    /// Rows, a row for each feature.
    pub fn rows(&self) -> usize {
        match self {
            Self::Blocks(w) => w.rows(),
            Self::Floats(_, w) => w.rows(),
        }
    }

    /// Elements per row.
    pub fn k(&self) -> usize {
        match self {
            Self::Blocks(w) => w.k(),
            Self::Floats(_, w) => w.cols(),
        }
    }

    /// Value of an element, tensor scale included.
    ///
    /// # Panics
    /// If there is no such element.
    pub fn value(&self, row: usize, k: usize) -> f64 {
        match self {
            Self::Blocks(w) => w.value(row, k),
            Self::Floats(_, w) => w.value(row, k).into(),
        }
    }

    /// The tensor scale; of floats 1.
    pub fn global_scale(&self) -> GlobalScale {
        match self {
            Self::Blocks(w) => w.global_scale(),
            Self::Floats(..) => GlobalScale::ONE,
        }
    }

    /// The matrix in 4 bits.
    ///
    /// # Errors
    /// If it is in floats.
    pub fn blocks(&self) -> Result<&QuantizedMatrix<'a>, Error> {
        match self {
            Self::Blocks(w) => Ok(w),
            Self::Floats(name, w) => {
                Err(Error::operand(&**name, w.float_type().to_string(), "nvfp4 or mxfp4"))
            }
        }
    }

    /// Some rows, borrowed.
    ///
    /// # Errors
    /// If the range is empty or reaches past the rows.
    pub fn slice_rows(&self, rows: Range<usize>) -> Result<Weight<'_>, Error> {
        Ok(match self {
            Self::Blocks(w) => Weight::Blocks(w.slice_rows(rows)?),
            Self::Floats(name, w) if rows.is_empty() || rows.end > w.rows() => {
                let expected = format!("rows below {}, at least one", w.rows());
                return Err(Error::operand(&**name, format!("asked for rows {rows:?}"), expected));
            }
            Self::Floats(name, w) => Weight::Floats(Cow::Borrowed(&**name), w.part(rows, 0..w.cols())),
        })
    }

    /// The columns of one rank, as [`QuantizedMatrix::shard_k`] takes them.
    ///
    /// # Errors
    /// If `rank` is not below `ranks`, or K does not divide evenly, by whole blocks.
    pub fn shard_k(&self, rank: usize, ranks: usize) -> Result<Weight<'_>, Error> {
        Ok(match self {
            Self::Blocks(w) => Weight::Blocks(w.shard_k(rank, ranks)?),
            Self::Floats(name, w) => {
                let columns = BlockFormat::Nvfp4.shard(name, w.cols(), rank, ranks)?;
                Weight::Floats(Cow::Borrowed(&**name), w.part(0..w.rows(), columns))
            }
        })
    }

    /// The same matrix, owning its elements.
    pub fn into_owned(self) -> Weight<'static> {
        match self {
            Self::Blocks(w) => Weight::Blocks(w.into_owned()),
            Self::Floats(name, w) => Weight::Floats(name.into_owned().into(), w.into_owned()),
        }
    }
}

/// The weights of a linear layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear<'a> {
    /// `[n, k]`: a row for each feature of C.
    pub weight: Weight<'a>,
    /// Added after all scales, `[n]`.
    pub bias: Option<Cow<'a, [f32]>>,
}

impl<'a> Linear<'a> {
    /// A layer without bias.
    pub fn new(weight: impl Into<Weight<'a>>) -> Self {
        Self { weight: weight.into(), bias: None }
    }

    /// Features (N).
    pub fn n(&self) -> usize {
        self.weight.rows()
    }

    /// Elements per row (K).
    pub fn k(&self) -> usize {
        self.weight.k()
    }

    /// Some features; codes and floats are borrowed.
    ///
    /// # Errors
    /// If the range is empty or reaches past N.
    pub fn features(&self, range: Range<usize>) -> Result<Linear<'_>, Error> {
        Ok(Linear { weight: self.weight.slice_rows(range.clone())?, bias: bias_of(&self.bias, range) })
    }

    /// The same layer, owning all it is made of.
    pub fn into_owned(self) -> Linear<'static> {
        let bias = self.bias.map(|bias| bias.into_owned().into());
        Linear { weight: self.weight.into_owned(), bias }
    }

    /// Checks that the bias has N values and that no block scale is NaN or negative.
    ///
    /// # Errors
    /// Names the tensor and the rule.
    pub fn check(&self) -> Result<(), Error> {
        if let Weight::Blocks(weight) = &self.weight {
            weight.check_scales()?;
        }
        check_bias(self.weight.name(), self.weight.rows(), &self.bias)
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

    /// Name of gate, or of the only matrix.
    pub fn name(self) -> &'w str {
        match self {
            Self::GateUp(pair) => pair.gate.name(),
            Self::Linear(layer) => layer.weight.name(),
        }
    }

    /// Format, features and elements of each matrix.
    pub fn shape(self) -> (AFormat, usize, usize) {
        match self {
            Self::GateUp(pair) => (pair.gate.format().into(), pair.n(), pair.k()),
            Self::Linear(layer) => (layer.weight.format(), layer.n(), layer.k()),
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

    /// Some rows of a C `[m, n]` of floats; none if it is not one or has not those rows.
    pub fn rows(&mut self, rows: Range<usize>, (m, n): (usize, usize)) -> Option<OutputMut<'_>> {
        let (_, len) = self.floats()?;
        if len != m * n || rows.end > m {
            return None;
        }
        let values = rows.start * n..rows.end * n;
        Some(match_floats!(self, Self(c) => OutputMut: c.get_mut(values)?, Self::Nvfp4 { .. } => return None))
    }
}
