//! The asynchronous engines: copies, matrix operations and arrivals that complete later than they are issued.
//!
//! An operation is a closure with a due time; the time is drawn from the seed, so that different seeds complete
//! operations in different orders. Nothing completes at issue: a kernel that forgets to wait sees old data.

use super::cluster::Cluster;
use crate::check::order::{Actor, ENGINES_PER_CTA, View};
use crate::trap::Fault;
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Who started an operation, and as whom it acts.
#[derive(Debug, Clone)]
pub struct Agent {
    /// CTA (rank in the cluster).
    pub cta: u32,
    /// Warp of the CTA.
    pub warp: u32,
    pub pc: u32,
    pub actor: Actor,
    pub clock: u32,
    /// What the issuer knew.
    pub view: Arc<View>,
}

impl Agent {
    /// What a party that waits for the operation learns.
    pub fn outcome(&self) -> View {
        let mut view = (*self.view).clone();
        view.learn(self.actor, self.clock);
        // What an engine wrote, it wrote through the async proxy: no fence is owed for it.
        view
    }
}

/// What completes an operation.
pub type Job = Box<dyn for<'a> FnOnce(&mut Cluster<'a>, &Agent) -> Result<(), Fault> + Send>;

struct Pending {
    due: u64,
    seq: u64,
    agent: Agent,
    /// Its CTA may exit before.
    outlives: bool,
    job: Job,
}

impl PartialEq for Pending {
    fn eq(&self, other: &Pending) -> bool {
        self.seq == other.seq
    }
}

impl Eq for Pending {}

impl PartialOrd for Pending {
    fn partial_cmp(&self, other: &Pending) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Pending {
    /// The earliest due is the greatest, as the heap gives the greatest first.
    fn cmp(&self, other: &Pending) -> Ordering {
        (other.due, other.seq).cmp(&(self.due, self.seq))
    }
}

/// Operations in flight of one cluster.
#[derive(Default)]
pub struct Engine {
    queue: BinaryHeap<Pending>,
    seq: u64,
    /// Next actor slot of each CTA, and the clock each slot has reached.
    slots: Vec<(usize, [u32; ENGINES_PER_CTA])>,
    first_actor: usize,
}

impl Engine {
    /// Engines for `ctas` CTAs whose actors start at `first_actor`.
    pub fn new(ctas: usize, first_actor: usize) -> Engine {
        Engine { slots: vec![(0, [0; ENGINES_PER_CTA]); ctas], first_actor, ..Engine::default() }
    }

    /// A fresh actor for an operation of `cta`.
    pub fn actor(&mut self, cta: u32) -> (Actor, u32) {
        let (next, clocks) = &mut self.slots[cta as usize];
        let slot = *next;
        *next = (slot + 1) % ENGINES_PER_CTA;
        clocks[slot] += 1;
        ((self.first_actor + cta as usize * ENGINES_PER_CTA + slot) as Actor, clocks[slot])
    }

    /// Schedules a job; its CTA may exit before if it `outlives` that.
    pub fn push(&mut self, due: u64, agent: Agent, outlives: bool, job: Job) {
        self.seq += 1;
        self.queue.push(Pending { due, seq: self.seq, agent, outlives, job });
    }

    /// When the next job is due.
    pub fn next_due(&self) -> Option<u64> {
        self.queue.peek().map(|p| p.due)
    }

    /// Takes the next job if it is due at `time`.
    pub fn pop(&mut self, time: u64) -> Option<(Agent, Job)> {
        if self.next_due()? > time {
            return None;
        }
        self.queue.pop().map(|p| (p.agent, p.job))
    }

    /// Whether a job that needs this CTA is in flight, and the instruction that started it.
    pub fn pending_of(&self, cta: u32) -> Option<&Agent> {
        self.queue
            .iter()
            .filter(|p| p.agent.cta == cta && !p.outlives)
            .min_by_key(|p| p.seq)
            .map(|p| &p.agent)
    }
}
