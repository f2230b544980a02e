//! Integer arithmetic, logic, comparison and selection, bit-exact.
//! PTX ISA 9.7.1, 9.7.2, 9.7.6 to 9.7.8. Functions of one lane first, then the loop over lanes.

use super::{Cx, Result};
use crate::decode::arith::{Arith, BoolOp, Comparison, Int1, Int2, Int3, Part, Permute};
use crate::machine::regs::FULL;
use crate::machine::step::Flow;
use crate::program::{Dst, Src};
use crate::semantics::float::F32;
use crate::semantics::float::arith::{Compare, compare};
use crate::semantics::float::int::IntType;
use dualgemm_ptx::Type;

fn mask(n: u32) -> u64 {
    u64::MAX >> (64 - n)
}

fn product(part: Part, ty: IntType, a: u64, b: u64) -> u64 {
    // Of two large unsigned 64-bit numbers the product needs all 128 bits.
    let p = ty.value(a).wrapping_mul(ty.value(b));
    match part {
        Part::Lo => p as u64 & mask(ty.bits),
        Part::Hi => (p >> ty.bits) as u64 & mask(ty.bits),
        Part::Wide => p as u64 & mask(ty.bits * 2),
    }
}

/// 24-bit products keep 48 bits: the low 32, or bits 16 to 47.
fn product24(part: Part, signed: bool, a: u64, b: u64) -> u64 {
    let ty = IntType { bits: 24, signed };
    let p = ty.value(a) * ty.value(b);
    let kept = if part == Part::Hi { p >> 16 } else { p };
    u64::from(kept as u32)
}

/// An operation of two operands on values of `ty`, zero-extended.
pub fn int2(op: Int2, ty: IntType, a: u64, b: u64) -> u64 {
    let (x, y) = (ty.value(a), ty.value(b));
    let saturate = |v: i128| ty.bits_of(v.clamp(ty.min(), ty.max()));
    let bits = ty.bits;
    match op {
        Int2::Add => ty.bits_of(x + y),
        Int2::AddSat => saturate(x + y),
        Int2::Sub => ty.bits_of(x - y),
        Int2::SubSat => saturate(x - y),
        Int2::Mul(part) => product(part, ty, a, b),
        Int2::Mul24(part) => product24(part, ty.signed, a, b),
        // Division by zero gives an unspecified value; chips give all ones, and the dividend as remainder.
        Int2::Div if y == 0 => mask(bits),
        Int2::Rem if y == 0 => a & mask(bits),
        Int2::Div => ty.bits_of(x / y),
        Int2::Rem => ty.bits_of(x % y),
        Int2::Min => ty.bits_of(x.min(y)),
        Int2::Max => ty.bits_of(x.max(y)),
        Int2::MinRelu => ty.bits_of(x.min(y).max(0)),
        Int2::MaxRelu => ty.bits_of(x.max(y).max(0)),
        Int2::And => a & b,
        Int2::Or => a | b,
        Int2::Xor => a ^ b,
        Int2::Shl => {
            if b as u32 >= bits {
                0
            } else {
                a << b as u32 & mask(bits)
            }
        }
        Int2::Shr => ty.bits_of(x >> (b as u32).min(bits)),
        Int2::Szext { wrap } => {
            let n = b as u32;
            let n = if wrap { n & 31 } else { n };
            match n {
                0 if wrap || b == 0 => 0,
                1..=31 => IntType { bits: 32, ..ty }.bits_of(IntType { bits: n, ..ty }.value(a)),
                _ => a & mask(32),
            }
        }
        Int2::Bmsk { wrap } => {
            let (start, width) = (a as u32, b as u32);
            let (start, width) = if wrap { (start & 31, width & 31) } else { (start, width.min(32)) };
            if start > 31 { 0 } else { ((1u64 << width) - 1) << start & mask(32) }
        }
    }
}

