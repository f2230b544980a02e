//! Floating-point arithmetic: applies one function of `semantics` to every element of every lane.
//! PTX ISA 9.7.3 (f32, f64), 9.7.4 (f16, bf16), 9.7.5 (mixed precision).

use super::*;
use crate::names::modifiers;
use crate::semantics::approx::{Function, approx, div};
use crate::semantics::float::arith::{self, MinMax, Mode};
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

modifiers! {
    /// Classes that `testp` asks for.
    Class {
        Finite "finite", Infinite "infinite", Number "number", Nan "notanumber", Normal "normal", Subnormal "subnormal",
    }
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

/// The operands of an instruction: how they lie in registers, where the result goes, where they come from.
struct Elements {
    shape: Shape,
    d: Dst,
    s: Vec<Src>,
}

pub fn decode(i: &mut Ins<'_>) -> Decoded {
    let root = i.ast.root.as_str();
    if root == "testp" {
        return test(i);
    }
    let (round, is_approx, full) = (rounding(i), i.has("approx"), i.has("full"));
    let mode =
        Mode { round: round.unwrap_or_default(), ftz: i.has("ftz"), sat: i.has("sat"), relu: i.has("relu") };
    let min_max = MinMax {
        max: root == "max",
        nan: i.has("NaN"),
        xorsign: i.has("xorsign"),
        abs: root != "abs" && i.has("abs"),
        ftz: mode.ftz,
    };
    let elements = elements(i)?;
    let (format, ftz) = (elements.shape.format, mode.ftz);
    // f16 and bf16 functions other than arithmetic are approximate by nature.
    let function = match root {
        "rcp" if is_approx => Some(Function::Rcp),
        "sqrt" if is_approx => Some(Function::Sqrt),
        "rsqrt" => Some(Function::Rsqrt),
        "ex2" => Some(Function::Ex2),
        "lg2" => Some(Function::Lg2),
        "sin" => Some(Function::Sin),
        "cos" => Some(Function::Cos),
        "tanh" => Some(Function::Tanh),
        _ => None,
    };
    Ok(match function {
        Some(f) if format == F64 => elements.each(move |[a, ..]| approx64(f, a)),
        Some(f) => elements.each(move |[a, ..]| approx(f, format, a as u32, ftz).into()),
        None if root == "div" && (full || is_approx) => {
            elements.each(move |[a, b, _]| div(a as u32, b as u32, full, ftz).into())
        }
        None => return exact(i, elements, mode, min_max),
    })
}

fn elements(i: &mut Ins<'_>) -> Decoded<Elements> {
    let (ty, narrow) = match i.types()[..] {
        [ty] => (ty, None),
        [Type::F32, narrow @ (Type::F16 | Type::Bf16)] => (Type::F32, Some(narrow)),
        _ => return i.error("needs one floating-point type"),
    };
    let Some(mut shape) = shape(ty) else { return i.error("needs a floating-point type") };
    shape.narrow = narrow.map(|n| if n == Type::F16 { F16 } else { BF16 });
    let last = i.count() - 1;
    let source = |k| i.src(k, if k < last { narrow.unwrap_or(ty) } else { ty });
    let s = (1..=last).map(source).collect::<Decoded<_>>()?;
    Ok(Elements { shape, d: i.dst(0)?, s })
}

/// What PTX defines to the last bit.
fn exact(i: &Ins<'_>, e: Elements, mode: Mode, how: MinMax) -> Decoded {
    let root = i.ast.root.as_str();
    let want = match root {
        "fma" | "mad" => 3..=3,
        "min" | "max" => 2..=3,
        "add" | "sub" | "mul" | "div" | "copysign" => 2..=2,
        "rcp" | "sqrt" | "neg" | "abs" => 1..=1,
        _ => return i.error("this floating-point instruction is not executed"),
    };
    let n = e.s.len();
    if !want.contains(&n) {
        return i.error(format!("has {n} sources, needs {}", want.start()));
    }
    let format = e.shape.format;
    // Mostly nothing is asked for beside the operation.
    if (e.shape, mode) == (Shape { format: F32, lanes: 1, narrow: None }, Mode::default()) {
        match root {
            "add" => return Ok(e.plain(|[a, b, _]| a + b)),
            "sub" => return Ok(e.plain(|[a, b, _]| a - b)),
            "mul" => return Ok(e.plain(|[a, b, _]| a * b)),
            "fma" | "mad" => return Ok(e.plain(|[a, b, c]| a.mul_add(b, c))),
            _ => {}
        }
    }
    Ok(match root {
        "add" => e.each(move |[a, b, _]| arith::add(format, a, b, mode)),
        "sub" => e.each(move |[a, b, _]| arith::sub(format, a, b, mode)),
        "mul" => e.each(move |[a, b, _]| arith::mul(format, a, b, mode)),
        "fma" | "mad" => e.each(move |[a, b, c]| arith::fma(format, a, b, c, mode)),
        "div" => e.each(move |[a, b, _]| arith::div(format, a, b, mode)),
        "rcp" => e.each(move |[a, ..]| arith::rcp(format, a, mode)),
        "sqrt" => e.each(move |[a, ..]| arith::sqrt(format, a, mode)),
        "neg" => e.each(move |[a, ..]| arith::neg(format, a, mode.ftz)),
        "abs" => e.each(move |[a, ..]| arith::abs(format, a, mode.ftz)),
        "copysign" => {
            let sign = 1 << (format.width() - 1);
            e.each(move |[a, b, _]| a & sign | b & !sign)
        }
        _ => e.each(move |[a, b, c]| {
            let two = arith::min_max(format, a, b, how);
            if n == 3 { arith::min_max(format, two, c, how) } else { two }
        }),
    })
}

impl Elements {
    /// An instruction on f32 as the host computes: a loop that the compiler turns into vector code.
    fn plain(self, f: impl Fn([f32; 3]) -> f32 + Send + Sync + 'static) -> Op {
        let Elements { d, s, .. } = self;
        Op::computes(Spread::Whole(32), &s.clone(), &[], move |cx| {
            let mut v = [[0u32; 32]; 3];
            for (v, s) in v.iter_mut().zip(&s) {
                *v = cx.w.regs.r32(*s, cx.m);
            }
            let lane = |l: usize| arith::canonical(f([v[0][l], v[1][l], v[2][l]].map(f32::from_bits)));
            cx.w.regs.w32(d, cx.m, &std::array::from_fn(lane));
        })
    }

    /// An instruction on elements, one after another.
    fn each(self, f: impl Fn([u64; 3]) -> u64 + Send + Sync + 'static) -> Op {
        let Elements { shape, d, s } = self;
        let width = shape.format.width();
        let how = match (shape.lanes, shape.narrow) {
            (1, None) => Spread::Whole(width),
            (_, None) => Spread::Elements(width, width),
            (_, Some(_)) => Spread::Whole(64),
        };
        Op::computes(how, &s.clone(), &[], move |cx| map(cx, shape, d, &s, &f))
    }
}

/// Applies `f` to up to three operands, element by element.
#[inline]
fn map(cx: &mut Cx<'_, '_>, shape: Shape, d: Dst, s: &[Src], f: impl Fn([u64; 3]) -> u64) {
    let (m, width) = (cx.m, shape.format.width());
    if width * shape.lanes == 64 {
        let mut v = [[0u64; 32]; 3];
        for (v, s) in v.iter_mut().zip(s) {
            *v = cx.w.regs.r64(*s, m);
        }
        let part = |l: usize, shift: u32| f(v.map(|v| v[l] >> shift & u64::MAX >> (64 - width)));
        let lane = |l: usize| match shape.lanes {
            2 => part(l, 0) | part(l, 32) << 32,
            // Binary64 is slow: lanes that do not execute it need no result.
            _ if m >> l & 1 != 0 => part(l, 0),
            _ => 0,
        };
        cx.w.regs.w64(d, m, &std::array::from_fn(lane));
        return;
    }
    let mut v = [[0u32; 32]; 3];
    let last = s.len() - 1;
    for (k, (v, s)) in v.iter_mut().zip(s).enumerate() {
        *v = cx.w.regs.r32(*s, m);
        if let Some(narrow) = shape.narrow
            && k < last
        {
            *v = v.map(|x| arith::widen(narrow, x));
        }
    }
    let r: [u32; 32] = if shape.lanes == 2 {
        let half = |l: usize, shift: u32| f(v.map(|v| u64::from(v[l] >> shift & 0xffff))) as u32;
        std::array::from_fn(|l| half(l, 0) | half(l, 16) << 16)
    } else {
        std::array::from_fn(|l| f([v[0][l], v[1][l], v[2][l]].map(u64::from)) as u32)
    };
    cx.w.regs.w32(d, m, &r);
}

/// `testp`
fn test(i: &mut Ins<'_>) -> Decoded {
    let class = i.need("a class", Class::NAMES)?;
    let ty = i.ty()?;
    let Some(Shape { format, .. }) = shape(ty) else { return i.error("needs .f32 or .f64") };
    let (d, s) = (i.dst(0)?, i.src(1, ty)?);
    let is = move |bits: u64| {
        let (x, subnormal) = (format.decode(bits), format.is_subnormal(bits));
        match class {
            Class::Finite => x.is_finite(),
            Class::Infinite => x.is_infinite(),
            Class::Number => !x.is_nan(),
            Class::Nan => x.is_nan(),
            // Zeros count as normal numbers, by the ISA.
            Class::Normal => x.is_finite() && !subnormal,
            Class::Subnormal => subnormal,
        }
    };
    Ok(Op::computes(Spread::Whole(format.width()), &[s], &[], move |cx| {
        let v = cx.w.regs.r64(s, cx.m);
        cx.w.regs.wpred(d, cx.m, (0..32).fold(0, |p, i| p | u32::from(is(v[i])) << i));
    }))
}

/// `rcp.approx.ftz.f64` and `rsqrt.approx.f64`: 20 bits are promised; the upper word is computed, the lower zero.
fn approx64(f: Function, a: u64) -> u64 {
    let x = f64::from_bits(F64.flush(a));
    let y = if f == Function::Rsqrt { 1.0 / x.sqrt() } else { 1.0 / x };
    F64.flush(y.to_bits() & !u64::from(u32::MAX))
}
