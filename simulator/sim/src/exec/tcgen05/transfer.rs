//! Moving data between registers, shared memory and tensor memory: `tcgen05.ld`, `st`, `cp`.

use super::super::*;
use super::{TensorWho, group, tmem};
use crate::machine::regs::Lock;
use crate::memory::tmem::COLUMNS;
use crate::semantics::misuse::require;
use crate::semantics::narrow::Narrow;
use crate::semantics::smem_desc::SmemDesc;
use crate::semantics::tcgen05::{AccessShape, Cell, CopyShape, SHIFT_COLUMNS, SHIFT_LANES};

/// A decoded load from or store to tensor memory.
#[derive(Debug, Clone)]
pub struct Access {
    pub shape: AccessShape,
    pub regs: Vec<Reg>,
    pub address: Addr,
    /// Two 16-bit values to a register.
    pub packed: bool,
}

/// `tcgen05.cp`, with the source format of elements that are widened to bytes.
pub fn copy(i: &mut Ins<'_>) -> Decoded {
    let warps = i.one_of(&[("warpx2::02_13", 0), ("warpx2::01_23", 1), ("warpx4", 2)]);
    let shape = i.need(
        "a shape",
        &[("128x256b", 0), ("4x256b", 1), ("128x128b", 2), ("64x128b", 3), ("32x128b", 4)],
    )?;
    let shape = match (shape, warps) {
        (0, None) => CopyShape::S128x256b,
        (1, None) => CopyShape::S4x256b,
        (2, None) => CopyShape::S128x128b,
        (3, Some(0)) => CopyShape::S64x128bWarps02And13,
        (3, Some(1)) => CopyShape::S64x128bWarps01And23,
        (4, Some(2)) => CopyShape::S32x128bWarpx4,
        _ => return i.error("this shape and warp multicast do not go together"),
    };
    let narrow = i.one_of(Narrow::NAMES);
    if narrow.is_some() != i.has("b8x16") {
        return i.error("a source format and .b8x16 go together");
    }
    let (group, to, desc) = (group(i)?, tmem(i, 0)?, i.src(1, Type::B64)?);
    Ok(Op::new(move |cx| execute_copy(cx, group, (shape, narrow), &to, desc)))
}

pub fn access(i: &mut Ins<'_>, regs: usize, address: usize, pack: &str) -> Decoded<Access> {
    i.ignore(&["b32"]);
    let packed = i.has(pack);
    let counts = i.parse_all(|m| m.strip_prefix('x').and_then(|n| n.parse::<u32>().ok()));
    let [n] = counts[..] else { return i.error("needs a repetition such as .x8") };
    let shape = i.need(
        "a shape",
        &[
            ("32x32b", AccessShape::S32x32b),
            ("16x64b", AccessShape::S16x64b),
            ("16x128b", AccessShape::S16x128b),
            ("16x256b", AccessShape::S16x256b),
            ("16x32bx2", AccessShape::S16x32bx2 { split: 0 }),
        ],
    )?;
    let shape = match shape {
        AccessShape::S16x32bx2 { .. } => {
            // The distance of the second half stands after the address.
            let split = i.constant(address + 1)?;
            if split > COLUMNS {
                return i.error(format!("the second half is {split} columns behind: there are {COLUMNS}"));
            }
            AccessShape::S16x32bx2 { split }
        }
        other => other,
    };
    let list = i.regs(regs)?;
    let want = shape.registers(n) as usize;
    if list.len() != want || list.iter().any(|r| r.bits() != 32) {
        return i.error(format!("has {} registers, needs {want} of 32 bits", list.len()));
    }
    Ok(Access { shape, regs: list, address: tmem(i, address)?, packed })
}

/// Cells of register `r` of every thread: one, or two for packed halves.
fn cells(op: &Access, base: Cell, thread: u32, r: u32) -> Vec<Cell> {
    if op.packed {
        op.shape.packed_cells(thread, r).map(|c| base + c).to_vec()
    } else {
        vec![base + op.shape.cell(thread, r)]
    }
}

