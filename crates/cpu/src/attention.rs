//! Causal attention of many rows of bf16, where a processor multiplies bf16 by tiles or in vectors: a prompt's.
//!
//! ```text
//! once for all heads of queries that share them: keys and values in the order of weights of a `Pass`
//! for each head and 64 rows, 128 keys at a time up to the last row's own; for each 32 of the rows
//!     scores  = q·kᵀ                                                       passes of 16 rows and 32 keys
//!     weights = 2^(scale · log₂e · scores - largest so far)                within 2⁻¹⁸
//!     sums    = sums · 2^(largest before - largest) + bf16(weights) · v    passes of 16 rows and 32 features
//! result = sums · (1 / Σ weights)
//! ```
//!
//! Everything but the weights' rounding to bf16, which torch does, too, is f32. Weights below 2⁻¹²⁶ are 0; so are products and sums
//! that small, which tiles and `vdpbf16ps` take for 0: beside a largest weight of 1 they are nothing, and as scores they change no
//! weight. A score of NaN or +∞ makes its row's result NaN. Results do not depend on the number of threads.

use std::cell::RefCell;
use std::f32::consts::LOG2_E;

use bytemuck::AnyBitPattern;
use half::bf16;

use crate::amx::{Pass, TILE_K, TILE_ROWS, Tiles, Unit};
use crate::isa::{Available, InstructionSet, Work};
use crate::threads::{self, SharedSlice};
use crate::tile::TILE_COLS;
use crate::vmath::{bf16_bits, exp2};
use crate::w4a16::{Pairs, Vector};
use crate::{Aligned, Error, Isa, lanes};

/// Most features of a head.
const MAX_DIM: usize = 256;

/// Panels of 32 keys at a time.
const PANELS: usize = 4;

/// Keys at a time.
const KEYS: usize = PANELS * TILE_COLS;

/// Rows of a group: two tiles.
const GROUP_ROWS: usize = 2 * TILE_ROWS;

/// Groups of rows that share the keys while these are in the cache.
const GROUPS: usize = 2;

/// Rows that share them.
const ROWS: usize = GROUPS * GROUP_ROWS;

// Every row sees a key of each block of keys up to its group's own, and the last panel that a group sees has its own keys.
const _: () = assert!(KEYS.is_multiple_of(ROWS) && GROUP_ROWS == TILE_COLS && TILE_COLS == TILE_K);

/// `[row][key or feature]` of a group.
type Panel<T> = [T; GROUP_ROWS * TILE_COLS];

/// Sums of a tile of rows in it.
const TILE_SUMS: usize = TILE_ROWS * TILE_COLS;

/// Words of a tile of weights, `[pair of k][16 features]`, two bf16 each.
const WORDS: usize = TILE_ROWS * TILE_K / 2;

/// Tokens from one weight of a pair to the other. So two vectors of weights make one of pairs.
const PAIR: usize = TILE_K / 2;

/// Vectors of heads, somewhere in memory.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// From the first element to the last one.
    pub elements: &'a [bf16],
    /// Number of heads.
    pub heads: usize,
    /// Elements from head to head.
    pub head_stride: usize,
    /// Elements from row to row.
    pub row_stride: usize,
}

impl<'a> Heads<'a> {
    fn row(&self, head: usize, row: usize, dim: usize) -> &'a [bf16] {
        &self.elements[head * self.head_stride + row * self.row_stride..][..dim]
    }

    fn check(&self, what: &'static str, rows: usize, dim: usize) -> Result<(), Error> {
        let last = |count: usize, stride: usize| count.checked_sub(1)?.checked_mul(stride);
        let end = last(self.heads, self.head_stride).zip(last(rows, self.row_stride));
        let end = end.and_then(|(head, row)| head.checked_add(row)?.checked_add(dim));
        if end.is_some_and(|end| end <= self.elements.len()) {
            return Ok(());
        }
        let found = format!("{} heads in {} elements", self.heads, self.elements.len());
        Err(Error::NotPlanned {
            what,
            found,
            expected: format!("at least one of {rows} rows of {dim} elements"),
        })
    }
}

/// Whether this machine computes it for heads of so many features, as fast as others do: ARM's were not measured.
pub fn is_available(dim: usize) -> bool {
    cfg!(target_arch = "x86_64") && Isa::detect().is_ok_and(|isa| fits(isa.tiles(), dim))
}

fn fits(tiles: Tiles, dim: usize) -> bool {
    tiles != Tiles::No && dim.is_multiple_of(TILE_K) && (1..=MAX_DIM).contains(&dim)
}

