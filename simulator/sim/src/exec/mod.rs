//! What instructions do, one file per family: `decode` of a family reads the syntax once, and gives the [`Op`] that a warp
//! executes. What operands mean is in [`decode`](crate::decode); pure computations are in [`semantics`](crate::semantics).

pub mod access;
pub mod arith;
pub mod atomic;
pub mod control;
pub mod convert;
pub mod copy;
pub mod fence;
pub mod float;
pub mod in_flight;
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
use crate::decode::operand::{Addr, Ordering, Scope};
use crate::decode::{Decoded, Ins};
use crate::machine::cluster::Cluster;
use crate::machine::engine::Agent;
use crate::machine::regs::{FULL, each};
use crate::machine::step::Flow;
use crate::machine::warp::{Group, GroupKind, Wait, Warp};
use crate::memory::{Place, Space, place};
use crate::program::{Dst, Given, Reg, Src};
use crate::trap::{Check, Fault, Party, fault};
use dualgemm_ptx::Type;
use dualgemm_ptx::ast::Operand;
use std::fmt;
use std::sync::Arc;
use undefined::{Operands, Spread};

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

/// An instruction ready to run: a function that knows its operands.
#[derive(Clone)]
pub struct Op {
    run: Arc<dyn Fn(&mut Cx<'_, '_>) -> Result + Send + Sync>,
    pub kind: OpKind,
}

/// What must be known of an instruction beside what it does.
#[derive(Debug, Clone)]
pub enum OpKind {
    /// It reads and writes registers of its own lane and does nothing else.
    Computes(Operands),
    /// It goes to one of these instructions.
    Jumps(Vec<u32>),
    /// It calls a function, whose results go to these parameters.
    Calls(Vec<Given>),
    /// It returns, exits or traps.
    Leaves,
    /// Anything else.
    Acts,
}

/// How an operation ends: mostly the next instruction follows.
pub trait Ends {
    fn flow(self) -> Result;
}

impl Ends for () {
    fn flow(self) -> Result {
        Ok(Flow::Next)
    }
}

impl Ends for Flow {
    fn flow(self) -> Result {
        Ok(self)
    }
}

impl<T: Ends> Ends for Result<T> {
    fn flow(self) -> Result {
        self?.flow()
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

impl Op {
    /// An instruction that acts.
    pub fn new<E: Ends>(run: impl Fn(&mut Cx<'_, '_>) -> E + Send + Sync + 'static) -> Op {
        Op::of(OpKind::Acts, run)
    }

    /// An `.aligned` instruction that acts: all lanes of the warp execute it as one.
    pub fn aligned<E: Ends>(run: impl Fn(&mut Cx<'_, '_>) -> E + Send + Sync + 'static) -> Op {
        Op::new(move |cx| match cx.aligned()? {
            Some(flow) => Ok(flow),
            None => run(cx).flow(),
        })
    }

    /// An instruction that computes. How undefined bits of `sources` reach the results is said by `how`; one that is
    /// undefined among `controls` makes all of them undefined.
    pub fn computes<E: Ends>(
        how: Spread,
        sources: &[Src],
        controls: &[Src],
        run: impl Fn(&mut Cx<'_, '_>) -> E + Send + Sync + 'static,
    ) -> Op {
        Op::of(OpKind::Computes(Operands { how, sources: sources.into(), controls: controls.into() }), run)
    }

    /// An instruction of a kind.
    pub fn of<E: Ends>(kind: OpKind, run: impl Fn(&mut Cx<'_, '_>) -> E + Send + Sync + 'static) -> Op {
        Op { run: Arc::new(move |cx| run(cx).flow()), kind }
    }

    /// Executes it.
    #[inline]
    pub fn run(&self, cx: &mut Cx<'_, '_>) -> Result {
        (self.run)(cx)
    }
}

/// The set lanes of a mask.
pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |i| mask >> i & 1 != 0)
}

impl Cx<'_, '_> {
    /// Stops an instruction that has read an operand it must not use: the dispatch loop reports which.
    pub fn defined(&self) -> Result<()> {
        match self.w.regs.bad {
            None => Ok(()),
            Some(_) => Err(Fault::new(Check::Uninit, "an operand is undefined")),
        }
    }

    /// Whether all of `members` that are here execute the instruction: lanes whose guard is false do not.
    pub fn all_execute(&self, members: u32, of: fmt::Arguments<'_>) -> Result<()> {
        let idle = members & self.g.mask & !self.m;
        if idle == 0 {
            return Ok(());
        }
        Err(fault!(Check::Barrier, "the guard of lanes {idle:#010x} is false at {of}")
            .help("lanes whose guard is false do not execute it: leave them out of the members, or branch around it"))
    }

    /// Brings lanes together for an instruction that `members` execute as one. `Some` while some are missing.
    /// Those that are here or wait have been found to execute it, by [`all_execute`](Cx::all_execute).
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
    pub fn gather_all(&mut self) -> Result<Option<Flow>> {
        self.all_execute(
            u32::MAX,
            format_args!("an .aligned instruction, which all lanes of the warp execute"),
        )?;
        Ok(self.gather(u32::MAX))
    }

    /// As [`gather_all`](Cx::gather_all), and strict checks find lanes that only happen to be together.
    pub fn aligned(&mut self) -> Result<Option<Flow>> {
        let flow = self.gather_all()?;
        match self.g.met {
            Some(pc) if flow.is_none() && self.cl.launch.config.checks.strict => Err(Fault::new(
                Check::Barrier,
                "an .aligned instruction after lanes of the warp have taken different branches",
            )
            .party(Party::new("branch", pc))
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
            Some(l) => Err(fault!(
                Check::Illegal,
                "{what} must be the same in all lanes: {value:#x} in lane {first}, {:#x} in lane {l}",
                v[l]
            )),
        }
    }

    /// The first active lane.
    pub fn first_lane(&self) -> u32 {
        self.m.trailing_zeros().min(31)
    }
}
