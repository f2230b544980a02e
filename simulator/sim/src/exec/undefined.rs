//! Which bits of a result are undefined when bits of the operands are: run after an instruction that has read some,
//! whose writes the registers have put aside.

use super::arith::Comparison;
use super::mma::Mma;
use super::*;
use crate::check::lanes::Who;
use crate::check::proxy::Memory;
use crate::check::shadow::{self, Access, Look};
use crate::check::undefined::{Hole, Origin, Source};
use crate::machine::grid::Launch;
use crate::machine::regs::{Aside, Shadow};
use crate::semantics::float::arith::Compare;
use crate::semantics::fragment::{
    fragment_a, fragment_b, fragment_c, scale_a_lane, scale_b_lane, scale_byte,
};
use smallvec::SmallVec;

/// What reaches the results of an instruction that computes.
#[derive(Debug, Clone)]
pub struct Operands {
    pub how: Spread,
    pub sources: Vec<Src>,
    /// Those that say what happens to the bits of the others.
    pub controls: Vec<Src>,
}

/// How undefined bits of operands reach the result.
#[derive(Debug, Clone, Copy)]
pub enum Spread {
    /// A bit of the result depends on at most one bit of each operand: trying 0 and 1 shows which.
    Bits,
    /// Carries go upwards: from the lowest undefined bit on.
    Upward,
    /// Elements of so many bits depend on those in the same place of the operands: bits there and in the result.
    Elements(u32, u32),
    /// Each element of so many bits depends on so many bits of one operand.
    Places(u32, u32),
    /// The result is a comparison, which the defined bits may decide.
    Comparison(Comparison),
    /// Everything depends on everything in so many bits.
    Whole(u32),
}

fn low(bits: u32) -> u128 {
    u128::MAX.checked_shr(128 - bits).unwrap_or(0)
}

/// Registers to try both values of; more are rare, and then everything counts as undefined.
const TRIED: usize = 4;

/// The bits of each write that differ between the ways of filling the undefined bits of `reads`.
fn tried(op: &Op, cx: &mut Cx<'_, '_>, reads: &[(Reg, Shadow)]) -> Result<Vec<[u128; 32]>> {
    let old: Vec<_> = reads.iter().map(|(r, _)| cx.w.regs.values(*r)).collect();
    let check = cx.w.regs.check_reads(false);
    let mut first: Vec<Aside> = Vec::new();
    let mut differ: Vec<[u128; 32]> = Vec::new();
    for fill in 0..1u32 << reads.len() {
        for (k, (r, shadow)) in reads.iter().enumerate() {
            let ones = fill >> k & 1 != 0;
            let value = |l: usize| {
                let bits = shadow.bits[l] as u64;
                if ones { old[k][l] | bits } else { old[k][l] & !bits }
            };
            cx.w.regs.replace(*r, u32::MAX, &std::array::from_fn(value));
        }
        cx.w.regs.rehearse();
        op.run(cx)?;
        let (_, writes) = cx.w.regs.take_aside();
        if fill == 0 {
            differ = vec![[0; 32]; writes.len()];
            first = writes;
            continue;
        }
        for (d, (a, b)) in differ.iter_mut().zip(first.iter().zip(&writes)) {
            for (l, d) in d.iter_mut().enumerate() {
                *d |= u128::from(a.2[l] ^ b.2[l]);
            }
        }
    }
    for ((r, _), old) in reads.iter().zip(&old) {
        cx.w.regs.replace(*r, u32::MAX, old);
    }
    cx.w.regs.check_reads(check);
    cx.w.regs.bad = None;
    Ok(differ)
}

/// Whether the defined bits of two integers decide how they compare.
fn decided(c: Comparison, (a, ua): (u64, u128), (b, ub): (u64, u128)) -> bool {
    let Comparison::Int(op, ty) = c else { return ua == 0 && ub == 0 };
    let mask = low(ty.bits) as u64;
    let (ua, ub) = (ua as u64 & mask, ub as u64 & mask);
    if matches!(op, Compare::Eq | Compare::Ne) {
        return ua | ub == 0 || (a ^ b) & mask & !(ua | ub) != 0;
    }
    // The sign bit counts the other way.
    let sign = if ty.signed { 1 << (ty.bits - 1) } else { 0 };
    let least = |v: u64, u: u64| v & !u | u & sign;
    let most = |v: u64, u: u64| v & !u | u & !sign;
    let compare = |x, y| super::arith::compares(c, x, y);
    compare(least(a, ua), most(b, ub)) == compare(most(a, ua), least(b, ub))
}

