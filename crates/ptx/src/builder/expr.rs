//! Integer arithmetic as formulas: `row * pitch + (column << 1)` in place of one call and one name for each instruction.

use super::arith::{Bits, DoubleWidth, Integer, Ordered};
use super::reg::{Reg, RegType, Src, U32};
use super::{Kernel, Value};
use crate::ast::Operand;
use std::marker::PhantomData;
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Rem, Shl, Shr, Sub};

/// A formula that gives a `T`: registers and numbers joined by `+ - * / % & | ^ << >>` and the methods of [`Formula`].
///
/// Precedence is Rust's: shifts bind less than sums, `&` less than shifts. A formula appends nothing until
/// [`Kernel::eval`] (or another method that takes formulas, like [`Kernel::offset`]) appends its instructions:
///
/// - Operands come before what is made of them, the left one first, and each operation is one instruction. So the
///   text can be read off the formula.
/// - A sum that begins with a product, `a * b + c` or `a.mul_wide(b) + c`, is one `mad`. `c + a * b` is a product and
///   a sum.
/// - Nothing is rewritten: a product with a power of two stays a product, and adding 0 stays an addition. What Rust
///   can compute is a number before it gets here, as in `n + (tile - 1)`.
///
/// Integers wrap. Quotients are rounded towards zero; what a division by zero gives is unspecified, as in PTX.
///
/// ```
/// use dualgemm_ptx::builder::*;
/// use dualgemm_ptx::{Target, ast::Version};
///
/// let mut module = Builder::new(Target::Sm80, Version::new(7, 0));
/// module.kernel("place", |k| {
///     let (cta, lane) = (k.special(Special::CtaidX), k.special(Special::LaneId));
///     let place = k.eval(cta * 512 + ((lane >> 2) << 4));
///     k.to(place).eval(place + 8);
/// });
/// let text = module.finish().unwrap().to_string();
/// let body: Vec<&str> = text.lines().map(str::trim).collect();
/// let formulas = ["shr.u32 %r2, %r1, 2;", "shl.b32 %r3, %r2, 4;", "mad.lo.u32 %r4, %r0, 512, %r3;", "add.u32 %r4, %r4, 8;"];
/// assert!(body.windows(4).any(|lines| lines == formulas), "{text}");
/// ```
#[derive(Debug)]
#[must_use = "a formula is no instruction before it is evaluated"]
pub struct Expr<T> {
    node: Node,
    ty: PhantomData<T>,
}

#[derive(Debug)]
enum Node {
    Value(Operand),
    Apply(Apply),
}

/// An instruction that is not appended yet.
#[derive(Debug)]
struct Apply {
    opcode: String,
    sources: Vec<Node>,
    /// [`Kernel::give`] for the type of the result.
    give: fn(&mut Kernel, &str, Vec<Operand>) -> Operand,
}

impl Node {
    fn lower(self, k: &mut Kernel) -> Operand {
        match self {
            Node::Value(value) => value,
            Node::Apply(Apply { opcode, sources, give }) => {
                let sources = lower(sources, k);
                give(k, &opcode, sources)
            }
        }
    }
}

fn lower(sources: Vec<Node>, k: &mut Kernel) -> Vec<Operand> {
    sources.into_iter().map(|source| source.lower(k)).collect()
}

impl<T: RegType> Expr<T> {
    fn apply(opcode: String, sources: Vec<Node>) -> Self {
        let give = |k: &mut Kernel, opcode: &str, sources| k.give::<T>(opcode, sources).operand();
        Self { node: Node::Apply(Apply { opcode, sources, give }), ty: PhantomData }
    }

    fn sum(self, b: Node) -> Self {
        match self.node {
            Node::Apply(Apply { opcode, mut sources, .. }) if opcode.starts_with("mul.") => {
                sources.push(b);
                Self::apply(opcode.replacen("mul.", "mad.", 1), sources)
            }
            a => Self::apply(format!("add.{}", T::TYPE), vec![a, b]),
        }
    }

    /// As the operand of an instruction that is appended next.
    pub(super) fn operand(self, k: &mut Kernel) -> Operand {
        let outer = (k.destination.take(), k.guard.take());
        let operand = self.node.lower(k);
        (k.destination, k.guard) = outer;
        operand
    }
}

impl<T: RegType> From<Value<T>> for Expr<T> {
    fn from(value: Value<T>) -> Self {
        Self { node: Node::Value(value.operand()), ty: PhantomData }
    }
}

