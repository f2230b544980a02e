//! What is known of each register beside its value: in which lanes all bits are defined, since which fence; and whether an
//! operation in flight (`wgmma`, `tcgen05.ld`) owns it.

use super::{FULL, Regs};
use crate::program::{Reg, Src};

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
    /// Read where not all bits are defined, in these lanes.
    Unwritten(Reg, u32),
    /// Touched while in flight; `true` for a write.
    InFlight(Reg, bool),
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Meta {
    pub(super) written: u32,
    lock: Lock,
    /// The epoch of the last write, see [`Regs::fence`].
    epoch: u32,
}

impl Regs {
    #[cold]
    pub(super) fn complain(&mut self, bad: BadReg) {
        match bad {
            BadReg::Unwritten(r, lanes) => {
                self.has_read(r, lanes);
                self.bad.get_or_insert(bad);
            }
            BadReg::InFlight(..) if matches!(self.bad, Some(BadReg::InFlight(..))) => {}
            BadReg::InFlight(..) => self.bad = Some(bad),
        }
    }

    #[inline]
    fn meta(&mut self, r: Reg) -> &mut Meta {
        match r {
            Reg::R32(i) => &mut self.meta32[i as usize],
            // Predicates are never matrix operands; decode gives none to the functions that lock.
            Reg::R64(i) | Reg::R128(i) | Reg::Pred(i) => &mut self.meta64[i as usize],
        }
    }

    #[inline]
    pub(super) fn may_read(&mut self, r: Reg, m: u32) {
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

    /// Whether the value is written now, not put aside.
    #[inline]
    pub(super) fn will_write(&mut self, r: Reg, m: u32) -> bool {
        let epoch = self.epoch;
        let now = self.undefined == 0;
        let meta = self.meta(r);
        if now {
            meta.written |= m;
        }
        meta.epoch = epoch;
        if meta.lock != Lock::Free {
            self.complain(BadReg::InFlight(r, true));
        }
        if let Some(from) = self.moved_from {
            self.lock(r, Lock::Loaded);
            self.moved.push((from, r));
        }
        now
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

    /// Lanes in which not all bits of a source are defined.
    pub fn unwritten(&self, s: Src) -> u32 {
        match s {
            _ if !self.check_uninit => 0,
            Src::Reg(Reg::R32(i)) => !self.meta32[i as usize].written,
            Src::Reg(Reg::R64(i)) => !self.meta64[i as usize].written,
            Src::Reg(Reg::R128(i)) => {
                !(self.meta64[i as usize].written & self.meta64[i as usize + 1].written)
            }
            Src::Reg(Reg::Pred(i)) | Src::NotPred(i) => !self.meta_pred[i as usize],
            _ => 0,
        }
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::ids::Ids;
    use crate::program::Dst;

    fn regs() -> Regs {
        Regs::new([2, 0, 0], Ids::default(), true)
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
}
