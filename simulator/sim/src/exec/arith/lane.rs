//! Integer arithmetic of one lane.

use crate::decode::arith::{Comparison, Int1, Int2, Int3, Part, Permute};
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

/// An operation of two operands on values of `ty`, zero-extended.
pub(in crate::exec) fn int2(op: Int2, ty: IntType, a: u64, b: u64) -> u64 {
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

pub(in crate::exec) fn int1(op: Int1, ty: IntType, a: u64) -> u64 {
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

/// `lop3` as its truth table says, with a = 0xf0, b = 0xcc, c = 0xaa.
pub(in crate::exec) fn lop3(table: u8, a: u32, b: u32, c: u32) -> u32 {
    (0..8).filter(|i| table >> i & 1 != 0).fold(0, |out, i| {
        let pick = |bit: u32, v: u32| if i & bit != 0 { v } else { !v };
        out | pick(4, a) & pick(2, b) & pick(1, c)
    })
}

/// The same for 32 lanes, one after the other for each bit of the table.
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

pub(in crate::exec) fn int3(op: Int3, ty: IntType, a: u64, b: u64, c: u64) -> u64 {
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

pub(in crate::exec) fn abs_diff4(signed: bool, add: bool, a: u64, b: u64, c: u64) -> u64 {
    let byte = IntType { bits: 8, signed };
    let difference = |i: u32| (byte.value(a >> (8 * i)) - byte.value(b >> (8 * i))).unsigned_abs() as u64;
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

/// Compares two values as the comparison says.
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
