//! `cvt`, `mov`, and the instructions that change what an address means.
//! PTX ISA 9.7.9.21 (`cvt`), 9.7.9.1 (`mov`), `cvta`, `isspacep`, `mapa`, `getctarank`.

use super::float::rounding;
use super::mma::element;
use super::*;
use crate::decode::operand::untyped;
use crate::memory::{RANK_SHIFT, SHARED_WINDOW, from_generic, in_space, to_generic};
use crate::semantics::element::Element;
use crate::semantics::float::int::{self, IntRound, IntType};
use crate::semantics::float::{
    BF16, Clamp, F16, F32, F64, Format, Round, decode_ue8m0, encode_stochastic, encode_ue8m0,
};

/// One side of a conversion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    Int(IntType),
    Float(Format),
    Ue8m0,
}

impl Number {
    fn bits(self) -> u32 {
        match self {
            Number::Int(ty) => ty.bits,
            Number::Float(format) => format.width(),
            Number::Ue8m0 => 8,
        }
    }
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

fn number(name: &str) -> Option<Number> {
    Some(match name {
        "f32" => Number::Float(F32),
        "f64" => Number::Float(F64),
        "ue8m0" => Number::Ue8m0,
        _ => match element(name).and_then(Element::format) {
            Some(format) => Number::Float(format),
            None => {
                let ty =
                    Type::from_name(name).filter(|ty| name.starts_with(['u', 's']) && ty.bits() <= 64)?;
                Number::Int(IntType { bits: ty.bits(), signed: ty.is_signed() })
            }
        },
    })
}

/// A number or several by their PTX name: what they are, the bits that each takes, how many there are.
fn operand(name: &str) -> Option<(Number, u32, u32)> {
    let (base, count) = match name.rsplit_once('x') {
        Some((base, "2")) => (base, 2),
        Some((base, "4")) => (base, 4),
        _ => (name, 1),
    };
    let number = number(base)?;
    let bits = if number.bits() == 6 { 8 } else { number.bits() };
    Some((number, bits, count))
}

/// A decoded number: what `cvt` reads.
fn read(from: Number, ftz: bool, bits: u64) -> f64 {
    match from {
        Number::Float(f) => f.decode(if ftz && f == F32 { f.flush(bits) } else { bits }),
        Number::Ue8m0 => decode_ue8m0(bits as u8),
        Number::Int(ty) => ty.value(bits) as f64,
    }
}

fn write(to: Number, x: f64, round: Round, clamp: Clamp) -> u64 {
    match to {
        Number::Float(f) => f.encode(x, round, clamp),
        Number::Ue8m0 => encode_ue8m0(x, round, clamp.satfinite).into(),
        // Integers are converted by `one`; packed conversions have none.
        Number::Int(ty) => ty.bits_of(x as i128),
    }
}

/// NaN that a conversion carries along, as an H100 does: binary64 on either side keeps sign and upper payload and
/// becomes quiet; bfloat16 is widened by a shift, TF32 cut off. Others give the canonical NaN.
fn nan(from: Format, to: Format, round: Round, bits: u64) -> Option<u64> {
    if from == BF16 && to == F32 {
        return Some(bits << 16);
    }
    if from == F32 && round == Round::NearestAway {
        return Some(bits & 0xffff_e000);
    }
    if from != F64 && to != F64 {
        return None;
    }
    let sign = bits >> (from.width() - 1) & 1;
    let payload = bits << (64 - from.man_bits) >> (64 - to.man_bits);
    let exponent = (1u64 << to.exp_bits) - 1;
    Some(sign << (to.width() - 1) | exponent << to.man_bits | 1 << (to.man_bits - 1) | payload)
}

/// The conversion of one number.
fn one(h: &How, bits: u64) -> u64 {
    match (h.to, h.from) {
        (Number::Int(to), Number::Int(from)) => int::int_to_int(bits, from, to, h.clamp.sat),
        (Number::Int(to), Number::Float(f)) => {
            let x = read(h.from, h.ftz, bits);
            int::float_to_int(x, f == F64, to, h.integral.unwrap_or(IntRound::Zero))
        }
        (Number::Float(f), Number::Int(from)) => int::int_to_float(from.value(bits), f, h.round, h.clamp.sat),
        (Number::Float(to), Number::Float(from)) => {
            // Between equal types without rounding the bits stay, NaN payloads too.
            if to == from && h.integral.is_none() && h.clamp == Clamp::default() {
                return if h.ftz && to == F32 { to.flush(bits) } else { bits };
            }
            // Flushing does not reach conversions to binary16, as directed rounding shows on an H100.
            let x = read(h.from, h.ftz && to != F16, bits);
            if x.is_nan()
                && !h.clamp.sat
                && let Some(nan) = nan(from, to, h.round, bits)
            {
                return nan;
            }
            let x = match h.integral {
                Some(round) if to == from => int::round_to_integral(x, round),
                _ => x,
            };
            let r = to.encode(x, h.round, h.clamp);
            if h.ftz && to == F32 { to.flush(r) } else { r }
        }
        (to, from) => write(to, read(from, h.ftz, bits), h.round, h.clamp),
    }
}

pub fn decode(i: &mut Ins<'_>) -> Decoded {
    match i.ast.root.as_str() {
        "mov" => mov(i),
        "cvta" => {
            let (to, space, ty) = (i.has("to"), i.space(), i.ty()?);
            // A variable's name stands for its address in its own space.
            address(i, &[ty], move |[a, _], _| if to { from_generic(space, a) } else { to_generic(space, a) })
        }
        "isspacep" => {
            let space = i.space();
            address(i, &[Type::U64], move |[a, _], own| in_space(space, a, own).into())
        }
        "mapa" => map(i),
        "getctarank" => {
            let (generic, ty) = (i.space() == Space::Generic, i.ty()?);
            address(i, &[if generic { Type::U64 } else { ty }], move |[a, _], _| {
                let a = if generic { from_generic(Space::SharedCluster, a) } else { a };
                u64::from(a as u32 >> RANK_SHIFT)
            })
        }
        _ => cvt(i),
    }
}

/// A function of up to two numbers and the rank of the CTA.
fn address(i: &Ins<'_>, types: &[Type], f: impl Fn([u64; 2], u32) -> u64 + Send + Sync + 'static) -> Decoded {
    let s = types.iter().zip(1..).map(|(ty, k)| i.src(k, *ty)).collect::<Decoded<Vec<_>>>()?;
    let d = i.dst(0)?;
    Ok(Op::computes(Spread::Whole(64), &s.clone(), &[], move |cx| {
        let rank = cx.w.regs.ids.rank;
        let mut v = [[0; 32]; 2];
        v.iter_mut().zip(&s).for_each(|(v, s)| *v = cx.w.regs.r64(*s, cx.m));
        cx.w.regs.w64(d, cx.m, &std::array::from_fn(|l| f([v[0][l], v[1][l]], rank)));
    }))
}

/// `mapa`
fn map(i: &mut Ins<'_>) -> Decoded {
    let (generic, ty) = (i.space() == Space::Generic, i.ty()?);
    let (d, a, rank) = (i.dst(0)?, i.src(1, ty)?, i.src(2, Type::U32)?);
    Ok(Op::computes(Spread::Whole(64), &[a, rank], &[], move |cx| {
        let m = cx.m;
        let (a, rank) = (cx.w.regs.r64(a, m), cx.w.regs.r32(rank, m));
        let size = cx.cl.ctas.len() as u32;
        if let Some(l) = lanes(m).find(|&l| rank[l] >= size) {
            return Err(
                fault!(Check::Bounds, "mapa to rank {} of a cluster of {size} CTAs", rank[l]).lane(l as u32)
            );
        }
        let low = (1 << RANK_SHIFT) - 1;
        let base = if generic { SHARED_WINDOW } else { 0 };
        let r = std::array::from_fn(|i| base | a[i] & low | u64::from(rank[i]) << RANK_SHIFT);
        cx.w.regs.w64(d, m, &r);
        Ok(())
    }))
}

/// `mov`, also of a vector into one register or the other way round, low element first.
fn mov(i: &mut Ins<'_>) -> Decoded {
    let ty = i.ty()?;
    Ok(match (i.operand(0)?, i.operand(1)?) {
        (Operand::Vector(list), _) => {
            let (bits, d, s) = (ty.bits() / list.len() as u32, i.dsts(0)?, i.src(1, ty)?);
            Op::computes(Spread::Bits, &[s], &[], move |cx| {
                cx.w.regs.moving(|regs| {
                    let v = regs.r128(s, cx.m);
                    for (k, d) in (0..).zip(&d) {
                        regs.w64(*d, cx.m, &v.map(|v| (v >> (k * bits)) as u64 & u64::MAX >> (64 - bits)));
                    }
                });
            })
        }
        (_, Operand::Vector(list)) => {
            let bits = ty.bits() / list.len() as u32;
            let (d, s) = (i.dst(0)?, i.srcs(1, untyped(bits))?);
            Op::computes(Spread::Places(bits, bits), &s.clone(), &[], move |cx| {
                cx.w.regs.moving(|regs| {
                    let mut r = [0u128; 32];
                    for (k, s) in (0..).zip(&s) {
                        let v = regs.r64(*s, cx.m).map(|v| u128::from(v & u64::MAX >> (64 - bits)));
                        r.iter_mut().zip(v).for_each(|(r, v)| *r |= v << (k * bits));
                    }
                    regs.w128(d, cx.m, &r);
                });
            })
        }
        _ => {
            let (d, s) = (i.dst(0)?, i.src(1, ty)?);
            Op::computes(Spread::Bits, &[s], &[], move |cx| cx.w.regs.copy(d, s, cx.m))
        }
    })
}

fn cvt(i: &mut Ins<'_>) -> Decoded {
    let stochastic = i.has("rs");
    let away = i.has("rna");
    let round = if away { Some(Round::NearestAway) } else { rounding(i) }.unwrap_or(Round::NearestEven);
    let integral = i.one_of(IntRound::NAMES);
    let clamp = Clamp { sat: i.has("sat"), satfinite: i.has("satfinite"), relu: i.has("relu") };
    let ftz = i.has("ftz");
    if i.has("pack") {
        return pack(i);
    }
    let types = i.parse_all(operand);
    let [(to, step, n_to), (from, width, n_from)] = types[..] else {
        return i.error("needs a destination and a source type the simulator converts");
    };
    let how = How { to, from, round, integral, clamp, ftz };
    let source = match (from, width) {
        (Number::Float(f), 32) if f == F32 => Type::F32,
        (Number::Float(f), 64) if f == F64 => Type::F64,
        _ => untyped(width),
    };
    let d = i.dst(0)?;
    match (n_to, n_from) {
        (1, 1) => {
            let s = i.src(1, source)?;
            Ok(single_number(how, d, s))
        }
        (_, 1) => {
            // `d, {a, b, c, e}, random` or `d, a, b[, random]`: the first is the uppermost.
            let vector = matches!(i.operand(1)?, Operand::Vector(_));
            let mut s = match vector {
                true => i.srcs(1, source)?,
                false => (1..=n_to as usize).map(|k| i.src(k, source)).collect::<Decoded<_>>()?,
            };
            s.reverse();
            if s.len() != n_to as usize {
                return i.error(format!("needs {n_to} numbers to convert, has {}", s.len()));
            }
            if !stochastic {
                let spread = Spread::Places(step, from.bits());
                return Ok(Op::computes(spread, &s.clone(), &[], move |cx| {
                    each(cx, d, &s, step, |_, _, v| {
                        write(to, read(from, ftz, v), round, clamp) & ((1 << step) - 1)
                    });
                }));
            }
            let Number::Float(to) = to else { return i.error(".rs needs a floating-point type") };
            let random = i.src(i.count() - 1, Type::B32)?;
            Ok(Op::computes(Spread::Places(step, 32), &s.clone(), &[random], move |cx| {
                let random = cx.w.regs.r32(random, cx.m);
                each(cx, d, &s, step, |l, k, v| {
                    let bits = random_bits(random[l], step, k);
                    encode_stochastic(to, f32::from_bits(v as u32), bits, clamp)
                });
            }))
        }
        (a, b) if a == b => {
            let s = i.src(1, Type::B32)?;
            Ok(Op::computes(Spread::Elements(width, step), &[s], &[], move |cx| {
                let v = cx.w.regs.r64(s, cx.m);
                let convert = |bits: u64| {
                    (0..a).fold(0, |out, k| {
                        let e = bits >> (k * width) & ((1 << width) - 1);
                        out | write(to, read(from, false, e), round, clamp) << (k * step)
                    })
                };
                cx.w.regs.w64(d, cx.m, &v.map(convert));
            }))
        }
        _ => i.error("converts between different numbers of elements"),
    }
}

/// `cvt` of one number. A result narrower than its register is extended as its type says.
fn single_number(how: How, d: Dst, s: Src) -> Op {
    let extend = if matches!(d, Dst::Reg(Reg::R64(_))) { 64 } else { 32 };
    let widen = move |r: u64| match how.to {
        Number::Int(ty) if ty.signed && ty.bits < extend => {
            IntType { bits: extend, signed: true }.bits_of(ty.value(r))
        }
        _ => r,
    };
    let spread = match (how.to, how.from) {
        (Number::Int(_), Number::Int(_)) if !how.clamp.sat => Spread::Bits,
        (_, from) => Spread::Whole(from.bits()),
    };
    Op::computes(spread, &[s], &[], move |cx| {
        let (v, m) = (cx.w.regs.r64(s, cx.m), cx.m);
        let r = std::array::from_fn(|i| if m >> i & 1 != 0 { widen(one(&how, v[i])) } else { 0 });
        cx.w.regs.w64(d, m, &r);
    })
}

/// Converts several numbers into places of `step` bits of one register, from the lowest up: `f` takes lane, place and bits.
fn each(cx: &mut Cx<'_, '_>, d: Dst, s: &[Src], step: u32, f: impl Fn(usize, u32, u64) -> u64) {
    let mut r = [0u64; 32];
    for (k, s) in (0..).zip(s) {
        let v = cx.w.regs.r64(*s, cx.m);
        lanes(cx.m).for_each(|l| r[l] |= f(l, k, v[l]) << (k * step));
    }
    cx.w.regs.w64(d, cx.m, &r);
}

/// `cvt.pack`: two s32, saturated, and maybe bits below them that are shifted up.
fn pack(i: &mut Ins<'_>) -> Decoded {
    // d, a, b: the first type is the result's; `.b32` appears when bits are shifted up.
    let Some(to) = i.types().first().copied() else { return i.error("needs types") };
    let to = IntType { bits: to.bits(), signed: to.is_signed() };
    let (d, s) = (i.dst(0)?, [i.src(1, Type::S32)?, i.src(2, Type::S32)?]);
    let below = i.optional(3, Type::B32)?;
    let operands: Vec<Src> = s.into_iter().chain(below).collect();
    Ok(Op::computes(Spread::Whole(64), &operands, &[], move |cx| {
        let [a, b] = s.map(|s| cx.w.regs.r32(s, cx.m));
        let c = below.map(|c| cx.w.regs.r32(c, cx.m));
        let sat = |v: u32| to.bits_of(i128::from(v as i32).clamp(to.min(), to.max()));
        let r = std::array::from_fn(|i| {
            let pair = sat(a[i]) << to.bits | sat(b[i]);
            c.map_or(pair, |c| u64::from(c[i]) << (2 * to.bits) | pair) & u64::from(u32::MAX)
        });
        cx.w.regs.w64(d, cx.m, &r);
    }))
}

/// The random bits of place `k` from below, of results `step` bits apart (PTX ISA 9.7.9.21): 16 bits each to two
/// results of 16 bits; to four of 8 bits the low half for the lower two, the high half for the upper two; to four of 4
/// bits the low bytes of both halves for the lower two, the high bytes for the upper two. That the byte of the high
/// half is the more significant one is not published.
fn random_bits(random: u32, step: u32, k: u32) -> u32 {
    match step {
        16 => random >> (16 * k),
        8 => random >> (16 * (k / 2)),
        _ => {
            let bytes = random >> (8 * (k / 2));
            bytes & 0xff | bytes >> 8 & 0xff00
        }
    }
}
