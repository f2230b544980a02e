//! One row of digits with `vpmaddubsw`, in an order of instructions that LLVM does not find.
//!
//! The sums of a pair of vectors of features are joined, scaled and added, and each of these steps waits for the one before.
//! Meanwhile the next pair is decoded and multiplied. That needs all sixteen registers all the time, so each step has to free the
//! registers that the next one fills: the sums of a digit are read right before the first products of that digit replace them.
//! LLVM reorders the steps and spills.
//!
//! | registers | what |
//! |---|---|
//! | 0, 1 | nibble mask, table of codes |
//! | 2 to 7 | the sums of digits 0, 1 and 2 for both vectors: first of the pair before, then of this pair |
//! | 8, 9 and 10, 11 | weights of an even quad and of an odd one; in between, scales |
//! | 12, 13 | four activations, products |
//! | 14, 15 | joined sums of the pair before |

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

use dualgemm_formats::BlockFormat;

use super::digits::{DIGITS, DigitBlock, DigitTask, finish_pair};
use super::kernel::STREAMS;
use super::vector::{BIASED, Vector};
use crate::fetch::fetch;
use crate::isa::compiled_for;
use crate::pack::{CHUNK, CHUNK_K, PANEL, SCALES, UP_CODES};
use crate::tile::TILE_COLS;

/// How many bytes ahead of their use weights of each panel are fetched: further than in loops that do less per chunk.
const AHEAD: usize = 4 * CHUNK;

/// Constants that the steps read: the [`DIGITS`] for every feature, and the bits of the smallest scale of mxfp4.
#[repr(C, align(32))]
struct Constants {
    digits: [[i16; 16]; 3],
    least_scale: [i32; 8],
}

static CONSTANTS: Constants =
    Constants { digits: [[DIGITS[0]; 16], [DIGITS[1]; 16], [DIGITS[2]; 16]], least_scale: [1 << 22; 8] };

/// Sums of some panels, and a spare place for the zeros before the first pair. Aligned, or else every other vector would lie in
/// two cache lines.
#[repr(C, align(64))]
struct Totals([f32; (STREAMS + 1) * TILE_COLS]);

/// Registers of the sums of a digit.
#[rustfmt::skip]
macro_rules! sum {
    (0, 0) => { "ymm2" };
    (0, 1) => { "ymm3" };
    (1, 0) => { "ymm4" };
    (1, 1) => { "ymm5" };
    (2, 0) => { "ymm6" };
    (2, 1) => { "ymm7" };
}

/// Registers of the weights of an even or odd quad.
#[rustfmt::skip]
macro_rules! weights {
    (even, 0) => { "ymm8" };
    (even, 1) => { "ymm9" };
    (odd, 0) => { "ymm10" };
    (odd, 1) => { "ymm11" };
}

/// Decodes the weights of an even or an odd quad. `$line` is where in the chunk they are.
#[rustfmt::skip]
macro_rules! decode {
    ($weights:tt, $line:expr) => {
        concat!(decode!($weights, $line, 0), decode!($weights, $line, 1))
    };
    (even, $line:expr, $vector:tt) => {
        concat!(
            "vpand ", weights!(even, $vector), ", ymm0, [{codes} + ", $line, " + 32 * ", $vector, "]\n",
            "vpshufb ", weights!(even, $vector), ", ymm1, ", weights!(even, $vector), "\n",
        )
    };
    (odd, $line:expr, $vector:tt) => {
        concat!(
            "vpandn ", weights!(odd, $vector), ", ymm0, [{codes} + ", $line, " + 32 * ", $vector, "]\n",
            "vpsrlw ", weights!(odd, $vector), ", ", weights!(odd, $vector), ", 4\n",
            "vpshufb ", weights!(odd, $vector), ", ymm1, ", weights!(odd, $vector), "\n",
        )
    };
}

/// The first products of a digit, with the weights of quad 0.
#[rustfmt::skip]
macro_rules! start {
    ($digit:tt) => {
        concat!(
            "vpbroadcastd ymm12, [{block} + 16 * ", $digit, "]\n",
            "vpmaddubsw ", sum!($digit, 0), ", ymm8, ymm12\n",
            "vpmaddubsw ", sum!($digit, 1), ", ymm9, ymm12\n",
        )
    };
}