impl Spread {
    /// The undefined bits of a lane's result, of operands with these.
    fn reach(&self, operands: &[u128], values: impl Fn(usize) -> u64) -> u128 {
        let any = operands.iter().fold(0, |any, bits| any | bits);
        let at = |element: u32, width: u32| low(width).checked_shl(element * width).unwrap_or(0);
        let all_if = |undefined: bool| if undefined { u128::MAX } else { 0 };
        match self {
            Spread::Bits => all_if(any != 0),
            Spread::Upward => u128::MAX.checked_shl(any.trailing_zeros()).unwrap_or(0),
            Spread::Elements(from, to) => {
                (0..128 / from).filter(|e| any & at(*e, *from) != 0).fold(0, |m, e| m | at(e, *to))
            }
            Spread::Places(to, from) => {
                let undefined = operands.iter().zip(0..).filter(|(bits, _)| **bits & low(*from) != 0);
                undefined.fold(0, |m, (_, e)| m | at(e, *to))
            }
            Spread::Comparison(c) => all_if(!decided(*c, (values(0), operands[0]), (values(1), operands[1]))),
            Spread::Whole(width) => all_if(any & low(*width) != 0),
        }
    }
}

/// Completes an instruction that has computed with undefined bits; in `unsure` lanes its guard is undefined.
pub fn settle(op: &Op, cx: &mut Cx<'_, '_>, unsure: u32) -> Result<()> {
    let OpKind::Computes(Operands { how, sources, controls }) = &op.kind else { return Ok(()) };
    let pc = cx.pc;
    let (reads, writes) = cx.w.regs.take_aside();
    let shadow = |cx: &Cx<'_, '_>, s: Src| cx.w.regs.shadow(s, pc);
    let reads: Vec<_> = reads.into_iter().map(|r| (r, shadow(cx, Src::Reg(r)))).collect();
    let shadows: Vec<Shadow> = sources.iter().map(|s| shadow(cx, *s)).collect();
    let whole = controls.iter().fold(unsure, |m, s| m | cx.w.regs.unwritten(*s));
    let differ = match how {
        Spread::Bits if reads.len() <= TRIED => tried(op, cx, &reads)?,
        _ => Vec::new(),
    };
    let values: Vec<[u64; 32]> = match how {
        Spread::Comparison(_) => sources.iter().map(|s| cx.w.regs.peek64(*s)).collect(),
        _ => Vec::new(),
    };
    // Of a predicate that comes with a number, all bits of the number decide.
    let is_predicate = |write: &Aside| matches!(write.0, Reg::Pred(_));
    let numbers = writes.iter().any(|write| !is_predicate(write));
    for (n, write) in writes.iter().enumerate() {
        let mut out = Shadow::default();
        let tried = differ.get(n).filter(|_| !(numbers && is_predicate(write)));
        for l in lanes(write.1) {
            let bits = match tried {
                _ if whole >> l & 1 != 0 => u128::MAX,
                Some(differ) => differ[l],
                None => {
                    let operands: SmallVec<[u128; 4]> = shadows.iter().map(|s| s.bits[l]).collect();
                    how.reach(&operands, |k| values[k][l])
                }
            };
            let bits = if is_predicate(write) { (bits != 0).into() } else { bits };
            out.add(l, bits, reads.iter().find_map(|(_, s)| s.origins[l]));
        }
        cx.w.regs.put_back(write, &out);
    }
    Ok(())
}

/// Whether an operand of a product is not defined in all lanes.
pub fn any_operand(op: &Mma, cx: &Cx<'_, '_>) -> bool {
    let scales = op.scale.iter().flat_map(|(_, _, s)| s.iter().map(|s| s.data));
    let matrices = op.a.iter().chain(&op.b).map(|r| Src::Reg(*r));
    matrices.chain(op.c.iter().copied()).chain(scales).any(|s| cx.w.regs.unwritten(s) != 0)
}

