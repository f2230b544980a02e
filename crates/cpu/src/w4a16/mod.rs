//! W4A16: float activations as they are, 4-bit weights decoded exactly, f32 fused multiply-adds.
//!
//! Only sums round: f32, f16 and bf16 activations are exact in f32, and so is a code times its scale. (An mxfp4
//! scale of 2¹²⁶ or 2¹²⁷ times a code can exceed f32; it becomes infinite.)
//!
//! | module | what |
//! |---|---|
//! | [`vector`] | the operations an instruction set has to provide |
//! | [`kernel`] | the products, written once over them, and the order of their sums |
//! | [`portable`], [`avx2`], [`avx512`] | the instruction sets |

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod kernel;
mod portable;
#[cfg(test)]
mod tests;
mod vector;

use dualgemm_formats::{BlockFormat, FloatMatrix};
use half::slice::HalfFloatSliceExt;

use crate::pack::{CHUNK, CHUNK_K, PackedGateUp};
use crate::threads::{self, SharedSlice};
use crate::tile::{RowTile, TILE_COLS, TileKernel};
use crate::{Error, Isa};

type Multiply = unsafe fn(BlockFormat, *const u8, usize, *const f32, usize, *mut f32);

/// The kernel of one instruction set, which the machine has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    multiply: Multiply,
    /// Most rows of a group of a wide tile.
    group_rows: usize,
}

impl Kernel {
    /// The kernel for an instruction set. VNNI is about integers and changes nothing here.
    ///
    /// # Errors
    /// If this machine lacks it.
    pub(crate) fn new(isa: Isa) -> Result<Self, Error> {
        isa.require()?;
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m256, __m512};
            match isa {
                Isa::Portable => {}
                Isa::Avx2 | Isa::AvxVnni => return Ok(Self::of::<__m256>(avx2::multiply)),
                Isa::Avx512 | Isa::Avx512Vnni => return Ok(Self::of::<__m512>(avx512::multiply)),
            }
        }
        Ok(Self::portable::<{ portable::FUSED }>())
    }

    fn portable<const FUSED: bool>() -> Self {
        Self::of::<portable::Portable<FUSED>>(portable::multiply::<FUSED>)
    }

    fn of<V: vector::Vector>(multiply: Multiply) -> Self {
        Self { multiply, group_rows: V::ROWS }
    }

    /// Writes A into `buffer`, as the kernel reads it, and returns the kernel bound to it.
    ///
    /// # Panics
    /// If `buffer` holds fewer than K values for a row of the tiles.
    pub(crate) fn prepare<'a>(
        self,
        threads: usize,
        a: &FloatMatrix<'_>,
        tiles: &[RowTile],
        buffer: &'a mut [f32],
    ) -> Bound<'a> {
        let (k, origin) = (a.cols(), tiles.first().map_or(0, |tile| tile.first_row));
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
                let out = unsafe { shared.part((tile.first_row - origin) * k, tile.rows * k) };
                self.prepare_tile(a, tile, out);
            },
        );
        Bound { kernel: self, first_row: origin, k, a: buffer }
    }

    /// The rows of one tile, `rows · k` values in the order that [`kernel`] describes.
    fn prepare_tile(self, a: &FloatMatrix<'_>, tile: &RowTile, out: &mut [f32]) {
        let k = a.cols();
        let mut wide = [0.0; kernel::BLOCK_K];
        if kernel::is_narrow(tile.rows) {
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
        for group in 0..tile.rows.div_ceil(self.group_rows) {
            let [start, end] = [group, group + 1].map(|g| kernel::group_start(tile.rows, self.group_rows, g));
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

/// A kernel and the activations it multiplies.
#[derive(Debug)]
pub(crate) struct Bound<'a> {
    kernel: Kernel,
    first_row: usize,
    k: usize,
    a: &'a [f32],
}

impl TileKernel for Bound<'_> {
    fn multiply(&self, tile: &RowTile, weights: &PackedGateUp, panel: usize, sums: &mut [f32]) {
        let a = &self.a[(tile.first_row - self.first_row) * self.k..][..self.k * tile.rows];
        let panel = weights.panel(panel);
        assert_eq!(panel.len(), self.k / CHUNK_K * CHUNK, "K of A and of the weights");
        let sums = &mut sums[..tile.rows * TILE_COLS];
        // SAFETY: the machine has the instruction set, or `new` would have failed; the slices are as long as the
        // kernel reads and writes.
        unsafe {
            (self.kernel.multiply)(
                weights.format(),
                panel.as_ptr(),
                self.k / CHUNK_K,
                a.as_ptr(),
                tile.rows,
                sums.as_mut_ptr(),
            );
        }
    }

    fn sum_unit(&self, _weights: &PackedGateUp) -> f32 {
        1.0
    }
}