/// Adds the products of a digit with the weights of another quad.
#[rustfmt::skip]
macro_rules! add {
    ($digit:tt, $quad:literal, $weights:tt) => {
        concat!(
            "vpbroadcastd ymm12, [{block} + 16 * ", $digit, " + 4 * ", $quad, "]\n",
            "vpmaddubsw ymm13, ", weights!($weights, 0), ", ymm12\n",
            "vpmaddubsw ymm12, ", weights!($weights, 1), ", ymm12\n",
            "vpaddw ", sum!($digit, 0), ", ", sum!($digit, 0), ", ymm13\n",
            "vpaddw ", sum!($digit, 1), ", ", sum!($digit, 1), ", ymm12\n",
        )
    };
}

/// Joins the sums of a digit of the pair before. The highest digit starts from the word that subtracts the bias.
#[rustfmt::skip]
macro_rules! join {
    (highest $digit:tt) => {
        concat!("vpbroadcastd ymm15, [{before} + {bias}]\n", join!($digit, "ymm15"))
    };
    ($digit:tt) => {
        join!($digit, "ymm14")
    };
    ($digit:tt, $joined:literal) => {
        concat!(
            "vpmaddwd ", sum!($digit, 0), ", ", sum!($digit, 0), ", [{constants} + 32 * ", $digit, "]\n",
            "vpmaddwd ", sum!($digit, 1), ", ", sum!($digit, 1), ", [{constants} + 32 * ", $digit, "]\n",
            "vpaddd ymm14, ", $joined, ", ", sum!($digit, 0), "\n",
            "vpaddd ymm15, ymm15, ", sum!($digit, 1), "\n",
        )
    };
}

/// Scales one vector of joined sums and adds it, as [`add_scaled`](super::kernel::add_scaled) does. The scale of the block
/// stays in register 9 from the first vector to the second.
macro_rules! finish {
    ($format:ident, $half:ident, 0) => {
        concat!("vbroadcastss ymm9, [{before} + {scale}]\n", finish!($format, $half, 0, "ymm14"))
    };
    ($format:ident, $half:ident, 1) => {
        finish!($format, $half, 1, "ymm15")
    };
    (Nvfp4, $half:ident, $vector:literal, $joined:literal) => {
        concat!(
            "vpmovzxbd ymm8, [", before!(scales $half), " + 8 * ", $vector, "]\n",
            "vpslld ymm8, ymm8, 20\n",
            "vmulps ymm8, ymm8, ymm9\n",
            "vcvtdq2ps ", $joined, ", ", $joined, "\n",
            finish!(add $half, $vector, $joined),
        )
    };
    (Mxfp4, $half:ident, $vector:literal, $joined:literal) => {
        concat!(
            "vpmovzxbd ymm8, [", before!(scales $half), " + 8 * ", $vector, "]\n",
            "vpslld ymm8, ymm8, 23\n",
            "vpmaxsd ymm8, ymm8, [{constants} + 96]\n",
            "vcvtdq2ps ", $joined, ", ", $joined, "\n",
            "vmulps ", $joined, ", ", $joined, ", ymm9\n",
            finish!(add $half, $vector, $joined),
        )
    };
    (add $half:ident, $vector:literal, $joined:literal) => {
        concat!(
            "vfmadd213ps ymm8, ", $joined, ", [", before!(to $half), " + 32 * ", $vector, "]\n",
            "vmovups [", before!(to $half), " + 32 * ", $vector, "], ymm8\n",
        )
    };
}

/// Where the scales and sums of the pair before are: before gate's features of a panel come up's features of another panel.
#[rustfmt::skip]
macro_rules! before {
    (scales gate) => { "{scales}" };
    (scales up) => { "{codes} + {gate_scales}" };
    (to gate) => { "{to}" };
    (to up) => { "{sums}" };
}

/// Where a line of a half is in the chunk.
#[rustfmt::skip]
macro_rules! at {
    (gate, $line:literal) => { $line };
    (up, $line:literal) => { concat!("{up} + ", $line) };
}

/// Prefetches a line of the chunk [`AHEAD`] of this one. Both halves together fetch all lines of that chunk.
macro_rules! fetch {
    ($half:ident, $line:literal) => {
        concat!("prefetcht0 [{codes} + {ahead} + ", at!($half, $line), "]\n")
    };
}

