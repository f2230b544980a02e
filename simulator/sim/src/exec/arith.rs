//! Integer arithmetic, logic, comparison and selection, bit-exact.
//! PTX ISA 9.7.1 (integer), 9.7.2 (extended precision), 9.7.6 to 9.7.8 (comparison, logic, shift).
//! What one lane computes is in `lane`.

mod lane;

use super::*;
use crate::check::undefined::{Origin, Source};
use crate::decode::operand::untyped;
use crate::machine::regs::Shadow;
use crate::names::modifiers;
use crate::semantics::float::arith::Compare;
use crate::semantics::float::int::IntType;
use crate::semantics::float::{F32, Format};
pub(super) use lane::*;

modifiers! {
    /// Which part of a product is kept.
    Part { Lo "lo", Hi "hi", Wide "wide" }
}

modifiers! {
    /// Modes of `prmt`.
    Permute { F4e "f4e", B4e "b4e", Rc8 "rc8", Ecl "ecl", Ecr "ecr", Rc16 "rc16" }
}

/// How operands are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Comparison {
    Int(Compare, IntType),
    /// As floating-point numbers; `true`: subnormals count as zero.
    Float(Compare, Format, bool),
}

modifiers! {
    /// How a comparison combines with a predicate.
    BoolOp { And "and", Or "or", Xor "xor" }
}

fn combine(op: BoolOp, a: u32, b: u32) -> u32 {
    match op {
        BoolOp::And => a & b,
        BoolOp::Or => a | b,
        BoolOp::Xor => a ^ b,
    }
}

fn int(ty: Type) -> IntType {
    IntType { bits: ty.bits(), signed: ty.is_signed() }
}

fn part(i: &mut Ins<'_>) -> Decoded<Part> {
    i.need("a part of the product", Part::NAMES)
}

/// Operands from the second on, of these types.
fn sources<const N: usize>(i: &Ins<'_>, types: [Type; N]) -> Decoded<[Src; N]> {
    let mut s = [Src::Imm(0); N];
    for (k, ty) in types.into_iter().enumerate() {
        s[k] = i.src(k + 1, ty)?;
    }
    Ok(s)
}

pub fn decode(i: &mut Ins<'_>) -> Decoded {
    match i.ast.root.as_str() {
        "setp" | "set" => compare(i),
        "selp" => {
            let ty = i.ty()?;
            let (d, s, p) = (i.dst(0)?, sources(i, [ty; 2])?, i.predicate(3)?);
            Ok(Op::computes(Spread::Bits, &s, &[p], move |cx| select(cx, d, s, p)))
        }
        "slct" => sign_select(i),
        "lop3" => lop3(i),
        "addc" | "subc" | "madc" => carry(i),
        "add" | "sub" | "mad" if i.ast.has("cc") => carry(i),
        "neg" | "abs" | "not" | "cnot" | "popc" | "clz" | "brev" | "bfind" => one(i),
        "mad" | "mad24" | "sad" | "bfe" | "shf" | "prmt" | "fns" | "vabsdiff4" | "dp4a" | "dp2a" => three(i),
        "bfi" => {
            let ty = i.ty()?;
            let (t, d, s) = (int(ty), i.dst(0)?, sources(i, [ty, ty, Type::U32, Type::U32])?);
            Ok(Op::computes(Spread::Bits, &s[..2], &s[2..], move |cx| {
                let v = s.map(|s| cx.w.regs.r64(s, cx.m));
                let r = std::array::from_fn(|l| insert(t, v[0][l], v[1][l], v[2][l], v[3][l]));
                cx.w.regs.w64(d, cx.m, &r);
            }))
        }
        _ => two(i),
    }
}

fn one(i: &mut Ins<'_>) -> Decoded {
    let root = i.ast.root.as_str();
    let f = unary(root, i.has("shiftamt"));
    let (ty, d) = (i.ty()?, i.dst(0)?);
    if ty == Type::Pred {
        let s = i.predicate(1)?;
        return Ok(Op::computes(Spread::Bits, &[s], &[], move |cx| {
            let p = cx.w.regs.pred(s, cx.m);
            cx.w.regs.wpred(d, cx.m, !p);
        }));
    }
    let how = match root {
        "not" | "brev" => Spread::Bits,
        "neg" => Spread::Upward,
        _ => Spread::Whole(ty.bits()),
    };
    let (t, s) = (int(ty), i.src(1, ty)?);
    Ok(Op::computes(how, &[s], &[], move |cx| {
        let a = cx.w.regs.r64(s, cx.m);
        cx.w.regs.w64(d, cx.m, &each(&a, |a| f(t, a)));
    }))
}

