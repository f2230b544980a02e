//! Many rows with tiles of bf16: the units of AMX multiply 16 rows by 16 features by 32 k at once.
//!
//! ```text
//! a = a0 (+ a1 (+ a2))      bf16 each, cut off from above: one for bf16, two for f16, three for f32; exact
//! w = code · scale          bf16, exact: 2 bits times 4
//! sum += Σ_32 k a0[k]·w[k]  as TDPBF16PS adds: see [`amx`](crate::amx)
//! ```
//!
//! The order is: blocks of [`BLOCK_K`] of k ascending; in each block a0, then a1, then a2; for each of them k ascending, 32 at a time,
//! from 0. So products are exact, and a sum of K products takes at most K/32 + 17 roundings for each of the terms.
//!
//! TDPBF16PS takes what is below 2⁻¹²⁶ for zero. A tile with a float so small that a product may have bits there goes another
//! way, and so does one with infinities or NaN ([`fits`]). What is left has no bits below 2⁻¹²⁶: every sum is a multiple of it.
//!
//! ```text
//! A        [block of K][group of 16 rows][term][step of 32 k][row of group][32]     bf16
//! weights  [step of 32 k][gate, up][pair of k][feature][2]                           bf16, one block of K of a panel
//! ```

use std::mem::MaybeUninit;
use std::ops::Range;

use dualgemm_formats::FloatMatrix;

use super::pairs::Pairs;
use super::vector::Vector;
use super::widen;
use crate::amx::{Pass, TILE_K, TILE_ROWS, Tiles, Unit};
use crate::fetch::fetch;
use crate::isa::{InstructionSet, Work};
use crate::pack::{CHUNK, CHUNK_K, PANEL};
use crate::tile::{RowTile, TILE_COLS};

/// Elements of K of a panel that are widened at a time: 16 KiB, which leaves room for A in a first-level cache of 48 KiB that two
/// threads share.
pub(crate) const BLOCK_K: usize = 256;

/// Fewest rows for which widening weights pays, by the bf16 of a float; `None` if it never does.
///
/// On 16 threads of an Emerald Rapids, eight rows of bf16 take 8 % less time than as pairs; eight of f16 and f32 take a quarter more
/// than their other ways, and 16 take half and three quarters of it.
pub(super) fn min_rows(tiles: Tiles, terms: usize) -> Option<usize> {
    match (tiles.are_real(), terms) {
        (true, 1) => Some(8),
        (true, _) => Some(16),
        (false, 1) => (tiles != Tiles::No).then_some(8),
        (false, _) => None,
    }
}

/// Elements of A that are multiplied with several panels in turn: 512 KiB of a second-level cache of 2 MiB that two threads share.
const CACHED: usize = 256 << 10;

/// Whether tiles multiply these floats: all are zero, or finite and so large that the last bit of each, times the last bit of a
/// weight of nvfp4, 2⁻¹⁰, is at least 2⁻¹²⁶.
#[inline(always)]
fn fits(values: &[f32], terms: usize) -> bool {
    const BITS: [i32; 3] = [8, 11, 24];
    let smallest = f32::from_bits(((1 + 10 + BITS[terms - 1] - 1) << 23) as u32);
    let fits = |x: f32| (x == 0.0) | ((x.abs() >= smallest) & (x.abs() <= f32::MAX));
    values.iter().fold(true, |all, &x| all & fits(x))
}

/// The groups of a tile's rows.
#[inline(always)]
fn groups(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(TILE_ROWS).map(move |start| start..rows.min(start + TILE_ROWS))
}

/// Elements of K `first ..` of all rows of a tile of A, to be written into `out`: `terms` bf16 for each. The result says whether
/// they [fit](fits); if not, what is in `out` has no meaning.
pub(super) struct Write<'a> {
    /// A.
    pub(super) a: &'a FloatMatrix<'a>,
    /// bf16 for each float.
    pub(super) terms: usize,
    /// Rows of A.
    pub(super) tile: &'a RowTile,
    /// First k, a multiple of [`BLOCK_K`].
    pub(super) first: usize,
    /// Where they go.
    pub(super) out: &'a mut [u16],
}

impl Work for Write<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) -> bool {
        let Self { a, terms, tile, first, out } = self;
        let mut room = [0.0; BLOCK_K];
        write(tile.rows, terms, out, |row, block, out| {
            let values = widen(a, tile.first_row + row, first + block.start, &mut room[..block.len()]);
            let fits = fits(values, terms);
            if fits {
                cut(values, terms, out);
            }
            fits
        })
    }
}

