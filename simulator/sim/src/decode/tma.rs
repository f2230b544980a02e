//! Copies through a tensor map. PTX ISA 9.7.9.27.

use super::atomic::operator;
use super::*;
use crate::semantics::reduce::Reduction;

/// What a copy moves.
#[derive(Debug, Clone)]
pub enum Mode {
    Tile,
    /// Four rows of a matrix.
    Rows,
    /// A column of pixels, with the offsets of each dimension of space.
    Im2col(Vec<Src>),
}

/// A decoded tensor copy.
#[derive(Debug, Clone)]
pub enum Tensor {
    /// Global to shared memory.
    Load {
        to: Addr,
        /// Generic address of the map.
        map: Addr,
        mode: Mode,
        /// Coordinates, innermost first.
        coordinates: Vec<Src>,
        /// Barrier that counts the bytes.
        barrier: Addr,
        multicast: Option<Src>,
        /// `.cta_group::2`: the barrier may be the other one's of the pair.
        pair: bool,
    },
    /// Shared to global memory.
    Store {
        from: Addr,
        /// Generic address of the map.
        map: Addr,
        mode: Mode,
        /// Coordinates, innermost first.
        coordinates: Vec<Src>,
        /// On elements of the type that the map has.
        reduce: Option<Reduction>,
    },
}

/// Decodes a tensor copy or prefetch.
pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    if i.has("prefetch") {
        return Ok(Op::Nop);
    }
    let reducing = i.ast.modifiers.first().is_some_and(|m| m == "reduce");
    i.ignore(&["async", "reduce", "bulk", "tensor", "tile"]);
    i.cache_hints();
    let rank = i.need("a number of dimensions", &[("1d", 1), ("2d", 2), ("3d", 3), ("4d", 4), ("5d", 5)])?;
    let rows = i.has("tile::gather4") || i.has("tile::scatter4");
    let im2col = i.has("im2col");
    let multicast = i.has("multicast::cluster");
    let pair = i.has("cta_group::2");
    i.ignore(&["cta_group::1"]);
    let load = i.has("mbarrier::complete_tx::bytes");
    let store = i.has("bulk_group");
    let spaces = i.spaces();
    // The map has its element type; a reduction names only its operator, with the type in the map.
    let reduce = if reducing { operator(i) } else { None };
    i.finish()?;
    let coordinates = |i: &Ins<'_>, at: usize| -> Result<(Addr, Vec<Src>)> {
        let Operand::List(list) = i.operand(at)? else { return i.error("needs [map, {coordinates}]") };
        let map = i.address(&list[0], Space::Generic)?;
        let c = match list.get(1) {
            Some(c) => Ins::elements(c).iter().map(|c| i.value(c, Type::S32)).collect::<Result<Vec<_>>>()?,
            None => Vec::new(),
        };
        let want = if rows { 5 } else { rank };
        if c.len() != want {
            return i.error(format!("has {} coordinates, needs {want}", c.len()));
        }
        Ok((map, c))
    };
    match (load, store, spaces.first()) {
        (true, false, Some(&to)) if to != Space::Global => {
            let (map, c) = coordinates(i, 1)?;
            let mode = match (rows, im2col) {
                (true, _) => Mode::Rows,
                (_, true) => {
                    let offsets = i.srcs(3, Type::U16)?;
                    if offsets.len() + 2 != rank {
                        return i.error(format!("has {} offsets for {rank} dimensions", offsets.len()));
                    }
                    Mode::Im2col(offsets)
                }
                _ => Mode::Tile,
            };
            let mask = if im2col { 4 } else { 3 };
            let multicast = if multicast { Some(i.src(mask, Type::B16)?) } else { None };
            let (to, barrier) = (i.addr(0, to)?, i.addr(2, Space::SharedCluster)?);
            Ok(Op::Tensor(Tensor::Load { to, map, mode, coordinates: c, barrier, multicast, pair }))
        }
        (false, true, Some(Space::Global)) => {
            let (map, c) = coordinates(i, 0)?;
            if reducing && reduce.is_none() {
                return i.error("needs a reduction");
            }
            let from = i.addr(1, Space::SharedCta)?;
            let mode = if rows { Mode::Rows } else { Mode::Tile };
            Ok(Op::Tensor(Tensor::Store { from, map, mode, coordinates: c, reduce }))
        }
        _ => i.error(
            "needs .shared.global with .mbarrier::complete_tx::bytes, or .global.shared with .bulk_group",
        ),
    }
}
