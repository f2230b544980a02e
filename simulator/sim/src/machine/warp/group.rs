//! Lanes that execute together: where they are, what they know, why they wait.
//!
//! Flow: [`Warp`](super::Warp) splits and joins groups; `machine::step` runs one until it waits; `exec` lets it learn and
//! publish (`order`) through the views of [`order`](crate::check::order).

use super::Known;
use crate::check::order::{Actor, View};
use crate::decode::operand::Scope as Reach;
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
        parity: u32,
    },
    /// These lanes of the warp, at this instruction.
    Lanes(u32),
    /// All but the newest `n` committed groups of an asynchronous kind.
    Groups {
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
    /// What strong reads of some lanes have seen but no fence has acquired yet.
    pub observed: Option<(u32, Arc<View>)>,
    /// What it had published at its last fence, and how far that reaches: strong writes pass it on.
    pub fenced: Option<(Reach, Arc<View>)>,
    /// Whether it has accessed no memory since.
    pub quiet: bool,
    /// What other fences have covered: initializations of mbarriers, and what was done to tensor memory. Relaxed arrivals
    /// pass it on too.
    other: Option<Arc<View>>,
    /// What its last `tcgen05.fence::after_thread_sync` adds to what it knows, for tensor memory.
    pub tensor: Arc<View>,
}

impl Carried {
    /// What a relaxed arrival of these lanes passes on in a scope: what their fences that reach as far have covered.
    pub fn passed_on(&self, scope: Reach, lanes: u32) -> Option<Arc<View>> {
        let fenced = self.fenced_by(lanes).filter(|(reach, _)| *reach >= scope).map(|(_, view)| view);
        match (fenced, &self.other) {
            (Some(mut both), Some(other)) => {
                Arc::make_mut(&mut both).join(other);
                Some(both)
            }
            (fenced, other) => fenced.or(other.clone()),
        }
    }

    /// What the last fence of these lanes has covered, and how far it reaches.
    pub fn fenced_by(&self, lanes: u32) -> Option<(Reach, Arc<View>)> {
        let (reach, mut view) = self.fenced.clone()?;
        Arc::make_mut(&mut view).settle(lanes);
        Some((reach, view))
    }

    /// Notes what strong reads of these lanes have seen.
    pub fn observe(&mut self, lanes: u32, view: &View) {
        let (some, seen) = self.observed.get_or_insert_default();
        *some |= lanes;
        Arc::make_mut(seen).join(view);
    }

    /// Lets relaxed arrivals pass this on.
    pub fn pass_on(&mut self, what: &View) {
        Arc::make_mut(self.other.get_or_insert_default()).join(what);
    }

    /// That of lanes which join.
    pub(super) fn merge(&mut self, other: &Carried) {
        self.quiet = false;
        Arc::make_mut(&mut self.tensor).join(&other.tensor);
        if let Some((lanes, theirs)) = &other.observed {
            self.observe(*lanes, theirs);
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

/// Lanes that execute together.
#[derive(Debug, Clone, Default)]
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
    /// What its lanes know.
    pub known: Known,
    /// What its fences deal with.
    pub carried: Carried,
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