/// Writes rows in the order of this file: `row` is asked for one row's elements of a block of K at a time, and writes them in the
/// steps that it gets, `[term][step]`. Ends if it returns false, and returns that.
#[inline(always)]
pub(crate) fn write(
    rows: usize,
    terms: usize,
    out: &mut [u16],
    mut row: impl FnMut(usize, Range<usize>, Steps<'_>) -> bool,
) -> bool {
    let mut first = 0;
    for out in out.chunks_mut(BLOCK_K * rows * terms) {
        let k = out.len() / (rows * terms);
        for group in groups(rows) {
            let out = &mut out[group.start * k * terms..group.end * k * terms];
            for (i, at) in group.clone().enumerate() {
                if !row(at, first..first + k, Steps { out: &mut *out, rows: group.len(), row: i }) {
                    return false;
                }
            }
        }
        first += k;
    }
    true
}

/// Where the elements of a row of a group go: step after step.
pub(crate) struct Steps<'a> {
    out: &'a mut [u16],
    rows: usize,
    row: usize,
}

impl Steps<'_> {
    /// The elements of a step.
    #[inline(always)]
    pub(crate) fn step(&mut self, step: usize) -> &mut [u16; TILE_K] {
        &mut self.out.as_chunks_mut().0[step * self.rows + self.row]
    }
}

/// Cuts floats into `terms` bf16.
#[inline(always)]
fn cut(values: &[f32], terms: usize, mut out: Steps<'_>) {
    let steps = values.len() / TILE_K;
    for (step, values) in values.as_chunks::<TILE_K>().0.iter().enumerate() {
        let mut rest = *values;
        for term in 0..terms {
            for (rest, out) in rest.iter_mut().zip(out.step(term * steps + step)) {
                *out = (rest.to_bits() >> 16) as u16;
                *rest -= f32::from_bits(rest.to_bits() & 0xFFFF_0000);
            }
        }
    }
}

/// Overwrites sums with the products of a tile and some panels of nvfp4.
pub(crate) struct Multiply<'a> {
    /// The tiles to use.
    pub(crate) tiles: Tiles,
    /// Packed panels.
    pub(crate) packed: &'a [u8],
    /// Number of panels.
    pub(crate) panels: usize,
    /// Chunks of each.
    pub(crate) chunks: usize,
    /// A, as [`write()`] writes it.
    pub(crate) a: &'a [u16],
    /// Rows.
    pub(crate) rows: usize,
    /// bf16 for each element of A.
    pub(crate) terms: usize,
    /// `[panels][rows][32]` sums.
    pub(crate) sums: &'a mut [f32],
}

impl Work for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let Self { panels, chunks, rows, terms, .. } = self;
        assert!(panels * chunks * CHUNK <= self.packed.len(), "weights");
        assert!(chunks.is_multiple_of(TILE_K / CHUNK_K), "whole steps of K");
        assert!(rows * chunks * CHUNK_K * terms <= self.a.len(), "activations");
        assert_eq!(panels * rows * TILE_COLS, self.sums.len(), "sums");
        // SAFETY: the machine has the instruction set, since `run` got its token, and `Isa::checked` found the tiles it names. The
        // slices were just checked.
        unsafe {
            match self.tiles {
                #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
                Tiles::Vectors => self.multiply::<<S as Pairs>::Floats, crate::amx::Vectors>(),
                #[cfg(target_arch = "x86_64")]
                Tiles::Hardware => self.multiply::<<S as Pairs>::Floats, crate::amx::Amx>(),
                #[cfg(test)]
                Tiles::Emulated => self.multiply::<<S as Pairs>::Floats, crate::amx::Emulated>(),
                Tiles::No => unreachable!("`Kernel::prepare` writes for tiles only where there are tiles"),
            }
        }
    }
}

/// Room for a block of weights.
#[repr(align(64))]
struct Widened(MaybeUninit<[u16; BLOCK_K * TILE_COLS]>);

