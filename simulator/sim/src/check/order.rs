//! Happens-before: who knows what of whom.
//!
//! An *actor* is something whose actions are in program order: a converged group of lanes of a warp, or one
//! asynchronous operation. Each has a clock that advances when it publishes (arrives, releases, issues
//! asynchronous work). A [`View`] says, for every actor of the cluster, up to which of its clock values this
//! party has synchronized: an access `(actor, clock)` happened before iff `clock <= view.seen[actor]`.
//! `fenced` is the same for generic-proxy writes that a `fence.proxy.async` of their memory has made visible to the async
//! proxy anywhere along the way (PTX ISA "Memory Consistency Model", proxy-preserved base causality order).
//!
//! Assumption, stated in `docs/simulator.md`: lanes that execute an instruction together are ordered with
//! what they executed together before, as if `__syncwarp` stood between. Strict checks do not make it: there a group's own
//! actions are in program order for each lane alone (see [`lanes`](super::lanes)), `seen` is what holds for all lanes, and
//! a [`Part`] what holds for the accesses of some.

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
    pub actors: Actors,
}

impl Places {
    /// The CTA and warp of an actor; no warp for an asynchronous operation.
    pub fn of(&self, actor: Actor) -> ([u32; 3], Option<u32>) {
        let (rank, warp) = self.actors.of(actor);
        (self.ctas[rank], warp)
    }
}

/// What is known of an actor that acts for several lanes of a warp: its actions up to a clock, as far as these lanes did
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub actor: Actor,
    /// Up to which clock.
    pub clock: u32,
    /// Which lanes' actions.
    pub lanes: u32,
    /// Each lane of the party that holds this knows of its own only.
    pub own: bool,
}

impl Part {
    fn covers(&self, other: &Part) -> bool {
        self.actor == other.actor
            && self.own == other.own
            && self.clock >= other.clock
            && other.lanes & !self.lanes == 0
    }
}

/// Whose actions are known, of an actor that acts for several lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Whose {
    /// Those of these lanes.
    pub lanes: u32,
    /// Those of the lane itself.
    pub own: bool,
}

/// What one party knows: see the module documentation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    seen: Vec<u32>,
    /// What holds for some lanes only; strict checks alone have such.
    parts: Vec<Part>,
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
        let mut theirs = other.seen.iter().enumerate();
        theirs.all(|(actor, &clock)| clock == 0 || actor == own as usize || self.knows(actor as Actor, clock))
    }

    /// Whose actions up to `clock` are known of an actor of which not all are.
    pub fn whose(&self, actor: Actor, clock: u32) -> Whose {
        let parts = self.parts.iter().filter(|p| p.actor == actor && clock <= p.clock);
        parts.fold(Whose::default(), |whose, part| match part.own {
            true => Whose { own: true, ..whose },
            false => Whose { lanes: whose.lanes | part.lanes, ..whose },
        })
    }

    /// Whether an action is known, or may be: of an actor of which not all is known.
    pub fn knows_some(&self, actor: Actor, clock: u32) -> bool {
        self.knows(actor, clock) || self.whose(actor, clock) != Whose::default()
    }

    /// Learns of some lanes' actions.
    pub fn learn_part(&mut self, part: Part) {
        if self.knows(part.actor, part.clock) || self.parts.iter().any(|p| p.covers(&part)) {
            return;
        }
        self.parts.retain(|p| !part.covers(p));
        self.parts.push(part);
    }

    /// Turns what each lane knows of itself into what these lanes know together.
    pub fn settle(&mut self, lanes: u32) {
        let (own, parts) = std::mem::take(&mut self.parts).into_iter().partition(|p| p.own);
        self.parts = parts;
        for part in own {
            match part.lanes & !lanes {
                0 => self.learn(part.actor, part.clock),
                _ if part.lanes & lanes == 0 => {}
                _ => self.learn_part(Part { lanes: part.lanes & lanes, own: false, ..part }),
            }
        }
    }

    /// What a `fence.mbarrier_init` makes known by itself: what the warp of these actors has initialized.
    pub fn initialized(first: Actor, clock: u32) -> View {
        let mut own = vec![0; first as usize];
        own.resize(first as usize + GROUPS_PER_WARP, clock);
        View { fenced: Fenced::initialized(own), ..View::default() }
    }

    /// Learns an actor's actions.
    pub fn learn(&mut self, actor: Actor, clock: u32) {
        set(&mut self.seen, actor, clock);
        self.parts.retain(|p| p.actor != actor || p.clock > clock);
    }

    /// Learns everything another party of the same cluster knew.
    pub fn join(&mut self, other: &View) {
        join(&mut self.seen, &other.seen);
        if !self.parts.is_empty() {
            let seen = &self.seen;
            self.parts.retain(|p| seen.get(p.actor as usize).is_none_or(|&c| p.clock > c));
        }
        other.parts.iter().for_each(|part| self.learn_part(*part));
        self.fenced.join(&other.fenced);
        join(&mut self.piped, &other.piped);
        join(&mut self.tensor, &other.tensor);
        if let Some(theirs) = &other.outside {
            Outside::join(&mut self.outside, theirs);
        }
    }

    /// Keeps what another party of the same cluster knows as well.
    pub fn meet(&mut self, other: &View) {
        self.piped.clear();
        self.tensor.clear();
        let has =
            |view: &View, p: &Part| view.knows(p.actor, p.clock) || view.parts.iter().any(|q| q.covers(p));
        let mine = self.parts.iter().filter(|p| has(other, p));
        let theirs = other.parts.iter().filter(|p| has(self, p));
        self.parts = mine.chain(theirs).copied().collect();
        self.seen.truncate(other.seen.len());
        self.seen.iter_mut().zip(&other.seen).for_each(|(a, &b)| *a = (*a).min(b));
        self.fenced.meet(&other.fenced);
        self.outside = None;
    }

    /// `fence.proxy.async`: every generic write known now to the memories named, and those of `own`, becomes visible to the
    /// async proxy. That others may know of those is for a `__syncwarp` to say.
    pub fn fence_proxy(&mut self, memories: &[Fence], own: &[(Actor, u32)]) {
        let mut seen = self.seen.clone();
        let parts = self.parts.iter().map(|p| (p.actor, p.clock));
        parts.chain(own.iter().copied()).for_each(|(actor, clock)| set(&mut seen, actor, clock));
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
        a.fence_proxy(&[Fence::Cluster], &[(0, 2)]);
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
