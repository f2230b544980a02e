//! `wgmma`: the four warps of a warpgroup issue an operation one by one; it is carried out as one, later. Each warp
//! has 16 rows of the 64.

use super::mma::{collect, gather, spread, width};
use super::operand::Matrix;
use super::*;
use crate::decode::wgmma::{A, Multiply, Wgmma};
use crate::machine::groups::{OpId, Share};
use crate::machine::regs::Lock;
use crate::machine::warp::Warp;
use crate::semantics::dot::{Family, Generation, Product, Shape};
use crate::semantics::fragment::{wgmma_a, wgmma_d};
use crate::semantics::smem_desc::SmemDesc;

pub fn execute(op: &Wgmma, cx: &mut Cx<'_, '_>) -> Result {
    if let Some(flow) = cx.aligned()? {
        return Ok(flow);
    }
    match op {
        Wgmma::Fence => {
            cx.w.regs.fence();
            cx.w.wgmma.fenced = true;
            Ok(Flow::Next)
        }
        Wgmma::Commit => {
            cx.w.async_groups.commit(GroupKind::Wgmma, cx.m);
            Ok(Flow::Next)
        }
        Wgmma::Wait(n) => {
            let waited = cx.w.async_groups.must_finish(GroupKind::Wgmma, cx.m, *n);
            let flow = cx.wait_groups(GroupKind::Wgmma, *n)?;
            if flow == Flow::Next {
                cx.w.release_registers(&waited);
            }
            Ok(flow)
        }
        Wgmma::Multiply(op) => issue(op, cx),
    }
}

fn issue(op: &Multiply, cx: &mut Cx<'_, '_>) -> Result {
    let scale_d = match cx.w.regs.pred(op.scale_d, FULL) {
        0 => false,
        FULL => true,
        _ => return Err(Fault::new(Check::Illegal, "scale-d must be the same in all lanes")),
    };
    let a = match op.a {
        A::Descriptor(s, _) => Some(cx.uniform(s, "the descriptor of A")?),
        A::Registers(_) => None,
    };
    let b = cx.uniform(op.b, "the descriptor of B")?;
    if cx.w.regs.bad.is_some() {
        return Ok(Flow::Next);
    }
    let a_desc = match a {
        Some(bits) => Some(SmemDesc::decode_wgmma(bits)?),
        None => None,
    };
    let b_desc = SmemDesc::decode_wgmma(b)?;
    if !cx.w.wgmma.fenced {
        return Err(Fault::new(Check::InFlight, "wgmma.mma_async before any wgmma.fence")
            .help("execute wgmma.fence.sync.aligned before the first wgmma.mma_async"));
    }
    let a_regs: &[Reg] = match &op.a {
        A::Registers(regs) => regs,
        A::Descriptor(..) => &[],
    };
    for (reg, is_d) in op.d.iter().map(|r| (*r, true)).chain(a_regs.iter().map(|r| (*r, false))) {
        if cx.w.regs.written_since_fence(reg) {
            let text = format!(
                "register {} was written after the last wgmma.fence",
                cx.cl.launch.kernel.register(reg)
            );
            return Err(Fault::new(Check::InFlight, text)
                .help("execute wgmma.fence.sync.aligned between writing registers and wgmma.mma_async"));
        }
        let used = !is_d || scale_d;
        let lock = cx.w.regs.lock_of(reg);
        let in_flight = if is_d { lock == Lock::Source } else { lock == Lock::Target };
        if in_flight {
            let holder = cx.w.wgmma.held.iter().find(|h| h.1 == reg).map(|h| h.3);
            let text = format!(
                "register {} is used by another wgmma.mma_async in flight",
                cx.cl.launch.kernel.register(reg)
            );
            return Err(Fault::new(Check::InFlight, text)
                .party(Party { role: "in flight".into(), pc: holder, cta: None, warp: None })
                .help("wait for the group with wgmma.wait_group first"));
        }
        if used && lock == Lock::Free && cx.w.regs.unwritten(Src::Reg(reg)) != 0 {
            cx.w.regs.r32(Src::Reg(reg), FULL);
            return Ok(Flow::Next);
        }
    }
    let id = share(op, cx, a_desc, b_desc, scale_d)?;
    for (regs, target) in [(op.d.as_slice(), true), (a_regs, false)] {
        for &reg in regs {
            cx.w.wgmma.held.push((id, reg, target, cx.pc));
            if target || cx.w.regs.lock_of(reg) == Lock::Free {
                cx.w.regs.lock(reg, if target { Lock::Target } else { Lock::Source });
            }
        }
    }
    let ops = 2 * 16 * u64::from(op.n) * u64::from(op.k);
    cx.cl.counters.tensor(width(op.elements[0]), ops);
    Ok(Flow::Next)
}