impl Multiply<'_> {
    #[inline(always)]
    unsafe fn multiply<V: Vector, U: Unit>(self) {
        let Self { packed, panels, rows, terms, a, sums, .. } = self;
        let k = self.chunks * CHUNK_K;
        let mut widened = Widened(MaybeUninit::uninit());
        let weights = widened.0.as_mut_ptr().cast::<u16>();
        sums.fill(0.0);
        // SAFETY: `run` compared the slices with the numbers: blocks lie inside K, panels and rows inside theirs. Its caller has
        // the unit.
        unsafe {
            let mut unit = U::new();
            // All panels take one stretch of K before the next one, so that its activations stay in the second-level cache.
            let stretch = (CACHED / (rows * terms) / BLOCK_K).max(1) * BLOCK_K;
            for start in (0..k).step_by(stretch) {
                let end = k.min(start + stretch);
                for panel in 0..panels {
                    for first in (start..end).step_by(BLOCK_K) {
                        let len = BLOCK_K.min(end - first);
                        let chunk = packed.as_ptr().add((panel * self.chunks + first / CHUNK_K) * CHUNK);
                        for c in 0..len / CHUNK_K {
                            widen_chunk::<V>(chunk.add(c * CHUNK), c, weights);
                        }
                        let a = a.as_ptr().add(first * rows * terms);
                        let block = Block { a, rows, terms, weights, len };
                        let backwards = first / BLOCK_K % 2 == 1;
                        block.multiply(&mut unit, sums.as_mut_ptr().add(panel * rows * TILE_COLS), backwards);
                    }
                }
            }
        }
    }
}

/// A block of K, and all rows of a tile.
struct Block {
    a: *const u16,
    rows: usize,
    terms: usize,
    weights: *const u16,
    len: usize,
}

impl Block {
    /// Adds its products to `sums`, `[rows][32]`: two groups of rows at a time, and those that are not full alone. Those come last
    /// in one block and first in the next one, since it takes 0.1 µs to set the rows of a register.
    #[inline(always)]
    unsafe fn multiply(&self, unit: &mut impl Unit, sums: *mut f32, backwards: bool) {
        let Self { a, rows, terms, weights, len } = *self;
        let full = rows / TILE_ROWS * TILE_ROWS;
        let mut parts = [0..full, full..rows];
        if backwards {
            parts.reverse();
        }
        for Range { start, end } in parts {
            let mut row = start;
            while row < end {
                let (first, two) = (TILE_ROWS.min(end - row), end - row >= 2 * TILE_ROWS);
                unit.configure(first);
                for term in 0..terms {
                    // SAFETY: the rows from `row` on are inside the tile, and a term of a group has `len` elements for each row.
                    unsafe {
                        let a = a.add((row * terms + term * first) * len);
                        let second = two.then(|| a.add(TILE_ROWS * terms * len));
                        let sums = sums.add(row * TILE_COLS);
                        unit.pass(&Pass { a, second, b: weights, steps: len / TILE_K, sums });
                    }
                }
                row += first + if two { TILE_ROWS } else { 0 };
            }
        }
    }
}

/// Widens chunk `c` of a block.
#[inline(always)]
unsafe fn widen_chunk<V: Vector>(chunk: *const u8, c: usize, weights: *mut u16) {
    fetch(chunk.wrapping_add(BLOCK_K / CHUNK_K * CHUNK));
    for column in (0..TILE_COLS).step_by(V::LANES) {
        // Pairs of k of a step, behind those of the features before.
        let pairs = (c / 2 * 2 + column / PANEL) * TILE_ROWS + c % 2 * (CHUNK_K / 2);
        // SAFETY: `multiply` passes a whole chunk, and room for a block of weights: two bf16 for each feature and pair of k.
        unsafe { V::widen(chunk, column, weights.cast::<u32>().add(pairs * PANEL + column % PANEL)) };
    }
}

/// Multiplies two groups of rows with a block of weights again and again, all in the first-level cache, to show the most that tiles
/// can do: see [`limits`](crate::limits). Returns the number of products.
pub(crate) struct Spin(pub(crate) Tiles);

impl Work for Spin {
    type Output = usize;

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) -> usize {
        match self.0 {
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Tiles::Vectors => spin::<crate::amx::Vectors>(),
            #[cfg(target_arch = "x86_64")]
            Tiles::Hardware => spin::<crate::amx::Amx>(),
            #[cfg(test)]
            Tiles::Emulated => spin::<crate::amx::Emulated>(),
            Tiles::No => 0,
        }
    }
}

#[inline(always)]
fn spin<U: Unit>() -> usize {
    const TURNS: usize = 64;
    const ROWS: usize = 2 * TILE_ROWS;
    let (a, b) = ([1u16; ROWS * BLOCK_K], [1u16; TILE_COLS * BLOCK_K]);
    let (block, mut sums) = (
        Block { a: a.as_ptr(), rows: ROWS, terms: 1, weights: b.as_ptr(), len: BLOCK_K },
        [0.0; ROWS * TILE_COLS],
    );
    // SAFETY: a value of `Tiles` names what the machine has, and the arrays are as long as the block says.
    unsafe {
        let mut unit = U::new();
        for _ in 0..TURNS {
            block.multiply(&mut unit, sums.as_mut_ptr(), false);
        }
    }
    std::hint::black_box(sums);
    TURNS * ROWS * TILE_COLS * BLOCK_K
}
