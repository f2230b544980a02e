//! What the x86-64 implementations of [`Vector`](super::vector::Vector) and [`Pairs`](super::pairs::Pairs) share:
//! intrinsics of a width wrapped into the traits, and the kernels compiled for an instruction set.
//!
//! Reference: Intel Intrinsics Guide, <https://www.intel.com/content/www/us/en/docs/intrinsics-guide/>.

/// The operations of `Vector` that are one instruction on `$vector`, and what is compiled for `$isa`.
macro_rules! operations {
    (
        $vector:ty, isa: $isa:ident;
        zero: $zero:path, splat: $splat:path, load: $load:path, store: $store:path;
        add: $add:path, mul: $mul:path, mul_add: $mul_add:path;
    ) => {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the machine has the instructions.
            unsafe { $zero() }
        }

        #[inline(always)]
        unsafe fn splat(value: *const f32) -> Self {
            // SAFETY: the caller passes a value.
            unsafe { $splat(*value) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller passes a vector of values.
            unsafe { $load(from) }
        }

        #[inline(always)]
        unsafe fn store(to: *mut f32, value: Self) {
            // SAFETY: the caller passes room for a vector of values.
            unsafe { $store(to, value) };
        }

        #[inline(always)]
        unsafe fn add(a: Self, b: Self) -> Self {
            // SAFETY: the machine has the instructions.
            unsafe { $add(a, b) }
        }

        #[inline(always)]
        unsafe fn mul(a: Self, b: Self) -> Self {
            // SAFETY: the machine has the instructions.
            unsafe { $mul(a, b) }
        }

        #[inline(always)]
        unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self {
            // SAFETY: the machine has the instructions.
            unsafe { $mul_add(a, b, c) }
        }

        #[inline(never)]
        unsafe fn pass(pass: &Pass) {
            compiled_for!($isa, {
                unsafe fn compiled(pass: &Pass) {
                    // SAFETY: the caller's promises.
                    unsafe { kernel::pass::<$vector>(pass) }
                }
            });
            // SAFETY: the caller's promises.
            unsafe { compiled(pass) }
        }
    };
}
pub(super) use operations;

/// Implements `Pairs` for `$name`, and defines `$functions`, compiled for `$isa`.
macro_rules! x86_pairs {
    (
        $(#[$doc:meta])*
        $name:ident, $functions:ident, isa: $isa:ident, $floats:ty, $integers:ty;
        weights: $weights:path, splat: $splat:path, scaled: $scaled:path, floats: $to_floats:path;
        dot: $dot:path, add_dots: |$sums:ident, $two:ident, $a:ident| $add_dots:expr;
    ) => {
        $(#[$doc])*
        pub(super) struct $name;

        impl Pairs for $name {
            type Floats = $floats;
            type Pairs = $integers;
            type Pair = $integers;
            type Sums = $integers;

            #[inline(always)]
            unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [$integers; 2] {
                // SAFETY: the caller's promises.
                unsafe { $weights(chunk, column, quad) }
            }

            #[inline(always)]
            unsafe fn splat(pair: *const [i16; 2]) -> $integers {
                // SAFETY: the caller passes a pair.
                unsafe { $splat(pair.cast::<i32>().read_unaligned()) }
            }

            #[inline(always)]
            unsafe fn dot(weights: $integers, a: $integers) -> $integers {
                // SAFETY: the machine has the instructions.
                unsafe { $dot(weights, a) }
            }

            #[inline(always)]
            unsafe fn add_dots($sums: [$integers; 2], $two: [$integers; 2], $a: $integers) -> [$integers; 2] {
                // SAFETY: the machine has the instructions.
                unsafe { $add_dots }
            }

            #[inline(always)]
            unsafe fn scaled(scales: $floats, unit: $floats) -> $floats {
                // SAFETY: the machine has the instructions.
                unsafe { $scaled(scales, unit) }
            }

            #[inline(always)]
            unsafe fn floats(sums: $integers) -> $floats {
                // SAFETY: the machine has the instructions.
                unsafe { $to_floats(sums) }
            }

            #[inline(never)]
            unsafe fn pass(pass: &pairs::Pass) {
                compiled_for!($isa, {
                    unsafe fn compiled(pass: &pairs::Pass) {
                        // SAFETY: the caller's promises.
                        unsafe { pairs::pass::<$name>(pass) }
                    }
                });
                // SAFETY: the caller's promises.
                unsafe { compiled(pass) }
            }
        }

        /// What is compiled with this instruction set.
        pub(super) const $functions: Functions = {
            compiled_for!($isa, {
                unsafe fn narrow(task: &Task) {
                    // SAFETY: the caller's promises.
                    unsafe { kernel::narrow::<$floats>(task) }
                }
            });

            compiled_for!($isa, {
                unsafe fn wide(task: &Task) {
                    // SAFETY: the caller's promises.
                    unsafe { kernel::wide::<$name>(task) }
                }
            });

            let (group_rows, pair_rows) = (<$floats as Vector>::ROWS, $name::ROWS);
            Functions { narrow, wide, group_rows, pair_rows }
        };
    };
}
pub(super) use x86_pairs;
