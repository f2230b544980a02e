//! Linear layers whose weights stay floats: `C[m,n] = A[m,k] · W[n,k]ᵀ + bias`, W row-major as a checkpoint has it, read in place.
//!
//! Products of two 16-bit floats are exact in f32. There are three ways to add them:
//!
//! ```text
//! floats    a lane of f32 sums every k of its residue, fused; then lanes are added               any types, any rows
//! pairs     the same with VDPBF16PS, which adds two products: see `w4a16::dots`                  bf16 · bf16 on AMD's
//! tiles     as `w4a16::tiles`, with 32 features in the place of rows of A, and rows of A in the  bf16 · bf16 with AMX,
//!           place of features: so no weight is reordered; with VDPBF16PS see `dots`              VDPBF16PS or BFMMLA, many rows
//! ```
//!
//! Pairs and tiles take bf16 and sums below 2⁻¹²⁶ for 0. One row is bound by the memory. C may differ in its last bits between
//! instruction sets and between numbers of rows, but not between numbers of threads.

#[cfg(target_arch = "x86_64")]
mod dots;
mod products;
mod tiles;
mod vectors;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use bytemuck::Pod;
use dualgemm_formats::{FloatMatrix, Matrix};
use dualgemm_gemm::OutputMut;
use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
pub(crate) use products::Products;
pub(crate) use products::{Element, Fused, multiply};

use crate::aligned::Aligned;
use crate::amx::{TILE_K, TILE_ROWS, Tiles};
use crate::fetch::prefetch;
#[cfg(target_arch = "x86_64")]
use crate::isa::compiled_for;
use crate::isa::{Available, InstructionSet, Work};
use crate::output::Destination;
use crate::threads::{self, SharedSlice};
use crate::tile::{MAX_TILE_ROWS, TILE_COLS};
#[cfg(target_arch = "x86_64")]
use crate::w4a16::dots::Dots;
use crate::w4a16::widen;
use crate::{CpuOptions, Error, Isa, team, vmath};

/// Elements of K that are multiplied for all rows of a tile before the next ones: 256 KiB of f32.
const STRETCH: usize = 1024;

/// Elements between one row of K and the next, so that rows do not lie in the same sets of a cache.
const PAD: usize = TILE_K;

/// Elements of a row of A where it is written by rows.
const fn padded(k: usize) -> usize {
    k.next_multiple_of(TILE_K) + PAD
}

/// Words of a worker's room: sums of most rows, and weights of a panel.
const ROOM: usize = MAX_TILE_ROWS * TILE_COLS * TILE_PANELS + TILE_COLS * (STRETCH + PAD);

/// Most panels of 32 features of a tile of bf16, where weights are not copied.
const TILE_PANELS: usize = 4;

/// Rows of a tile where there are no tiles of AMX.
pub(crate) const VECTOR_ROWS: usize = 64;

const BLOCK_ROWS: usize = 2 * TILE_ROWS;

/// Fewest rows for which a block of tiles that is not full pays.
const fn min_tile_rows(tiles: Tiles) -> usize {
    match tiles {
        Tiles::Vectors if cfg!(target_arch = "x86_64") => MIN_BLOCK_ROWS,
        Tiles::Vectors => BLOCK_ROWS,
        _ => TILE_ROWS,
    }
}

/// The least of these. With VDPBF16PS, 13 rows take as long as 16, and no longer than three passes of few rows.
const MIN_BLOCK_ROWS: usize = 2 * FEW_PAIRS + 1;

/// Rows of A that are prepared and multiplied before the next ones.
const WAVE_ROWS: usize = 1024;

/// Most panels of 32 features that a thread takes at a time.
const MAX_PANELS: usize = 8;

/// Rows that are few: the sums of [`STREAMS`] features and so many rows fit the registers.
const FEW_ROWS: usize = 3;

/// The same of pairs, which AVX-512 alone has.
const FEW_PAIRS: usize = 6;

