//! Registers whose bits are not all defined.
//!
//! Of most registers it is enough to know the lanes in which all bits are defined (`written` in `marks`); only for
//! the other lanes is a [`Shadow`] kept. What an instruction writes after it has read such a lane is put aside until
//! `exec::undefined` knows which bits of it are defined, so instructions on defined values pay nothing.

use super::{FULL, Regs};
use crate::check::undefined::{Hole, Origin, Source};
use crate::program::{Dst, Reg, Src};

/// The undefined bits of a value in each lane.
#[derive(Debug, Clone, Default)]
pub struct Shadow {
    /// One bit for each bit.
    pub bits: [u128; 32],
    /// Where they came from, for lanes that have any.
    pub origins: [Option<Origin>; 32],
}

impl Shadow {
    /// The undefined bytes of the low `width` bytes of a lane.
    pub fn hole(&self, lane: usize, width: usize) -> Option<Hole> {
        let byte = |b: &usize| self.bits[lane] >> (8 * b) & 0xff != 0;
        let bytes = (0..width).filter(byte).fold(0, |m, b| m | 1 << b);
        Some(Hole { bytes, origin: self.origins[lane]? }).filter(|h| h.bytes != 0)
    }

    /// Adds undefined bits to a lane.
    pub fn add(&mut self, lane: usize, bits: u128, origin: Option<Origin>) {
        self.bits[lane] |= bits;
        self.origins[lane] = self.origins[lane].or(origin);
    }
}

fn width(r: Reg) -> u128 {
    u128::MAX >> (128 - r.bits())
}

/// A write put aside: register, lanes, values.
pub type Aside = (Reg, u32, [u64; 32]);

impl Regs {
    /// The running instruction has read undefined bits of a register: its writes are put aside from now on.
    #[cold]
    pub(super) fn has_read(&mut self, r: Reg, lanes: u32) {
        self.undefined |= lanes;
        if !self.reads.contains(&r) {
            self.reads.push(r);
        }
    }

    #[cold]
    pub(super) fn put_aside(&mut self, r: Reg, m: u32, v: [u64; 32]) {
        self.aside.push((r, m, v));
    }

    /// Lanes in which the running instruction has read undefined bits.
    pub fn undefined_lanes(&self) -> u32 {
        self.undefined
    }

    /// Ends an instruction that has read undefined bits: the registers it read them from, the writes put aside.
    pub fn take_aside(&mut self) -> (Vec<Reg>, Vec<Aside>) {
        self.undefined = 0;
        (std::mem::take(&mut self.reads), std::mem::take(&mut self.aside))
    }

    /// Carries out a write that was put aside.
    pub fn put_back(&mut self, (r, m, v): &Aside, shadow: &Shadow) {
        self.replace(*r, *m, v);
        match *r {
            Reg::R32(i) => self.meta32[i as usize].written |= m,
            Reg::R64(i) | Reg::R128(i) => self.meta64[i as usize].written |= m,
            Reg::Pred(i) => self.meta_pred[i as usize] |= m,
        }
        self.set_shadow(Dst::Reg(*r), *m, shadow);
    }

    /// The values of a register, whatever is known of them.
    pub fn values(&self, r: Reg) -> [u64; 32] {
        match r {
            Reg::R32(i) => self.r32[i as usize].map(u64::from),
            Reg::R64(i) | Reg::R128(i) => self.r64[i as usize],
            Reg::Pred(i) => std::array::from_fn(|l| u64::from(self.pred[i as usize] >> l & 1)),
        }
    }

    /// Sets the values of a register, and nothing else.
    pub fn replace(&mut self, r: Reg, m: u32, v: &[u64; 32]) {
        match r {
            Reg::R32(i) => super::blend(&mut self.r32[i as usize], &v.map(|v| v as u32), m),
            Reg::R64(i) | Reg::R128(i) => super::blend(&mut self.r64[i as usize], v, m),
            Reg::Pred(i) => {
                let p = (0..32).fold(0, |p, l| p | (v[l] as u32 & 1) << l);
                self.pred[i as usize] = self.pred[i as usize] & !m | p & m;
            }
        }
    }

    /// Turns the check of what is read on or off; returns what it was.
    pub fn check_reads(&mut self, on: bool) -> bool {
        std::mem::replace(&mut self.check_uninit, on)
    }

    /// Puts all writes of an instruction aside that is executed only to see what it would write.
    pub fn rehearse(&mut self) {
        self.undefined = FULL;
    }

    /// The undefined bits of a value. Of a register that nothing wrote, `pc` is the first reader.
    pub fn shadow(&self, s: Src, pc: u32) -> Shadow {
        let mut out = Shadow::default();
        let (r, lanes) = match s {
            Src::Reg(Reg::R128(i)) => {
                let [lo, hi] = [i, i + 1].map(|i| self.shadow(Src::Reg(Reg::R64(i)), pc));
                for l in 0..32 {
                    out.add(l, lo.bits[l], lo.origins[l]);
                    out.add(l, hi.bits[l] << 64, hi.origins[l]);
                }
                return out;
            }
            Src::NotPred(i) => (Reg::Pred(i), self.unwritten(s)),
            Src::Reg(r) => (r, self.unwritten(s)),
            _ => return out,
        };
        let known = self.shadows.get(&r);
        for l in (0..32).filter(|l| lanes >> l & 1 != 0) {
            let never = Origin { source: Source::Register(r), pc };
            let (bits, origin) = known.map_or((width(r), None), |s| (s.bits[l], s.origins[l]));
            out.add(l, bits, Some(origin.unwrap_or(never)));
        }
        out
    }

    /// Marks bits of a register undefined that has just been written in the lanes `m`.
    pub fn set_shadow(&mut self, d: Dst, m: u32, shadow: &Shadow) {
        let r = match d {
            Dst::Sink => return,
            Dst::Reg(Reg::R128(i)) => {
                let high = Shadow { bits: shadow.bits.map(|b| b >> 64), origins: shadow.origins };
                self.set_shadow(Dst::Reg(Reg::R64(i)), m, shadow);
                return self.set_shadow(Dst::Reg(Reg::R64(i + 1)), m, &high);
            }
            Dst::Reg(r) => r,
        };
        let bits = shadow.bits.map(|b| b & width(r));
        let lanes = (0..32).filter(|l| bits[*l] != 0).fold(0, |m, l| m | 1 << l) & m;
        if lanes == 0 {
            return;
        }
        let fresh = || Box::new(Shadow { bits: [width(r); 32], origins: [None; 32] });
        let known = self.shadows.entry(r).or_insert_with(fresh);
        for l in (0..32).filter(|l| lanes >> l & 1 != 0) {
            known.bits[l] = bits[l];
            known.origins[l] = shadow.origins[l];
        }
        match r {
            Reg::R32(i) => self.meta32[i as usize].written &= !lanes,
            Reg::R64(i) | Reg::R128(i) => self.meta64[i as usize].written &= !lanes,
            Reg::Pred(i) => self.meta_pred[i as usize] &= !lanes,
        }
    }
}