impl<T: RegType> From<Reg<T>> for Expr<T> {
    fn from(register: Reg<T>) -> Self {
        Value::from(register).into()
    }
}

/// Operators: trait, method, bound of the left side and type of the right one, what they make of both.
macro_rules! operators {
    ($($op:ident $method:ident $bound:ident $right:ty: |$a:ident, $b:ident| $result:expr;)*) => {$(
        impl<T: $bound, R: Into<Expr<$right>>> $op<R> for Expr<T> {
            type Output = Expr<T>;
            fn $method(self, right: R) -> Expr<T> {
                let ($a, $b) = (self, right.into().node);
                $result
            }
        }

        impl<T: $bound, R: Into<Expr<$right>>> $op<R> for Reg<T> {
            type Output = Expr<T>;
            fn $method(self, right: R) -> Expr<T> {
                Expr::from(self).$method(right)
            }
        }
    )*};
}

operators! {
    Add add Integer T: |a, b| a.sum(b);
    Sub sub Integer T: |a, b| Expr::apply(format!("sub.{}", T::TYPE), vec![a.node, b]);
    Mul mul Integer T: |a, b| Expr::apply(format!("mul.lo.{}", T::TYPE), vec![a.node, b]);
    Div div Integer T: |a, b| Expr::apply(format!("div.{}", T::TYPE), vec![a.node, b]);
    Rem rem Integer T: |a, b| Expr::apply(format!("rem.{}", T::TYPE), vec![a.node, b]);
    BitAnd bitand Bits T: |a, b| Expr::apply(format!("and.{}", T::BITS), vec![a.node, b]);
    BitOr bitor Bits T: |a, b| Expr::apply(format!("or.{}", T::BITS), vec![a.node, b]);
    BitXor bitxor Bits T: |a, b| Expr::apply(format!("xor.{}", T::BITS), vec![a.node, b]);
    Shl shl Bits U32: |a, b| Expr::apply(format!("shl.{}", T::BITS), vec![a.node, b]);
    Shr shr Bits U32: |a, b| Expr::apply(format!("shr.{}", T::TYPE), vec![a.node, b]);
}

/// What formulas have beside operators, for registers and for parts of formulas.
pub trait Formula<T: RegType>: Into<Expr<T>> {
    /// The smaller one.
    fn min(self, b: impl Into<Expr<T>>) -> Expr<T>
    where
        T: Ordered,
    {
        Expr::apply(format!("min.{}", T::TYPE), vec![self.into().node, b.into().node])
    }

    /// `len` bits from bit `pos` on; signed types replicate the sign.
    fn bit_field(self, pos: u32, len: u32) -> Expr<T>
    where
        T: Integer,
    {
        let bits = [pos, len].map(|number| Expr::<U32>::from(number).node);
        Expr::apply(format!("bfe.{}", T::TYPE), [self.into().node].into_iter().chain(bits).collect())
    }

    /// The product in twice the width.
    fn mul_wide(self, b: impl Into<Expr<T>>) -> Expr<T::Product>
    where
        T: DoubleWidth,
    {
        Expr::apply(format!("mul.wide.{}", T::TYPE), vec![self.into().node, b.into().node])
    }

    /// The same number in twice the width.
    fn widen(self) -> Expr<T::Product>
    where
        T: DoubleWidth,
    {
        Expr::apply(format!("cvt.{}.{}", T::Product::TYPE, T::TYPE), vec![self.into().node])
    }

    /// The quotient by `n`, rounded up: the sum with `n - 1`, which must not wrap, over `n`.
    fn div_ceil(self, n: u32) -> Expr<U32>
    where
        Self: Formula<U32>,
    {
        let sum: Expr<U32> = self.into();
        (sum + (n - 1)) / n
    }
}

impl<T: RegType> Formula<T> for Reg<T> {}
impl<T: RegType> Formula<T> for Expr<T> {}

impl Kernel {
    /// Appends the instructions of a formula; its own [`to`](Self::to), [`when`](Self::when) and
    /// [`unless`](Self::unless) go with the last one. A formula that is a register or a number becomes a `mov`.
    pub fn eval<T: RegType>(&mut self, formula: Expr<T>) -> Reg<T> {
        match formula.node {
            Node::Value(value) => self.mov(Value::new(value)),
            Node::Apply(Apply { opcode, sources, .. }) => {
                let outer = (self.destination.take(), self.guard.take());
                let sources = lower(sources, self);
                (self.destination, self.guard) = outer;
                self.give(&opcode, sources)
            }
        }
    }
}