#[inline]
fn map2<T: Copy, R>(a: &[T; 32], b: &[T; 32], f: impl Fn(T, T) -> R) -> [R; 32] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// An operation on the rows of two registers.
type Rows<T> = fn(&[T; 32], &[T; 32]) -> [T; 32];

/// The common operations on registers of a width as loops that the compiler turns into vector code.
macro_rules! rows {
    ($t:ty, $op:expr) => {{
        let rows: Option<Rows<$t>> = match $op {
            ("add", _) => Some(|a, b| map2(a, b, <$t>::wrapping_add)),
            ("sub", _) => Some(|a, b| map2(a, b, <$t>::wrapping_sub)),
            ("mul", Some(Part::Lo)) => Some(|a, b| map2(a, b, <$t>::wrapping_mul)),
            ("and", _) => Some(|a, b| map2(a, b, |x, y| x & y)),
            ("or", _) => Some(|a, b| map2(a, b, |x, y| x | y)),
            ("xor", _) => Some(|a, b| map2(a, b, |x, y| x ^ y)),
            _ => None,
        };
        rows
    }};
}

/// As [`rows!`], for what is common on 32 bits only.
fn rows32(root: &str, signed: bool) -> Option<Rows<u32>> {
    Some(match (root, signed) {
        ("shl", _) => |a, b| map2(a, b, |x, y| x.checked_shl(y).unwrap_or(0)),
        ("shr", false) => |a, b| map2(a, b, |x, y| x.checked_shr(y).unwrap_or(0)),
        ("shr", true) => |a, b| map2(a, b, |x, y| ((x as i32) >> y.min(31)) as u32),
        ("min", false) => |a, b| map2(a, b, u32::min),
        ("max", false) => |a, b| map2(a, b, u32::max),
        ("min", true) => |a, b| map2(a, b, |x, y| (x as i32).min(y as i32) as u32),
        ("max", true) => |a, b| map2(a, b, |x, y| (x as i32).max(y as i32) as u32),
        _ => return None,
    })
}

