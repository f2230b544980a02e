//! Copies through a tensor map: `semantics::tma` plans the pieces, this moves them.

use super::copy::destinations;
use super::mbarrier::locate;
use super::*;
use crate::decode::tma::{Mode, Tensor};
use crate::semantics::reduce::Reduction;
use crate::semantics::tma::{Direction, Piece, TiledTensor};
use crate::tensor_map;
use dualgemm_ptx::Type;
use dualgemm_ptx::layout::TensorDataType;

/// Executes a tensor copy.
pub fn execute(op: &Tensor, cx: &mut Cx<'_, '_>) -> Result {
    match op {
        Tensor::Load { .. } => load(op, cx),
        Tensor::Store { from, map, mode, coordinates, reduce } => {
            store(cx, from, (map, mode), coordinates, *reduce)
        }
    }
}

/// What one lane moves.
#[derive(Clone, PartialEq, Eq)]
struct Transfer {
    tensor: TiledTensor,
    coordinates: Vec<i32>,
    mode: Moved,
}

#[derive(Clone, PartialEq, Eq)]
enum Moved {
    Tile,
    Rows,
    Im2col(Vec<u32>),
}

impl Transfer {
    /// Where each part comes from and goes to.
    fn pieces(&self, smem: u32, direction: Direction) -> Result<Vec<Piece>> {
        let Transfer { tensor, coordinates, mode } = self;
        match mode {
            Moved::Tile => tensor.pieces(coordinates, smem, direction).map(Iterator::collect),
            Moved::Rows => tensor.scattered(coordinates[0], &coordinates[1..], smem, direction),
            Moved::Im2col(offsets) => tensor.columns(coordinates, offsets, smem),
        }
    }

    /// Bytes that a load completes.
    fn bytes(&self) -> u32 {
        match self.mode {
            Moved::Rows => self.tensor.scattered_bytes(self.coordinates.len() - 1),
            _ => self.tensor.box_bytes(),
        }
    }
}

/// What every active lane moves.
fn operands(cx: &mut Cx<'_, '_>, (map, mode): (&Addr, &Mode), c: &[Src]) -> Result<Vec<(usize, Transfer)>> {
    let maps = cx.addresses(map);
    let values: Vec<_> = c.iter().map(|c| cx.w.regs.r32(*c, cx.m)).collect();
    let offsets: Vec<_> = match mode {
        Mode::Im2col(offsets) => offsets.iter().map(|o| cx.w.regs.r32(*o, cx.m)).collect(),
        _ => Vec::new(),
    };
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
        let dimensions = if matches!(mode, Mode::Rows) { 2 } else { c.len() };
        if tensor.rank != dimensions {
            let text = format!("a {dimensions}-dimensional copy with a map of {} dimensions", tensor.rank);
            return Err(Fault::new(Check::Illegal, text).lane(l as u32));
        }
        let mode = match mode {
            Mode::Tile => Moved::Tile,
            Mode::Rows => Moved::Rows,
            Mode::Im2col(_) => Moved::Im2col(offsets.iter().map(|o| o[l] & 0xffff).collect()),
        };
        out.push((l, Transfer { tensor, coordinates: values.iter().map(|v| v[l] as i32).collect(), mode }));
    }
    Ok(out)
}

fn load(op: &Tensor, cx: &mut Cx<'_, '_>) -> Result {
    let Tensor::Load { to, map, mode, coordinates, barrier, multicast, pair } = op else {
        return Ok(Flow::Next);
    };
    let (dst, barriers) = (cx.addresses(to), cx.addresses(barrier));
    let multicast = multicast.map(|s| cx.w.regs.r64(s, cx.m));
    for (l, transfer) in operands(cx, (map, mode), coordinates)? {
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
        transfer.pieces(offset, Direction::Load).map_err(lane)?;
        let agent = cx.agent_of(1 << l);
        cx.cl.later(agent, move |cl, me| {
            let mut buffer = Vec::new();
            for piece in transfer.pieces(offset, Direction::Load)? {
                buffer.clear();
                buffer.resize(piece.bytes as usize, 0);
                if let Some(from) = piece.global {
                    cl.async_read(Place::Global(from), &mut buffer, me)?;
                }
                for &(rank, _) in &targets {
                    cl.async_write(Place::Shared { rank, offset: piece.smem }, &buffer, me)?;
                }
            }
            for (_, rank) in targets {
                cl.complete_tx(rank, signal, transfer.bytes(), me)?;
            }
            Ok(())
        });
    }
    Ok(Flow::Next)
}

/// What a reduction works on: the logical operators on the bits of whole numbers.
fn element(op: Reduction, ty: TensorDataType) -> Option<Type> {
    use TensorDataType::*;
    let logical = matches!(op, Reduction::And | Reduction::Or | Reduction::Xor);
    Some(match ty {
        U32 | S32 if logical => Type::B32,
        U64 | S64 if logical => Type::B64,
        U32 => Type::U32,
        S32 => Type::S32,
        U64 => Type::U64,
        S64 => Type::S64,
        F16 => Type::F16,
        Bf16 => Type::Bf16,
        F32 | F32Ftz => Type::F32,
        F64 => Type::F64,
        _ => return None,
    })
}

fn store(
    cx: &mut Cx<'_, '_>,
    from: &Addr,
    what: (&Addr, &Mode),
    c: &[Src],
    reduce: Option<Reduction>,
) -> Result {
    let src = cx.addresses(from);
    // Lanes that store the same do it once, as the chip does for the lanes of a warp: CUTLASS has whole warps store.
    let mut stores: Vec<(usize, u32, Transfer)> = Vec::new();
    for (l, transfer) in operands(cx, what, c)? {
        let same = |s: &&mut (usize, u32, Transfer)| src[s.0] == src[l] && s.2 == transfer;
        match stores.iter_mut().find(same) {
            Some(store) if reduce.is_none() => store.1 |= 1 << l,
            _ => stores.push((l, 1 << l, transfer)),
        }
    }
    for (l, lanes, transfer) in stores {
        let lane = |f: Fault| f.lane(l as u32);
        let Place::Shared { rank, offset } = place(from.space, src[l]) else { continue };
        transfer.pieces(offset, Direction::Store).map_err(lane)?;
        let reduce = match reduce {
            Some(op) => match element(op, transfer.tensor.ty) {
                Some(ty) => Some((op, ty)),
                None => {
                    let text = format!("no reduction on elements of type {:?}", transfer.tensor.ty);
                    return Err(Fault::new(Check::Illegal, text).lane(l as u32));
                }
            },
            None => None,
        };
        let agent = cx.agent_of(lanes);
        let op = cx.cl.start_op(&agent, lanes);
        cx.w.async_groups.start(GroupKind::Bulk, lanes, op);
        cx.cl.later_store(agent, move |cl, me| {
            let mut pieces = Vec::new();
            for piece in transfer.pieces(offset, Direction::Store)? {
                let mut bytes = vec![0; piece.bytes as usize];
                cl.async_read(Place::Shared { rank, offset: piece.smem }, &mut bytes, me)?;
                pieces.extend(piece.global.map(|at| (Place::Global(at), bytes)));
            }
            cl.finish_op(op, false);
            cl.write_later(me.clone(), (true, reduce.is_some()), move |cl, me| {
                for (at, bytes) in pieces {
                    cl.async_reduce(at, &bytes, reduce, u16::MAX, me)?;
                }
                cl.finish_op(op, true);
                Ok(())
            });
            Ok(())
        });
    }
    Ok(Flow::Next)
}
