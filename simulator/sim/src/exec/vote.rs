//! Data exchange within a warp. Every operation first brings the lanes of its member mask together.

use super::*;
use crate::check::undefined::{Origin, Source};
use crate::decode::vote::{Ballot, Redux, Shuffle, Vote};
use crate::machine::regs::Shadow;
use crate::semantics::float::{F32, arith};

/// For each executing lane, the live members of its mask, once all of them are here.
///
/// Lanes of different masks (tiles of a warp) may execute together; if members of some are missing, lanes with
/// the first mask go on alone. `Err` is what to do while members are missing.
pub fn members(cx: &mut Cx<'_, '_>, mask: Src) -> Result<std::result::Result<[u32; 32], Flow>> {
    let masks = cx.w.regs.r32(mask, cx.m);
    let first = masks[cx.first_lane() as usize];
    if let Some(l) = lanes(cx.m).find(|&l| masks[l] >> l & 1 == 0) {
        return Err(Fault::new(
            Check::Barrier,
            format!("lane {l} executes a warp-synchronous instruction for members {:#010x}", masks[l]),
        )
        .lane(l as u32));
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

pub fn execute(op: &Vote, cx: &mut Cx<'_, '_>) -> Result {
    let mask = match op {
        Vote::Shuffle(.., s) => Some(s[3]),
        Vote::Ballot(.., mask) | Vote::Match(.., mask) | Vote::Redux(.., mask) | Vote::Elect(.., mask) => {
            Some(*mask)
        }
        Vote::Active(_) => None,
    };
    let all = match mask {
        Some(mask) => match members(cx, mask)? {
            Ok(all) => all,
            Err(flow) => return Ok(flow),
        },
        None => [cx.m; 32],
    };
    let m = cx.m;
    if m == cx.g.mask && mask.is_some() {
        cx.g.met = None;
    }
    match op {
        Vote::Shuffle(mode, d, p, s) => exchange(cx, *mode, [*d, *p], s, &all),
        Vote::Ballot(mode, d, p, _) => {
            let p = cx.w.regs.pred(*p, m);
            if *mode == Ballot::Mask {
                cx.w.regs.w32(*d, m, &all.map(|all| p & all));
                return Ok(Flow::Next);
            }
            let r = lanes(m).fold(0, |r, l| {
                let yes = match mode {
                    Ballot::All => p & all[l] == all[l],
                    Ballot::Any => p & all[l] != 0,
                    _ => p & all[l] == 0 || p & all[l] == all[l],
                };
                r | u32::from(yes) << l
            });
            cx.w.regs.wpred(*d, m, r);
        }
        Vote::Match(every, d, p, a, _) => {
            let a = cx.w.regs.r64(*a, m);
            let same = |l: usize| lanes(all[l]).filter(|&k| a[k] == a[l]).fold(0u32, |s, k| s | 1 << k);
            let mut out = [0; 32];
            let mut uniform = 0;
            for l in lanes(m) {
                let s = same(l);
                uniform |= u32::from(s == all[l]) << l;
                out[l] = if *every && s != all[l] { 0 } else { s };
            }
            cx.w.regs.w32(*d, m, &out);
            cx.w.regs.wpred(*p, m, uniform);
        }
        Vote::Redux(op, d, a, _) => {
            let a = cx.w.regs.r32(*a, m);
            let combine = |x: u32, y: u32| match op {
                Redux::Add => x.wrapping_add(y),
                Redux::Min(false) => x.min(y),
                Redux::Max(false) => x.max(y),
                Redux::Min(true) => (x as i32).min(y as i32) as u32,
                Redux::Max(true) => (x as i32).max(y as i32) as u32,
                Redux::And => x & y,
                Redux::Or => x | y,
                Redux::Xor => x ^ y,
                Redux::Float(how) => arith::min_max(F32, x.into(), y.into(), *how) as u32,
            };
            let r = all.map(|all| lanes(all).map(|l| a[l]).reduce(combine).unwrap_or(0));
            cx.w.regs.w32(*d, m, &r);
        }
        Vote::Elect(d, p, _) => {
            // Which lane leads is unspecified; the lowest, always.
            let leader = all.map(|all| all.trailing_zeros().min(31));
            cx.w.regs.w32(*d, m, &leader);
            cx.w.regs.wpred(*p, m, lanes(m).fold(0, |p, l| p | 1 << leader[l]));
        }
        Vote::Active(d) => cx.w.regs.w32(*d, m, &[m; 32]),
    }
    Ok(Flow::Next)
}

fn exchange(cx: &mut Cx<'_, '_>, mode: Shuffle, [d, p]: [Dst; 2], s: &[Src; 4], all: &[u32; 32]) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_stay_in_their_segment_exact() {
        // Width 8: c = (32 - 8) << 8 | 31 for idx, down and bfly; clamp 0 for up.
        let c = 24 << 8 | 31;
        assert_eq!(shuffle(Shuffle::Index, 10, 3, c), (11, true));
        assert_eq!(shuffle(Shuffle::Down, 13, 3, c), (13, false));
        assert_eq!(shuffle(Shuffle::Down, 12, 3, c), (15, true));
        assert_eq!(shuffle(Shuffle::Up, 9, 3, 24 << 8), (9, false));
        assert_eq!(shuffle(Shuffle::Up, 12, 3, 24 << 8), (9, true));
        assert_eq!(shuffle(Shuffle::Butterfly, 9, 4, c), (13, true));
        assert_eq!(shuffle(Shuffle::Index, 20, 0, 31), (0, true));
    }
}