/// Features that few rows read at once.
const STREAMS: usize = 4;

/// Most elements of A of a tile: 512 KiB of bf16, which stay in the second-level cache for all features.
const CACHED: usize = 1 << 20;

/// Buffers for products of activations with up to so many rows, and of any weights with this K. Runs allocate nothing.
#[derive(Debug)]
pub struct FloatLinear {
    rows: usize,
    k: usize,
    isa: Available,
    threads: usize,
    words: Aligned<f32>,
    rooms: Vec<Mutex<Aligned<f32>>>,
}

impl FloatLinear {
    /// Allocates the buffers for up to `rows` rows of `k`.
    ///
    /// # Errors
    /// If a number is 0, this machine lacks the instruction set that `options` names, or the memory is not there.
    pub fn new(rows: usize, k: usize, options: CpuOptions) -> Result<Self, Error> {
        for (dim, size) in [("M", rows), ("K", k)] {
            if size == 0 {
                return Err(dualgemm_gemm::Error::ZeroDim { dim }.into());
            }
        }
        let isa = options.isa.map_or_else(Isa::detect, Isa::require)?;
        let threads = options.threads.unwrap_or_else(team::threads).max(1);
        let wave = rows.min(WAVE_ROWS);
        let wave = if wave < MIN_BLOCK_ROWS { wave } else { wave.next_multiple_of(BLOCK_ROWS) };
        let words = k.checked_add(2 * PAD).and_then(|_| padded(k).checked_mul(wave));
        let words = words.and_then(Aligned::try_zeroed).ok_or(Error::NoMemory { rows, k })?;
        let rooms = (0..threads).map(|_| Mutex::new(Aligned::zeroed(ROOM))).collect();
        Ok(Self { rows, k, isa: isa.checked()?, threads, words, rooms })
    }

    /// Computes C, `[rows of A, rows of W]`, in floats.
    ///
    /// # Errors
    /// If A, W, the bias or `c` do not belong together, or A has more rows than was planned for. Then C is unchanged.
    pub fn run(
        &mut self,
        a: &FloatMatrix<'_>,
        w: &FloatMatrix<'_>,
        bias: Option<&[f32]>,
        c: OutputMut<'_>,
    ) -> Result<(), Error> {
        let n = w.rows();
        for (what, matrix, most) in [("A", a, self.rows), ("W", w, usize::MAX)] {
            if matrix.cols() != self.k || matrix.rows() > most {
                let found = format!("[{}, {}]", matrix.rows(), matrix.cols());
                let rows = if what == "A" { format!("up to [{}", self.rows) } else { "[N".into() };
                let expected = format!("{rows}, {}]", self.k);
                return Err(Error::NotPlanned { what, found, expected });
            }
        }
        if let Some(bias) = bias.filter(|bias| bias.len() != n) {
            return Err(dualgemm_gemm::Error::BiasLen { tensor: "W".into(), found: bias.len(), n }.into());
        }
        let Some((format, _)) = c.floats() else {
            let (found, expected) = ("nvfp4".into(), "f32, f16 or bf16".into());
            return Err(Error::NotPlanned { what: "C", found, expected });
        };
        let (c, _) = Destination::new(format.into(), c, a.rows(), n, None)?;
        for first in (0..a.rows()).step_by(WAVE_ROWS) {
            self.wave(a, first..a.rows().min(first + WAVE_ROWS), w, bias, &c);
        }
        Ok(())
    }

