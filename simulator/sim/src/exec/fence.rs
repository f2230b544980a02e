//! Fences, named barriers of a CTA, the cluster barrier, and `__syncwarp`.

use super::*;
use crate::check::proxy::Fence as Proxied;
use crate::decode::fence::{Barrier, Fence, Kind, Memories};

pub fn fence(op: &Fence, cx: &mut Cx<'_, '_>) -> Result {
    match op {
        Fence::Memory { scope, acquire, release } => {
            if *acquire && let Some((lanes, view)) = cx.g.carried.observed.take() {
                cx.g.known.join(lanes & cx.m, &view);
                if lanes & !cx.m != 0 {
                    cx.g.carried.observed = Some((lanes & !cx.m, view));
                }
            }
            if *release {
                cx.g.carried.fenced = Some((*scope, cx.w.so_far(cx.g, cx.m)));
                cx.g.carried.quiet = true;
            }
        }
        Fence::Async(memories) => {
            let own = Proxied::Cta(cx.cta as u32);
            let memories: &[_] = match memories {
                Memories::All => &[Proxied::Global, Proxied::Cluster],
                Memories::Global => &[Proxied::Global],
                Memories::Cluster => &[Proxied::Cluster],
                Memories::Cta => std::slice::from_ref(&own),
            };
            cx.w.fence_proxy(cx.g, cx.m, memories);
        }
        Fence::Initialized => cx.w.fence_initialized(cx.g, cx.m),
        Fence::Nothing => {}
    }
    Ok(Flow::Next)
}

pub fn barrier(op: &Barrier, cx: &mut Cx<'_, '_>) -> Result {
    match op {
        Barrier::Warp(mask) => Ok(match super::vote::members(cx, *mask)? {
            Ok(members) => {
                let mut left = cx.m;
                while left != 0 {
                    let members = members[left.trailing_zeros() as usize] & cx.m;
                    cx.w.sync(cx.g, members);
                    left &= !members;
                }
                Flow::Next
            }
            Err(flow) => flow,
        }),
        Barrier::Cta { kind, aligned, id, count, vote } => cta(cx, *kind, *aligned, *id, *count, *vote),
        Barrier::ClusterArrive(aligned, release) => cluster_arrive(cx, *aligned, *release),
        Barrier::ClusterWait(aligned) => cluster_wait(cx, *aligned),
    }
}

fn cta(
    cx: &mut Cx<'_, '_>,
    kind: Kind,
    aligned: bool,
    id: Src,
    count: Option<Src>,
    vote: Option<(Dst, Src)>,
) -> Result {
    // Compilers put it after branches as it is; lanes wait for each other here in any case.
    if aligned
        && cx.g.arrived.is_none()
        && let Some(flow) = cx.gather(u32::MAX)
    {
        return Ok(flow);
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
                return fault(format!("barrier {id} with {c} threads: the count is a multiple of 32, not 0"));
            }
            Some(c)
        }
        None => None,
    };
    let cta = cx.cta;
    let live = cx.cl.ctas[cta].live_threads;
    if let Some(generation) = cx.g.arrived {
        return Ok(leave(cx, kind, id as u32, generation, vote));
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
    } else if b.expected != count {
        let name = |c: Option<u32>| c.map_or("all threads".to_string(), |c| format!("{c} threads"));
        let (theirs, ours) = (name(b.expected), name(count));
        let first = b.first_pc;
        return Err(Fault::new(
            Check::Barrier,
            format!("barrier {id} is for {ours} here, but an earlier arrival of this round said {theirs}"),
        )
        .party(Party { role: "first arrival".into(), pc: Some(first), cta: None, warp: None }));
    }
    b.arrived += mine;
    b.votes += votes;
    b.current.join(&view);
    let generation = b.generation;
    let needed = b.expected.unwrap_or(live);
    if b.arrived > needed {
        let arrived = b.arrived;
        return fault(format!("barrier {id}: {arrived} threads have arrived where {needed} are expected"));
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
fn leave(cx: &mut Cx<'_, '_>, kind: Kind, id: u32, generation: u64, vote: Option<(Dst, Src)>) -> Flow {
    let b = &cx.cl.ctas[cx.cta].barriers[id as usize];
    if b.generation == generation {
        return Flow::Wait(Wait::Named { id, generation });
    }
    let (done, result) = (b.done.clone(), b.result);
    cx.g.arrived = None;
    cx.g.known.join(cx.m, &done);
    cx.w.sync(cx.g, cx.m);
    if let Some((d, _)) = vote {
        let (votes, of) = result;
        match kind {
            Kind::Popc => cx.w.regs.w32(d, cx.m, &[votes; 32]),
            Kind::And => cx.w.regs.wpred(d, cx.m, if votes == of { u32::MAX } else { 0 }),
            _ => cx.w.regs.wpred(d, cx.m, if votes != 0 { u32::MAX } else { 0 }),
        }
    }
    Flow::Next
}

fn cluster_arrive(cx: &mut Cx<'_, '_>, aligned: bool, release: bool) -> Result {
    if aligned && let Some(flow) = cx.aligned()? {
        return Ok(flow);
    }
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
    Ok(Flow::Next)
}

fn cluster_wait(cx: &mut Cx<'_, '_>, aligned: bool) -> Result {
    if aligned && let Some(flow) = cx.aligned()? {
        return Ok(flow);
    }
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
