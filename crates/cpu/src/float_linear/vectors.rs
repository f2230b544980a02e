//! Rows and features by lanes along K: few rows with weights where they lie, others with copies of them.

use bytemuck::Zeroable;
use dualgemm_formats::Matrix;

use super::products::{Element, Fused, Products, multiply};
use super::{FEW_ROWS, Multiply, PAD, STREAMS, STRETCH, fetch_behind};
use crate::amx::TILE_K;
use crate::tile::TILE_COLS;
use crate::w4a16::{Pairs, Vector, for_rows};

impl Multiply<'_> {
    /// A tile of rows with the vectors of an instruction set.
    ///
    /// # Safety
    /// The machine has the instruction set.
    #[inline(always)]
    pub(super) unsafe fn floats<S: Pairs, T: Element>(&mut self, w: &Matrix<'_, T>) {
        // SAFETY: the caller's machine has the instruction set.
        unsafe {
            if <S::Floats as Vector>::LANES == 16 {
                self.vectors::<Fused<S::Floats, T>, 8, 3>(w);
            } else {
                self.vectors::<Fused<S::Floats, T>, 4, 2>(w);
            }
        }
    }

    /// `ROWS` rows and `FEATURES` features at a time, whose sums are in registers. Features are copied first, since rows of a
    /// length that is a power of two lie in the same few sets of a cache.
    #[inline(always)]
    unsafe fn vectors<P: Products, const FEATURES: usize, const ROWS: usize>(
        &mut self,
        w: &Matrix<'_, P::W>,
    ) {
        let Self { rows, k, first_col, stride, cols, .. } = *self;
        let a = &bytemuck::cast_slice::<f32, P::A>(self.words)[self.tile * stride..];
        if self.few {
            // SAFETY: as here.
            return unsafe { self.few_rows::<P, FEW_ROWS>(w) };
        }
        let (sums, room) = self.room.split_at_mut(rows * TILE_COLS);
        sums.fill(0.0);
        let sums = sums.as_chunks_mut::<TILE_COLS>().0;
        let room: &mut [P::W] = bytemuck::cast_slice_mut(room);
        for first in (0..k).step_by(STRETCH) {
            let (end, len) = (k.min(first + STRETCH), (k - first).min(STRETCH).next_multiple_of(TILE_K));
            for (col, to) in
                room.chunks_exact_mut(STRETCH + PAD).take(cols.next_multiple_of(FEATURES)).enumerate()
            {
                let from = &w.row((first_col + col).min(w.rows() - 1))[first..end];
                to[..from.len()].copy_from_slice(from);
                to[from.len()..len].fill(P::W::zeroed());
                fetch_behind(from);
            }
            for column in (0..cols).step_by(FEATURES) {
                let weights: [&[P::W]; FEATURES] =
                    std::array::from_fn(|i| &room[(column + i) * (STRETCH + PAD)..][..len]);
                for row in (0..rows).step_by(ROWS) {
                    for_rows!(ROWS.min(rows - row), ROWS, |COUNT| {
                        let a: [&[P::A]; COUNT] =
                            std::array::from_fn(|i| &a[(row + i) * stride + first..][..len]);
                        // SAFETY: the caller's machine has the instruction set.
                        let products = unsafe { multiply::<P, FEATURES, COUNT, false>(weights, a) };
                        for (sums, products) in sums[row..].iter_mut().zip(products) {
                            for (sum, product) in sums[column..].iter_mut().zip(products) {
                                *sum += product;
                            }
                        }
                    });
                }
            }
        }
    }

    /// Up to `MOST` rows at a time: features come from the memory in [`STREAMS`] streams, since one does not keep it busy.
    ///
    /// # Safety
    /// The machine has the instruction set of `P`.
    #[inline(always)]
    pub(super) unsafe fn few_rows<P: Products, const MOST: usize>(&mut self, w: &Matrix<'_, P::W>) {
        let Self { rows, first_col, cols, stride, .. } = *self;
        let a = &bytemuck::cast_slice::<f32, P::A>(self.words)[self.tile * stride..];
        let (of_stream, at_once) = (cols.div_ceil(STREAMS), rows.div_ceil(rows.div_ceil(MOST)));
        for at in 0..of_stream {
            let column = |stream: usize| (stream * of_stream + at).min(cols - 1);
            let weights = std::array::from_fn(|stream| w.row(first_col + column(stream)));
            for first in (0..rows).step_by(at_once) {
                for_rows!(at_once.min(rows - first), MOST, |COUNT| {
                    let a: [&[P::A]; COUNT] =
                        std::array::from_fn(|row| &a[(first + row) * stride..][..stride]);
                    // SAFETY: the caller's machine has the instruction set.
                    let products = unsafe { multiply::<P, STREAMS, COUNT, true>(weights, a) };
                    for (row, products) in (first..).zip(products) {
                        for (stream, product) in products.into_iter().enumerate() {
                            self.room[row * cols + column(stream)] = product;
                        }
                    }
                });
            }
        }
    }
}