fn int1(op: Int1, ty: IntType, a: u64) -> u64 {
    let x = ty.value(a);
    let bits = ty.bits;
    match op {
        Int1::Neg => ty.bits_of(-x),
        Int1::Abs => ty.bits_of(x.abs()),
        Int1::Not => !a & mask(bits),
        Int1::Cnot => u64::from(a & mask(bits) == 0),
        Int1::Popc => (a & mask(bits)).count_ones().into(),
        Int1::Clz => ((a & mask(bits)).leading_zeros() - (64 - bits)).into(),
        Int1::Brev => a.reverse_bits() >> (64 - bits),
        Int1::Bfind { shift } => {
            // Of a negative signed number the most significant zero is looked for.
            let v = if ty.signed && x < 0 { !a & mask(bits) } else { a & mask(bits) };
            match v.checked_ilog2() {
                None => u32::MAX.into(),
                Some(at) if shift => u64::from(bits - 1 - at),
                Some(at) => at.into(),
            }
        }
    }
}

fn permute(mode: Permute, a: u32, b: u32, c: u32) -> u32 {
    let bytes: [u8; 8] = (u64::from(a) | u64::from(b) << 32).to_le_bytes();
    let pick = |sel: u32| {
        let byte = bytes[(sel & 7) as usize];
        if sel & 8 != 0 { if byte & 0x80 != 0 { 0xff } else { 0 } } else { byte }
    };
    let c3 = c & 3;
    let out: [u8; 4] = match mode {
        Permute::Index => std::array::from_fn(|i| pick(c >> (4 * i) & 0xf)),
        Permute::F4e => std::array::from_fn(|i| pick((c3 + i as u32) & 7)),
        Permute::B4e => std::array::from_fn(|i| pick(c3.wrapping_sub(i as u32) & 7)),
        Permute::Rc8 => [pick(c3); 4],
        Permute::Ecl => std::array::from_fn(|i| pick((i as u32).max(c3))),
        Permute::Ecr => std::array::from_fn(|i| pick((i as u32).min(c3))),
        Permute::Rc16 => std::array::from_fn(|i| pick((c & 1) * 2 + (i as u32 & 1))),
    };
    u32::from_le_bytes(out)
}

/// `lop3` as its truth table says, with a = 0xf0, b = 0xcc, c = 0xaa.
pub fn lop3(table: u8, a: u32, b: u32, c: u32) -> u32 {
    (0..8).filter(|i| table >> i & 1 != 0).fold(0, |out, i| {
        let pick = |bit: u32, v: u32| if i & bit != 0 { v } else { !v };
        out | pick(4, a) & pick(2, b) & pick(1, c)
    })
}

/// The same for 32 lanes, one after the other for each bit of the table.
fn lop3_row(table: u8, v: &[[u32; 32]; 3]) -> [u32; 32] {
    let mut out = [0; 32];
    for i in (0..8).filter(|i| table >> i & 1 != 0) {
        let flip = [4, 2, 1].map(|bit| if i & bit != 0 { 0 } else { u32::MAX });
        for (l, out) in out.iter_mut().enumerate() {
            *out |= (v[0][l] ^ flip[0]) & (v[1][l] ^ flip[1]) & (v[2][l] ^ flip[2]);
        }
    }
    out
}

fn extract(ty: IntType, a: u64, b: u64, c: u64) -> u64 {
    let (pos, len) = (b as u32 & 0xff, c as u32 & 0xff);
    let bits = ty.bits;
    if len == 0 {
        return 0;
    }
    let sign = if ty.signed { a >> (pos + len - 1).min(bits - 1) & 1 } else { 0 };
    let kept = if pos < bits { (a & mask(bits)) >> pos } else { 0 };
    let have = len.min(bits.saturating_sub(pos));
    let field = if have == 0 { 0 } else { kept & mask(have) };
    let fill =
        if sign != 0 && have < bits { mask(bits) & !if have == 0 { 0 } else { mask(have) } } else { 0 };
    field | fill
}

fn insert(ty: IntType, a: u64, b: u64, pos: u64, len: u64) -> u64 {
    let (pos, len) = (pos as u32 & 0xff, len as u32 & 0xff);
    if len == 0 || pos >= ty.bits {
        return b;
    }
    let field = mask(len.min(ty.bits - pos)) << pos;
    b & !field | a << pos & field
}

