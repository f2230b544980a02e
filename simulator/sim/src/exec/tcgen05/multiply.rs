//! `tcgen05.mma`.

use super::super::mma::{Decoder, width};
use super::super::operand::Matrix;
use super::super::*;
use super::{TensorWho, group, tmem};
use crate::semantics::dot::{BlockScales, Family, Product, Shape};
use crate::semantics::element::Scale;
use crate::semantics::instr_desc::{InstrDesc, Kind as MmaKind};
use crate::semantics::smem_desc::{Major, SmemDesc, check_tcgen05_layout};
use crate::semantics::tcgen05::{Cell, DataPath, operand_rows, scale, scale_b_half};

/// Where A of a product comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum A {
    Descriptor(Src),
    Tmem(Addr),
}

/// A decoded `tcgen05.mma`.
#[derive(Debug, Clone)]
pub struct Multiply {
    /// `.cta_group::N`
    pub group: u32,
    pub kind: MmaKind,
    /// Accumulator address.
    pub d: Addr,
    pub a: A,
    pub b: Src,
    pub idesc: Src,
    /// Addresses of the scales of A and B, and scales in a row of 32 bits (`scale_vec::NX`).
    pub scales: Option<(Addr, Addr, u32)>,
    /// Whether D is added.
    pub accumulate: Src,
    /// Lanes whose results are dropped.
    pub disabled: Vec<Src>,
    /// D is scaled by 2^-this first.
    pub scale_d: u32,
}

pub fn decode(i: &mut Ins<'_>) -> Decoded<Multiply> {
    let group = group(i)?;
    let kind = i.need("a kind", MmaKind::NAMES)?;
    let scaled = i.has("block_scale");
    // Whether a buffer keeps A changes no value.
    i.ignore_if(|m| m.starts_with("collector::"));
    let vec = i.one_of(&[
        ("scale_vec::1X", 1),
        ("scale_vec::2X", 2),
        ("scale_vec::4X", 4),
        ("block32", if kind == MmaKind::Mxf8f6f4 { 1 } else { 2 }),
        ("block16", 4),
    ]);
    if scaled != kind.block_scaled() {
        return i.error("the kind and .block_scale do not go together");
    }
    let a = match i.operand(1)? {
        Operand::Address(_) => A::Tmem(tmem(i, 1)?),
        _ => A::Descriptor(i.src(1, Type::B64)?),
    };
    let mut op = Multiply {
        group,
        kind,
        d: tmem(i, 0)?,
        a,
        b: i.src(2, Type::B64)?,
        idesc: i.src(3, Type::B32)?,
        scales: None,
        accumulate: Src::Imm(1),
        disabled: Vec::new(),
        scale_d: 0,
    };
    let mut at = 4;
    if scaled {
        let default = if kind == MmaKind::Mxf8f6f4 { 1 } else { 2 };
        op.scales = Some((tmem(i, 4)?, tmem(i, 5)?, vec.unwrap_or(default)));
        at = 6;
    } else if matches!(i.operand(4)?, Operand::Vector(_)) {
        op.disabled = i.srcs(4, Type::B32)?;
        at = 5;
    }
    op.accumulate = i.src(at, Type::Pred)?;
    if i.count() > at + 1 {
        op.scale_d = i.constant(at + 1)?;
    }
    Ok(op)
}

/// Everything an operation needs when it is carried out.
struct Work {
    op: Arc<Multiply>,
    desc: InstrDesc,
    path: DataPath,
    ranks: Vec<u32>,
    d: Cell,
    a: Place,
    b: SmemDesc,
    scales: Option<(Cell, Cell, u32)>,
    accumulate: bool,
    disabled: Vec<u32>,
}

#[derive(Clone, Copy)]
enum Place {
    Shared(SmemDesc),
    Tmem(Cell),
}

