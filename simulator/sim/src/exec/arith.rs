//! Integer arithmetic, logic, comparison and selection, bit-exact.
//! PTX ISA 9.7.1, 9.7.2, 9.7.6 to 9.7.8. What one lane computes is in `lane`.

mod lane;

use super::*;
use crate::decode::arith::{Arith, BoolOp, Comparison, Int2, Int3, Part};
use crate::semantics::float::F32;
use crate::semantics::float::arith::Compare;
use crate::semantics::float::int::IntType;
use dualgemm_ptx::Type;
pub(super) use lane::*;

fn combine(op: BoolOp, a: u32, b: u32) -> u32 {
    match op {
        BoolOp::And => a & b,
        BoolOp::Or => a | b,
        BoolOp::Xor => a ^ b,
    }
}

fn bits(f: impl Fn(usize) -> bool) -> u32 {
    (0..32).fold(0, |m, i| m | u32::from(f(i)) << i)
}

#[inline]
fn map2<T: Copy, R>(a: &[T; 32], b: &[T; 32], f: impl Fn(T, T) -> R) -> [R; 32] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// The common 32-bit operations as loops the compiler turns into vector code.
#[inline]
fn fast2(op: Int2, signed: bool, a: &[u32; 32], b: &[u32; 32]) -> Option<[u32; 32]> {
    Some(match (op, signed) {
        (Int2::Add, _) => map2(a, b, u32::wrapping_add),
        (Int2::Sub, _) => map2(a, b, u32::wrapping_sub),
        (Int2::Mul(Part::Lo), _) => map2(a, b, u32::wrapping_mul),
        (Int2::And, _) => map2(a, b, |x, y| x & y),
        (Int2::Or, _) => map2(a, b, |x, y| x | y),
        (Int2::Xor, _) => map2(a, b, |x, y| x ^ y),
        (Int2::Shl, _) => map2(a, b, |x, y| x.checked_shl(y).unwrap_or(0)),
        (Int2::Shr, false) => map2(a, b, |x, y| x.checked_shr(y).unwrap_or(0)),
        (Int2::Shr, true) => map2(a, b, |x, y| ((x as i32) >> y.min(31)) as u32),
        (Int2::Min, false) => map2(a, b, u32::min),
        (Int2::Max, false) => map2(a, b, u32::max),
        (Int2::Min, true) => map2(a, b, |x, y| (x as i32).min(y as i32) as u32),
        (Int2::Max, true) => map2(a, b, |x, y| (x as i32).max(y as i32) as u32),
        _ => return None,
    })
}

fn setp(cx: &mut Cx<'_, '_>, c: Comparison, s: &[Src; 2], wide: bool) -> u32 {
    let m = cx.m;
    let (a, b) = if wide {
        (cx.w.regs.r64(s[0], m), cx.w.regs.r64(s[1], m))
    } else {
        (cx.w.regs.r32(s[0], m).map(u64::from), cx.w.regs.r32(s[1], m).map(u64::from))
    };
    let Comparison::Int(op, ty) = c else { return bits(|i| compares(c, a[i], b[i])) };
    let (a, b) = (a.map(|v| ty.key(v)), b.map(|v| ty.key(v)));
    // One loop per operator, so that the compiler sees which it is.
    match op {
        Compare::Eq => bits(|i| ordered(Compare::Eq, a[i], b[i])),
        Compare::Ne => bits(|i| ordered(Compare::Ne, a[i], b[i])),
        Compare::Lt => bits(|i| ordered(Compare::Lt, a[i], b[i])),
        Compare::Le => bits(|i| ordered(Compare::Le, a[i], b[i])),
        Compare::Gt => bits(|i| ordered(Compare::Gt, a[i], b[i])),
        _ => bits(|i| ordered(op, a[i], b[i])),
    }
}

fn is_wide(c: Comparison) -> bool {
    match c {
        Comparison::Int(_, ty) => ty.bits == 64,
        Comparison::Float(_, f, _) => f.width() == 64,
    }
}

/// Compares the two 16-bit halves of each lane: results for the low and the high half.
fn setp_packed(cx: &mut Cx<'_, '_>, c: Comparison, s: &[Src; 2]) -> [u32; 2] {
    let (a, b) = (cx.w.regs.r32(s[0], cx.m), cx.w.regs.r32(s[1], cx.m));
    let half = |shift: u32| {
        bits(|i| compares(c, u64::from(a[i] >> shift & 0xffff), u64::from(b[i] >> shift & 0xffff)))
    };
    [half(0), half(16)]
}

