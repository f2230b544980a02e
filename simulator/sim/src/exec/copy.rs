//! Asynchronous copies without a tensor map. PTX ISA 9.7.9.25 (`cp.async`, `cp.async.bulk`), `st.async`, `red.async`,
//! `clusterlaunchcontrol.try_cancel`.

use super::atomic::{Reduce, reduction};
use super::mbarrier::locate;
use super::*;
use crate::check::lanes::Who;
use crate::machine::groups::OpId;

/// How the completion of a bulk copy is noticed.
#[derive(Clone, Copy)]
enum Completion {
    /// Bytes are counted on this barrier.
    Mbarrier(Addr),
    /// The thread's bulk group.
    Group,
}

#[derive(Clone, Copy)]
struct BulkCopy {
    to: Addr,
    from: Addr,
    size: Src,
    completion: Completion,
    multicast: Option<Src>,
    reduce: Option<Reduce>,
}

/// `cp.async` of 4, 8 or 16 bytes.
#[derive(Clone, Copy)]
struct Small {
    /// Shared destination.
    to: Addr,
    /// Global source.
    from: Addr,
    bytes: u32,
    /// Bytes read, if fewer; the rest is zeroed.
    source: Option<Src>,
    /// Predicate: read nothing.
    ignore: Option<Src>,
}

/// `cp.async` without bulk
pub fn cp_async(i: &mut Ins<'_>) -> Decoded {
    i.ignore(&["async"]);
    if i.has("mbarrier") {
        i.ignore(&["arrive", "b64"]);
        let (noinc, space) = (i.has("noinc"), i.space());
        let a = i.addr(0, space)?;
        return Ok(Op::new(move |cx| super::mbarrier::copy_arrive(cx, &a, noinc)));
    }
    let commit = |cx: &mut Cx<'_, '_>| cx.w.async_groups.commit(GroupKind::CpAsync, cx.m);
    if i.has("commit_group") {
        return Ok(Op::new(commit));
    }
    if i.has("wait_all") {
        return Ok(Op::new(move |cx| {
            commit(cx);
            cx.wait_groups(GroupKind::CpAsync, 0)
        }));
    }
    if i.has("wait_group") {
        let n = i.constant(0)?;
        return Ok(Op::new(move |cx| cx.wait_groups(GroupKind::CpAsync, n)));
    }
    let hint = i.ast.has("L2::cache_hint");
    i.cache_hints();
    i.ignore(&["shared", "shared::cta", "global"]);
    let bytes = i.constant(2)?;
    if !matches!(bytes, 4 | 8 | 16) {
        return i.error(format!("copies {bytes} bytes: 4, 8 or 16 are allowed"));
    }
    let extra = if i.count() > 3 + usize::from(hint) { Some(i.src(3, Type::U32)?) } else { None };
    let predicate = |s: &Src| matches!(s, Src::Reg(Reg::Pred(_)) | Src::NotPred(_));
    let (ignore, source) = (extra.filter(predicate), extra.filter(|s| !predicate(s)));
    let copy =
        Small { to: i.addr(0, Space::SharedCta)?, from: i.addr(1, Space::Global)?, bytes, source, ignore };
    Ok(Op::new(move |cx| copy.start(cx)))
}

/// `cp.async.bulk` and `cp.reduce.async.bulk` without tensor
pub fn bulk(i: &mut Ins<'_>) -> Decoded {
    let reducing = i.ast.modifiers.first().is_some_and(|m| m == "reduce");
    i.ignore(&["async", "bulk", "reduce"]);
    if i.has("commit_group") {
        return Ok(Op::new(|cx| cx.w.async_groups.commit(GroupKind::Bulk, cx.m)));
    }
    if i.has("wait_group") {
        let kind = if i.has("read") { GroupKind::BulkRead } else { GroupKind::Bulk };
        let n = i.constant(0)?;
        return Ok(Op::new(move |cx| cx.wait_groups(kind, n)));
    }
    if i.has("prefetch") {
        return Ok(i.nothing());
    }
    i.cache_hints();
    let multicast = i.has("multicast::cluster");
    let (counted, grouped) = (i.has("mbarrier::complete_tx::bytes"), i.has("bulk_group"));
    // The first space is the destination's, the second the source's.
    let [to, from] = i.spaces()[..] else { return i.error("needs a destination and a source space") };
    let reduce = if reducing {
        i.ignore(&["noftz"]);
        let ty = i.ty()?;
        reduction(i, ty, true)?
    } else {
        None
    };
    let completion = match (counted, grouped) {
        (true, false) => Completion::Mbarrier(i.addr(3, Space::SharedCluster)?),
        (false, true) => Completion::Group,
        _ => return i.error("needs .mbarrier::complete_tx::bytes or .bulk_group"),
    };
    let multicast = if multicast { Some(i.src(4, Type::B16)?) } else { None };
    let (to, from, size) = (i.addr(0, to)?, i.addr(1, from)?, i.src(2, Type::U32)?);
    let op = BulkCopy { to, from, size, completion, multicast, reduce };
    Ok(Op::new(move |cx| copy(cx, &op)))
}

