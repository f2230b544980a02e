//! `tcgen05`: tensor memory and the tensor core of sm_100. PTX ISA 9.7.16.
//!
//! Operations of a thread on the tensor core (`mma`, `cp`, `shift`, `commit`) complete in order; `ld` and `st` are
//! separate and waited for with `tcgen05.wait`. Between threads, a release and an acquire order accesses to tensor
//! memory like all others (PTX ISA 9.7.16.6.3: the standard mechanisms apply as well). `tcgen05.fence` does two things
//! more: after a relaxed wait, `after_thread_sync` orders what the wait has seen, and operations that are not complete
//! but lie before a `before_thread_sync` are ordered before those of the same pipeline behind an `after_thread_sync`.

mod multiply;
mod transfer;

use super::mbarrier::locate;
use super::*;
use crate::check::lanes::Who;
use crate::check::order::View;
use crate::check::proxy::Memory;
use crate::check::shadow::{Access, Conflict};
use crate::memory::tmem::Tmem;
use crate::semantics::tcgen05::Cell;
use transfer::access;

/// Who accesses tensor memory: `fenced` is what counts, `full` what relaxed waits have seen besides.
#[derive(Clone)]
pub(super) struct TensorWho {
    pub actor: u16,
    pub clock: u32,
    pub pc: u32,
    pub fenced: Arc<View>,
    pub full: Arc<View>,
}

impl Cluster<'_> {
    /// Checks an access to `n` cells of a lane and remembers it.
    fn touch_tmem(&mut self, rank: u32, at: Cell, n: u32, kind: Kind, who: &TensorWho) -> Result<()> {
        let Cell { lane, column } = at;
        self.ctas[rank as usize].tmem.check(lane, 1, column, n).map_err(|f| {
            let end = column + n;
            f.at(format_args!("tensor memory lane {lane}, columns {column}..{end} of cluster rank {rank}"))
        })?;
        let bytes = u64::from(n) * 4;
        if kind.write {
            self.counters.tmem_written += bytes;
            self.progress += 1;
        } else {
            self.counters.tmem_read += bytes;
        }
        let look = self.look(Memory::Shared(rank));
        let access = Access { actor: who.actor, clock: who.clock, pc: who.pc, kind, era: 0 };
        let start = Tmem::index(at.lane, at.column) * 4;
        let shadow = &mut self.ctas[rank as usize].tmem.shadow;
        let TensorWho { actor, clock, pc, fenced, .. } = who;
        let by = Who { actor: *actor, clock: *clock, pc: *pc, view: fenced, warp: None, lanes: Lanes::Any };
        let result = self.states.access((shadow, None), start, n as usize * 4, access, &by, look);
        let Err((byte, conflict)) = result else { return Ok(()) };
        let column = byte / 4 % 512;
        let place = format!("tensor memory lane {}, column {column} of cluster rank {rank}", at.lane);
        let noun = kind.noun();
        Err(match conflict {
            Conflict::Uninit => {
                fault!(Check::Uninit, "{noun} of tensor memory that nothing wrote")
            }
            Conflict::Race(a) | Conflict::Unfenced(a) if who.full.knows(a.actor, a.clock) => fault!(Check::Tmem, "{noun} of tensor memory is synchronized with an earlier {} by a relaxed wait, but not fenced",
                    a.kind.noun())
            .party(self.earlier(a))
            .help("execute tcgen05.fence::after_thread_sync after the synchronization"),
            Conflict::Race(a) | Conflict::Unfenced(a) | Conflict::NotConstant(a) => fault!(Check::Race, "{noun} of tensor memory is not ordered with an earlier {}", a.kind.noun())
            .party(self.earlier(a))
            .help("order them: tcgen05.commit and its mbarrier after mma, tcgen05.wait after ld and st"),
        }
        .at(place))
    }

    /// Carries out `job` when the tensor-core operations of this CTA before it are complete.
    fn on_tensor_core(
        &mut self,
        cta: usize,
        agent: Agent,
        job: impl for<'c> FnOnce(&mut Cluster<'c>, &Agent) -> Result<()> + Send + 'static,
    ) {
        let due = self.due().max(self.ctas[cta].tensor_busy_until + 1);
        self.ctas[cta].tensor_busy_until = due;
        self.engine.push(due, agent, false, Box::new(job));
    }
}