pub fn execute(op: &Arith, cx: &mut Cx<'_, '_>) -> Result {
    let m = cx.m;
    match op {
        Arith::One(op, ty, d, s) => {
            let a = cx.w.regs.r64(*s, m);
            cx.w.regs.w64(*d, m, &a.map(|a| int1(*op, *ty, a)));
        }
        Arith::Two(op, ty, d, s, packed) => two(cx, *op, *ty, *d, s, *packed),
        Arith::Three(op, ty, d, s, p) => three(cx, (*op, *ty), *d, s, *p),
        Arith::Insert(ty, d, s) => {
            let v: [_; 4] = std::array::from_fn(|k| cx.w.regs.r64(s[k], m));
            let r = std::array::from_fn(|i| insert(*ty, v[0][i], v[1][i], v[2][i], v[3][i]));
            cx.w.regs.w64(*d, m, &r);
        }
        Arith::Carry { .. } => carry(cx, op),
        Arith::Dot { signed, half, d, s } => {
            let v: [_; 3] = std::array::from_fn(|k| cx.w.regs.r32(s[k], m));
            let r = std::array::from_fn(|i| dot(*signed, *half, v[0][i], v[1][i], v[2][i]));
            cx.w.regs.w32(*d, m, &r);
        }
        Arith::Pred(op, d, s) => {
            let (a, b) = (cx.w.regs.pred(s[0], m), cx.w.regs.pred(s[1], m));
            let r = match op {
                Int2::And => a & b,
                Int2::Or => a | b,
                _ => a ^ b,
            };
            cx.w.regs.wpred(*d, m, r);
        }
        Arith::Setp(c, d, s, with, packed) => {
            let [p, q] = if *packed {
                setp_packed(cx, *c, s)
            } else {
                let p = setp(cx, *c, s, is_wide(*c));
                [p, !p]
            };
            let (p, q) = match with {
                Some((op, with)) => {
                    let with = cx.w.regs.pred(*with, m);
                    (combine(*op, p, with), combine(*op, q, with))
                }
                None => (p, q),
            };
            cx.w.regs.wpred(d[0], m, p);
            cx.w.regs.wpred(d[1], m, q);
        }
        Arith::Set(c, result, d, s, with, packed) => set(cx, (*c, *result), *d, s, *with, *packed),
        Arith::Select(d, s, p) => select(cx, *d, s, *p),
        Arith::SignSelect(ty, d, s, by, float, ftz) => {
            let by = cx.w.regs.r32(*by, m);
            // -0 counts as non-negative, so does what is flushed to it; NaN does not.
            let p = bits(|i| {
                if *float {
                    f32::from_bits(by[i]) >= 0.0 || *ftz && F32.is_subnormal(by[i].into())
                } else {
                    by[i] as i32 >= 0
                }
            });
            if ty.bits() == 64 {
                let (a, b) = (cx.w.regs.r64(s[0], m), cx.w.regs.r64(s[1], m));
                cx.w.regs.w64(*d, m, &std::array::from_fn(|i| if p >> i & 1 != 0 { a[i] } else { b[i] }));
            } else {
                let (a, b) = (cx.w.regs.r32(s[0], m), cx.w.regs.r32(s[1], m));
                cx.w.regs.w32(*d, m, &std::array::from_fn(|i| if p >> i & 1 != 0 { a[i] } else { b[i] }));
            }
        }
    }
    Ok(Flow::Next)
}

fn three(
    cx: &mut Cx<'_, '_>,
    (op, ty): (Int3, IntType),
    d: Dst,
    s: &[Src; 3],
    p: Option<(Dst, BoolOp, Src)>,
) {
    let m = cx.m;
    if ty.bits == 64 || matches!(op, Int3::Mad(Part::Wide)) {
        let v = [cx.w.regs.r64(s[0], m), cx.w.regs.r64(s[1], m), cx.w.regs.r64(s[2], m)];
        let r = match op {
            Int3::Mad(Part::Lo) => {
                std::array::from_fn(|i| v[0][i].wrapping_mul(v[1][i]).wrapping_add(v[2][i]))
            }
            _ => std::array::from_fn(|i| int3(op, ty, v[0][i], v[1][i], v[2][i])),
        };
        cx.w.regs.w64(d, m, &r);
        return;
    }
    let v = [cx.w.regs.r32(s[0], m), cx.w.regs.r32(s[1], m), cx.w.regs.r32(s[2], m)];
    let r: [u32; 32] = match op {
        Int3::Mad(Part::Lo) if ty.bits == 32 => {
            std::array::from_fn(|i| v[0][i].wrapping_mul(v[1][i]).wrapping_add(v[2][i]))
        }
        Int3::Lop3(t) => lop3_row(t, &v),
        _ => std::array::from_fn(|i| int3(op, ty, v[0][i].into(), v[1][i].into(), v[2][i].into()) as u32),
    };
    cx.w.regs.w32(d, m, &r);
    if let Some((p, op, q)) = p {
        let q = cx.w.regs.pred(q, m);
        cx.w.regs.wpred(p, m, combine(op, bits(|i| r[i] != 0), q));
    }
}

