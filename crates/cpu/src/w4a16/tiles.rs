//! Many rows with tiles of bf16: the units of AMX multiply 16 rows by 16 features by 32 k at once.
//!
//! ```text
//! a = a0 (+ a1 (+ a2))      bf16 each, cut off from above: one for bf16, two for f16, three for f32; exact
//! w = code · scale          bf16, exact: 2 bits times 4
//! sum += Σ_32 k a0[k]·w[k]  as TDPBF16PS adds: see [`amx`](crate::amx)
//! ```
//!
//! The order is: blocks of [`BLOCK_K`] of k ascending (of one term alone, even ones of a K up to [`WHOLE_K`], which is the same order);
//! in each block a0, then a1, then a2; for each of them k ascending, 32 at a time, from 0. So products are exact, and a sum of K products
//! takes at most K/32 + 17 roundings for each of the terms.
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

use dualgemm_formats::{BlockFormat, FloatMatrix};

use super::pairs::Pairs;
use super::vector::Vector;
use super::widen;
use crate::amx::{Pass, TILE_K, TILE_ROWS, Tiles, Unit};
use crate::fetch::fetch;
use crate::isa::{Available, InstructionSet, Work};
use crate::pack::{CHUNK, CHUNK_K, PANEL, PackedGateUp};
use crate::tile::{RowsOfA, TILE_COLS};

/// Elements of K of a panel that are widened at a time: 16 KiB, which leaves room for A in a first-level cache of 48 KiB that two
/// threads share.
pub(crate) const BLOCK_K: usize = 256;

/// Most K of which a panel's weights are widened at once, up to 96 KiB of them. Then sums of a part of the rows are complete, and go
/// on, while they are in the first-level cache.
pub(crate) const WHOLE_K: usize = 6 * BLOCK_K;

/// Rows of such a part: 16 KiB of sums.
const PART_ROWS: usize = 8 * TILE_ROWS;

/// Whether weights of this K are widened at once.
pub(super) fn is_whole(tiles: Tiles, terms: usize, k: usize) -> bool {
    tiles.are_real() && terms == 1 && k <= WHOLE_K
}

/// Elements of K of the blocks that A is written in: even ones of a whole K.
pub(super) fn block_k(whole: bool, k: usize) -> usize {
    if whole { k.div_ceil(k.div_ceil(BLOCK_K)).next_multiple_of(TILE_K) } else { BLOCK_K }
}

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

/// The exponent, as f32 and bf16 have it, of the smallest float that tiles multiply: the last bit of that float, times the last bit
/// of a weight of nvfp4, 2⁻¹⁰, is 2⁻¹²⁶.
const fn smallest_exponent(terms: usize) -> u16 {
    const BITS: [u16; 3] = [8, 11, 24];
    1 + 10 + BITS[terms - 1] - 1
}

/// Whether tiles multiply these floats: all are zero, or finite and not too small.
#[inline(always)]
fn fits(values: &[f32], terms: usize) -> bool {
    let smallest = f32::from_bits(u32::from(smallest_exponent(terms)) << 23);
    let fits = |x: f32| (x == 0.0) | ((x.abs() >= smallest) & (x.abs() <= f32::MAX));
    values.iter().fold(true, |all, &x| all & fits(x))
}

/// The same of the bits of a bf16.
#[inline(always)]
pub(super) fn fits_bf16(x: u16) -> bool {
    const SMALLEST: u16 = smallest_exponent(1) << 7;
    const INFINITY: u16 = 0x7F80;
    (x << 1 == 0) | ((x & 0x7FFF).wrapping_sub(SMALLEST) < INFINITY - SMALLEST)
}

/// Copies bf16. The result says whether they fit.
#[inline(always)]
fn copy(values: &[u16], mut out: Steps<'_>) -> bool {
    let mut misfits = [0; TILE_K];
    for (step, values) in values.as_chunks().0.iter().enumerate() {
        *out.step(step) = *values;
        for (misfit, x) in misfits.iter_mut().zip(values) {
            *misfit |= u16::from(!fits_bf16(*x));
        }
    }
    misfits == [0; TILE_K]
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
    /// Elements of K of a block.
    pub(super) block: usize,
    /// Rows of A.
    pub(super) rows: RowsOfA<'a>,
    /// First k, a multiple of `block`.
    pub(super) first: usize,
    /// Where they go.
    pub(super) out: &'a mut [u16],
}

