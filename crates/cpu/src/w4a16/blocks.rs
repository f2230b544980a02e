//! A for many rows, by blocks of BLOCK_K of k: as floats, or as integers with few rests.
//!
//! ```text
//! floats        [group of rows][k][row of group]                  1024 bytes of each row
//! integers      [group of rows][chunk]                            576 bytes of each row
//!                   [pair][row of group]    two i16: k = 4i + 0 and 2, or 4i + 1 and 3
//!                   [row of group]          f32: the power of two that one unit of them stands for, 1 if all are 0
//! rests         behind the integers, by row and k
//! ```
//!
//! The numbers of a block of a tile alone decide which of the two it is. Integers and rests lie in the same four-byte words as
//! floats would.

use bytemuck::{Pod, Zeroable};
use dualgemm_formats::FloatMatrix;

use super::kernel::{BLOCK_K, Layout, groups};
use super::pairs::Pairs;
use super::split::{SHORT_BITS, largest, power_of_two, take_integers};
use super::vector::Vector;
use super::widen;
use crate::isa::{InstructionSet, Work};
use crate::lanes::map;
use crate::pack::CHUNK_K;
use crate::tile::RowsOfA;

/// Four-byte words of a row's integers in a chunk.
pub(super) const PAIR_WORDS: usize = CHUNK_K / 2 + 1;

/// Multiplying floats is faster if there is more than one rest for so many chunks of a row: with AVX2, 16 features of a row and
/// a chunk take four cycles less as integers, and a rest takes six to eight.
const CHUNKS_PER_REST: usize = 2;

/// Where an element of K is in a block of pairs.
pub(super) struct Place {
    /// Chunk of the block.
    pub(super) chunk: usize,
    /// Pair of the chunk.
    pub(super) pair: usize,
    /// Element of the pair.
    pub(super) element: usize,
}

/// What an integer of 15 bits leaves of a float. It has so few bits that its product with a weight is exact in f32.
#[derive(Debug, Clone, Copy, PartialEq, Zeroable, Pod)]
#[repr(C)]
pub(super) struct Rest {
    pub(super) value: f32,
    /// Row of the tile, k of the block.
    at: [u16; 2],
}

impl Rest {
    /// Row of the tile.
    #[inline(always)]
    pub(super) fn row(self) -> usize {
        self.at[0].into()
    }

    /// Where its k is in the block.
    #[inline(always)]
    pub(super) fn place(self) -> Place {
        let k = usize::from(self.at[1]);
        Place { chunk: k / CHUNK_K, pair: k % CHUNK_K / 4 * 2 + k % 2, element: k % 4 / 2 }
    }
}

/// One block of K of a tile, to be written into `out`: `BLOCK_K` or fewer words per row. The result says how.
pub(super) struct Write<'a> {
    pub(super) a: &'a FloatMatrix<'a>,
    pub(super) rows: RowsOfA<'a>,
    /// First k.
    pub(super) first: usize,
    /// Where the block goes.
    pub(super) out: &'a mut [f32],
}

impl Work for Write<'_> {
    type Output = Layout;

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) -> Layout {
        self.write(<S as Pairs>::Floats::ROWS, <S as Pairs>::ROWS)
    }
}

