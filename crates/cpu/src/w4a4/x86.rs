//! What the x86-64 implementations of [`Vector`](super::vector::Vector) share: one macro that wraps intrinsics of a
//! width into the trait and compiles the kernel for the instruction set.
//!
//! Reference: Intel Intrinsics Guide, <https://www.intel.com/content/www/us/en/docs/intrinsics-guide/>.

use std::arch::x86_64::*;

use dualgemm_formats::scalar::e2m1;

use super::vector::BIAS;
use crate::pack::CHUNK_K;

/// −12 · sum, one half of it in each of two i16 lanes. For kernels whose sums are i16.
pub(super) fn bias_halves(sum: i32) -> i32 {
    let half = (-i32::from(BIAS) / 2 * sum) as u16;
    i32::from(half) | i32::from(half) << 16
}

/// −12 · sum. For kernels whose sums are i32.
pub(super) fn bias_whole(sum: i32) -> i32 {
    -i32::from(BIAS) * sum
}

/// [`Vector::doubled`](super::vector::Vector::doubled) by a byte shuffle.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
pub(super) unsafe fn doubled(codes: [u8; CHUNK_K]) -> ([i8; CHUNK_K], i32) {
    // SAFETY: the caller's promise; vectors and arrays have 16 bytes.
    unsafe {
        let table = _mm_loadu_si128(e2m1::DOUBLED.as_ptr().cast());
        let doubled = _mm_shuffle_epi8(table, _mm_loadu_si128(codes.as_ptr().cast()));
        // Sums of eight unsigned bytes each.
        let sums = _mm_sad_epu8(_mm_add_epi8(doubled, _mm_set1_epi8(BIAS)), _mm_setzero_si128());
        let sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi16::<4>(sums);
        (std::mem::transmute::<__m128i, [i8; CHUNK_K]>(doubled), sum - CHUNK_K as i32 * i32::from(BIAS))
    }
}

