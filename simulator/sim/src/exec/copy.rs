//! Asynchronous copies without a tensor map.

use super::mbarrier::locate;
use super::*;
use crate::check::lanes::Who;
use crate::check::order::{Part, View};
use crate::decode::copy::{Bulk, BulkCopy, Completion, CpAsync, Reduce};
use crate::machine::engine::Job;
use crate::machine::groups::{OpId, OpState};
use dualgemm_ptx::Type;

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
            lanes,
        };
        self.ops.insert(self.next_op, state);
        self.next_op
    }

    /// Lets those who wait for an operation know what it did for themselves alone.
    fn owned(&mut self, op: OpId, agent: &Agent) {
        if let Some(state) = self.ops.get_mut(&op) {
            let mut view = View::default();
            view.learn_part(Part { actor: agent.actor, clock: agent.clock, lanes: state.lanes, own: true });
            state.view = Arc::new(view);
        }
    }

    /// Notes how far an operation has come.
    pub fn finish_op(&mut self, op: OpId, done: bool) {
        if let Some(state) = self.ops.get_mut(&op) {
            state.read = true;
            state.done |= done;
        }
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

    /// Writes for an asynchronous operation, reducing if asked; only bytes of `mask` (one bit for each of 16 bytes).
    pub fn async_reduce(
        &mut self,
        at: Place,
        src: &[u8],
        reduce: Option<Reduce>,
        mask: u16,
        agent: &Agent,
    ) -> Result<()> {
        if reduce.is_none() && mask == u16::MAX {
            return self.async_write(at, src, agent);
        }
        let global = matches!(at, Place::Global(_));
        let mut old = vec![0; src.len()];
        // Reductions of global memory are strong; that one access is all of them.
        let kind = if global { Kind::PROXY_WRITE.strong(Some(Scope::Gpu)) } else { Kind::PROXY_READ };
        self.touch(at, src.len(), kind, agent.who())?;
        self.read_at(at, &mut old)?;
        match reduce {
            Some(reduce) => apply(reduce, &mut old, src, global)?,
            None => {
                let written = old.iter_mut().zip(src).enumerate().filter(|(k, _)| mask >> (k % 16) & 1 != 0);
                written.for_each(|(_, (o, s))| *o = *s);
            }
        }
        match global && reduce.is_some() {
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
            if let Some(state) = self.cl.ops.get(&op) {
                if state.done {
                    gone.push(op);
                }
                self.g.known.join(self.m & state.lanes, &state.view);
            }
        }
        for op in &gone {
            self.cl.ops.remove(op);
        }
        let ops = &self.cl.ops;
        self.w.async_groups.retire(kind, |op| !ops.contains_key(&op));
        Ok(Flow::Next)
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
    fn agent_of_each(&mut self) -> Agent {
        let view = self.w.so_far(self.g, self.m);
        Agent { view, ..self.agent() }
    }
}

pub fn cp_async(op: &CpAsync, cx: &mut Cx<'_, '_>) -> Result {
    match op {
        CpAsync::Commit => {
            cx.w.async_groups.commit(GroupKind::CpAsync, cx.m);
            Ok(Flow::Next)
        }
        CpAsync::Wait(n) => cx.wait_groups(GroupKind::CpAsync, *n),
        CpAsync::WaitAll => {
            cx.w.async_groups.commit(GroupKind::CpAsync, cx.m);
            cx.wait_groups(GroupKind::CpAsync, 0)
        }
        CpAsync::Copy { to, from, bytes, source, ignore } => {
            let (dst, src) = (cx.addresses(to), cx.addresses(from));
            let m = cx.m;
            let sizes = source.map(|s| cx.w.regs.r32(s, m));
            let ignore = ignore.map_or(0, |p| cx.w.regs.pred(p, m));
            if cx.w.regs.bad.is_some() {
                return Ok(Flow::Next);
            }
            let mut copies = Vec::new();
            for l in lanes(m) {
                let mut n = sizes.map_or(*bytes, |s| s[l]);
                if n > *bytes {
                    let text = format!("cp.async of {bytes} bytes with a source size of {n}");
                    return Err(Fault::new(Check::Illegal, text).lane(l as u32));
                }
                if ignore >> l & 1 != 0 {
                    n = 0;
                }
                cx.aligned_to(to.space, dst[l], (*bytes).into(), l)?;
                cx.aligned_to(from.space, src[l], (*bytes).into(), l)?;
                copies.push((l, place(to.space, dst[l]), src[l], n as usize));
            }
            let agent = cx.agent_of_each();
            let op = cx.cl.start_op(&agent, m);
            if cx.w.apart {
                cx.cl.owned(op, &agent);
            }
            cx.w.async_groups.start(GroupKind::CpAsync, m, op);
            let (total, apart) = (*bytes as usize, cx.w.apart);
            cx.cl.later(agent, move |cl, me| {
                for (l, to, from, n) in copies {
                    let lanes = if apart { Lanes::One(l) } else { Lanes::Any };
                    let who = Who { lanes, ..me.who() };
                    copy_small(cl, who, to, from, n, total).map_err(|f| f.lane(l as u32))?;
                }
                cl.finish_op(op, true);
                Ok(())
            });
            Ok(Flow::Next)
        }
    }
}

/// `cp.async` goes through the generic proxy, so it owes and is owed no proxy fence.
fn copy_small(
    cl: &mut Cluster<'_>,
    who: Who<'_>,
    to: Place,
    from: u64,
    n: usize,
    total: usize,
) -> Result<()> {
    let mut buffer = [0u8; 16];
    if n != 0 {
        cl.touch_global(from, n as u64, Kind::READ, who)?;
        cl.launch.global.read(from, &mut buffer[..n])?;
    }
    if !matches!(to, Place::Shared { .. }) {
        return Err(Fault::new(Check::Illegal, "cp.async writes shared memory").at(to));
    }
    cl.touch(to, total, Kind::WRITE, who)?;
    cl.write_at(to, &buffer[..total])
}

pub fn bulk(op: &Bulk, cx: &mut Cx<'_, '_>) -> Result {
    match op {
        Bulk::Commit => {
            cx.w.async_groups.commit(GroupKind::Bulk, cx.m);
            Ok(Flow::Next)
        }
        Bulk::Wait(n, read) => cx.wait_groups(if *read { GroupKind::BulkRead } else { GroupKind::Bulk }, *n),
        Bulk::Copy(op) => copy(cx, op),
        Bulk::Store { to, ty, s, barrier, reduce } => store(cx, to, *ty, s, barrier, *reduce),
        Bulk::Fill(a, size) => {
            let (addresses, size) = (cx.addresses(a), cx.w.regs.r64(*size, cx.m));
            for l in lanes(cx.m) {
                cx.aligned_to(a.space, addresses[l], 8, l)?;
                cx.write_lane(a.space, addresses[l], l, Kind::WRITE, &vec![0; size[l] as usize])?;
            }
            Ok(Flow::Next)
        }
        Bulk::TryCancel(response, barrier, all) => try_cancel(cx, response, barrier, *all),
    }
}

/// Ranks of the CTAs that a multicast mask names.
pub fn destinations(cl: &Cluster<'_>, mask: u64) -> Result<Vec<u32>> {
    let size = cl.ctas.len() as u32;
    let mask = mask & 0xffff;
    if mask == 0 || mask >> size != 0 {
        return Err(Fault::new(
            Check::Illegal,
            format!("multicast mask {mask:#06x} in a cluster of {size} CTAs: each bit names a rank"),
        ));
    }
    Ok((0..size).filter(|r| mask >> r & 1 != 0).collect())
}

fn copy(cx: &mut Cx<'_, '_>, op: &BulkCopy) -> Result {
    let BulkCopy { to, from, size, completion, multicast, reduce, bytes: mask } = *op;
    let m = cx.m;
    let (dst, src) = (cx.addresses(&to), cx.addresses(&from));
    let size = cx.w.regs.r32(size, m);
    let barriers = match completion {
        Completion::Mbarrier(a) => Some((a.space, cx.addresses(&a))),
        Completion::Group => None,
    };
    let multicast = multicast.map(|s| cx.w.regs.r64(s, m));
    let mask = mask.map(|s| cx.w.regs.r32(s, m));
    if cx.w.regs.bad.is_some() {
        return Ok(Flow::Next);
    }
    // Lanes that store the same do it once, as in `tma::store`.
    let once = reduce.is_none() && barriers.is_none();
    for l in lanes(m) {
        let what = |k: usize| (dst[k], src[k], size[k], mask.map(|m| m[k]));
        let alike: u32 = lanes(m).filter(|&k| k == l || once && what(k) == what(l)).map(|k| 1 << k).sum();
        if alike.trailing_zeros() != l as u32 {
            continue;
        }
        let n = size[l];
        if n == 0 || !n.is_multiple_of(16) {
            let text = format!("a bulk copy of {n} bytes: the size is a multiple of 16, not 0");
            return Err(Fault::new(Check::Align, text).lane(l as u32));
        }
        cx.aligned_to(to.space, dst[l], 16, l)?;
        cx.aligned_to(from.space, src[l], 16, l)?;
        let (to, from) = (place(to.space, dst[l]), place(from.space, src[l]));
        let ranks = match &multicast {
            Some(mask) => Some(destinations(cx.cl, mask[l])?),
            None => None,
        };
        let targets: Vec<Place> = match (&ranks, to) {
            (Some(ranks), Place::Shared { offset, .. }) => {
                ranks.iter().map(|&rank| Place::Shared { rank, offset }).collect()
            }
            _ => vec![to],
        };
        let signal = match &barriers {
            Some((space, a)) => Some(locate(*space, a[l]).map_err(|f| f.lane(l as u32))?),
            None => None,
        };
        if let (Some((rank, _)), Place::Shared { rank: to, .. }, None) = (signal, to, &ranks)
            && rank != to
        {
            let text = format!(
                "the destination is in rank {to}, its mbarrier in rank {rank}: they must be in one CTA"
            );
            return Err(Fault::new(Check::Mbarrier, text).lane(l as u32));
        }
        let agent = cx.agent_of(alike);
        let op = match signal {
            Some(_) => None,
            None => {
                let op = cx.cl.start_op(&agent, alike);
                cx.w.async_groups.start(GroupKind::Bulk, alike, op);
                Some(op)
            }
        };
        let mask = mask.map_or(u16::MAX, |m| m[l] as u16);
        let moved = Moved { from, to, targets, bytes: n, mask, reduce, signal: signal.map(|s| s.1), op };
        match signal {
            Some(_) => cx.cl.later(agent, move |cl, me| moved.carry_out(cl, me)),
            None => cx.cl.later_store(agent, move |cl, me| moved.carry_out(cl, me)),
        }
    }
    Ok(Flow::Next)
}

/// A bulk copy in flight.
struct Moved {
    from: Place,
    to: Place,
    targets: Vec<Place>,
    bytes: u32,
    mask: u16,
    reduce: Option<Reduce>,
    /// Where in each target's CTA the bytes are counted.
    signal: Option<u32>,
    /// What a group waits for.
    op: Option<OpId>,
}

impl Moved {
    /// Reads now, writes later.
    fn carry_out(self, cl: &mut Cluster<'_>, me: &Agent) -> Result<()> {
        let Moved { from, to, targets, bytes, mask, reduce, signal, op } = self;
        let mut data = vec![0; bytes as usize];
        cl.async_read(from, &mut data, me)?;
        if let Some(op) = op {
            cl.finish_op(op, false);
        }
        let global = matches!(to, Place::Global(_));
        cl.write_later(me.clone(), (global, global && reduce.is_some()), move |cl, me| {
            for at in targets {
                cl.async_reduce(at, &data, reduce, mask, me)?;
                if let (Some(offset), Place::Shared { rank, .. }) = (signal, at) {
                    cl.complete_tx(rank, offset, bytes, me)?;
                }
            }
            if let Some(op) = op {
                cl.finish_op(op, true);
            }
            Ok(())
        });
        Ok(())
    }
}

/// `st.async`, `red.async`: values are taken now, arrive later, and count on the barrier of the destination.
fn store(
    cx: &mut Cx<'_, '_>,
    to: &Addr,
    ty: Type,
    s: &[Src],
    barrier: &Addr,
    reduce: Option<Reduce>,
) -> Result {
    let m = cx.m;
    let (dst, barriers) = (cx.addresses(to), cx.addresses(barrier));
    let values: Vec<_> = s.iter().map(|s| cx.w.regs.r64(*s, m)).collect();
    if cx.w.regs.bad.is_some() {
        return Ok(Flow::Next);
    }
    let width = ty.bytes() as usize;
    let mut work = Vec::new();
    for l in lanes(m) {
        let total = width * values.len();
        cx.aligned_to(to.space, dst[l], total as u64, l)?;
        let signal = locate(barrier.space, barriers[l]).map_err(|f| f.lane(l as u32))?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v[l].to_le_bytes()[..width].to_vec()).collect();
        work.push((l, place(to.space, dst[l]), signal, bytes));
    }
    let agent = cx.agent();
    cx.cl.later(agent, move |cl, me| {
        for (l, at, (rank, offset), bytes) in work {
            cl.async_reduce(at, &bytes, reduce, u16::MAX, me).map_err(|f| f.lane(l as u32))?;
            cl.complete_tx(rank, offset, bytes.len() as u32, me).map_err(|f| f.lane(l as u32))?;
        }
        Ok(())
    });
    Ok(Flow::Next)
}

/// Every CTA is launched, so no launch can be cancelled: the response says so.
fn try_cancel(cx: &mut Cx<'_, '_>, response: &Addr, barrier: &Addr, all: bool) -> Result {
    let (to, barriers) = (cx.addresses(response), cx.addresses(barrier));
    for l in lanes(cx.m) {
        cx.aligned_to(response.space, to[l], 16, l)?;
        let (rank, offset) = locate(barrier.space, barriers[l]).map_err(|f| f.lane(l as u32))?;
        let Place::Shared { offset: at, .. } = place(response.space, to[l]) else { continue };
        let ranks = if all { (0..cx.cl.ctas.len() as u32).collect() } else { vec![rank] };
        let agent = cx.agent_of(1 << l);
        cx.cl.later(agent, move |cl, me| {
            for rank in ranks {
                cl.async_write(Place::Shared { rank, offset: at }, &[0; 16], me)?;
                cl.complete_tx(rank, offset, 16, me)?;
            }
            Ok(())
        });
    }
    Ok(Flow::Next)
}
