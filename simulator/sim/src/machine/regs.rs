//! The registers of a warp: one row of 32 lanes per register, so that an instruction is a loop over arrays.
//!
//! What a row may be used for is in `marks`. A read or write that breaks a rule is remembered in [`Regs::bad`] and
//! reported by the dispatch loop after the instruction: reads need no error path of their own.

mod marks;
mod undefined;

pub use marks::{BadReg, Lock};
pub use undefined::{Aside, Shadow};

use super::ids::{Ids, SPECIALS};
use crate::program::{Dst, Reg, Src};
use marks::Meta;
use std::collections::HashMap;
use std::hash::{Hash as _, Hasher};
use std::ops::Range;

/// All lanes.
pub const FULL: u32 = u32::MAX;

/// The register file of one warp.
#[derive(Debug, Default)]
pub struct Regs {
    r32: Vec<[u32; 32]>,
    r64: Vec<[u64; 32]>,
    pred: Vec<u32>,
    meta32: Vec<Meta>,
    meta64: Vec<Meta>,
    meta_pred: Vec<u32>,
    /// Values of special registers.
    pub ids: Ids,
    /// The first broken rule of the running instruction.
    pub bad: Option<BadReg>,
    /// The undefined bits of registers, in lanes that `written` does not have. Without an entry all are.
    shadows: HashMap<Reg, Box<Shadow>>,
    /// Lanes in which the running instruction has read undefined bits; its writes are put aside then.
    undefined: u32,
    /// Registers it has read them from.
    reads: Vec<Reg>,
    /// Its writes.
    aside: Vec<Aside>,
    /// The running instruction only moves values.
    moving: bool,
    /// A register in flight that it has read.
    moved_from: Option<Reg>,
    /// Moves of registers in flight: from, to.
    moved: Vec<(Reg, Reg)>,
    check_uninit: bool,
    epoch: u32,
}

fn splat(v: u32) -> [u32; 32] {
    [v; 32]
}

/// A row by lane. `map` would move the row first, one lane at a time.
#[inline]
pub fn each<T: Copy, R>(row: &[T; 32], f: impl Fn(T) -> R) -> [R; 32] {
    std::array::from_fn(|l| f(row[l]))
}

/// `new` where the mask has a bit, `old` elsewhere.
#[inline]
fn blend<T: Copy>(old: &mut [T; 32], new: &[T; 32], m: u32) {
    if m == FULL {
        *old = *new;
    } else {
        for (i, (o, n)) in old.iter_mut().zip(new).enumerate() {
            if m >> i & 1 != 0 {
                *o = *n;
            }
        }
    }
}

impl Regs {
    /// Unwritten registers; `rows` counts 32-bit, 64-bit and predicate rows.
    pub fn new(rows: [u32; 3], ids: Ids, check_uninit: bool) -> Regs {
        let [n32, n64, np] = rows.map(|n| n as usize);
        Regs {
            r32: vec![[0; 32]; n32],
            r64: vec![[0; 32]; n64],
            pred: vec![0; np],
            meta32: vec![Meta::default(); n32],
            meta64: vec![Meta::default(); n64],
            meta_pred: vec![0; np],
            ids,
            check_uninit,
            epoch: 1,
            ..Regs::default()
        }
    }

    /// Makes rows what they are before the first write, in some lanes.
    pub fn forget(&mut self, rows: &[Range<u32>; 3], m: u32) {
        let [of_32, of_64, of_pred] = rows.clone().map(|rows| rows.start as usize..rows.end as usize);
        let metas = self.meta32[of_32].iter_mut().chain(&mut self.meta64[of_64]);
        metas.for_each(|meta| meta.written &= !m);
        self.meta_pred[of_pred].iter_mut().for_each(|written| *written &= !m);
        self.shadows.retain(|reg, _| {
            let (file, row) = match *reg {
                Reg::R32(i) => (0, i),
                Reg::R64(i) | Reg::R128(i) => (1, i),
                Reg::Pred(i) => (2, i),
            };
            !rows[file].contains(&row)
        });
    }

    /// Adds all values to a hash.
    pub fn hash(&self, hasher: &mut impl Hasher) {
        (&self.r32, &self.r64, &self.pred).hash(hasher);
    }

    /// The low 32 bits of a value.
    #[inline]
    pub fn r32(&mut self, s: Src, m: u32) -> [u32; 32] {
        match s {
            Src::Reg(Reg::R32(i)) => {
                self.may_read(Reg::R32(i), m);
                self.r32[i as usize]
            }
            Src::Imm(v) => splat(v as u32),
            other => each(&self.r64(other, m), |v| v as u32),
        }
    }

