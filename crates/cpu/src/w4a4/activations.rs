//! A for the W4A4 kernels: codes doubled to bytes, with the block's scale and what the bias of the weights needs.
//!
//! ```text
//! blocks[tile][chunk][row of tile]       24 bytes each, read once per panel, in order
//! ```

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use dualgemm_formats::quantize::Quantizer;
use dualgemm_formats::scalar::e2m1::DOUBLED;
use dualgemm_formats::scalar::e4m3;
use dualgemm_formats::{FloatMatrix, QuantizedMatrix};
use half::{bf16, f16};

use crate::pack::CHUNK_K;
use crate::tile::RowTile;

/// 16 elements of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub(crate) struct Block {
    /// Doubled codes, by k.
    pub(super) codes: [i8; CHUNK_K],
    /// [`Vector::bias_word`](super::vector::Vector::bias_word) of their sum.
    pub(super) bias: i32,
    /// The block scale.
    pub(super) scale: f32,
}

// SAFETY: 16 bytes, an i32 and an f32 without padding, all of which may be zero.
unsafe impl Zeroable for Block {}
// SAFETY: as above, every bit pattern is valid; it is `Copy`, `repr(C)`, and holds no pointer.
unsafe impl Pod for Block {}

/// Chunks that are prepared together: their codes are one cache line per row.
pub(super) const SPAN: usize = 8;

/// Both doubled codes of a byte, the even element first, and their sum.
const PAIRS: [([i8; 2], i8); 256] = {
    let mut table = [([0; 2], 0); 256];
    let mut byte = 0;
    while byte < 256 {
        let (even, odd) = (DOUBLED[byte & 15], DOUBLED[byte >> 4]);
        table[byte] = ([even, odd], even + odd);
        byte += 1;
    }
    table
};

/// A, quantized before or to be quantized on the way in.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source<'a> {
    /// As it came.
    Quantized(&'a QuantizedMatrix<'a>),
    /// Floats and how to quantize them, to nvfp4.
    Float(&'a FloatMatrix<'a>, &'a Quantizer),
}

impl Source<'_> {
    /// Elements per row.
    pub(super) fn k(&self) -> usize {
        match self {
            Self::Quantized(a) => a.k(),
            Self::Float(a, _) => a.cols(),
        }
    }

    /// Rows.
    pub(super) fn rows(&self) -> usize {
        match self {
            Self::Quantized(a) => a.rows(),
            Self::Float(a, _) => a.rows(),
        }
    }

    /// Fills `out`, `[chunks of the span][rows of the tile]`.
    pub(super) fn prepare(
        &self,
        tile: &RowTile,
        chunks: Range<usize>,
        bias_word: fn(i32) -> i32,
        out: &mut [Block],
    ) {
        for row in 0..tile.rows {
            let to = out[row..].iter_mut().step_by(tile.rows).zip(chunks.clone());
            match self {
                Self::Quantized(a) => {
                    let codes = a.row_codes(tile.first_row + row).as_chunks().0;
                    let chunks_per_block = a.format().block_len() / CHUNK_K;
                    for (block, chunk) in to {
                        let scale = a.scale_byte(tile.first_row + row, chunk / chunks_per_block);
                        *block = Block::new(&codes[chunk], a.format().decode_scale(scale), bias_word);
                    }
                }
                Self::Float(a, quantizer) => {
                    for (block, chunk) in to {
                        let (codes, scale) = quantizer.block(&widen(a, tile.first_row + row, chunk));
                        *block = Block::new(&codes, e4m3::decode(scale), bias_word);
                    }
                }
            }
        }
    }
}

impl Block {
    fn new(codes: &[u8; CHUNK_K / 2], scale: f32, bias_word: fn(i32) -> i32) -> Self {
        let (mut doubled, mut sum) = ([0; CHUNK_K], 0);
        for (pair, &byte) in doubled.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            let (values, of_pair) = PAIRS[usize::from(byte)];
            *pair = values;
            sum += i32::from(of_pair);
        }
        Self { codes: doubled, bias: bias_word(sum), scale }
    }

    /// A block of any i8 in place of doubled codes.
    pub(super) fn of_digits(digits: [i8; CHUNK_K], scale: f32, bias_word: fn(i32) -> i32) -> Self {
        let sum = digits.iter().map(|&digit| i32::from(digit)).sum();
        Self { codes: digits, bias: bias_word(sum), scale }
    }
}

/// 16 elements of a row as f32.
fn widen(a: &FloatMatrix<'_>, row: usize, chunk: usize) -> [f32; CHUNK_K] {
    match a {
        FloatMatrix::F32(a) => a.row(row).as_chunks().0[chunk],
        FloatMatrix::F16(a) => a.row(row).as_chunks().0[chunk].map(f16::to_f32),
        FloatMatrix::Bf16(a) => a.row(row).as_chunks().0[chunk].map(bf16::to_f32),
    }
}
