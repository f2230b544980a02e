//! Data exchange within a warp. Every operation first brings the lanes of its member mask together.
//! PTX ISA 9.7.9.6 (`shfl.sync`), 9.7.13.6 (`vote`), 9.7.13.8 (`match`), 9.7.13.10 (`redux`), 9.7.13.11 (`elect`).

use super::*;
use crate::check::undefined::{Origin, Source};
use crate::machine::regs::Shadow;
use crate::names::modifiers;
use crate::semantics::float::{
    F32,
    arith::{MinMax, min_max},
};

modifiers! {
    /// Where `shfl` reads.
    Shuffle { Up "up", Down "down", Butterfly "bfly", Index "idx" }
}

modifiers! {
    /// What `vote` asks.
    Ballot { All "all", Any "any", Uniform "uni", Mask "ballot" }
}

/// For each executing lane, the live members of its mask, once all of them are here.
///
/// Lanes of different masks (tiles of a warp) may execute together; if members of some are missing, lanes with
/// the first mask go on alone. `Err` is what to do while members are missing.
pub fn members(cx: &mut Cx<'_, '_>, mask: Src) -> Result<std::result::Result<[u32; 32], Flow>> {
    let masks = cx.w.regs.r32(mask, cx.m);
    let first = masks[cx.first_lane() as usize];
    if let Some(l) = lanes(cx.m).find(|&l| masks[l] >> l & 1 == 0) {
        return Err(fault!(
            Check::Barrier,
            "lane {l} executes a warp-synchronous instruction for members {:#010x}",
            masks[l]
        )
        .lane(l as u32));
    }
    if cx.m != cx.g.mask {
        for l in lanes(cx.m) {
            let of = format_args!("a warp-synchronous instruction for members {:#010x}", masks[l]);
            cx.all_execute(masks[l], of)?;
        }
    }
    let same = lanes(cx.m).filter(|&l| masks[l] == first).fold(0, |s, l| s | 1 << l);
    if same != cx.m {
        let live = cx.w.live;
        if lanes(cx.m).any(|l| masks[l] & live & !cx.m != 0) {
            return Ok(Err(Flow::Some(same, cx.pc)));
        }
        return Ok(Ok(masks.map(|m| m & live)));
    }
    Ok(match cx.gather(first) {
        Some(flow) => Err(flow),
        None => Ok([first & cx.w.live; 32]),
    })
}

pub fn decode(i: &mut Ins<'_>) -> Decoded {
    let root = i.ast.root.as_str();
    if root == "activemask" {
        i.ignore(&["b32"]);
        let d = i.dst(0)?;
        return Ok(Op::new(move |cx| cx.w.regs.w32(d, cx.m, &[cx.m; 32])));
    }
    if !i.has("sync") {
        return i.error("only the .sync form exists on the targets this simulator runs");
    }
    match root {
        "shfl" => {
            let mode = i.need("a mode", Shuffle::NAMES)?;
            i.ignore(&["b32"]);
            let (d, [a, b, c]) =
                (i.pair(0)?, [i.src(1, Type::B32)?, i.src(2, Type::B32)?, i.src(3, Type::B32)?]);
            together(i, 4, move |cx, all| exchange(cx, mode, d, [a, b, c], &all))
        }
        "vote" => {
            let mode = i.need("a mode", Ballot::NAMES)?;
            i.ignore(&["pred", "b32"]);
            let (d, p) = (i.dst(0)?, i.predicate(1)?);
            together(i, 2, move |cx, all| ballot(cx, mode, d, p, &all))
        }
        "match" => {
            let every = i.need("a mode", &[("all", true), ("any", false)])?;
            let (ty, [d, p]) = (i.ty()?, i.pair(0)?);
            let a = i.src(1, ty)?;
            together(i, 2, move |cx, all| matching(cx, every, [d, p], a, &all))
        }
        "redux" => redux(i),
        _ => {
            let [d, p] = i.pair(0)?;
            together(i, 1, move |cx, all| {
                // Which lane leads is unspecified; the lowest, always.
                let leader = all.map(|all| all.trailing_zeros().min(31));
                cx.w.regs.w32(d, cx.m, &leader);
                cx.w.regs.wpred(p, cx.m, lanes(cx.m).fold(0, |p, l| p | 1 << leader[l]));
            })
        }
    }
}

/// What the members of the mask that is operand `mask` do together; `act` takes those of each lane.
fn together(
    i: &Ins<'_>,
    mask: usize,
    act: impl Fn(&mut Cx<'_, '_>, [u32; 32]) + Send + Sync + 'static,
) -> Decoded {
    let mask = i.src(mask, Type::B32)?;
    Ok(Op::new(move |cx| {
        let all = match members(cx, mask)? {
            Ok(all) => all,
            Err(flow) => return Ok(flow),
        };
        if cx.m == cx.g.mask {
            cx.g.met = None;
        }
        act(cx, all);
        Ok(Flow::Next)
    }))
}

