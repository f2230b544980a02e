//! GGUF's `block_nvfp4` (type 40): 36 bytes for 64 elements, four scale bytes and then the codes.
//!
//! ```text
//! byte 0..4           scale of elements 0..16, 16..32, 32..48, 48..64
//! byte 4 + 8s + j     low nibble: element 16s + j, high nibble: element 16s + j + 8     (s < 4, j < 8)
//! ```
//!
//! Everywhere else in this crate element 2j and its successor share a byte; only these functions know ggml's
//! order. In ggml the scale byte 0x7F means 0, so it is read as 0x00; a byte with the sign bit is kept for
//! [`QuantizedMatrix::check_scales`] to find.
//!
//! Source: `ggml/src/{ggml-common.h,ggml-quants.c}` of <https://github.com/ggml-org/llama.cpp>.

use crate::scalar::{e2m1, e4m3};
use crate::{BlockFormat, Error, GlobalScale, QuantizedMatrix, ScaleLayout};

/// Elements of a `block_nvfp4`.
pub const BLOCK_ELEMENTS: usize = 64;
/// Bytes of a `block_nvfp4`.
pub const BLOCK_BYTES: usize = 36;

/// The eight code bytes of 16 elements, from pairs to ggml's order.
pub fn pack_codes(pairs: [u8; 8]) -> [u8; 8] {
    let code = |k: usize| (pairs[k / 2] >> (k % 2 * 4)) & 15;
    std::array::from_fn(|j| e2m1::pack(code(j), code(j + 8)))
}

/// The eight code bytes of 16 elements, from ggml's order to pairs.
pub fn unpack_codes(ggml: [u8; 8]) -> [u8; 8] {
    let code = |k: usize| (ggml[k % 8] >> (k / 8 * 4)) & 15;
    std::array::from_fn(|i| e2m1::pack(code(2 * i), code(2 * i + 1)))
}

/// One row to GGUF: `codes` are `K / 2` bytes, `scales` the `K / 16` bytes in order, `out` gets `K / 64` blocks.
///
/// # Panics
/// If the three do not fit each other.
pub fn pack_row(codes: &[u8], scales: &[u8], out: &mut [u8]) {
    let blocks = out.as_chunks_mut::<BLOCK_BYTES>().0;
    assert_eq!((codes.len(), scales.len()), (blocks.len() * 32, blocks.len() * 4), "row does not fit");
    let parts = codes.as_chunks::<8>().0.chunks_exact(4).zip(scales.as_chunks::<4>().0);
    for (block, (codes, scales)) in blocks.iter_mut().zip(parts) {
        block[..4].copy_from_slice(scales);
        for (out, &pairs) in block[4..].as_chunks_mut::<8>().0.iter_mut().zip(codes) {
            *out = pack_codes(pairs);
        }
    }
}

/// One row from GGUF, the inverse of [`pack_row`].
///
/// # Panics
/// If the three do not fit each other.
pub fn unpack_row(gguf: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    let blocks = gguf.as_chunks::<BLOCK_BYTES>().0;
    assert_eq!((codes.len(), scales.len()), (blocks.len() * 32, blocks.len() * 4), "row does not fit");
    let parts = codes.as_chunks_mut::<8>().0.chunks_exact_mut(4).zip(scales.as_chunks_mut::<4>().0);
    for (block, (codes, scales)) in blocks.iter().zip(parts) {
        for (scale, &byte) in scales.iter_mut().zip(&block[..4]) {
            *scale = if byte == e4m3::NAN { 0 } else { byte };
        }
        for (out, &ggml) in codes.iter_mut().zip(block[4..].as_chunks::<8>().0) {
            *out = unpack_codes(ggml);
        }
    }
}

/// Bytes of a `[rows, k]` tensor.
///
/// # Errors
/// If K is not a multiple of 64 or the size overflows.
pub fn len(tensor: &str, rows: usize, k: usize) -> Result<usize, Error> {
    if k == 0 || !k.is_multiple_of(BLOCK_ELEMENTS) {
        return Err(Error::KNotGgufBlocks { tensor: tensor.into(), k });
    }
    let row_bytes = k / BLOCK_ELEMENTS * BLOCK_BYTES;
    rows.checked_mul(row_bytes).ok_or_else(|| Error::TooLarge {
        tensor: tensor.into(),
        rows,
        row_stride: row_bytes,
    })
}

