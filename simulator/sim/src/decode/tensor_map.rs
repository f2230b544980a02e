//! Tensor maps that a kernel edits: `tensormap.replace` (PTX ISA 9.7.9.28) and `tensormap.cp_fenceproxy`
//! (9.7.13.16).

use super::*;
use crate::tensor_map::Field;

#[derive(Debug, Clone)]
pub enum TensorMapOp {
    Replace {
        map: Addr,
        field: Field,
        /// Dimension, for the fields that have one value per dimension.
        dimension: usize,
        value: Src,
    },
    /// `tensormap.cp_fenceproxy`: a copy of the map from shared to global memory, and a release.
    Copy { to: Addr, from: Addr, scope: Scope },
}

/// Decodes `tensormap.replace` and `tensormap.cp_fenceproxy`.
pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    if i.has("cp_fenceproxy") {
        i.ignore(&["global", "shared::cta", "tensormap::generic", "release", "sync", "aligned"]);
        let scope = i.need("a scope", Scope::NAMES)?;
        i.finish()?;
        if i.src(2, Type::U32)? != Src::Imm(128) {
            return i.error("a tensor map has 128 bytes");
        }
        let (to, from) = (i.addr(0, Space::Global)?, i.addr(1, Space::SharedCta)?);
        return Ok(Op::TensorMap(TensorMapOp::Copy { to, from, scope }));
    }
    i.ignore(&["replace", "tile", "b1024"]);
    let field = i.need("a field", Field::NAMES)?;
    let space = i.space();
    let ty = i.ty()?;
    i.finish()?;
    let (dimension, value) = match field.per_dimension() {
        true => match i.operand(1)? {
            Operand::Imm(n) if (n.bits() as usize) < field.values() => (n.bits() as usize, 2),
            other => return i.error(format!("{other:?} is not the number of a dimension")),
        },
        false => (0, 1),
    };
    let (map, value) = (i.addr(0, space)?, i.src(value, ty)?);
    Ok(Op::TensorMap(TensorMapOp::Replace { map, field, dimension, value }))
}