/// The steps of a pair of two digits. Before the first products of digit 1, `$before` joins the sums of all digits but 0.
///
/// The order of steps, here and in `three!`, was found by trying: 19 cycles on Zen 3 for two digits, 24 for three.
/// Similar orders take up to 4 % more. LLVM's order, one pair after the other, takes 21.7 and 27.8. The limit of four ports is
/// 16.5 and 21.3.
#[rustfmt::skip]
macro_rules! two {
    ($format:ident, $half:ident, $before:expr) => {
        concat!(
            $before, decode!(odd, at!($half, 0)), decode!(even, at!($half, 0)),
            fetch!($half, 0), fetch!($half, 64),
            join!(0), start!(0), start!(1), finish!($format, $half, 0),
            add!(1, 1, odd), fetch!($half, 128), finish!($format, $half, 1),
            decode!(even, at!($half, 64)), add!(0, 1, odd), decode!(odd, at!($half, 64)),
            add!(1, 2, even), add!(1, 3, odd), add!(0, 2, even), add!(0, 3, odd),
        )
    };
}

/// The steps of a pair of three digits. `$before2` and `$before1` join the sums of digits 2 and 1 of the pair before.
#[rustfmt::skip]
macro_rules! three {
    ($format:ident, $half:ident, $before2:expr, $before1:expr) => {
        concat!(
            $before2, decode!(odd, at!($half, 0)), decode!(even, at!($half, 0)),
            fetch!($half, 0), fetch!($half, 64),
            $before1, join!(0), start!(0), start!(1), start!(2),
            add!(2, 1, odd), finish!($format, $half, 0), fetch!($half, 128),
            add!(1, 1, odd), finish!($format, $half, 1),
            decode!(even, at!($half, 64)), add!(0, 1, odd), decode!(odd, at!($half, 64)),
            add!(2, 2, even), add!(2, 3, odd), add!(1, 2, even), add!(1, 3, odd), add!(0, 2, even), add!(0, 3, odd),
        )
    };
}

/// All pairs of a block. The first one finishes the last pair of the block before, which may have another number of digits.
macro_rules! block {
    ($format:ident, 2 after 2) => { block!($format, two, [join!(highest 1)], [join!(highest 1)]) };
    ($format:ident, 2 after 3) => { block!($format, two, [concat!(join!(highest 2), join!(1))], [join!(highest 1)]) };
    ($format:ident, 3 after 2) => { block!($format, three, ["", join!(highest 1)], [join!(highest 2), join!(1)]) };
    ($format:ident, 3 after 3) => {
        block!($format, three, [join!(highest 2), join!(1)], [join!(highest 2), join!(1)])
    };
    ($format:ident, $digits:ident, [$($first:expr),*], $next:tt) => {
        concat!($digits!($format, gate, $($first),*), block!($format, $digits, $next))
    };
    ($format:ident, $digits:ident, [$($next:expr),*]) => {
        concat!(
            "mov {before}, {block}\n",
            "2:\n",
            $digits!($format, up, $($next),*),
            "lea {scales}, [{codes} + {up_scales}]\n",
            "lea {to}, [{sums} + 64]\n",
            "add {sums}, 128\n",
            "add {codes}, {stride}\n",
            "dec {count}\n",
            "jz 3f\n",
            $digits!($format, gate, $($next),*),
            "jmp 2b\n",
            "3:\n",
        )
    };
}

/// Fetches the first [`AHEAD`] bytes of each panel, since the steps fetch only what follows. Waiting for these lines one by one
/// would take 1 % of the time.
#[inline(always)]
fn fetch_first(task: &DigitTask, chunk: u32) {
    for p in 0..task.panels {
        let start = task.panel.wrapping_add(p * task.panel_stride + chunk as usize * CHUNK);
        for distance in (0..AHEAD).step_by(CHUNK) {
            fetch(start.wrapping_add(distance));
        }
    }
}

