//! Bulk copies and the tensor memory accelerator. One thread issues each.

use super::addr::{Addr, Global, Shared};
use super::memory::Eviction;
use super::reg::*;
use super::tcgen05::CtaGroup;
use super::{Kernel, number};
use crate::ast::Operand;

/// What a bulk copy may be told beyond source and destination.
#[derive(Debug, Clone, Default)]
pub struct TmaOptions {
    /// Deliver to the CTAs of the cluster whose bit is set, at the same offsets (loads only).
    pub multicast: Option<Value<B16>>,
    /// How long L2 should keep the data.
    pub l2: Option<Eviction>,
    /// The mbarrier may be in either CTA of the pair (tensor loads on sm_100 only).
    pub cta_group: Option<CtaGroup>,
    /// Name the destination as the own CTA's (PTX 8.6). For sm_120, which has no clusters, ptxas otherwise adds a stack
    /// frame.
    pub own_cta: bool,
}

impl TmaOptions {
    fn destination(&self) -> &'static str {
        if self.own_cta { "shared::cta" } else { "shared::cluster" }
    }

    fn modifiers(&self) -> String {
        let multicast = if self.multicast.is_some() { ".multicast::cluster" } else { "" };
        let group = self.cta_group.map(CtaGroup::as_str).unwrap_or_default();
        let hint = if self.l2.is_some() { ".L2::cache_hint" } else { "" };
        format!("{multicast}{group}{hint}")
    }

    fn operands(&self) -> impl Iterator<Item = Operand> {
        let mask = self.multicast.clone().map(Src::operand);
        mask.into_iter().chain(self.l2.map(|e| Src::<B64>::operand(e.policy())))
    }
}

/// `[map, {c0, c1, ...}]`
fn place(map: Reg<U64>, coordinates: &[Value<S32>]) -> Operand {
    let coordinates = coordinates.iter().map(|c| c.clone().operand()).collect();
    Operand::List(vec![map.operand(), Operand::Vector(coordinates)])
}

instructions! {
    /// Copies `bytes` bytes of shared memory to global memory, as part of the thread's bulk group.
    bulk_store(to: Addr<Global>, from: Addr<Shared>, bytes: impl Src<U32>)
        = "cp.async.bulk.global.shared::cta.bulk_group";
    /// Closes a group of bulk stores of this thread.
    bulk_commit() = "cp.async.bulk.commit_group";
    /// Waits until at most `pending` groups of this thread are unfinished.
    bulk_wait(pending: u32) = "cp.async.bulk.wait_group", [number(pending.into())];
    /// Fetches a tensor map ahead of its first use.
    prefetch_tensor_map(map: Reg<U64>) = "prefetch.tensormap", [Addr::<super::Generic>::new(map).operand()];
}

impl Kernel {
    /// Copies `bytes` contiguous bytes of global memory to shared memory and completes them on `mbarrier`.
    /// Addresses and size are multiples of 16.
    pub fn bulk_load(
        &mut self,
        to: Addr<Shared>,
        from: Addr<Global>,
        bytes: impl Src<U32>,
        mbarrier: Addr<Shared>,
        options: &TmaOptions,
    ) {
        let opcode = format!(
            "cp.async.bulk.{}.global.mbarrier::complete_tx::bytes{}",
            options.destination(),
            options.modifiers()
        );
        let mut operands = vec![to.operand(), from.operand(), bytes.operand(), mbarrier.operand()];
        operands.extend(options.operands());
        self.push(&opcode, operands);
    }

    /// Loads the box at `coordinates` (innermost first, in elements; parts outside the tensor are filled) to
    /// shared memory and completes the bytes of the whole box on `mbarrier`.
    pub fn tensor_load(
        &mut self,
        to: Addr<Shared>,
        map: Reg<U64>,
        coordinates: &[Value<S32>],
        mbarrier: Addr<Shared>,
        options: &TmaOptions,
    ) {
        let opcode = format!(
            "cp.async.bulk.tensor.{}d.{}.global.tile.mbarrier::complete_tx::bytes{}",
            coordinates.len(),
            options.destination(),
            options.modifiers()
        );
        let mut operands = vec![to.operand(), place(map, coordinates), mbarrier.operand()];
        operands.extend(options.operands());
        self.push(&opcode, operands);
    }
}