impl Cx<'_, '_> {
    /// An agent for a tensor-core operation, and what counts for its accesses to tensor memory. What the same
    /// warp has issued before is ordered by the pipeline, and so is what others passed on.
    fn tensor_agent(&mut self) -> (Agent, TensorWho) {
        let mut agent = self.agent();
        Arc::make_mut(&mut agent.view).join(&self.w.tensor_issued);
        let who = self.tensor_who((agent.actor, agent.clock), &agent.view, true);
        self.w.tensor_issued.learn(agent.actor, agent.clock);
        (agent, who)
    }

    fn tensor_who(&self, (actor, clock): (u16, u32), view: &Arc<View>, pipelined: bool) -> TensorWho {
        let mut fenced = view.clone();
        let view = Arc::make_mut(&mut fenced);
        let mut fence = self.g.carried.tensor.clone();
        if pipelined {
            Arc::make_mut(&mut fence).in_pipeline();
        }
        view.join(&fence);
        let mut full = fenced.clone();
        if let Some(observed) = &self.g.carried.observed {
            Arc::make_mut(&mut full).join(&observed.1);
        }
        TensorWho { actor, clock, pc: self.pc, fenced, full }
    }

    /// A tensor-memory address, the same in all lanes.
    fn cell(&mut self, a: &Addr) -> Result<Cell> {
        let base = self.uniform(a.base, "the tensor memory address")?;
        Ok(Cell::from_address((base as u32).wrapping_add(a.offset as u32)))
    }

    /// Ranks of the CTAs an operation of this group touches.
    fn pair(&self, group: u32) -> Result<Vec<u32>> {
        let rank = self.cta as u32;
        if group == 1 {
            return Ok(vec![rank]);
        }
        let even = rank & !1;
        if even as usize + 1 >= self.cl.ctas.len() {
            return Err(Fault::new(Check::Tmem, "cta_group::2 needs a cluster with an even number of CTAs"));
        }
        Ok(vec![even, even + 1])
    }

    /// Issued by one thread: a fault if several lanes are active.
    fn single(&self) -> Result<()> {
        match self.m.count_ones() {
            1 => Ok(()),
            n => Err(fault!(Check::Illegal, "{n} lanes execute it: one thread issues it")
                .help("guard it with elect.sync, or a comparison with the lane number")),
        }
    }
}

fn tmem(i: &Ins<'_>, at: usize) -> Decoded<Addr> {
    // Tensor-memory addresses are plain 32-bit numbers; no space of the machine holds them.
    i.addr(at, Space::Param)
}

fn group(i: &mut Ins<'_>) -> Decoded<u32> {
    i.need("a CTA group", &[("cta_group::1", 1), ("cta_group::2", 2)])
}