/// Checks all cells of an access.
fn touch(
    cl: &mut Cluster<'_>,
    rank: u32,
    op: &Access,
    base: Cell,
    kind: Kind,
    who: &TensorWho,
) -> Result<()> {
    let n = op.regs.len() as u32;
    if op.shape == AccessShape::S32x32b && !op.packed {
        // A thread's cells are one run of columns.
        return (0..32).try_for_each(|t| cl.touch_tmem(rank, base + op.shape.cell(t, 0), n, kind, who));
    }
    for t in 0..32 {
        for r in 0..n {
            for c in cells(op, base, t, r) {
                cl.touch_tmem(rank, c, 1, kind, who)?;
            }
        }
    }
    Ok(())
}

/// `tcgen05.ld`. With [`Checks::strict`](crate::Checks::strict) the registers belong to it until
/// `tcgen05.wait::ld`.
pub fn load(op: &Arc<Access>, cx: &mut Cx<'_, '_>) -> Result<()> {
    let base = cx.cell(&op.address)?;
    op.shape.check_base(base, cx.w.index)?;
    // A register that another operation in flight owns cannot be a target.
    for r in &op.regs {
        cx.w.regs.w32(crate::program::Dst::Reg(*r), FULL, &[0; 32]);
    }
    cx.defined()?;
    if !cx.cl.launch.config.checks.strict {
        // As on chips, where a use of the registers waits for them: no later than the read of a thread.
        let who = cx.tensor_who((cx.g.actor, cx.w.clock), &cx.g.known.joined(cx.m), false);
        let rows = read(cx.cl, cx.cta as u32, op, base, &who)?;
        for (reg, row) in op.regs.iter().zip(&rows) {
            cx.w.regs.set_row32(*reg, row);
        }
        return Ok(());
    }
    // It takes nothing of the lanes, so the wait for it orders none of their accesses.
    let agent = cx.cl.agent(cx.cta, cx.w, cx.g, 0);
    let who = cx.tensor_who((agent.actor, agent.clock), &agent.view, false);
    let id = cx.cl.start_op(&agent, cx.m);
    cx.w.async_groups.start(GroupKind::TmemLoad, cx.m, id);
    // Moves of the registers before the wait take what the load will find, for nothing may write it meanwhile.
    let rows = values(cx.cl, cx.cta as u32, op, base);
    for (r, row) in op.regs.iter().zip(&rows) {
        cx.w.regs.set_row32(*r, row);
        cx.w.regs.lock(*r, Lock::Loaded);
        cx.w.wgmma.held.push((id, *r, true, cx.pc));
    }
    let (op, rank, warp) = (op.clone(), cx.cta as u32, cx.w.index as usize);
    cx.cl.later(agent, move |cl, _| {
        let rows = read(cl, rank, &op, base, &who)?;
        if let Some(w) = cl.warps[rank as usize][warp].as_mut() {
            for (reg, row) in op.regs.iter().zip(&rows) {
                w.regs.set_row32(*reg, row);
            }
        }
        cl.finish_op(id);
        Ok(())
    });
    Ok(())
}

/// The registers a load fills.
fn read(cl: &mut Cluster<'_>, rank: u32, op: &Access, base: Cell, who: &TensorWho) -> Result<Vec<[u32; 32]>> {
    touch(cl, rank, op, base, Kind::READ, who)?;
    Ok(values(cl, rank, op, base))
}

fn values(cl: &Cluster<'_>, rank: u32, op: &Access, base: Cell) -> Vec<[u32; 32]> {
    let tmem = &cl.ctas[rank as usize].tmem;
    let mut rows = vec![[0u32; 32]; op.regs.len()];
    for (r, row) in rows.iter_mut().enumerate() {
        for (t, value) in row.iter_mut().enumerate() {
            let c = cells(op, base, t as u32, r as u32);
            *value = match c[..] {
                [low, high] => {
                    tmem.get(low.lane, low.column) & 0xffff | tmem.get(high.lane, high.column) << 16
                }
                _ => tmem.get(c[0].lane, c[0].column),
            };
        }
    }
    rows
}