/// Position of the `offset`-th set bit of `a` from `base` up (or down), as PTX describes it.
fn find_nth(a: u32, base: u32, offset: i32) -> u32 {
    if offset == 0 {
        return if base < 32 && a >> base & 1 != 0 { base } else { u32::MAX };
    }
    let mut pos = base as i64;
    let step = if offset > 0 { 1 } else { -1 };
    let mut left = offset.unsigned_abs();
    while (0..32).contains(&pos) {
        if a >> pos & 1 != 0 {
            left -= 1;
            if left == 0 {
                return pos as u32;
            }
        }
        pos += step;
    }
    u32::MAX
}

fn int3(op: Int3, ty: IntType, a: u64, b: u64, c: u64) -> u64 {
    let funnel = |wrap: bool| if wrap { c as u32 & 31 } else { (c as u32).min(32) };
    let pair = a & mask(32) | b << 32;
    match op {
        Int3::Mad(Part::Wide) => {
            let wide = IntType { bits: ty.bits * 2, ..ty };
            wide.bits_of(wide.value(product(Part::Wide, ty, a, b)) + wide.value(c))
        }
        Int3::Mad(part) => ty.bits_of(ty.value(product(part, ty, a, b)) + ty.value(c)),
        Int3::MadSat => {
            let sum = ty.value(product(Part::Hi, ty, a, b)) + ty.value(c);
            ty.bits_of(sum.clamp(ty.min(), ty.max()))
        }
        Int3::Mad24(part) => product24(part, ty.signed, a, b).wrapping_add(c) & mask(32),
        Int3::Sad => ty.bits_of((ty.value(a) - ty.value(b)).abs() + ty.value(c)),
        Int3::Bfe => extract(ty, a, b, c),
        Int3::ShfL { wrap } => ((u128::from(pair) << funnel(wrap)) >> 32) as u64 & mask(32),
        Int3::ShfR { wrap } => pair >> funnel(wrap) & mask(32),
        Int3::Prmt(mode) => permute(mode, a as u32, b as u32, c as u32).into(),
        Int3::Lop3(table) => lop3(table, a as u32, b as u32, c as u32).into(),
        Int3::Fns => find_nth(a as u32, b as u32, c as u32 as i32).into(),
        Int3::AbsDiff4(add) => abs_diff4(ty.signed, add, a, b, c),
    }
}

fn abs_diff4(signed: bool, add: bool, a: u64, b: u64, c: u64) -> u64 {
    let byte = IntType { bits: 8, signed };
    let difference = |i: u32| (byte.value(a >> (8 * i)) - byte.value(b >> (8 * i))).unsigned_abs() as u64;
    if add {
        ((0..4).map(difference).sum::<u64>() + c) & mask(32)
    } else {
        (0..4).map(|i| difference(i) << (8 * i)).sum()
    }
}

fn dot(signed: [bool; 2], half: Option<bool>, a: u32, b: u32, c: u32) -> u32 {
    let byte = |v: u32, i: u32, s: bool| IntType { bits: 8, signed: s }.value((v >> (8 * i)).into());
    let mut sum = i128::from(c as i32);
    match half {
        None => (0..4).for_each(|i| sum += byte(a, i, signed[0]) * byte(b, i, signed[1])),
        Some(upper) => {
            let word = IntType { bits: 16, signed: signed[0] };
            for i in 0..2 {
                let at = i + 2 * u32::from(upper);
                sum += word.value((a >> (16 * i)).into()) * byte(b, at, signed[1]);
            }
        }
    }
    sum as u32
}

/// Compares two values as the comparison says.
pub fn compares(c: Comparison, a: u64, b: u64) -> bool {
    match c {
        Comparison::Float(op, format, ftz) => {
            let prepare = |v: u64| format.decode(if ftz { format.flush(v) } else { v });
            compare(op, prepare(a), prepare(b))
        }
        Comparison::Int(op, ty) => ordered(op, ty.key(a), ty.key(b)),
    }
}

