//! W4A16: float activations as they are, 4-bit weights decoded exactly, f32 sums.
//!
//! Only sums round: f32, f16 and bf16 activations are exact in f32, and so is a code times its scale. (An mxfp4
//! scale of 2¹²⁶ or 2¹²⁷ times a code can exceed f32; it becomes infinite.) One row, few rows and many rows go
//! different ways, chosen from the activations of a tile alone, each with one order of sums for all instruction sets.
//!
//! | module | what |
//! |---|---|
//! | [`digits`] | one row: activations as integers, for the kernels of W4A4 |
//! | [`kernel`] | any rows: weights as f32 |
//! | [`vector`] | the operations an instruction set has to provide for that |
//! | [`portable`], [`avx2`], [`avx512`] | the instruction sets |

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod digits;
mod kernel;
mod portable;
#[cfg(test)]
mod tests;
mod vector;

use dualgemm_formats::{BlockFormat, FloatMatrix};
use half::slice::HalfFloatSliceExt;
use kernel::Task;

use crate::pack::{CHUNK, CHUNK_K, PackedGateUp};
use crate::threads::{self, SharedSlice};
use crate::tile::{RowTile, TILE_COLS, TileKernel};
use crate::{Error, Isa, w4a4};

/// What is compiled once per instruction set, and needs a machine that has it.
#[derive(Debug, Clone, Copy)]
struct Functions {
    /// [`kernel::narrow`].
    narrow: unsafe fn(&Task),
    /// [`kernel::wide`].
    wide: unsafe fn(&Task),
    /// Most rows of a group of a wide tile.
    group_rows: usize,
}

/// The kernels of one instruction set, which the machine has, for weights of one format.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    isa: Isa,
    format: BlockFormat,
    digits: w4a4::Kernel,
    functions: Functions,
}

/// Words in front of each tile in the buffer of activations: one cache line, whose first word tells how the tile is
/// written.
const HEADER: usize = 16;
const AS_FLOATS: f32 = 0.0;
const AS_DIGITS: f32 = 1.0;

/// Plans of up to this many rows have room for any number of digits that is of use, others for two and a half per
/// chunk.
const MAX_ROOMY_ROWS: usize = 64;

/// Words that the activations of `rows` rows take, in tiles of any size.
pub(crate) fn buffer_len(rows: usize, k: usize) -> usize {
    rows * row_len(rows, k)
}

fn row_len(rows: usize, k: usize) -> usize {
    HEADER + if rows <= MAX_ROOMY_ROWS { 2 * k } else { k }
}

