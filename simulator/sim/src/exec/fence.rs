//! Fences, named barriers of a CTA, the cluster barrier, and `__syncwarp`.
//! PTX ISA 9.7.13.1 (`bar`), 9.7.13.2 (`barrier.cluster`), 9.7.13.5 (`fence`).

use super::*;
use crate::check::proxy::Fence as Proxied;

/// What a CTA barrier does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Sync,
    Arrive,
    Popc,
    And,
    Or,
}

impl Kind {
    /// What all arrivals of a round have in common: a reduction, or none (`sync` and `arrive`).
    fn reduction(self) -> Option<&'static str> {
        match self {
            Kind::Sync | Kind::Arrive => None,
            Kind::Popc => Some(".red.popc"),
            Kind::And => Some(".red.and"),
            Kind::Or => Some(".red.or"),
        }
    }
}

/// A barrier of a CTA.
struct Barrier {
    kind: Kind,
    /// Whether the warp executes it as one.
    aligned: bool,
    id: Src,
    /// Threads that take part; all if absent.
    count: Option<Src>,
    /// Result and predicate of `red`.
    vote: Option<(Dst, Src)>,
}

/// `.gl` is what `membar` calls the GPU.
fn scope(i: &mut Ins<'_>) -> Decoded<Scope> {
    match i.one_of(Scope::NAMES).or_else(|| i.has("gl").then_some(Scope::Gpu)) {
        Some(scope) => Ok(scope),
        None => i.error("needs a scope: .cta .cluster .gpu or .sys"),
    }
}

/// `fence`, `membar`
pub fn fence(i: &mut Ins<'_>) -> Decoded {
    let named = |what: fn(&str) -> bool| i.ast.modifiers.iter().any(|m| what(m));
    if named(|m| m.starts_with("proxy")) {
        let [asynchronous, tensormap] =
            [named(|m| m.starts_with("async")), named(|m| m.starts_with("tensormap"))];
        if !(asynchronous || tensormap || i.ast.has("alias")) {
            return i.error("needs a proxy: .alias, .async or .tensormap::generic");
        }
        // Which memories generic writes to become visible to the async proxy; all if none is named.
        let memories = match () {
            () if named(|m| m.ends_with("shared::cluster")) => vec![Proxied::Cluster],
            () if named(|m| m.ends_with("shared::cta")) => Vec::new(),
            () if named(|m| m.ends_with("global")) => vec![Proxied::Global],
            () => vec![Proxied::Global, Proxied::Cluster],
        };
        let acquire = i.has("acquire");
        let between = tensormap && (acquire || i.has("release"));
        let scope = if between { Some(scope(i)?) } else { None };
        let nothing = i.nothing();
        return Ok(match scope {
            Some(scope) => Op::new(move |cx| order(cx, scope, acquire, !acquire)),
            // The other proxies are one here.
            None if !asynchronous => nothing,
            None if memories.is_empty() => {
                Op::new(|cx| cx.w.fence_proxy(cx.g, cx.m, &[Proxied::Cta(cx.cta as u32)]))
            }
            None => Op::new(move |cx| cx.w.fence_proxy(cx.g, cx.m, &memories)),
        });
    }
    let initialized = i.has("mbarrier_init");
    // Restricted to one space: a fence of everything is at least as strong.
    i.ignore_if(|m| m.starts_with("sync_restrict"));
    let (acquire, release) = (i.has("acquire"), i.has("release"));
    i.ignore(&["acq_rel", "sc"]);
    let scope = scope(i)?;
    if initialized {
        return Ok(Op::new(|cx| cx.w.fence_initialized(cx.g, cx.m)));
    }
    let both = acquire == release;
    Ok(Op::new(move |cx| order(cx, scope, both || acquire, both || release)))
}

/// Orders memory accesses: the halves of a fence.
pub fn order(cx: &mut Cx<'_, '_>, scope: Scope, acquire: bool, release: bool) {
    if acquire && let Some((lanes, view)) = cx.g.carried.observed.take() {
        cx.g.known.join(lanes & cx.m, &view);
        if lanes & !cx.m != 0 {
            cx.g.carried.observed = Some((lanes & !cx.m, view));
        }
    }
    if release {
        cx.g.carried.fenced = Some((scope, cx.w.so_far(cx.g, cx.m)));
        cx.g.carried.quiet = true;
    }
}