/// `st.async`, `red.async`: values to another CTA, whose barrier counts the bytes.
pub fn async_store(i: &mut Ins<'_>) -> Decoded {
    i.ignore(&["async", "relaxed", "weak", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes"]);
    i.ignore(&["v2", "v4"]);
    let ty = i.ty()?;
    let reduce = reduction(i, ty, i.ast.root == "red")?;
    let (to, barrier) = (i.addr(0, Space::SharedCluster)?, i.addr(2, Space::SharedCluster)?);
    let s = i.srcs(1, ty)?;
    Ok(Op::new(move |cx| store(cx, &to, ty, &s, &barrier, reduce)))
}

/// `clusterlaunchcontrol.try_cancel`, also to every CTA of the cluster. Every CTA is launched, so no launch can be cancelled:
/// the response says so.
pub fn try_cancel(i: &mut Ins<'_>) -> Decoded {
    i.ignore(&["try_cancel", "async", "shared::cta", "mbarrier::complete_tx::bytes", "b128"]);
    let all = i.has("multicast::cluster::all");
    let (Operand::Address(_), Operand::Address(_)) = (i.operand(0)?, i.operand(1)?) else {
        return i.error("needs the address of the response and of a barrier");
    };
    let (response, barrier) = (i.addr(0, Space::SharedCta)?, i.addr(1, Space::SharedCta)?);
    Ok(Op::new(move |cx| answer(cx, &response, &barrier, all)))
}

impl Small {
    fn start(self, cx: &mut Cx<'_, '_>) -> Result<()> {
        let Small { to, from, bytes, source, ignore } = self;
        let (dst, src) = (cx.addresses(&to), cx.addresses(&from));
        let m = cx.m;
        let sizes = source.map(|s| cx.w.regs.r32(s, m));
        let ignore = ignore.map_or(0, |p| cx.w.regs.pred(p, m));
        cx.defined()?;
        let mut copies = Vec::new();
        for l in lanes(m) {
            let mut n = sizes.map_or(bytes, |s| s[l]);
            if n > bytes {
                return Err(fault!(Check::Illegal, "cp.async of {bytes} bytes with a source size of {n}")
                    .lane(l as u32));
            }
            if ignore >> l & 1 != 0 {
                n = 0;
            }
            cx.aligned_to(to.space, dst[l], bytes.into(), l)?;
            cx.aligned_to(from.space, src[l], bytes.into(), l)?;
            copies.push((l, cx.allowed(to.space, dst[l], l)?, src[l], n as usize));
        }
        let agent = cx.agent_of_each();
        let op = cx.cl.start_op(&agent, m);
        if cx.w.apart {
            cx.cl.owned(op, &agent);
        }
        cx.w.async_groups.start(GroupKind::CpAsync, m, op);
        let (total, apart) = (bytes as usize, cx.w.apart);
        cx.cl.later(agent, move |cl, me| {
            for (l, to, from, n) in copies {
                let lanes = if apart { Lanes::One(l) } else { Lanes::Any };
                let who = Who { lanes, ..me.who() };
                copy_small(cl, who, to, from, n, total).map_err(|f| f.lane(l as u32))?;
            }
            cl.finish_op(op);
            Ok(())
        });
        Ok(())
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

/// Ranks of the CTAs that a multicast mask names.
pub fn destinations(cl: &Cluster<'_>, mask: u64) -> Result<Vec<u32>> {
    let size = cl.ctas.len() as u32;
    let mask = mask & 0xffff;
    if mask == 0 || mask >> size != 0 {
        return Err(fault!(
            Check::Illegal,
            "multicast mask {mask:#06x} in a cluster of {size} CTAs: each bit names a rank"
        ));
    }
    Ok((0..size).filter(|r| mask >> r & 1 != 0).collect())
}

fn copy(cx: &mut Cx<'_, '_>, op: &BulkCopy) -> Result<()> {
    let BulkCopy { to, from, size, completion, multicast, reduce } = *op;
    let m = cx.m;
    let (dst, src) = (cx.addresses(&to), cx.addresses(&from));
    let size = cx.w.regs.r32(size, m);
    let barriers = match completion {
        Completion::Mbarrier(a) => Some((a.space, cx.addresses(&a))),
        Completion::Group => None,
    };
    let multicast = multicast.map(|s| cx.w.regs.r64(s, m));
    cx.defined()?;
    // Lanes that store the same do it once, as in `tma::store`.
    let once = reduce.is_none() && barriers.is_none();
    for l in lanes(m) {
        let what = |k: usize| (dst[k], src[k], size[k]);
        let alike: u32 = lanes(m).filter(|&k| k == l || once && what(k) == what(l)).map(|k| 1 << k).sum();
        if alike.trailing_zeros() != l as u32 {
            continue;
        }
        let n = size[l];
        if n == 0 || !n.is_multiple_of(16) {
            return Err(fault!(
                Check::Align,
                "a bulk copy of {n} bytes: the size is a multiple of 16, not 0"
            )
            .lane(l as u32));
        }
        cx.aligned_to(to.space, dst[l], 16, l)?;
        cx.aligned_to(from.space, src[l], 16, l)?;
        let (to, from) = (cx.allowed(to.space, dst[l], l)?, cx.allowed(from.space, src[l], l)?);
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
            return Err(fault!(
                Check::Mbarrier,
                "the destination is in rank {to}, its mbarrier in rank {rank}: they must be in one CTA"
            )
            .lane(l as u32));
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
        let moved = Moved { from, to, targets, bytes: n, reduce, signal: signal.map(|s| s.1), op };
        match signal {
            Some(_) => cx.cl.later(agent, move |cl, me| moved.carry_out(cl, me)),
            None => cx.cl.later_store(agent, move |cl, me| moved.carry_out(cl, me)),
        }
    }
    Ok(())
}

/// A bulk copy in flight.
struct Moved {
    from: Place,
    to: Place,
    targets: Vec<Place>,
    bytes: u32,
    reduce: Option<Reduce>,
    /// Where in each target's CTA the bytes are counted.
    signal: Option<u32>,
    /// What a group waits for.
    op: Option<OpId>,
}

impl Moved {
    /// Reads now, writes later.
    fn carry_out(self, cl: &mut Cluster<'_>, me: &Agent) -> Result<()> {
        let Moved { from, to, targets, bytes, reduce, signal, op } = self;
        let data = cl.async_bytes(from, bytes, me)?;
        let writer = op.map_or_else(|| me.clone(), |op| cl.sources_read(op, me));
        let global = matches!(to, Place::Global(_));
        cl.write_later(writer, (global, global && reduce.is_some()), move |cl, me| {
            for at in targets {
                cl.async_reduce(at, &data, reduce, me)?;
                if let (Some(offset), Place::Shared { rank, .. }) = (signal, at) {
                    cl.complete_tx(rank, offset, bytes, me)?;
                }
            }
            if let Some(op) = op {
                cl.finish_op(op);
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
) -> Result<()> {
    let m = cx.m;
    let (dst, barriers) = (cx.addresses(to), cx.addresses(barrier));
    let values: Vec<_> = s.iter().map(|s| cx.w.regs.r64(*s, m)).collect();
    cx.defined()?;
    let width = ty.bytes() as usize;
    for l in lanes(m) {
        let total = width * values.len();
        cx.aligned_to(to.space, dst[l], total as u64, l)?;
        let (rank, offset) = locate(barrier.space, barriers[l]).map_err(|f| f.lane(l as u32))?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v[l].to_le_bytes()[..width].to_vec()).collect();
        let at = place(to.space, dst[l]);
        // Each lane's bytes arrive by themselves, so that a barrier that expects too few of them is told.
        let agent = cx.agent_of(1 << l);
        cx.cl.later(agent, move |cl, me| {
            cl.async_reduce(at, &bytes, reduce, me).map_err(|f| f.lane(l as u32))?;
            cl.complete_tx(rank, offset, bytes.len() as u32, me).map_err(|f| f.lane(l as u32))
        });
    }
    Ok(())
}

fn answer(cx: &mut Cx<'_, '_>, response: &Addr, barrier: &Addr, all: bool) -> Result<()> {
    let (to, barriers) = (cx.addresses(response), cx.addresses(barrier));
    for l in lanes(cx.m) {
        cx.aligned_to(response.space, to[l], 16, l)?;
        let (rank, offset) = cx.barrier_at(barrier.space, barriers[l], l)?;
        let Place::Shared { offset: at, .. } = cx.allowed(response.space, to[l], l)? else { continue };
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
    Ok(())
}
