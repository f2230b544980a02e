//! Products of block-scaled matrices.

use super::fused::one;
use super::{Model, Shape, exponent, finish, not_finite, power};

/// Products that add exactly before scaling (rule 6), whatever the scale's block.
const GROUP: usize = 16;
/// Places kept below the largest exponent.
const FRACTION_BITS: i32 = 35;

/// Block scales, decoded: `a[row * blocks + block]`, `b[col * blocks + block]`.
#[derive(Debug, Clone, Copy)]
pub struct BlockScales<'s> {
    /// Scales of A.
    pub a: &'s [f32],
    /// Scales of B.
    pub b: &'s [f32],
    /// Scales per row: `k` over the block size.
    pub blocks: usize,
    /// The smallest exponent of the scale type: -6 for ue4m3, -127 for ue8m0.
    pub min_exponent: i32,
}

/// D = (A ∘ scales)·(B ∘ scales) + C in `c`, f32. With a single scale per row (`kind::mxf8f6f4`) products sum
/// as `model` says, in one group; with several (`kind::mxf4`, `mxf4nvf4`, e2m1 elements) by rule 6 of the
/// [module](super) text.
///
/// # Panics
/// If a slice does not have the length its layout says, or blocks are not a multiple of 16 elements.
pub fn multiply_scaled(
    model: &Model,
    shape: Shape,
    a: &[f32],
    b: &[f32],
    scales: BlockScales<'_>,
    c: &mut [f32],
) {
    let Shape { m, n, k } = shape;
    let blocks = scales.blocks;
    assert!(a.len() == m * k && b.len() == n * k && c.len() == m * n, "operand lengths must match {shape:?}");
    assert!(scales.a.len() == m * blocks && scales.b.len() == n * blocks, "scales must match {shape:?}");
    if blocks == 1 {
        return multiply_one_scale(model, shape, a, b, scales, c);
    }
    assert!((k / blocks).is_multiple_of(GROUP), "a block is a multiple of {GROUP} elements");
    // Codes doubled are integers up to 12.
    let doubled = |x: &[f32]| x.iter().map(|&x| (2.0 * x) as i16).collect::<Vec<_>>();
    let (a, b) = (doubled(a), doubled(b));
    let exponents = |s: &[f32]| s.iter().map(|&s| exponent(s, scales.min_exponent)).collect::<Vec<_>>();
    let (ea, eb) = (exponents(scales.a), exponents(scales.b));
    let groups = k / GROUP;
    let per_block = groups / blocks;
    for row in 0..m {
        let a_row = &a[row * k..][..k];
        for col in 0..n {
            let b_row = &b[col * k..][..k];
            let c = &mut c[row * n + col];
            let (sa, sb) = (&scales.a[row * blocks..][..blocks], &scales.b[col * blocks..][..blocks]);
            let (ea, eb) = (&ea[row * blocks..][..blocks], &eb[col * blocks..][..blocks]);
            if !c.is_finite() || sa.iter().chain(sb).any(|s| s.is_nan()) {
                // Codes and scales have no infinity: the sum is C's, or NaN.
                let nan_or_zero: f64 = sa.iter().chain(sb).map(|&s| s as f64 * 0.0).sum();
                *c = not_finite(nan_or_zero + *c as f64);
                continue;
            }
            let mut top = exponent(*c, -126);
            for block in 0..blocks {
                if sa[block] != 0.0 && sb[block] != 0.0 {
                    top = top.max(ea[block] + eb[block]);
                }
            }
            let scale = power(FRACTION_BITS - top);
            let mut sum = (*c as f64 * scale) as i64;
            for group in 0..groups {
                let at = group * GROUP;
                let dot = dot16(&a_row[at..], &b_row[at..]);
                let block = group / per_block;
                // 12 bits times two significands of 4: exact. The quarter undoes the doubling.
                let term = dot as f64 * 0.25 * (sa[block] as f64 * sb[block] as f64);
                sum += (term * scale) as i64;
            }
            *c = finish(sum as f64 * power(top - FRACTION_BITS), super::Sum::F32);
        }
    }
}

/// The exact sum of sixteen products of doubled codes.
#[inline]
fn dot16(a: &[i16], b: &[i16]) -> i32 {
    a[..GROUP].iter().zip(&b[..GROUP]).map(|(&x, &y)| x as i32 * y as i32).sum()
}

/// One power-of-two scale per row (`scale_vec::1X`): it moves the exponents of a row's products and nothing
/// else.
fn multiply_one_scale(
    model: &Model,
    shape: Shape,
    a: &[f32],
    b: &[f32],
    scales: BlockScales<'_>,
    c: &mut [f32],
) {
    for (row, c_row) in c.chunks_exact_mut(shape.n).enumerate() {
        for (col, c) in c_row.iter_mut().enumerate() {
            let (sa, sb) = (scales.a[row], scales.b[col]);
            let scale = sa as f64 * sb as f64;
            let by = exponent(sa, scales.min_exponent) + exponent(sb, scales.min_exponent);
            *c = one(model, &a[row * shape.k..][..shape.k], &b[col * shape.k..][..shape.k], *c, (scale, by));
        }
    }
}
