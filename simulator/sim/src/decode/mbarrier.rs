//! `mbarrier`. PTX ISA 9.7.13.15.

use super::*;

/// An arrival.
#[derive(Debug, Clone)]
pub struct Arrive {
    pub address: Addr,
    /// The state before it.
    pub state: Dst,
    pub drop: bool,
    /// Announces this many bytes first.
    pub expect: Option<Src>,
    pub count: Src,
    pub order: Ordering,
}

#[derive(Debug, Clone)]
pub enum Mbar {
    Init(Addr, Src),
    Inval(Addr),
    Expect(Addr, Src),
    Complete(Addr, Src),
    Arrive(Arrive),
    Wait {
        d: Dst,
        address: Addr,
        /// State or parity.
        phase: Src,
        /// `phase` is a parity.
        parity: bool,
        /// `try_wait`: may block for a while.
        blocks: bool,
        order: Ordering,
    },
    PendingCount(Dst, Src),
    /// `cp.async.mbarrier.arrive`; `true`: `.noinc`.
    CopyArrive(Addr, bool),
}

pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    i.ignore(&["b64", "noComplete"]);
    let relaxed = i.ast.has("relaxed");
    let mut order = i.ordering();
    // PTX ISA 9.7.13.15.13 and 16: without a word the scope is that of the CTA.
    let says = Scope::NAMES.iter().any(|(scope, _)| i.ast.has(scope));
    order.scope = if says { order.scope } else { Scope::Cta };
    let space = match i.space() {
        Space::SharedCluster => Space::SharedCluster,
        Space::SharedCta => Space::SharedCta,
        _ => Space::Generic,
    };
    let parity = i.has("parity");
    let drop = i.has("arrive_drop");
    let expect = i.has("expect_tx");
    let op = if i.has("arrive") || drop {
        order.release = !relaxed;
        // `arrive [a]` without a result exists for remote barriers.
        let at = usize::from(!matches!(i.operand(0)?, Operand::Address(_)));
        let state = if at == 1 { i.dst(0)? } else { Dst::Sink };
        let address = i.addr(at, space)?;
        let last = if i.count() > at + 1 { Some(i.src(at + 1, Type::U32)?) } else { None };
        let (expect, count) = match (expect, last) {
            (true, Some(tx)) => (Some(tx), Src::Imm(1)),
            (true, None) => return i.error("needs a byte count"),
            (false, count) => (None, count.unwrap_or(Src::Imm(1))),
        };
        Mbar::Arrive(Arrive { address, state, drop, expect, count, order })
    } else if i.has("init") {
        Mbar::Init(i.addr(0, space)?, i.src(1, Type::U32)?)
    } else if i.has("inval") {
        Mbar::Inval(i.addr(0, space)?)
    } else if expect {
        Mbar::Expect(i.addr(0, space)?, i.src(1, Type::U32)?)
    } else if i.has("complete_tx") {
        Mbar::Complete(i.addr(0, space)?, i.src(1, Type::U32)?)
    } else if i.has("pending_count") {
        Mbar::PendingCount(i.dst(0)?, i.src(1, Type::B64)?)
    } else {
        let blocks = i.need("an operation", &[("try_wait", true), ("test_wait", false)])?;
        order.acquire = !relaxed;
        let ty = if parity { Type::U32 } else { Type::B64 };
        let (d, address, phase) = (i.dst(0)?, i.addr(1, space)?, i.src(2, ty)?);
        Mbar::Wait { d, address, phase, parity, blocks, order }
    };
    i.finish()?;
    Ok(Op::Mbarrier(op))
}
