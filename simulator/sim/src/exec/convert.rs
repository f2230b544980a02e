//! `cvt`, `mov`, and the instructions that change what an address means.

use super::*;
use crate::decode::convert::{Convert, How, Number};
use crate::machine::regs::Regs;
use crate::memory::{self, RANK_SHIFT, SHARED_WINDOW, in_space};
use crate::semantics::float::int::{self, IntRound, IntType};
use crate::semantics::float::{
    BF16, Clamp, F16, F32, F64, Format, Round, decode_ue8m0, encode_stochastic, encode_ue8m0,
};

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

pub fn execute(op: &Convert, cx: &mut Cx<'_, '_>) -> Result {
    let m = cx.m;
    match op {
        Convert::Move(d, s) => cx.w.regs.copy(*d, *s, m),
        Convert::Pack(d, s, bits) => cx.w.regs.moving(|regs| pack(regs, m, *d, s, *bits)),
        Convert::Unpack(d, s, bits) => cx.w.regs.moving(|regs| unpack(regs, m, d, *s, *bits)),
        Convert::One { how, extend, d, s } => {
            let v = cx.w.regs.r64(*s, m);
            let widen = |r: u64| match how.to {
                // A result narrower than its register is extended as its type says.
                Number::Int(ty) if ty.signed && ty.bits < *extend => {
                    IntType { bits: *extend, signed: true }.bits_of(ty.value(r))
                }
                _ => r,
            };
            let r = std::array::from_fn(|i| if m >> i & 1 != 0 { widen(one(how, v[i])) } else { 0 });
            cx.w.regs.w64(*d, m, &r);
        }
        Convert::Many { to, from, step, round, clamp, ftz, d, s } => {
            let mut r = [0u64; 32];
            for (k, s) in s.iter().enumerate() {
                let v = cx.w.regs.r64(*s, m);
                for i in lanes(m) {
                    let e = write(*to, read(*from, *ftz, v[i]), *round, *clamp);
                    r[i] |= (e & ((1 << step) - 1)) << (k as u32 * step);
                }
            }
            cx.w.regs.w64(*d, m, &r);
        }
        Convert::Packed { to, from, width, step, n, round, clamp, d, s } => {
            let v = cx.w.regs.r64(*s, m);
            let convert = |bits: u64| {
                (0..*n).fold(0, |out, k| {
                    let e = bits >> (k * width) & ((1 << width) - 1);
                    out | write(*to, read(*from, false, e), *round, *clamp) << (k * step)
                })
            };
            cx.w.regs.w64(*d, m, &v.map(convert));
        }
        Convert::Stochastic { to, step, clamp, d, s, random } => {
            stochastic(cx, *to, *step, *clamp, *d, s, *random)?
        }
        Convert::PackInt { to, d, s, below } => {
            let (a, b) = (cx.w.regs.r32(s[0], m), cx.w.regs.r32(s[1], m));
            let c = below.map(|c| cx.w.regs.r32(c, m));
            let sat = |v: u32| to.bits_of(i128::from(v as i32).clamp(to.min(), to.max()));
            let r = std::array::from_fn(|i| {
                let pair = sat(a[i]) << to.bits | sat(b[i]);
                c.map_or(pair, |c| u64::from(c[i]) << (2 * to.bits) | pair) & u64::from(u32::MAX)
            });
            cx.w.regs.w64(*d, m, &r);
        }
        _ => return addresses(op, cx),
    }
    Ok(Flow::Next)
}

/// Instructions that change what an address means.
fn addresses(op: &Convert, cx: &mut Cx<'_, '_>) -> Result {
    let m = cx.m;
    match op {
        Convert::Address(space, to, d, s) => {
            let v = cx.w.regs.r64(*s, m);
            let f =
                |a: u64| if *to { memory::from_generic(*space, a) } else { memory::to_generic(*space, a) };
            cx.w.regs.w64(*d, m, &v.map(f));
        }
        Convert::IsSpace(space, d, s) => {
            let v = cx.w.regs.r64(*s, m);
            let rank = cx.w.regs.ids.rank;
            let p = (0..32).fold(0, |p, i| p | u32::from(in_space(*space, v[i], rank)) << i);
            cx.w.regs.wpred(*d, m, p);
        }
        Convert::Map(generic, d, a, rank) => {
            let (a, rank) = (cx.w.regs.r64(*a, m), cx.w.regs.r32(*rank, m));
            let size = cx.cl.ctas.len() as u32;
            if let Some(l) = lanes(m).find(|&l| rank[l] >= size) {
                return Err(Fault::new(
                    Check::Bounds,
                    format!("mapa to rank {} of a cluster of {size} CTAs", rank[l]),
                )
                .lane(l as u32));
            }
            let low = (1 << RANK_SHIFT) - 1;
            let base = if *generic { SHARED_WINDOW } else { 0 };
            let r = std::array::from_fn(|i| base | a[i] & low | u64::from(rank[i]) << RANK_SHIFT);
            cx.w.regs.w64(*d, m, &r);
        }
        Convert::Rank(generic, d, a) => {
            let a = cx.w.regs.r64(*a, m);
            let r = a.map(|a| {
                let a = if *generic { memory::from_generic(Space::SharedCluster, a) } else { a };
                a as u32 >> RANK_SHIFT
            });
            cx.w.regs.w32(*d, m, &r);
        }
        _ => {}
    }
    Ok(Flow::Next)
}

fn pack(regs: &mut Regs, m: u32, d: Dst, s: &[Src], bits: u32) {
    let mut r = [0u128; 32];
    for (k, s) in s.iter().enumerate() {
        let v = regs.r64(*s, m);
        let keep = u64::MAX >> (64 - bits);
        for (r, v) in r.iter_mut().zip(v) {
            *r |= u128::from(v & keep) << (k as u32 * bits);
        }
    }
    regs.w128(d, m, &r);
}

fn unpack(regs: &mut Regs, m: u32, d: &[Dst], s: Src, bits: u32) {
    let v = regs.r128(s, m);
    let keep = u64::MAX >> (64 - bits);
    for (k, d) in d.iter().enumerate() {
        let part = v.map(|v| (v >> (k as u32 * bits)) as u64 & keep);
        regs.w64(*d, m, &part);
    }
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

fn stochastic(
    cx: &mut Cx<'_, '_>,
    to: Format,
    step: u32,
    clamp: Clamp,
    d: Dst,
    s: &[Src],
    random: Src,
) -> Result<()> {
    let m = cx.m;
    let random = cx.w.regs.r32(random, m);
    let mut r = [0u64; 32];
    for (k, s) in s.iter().enumerate() {
        let v = cx.w.regs.r32(*s, m);
        for i in lanes(m) {
            let bits = random_bits(random[i], step, k as u32);
            r[i] |= encode_stochastic(to, f32::from_bits(v[i]), bits, clamp) << (step * k as u32);
        }
    }
    cx.w.regs.w64(d, m, &r);
    Ok(())
}
