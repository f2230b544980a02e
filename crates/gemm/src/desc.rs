//! The problem before any tensor exists: shapes, formats, epilogue.

use dualgemm_formats::{BlockFormat, FloatType, ScaleLayout, match_floats};

use crate::operands::WeightRef;
use crate::{AOperand, Epilogue, Error};

dualgemm_formats::named! {
    /// Element format of A, and of weights.
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum AFormat {
        /// 32-bit float.
        F32 = "f32",
        /// IEEE half.
        F16 = "f16",
        /// bfloat16.
        Bf16 = "bf16",
        /// e2m1 codes, an e4m3 scale per 16 elements of K, an f32 scale per tensor.
        Nvfp4 = "nvfp4",
        /// e2m1 codes, a ue8m0 scale per 32 elements of K.
        Mxfp4 = "mxfp4",
    }
}

impl AFormat {
    /// The block format, if this is a quantized one.
    pub const fn block_format(self) -> Option<BlockFormat> {
        match self {
            Self::Nvfp4 => Some(BlockFormat::Nvfp4),
            Self::Mxfp4 => Some(BlockFormat::Mxfp4),
            Self::F32 | Self::F16 | Self::Bf16 => None,
        }
    }

    /// The type of floats, if it is one.
    pub const fn float_type(self) -> Option<FloatType> {
        Some(match_floats!(self, Self => FloatType, Self::Nvfp4 | Self::Mxfp4 => return None))
    }

    /// The format of an operand.
    pub fn of(a: &AOperand<'_>) -> Self {
        match a {
            AOperand::Float(a) => a.float_type().into(),
            AOperand::Quantized(a) => a.format().into(),
        }
    }

    /// Bits that an element takes, its share of the block scale included.
    pub const fn bits_per_element(self) -> f64 {
        match self {
            Self::F32 => 32.0,
            Self::F16 | Self::Bf16 => 16.0,
            Self::Nvfp4 => 4.5,
            Self::Mxfp4 => 4.25,
        }
    }
}

impl From<FloatType> for AFormat {
    fn from(float: FloatType) -> Self {
        match_floats!(float, FloatType => Self)
    }
}

impl From<BlockFormat> for AFormat {
    fn from(format: BlockFormat) -> Self {
        match format {
            BlockFormat::Nvfp4 => Self::Nvfp4,
            BlockFormat::Mxfp4 => Self::Mxfp4,
        }
    }
}

impl From<OutFormat> for AFormat {
    /// What the next product reads.
    fn from(out: OutFormat) -> Self {
        match_floats!(out, OutFormat => Self, OutFormat::Nvfp4 { .. } => Self::Nvfp4)
    }
}

impl From<FloatType> for OutFormat {
    fn from(float: FloatType) -> Self {
        match_floats!(float, FloatType => Self)
    }
}

/// What becomes of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// `C = act(A·B1ᵀ, A·B2ᵀ)`, the first half of a gated MLP.
    #[default]
    GateUp,
    /// `C = A·B1ᵀ`, a linear layer. The epilogue's activation is unused, and so is `alpha_up`.
    Linear,
}

impl Operation {
    /// Weight matrices of `[n, k]`.
    pub const fn matrices(self) -> usize {
        match self {
            Self::GateUp => 2,
            Self::Linear => 1,
        }
    }

    /// Spelling on a command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GateUp => "gate-up",
            Self::Linear => "linear",
        }
    }
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::GateUp => "gate and up",
            Self::Linear => "a linear layer",
        })
    }
}

/// Whether a float A is quantized to nvfp4 on the way in.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuantizeA {
    /// Used as it is (W4A16).
    #[default]
    No,
    /// With this tensor scale, the checkpoint's `input_scale` (a multiplier).
    Static(f32),
    /// With a tensor scale from the largest magnitude in A.
    Dynamic,
}

/// The tensor scale of a re-quantized C.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutScale {
    /// This multiplier, the down projection's `input_scale`.
    Static(f32),
    /// From the largest magnitude in C, which takes a second pass over C.
    Dynamic,
}

