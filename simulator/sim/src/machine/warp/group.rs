//! Lanes that execute together: where they are, what they know, why they wait.
//!
//! Flow: [`Warp`](super::Warp) splits and joins groups; `machine::step` runs one until it waits; `exec` lets it learn and
//! publish through the views of [`order`](crate::check::order).

use crate::check::order::{Actor, View};
use crate::check::proxy::Fence;
use crate::decode::operand::Scope as Reach;
use smallvec::SmallVec;
use std::sync::Arc;

/// Why a group does not run. It is tried again when the reason may have gone; the instruction is executed anew
/// and decides itself whether it can finish.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Wait {
    /// It can run.
    #[default]
    No,
    /// It polls: try again once anything has happened since this progress count.
    Poll(u64),
    /// Named barrier `id` of the CTA, until its generation passes this one.
    Named {
        /// Barrier number.
        id: u32,
        /// Generation it arrived in.
        generation: u64,
    },
    /// The cluster barrier, until its generation passes this one.
    Cluster(u64),
    /// An mbarrier of the CTA with this rank, until the phase with this parity ends.
    Mbarrier {
        /// Rank of the CTA that holds it.
        rank: u32,
        /// Its offset in shared memory.
        offset: u32,
        /// The parity waited for.
        parity: u32,
    },
    /// These lanes of the warp, at this instruction.
    Lanes(u32),
    /// All but the newest `n` committed groups of an asynchronous kind.
    Groups {
        /// Which kind.
        kind: GroupKind,
        /// How many may stay in flight.
        n: u32,
    },
    /// Free tensor memory: try again once anything has happened since this progress count.
    Tmem(u64),
    /// Registers another warp must give back first; as `Tmem`.
    Registers(u64),
    /// The turn of this cluster to touch global memory in order.
    Grid,
}

/// The asynchronous operations that are waited for in groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// `cp.async`
    CpAsync,
    /// `cp.async.bulk`, until complete.
    Bulk,
    /// `cp.async.bulk`, until the sources have been read.
    BulkRead,
    /// `wgmma.mma_async`
    Wgmma,
    /// `tcgen05.ld`
    TmemLoad,
    /// `tcgen05.st`
    TmemStore,
}

/// Knowledge that is not yet, or no longer, part of what a group has synchronized with.
#[derive(Debug, Clone, Default)]
pub struct Carried {
    /// What strong reads have seen but no fence has acquired yet.
    pub observed: Option<Arc<View>>,
    /// What it had published at its last fence, and how far that reaches: strong writes pass it on.
    pub fenced: Option<(Reach, Arc<View>)>,
    /// What other fences have covered: initializations of mbarriers, and what was done to tensor memory. Relaxed arrivals
    /// pass it on too.
    other: Option<Arc<View>>,
    /// What its last `tcgen05.fence::after_thread_sync` adds to what it knows, for tensor memory.
    pub tensor: Arc<View>,
}

impl Carried {
    /// What a relaxed arrival or write passes on in a scope: what fences that reach as far have covered.
    pub fn passed_on(&self, scope: Reach) -> Option<Arc<View>> {
        let fenced = self.fenced.as_ref().filter(|(reach, _)| *reach >= scope).map(|(_, view)| view);
        match (fenced, &self.other) {
            (Some(fenced), Some(other)) => {
                let mut both = fenced.clone();
                Arc::make_mut(&mut both).join(other);
                Some(both)
            }
            (fenced, other) => fenced.or(other.as_ref()).cloned(),
        }
    }

    /// Lets relaxed arrivals pass this on.
    pub fn pass_on(&mut self, what: &View) {
        Arc::make_mut(self.other.get_or_insert_default()).join(what);
    }

    /// That of lanes which join.
    pub(super) fn merge(&mut self, other: &Carried) {
        Arc::make_mut(&mut self.tensor).join(&other.tensor);
        if let Some(theirs) = &other.observed {
            Arc::make_mut(self.observed.get_or_insert_default()).join(theirs);
        }
        if let Some(theirs) = &other.other {
            self.pass_on(theirs);
        }
        match (&mut self.fenced, &other.fenced) {
            (Some((reach, mine)), Some((other, theirs))) => {
                *reach = (*reach).min(*other);
                Arc::make_mut(mine).join(theirs);
            }
            (mine @ None, theirs) => *mine = theirs.clone(),
            (Some(_), None) => {}
        }
    }
}

