//! A for the W4A4 kernels: doubled codes as bytes, the block's scale, and the word that subtracts the bias of the weights.
//!
//! ```text
//! blocks[tile][chunk][row of tile]       24 bytes each, read once per panel, in order
//! ```

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use dualgemm_formats::quantize::te_codes;
use dualgemm_formats::scalar::e4m3;
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, QuantizedMatrix};
use half::slice::HalfFloatSliceExt;

use crate::amx::TILE_K;
use crate::isa::{InstructionSet, Work};
use crate::pack::CHUNK_K;
use crate::tile::RowsOfA;
use crate::w4a16::tiles;

/// 16 elements of one row.
#[derive(Debug, Clone, Copy, PartialEq, Zeroable, Pod)]
#[repr(C)]
pub(crate) struct Block {
    /// Doubled codes, by k.
    pub(super) codes: [i8; CHUNK_K],
    /// [`Vector::bias_word`](super::vector::Vector::bias_word) of their sum.
    pub(super) bias: i32,
    /// The block scale in units of [`Source::unit`].
    pub(super) scale: Scale,
}

/// A block scale in one word: a float, which is never negative, or a negative integer. The sign tells which.
#[derive(Debug, Clone, Copy, PartialEq, Zeroable, Pod)]
#[repr(transparent)]
pub(super) struct Scale(u32);

impl Scale {
    #[inline(always)]
    fn float(scale: f32) -> Self {
        Self(scale.to_bits())
    }

    /// In units of [`INTEGER_UNIT`], once in each half of the word.
    #[inline(always)]
    fn integer(scale: i16) -> Self {
        Self(u32::from(scale as u16) * 0x1_0001)
    }

    /// The float that this holds before [`Block::scales_to_integers`].
    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_bits(self.0)
    }

    /// Whether this is an integer. If the first scale of a chunk is one, all are.
    #[inline(always)]
    pub(super) fn is_integer(self) -> bool {
        (self.0 as i32) < 0
    }
}

/// Chunks that are prepared together: their codes fill one cache line per row.
pub(super) const SPAN: usize = 8;

/// The value that an integer scale of 1 stands for. It is negative, so that integers are.
pub(super) const INTEGER_UNIT: f32 = -1.0 / 64.0;

/// A, quantized already or to be quantized while it is prepared.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source<'a> {
    /// Quantized already.
    Quantized(&'a QuantizedMatrix<'a>),
    /// Floats to be quantized to nvfp4 by Transformer Engine's rule, with this tensor scale.
    Float(&'a FloatMatrix<'a>, GlobalScale),
}

impl Source<'_> {
    /// Elements per row.
    pub(super) fn k(&self) -> usize {
        match self {
            Self::Quantized(a) => a.k(),
            Self::Float(a, _) => a.cols(),
        }
    }

    /// The value that a block scale of 1 stands for: 2¹² in mxfp4, so that the largest dot product, 2304, times the largest
    /// scale, 2¹²⁷, is an f32. The smallest scale stays exact.
    pub(super) fn unit(&self) -> f32 {
        match self {
            Self::Quantized(a) if a.format() == BlockFormat::Mxfp4 => 4096.0,
            _ => 1.0,
        }
    }
}

impl Source<'_> {
    /// Calls `each` with the index, the codes and the scale, in units of [`unit`](Self::unit), of some chunks of a row.
    #[inline(always)]
    fn for_each_chunk(
        &self,
        row: usize,
        chunks: Range<usize>,
        mut each: impl FnMut(usize, [u8; CHUNK_K], f32),
    ) {
        match self {
            Self::Quantized(a) => {
                let codes = a.row_codes(row).as_chunks().0;
                let chunks_per_block = a.format().block_len() / CHUNK_K;
                let units = 1.0 / self.unit();
                for (i, chunk) in chunks.enumerate() {
                    let scale = a.scale_byte(row, chunk / chunks_per_block);
                    each(i, unpack(&codes[chunk]), a.format().decode_scale(scale) * units);
                }
            }
            Self::Float(a, global_scale) => {
                let mut widened = [0.0; CHUNK_K];
                for (i, chunk) in chunks.enumerate() {
                    let (codes, scale) = te_codes(widen(a, row, chunk, &mut widened), *global_scale);
                    each(i, codes, e4m3::decode(scale));
                }
            }
        }
    }
}

/// Writes the same chunks of an A in nvfp4 into `out` for [`tiles`]: doubled codes times their scales, which are bf16.
pub(super) struct PrepareTiles<'a> {
    pub(super) a: &'a Source<'a>,
    pub(super) rows: RowsOfA<'a>,
    /// Chunks of K: blocks of [`tiles::BLOCK_K`] and what is left at the end.
    pub(super) chunks: Range<usize>,
    pub(super) out: &'a mut [u16],
}

impl Work for PrepareTiles<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) -> bool {
        let Self { a, rows, chunks, out } = self;
        tiles::write(rows.len(), 1, tiles::BLOCK_K, out, |row, block, mut steps| {
            let first = chunks.start + block.start / CHUNK_K;
            let chunks = first..first + block.len() / CHUNK_K;
            a.for_each_chunk(rows.row(row), chunks, |i, codes, scale| {
                // SAFETY: the machine has the instruction set, since `run` got its token.
                let (codes, _) = unsafe { S::doubled(codes) };
                let to = &mut steps.step(i * CHUNK_K / TILE_K)[i * CHUNK_K % TILE_K..];
                for (to, code) in to.iter_mut().zip(codes) {
                    *to = ((f32::from(code) * scale).to_bits() >> 16) as u16;
                }
            });
            true
        })
    }
}

