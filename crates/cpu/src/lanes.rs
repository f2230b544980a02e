//! Arrays of 16 as LLVM turns them into vectors.
//!
//! It takes arrays apart that `array::map` went through, which is not always inlined, and reductions in order.

/// `f` of each value.
#[inline(always)]
pub(crate) fn map<T: Copy, U: Copy>(values: &[T; 16], f: impl Fn(T) -> U) -> [U; 16] {
    let mut out = [f(values[0]); 16];
    for (out, &value) in out.iter_mut().zip(values) {
        *out = f(value);
    }
    out
}

/// The values joined by `f`, which is associative and commutative.
#[inline(always)]
pub(crate) fn reduce<T: Copy>(values: &[T; 16], f: impl Fn(T, T) -> T) -> T {
    let (left, right) = values.split_at(8);
    let mut eight = [values[0]; 8];
    for ((joined, &x), &y) in eight.iter_mut().zip(left).zip(right) {
        *joined = f(x, y);
    }
    eight[1..].iter().fold(eight[0], |x, &y| f(x, y))
}
