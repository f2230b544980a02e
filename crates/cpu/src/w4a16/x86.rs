//! What the x86-64 implementations of [`Vector`](super::vector::Vector) share: intrinsics of a width wrapped into the
//! trait, and the kernels compiled with the features they need.
//!
//! Reference: Intel Intrinsics Guide, <https://www.intel.com/content/www/us/en/docs/intrinsics-guide/>.

/// The operations of `Vector` that are one instruction on `$vector`, and what is compiled with `$features`.
macro_rules! operations {
    (
        $vector:ty, features: $features:literal;
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
            #[target_feature(enable = $features)]
            unsafe fn compiled(pass: &Pass) {
                // SAFETY: the caller's promises.
                unsafe { kernel::pass::<$vector>(pass) }
            }
            // SAFETY: the caller's promises.
            unsafe { compiled(pass) }
        }

        #[inline(always)]
        unsafe fn prefetch(address: *const u8) {
            // SAFETY: prefetching reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
        }
    };
}
pub(super) use operations;

/// The kernels of `$vector`, compiled with `$features`.
macro_rules! functions {
    ($vector:ty, features: $features:literal) => {{
        #[target_feature(enable = $features)]
        unsafe fn narrow(task: &Task) {
            // SAFETY: the caller's promises.
            unsafe { kernel::narrow::<$vector>(task) }
        }

        #[target_feature(enable = $features)]
        unsafe fn wide(task: &Task) {
            // SAFETY: the caller's promises.
            unsafe { kernel::wide::<$vector>(task) }
        }

        Functions { narrow, wide, group_rows: <$vector as Vector>::ROWS }
    }};
}
pub(super) use functions;
