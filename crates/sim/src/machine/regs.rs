//! The registers of a warp: one row of 32 lanes per register, so that an instruction is a loop over arrays.
//!
//! Each row knows which lanes have been written, and whether an unfinished `wgmma` owns it. A read or write that
//! breaks a rule is remembered in [`Regs::bad`] and reported by the dispatch loop after the instruction: reads
//! need no error path of their own.

use super::ids::Ids;
use crate::program::{Dst, Reg, Src};

/// All lanes.
pub const FULL: u32 = u32::MAX;

/// What a register may be used for while `wgmma` is in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lock {
    /// No operation in flight uses it.
    #[default]
    Free,
    /// Read by an operation in flight: must not be written.
    Source,
    /// Written by an operation in flight: must not be touched.
    Target,
    /// Written by a `tcgen05.ld` in flight: may be moved, not used. Compilers put moves before the wait.
    Loaded,
}

/// What was wrong with a register access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadReg {
    /// Read before it was written, in these lanes.
    Unwritten(Reg, u32),
    /// Touched while in flight; `true` for a write.
    InFlight(Reg, bool),
}

#[derive(Debug, Clone, Copy, Default)]
struct Meta {
    written: u32,
    lock: Lock,
    /// The epoch of the last write, see [`Regs::fence`].
    epoch: u32,
}

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
    /// Lanes in which the running instruction has read something unwritten: what it writes there is undefined.
    undefined: u32,
    /// Registers the running instruction has made undefined so.
    tainted: Vec<Reg>,
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
            bad: None,
            undefined: 0,
            tainted: Vec::new(),
            moving: false,
            moved_from: None,
            moved: Vec::new(),
            check_uninit,
            epoch: 1,
        }
    }

    #[cold]
    fn complain(&mut self, bad: BadReg) {
        match bad {
            BadReg::Unwritten(_, lanes) => {
                self.undefined |= lanes;
                self.bad.get_or_insert(bad);
            }
            BadReg::InFlight(..) if matches!(self.bad, Some(BadReg::InFlight(..))) => {}
            BadReg::InFlight(..) => self.bad = Some(bad),
        }
    }

    #[cold]
    fn taint(&mut self, r: Reg, m: u32) {
        self.forget(Dst::Reg(r), m & self.undefined);
        self.tainted.push(r);
    }

    /// Ends an instruction whose result may be undefined; returns the registers it has made so.
    pub fn take_tainted(&mut self) -> Vec<Reg> {
        self.undefined = 0;
        std::mem::take(&mut self.tainted)
    }

    fn meta(&mut self, r: Reg) -> &mut Meta {
        match r {
            Reg::R32(i) => &mut self.meta32[i as usize],
            // Predicates are never matrix operands; decode gives none to the functions that lock.
            Reg::R64(i) | Reg::R128(i) | Reg::Pred(i) => &mut self.meta64[i as usize],
        }
    }

    #[inline]
    fn may_read(&mut self, r: Reg, m: u32) {
        let meta = *self.meta(r);
        if matches!(meta.lock, Lock::Target | Lock::Loaded) {
            if self.moving && meta.lock == Lock::Loaded && m == FULL {
                self.moved_from = Some(r);
            } else {
                self.complain(BadReg::InFlight(r, false));
            }
        } else if self.check_uninit && m & !meta.written != 0 {
            self.complain(BadReg::Unwritten(r, m & !meta.written));
        }
    }

    #[inline]
    fn will_write(&mut self, r: Reg, m: u32) {
        let epoch = self.epoch;
        let meta = self.meta(r);
        meta.written |= m;
        meta.epoch = epoch;
        if meta.lock != Lock::Free {
            self.complain(BadReg::InFlight(r, true));
        }
        if self.undefined != 0 {
            self.taint(r, m);
        }
        if let Some(from) = self.moved_from {
            self.lock(r, Lock::Loaded);
            self.moved.push((from, r));
        }
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
            other => self.r64(other, m).map(|v| v as u32),
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
                self.r32[i as usize].map(u64::from)
            }
            Src::Imm(v) => [v; 32],
            Src::Shared(offset) => [u64::from(offset | self.ids.rank << crate::memory::RANK_SHIFT); 32],
            Src::Special(s) => self.ids.get(s),
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
                self.will_write(Reg::R32(i), m);
                blend(&mut self.r32[i as usize], v, m);
            }
            Dst::Sink => {}
            other => self.w64(other, m, &v.map(u64::from)),
        }
    }

    /// Writes 64-bit values (truncated into a narrower register).
    #[inline]
    pub fn w64(&mut self, d: Dst, m: u32, v: &[u64; 32]) {
        match d {
            Dst::Reg(Reg::R64(i)) => {
                self.will_write(Reg::R64(i), m);
                blend(&mut self.r64[i as usize], v, m);
            }
            Dst::Reg(Reg::R128(i)) => {
                self.w64(Dst::Reg(Reg::R64(i)), m, v);
                self.w64(Dst::Reg(Reg::R64(i + 1)), m, &[0; 32]);
            }
            Dst::Reg(Reg::R32(i)) => {
                self.will_write(Reg::R32(i), m);
                blend(&mut self.r32[i as usize], &v.map(|v| v as u32), m);
            }
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
                let i = i as usize;
                self.pred[i] = self.pred[i] & !m | p & m;
                self.meta_pred[i] |= m;
                if self.undefined != 0 {
                    self.taint(Reg::Pred(i as u32), m);
                }
            }
            Dst::Sink => {}
            other => self.w64(other, m, &std::array::from_fn(|i| u64::from(p >> i & 1))),
        }
    }

    /// Runs what only moves values between registers: those in flight may take part and stay in flight.
    pub fn moving<T>(&mut self, f: impl FnOnce(&mut Regs) -> T) -> T {
        self.moving = true;
        let result = f(self);
        self.moving = false;
        self.moved_from = None;
        result
    }

    /// Frees the registers that these were moved to.
    pub fn free_moved(&mut self, mut freed: Vec<Reg>) {
        for (from, to) in std::mem::take(&mut self.moved) {
            if freed.contains(&from) {
                self.lock(to, Lock::Free);
                freed.push(to);
            } else {
                self.moved.push((from, to));
            }
        }
    }

    /// Copies a register without reading it: what was unwritten stays so. Compilers move undefined values
    /// about freely; only using one is wrong.
    pub fn copy(&mut self, d: Dst, s: Src, m: u32) {
        self.moving(|r| r.copy_as_is(d, s, m));
    }

    fn copy_as_is(&mut self, d: Dst, s: Src, m: u32) {
        let unwritten = self.unwritten(s);
        let check = std::mem::replace(&mut self.check_uninit, false);
        if let Src::Reg(Reg::R128(_)) = s {
            let v = self.r128(s, m);
            self.w128(d, m, &v);
        } else if let (Dst::Reg(Reg::Pred(_)), _) = (d, s) {
            let p = self.pred(s, m);
            self.wpred(d, m, p);
        } else {
            let v = self.r64(s, m);
            self.w64(d, m, &v);
        }
        self.check_uninit = check;
        self.forget(d, unwritten & m);
    }

    /// Lanes in which a source is unwritten.
    pub fn unwritten(&self, s: Src) -> u32 {
        match s {
            Src::Reg(Reg::R32(i)) => !self.meta32[i as usize].written,
            Src::Reg(Reg::R64(i)) => !self.meta64[i as usize].written,
            Src::Reg(Reg::R128(i)) => {
                !(self.meta64[i as usize].written & self.meta64[i as usize + 1].written)
            }
            Src::Reg(Reg::Pred(i)) | Src::NotPred(i) => !self.meta_pred[i as usize],
            _ => 0,
        }
    }

    /// Marks lanes of a register unwritten.
    pub fn forget(&mut self, d: Dst, lanes: u32) {
        if lanes == 0 {
            return;
        }
        match d {
            Dst::Reg(Reg::R32(i)) => self.meta32[i as usize].written &= !lanes,
            Dst::Reg(Reg::R64(i)) => self.meta64[i as usize].written &= !lanes,
            Dst::Reg(Reg::R128(i)) => {
                self.meta64[i as usize].written &= !lanes;
                self.meta64[i as usize + 1].written &= !lanes;
            }
            Dst::Reg(Reg::Pred(i)) => self.meta_pred[i as usize] &= !lanes,
            Dst::Sink => {}
        }
    }

    /// Reads a value without asking whether it was written (registers an instruction may ignore).
    pub fn peek32(&mut self, s: Src) -> [u32; 32] {
        let check = std::mem::replace(&mut self.check_uninit, false);
        let v = self.r32(s, FULL);
        self.check_uninit = check;
        v
    }

    /// `wgmma.fence`: what has been written so far may be used by matrix operations.
    pub fn fence(&mut self) {
        self.epoch += 1;
    }

    /// Whether the program wrote a register after the last [`fence`](Regs::fence).
    pub fn written_since_fence(&mut self, r: Reg) -> bool {
        let epoch = self.epoch;
        self.meta(r).epoch == epoch
    }

    /// Gives a register to an operation in flight, or takes it back.
    pub fn lock(&mut self, r: Reg, lock: Lock) {
        self.meta(r).lock = lock;
    }

    /// Who owns a register.
    pub fn lock_of(&mut self, r: Reg) -> Lock {
        self.meta(r).lock
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
    fn unwritten_lanes_are_noticed_on_use_but_not_on_copy_exact() {
        let mut r = regs();
        r.w32(Dst::Reg(Reg::R32(0)), 0x1, &[7; 32]);
        r.copy(Dst::Reg(Reg::R32(1)), Src::Reg(Reg::R32(0)), FULL);
        assert_eq!(r.bad, None);
        r.r32(Src::Reg(Reg::R32(1)), 0x1);
        assert_eq!(r.bad, None);
        r.r32(Src::Reg(Reg::R32(1)), 0x3);
        assert_eq!(r.bad, Some(BadReg::Unwritten(Reg::R32(1), 0x2)));
    }

    #[test]
    fn registers_in_flight_are_guarded_exact() {
        let mut r = regs();
        r.w32(Dst::Reg(Reg::R32(0)), FULL, &[7; 32]);
        r.lock(Reg::R32(0), Lock::Source);
        r.r32(Src::Reg(Reg::R32(0)), FULL);
        assert_eq!(r.bad, None);
        r.w32(Dst::Reg(Reg::R32(0)), FULL, &[7; 32]);
        assert_eq!(r.bad, Some(BadReg::InFlight(Reg::R32(0), true)));
        r.bad = None;
        r.lock(Reg::R32(0), Lock::Target);
        r.r32(Src::Reg(Reg::R32(0)), FULL);
        assert_eq!(r.bad, Some(BadReg::InFlight(Reg::R32(0), false)));
    }

    #[test]
    fn a_loaded_register_may_be_moved_but_not_used_exact() {
        let mut r = regs();
        let (from, to) = (Reg::R32(0), Reg::R32(1));
        r.w32(Dst::Reg(from), FULL, &[7; 32]);
        r.lock(from, Lock::Loaded);
        r.copy(Dst::Reg(to), Src::Reg(from), FULL);
        assert_eq!(r.bad, None);
        r.r32(Src::Reg(to), FULL);
        assert_eq!(r.bad.take(), Some(BadReg::InFlight(to, false)));
        r.lock(from, Lock::Free);
        r.free_moved(vec![from]);
        assert_eq!(r.r32(Src::Reg(to), FULL), [7; 32]);
        assert_eq!(r.bad, None);
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
