//! What happens between accumulator and store, written once for every target.
//!
//! An activation is an [`Expr`] over the two scaled products. [`Expr::compile`] turns it into a [`Program`], a
//! list of operations without repeats, which the CPU kernels evaluate over vectors and GPU generators turn into
//! instructions. To add an activation, add a variant to [`Activation`] and its line in [`Activation::expr`].
//!
//! # What is not finite
//!
//! Gate and up are f32, and one that overflows is infinite. The same holds of every activation and on every target:
//!
//! - NaN in gate or up gives NaN, through limits too. (Codes of nvfp4 have no NaN: there it becomes the largest.)
//! - A gate of -∞ gives what functions of the sigmoid and relu tend to: zero, negative where up is positive (relu2: of the
//!   sign of up). So does every gate whose sigmoid is 0.
//! - A gate of +∞ gives ∞ of the sign of up, or what its limit gives.
//! - Up of ±∞ is infinite, or its limit. Times a gate that makes zero, it is NaN: what overflowed is not known.
//! - `identity` is the product, as IEEE 754 has it: 0 · ∞ is NaN.
//!
//! A sigmoid below 2⁻¹²⁶, of gates below -87, is subnormal on CPUs and 0 on GPUs.

use std::ops::{Add, Mul, Sub};

use crate::Error;

/// Below minus this, a sigmoid is 0 in f32 (2⁻¹⁵⁰ = e^-103.97).
const SIGMOID_IS_0: f32 = 104.0;

/// A step of an epilogue on earlier ones: expressions in an [`Expr`], results in an [`Op`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Node<T> {
    /// The gate product.
    Gate,
    /// The up product.
    Up,
    /// A constant.
    Const(f32),
    /// Sum.
    Add(T, T),
    /// Difference.
    Sub(T, T),
    /// Product.
    Mul(T, T),
    /// Smaller of two, NaN if either is.
    Min(T, T),
    /// Larger of two, NaN if either is.
    Max(T, T),
    /// `1 / (1 + e^-x)`.
    Sigmoid(T),
    /// Hyperbolic tangent.
    Tanh(T),
}

/// An expression over the gate product and the up product, both scaled and biased.
#[derive(Debug, Clone, PartialEq)]
pub struct Expr(Box<Node<Expr>>);

/// One operation on earlier results.
pub type Op = Node<Slot>;

impl Expr {
    /// The smaller of this and a constant.
    pub fn min(self, limit: f32) -> Self {
        Node::Min(self, limit.into()).into()
    }

    /// The larger of this and a constant.
    pub fn max(self, limit: f32) -> Self {
        Node::Max(self, limit.into()).into()
    }

    /// This, limited to `-limit ..= limit`.
    pub fn clamp(self, limit: f32) -> Self {
        self.min(limit).max(-limit)
    }

    /// This, with the least finite f32 in place of -∞, whose product with a sigmoid of 0 would be NaN.
    pub fn above_infinity(self) -> Self {
        self.max(f32::MIN)
    }

    /// The logistic function of this.
    pub fn sigmoid(self) -> Self {
        Node::Sigmoid(self).into()
    }

    /// The hyperbolic tangent of this.
    pub fn tanh(self) -> Self {
        Node::Tanh(self).into()
    }

    /// The expression as a list of operations, every common part computed once.
    ///
    /// # Panics
    /// If that takes more than 256 operations.
    pub fn compile(&self) -> Program {
        let mut program = Program { ops: Vec::new() };
        program.push(self);
        program
    }
}

impl From<Node<Expr>> for Expr {
    fn from(node: Node<Expr>) -> Self {
        Self(node.into())
    }
}

impl From<f32> for Expr {
    fn from(x: f32) -> Self {
        Node::Const(x).into()
    }
}

macro_rules! binary_operator {
    ($($op:ident $method:ident),*) => {$(
        impl<R: Into<Expr>> $op<R> for Expr {
            type Output = Expr;
            fn $method(self, right: R) -> Expr {
                Node::$op(self, right.into()).into()
            }
        }
    )*};
}
binary_operator!(Add add, Sub sub, Mul mul);

/// Index of an earlier operation of a [`Program`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot(pub u8);

