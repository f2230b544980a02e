//! Many rows of bf16 by tiles: weights are copied in the order of rows of A of [`w4a16::tiles`](crate::w4a16::tiles).

use dualgemm_formats::Matrix;
use half::bf16;

use super::{BLOCK_ROWS, Multiply, fetch_behind};
use crate::amx::{Pass, TILE_K, TILE_ROWS, Unit};
use crate::tile::TILE_COLS;
use crate::w4a16::tiles::BLOCK_K;

impl Multiply<'_> {
    /// A tile of rows with the tile registers of a unit.
    ///
    /// # Safety
    /// The machine has the unit.
    #[inline(always)]
    pub(super) unsafe fn tiles<U: Unit>(&mut self, w: &Matrix<'_, bf16>) {
        let Self { rows, k, first_col, .. } = *self;
        let (blocks, of_block) = (rows.div_ceil(BLOCK_ROWS), k.next_multiple_of(TILE_K) * BLOCK_ROWS);
        let a = &bytemuck::cast_slice::<f32, u16>(self.words)[self.tile / BLOCK_ROWS * of_block..]
            [..blocks * of_block];
        let (sums, room) = self.room.split_at_mut(blocks * BLOCK_ROWS * TILE_COLS);
        let sums = sums.as_chunks_mut::<{ BLOCK_ROWS * TILE_COLS }>().0;
        let weights = bytemuck::cast_slice_mut::<f32, u16>(room).as_chunks_mut::<TILE_K>().0;
        // SAFETY: the caller's machine has the unit.
        let mut unit = unsafe { U::new() };
        for first in (0..k).step_by(BLOCK_K) {
            let steps = BLOCK_K.min(k - first).div_ceil(TILE_K);
            for feature in 0..TILE_COLS {
                let row = &w.row((first_col + feature).min(w.rows() - 1))[first..k.min(first + BLOCK_K)];
                let to = &mut weights[feature / TILE_ROWS * steps * TILE_ROWS + feature % TILE_ROWS..];
                let (whole, rest) = bytemuck::cast_slice::<bf16, u16>(row).as_chunks::<TILE_K>();
                for (to, from) in to.iter_mut().step_by(TILE_ROWS).zip(whole) {
                    *to = *from;
                }
                fetch_behind(row);
                if !rest.is_empty() {
                    let to = &mut to[whole.len() * TILE_ROWS];
                    *to = [0; TILE_K];
                    to[..rest.len()].copy_from_slice(rest);
                }
            }
            for (sums, a) in sums.iter_mut().zip(a.chunks_exact(of_block)) {
                let b = a[first * BLOCK_ROWS..].as_ptr();
                for group in 0..2 {
                    let a = weights[group * steps * TILE_ROWS..].as_ptr().cast();
                    let sums = sums[group * TILE_ROWS * TILE_COLS..].as_mut_ptr();
                    // SAFETY: a block has so many steps of A and of each group of weights, and 32 sums of each feature.
                    unsafe { unit.pass(&Pass { a, rows: TILE_ROWS, b, steps, sums, add: first > 0 }, true) };
                }
            }
        }
        for sums in sums {
            let by_feature = *sums;
            for (feature, of_feature) in by_feature.as_chunks::<BLOCK_ROWS>().0.iter().enumerate() {
                for (row, sum) in of_feature.iter().enumerate() {
                    sums[row * TILE_COLS + feature] = *sum;
                }
            }
        }
    }
}
