//! mxfp4: floats to it by the OCP rule, and from it to nvfp4 without loss.
//!
//! Source: OCP Microscaling Formats (MX) v1.0, section 6.3; the conversion is that of ModelOpt's `numeric_utils`
//! (<https://github.com/NVIDIA/Model-Optimizer>).

use super::for_each_block;
use super::rules::{block_amax, pack};
use crate::scalar::{e2m1, e4m3, ue8m0};
use crate::{BlockFormat, Error, FloatMatrix, GlobalScale, QuantizedMatrix, ScaleLayout};

/// Exponent of e2m1's largest power of two, 4.
const EMAX: i32 = 2;

/// Quantizes a matrix to mxfp4: the scale is `2^(⌊log₂ amax⌋ - 2)`, elements are divided by it and rounded to
/// nearest, ties to even, so magnitudes over 6 scales saturate. A block of zeros gets byte 0; NaN gets code 7 and
/// does not count in amax, so that no scale is NaN.
///
/// # Errors
/// If K is not a multiple of 32.
pub fn quantize_mxfp4(name: &str, x: &FloatMatrix<'_>) -> Result<QuantizedMatrix<'static>, Error> {
    let (rows, k, format) = (x.rows(), x.cols(), BlockFormat::Mxfp4);
    if k % 32 != 0 {
        return Err(Error::KNotWholeBlocks { tensor: name.into(), format, k });
    }
    let mut scales = vec![0u8; rows * (k / 32)];
    for_each_block(x, 0..rows, |row, half, x| {
        let scale = &mut scales[row * (k / 32) + half / 2];
        *scale = scale_byte(block_amax(x)).max(*scale);
    });
    let mut codes = vec![0u8; rows * (k / 2)];
    let halves = codes.as_chunks_mut::<8>().0;
    for_each_block(x, 0..rows, |row, half, x| {
        let scale = ue8m0::decode(scales[row * (k / 32) + half / 2]);
        halves[row * (k / 16) + half] = pack(x.map(|x| e2m1::encode(x / scale)));
    });
    let (name, linear) = (name.to_owned(), ScaleLayout::Linear);
    QuantizedMatrix::new(name, format, rows, k, codes, scales, linear, GlobalScale::ONE)
}

/// Byte of `2^(⌊log₂ amax⌋ - 2)`. The exponent field is the logarithm; it is 0 for zero and subnormals, whose
/// scale is the smallest there is anyway.
fn scale_byte(amax: f32) -> u8 {
    ue8m0::from_exponent((amax.to_bits() >> 23) as i32 - 127 - EMAX)
}

/// The same values as nvfp4. With `k_max` the largest scale exponent, the global scale becomes `2^(k_max - 8)`
/// and a block's `2^(k - k_max + 8)`, a power of two that e4m3 holds down to 2⁻⁹. Blocks that hold only zeros get
/// scale 0 and do not count.
///
/// # Errors
/// If a block's exponent lies more than 17 under the largest one, or a scale is NaN.
///
/// # Panics
/// If the matrix is not mxfp4.
pub fn mxfp4_to_nvfp4(x: &QuantizedMatrix<'_>) -> Result<QuantizedMatrix<'static>, Error> {
    assert_eq!(x.format(), BlockFormat::Mxfp4, "not an mxfp4 matrix");
    x.check_scales()?;
    let (rows, k) = (x.rows(), x.k());
    let exponent = |row, block| {
        let codes = &x.row_codes(row)[block * 16..][..16];
        codes.iter().any(|c| c & 0x77 != 0).then(|| i32::from(x.scale_byte(row, block)) - 127)
    };
    let each = || (0..rows).flat_map(|row| (0..x.blocks()).map(move |block| (row, block)));
    let k_max = each().filter_map(|(row, block)| exponent(row, block)).max().unwrap_or(8);

    let mut scales = Vec::with_capacity(rows * (k / 16));
    for (row, block) in each() {
        let byte = match exponent(row, block) {
            None => 0,
            Some(k) if k_max - k <= 17 => e4m3::encode(2f32.powi(k - k_max + 8)),
            Some(k) => {
                let tensor = x.name().into();
                return Err(Error::Mxfp4Range { tensor, row, block, exponent: k, largest: k_max });
            }
        };
        scales.extend([byte; 2]);
    }
    let codes: Vec<u8> = (0..rows).flat_map(|row| x.row_codes(row)).copied().collect();
    // A power of two down to 2⁻¹³⁵, exact in f32, through f64 because f32's powi loses subnormals.
    let global = GlobalScale::multiplier(2f64.powi(k_max - 8) as f32);
    let (name, linear) = (x.name().to_owned(), ScaleLayout::Linear);
    QuantizedMatrix::new(name, BlockFormat::Nvfp4, rows, k, codes, scales, linear, global)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Matrix;

    fn quantized(x: &[f32]) -> QuantizedMatrix<'static> {
        let x = FloatMatrix::F32(Matrix::new("x", 1, x.len(), x).unwrap());
        quantize_mxfp4("x", &x).unwrap()
    }

    #[test]
    fn scale_is_the_floor_of_the_logarithm() {
        for (amax, exponent) in [(4.0, 0), (7.99, 0), (8.0, 1), (3.99, -1), (1.0, -2), (f32::MAX, 125)] {
            let mut x = [0.0; 32];
            x[20] = amax;
            assert_eq!(i32::from(quantized(&x).scale_byte(0, 0)) - 127, exponent, "{amax}");
        }
    }

    #[test]
    fn elements_round_to_even_and_saturate() {
        let mut x = [0.0; 32];
        x[..9].copy_from_slice(&[7.9, -6.5, 5.0, 3.5, 2.5, -0.25, -0.0, 0.75, f32::NAN]);
        let q = quantized(&x);
        assert_eq!((0..9).map(|k| q.code(0, k)).collect::<Vec<_>>(), [7, 15, 6, 6, 4, 8, 8, 2, 7]);
    }

    #[test]
    fn scale_bytes_are_never_nan() {
        for amax in [0.0, 1e-45, f32::MIN_POSITIVE, f32::INFINITY, f32::NAN] {
            let q = quantized(&[amax; 32]);
            q.check_scales().unwrap();
            assert!((0..32).all(|k| q.value(0, k).is_finite()), "{amax}");
        }
        assert_eq!(
            [quantized(&[0.0; 32]).scale_byte(0, 0), quantized(&[1e-45; 32]).scale_byte(0, 0)],
            [0, 0]
        );
    }

    fn matrix(exponents: &[u8], codes: Vec<u8>) -> QuantizedMatrix<'static> {
        let (format, layout) = (BlockFormat::Mxfp4, ScaleLayout::Linear);
        let k = exponents.len() * 32;
        QuantizedMatrix::new("w", format, 1, k, codes, exponents.to_vec(), layout, GlobalScale::ONE).unwrap()
    }

    #[test]
    fn conversion_to_nvfp4_is_exact_over_seventeen_octaves() {
        for k_max in [17u8, 127, 140, 254] {
            let exponents: Vec<u8> = (0..18).map(|d| k_max - d).collect();
            let x = matrix(&exponents, (0..18 * 16).map(|i| (i * 37) as u8).collect());
            let nv = mxfp4_to_nvfp4(&x).unwrap();
            nv.check_scales().unwrap();
            for k in 0..x.k() {
                assert_eq!(nv.value(0, k).to_bits(), x.value(0, k).to_bits(), "{k_max} {k}");
            }
        }
    }

    #[test]
    fn wider_ranges_are_refused_and_zero_blocks_do_not_count() {
        let error = mxfp4_to_nvfp4(&matrix(&[127, 109], vec![0x11; 32])).unwrap_err().to_string();
        assert_eq!(
            error,
            "w: the scale 2^-18 at row 0, block 1 is more than 2^17 below the largest, 2^0; nvfp4 cannot hold both"
        );
        let mut codes = vec![0x11; 16];
        codes.extend([0x88; 16]);
        let nv = mxfp4_to_nvfp4(&matrix(&[127, 0], codes)).unwrap();
        assert_eq!([nv.value(0, 0), nv.value(0, 40)], [0.5, 0.0]);
        assert!(mxfp4_to_nvfp4(&matrix(&[0xFF], vec![0x11; 16])).is_err());
        assert!(mxfp4_to_nvfp4(&matrix(&[0, 255 - 1], vec![0; 32])).is_ok());
    }
}