/// Element format of C.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutFormat {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Quantized for the down projection; N must be a multiple of 16.
    Nvfp4 {
        /// Order of the scale bytes.
        scale_layout: ScaleLayout,
        /// The tensor scale.
        global_scale: OutScale,
    },
}

impl OutFormat {
    /// The name that commands and reports use: that of the elements.
    pub fn name(self) -> &'static str {
        AFormat::from(self).name()
    }

    /// Bits that an element takes, its share of the block scale included.
    pub fn bits_per_element(self) -> f64 {
        AFormat::from(self).bits_per_element()
    }

    /// Whether the tensor scale comes from the values of C, and so is known when all are.
    pub const fn is_dynamic(self) -> bool {
        matches!(self, Self::Nvfp4 { global_scale: OutScale::Dynamic, .. })
    }
}

impl std::fmt::Display for OutFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nvfp4 { scale_layout, .. } => write!(f, "nvfp4({scale_layout})"),
            floats => f.write_str(floats.name()),
        }
    }
}

/// `C[m,n] = act(A·B1ᵀ, A·B2ᵀ)` with A `[m,k]` and B1, B2 `[n,k]`, or `C[m,n] = A·B1ᵀ`; `batch` times over.
///
/// A grouped (mixture of experts) problem has the same description: `m` counts the rows of all experts, and
/// the row ranges come with the call.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct DualGemmDesc {
    /// Rows of A and C (tokens); of one batch entry.
    pub m: usize,
    /// Features: rows of B1 and of B2, columns of C.
    pub n: usize,
    /// Elements that are summed: columns of A, B1 and B2.
    pub k: usize,
    /// Independent problems of this shape (L).
    pub batch: usize,
    /// Format of A.
    pub a: AFormat,
    /// Whether a float A is quantized on the way in.
    pub quantize_a: QuantizeA,
    /// Format of B1 and B2. One matrix alone may be of floats.
    pub b: AFormat,
    /// Format of C.
    pub out: OutFormat,
    /// Between accumulator and store.
    pub epilogue: Epilogue,
    /// What becomes of the products.
    #[serde(default)]
    pub op: Operation,
}

impl DualGemmDesc {
    /// A single problem with f32 output and the SiLU epilogue.
    pub fn new(m: usize, n: usize, k: usize, a: AFormat, b: impl Into<AFormat>) -> Self {
        let (b, quantize_a, out) = (b.into(), QuantizeA::No, OutFormat::F32);
        let epilogue = Epilogue::default();
        Self { m, n, k, batch: 1, a, quantize_a, b, out, epilogue, op: Operation::GateUp }
    }

    /// A single linear layer of `n` features with f32 output.
    pub fn linear(m: usize, n: usize, k: usize, a: AFormat, b: impl Into<AFormat>) -> Self {
        Self { op: Operation::Linear, ..Self::new(m, n, k, a, b) }
    }

    /// The format that A is multiplied in: nvfp4 where a float A is quantized on the way in.
    pub fn a_compute(&self) -> AFormat {
        match self.quantize_a {
            QuantizeA::No => self.a,
            QuantizeA::Static(_) | QuantizeA::Dynamic => AFormat::Nvfp4,
        }
    }