    /// The low 64 bits of a value.
    #[inline]
    pub fn r64(&mut self, s: Src, m: u32) -> [u64; 32] {
        match s {
            Src::Reg(Reg::R64(i) | Reg::R128(i)) => {
                self.may_read(Reg::R64(i), m);
                self.r64[i as usize]
            }
            Src::Reg(Reg::R32(i)) => {
                self.may_read(Reg::R32(i), m);
                each(&self.r32[i as usize], u64::from)
            }
            Src::Imm(v) => [v; 32],
            Src::Shared(offset) => [u64::from(offset | self.ids.rank << crate::memory::RANK_SHIFT); 32],
            Src::Special(row, component) => SPECIALS[row as usize].1(&self.ids, component.into()),
            Src::Reg(Reg::Pred(_)) | Src::NotPred(_) => {
                let p = self.pred(s, m);
                std::array::from_fn(|i| u64::from(p >> i & 1))
            }
        }
    }

    /// All 128 bits of a value.
    pub fn r128(&mut self, s: Src, m: u32) -> [u128; 32] {
        match s {
            Src::Reg(Reg::R128(i)) => {
                let lo = self.r64(Src::Reg(Reg::R64(i)), m);
                let hi = self.r64(Src::Reg(Reg::R64(i + 1)), m);
                std::array::from_fn(|l| u128::from(lo[l]) | u128::from(hi[l]) << 64)
            }
            other => self.r64(other, m).map(u128::from),
        }
    }

    /// One bit per lane.
    #[inline]
    pub fn pred(&mut self, s: Src, m: u32) -> u32 {
        match s {
            Src::Reg(Reg::Pred(i)) => {
                let unwritten = m & !self.meta_pred[i as usize];
                if self.check_uninit && unwritten != 0 {
                    self.complain(BadReg::Unwritten(Reg::Pred(i), unwritten));
                }
                self.pred[i as usize]
            }
            Src::NotPred(i) => !self.pred(Src::Reg(Reg::Pred(i)), m),
            Src::Imm(v) => {
                if v != 0 {
                    FULL
                } else {
                    0
                }
            }
            other => {
                let v = self.r64(other, m);
                (0..32).fold(0, |p, i| p | u32::from(v[i] != 0) << i)
            }
        }
    }

    /// Writes 32-bit values (zero-extended into a wider register).
    #[inline]
    pub fn w32(&mut self, d: Dst, m: u32, v: &[u32; 32]) {
        match d {
            Dst::Reg(Reg::R32(i)) => {
                if self.will_write(Reg::R32(i), m) {
                    blend(&mut self.r32[i as usize], v, m);
                } else {
                    self.put_aside(Reg::R32(i), m, each(v, u64::from));
                }
            }
            Dst::Sink => {}
            other => self.w64(other, m, &each(v, u64::from)),
        }
    }

    /// Writes 64-bit values (truncated into a narrower register).
    #[inline]
    pub fn w64(&mut self, d: Dst, m: u32, v: &[u64; 32]) {
        match d {
            Dst::Reg(Reg::R64(i)) => {
                if self.will_write(Reg::R64(i), m) {
                    blend(&mut self.r64[i as usize], v, m);
                } else {
                    self.put_aside(Reg::R64(i), m, *v);
                }
            }
            Dst::Reg(Reg::R128(i)) => {
                self.w64(Dst::Reg(Reg::R64(i)), m, v);
                self.w64(Dst::Reg(Reg::R64(i + 1)), m, &[0; 32]);
            }
            Dst::Reg(Reg::R32(_)) => self.w32(d, m, &each(v, |v| v as u32)),
            Dst::Reg(Reg::Pred(_)) => {
                let p = (0..32).fold(0, |p, i| p | u32::from(v[i] != 0) << i);
                self.wpred(d, m, p);
            }
            Dst::Sink => {}
        }
    }

    /// Writes 128-bit values.
    pub fn w128(&mut self, d: Dst, m: u32, v: &[u128; 32]) {
        match d {
            Dst::Reg(Reg::R128(i)) => {
                self.w64(Dst::Reg(Reg::R64(i)), m, &v.map(|v| v as u64));
                self.w64(Dst::Reg(Reg::R64(i + 1)), m, &v.map(|v| (v >> 64) as u64));
            }
            other => self.w64(other, m, &v.map(|v| v as u64)),
        }
    }

    /// Writes predicates.
    #[inline]
    pub fn wpred(&mut self, d: Dst, m: u32, p: u32) {
        match d {
            Dst::Reg(Reg::Pred(i)) => {
                if self.undefined != 0 {
                    return self.put_aside(Reg::Pred(i), m, std::array::from_fn(|l| u64::from(p >> l & 1)));
                }
                let i = i as usize;
                self.pred[i] = self.pred[i] & !m | p & m;
                self.meta_pred[i] |= m;
            }
            Dst::Sink => {}
            other => self.w64(other, m, &std::array::from_fn(|i| u64::from(p >> i & 1))),
        }
    }