/// `add.cc` and its kin.
fn carry(cx: &mut Cx<'_, '_>, op: &Arith) {
    let Arith::Carry { sub, reads, writes, mul, ty, d, s } = op else { return };
    let m = cx.m;
    let v: [_; 3] = std::array::from_fn(|k| cx.w.regs.r64(s[k], m));
    let mut r = [0; 32];
    let mut out = 0;
    for i in 0..32 {
        let (a, b) = match mul {
            Some(part) => (product(*part, *ty, v[0][i], v[1][i]), v[2][i]),
            None => (v[0][i], v[1][i]),
        };
        let c = u128::from(*reads && cx.w.carry >> i & 1 != 0);
        let (a, b) = (u128::from(a & mask(ty.bits)), u128::from(b & mask(ty.bits)));
        // A borrow is a carry into the bit above the width.
        let wide = if *sub { a.wrapping_sub(b).wrapping_sub(c) } else { a + b + c };
        r[i] = wide as u64 & mask(ty.bits);
        out |= ((wide >> ty.bits) as u32 & 1) << i;
    }
    cx.w.regs.w64(*d, m, &r);
    if *writes {
        cx.w.carry = cx.w.carry & !m | out & m;
    }
}

/// `set`: a comparison as ones or 1.0 of the result's type.
fn set(
    cx: &mut Cx<'_, '_>,
    (c, result): (Comparison, Type),
    d: Dst,
    s: &[Src; 2],
    with: Option<(BoolOp, Src)>,
    packed: bool,
) {
    let m = cx.m;
    let with = with.map(|(op, p)| (op, cx.w.regs.pred(p, m)));
    let adjust = |p: u32| with.map_or(p, |(op, with)| combine(op, p, with));
    let (one, half) = match result {
        Type::F32 => (1f32.to_bits(), 0),
        Type::F16 | Type::F16x2 => (0x3c00, 0x3c00),
        Type::Bf16 | Type::Bf16x2 => (0x3f80, 0x3f80),
        Type::U16 | Type::S16 => (0xffff, 0xffff),
        _ => (FULL, 0xffff),
    };
    let r: [u32; 32] = if packed {
        let [lo, hi] = setp_packed(cx, c, s).map(adjust);
        std::array::from_fn(|i| ((lo >> i & 1) * half) | (((hi >> i & 1) * half) << 16))
    } else {
        let p = adjust(setp(cx, c, s, is_wide(c)));
        std::array::from_fn(|i| (p >> i & 1) * one)
    };
    cx.w.regs.w32(d, m, &r);
}

/// `selp`: moves one of two values.
fn select(cx: &mut Cx<'_, '_>, d: Dst, s: &[Src; 2], p: Src) {
    let m = cx.m;
    let p = cx.w.regs.pred(p, m);
    cx.w.regs.moving(|regs| {
        let (a, b) = (regs.r64(s[0], m & p), regs.r64(s[1], m & !p));
        regs.w64(d, m, &std::array::from_fn(|i| if p >> i & 1 != 0 { a[i] } else { b[i] }));
    });
}

fn two(cx: &mut Cx<'_, '_>, op: Int2, ty: IntType, d: Dst, s: &[Src; 2], packed: bool) {
    let m = cx.m;
    if ty.bits == 64 {
        let (a, b) = (cx.w.regs.r64(s[0], m), cx.w.regs.r64(s[1], m));
        let r = match op {
            Int2::Add => map2(&a, &b, u64::wrapping_add),
            Int2::Sub => map2(&a, &b, u64::wrapping_sub),
            Int2::Mul(Part::Lo) => map2(&a, &b, u64::wrapping_mul),
            Int2::And => map2(&a, &b, |x, y| x & y),
            Int2::Or => map2(&a, &b, |x, y| x | y),
            Int2::Xor => map2(&a, &b, |x, y| x ^ y),
            _ => map2(&a, &b, |x, y| int2(op, ty, x, y)),
        };
        cx.w.regs.w64(d, m, &r);
        return;
    }
    let (a, b) = (cx.w.regs.r32(s[0], m), cx.w.regs.r32(s[1], m));
    if op == Int2::Mul(Part::Wide) {
        let r = match ty {
            IntType { bits: 32, signed: false } => map2(&a, &b, |x, y| u64::from(x) * u64::from(y)),
            _ => map2(&a, &b, |x, y| product(Part::Wide, ty, x.into(), y.into())),
        };
        cx.w.regs.w64(d, m, &r);
        return;
    }
    let r = match (packed, ty.bits == 32) {
        (false, true) => fast2(op, ty.signed, &a, &b),
        _ => None,
    };
    let r = r.unwrap_or_else(|| {
        let one = |x: u32, y: u32| int2(op, ty, x.into(), y.into()) as u32;
        if packed {
            map2(&a, &b, |x, y| one(x & 0xffff, y & 0xffff) | one(x >> 16, y >> 16) << 16)
        } else {
            map2(&a, &b, one)
        }
    });
    cx.w.regs.w32(d, m, &r);
}

#[cfg(test)]
mod tests;
