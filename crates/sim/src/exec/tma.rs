//! Copies through a tensor map: `semantics::tma` plans the pieces, this moves them.

use super::copy::{apply, destinations};
use super::mbarrier::locate;
use super::{Cx, Result, lanes};
use crate::check::shadow::Kind;
use crate::decode::copy::Reduce;
use crate::decode::operand::Addr;
use crate::decode::tma::Tensor;
use crate::machine::cluster::Cluster;
use crate::machine::engine::{Agent, Job};
use crate::machine::step::Flow;
use crate::machine::warp::GroupKind;
use crate::memory::{Place, place};
use crate::program::Src;
use crate::semantics::reduce::{ReduceType, Reduction};
use crate::semantics::tma::{Direction, TensorType, TiledTensor};
use crate::tensor_map;
use crate::trap::{Check, Fault};

/// Executes a tensor copy.
///
/// # Errors
/// A bad map, address or coordinate.
pub fn execute(op: &Tensor, cx: &mut Cx<'_, '_>) -> Result {
    match op {
        Tensor::Load { .. } => load(op, cx),
        Tensor::Store { from, map, coordinates, reduce } => store(cx, from, map, coordinates, *reduce),
    }
}

/// The map and the coordinates of every active lane.
fn operands(cx: &mut Cx<'_, '_>, map: &Addr, c: &[Src]) -> Result<Vec<(usize, TiledTensor, Vec<i32>)>> {
    let maps = cx.addresses(map);
    let values: Vec<_> = c.iter().map(|c| cx.w.regs.r32(*c, cx.m)).collect();
    if cx.w.regs.bad.is_some() {
        return Ok(Vec::new());
    }
    let mut out = Vec::new();
    for l in lanes(cx.m) {
        let mut bytes = [0; 128];
        cx.aligned_to(map.space, maps[l], 64, l)?;
        cx.read_lane(map.space, maps[l], l, Kind::READ, &mut bytes)?;
        let at = place(map.space, maps[l]);
        let tensor = tensor_map::decode(&bytes).map_err(|f| f.lane(l as u32).at(at))?;
        if tensor.rank != c.len() {
            let text = format!("a {}-dimensional copy with a map of {} dimensions", c.len(), tensor.rank);
            return Err(Fault::new(Check::Illegal, text).lane(l as u32));
        }
        out.push((l, tensor, values.iter().map(|v| v[l] as i32).collect()));
    }
    Ok(out)
}

fn load(op: &Tensor, cx: &mut Cx<'_, '_>) -> Result {
    let Tensor::Load { to, map, coordinates, barrier, multicast, pair } = op else { return Ok(Flow::Next) };
    let (dst, barriers) = (cx.addresses(to), cx.addresses(barrier));
    let multicast = multicast.map(|s| cx.w.regs.r64(s, cx.m));
    for (l, tensor, c) in operands(cx, map, coordinates)? {
        let lane = |f: Fault| f.lane(l as u32);
        let Place::Shared { rank, offset } = place(to.space, dst[l]) else { continue };
        let (signal_rank, signal) = locate(barrier.space, barriers[l]).map_err(lane)?;
        let targets: Vec<(u32, u32)> = match &multicast {
            Some(mask) => destinations(cx.cl, mask[l])?
                .into_iter()
                // In a pair, the parity of the named barrier's CTA says which of the two is signalled.
                .map(|r| (r, if *pair { r & !1 | signal_rank & 1 } else { r }))
                .collect(),
            None => vec![(rank, signal_rank)],
        };
        if !pair && multicast.is_none() && rank != signal_rank {
            let text = format!("the destination is in rank {rank}, its mbarrier in rank {signal_rank}");
            return Err(Fault::new(Check::Mbarrier, text).lane(l as u32));
        }
        // The plan is checked now, so that a bad destination is reported at the instruction.
        tensor.pieces(&c, offset, Direction::Load).map_err(|m| lane(m.into()))?;
        let agent = cx.agent();
        let me = agent.clone();
        let job = move |cl: &mut Cluster<'_>| {
            let mut buffer = Vec::new();
            for piece in tensor.pieces(&c, offset, Direction::Load)? {
                buffer.clear();
                buffer.resize(piece.bytes as usize, 0);
                if let Some(from) = piece.global {
                    cl.async_read_global(from, &mut buffer, &me)?;
                }
                for &(rank, _) in &targets {
                    cl.async_write_shared(rank, piece.smem, &buffer, &me)?;
                }
            }
            for (_, rank) in targets {
                cl.complete_tx(rank, signal, tensor.box_bytes(), &me)?;
            }
            Ok(())
        };
        let due = cx.cl.due();
        cx.cl.engine.push(due, agent, Box::new(job));
    }
    Ok(Flow::Next)
}