    /// Computes some rows of C.
    fn wave(
        &mut self,
        a: &FloatMatrix<'_>,
        rows: Range<usize>,
        w: &FloatMatrix<'_>,
        bias: Option<&[f32]>,
        c: &Destination<'_>,
    ) {
        let (n, isa) = (w.rows(), self.isa);
        #[cfg(target_arch = "x86_64")]
        let of_block = if isa.tiles == Tiles::Vectors { dots::block_k(rows.len(), self.k) } else { self.k };
        #[cfg(not(target_arch = "x86_64"))]
        let of_block = self.k;
        let way = match (a, w) {
            (FloatMatrix::Bf16(a), FloatMatrix::Bf16(w))
                if isa.tiles != Tiles::No && rows.len() >= min_tile_rows(isa.tiles) =>
            {
                self.write_blocks(a, &rows, of_block);
                Way::Tiles(w)
            }
            #[cfg(target_arch = "x86_64")]
            (FloatMatrix::Bf16(a), FloatMatrix::Bf16(w)) if isa.tiles == Tiles::Vectors => {
                self.write_rows(&rows, |row, out: &mut [bf16]| out.copy_from_slice(a.row(row)));
                Way::Pairs(w)
            }
            _ => {
                self.write_rows(&rows, |row, out: &mut [f32]| match a {
                    FloatMatrix::F32(a) => out.copy_from_slice(a.row(row)),
                    _ => _ = widen(a, row, 0, out),
                });
                Way::Floats(w)
            }
        };
        let (k, stride, threads) = (self.k, padded(self.k), self.threads);
        let of_tile = match way {
            Way::Tiles(_) => (CACHED / k / BLOCK_ROWS * BLOCK_ROWS).clamp(BLOCK_ROWS, MAX_TILE_ROWS),
            _ => VECTOR_ROWS,
        };
        let few = way.are_few(rows.len());
        let most = match way {
            Way::Tiles(_) if isa.tiles == Tiles::Vectors && cfg!(target_arch = "x86_64") => TILE_PANELS,
            _ if few => MAX_PANELS,
            _ => 1,
        };
        let of_panel = TILE_COLS * (n / TILE_COLS / (8 * threads)).clamp(1, most);
        let (words, rooms, panels) = (&self.words[..], &self.rooms, n.div_ceil(of_panel));
        threads::for_each(
            threads,
            rows.len().div_ceil(of_tile) * panels,
            // Each worker has its own number, so the lock is free. What a panic left behind is overwritten.
            |worker| rooms[worker].lock().unwrap_or_else(PoisonError::into_inner),
            |room, item| {
                let (tile, first_col) = (item / panels * of_tile, item % panels * of_panel);
                let (count, cols) = (of_tile.min(rows.len() - tile), of_panel.min(n - first_col));
                let room = &mut room[..];
                let multiply = Multiply {
                    isa,
                    way,
                    few,
                    #[cfg(target_arch = "x86_64")]
                    of_wave: rows.len(),
                    words,
                    stride,
                    tile,
                    rows: count,
                    k,
                    bias,
                    first_col,
                    cols,
                    room,
                };
                isa.dispatch(Store { multiply, c, n, first_row: rows.start + tile });
            },
        );
    }

    /// Writes rows of A one by one, each padded with zeros.
    fn write_rows<T: Pod + Send>(&mut self, rows: &Range<usize>, write: impl Fn(usize, &mut [T]) + Sync) {
        let (k, threads) = (self.k, if rows.len() == 1 { 1 } else { self.threads });
        let words = &mut bytemuck::cast_slice_mut::<f32, T>(&mut self.words)[..rows.len() * padded(k)];
        threads::for_each_part(threads, words, padded(k), |row, out| {
            let (out, rest) = out.split_at_mut(k);
            write(rows.start + row, out);
            rest.fill(T::zeroed());
        });
    }