impl Kernel {
    /// The kernels for an instruction set and weights of a format.
    ///
    /// # Errors
    /// If this machine lacks it.
    pub(crate) fn new(isa: Isa, format: BlockFormat) -> Result<Self, Error> {
        let digits = w4a4::Kernel::new(isa)?;
        #[cfg(target_arch = "x86_64")]
        let functions = match isa {
            Isa::Portable => portable::functions::<{ portable::FUSED }>(),
            Isa::Avx2 | Isa::AvxVnni => avx2::FUNCTIONS,
            Isa::Avx512 | Isa::Avx512Vnni => avx512::FUNCTIONS,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let functions = portable::functions::<{ portable::FUSED }>();
        Ok(Self { isa, format, digits, functions })
    }

    /// Writes A into `buffer`, as the kernels read it, and returns the kernels bound to it. `rows` is what
    /// [`buffer_len`] was asked for.
    ///
    /// # Panics
    /// If `buffer` is shorter than that, or a tile lies beyond.
    pub(crate) fn prepare<'a>(
        self,
        threads: usize,
        a: &FloatMatrix<'_>,
        rows: usize,
        tiles: &[RowTile],
        buffer: &'a mut [f32],
    ) -> Bound<'a> {
        let row_len = row_len(rows, a.cols());
        let shared = SharedSlice::new(buffer);
        // One row takes a few microseconds, less than waking a thread.
        let threads = if a.rows() == 1 { 1 } else { threads };
        threads::for_each(
            threads,
            tiles.len(),
            |_| (),
            |(), item| {
                let tile = &tiles[item];
                // SAFETY: each tile is claimed once, and tiles have no row in common.
                let out = unsafe { shared.part(tile.first_row * row_len, tile.rows * row_len) };
                let (header, out) = out.split_at_mut(HEADER);
                let unit = w4a4::digit_unit(self.format);
                // SAFETY: the machine has the instruction set, or `new` would have failed.
                let digits = tile.rows == 1
                    && unsafe { digits::write(self.isa, self.digits, unit, a, tile.first_row, out) };
                header[0] = if digits { AS_DIGITS } else { AS_FLOATS };
                if !digits {
                    self.write_floats(a, tile, &mut out[..tile.rows * a.cols()]);
                }
            },
        );
        Bound { kernel: self, row_len, k: a.cols(), a: buffer }
    }

    /// The rows of one tile, `rows · k` values in the order that [`kernel::multiply`] reads.
    fn write_floats(self, a: &FloatMatrix<'_>, tile: &RowTile, out: &mut [f32]) {
        let k = a.cols();
        let mut wide = [0.0; kernel::BLOCK_K];
        if tile.rows <= kernel::NARROW_ROWS {
            for (row, out) in out.chunks_exact_mut(k).enumerate() {
                for (first, out) in (0..k).step_by(kernel::BLOCK_K).zip(out.chunks_mut(kernel::BLOCK_K)) {
                    let row = widen(a, tile.first_row + row, first, &mut wide[..out.len()]);
                    for (quad, out) in row.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<4>().0) {
                        *out = [quad[0], quad[2], quad[1], quad[3]];
                    }
                }
            }
            return;
        }
        for group in 0..tile.rows.div_ceil(self.functions.group_rows) {
            let [start, end] =
                [group, group + 1].map(|g| kernel::group_start(tile.rows, self.functions.group_rows, g));
            let rows = end - start;
            let out = &mut out[start * k..end * k];
            for (first, out) in (0..k).step_by(kernel::BLOCK_K).zip(out.chunks_mut(kernel::BLOCK_K * rows)) {
                for row in 0..rows {
                    let len = out.len() / rows;
                    let values = widen(a, tile.first_row + start + row, first, &mut wide[..len]);
                    for (value, out) in values.iter().zip(out.chunks_exact_mut(rows)) {
                        out[row] = *value;
                    }
                }
            }
        }
    }
}

/// The elements `first ..` of a row as f32, as many as `wide` has room for.
fn widen<'a>(a: &'a FloatMatrix<'_>, row: usize, first: usize, wide: &'a mut [f32]) -> &'a [f32] {
    let range = first..first + wide.len();
    match a {
        FloatMatrix::F32(a) => return &a.row(row)[range],
        FloatMatrix::F16(a) => a.row(row)[range].convert_to_f32_slice(wide),
        FloatMatrix::Bf16(a) => a.row(row)[range].convert_to_f32_slice(wide),
    }
    wide
}

/// The kernels and the activations they multiply.
#[derive(Debug)]
pub(crate) struct Bound<'a> {
    kernel: Kernel,
    row_len: usize,
    k: usize,
    a: &'a [f32],
}

impl TileKernel for Bound<'_> {
    fn multiply(&self, tile: &RowTile, weights: &PackedGateUp, panel: usize, sums: &mut [f32]) {
        let (rows, chunks) = (tile.rows, self.k / CHUNK_K);
        let (header, a) = self.a[tile.first_row * self.row_len..][..rows * self.row_len].split_at(HEADER);
        let sums = &mut sums[..rows * TILE_COLS];
        assert_eq!((weights.k(), weights.format()), (self.k, self.kernel.format), "what A was prepared for");
        if header[0] == AS_DIGITS {
            let (starts, blocks) = digits::read(chunks, a);
            // SAFETY: the offsets are as `digits::write` wrote them.
            return unsafe { self.kernel.digits.multiply_digits(weights, panel, starts, blocks, sums) };
        }
        let task = Task {
            format: weights.format(),
            panel: weights.panel(panel)[..chunks * CHUNK].as_ptr(),
            chunks,
            a: a[..rows * self.k].as_ptr(),
            rows,
            sums: sums.as_mut_ptr(),
        };
        let Functions { narrow, wide, .. } = self.kernel.functions;
        // SAFETY: the machine has the instruction set, or `new` would have failed; the slices are as long as the
        // task says.
        unsafe { if rows <= kernel::NARROW_ROWS { narrow(&task) } else { wide(&task) } }
    }

    fn sum_unit(&self, _weights: &PackedGateUp) -> f32 {
        1.0
    }
}
