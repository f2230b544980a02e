//! `atom` and `red`, lane by lane in order, one element at a time. PTX ISA 9.7.13.3, 9.7.13.4.

use super::*;
use crate::semantics::reduce::Reduction;

/// What happens to an element.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Modify {
    Reduce(Reduction, Type),
    Exchange,
    CompareSwap,
}

struct Atomic {
    modify: Modify,
    address: Addr,
    /// Bytes of an element as it is modified: 2, 4, 8 or 16.
    bytes: usize,
    /// Elements of `bytes` in one register, for the packed types.
    per_register: usize,
    /// Old values; empty for `red`.
    d: Vec<Dst>,
    /// Operands, one per register.
    s: Vec<Src>,
    /// New value of `.cas`.
    swap: Option<Src>,
    order: Ordering,
}

/// The type of the elements of a reduction on `ty`, and how many a register holds.
fn reduce_type(ty: Type) -> Option<(Type, u32)> {
    use Type::*;
    match ty {
        F16x2 => Some((F16, 2)),
        Bf16x2 => Some((Bf16, 2)),
        U32 | S32 | U64 | S64 | B32 | B64 | F16 | Bf16 | F32 | F64 => Some((ty, 1)),
        _ => None,
    }
}

/// An element-wise reduction at the destination of a copy: operator and type of an element.
pub type Reduce = (Reduction, Type);

/// The reduction that a copy makes on `ty`, if it is one.
pub fn reduction(i: &mut Ins<'_>, ty: Type, reduces: bool) -> Decoded<Option<Reduce>> {
    match (reduces, i.one_of(Reduction::NAMES), reduce_type(ty)) {
        (false, None, _) => Ok(None),
        (true, Some(op), Some((ty, _))) => Ok(Some((op, ty))),
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
    let (address, s) = (i.addr(at, space)?, i.srcs(at + 1, ty)?);
    let swap = if cas { Some(i.src(at + 2, ty)?) } else { None };
    let (bytes, per_register) = (bytes as usize, per_register as usize);
    let op = Atomic { modify, address, bytes, per_register, d, s, swap, order };
    Ok(Op::new(move |cx| op.execute(cx)))
}

fn element(bytes: &[u8]) -> u128 {
    let mut b = [0; 16];
    b[..bytes.len()].copy_from_slice(bytes);
    u128::from_le_bytes(b)
}

impl Atomic {
    fn execute(&self, cx: &mut Cx<'_, '_>) -> Result {
        let addresses = cx.addresses(&self.address);
        let polls = matches!(self.modify, Modify::CompareSwap | Modify::Exchange);
        if let Some(flow) = cx.hold(&self.address, &addresses, polls) {
            return Ok(flow);
        }
        let m = cx.m;
        let register = self.bytes * self.per_register;
        let total = register * self.s.len();
        let operands: Vec<[u128; 32]> = self.s.iter().map(|s| cx.w.regs.r128(*s, m)).collect();
        let swap = self.swap.map(|s| cx.w.regs.r128(s, m));
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
            for (k, operand) in operands.iter().enumerate() {
                let here = &mut buffer[k * register..(k + 1) * register];
                old[k][l] = element(here);
                for (e, part) in here.chunks_exact_mut(self.bytes).enumerate() {
                    let operand = operand[l] >> (8 * self.bytes * e);
                    let new = self.modified(element(part), operand, swap.map(|s| s[l]), global)?;
                    part.copy_from_slice(&new.to_le_bytes()[..self.bytes]);
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

    /// What becomes of an element.
    fn modified(&self, was: u128, operand: u128, swap: Option<u128>, global: bool) -> Result<u128> {
        let operand = operand & u128::MAX >> (128 - 8 * self.bytes);
        Ok(match self.modify {
            Modify::Exchange => operand,
            Modify::CompareSwap if was == operand => swap.unwrap_or(was),
            Modify::CompareSwap => was,
            Modify::Reduce(r, ty) => r.apply(ty, was as u64, operand as u64, global)?.into(),
        })
    }
}
