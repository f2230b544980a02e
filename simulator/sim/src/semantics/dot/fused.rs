//! Products of floating-point matrices without block scales.
//!
//! Two ways through the same arithmetic: whole rows of D side by side in f32 and i32, and one element at a
//! time in f64 and i64 for what does not fit it (wide exponents of bf16 and tf32, infinities and NaNs).

use super::super::float::arith;
use super::{Model, Shape, Sum, exponent, finish, not_finite, power};

/// The exponent of zero: far below any other, so that a product with it never is the largest, and far enough
/// from the limits of i16 that two of them add.
const ZERO: i16 = -4000;
/// Sums of operand exponents between which a product, and a product scaled for alignment, are normal f32
/// numbers.
const NARROW: std::ops::RangeInclusive<i16> = -45..=45;

/// D = A·B + C in `c`, as `model` sums. See the [module](super) text for the layouts.
///
/// # Panics
/// If a slice does not have the length its layout says, or `k` is not a multiple of the model's group.
pub fn multiply(model: &Model, shape: Shape, a: &[f32], b: &[f32], c: &mut [f32]) {
    let Shape { m, n, k } = shape;
    assert!(a.len() == m * k && b.len() == n * k && c.len() == m * n, "operand lengths must match {shape:?}");
    assert!(k.is_multiple_of(model.group), "k = {k} must be a multiple of the group {}", model.group);
    if model.paired {
        return multiply_paired(model, shape, a, b, c);
    }
    let (a_exponents, a_narrow) = exponents(a, model.min_exponent);
    let (b_exponents, b_narrow) = exponents(b, model.min_exponent);
    let fast = a_narrow && b_narrow && model.group <= 32 && model.fraction_bits <= 25;
    let mut panel = Panel::default();
    for start in (0..k).step_by(model.group) {
        if fast {
            panel.gather(shape, start, model.group, b, &b_exponents);
        }
        for (row, c) in c.chunks_exact_mut(n).enumerate() {
            let at = row * k + start;
            let a = &a[at..][..model.group];
            if fast && c.iter().all(|c| c.is_finite()) {
                panel.row(model, a, &a_exponents[at..][..model.group], c);
            } else {
                for (col, c) in c.iter_mut().enumerate() {
                    *c = one(model, a, &b[col * k + start..][..model.group], *c, UNSCALED);
                }
            }
        }
    }
}

/// [`multiply`] by rule 7.
fn multiply_paired(model: &Model, shape: Shape, a: &[f32], b: &[f32], c: &mut [f32]) {
    let in_order_of_sums = |x: &[f32]| -> Vec<f32> {
        let half = |x: &[f32], high| x.chunks(2).skip(high).step_by(2).flatten().copied().collect::<Vec<_>>();
        x.chunks(2 * model.group).flat_map(|x| [half(x, 0), half(x, 1)].concat()).collect()
    };
    let mut sums = vec![0.0; c.len()];
    let model = Model { paired: false, ..*model };
    multiply(&model, shape, &in_order_of_sums(a), &in_order_of_sums(b), &mut sums);
    for (c, sum) in c.iter_mut().zip(sums) {
        *c = f32::from_bits(arith::canonical(sum + *c));
    }
}

/// Exponents of all elements, and whether all are finite and within [`NARROW`].
fn exponents(x: &[f32], min_exponent: i32) -> (Vec<i16>, bool) {
    let mut narrow = true;
    let exponents = x
        .iter()
        .map(|&x| {
            if x == 0.0 {
                return ZERO;
            }
            let e = exponent(x, min_exponent) as i16;
            // Infinity and NaN have exponent 128.
            narrow &= NARROW.contains(&e);
            e
        })
        .collect();
    (exponents, narrow)
}

/// A K-group of B, transposed to `[kk][col]`, and one row's intermediate values.
#[derive(Default)]
struct Panel {
    columns: usize,
    values: Vec<f32>,
    exponents: Vec<i16>,
    /// The largest exponent among the products of each column.
    largest: Vec<i16>,
    /// The largest exponent among products and addend.
    top: Vec<i32>,
    /// What aligns a term to it.
    scale: Vec<f32>,
    /// Sums of the products with even and with odd `kk`.
    sums: [Vec<i32>; 2],
}

impl Panel {
    fn gather(&mut self, shape: Shape, start: usize, group: usize, b: &[f32], exponents: &[i16]) {
        let n = shape.n;
        self.columns = n;
        self.values.resize(group * n, 0.0);
        self.exponents.resize(group * n, 0);
        for col in 0..n {
            let at = col * shape.k + start;
            for kk in 0..group {
                self.values[kk * n + col] = b[at + kk];
                self.exponents[kk * n + col] = exponents[at + kk];
            }
        }
        self.top.resize(n, 0);
        self.scale.resize(n, 0.0);
    }

