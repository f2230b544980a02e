//! Happens-before: who knows what of whom.
//!
//! An *actor* is something whose actions are in program order: a converged group of lanes of a warp, or one
//! asynchronous operation. Each has a clock that advances when it publishes (arrives, releases, issues
//! asynchronous work). A [`View`] says, for every actor of the cluster, up to which of its clock values this
//! party has synchronized: an access `(actor, clock)` happened before iff `clock <= view.seen[actor]`.
//! `fenced` is the same for generic-proxy writes that a `fence.proxy.async` of their memory has made visible to the async
//! proxy anywhere along the way (PTX ISA "Memory Consistency Model", proxy-preserved base causality order).
//!
//! Assumption, stated in the crate documentation: lanes that execute an instruction together are ordered with
//! what they executed together before, as if `__syncwarp` stood between. Strict checks do not make it where some lanes
//! publish: others then learn of the remaining lanes only what a `__syncwarp` or a barrier came after.

use super::outside::Outside;
use super::proxy::{Fence, Fenced, Memory};
use crate::decode::operand::Scope;
use std::sync::Arc;

/// Actors of one warp: groups that diverged. More than this many at once share the last one.
pub const GROUPS_PER_WARP: usize = 4;
/// Asynchronous operations of one CTA that are told apart.
pub const ENGINES_PER_CTA: usize = 64;

/// Index of an actor in its cluster.
pub type Actor = u16;

/// How the actors of a cluster are numbered.
#[derive(Debug, Clone, Copy)]
pub struct Actors {
    /// CTAs of the cluster.
    pub ctas: usize,
    /// Warps of a CTA.
    pub warps: usize,
}

impl Actors {
    /// Actors that are groups of lanes; those of asynchronous operations follow.
    pub fn groups(self) -> usize {
        self.ctas * self.warps * GROUPS_PER_WARP
    }

    /// The rank and warp of an actor; no warp for an asynchronous operation.
    fn of(self, actor: Actor) -> (usize, Option<u32>) {
        let (actor, groups) = (actor as usize, self.groups());
        if actor < groups {
            let warp = actor / GROUPS_PER_WARP;
            (warp / self.warps, Some((warp % self.warps) as u32))
        } else {
            (((actor - groups) / ENGINES_PER_CTA).min(self.ctas - 1), None)
        }
    }

    /// The rank of an actor's CTA.
    pub fn rank(self, actor: Actor) -> usize {
        self.of(actor).0
    }

    /// The least scope that holds both.
    pub fn apart(self, a: Actor, b: Actor) -> Scope {
        if self.rank(a) == self.rank(b) { Scope::Cta } else { Scope::Cluster }
    }
}

/// Which CTA and warp an actor belongs to.
#[derive(Debug, Clone)]
pub struct Places {
    /// CTAs by rank.
    pub ctas: Vec<[u32; 3]>,
    /// The numbers of actors.
    pub actors: Actors,
}

impl Places {
    /// The CTA and warp of an actor; no warp for an asynchronous operation.
    pub fn of(&self, actor: Actor) -> ([u32; 3], Option<u32>) {
        let (rank, warp) = self.actors.of(actor);
        (self.ctas[rank], warp)
    }
}

/// What one party knows: see the module documentation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    seen: Vec<u32>,
    fenced: Fenced,
    /// Operations of tensor cores that need not be complete, but are ordered before what follows on the same core.
    piped: Vec<u32>,
    /// What happened before a `tcgen05.fence::before_thread_sync`, for those who take it up by `after_thread_sync`.
    tensor: Vec<u32>,
    /// What is known of other clusters and launches.
    outside: Option<Arc<Outside>>,
}

/// Takes the later of two clocks for every actor.
pub(super) fn join(into: &mut Vec<u32>, from: &[u32]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (a, &b) in into.iter_mut().zip(from) {
        *a = (*a).max(b);
    }
}

fn set(v: &mut Vec<u32>, actor: Actor, clock: u32) {
    let i = actor as usize;
    if v.len() <= i {
        v.resize(i + 1, 0);
    }
    v[i] = v[i].max(clock);
}

impl View {
    /// Whether the action `(actor, clock)` of this cluster happened before.
    #[inline]
    pub fn knows(&self, actor: Actor, clock: u32) -> bool {
        self.seen.get(actor as usize).is_some_and(|&c| clock <= c)
    }

    /// Whether that generic-proxy write to this memory is visible to the async proxy.
    #[inline]
    pub fn knows_fenced(&self, memory: Memory, actor: Actor, clock: u32) -> bool {
        self.fenced.knows(memory, actor, clock)
    }

    /// What is known of other clusters and launches.
    pub fn outside(&self) -> Option<&Arc<Outside>> {
        self.outside.as_ref()
    }

    /// Whether all actions that another party of the same cluster knows happened before.
    pub fn knows_all(&self, other: &View, own: Actor) -> bool {
        let theirs = other.seen.iter().enumerate();
        theirs
            .into_iter()
            .all(|(actor, &clock)| clock == 0 || actor == own as usize || self.knows(actor as Actor, clock))
    }

    /// What a `fence.mbarrier_init` of an actor makes known by itself: what the lanes of its warp have initialized.
    pub fn initialized(&self, actor: Actor, clock: u32) -> View {
        let first = actor as usize / GROUPS_PER_WARP * GROUPS_PER_WARP;
        let mut own = vec![0; first];
        own.extend(self.seen.iter().skip(first).take(GROUPS_PER_WARP));
        set(&mut own, actor, clock);
        View { fenced: Fenced::initialized(own), ..View::default() }
    }