fn two(i: &mut Ins<'_>) -> Decoded {
    let root = i.ast.root.as_str();
    let (sat, relu, wrap) = (i.has("sat"), i.has("relu"), i.has("wrap"));
    i.ignore(&["clamp"]);
    let part = if root.starts_with("mul") { Some(part(i)?) } else { None };
    let (ty, d) = (i.ty()?, i.dst(0)?);
    if ty == Type::Pred {
        let s = [i.predicate(1)?, i.predicate(2)?];
        let op = BoolOp::NAMES.iter().find(|(name, _)| *name == root).map_or(BoolOp::Xor, |(_, op)| *op);
        return Ok(Op::computes(Spread::Bits, &s, &[], move |cx| {
            let [a, b] = s.map(|s| cx.w.regs.pred(s, cx.m));
            cx.w.regs.wpred(d, cx.m, combine(op, a, b));
        }));
    }
    let packed = matches!(ty, Type::U16x2 | Type::S16x2);
    let shifts = matches!(root, "shl" | "shr");
    let second = if shifts || root == "szext" { Type::U32 } else { ty };
    let t = if packed { IntType { bits: 16, signed: ty.is_signed() } } else { int(ty) };
    let how = match (root, part) {
        ("and" | "or" | "xor" | "shl" | "shr", _) => Spread::Bits,
        _ if packed => Spread::Elements(16, 16),
        ("add" | "sub", _) if !sat => Spread::Upward,
        ("mul", Some(Part::Lo | Part::Wide)) => Spread::Upward,
        _ => Spread::Whole(t.bits),
    };
    let s = sources(i, [ty, second])?;
    let (operands, controls) = s.split_at(if shifts { 1 } else { 2 });
    let f = binary(root, part, (sat, relu, wrap));
    if matches!(root, "div" | "rem") {
        return Ok(Op::computes(how, operands, controls, move |cx| divide(cx, (t, f), d, s)));
    }
    let plain = !(sat || relu || packed);
    if t.bits == 64 || part == Some(Part::Wide) {
        // An unsigned product of 32 bits is a product of 64 bits.
        let wide = (part == Some(Part::Wide) && ty == Type::U32).then_some(Part::Lo);
        let rows = if plain { rows!(u64, (root, wide.or(part))) } else { None };
        return Ok(Op::computes(how, operands, controls, move |cx| {
            let a = cx.w.regs.r64(s[0], cx.m);
            let b = cx.w.regs.r64(s[1], cx.m);
            match rows {
                Some(rows) => cx.w.regs.w64(d, cx.m, &rows(&a, &b)),
                None => cx.w.regs.w64(d, cx.m, &map2(&a, &b, |x, y| f(t, x, y))),
            }
        }));
    }
    let fast = plain && t.bits == 32;
    if let Some(rows) = rows!(u32, (root, part)).or(rows32(root, t.signed)).filter(|_| fast) {
        return Ok(Op::computes(how, operands, controls, move |cx| {
            let a = cx.w.regs.r32(s[0], cx.m);
            let b = cx.w.regs.r32(s[1], cx.m);
            cx.w.regs.w32(d, cx.m, &rows(&a, &b));
        }));
    }
    Ok(Op::computes(how, operands, controls, move |cx| {
        let [a, b] = s.map(|s| cx.w.regs.r32(s, cx.m));
        let one = |x: u32, y: u32| f(t, x.into(), y.into()) as u32;
        let r = match packed {
            true => map2(&a, &b, |x, y| one(x & 0xffff, y & 0xffff) | one(x >> 16, y >> 16) << 16),
            false => map2(&a, &b, one),
        };
        cx.w.regs.w32(d, cx.m, &r);
    }))
}

/// `div` and `rem`, whose result is undefined where the divisor is zero.
fn divide(cx: &mut Cx<'_, '_>, (t, f): (IntType, fn(IntType, u64, u64) -> u64), d: Dst, s: [Src; 2]) {
    let [a, b] = s.map(|s| cx.w.regs.r64(s, cx.m));
    cx.w.regs.w64(d, cx.m, &map2(&a, &b, |x, y| f(t, x, y)));
    let mut undefined = Shadow::default();
    for l in lanes(cx.m).filter(|&l| t.value(b[l]) == 0) {
        undefined.add(l, u128::MAX, Some(Origin { source: Source::Division, pc: cx.pc }));
    }
    cx.w.regs.set_shadow(d, cx.m, &undefined);
}

/// The low 32 bits of three values. Written in place: `map` copies the rows.
#[inline]
fn rows3(cx: &mut Cx<'_, '_>, s: &[Src; 3]) -> [[u32; 32]; 3] {
    [cx.w.regs.r32(s[0], cx.m), cx.w.regs.r32(s[1], cx.m), cx.w.regs.r32(s[2], cx.m)]
}

/// An operation on three values of each lane; `controls` of them, the last ones, say what happens to the bits of the others.
fn triple(
    i: &Ins<'_>,
    types: [Type; 3],
    (how, controls): (Spread, usize),
    f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static,
) -> Decoded {
    let (d, s) = (i.dst(0)?, sources(i, types)?);
    let (operands, controls) = s.split_at(3 - controls);
    Ok(Op::computes(how, operands, controls, move |cx| {
        let a = cx.w.regs.r64(s[0], cx.m);
        let b = cx.w.regs.r64(s[1], cx.m);
        let c = cx.w.regs.r64(s[2], cx.m);
        cx.w.regs.w64(d, cx.m, &std::array::from_fn(|l| f(a[l], b[l], c[l])));
    }))
}

