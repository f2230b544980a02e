//! Floating-point arithmetic. PTX ISA 9.7.3 (f32, f64), 9.7.4 (f16, bf16), 9.7.5 (mixed precision).

use super::*;
use crate::semantics::approx::Function;
use crate::semantics::float::arith::{MinMax, Mode};
use crate::semantics::float::{BF16, F16, F32, F64, Format, Round};

/// How values lie in a register.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Format of an element.
    pub format: Format,
    /// Elements in a register: 1 or 2.
    pub lanes: u32,
    /// Format of the narrow operands of a mixed-precision instruction (all but the last).
    pub narrow: Option<Format>,
}

/// An operation that PTX defines to the last bit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Exact {
    Add,
    Sub,
    Mul,
    Fma,
    Div,
    Rcp,
    Sqrt,
    Neg,
    Abs,
    CopySign,
    /// `min`, `max` of two or three
    MinMax(MinMax),
}

/// An operation that PTX defines within an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Approx {
    /// A function of one operand.
    Function(Function),
    Div,
    DivFull,
}

modifiers! {
    /// Classes that `testp` asks for.
    Class {
        Finite "finite", Infinite "infinite", Number "number", Nan "notanumber", Normal "normal", Subnormal "subnormal",
    }
}

#[derive(Debug, Clone)]
pub enum Float {
    /// Bit-exact, of up to three operands.
    Exact(Exact, Shape, Mode, Dst, Vec<Src>),
    /// Approximate; `true`: `.ftz`.
    Approx(Approx, Shape, bool, Dst, Vec<Src>),
    Test(Class, Format, Dst, Src),
}

pub fn shape(ty: Type) -> Option<Shape> {
    let (format, lanes) = match ty {
        Type::F16 => (F16, 1),
        Type::F16x2 => (F16, 2),
        Type::Bf16 => (BF16, 1),
        Type::Bf16x2 => (BF16, 2),
        Type::F32 => (F32, 1),
        Type::F32x2 => (F32, 2),
        Type::F64 => (F64, 1),
        _ => return None,
    };
    Some(Shape { format, lanes, narrow: None })
}

/// The floating-point rounding modifier, if there is one.
pub fn rounding(i: &mut Ins<'_>) -> Option<Round> {
    i.one_of(&[("rn", Round::NearestEven), ("rz", Round::Zero), ("rm", Round::Down), ("rp", Round::Up)])
}

pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    let root = i.ast.root.as_str();
    let round = rounding(i);
    let approx = i.has("approx");
    let full = i.has("full");
    let mode =
        Mode { round: round.unwrap_or_default(), ftz: i.has("ftz"), sat: i.has("sat"), relu: i.has("relu") };
    let min_max = MinMax {
        max: root == "max",
        nan: i.has("NaN"),
        xorsign: i.has("xorsign"),
        abs: root != "abs" && i.has("abs"),
        ftz: mode.ftz,
    };
    if root == "testp" {
        let class = i.need("a class", Class::NAMES)?;
        let ty = i.ty()?;
        let Some(s) = shape(ty) else { return i.error("needs .f32 or .f64") };
        i.finish()?;
        return Ok(Op::Float(Float::Test(class, s.format, i.dst(0)?, i.src(1, ty)?)));
    }
    // `fma.rn.oob` and its relu form: NaN operands give zero.
    if i.has("oob") {
        return i.error(".oob is not executed");
    }
    let types = i.types();
    let (ty, narrow) = match types[..] {
        [ty] => (ty, None),
        [Type::F32, narrow @ (Type::F16 | Type::Bf16)] => (Type::F32, Some(narrow)),
        _ => return i.error("needs one floating-point type"),
    };
    let Some(mut shape) = shape(ty) else { return i.error("needs a floating-point type") };
    shape.narrow = narrow.map(|n| if n == Type::F16 { F16 } else { BF16 });
    i.finish()?;
    let last = i.count() - 1;
    let mut sources = Vec::new();
    for k in 1..=last {
        sources.push(i.src(k, if k < last { narrow.unwrap_or(ty) } else { ty })?);
    }
    let d = i.dst(0)?;
    // f16 and bf16 functions other than arithmetic are approximate by nature.
    let approximate = match root {
        "rcp" if approx => Some(Approx::Function(Function::Rcp)),
        "sqrt" if approx => Some(Approx::Function(Function::Sqrt)),
        "rsqrt" => Some(Approx::Function(Function::Rsqrt)),
        "ex2" => Some(Approx::Function(Function::Ex2)),
        "lg2" => Some(Approx::Function(Function::Lg2)),
        "sin" => Some(Approx::Function(Function::Sin)),
        "cos" => Some(Approx::Function(Function::Cos)),
        "tanh" => Some(Approx::Function(Function::Tanh)),
        "div" if full => Some(Approx::DivFull),
        "div" if approx => Some(Approx::Div),
        _ => None,
    };
    if let Some(op) = approximate {
        return Ok(Op::Float(Float::Approx(op, shape, mode.ftz, d, sources)));
    }
    let Some(exact) = exact(root, min_max) else {
        return i.error("this floating-point instruction is not executed");
    };
    let want = match exact {
        Exact::Fma => 3..=3,
        Exact::MinMax(_) => 2..=3,
        Exact::Rcp | Exact::Sqrt | Exact::Neg | Exact::Abs => 1..=1,
        _ => 2..=2,
    };
    if !want.contains(&sources.len()) {
        return i.error(format!("has {} sources, needs {}", sources.len(), want.start()));
    }
    Ok(Op::Float(Float::Exact(exact, shape, mode, d, sources)))
}

fn exact(root: &str, min_max: MinMax) -> Option<Exact> {
    Some(match root {
        "add" => Exact::Add,
        "sub" => Exact::Sub,
        "mul" => Exact::Mul,
        "fma" | "mad" => Exact::Fma,
        "div" => Exact::Div,
        "rcp" => Exact::Rcp,
        "sqrt" => Exact::Sqrt,
        "neg" => Exact::Neg,
        "abs" => Exact::Abs,
        "copysign" => Exact::CopySign,
        "min" | "max" => Exact::MinMax(min_max),
        _ => return None,
    })
}
