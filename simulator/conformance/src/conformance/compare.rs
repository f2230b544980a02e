//! Two results of one case, bit for bit or within the case's tolerance.

use super::{Argument, Case, Outcome};
use half::{bf16, f16};

/// How far results may be apart: either bound suffices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Units in the last place.
    pub ulp: u64,
    /// Absolute difference.
    pub absolute: f64,
}

/// Elements of one buffer that differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Which launch, from 0.
    pub launch: usize,
    /// Which argument, from 0.
    pub argument: usize,
    /// Elements that differ.
    pub count: usize,
    /// Elements there are.
    pub of: usize,
    /// The first of them.
    pub first: usize,
    /// Its bits in the first result.
    pub left: u64,
    /// Its bits in the second result.
    pub right: u64,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "launch {}, argument {}: {} of {} elements differ, first [{}]: {:#x} and {:#x}",
            self.launch, self.argument, self.count, self.of, self.first, self.left, self.right
        )
    }
}

/// Where two outcomes of `case` differ by more than it allows.
pub fn compare(case: &Case, left: &Outcome, right: &Outcome) -> Vec<Difference> {
    let mut differences = Vec::new();
    for ((launch, argument, a), (_, _, b)) in left.0.iter().zip(&right.0) {
        let Argument::Buffer(buffer) = &case.launches[*launch].arguments[*argument] else { continue };
        let width = super::data::size(&buffer.data.ty).unwrap_or(1);
        let bits = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |v, &b| v << 8 | u64::from(b));
        let pairs = a.chunks_exact(width).zip(b.chunks_exact(width)).map(|(a, b)| (bits(a), bits(b)));
        let wrong: Vec<(usize, (u64, u64))> = pairs
            .enumerate()
            .filter(|(_, (a, b))| {
                a != b && !buffer.tolerance.is_some_and(|t| t.allows(&buffer.data.ty, *a, *b))
            })
            .collect();
        if let Some(&(first, (l, r))) = wrong.first() {
            differences.push(Difference {
                launch: *launch,
                argument: *argument,
                count: wrong.len(),
                of: a.len() / width,
                first,
                left: l,
                right: r,
            });
        }
    }
    differences
}

impl Tolerance {
    /// Whether elements with bits `a` and `b` of type `ty` are near enough.
    fn allows(self, ty: &str, a: u64, b: u64) -> bool {
        let one = |a: f64, b: f64, ulp: u64| {
            a.is_nan() && b.is_nan() || ulp <= self.ulp || (a - b).abs() <= self.absolute
        };
        // Distance along the number line of the format, of `n` bits.
        let distance = |a: u64, b: u64, n: u32| {
            let line = |v: u64| {
                let magnitude = (v & ((1 << (n - 1)) - 1)) as i128;
                if v >> (n - 1) & 1 == 1 { -magnitude } else { magnitude }
            };
            (line(a) - line(b)).unsigned_abs() as u64
        };
        let halves = |f: fn(u16) -> f64| {
            (0..2).all(|i| {
                let (a, b) = ((a >> (16 * i)) as u16, (b >> (16 * i)) as u16);
                one(f(a), f(b), distance(a.into(), b.into(), 16))
            })
        };
        match ty {
            "f32" => {
                let value = |v: u64| f64::from(f32::from_bits(v as u32));
                one(value(a), value(b), distance(a, b, 32))
            }
            "f64" => one(f64::from_bits(a), f64::from_bits(b), distance(a, b, 64)),
            "f16" | "f16x2" => halves(|v| f16::from_bits(v).to_f64()),
            "bf16" | "bf16x2" => halves(|v| bf16::from_bits(v).to_f64()),
            _ => false,
        }
    }
}