/// Accesses of lanes that no `__syncwarp` has ordered with the other lanes of their warp; kept for strict checks only.
#[derive(Debug, Clone, Default)]
pub struct Loose {
    /// Lanes that have read or written memory since.
    pub lanes: u32,
    /// The group's clock at its last `__syncwarp` or barrier.
    pub(super) since: u32,
    /// Groups that this one was part of, and up to where lanes outside of it are ordered before.
    pub(super) before: SmallVec<[(Actor, u32); 1]>,
}

/// Lanes that execute together.
#[derive(Debug, Clone)]
pub struct Group {
    /// Next instruction.
    pub pc: u32,
    /// Its lanes.
    pub mask: u32,
    /// Where it will meet others.
    pub scope: usize,
    /// Slot among the warp's actors.
    pub slot: usize,
    /// Actor in the cluster.
    pub actor: Actor,
    /// Clock of its present actions.
    pub clock: u32,
    /// What it knows.
    pub view: Arc<View>,
    /// What its fences deal with.
    pub carried: Carried,
    /// What it has not synchronized within itself.
    pub loose: Loose,
    /// The branch after which its lanes met again, unless a `.sync` instruction of all of them came since.
    pub met: Option<u32>,
    /// Why it does not run.
    pub wait: Wait,
    /// A polling instruction must answer now, even with "not yet".
    pub forced: bool,
    /// The barrier it has arrived at and still waits for.
    pub arrived: Option<u64>,
    /// `(pc, progress)` of its last unsuccessful poll.
    pub polled: Option<(u32, u64)>,
}

impl Group {
    /// Whether an action of this cluster is ordered before the present one.
    pub fn knows(&self, actor: Actor, clock: u32) -> bool {
        actor == self.actor || self.view.knows(actor, clock)
    }

    /// Learns what another party published.
    pub fn join(&mut self, other: &View) {
        Arc::make_mut(&mut self.view).join(other);
    }

    /// Learns what a wait or a strong read has seen: now if it acquires, at the next fence if it is relaxed.
    pub fn learn(&mut self, other: &View, acquire: bool) {
        if acquire {
            self.join(other);
        } else {
            Arc::make_mut(self.carried.observed.get_or_insert_default()).join(other);
        }
    }

    /// What others learn from these lanes of the group now; later actions are not part of it. Nothing of the other lanes
    /// since the last `__syncwarp`, where that is looked at.
    pub fn publish(&mut self, lanes: u32) -> Arc<View> {
        let all = self.loose.lanes & !lanes == 0;
        let mut view = self.until(if all { self.clock } else { self.loose.since });
        for &(actor, clock) in &self.loose.before {
            Arc::make_mut(&mut view).limit(actor, clock);
        }
        view
    }

    /// Everything that the group knows and did.
    pub(super) fn all(&mut self) -> Arc<View> {
        self.until(self.clock)
    }

    /// What the group knows, and what it did up to `clock`; later actions are later than that.
    fn until(&mut self, clock: u32) -> Arc<View> {
        let mut view = self.view.clone();
        Arc::make_mut(&mut view).learn(self.actor, clock);
        self.clock += 1;
        view
    }

    /// `__syncwarp`, or a barrier that includes one: the lanes know what the others did.
    pub fn sync(&mut self) {
        self.loose = Loose { since: self.clock, ..Loose::default() };
        self.met = None;
        self.clock += 1;
    }

    /// `fence.mbarrier_init`
    pub fn fence_initialized(&mut self) {
        let own = self.view.initialized(self.actor, self.clock);
        self.join(&own);
        self.carried.pass_on(&own);
        self.clock += 1;
    }

    /// `fence.proxy.async` of these memories.
    pub fn fence_proxy(&mut self, memories: &[Fence]) {
        Arc::make_mut(&mut self.view).fence_proxy(memories, (self.actor, self.clock));
        self.clock += 1;
    }
}
