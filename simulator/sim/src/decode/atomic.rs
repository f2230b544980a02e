//! `atom` and `red`. PTX ISA 9.7.13.3, 9.7.13.4.

use super::*;
use crate::semantics::reduce::Reduction;

/// What happens to an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Modify {
    Reduce(Reduction, Type),
    Exchange,
    CompareSwap,
}

#[derive(Debug, Clone)]
pub struct Atomic {
    pub modify: Modify,
    pub address: Addr,
    /// Bytes of an element as it is modified: 2, 4, 8 or 16.
    pub bytes: u32,
    /// Elements of `bytes` in one register, for the packed types.
    pub per_register: u32,
    /// Old values; empty for `red`.
    pub d: Vec<Dst>,
    /// Operands, one per register.
    pub s: Vec<Src>,
    /// New value of `.cas`.
    pub swap: Option<Src>,
    pub order: Ordering,
}

/// The type of the elements of a reduction on `ty`, and how many a register holds.
pub fn reduce_type(ty: Type) -> Option<(Type, u32)> {
    use Type::*;
    match ty {
        F16x2 => Some((F16, 2)),
        Bf16x2 => Some((Bf16, 2)),
        U32 | S32 | U64 | S64 | B32 | B64 | F16 | Bf16 | F32 | F64 => Some((ty, 1)),
        _ => None,
    }
}

/// The reduction operator among the modifiers.
pub fn operator(i: &mut Ins<'_>) -> Option<Reduction> {
    i.one_of(Reduction::NAMES)
}

pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    let mut order = i.ordering();
    order.strong = true;
    i.cache_hints();
    i.ignore(&["noftz"]);
    let space = i.space();
    i.ignore(&["v2", "v4", "v8"]);
    let cas = i.has("cas");
    let exchange = i.has("exch");
    let reduction = operator(i);
    let ty = i.ty()?;
    i.finish()?;
    let (modify, bytes, per_register) = match (reduction, cas, exchange) {
        (Some(op), false, false) => match reduce_type(ty) {
            Some((element, n)) => (Modify::Reduce(op, element), element.bits() / 8, n),
            None => return i.error(format!("no reduction on .{ty}")),
        },
        (None, true, false) => (Modify::CompareSwap, ty.bytes(), 1),
        (None, false, true) => (Modify::Exchange, ty.bytes(), 1),
        _ => return i.error("needs one operation: .add .min .max .inc .dec .and .or .xor .exch or .cas"),
    };
    let red = i.ast.root == "red";
    let at = usize::from(!red);
    let d = if red { Vec::new() } else { i.dsts(0)? };
    let address = i.addr(at, space)?;
    let s = i.srcs(at + 1, ty)?;
    let swap = if cas { Some(i.src(at + 2, ty)?) } else { None };
    Ok(Op::Atomic(Atomic { modify, address, bytes, per_register, d, s, swap, order }))
}
