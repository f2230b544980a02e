//! Atomics. Lanes are carried out in lane order, one element at a time.

use super::*;
use crate::decode::atomic::{Atomic, Modify};

fn element(bytes: &[u8]) -> u128 {
    let mut b = [0; 16];
    b[..bytes.len()].copy_from_slice(bytes);
    u128::from_le_bytes(b)
}

pub fn execute(op: &Atomic, cx: &mut Cx<'_, '_>) -> Result {
    let addresses = cx.addresses(&op.address);
    let polls = op.modify == Modify::CompareSwap || op.modify == Modify::Exchange;
    if let Some(flow) = cx.hold(&op.address, &addresses, polls) {
        return Ok(flow);
    }
    let m = cx.m;
    let (bytes, per) = (op.bytes as usize, op.per_register as usize);
    let register = bytes * per;
    let total = register * op.s.len();
    let operands: Vec<[u128; 32]> = op.s.iter().map(|s| cx.w.regs.r128(*s, m)).collect();
    let swap = op.swap.map(|s| cx.w.regs.r128(s, m));
    if cx.w.regs.bad.is_some() {
        return Ok(Flow::Next);
    }
    let places = cx.places(&op.address, &addresses);
    cx.acquire_at(&places, op.order);
    cx.release_at(&places, op.order, true);
    let mut old = vec![[0u128; 32]; op.s.len()];
    let progress = cx.cl.progress;
    let mut changed = false;
    for l in lanes(m) {
        cx.aligned_to(op.address.space, addresses[l], total as u64, l)?;
        let mut buffer = [0u8; 32];
        let kind = Kind::READ.strong(op.order.reach());
        cx.read_lane(op.address.space, addresses[l], l, kind, &mut buffer[..total])?;
        let before = buffer;
        let global = matches!(crate::memory::place(op.address.space, addresses[l]), Place::Global(_));
        for (k, operand) in operands.iter().enumerate() {
            let here = &mut buffer[k * register..(k + 1) * register];
            old[k][l] = element(here);
            for e in 0..per {
                let part = &mut here[e * bytes..(e + 1) * bytes];
                let was = element(part);
                let operand = operand[l] >> (8 * bytes * e);
                let keep = if bytes == 16 { u128::MAX } else { (1 << (8 * bytes)) - 1 };
                let new = match op.modify {
                    Modify::Exchange => operand,
                    Modify::CompareSwap if was == operand & keep => swap.map_or(was, |s| s[l]),
                    Modify::CompareSwap => was,
                    Modify::Reduce(r, ty) => {
                        u128::from(r.apply(ty, was as u64, (operand & keep) as u64, global)?)
                    }
                };
                part.copy_from_slice(&new.to_le_bytes()[..bytes]);
            }
        }
        cx.write_lane(
            op.address.space,
            addresses[l],
            l,
            Kind::WRITE.strong(op.order.reach()),
            &buffer[..total],
        )?;
        changed |= buffer[..total] != before[..total];
    }
    cx.released();
    if !changed {
        // Nobody can notice; a spin on a lock is no progress.
        cx.cl.progress = progress;
    }
    for (d, old) in op.d.iter().zip(&old) {
        cx.w.regs.w128(*d, m, old);
    }
    Ok(Flow::Yield)
}