/// Keys and values in the order in which they are multiplied. Kept from call to call, it is allocated once.
#[derive(Debug)]
pub struct Prepared(Aligned<u32>);

impl Default for Prepared {
    fn default() -> Self {
        Self(Aligned::zeroed(0))
    }
}

/// A prompt's queries, keys and values.
#[derive(Debug, Clone, Copy)]
pub struct Causal<'a> {
    /// Queries.
    pub q: Heads<'a>,
    /// Keys: as many heads as there are of values, each for as many of queries.
    pub k: Heads<'a>,
    /// Values.
    pub v: Heads<'a>,
    /// Tokens.
    pub rows: usize,
    /// Features of a head.
    pub dim: usize,
    /// The factor of products of queries and keys.
    pub scale: f32,
}

impl Causal<'_> {
    /// Writes what each token attends to, of itself and those before: `[rows, heads of queries, dim]`.
    ///
    /// # Errors
    /// If kernels do not multiply bf16, or not so many features, or the operands do not have these rows, or heads that share keys evenly.
    pub fn run(&self, out: &mut [bf16], threads: usize, prepared: &mut Prepared) -> Result<(), Error> {
        self.run_on(Isa::detect()?.checked()?, out, threads, prepared)
    }

    /// The same with an instruction set.
    pub(crate) fn run_on(
        &self,
        isa: Available,
        out: &mut [bf16],
        threads: usize,
        Prepared(prepared): &mut Prepared,
    ) -> Result<(), Error> {
        self.check(isa.tiles, out.len())?;
        let Self { q, k, rows, dim, .. } = *self;
        let (blocks, items) = (rows.div_ceil(KEYS), rows.div_ceil(ROWS));
        let of_head = blocks * KEYS * dim;
        if prepared.len() < k.heads * of_head {
            *prepared = Aligned::zeroed(k.heads * of_head);
        }
        threads::for_each_part(threads, &mut prepared[..k.heads * of_head], KEYS * dim, |item, to| {
            isa.dispatch(Prepare { causal: self, head: item / blocks, first: item % blocks * KEYS, to });
        });
        let (prepared, out) = (&prepared[..], &SharedSlice::new(out));
        threads::for_each(
            threads,
            q.heads * items,
            |_| (),
            |(), item| {
                // Those with most keys first.
                let (head, first) = (item % q.heads, (items - 1 - item / q.heads) * ROWS);
                let prepared = &prepared[head / (q.heads / k.heads) * of_head..][..of_head];
                ROOM.with_borrow_mut(|room| {
                    isa.dispatch(Attend { causal: self, tiles: isa.tiles, prepared, head, first, out, room });
                });
            },
        );
        Ok(())
    }

    fn check(&self, tiles: Tiles, out: usize) -> Result<(), Error> {
        let Self { q, k, v, rows, dim, .. } = *self;
        let fault = |what, found: String, expected: String| Err(Error::NotPlanned { what, found, expected });
        if !fits(tiles, dim) {
            let expected =
                "multiples of 32 up to 256, where kernels multiply bf16: avx512bf16, amxbf16, neonbf16";
            return fault("head_dim", dim.to_string(), expected.into());
        }
        for (what, heads) in [("q", q), ("k", k), ("v", v)] {
            heads.check(what, rows, dim)?;
        }
        if k.heads != v.heads || !q.heads.is_multiple_of(k.heads) {
            let found = format!("{}, {} and {}", q.heads, k.heads, v.heads);
            let expected = "as many keys as values, each for as many queries".into();
            return fault("the number of heads", found, expected);
        }
        if out != rows * q.heads * dim {
            let expected = format!("{rows} rows of {} heads of {dim}", q.heads);
            return fault("out", format!("{out} elements"), expected);
        }
        Ok(())
    }

    /// Elements of a token's row, from one on; behind the last token, those of the last.
    #[inline(always)]
    fn elements<T: AnyBitPattern>(&self, of: Heads<'_>, head: usize, token: usize, first: usize) -> T {
        let row = of.row(head, token.min(self.rows - 1), self.dim);
        bytemuck::pod_read_unaligned(bytemuck::cast_slice(
            &row[first..][..size_of::<T>() / size_of::<bf16>()],
        ))
    }
}

/// Puts keys and values of [`KEYS`] tokens in order, from `first` on.
struct Prepare<'a> {
    causal: &'a Causal<'a>,
    head: usize,
    first: usize,
    /// `[panel of keys][step of features]` of keys, and behind them `[panel of features][step of keys]` of values.
    to: &'a mut [u32],
}