/// Fills `out`, `[chunks][rows of the tile]`, with chunks of the tile's rows.
pub(super) struct Prepare<'a> {
    pub(super) a: &'a Source<'a>,
    pub(super) rows: RowsOfA<'a>,
    /// Chunks of K.
    pub(super) chunks: Range<usize>,
    pub(super) out: &'a mut [Block],
}

impl Work for Prepare<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let Self { a: source, rows, chunks, out } = self;
        let block = |codes, scale| {
            // A scale of zero may become any number in a kernel.
            let (codes, scale) = if scale == 0.0 { ([0; CHUNK_K], 1.0) } else { (codes, scale) };
            // SAFETY: the machine has the instruction set, since `run` got its token.
            let (codes, sum) = unsafe { S::doubled(codes) };
            Block { codes, bias: S::bias_word(sum), scale: Scale::float(scale) }
        };
        for row in 0..rows.len() {
            let mut to = out[row..].iter_mut().step_by(rows.len());
            source.for_each_chunk(rows.row(row), chunks.clone(), |_, codes, scale| {
                if let Some(to) = to.next() {
                    *to = block(codes, scale);
                }
            });
        }
        // `one_row` uses floats, since integers gain little where sums stay in registers.
        if S::SCALES_INTEGERS && rows.len() > 1 {
            out.chunks_exact_mut(rows.len()).for_each(Block::scales_to_integers);
        }
    }
}

impl Block {
    /// Turns the scales of a chunk's rows, all other than 0, into integers if all are multiples of [`INTEGER_UNIT`]: every e4m3 scale
    /// from 1/8 on is.
    #[inline(always)]
    fn scales_to_integers(blocks: &mut [Self]) {
        let integer = |block: &Self| (block.scale.value() / INTEGER_UNIT) as i16;
        let exact = |block: &Self| f32::from(integer(block)) * INTEGER_UNIT == block.scale.value();
        if blocks.iter().all(exact) {
            for block in blocks {
                block.scale = Scale::integer(integer(block));
            }
        }
    }
}

/// The codes in 8 bytes, with even elements in low nibbles.
#[inline(always)]
fn unpack(bytes: &[u8; CHUNK_K / 2]) -> [u8; CHUNK_K] {
    let codes = |byte| (u16::from(byte) | u16::from(byte) << 4) & 0x0F0F;
    bytemuck::cast(bytes.map(|byte| codes(byte).to_le()))
}

/// 16 elements of a row as f32: in place if they are f32, or else in `room`.
#[inline(always)]
fn widen<'a>(
    a: &'a FloatMatrix<'_>,
    row: usize,
    chunk: usize,
    room: &'a mut [f32; CHUNK_K],
) -> &'a [f32; CHUNK_K] {
    match a {
        FloatMatrix::F32(a) => return &a.row(row).as_chunks().0[chunk],
        FloatMatrix::F16(a) => a.row(row).as_chunks::<CHUNK_K>().0[chunk].convert_to_f32_slice(room),
        FloatMatrix::Bf16(a) => a.row(row).as_chunks::<CHUNK_K>().0[chunk].convert_to_f32_slice(room),
    }
    room
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_formats::scalar::e2m1::pack;

    #[test]
    fn codes_are_unpacked_in_order_exact() {
        let codes: [u8; CHUNK_K] = std::array::from_fn(|k| (k as u8 * 7 + 3) % 16);
        let bytes = std::array::from_fn(|i| pack(codes[2 * i], codes[2 * i + 1]));
        assert_eq!(unpack(&bytes), codes);
    }

    #[test]
    fn rows_for_tiles_start_on_a_line_exact() {
        let kernel = crate::w4a4::Kernel {
            tiles: true,
            ..crate::w4a4::Kernel::new(crate::Isa::Portable.checked().unwrap())
        };
        for chunks in (2..=448).step_by(2) {
            let bytes = kernel.row_blocks(chunks) * size_of::<Block>();
            assert!(
                bytes.is_multiple_of(64) && bytes >= chunks * CHUNK_K * size_of::<u16>(),
                "{chunks} chunks: {bytes} bytes"
            );
        }
    }

    /// Each of the 126 scales of nvfp4 but 0, twice and behind one that can be an integer.
    #[test]
    fn scales_become_integers_where_all_are_exact() {
        let block = |scale| Block { codes: [0; CHUNK_K], bias: 0, scale: Scale::float(scale) };
        for scale in (1..0x7F).map(e4m3::decode) {
            let whole = (scale * 64.0).fract() == 0.0;
            assert!(whole || scale < 0.125, "{scale}");
            for scales in [[scale, scale], [448.0, scale]] {
                let mut blocks = scales.map(block);
                Block::scales_to_integers(&mut blocks);
                assert_eq!(blocks[0].scale.is_integer(), whole, "{scales:?}");
                for (block, scale) in blocks.iter().zip(scales) {
                    let halves = [block.scale.0 as i16, (block.scale.0 >> 16) as i16];
                    let values = halves.map(|half| f32::from(half) * INTEGER_UNIT);
                    assert_eq!(if whole { values } else { [block.scale.value(); 2] }, [scale; 2]);
                }
            }
        }
    }
}
