//! Floating-point arithmetic: applies one function of `semantics` to every element of every lane.

use super::*;
use crate::decode::float::{Approx, Class, Exact, Float, Shape};
use crate::semantics::approx::{Function, approx, div};
use crate::semantics::float::arith::{self, Mode};
use crate::semantics::float::{F64, Format, Round, f64_ops};

fn exact32(op: Exact, format: Format, mode: Mode, v: [u32; 3], n: usize) -> u32 {
    let [a, b, c] = v;
    match op {
        Exact::Add => arith::add(format, a, b, mode),
        Exact::Sub => arith::sub(format, a, b, mode),
        Exact::Mul => arith::mul(format, a, b, mode),
        Exact::Fma => arith::fma(format, a, b, c, mode),
        Exact::Div => arith::div(a, b, mode),
        Exact::Rcp => arith::rcp(a, mode),
        Exact::Sqrt => arith::sqrt(a, mode),
        Exact::Neg => arith::neg(format, a.into(), mode.ftz) as u32,
        Exact::Abs => arith::abs(format, a.into(), mode.ftz) as u32,
        Exact::CopySign => {
            let sign = 1 << (format.width() - 1);
            a & sign | b & !sign
        }
        Exact::MinMax(how) => {
            let two = arith::min_max(format, a.into(), b.into(), how);
            if n == 3 { arith::min_max(format, two, c.into(), how) as u32 } else { two as u32 }
        }
    }
}

fn exact64(op: Exact, round: Round, v: [u64; 3]) -> u64 {
    let [a, b, c] = v;
    match op {
        Exact::Add => f64_ops::add(a, b, round),
        Exact::Sub => f64_ops::sub(a, b, round),
        Exact::Mul => f64_ops::mul(a, b, round),
        Exact::Fma => f64_ops::fma(a, b, c, round),
        Exact::Div => f64_ops::div(a, b, round),
        Exact::Rcp => f64_ops::rcp(a, round),
        Exact::Sqrt => f64_ops::sqrt(a, round),
        Exact::Neg => arith::neg(F64, a, false),
        Exact::Abs => arith::abs(F64, a, false),
        Exact::CopySign => a & 1 << 63 | b & !(1 << 63),
        Exact::MinMax(how) => arith::min_max(F64, a, b, how),
    }
}

/// Applies `f` to up to three operands, element by element.
fn map(cx: &mut Cx<'_, '_>, shape: Shape, d: Dst, s: &[Src], f: impl Fn([u32; 3]) -> u32) {
    let m = cx.m;
    if shape.format.width() == 32 && shape.lanes == 2 {
        let mut v = [[0u64; 32]; 3];
        for (v, s) in v.iter_mut().zip(s) {
            *v = cx.w.regs.r64(*s, m);
        }
        let half = |i: usize, shift: u32| u64::from(f(v.map(|v| (v[i] >> shift) as u32)));
        cx.w.regs.w64(d, m, &std::array::from_fn(|i| half(i, 0) | half(i, 32) << 32));
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
        let half = |i: usize, shift: u32| f(v.map(|v| v[i] >> shift & 0xffff));
        std::array::from_fn(|i| half(i, 0) | half(i, 16) << 16)
    } else {
        std::array::from_fn(|i| f([v[0][i], v[1][i], v[2][i]]))
    };
    cx.w.regs.w32(d, m, &r);
}

fn class(format: Format, class: Class, bits: u64) -> bool {
    let x = format.decode(bits);
    let subnormal = format.is_subnormal(bits);
    match class {
        Class::Finite => x.is_finite(),
        Class::Infinite => x.is_infinite(),
        Class::Number => !x.is_nan(),
        Class::Nan => x.is_nan(),
        // Zeros count as normal numbers, by the ISA.
        Class::Normal => x.is_finite() && !subnormal,
        Class::Subnormal => subnormal,
    }
}

pub fn execute(op: &Float, cx: &mut Cx<'_, '_>) -> Result {
    let m = cx.m;
    match op {
        Float::Exact(op, shape, mode, d, s) if shape.format == F64 => {
            let mut v = [[0u64; 32]; 3];
            for (v, s) in v.iter_mut().zip(s) {
                *v = cx.w.regs.r64(*s, m);
            }
            let r = std::array::from_fn(|i| {
                if m >> i & 1 != 0 { exact64(*op, mode.round, [v[0][i], v[1][i], v[2][i]]) } else { 0 }
            });
            cx.w.regs.w64(*d, m, &r);
        }
        Float::Exact(op, shape, mode, d, s) => {
            let (op, format, mode, n) = (*op, shape.format, *mode, s.len());
            // One loop per operation, so that the compiler sees which it is.
            match op {
                Exact::Add => map(cx, *shape, *d, s, |[a, b, _]| arith::add(format, a, b, mode)),
                Exact::Mul => map(cx, *shape, *d, s, |[a, b, _]| arith::mul(format, a, b, mode)),
                Exact::Fma => map(cx, *shape, *d, s, |[a, b, c]| arith::fma(format, a, b, c, mode)),
                _ => map(cx, *shape, *d, s, |v| exact32(op, format, mode, v, n)),
            }
        }
        Float::Approx(op, shape, ftz, d, s) => {
            let (op, format, ftz) = (*op, shape.format, *ftz);
            if format == F64 {
                let a = cx.w.regs.r64(s[0], m);
                cx.w.regs.w64(*d, m, &a.map(|a| approx64(op, a)));
            } else {
                map(cx, *shape, *d, s, |[a, b, _]| match op {
                    Approx::Function(f) => approx(f, format, a, ftz),
                    Approx::Div => div(a, b, false, ftz),
                    Approx::DivFull => div(a, b, true, ftz),
                });
            }
        }
        Float::Test(which, format, d, s) => {
            let v = cx.w.regs.r64(*s, m);
            let p = (0..32).fold(0, |p, i| p | u32::from(class(*format, *which, v[i])) << i);
            cx.w.regs.wpred(*d, m, p);
        }
    }
    Ok(Flow::Next)
}

/// `rcp.approx.ftz.f64` and `rsqrt.approx.f64`: 20 bits are promised; the upper word is computed, the lower zero.
fn approx64(op: Approx, a: u64) -> u64 {
    let x = f64::from_bits(F64.flush(a));
    let y = match op {
        Approx::Function(Function::Rsqrt) => 1.0 / x.sqrt(),
        _ => 1.0 / x,
    };
    F64.flush(y.to_bits() & !u64::from(u32::MAX))
}
