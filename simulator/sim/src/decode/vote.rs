//! Data exchange within a warp. PTX ISA 9.7.9.6 (`shfl.sync`), 9.7.13.6 (`vote`), 9.7.13.8 (`match`),
//! 9.7.13.10 (`redux`), 9.7.13.11 (`elect`).

use super::*;
use crate::semantics::float::arith::MinMax;

modifiers! {
    /// Where `shfl` reads.
    Shuffle { Up "up", Down "down", Butterfly "bfly", Index "idx" }
}

modifiers! {
    /// What `vote` asks.
    Ballot { All "all", Any "any", Uniform "uni", Mask "ballot" }
}

/// What `redux` computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Redux {
    Add,
    /// `.min`; signed or not
    Min(bool),
    Max(bool),
    And,
    Or,
    Xor,
    Float(MinMax),
}

#[derive(Debug, Clone)]
pub enum Vote {
    /// `shfl.sync d|p, a, b, c, mask`
    Shuffle(Shuffle, Dst, Dst, [Src; 4]),
    /// `vote.sync d, p, mask`
    Ballot(Ballot, Dst, Src, Src),
    /// `match.sync`; `true`: `.all` with predicate
    Match(bool, Dst, Dst, Src, Src),
    /// `redux.sync d, a, mask`
    Redux(Redux, Dst, Src, Src),
    /// `elect.sync d|p, mask`
    Elect(Dst, Dst, Src),
    Active(Dst),
}

fn pair(i: &Ins<'_>) -> Result<(Dst, Dst)> {
    match i.operand(0)? {
        Operand::Pair(d, p) => Ok((i.result(d)?, i.result(p)?)),
        d => Ok((i.result(d)?, Dst::Sink)),
    }
}

pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    let sync = i.has("sync");
    let root = i.ast.root.as_str();
    if !sync && root != "activemask" {
        return i.error("only the .sync form exists on the targets this simulator runs");
    }
    let op = match root {
        "shfl" => {
            let mode = i.need("a mode", Shuffle::NAMES)?;
            i.ignore(&["b32"]);
            let (d, p) = pair(i)?;
            let s = [i.src(1, Type::B32)?, i.src(2, Type::B32)?, i.src(3, Type::B32)?, i.src(4, Type::B32)?];
            Vote::Shuffle(mode, d, p, s)
        }
        "vote" => {
            let mode = i.need("a mode", Ballot::NAMES)?;
            i.ignore(&["pred", "b32"]);
            Vote::Ballot(mode, i.dst(0)?, i.predicate(1)?, i.src(2, Type::B32)?)
        }
        "match" => {
            let all = i.need("a mode", &[("all", true), ("any", false)])?;
            let ty = i.ty()?;
            let (d, p) = pair(i)?;
            Vote::Match(all, d, p, i.src(1, ty)?, i.src(2, Type::B32)?)
        }
        "redux" => {
            let nan = i.has("NaN");
            let abs = i.has("abs");
            let op = i.need(
                "an operation",
                &[
                    ("add", Redux::Add),
                    ("min", Redux::Min(false)),
                    ("max", Redux::Max(false)),
                    ("and", Redux::And),
                    ("or", Redux::Or),
                    ("xor", Redux::Xor),
                ],
            )?;
            let ty = i.ty()?;
            let float = |max| Redux::Float(MinMax { max, nan, abs, ..MinMax::default() });
            let op = match (op, ty) {
                (Redux::Min(_), Type::F32) => float(false),
                (Redux::Max(_), Type::F32) => float(true),
                (Redux::Min(_), _) => Redux::Min(ty.is_signed()),
                (Redux::Max(_), _) => Redux::Max(ty.is_signed()),
                (op, _) => op,
            };
            Vote::Redux(op, i.dst(0)?, i.src(1, ty)?, i.src(2, Type::B32)?)
        }
        "elect" => {
            let (d, p) = pair(i)?;
            Vote::Elect(d, p, i.src(1, Type::B32)?)
        }
        _ => {
            i.ignore(&["b32"]);
            Vote::Active(i.dst(0)?)
        }
    };
    i.finish()?;
    Ok(Op::Vote(op))
}