/// A compiled expression: operations in order, the last one is the result.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    ops: Vec<Op>,
}

impl Program {
    /// The operations; each refers only to earlier ones.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    fn push(&mut self, expr: &Expr) -> Slot {
        let op = match &*expr.0 {
            Node::Gate => Op::Gate,
            Node::Up => Op::Up,
            Node::Const(c) => Op::Const(*c),
            Node::Add(l, r) => Op::Add(self.push(l), self.push(r)),
            Node::Sub(l, r) => Op::Sub(self.push(l), self.push(r)),
            Node::Mul(l, r) => Op::Mul(self.push(l), self.push(r)),
            Node::Min(l, r) => Op::Min(self.push(l), self.push(r)),
            Node::Max(l, r) => Op::Max(self.push(l), self.push(r)),
            Node::Sigmoid(x) => Op::Sigmoid(self.push(x)),
            Node::Tanh(x) => Op::Tanh(self.push(x)),
        };
        let index = self.ops.iter().position(|&known| known == op).unwrap_or_else(|| {
            self.ops.push(op);
            self.ops.len() - 1
        });
        Slot(u8::try_from(index).expect("an epilogue has at most 256 operations"))
    }
}

/// The activation functions found in real gated MLPs.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `gate · sigmoid(gate) · up`: Llama, Qwen, Mistral and most others.
    #[default]
    Silu,
    /// silu with the gate limited from above and up limited on both sides (DeepSeek-V4 `swiglu_limit`).
    ClampedSilu {
        /// The limit.
        limit: f32,
    },
    /// silu, then its result limited from above and up limited on both sides (Step `swiglu_limits`).
    SwigluStep {
        /// The limit.
        limit: f32,
    },
    /// `(up + beta) · gate · sigmoid(alpha · gate)` with both limited (gpt-oss: 1.702, 1, 7).
    SwigluOai {
        /// Slope inside the sigmoid.
        alpha: f32,
        /// Added to up.
        beta: f32,
        /// Gate is limited from above, up on both sides.
        limit: f32,
    },
    /// `gelu(gate) · up`, gelu by its tanh approximation (Gemma).
    GeluTanh,
    /// `relu(gate) · up` (SmallThinker).
    Relu,
    /// `relu(gate)² · up`.
    Relu2,
    /// `gate · up`.
    Identity,
}

impl Activation {
    /// gpt-oss's constants.
    pub const SWIGLU_OAI: Self = Self::SwigluOai { alpha: 1.702, beta: 1.0, limit: 7.0 };

    /// One of each, for tests and listings.
    pub const EXAMPLES: [Self; 8] = [
        Self::Silu,
        Self::ClampedSilu { limit: 7.0 },
        Self::SwigluStep { limit: 7.0 },
        Self::SWIGLU_OAI,
        Self::GeluTanh,
        Self::Relu,
        Self::Relu2,
        Self::Identity,
    ];

    /// The function as an expression over the gate and the up product.
    pub fn expr(self) -> Expr {
        let [gate, up]: [fn() -> Expr; 2] = [|| Node::Gate.into(), || Node::Up.into()];
        match self {
            Self::Silu => gate().above_infinity() * gate().sigmoid() * up(),
            Self::ClampedSilu { limit } => {
                let low = gate().min(limit);
                low.clone().above_infinity() * low.sigmoid() * up().clamp(limit)
            }
            Self::SwigluStep { limit } => {
                (gate().above_infinity() * gate().sigmoid()).min(limit) * up().clamp(limit)
            }
            Self::SwigluOai { alpha, beta, limit } => {
                let low = gate().min(limit);
                let finite = low.clone().above_infinity();
                // Under a slope that leaves the sigmoid of the least gate above 0, -∞ stays what it is.
                let factor = if alpha * f32::MAX > SIGMOID_IS_0 { finite.clone() } else { low };
                factor * (finite * alpha).sigmoid() * (up().clamp(limit) + beta)
            }
            Self::GeluTanh => {
                // (1 + tanh x) / 2 is sigmoid(2x), which does not cancel for negative x. The factor is 2 · √(2/π).
                let twice_inner = (gate() + gate() * gate() * gate() * 0.044715) * 1.595_769_2;
                gate().above_infinity() * twice_inner.sigmoid() * up()
            }
            Self::Relu => gate().max(0.0) * up(),
            Self::Relu2 => {
                // The square alone overflows from 2⁶⁴ on.
                let positive = gate().max(0.0);
                positive.clone() * up() * positive
            }
            Self::Identity => gate() * up(),
        }
    }

