//! Asynchronous operations that a thread waits for in groups: `cp.async`, `cp.async.bulk`, `wgmma`, tensor
//! memory loads and stores.
//!
//! A thread starts operations, closes them into a group with `commit_group`, and waits until at most N groups
//! are unfinished. Lanes of a warp do this together, so a group is kept once with the mask of its lanes.

use super::engine::Agent;
use super::warp::GroupKind;
use crate::check::order::View;
use crate::program::Reg;
use crate::semantics::smem_desc::SmemDesc;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Number of an asynchronous operation, unique in its cluster.
pub type OpId = u64;

/// How far an operation has come.
#[derive(Debug, Clone)]
pub struct OpState {
    /// Its sources have been read.
    pub read: bool,
    /// It is complete.
    pub done: bool,
    /// The instruction that started it.
    pub pc: u32,
    /// CTA and warp that started it.
    pub owner: (u32, u32),
    /// What a waiter learns: what the issuer knew, and the operation itself.
    pub view: Arc<View>,
    /// And what it wrote, if that is another's doing: see `sources_read`.
    pub written: Option<Arc<View>>,
    /// The lanes that started it: those that can wait for it.
    pub lanes: u32,
}

#[derive(Debug, Clone)]
struct Committed {
    lanes: u32,
    ops: Vec<OpId>,
}

#[derive(Debug, Default)]
struct Queue {
    open: Vec<(u32, OpId)>,
    committed: VecDeque<Committed>,
}

/// The groups of one warp.
#[derive(Debug, Default)]
pub struct AsyncGroups {
    queues: HashMap<GroupKind, Queue>,
}

fn family(kind: GroupKind) -> GroupKind {
    if kind == GroupKind::BulkRead { GroupKind::Bulk } else { kind }
}

impl AsyncGroups {
    /// Adds an operation that `lanes` have started.
    pub fn start(&mut self, kind: GroupKind, lanes: u32, op: OpId) {
        self.queues.entry(family(kind)).or_default().open.push((lanes, op));
    }

    /// Closes the open operations of `lanes` into a group (an empty one if there are none).
    pub fn commit(&mut self, kind: GroupKind, lanes: u32) {
        let queue = self.queues.entry(family(kind)).or_default();
        let (mine, rest) = queue.open.drain(..).partition(|(l, _)| l & lanes != 0);
        queue.open = rest;
        queue.committed.push_back(Committed { lanes, ops: mine.into_iter().map(|(_, op)| op).collect() });
    }

    /// The operations that must be complete before `lanes` may pass `wait_group n`.
    pub fn must_finish(&self, kind: GroupKind, lanes: u32, n: u32) -> Vec<OpId> {
        let Some(queue) = self.queues.get(&family(kind)) else { return Vec::new() };
        let mut seen = [0u32; 32];
        let mut ops = Vec::new();
        for group in queue.committed.iter().rev() {
            let shared = group.lanes & lanes;
            let mut late = false;
            for (lane, count) in seen.iter_mut().enumerate() {
                if shared >> lane & 1 != 0 {
                    late |= *count >= n;
                    *count += 1;
                }
            }
            if late {
                ops.extend(&group.ops);
            }
        }
        ops
    }

    /// Operations of `lanes` that are not in a group yet.
    pub fn open(&self, kind: GroupKind, lanes: u32) -> impl Iterator<Item = OpId> + '_ {
        let queue = self.queues.get(&family(kind));
        queue.into_iter().flat_map(|q| &q.open).filter(move |(l, _)| l & lanes != 0).map(|(_, op)| *op)
    }

    /// Every operation of `lanes`, grouped or not.
    pub fn all(&self, kind: GroupKind, lanes: u32) -> Vec<OpId> {
        let mut ops = self.must_finish(kind, lanes, 0);
        ops.extend(self.open(kind, lanes));
        ops
    }

    /// Forgets groups whose operations have all been retired.
    pub fn retire(&mut self, kind: GroupKind, gone: impl Fn(OpId) -> bool) {
        if let Some(queue) = self.queues.get_mut(&family(kind)) {
            for group in &mut queue.committed {
                group.ops.retain(|op| !gone(*op));
            }
            while queue.committed.front().is_some_and(|g| g.ops.is_empty()) {
                queue.committed.pop_front();
            }
        }
    }
}

/// Matrix operations of a warp in flight.
#[derive(Debug, Default)]
pub struct WgmmaState {
    /// A `wgmma.fence` has been executed.
    pub fenced: bool,
    /// Registers of operations in flight: `(operation, register, written by it, instruction)`.
    pub held: Vec<(OpId, Reg, bool, u32)>,
    /// `wgmma.mma_async` executed.
    pub issued: u64,
}

/// One warp's share of a matrix operation of its warpgroup.
#[derive(Debug)]
pub struct Share {
    /// The warp, as whom the operation acts for it.
    pub agent: Agent,
    /// What the warp waits for.
    pub id: OpId,
    /// A in shared memory.
    pub a: Option<SmemDesc>,
    /// Whether D is added.
    pub scale_d: bool,
}

/// Matrix operations of a warpgroup. Its four warps issue one by one what the tensor core carries out as one
/// operation; it starts when all have.
#[derive(Debug, Default)]
pub struct Warpgroup {
    /// Operations that some warps have yet to issue, by age: descriptor of B and the shares of the others.
    pub open: VecDeque<(SmemDesc, Vec<Share>)>,
    /// Operations before those.
    pub issued: u64,
    /// When the newest operation completes; later ones complete later.
    pub busy_until: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_group_counts_the_newest_groups_of_each_lane_exact() {
        let mut g = AsyncGroups::default();
        let k = GroupKind::CpAsync;
        for op in 0..4 {
            g.start(k, u32::MAX, op);
            g.commit(k, u32::MAX);
        }
        assert_eq!(g.must_finish(k, u32::MAX, 1), [2, 1, 0]);
        assert_eq!(g.must_finish(k, 1, 4), []);
        g.commit(k, 1);
        assert_eq!(g.must_finish(k, 2, 4), []);
        assert_eq!(g.must_finish(k, 1, 4), [0]);
        g.start(k, 4, 9);
        assert_eq!(g.all(k, 4).len(), 5);
        assert_eq!(g.open(k, 8).count(), 0);
        g.retire(k, |op| op < 2);
        assert_eq!(g.must_finish(k, 2, 0), [3, 2]);
    }
}