/// Issues a product.
pub fn issue(op: &Arc<Multiply>, cx: &mut Cx<'_, '_>) -> Result<()> {
    cx.single()?;
    let lane = cx.first_lane() as usize;
    let idesc = cx.uniform(op.idesc, "the instruction descriptor")? as u32;
    let desc = InstrDesc::decode(idesc, op.kind, op.group)?;
    let d = cx.cell(&op.d)?;
    let path = DataPath::new(desc.m, op.group);
    path.check_base(d)?;
    let layout = |cx: &mut Cx<'_, '_>, s, bits, major| -> Result<SmemDesc> {
        let desc = SmemDesc::decode_tcgen05(cx.uniform(s, "the descriptor")?)?;
        check_tcgen05_layout(bits, major, desc.swizzle)?;
        Ok(desc)
    };
    let a = match &op.a {
        A::Descriptor(s) => Place::Shared(layout(cx, *s, desc.a.bits(), desc.a_major)?),
        A::Tmem(a) => Place::Tmem(cx.cell(a)?),
    };
    let b = layout(cx, op.b, desc.b.bits(), desc.b_major)?;
    let scales = match &op.scales {
        Some((sa, sb, vec)) => Some((cx.cell(sa)?, cx.cell(sb)?, *vec)),
        None => None,
    };
    let accumulate = cx.w.regs.pred(op.accumulate, cx.m) >> lane & 1 != 0;
    let mut disabled = Vec::new();
    for s in &op.disabled {
        disabled.push(cx.w.regs.r32(*s, cx.m)[lane]);
    }
    cx.defined()?;
    cx.cl.ctas[cx.cta].tmem.use_group(op.group)?;
    let ranks = cx.pair(op.group)?;
    let ops = 2 * u64::from(desc.m) * u64::from(desc.n) * u64::from(desc.k);
    cx.cl.counters.tensor(width(desc.a), ops);
    let (agent, who) = cx.tensor_agent();
    let work = Work { op: op.clone(), desc, path, ranks, d, a, b, scales, accumulate, disabled };
    cx.cl.on_tensor_core(cx.cta, agent, move |cl, me| carry_out(&work, cl, me, &who));
    Ok(())
}

fn carry_out(w: &Work, cl: &mut Cluster<'_>, me: &Agent, who: &TensorWho) -> Result<()> {
    let InstrDesc { m, n, k, .. } = w.desc;
    let (a, b) = operands(w, cl, me, who)?;
    // Every row of D is read and written, wherever its lane is.
    let columns = w.path.accumulator_columns(n);
    for &rank in &w.ranks {
        let index = rank - w.ranks[0];
        for row in lanes_of(w, index) {
            let cell = Cell { lane: row, column: w.d.column };
            if w.accumulate {
                cl.touch_tmem(rank, cell, columns, Kind::READ, who)?;
            }
            cl.touch_tmem(rank, cell, columns, Kind::WRITE, who)?;
        }
    }
    let place = |row: u32, col: u32| {
        let (cta, cell) = w.path.accumulator(n, row, col);
        (w.ranks[cta as usize] as usize, w.d + cell)
    };
    let shape = Shape { m: m as usize, n: n as usize, k: k as usize };
    let old: Vec<u32> = (0..m * n)
        .map(|i| {
            let (rank, cell) = place(i / n, i % n);
            if w.accumulate { cl.ctas[rank].tmem.get(cell.lane, cell.column) } else { 0 }
        })
        .collect();
    let generation = cl.launch.kernel.generation;
    let factors = match w.scales {
        None => None,
        Some((a, b, vec)) => Some((
            scale_factors(w, cl, who, (a, true), vec)?,
            scale_factors(w, cl, who, (b, false), vec)?,
            vec,
        )),
    };
    let scales = factors.as_ref().map(|(a, b, vec)| {
        let min_exponent = w.desc.scale.map_or(-127, Scale::min_exponent);
        BlockScales { a, b, blocks: *vec as usize, min_exponent }
    });
    let (element, c, d) = (w.desc.a, w.desc.d, w.desc.d);
    let (family, saturate, halved) = (Family::Tcgen05, w.desc.saturate, w.op.scale_d);
    let product = Product { generation, family, shape, element, c, d, saturate, halved, scales };
    let new = product.of(&a, &b, &old);
    for (i, value) in new.into_iter().enumerate() {
        let (row, col) = (i as u32 / n, i as u32 % n);
        let (rank, cell) = place(row, col);
        // The mask names lanes of the first CTA, then of the second.
        let lane = cell.lane as usize + 128 * (rank - w.ranks[0] as usize);
        let off = w.disabled.get(lane / 32).is_some_and(|mask| mask >> (lane % 32) & 1 != 0);
        if !off {
            cl.ctas[rank].tmem.set(cell.lane, cell.column, value);
        }
    }
    Ok(())
}