    /// The function, compiled.
    pub fn program(self) -> Program {
        self.expr().compile()
    }

    /// Checks the numbers of the function: finite, and limits above 0, since what lies between `-limit` and `limit` would
    /// otherwise be nothing.
    ///
    /// # Errors
    /// Names the number and its value.
    pub fn check(self) -> Result<(), Error> {
        let (slopes, limit) = match self {
            Self::Silu | Self::GeluTanh | Self::Relu | Self::Relu2 | Self::Identity => return Ok(()),
            Self::ClampedSilu { limit } | Self::SwigluStep { limit } => (vec![], limit),
            Self::SwigluOai { alpha, beta, limit } => (vec![("alpha", alpha), ("beta", beta)], limit),
        };
        check_finite(&self.to_string(), &slopes)?;
        if limit > 0.0 && limit.is_finite() {
            return Ok(());
        }
        let valid = "a positive finite number";
        Err(Error::EpilogueNumber { function: self.to_string(), number: "limit", value: limit, valid })
    }
}

fn check_finite(function: &str, numbers: &[(&'static str, f32)]) -> Result<(), Error> {
    let Some(&(number, value)) = numbers.iter().find(|(_, value)| !value.is_finite()) else { return Ok(()) };
    Err(Error::EpilogueNumber { function: function.into(), number, value, valid: "a finite number" })
}

/// The name as [`FromStr`](std::str::FromStr) reads it, numbers after a colon.
impl std::fmt::Display for Activation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silu => f.write_str("silu"),
            Self::ClampedSilu { limit } => write!(f, "clamped-silu:{limit}"),
            Self::SwigluStep { limit } => write!(f, "swiglustep:{limit}"),
            Self::SwigluOai { alpha, beta, limit } => write!(f, "swigluoai:{alpha},{beta},{limit}"),
            Self::GeluTanh => f.write_str("gelu-tanh"),
            Self::Relu => f.write_str("relu"),
            Self::Relu2 => f.write_str("relu2"),
            Self::Identity => f.write_str("identity"),
        }
    }
}

/// The name, with its numbers after a colon or the usual ones.
impl std::str::FromStr for Activation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let unknown = || Error::UnknownActivation { found: text.into() };
        let (name, numbers) =
            text.split_once(':').map_or((text, None), |(name, numbers)| (name, Some(numbers)));
        let numbers = numbers.into_iter().flat_map(|numbers| numbers.split(',')).map(str::parse::<f32>);
        let numbers = numbers.collect::<Result<Vec<_>, _>>().map_err(|_| unknown())?;
        let activation = match (name, numbers.as_slice()) {
            ("silu", []) => Self::Silu,
            ("clamped-silu", []) => Self::ClampedSilu { limit: 7.0 },
            ("clamped-silu", &[limit]) => Self::ClampedSilu { limit },
            ("swiglustep", []) => Self::SwigluStep { limit: 7.0 },
            ("swiglustep", &[limit]) => Self::SwigluStep { limit },
            ("swigluoai", []) => Self::SWIGLU_OAI,
            ("swigluoai", &[alpha, beta, limit]) => Self::SwigluOai { alpha, beta, limit },
            ("gelu-tanh", []) => Self::GeluTanh,
            ("relu", []) => Self::Relu,
            ("relu2", []) => Self::Relu2,
            ("identity", []) => Self::Identity,
            _ => return Err(unknown()),
        };
        activation.check().map(|()| activation).map_err(|_| unknown())
    }
}

