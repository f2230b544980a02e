//! Copies through a tensor map: `semantics::tma` plans the pieces, this moves them. PTX ISA 9.7.9.27.

use super::copy::destinations;
use super::mbarrier::locate;
use super::*;
use crate::semantics::reduce::Reduction;
use crate::semantics::tma::{Direction, Piece, TiledTensor};
use crate::tensor_map;
use dualgemm_ptx::layout::TensorDataType;

/// What a copy moves.
#[derive(Clone, PartialEq, Eq)]
enum Mode<T> {
    Tile,
    /// Four rows of a matrix.
    Rows,
    /// A column of pixels, with the offsets of each dimension of space where it is loaded.
    Im2col(Vec<T>),
}

/// A part of a tensor in global memory.
struct Part {
    /// Generic address of the map.
    map: Addr,
    mode: Mode<Src>,
    /// Coordinates, innermost first.
    coordinates: Vec<Src>,
}

/// Decodes a tensor copy or prefetch.
pub fn decode(i: &mut Ins<'_>) -> Decoded {
    if i.has("prefetch") {
        return Ok(i.nothing());
    }
    let reducing = i.ast.modifiers.first().is_some_and(|m| m == "reduce");
    i.ignore(&["async", "reduce", "bulk", "tensor", "tile"]);
    i.cache_hints();
    let rank = i.need("a number of dimensions", &[("1d", 1), ("2d", 2), ("3d", 3), ("4d", 4), ("5d", 5)])?;
    let rows = i.has("tile::gather4") || i.has("tile::scatter4");
    let (im2col, no_offsets) = (i.has("im2col"), i.has("im2col_no_offs"));
    let multicast = i.has("multicast::cluster");
    let pair = i.has("cta_group::2");
    i.ignore(&["cta_group::1"]);
    let (load, store) = (i.has("mbarrier::complete_tx::bytes"), i.has("bulk_group"));
    let spaces = i.spaces();
    // The map has its element type; a reduction names only its operator, with the type in the map.
    let reduce = if reducing { i.one_of(Reduction::NAMES) } else { None };
    let part = |at: usize, mode: Mode<Src>| -> Decoded<Part> {
        let Operand::List(list) = i.operand(at)? else { return i.error("needs [map, {coordinates}]") };
        let map = i.address(&list[0], Space::Generic)?;
        let given = list.get(1).map_or(&[][..], Ins::elements);
        let coordinates = given.iter().map(|c| i.value(c, Type::S32)).collect::<Decoded<Vec<_>>>()?;
        let want = if rows { 5 } else { rank };
        if coordinates.len() != want {
            return i.error(format!("has {} coordinates, needs {want}", coordinates.len()));
        }
        Ok(Part { map, mode, coordinates })
    };
    let boxed = if rows { Mode::Rows } else { Mode::Tile };
    match (load, store, spaces.first()) {
        (true, false, Some(&to)) if to != Space::Global => {
            let mode = if im2col && !rows { Mode::Im2col(i.srcs(3, Type::U16)?) } else { boxed };
            if let Mode::Im2col(offsets) = &mode
                && offsets.len() + 2 != rank
            {
                return i.error(format!("has {} offsets for {rank} dimensions", offsets.len()));
            }
            let mask = if im2col { 4 } else { 3 };
            let multicast = if multicast { Some(i.src(mask, Type::B16)?) } else { None };
            let (to, part, barrier) = (i.addr(0, to)?, part(1, mode)?, i.addr(2, Space::SharedCluster)?);
            Ok(Op::new(move |cx| load_part(cx, &to, &part, &barrier, (multicast, pair))))
        }
        (false, true, Some(Space::Global)) => {
            if reducing && reduce.is_none() {
                return i.error("needs a reduction");
            }
            let mode = if no_offsets { Mode::Im2col(Vec::new()) } else { boxed };
            let (part, from) = (part(0, mode)?, i.addr(1, Space::SharedCta)?);
            Ok(Op::new(move |cx| store_part(cx, &from, &part, reduce)))
        }
        _ => i.error(
            "needs .shared.global with .mbarrier::complete_tx::bytes, or .global.shared with .bulk_group",
        ),
    }
}

/// What one lane moves.
#[derive(Clone, PartialEq, Eq)]
struct Transfer {
    tensor: TiledTensor,
    coordinates: Vec<i32>,
    mode: Mode<u32>,
}

impl Transfer {
    /// Where each part comes from and goes to.
    fn pieces(&self, smem: u32, direction: Direction) -> Result<Vec<Piece>> {
        let Transfer { tensor, coordinates, mode } = self;
        match mode {
            Mode::Tile => tensor.pieces(coordinates, smem, direction),
            Mode::Rows => tensor.scattered(coordinates[0], &coordinates[1..], smem, direction),
            Mode::Im2col(offsets) => tensor.columns(coordinates, offsets, smem, direction),
        }
    }

    /// Bytes that a load completes.
    fn bytes(&self) -> u32 {
        match self.mode {
            Mode::Rows => self.tensor.scattered_bytes(self.coordinates.len() - 1),
            _ => self.tensor.box_bytes(),
        }
    }
}