/// Implements `Vector` for `$name` and defines `$functions`, compiled for `$isa`.
macro_rules! x86_vector {
    (
        $(#[$doc:meta])*
        $name:ident, $functions:ident, isa: $isa:ident, lanes: $lanes:literal, ahead: $ahead:ident, $integers:ty, $floats:ty;
        weights: $weights:path, scales: $scales:path, raw_scales: $raw_scales:path, bias_word: $bias_word:path;
        broadcast: $broadcast:path, splat: $splat:path;
        mul: $mul:path, mul_add: $mul_add:path, load: $load:path, store: $store:path;
        dots: |$sums:ident, $two:ident, $quad:ident| $add_dots:expr;
        floats: |$dots:ident| $to_floats:expr;
        scaled_floats: $scales_integers:literal, |$scaled:ident, $scale:ident| $to_scaled_floats:expr;
        join: |$joined:ident, $digits:ident, $digit:ident| $join:expr;
        whole_bias: $whole:literal, joined_floats: $joined_floats:path, multiply_blocks: $multiply_blocks:ident;
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Vector for $name {
            const LANES: usize = $lanes;
            const AHEAD: usize = $ahead;
            type Quads = $integers;
            type Quad = $integers;
            type Sums = $integers;
            type Floats = $floats;

            fn bias_word(sum: i32) -> i32 {
                $bias_word(sum)
            }

            #[inline(always)]
            unsafe fn doubled(codes: [u8; CHUNK_K]) -> ([i8; CHUNK_K], i32) {
                // SAFETY: the machine has the instructions.
                unsafe { x86::doubled(codes) }
            }

            #[inline(always)]
            unsafe fn weights(chunk: *const u8, column: usize) -> [$integers; 4] {
                // SAFETY: the caller's promises.
                unsafe { $weights(chunk, column) }
            }

            #[inline(always)]
            unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> $floats {
                // SAFETY: the caller's promises.
                unsafe { $scales(chunk, column, format) }
            }

            #[inline(always)]
            unsafe fn raw_scales(chunk: *const u8, column: usize, format: BlockFormat) -> $floats {
                // SAFETY: the caller's promises.
                unsafe { $raw_scales(chunk, column, format) }
            }

            #[inline(always)]
            unsafe fn quad(quad: *const i8) -> $integers {
                // SAFETY: the caller passes four bytes.
                unsafe { $broadcast(quad.cast::<i32>().read_unaligned()) }
            }

            #[inline(always)]
            unsafe fn start(word: *const i32) -> $integers {
                // SAFETY: the caller passes a word.
                unsafe { $broadcast(*word) }
            }

            #[inline(always)]
            unsafe fn dots(
                $sums: [$integers; 2],
                $two: [$integers; 2],
                $quad: $integers,
            ) -> [$integers; 2] {
                // SAFETY: the machine has the instructions.
                unsafe { $add_dots }
            }

            #[inline(always)]
            unsafe fn floats($dots: $integers) -> $floats {
                // SAFETY: the machine has the instructions.
                unsafe { $to_floats }
            }

            const SCALES_INTEGERS: bool = $scales_integers;

            #[inline(always)]
            unsafe fn scaled_floats($scaled: $integers, scale: *const i32) -> $floats {
                // SAFETY: the machine has the instructions, and the caller passes a word.
                unsafe {
                    let $scale = $broadcast(*scale);
                    $to_scaled_floats
                }
            }

            type Joined = $integers;

            #[inline(always)]
            unsafe fn joined(bias: *const i32) -> $integers {
                // SAFETY: the caller passes a number.
                unsafe { if $whole { $broadcast(*bias) } else { $broadcast(0) } }
            }

            #[inline(always)]
            unsafe fn start_digit(bias: *const i32, digit: usize) -> $integers {
                // SAFETY: the caller passes a number.
                unsafe { if $whole || digit > 0 { $broadcast(0) } else { $broadcast(*bias) } }
            }

            #[inline(always)]
            unsafe fn join($joined: $integers, $digits: $integers, $digit: usize) -> $integers {
                // SAFETY: the machine has the instructions.
                unsafe { $join }
            }

            #[inline(always)]
            unsafe fn joined_floats(joined: $integers) -> $floats {
                // SAFETY: the machine has the instructions.
                unsafe { $joined_floats(joined) }
            }

            #[inline(always)]
            unsafe fn multiply_blocks(task: &DigitTask, blocks: &[DigitBlock]) {
                // SAFETY: the caller's promises.
                unsafe { $multiply_blocks::multiply_blocks::<$name>(task, blocks) }
            }

            #[inline(always)]
            unsafe fn splat(value: *const f32) -> $floats {
                // SAFETY: the caller passes a value.
                unsafe { $splat(*value) }
            }

            #[inline(always)]
            unsafe fn mul(a: $floats, b: $floats) -> $floats {
                // SAFETY: the machine has the instructions.
                unsafe { $mul(a, b) }
            }

            #[inline(always)]
            unsafe fn mul_add(a: $floats, b: $floats, c: $floats) -> $floats {
                // SAFETY: the machine has the instructions.
                unsafe { $mul_add(a, b, c) }
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> $floats {
                // SAFETY: the caller passes a vector of values.
                unsafe { $load(from) }
            }

            #[inline(always)]
            unsafe fn store(to: *mut f32, value: $floats) {
                // SAFETY: the caller passes room for a vector of values.
                unsafe { $store(to, value) };
            }
        }

        /// What is compiled with this instruction set.
        pub(super) const $functions: Functions = {
            compiled_for!($isa, {
                unsafe fn prepare(a: &Source<'_>, tile: &RowTile, chunks: Range<usize>, out: &mut [Block]) {
                    // SAFETY: the caller's promise.
                    unsafe { a.prepare::<$name>(tile, chunks, out) };
                }
            });

            compiled_for!($isa, {
                unsafe fn multiply(task: &Task) {
                    // SAFETY: the caller's promises.
                    unsafe { kernel::multiply::<$name>(task) }
                }
            });

            compiled_for!($isa, {
                unsafe fn multiply_digits(task: &DigitTask, blocks: &[DigitBlock]) {
                    // SAFETY: the caller's promises.
                    unsafe { digits::multiply::<$name>(task, blocks) }
                }
            });

            compiled_for!($isa, {
                unsafe fn integer_dots() -> usize {
                    // SAFETY: the caller's promise.
                    unsafe { spin::integer_dots::<$name>() }
                }
            });

            compiled_for!($isa, {
                unsafe fn multiply_adds() -> usize {
                    // SAFETY: the caller's promise.
                    unsafe { spin::multiply_adds::<$name>() }
                }
            });

            compiled_for!($isa, {
                unsafe fn read(from: *const f32, lines: usize) -> usize {
                    // SAFETY: the caller's promises.
                    unsafe { spin::read::<$name>(from, lines) }
                }
            });

            Functions {
                prepare,
                multiply,
                multiply_digits,
                integer_dots,
                multiply_adds,
                read,
            }
        };
    };
}
pub(super) use x86_vector;