/// `tcgen05.st`: values are taken at issue, visible after `tcgen05.wait::st`.
pub fn store(op: &Arc<Access>, cx: &mut Cx<'_, '_>) -> Result<()> {
    let base = cx.cell(&op.address)?;
    op.shape.check_base(base, cx.w.index)?;
    let rows: Vec<_> = op.regs.iter().map(|r| cx.w.regs.r32(Src::Reg(*r), FULL)).collect();
    cx.defined()?;
    let agent = cx.agent();
    let who = cx.tensor_who((agent.actor, agent.clock), &agent.view, false);
    let id = cx.cl.start_op(&agent, cx.m);
    cx.w.async_groups.start(GroupKind::TmemStore, cx.m, id);
    let (op, rank) = (op.clone(), cx.cta as u32);
    cx.cl.later(agent, move |cl, _| {
        touch(cl, rank, &op, base, Kind::WRITE, &who)?;
        let tmem = &mut cl.ctas[rank as usize].tmem;
        for (r, row) in rows.iter().enumerate() {
            for (t, value) in row.iter().enumerate() {
                let c = cells(&op, base, t as u32, r as u32);
                match c[..] {
                    [low, high] => {
                        tmem.set(low.lane, low.column, value & 0xffff);
                        tmem.set(high.lane, high.column, value >> 16);
                    }
                    _ => tmem.set(c[0].lane, c[0].column, *value),
                }
            }
        }
        cl.finish_op(id);
        Ok(())
    });
    Ok(())
}

/// `tcgen05.wait`: everything of this kind is complete.
pub fn wait(cx: &mut Cx<'_, '_>, kind: GroupKind) -> Result {
    cx.w.async_groups.commit(kind, cx.m);
    cx.wait_registers(kind, 0)
}

/// `tcgen05.cp`: rows of shared memory to lanes of tensor memory.
fn execute_copy(
    cx: &mut Cx<'_, '_>,
    group: u32,
    (shape, narrow): (CopyShape, Option<Narrow>),
    to: &Addr,
    desc: Src,
) -> Result<()> {
    cx.single()?;
    let base = cx.cell(to)?;
    let desc = SmemDesc::decode_tcgen05(cx.uniform(desc, "the descriptor")?)?;
    cx.cl.ctas[cx.cta].tmem.use_group(group)?;
    let ranks = cx.pair(group)?;
    let (agent, who) = cx.tensor_agent();
    cx.cl.on_tensor_core(cx.cta, agent, move |cl, me| {
        // Each CTA of a pair copies from its own shared to its own tensor memory.
        for rank in ranks {
            for row in 0..shape.rows() {
                for chunk in 0..shape.chunks() {
                    let mut bytes = [0; 16];
                    let source = &mut bytes[..narrow.map_or(16, Narrow::packed_bytes)];
                    let from = Place::Shared { rank, offset: desc.k_major(row, chunk) };
                    cl.async_read(from, source, me)?;
                    if let Some(narrow) = narrow {
                        bytes = narrow.widen(bytes, narrow.tensor_shift());
                    }
                    for lane in shape.lanes(row) {
                        let cell = base + Cell { lane, column: 4 * chunk };
                        cl.touch_tmem(rank, cell, 4, Kind::WRITE, &who)?;
                        for (i, word) in bytes.chunks_exact(4).enumerate() {
                            let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                            cl.ctas[rank as usize].tmem.set(cell.lane, cell.column + i as u32, word);
                        }
                    }
                }
            }
        }
        Ok(())
    });
    Ok(())
}

/// `tcgen05.shift`: each row of 32 lanes takes the 32 bytes of the row after it; the last keeps its own.
pub fn shift(cx: &mut Cx<'_, '_>, group: u32, at: &Addr) -> Result<()> {
    cx.single()?;
    let base = cx.cell(at)?;
    let aligned = base.lane.is_multiple_of(SHIFT_LANES);
    require(aligned, "tcgen05.shift", "lane of the address", base.lane as u64, "it is a multiple of 32")?;
    cx.cl.ctas[cx.cta].tmem.use_group(group)?;
    let ranks = cx.pair(group)?;
    let (agent, who) = cx.tensor_agent();
    cx.cl.on_tensor_core(cx.cta, agent, move |cl, _| {
        for rank in ranks {
            let cell = |row: u32| Cell { lane: base.lane + row, column: base.column };
            for row in 0..SHIFT_LANES - 1 {
                cl.touch_tmem(rank, cell(row + 1), SHIFT_COLUMNS, Kind::READ, &who)?;
                cl.touch_tmem(rank, cell(row), SHIFT_COLUMNS, Kind::WRITE, &who)?;
                let tmem = &mut cl.ctas[rank as usize].tmem;
                for column in base.column..base.column + SHIFT_COLUMNS {
                    let next = tmem.get(base.lane + row + 1, column);
                    tmem.set(base.lane + row, column, next);
                }
            }
        }
        Ok(())
    });
    Ok(())
}