fn element(ty: TensorType) -> Option<ReduceType> {
    Some(match ty {
        TensorType::U32 => ReduceType::U32,
        TensorType::S32 => ReduceType::S32,
        TensorType::U64 => ReduceType::U64,
        TensorType::S64 => ReduceType::S64,
        TensorType::F16 => ReduceType::F16,
        TensorType::Bf16 => ReduceType::Bf16,
        TensorType::F32 | TensorType::F32Ftz => ReduceType::F32,
        TensorType::F64 => ReduceType::F64,
        _ => return None,
    })
}

/// The logical operators work on the bits of whole numbers.
fn operated(op: Reduction, ty: ReduceType) -> ReduceType {
    match (op, ty) {
        (Reduction::And | Reduction::Or | Reduction::Xor, ReduceType::U32 | ReduceType::S32) => {
            ReduceType::B32
        }
        (Reduction::And | Reduction::Or | Reduction::Xor, ReduceType::U64 | ReduceType::S64) => {
            ReduceType::B64
        }
        _ => ty,
    }
}

fn store(cx: &mut Cx<'_, '_>, from: &Addr, map: &Addr, c: &[Src], reduce: Option<Reduce>) -> Result {
    let src = cx.addresses(from);
    for (l, tensor, c) in operands(cx, map, c)? {
        let lane = |f: Fault| f.lane(l as u32);
        let Place::Shared { rank, offset } = place(from.space, src[l]) else { continue };
        tensor.pieces(&c, offset, Direction::Store).map_err(|m| lane(m.into()))?;
        let reduce = match reduce {
            Some((op, _, n)) => match element(tensor.ty) {
                Some(ty) => Some((op, operated(op, ty), n)),
                None => {
                    let text = format!("no reduction on elements of type {:?}", tensor.ty);
                    return Err(Fault::new(Check::Illegal, text).lane(l as u32));
                }
            },
            None => None,
        };
        let agent = cx.agent();
        let op = cx.cl.start_op(&agent);
        cx.w.async_groups.start(GroupKind::Bulk, 1 << l, op);
        let me = agent.clone();
        let job = move |cl: &mut Cluster<'_>| {
            let mut pieces = Vec::new();
            for piece in tensor.pieces(&c, offset, Direction::Store)? {
                let mut bytes = vec![0; piece.bytes as usize];
                cl.async_read_shared(rank, piece.smem, &mut bytes, &me)?;
                pieces.extend(piece.global.map(|at| (at, bytes)));
            }
            cl.finish_op(op, false);
            let agent = me.clone();
            let write = move |cl: &mut Cluster<'_>| {
                for (at, bytes) in pieces {
                    write_piece(cl, at, &bytes, reduce, &me)?;
                }
                cl.finish_op(op, true);
                Ok(())
            };
            let due = cl.due();
            let again = agent.clone();
            let job: Job = if reduce.is_some() {
                Box::new(move |cl: &mut Cluster<'_>| cl.in_order(again, Box::new(write)))
            } else {
                Box::new(write)
            };
            cl.engine.push_global(due, agent, job);
            Ok(())
        };
        let due = cx.cl.due();
        cx.cl.engine.push(due, agent, Box::new(job));
    }
    Ok(Flow::Next)
}

fn write_piece(
    cl: &mut Cluster<'_>,
    at: u64,
    bytes: &[u8],
    reduce: Option<Reduce>,
    me: &Agent,
) -> Result<()> {
    let Some(reduce) = reduce else { return cl.async_write_global(at, bytes, me) };
    cl.touch_global(at, bytes.len() as u64, Kind::PROXY_WRITE.strong(true), me.who())?;
    let mut old = vec![0; bytes.len()];
    cl.launch.global.read(at, &mut old)?;
    apply(reduce, &mut old, bytes, true)?;
    cl.launch.global.write(at, &old)
}