/// Adds this warp's share of an operation of the warpgroup, which starts with the last share.
fn share(
    op: &Multiply,
    cx: &mut Cx<'_, '_>,
    a: Option<SmemDesc>,
    b: SmemDesc,
    scale_d: bool,
) -> Result<OpId> {
    let (group, members) = (cx.w.index as usize / 4, cx.cl.warpgroup_members(cx.cta, cx.w.index));
    let warpgroup = &cx.cl.ctas[cx.cta].warpgroups[group];
    let at = (cx.w.wgmma.issued - warpgroup.issued) as usize;
    let first = warpgroup.open.get(at).map(|(b, shares)| (*b, shares[0].agent.clone()));
    let agent = match first {
        None => cx.agent(),
        Some((other, first)) if first.pc != cx.pc || other != b => {
            let what = if other == b { "another wgmma.mma_async" } else { "another descriptor of B" };
            return Err(Fault::new(
                Check::Illegal,
                format!("warp {} of the warpgroup has {what} here than warp {}", first.warp, cx.w.index),
            )
            .party(Party { role: format!("warp {}", first.warp), pc: Some(first.pc), cta: None, warp: None })
            .help("all four warps of a warpgroup execute the same wgmma.mma_async"));
        }
        Some((_, first)) => Agent { warp: cx.w.index, view: cx.w.publish(cx.g, cx.m), ..first },
    };
    let id = cx.cl.start_op(&agent, cx.m);
    cx.w.async_groups.start(GroupKind::Wgmma, cx.m, id);
    cx.w.wgmma.issued += 1;
    let warpgroup = &mut cx.cl.ctas[cx.cta].warpgroups[group];
    if at == warpgroup.open.len() {
        warpgroup.open.push_back((b, Vec::new()));
    }
    warpgroup.open[at].1.push(Share { agent: agent.clone(), id, a, scale_d });
    if warpgroup.open[at].1.len() == members
        && let Some((_, shares)) = warpgroup.open.remove(at)
    {
        warpgroup.issued += 1;
        // Matrix operations of a warpgroup complete in order.
        let earliest = warpgroup.busy_until + 1;
        let due = cx.cl.due().max(earliest);
        cx.cl.ctas[cx.cta].warpgroups[group].busy_until = due;
        let op = op.clone();
        cx.cl.engine.push(due, agent, false, Box::new(move |cl, _| carry_out(&op, b, shares, cl)));
    }
    Ok(id)
}

/// Computes an operation that all warps of the warpgroup have issued.
fn carry_out(op: &Multiply, b: SmemDesc, shares: Vec<Share>, cl: &mut Cluster<'_>) -> Result<()> {
    let Some(last) = shares.last() else { return Ok(()) };
    let mut all = last.agent.clone();
    // B is read for all warps: what precedes the operation is what all of them know.
    shares.iter().for_each(|s| Arc::make_mut(&mut all.view).meet(&s.agent.view));
    let [a_element, b_element] = op.elements;
    let b = Matrix { rank: all.cta, desc: b, major: op.b_major, element: b_element, padded: false };
    let mut b = b.read(cl, 0, op.n, op.k, &all)?;
    if op.negate[1] {
        b.iter_mut().for_each(|x| *x = -*x);
    }
    let generation = cl.launch.kernel.generation;
    for Share { agent, id, a, scale_d } in shares {
        let a = match (&op.a, a) {
            (A::Descriptor(_, major), Some(desc)) => {
                let a = Matrix { rank: agent.cta, desc, major: *major, element: a_element, padded: false };
                Some(a.read(cl, 16 * (agent.warp % 4), 16, op.k, &agent)?)
            }
            _ => None,
        };
        if let Some(w) = cl.warps[agent.cta as usize][agent.warp as usize].as_mut() {
            compute(op, w, generation, a, &b, scale_d);
        }
        cl.finish_op(id, true);
    }
    Ok(())
}

/// Computes the rows of one warp; the fragment functions count them from its first.
fn compute(
    op: &Multiply,
    w: &mut Warp,
    generation: Generation,
    a: Option<Vec<f32>>,
    b: &[f32],
    scale_d: bool,
) {
    let [n, k] = [op.n, op.k].map(|v| v as usize);
    let rows = |regs: &[Reg]| regs.iter().map(|r| w.regs.row32(*r)).collect::<Vec<_>>();
    let mut a = a.unwrap_or_else(|| {
        let A::Registers(regs) = &op.a else { return Vec::new() };
        let bits = op.elements[0].bits();
        gather(&rows(regs), bits, op.elements[0], 16 * k, |l, i| {
            let (row, kk) = wgmma_a(bits, 0, l, i);
            row as usize * k + kk as usize
        })
    });
    if op.negate[0] {
        a.iter_mut().for_each(|x| *x = -*x);
    }
    let place = |l, i| {
        let (row, col) = wgmma_d(0, l, i);
        row as usize * n + col as usize
    };
    let bits = op.sums.bits();
    let c = match scale_d {
        true => spread(&rows(&op.d), bits, 16 * n, place, |bits| bits as u32),
        false => vec![0; 16 * n],
    };
    let product = Product {
        generation,
        family: Family::Wgmma,
        shape: Shape { m: 16, n, k },
        element: op.elements[0],
        c: op.sums,
        d: op.sums,
        saturate: op.saturate,
        halved: 0,
        scales: None,
    };
    let d = collect(&product.of(&a, b, &c), bits, op.d.len(), place, u64::from);
    for (r, v) in op.d.iter().zip(d) {
        w.regs.set_row32(*r, &v.map(|v| v as u32));
    }
}
