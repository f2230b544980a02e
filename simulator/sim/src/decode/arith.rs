//! Integer arithmetic, logic, comparison and selection.
//! PTX ISA 9.7.1 (integer), 9.7.2 (extended precision), 9.7.6 to 9.7.8 (comparison, logic, shift).

use super::float::shape;
use super::*;
use crate::semantics::float::Format;
use crate::semantics::float::arith::Compare;
use crate::semantics::float::int::IntType;

modifiers! {
    /// Which part of a product is kept.
    Part { Lo "lo", Hi "hi", Wide "wide" }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int2 {
    Add,
    AddSat,
    Sub,
    SubSat,
    Mul(Part),
    Mul24(Part),
    Div,
    Rem,
    Min,
    Max,
    MinRelu,
    MaxRelu,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    Szext { wrap: bool },
    Bmsk { wrap: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int1 {
    Neg,
    Abs,
    Not,
    Cnot,
    Popc,
    Clz,
    Brev,
    Bfind { shift: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int3 {
    Mad(Part),
    MadSat,
    Mad24(Part),
    Sad,
    Bfe,
    ShfL {
        wrap: bool,
    },
    ShfR {
        wrap: bool,
    },
    /// Without a mode each nibble of c chooses a byte.
    Prmt(Option<Permute>),
    Lop3(u8),
    Fns,
    /// `vabsdiff4`; `true`: `.add`, of the four differences.
    AbsDiff4(bool),
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

/// A decoded operation; operand widths follow from the type.
#[derive(Debug, Clone)]
pub enum Arith {
    One(Int1, IntType, Dst, Src),
    /// Two operands; `true`: the halves are separate 16-bit integers.
    Two(Int2, IntType, Dst, [Src; 2], bool),
    /// Three operands. For `lop3` with a predicate result, that and its combination.
    Three(Int3, IntType, Dst, [Src; 3], Option<(Dst, BoolOp, Src)>),
    Insert(IntType, Dst, [Src; 4]),
    /// `add.cc` and its kin: subtract, read carry, write carry.
    Carry {
        /// Subtract rather than add.
        sub: bool,
        /// Adds the carry (borrow) flag.
        reads: bool,
        /// Sets it.
        writes: bool,
        /// Product to form first, for `mad`.
        mul: Option<Part>,
        ty: IntType,
        d: Dst,
        /// Operands; the third only with `mul`.
        s: [Src; 3],
    },
    /// `dp4a`, `dp2a`: signs of a and b, elements are bytes of b; for `dp2a` whether the upper two.
    Dot {
        /// Whether a and b are signed.
        signed: [bool; 2],
        /// `dp2a.lo`, `dp2a.hi`; `None` for `dp4a`.
        half: Option<bool>,
        d: Dst,
        s: [Src; 3],
    },
    /// `not`, `and`, `or`, `xor`, `cnot` of predicates.
    Pred(Int2, Dst, [Src; 2]),
    /// `setp`: results p and q, combination; `true`: packed, p for the low and q for the high half.
    Setp(Comparison, [Dst; 2], [Src; 2], Option<(BoolOp, Src)>, bool),
    /// `set`: the result is all ones or 1.0.
    Set(Comparison, Type, Dst, [Src; 2], Option<(BoolOp, Src)>, bool),
    Select(Dst, [Src; 2], Src),
    /// `slct`: by the sign of an integer, or of a float (`true`), its subnormals flushed (`true`).
    SignSelect(Type, Dst, [Src; 2], Src, bool, bool),
}

fn int(ty: Type) -> IntType {
    IntType { bits: ty.bits(), signed: ty.is_signed() }
}

fn part(i: &mut Ins<'_>) -> Result<Part> {
    i.need("a part of the product", Part::NAMES)
}

pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    let op = match i.ast.root.as_str() {
        "setp" | "set" => compare(i)?,
        "selp" => {
            let ty = i.ty()?;
            Arith::Select(i.dst(0)?, [i.src(1, ty)?, i.src(2, ty)?], i.predicate(3)?)
        }
        "slct" => {
            let ftz = i.has("ftz");
            let types = i.types();
            let [ty, by] = types[..] else { return i.error("needs two types") };
            let float = by == Type::F32;
            Arith::SignSelect(ty, i.dst(0)?, [i.src(1, ty)?, i.src(2, ty)?], i.src(3, by)?, float, ftz)
        }
        "lop3" => lop3(i)?,
        "dp4a" | "dp2a" => {
            let half = (i.ast.root == "dp2a").then(|| i.has("hi"));
            i.ignore(&["lo"]);
            let types = i.types();
            let [a, b] = types[..] else { return i.error("needs two types") };
            let s = [i.src(1, a)?, i.src(2, b)?, i.src(3, Type::B32)?];
            Arith::Dot { signed: [a.is_signed(), b.is_signed()], half, d: i.dst(0)?, s }
        }
        "bfi" => {
            let ty = i.ty()?;
            let s = [i.src(1, ty)?, i.src(2, ty)?, i.src(3, Type::U32)?, i.src(4, Type::U32)?];
            Arith::Insert(int(ty), i.dst(0)?, s)
        }
        // The SIMD video instruction that still has a counterpart in hardware; nvcc emits no other.
        "vabsdiff4" => {
            let add = i.has("add");
            let types = i.types();
            let [_, a, b] = types[..] else { return i.error("needs three types") };
            if a != b {
                return i.error("is executed for a and b of one type");
            }
            let s = [i.src(1, a)?, i.src(2, b)?, i.src(3, Type::B32)?];
            Arith::Three(Int3::AbsDiff4(add), int(a), i.dst(0)?, s, None)
        }
        "addc" | "subc" | "madc" => carry(i)?,
        "add" | "sub" | "mad" if i.ast.has("cc") => carry(i)?,
        "neg" | "abs" | "not" | "cnot" | "popc" | "clz" | "brev" | "bfind" => one(i)?,
        "mad" | "mad24" | "sad" | "bfe" | "shf" | "prmt" | "fns" => three(i)?,
        _ => two(i)?,
    };
    i.finish()?;
    Ok(Op::Arith(op))
}

fn one(i: &mut Ins<'_>) -> Result<Arith> {
    let op = match i.ast.root.as_str() {
        "neg" => Int1::Neg,
        "abs" => Int1::Abs,
        "not" => Int1::Not,
        "cnot" => Int1::Cnot,
        "popc" => Int1::Popc,
        "clz" => Int1::Clz,
        "brev" => Int1::Brev,
        _ => Int1::Bfind { shift: i.has("shiftamt") },
    };
    let ty = i.ty()?;
    if ty == Type::Pred {
        // `not.pred`: an exclusive or with true.
        return Ok(Arith::Pred(Int2::Xor, i.dst(0)?, [i.predicate(1)?, Src::Imm(1)]));
    }
    Ok(Arith::One(op, int(ty), i.dst(0)?, i.src(1, ty)?))
}

fn two(i: &mut Ins<'_>) -> Result<Arith> {
    let sat = i.has("sat");
    let relu = i.has("relu");
    let wrap = i.has("wrap");
    i.ignore(&["clamp"]);
    let op = match (i.ast.root.as_str(), sat, relu) {
        ("add", false, _) => Int2::Add,
        ("add", true, _) => Int2::AddSat,
        ("sub", false, _) => Int2::Sub,
        ("sub", true, _) => Int2::SubSat,
        ("mul", ..) => Int2::Mul(part(i)?),
        ("mul24", ..) => Int2::Mul24(part(i)?),
        ("div", ..) => Int2::Div,
        ("rem", ..) => Int2::Rem,
        ("min", _, false) => Int2::Min,
        ("min", _, true) => Int2::MinRelu,
        ("max", _, false) => Int2::Max,
        ("max", _, true) => Int2::MaxRelu,
        ("and", ..) => Int2::And,
        ("or", ..) => Int2::Or,
        ("xor", ..) => Int2::Xor,
        ("shl", ..) => Int2::Shl,
        ("shr", ..) => Int2::Shr,
        ("szext", ..) => Int2::Szext { wrap },
        _ => Int2::Bmsk { wrap },
    };
    let ty = i.ty()?;
    if ty == Type::Pred {
        return Ok(Arith::Pred(op, i.dst(0)?, [i.predicate(1)?, i.predicate(2)?]));
    }
    let packed = matches!(ty, Type::U16x2 | Type::S16x2);
    let second = if matches!(op, Int2::Shl | Int2::Shr | Int2::Szext { .. }) { Type::U32 } else { ty };
    let ity = if packed { IntType { bits: 16, signed: ty.is_signed() } } else { int(ty) };
    Ok(Arith::Two(op, ity, i.dst(0)?, [i.src(1, ty)?, i.src(2, second)?], packed))
}

fn three(i: &mut Ins<'_>) -> Result<Arith> {
    let sat = i.has("sat");
    let wrap = i.has("wrap");
    i.ignore(&["clamp"]);
    let permute = i.one_of(Permute::NAMES);
    let op = match i.ast.root.as_str() {
        "mad" if sat => {
            i.ignore(&["hi"]);
            Int3::MadSat
        }
        "mad" => Int3::Mad(part(i)?),
        "mad24" if sat => return i.error("mad24.hi.sat is not executed"),
        "mad24" => Int3::Mad24(part(i)?),
        "sad" => Int3::Sad,
        "bfe" => Int3::Bfe,
        "fns" => Int3::Fns,
        "prmt" => Int3::Prmt(permute),
        _ if i.has("l") => Int3::ShfL { wrap },
        _ => {
            i.ignore(&["r"]);
            Int3::ShfR { wrap }
        }
    };
    let ty = i.ty()?;
    let types = match op {
        Int3::Mad(Part::Wide) => [ty, ty, untyped(ty.bits() * 2)],
        Int3::Bfe => [ty, Type::U32, Type::U32],
        Int3::Fns => [Type::U32, Type::U32, Type::S32],
        _ => [ty, ty, ty],
    };
    let s = [i.src(1, types[0])?, i.src(2, types[1])?, i.src(3, types[2])?];
    Ok(Arith::Three(op, int(ty), i.dst(0)?, s, None))
}

fn lop3(i: &mut Ins<'_>) -> Result<Arith> {
    let bool_op = i.one_of(BoolOp::NAMES);
    let ty = i.ty()?;
    let s = [i.src(1, ty)?, i.src(2, ty)?, i.src(3, ty)?];
    let Src::Imm(table) = i.src(4, Type::B32)? else { return i.error("the table is a constant") };
    let (d, p) = match (i.operand(0)?, bool_op) {
        (Operand::Pair(d, p), Some(op)) => (i.result(d)?, Some((i.result(p)?, op, i.predicate(5)?))),
        (_, None) => (i.dst(0)?, None),
        _ => return i.error("a predicate result needs .and, .or or .xor, and the other way round"),
    };
    Ok(Arith::Three(Int3::Lop3(table as u8), int(ty), d, s, p))
}

fn carry(i: &mut Ins<'_>) -> Result<Arith> {
    let root = i.ast.root.as_str();
    let writes = i.has("cc");
    let mul = if root.starts_with("mad") { Some(part(i)?) } else { None };
    let ty = i.ty()?;
    let third = if mul.is_some() { i.src(3, ty)? } else { Src::Imm(0) };
    Ok(Arith::Carry {
        sub: root.starts_with("sub"),
        reads: root.ends_with('c') && root.len() == 4,
        writes,
        mul,
        ty: int(ty),
        d: i.dst(0)?,
        s: [i.src(1, ty)?, i.src(2, ty)?, third],
    })
}

fn compare(i: &mut Ins<'_>) -> Result<Arith> {
    let ftz = i.has("ftz");
    let bool_op = i.one_of(BoolOp::NAMES);
    let op = i.need("a comparison", Compare::NAMES)?;
    let types = i.types();
    let set = i.ast.root == "set";
    let (result, ty) = match (types[..].split_last(), set) {
        (Some((ty, [])), false) => (Type::Pred, *ty),
        (Some((ty, [result])), true) => (*result, *ty),
        _ => return i.error("needs its types: one for setp, two for set"),
    };
    let packed = matches!(ty, Type::F16x2 | Type::Bf16x2);
    let comparison = match shape(ty) {
        Some(shape) => Comparison::Float(op, shape.format, ftz),
        None => Comparison::Int(op, int(ty)),
    };
    let s = [i.src(1, ty)?, i.src(2, ty)?];
    let combine = match bool_op {
        Some(op) => Some((op, i.predicate(3)?)),
        None => None,
    };
    if set {
        return Ok(Arith::Set(comparison, result, i.dst(0)?, s, combine, packed));
    }
    let d = match i.operand(0)? {
        Operand::Pair(p, q) => [i.result(p)?, i.result(q)?],
        p => [i.result(p)?, Dst::Sink],
    };
    Ok(Arith::Setp(comparison, d, s, combine, packed))
}
