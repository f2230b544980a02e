//! A CTA: its shared and tensor memory, its barriers, its place in the grid.

use super::groups::Warpgroup;
use crate::check::cross::Dependency;
use crate::check::order::{Actor, View};
use crate::decode::operand::Scope;
use crate::exec::mbarrier::{Initializer, Use};
use crate::memory::shared::Shared;
use crate::memory::tmem::Tmem;
use crate::semantics::mbarrier::Mbarrier;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A named barrier (PTX ISA `barrier.cta`).
#[derive(Debug, Default)]
pub struct NamedBarrier {
    /// Completed rounds.
    pub generation: u64,
    /// Threads that have arrived in this round.
    pub arrived: u32,
    /// Threads this round needs, once the first has said so; `None`: all that live.
    pub expected: Option<u32>,
    /// Instruction of the first arrival of this round.
    pub first_pc: u32,
    /// What this round reduces, if anything, as the first arrival said.
    pub reduction: Option<&'static str>,
    /// Predicate results gathered for `barrier.red`: number of true ones.
    pub votes: u32,
    /// Votes of the last completed round, and how many took part.
    pub result: (u32, u32),
    /// Threads that wait (`sync`), for messages and leaks.
    pub waiting: u32,
    /// What those who arrived in this round knew.
    pub current: View,
    /// What waiters of completed rounds learn.
    pub done: Arc<View>,
}

impl NamedBarrier {
    pub fn complete(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        Arc::make_mut(&mut done).join(&self.current);
        let (generation, result) = (self.generation + 1, (self.votes, self.arrived));
        *self = NamedBarrier { generation, result, done, ..NamedBarrier::default() };
    }
}

/// An mbarrier object: the counts, and the knowledge that its phases carry.
#[derive(Debug)]
pub struct MbarrierObject {
    /// The counts.
    pub state: Mbarrier,
    /// Instruction that initialized it.
    pub init_pc: u32,
    pub init: Initializer,
    /// The round of the cluster barrier at which the one who initialized it has arrived, if only relaxed.
    pub announced: Option<u64>,
    /// The last use by each actor.
    pub uses: Vec<Use>,
    /// What those who arrived in this phase knew.
    pub current: Told,
    /// What waiters of completed phases learn.
    pub done: Told,
}

/// The CTA of a thread and the scope of its arrival or wait; none where that makes no difference.
pub type Reach = Option<(usize, Scope)>;

/// Who told what.
#[derive(Debug, Clone, Default)]
pub struct Told(SmallVec<[Heard; 1]>);

type Heard = (Reach, Arc<View>);

impl Told {
    /// Adds what one who arrived knew.
    pub fn join(&mut self, from: Reach, view: &Arc<View>) {
        match self.0.iter_mut().find(|(other, _)| *other == from) {
            Some((_, known)) => Arc::make_mut(known).join(view),
            None => self.0.push((from, view.clone())),
        }
    }

    /// What one who waits learns: with a scope, of arrivals in the same CTA, and in others if both scopes reach that far.
    pub fn to(&self, waiter: Reach) -> impl Iterator<Item = &Arc<View>> {
        let reaches = move |from: Reach| match (from, waiter) {
            (Some((from, wide)), Some((to, scope))) => from == to || wide.min(scope) > Scope::Cta,
            _ => true,
        };
        self.0.iter().filter(move |(from, _)| reaches(*from)).map(|(_, view)| view)
    }
}

impl MbarrierObject {
    /// Takes over a new state; a completed phase hands its knowledge to waiters.
    pub fn advance(&mut self, state: Mbarrier, completed: bool) {
        self.state = state;
        if completed {
            for (from, view) in std::mem::take(&mut self.current).0 {
                self.done.join(from, &view);
            }
        }
    }
}

#[derive(Debug, Default)]
pub struct Cta {
    /// Place in the grid.
    pub id: [u32; 3],
    /// Rank in the cluster.
    pub rank: u32,
    pub shared: Shared,
    /// Tensor memory.
    pub tmem: Tmem,
    pub barriers: [NamedBarrier; 16],
    /// Live mbarrier objects by offset.
    pub mbarriers: BTreeMap<u32, MbarrierObject>,
    /// How it meets with the launches around this one.
    pub dependency: Dependency,
    /// Threads that have not exited.
    pub live_threads: u32,
    /// What those knew that have, in a cluster.
    pub gone: View,
    /// The last arrival at one of its mbarriers by each thread of another CTA: clock and instruction.
    pub visits: BTreeMap<Actor, (u32, u32)>,
    /// Registers that `setmaxnreg.dec` has given back and `.inc` may take.
    pub spare_registers: i64,
    /// When the newest tensor-core operation of the CTA completes; later ones complete later.
    pub tensor_busy_until: u64,
    /// Matrix operations of Hopper's tensor cores, by warpgroup.
    pub warpgroups: Vec<Warpgroup>,
}

impl Cta {
    /// The mbarrier that overlaps `len` bytes at `offset`.
    pub fn mbarrier_in(&self, offset: u32, len: u32) -> Option<u32> {
        let first = offset.saturating_sub(7);
        self.mbarriers.range(first..offset + len).next().map(|(&o, _)| o)
    }
}