/// A and B of all CTAs of the group, with the signs that the descriptor gives them.
fn operands(w: &Work, cl: &mut Cluster<'_>, me: &Agent, who: &TensorWho) -> Result<(Vec<f32>, Vec<f32>)> {
    let InstrDesc { m, n, k, .. } = w.desc;
    let (rows_a, rows_b) = operand_rows(m, n, w.op.group);
    let padded = matches!(w.op.kind, MmaKind::F8f6f4 | MmaKind::Mxf8f6f4);
    let mut a = Vec::new();
    let mut b = Vec::new();
    for &rank in &w.ranks {
        match w.a {
            Place::Shared(desc) => {
                let matrix = Matrix {
                    rank,
                    desc,
                    major: w.desc.a_major,
                    element: w.desc.a,
                    padded: padded && w.desc.a.bits() < 8,
                };
                a.extend(matrix.read(cl, 0, rows_a, k, me)?);
            }
            Place::Tmem(base) => a.extend(tmem_operand(w, cl, rank, base, rows_a, who)?),
        }
        let matrix = Matrix {
            rank,
            desc: w.b,
            major: w.desc.b_major,
            element: w.desc.b,
            padded: padded && w.desc.b.bits() < 8,
        };
        b.extend(matrix.read(cl, 0, rows_b, k, me)?);
    }
    for (negate, matrix) in [(w.desc.negate_a, &mut a), (w.desc.negate_b, &mut b)] {
        if negate {
            matrix.iter_mut().for_each(|x| *x = -*x);
        }
    }
    Ok((a, b))
}

/// Lanes of D in one CTA of the group.
fn lanes_of(w: &Work, cta: u32) -> Vec<u32> {
    let (m, n) = (w.desc.m, w.desc.n);
    let mut lanes: Vec<u32> = (0..m)
        .flat_map(|row| [0, n - 1].map(|col| w.path.accumulator(n, row, col)))
        .filter(|(c, _)| *c == cta)
        .map(|(_, cell)| w.d.lane + cell.lane)
        .collect();
    lanes.sort_unstable();
    lanes.dedup();
    lanes
}

/// A from tensor memory.
fn tmem_operand(
    w: &Work,
    cl: &mut Cluster<'_>,
    rank: u32,
    base: Cell,
    rows: u32,
    who: &TensorWho,
) -> Result<Vec<f32>> {
    if w.desc.a_major != Major::K {
        return Err(Fault::new(Check::Illegal, "A in tensor memory is K-major"));
    }
    let decoder = Decoder::new(w.desc.a);
    let bits = w.desc.a.bits();
    let container = if matches!(w.op.kind, MmaKind::F8f6f4 | MmaKind::Mxf8f6f4) { 8 } else { bits };
    // Narrow elements lie in the middle of their byte, where `tcgen05.cp` puts them.
    let within = (container - bits) / 2;
    let first = (rank - w.ranks[0]) * rows;
    let words = (w.desc.k * container).div_ceil(32);
    let mut out = Vec::with_capacity((rows * w.desc.k) as usize);
    for row in 0..rows {
        let (_, start, _) = w.path.multiplicand(container, first + row, 0);
        let start = base + start;
        for copy in w.path.copies() {
            let cell = Cell { lane: start.lane + copy, ..start };
            cl.touch_tmem(rank, cell, words, Kind::READ, who)?;
            let tmem = &cl.ctas[rank as usize].tmem;
            let other = |c: &u32| tmem.get(start.lane, *c) != tmem.get(cell.lane, *c);
            if let Some(column) = (start.column..start.column + words).find(other) {
                return Err(fault!(
                    Check::Tmem,
                    "A at lane {}, column {column} differs from its copy at lane {}: with M = 128 and cta_group::2 lanes 64 to 127 hold what lanes 0 to 63 hold",
                    start.lane,
                    cell.lane
                ));
            }
        }
        for k in 0..w.desc.k {
            let (_, cell, shift) = w.path.multiplicand(container, first + row, k);
            let cell = base + cell;
            let word = cl.ctas[rank as usize].tmem.get(cell.lane, cell.column);
            out.push(decoder.get(word >> (shift + within)));
        }
    }
    Ok(out)
}