    /// Checks the rules of shapes, scales and the epilogue.
    ///
    /// # Errors
    /// Names the dimension or number, the rule and the value.
    pub fn check(&self) -> Result<(), Error> {
        for (name, value) in [("M", self.m), ("N", self.n), ("K", self.k), ("batch", self.batch)] {
            if value == 0 {
                return Err(Error::ZeroDim { dim: name });
            }
        }
        for (tensor, format) in [("A", self.a_compute().block_format()), ("B", self.b.block_format())] {
            if let Some(format) = format.filter(|f| !self.k.is_multiple_of(f.block_len())) {
                return Err(Error::KNotWholeBlocks { tensor, format, k: self.k });
            }
        }
        let &Self { m, n, k, batch, .. } = self;
        for (tensor, rows, cols) in [("A", m, k), ("B", n, k), ("C", m, n)] {
            // No element of any operand, and of what kernels make of it, takes more than 8 bytes.
            let bytes = [rows, cols, batch].iter().try_fold(8usize, |bytes, &x| bytes.checked_mul(x));
            if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
                return Err(Error::TooLarge { tensor, batch, rows, cols });
            }
        }
        self.epilogue.check()?;
        if self.quantize_a != QuantizeA::No && self.a.block_format().is_some() {
            return Err(Error::AlreadyQuantized { a: self.a });
        }
        if let QuantizeA::Static(scale) = self.quantize_a {
            check_scale("A", scale)?;
        }
        if self.b.block_format().is_none() {
            self.check_floats()?;
        }
        if let OutFormat::Nvfp4 { global_scale, .. } = self.out {
            if !self.n.is_multiple_of(BlockFormat::Nvfp4.block_len()) {
                return Err(Error::NNotWholeBlocks { n: self.n });
            }
            if let OutScale::Static(scale) = global_scale {
                check_scale("C", scale)?;
            }
        }
        Ok(())
    }

    /// Checks what weights of floats are multiplied by, and where.
    fn check_floats(&self) -> Result<(), Error> {
        let Self { b, out, op, batch, epilogue, .. } = self;
        let wrong = |tensor: &str, found: &dyn std::fmt::Display| {
            let expected = format!("floats that stay so, by one matrix in {b}");
            Err(Error::operand(tensor, found.to_string(), expected))
        };
        if *op != Operation::Linear || *batch != 1 || epilogue.alpha_gate != 1.0 {
            return wrong("the weights", &format_args!("{op} in {b}, {batch} times"));
        }
        if self.a_compute().block_format().is_some() {
            return wrong("A", &self.a_compute());
        }
        if let OutFormat::Nvfp4 { .. } = out {
            return wrong("C", out);
        }
        Ok(())
    }

    /// Checks that weights fit this description.
    ///
    /// # Errors
    /// Names the tensor and what the description wants.
    pub fn check_weights(&self, weights: WeightRef<'_>) -> Result<(), Error> {
        let (op, found) = (weights.op(), weights.shape());
        let expected = (self.b, self.n, self.k);
        if (op, found) == (self.op, expected) {
            return Ok(());
        }
        let text = |op, (format, n, k): (AFormat, usize, usize)| match weights.op() == self.op {
            true => format!("{format} [{n}, {k}]"),
            false => format!("{op} of {format} [{n}, {k}]"),
        };
        Err(Error::operand(weights.name(), text(op, found), text(self.op, expected)))
    }

    /// Multiplications and additions of all batch entries: `2·m·n·k·batch` for each matrix of weights.
    pub fn flops(&self) -> f64 {
        2.0 * self.op.matrices() as f64 * self.m as f64 * self.n as f64 * self.k as f64 * self.batch as f64
    }

    /// Bytes that must move if every operand is read once and C written once, padding, biases and tensor scales not
    /// counted.
    pub fn bytes(&self) -> f64 {
        let (m, n, k) = (self.m as f64, self.n as f64, self.k as f64);
        let bits = m * k * self.a.bits_per_element() + m * n * self.out.bits_per_element();
        bits / 8.0 * self.batch as f64 + self.weight_bytes()
    }

    /// Those of the weights alone.
    pub fn weight_bytes(&self) -> f64 {
        let elements = (self.op.matrices() * self.batch) as f64 * self.n as f64 * self.k as f64;
        elements * self.b.bits_per_element() / 8.0
    }
}

fn check_scale(tensor: &str, value: f32) -> Result<(), Error> {
    if value.is_finite() && value > 0.0 && (1.0 / value).is_finite() {
        return Ok(());
    }
    Err(dualgemm_formats::Error::GlobalScale { tensor: tensor.into(), value }.into())
}