/// All of the epilogue but the tensors: factors, rounding, activation.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Epilogue {
    /// The function of the two products.
    pub activation: Activation,
    /// Multiplies the gate product, beside the tensor scales.
    pub alpha_gate: f32,
    /// Multiplies the up product, beside the tensor scales.
    pub alpha_up: f32,
    /// Round both products to bf16 before the activation, as unfused bf16 pipelines do. Off by default: it is
    /// visible in the result.
    pub round_gate_up_to_bf16: bool,
}

impl Epilogue {
    /// Checks factors and the numbers of the activation.
    ///
    /// # Errors
    /// Names the number and its value.
    pub fn check(&self) -> Result<(), Error> {
        check_finite("the epilogue", &[("alpha_gate", self.alpha_gate), ("alpha_up", self.alpha_up)])?;
        self.activation.check()
    }
}

impl Default for Epilogue {
    fn default() -> Self {
        Self { activation: Activation::Silu, alpha_gate: 1.0, alpha_up: 1.0, round_gate_up_to_bf16: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn eval(activation: Activation, gate: f64, up: f64) -> f64 {
        activation.program().eval_f64(gate, up)
    }

    #[test]
    fn activations_are_read_with_and_without_their_numbers() {
        let parse = |text: &str| text.parse::<Activation>();
        assert_eq!(parse("silu"), Ok(Activation::Silu));
        // What is printed can be read again.
        for activation in Activation::EXAMPLES {
            assert_eq!(parse(&activation.to_string()), Ok(activation));
        }
        assert_eq!(parse("clamped-silu:10"), Ok(Activation::ClampedSilu { limit: 10.0 }));
        assert_eq!(parse("swigluoai"), Ok(Activation::SWIGLU_OAI));
        assert_eq!(
            parse("swigluoai:1.5,0,3"),
            Ok(Activation::SwigluOai { alpha: 1.5, beta: 0.0, limit: 3.0 })
        );
        for bad in [
            "swish",
            "silu:1",
            "silu:",
            "clamped-silu:-1",
            "clamped-silu:nan",
            "clamped-silu:x",
            "clamped-silu:",
            "swiglustep:0",
            "swigluoai:1",
            "swigluoai:1,,2,3",
            "swigluoai:inf,1,7",
        ] {
            assert_eq!(parse(bad), Err(Error::UnknownActivation { found: bad.into() }));
        }
    }

    #[test]
    fn every_activation_is_its_closed_form() {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        for gate in [-50.0, -7.5, -1.0, -0.0, 0.3, 2.0, 50.0] {
            for up in [-50.0, -0.5, 0.0, 3.0, 50.0] {
                let (low, mid) = (f64::min(gate, 7.0), f64::clamp(up, -7.0, 7.0));
                assert_eq!(eval(Activation::Silu, gate, up), gate * sigmoid(gate) * up);
                assert_eq!(eval(Activation::ClampedSilu { limit: 7.0 }, gate, up), low * sigmoid(low) * mid);
                let step = (gate * sigmoid(gate)).min(7.0) * mid;
                assert_eq!(eval(Activation::SwigluStep { limit: 7.0 }, gate, up), step);
                let oai = (mid + 1.0) * low * sigmoid(f64::from(1.702f32) * low);
                assert!((eval(Activation::SWIGLU_OAI, gate, up) - oai).abs() <= 1e-12 * oai.abs());
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
                let gelu = 0.5 * gate * (1.0 + inner.tanh()) * up;
                assert!((eval(Activation::GeluTanh, gate, up) - gelu).abs() <= 1e-6 * gelu.abs() + 1e-12);
                assert_eq!(eval(Activation::Relu, gate, up), gate.max(0.0) * up);
                assert_eq!(eval(Activation::Relu2, gate, up), gate.max(0.0) * up * gate.max(0.0));
                assert_eq!(eval(Activation::Identity, gate, up), gate * up);
            }
        }
    }

    /// Half the gate times 1 + tanh(√(2/π) · (gate + 0.044715 · gate³)), computed with 60 digits; what f64 may differ by
    /// comes from the two constants, which are f32.
    #[test]
    fn gelu_tanh_keeps_its_digits_for_negative_gates() {
        const GELU: [(f64, f64); 13] = [
            (-10.0, -1.204092348209806e-37),
            (-8.0, -3.1077829375011112e-21),
            (-6.0, -8.439646700762297e-11),
            (-5.0, -2.291796196629506e-07),
            (-4.0, -7.024594819237268e-05),
            (-3.5, -0.0006161976553736633),
            (-3.0, -0.003637392081773019),
            (-2.0, -0.04540230591222498),
            (-1.0, -0.1588080093917233),
            (-0.5, -0.15428599017485609),
            (0.5, 0.34571400982514394),
            (3.0, 2.996362607918227),
            (10.0, 10.0),
        ];
        for (gate, want) in GELU {
            for up in [1.0, -3.0] {
                let got = eval(Activation::GeluTanh, gate, up);
                assert!((got - want * up).abs() <= 1e-5 * (want * up).abs(), "{gate}: {got:e} for {want:e}");
            }
        }
    }

    #[test]
    fn numbers_that_make_no_function_are_refused() {
        for activation in Activation::EXAMPLES {
            assert_eq!(activation.check(), Ok(()));
        }
        let message = |activation: Activation| activation.check().unwrap_err().to_string();
        for limit in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let text = message(Activation::ClampedSilu { limit });
            let want = format!("clamped-silu:{limit}: limit is {limit}; a positive finite number is needed");
            assert_eq!(text, want);
            assert!(Activation::SwigluOai { alpha: 1.0, beta: 1.0, limit }.check().is_err());
        }
        let text = message(Activation::SwigluOai { alpha: f32::NAN, beta: 1.0, limit: 7.0 });
        assert!(text.ends_with("alpha is NaN; a finite number is needed"), "{text}");
        let epilogue = Epilogue { alpha_up: f32::INFINITY, ..Epilogue::default() };
        assert_eq!(
            epilogue.check().unwrap_err().to_string(),
            "the epilogue: alpha_up is inf; a finite number is needed"
        );
    }

    #[test]
    fn what_is_not_finite_gives_what_is_stated() {
        const INF: f64 = f64::INFINITY;
        let oai = |alpha| Activation::SwigluOai { alpha, beta: 1.0, limit: 7.0 };
        for activation in Activation::EXAMPLES {
            for (gate, up) in [(f64::NAN, 1.0), (1.0, f64::NAN), (-INF, f64::NAN), (f64::NAN, INF)] {
                assert!(eval(activation, gate, up).is_nan(), "{activation} of {gate} and {up}");
            }
            // Of a gate that overflowed, too: -1e39 is -∞ in f32.
            for (gate, up) in [(-INF, 3.0), (-INF, -3.0), (-1e39, 3.0), (-1e39, -3.0)] {
                let want = match activation {
                    Activation::Identity => gate * up,
                    Activation::Relu | Activation::Relu2 => 0.0f64.copysign(up),
                    _ => 0.0f64.copysign(-up),
                };
                let found = eval(activation, gate, up);
                assert_eq!(found.to_bits(), want.to_bits(), "{activation} of {gate} and {up}: {found}");
            }
        }
        for activation in [Activation::Silu, Activation::GeluTanh, Activation::Relu2, Activation::Identity] {
            assert_eq!([eval(activation, INF, 2.0), eval(activation, INF, -2.0)], [INF, -INF]);
            assert_eq!(eval(activation, 2.0, -INF), -INF);
            assert!(eval(activation, 0.0, INF).is_nan());
        }
        assert!(eval(Activation::Silu, -INF, INF).is_nan() && eval(Activation::Relu2, -1.0, INF).is_nan());
        assert_eq!(eval(Activation::SwigluStep { limit: 7.0 }, INF, -INF), -49.0);
        // The slope decides what a gate of -∞ tends to.
        assert_eq!([oai(-1.0), oai(0.0), oai(1e-40)].map(|oai| eval(oai, -INF, 1.0)), [-INF; 3]);
    }

    #[test]
    fn common_parts_are_computed_once() {
        let ops = Activation::ClampedSilu { limit: 7.0 }.program().ops().to_vec();
        assert_eq!(ops.iter().filter(|op| matches!(op, Op::Min(..))).count(), 2, "{ops:?}");
        assert_eq!(ops.iter().filter(|op| matches!(op, Op::Gate)).count(), 1);
    }
}
