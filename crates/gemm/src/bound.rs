//! How far a right result may be from the reference: the roundings of f32, followed from the sums to C.
//!
//! ```text
//! sum        (6·√K + 16) · 2⁻²⁴ · Σ|a·b|    roundings of K terms, in any order
//! gate, up   that times alpha; two roundings of the product, one of the bias; one to bf16, if asked
//! C          each operation hands on the errors of its operands and adds its own, sigmoid 2⁻²⁰
//! stored     half a step of the format, see [`crate::compare`]
//! ```
//!
//! Roundings of sums are as good as independent: the error of K terms is below λ·√K·2⁻²⁴·Σ|a·b| but with a probability
//! of 2·exp(-λ²/2) a rounding (Higham and Mary, *A New Approach to Probabilistic Rounding Error Analysis*, SIAM J. Sci.
//! Comput. 41, 2019, theorem 2.4), for λ = 6 one in 3·10⁷. The bound without probability, K·2⁻²⁴·Σ|a·b|, is as much as one weight
//! of thousands contributes, and so would hide a wrong one. The 16 are what short sums lose beside: tensor cores align 16
//! products to the largest and cut them off.

use crate::epilogue::{Op, Program, Slot};

/// Half a unit in the last place of 1 in f32: what one rounding loses at most.
const ROUNDING: f64 = 1.0 / (1u64 << 24) as f64;

/// The step of subnormal f32.
const STEP: f64 = f64::from_bits((1023 - 149) << 52);

/// A value of the reference, and how far from it f32 may come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounded {
    /// The value in f64.
    pub value: f64,
    /// The most that a right f32 differs by; infinite where that is not known, NaN where a number on the way exceeds f32 and
    /// anything may come out.
    pub error: f64,
}

/// A value without a known bound.
impl From<f64> for Bounded {
    fn from(value: f64) -> Self {
        Self { value, error: f64::INFINITY }
    }
}

impl Bounded {
    /// A value without error.
    pub fn exact(value: f64) -> Self {
        Self { value, error: 0.0 }
    }

    /// `alpha · Σ products + bias`, of `k` products with this sum and this sum of magnitudes.
    pub fn product(k: usize, [sum, magnitudes]: [f64; 2], alpha: f64, bias: f64) -> Self {
        let roundings = 6.0 * (k as f64).sqrt() + 16.0;
        let value = alpha * sum + bias;
        let error = alpha.abs() * (magnitudes * roundings + sum.abs() * 2.0) * ROUNDING;
        // Terms are summed before alpha, in any order: a part of the sum may exceed f32 where the whole does not.
        let overflows = magnitudes.is_finite() && magnitudes > f64::from(f32::MAX);
        Self { value, error: if overflows { f64::NAN } else { error } }.rounded()
    }

    /// The most that the errors of many terms add up to, if they are as good as independent, from the sum of their squares.
    pub(crate) fn together(squares: f64) -> f64 {
        6.0 * squares.sqrt()
    }

    pub(crate) fn off_by(self, error: f64) -> Self {
        Self { error: self.error + error, ..self }
    }

    /// Rounded by a function that keeps order, where the value may fall to either side of a border.
    pub(crate) fn rounded_by(self, round: impl Fn(f64) -> f64) -> Self {
        Self::between(round(self.value), round(self.value - self.error), round(self.value + self.error))
    }

    fn between(value: f64, low: f64, high: f64) -> Self {
        Self { value, error: (high - value).max(value - low) }
    }

    /// One more rounding to f32.
    fn rounded(self) -> Self {
        let error = self.error + self.value.abs() * ROUNDING + STEP;
        let overflows = self.value.is_finite() && self.value.abs() + error > f64::from(f32::MAX);
        Self { error: if overflows { f64::NAN } else { error }, ..self }
    }

    /// The sum with another.
    pub fn plus(self, other: Self) -> Self {
        Self { value: self.value + other.value, error: self.error + other.error }.rounded()
    }

    /// The product with a number of f32.
    pub fn times(self, factor: f64) -> Self {
        self.product_with(Self::exact(factor))
    }

    fn product_with(self, other: Self) -> Self {
        let error = self.value.abs() * other.error + (other.value.abs() + other.error) * self.error;
        Self { value: self.value * other.value, error }.rounded()
    }

    /// The smaller or the larger of two, NaN if either is.
    fn pick(self, other: Self, smaller: bool) -> Self {
        let pick = |l: f64, r: f64| match (l, r) {
            (l, r) if l.is_nan() || r.is_nan() => f64::NAN,
            // Of equal zeros the second: max(-0, 0) is 0, in vectors and in PTX.
            (l, r) if (if smaller { l < r } else { l > r }) => l,
            (_, r) => r,
        };
        let low = pick(self.value - self.error, other.value - other.error);
        let high = pick(self.value + self.error, other.value + other.error);
        Self::between(pick(self.value, other.value), low, high)
    }

