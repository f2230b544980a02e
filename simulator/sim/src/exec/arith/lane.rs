//! Integer arithmetic of one lane.

use super::{Comparison, Part, Permute};
use crate::semantics::float::arith::{Compare, compare};
use crate::semantics::float::int::IntType;

pub(in crate::exec) fn mask(n: u32) -> u64 {
    u64::MAX >> (64 - n)
}

pub(in crate::exec) fn product(part: Part, ty: IntType, a: u64, b: u64) -> u64 {
    // Of two large unsigned 64-bit numbers the product needs all 128 bits.
    let p = ty.value(a).wrapping_mul(ty.value(b));
    match part {
        Part::Lo => p as u64 & mask(ty.bits),
        Part::Hi => (p >> ty.bits) as u64 & mask(ty.bits),
        Part::Wide => p as u64 & mask(ty.bits * 2),
    }
}

/// 24-bit products keep 48 bits: the low 32, or bits 16 to 47.
pub(in crate::exec) fn product24(part: Part, signed: bool, a: u64, b: u64) -> u64 {
    let ty = IntType { bits: 24, signed };
    let p = ty.value(a) * ty.value(b);
    let kept = if part == Part::Hi { p >> 16 } else { p };
    u64::from(kept as u32)
}

fn saturated(ty: IntType, v: i128) -> u64 {
    ty.bits_of(v.clamp(ty.min(), ty.max()))
}

/// An instruction of two operands as a function of values of its type, zero-extended. The modifiers are `.sat`, `.relu` and
/// `.wrap`.
pub(in crate::exec) fn binary(
    root: &str,
    part: Option<Part>,
    (sat, relu, wrap): (bool, bool, bool),
) -> fn(IntType, u64, u64) -> u64 {
    match (root, part) {
        ("add", _) if sat => |t, a, b| saturated(t, t.value(a) + t.value(b)),
        ("add", _) => |t, a, b| t.bits_of(t.value(a) + t.value(b)),
        ("sub", _) if sat => |t, a, b| saturated(t, t.value(a) - t.value(b)),
        ("sub", _) => |t, a, b| t.bits_of(t.value(a) - t.value(b)),
        ("mul", Some(Part::Hi)) => |t, a, b| product(Part::Hi, t, a, b),
        ("mul", Some(Part::Wide)) => |t, a, b| product(Part::Wide, t, a, b),
        ("mul", _) => |t, a, b| product(Part::Lo, t, a, b),
        ("mul24", Some(Part::Hi)) => |t, a, b| product24(Part::Hi, t.signed, a, b),
        ("mul24", _) => |t, a, b| product24(Part::Lo, t.signed, a, b),
        // Division by zero gives an unspecified value; chips give all ones, and the dividend as remainder.
        ("div", _) => |t, a, b| match t.value(b) {
            0 => mask(t.bits),
            y => t.bits_of(t.value(a) / y),
        },
        ("rem", _) => |t, a, b| match t.value(b) {
            0 => a & mask(t.bits),
            y => t.bits_of(t.value(a) % y),
        },
        ("min", _) if relu => |t, a, b| t.bits_of(t.value(a).min(t.value(b)).max(0)),
        ("min", _) => |t, a, b| t.bits_of(t.value(a).min(t.value(b))),
        ("max", _) if relu => |t, a, b| t.bits_of(t.value(a).max(t.value(b)).max(0)),
        ("max", _) => |t, a, b| t.bits_of(t.value(a).max(t.value(b))),
        ("and", _) => |_, a, b| a & b,
        ("or", _) => |_, a, b| a | b,
        ("xor", _) => |_, a, b| a ^ b,
        ("shl", _) => |t, a, b| if b as u32 >= t.bits { 0 } else { a << b as u32 & mask(t.bits) },
        ("shr", _) => |t, a, b| t.bits_of(t.value(a) >> (b as u32).min(t.bits)),
        ("szext", _) if wrap => |t, a, b| extended(t, a, b & 31),
        ("szext", _) => extended,
        _ if wrap => |_, a, b| bit_mask(a as u32 & 31, b as u32 & 31),
        _ => |_, a, b| bit_mask(a as u32, (b as u32).min(32)),
    }
}

/// The low `n` bits of a number of 32 bits, extended as its type says.
fn extended(t: IntType, a: u64, n: u64) -> u64 {
    match n {
        0 => 0,
        1..=31 => IntType { bits: 32, ..t }.bits_of(IntType { bits: n as u32, ..t }.value(a)),
        _ => a & mask(32),
    }
}

fn bit_mask(start: u32, width: u32) -> u64 {
    if start > 31 { 0 } else { ((1u64 << width) - 1) << start & mask(32) }
}