impl std::fmt::Display for DualGemmDesc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { m, n, k, batch, a, b, out, epilogue, op, .. } = self;
        let (function, weights) = match op {
            Operation::GateUp => (epilogue.activation.to_string(), "B1,B2"),
            Operation::Linear => ("linear".into(), "B"),
        };
        write!(f, "C[{m},{n}] {out} = {function}(A[{m},{k}] {a}")?;
        match self.quantize_a {
            QuantizeA::No => {}
            QuantizeA::Static(scale) => write!(f, "→nvfp4(scale={scale:e})")?,
            QuantizeA::Dynamic => f.write_str("→nvfp4(dynamic)")?,
        }
        write!(f, " · {weights}[{n},{k}]ᵀ {b})")?;
        if *batch > 1 {
            write!(f, " × {batch}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_m_and_n_whole_blocks_of_k() {
        let desc = |m, n, k, b| DualGemmDesc::new(m, n, k, AFormat::Nvfp4, b).check();
        for mn in [1, 2, 127, 128, 129, 464] {
            assert_eq!(desc(mn, mn, 464, BlockFormat::Nvfp4), Ok(()));
        }
        let message = |r: Result<(), Error>| r.unwrap_err().to_string();
        assert_eq!(message(desc(0, 1, 16, BlockFormat::Nvfp4)), "M is 0; it must be at least 1");
        assert_eq!(
            message(desc(1, 1, 24, BlockFormat::Nvfp4)),
            "K = 24 is not a multiple of 16, the block length of A in nvfp4"
        );
        assert_eq!(
            message(desc(1, 1, 48, BlockFormat::Mxfp4)),
            "K = 48 is not a multiple of 32, the block length of B in mxfp4"
        );
    }

    #[test]
    fn sizes_beyond_memory_and_odd_numbers_are_refused() {
        const HUGE: usize = 1 << 40;
        for (m, n, k, batch, tensor) in [
            (HUGE, 16, HUGE, 1, "A"),
            (1, HUGE, HUGE, 1, "B"),
            (HUGE, HUGE, 16, 1, "C"),
            (HUGE, 1, 16, HUGE, "A"),
        ] {
            let desc = DualGemmDesc::new(m, n, k, AFormat::Nvfp4, BlockFormat::Nvfp4);
            let shape = match tensor {
                "A" => (m, k),
                "B" => (n, k),
                _ => (m, n),
            };
            let message = DualGemmDesc { batch, ..desc }.check().unwrap_err().to_string();
            let times = if batch > 1 { format!(" × {batch}") } else { String::new() };
            let want = format!("{tensor} [{}, {}]{times} does not fit the memory", shape.0, shape.1);
            assert!(message.starts_with(&want), "{message}");
        }
        let mut desc = DualGemmDesc::new(1, 1, 16, AFormat::Nvfp4, BlockFormat::Nvfp4);
        desc.epilogue.activation = crate::Activation::ClampedSilu { limit: -1.0 };
        assert!(matches!(desc.check(), Err(Error::EpilogueNumber { number: "limit", .. })));
    }

    #[test]
    fn nvfp4_output_needs_whole_blocks_of_n_and_a_scale() {
        let mut desc = DualGemmDesc::new(4, 24, 32, AFormat::Bf16, BlockFormat::Nvfp4);
        desc.out =
            OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale: OutScale::Static(f32::NAN) };
        assert_eq!(desc.check(), Err(Error::NNotWholeBlocks { n: 24 }));
        desc.n = 32;
        assert!(desc.check().unwrap_err().to_string().starts_with("C: tensor scale NaN"));
    }

    #[test]
    fn bytes_and_flops_of_the_first_ranked_shape() {
        let desc = DualGemmDesc::new(256, 4096, 7168, AFormat::Nvfp4, BlockFormat::Nvfp4);
        assert_eq!(desc.flops(), 4.0 * 256.0 * 4096.0 * 7168.0);
        let weights = 2.0 * 4096.0 * 7168.0 * 0.5625;
        assert_eq!(desc.bytes(), weights + 256.0 * 7168.0 * 0.5625 + 256.0 * 4096.0 * 4.0);
    }

    #[test]
    fn survives_json() {
        let desc = DualGemmDesc::new(1, 2, 16, AFormat::F16, BlockFormat::Nvfp4);
        let text = serde_json::to_string(&desc).unwrap();
        assert_eq!(serde_json::from_str::<DualGemmDesc>(&text).unwrap(), desc);
    }
}