impl Work for Write<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) -> bool {
        let Self { a, terms, block, rows, first, out } = self;
        let mut room = [0.0; BLOCK_K];
        write(rows.len(), terms, block, out, |row, block, out| {
            let (row, block) = (rows.row(row), first + block.start..first + block.end);
            if let FloatMatrix::Bf16(a) = a {
                return copy(bytemuck::cast_slice(&a.row(row)[block]), out);
            }
            let values = widen(a, row, block.start, &mut room[..block.len()]);
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
    block: usize,
    out: &mut [u16],
    mut row: impl FnMut(usize, Range<usize>, Steps<'_>) -> bool,
) -> bool {
    let mut first = 0;
    for out in out.chunks_mut(block * rows * terms) {
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

/// A of a tile, as [`write()`] writes it.
pub(crate) struct Bf16Tile<'a> {
    /// The instruction set, and its tiles.
    pub(crate) isa: Available,
    /// `rows · chunks · 16 · terms` bf16, and perhaps more behind them.
    pub(crate) a: &'a [u16],
    /// Rows.
    pub(crate) rows: usize,
    /// Chunks of each.
    pub(crate) chunks: usize,
    /// bf16 for each element.
    pub(crate) terms: usize,
    /// Whether weights of all K are widened at once.
    pub(crate) whole: bool,
}

impl Bf16Tile<'_> {
    /// Multiplies some of the rows, from a multiple of 16 on, with some panels of nvfp4. `done` gets the number of a panel among them, and
    /// the sums of some rows, which lie in `sums`: room for `[panels][rows][32]`.
    pub(crate) fn multiply(
        self,
        rows: Range<usize>,
        weights: &PackedGateUp,
        panels: Range<usize>,
        sums: &mut [f32],
        done: impl FnMut(usize, Range<usize>, &mut [f32]),
    ) {
        let found = (weights.chunks(), weights.format());
        assert_eq!(found, (self.chunks, BlockFormat::Nvfp4), "K and format that A was prepared for");
        let (isa, count) = (self.isa, panels.len());
        isa.dispatch(Multiply {
            a: self,
            rows,
            packed: weights.panel_range(panels),
            panels: count,
            sums,
            done,
        });
    }
}

struct Multiply<'a, D> {
    a: Bf16Tile<'a>,
    /// Rows to multiply.
    rows: Range<usize>,
    /// Packed panels, and their number.
    packed: &'a [u8],
    panels: usize,
    sums: &'a mut [f32],
    done: D,
}

impl<D: FnMut(usize, Range<usize>, &mut [f32])> Work for Multiply<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let Self { a: Bf16Tile { chunks, rows: of_tile, terms, whole, .. }, panels, ref rows, .. } = self;
        assert!(panels * chunks * CHUNK <= self.packed.len(), "weights");
        assert!(chunks.is_multiple_of(TILE_K / CHUNK_K), "whole steps of K");
        assert!(of_tile * chunks * CHUNK_K * terms <= self.a.a.len(), "activations");
        assert!(!whole || chunks * CHUNK_K <= WHOLE_K, "a whole K");
        assert!(rows.start.is_multiple_of(TILE_ROWS) && rows.end <= of_tile, "rows");
        assert!(panels * rows.len() * TILE_COLS <= self.sums.len(), "sums");
        // SAFETY: the machine has the instruction set, since `run` got its token, and `Isa::checked` found the tiles it names. The
        // slices were just checked.
        unsafe {
            match self.a.isa.tiles {
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

/// Room for widened weights.
#[repr(align(64))]
struct Widened(MaybeUninit<[u16; WHOLE_K * TILE_COLS]>);

impl<D: FnMut(usize, Range<usize>, &mut [f32])> Multiply<'_, D> {
    #[inline(always)]
    unsafe fn multiply<V: Vector, U: Unit>(self) {
        let Self {
            a: Bf16Tile { a, rows: of_tile, chunks, terms, whole, .. },
            packed,
            panels,
            rows,
            sums,
            mut done,
        } = self;
        let k = chunks * CHUNK_K;
        let mut widened = Widened(MaybeUninit::uninit());
        let weights = widened.0.as_mut_ptr().cast::<u16>();
        let most = block_k(whole, k);
        let (at_once, part, place) =
            if whole { (k, PART_ROWS, 0) } else { (most, rows.len(), rows.len() * TILE_COLS) };
        // SAFETY: `run` compared the slices with the numbers: blocks lie inside K, panels and rows inside theirs. Its caller has
        // the unit.
        unsafe {
            let mut unit = U::new();
            // All panels take one stretch of K before the next one, so that its activations stay in the second-level cache.
            let stretch = (CACHED / (rows.len() * terms) / at_once).max(1) * at_once;
            for start in (0..k).step_by(stretch) {
                let end = k.min(start + stretch);
                for panel in 0..panels {
                    for first in (start..end).step_by(at_once) {
                        let last = end.min(first + at_once);
                        let chunk =
                            |panel, k| packed.as_ptr().wrapping_add((panel * chunks + k / CHUNK_K) * CHUNK);
                        for c in 0..(last - first) / CHUNK_K {
                            widen_chunk::<V>(chunk(panel, first).add(c * CHUNK), c, weights);
                        }
                        let mut next = match (last < end, panel + 1 < panels) {
                            (true, _) => chunk(panel, last),
                            (false, true) => chunk(panel + 1, start),
                            (false, false) => chunk(0, end),
                        };
                        // All at once they would wait for each other, and the widening for them.
                        let fetched = ((last - first) / CHUNK_K).div_ceil(rows.len().div_ceil(TILE_ROWS));
                        for start in rows.clone().step_by(part) {
                            let part = start..rows.end.min(start + part);
                            let sums = &mut sums[panel * place..][..part.len() * TILE_COLS];
                            for block in (first..last).step_by(most) {
                                let a = a.as_ptr().add(block * of_tile * terms);
                                let weights = weights.add((block - first) * TILE_COLS);
                                let (len, add) = (most.min(last - block), block > 0);
                                let fetched = if block == first { fetched } else { 0 };
                                let block_of = Block { a, terms, weights, len, add, whole, next, fetched };
                                let backwards = block / most % 2 == 1;
                                block_of.multiply(&mut unit, part.clone(), sums.as_mut_ptr(), backwards);
                            }
                            next = next.wrapping_add(part.len().div_ceil(TILE_ROWS) * fetched * CHUNK);
                            if last == k {
                                done(panel, part, sums);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A block of K.
struct Block {
    /// Of all rows.
    a: *const u16,
    terms: usize,
    weights: *const u16,
    len: usize,
    /// Whether the products are added to the sums, and do not overwrite them.
    add: bool,
    /// Whether K is so short that A comes from the caches without being asked for.
    whole: bool,
    /// Packed weights that are widened next, and how many chunks of them are fetched for each group of rows.
    next: *const u8,
    fetched: usize,
}

impl Block {
    /// Multiplies some rows into `sums`, `[rows][32]`. The group that comes last in one block comes first in the next one, since its
    /// sums are in the first-level cache: 3 % on 16 threads of an Emerald Rapids.
    #[inline(always)]
    unsafe fn multiply(&self, unit: &mut impl Unit, rows: Range<usize>, sums: *mut f32, backwards: bool) {
        let Self { a, terms, weights, len, add, whole, next, fetched } = *self;
        let count = rows.len().div_ceil(TILE_ROWS);
        for group in 0..count {
            (group * fetched..(group + 1) * fetched).for_each(|c| fetch(next.wrapping_add(c * CHUNK)));
            let first = rows.start + TILE_ROWS * if backwards { count - 1 - group } else { group };
            let of_group = TILE_ROWS.min(rows.end - first);
            for term in 0..terms {
                // SAFETY: the rows from `first` on are inside the tile, and a term of a group has `len` elements for each row.
                unsafe {
                    let a = a.add((first * terms + term * of_group) * len);
                    let sums = sums.add((first - rows.start) * TILE_COLS);
                    let (steps, add) = (len / TILE_K, add || term > 0);
                    unit.pass(&Pass { a, rows: of_group, b: weights, steps, sums, add }, !whole);
                }
            }
        }
    }
}

/// Widens chunk `c` of a block.
#[inline(always)]
unsafe fn widen_chunk<V: Vector>(chunk: *const u8, c: usize, weights: *mut u16) {
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
    let (weights, next, mut sums) = (b.as_ptr(), b.as_ptr().cast(), [0.0; ROWS * TILE_COLS]);
    let (len, terms, whole, fetched) = (BLOCK_K, 1, false, 0);
    let block = Block { a: a.as_ptr(), terms, weights, len, add: true, whole, next, fetched };
    // SAFETY: a value of `Tiles` names what the machine has, and the arrays are as long as the block says.
    unsafe {
        let mut unit = U::new();
        for _ in 0..TURNS {
            block.multiply(&mut unit, 0..ROWS, sums.as_mut_ptr(), false);
        }
    }
    std::hint::black_box(sums);
    TURNS * ROWS * TILE_COLS * BLOCK_K
}