/// `bar`, `barrier`
pub fn barrier(i: &mut Ins<'_>) -> Decoded {
    if i.has("warp") {
        i.ignore(&["sync"]);
        let mask = i.src(0, Type::B32)?;
        return Ok(Op::new(move |cx| warp(cx, mask)));
    }
    let cluster = i.has("cluster");
    i.ignore(&["cta"]);
    let aligned = i.has("aligned") || i.ast.root == "bar";
    if cluster {
        // A wait always acquires: PTX 9 spells `.relaxed` for arrivals only, and ptxas refuses it on a wait.
        let arrive = i.need("an operation", &[("arrive", true), ("wait", false)])?;
        let relaxed = arrive && i.has("relaxed");
        let word = if arrive { "release" } else { "acquire" };
        i.ignore_if(|m| m == word && !relaxed);
        return Ok(match (aligned, arrive) {
            (true, true) => Op::aligned(move |cx| cluster_arrive(cx, !relaxed)),
            (true, false) => Op::aligned(cluster_wait),
            (false, true) => Op::new(move |cx| cluster_arrive(cx, !relaxed)),
            (false, false) => Op::new(cluster_wait),
        });
    }
    let red = i.has("red");
    let kind = if red {
        i.ignore(&["u32", "pred"]);
        i.need("an operation", &[("popc", Kind::Popc), ("and", Kind::And), ("or", Kind::Or)])?
    } else {
        i.need("an operation", &[("sync", Kind::Sync), ("arrive", Kind::Arrive)])?
    };
    let at = usize::from(red);
    let id = i.src(at, Type::U32)?;
    let have = i.count() - at - usize::from(red);
    let count = if have > 1 { Some(i.src(at + 1, Type::U32)?) } else { None };
    let vote = if red { Some((i.dst(0)?, i.predicate(i.count() - 1)?)) } else { None };
    if kind == Kind::Arrive && count.is_none() {
        return i.error("arrive needs a thread count");
    }
    let barrier = Barrier { kind, aligned, id, count, vote };
    Ok(Op::new(move |cx| barrier.execute(cx)))
}

/// `bar.warp.sync`
fn warp(cx: &mut Cx<'_, '_>, mask: Src) -> Result {
    let members = match super::vote::members(cx, mask)? {
        Ok(members) => members,
        Err(flow) => return Ok(flow),
    };
    let mut left = cx.m;
    while left != 0 {
        let members = members[left.trailing_zeros() as usize] & cx.m;
        cx.w.sync(cx.g, members);
        left &= !members;
    }
    Ok(Flow::Next)
}

impl Barrier {
    fn execute(&self, cx: &mut Cx<'_, '_>) -> Result {
        // Compilers put it after branches as it is; lanes wait for each other here in any case.
        let Barrier { kind, aligned, id, count, vote } = *self;
        if aligned
            && cx.g.arrived.is_none()
            && let Some(flow) = cx.gather_all()?
        {
            return Ok(flow);
        }
        if kind != Kind::Arrive && cx.m != cx.g.mask {
            // Lanes whose guard is false do not wait.
            return Ok(Flow::Part(cx.m));
        }
        let id = cx.uniform(id, "the barrier number")?;
        let fault = |text: String| Err(Fault::new(Check::Barrier, text));
        if id > 15 {
            return fault(format!("barrier {id}: a CTA has barriers 0 to 15"));
        }
        let count = match count {
            Some(c) => {
                let c = cx.uniform(c, "the thread count")? as u32;
                if c == 0 || !c.is_multiple_of(32) {
                    return fault(format!(
                        "barrier {id} with {c} threads: the count is a multiple of 32, not 0"
                    ));
                }
                Some(c)
            }
            None => None,
        };
        let cta = cx.cta;
        let live = cx.cl.ctas[cta].live_threads;
        if let Some(generation) = cx.g.arrived {
            return Ok(self.leave(cx, id as u32, generation));
        }
        // An aligned barrier counts whole warps, exited lanes included; without a count only live threads matter.
        let mine = if aligned && count.is_some() { 32 } else { cx.m.count_ones() };
        let votes = vote.map_or(0, |(_, p)| (cx.w.regs.pred(p, cx.m) & cx.m).count_ones());
        let view = cx.w.publish(cx.g, cx.m);
        let pc = cx.pc;
        let b = &mut cx.cl.ctas[cta].barriers[id as usize];
        if b.arrived == 0 {
            b.first_pc = pc;
            b.expected = count;
            b.reduction = kind.reduction();
        } else if b.reduction != kind.reduction() {
            let name = |r: Option<&'static str>| r.unwrap_or(".sync or .arrive");
            let (theirs, ours, first) = (name(b.reduction), name(kind.reduction()), b.first_pc);
            return Err(fault!(
                Check::Barrier,
                "barrier {id} is used by {ours} here, but an earlier arrival of this round was by {theirs}"
            )
            .party(Party::new("first arrival", first))
            .help("all arrivals of a round are the same reduction, or none is one"));
        } else if b.expected != count {
            let name = |c: Option<u32>| c.map_or("all threads".to_string(), |c| format!("{c} threads"));
            let (theirs, ours) = (name(b.expected), name(count));
            let first = b.first_pc;
            return Err(fault!(
                Check::Barrier,
                "barrier {id} is for {ours} here, but an earlier arrival of this round said {theirs}"
            )
            .party(Party::new("first arrival", first)));
        }
        b.arrived += mine;
        b.votes += votes;
        b.current.join(&view);
        let generation = b.generation;
        let needed = b.expected.unwrap_or(live);
        if b.arrived > needed {
            let arrived = b.arrived;
            return fault(format!(
                "barrier {id}: {arrived} threads have arrived where {needed} are expected"
            ));
        }
        if b.arrived == needed {
            b.complete();
        }
        cx.cl.progress += 1;
        if kind == Kind::Arrive {
            return Ok(Flow::Next);
        }
        cx.g.arrived = Some(generation);
        if cx.cl.ctas[cta].barriers[id as usize].generation != generation {
            // The last to arrive goes on at once, through the code above.
            return Ok(Flow::Wait(Wait::No));
        }
        cx.cl.ctas[cta].barriers[id as usize].waiting += mine;
        Ok(Flow::Wait(Wait::Named { id: id as u32, generation }))
    }

