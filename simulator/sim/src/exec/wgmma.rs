//! `wgmma`: the four warps of a warpgroup issue an operation one by one; it is carried out as one, later. Each warp
//! has 16 rows of the 64. PTX ISA 9.7.15.

use super::mma::{collect, gather, shape_of, spread, sums, types, width};
use super::operand::Matrix;
use super::*;
use crate::machine::groups::{OpId, Share};
use crate::machine::regs::Lock;
use crate::semantics::dot::{Family, Generation, Product, Shape};
use crate::semantics::element::Element;
use crate::semantics::fragment::{fragment_a, fragment_c};
use crate::semantics::instr_desc::Accumulator;
use crate::semantics::smem_desc::{Major, SmemDesc};

const WARPS: usize = 4;

#[derive(Debug, Clone)]
pub enum A {
    Descriptor(Src, Major),
    /// Four registers.
    Registers(Vec<Reg>),
}

/// A decoded `wgmma.mma_async`.
#[derive(Debug, Clone)]
pub struct Multiply {
    /// Columns of D.
    pub n: u32,
    /// Depth.
    pub k: u32,
    /// The type of D.
    pub sums: Accumulator,
    pub elements: [Element; 2],
    /// `.satfinite` of integers.
    pub saturate: bool,
    /// Accumulator registers.
    pub d: Vec<Reg>,
    pub a: A,
    pub b: Src,
    /// Which dimension of B is contiguous.
    pub b_major: Major,
    /// Whether D is added.
    pub scale_d: Src,
    /// Signs of A and B.
    pub negate: [bool; 2],
}

pub fn decode(i: &mut Ins<'_>) -> Decoded {
    i.ignore(&["sync", "aligned"]);
    if i.has("fence") {
        return Ok(Op::aligned(|cx| {
            cx.w.regs.fence();
            cx.w.wgmma.fenced = true;
        }));
    }
    if i.has("commit_group") {
        return Ok(Op::aligned(|cx| cx.w.async_groups.commit(GroupKind::Wgmma, cx.m)));
    }
    if i.has("wait_group") {
        let n = i.constant(0)?;
        return Ok(Op::aligned(move |cx| cx.wait_registers(GroupKind::Wgmma, n)));
    }
    i.need("an operation", &[("mma_async", ())])?;
    let op = Arc::new(multiply(i)?);
    Ok(Op::aligned(move |cx| issue(&op, cx)))
}

fn sign(i: &Ins<'_>, at: usize) -> Decoded<bool> {
    match i.src(at, Type::S32)? {
        Src::Imm(1) => Ok(false),
        Src::Imm(n) if n == u64::from(u32::MAX) => Ok(true),
        _ => i.error("the sign of a matrix is 1 or -1"),
    }
}

fn major(i: &Ins<'_>, at: usize) -> Decoded<Major> {
    match i.src(at, Type::S32)? {
        Src::Imm(0) => Ok(Major::K),
        Src::Imm(1) => Ok(Major::Mn),
        _ => i.error("transposition is 0 or 1"),
    }
}

fn multiply(i: &mut Ins<'_>) -> Decoded<Multiply> {
    let saturate = i.has("satfinite");
    let [m, n, k] = shape_of(i)?;
    let [d, a, b] = types(i)[..] else { return i.error("needs the types of D, A and B") };
    let (sums, elements) = sums(i, [d, a, b])?;
    if m != 64 || k * elements[0].bits() != 256 || n % 8 != 0 || !(8..=256).contains(&n) {
        return i.error(format!("shape m{m}n{n}k{k}: M is 64, N a multiple of 8 up to 256, K 256 bits"));
    }
    let regs = i.regs(0)?;
    let want = (n * sums.bits() / 64) as usize;
    if regs.len() != want {
        return i.error(format!("has {} accumulator registers, needs {want}", regs.len()));
    }
    let integer = sums == Accumulator::S32;
    let in_registers = matches!(i.operand(1)?, Operand::Vector(_));
    let half = elements[0].bits() == 16;
    let negate = if integer { [false; 2] } else { [sign(i, 4)?, sign(i, 5)?] };
    let transposed = half && i.count() > 6;
    let (a, b_major) = if in_registers {
        let a = i.regs(1)?;
        if a.len() != 4 {
            return i.error("A in registers takes four");
        }
        (A::Registers(a), if transposed { major(i, 6)? } else { Major::K })
    } else {
        let (ta, tb) = if transposed { (major(i, 6)?, major(i, 7)?) } else { (Major::K, Major::K) };
        (A::Descriptor(i.src(1, Type::B64)?, ta), tb)
    };
    let registers = match &a {
        A::Registers(a) => a.as_slice(),
        A::Descriptor(..) => &[],
    };
    if regs.iter().chain(registers).any(|r| r.bits() != 32) {
        return i.error("matrix registers have 32 bits");
    }
    Ok(Multiply {
        n,
        k,
        sums,
        elements,
        saturate,
        d: regs,
        a,
        b: i.src(2, Type::B64)?,
        b_major,
        scale_d: i.src(3, Type::Pred)?,
        negate,
    })
}

