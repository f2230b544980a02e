//! Operations in flight: how they start, when they are carried out, how threads wait for groups of them.

use super::atomic::Reduce;
use super::*;
use crate::check::order::{Part, View};
use crate::machine::engine::Job;
use crate::machine::groups::{OpId, OpState};

impl Cluster<'_> {
    /// Registers an operation that threads can wait for in a group.
    pub fn start_op(&mut self, agent: &Agent, lanes: u32) -> OpId {
        self.next_op += 1;
        let state = OpState {
            read: false,
            done: false,
            pc: agent.pc,
            owner: (agent.cta, agent.warp),
            view: Arc::new(agent.outcome()),
            written: None,
            lanes,
        };
        self.ops.insert(self.next_op, state);
        self.next_op
    }

    /// Lets those who wait for an operation know what it did for themselves alone.
    pub(super) fn owned(&mut self, op: OpId, agent: &Agent) {
        if let Some(state) = self.ops.get_mut(&op) {
            let mut view = View::default();
            view.learn_part(Part { actor: agent.actor, clock: agent.clock, lanes: state.lanes, own: true });
            state.view = Arc::new(view);
        }
    }

    /// Notes that an operation is complete.
    pub fn finish_op(&mut self, op: OpId) {
        if let Some(state) = self.ops.get_mut(&op) {
            (state.read, state.done) = (true, true);
        }
    }

    /// Notes that an operation has read its sources, and returns the agent of its writes: who waits for the reads alone knows
    /// nothing of them.
    pub fn sources_read(&mut self, op: OpId, agent: &Agent) -> Agent {
        let (actor, clock) = self.engine.actor(agent.cta);
        let writer = Agent { actor, clock, view: Arc::new(agent.outcome()), ..agent.clone() };
        if let Some(state) = self.ops.get_mut(&op) {
            (state.read, state.written) = (true, Some(Arc::new(writer.outcome())));
        }
        writer
    }

    /// Carries out `job` as this agent at a later point.
    pub fn later(
        &mut self,
        agent: Agent,
        job: impl for<'c> FnOnce(&mut Cluster<'c>, &Agent) -> Result<()> + Send + 'static,
    ) {
        let due = self.due();
        self.engine.push(due, agent, false, Box::new(job));
    }

    /// As [`later`](Cluster::later), for what reads shared memory for a bulk store.
    pub fn later_store(
        &mut self,
        agent: Agent,
        job: impl for<'c> FnOnce(&mut Cluster<'c>, &Agent) -> Result<()> + Send + 'static,
    ) {
        let due = self.due();
        self.engine.push(due, agent, !self.launch.config.checks.strict, Box::new(job));
    }

    /// Writes later, to global memory or not, what an operation has read; in turn if others can notice the order.
    pub fn write_later(
        &mut self,
        agent: Agent,
        (global, ordered): (bool, bool),
        write: impl for<'c> FnOnce(&mut Cluster<'c>, &Agent) -> Result<()> + Send + 'static,
    ) {
        let job: Job = match ordered {
            true => Box::new(move |cl: &mut Cluster<'_>, me: &Agent| {
                if cl.may_touch_global() {
                    return write(cl, me);
                }
                cl.ordered.push((me.clone(), Box::new(write)));
                Ok(())
            }),
            false => Box::new(write),
        };
        let due = self.due();
        self.engine.push(due, agent, global, job);
    }

    /// Writes for an asynchronous operation, reducing if asked.
    pub fn async_reduce(
        &mut self,
        at: Place,
        src: &[u8],
        reduce: Option<Reduce>,
        agent: &Agent,
    ) -> Result<()> {
        let Some(reduce) = reduce else { return self.async_write(at, src, agent) };
        let global = matches!(at, Place::Global(_));
        let mut old = vec![0; src.len()];
        // Reductions of global memory are strong; that one access is all of them.
        let kind = if global { Kind::PROXY_WRITE.strong(Some(Scope::Gpu)) } else { Kind::PROXY_READ };
        self.touch(at, src.len(), kind, agent.who())?;
        self.read_at(at, &mut old)?;
        apply(reduce, &mut old, src, global)?;
        match global {
            true => self.write_at(at, &old),
            false => self.async_write(at, &old, agent),
        }
    }
}

/// Reduces elements of `src` into `old`.
pub fn apply(reduce: Reduce, old: &mut [u8], src: &[u8], global: bool) -> Result<()> {
    let (op, ty) = reduce;
    let n = ty.bits() as usize / 8;
    for (o, s) in old.chunks_exact_mut(n).zip(src.chunks_exact(n)) {
        let value = |b: &[u8]| {
            let mut x = [0; 8];
            x[..n].copy_from_slice(b);
            u64::from_le_bytes(x)
        };
        let new = op.apply(ty, value(o), value(s), global)?;
        o.copy_from_slice(&new.to_le_bytes()[..n]);
    }
    Ok(())
}

impl Cx<'_, '_> {
    /// Waits until at most `n` groups of a kind are unfinished, then learns what the finished ones did.
    pub(super) fn wait_groups(&mut self, kind: GroupKind, n: u32) -> Result {
        let read = kind == GroupKind::BulkRead;
        let must = self.w.async_groups.must_finish(kind, self.m, n);
        let pending = |op: &OpId| self.cl.ops.get(op).is_some_and(|s| !(s.done || read && s.read));
        if must.iter().any(pending) {
            return Ok(Flow::Wait(Wait::Groups { kind, n }));
        }
        let mut gone = Vec::new();
        for op in must {
            let Some(state) = self.cl.ops.get(&op) else { continue };
            let written = state.written.as_ref().filter(|_| !read);
            self.g.known.join(self.m & state.lanes, written.unwrap_or(&state.view));
            if state.done && !(read && state.written.is_some()) {
                gone.push(op);
            }
        }
        for op in &gone {
            self.cl.ops.remove(op);
        }
        let ops = &self.cl.ops;
        self.w.async_groups.retire(kind, |op| !ops.contains_key(&op));
        Ok(Flow::Next)
    }

    /// As [`wait_groups`](Cx::wait_groups) for groups that own registers, which the program gets back.
    pub(super) fn wait_registers(&mut self, kind: GroupKind, n: u32) -> Result {
        let finished = self.w.async_groups.must_finish(kind, self.m, n);
        let flow = self.wait_groups(kind, n)?;
        if flow == Flow::Next {
            self.w.release_registers(&finished);
        }
        Ok(flow)
    }

    /// An agent for one more operation of this group.
    pub(super) fn agent(&mut self) -> Agent {
        self.agent_of(self.m)
    }

    /// An agent for one more operation of these lanes.
    pub(super) fn agent_of(&mut self, lanes: u32) -> Agent {
        self.cl.agent(self.cta, self.w, self.g, lanes)
    }

    /// An agent that acts for each of the lanes by itself.
    pub(super) fn agent_of_each(&mut self) -> Agent {
        let view = self.w.so_far(self.g, self.m);
        Agent { view, ..self.agent() }
    }
}
