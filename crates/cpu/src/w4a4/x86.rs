//! What the x86-64 implementations of [`Vector`](super::vector::Vector) share: one macro that wraps intrinsics of a
//! width into the trait.
//!
//! Reference: Intel Intrinsics Guide, <https://www.intel.com/content/www/us/en/docs/intrinsics-guide/>.

use std::arch::x86_64::*;

use dualgemm_formats::scalar::e2m1;

use super::vector::BIAS;
use crate::pack::CHUNK_K;

/// −12 · sum, split equally between two i16 lanes. For kernels whose sums are i16.
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
    // SAFETY: the instructions are part of AVX2; vectors and arrays have 16 bytes.
    unsafe {
        let table = _mm_loadu_si128(e2m1::DOUBLED.as_ptr().cast());
        let doubled = _mm_shuffle_epi8(table, _mm_loadu_si128(codes.as_ptr().cast()));
        // Sums of eight unsigned bytes each.
        let sums = _mm_sad_epu8(_mm_add_epi8(doubled, _mm_set1_epi8(BIAS)), _mm_setzero_si128());
        let sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi16::<4>(sums);
        (std::mem::transmute::<__m128i, [i8; CHUNK_K]>(doubled), sum - CHUNK_K as i32 * i32::from(BIAS))
    }
}

/// How vectors of a width read a chunk of a panel.
macro_rules! chunk_readers {
    (
        $integers:ident, $floats:ident;
        table: $table:ident, load: $load:ident, byte: $byte:ident, word: $word:ident;
        and: $and:ident, max: $max:ident, add: $add:ident, shuffle: $shuffle:ident;
        right: $right:ident, left: $left:ident, floats: $to_floats:ident;
        bytes: $extended:ident, $load_bytes:ident;
    ) => {
        /// As many features × four weights, from two lines of one half of a chunk.
        #[inline(always)]
        unsafe fn weights(chunk: *const u8, column: usize) -> [$integers; 4] {
            // SAFETY: reads from each of two lines of 64 bytes, 128 · half + 128 ≤ 256, the chunk's code bytes: all, or a half, since
            // `column` is a multiple of the features.
            unsafe {
                let table = $table(_mm_loadu_si128(BIASED.as_ptr().cast()));
                let nibble = $byte(15);
                let first = chunk.add(column / PANEL * UP_CODES + column % PANEL * 4);
                let (line0, line1) = ($load(first.cast()), $load(first.add(64).cast()));
                let (high0, high1) = ($right::<4>(line0), $right::<4>(line1));
                [
                    $shuffle(table, $and(line0, nibble)),
                    $shuffle(table, $and(high0, nibble)),
                    $shuffle(table, $and(line1, nibble)),
                    $shuffle(table, $and(high1, nibble)),
                ]
            }
        }

        /// The bits of scales as f32; scales of nvfp4 are multiplied by 2 to the power of -[`SCALE_EXPONENT`].
        #[inline(always)]
        unsafe fn scale_bits(chunk: *const u8, column: usize, format: BlockFormat) -> $integers {
            // SAFETY: reads a byte for each feature of the chunk's 32, since `column` is a multiple of the features.
            unsafe {
                let bytes = $extended($load_bytes(chunk.add(SCALES + column).cast()));
                match format {
                    BlockFormat::Nvfp4 => $left::<20>(bytes),
                    // Byte 0 is 2⁻¹²⁷, a subnormal.
                    BlockFormat::Mxfp4 => $max($left::<23>(bytes), $word(1 << 22)),
                }
            }
        }

        /// [`Vector::raw_scales`].
        ///
        /// # Safety
        /// The machine has the instruction set, and `chunk` points to a chunk of a panel.
        #[inline(always)]
        unsafe fn raw_scales(chunk: *const u8, column: usize, format: BlockFormat) -> $floats {
            // SAFETY: `scale_bits` reads the scales of a chunk, to which `chunk` points.
            unsafe { $to_floats(scale_bits(chunk, column, format)) }
        }

        /// [`Vector::scales`].
        ///
        /// # Safety
        /// The machine has the instruction set, and `chunk` points to a chunk of a panel.
        #[inline(always)]
        pub(crate) unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> $floats {
            // SAFETY: `scale_bits` reads the scales of a chunk, to which `chunk` points.
            unsafe {
                let bits = scale_bits(chunk, column, format);
                $to_floats(match format {
                    BlockFormat::Nvfp4 => $add(bits, $word((SCALE_EXPONENT as i32 - 1) << 23)),
                    BlockFormat::Mxfp4 => bits,
                })
            }
        }
    };
}
pub(super) use chunk_readers;