/// An instruction of one operand as a function of values of its type; `shift` is `.shiftamt` of `bfind`.
pub(in crate::exec) fn unary(root: &str, shift: bool) -> fn(IntType, u64) -> u64 {
    match root {
        "neg" => |t, a| t.bits_of(-t.value(a)),
        "abs" => |t, a| t.bits_of(t.value(a).abs()),
        "not" => |t, a| !a & mask(t.bits),
        "cnot" => |t, a| u64::from(a & mask(t.bits) == 0),
        "popc" => |t, a| (a & mask(t.bits)).count_ones().into(),
        "clz" => |t, a| ((a & mask(t.bits)).leading_zeros() - (64 - t.bits)).into(),
        "brev" => |t, a| a.reverse_bits() >> (64 - t.bits),
        _ if shift => |t, a| highest(t, a).map_or(u32::MAX, |at| t.bits - 1 - at).into(),
        _ => |t, a| highest(t, a).unwrap_or(u32::MAX).into(),
    }
}

/// The most significant one; of a negative signed number the most significant zero.
fn highest(t: IntType, a: u64) -> Option<u32> {
    let v = if t.signed && t.value(a) < 0 { !a } else { a };
    (v & mask(t.bits)).checked_ilog2()
}

/// `shf`: the upper half of a pair shifted left, or the lower half of it shifted right.
pub(in crate::exec) fn funnel(left: bool, wrap: bool, a: u64, b: u64, c: u64) -> u64 {
    let by = if wrap { c as u32 & 31 } else { (c as u32).min(32) };
    let pair = a & mask(32) | b << 32;
    match left {
        true => ((u128::from(pair) << by) >> 32) as u64 & mask(32),
        false => pair >> by & mask(32),
    }
}

pub(in crate::exec) fn permute(mode: Option<Permute>, a: u32, b: u32, c: u32) -> u32 {
    let bytes: [u8; 8] = (u64::from(a) | u64::from(b) << 32).to_le_bytes();
    let pick = |sel: u32| {
        let byte = bytes[(sel & 7) as usize];
        if sel & 8 != 0 { if byte & 0x80 != 0 { 0xff } else { 0 } } else { byte }
    };
    let c3 = c & 3;
    let out: [u8; 4] = match mode {
        None => std::array::from_fn(|i| pick(c >> (4 * i) & 0xf)),
        Some(Permute::F4e) => std::array::from_fn(|i| pick((c3 + i as u32) & 7)),
        Some(Permute::B4e) => std::array::from_fn(|i| pick(c3.wrapping_sub(i as u32) & 7)),
        Some(Permute::Rc8) => [pick(c3); 4],
        Some(Permute::Ecl) => std::array::from_fn(|i| pick((i as u32).max(c3))),
        Some(Permute::Ecr) => std::array::from_fn(|i| pick((i as u32).min(c3))),
        Some(Permute::Rc16) => std::array::from_fn(|i| pick((c & 1) * 2 + (i as u32 & 1))),
    };
    u32::from_le_bytes(out)
}

/// `lop3` of 32 lanes as its truth table says, with a = 0xf0, b = 0xcc, c = 0xaa.
pub(in crate::exec) fn lop3_row(table: u8, v: &[[u32; 32]; 3]) -> [u32; 32] {
    let mut out = [0; 32];
    for i in (0..8).filter(|i| table >> i & 1 != 0) {
        let flip = [4, 2, 1].map(|bit| if i & bit != 0 { 0 } else { u32::MAX });
        for (l, out) in out.iter_mut().enumerate() {
            *out |= (v[0][l] ^ flip[0]) & (v[1][l] ^ flip[1]) & (v[2][l] ^ flip[2]);
        }
    }
    out
}

pub(in crate::exec) fn extract(ty: IntType, a: u64, b: u64, c: u64) -> u64 {
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

pub(in crate::exec) fn insert(ty: IntType, a: u64, b: u64, pos: u64, len: u64) -> u64 {
    let (pos, len) = (pos as u32 & 0xff, len as u32 & 0xff);
    if len == 0 || pos >= ty.bits {
        return b;
    }
    let field = mask(len.min(ty.bits - pos)) << pos;
    b & !field | a << pos & field
}

/// Position of the `offset`-th set bit of `a` from `base` up (or down), as PTX describes it.
pub(in crate::exec) fn find_nth(a: u32, base: u32, offset: i32) -> u32 {
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

pub(in crate::exec) fn abs_diff4(signed: bool, most: u64, add: bool, a: u64, b: u64, c: u64) -> u64 {
    let byte = IntType { bits: 8, signed };
    let difference =
        |i: u32| most.min((byte.value(a >> (8 * i)) - byte.value(b >> (8 * i))).unsigned_abs() as u64);
    if add {
        ((0..4).map(difference).sum::<u64>() + c) & mask(32)
    } else {
        (0..4).map(|i| difference(i) << (8 * i)).sum()
    }
}

pub(in crate::exec) fn dot(signed: [bool; 2], half: Option<bool>, a: u32, b: u32, c: u32) -> u32 {
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

pub(in crate::exec) fn compares(c: Comparison, a: u64, b: u64) -> bool {
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
pub(in crate::exec) fn ordered(op: Compare, a: u64, b: u64) -> bool {
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