/// Compares integers.
#[inline]
fn ordered(op: Compare, a: u64, b: u64) -> bool {
    match op {
        Compare::Eq => a == b,
        Compare::Ne => a != b,
        Compare::Lt => a < b,
        Compare::Le => a <= b,
        Compare::Gt => a > b,
        // Unordered forms do not exist for integers; the parser's grammar leaves only `ge`.
        _ => a >= b,
    }
}

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

/// Executes an operation of this family.
///
/// # Errors
/// None of its own.
pub fn execute(op: &Arith, cx: &mut Cx<'_, '_>) -> Result {
    let m = cx.m;
    match op {
        Arith::One(op, ty, d, s) => {
            let a = cx.w.regs.r64(*s, m);
            cx.w.regs.w64(*d, m, &a.map(|a| int1(*op, *ty, a)));
        }
        Arith::Two(op, ty, d, s, packed) => two(cx, *op, *ty, *d, s, *packed),
        Arith::Three(op, ty, d, s, p) => {
            if ty.bits == 64 || matches!(op, Int3::Mad(Part::Wide)) {
                let v = [cx.w.regs.r64(s[0], m), cx.w.regs.r64(s[1], m), cx.w.regs.r64(s[2], m)];
                let r = match op {
                    Int3::Mad(Part::Lo) => {
                        std::array::from_fn(|i| v[0][i].wrapping_mul(v[1][i]).wrapping_add(v[2][i]))
                    }
                    _ => std::array::from_fn(|i| int3(*op, *ty, v[0][i], v[1][i], v[2][i])),
                };
                cx.w.regs.w64(*d, m, &r);
                return Ok(Flow::Next);
            }
            let v = [cx.w.regs.r32(s[0], m), cx.w.regs.r32(s[1], m), cx.w.regs.r32(s[2], m)];
            let r: [u32; 32] = match op {
                Int3::Mad(Part::Lo) if ty.bits == 32 => {
                    std::array::from_fn(|i| v[0][i].wrapping_mul(v[1][i]).wrapping_add(v[2][i]))
                }
                Int3::Lop3(t) => lop3_row(*t, &v),
                _ => std::array::from_fn(|i| {
                    int3(*op, *ty, v[0][i].into(), v[1][i].into(), v[2][i].into()) as u32
                }),
            };
            cx.w.regs.w32(*d, m, &r);
            if let Some((p, op, q)) = p {
                let q = cx.w.regs.pred(*q, m);
                cx.w.regs.wpred(*p, m, combine(*op, bits(|i| r[i] != 0), q));
            }
        }
        Arith::Insert(ty, d, s) => {
            let v: [_; 4] = std::array::from_fn(|k| cx.w.regs.r64(s[k], m));
            let r = std::array::from_fn(|i| insert(*ty, v[0][i], v[1][i], v[2][i], v[3][i]));
            cx.w.regs.w64(*d, m, &r);
        }
        Arith::Carry { sub, reads, writes, mul, ty, d, s } => {
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
        Arith::Set(c, result, d, s, with, packed) => {
            let with = with.map(|(op, p)| (op, cx.w.regs.pred(p, m)));
            let adjust = |p: u32| with.map_or(p, |(op, with)| combine(op, p, with));
            let (one, half) = match result {
                Type::F32 => (1f32.to_bits(), 0),
                Type::F16 | Type::F16x2 => (0x3c00, 0x3c00),
                Type::Bf16 | Type::Bf16x2 => (0x3f80, 0x3f80),
                Type::U16 | Type::S16 => (0xffff, 0xffff),
                _ => (FULL, 0xffff),
            };
            let r: [u32; 32] = if *packed {
                let [lo, hi] = setp_packed(cx, *c, s).map(adjust);
                std::array::from_fn(|i| ((lo >> i & 1) * half) | (((hi >> i & 1) * half) << 16))
            } else {
                let p = adjust(setp(cx, *c, s, is_wide(*c)));
                std::array::from_fn(|i| (p >> i & 1) * one)
            };
            cx.w.regs.w32(*d, m, &r);
        }
        Arith::Select(_, d, s, p) => select(cx, *d, s, *p),
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