pub fn decode(i: &mut Ins<'_>) -> Decoded {
    let name = i.ast.modifiers.first().map_or("", |m| m.as_str());
    i.ignore(&["sync", "aligned", name]);
    Ok(match name {
        "alloc" => {
            i.ignore(&["b32"]);
            let space = i.space();
            let (group, to, columns) = (group(i)?, i.addr(0, space)?, i.src(1, Type::U32)?);
            Op::aligned(move |cx| alloc(cx, group, &to, columns))
        }
        "dealloc" => {
            i.ignore(&["b32"]);
            let (group, address, columns) = (group(i)?, i.src(0, Type::U32)?, i.src(1, Type::U32)?);
            Op::aligned(move |cx| dealloc(cx, group, address, columns))
        }
        "relinquish_alloc_permit" => {
            let group = group(i)?;
            Op::aligned(move |cx| {
                let tmem = &mut cx.cl.ctas[cx.cta].tmem;
                tmem.use_group(group).map(|()| tmem.relinquish())
            })
        }
        "ld" => {
            let access = Arc::new(access(i, 0, 1, "pack::16b")?);
            Op::aligned(move |cx| transfer::load(&access, cx))
        }
        "st" => {
            let access = Arc::new(access(i, i.count() - 1, 0, "unpack::16b")?);
            Op::aligned(move |cx| transfer::store(&access, cx))
        }
        "wait::ld" => Op::aligned(|cx| transfer::wait(cx, GroupKind::TmemLoad)),
        "wait::st" => Op::aligned(|cx| transfer::wait(cx, GroupKind::TmemStore)),
        "cp" => return transfer::copy(i),
        "shift" => {
            i.ignore(&["down"]);
            let (group, at) = (group(i)?, tmem(i, 0)?);
            Op::new(move |cx| transfer::shift(cx, group, &at))
        }
        "mma" => {
            let op = Arc::new(multiply::decode(i)?);
            Op::new(move |cx| multiply::issue(&op, cx))
        }
        "commit" => {
            i.ignore(&["mbarrier::arrive::one", "b64"]);
            let (multicast, space) = (i.has("multicast::cluster"), i.space());
            let mask = if multicast { Some(i.src(1, Type::B16)?) } else { None };
            let (group, barrier) = (group(i)?, i.addr(0, space)?);
            Op::new(move |cx| commit(cx, group, &barrier, mask))
        }
        "fence::before_thread_sync" => Op::new(|cx| {
            let issued = &cx.w.tensor_issued;
            cx.g.known.change(cx.m, |view| view.pipe(issued));
            let before = cx.w.publish(cx.g, cx.m).before_fence();
            cx.g.carried.pass_on(&before);
        }),
        "fence::after_thread_sync" => Op::new(|cx| {
            let carried = &mut cx.g.carried;
            let observed = carried.observed.as_ref().map(|(_, view)| &**view);
            Arc::make_mut(&mut carried.tensor).after_fence(&cx.g.known.joined(cx.m), observed);
        }),
        _ => return i.error("this tcgen05 operation is not executed"),
    })
}

fn dealloc(cx: &mut Cx<'_, '_>, group: u32, address: Src, columns: Src) -> Result<()> {
    let columns = cx.uniform(columns, "the column count")? as u32;
    let address = cx.uniform(address, "the tensor memory address")? as u32;
    let tmem = &mut cx.cl.ctas[cx.cta].tmem;
    tmem.use_group(group)?;
    tmem.dealloc(address, columns)?;
    cx.cl.progress += 1;
    Ok(())
}

fn alloc(cx: &mut Cx<'_, '_>, group: u32, to: &Addr, columns: Src) -> Result {
    let columns = cx.uniform(columns, "the column count")? as u32;
    let to_address = cx.addresses(to)[0];
    let tmem = &mut cx.cl.ctas[cx.cta].tmem;
    tmem.use_group(group)?;
    let Some(column) = tmem.alloc(columns)? else {
        return Ok(Flow::Wait(Wait::Tmem(cx.cl.progress)));
    };
    let used = tmem.columns_in_use();
    cx.cl.counters.tmem_columns = cx.cl.counters.tmem_columns.max(used);
    cx.aligned_to(to.space, to_address, 4, 0)?;
    // The warp has allocated: PTX's example reads the address with nothing in between.
    cx.together = Some(Lanes::Every);
    cx.write_lane(to.space, to_address, 0, Kind::WRITE, &column.to_le_bytes())?;
    Ok(Flow::Next)
}

/// `commit`: arrives when everything this thread has issued to the tensor core is complete.
fn commit(cx: &mut Cx<'_, '_>, group: u32, barrier: &Addr, mask: Option<Src>) -> Result<()> {
    cx.single()?;
    cx.cl.ctas[cx.cta].tmem.use_group(group)?;
    let lane = cx.first_lane() as usize;
    let address = cx.addresses(barrier)[lane];
    let (rank, offset) = locate(barrier.space, address)?;
    let ranks = match mask {
        Some(mask) => {
            let mask = cx.w.regs.r64(mask, cx.m)[lane];
            super::copy::destinations(cx.cl, mask)?
        }
        None => vec![rank],
    };
    let (agent, _) = cx.tensor_agent();
    cx.cl.on_tensor_core(cx.cta, agent, move |cl, me| {
        ranks.into_iter().try_for_each(|rank| cl.async_arrive(rank, offset, me, true))
    });
    Ok(())
}