    /// GPUs make it of `ex2.approx` and `rcp.approx`, whose exponent is rounded, and have no subnormal one.
    fn sigmoid(self) -> Self {
        let of = |x: f64| 1.0 / (1.0 + (-x).exp());
        let (value, rest) = (of(self.value), of(-self.value));
        // The slope s·(1 - s) grows by at most e^error over the error.
        let handed_on = (value * rest * self.error * self.error.min(50.0).exp()).min(1.0);
        let own = value * (16.0 + 4.0 * rest * self.value.abs().min(1e4)) * ROUNDING;
        Self { value, error: handed_on + own + value.min(f32::MIN_POSITIVE.into()) }
    }

    fn tanh(self) -> Self {
        let value = self.value.tanh();
        let slope = (1.0 - value * value) * (2.0 * self.error.min(25.0)).exp();
        Self { value, error: (slope * self.error).min(2.0) + 32.0 * ROUNDING }
    }
}

impl Program {
    /// The value for a gate and an up product, with what they may be off by and what f32 adds.
    pub fn eval(&self, gate: Bounded, up: Bounded) -> Bounded {
        let mut values: Vec<Bounded> = Vec::with_capacity(self.ops().len());
        for op in self.ops() {
            let at = |slot: Slot| values[slot.0 as usize];
            values.push(match *op {
                Op::Gate => gate,
                Op::Up => up,
                Op::Const(c) => Bounded::exact(c.into()),
                Op::Add(l, r) => at(l).plus(at(r)),
                Op::Sub(l, r) => at(l).plus(Bounded { value: -at(r).value, ..at(r) }),
                Op::Mul(l, r) => at(l).product_with(at(r)),
                Op::Min(l, r) => at(l).pick(at(r), true),
                Op::Max(l, r) => at(l).pick(at(r), false),
                Op::Sigmoid(x) => at(x).sigmoid(),
                Op::Tanh(x) => at(x).tanh(),
            });
        }
        values[values.len() - 1]
    }

    /// The value for a gate and an up product, in f64.
    pub fn eval_f64(&self, gate: f64, up: f64) -> f64 {
        self.eval(Bounded::exact(gate), Bounded::exact(up)).value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Activation;

    /// Whatever gate and up become within their errors, C stays within its own; and that is not much more than it needs.
    #[test]
    fn errors_of_gate_and_up_are_handed_on() {
        for activation in Activation::EXAMPLES {
            let program = activation.program();
            for (gate, up) in [(0.3, 2.0), (-0.5, 5.0), (7.0, -7.0), (-30.0, 0.1), (12.0, 90.0), (0.0, 0.0)] {
                for error in [1e-6, 1e-3, 0.5] {
                    let of = |value: f64| Bounded { value, error };
                    let found = program.eval(of(gate), of(up));
                    let far = |g: f64, u: f64| {
                        (program.eval_f64(gate + g * error, up + u * error) - found.value).abs()
                    };
                    let corners = [-1.0, -0.5, 0.0, 0.5, 1.0];
                    let most = corners.iter().flat_map(|&g| corners.map(|u| far(g, u))).fold(0.0, f64::max);
                    assert!(
                        most <= found.error,
                        "{activation} of {gate} and {up}: {most:e} of {:e}",
                        found.error
                    );
                    let own = 1e-5 * (gate.abs() + 1.0) * (up.abs() + 1.0) * (gate.abs() + 1.0);
                    let loose = if error > 0.1 { 8.0 } else { 4.0 };
                    assert!(
                        found.error <= loose * most + own,
                        "{activation} of {gate} and {up}: {:e}",
                        found.error
                    );
                }
            }
        }
    }

    #[test]
    fn sums_are_off_by_what_is_stated() {
        let exact = Bounded::product(64, [0.0, 2.0], 3.0, 0.0);
        assert_eq!(exact.error, 6.0 * 64.0 * ROUNDING + STEP);
        assert_eq!(exact.rounded_by(|x| x.round()).error, 0.0);
        // Before alpha, a part of a sum of zero may exceed f32.
        assert!(Bounded::product(64, [0.0, 1e39], 1e-3, 0.0).error.is_nan());
        let near = Bounded { value: 0.5 - 1e-7, error: 1e-6 };
        assert_eq!(near.rounded_by(|x| x.round()), Bounded { value: 0.0, error: 1.0 });
    }
}