/// A matrix as GGUF tensor data. Its global scale is not part of that; it goes to the `.scale` tensor.
///
/// # Errors
/// If K is not a multiple of 64.
///
/// # Panics
/// If the matrix is not nvfp4.
pub fn from_matrix(x: &QuantizedMatrix<'_>) -> Result<Vec<u8>, Error> {
    assert_eq!(x.format(), BlockFormat::Nvfp4, "not an nvfp4 matrix");
    let mut out = vec![0; len(x.name(), x.rows(), x.k())?];
    let mut scales = vec![0; x.blocks()];
    for (row, out) in out.chunks_exact_mut(x.k() / BLOCK_ELEMENTS * BLOCK_BYTES).enumerate() {
        for (block, scale) in scales.iter_mut().enumerate() {
            *scale = x.scale_byte(row, block);
        }
        pack_row(x.row_codes(row), &scales, out);
    }
    Ok(out)
}

/// A `[rows, k]` matrix from GGUF tensor data, with the global scale of its `.scale` tensor or
/// [`GlobalScale::ONE`].
///
/// # Errors
/// If K is not a multiple of 64, the data has another size, or the global scale is not a positive finite number.
pub fn to_matrix(
    name: &str,
    rows: usize,
    k: usize,
    gguf: &[u8],
    global_scale: GlobalScale,
) -> Result<QuantizedMatrix<'static>, Error> {
    let needed = len(name, rows, k)?;
    if gguf.len() != needed {
        return Err(Error::GgufLen { tensor: name.into(), rows, k, found: gguf.len(), needed });
    }
    let (mut codes, mut scales) = (vec![0; rows * (k / 2)], vec![0; rows * (k / 16)]);
    unpack_row(gguf, &mut codes, &mut scales);
    let (name, linear) = (name.to_owned(), ScaleLayout::Linear);
    QuantizedMatrix::new(name, BlockFormat::Nvfp4, rows, k, codes, scales, linear, global_scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_orders_are_inverse_and_place_element_8_beside_element_0() {
        let pairs = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE];
        assert_eq!(pack_codes(pairs), [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]);
        assert_eq!(unpack_codes(pack_codes(pairs)), pairs);
    }

    #[test]
    fn matrices_round_trip_from_every_scale_layout() {
        let (rows, k) = (5, 192);
        let codes: Vec<u8> = (0..rows * k / 2).map(|i| (i * 53) as u8).collect();
        let scales: Vec<u8> = (0..rows * k / 16).map(|i| (i % 0x7F) as u8).collect();
        let (format, global) = (BlockFormat::Nvfp4, GlobalScale::multiplier(0.5));
        let x =
            QuantizedMatrix::new("w", format, rows, k, codes, scales, ScaleLayout::Linear, global).unwrap();
        for layout in ScaleLayout::ALL {
            let gguf = from_matrix(&x.clone().with_scale_layout(layout)).unwrap();
            assert_eq!(gguf.len(), rows * 3 * 36);
            assert_eq!(to_matrix("w", rows, k, &gguf, global).unwrap(), x);
        }
    }

    #[test]
    fn an_element_is_where_the_layout_says() {
        let mut gguf = vec![0; 2 * 72];
        // Row 1, second block, third sub-block, element 11 = high nibble of byte 3.
        gguf[72 + 36 + 2] = 0x40;
        gguf[72 + 36 + 4 + 8 * 2 + 3] = 0x50;
        let x = to_matrix("w", 2, 128, &gguf, GlobalScale::ONE).unwrap();
        assert_eq!(x.value(1, 64 + 32 + 11), 6.0);
        assert_eq!((0..128).filter(|&k| x.code(1, k) != 0).count(), 1);
    }

    #[test]
    fn nan_scale_is_zero_and_negative_ones_stay_visible() {
        let mut gguf = vec![0x22; 36];
        gguf[..4].copy_from_slice(&[0x7F, 0x38, 0x38, 0xB8]);
        let x = to_matrix("w", 1, 64, &gguf, GlobalScale::ONE).unwrap();
        assert_eq!([x.value(0, 0), x.value(0, 16)], [0.0, 1.0]);
        assert!(x.check_scales().is_err());
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        let message = |r: Result<QuantizedMatrix<'_>, Error>| r.unwrap_err().to_string();
        assert_eq!(
            message(to_matrix("w", 1, 80, &[], GlobalScale::ONE)),
            "w: K = 80 is not a positive multiple of 64, the GGUF nvfp4 block length"
        );
        assert_eq!(
            message(to_matrix("w", 2, 64, &[0; 71], GlobalScale::ONE)),
            "w: GGUF data holds 71 bytes; [2, 64] in blocks of 64 elements needs 72"
        );
        assert!(len("w", usize::MAX, 64).is_err());
    }
}