fn three(i: &mut Ins<'_>) -> Decoded {
    let root = i.ast.root.as_str();
    let (sat, wrap, left) = (i.has("sat"), i.has("wrap"), i.has("l"));
    let (upper, add) = (i.has("hi"), i.has("add"));
    let (whole, upward) = ((Spread::Whole(64), 0), (Spread::Upward, 0));
    let types = i.types();
    let (ty, second) = match (root, &types[..]) {
        // Of `vabsdiff4` the first type is that of the result.
        ("vabsdiff4", [_, a, b]) if a != b => return i.error("is executed for a and b of one type"),
        ("dp4a" | "dp2a", [a, b]) | ("vabsdiff4", [_, a, b]) => (*a, *b),
        ("dp4a" | "dp2a", _) => return i.error("needs two types"),
        ("vabsdiff4", _) => return i.error("needs three types"),
        (_, [ty]) => (*ty, *ty),
        _ => return i.error("needs one type"),
    };
    let t = int(ty);
    match root {
        "mad" if sat => triple(i, [ty; 3], whole, move |a, b, c| {
            let sum = t.value(product(Part::Hi, t, a, b)) + t.value(c);
            t.bits_of(sum.clamp(t.min(), t.max()))
        }),
        "mad" => match if upper { Part::Hi } else { part(i)? } {
            Part::Lo if t.bits == 32 => {
                let (d, s) = (i.dst(0)?, sources(i, [ty; 3])?);
                Ok(Op::computes(Spread::Upward, &s, &[], move |cx| {
                    let [a, b, c] = rows3(cx, &s);
                    let r = std::array::from_fn(|l| a[l].wrapping_mul(b[l]).wrapping_add(c[l]));
                    cx.w.regs.w32(d, cx.m, &r);
                }))
            }
            Part::Lo => {
                triple(i, [ty; 3], upward, move |a, b, c| a.wrapping_mul(b).wrapping_add(c) & mask(t.bits))
            }
            Part::Hi => triple(i, [ty; 3], whole, move |a, b, c| {
                t.bits_of(t.value(product(Part::Hi, t, a, b)) + t.value(c))
            }),
            Part::Wide => triple(i, [ty, ty, untyped(ty.bits() * 2)], upward, move |a, b, c| {
                product(Part::Wide, t, a, b).wrapping_add(c) & mask(2 * t.bits)
            }),
        },
        "mad24" if sat => i.error("mad24.hi.sat is not executed"),
        "mad24" => {
            let part = if upper { Part::Hi } else { part(i)? };
            triple(i, [ty; 3], whole, move |a, b, c| {
                product24(part, t.signed, a, b).wrapping_add(c) & mask(32)
            })
        }
        "sad" => {
            triple(i, [ty; 3], whole, move |a, b, c| t.bits_of((t.value(a) - t.value(b)).abs() + t.value(c)))
        }
        "bfe" => triple(i, [ty, Type::U32, Type::U32], (Spread::Bits, 2), move |a, b, c| extract(t, a, b, c)),
        "fns" => triple(i, [Type::U32, Type::U32, Type::S32], whole, |a, b, c| {
            find_nth(a as u32, b as u32, c as u32 as i32).into()
        }),
        "prmt" => {
            let mode = i.one_of(Permute::NAMES);
            triple(i, [ty; 3], (Spread::Bits, 1), move |a, b, c| {
                permute(mode, a as u32, b as u32, c as u32).into()
            })
        }
        "shf" => {
            i.ignore(&["clamp", "r"]);
            triple(i, [ty; 3], (Spread::Bits, 1), move |a, b, c| funnel(left, wrap, a, b, c))
        }
        // The SIMD video instruction that still has a counterpart in hardware; nvcc emits no other.
        "vabsdiff4" => {
            // The first type is that of the result, which a byte of 255 exceeds if it has a sign.
            let most = if sat && types[0].is_signed() { 0x7f } else { 0xff };
            triple(i, [ty, ty, Type::B32], whole, move |a, b, c| abs_diff4(t.signed, most, add, a, b, c))
        }
        _ => {
            let half = (root == "dp2a").then_some(upper);
            i.ignore(&["lo"]);
            let signed = [ty.is_signed(), second.is_signed()];
            triple(i, [ty, second, Type::B32], whole, move |a, b, c| {
                dot(signed, half, a as u32, b as u32, c as u32).into()
            })
        }
    }
}

