//! Loops over small arrays in a form that LLVM turns into vectors.
//!
//! LLVM splits arrays into scalars where `array::map` is not inlined, which happens, and where a reduction runs in order.

/// Applies `f` to each value.
#[inline(always)]
pub(crate) fn map<T: Copy, U: Copy>(values: &[T; 16], f: impl Fn(T) -> U) -> [U; 16] {
    let mut out = [f(values[0]); 16];
    for (out, &value) in out.iter_mut().zip(values) {
        *out = f(value);
    }
    out
}

/// Applies `f` to each pair of values.
#[inline(always)]
pub(crate) fn zip<T: Copy, U: Copy, V: Copy, const N: usize>(
    left: &[T; N],
    right: &[U; N],
    f: impl Fn(T, U) -> V,
) -> [V; N] {
    let mut out = [f(left[0], right[0]); N];
    for ((out, &left), &right) in out.iter_mut().zip(left).zip(right) {
        *out = f(left, right);
    }
    out
}

/// Reduces the values with `f`, which is associative and commutative.
#[inline(always)]
pub(crate) fn reduce<T: Copy>(values: &[T; 16], f: impl Fn(T, T) -> T) -> T {
    let (left, right) = values.split_at(8);
    let mut eight = [values[0]; 8];
    for ((joined, &x), &y) in eight.iter_mut().zip(left).zip(right) {
        *joined = f(x, y);
    }
    eight[1..].iter().fold(eight[0], |x, &y| f(x, y))
}
