//! What each decoded operation does to the machine, one file per family.

pub mod access;
pub mod arith;
pub mod atomic;
pub mod control;
pub mod convert;
pub mod copy;
pub mod fence;
pub mod float;
pub mod ld_st;
pub mod mbarrier;
pub mod mma;
pub mod operand;
pub mod sync;
pub mod tcgen05;
pub mod tensor_map;
pub mod tma;
pub mod undefined;
pub mod vote;
pub mod warp;
pub mod wgmma;
pub mod wmma;

// What most families work with; they import it from here.
use crate::check::{lanes::Lanes, shadow::Kind};
use crate::decode::Op;
use crate::decode::operand::{Addr, Ordering, Scope};
use crate::machine::cluster::Cluster;
use crate::machine::engine::Agent;
use crate::machine::regs::FULL;
use crate::machine::step::Flow;
use crate::machine::warp::{Group, GroupKind, Wait, Warp};
use crate::memory::{Place, Space, place};
use crate::program::{Dst, Reg, Src};
use crate::trap::{Check, Fault, Party};
use std::sync::Arc;

pub struct Cx<'c, 'a> {
    pub cl: &'c mut Cluster<'a>,
    pub w: &'c mut Warp,
    pub g: &'c mut Group,
    pub cta: usize,
    /// Lanes whose guard is true.
    pub m: u32,
    pub pc: u32,
    /// For which lanes accesses are, if not for the lane that gives the address.
    pub together: Option<Lanes>,
}

pub type Result<T = Flow> = std::result::Result<T, Fault>;

/// The set lanes of a mask.
pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |i| mask >> i & 1 != 0)
}

impl Cx<'_, '_> {
    /// Brings lanes together for an instruction that `members` execute as one. `Some` while some are missing.
    pub fn gather(&mut self, members: u32) -> Option<Flow> {
        let wanted = members & self.w.live;
        if wanted & !self.g.mask == 0 {
            return None;
        }
        if self.w.gather(self.g, members) {
            self.m |= wanted;
            return None;
        }
        Some(Flow::Wait(Wait::Lanes(members)))
    }

    /// As [`gather`](Cx::gather) for an `.aligned` instruction: all lanes of the warp.
    pub fn aligned(&mut self) -> Result<Option<Flow>> {
        let flow = self.gather(u32::MAX);
        match self.g.met {
            Some(pc) if flow.is_none() && self.cl.launch.config.checks.strict => Err(Fault::new(
                Check::Barrier,
                "an .aligned instruction after lanes of the warp have taken different branches",
            )
            .party(Party { role: "branch".into(), pc: Some(pc), cta: None, warp: None })
            .help("execute bar.warp.sync first: lanes need not run together again where branches meet")),
            _ => Ok(flow),
        }
    }

    /// The value that all active lanes have in common.
    pub fn uniform(&mut self, s: Src, what: &str) -> Result<u64> {
        let v = self.w.regs.r64(s, self.m);
        let first = self.m.trailing_zeros() as usize;
        let value = v[first.min(31)];
        match lanes(self.m).find(|&l| v[l] != value) {
            None => Ok(value),
            Some(l) => Err(Fault::new(
                Check::Illegal,
                format!(
                    "{what} must be the same in all lanes: {value:#x} in lane {first}, {:#x} in lane {l}",
                    v[l]
                ),
            )),
        }
    }

    /// The first active lane.
    pub fn first_lane(&self) -> u32 {
        self.m.trailing_zeros().min(31)
    }
}

pub fn execute(op: &Op, cx: &mut Cx<'_, '_>) -> Result {
    match op {
        Op::Nop => Ok(Flow::Next),
        Op::Branch(target) => Ok(Flow::Branch(*target)),
        Op::Control(op) => control::execute(op, cx),
        Op::Arith(op) => arith::execute(op, cx),
        Op::Float(op) => float::execute(op, cx),
        Op::Convert(op) => convert::execute(op, cx),
        Op::Memory(op) => ld_st::execute(op, cx),
        Op::Matrix(op) => ld_st::matrix(op, cx),
        Op::Atomic(op) => atomic::execute(op, cx),
        Op::Fence(op) => fence::fence(op, cx),
        Op::Barrier(op) => fence::barrier(op, cx),
        Op::Vote(op) => vote::execute(op, cx),
        Op::Mbarrier(op) => mbarrier::execute(op, cx),
        Op::CpAsync(op) => copy::cp_async(op, cx),
        Op::Bulk(op) => copy::bulk(op, cx),
        Op::Tensor(op) => tma::execute(op, cx),
        Op::TensorMap(op) => tensor_map::execute(op, cx),
        Op::Mma(op) => mma::execute(op, cx),
        Op::Wmma(op) => wmma::execute(op, cx),
        Op::Wgmma(op) => wgmma::execute(op, cx),
        Op::Tcgen05(op) => tcgen05::execute(op, cx),
    }
}
