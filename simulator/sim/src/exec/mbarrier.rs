//! mbarriers: counts in `semantics::mbarrier`, knowledge and waiting here. PTX ISA 9.7.13.15.

use super::*;
use crate::check::lanes::{Order, Who};
use crate::check::order::{Actor, View};
use crate::check::proxy::Memory;
use crate::machine::cta::{MbarrierObject, Reach};
use crate::memory::misaligned;
use crate::semantics::mbarrier::{Mbarrier, Outcome};

/// Who uses an mbarrier.
pub struct User {
    actor: Actor,
    view: Arc<View>,
    /// The first actor of its warp, if lanes are told apart.
    warp: Option<Actor>,
    lane: usize,
    asynchronous: bool,
}

/// The last use of an mbarrier by a warp.
#[derive(Debug, Clone, Copy)]
pub struct Use {
    /// As which actor, and its clock then.
    pub by: (Actor, u32),
    /// By which of its lanes: by those, if by several, which did not know of each other.
    pub lanes: u32,
    pub pc: u32,
}

impl MbarrierObject {
    /// Notes a use by lanes of whom `user` is one.
    fn used(&mut self, user: &User, this: Use) {
        match self.uses.iter_mut().find(|old| old.by.0 == this.by.0) {
            Some(old) => {
                let lanes = if user.view.knows(old.by.0, old.by.1) { 0 } else { old.lanes };
                *old = Use { lanes: lanes | this.lanes, ..this };
            }
            None => self.uses.push(this),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Initializer {
    pub actor: Actor,
    pub clock: u32,
    pub lane: usize,
}

impl User {
    /// An operation in flight, through the async proxy or not.
    fn of(agent: &Agent, asynchronous: bool) -> User {
        User { actor: agent.actor, view: agent.view.clone(), warp: None, lane: 0, asynchronous }
    }

    /// Whether what lanes of an actor did happened before.
    fn follows(&self, (actor, clock): (Actor, u32), lanes: u32) -> bool {
        let (view, warp) = (&self.view, self.warp);
        let who = Who { actor: self.actor, clock: 0, pc: 0, view, warp, lanes: Lanes::Any };
        match who.order(actor, clock) {
            Order::None => false,
            Order::Before => true,
            Order::Of(whose) => lanes & !(whose.lanes | u32::from(whose.own) << self.lane) == 0,
        }
    }

    /// Whether an initialization happened before.
    fn knows(&self, rank: u32, init: Initializer) -> bool {
        self.follows((init.actor, init.clock), 1 << init.lane) || self.fenced(rank, init)
    }

    /// Whether an initialization is visible to the async proxy.
    fn fenced(&self, rank: u32, init: Initializer) -> bool {
        self.view.knows_fenced(Memory::Mbarrier(rank), init.actor, init.clock)
    }
}

impl Cluster<'_> {
    /// The mbarrier at an offset of a CTA.
    pub fn mbarrier(&mut self, rank: u32, offset: u32, user: &User) -> Result<&mut MbarrierObject> {
        let launch = self.launch;
        let at = || launch.describe_shared(rank, offset);
        let size = self.ctas.len();
        let (race, strict) = (self.launch.config.checks.race, self.launch.config.checks.strict);
        let rounds = self.barrier.generation;
        let Some(cta) = self.ctas.get_mut(rank as usize) else {
            return Err(fault!(Check::Bounds, "an mbarrier of rank {rank} in a cluster of {size}"));
        };
        let id = cta.id;
        match cta.mbarriers.get_mut(&offset) {
            None => {
                Err(Fault::new(Check::Mbarrier, "there is no mbarrier here: nothing has initialized one")
                    .at(at())
                    .help("mbarrier.init by one thread, then a barrier, before the first use"))
            }
            // Chips make an initialization visible by the end of the cluster barrier even if no fence precedes a
            // relaxed arrival; CUTLASS's kernels for sm_100 leave it out for one barrier.
            Some(b)
                if race
                    && !user.knows(rank, b.init)
                    && (strict || b.announced.is_none_or(|round| round >= rounds)) =>
            {
                Err(Fault::new(Check::Race, "use of an mbarrier is not ordered after its initialization")
                    .at(at())
                    .party(Party::new("mbarrier.init", b.init_pc).of((id, None)))
                    .help("synchronize after mbarrier.init: a CTA barrier, or fence.mbarrier_init and a cluster barrier"))
            }
            Some(b) if race && strict && user.asynchronous && !user.fenced(rank, b.init) => {
                Err(Fault::new(
                    Check::Proxy,
                    "the async proxy uses an mbarrier whose initialization was not fenced",
                )
                .at(at())
                .party(Party::new("mbarrier.init", b.init_pc).of((id, None)))
                .help("execute fence.mbarrier_init.release.cluster after mbarrier.init, in the same thread"))
            }
            Some(b) => Ok(b),
        }
    }

    /// Bytes of an asynchronous copy have arrived: `complete_tx` on a barrier.
    pub fn complete_tx(&mut self, rank: u32, offset: u32, bytes: u32, agent: &Agent) -> Result<()> {
        self.async_change((rank, offset), agent, true, |b| b.complete_tx(bytes))
    }

    /// An asynchronous operation arrives at a barrier; `proxy` is whether through the async proxy.
    pub fn async_arrive(&mut self, rank: u32, offset: u32, agent: &Agent, proxy: bool) -> Result<()> {
        self.async_change((rank, offset), agent, proxy, |b| b.arrive(1))
    }

    fn async_change(
        &mut self,
        (rank, offset): (u32, u32),
        agent: &Agent,
        proxy: bool,
        change: impl Fn(Mbarrier) -> Result<Outcome>,
    ) -> Result<()> {
        let view = Arc::new(agent.outcome());
        let launch = self.launch;
        let b = self.mbarrier(rank, offset, &User::of(agent, proxy))?;
        b.current.join(None, &view);
        let out = change(b.state).map_err(|f| f.at(launch.describe_shared(rank, offset)))?;
        b.advance(out.barrier, out.completed);
        self.progress += 1;
        Ok(())
    }
}

/// The CTA and offset of an mbarrier operand.
pub fn locate(space: Space, address: u64) -> Result<(u32, u32)> {
    match place(space, address) {
        Place::Shared { rank, offset } if offset % 8 == 0 => Ok((rank, offset)),
        p @ Place::Shared { .. } => Err(misaligned(p, 8)),
        p => Err(Fault::new(Check::Mbarrier, "an mbarrier lies in shared memory").at(p)),
    }
}

impl Cx<'_, '_> {
    /// How far an arrival or a wait of this scope reaches, where that is looked at.
    fn reach(&self, scope: Scope) -> Reach {
        (self.cl.launch.config.checks.strict && self.cl.ctas.len() > 1).then_some((self.cta, scope))
    }

    fn user(&self, lane: usize) -> User {
        let warp = self.w.apart.then_some(self.w.first_actor);
        User { actor: self.g.actor, view: self.g.known.of(lane), warp, lane, asynchronous: false }
    }

    pub(super) fn barrier_at(&mut self, space: Space, address: u64, lane: usize) -> Result<(u32, u32)> {
        let at = locate(space, address).map_err(|f| f.lane(lane as u32))?;
        if space == Space::SharedCta && at.0 as usize != self.cta {
            return Err(Fault::new(Check::Bounds, "a .shared::cta operation on another CTA's mbarrier")
                .lane(lane as u32)
                .help("use .shared::cluster"));
        }
        Ok(at)
    }
}

pub fn decode(i: &mut Ins<'_>) -> Decoded {
    i.ignore(&["b64"]);
    let relaxed = i.ast.has("relaxed");
    let mut order = i.ordering();
    // PTX ISA 9.7.13.15.13 and 16: without a word the scope is that of the CTA.
    let says = Scope::NAMES.iter().any(|(scope, _)| i.ast.has(scope));
    order.scope = if says { order.scope } else { Scope::Cta };
    let space = i.space();
    let (parity, drop, expect) = (i.has("parity"), i.has("arrive_drop"), i.has("expect_tx"));
    if i.has("arrive") || drop {
        order.release = !relaxed;
        return arrive(i, space, (drop, expect), order);
    }
    if i.has("pending_count") {
        let (d, s) = (i.dst(0)?, i.src(1, Type::B64)?);
        return Ok(Op::new(move |cx| {
            let v = cx.w.regs.r64(s, cx.m);
            cx.w.regs.w32(d, cx.m, &v.map(Mbarrier::pending_count));
        }));
    }
    if i.has("inval") {
        let a = i.addr(0, space)?;
        return Ok(Op::new(move |cx| invalidate(cx, &a)));
    }
    let (starts, completes) = (i.has("init"), i.has("complete_tx"));
    if starts || expect || completes {
        let (a, n) = (i.addr(0, space)?, i.src(1, Type::U32)?);
        return Ok(match (starts, expect) {
            (true, _) => Op::new(move |cx| init(cx, &a, n)),
            (_, true) => Op::new(move |cx| change(cx, &a, n, Dst::Sink, None, |b, n| b.expect_tx(n))),
            _ => Op::new(move |cx| change(cx, &a, n, Dst::Sink, None, |b, n| b.complete_tx(n))),
        });
    }
    let blocks = i.need("an operation", &[("try_wait", true), ("test_wait", false)])?;
    order.acquire = !relaxed;
    let ty = if parity { Type::U32 } else { Type::B64 };
    let wait =
        Waiting { d: i.dst(0)?, address: i.addr(1, space)?, phase: i.src(2, ty)?, parity, blocks, order };
    Ok(Op::new(move |cx| wait.execute(cx)))
}

/// `mbarrier.arrive` and `arrive_drop`, also with `.expect_tx`.
fn arrive(i: &mut Ins<'_>, space: Space, (drop, expect): (bool, bool), order: Ordering) -> Decoded {
    // `arrive [a]` without a result exists for remote barriers.
    let at = usize::from(!matches!(i.operand(0)?, Operand::Address(_)));
    let state = if at == 1 { i.dst(0)? } else { Dst::Sink };
    let (a, last) = (i.addr(at, space)?, i.optional(at + 1, Type::U32)?);
    if expect && last.is_none() {
        return i.error("needs a byte count");
    }
    let n = last.unwrap_or(Src::Imm(1));
    let completes = !i.has("noComplete");
    let apply = match (expect, drop) {
        (false, false) => Mbarrier::arrive,
        (false, true) => Mbarrier::arrive_drop,
        (true, false) => Mbarrier::arrive_expect_tx,
        (true, true) => Mbarrier::arrive_drop_expect_tx,
    };
    Ok(Op::new(move |cx| {
        let clock = cx.w.clock;
        let view = match order.release {
            true => Some(cx.w.so_far(cx.g, cx.m)),
            false => cx.g.carried.passed_on(order.scope, cx.m),
        };
        let arrival = Arrival { view, reach: cx.reach(order.scope), clock };
        change(cx, &a, n, state, Some(arrival), |b, n| match apply(b, n)? {
            Outcome { completed: true, .. } if !completes => Err(Fault::new(
                Check::Mbarrier,
                format!("mbarrier.arrive.noComplete completes phase {}", b.phase),
            )),
            outcome => Ok(outcome),
        })
    }))
}

fn init(cx: &mut Cx<'_, '_>, a: &Addr, count: Src) -> Result<()> {
    let addresses = cx.addresses(a);
    let counts = cx.w.regs.r32(count, cx.m);
    for l in lanes(cx.m) {
        let (rank, offset) = cx.barrier_at(a.space, addresses[l], l)?;
        if let Some(old) = cx.cl.ctas[rank as usize].mbarriers.get(&offset) {
            let pc = old.init_pc;
            let state = old.state;
            return Err(fault!(
                Check::Mbarrier,
                "mbarrier.init over a live mbarrier: phase {}, {} of {} arrivals pending",
                state.phase,
                state.pending,
                state.expected
            )
            .lane(l as u32)
            .at(cx.cl.launch.describe_shared(rank, offset))
            .party(Party::new("mbarrier.init", pc))
            .help("mbarrier.inval first"));
        }
        let state = Mbarrier::init(counts[l]).map_err(|f| f.lane(l as u32))?;
        cx.write_lane(a.space, addresses[l], l, Kind::WRITE, &state.to_bits().to_le_bytes())?;
        let object = MbarrierObject {
            state,
            init_pc: cx.pc,
            init: Initializer { actor: cx.g.actor, clock: cx.w.clock, lane: l },
            announced: None,
            uses: Vec::new(),
            current: Default::default(),
            done: Default::default(),
        };
        cx.cl.ctas[rank as usize].mbarriers.insert(offset, object);
    }
    Ok(())
}

fn invalidate(cx: &mut Cx<'_, '_>, a: &Addr) -> Result<()> {
    let addresses = cx.addresses(a);
    for l in lanes(cx.m) {
        let (rank, offset) = cx.barrier_at(a.space, addresses[l], l)?;
        let user = cx.user(l);
        let race = cx.cl.launch.config.checks.race;
        let b = cx.cl.mbarrier(rank, offset, &user).map_err(|f| f.lane(l as u32))?;
        let open = b.uses.iter().find(|used| race && !user.follows(used.by, used.lanes)).copied();
        if let Some(Use { by: (actor, _), pc, .. }) = open {
            let text = "mbarrier.inval is not ordered after another thread's use of the mbarrier";
            return Err(Fault::new(Check::Mbarrier, text)
                .lane(l as u32)
                .at(cx.cl.launch.describe_shared(rank, offset))
                .party(Party::new("use", pc).of(cx.cl.places.of(actor)))
                .help("synchronize first with all that use it: another may not have seen its phase end"));
        }
        cx.cl.ctas[rank as usize].mbarriers.remove(&offset);
        cx.cl.progress += 1;
    }
    Ok(())
}

/// What an arrival says (not settled), how far, and when.
struct Arrival {
    view: Option<Arc<View>>,
    reach: Reach,
    clock: u32,
}

/// Applies `f` for every lane; the state before it goes to `to`.
fn change(
    cx: &mut Cx<'_, '_>,
    a: &Addr,
    operand: Src,
    to: Dst,
    arrival: Option<Arrival>,
    f: impl Fn(Mbarrier, u32) -> Result<Outcome>,
) -> Result<()> {
    let addresses = cx.addresses(a);
    let n = cx.w.regs.r32(operand, cx.m);
    cx.defined()?;
    let mut states = [0; 32];
    for l in lanes(cx.m) {
        let (rank, offset) = cx.barrier_at(a.space, addresses[l], l)?;
        let launch = cx.cl.launch;
        let at = || launch.describe_shared(rank, offset);
        let user = cx.user(l);
        let b = cx.cl.mbarrier(rank, offset, &user).map_err(|f| f.lane(l as u32))?;
        states[l] = b.state.to_bits();
        if let Some(Arrival { view: Some(view), reach, .. }) = &arrival {
            let mut view = view.clone();
            let same = lanes(cx.m).filter(|&k| addresses[k] == addresses[l]).fold(0, |m, k| m | 1 << k);
            Arc::make_mut(&mut view).settle(same);
            b.current.join(*reach, &view);
            let by = (cx.g.actor, arrival.as_ref().map_or(0, |arrival| arrival.clock));
            b.used(&user, Use { by, lanes: 1 << l, pc: cx.pc });
        }
        let out = f(b.state, n[l]).map_err(|f| f.lane(l as u32).at(at()))?;
        b.advance(out.barrier, out.completed);
        if let Some(arrival) = arrival.as_ref().filter(|_| rank as usize != cx.cta) {
            cx.cl.ctas[rank as usize].visits.insert(cx.g.actor, (arrival.clock, cx.pc));
        }
    }
    cx.cl.progress += 1;
    cx.w.regs.w64(to, cx.m, &states);
    Ok(())
}

/// Besides the first wait at each place, one in this many answers "not yet" at first, as hardware may.
const SPURIOUS: u64 = 16;

/// `mbarrier.test_wait` and `try_wait`.
struct Waiting {
    d: Dst,
    address: Addr,
    /// State or parity.
    phase: Src,
    /// `phase` is a parity.
    parity: bool,
    /// `try_wait`: may block for a while.
    blocks: bool,
    order: Ordering,
}

impl Waiting {
    /// The first wait of a thread at each place answers "not yet" unless the phase is known to be complete: it could have come
    /// earlier. So what a kernel does without a retry is seen with any seed.
    fn execute(&self, cx: &mut Cx<'_, '_>) -> Result {
        let Waiting { d, address, phase, parity, blocks, order } = *self;
        let addresses = cx.addresses(&address);
        let phases = cx.w.regs.r64(phase, cx.m);
        cx.defined()?;
        let reach = cx.reach(order.scope);
        let mut done = 0;
        let mut views = Vec::new();
        let mut first = None;
        let mut same = true;
        // Whether what holds for one lane holds for all that wait for the same.
        let mut alike = !cx.w.apart;
        for l in lanes(cx.m) {
            let (rank, offset) = cx.barrier_at(address.space, addresses[l], l)?;
            let this = (rank, offset, phases[l]);
            match first {
                None => first = Some(this),
                Some(f) if f == this && alike => {
                    done |= (done >> cx.first_lane() & 1) << l;
                    continue;
                }
                Some(f) => same &= f == this,
            }
            let user = cx.user(l);
            let b = cx.cl.mbarrier(rank, offset, &user).map_err(|f| f.lane(l as u32))?;
            alike |= cx.g.known.alike(cx.m).is_some_and(|view| view.knows(b.init.actor, b.init.clock));
            let lanes = if alike { cx.m } else { 1 << l };
            b.used(&user, Use { by: (cx.g.actor, cx.w.clock), lanes, pc: cx.pc });
            let complete = if parity {
                b.state.test_parity(phases[l] as u32 & 1)
            } else {
                b.state.test_state(phases[l])
            };
            if complete {
                done |= 1 << l;
                views.extend(b.done.to(reach).map(|view| (1 << l, view.clone())));
            }
        }
        let progress = cx.cl.progress;
        let known = cx.g.known.of(cx.first_lane() as usize);
        let beyond = |known: &View| views.iter().any(|(_, v)| !known.knows_all(v, cx.g.actor));
        let open = done == 0 || beyond(&known);
        // What the thread itself did, such as the arrival that completes the phase, is known to it.
        let first_here =
            open && cx.w.first_wait(cx.pc, cx.m) && (done == 0 || beyond(&cx.w.publish(cx.g, cx.m)));
        if first_here {
            (done, views) = (0, Vec::new());
        }
        if done == 0 && !cx.g.forced {
            let again = cx.g.polled == Some((cx.pc, progress));
            let spurious = first_here || blocks && !again && cx.cl.rng.below(SPURIOUS) == 0;
            if !spurious && (blocks || again) {
                let wait = match first {
                    Some((rank, offset, phase)) if same && parity => {
                        Wait::Mbarrier { rank, offset, parity: phase as u32 & 1 }
                    }
                    _ => Wait::Poll(progress),
                };
                return Ok(Flow::Wait(wait));
            }
            cx.g.polled = Some((cx.pc, progress));
        }
        for (lane, view) in views {
            cx.learn(if same { cx.m } else { lane }, &view, order.acquire);
        }
        cx.w.regs.wpred(d, cx.m, done);
        Ok(Flow::Yield)
    }
}

/// `cp.async.mbarrier.arrive`: arrives once for each lane when its earlier `cp.async` are complete.
pub fn copy_arrive(cx: &mut Cx<'_, '_>, a: &Addr, noinc: bool) -> Result<()> {
    let addresses = cx.addresses(a);
    let mut targets = Vec::new();
    for l in lanes(cx.m) {
        let (rank, offset) = cx.barrier_at(a.space, addresses[l], l)?;
        let user = cx.user(l);
        let b = cx.cl.mbarrier(rank, offset, &user).map_err(|f| f.lane(l as u32))?;
        if !noinc {
            b.state = b.state.increment_pending().map_err(|f| f.lane(l as u32))?;
        }
        targets.push((rank, offset));
    }
    let before = cx.w.async_groups.all(GroupKind::CpAsync, cx.m);
    let agent = cx.cl.agent(cx.cta, cx.w, cx.g, cx.m);
    cx.cl.arrive_after(before, targets, (agent, cx.m));
    Ok(())
}

impl Cluster<'_> {
    /// Arrives at `targets` once every operation of `before` is complete, looking again every few instructions.
    fn arrive_after(&mut self, before: Vec<u64>, targets: Vec<(u32, u32)>, (agent, lanes): (Agent, u32)) {
        self.later(agent, move |cl, me| {
            let mut me = me.clone();
            let left: Vec<u64> =
                before.into_iter().filter(|op| cl.ops.get(op).is_some_and(|s| !s.done)).collect();
            if !left.is_empty() {
                cl.progress -= 1;
                cl.arrive_after(left, targets, (me, lanes));
                return Ok(());
            }
            // Earlier copies are part of what the arrival carries.
            let view = Arc::make_mut(&mut me.view);
            let mine = cl.ops.values().filter(|s| s.done && s.owner == (me.cta, me.warp));
            mine.for_each(|s| view.join(&s.view));
            view.settle(lanes);
            targets.into_iter().try_for_each(|(rank, offset)| cl.async_arrive(rank, offset, &me, false))
        });
    }
}