compiled_for!(Avx2, {
    /// [`Vector::multiply_blocks`].
    ///
    /// # Safety
    /// The machine has AVX2 and FMA. The pointers of the task are valid for its panels and sums, at most [`STREAMS`] panels, and
    /// each panel has the chunk of every block.
    pub(super) unsafe fn multiply_blocks<V>(task: &DigitTask, blocks: &[DigitBlock])
    where
        V: Vector<Sums = __m256i, Floats = __m256>,
    {
        const { assert!(CHUNK_K == 16 && V::LANES == 8 && TILE_COLS * 4 == 128 && PANEL * 4 == 64) };
        const { assert!(offset_of!(DigitBlock, digits) == 0) };
        let [first, ..] = blocks else {
            // SAFETY: the task has 32 sums for each panel.
            return unsafe { task.sums.write_bytes(0, task.panels * TILE_COLS) };
        };
        fetch_first(task, first.chunk);
        // SAFETY: reads the 16 bytes of the table.
        let table = unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(BIASED.as_ptr().cast())) };
        let mut totals = Totals([0.0; (STREAMS + 1) * TILE_COLS]);
        let totals = (&raw mut totals.0).cast::<f32>();
        // No pair is before the first one: zeros go to the spare sums.
        let mut sums = [[_mm256_setzero_si256(); 2]; 3];
        let (mut before, mut to) = (&raw const *first, totals.wrapping_add(STREAMS * TILE_COLS));
        let mut scales = task.panel.wrapping_add(SCALES);
        let mut digits_before = first.count;
        for block in blocks {
            macro_rules! run {
                ($steps:expr) => {
                    asm!(
                        $steps,
                        block = in(reg) block,
                        before = inout(reg) before,
                        codes = inout(reg) task.panel.add(block.chunk as usize * CHUNK) => _,
                        scales = inout(reg) scales,
                        sums = inout(reg) totals => _,
                        to = inout(reg) to,
                        stride = in(reg) task.panel_stride,
                        count = inout(reg) task.panels => _,
                        constants = in(reg) &raw const CONSTANTS,
                        bias = const offset_of!(DigitBlock, bias),
                        scale = const offset_of!(DigitBlock, scale),
                        up = const UP_CODES,
                        gate_scales = const SCALES,
                        up_scales = const SCALES + PANEL,
                        ahead = const AHEAD,
                        in("ymm0") _mm256_set1_epi8(15), in("ymm1") table,
                        inout("ymm2") sums[0][0], inout("ymm3") sums[0][1],
                        inout("ymm4") sums[1][0], inout("ymm5") sums[1][1],
                        inout("ymm6") sums[2][0], inout("ymm7") sums[2][1],
                        out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                        out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                        options(nostack),
                    )
                };
            }
            // SAFETY: the steps read the block and its chunk of each of the task's panels, and add to the sums of these panels in
            // `totals`, which has room for `STREAMS`. They also read the block before and 16 of its scales, and add to 16 of its
            // sums. Prefetching may touch any address.
            unsafe {
                match (task.format, block.count, digits_before) {
                    (BlockFormat::Nvfp4, 2, 2) => run!(block!(Nvfp4, 2 after 2)),
                    (BlockFormat::Nvfp4, 2, _) => run!(block!(Nvfp4, 2 after 3)),
                    (BlockFormat::Nvfp4, _, 2) => run!(block!(Nvfp4, 3 after 2)),
                    (BlockFormat::Nvfp4, _, _) => run!(block!(Nvfp4, 3 after 3)),
                    (BlockFormat::Mxfp4, 2, 2) => run!(block!(Mxfp4, 2 after 2)),
                    (BlockFormat::Mxfp4, 2, _) => run!(block!(Mxfp4, 2 after 3)),
                    (BlockFormat::Mxfp4, _, 2) => run!(block!(Mxfp4, 3 after 2)),
                    (BlockFormat::Mxfp4, _, _) => run!(block!(Mxfp4, 3 after 3)),
                }
            }
            digits_before = block.count;
        }
        // SAFETY: the asm left `before`, `scales` and `to` at the block, the 16 scales and the 16 sums of the last pair, which
        // holds up's features. `totals` and the task's sums have 32 for each panel.
        unsafe {
            let chunk = scales.sub(SCALES + PANEL);
            let mut last = [V::load(to), V::load(to.add(V::LANES))];
            finish_pair::<V>(task.format, chunk, PANEL, &*before, &sums[..digits_before as usize], &mut last);
            V::store(to, last[0]);
            V::store(to.add(V::LANES), last[1]);
            task.sums.copy_from_nonoverlapping(totals, task.panels * TILE_COLS);
        }
    }
});
