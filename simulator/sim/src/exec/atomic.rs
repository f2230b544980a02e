//! `atom` and `red`, lane by lane in order, one element at a time. PTX ISA 9.7.13.3, 9.7.13.4.

use super::in_flight::apply;
use super::*;
use crate::semantics::reduce::Reduction;

/// What happens to a register's worth of memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Modify {
    Reduce(Reduce),
    Exchange,
    /// To this, if it is what the operand says.
    CompareSwap(Src),
}

struct Atomic {
    modify: Modify,
    address: Addr,
    /// Bytes of memory for a register: 2, 4, 8 or 16.
    bytes: usize,
    /// Old values; empty for `red`.
    d: Vec<Dst>,
    /// Operands, one per register.
    s: Vec<Src>,
    order: Ordering,
}

/// The type of the elements of a reduction on `ty`.
fn reduce_type(ty: Type) -> Option<Type> {
    use Type::*;
    match ty {
        F16x2 => Some(F16),
        Bf16x2 => Some(Bf16),
        U32 | S32 | U64 | S64 | B32 | B64 | F16 | Bf16 | F32 | F64 => Some(ty),
        _ => None,
    }
}

/// An element-wise reduction at the destination of a copy: operator and type of an element.
pub type Reduce = (Reduction, Type);

/// The reduction that a copy makes on `ty`, if it is one.
pub fn reduction(i: &mut Ins<'_>, ty: Type, reduces: bool) -> Decoded<Option<Reduce>> {
    match (reduces, i.one_of(Reduction::NAMES), reduce_type(ty)) {
        (false, None, _) => Ok(None),
        (true, Some(op), Some(ty)) => Ok(Some((op, ty))),
        _ => i.error("needs a reduction and its type"),
    }
}

pub fn decode(i: &mut Ins<'_>) -> Decoded {
    let order = Ordering { strong: true, ..i.ordering() };
    i.cache_hints();
    i.ignore(&["noftz", "v2", "v4", "v8"]);
    let space = i.space();
    let (cas, exchange, reduction) = (i.has("cas"), i.has("exch"), i.one_of(Reduction::NAMES));
    let ty = i.ty()?;
    let red = i.ast.root == "red";
    let at = usize::from(!red);
    let modify = match (reduction, cas, exchange) {
        (Some(op), false, false) => match reduce_type(ty) {
            Some(element) => Modify::Reduce((op, element)),
            None => return i.error(format!("no reduction on .{ty}")),
        },
        (None, true, false) => Modify::CompareSwap(i.src(at + 2, ty)?),
        (None, false, true) => Modify::Exchange,
        _ => return i.error("needs one operation: .add .min .max .inc .dec .and .or .xor .exch or .cas"),
    };
    let d = if red { Vec::new() } else { i.dsts(0)? };
    let (address, s, bytes) = (i.addr(at, space)?, i.srcs(at + 1, ty)?, ty.bytes() as usize);
    let op = Atomic { modify, address, bytes, d, s, order };
    Ok(Op::new(move |cx| op.execute(cx)))
}

impl Atomic {
    fn execute(&self, cx: &mut Cx<'_, '_>) -> Result {
        let addresses = cx.addresses(&self.address);
        let polls = !matches!(self.modify, Modify::Reduce(_));
        if let Some(flow) = cx.hold(&self.address, &addresses, polls) {
            return Ok(flow);
        }
        let m = cx.m;
        let total = self.bytes * self.s.len();
        let operands: Vec<[u128; 32]> = self.s.iter().map(|s| cx.w.regs.r128(*s, m)).collect();
        let swap = match self.modify {
            Modify::CompareSwap(s) => cx.w.regs.r128(s, m),
            _ => [0; 32],
        };
        cx.defined()?;
        let places = cx.places(&self.address, &addresses);
        cx.acquire_at(&places, self.order);
        cx.release_at(&places, self.order, true);
        let mut old = vec![[0u128; 32]; self.s.len()];
        let progress = cx.cl.progress;
        let mut changed = false;
        let (space, reach) = (self.address.space, self.order.reach());
        for l in lanes(m) {
            cx.aligned_to(space, addresses[l], total as u64, l)?;
            let mut buffer = [0u8; 32];
            cx.read_lane(space, addresses[l], l, Kind::READ.strong(reach), &mut buffer[..total])?;
            let before = buffer;
            let global = matches!(place(space, addresses[l]), Place::Global(_));
            for (k, here) in buffer[..total].chunks_exact_mut(self.bytes).enumerate() {
                let [operand, swap] = [operands[k][l], swap[l]].map(u128::to_le_bytes);
                let operand = &operand[..self.bytes];
                let mut was = [0; 16];
                was[..self.bytes].copy_from_slice(here);
                old[k][l] = u128::from_le_bytes(was);
                match self.modify {
                    Modify::Reduce(reduce) => apply(reduce, here, operand, global)?,
                    Modify::CompareSwap(_) if here != operand => {}
                    Modify::CompareSwap(_) => here.copy_from_slice(&swap[..self.bytes]),
                    Modify::Exchange => here.copy_from_slice(operand),
                }
            }
            cx.write_lane(space, addresses[l], l, Kind::WRITE.strong(reach), &buffer[..total])?;
            changed |= buffer[..total] != before[..total];
        }
        cx.released();
        if !changed {
            // Nobody can notice; a spin on a lock is no progress.
            cx.cl.progress = progress;
        }
        for (d, old) in self.d.iter().zip(&old) {
            cx.w.regs.w128(*d, m, old);
        }
        Ok(Flow::Yield)
    }
}