/// A function that returns two vectors unchanged, and makes the compiler compute both before anything that follows.
///
/// Otherwise LLVM finishes one vector's sums before the other's, or one row's before the next one's, and spills the operands of the
/// others meanwhile: sixteen registers are just enough. Empty `asm` blocks keep their order and so prevent that.
macro_rules! in_order {
    ($isa:ident, $integers:ident, $register:ident) => {
        compiled_for!($isa, {
            #[inline]
            pub(crate) fn in_order([mut left, mut right]: [$integers; 2]) -> [$integers; 2] {
                // SAFETY: the block holds a comment and no instruction.
                unsafe {
                    std::arch::asm!(
                        "/* {0} {1} */",
                        inout($register) left,
                        inout($register) right,
                        options(nomem, nostack, preserves_flags)
                    );
                }
                [left, right]
            }
        });
    };
}
pub(super) use in_order;

/// Implements `Vector` for the token `$isa`.
macro_rules! x86_vector {
    (
        $isa:ident, lanes: $lanes:literal, $(rows: $rows:literal,)? ahead: $ahead:ident, $integers:ty, $floats:ty;
        weights: $weights:path, scales: $scales:path, raw_scales: $raw_scales:path, bias_word: $bias_word:path;
        broadcast: $broadcast:path, splat: $splat:path;
        mul: $mul:path, mul_add: $mul_add:path, load: $load:path, store: $store:path;
        dots: |$sums:ident, $two:ident, $quad:ident| $add_dots:expr;
        floats: |$dots:ident| $to_floats:expr;
        scaled_floats: $scales_integers:literal, |$scaled:ident, $scale:ident| $to_scaled_floats:expr;
        join: |$joined:ident, $digits:ident, $digit:ident| $join:expr;
        whole_bias: $whole:literal, joined_floats: $joined_floats:path, multiply_blocks: $multiply_blocks:ident;
        $(first_rows: $first_rows:path;)?
    ) => {
        impl Vector for $isa {
            const LANES: usize = $lanes;
            const AHEAD: usize = $ahead;
            $(const ROWS: usize = $rows;)?
            const SCALES_INTEGERS: bool = $scales_integers;
            type Quads = $integers;
            type Quad = $integers;
            type Sums = $integers;
            type Joined = $integers;
            type Floats = $floats;

            fn bias_word(sum: i32) -> i32 {
                $bias_word(sum)
            }

            unsafe_methods! {
                fn doubled(codes: [u8; CHUNK_K]) -> ([i8; CHUNK_K], i32) { x86::doubled(codes) }
                fn weights(chunk: *const u8, column: usize) -> [$integers; 4] { $weights(chunk, column) }
                fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> $floats {
                    $scales(chunk, column, format)
                }
                fn raw_scales(chunk: *const u8, column: usize, format: BlockFormat) -> $floats {
                    $raw_scales(chunk, column, format)
                }
                fn quad(quad: *const i8) -> $integers { $broadcast(quad.cast::<i32>().read_unaligned()) }
                fn start(word: *const i32) -> $integers { $broadcast(*word) }
                fn dots($sums: [$integers; 2], $two: [$integers; 2], $quad: $integers) -> [$integers; 2] { $add_dots }
                fn floats($dots: $integers) -> $floats { $to_floats }
                fn scaled_floats($scaled: $integers, scale: *const i32) -> $floats {{
                    let $scale = $broadcast(*scale);
                    $to_scaled_floats
                }}
                fn joined(bias: *const i32) -> $integers { if $whole { $broadcast(*bias) } else { $broadcast(0) } }
                fn start_digit(bias: *const i32, digit: usize) -> $integers {
                    if $whole || digit > 0 { $broadcast(0) } else { $broadcast(*bias) }
                }
                fn join($joined: $integers, $digits: $integers, $digit: usize) -> $integers { $join }
                fn joined_floats(joined: $integers) -> $floats { $joined_floats(joined) }
                fn multiply_blocks(task: &DigitTask, blocks: &[DigitBlock]) {
                    $multiply_blocks::multiply_blocks::<$isa>(task, blocks)
                }
                $(fn first_rows(pass: &Pass<Self>, rows: usize, blocks: *const Block, sums: *mut f32) -> usize {
                    $first_rows(pass, rows, blocks, sums)
                })?
                fn splat(value: *const f32) -> $floats { $splat(*value) }
                fn mul(a: $floats, b: $floats) -> $floats { $mul(a, b) }
                fn mul_add(a: $floats, b: $floats, c: $floats) -> $floats { $mul_add(a, b, c) }
                fn load(from: *const f32) -> $floats { $load(from) }
                fn store(to: *mut f32, value: $floats) { $store(to, value) }
            }
        }
    };
}
pub(super) use x86_vector;