impl Work for Prepare<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let Self { causal, head, first, to } = self;
        let steps = causal.dim / TILE_K;
        let (keys, values) = to.split_at_mut(KEYS * causal.dim / 2);
        for (i, tile) in keys.as_chunks_mut::<WORDS>().0.iter_mut().enumerate() {
            let (panel, step, half) = (i / (2 * steps), i / 2 % steps, i % 2);
            let mut by_key = [0; WORDS];
            for (key, pairs) in by_key.as_chunks_mut::<TILE_ROWS>().0.iter_mut().enumerate() {
                let token = first + panel * TILE_COLS + half * TILE_ROWS + key;
                *pairs = causal.elements(causal.k, head, token, step * TILE_K);
            }
            *tile = transposed(by_key);
        }
        for (i, tile) in values.as_chunks_mut::<WORDS>().0.iter_mut().enumerate() {
            let (panel, step, half) = (i / (2 * PANELS), i / 2 % PANELS, i % 2);
            for (pair, words) in tile.as_chunks_mut::<TILE_ROWS>().0.iter_mut().enumerate() {
                let (token, feature) = (first + step * TILE_K + pair, panel * TILE_COLS + half * TILE_ROWS);
                let left: [u16; TILE_ROWS] = causal.elements(causal.v, head, token, feature);
                let right: [u16; TILE_ROWS] = causal.elements(causal.v, head, token + PAIR, feature);
                for ((word, left), right) in words.iter_mut().zip(left).zip(right) {
                    *word = u32::from(left) | u32::from(right) << 16;
                }
            }
        }
    }
}

/// Rows of 16 as columns: a place's number has eight bits, and each turn moves the first one behind the last.
#[inline(always)]
fn transposed(mut words: [u32; WORDS]) -> [u32; WORDS] {
    for _ in 0..4 {
        let (left, right) = words.split_at(WORDS / 2);
        let mut turned = [0; WORDS];
        for ((to, left), right) in turned.as_chunks_mut::<2>().0.iter_mut().zip(left).zip(right) {
            *to = [*left, *right];
        }
        words = turned;
    }
    words
}

/// What a thread computes for a group of rows.
#[repr(align(64))]
struct Group {
    /// Of each tile of rows, `[step][row]`.
    q: [[[[u16; TILE_K]; TILE_ROWS]; MAX_DIM / TILE_K]; 2],
    scores: [Panel<f32>; PANELS],
    /// Of each tile of rows, `[panel][row]`, in [pairs](PAIR).
    weights: [[[[u32; PAIR]; TILE_ROWS]; PANELS]; 2],
    sums: [Panel<f32>; MAX_DIM / TILE_COLS],
    /// Of each row.
    largest: [f32; GROUP_ROWS],
    /// Of each row, by lanes.
    totals: [[f32; 16]; GROUP_ROWS],
}

impl Group {
    const EMPTY: Self = Self {
        q: [[[[0; _]; _]; _]; _],
        scores: [[0.0; _]; _],
        weights: [[[[0; _]; _]; _]; _],
        sums: [[0.0; _]; _],
        largest: [f32::NEG_INFINITY; _],
        totals: [[0.0; _]; _],
    };
}

thread_local! {
    static ROOM: RefCell<Box<[Group; GROUPS]>> = RefCell::new(Box::new([Group::EMPTY; _]));
}

/// Computes up to [`ROWS`] rows of a head, from `first` on.
struct Attend<'a> {
    causal: &'a Causal<'a>,
    tiles: Tiles,
    /// Keys and values of the head, block after block: see [`Prepare`].
    prepared: &'a [u32],
    head: usize,
    first: usize,
    out: &'a SharedSlice<'a, bf16>,
    room: &'a mut [Group; GROUPS],
}

impl Work for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        // SAFETY: the machine has the instruction set, since `run` got its token, and `Isa::checked` found the tiles it names.
        unsafe {
            match self.tiles {
                #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
                Tiles::Vectors => self.attend::<<S as Pairs>::Floats, crate::amx::Vectors>(),
                #[cfg(target_arch = "x86_64")]
                Tiles::Hardware => self.attend::<<S as Pairs>::Floats, crate::amx::Amx>(),
                #[cfg(test)]
                Tiles::Emulated => self.attend::<<S as Pairs>::Floats, crate::amx::Emulated>(),
                Tiles::No => unreachable!("`check` asks for tiles"),
            }
        }
    }
}

