//! What the x86-64 implementations of [`Vector`](super::vector::Vector) and [`Pairs`](super::pairs::Pairs) share: macros that wrap
//! intrinsics of a width into the traits.
//!
//! Reference: Intel Intrinsics Guide, <https://www.intel.com/content/www/us/en/docs/intrinsics-guide/>.

/// The methods of `Vector` that are one instruction on `$vector`, and its `pass`, compiled for `$isa`.
macro_rules! operations {
    (
        $vector:ty, isa: $isa:ident;
        zero: $zero:path, splat: $splat:path, load: $load:path, store: $store:path;
        add: $add:path, max: $max:path, mul: $mul:path, mul_add: $mul_add:path;
    ) => {
        unsafe_methods! {
            fn zero() -> Self { $zero() }
            fn splat(value: *const f32) -> Self { $splat(*value) }
            fn load(from: *const f32) -> Self { $load(from) }
            fn store(to: *mut f32, value: Self) { $store(to, value) }
            fn add(a: Self, b: Self) -> Self { $add(a, b) }
            fn max(a: Self, b: Self) -> Self { $max(a, b) }
            fn mul(a: Self, b: Self) -> Self { $mul(a, b) }
            fn mul_add(a: Self, b: Self, c: Self) -> Self { $mul_add(a, b, c) }
        }

        separate_pass!($isa, many_rows, $vector);
    };
}
pub(super) use operations;

/// The method `pass`, which calls `$module::pass::<$type>` as a separate function, compiled for `$isa`.
macro_rules! separate_pass {
    ($isa:ident, $module:ident, $type:ty) => {
        #[inline(never)]
        unsafe fn pass(pass: &$module::Pass) {
            compiled_for!($isa, {
                unsafe fn compiled(pass: &$module::Pass) {
                    // SAFETY: this is called below alone, where the contract is that of `$module::pass`.
                    unsafe { $module::pass::<$type>(pass) }
                }
            });
            // SAFETY: the trait has the caller's machine have the instruction set, and the pointers of the pass be valid.
            unsafe { compiled(pass) }
        }
    };
}
pub(super) use separate_pass;

/// Implements `Pairs` for the token `$isa`.
macro_rules! x86_pairs {
    (
        $isa:ident, rows: $rows:literal, $floats:ty, $integers:ty;
        weights: $weights:path, splat: $splat:path, scaled: $scaled:path, floats: $to_floats:path;
        dot: $dot:path, add_dots: |$sums:ident, $two:ident, $a:ident| $add_dots:expr;
    ) => {
        impl Pairs for $isa {
            const ROWS: usize = $rows;
            type Floats = $floats;
            type Pairs = $integers;
            type Pair = $integers;
            type Sums = $integers;

            unsafe_methods! {
                fn weights(chunk: *const u8, column: usize, quad: usize) -> [$integers; 2] {
                    $weights(chunk, column, quad)
                }
                fn splat(pair: *const [i16; 2]) -> $integers { $splat(pair.cast::<i32>().read_unaligned()) }
                fn dot(weights: $integers, a: $integers) -> $integers { $dot(weights, a) }
                fn add_dots($sums: [$integers; 2], $two: [$integers; 2], $a: $integers) -> [$integers; 2] { $add_dots }
                fn scaled(scales: $floats, unit: $floats) -> $floats { $scaled(scales, unit) }
                fn floats(sums: $integers) -> $floats { $to_floats(sums) }
            }

            separate_pass!($isa, pairs, $isa);
        }
    };
}
pub(super) use x86_pairs;
