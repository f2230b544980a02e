//! GGUF's `block_mxfp4` (type 39): 17 bytes for 32 elements, one ue8m0 byte and then the codes.
//!
//! ```text
//! byte 0        scale
//! byte 1 + j    low nibble: element j, high nibble: element j + 16     (j < 16)
//! ```
//!
//! Source: `ggml/src/ggml-common.h` of <https://github.com/ggml-org/llama.cpp>

use dualgemm_formats::QuantizedMatrix;
use dualgemm_formats::scalar::e2m1;

const CODES: usize = 16;
const BLOCK_BYTES: usize = 1 + CODES;

/// Codes (pairs of neighbours per byte) and scales of whole blocks.
pub(crate) fn unpack(gguf: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let blocks = gguf.as_chunks::<BLOCK_BYTES>().0;
    let mut codes = Vec::with_capacity(blocks.len() * CODES);
    for block in blocks {
        let code = |i: usize| (block[1 + i % CODES] >> (i / CODES * 4)) & 15;
        codes.extend((0..CODES).map(|i| e2m1::pack(code(2 * i), code(2 * i + 1))));
    }
    (codes, blocks.iter().map(|b| b[0]).collect())
}

/// A matrix as GGUF tensor data.
pub(crate) fn pack(x: &QuantizedMatrix<'_>) -> Vec<u8> {
    let mut out = Vec::with_capacity(x.rows() * x.blocks() * BLOCK_BYTES);
    for row in 0..x.rows() {
        for (block, codes) in x.row_codes(row).as_chunks::<CODES>().0.iter().enumerate() {
            let code = |i: usize| (codes[i / 2] >> (i % 2 * 4)) & 15;
            out.push(x.scale_byte(row, block));
            out.extend((0..CODES).map(|j| e2m1::pack(code(j), code(j + CODES))));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_formats::{BlockFormat, GlobalScale, ScaleLayout};

    #[test]
    fn element_16_shares_a_byte_with_element_0_and_blocks_round_trip() {
        let mut block = vec![0; BLOCK_BYTES];
        block[0] = 128;
        block[1] = 0x52;
        let (codes, scales) = unpack(&block);
        let global = GlobalScale::ONE;
        let m =
            QuantizedMatrix::new("w", BlockFormat::Mxfp4, 1, 32, codes, scales, ScaleLayout::Linear, global)
                .unwrap();
        assert_eq!([m.value(0, 0), m.value(0, 16), m.value(0, 1)], [2.0, 6.0, 0.0]);
        let bytes: Vec<u8> = (0..2 * BLOCK_BYTES * 3).map(|i| (i * 37) as u8).collect();
        let (codes, scales) = unpack(&bytes);
        let m =
            QuantizedMatrix::new("w", BlockFormat::Mxfp4, 2, 96, codes, scales, ScaleLayout::Linear, global)
                .unwrap();
        assert_eq!(pack(&m), bytes);
    }
}