impl Attend<'_> {
    #[inline(always)]
    unsafe fn attend<V: Vector, U: Unit>(self) {
        let Self { causal, prepared, head, first, out, room, .. } = self;
        let Causal { q, rows, dim, scale, .. } = *causal;
        let groups = &mut room[..(rows - first).div_ceil(GROUP_ROWS).min(GROUPS)];
        for (first, group) in (first..).step_by(GROUP_ROWS).zip(&mut *groups) {
            group.largest = [f32::NEG_INFINITY; _];
            group.totals = [[0.0; _]; _];
            for (row, token) in (first..first + GROUP_ROWS).enumerate() {
                let from = q.row(head, token.min(rows - 1), dim).as_chunks::<TILE_K>().0;
                for (tile, from) in group.q[row / TILE_ROWS].iter_mut().zip(from) {
                    tile[row % TILE_ROWS].copy_from_slice(bytemuck::cast_slice(from));
                }
            }
        }
        // SAFETY: the caller's machine has the unit, and prepared keys and values have the block's panels.
        unsafe {
            let mut unit = U::new();
            for key in (0..rows.min(first + ROWS)).step_by(KEYS) {
                let (keys, values) = prepared[key * dim..][..KEYS * dim].split_at(KEYS * dim / 2);
                // Up to that of a group's own keys.
                let until = |group: usize| (first - key) / TILE_COLS + group + 1;
                let panels = |group: usize| until(group).min(PANELS);
                (0..panels(0)).for_each(|panel| groups[0].score(&mut unit, keys, panel, dim));
                for i in 0..groups.len() {
                    let [group, next @ ..] = &mut groups[i..] else { break };
                    let shrunk = if key > 0 { dim } else { 0 };
                    group.compare::<V>(panels(i), until(i) <= PANELS, scale * LOG2_E, shrunk);
                    for panel in 0..PANELS {
                        if panel < panels(i) {
                            group.weigh(panel, scale * LOG2_E);
                        }
                        // Vectors do not wait for tiles.
                        if let Some(next) = next.first_mut().filter(|_| panel < panels(i + 1)) {
                            next.score(&mut unit, keys, panel, dim);
                        }
                    }
                    group.add(&mut unit, values, panels(i), dim, key > 0);
                }
            }
        }
        for (first, group) in (first..rows).step_by(GROUP_ROWS).zip(groups) {
            let totals = group.totals.as_chunks::<16>().0.iter();
            let totals = totals.flat_map(|totals| across(totals, |x, y| x + y));
            for ((row, token), total) in (first..rows).enumerate().zip(totals) {
                let factor = 1.0 / total;
                // SAFETY: rows of a head belong to one item of work, which one thread takes.
                let out = unsafe { out.part((token * q.heads + head) * dim, dim) };
                let sums = group.sums.iter().flat_map(|sums| &sums.as_chunks::<16>().0[2 * row..2 * row + 2]);
                for (out, sums) in out.as_chunks_mut::<16>().0.iter_mut().zip(sums) {
                    *out = lanes::map(sums, |sum| bf16::from_bits(bf16_bits(sum * factor)));
                }
            }
        }
    }
}

/// Reduces each of 16 rows.
#[inline(always)]
fn across(rows: &[[f32; 16]; 16], f: impl Fn(f32, f32) -> f32) -> [f32; 16] {
    let columns: [[f32; 16]; 16] = bytemuck::cast(transposed(bytemuck::cast(*rows)));
    let mut reduced = columns[0];
    for column in &columns[1..] {
        reduced.iter_mut().zip(column).for_each(|(x, y)| *x = f(*x, *y));
    }
    reduced
}

impl Group {
    /// Multiplies with a panel of keys.
    ///
    /// # Safety
    /// The machine has the unit, and the keys have the panel.
    #[inline(always)]
    unsafe fn score<U: Unit>(&mut self, unit: &mut U, keys: &[u32], panel: usize, dim: usize) {
        let b = keys[panel * TILE_COLS * dim / 2..].as_ptr().cast();
        for (q, sums) in self.q.iter().zip(self.scores[panel].as_chunks_mut::<TILE_SUMS>().0) {
            let (a, rows, steps, sums) = (q.as_ptr().cast(), TILE_ROWS, dim / TILE_K, sums.as_mut_ptr());
            // SAFETY: the caller vouches for the unit and the keys, and queries have as many steps as features.
            unsafe { unit.pass(&Pass { a, rows, b, steps, sums, add: false }, false) };
        }
    }