fn lop3(i: &mut Ins<'_>) -> Decoded {
    let bool_op = i.one_of(BoolOp::NAMES);
    let ty = i.ty()?;
    let s = sources(i, [ty; 3])?;
    let Src::Imm(table) = i.src(4, Type::B32)? else { return i.error("the table is a constant") };
    let (d, p) = match (i.operand(0)?, bool_op) {
        (Operand::Pair(d, p), Some(op)) => (i.result(d)?, Some((i.result(p)?, op, i.predicate(5)?))),
        (_, None) => (i.dst(0)?, None),
        _ => return i.error("a predicate result needs .and, .or or .xor, and the other way round"),
    };
    let operands: Vec<Src> = s.into_iter().chain(p.map(|(_, _, q)| q)).collect();
    Ok(Op::computes(Spread::Bits, &operands, &[], move |cx| {
        let m = cx.m;
        let r = lop3_row(table as u8, &rows3(cx, &s));
        cx.w.regs.w32(d, m, &r);
        if let Some((p, op, q)) = p {
            let q = cx.w.regs.pred(q, m);
            cx.w.regs.wpred(p, m, combine(op, bits(|l| r[l] != 0), q));
        }
    }))
}

/// `add.cc` and its kin: read and write the carry (borrow) flag, for `mad` of a product.
fn carry(i: &mut Ins<'_>) -> Decoded {
    let root = i.ast.root.as_str();
    let (writes, reads, subtracts) = (i.has("cc"), root.ends_with('c'), root.starts_with("sub"));
    let mul = if root.starts_with("mad") { Some(part(i)?) } else { None };
    let ty = i.ty()?;
    let third = if mul.is_some() { i.src(3, ty)? } else { Src::Imm(0) };
    let (t, d, s) = (int(ty), i.dst(0)?, [i.src(1, ty)?, i.src(2, ty)?, third]);
    let how = if matches!(mul, None | Some(Part::Lo)) { Spread::Upward } else { Spread::Whole(64) };
    Ok(Op::computes(how, &s, &[], move |cx| {
        let m = cx.m;
        let v = s.map(|s| cx.w.regs.r64(s, m));
        let (mut r, mut out) = ([0; 32], 0);
        for l in 0..32 {
            let (a, b) = match mul {
                Some(part) => (product(part, t, v[0][l], v[1][l]), v[2][l]),
                None => (v[0][l], v[1][l]),
            };
            let c = u128::from(reads && cx.w.carry >> l & 1 != 0);
            let (a, b) = (u128::from(a & mask(t.bits)), u128::from(b & mask(t.bits)));
            // A borrow is a carry into the bit above the width.
            let wide = if subtracts { a.wrapping_sub(b).wrapping_sub(c) } else { a + b + c };
            r[l] = wide as u64 & mask(t.bits);
            out |= ((wide >> t.bits) as u32 & 1) << l;
        }
        cx.w.regs.w64(d, m, &r);
        if writes {
            cx.w.carry = cx.w.carry & !m | out & m;
        }
    }))
}