    /// One row of A times all columns, plus `c`.
    fn row(&mut self, model: &Model, a: &[f32], ea: &[i16], c: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the function asks for AVX2 and for nothing else, and this CPU has it.
            unsafe { row_avx2(self, model, a, ea, c) };
            return;
        }
        self.row_portable(model, a, ea, c);
    }

    #[inline(always)]
    fn row_portable(&mut self, model: &Model, a: &[f32], ea: &[i16], c: &mut [f32]) {
        let n = self.columns;
        let fraction_bits = model.fraction_bits as i32;
        self.largest.clear();
        self.largest.resize(n, i16::MIN);
        for (&ea, eb) in ea.iter().zip(self.exponents.chunks_exact(n)) {
            for (largest, &eb) in self.largest.iter_mut().zip(eb) {
                *largest = (*largest).max(ea + eb);
            }
        }
        for (((top, scale), &largest), &c) in
            self.top.iter_mut().zip(&mut self.scale).zip(&self.largest).zip(&*c)
        {
            let of_c = ((c.to_bits() >> 23 & 0xff) as i32 - 127).max(-126);
            // With no product but zeros the sum is `c`, restored below; the bound keeps `scale` a number, and
            // the sums normal f32 numbers.
            *top = of_c.max(largest as i32).max(-90);
            *scale = f32::from_bits(((fraction_bits - *top + 127) as u32) << 23);
        }
        let [even, odd] = &mut self.sums;
        even.clear();
        even.extend(c.iter().zip(&self.scale).map(|(&c, &scale)| truncate(c * scale)));
        odd.clear();
        odd.resize(n, 0);
        for (a, b) in a.chunks(2).zip(self.values.chunks(2 * n)) {
            accumulate(even, a[0], &b[..n], &self.scale);
            if let [_, a] = *a {
                accumulate(odd, a, &b[n..], &self.scale);
            }
        }
        let dropped = match model.result {
            Sum::F32 => 52 - 23,
            Sum::F32Short => 52 - 13,
            Sum::F16 => 0,
        };
        let columns = c.iter_mut().zip(&self.largest).zip(&self.top).zip(even.iter().zip(&*odd));
        for (((c, &largest), &top), (&even, &odd)) in columns {
            let unit = f64::from_bits(((top - fraction_bits + 1023) as u64) << 52);
            let exact = (even as f64 + odd as f64) * unit;
            // What `finish` does for a sum in the range of f32's normal numbers or beyond.
            let cut = f64::from_bits(exact.to_bits() >> dropped << dropped);
            let sum = if model.result == Sum::F16 { finish(exact, Sum::F16) } else { cut as f32 };
            *c = if largest < ZERO / 2 { addend_alone(*c, model) } else { sum };
        }
    }
}

/// [`Panel::row_portable`] compiled for AVX2: the same operations, eight columns at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn row_avx2(panel: &mut Panel, model: &Model, a: &[f32], ea: &[i16], c: &mut [f32]) {
    panel.row_portable(model, a, ea, c);
}

/// Adds the aligned, truncated products of one `kk`. A sum takes at most 16 of them and C: significands up to
/// 1.875 (8-bit types, K = 32) keep it below 2^30.9, and the 8 of wider types below 2^30.
#[inline(always)]
fn accumulate(sums: &mut [i32], a: f32, b: &[f32], scale: &[f32]) {
    for ((sum, &b), &scale) in sums.iter_mut().zip(b).zip(scale) {
        // Both multiplications are exact, or the product is far below the last place kept.
        *sum += truncate(a * b * scale);
    }
}

/// A finite aligned term, truncated.
#[inline(always)]
fn truncate(term: f32) -> i32 {
    debug_assert!(term.abs() < 134217728.0);
    // SAFETY: alignment puts the largest exponent among the terms at `fraction_bits` <= 25 and a significand
    // is below 4, so the magnitude is below 2^27; operands and scale are finite, so it is not NaN.
    unsafe { term.to_int_unchecked() }
}

/// The sum of C and products that are all zero: -0 becomes +0.
#[inline(always)]
fn addend_alone(c: f32, model: &Model) -> f32 {
    if model.result == Sum::F32Short { finish(c as f64, model.result) + 0.0 } else { c + 0.0 }
}

/// No scale: times one, exponent zero.
const UNSCALED: (f64, i32) = (1.0, 0);

/// One element: the same sum in f64 and i64, for any operands, with products times a power of two given as
/// value and exponent.
pub(super) fn one(model: &Model, a: &[f32], b: &[f32], c: f32, (scale, by): (f64, i32)) -> f32 {
    let products = || a.iter().zip(b).map(|(&x, &y)| x as f64 * y as f64 * scale);
    let plain: f64 = products().sum::<f64>() + c as f64;
    if !plain.is_finite() {
        return not_finite(plain);
    }
    let of_products = a
        .iter()
        .zip(b)
        .filter(|&(&x, &y)| x != 0.0 && y != 0.0)
        .map(|(&x, &y)| exponent(x, model.min_exponent) + exponent(y, model.min_exponent) + by)
        .max();
    let Some(of_products) = of_products else { return addend_alone(c, model) };
    let top = of_products.max(exponent(c, -126));
    let align = power(model.fraction_bits as i32 - top);
    let sum: i64 = products().map(|p| (p * align) as i64).sum::<i64>() + (c as f64 * align) as i64;
    finish(sum as f64 * power(top - model.fraction_bits as i32), model.result)
}

#[cfg(test)]
pub(super) fn element_by_element(model: &Model, shape: Shape, a: &[f32], b: &[f32], c: &mut [f32]) {
    for start in (0..shape.k).step_by(model.group) {
        for row in 0..shape.m {
            for col in 0..shape.n {
                let c = &mut c[row * shape.n + col];
                let at = |x: usize| x * shape.k + start;
                *c = one(model, &a[at(row)..][..model.group], &b[at(col)..][..model.group], *c, UNSCALED);
            }
        }
    }
}
