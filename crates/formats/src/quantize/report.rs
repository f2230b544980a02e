//! How much a quantization loses.

use crate::{FloatMatrix, QuantizedMatrix};

use super::for_each_block;
use crate::scalar::e2m1;

/// `‖x - dequantized‖ / ‖x‖` over the finite elements of `x`; 0 if nothing is lost.
///
/// # Panics
/// If the shapes differ.
pub fn relative_l2(quantized: &QuantizedMatrix<'_>, x: &FloatMatrix<'_>) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for_each_error(quantized, x, |of_block, block_norm| {
        error += of_block;
        norm += block_norm;
    });
    if error == 0.0 { 0.0 } else { f64::sqrt(error / norm) }
}

/// The squared error of each block of 16, row by row.
pub(super) fn block_errors(quantized: &QuantizedMatrix<'_>, x: &FloatMatrix<'_>) -> Vec<f64> {
    let mut errors = Vec::with_capacity(x.rows() * x.cols() / 16);
    for_each_error(quantized, x, |error, _| errors.push(error));
    errors
}

/// Calls `f` with the squared error and the squared norm of each block, of the elements that are finite.
fn for_each_error(quantized: &QuantizedMatrix<'_>, x: &FloatMatrix<'_>, mut f: impl FnMut(f64, f64)) {
    assert_eq!((quantized.rows(), quantized.k()), (x.rows(), x.cols()), "shapes differ");
    let (format, global) = (quantized.format(), quantized.global_scale().exact());
    let per_scale = format.block_len() / 16;
    for_each_block(x, 0..x.rows(), |row, block, x| {
        let scale = f64::from(format.decode_scale(quantized.scale_byte(row, block / per_scale))) * global;
        let codes = &quantized.row_codes(row)[block * 8..][..8];
        let (mut error, mut norm) = (0.0, 0.0);
        for (pair, &byte) in x.as_chunks::<2>().0.iter().zip(codes) {
            let (even, odd) = e2m1::unpack(byte);
            for (x, code) in [(pair[0], even), (pair[1], odd)] {
                if x.is_finite() {
                    let x = f64::from(x);
                    error += (x - f64::from(e2m1::decode(code)) * scale).powi(2);
                    norm += x * x;
                }
            }
        }
        f(error, norm);
    });
}