/// `setp`, and `set`: a comparison as ones or 1.0 of the result's type.
fn compare(i: &mut Ins<'_>) -> Decoded {
    let ftz = i.has("ftz");
    let bool_op = i.one_of(BoolOp::NAMES);
    let op = i.need("a comparison", Compare::NAMES)?;
    let set = i.ast.root == "set";
    let (result, ty) = match (i.types()[..].split_last(), set) {
        (Some((ty, [])), false) => (Type::Pred, *ty),
        (Some((ty, [result])), true) => (*result, *ty),
        _ => return i.error("needs its types: one for setp, two for set"),
    };
    let packed = matches!(ty, Type::F16x2 | Type::Bf16x2);
    let c = match float::shape(ty) {
        Some(shape) => Comparison::Float(op, shape.format, ftz),
        None => Comparison::Int(op, int(ty)),
    };
    let s = sources(i, [ty; 2])?;
    let with = bool_op.map(|op| i.predicate(3).map(|p| (op, p))).transpose()?;
    // The comparison of the one value, or of the low and the high half, and of the one its negation.
    let compared = move |cx: &mut Cx<'_, '_>| {
        let m = cx.m;
        let [p, q] = if packed {
            setp_packed(cx, c, &s)
        } else {
            let p = setp(cx, c, &s);
            [p, !p]
        };
        match with {
            Some((op, with)) => {
                let with = cx.w.regs.pred(with, m);
                [combine(op, p, with), combine(op, q, with)]
            }
            None => [p, q],
        }
    };
    let controls: Vec<Src> = with.iter().map(|(_, p)| *p).collect();
    if !set {
        let (how, d) = (if packed { Spread::Whole(32) } else { Spread::Comparison(c) }, i.pair(0)?);
        return Ok(Op::computes(how, &s, &controls, move |cx| {
            let [p, q] = compared(cx);
            cx.w.regs.wpred(d[0], cx.m, p);
            cx.w.regs.wpred(d[1], cx.m, q);
        }));
    }
    let (one, half) = match result {
        Type::F32 => (1f32.to_bits(), 0),
        Type::F16 | Type::F16x2 => (0x3c00, 0x3c00),
        Type::Bf16 | Type::Bf16x2 => (0x3f80, 0x3f80),
        Type::U16 | Type::S16 => (0xffff, 0xffff),
        _ => (FULL, 0xffff),
    };
    let d = i.dst(0)?;
    Ok(Op::computes(Spread::Whole(64), &[&s[..], &controls].concat(), &[], move |cx| {
        let [p, q] = compared(cx);
        let value = |l: usize| match packed {
            true => ((p >> l & 1) * half) | (((q >> l & 1) * half) << 16),
            false => (p >> l & 1) * one,
        };
        cx.w.regs.w32(d, cx.m, &std::array::from_fn(value));
    }))
}

fn bits(f: impl Fn(usize) -> bool) -> u32 {
    (0..32).fold(0, |m, i| m | u32::from(f(i)) << i)
}

fn setp(cx: &mut Cx<'_, '_>, c: Comparison, s: &[Src; 2]) -> u32 {
    let a = cx.w.regs.r64(s[0], cx.m);
    let b = cx.w.regs.r64(s[1], cx.m);
    let Comparison::Int(op, ty) = c else { return bits(|i| compares(c, a[i], b[i])) };
    let (a, b) = (each(&a, |v| ty.key(v)), each(&b, |v| ty.key(v)));
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

/// Compares the two 16-bit halves of each lane: results for the low and the high half.
fn setp_packed(cx: &mut Cx<'_, '_>, c: Comparison, s: &[Src; 2]) -> [u32; 2] {
    let [a, b] = s.map(|s| cx.w.regs.r32(s, cx.m));
    let half = |v: u32, shift: u32| u64::from(v >> shift & 0xffff);
    [0, 16].map(|shift| bits(|i| compares(c, half(a[i], shift), half(b[i], shift))))
}

/// `selp`: moves one of two values.
fn select(cx: &mut Cx<'_, '_>, d: Dst, s: [Src; 2], p: Src) {
    let m = cx.m;
    let p = cx.w.regs.pred(p, m);
    cx.w.regs.moving(|regs| {
        let (a, b) = (regs.r64(s[0], m & p), regs.r64(s[1], m & !p));
        regs.w64(d, m, &std::array::from_fn(|i| if p >> i & 1 != 0 { a[i] } else { b[i] }));
    });
}

/// `slct`: one of two values by the sign of an integer or a float, whose subnormals may count as zero.
fn sign_select(i: &mut Ins<'_>) -> Decoded {
    let ftz = i.has("ftz");
    let [ty, by_type] = i.types()[..] else { return i.error("needs two types") };
    let (d, s, by) = (i.dst(0)?, sources(i, [ty; 2])?, i.src(3, by_type)?);
    Ok(Op::computes(Spread::Bits, &s, &[by], move |cx| {
        let by = cx.w.regs.r32(by, cx.m);
        // -0 counts as non-negative, so does what is flushed to it; NaN does not.
        let first = |l: usize| match by_type {
            Type::F32 => f32::from_bits(by[l]) >= 0.0 || ftz && F32.is_subnormal(by[l].into()),
            _ => by[l] as i32 >= 0,
        };
        let [a, b] = s.map(|s| cx.w.regs.r64(s, cx.m));
        cx.w.regs.w64(d, cx.m, &std::array::from_fn(|l| if first(l) { a[l] } else { b[l] }));
    }))
}