    /// Goes on behind a barrier that the group has arrived at, if all have.
    fn leave(&self, cx: &mut Cx<'_, '_>, id: u32, generation: u64) -> Flow {
        let b = &cx.cl.ctas[cx.cta].barriers[id as usize];
        if b.generation == generation {
            return Flow::Wait(Wait::Named { id, generation });
        }
        let (done, result) = (b.done.clone(), b.result);
        cx.g.arrived = None;
        cx.g.known.join(cx.m, &done);
        cx.w.sync(cx.g, cx.m);
        if let Some((d, _)) = self.vote {
            let (votes, of) = result;
            match self.kind {
                Kind::Popc => cx.w.regs.w32(d, cx.m, &[votes; 32]),
                Kind::And => cx.w.regs.wpred(d, cx.m, if votes == of { u32::MAX } else { 0 }),
                _ => cx.w.regs.wpred(d, cx.m, if votes != 0 { u32::MAX } else { 0 }),
            }
        }
        Flow::Next
    }
}

fn cluster_arrive(cx: &mut Cx<'_, '_>, release: bool) -> Result<()> {
    let (arrived, _) = cx.w.cluster_arrived;
    if arrived & cx.m != 0 {
        return Err(Fault::new(
            Check::Barrier,
            "barrier.cluster.arrive twice without barrier.cluster.wait in between",
        ));
    }
    let view = cx.w.publish(cx.g, cx.m);
    let live = cx.cl.live_threads();
    let b = &mut cx.cl.barrier;
    if release {
        b.current.join(&view);
    } else if let Some(fenced) = cx.g.carried.passed_on(Scope::Cluster, cx.m) {
        b.current.join(&fenced);
    }
    let (actor, round) = (cx.g.actor, b.generation);
    let own = cx.cl.ctas[cx.cta].mbarriers.values_mut().filter(|m| m.init.actor == actor);
    own.for_each(|m| m.announced = m.announced.or(Some(round)));
    let b = &mut cx.cl.barrier;
    cx.w.cluster_arrived = (arrived | cx.m, round);
    b.arrived += cx.m.count_ones();
    if b.arrived >= live {
        b.complete();
    }
    cx.cl.progress += 1;
    Ok(())
}

fn cluster_wait(cx: &mut Cx<'_, '_>) -> Result {
    let (arrived, generation) = cx.w.cluster_arrived;
    if cx.m & !arrived != 0 {
        return Err(Fault::new(Check::Barrier, "barrier.cluster.wait without barrier.cluster.arrive before"));
    }
    if cx.cl.barrier.generation == generation {
        return Ok(Flow::Wait(Wait::Cluster(generation)));
    }
    cx.w.cluster_arrived.0 &= !cx.m;
    let done = cx.cl.barrier.done.clone();
    cx.g.known.join(cx.m, &done);
    // What lanes did after they had arrived, it does not order.
    cx.g.met = None;
    Ok(Flow::Next)
}