    /// Writes rows of A for tiles: `[block of K][block of 32 rows][step of 32 k][half of the rows][pair of k][row][2]`, zeros past K.
    /// `of_block` is the length of a block of K, whose rows lie together for the second-level cache.
    fn write_blocks(&mut self, a: &Matrix<'_, bf16>, rows: &Range<usize>, of_block: usize) {
        let (k, blocks) = (self.k, rows.len().div_ceil(BLOCK_ROWS));
        let words = SharedSlice::new(&mut self.words);
        threads::for_each(
            self.threads,
            blocks,
            |_| (),
            |(), block| {
                let first_row = rows.start + block * BLOCK_ROWS;
                for first in (0..k).step_by(of_block) {
                    let end = k.min(first + of_block);
                    let len = (end - first).next_multiple_of(TILE_K) * TILE_ROWS;
                    // SAFETY: `for_each` hands out each block of rows once, and their blocks of K are different parts.
                    let out = unsafe { words.part(first * blocks * TILE_ROWS + block * len, len) };
                    let out: &mut [u32] = bytemuck::cast_slice_mut(out);
                    for row in 0..BLOCK_ROWS.min(rows.end - first_row) {
                        let half = row / TILE_ROWS * TILE_ROWS * TILE_ROWS + row % TILE_ROWS;
                        for (step, values) in a.row(first_row + row)[first..end].chunks(TILE_K).enumerate() {
                            let mut padded = [bf16::ZERO; TILE_K];
                            padded[..values.len()].copy_from_slice(values);
                            let out = out[step * TILE_K * TILE_ROWS + half..].iter_mut().step_by(TILE_ROWS);
                            for (pair, out) in padded.as_chunks::<2>().0.iter().zip(out) {
                                *out = u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16;
                            }
                        }
                    }
                }
            },
        );
    }
}

/// How rows are multiplied, with the weights.
#[derive(Debug, Clone, Copy)]
enum Way<'a> {
    Floats(&'a FloatMatrix<'a>),
    #[cfg(target_arch = "x86_64")]
    Pairs(&'a Matrix<'a, bf16>),
    Tiles(&'a Matrix<'a, bf16>),
}

impl Way<'_> {
    fn are_few(self, rows: usize) -> bool {
        match self {
            Way::Floats(_) => rows <= FEW_ROWS,
            #[cfg(target_arch = "x86_64")]
            Way::Pairs(_) => true,
            Way::Tiles(_) => false,
        }
    }
}

/// Computes the sums of some rows and features, bias included.
struct Multiply<'a> {
    isa: Available,
    way: Way<'a>,
    few: bool,
    /// Rows of the wave.
    #[cfg(target_arch = "x86_64")]
    of_wave: usize,
    /// A of the wave, and the elements from row to row, where it is written by rows.
    words: &'a [f32],
    stride: usize,
    /// The first row of the wave that is multiplied.
    tile: usize,
    rows: usize,
    k: usize,
    bias: Option<&'a [f32]>,
    first_col: usize,
    /// Features: up to 32, of few rows more.
    cols: usize,
    /// The sums, `[row][32]` or, of few rows, `[row][cols]`, and behind them room for weights.
    room: &'a mut [f32],
}

/// Fetches as many elements as these are from behind them: the same feature's next ones.
#[inline(always)]
fn fetch_behind<T>(elements: &[T]) {
    let end = elements.as_ptr_range().end.cast::<u8>();
    for line in (0..size_of_val(elements)).step_by(64) {
        prefetch(end.wrapping_add(line));
    }
}

/// Multiplies, and writes rows of C.
struct Store<'a> {
    multiply: Multiply<'a>,
    c: &'a Destination<'a>,
    n: usize,
    first_row: usize,
}

impl Work for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(mut self, token: S) {
        let Multiply { rows, few, first_col, cols, .. } = self.multiply;
        let width = if few { cols } else { TILE_COLS };
        self.multiply.run(token);
        let room = std::mem::take(&mut self.multiply.room);
        let of_panel = if width < cols { rows.next_multiple_of(BLOCK_ROWS) } else { rows } * width;
        for first in (0..cols).step_by(width) {
            let panel = &mut room[first / width * of_panel..];
            let (at, cols) = (first_col + first, width.min(cols - first));
            for (row, values) in (self.first_row..).zip(panel.chunks_exact_mut(width).take(rows)) {
                match values.first_chunk_mut::<TILE_COLS>() {
                    // A length that the compiler knows.
                    Some(values) if cols == TILE_COLS => self.finish(row, at, values),
                    _ => self.finish(row, at, &mut values[..cols]),
                }
            }
        }
    }
}

