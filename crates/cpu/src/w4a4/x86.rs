//! What the x86-64 implementations of [`Vector`](super::vector::Vector) share: one macro that wraps intrinsics of a
//! width into the trait and compiles the kernel with the features they need.
//!
//! Reference: Intel Intrinsics Guide, <https://www.intel.com/content/www/us/en/docs/intrinsics-guide/>.

use super::vector::BIAS;

/// −12 · sum, one half of it in each of two i16 lanes. For kernels whose sums are i16.
pub(super) fn bias_halves(sum: i32) -> i32 {
    let half = (-i32::from(BIAS) / 2 * sum) as u16;
    i32::from(half) | i32::from(half) << 16
}

/// −12 · sum. For kernels whose sums are i32.
pub(super) fn bias_whole(sum: i32) -> i32 {
    -i32::from(BIAS) * sum
}

/// Implements `Vector` for `$name` and defines `$functions`, compiled with `$features`.
macro_rules! x86_vector {
    (
        $(#[$doc:meta])*
        $name:ident, $functions:ident, features: $features:literal, lanes: $lanes:literal, $integers:ty, $floats:ty;
        weights: $weights:path, scales: $scales:path, bias_word: $bias_word:path;
        broadcast: $broadcast:path, splat: $splat:path;
        mul: $mul:path, mul_add: $mul_add:path, load: $load:path, store: $store:path;
        dot: |$sums:ident, $w:ident, $a:ident| $dot:expr;
        order: $order:path;
        floats: |$dots:ident| $to_floats:expr;
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Vector for $name {
            const LANES: usize = $lanes;
            type Quads = $integers;
            type Quad = $integers;
            type Sums = $integers;
            type Floats = $floats;

            fn bias_word(sum: i32) -> i32 {
                $bias_word(sum)
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
            unsafe fn dot($sums: $integers, $w: $integers, $a: $integers) -> $integers {
                // SAFETY: the machine has the instructions.
                unsafe { $dot }
            }

            #[inline(always)]
            unsafe fn order(left: &mut $integers, right: &mut $integers) {
                // SAFETY: the machine has the instructions.
                unsafe { $order(left, right) }
            }

            #[inline(always)]
            unsafe fn floats($dots: $integers) -> $floats {
                // SAFETY: the machine has the instructions.
                unsafe { $to_floats }
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

            #[inline(always)]
            unsafe fn prefetch(address: *const u8) {
                // SAFETY: prefetching reads nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
            }
        }

        /// What is compiled with this instruction set.
        pub(super) const $functions: Functions = {
            #[target_feature(enable = $features)]
            unsafe fn multiply(task: &Task) {
                // SAFETY: the caller's promises.
                unsafe { kernel::multiply::<$name>(task) }
            }

            #[target_feature(enable = $features)]
            unsafe fn multiply_digits(task: &Task, starts: *const u32) {
                // SAFETY: the caller's promises.
                unsafe { kernel::multiply_digits::<$name>(task, starts) }
            }

            #[target_feature(enable = $features)]
            unsafe fn integer_dots() -> usize {
                // SAFETY: the caller's promise.
                unsafe { spin::integer_dots::<$name>() }
            }

            #[target_feature(enable = $features)]
            unsafe fn multiply_adds() -> usize {
                // SAFETY: the caller's promise.
                unsafe { spin::multiply_adds::<$name>() }
            }

            #[target_feature(enable = $features)]
            unsafe fn read(from: *const f32, lines: usize) -> usize {
                // SAFETY: the caller's promises.
                unsafe { spin::read::<$name>(from, lines) }
            }

            Functions {
                multiply,
                multiply_digits,
                integer_dots,
                multiply_adds,
                read,
                bias_word: $name::bias_word,
            }
        };
    };
}
pub(super) use x86_vector;