    /// Copies a register; those in flight may be copied as well.
    pub fn copy(&mut self, d: Dst, s: Src, m: u32) {
        self.moving(|r| match (d, s) {
            (_, Src::Reg(Reg::R128(_))) => {
                let v = r.r128(s, m);
                r.w128(d, m, &v);
            }
            (Dst::Reg(Reg::Pred(_)), _) => {
                let p = r.pred(s, m);
                r.wpred(d, m, p);
            }
            (Dst::Reg(Reg::R32(_)), _) => {
                let v = r.r32(s, m);
                r.w32(d, m, &v);
            }
            _ => {
                let v = r.r64(s, m);
                r.w64(d, m, &v);
            }
        });
    }

    /// Reads a value without asking whether it is defined.
    pub fn peek32(&mut self, s: Src) -> [u32; 32] {
        self.peek64(s).map(|v| v as u32)
    }

    /// Reads a value without asking whether it is defined.
    pub fn peek64(&mut self, s: Src) -> [u64; 32] {
        let check = self.check_reads(false);
        let v = self.r64(s, FULL);
        self.check_reads(check);
        v
    }

    /// A row of the 32-bit file, for an operation in flight that owns it.
    pub fn row32(&self, r: Reg) -> [u32; 32] {
        match r {
            Reg::R32(i) => self.r32[i as usize],
            _ => [0; 32],
        }
    }

    /// Sets a row of the 32-bit file on behalf of an operation in flight.
    pub fn set_row32(&mut self, r: Reg, v: &[u32; 32]) {
        if let Reg::R32(i) = r {
            self.r32[i as usize] = *v;
            self.meta32[i as usize].written = FULL;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::undefined::{Origin, Source};

    fn regs() -> Regs {
        Regs::new([2, 3, 1], Ids::default(), true)
    }

    #[test]
    fn masked_writes_leave_other_lanes_exact() {
        let mut r = regs();
        let d = Dst::Reg(Reg::R32(0));
        r.w32(d, FULL, &[7; 32]);
        r.w32(d, 0xf0, &[9; 32]);
        let v = r.r32(Src::Reg(Reg::R32(0)), FULL);
        for (i, v) in v.into_iter().enumerate() {
            assert_eq!(v, if (4..8).contains(&i) { 9 } else { 7 });
        }
        assert_eq!(r.bad, None);
    }

    #[test]
    fn writes_after_an_undefined_read_are_put_aside_and_marked_exact() {
        let mut r = regs();
        let (from, to) = (Reg::R32(0), Reg::R32(1));
        r.w32(Dst::Reg(from), 0x1, &[7; 32]);
        r.r32(Src::Reg(from), 0x1);
        assert_eq!(r.bad, None);
        r.copy(Dst::Reg(to), Src::Reg(from), 0x3);
        assert_eq!(r.bad.take(), Some(BadReg::Unwritten(from, 0x2)));
        assert_eq!((r.undefined_lanes(), r.values(to)), (0x2, [0; 32]));
        let (reads, aside) = r.take_aside();
        assert_eq!(reads, [from]);
        let shadow = r.shadow(Src::Reg(from), 5);
        assert_eq!(shadow.origins[1], Some(Origin { source: Source::Register(from), pc: 5 }));
        assert_eq!((shadow.origins[0], shadow.bits[1]), (None, 0xffff_ffff));
        let mut half = Shadow::default();
        half.add(1, 0xff00, shadow.origins[1]);
        r.put_back(&aside[0], &half);
        assert_eq!(r.unwritten(Src::Reg(to)), !0x1);
        assert_eq!((r.shadow(Src::Reg(to), 9).hole(1, 4)).map(|h| h.bytes), Some(0x2));
        assert_eq!(r.shadow(Src::Reg(to), 9).origins[1], shadow.origins[1]);
        r.w32(Dst::Reg(to), FULL, &[1; 32]);
        assert_eq!(r.unwritten(Src::Reg(to)), 0);
    }

    #[test]
    fn wide_registers_hold_two_rows_exact() {
        let mut r = regs();
        r.w128(Dst::Reg(Reg::R128(1)), FULL, &[3 << 64 | 5; 32]);
        assert_eq!(r.r64(Src::Reg(Reg::R64(1)), FULL)[0], 5);
        assert_eq!(r.r64(Src::Reg(Reg::R64(2)), FULL)[31], 3);
        assert_eq!(r.r128(Src::Reg(Reg::R128(1)), FULL)[4], 3 << 64 | 5);
    }
}