fn issue(op: &Arc<Multiply>, cx: &mut Cx<'_, '_>) -> Result<()> {
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
    cx.defined()?;
    let a_desc = a.map(SmemDesc::decode_wgmma).transpose()?;
    let b_desc = SmemDesc::decode_wgmma(b)?;
    let warps = cx.cl.warps_per_cta() - cx.w.index as usize / WARPS * WARPS;
    if warps < WARPS {
        return Err(fault!(Check::Illegal, "the warpgroup has {warps} warps: all {WARPS} multiply together"));
    }
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
            return Err(fault!(
                Check::InFlight,
                "register {} was written after the last wgmma.fence",
                cx.cl.launch.kernel.register(reg)
            )
            .help("execute wgmma.fence.sync.aligned between writing registers and wgmma.mma_async"));
        }
        let used = !is_d || scale_d;
        let lock = cx.w.regs.lock_of(reg);
        let in_flight = if is_d { lock == Lock::Source } else { lock == Lock::Target };
        if in_flight {
            let holder = cx.w.wgmma.held.iter().find(|h| h.1 == reg).map(|h| h.3);
            return Err(fault!(
                Check::InFlight,
                "register {} is used by another wgmma.mma_async in flight",
                cx.cl.launch.kernel.register(reg)
            )
            .party(Party::new("in flight", holder))
            .help("wait for the group with wgmma.wait_group first"));
        }
        if used && lock == Lock::Free && cx.w.regs.unwritten(Src::Reg(reg)) != 0 {
            cx.w.regs.r32(Src::Reg(reg), FULL);
            return cx.defined();
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
    Ok(())
}

/// Adds this warp's share of an operation of the warpgroup, which starts with the last share.
fn share(
    op: &Arc<Multiply>,
    cx: &mut Cx<'_, '_>,
    a: Option<SmemDesc>,
    b: SmemDesc,
    scale_d: bool,
) -> Result<OpId> {
    let group = cx.w.index as usize / 4;
    let warpgroup = &cx.cl.ctas[cx.cta].warpgroups[group];
    let at = (cx.w.wgmma.issued - warpgroup.issued) as usize;
    let first = warpgroup.open.get(at).map(|(b, shares)| (*b, shares[0].agent.clone()));
    let agent = match first {
        None => cx.agent(),
        Some((other, first)) if first.pc != cx.pc || other != b => {
            let what = if other == b { "another wgmma.mma_async" } else { "another descriptor of B" };
            return Err(fault!(
                Check::Illegal,
                "warp {} of the warpgroup has {what} here than warp {}",
                first.warp,
                cx.w.index
            )
            .party(Party::new(format!("warp {}", first.warp), first.pc))
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
    if warpgroup.open[at].1.len() == WARPS
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
        cl.finish_op(id);
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
            let (row, kk) = fragment_a(bits, (16, op.k), l, i);
            row as usize * k + kk as usize
        })
    });
    if op.negate[0] {
        a.iter_mut().for_each(|x| *x = -*x);
    }
    let place = |l, i| {
        let (row, col) = fragment_c((16, op.n), l, i);
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
    let d = collect(&product.of(&a, b, &c), bits, op.d.len(), place, |bits| bits);
    for (r, v) in op.d.iter().zip(&d) {
        w.regs.set_row32(*r, v);
    }
}