    /// Learns one action.
    pub fn learn(&mut self, actor: Actor, clock: u32) {
        set(&mut self.seen, actor, clock);
    }

    /// Learns everything another party of the same cluster knew.
    pub fn join(&mut self, other: &View) {
        join(&mut self.seen, &other.seen);
        self.fenced.join(&other.fenced);
        join(&mut self.piped, &other.piped);
        join(&mut self.tensor, &other.tensor);
        if let Some(theirs) = &other.outside {
            Outside::join(&mut self.outside, theirs);
        }
    }

    /// Forgets what an actor did after `clock`.
    pub fn limit(&mut self, actor: Actor, clock: u32) {
        if let Some(known) = self.seen.get_mut(actor as usize) {
            *known = (*known).min(clock);
        }
        self.fenced.limit(actor, clock);
    }

    /// Keeps what another party of the same cluster knows as well.
    pub fn meet(&mut self, other: &View) {
        self.piped.clear();
        self.tensor.clear();
        self.seen.truncate(other.seen.len());
        self.seen.iter_mut().zip(&other.seen).for_each(|(a, &b)| *a = (*a).min(b));
        self.fenced.meet(&other.fenced);
        self.outside = None;
    }

    /// `fence.proxy.async`: every generic write known now to the memories named, and the actor's own, becomes visible to the
    /// async proxy. That others may know of those is for a `__syncwarp` to say.
    pub fn fence_proxy(&mut self, memories: &[Fence], (actor, clock): (Actor, u32)) {
        let mut seen = self.seen.clone();
        set(&mut seen, actor, clock);
        memories.iter().for_each(|fence| self.fenced.fence(*fence, &seen));
        if let Some(outside) = &mut self.outside
            && memories.contains(&Fence::Global)
        {
            Outside::fence_proxy(outside);
        }
    }

    /// `tcgen05.fence::before_thread_sync`: what was issued to the tensor core is passed on to those who synchronize.
    pub fn pipe(&mut self, issued: &View) {
        join(&mut self.piped, &issued.seen);
    }

    /// What a relaxed arrival passes on after `tcgen05.fence::before_thread_sync`.
    pub fn before_fence(&self) -> View {
        View { piped: self.piped.clone(), tensor: self.seen.clone(), ..View::default() }
    }

    /// `tcgen05.fence::after_thread_sync`: what `observed` synchronized with, and what was passed on to it.
    pub fn after_fence(&mut self, acquired: &View, observed: Option<&View>) {
        for other in std::iter::once(acquired).chain(observed) {
            join(&mut self.seen, &other.tensor);
            join(&mut self.piped, &other.piped);
        }
        if let Some(observed) = observed {
            join(&mut self.seen, &observed.seen);
        }
    }

    /// Counts operations that were passed on as complete: right for what comes after them in the same pipeline.
    pub fn in_pipeline(&mut self) {
        let piped = std::mem::take(&mut self.piped);
        join(&mut self.seen, &piped);
        self.piped = piped;
    }

    /// This knowledge of a party of `cluster`, as other clusters receive it.
    pub fn told(&self, cluster: u32) -> Arc<Outside> {
        let outside = self.outside.as_deref().cloned().unwrap_or_default();
        Arc::new(outside.with(cluster, &self.seen, self.fenced.global()))
    }

    /// What a party of `cluster` learns from another cluster, or from a launch before.
    pub fn heard(outside: &Arc<Outside>, cluster: u32) -> View {
        let [seen, fenced] = outside.of(cluster);
        let mut view = View { seen: seen.to_vec(), outside: Some(outside.clone()), ..View::default() };
        view.fenced.fence(Fence::Global, fenced);
        view
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knowledge_travels_by_join_exact() {
        let mut a = View::default();
        a.learn(3, 7);
        let mut b = View::default();
        assert!(!b.knows(3, 7));
        b.join(&a);
        assert!(b.knows(3, 7) && b.knows(3, 6) && !b.knows(3, 8) && !b.knows(2, 1));
    }

    #[test]
    fn a_proxy_fence_covers_what_is_known_then_exact() {
        let mut a = View::default();
        a.learn(1, 4);
        a.fence_proxy(&[Fence::Cluster], (0, 2));
        a.learn(1, 5);
        assert!(a.knows_fenced(Memory::Shared(0), 1, 4) && !a.knows_fenced(Memory::Shared(0), 1, 5));
        assert!(a.knows_fenced(Memory::Shared(0), 0, 2) && !a.knows(0, 2));
        let mut b = View::default();
        b.join(&a);
        assert!(b.knows_fenced(Memory::Shared(0), 1, 4) && !b.knows_fenced(Memory::Shared(0), 1, 5));
    }

    #[test]
    fn a_meeting_leaves_what_both_know_exact() {
        let (mut a, mut b) = (View::default(), View::default());
        a.learn(1, 4);
        a.learn(3, 9);
        b.learn(1, 6);
        b.learn(2, 5);
        a.meet(&b);
        assert!(a.knows(1, 4) && !a.knows(1, 5) && !a.knows(2, 1) && !a.knows(3, 1));
    }

    #[test]
    fn knowledge_of_other_clusters_keeps_its_cluster_exact() {
        let mut a = View::default();
        a.learn(1, 4);
        let b = View::heard(&a.told(0), 9);
        let outside = b.outside().unwrap();
        assert!(!b.knows(1, 4) && outside.knows(0, 1, 4) && !outside.knows(2, 1, 4));
        let back = View::heard(&b.told(9), 0);
        assert!(back.knows(1, 4) && !back.outside().unwrap().knows(9, 1, 4));
    }
}
