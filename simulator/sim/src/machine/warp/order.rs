//! How a warp's lanes learn and publish.

use super::{Group, Warp};
use crate::check::order::{Actor, GROUPS_PER_WARP, Part, View};
use crate::check::proxy::Fence;
use std::sync::Arc;

/// Lanes that have accessed memory, for each actor of the warp, since a `__syncwarp` or barrier of all that live. Only where
/// lanes are told apart.
#[derive(Debug, Default)]
pub struct Acted {
    /// Read or written.
    any: [u32; GROUPS_PER_WARP],
    /// Written.
    wrote: [u32; GROUPS_PER_WARP],
}

impl Acted {
    /// Whether lanes other than these have, as this actor.
    pub fn others(&self, slot: usize, lanes: u32) -> bool {
        self.any[slot] & !lanes != 0
    }
}

impl Warp {
    /// Notes that lanes access memory that others see.
    pub fn note(&mut self, g: &mut Group, lanes: u32, write: bool) {
        g.carried.quiet = false;
        if self.apart {
            self.acted.any[g.slot] |= lanes;
            self.acted.wrote[g.slot] |= if write { lanes } else { 0 };
        }
    }

    /// What lanes of a group know and did up to now, each its own; later actions are later than that.
    pub fn so_far(&mut self, g: &Group, lanes: u32) -> Arc<View> {
        let mut view = g.known.joined(lanes);
        let own = Arc::make_mut(&mut view);
        if self.apart {
            (0..GROUPS_PER_WARP).for_each(|slot| own.learn_part(self.part(slot)));
        } else {
            own.learn(g.actor, self.clock);
        }
        self.clock += 1;
        view
    }

    /// Adds what these lanes are about to do to what [`so_far`](Warp::so_far) has said, or a fence.
    pub fn add_present(&self, g: &Group, lanes: u32, view: &mut View) {
        match self.apart {
            true => view.learn_part(Part { lanes: lanes | self.acted.any[g.slot], ..self.part(g.slot) }),
            false => view.learn(g.actor, self.clock),
        }
    }

    /// What the lanes of the warp have done as one of its actors.
    fn part(&self, slot: usize) -> Part {
        let actor = self.first_actor + slot as Actor;
        Part { actor, clock: self.clock, lanes: self.acted.any[slot], own: true }
    }

    /// What others learn from these lanes of a group now. Nothing of the other lanes since the last `__syncwarp`, where that
    /// is looked at.
    pub fn publish(&mut self, g: &Group, lanes: u32) -> Arc<View> {
        let mut view = self.so_far(g, lanes);
        Arc::make_mut(&mut view).settle(lanes);
        view
    }

    /// `__syncwarp`, or a barrier that includes one: these lanes know what the others of them did.
    pub fn sync(&mut self, g: &mut Group, lanes: u32) {
        g.met = None;
        if !self.apart {
            self.clock += 1;
            return;
        }
        let view = self.publish(g, lanes);
        g.known.unite(lanes, view);
        if self.live & !lanes == 0 {
            let acted = self.acted.any.iter_mut().chain(&mut self.acted.wrote);
            acted.for_each(|acted| *acted &= !lanes);
        }
    }

    /// `fence.mbarrier_init`
    pub fn fence_initialized(&mut self, g: &mut Group, lanes: u32) {
        let own = View::initialized(self.first_actor, self.clock);
        g.known.join(lanes, &own);
        g.carried.pass_on(&own);
        self.clock += 1;
    }

    /// `fence.proxy.async` of these memories.
    pub fn fence_proxy(&mut self, g: &mut Group, lanes: u32, memories: &[Fence]) {
        let mut own = Vec::new();
        for (slot, wrote) in self.acted.wrote.iter().enumerate() {
            let fenced = if self.apart { *wrote != 0 && wrote & !lanes == 0 } else { slot == g.slot };
            own.extend(fenced.then(|| (self.first_actor + slot as Actor, self.clock)));
        }
        g.known.change(lanes, |view| view.fence_proxy(memories, &own));
        self.clock += 1;
    }
}
