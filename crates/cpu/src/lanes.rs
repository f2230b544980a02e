//! Loops over arrays of 16 in a form that LLVM turns into vectors.
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