impl Write<'_> {
    /// Writes in groups of up to `float_rows` or `pair_rows` rows.
    #[inline(always)]
    fn write(mut self, float_rows: usize, pair_rows: usize) -> Layout {
        // Most f32 have more than 15 bits and would leave a rest.
        let rests = if matches!(self.a, FloatMatrix::F32(_)) { None } else { self.integers(pair_rows) };
        match rests {
            Some(rests) => Layout::Pairs { rests },
            None => {
                self.floats(float_rows);
                Layout::Floats
            }
        }
    }

    #[inline(always)]
    fn floats(&mut self, group_rows: usize) {
        let k = self.out.len() / self.rows.len();
        let mut widened = [0.0; BLOCK_K];
        for group in groups(self.rows.len(), group_rows) {
            let out = &mut self.out[group.start * k..group.end * k];
            for (i, row) in group.clone().enumerate() {
                let values = widen(self.a, self.rows.row(row), self.first, &mut widened[..k]);
                for (value, out) in values.iter().zip(out.chunks_exact_mut(group.len())) {
                    out[i] = *value;
                }
            }
        }
    }

    /// Returns the number of rests, or `None` if there are too many.
    #[inline(always)]
    fn integers(&mut self, group_rows: usize) -> Option<usize> {
        let rows = self.rows.len();
        let chunks = self.out.len() / rows / CHUNK_K;
        let (mut out, rests) = self.out.split_at_mut(rows * chunks * PAIR_WORDS);
        let rests: &mut [Rest] = bytemuck::cast_slice_mut(&mut rests[..rows * chunks / CHUNKS_PER_REST * 2]);
        let (mut count, mut widened) = (0, [0.0; BLOCK_K]);
        let mut integers = [[0i16; CHUNK_K]; BLOCK_K / CHUNK_K];
        for group in groups(rows, group_rows) {
            let here;
            (here, out) = out.split_at_mut(group.len() * chunks * PAIR_WORDS);
            for (i, row) in group.clone().enumerate() {
                let k = chunks * CHUNK_K;
                let values = widen(self.a, self.rows.row(row), self.first, &mut widened[..k]);
                let per_chunk = here.chunks_exact_mut(group.len() * PAIR_WORDS);
                for (chunk, (out, integers)) in per_chunk.zip(&mut integers).enumerate() {
                    let mut floats = values.as_chunks::<CHUNK_K>().0[chunk];
                    let most = largest(&floats);
                    let taken = take_integers::<SHORT_BITS>(&mut floats, most);
                    let (unit, taken) =
                        taken.map_or((1.0, [0; CHUNK_K]), |(e, taken)| (power_of_two(e), taken));
                    out[CHUNK_K / 2 * group.len() + i] = unit;
                    *integers = map(&taken, |x| x as i16);
                    if floats.iter().fold(false, |any, rest| any | (*rest != 0.0)) {
                        for (k, &value) in floats.iter().enumerate().filter(|(_, value)| **value != 0.0) {
                            *rests.get_mut(count)? =
                                Rest { value, at: [row as u16, (chunk * CHUNK_K + k) as u16] };
                            count += 1;
                        }
                    }
                }
                // In a loop of its own: otherwise LLVM computes the integers above by fours, in the order of pairs, in twice the time.
                let per_chunk = here.chunks_exact_mut(group.len() * PAIR_WORDS);
                for (out, integers) in per_chunk.zip(&integers) {
                    let pairs: &mut [[i16; 2]] =
                        bytemuck::cast_slice_mut(&mut out[..CHUNK_K / 2 * group.len()]);
                    for (quad, integers) in integers.as_chunks::<4>().0.iter().enumerate() {
                        pairs[2 * quad * group.len() + i] = [integers[0], integers[2]];
                        pairs[(2 * quad + 1) * group.len() + i] = [integers[1], integers[3]];
                    }
                }
            }
        }
        Some(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_formats::Matrix;
    use half::bf16;
    use proptest::prelude::*;

    /// Writes a block of rows, in groups of `group_rows`.
    fn written(rows: &[[f32; 2 * CHUNK_K]], group_rows: usize) -> (Layout, Vec<f32>) {
        let data: Vec<bf16> = rows.iter().flatten().map(|&x| bf16::from_f32(x)).collect();
        let a = FloatMatrix::Bf16(Matrix::new("a", rows.len(), 2 * CHUNK_K, data).unwrap());
        let tile = crate::RowTile { group: 0, first_row: 0, rows: rows.len() };
        let mut out = vec![f32::NAN; rows.len() * 2 * CHUNK_K];
        let rows = RowsOfA::new(&tile, None);
        let layout = Write { a: &a, rows, first: 0, out: &mut out }.write(group_rows, group_rows);
        (layout, out)
    }

    /// The floats that are the sums of integers and rests.
    fn joined(rows: usize, group_rows: usize, rests: usize, out: &[f32]) -> Vec<[f64; 2 * CHUNK_K]> {
        let mut joined = vec![[0.0; 2 * CHUNK_K]; rows];
        let (mut integers, all_rests) = out.split_at(rows * 2 * PAIR_WORDS);
        for group in groups(rows, group_rows) {
            for chunk in 0..2 {
                let here;
                (here, integers) = integers.split_at(group.len() * PAIR_WORDS);
                for (i, row) in group.clone().enumerate() {
                    for k in 0..CHUNK_K {
                        let at = Rest { value: 0.0, at: [row as u16, (CHUNK_K * chunk + k) as u16] };
                        let place = at.place();
                        assert_eq!((at.row(), place.chunk), (row, chunk));
                        let integer =
                            (here[place.pair * group.len() + i].to_bits() >> (16 * place.element)) as i16;
                        let unit = f64::from(here[CHUNK_K / 2 * group.len() + i]);
                        joined[row][CHUNK_K * chunk + k] = f64::from(integer) * unit;
                    }
                }
            }
        }
        for rest in bytemuck::cast_slice::<f32, Rest>(&all_rests[..2 * rests]) {
            joined[rest.row()][usize::from(rest.at[1])] += f64::from(rest.value);
        }
        joined
    }

    proptest! {
        /// Rows of usual numbers, a few replaced by arbitrary ones.
        #[test]
        fn integers_and_rests_are_the_floats_exact(
            rows in prop::collection::vec(prop::array::uniform32(-4f32..4.0), 1..9),
            odd in prop::collection::vec((any::<(usize, usize)>(), any::<f32>()), 0..3),
            group_rows in 1usize..7,
        ) {
            let mut rows = rows;
            for ((row, k), value) in odd {
                let count = rows.len();
                rows[row % count][k % 32] = value;
            }
            let (layout, out) = written(&rows, group_rows);
            let Layout::Pairs { rests } = layout else { return Err(TestCaseError::reject("floats")) };
            for (row, joined) in rows.iter().zip(joined(rows.len(), group_rows, rests, &out)) {
                for (x, joined) in row.iter().zip(joined) {
                    let x = bf16::from_f32(*x).to_f64();
                    prop_assert!(x == joined || x.is_nan() && joined.is_nan(), "{x:e} {joined:e}");
                }
            }
        }
    }

    #[test]
    fn usual_numbers_leave_few_rests_and_zeros_none() {
        let row: [f32; 32] = std::array::from_fn(|k| (k as f32 - 15.7) / 3.0);
        assert_eq!(written(&[row, row], 6).0, Layout::Pairs { rests: 0 });
        assert_eq!(written(&[[0.0; 32], [-0.0; 32]], 6).0, Layout::Pairs { rests: 0 });
        let mut large = [row; 12];
        large[5][3] = 2000.0;
        let layout = written(&large, 6).0;
        assert!(matches!(layout, Layout::Pairs { rests: 1..=12 }), "{layout:?}");
    }

    #[test]
    fn too_many_rests_leave_floats_by_group_and_k_exact() {
        // One of two neighbours is 2²⁰ times the other, which becomes a rest.
        let row: [f32; 32] = std::array::from_fn(|k| if k % 2 == 0 { 3e6 } else { 3.25 });
        let mut rows = [[1.0; 32]; 16];
        rows[9] = row;
        let (layout, out) = written(&rows, 5);
        assert_eq!(layout, Layout::Pairs { rests: 16 });
        assert_eq!(joined(16, 5, 16, &out)[9], row.map(|x| bf16::from_f32(x).to_f64()));
        let (layout, out) = written(&[row, row, [2.0; 32]], 2);
        assert_eq!(layout, Layout::Floats);
        let want: Vec<f32> =
            row.iter().flat_map(|&x| [bf16::from_f32(x).to_f32(); 2]).chain([2.0; 32]).collect();
        assert_eq!(out, want);
    }
}
