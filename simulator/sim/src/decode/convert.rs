//! `cvt`, `mov`, and the instructions that change what an address means.
//! PTX ISA 9.7.9.21 (`cvt`), 9.7.9.1 (`mov`), `cvta`, `isspacep`, `mapa`, `getctarank`.

use super::float::rounding;
use super::*;
use crate::semantics::float::int::{IntRound, IntType};
use crate::semantics::float::{
    BF16, Clamp, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, F64, Format, Round, TF32,
};

/// One side of a conversion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    Int(IntType),
    Float(Format),
    Ue8m0,
}

/// How one number is converted.
#[derive(Debug, Clone, Copy)]
pub struct How {
    pub to: Number,
    pub from: Number,
    /// Rounding to a float.
    pub round: Round,
    /// Rounding to an integer, or to an integral float.
    pub integral: Option<IntRound>,
    pub clamp: Clamp,
    /// Flush subnormals of f32.
    pub ftz: bool,
}

#[derive(Debug, Clone)]
pub enum Convert {
    /// Copies without looking.
    Move(Dst, Src),
    /// `mov` of a vector into one register, low element first; bits of an element.
    Pack(Dst, Vec<Src>, u32),
    /// `mov` of one register into a vector; bits of an element.
    Unpack(Vec<Dst>, Src, u32),
    /// `cvt` of one number.
    One {
        how: How,
        /// Bits of the destination register that the result is extended to.
        extend: u32,
        d: Dst,
        s: Src,
    },
    /// `cvt` of two or four numbers into one register: the first operand goes to the upper place.
    Many {
        to: Number,
        from: Number,
        /// Bits of an element in the destination.
        step: u32,
        round: Round,
        clamp: Clamp,
        /// Flush subnormals of f32 operands.
        ftz: bool,
        d: Dst,
        /// Operands in the order of places, lowest first.
        s: Vec<Src>,
    },
    /// `cvt` of a packed register into a packed register of as many elements.
    Packed {
        to: Number,
        from: Number,
        /// Bits of an element in the source.
        width: u32,
        /// Bits of an element in the destination.
        step: u32,
        n: u32,
        round: Round,
        clamp: Clamp,
        d: Dst,
        s: Src,
    },
    /// `cvt.rs`: like `Many` with random bits.
    Stochastic {
        to: Format,
        /// Bits of an element.
        step: u32,
        clamp: Clamp,
        d: Dst,
        /// Operands, lowest place first.
        s: Vec<Src>,
        random: Src,
    },
    /// `cvt.pack`: two s32, and maybe bits below them.
    PackInt {
        to: IntType,
        d: Dst,
        /// Upper and lower operand.
        s: [Src; 2],
        /// What is shifted up.
        below: Option<Src>,
    },
    /// `cvta`; `true`: to the space.
    Address(Space, bool, Dst, Src),
    IsSpace(Space, Dst, Src),
    /// `mapa`; `true`: on generic addresses.
    Map(bool, Dst, Src, Src),
    /// `getctarank`; `true`: of a generic address.
    Rank(bool, Dst, Src),
}

fn narrow(name: &str) -> Option<(Number, u32, u32)> {
    // (element, bits in the register, elements)
    Some(match name {
        "f16x2" => (Number::Float(F16), 16, 2),
        "bf16x2" => (Number::Float(BF16), 16, 2),
        "e4m3x2" => (Number::Float(E4M3), 8, 2),
        "e5m2x2" => (Number::Float(E5M2), 8, 2),
        "e2m3x2" => (Number::Float(E2M3), 8, 2),
        "e3m2x2" => (Number::Float(E3M2), 8, 2),
        "e2m1x2" => (Number::Float(E2M1), 4, 2),
        "ue8m0x2" => (Number::Ue8m0, 8, 2),
        "e4m3x4" => (Number::Float(E4M3), 8, 4),
        "e5m2x4" => (Number::Float(E5M2), 8, 4),
        "e2m3x4" => (Number::Float(E2M3), 8, 4),
        "e3m2x4" => (Number::Float(E3M2), 8, 4),
        "e2m1x4" => (Number::Float(E2M1), 4, 4),
        _ => return None,
    })
}

fn single(name: &str) -> Option<(Number, u32, u32)> {
    let number = match name {
        "f16" => Number::Float(F16),
        "bf16" => Number::Float(BF16),
        "tf32" => Number::Float(TF32),
        "f32" => Number::Float(F32),
        "f64" => Number::Float(F64),
        _ => {
            let ty = Type::from_name(name)?;
            if !matches!(name.as_bytes()[0], b'u' | b's') || ty.bits() > 64 {
                return None;
            }
            Number::Int(IntType { bits: ty.bits(), signed: ty.is_signed() })
        }
    };
    let bits = match number {
        Number::Int(t) => t.bits,
        Number::Float(f) => f.width(),
        Number::Ue8m0 => 8,
    };
    Some((number, bits, 1))
}

pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    let op = match i.ast.root.as_str() {
        "mov" => mov(i)?,
        "cvta" => {
            let to = i.has("to");
            let space = i.space();
            let ty = i.ty()?;
            // A variable's name stands for its address in its own space.
            Convert::Address(space, to, i.dst(0)?, i.src(1, ty)?)
        }
        "isspacep" => {
            let space = i.space();
            Convert::IsSpace(space, i.dst(0)?, i.src(1, Type::U64)?)
        }
        "mapa" | "getctarank" => {
            let generic = i.space() == Space::Generic;
            let ty = i.ty()?;
            match i.ast.root.as_str() {
                "mapa" => Convert::Map(generic, i.dst(0)?, i.src(1, ty)?, i.src(2, Type::U32)?),
                _ => Convert::Rank(generic, i.dst(0)?, i.src(1, if generic { Type::U64 } else { ty })?),
            }
        }
        _ => cvt(i)?,
    };
    i.finish()?;
    Ok(Op::Convert(op))
}

fn mov(i: &mut Ins<'_>) -> Result<Convert> {
    let ty = i.ty()?;
    Ok(match (i.operand(0)?, i.operand(1)?) {
        (Operand::Vector(list), _) => {
            let n = list.len() as u32;
            Convert::Unpack(i.dsts(0)?, i.src(1, ty)?, ty.bits() / n)
        }
        (_, Operand::Vector(list)) => {
            let bits = ty.bits() / list.len() as u32;
            Convert::Pack(i.dst(0)?, i.srcs(1, untyped(bits))?, bits)
        }
        _ => Convert::Move(i.dst(0)?, i.src(1, ty)?),
    })
}

fn cvt(i: &mut Ins<'_>) -> Result<Convert> {
    let stochastic = i.has("rs");
    let away = i.has("rna");
    let round = if away { Some(Round::NearestAway) } else { rounding(i) };
    let integral = i.one_of(IntRound::NAMES);
    let clamp = Clamp { sat: i.has("sat"), satfinite: i.has("satfinite"), relu: i.has("relu") };
    let ftz = i.has("ftz");
    if i.has("scaled::n2::ue8m0") {
        return i.error("scaled conversions are not executed");
    }
    if i.has("pack") {
        return pack(i);
    }
    let types = i.parse_all(|m| narrow(m).or_else(|| single(m)));
    let [(to, step, n_to), (from, width, n_from)] = types[..] else {
        return i.error("needs a destination and a source type the simulator converts");
    };
    let round = round.unwrap_or(Round::NearestEven);
    let source = |bits: u32| match (from, bits) {
        (Number::Float(f), 32) if f == F32 => Type::F32,
        (Number::Float(f), 64) if f == F64 => Type::F64,
        _ => untyped(bits),
    };
    match (n_to, n_from) {
        (1, 1) => {
            let d = i.dst(0)?;
            let extend = match d {
                Dst::Reg(Reg::R64(_)) => 64,
                _ => 32,
            };
            let s = i.src(1, source(width))?;
            let how = How { to, from, round, integral, clamp, ftz };
            Ok(Convert::One { how, extend, d, s })
        }
        (_, 1) => {
            // `d, {a, b, c, e}, random` or `d, a, b[, random]`: the first is the uppermost.
            let sources = i.count() - 1;
            let vector = matches!(i.operand(1)?, Operand::Vector(_));
            let mut s = if vector {
                i.srcs(1, source(width))?
            } else {
                (1..=n_to as usize).map(|k| i.src(k, source(width))).collect::<Result<Vec<_>>>()?
            };
            s.reverse();
            if s.len() != n_to as usize {
                return i.error(format!("needs {n_to} numbers to convert, has {}", s.len()));
            }
            if stochastic {
                let Number::Float(to) = to else { return i.error(".rs needs a floating-point type") };
                let random = i.src(sources, Type::B32)?;
                return Ok(Convert::Stochastic { to, step, clamp, d: i.dst(0)?, s, random });
            }
            Ok(Convert::Many { to, from, step, round, clamp, ftz, d: i.dst(0)?, s })
        }
        (a, b) if a == b => {
            let s = i.src(1, Type::B32)?;
            Ok(Convert::Packed { to, from, width, step, n: a, round, clamp, d: i.dst(0)?, s })
        }
        _ => i.error("converts between different numbers of elements"),
    }
}

fn pack(i: &mut Ins<'_>) -> Result<Convert> {
    // d, a, b: the first type is the result's; `.b32` appears when bits are shifted up.
    let types = i.types();
    let Some(to) = types.first() else { return i.error("needs types") };
    let below = if i.count() > 3 { Some(i.src(3, Type::B32)?) } else { None };
    Ok(Convert::PackInt {
        to: IntType { bits: to.bits(), signed: to.is_signed() },
        d: i.dst(0)?,
        s: [i.src(1, Type::S32)?, i.src(2, Type::S32)?],
        below,
    })
}
