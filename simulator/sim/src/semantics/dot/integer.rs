//! Integer and f64 products.

use super::Shape;

/// D = A·B + C of s8, u8, s4 or u4 elements, given as their values. Without `saturate` sums wrap; with it
/// (`.satfinite`) the final sum is clamped to i32. PTX ISA 9.7.14.5.14, 9.7.16.10.9.1.
///
/// # Panics
/// If a slice does not have the length its layout says.
pub fn multiply_i32(shape: Shape, a: &[f32], b: &[f32], c: &mut [i32], saturate: bool) {
    let Shape { m, n, k } = shape;
    assert!(a.len() == m * k && b.len() == n * k && c.len() == m * n, "operand lengths must match {shape:?}");
    let narrow = |x: &[f32]| x.iter().map(|&x| x as i16).collect::<Vec<_>>();
    let (a, b) = (narrow(a), narrow(b));
    for (row, c_row) in c.chunks_exact_mut(n).enumerate() {
        let a_row = &a[row * k..][..k];
        for (c, b_row) in c_row.iter_mut().zip(b.chunks_exact(k)) {
            // At most 256 products of at most 2^16.
            let dot: i32 = a_row.iter().zip(b_row).map(|(&x, &y)| x as i32 * y as i32).sum();
            *c = if saturate { c.saturating_add(dot) } else { c.wrapping_add(dot) };
        }
    }
}

/// D = A·B + C in f64: fused multiply-adds in order of K, each rounded to nearest (PTX ISA 9.7.14.5.14,
/// `.f64`; the order is the one found in hardware, arXiv 2511.10909).
///
/// # Panics
/// If a slice does not have the length its layout says.
pub fn multiply_f64(shape: Shape, a: &[f64], b: &[f64], c: &mut [f64]) {
    let Shape { m, n, k } = shape;
    assert!(a.len() == m * k && b.len() == n * k && c.len() == m * n, "operand lengths must match {shape:?}");
    for (row, c_row) in c.chunks_exact_mut(n).enumerate() {
        let a_row = &a[row * k..][..k];
        for (c, b_row) in c_row.iter_mut().zip(b.chunks_exact(k)) {
            *c = a_row.iter().zip(b_row).fold(*c, |sum, (&x, &y)| x.mul_add(y, sum));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_fuse_in_order_exact() {
        let shape = Shape { m: 1, n: 1, k: 2 };
        let mut c = [-1.0];
        let third = 1.0 / 3.0;
        multiply_f64(shape, &[third, third], &[3.0, 1.0], &mut c);
        assert_eq!(c[0], third.mul_add(1.0, third.mul_add(3.0, -1.0)));
        assert_ne!(c[0], third * 3.0 - 1.0 + third);
    }
}