/// The undefined bits of the registers of D: those in a row of A, or a column of B, or under an element of C, that has any.
pub fn product(op: &Mma, cx: &mut Cx<'_, '_>) -> Result<Vec<Shadow>> {
    let pc = cx.pc;
    let [m, n, k] = op.shape;
    let bits = op.container;
    let per = (32 / bits).max(1);
    let mut rows: Vec<Option<Origin>> = vec![None; m as usize];
    let mut columns: Vec<Option<Origin>> = vec![None; n as usize];
    let note = |list: &mut [Option<Origin>], regs: &[Reg], index: &dyn Fn(u32, u32) -> u32| {
        for (r, reg) in regs.iter().enumerate().filter(|(_, r)| cx.w.regs.unwritten(Src::Reg(**r)) != 0) {
            let shadow = cx.w.regs.shadow(Src::Reg(*reg), pc);
            for l in 0..32 {
                for e in (0..per).filter(|e| shadow.bits[l] >> (e * bits) & low(bits) != 0) {
                    let at = &mut list[index(l as u32, r as u32 * per + e) as usize];
                    *at = at.or(shadow.origins[l]);
                }
            }
        }
    };
    note(&mut rows, &op.a, &|l, i| fragment_a(bits, (m, k), l, i).0);
    note(&mut columns, &op.b, &|l, i| fragment_b(bits, k, l, i).1);
    if let Some((_, vec, scales)) = &op.scale {
        for (s, list) in scales.iter().zip([&mut rows, &mut columns]) {
            let shadow = cx.w.regs.shadow(s.data, pc);
            let byte = cx.uniform(s.byte, "the byte selector")? as u32;
            let thread = cx.uniform(s.thread, "the thread selector")? as u32;
            let first = scale_byte(*vec, byte, 0)?;
            let of_a = list.len() > 8;
            for (at, index) in list.iter_mut().zip(0..) {
                let lane = if of_a { scale_a_lane(index, thread) } else { scale_b_lane(index, thread) };
                let lane = lane as usize & 31;
                if shadow.bits[lane] >> (8 * first) & low(8 * vec) != 0 {
                    *at = at.or(shadow.origins[lane]);
                }
            }
        }
    }
    let [width_c, width] = op.sums.map_or([64; 2], |sums| sums.map(|sum| sum.bits()));
    let [packed_c, packed] = [width_c, width].map(|width| (32 / width).max(1));
    let c: Vec<Shadow> = op.c.iter().map(|c| cx.w.regs.shadow(*c, pc)).collect();
    let mut out = vec![Shadow::default(); op.d.len()];
    for (r, out) in out.iter_mut().enumerate() {
        for (l, e) in (0..32).flat_map(|l| (0..packed).map(move |e| (l, e))) {
            let i = r as u32 * packed + e;
            let (row, column) = fragment_c((m, n), l as u32, i);
            let addend = c.get((i / packed_c) as usize);
            let addend = addend.filter(|c| c.bits[l] >> (i % packed_c * width_c) & low(width_c) != 0);
            let of_c = addend.and_then(|c| c.origins[l]);
            let origin = rows[row as usize].or(columns[column as usize]).or(of_c);
            if origin.is_some() {
                out.add(l, low(width) << (e * width), origin);
            }
        }
    }
    Ok(out)
}

impl Launch<'_> {
    /// The fault that a value is used which came from here.
    pub fn undefined(&self, origin: Origin, lane: Option<usize>, pc: u32) -> Fault {
        let (text, role) = match origin.source {
            Source::Register(r) => {
                (format!("register {} is used, which nothing wrote", self.kernel.register(r)), "first read")
            }
            Source::Shared { .. } => ("a value from shared memory is used that nothing wrote".into(), "read"),
            Source::Thread(_) => {
                ("a value from the thread's memory is used that nothing wrote".into(), "read")
            }
            Source::Division => ("the result of a division by zero is used".into(), "division"),
            Source::Lane(l) => {
                (format!("a value of lane {l} is used, which does not take part in the shuffle"), "shuffle")
            }
        };
        let mut fault = Fault::new(Check::Uninit, text);
        fault.lane = lane.map(|l| l as u32);
        match origin.source {
            Source::Shared { rank, offset } => fault = fault.at(self.describe_shared(rank, offset)),
            Source::Thread(place) => fault = fault.at(place),
            _ => {}
        }
        if origin.pc == pc {
            return fault;
        }
        fault.party(Party::new(role, origin.pc))
    }
}

