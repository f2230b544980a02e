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
    pub a: &'s [f32],
    pub b: &'s [f32],
    /// Scales per row: `k` over the block size.
    pub blocks: usize,
    /// [`Scale::min_exponent`](crate::semantics::element::Scale::min_exponent) of their type.
    pub min_exponent: i32,
}

/// D = (A ∘ scales)·(B ∘ scales) + C in `c`, f32. With a single scale per row, a power of two (`scale_vec::1X`), products sum
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
        // It moves the exponents of a row's products and nothing else.
        for (i, c) in c.iter_mut().enumerate() {
            let (row, col) = (i / n, i % n);
            let (sa, sb) = (scales.a[row], scales.b[col]);
            let by = exponent(sa, scales.min_exponent) + exponent(sb, scales.min_exponent);
            *c = one(model, &a[row * k..][..k], &b[col * k..][..k], *c, (sa as f64 * sb as f64, by));
        }
        return;
    }
    assert!((k / blocks).is_multiple_of(GROUP), "a block is a multiple of {GROUP} elements");
    let exponents = |s: &[f32]| s.iter().map(|&s| exponent_of_scale(s, scales)).collect::<Vec<_>>();
    let ea = exponents(scales.a);
    let mut panel = Panel::new(shape, b, scales);
    for (row, c) in c.chunks_exact_mut(n).enumerate() {
        let (a, at) = (&a[row * k..][..k], row * blocks);
        let sa = &scales.a[at..][..blocks];
        if panel.finite && sa.iter().all(|s| !s.is_nan()) && c.iter().all(|c| c.is_finite()) {
            panel.row(a, sa, &ea[at..][..blocks], c);
            continue;
        }
        for (col, c) in c.iter_mut().enumerate() {
            let sb = &scales.b[col * blocks..][..blocks];
            if !c.is_finite() || sa.iter().chain(sb).any(|s| s.is_nan()) {
                // Codes and scales have no infinity: the sum is C's, or NaN.
                let nan_or_zero: f64 = sa.iter().chain(sb).map(|&s| s as f64 * 0.0).sum();
                *c = not_finite(nan_or_zero + *c as f64);
            } else {
                let one = Shape { m: 1, n: 1, k };
                let scales = BlockScales { a: sa, b: sb, ..scales };
                Panel::new(one, &b[col * k..][..k], scales).row(
                    a,
                    sa,
                    &ea[at..][..blocks],
                    std::slice::from_mut(c),
                );
            }
        }
    }
}

/// The exponent of a scale; that of zero is below all others, and two of them add.
fn exponent_of_scale(s: f32, scales: BlockScales<'_>) -> i32 {
    if s == 0.0 { -4000 } else { exponent(s, scales.min_exponent) }
}

/// B with its columns side by side, so that a row of D is loops over columns, which the compiler turns into vector code.
struct Panel {
    columns: usize,
    /// No scale is NaN.
    finite: bool,
    /// `[kk][column]`
    values: Vec<f32>,
    /// `[block][column]`
    scales: Vec<f64>,
    exponents: Vec<i32>,
    top: Vec<i32>,
    dots: Vec<f32>,
    sums: Vec<f64>,
}

impl Panel {
    fn new(Shape { n, k, .. }: Shape, b: &[f32], scales: BlockScales<'_>) -> Panel {
        let blocks = scales.blocks;
        let scale = |block: usize| (0..n).map(move |col| scales.b[col * blocks + block]);
        Panel {
            columns: n,
            finite: scales.b.iter().all(|s| !s.is_nan()),
            values: (0..k).flat_map(|kk| (0..n).map(move |col| b[col * k + kk])).collect(),
            scales: (0..blocks).flat_map(scale).map(f64::from).collect(),
            exponents: (0..blocks).flat_map(scale).map(|s| exponent_of_scale(s, scales)).collect(),
            top: vec![0; n],
            dots: vec![0.0; n],
            sums: vec![0.0; n],
        }
    }

    /// One row of A times all columns, plus `c`; everything is finite.
    fn row(&mut self, a: &[f32], sa: &[f32], ea: &[i32], c: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the function asks for AVX2 and for nothing else, and this CPU has it.
            unsafe { row_avx2(self, a, sa, ea, c) };
            return;
        }
        self.row_portable(a, sa, ea, c);
    }

    #[inline(always)]
    fn row_portable(&mut self, a: &[f32], sa: &[f32], ea: &[i32], c: &mut [f32]) {
        let n = self.columns;
        for (top, &c) in self.top.iter_mut().zip(&*c) {
            *top = exponent(c, -126);
        }
        for (ea, eb) in ea.iter().zip(self.exponents.chunks_exact(n)) {
            self.top.iter_mut().zip(eb).for_each(|(top, eb)| *top = (*top).max(ea + eb));
        }
        for ((sum, &c), &top) in self.sums.iter_mut().zip(&*c).zip(&self.top) {
            *sum = (c as f64 * power(FRACTION_BITS - top)).trunc();
        }
        let per_block = a.len() / sa.len() / GROUP;
        for (group, (a, b)) in a.chunks(GROUP).zip(self.values.chunks(GROUP * n)).enumerate() {
            let block = group / per_block;
            // Codes are halves up to 6: sums of sixteen products are exact.
            self.dots.fill(0.0);
            for (&a, b) in a.iter().zip(b.chunks_exact(n)) {
                self.dots.iter_mut().zip(b).for_each(|(dot, &b)| *dot += a * b);
            }
            let (sa, sb) = (sa[block] as f64, &self.scales[block * n..][..n]);
            let columns = self.sums.iter_mut().zip(&self.dots).zip(sb).zip(&self.top);
            for (((sum, &dot), &sb), &top) in columns {
                // 12 bits times two significands of 4: exact, and so are sums of terms below 2^48.
                *sum += (dot as f64 * (sa * sb) * power(FRACTION_BITS - top)).trunc();
            }
        }
        for ((c, &sum), &top) in c.iter_mut().zip(&self.sums).zip(&self.top) {
            // + 0: a sum of zeros is +0.
            *c = finish((sum + 0.0) * power(top - FRACTION_BITS), super::Sum::F32);
        }
    }
}

/// [`Panel::row_portable`] compiled for AVX2: the same operations, more columns at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn row_avx2(panel: &mut Panel, a: &[f32], sa: &[f32], ea: &[i32], c: &mut [f32]) {
    panel.row_portable(a, sa, ea, c);
}