/// The scales of A (of each CTA's own rows) or of B (of all columns, in each CTA): `[row * blocks + block]`.
fn scale_factors(
    w: &Work,
    cl: &mut Cluster<'_>,
    who: &TensorWho,
    (base, of_a): (Cell, bool),
    vec: u32,
) -> Result<Vec<f32>> {
    let (rows_a, _) = operand_rows(w.desc.m, w.desc.n, w.op.group);
    let (rows, id) = if of_a { (rows_a, w.desc.sfa_id) } else { (w.desc.n, w.desc.sfb_id) };
    let Some(ty) = w.desc.scale else { return Ok(Vec::new()) };
    let mut out = Vec::new();
    for &rank in &w.ranks {
        for row in 0..rows {
            // Which 32-lane partitions hold it, and its number there.
            let half = if of_a { None } else { scale_b_half(w.path, w.desc.n, row) };
            let (partitions, number) = match half {
                Some(half) => (2 * half..2 * half + 2, row % (w.desc.n / 2)),
                None => (0..4, row),
            };
            let (relative, _) = scale(number, 0, id);
            let cell = base + relative;
            let word = replicated(cl, rank, cell, partitions, who)?;
            for block in 0..vec {
                let (_, byte) = scale(number, block, id);
                out.push(ty.decode((word >> (8 * byte)) as u8));
            }
        }
    }
    // Each CTA of a pair multiplies with the scales of B in its own tensor memory.
    if !of_a && w.ranks.len() == 2 {
        let second = out.split_off(out.len() / 2);
        let same = |i: &usize| out[*i].to_bits() != second[*i].to_bits();
        if let Some(i) = (0..out.len()).find(same) {
            let column = i as u32 / vec;
            return Err(fault!(
                Check::Tmem,
                "the scale factors of column {column} of B differ between the CTAs of the pair"
            )
            .help("each CTA holds the scales of all columns of B"));
        }
    }
    Ok(out)
}

/// A word of scale factors that the 32-lane `partitions` hold alike.
fn replicated(
    cl: &mut Cluster<'_>,
    rank: u32,
    cell: Cell,
    partitions: std::ops::Range<u32>,
    who: &TensorWho,
) -> Result<u32> {
    let mut word = None;
    for partition in partitions {
        let cell = Cell { lane: cell.lane % 32 + 32 * partition, ..cell };
        cl.touch_tmem(rank, cell, 1, Kind::READ, who)?;
        let found = cl.ctas[rank as usize].tmem.get(cell.lane, cell.column);
        let (first, lane) = *word.get_or_insert((found, cell.lane));
        if first != found {
            return Err(fault!(Check::Tmem, "scale factors at lane {}, column {} differ from those of lane {lane}: all 32-lane partitions that use them hold the same",
                    cell.lane, cell.column)
            .help("copy them with tcgen05.cp.32x128b.warpx4"));
        }
    }
    Ok(word.map_or(0, |(word, _)| word))
}
