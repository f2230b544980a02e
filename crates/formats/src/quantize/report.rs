//! How much a quantization loses.

use crate::{FloatMatrix, QuantizedMatrix};

use super::for_each_block;
use crate::scalar::e2m1;

/// Errors of a quantization, `‖x - dequantized‖ / ‖x‖` over the elements that are finite.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct QuantizeReport {
    /// Relative L2 error.
    pub rel_l2: f64,
    /// Relative L2 error with the producer's own block scales.
    pub rel_l2_plain: f64,
    /// Elements that are NaN or infinite. Anything but 0 is a reason to distrust the input.
    pub non_finite: usize,
}

impl QuantizeReport {
    /// Compares a matrix with its quantization and with the plain one.
    pub(super) fn new(
        x: &FloatMatrix<'_>,
        quantized: &QuantizedMatrix<'_>,
        plain: &QuantizedMatrix<'_>,
    ) -> Self {
        let found = squared_error(quantized, x);
        let rel_l2_plain =
            if std::ptr::eq(quantized, plain) { found.relative() } else { relative_l2(plain, x) };
        Self { rel_l2: found.relative(), rel_l2_plain, non_finite: found.non_finite }
    }
}

/// `‖x - dequantized‖ / ‖x‖` over the finite elements of `x`; 0 if nothing is lost.
///
/// # Panics
/// If the shapes differ.
pub fn relative_l2(quantized: &QuantizedMatrix<'_>, x: &FloatMatrix<'_>) -> f64 {
    squared_error(quantized, x).relative()
}

#[derive(Default)]
struct SquaredError {
    /// Sum of squared differences.
    error: f64,
    norm: f64,
    non_finite: usize,
}

impl SquaredError {
    fn relative(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { (self.error / self.norm).sqrt() }
    }
}

fn squared_error(quantized: &QuantizedMatrix<'_>, x: &FloatMatrix<'_>) -> SquaredError {
    let mut sum = SquaredError::default();
    for_each_error(quantized, x, |block| {
        sum.error += block.error;
        sum.norm += block.norm;
        sum.non_finite += block.non_finite;
    });
    sum
}

/// The squared error of each block of 16, row by row.
pub(super) fn block_errors(quantized: &QuantizedMatrix<'_>, x: &FloatMatrix<'_>) -> Vec<f64> {
    let mut errors = Vec::with_capacity(x.rows() * x.cols() / 16);
    for_each_error(quantized, x, |block| errors.push(block.error));
    errors
}

fn for_each_error(quantized: &QuantizedMatrix<'_>, x: &FloatMatrix<'_>, mut f: impl FnMut(SquaredError)) {
    assert_eq!((quantized.rows(), quantized.k()), (x.rows(), x.cols()), "shapes differ");
    let (format, global) = (quantized.format(), quantized.global_scale().exact());
    let per_scale = format.block_len() / 16;
    for_each_block(x, 0..x.rows(), |row, block, x| {
        let scale = f64::from(format.decode_scale(quantized.scale_byte(row, block / per_scale))) * global;
        let codes = &quantized.row_codes(row)[block * 8..][..8];
        let mut sum = SquaredError::default();
        for (pair, &byte) in x.as_chunks::<2>().0.iter().zip(codes) {
            let (even, odd) = e2m1::unpack(byte);
            for (x, code) in [(pair[0], even), (pair[1], odd)] {
                if !x.is_finite() {
                    sum.non_finite += 1;
                    continue;
                }
                let x = f64::from(x);
                sum.error += (x - f64::from(e2m1::decode(code)) * scale).powi(2);
                sum.norm += x * x;
            }
        }
        f(sum);
    });
}