impl Store<'_> {
    /// Writes the sums of features of a row, from one on.
    #[inline(always)]
    fn finish(&self, row: usize, first_col: usize, sums: &mut [f32]) {
        if let Some(bias) = self.multiply.bias {
            sums.iter_mut().zip(&bias[first_col..]).for_each(|(sum, bias)| *sum += bias);
        }
        for sum in &mut *sums {
            *sum = vmath::canonical(*sum);
        }
        // SAFETY: each element of C belongs to one item of work, which one thread takes.
        unsafe { self.c.write(row * self.n + first_col, sums) };
    }
}

impl Multiply<'_> {
    #[inline(always)]
    fn run<S: InstructionSet>(&mut self, _: S) {
        // SAFETY: the machine has the instruction set, since `run` got its token, and `Isa::checked` found the tiles it names.
        unsafe {
            match self.way {
                Way::Floats(FloatMatrix::F32(w)) => self.floats::<S, f32>(w),
                Way::Floats(FloatMatrix::F16(w)) => self.floats::<S, f16>(w),
                Way::Floats(FloatMatrix::Bf16(w)) => self.floats::<S, bf16>(w),
                #[cfg(target_arch = "x86_64")]
                Way::Pairs(w) => {
                    compiled_for!(Avx512Bf16, {
                        unsafe fn compiled(work: &mut Multiply<'_>, w: &Matrix<'_, bf16>) {
                            // SAFETY: `Isa::checked` found the instructions, where tiles are vectors.
                            unsafe { work.few_rows::<Dots, FEW_PAIRS>(w) };
                        }
                    });
                    compiled(self, w);
                }
                Way::Tiles(w) => match self.isa.tiles {
                    #[cfg(target_arch = "x86_64")]
                    Tiles::Hardware => self.tiles::<crate::amx::Amx>(w),
                    #[cfg(target_arch = "x86_64")]
                    Tiles::Vectors => self.dots(w),
                    #[cfg(target_arch = "aarch64")]
                    Tiles::Vectors => self.tiles::<crate::amx::Vectors>(w),
                    #[cfg(test)]
                    Tiles::Emulated => self.tiles::<crate::amx::Emulated>(w),
                    Tiles::No => unreachable!("`wave` takes tiles only where there are some"),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_gemm::{AOperand, Epilogue, Linear, Weight, bounded_reference};

    /// What tiles of AMX compute, where no other test has them: rows, features and K that fill no tile.
    #[test]
    fn emulated_tiles_are_within_the_bound_of_f64() {
        let (m, n, k) = (300, 35, 300);
        let matrix = |rows: usize, step: usize| {
            let of = |i: usize| bf16::from_f32((i * step % 251) as f32 / 100.0 - 1.2);
            FloatMatrix::Bf16(Matrix::new("m", rows, k, (0..rows * k).map(of).collect::<Vec<_>>()).unwrap())
        };
        let (a, w, bias) = (matrix(m, 7919), matrix(n, 104_729), vec![0.5; n]);
        let mut linear = FloatLinear::new(m, k, CpuOptions::default()).unwrap();
        linear.isa = Available::fused_portable().emulating_tiles();
        let mut c = vec![f32::NAN; m * n];
        linear.run(&a, &w, Some(&bias), OutputMut::F32(&mut c)).unwrap();
        let layer = Linear { weight: Weight::Floats("w".into(), w), bias: Some(bias.into()) };
        let want = bounded_reference(&Epilogue::default(), &AOperand::Float(a), 0..m, &layer);
        for (c, want) in c.into_iter().zip(want) {
            assert!((f64::from(c) - want.value).abs() <= want.error, "{c:e}, {want:?}");
        }
    }
}
