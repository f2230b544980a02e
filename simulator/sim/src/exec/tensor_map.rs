//! Tensor maps that a kernel edits, 128 bytes in memory: `tensormap.replace` (PTX ISA 9.7.9.28) and
//! `tensormap.cp_fenceproxy` (9.7.13.16).

use super::*;
use crate::tensor_map::{self, Field};

pub fn decode(i: &mut Ins<'_>) -> Decoded {
    if i.has("cp_fenceproxy") {
        i.ignore(&["global", "shared::cta", "tensormap::generic", "release", "sync", "aligned"]);
        let scope = i.need("a scope", Scope::NAMES)?;
        if i.src(2, Type::U32)? != Src::Imm(128) {
            return i.error("a tensor map has 128 bytes");
        }
        let (to, from) = (i.addr(0, Space::Global)?, i.addr(1, Space::SharedCta)?);
        return Ok(Op::aligned(move |cx| publish(cx, &to, &from, scope)));
    }
    i.ignore(&["replace", "tile", "b1024"]);
    let field = i.need("a field", Field::NAMES)?;
    let (space, ty) = (i.space(), i.ty()?);
    // The dimension, for the fields that have one value per dimension.
    let (dimension, value) = match field.values() {
        1 => (0, 1),
        n => match i.operand(1)? {
            Operand::Imm(at) if (at.bits() as usize) < n => (at.bits() as usize, 2),
            other => return i.error(format!("{other:?} is not the number of a dimension")),
        },
    };
    let (map, value) = (i.addr(0, space)?, i.src(value, ty)?);
    Ok(Op::new(move |cx| replace(cx, &map, (field, dimension), value)))
}

fn replace(cx: &mut Cx<'_, '_>, map: &Addr, (field, dimension): (Field, usize), value: Src) -> Result<()> {
    let mut bytes = [0; 128];
    let (at, value) = (cx.addresses(map), cx.w.regs.r64(value, cx.m));
    cx.defined()?;
    for l in lanes(cx.m) {
        cx.aligned_to(map.space, at[l], 64, l)?;
        cx.read_lane(map.space, at[l], l, Kind::READ, &mut bytes)?;
        tensor_map::replace(&mut bytes, field, dimension, value[l])
            .map_err(|f| f.lane(l as u32).at(place(map.space, at[l])))?;
        cx.write_lane(map.space, at[l], l, Kind::WRITE, &bytes)?;
    }
    Ok(())
}

/// A copy of the map from shared to global memory by the warp, and a release.
fn publish(cx: &mut Cx<'_, '_>, to: &Addr, from: &Addr, scope: Scope) -> Result<()> {
    let mut bytes = [0; 128];
    let (dst, src) = (cx.addresses(to), cx.addresses(from));
    cx.defined()?;
    let l = cx.first_lane() as usize;
    cx.aligned_to(from.space, src[l], 128, l)?;
    cx.aligned_to(to.space, dst[l], 128, l)?;
    cx.read_lane(from.space, src[l], l, Kind::READ, &mut bytes)?;
    cx.write_lane(to.space, dst[l], l, Kind::WRITE, &bytes)?;
    super::fence::order(cx, scope, false, true);
    Ok(())
}