/// What every active lane moves.
fn operands(cx: &mut Cx<'_, '_>, part: &Part) -> Result<Vec<(usize, Transfer)>> {
    let Part { map, mode, coordinates } = part;
    let maps = cx.addresses(map);
    let values: Vec<_> = coordinates.iter().map(|c| cx.w.regs.r32(*c, cx.m)).collect();
    let offsets: Vec<_> = match mode {
        Mode::Im2col(offsets) => offsets.iter().map(|o| cx.w.regs.r32(*o, cx.m)).collect(),
        _ => Vec::new(),
    };
    cx.defined()?;
    let mut out = Vec::new();
    for l in lanes(cx.m) {
        let mut bytes = [0; 128];
        cx.aligned_to(map.space, maps[l], 64, l)?;
        cx.read_lane(map.space, maps[l], l, Kind::READ, &mut bytes)?;
        let at = place(map.space, maps[l]);
        let tensor = tensor_map::decode(&bytes).map_err(|f| f.lane(l as u32).at(at))?;
        let dimensions = if matches!(mode, Mode::Rows) { 2 } else { coordinates.len() };
        if tensor.rank != dimensions {
            return Err(fault!(
                Check::Illegal,
                "a {dimensions}-dimensional copy with a map of {} dimensions",
                tensor.rank
            )
            .lane(l as u32));
        }
        let mode = match mode {
            Mode::Tile => Mode::Tile,
            Mode::Rows => Mode::Rows,
            Mode::Im2col(_) => Mode::Im2col(offsets.iter().map(|o| o[l] & 0xffff).collect()),
        };
        out.push((l, Transfer { tensor, coordinates: values.iter().map(|v| v[l] as i32).collect(), mode }));
    }
    Ok(out)
}

/// Global to shared memory. `barrier` counts the bytes; in a pair it may be the other CTA's.
fn load_part(
    cx: &mut Cx<'_, '_>,
    to: &Addr,
    part: &Part,
    barrier: &Addr,
    (multicast, pair): (Option<Src>, bool),
) -> Result<()> {
    let (dst, barriers) = (cx.addresses(to), cx.addresses(barrier));
    let multicast = multicast.map(|s| cx.w.regs.r64(s, cx.m));
    for (l, transfer) in operands(cx, part)? {
        let lane = |f: Fault| f.lane(l as u32);
        let Place::Shared { rank, offset } = cx.allowed(to.space, dst[l], l)? else { continue };
        let (signal_rank, signal) = locate(barrier.space, barriers[l]).map_err(lane)?;
        let targets: Vec<(u32, u32)> = match &multicast {
            Some(mask) => destinations(cx.cl, mask[l])?
                .into_iter()
                // In a pair, the parity of the named barrier's CTA says which of the two is signalled.
                .map(|r| (r, if pair { r & !1 | signal_rank & 1 } else { r }))
                .collect(),
            None => vec![(rank, signal_rank)],
        };
        if !pair && multicast.is_none() && rank != signal_rank {
            return Err(fault!(
                Check::Mbarrier,
                "the destination is in rank {rank}, its mbarrier in rank {signal_rank}"
            )
            .lane(l as u32));
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
    Ok(())
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

/// Shared to global memory, reducing elements of the type that the map has if asked.
fn store_part(cx: &mut Cx<'_, '_>, from: &Addr, part: &Part, reduce: Option<Reduction>) -> Result<()> {
    let src = cx.addresses(from);
    // Lanes that store the same do it once, as the chip does for the lanes of a warp: CUTLASS has whole warps store.
    let mut stores: Vec<(usize, u32, Transfer)> = Vec::new();
    for (l, transfer) in operands(cx, part)? {
        let same = |s: &&mut (usize, u32, Transfer)| src[s.0] == src[l] && s.2 == transfer;
        match stores.iter_mut().find(same) {
            Some(store) if reduce.is_none() => store.1 |= 1 << l,
            _ => stores.push((l, 1 << l, transfer)),
        }
    }
    for (l, lanes, transfer) in stores {
        let lane = |f: Fault| f.lane(l as u32);
        let Place::Shared { rank, offset } = cx.allowed(from.space, src[l], l)? else { continue };
        transfer.pieces(offset, Direction::Store).map_err(lane)?;
        let reduce = match reduce {
            Some(op) => match element(op, transfer.tensor.ty) {
                Some(ty) => Some((op, ty)),
                None => {
                    return Err(fault!(
                        Check::Illegal,
                        "no reduction on elements of type {:?}",
                        transfer.tensor.ty
                    )
                    .lane(l as u32));
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
                let bytes = cl.async_bytes(Place::Shared { rank, offset: piece.smem }, piece.bytes, me)?;
                pieces.extend(piece.global.map(|at| (Place::Global(at), bytes)));
            }
            let writer = cl.sources_read(op, me);
            cl.write_later(writer, (true, reduce.is_some()), move |cl, me| {
                for (at, bytes) in pieces {
                    cl.async_reduce(at, &bytes, reduce, me)?;
                }
                cl.finish_op(op);
                Ok(())
            });
            Ok(())
        });
    }
    Ok(())
}