impl Cluster<'_> {
    /// What is undefined of shared memory that a thread reads, which [`touch_shared`](Cluster::touch_shared) has just
    /// complained of.
    #[cold]
    pub(super) fn hole_in_shared(
        &mut self,
        rank: u32,
        offset: u32,
        len: u32,
        kind: shadow::Kind,
        who: Who<'_>,
    ) -> Result<Option<Hole>> {
        let look = Look { uninit: false, ..self.look(Memory::Shared(rank)) };
        let access = Access { actor: who.actor, clock: who.clock, pc: who.pc, kind, era: 0 };
        let shared = &mut self.ctas[rank as usize].shared;
        let words = (&mut shared.shadow[..], Some(&mut shared.tags));
        let result = self.states.access(words, offset as usize, len as usize, access, &who, look);
        if let Err((byte, c)) = result {
            return Err(
                self.conflict(c, (kind, &who), len, "shared", |l| l.describe_shared(rank, byte as u32))
            );
        }
        let shared = &self.ctas[rank as usize].shared;
        let left = shared.holes.of(offset.into(), len.into());
        let never = |b: &u32| !self.states.written(&shared.shadow, (offset + b) as usize, 1);
        let bytes = (0..len).filter(never).fold(0, |m, b| m | Hole::bit(b));
        let first = Source::Shared { rank, offset: offset + (0..len).find(never).unwrap_or(0) };
        let origin = match left {
            Some(hole) if bytes == 0 => hole.origin,
            _ => Origin { source: first, pc: who.pc },
        };
        Ok(Some(Hole { bytes: bytes | left.map_or(0, |h| h.bytes), origin }).filter(|h| h.bytes != 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::semantics::float::int::IntType;

    fn reach(spread: &Spread, operands: &[u128]) -> u128 {
        spread.reach(operands, |_| 0)
    }

    #[test]
    fn undefined_bits_reach_as_far_as_they_can_exact() {
        assert_eq!(reach(&Spread::Upward, &[0x100, 0x40]), u128::MAX << 6);
        assert_eq!(reach(&Spread::Upward, &[0, 0]), 0);
        assert_eq!(reach(&Spread::Elements(16, 16), &[0x1_0000, 0]), 0xffff_0000);
        assert_eq!(reach(&Spread::Elements(4, 16), &[0x11, 0]), 0xffff_ffff);
        assert_eq!(reach(&Spread::Places(8, 32), &[0, 1 << 31]), 0xff00);
        assert_eq!(reach(&Spread::Places(16, 16), &[1 << 16, 1]), 0xffff_0000);
        assert_eq!(reach(&Spread::Whole(16), &[1 << 16]), 0);
        assert_eq!(reach(&Spread::Whole(16), &[1 << 15]), u128::MAX);
    }

    #[test]
    fn defined_bits_decide_comparisons_exact() {
        let int = |op, signed| Comparison::Int(op, IntType { bits: 32, signed });
        // 0x1?? against 5: unequal whatever the low byte is, and larger.
        assert!(decided(int(Compare::Eq, false), (0x100, 0xff), (5, 0)));
        assert!(!decided(int(Compare::Eq, false), (0, 0xff), (5, 0)));
        assert!(decided(int(Compare::Gt, false), (0x100, 0xff), (5, 0)));
        assert!(!decided(int(Compare::Lt, false), (0, 0xff), (5, 0)));
        // With an undefined sign a signed number may be less than 5, an unsigned one may not.
        assert!(!decided(int(Compare::Lt, true), (7, 1 << 31), (5, 0)));
        assert!(decided(int(Compare::Lt, false), (7, 1 << 31), (5, 0)));
        // Bits above the type do not matter.
        assert!(decided(int(Compare::Lt, false), (7, 1 << 32), (5, 0)));
    }
}