fn ballot(cx: &mut Cx<'_, '_>, mode: Ballot, d: Dst, p: Src, all: &[u32; 32]) {
    let p = cx.w.regs.pred(p, cx.m);
    let answer = |all: u32| match mode {
        Ballot::Mask => p & all,
        Ballot::All => (p & all == all).into(),
        Ballot::Any => (p & all != 0).into(),
        Ballot::Uniform => (p & all == 0 || p & all == all).into(),
    };
    cx.w.regs.w32(d, cx.m, &all.map(answer));
}

fn matching(cx: &mut Cx<'_, '_>, every: bool, [d, p]: [Dst; 2], a: Src, all: &[u32; 32]) {
    let a = cx.w.regs.r64(a, cx.m);
    let (mut out, mut uniform) = ([0; 32], 0);
    for l in lanes(cx.m) {
        let same = lanes(all[l]).filter(|&k| a[k] == a[l]).fold(0u32, |s, k| s | 1 << k);
        uniform |= u32::from(same == all[l]) << l;
        out[l] = if every && same != all[l] { 0 } else { same };
    }
    cx.w.regs.w32(d, cx.m, &out);
    cx.w.regs.wpred(p, cx.m, uniform);
}

fn redux(i: &mut Ins<'_>) -> Decoded {
    let how = MinMax { nan: i.has("NaN"), abs: i.has("abs"), ..MinMax::default() };
    let names = ["add", "min", "max", "and", "or", "xor"].map(|name| (name, name));
    let (op, ty) = (i.need("an operation", &names)?, i.ty()?);
    let how = MinMax { max: op == "max", ..how };
    let (d, a) = (i.dst(0)?, i.src(1, ty)?);
    let float = move |x: u32, y: u32| min_max(F32, x.into(), y.into(), how) as u32;
    let combine: Box<dyn Fn(u32, u32) -> u32 + Send + Sync> = match (op, ty, ty.is_signed()) {
        ("min" | "max", Type::F32, _) => Box::new(float),
        ("min", _, true) => Box::new(|x, y| (x as i32).min(y as i32) as u32),
        ("min", ..) => Box::new(u32::min),
        ("max", _, true) => Box::new(|x, y| (x as i32).max(y as i32) as u32),
        ("max", ..) => Box::new(u32::max),
        ("add", ..) => Box::new(u32::wrapping_add),
        ("and", ..) => Box::new(|x, y| x & y),
        ("or", ..) => Box::new(|x, y| x | y),
        _ => Box::new(|x, y| x ^ y),
    };
    together(i, 2, move |cx, all| {
        let a = cx.w.regs.r32(a, cx.m);
        // A float alone is reduced as well: its magnitude is taken, its NaN becomes the canonical one.
        let a = if ty == Type::F32 { a.map(|x| float(x, x)) } else { a };
        cx.w.regs.w32(d, cx.m, &all.map(|all| lanes(all).map(|l| a[l]).reduce(&combine).unwrap_or(0)));
    })
}

fn exchange(cx: &mut Cx<'_, '_>, mode: Shuffle, [d, p]: [Dst; 2], s: [Src; 3], all: &[u32; 32]) {
    let m = cx.m;
    let pc = cx.pc;
    let shadow = (cx.w.regs.unwritten(s[0]) != 0).then(|| cx.w.regs.shadow(s[0], pc));
    let mut undefined = Shadow::default();
    let a = cx.w.regs.peek32(s[0]);
    let (b, c) = (cx.w.regs.r32(s[1], m), cx.w.regs.r32(s[2], m));
    let mut out = [0; 32];
    let mut valid = 0u32;
    for l in lanes(m) {
        let (from, ok) = shuffle(mode, l as u32, b[l], c[l]);
        // A lane that does not take part, or has exited, gives an undefined value.
        if all[l] >> from & 1 == 0 {
            undefined.add(l, u128::MAX, Some(Origin { source: Source::Lane(from), pc }));
        } else if let Some(shadow) = &shadow {
            undefined.add(l, shadow.bits[from as usize], shadow.origins[from as usize]);
        }
        out[l] = a[from as usize];
        valid |= u32::from(ok) << l;
    }
    cx.w.regs.w32(d, m, &out);
    cx.w.regs.set_shadow(d, m, &undefined);
    cx.w.regs.wpred(p, m, valid);
}

/// The lane `shfl` reads from, and whether it is in range (PTX ISA 9.7.9.6).
fn shuffle(mode: Shuffle, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let (b, clamp, segment) = (b & 31, c & 31, c >> 8 & 31);
    let max = (lane & segment) | (clamp & !segment);
    let min = lane & segment;
    let (from, ok) = match mode {
        Shuffle::Up => (lane.wrapping_sub(b), lane as i32 - b as i32 >= max as i32),
        Shuffle::Down => (lane + b, lane + b <= max),
        Shuffle::Butterfly => (lane ^ b, lane ^ b <= max),
        Shuffle::Index => {
            let j = min | (b & !segment);
            (j, j <= max)
        }
    };
    if ok { (from, true) } else { (lane, false) }
}