    /// Multiplies weights of some panels of keys with these keys' values.
    ///
    /// # Safety
    /// The machine has the unit, and there are values of `dim` features.
    #[inline(always)]
    unsafe fn add<U: Unit>(&mut self, unit: &mut U, values: &[u32], panels: usize, dim: usize, add: bool) {
        let values = values.chunks_exact(KEYS * TILE_COLS / 2);
        for (sums, values) in self.sums[..dim / TILE_COLS].iter_mut().zip(values) {
            let b = values.as_ptr().cast();
            for (weights, sums) in self.weights.iter().zip(sums.as_chunks_mut::<TILE_SUMS>().0) {
                let (a, rows, steps, sums) = (weights.as_ptr().cast(), TILE_ROWS, panels, sums.as_mut_ptr());
                // SAFETY: the caller vouches for the unit, and weights and values have so many steps.
                unsafe { unit.pass(&Pass { a, rows, b, steps, sums, add }, false) };
            }
        }
    }

    /// Finds the largest scores of some panels of keys, and shrinks what was added up of `dim` features where they have grown. The last
    /// panel may have the rows' `own` keys.
    ///
    /// # Safety
    /// The machine has the instruction set.
    #[inline(always)]
    unsafe fn compare<V: Vector>(&mut self, panels: usize, own: bool, factor: f32, dim: usize) {
        let (scores, before) = (&mut self.scores[..panels], self.largest);
        for (half, largest) in self.largest.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let mut lanes = [[f32::NEG_INFINITY; 16]; 16];
            for (row, lanes) in (half * 16..).zip(&mut lanes) {
                if own {
                    scores[panels - 1][row * TILE_COLS..][row + 1..TILE_COLS].fill(f32::NEG_INFINITY);
                }
                // SAFETY: the caller's machine has the instruction set, and vectors have at most 16 lanes.
                unsafe {
                    let (mut most, factor) = (V::load(lanes.as_ptr()), V::splat(&raw const factor));
                    for scores in &*scores {
                        for scores in scores[row * TILE_COLS..][..TILE_COLS].chunks_exact(V::LANES) {
                            most = V::max(V::mul(V::load(scores.as_ptr()), factor), most);
                        }
                    }
                    V::store(lanes.as_mut_ptr(), most);
                }
            }
            let most = across(&lanes, |x, y| if x > y { x } else { y });
            for (largest, most) in largest.iter_mut().zip(most) {
                *largest = if most > *largest { most } else { *largest };
            }
        }
        let mut shrink = before;
        shrink.iter_mut().zip(self.largest).for_each(|(before, largest)| *before -= largest);
        if shrink.iter().fold(true, |none, &grown| none & (grown == 0.0)) {
            return;
        }
        shrink.iter_mut().for_each(|grown| *grown = exp2(*grown));
        for (row, shrink) in shrink.iter().enumerate() {
            let sums = self.sums[..dim / TILE_COLS].iter_mut();
            let sums = sums.map(|sums| &mut sums[row * TILE_COLS..][..TILE_COLS]);
            for at in sums.chain([&mut self.totals[row][..]]).flat_map(|part| part.chunks_exact_mut(V::LANES))
            {
                // SAFETY: the caller's machine has the instruction set, and these are as many values as a vector has.
                unsafe { V::store(at.as_mut_ptr(), V::mul(V::load(at.as_ptr()), V::splat(shrink))) };
            }
        }
    }

    /// Turns scores of a panel of keys into weights, and adds these to the totals.
    #[inline(always)]
    fn weigh(&mut self, panel: usize, factor: f32) {
        let scores = self.scores[panel].as_chunks::<TILE_COLS>().0;
        for row in 0..GROUP_ROWS {
            // Copies, so that compilers see that nothing overlaps.
            let (scores, mut pairs) = (scores[row], [0; PAIR]);
            let (largest, mut totals) = (self.largest[row], self.totals[row]);
            let weight = |score: f32| exp2(score.mul_add(factor, -largest));
            for (i, pair) in pairs.iter_mut().enumerate() {
                let (left, right) = (weight(scores[i]), weight(scores[i + PAIR]));
                totals[i] += left + right;
                // To nearest.
                let nearest = |weight: f32| weight.to_bits().wrapping_add(0x8000);
                *pair = nearest(left) >> 16 | nearest(right) & 0xFFFF_0000;
            }
            self.weights[row / TILE_ROWS][panel][row % TILE_ROWS] = pairs;
            self.totals[row] = totals;
        }
    }
}

#[cfg(test)]
mod tests;
