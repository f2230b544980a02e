//! Memory barriers in shared memory, and fences.

use super::Kernel;
use super::addr::{Addr, Cluster, Shared};
use super::memory::{Scope, Semantics};
use super::reg::*;
use crate::ast::Operand;

impl Kernel {
    /// Sets up an mbarrier that completes a phase after `count` arrivals. Other threads may use it after a barrier;
    /// other CTAs and the async proxy after [`fence_mbarrier_init`](Self::fence_mbarrier_init) and a barrier.
    pub fn mbarrier_init(&mut self, mbarrier: Addr<Shared>, count: impl Src<U32>) {
        self.push("mbarrier.init.shared::cta.b64", vec![mbarrier.operand(), count.operand()]);
    }

    /// Ends the life of an mbarrier; its memory may be used otherwise.
    pub fn mbarrier_invalidate(&mut self, mbarrier: Addr<Shared>) {
        self.push("mbarrier.inval.shared::cta.b64", vec![mbarrier.operand()]);
    }

    /// Arrives once, releasing to the CTA.
    pub fn mbarrier_arrive(&mut self, mbarrier: Addr<Shared>) {
        self.push("mbarrier.arrive.shared::cta.b64", vec![Operand::Sink, mbarrier.operand()]);
    }

    /// Arrives once at an mbarrier of any CTA of the cluster, releasing to the CTA only.
    pub fn mbarrier_arrive_remote(&mut self, mbarrier: Addr<Cluster>) {
        self.push("mbarrier.arrive.shared::cluster.b64", vec![Operand::Sink, mbarrier.operand()]);
    }

    /// Arrives once at an mbarrier of any CTA of the cluster, releasing to the cluster.
    pub fn mbarrier_arrive_remote_release(&mut self, mbarrier: Addr<Cluster>) {
        let opcode = "mbarrier.arrive.release.cluster.shared::cluster.b64";
        self.push(opcode, vec![Operand::Sink, mbarrier.operand()]);
    }

    /// Announces `bytes` that asynchronous copies will complete, then arrives once.
    pub fn mbarrier_arrive_expect_tx(&mut self, mbarrier: Addr<Shared>, bytes: impl Src<U32>) {
        let operands = vec![Operand::Sink, mbarrier.operand(), bytes.operand()];
        self.push("mbarrier.arrive.expect_tx.shared::cta.b64", operands);
    }

    /// Announces `bytes` that asynchronous copies will complete.
    pub fn mbarrier_expect_tx(&mut self, mbarrier: Addr<Shared>, bytes: impl Src<U32>) {
        self.push(
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
            vec![mbarrier.operand(), bytes.operand()],
        );
    }

    /// Whether the phase of this parity is complete; may wait a while first.
    pub fn mbarrier_try_wait(&mut self, mbarrier: Addr<Shared>, parity: impl Src<U32>) -> Reg<Pred> {
        let opcode = "mbarrier.try_wait.parity.shared::cta.b64";
        self.give(opcode, vec![mbarrier.operand(), parity.operand()])
    }

    /// Whether the phase of this parity is complete; at once.
    pub fn mbarrier_test_wait(&mut self, mbarrier: Addr<Shared>, parity: impl Src<U32>) -> Reg<Pred> {
        let opcode = "mbarrier.test_wait.parity.shared::cta.b64";
        self.give(opcode, vec![mbarrier.operand(), parity.operand()])
    }

    /// Waits until the phase of this parity is complete (a loop of [`mbarrier_try_wait`](Self::mbarrier_try_wait)
    /// labelled `wait_<what>`). A fresh mbarrier lets parity 1 pass.
    pub fn mbarrier_wait(&mut self, mbarrier: Addr<Shared>, parity: impl Src<U32>, what: &str) {
        self.spin(&format!("wait_{what}"), |k| k.mbarrier_try_wait(mbarrier, parity));
    }

    /// As [`mbarrier_wait`](Self::mbarrier_wait), acquiring what other CTAs of the cluster released.
    pub fn mbarrier_wait_cluster(&mut self, mbarrier: Addr<Shared>, parity: impl Src<U32>, what: &str) {
        self.spin(&format!("wait_{what}"), |k| {
            let opcode = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64";
            k.give(opcode, vec![mbarrier.operand(), parity.operand()])
        });
    }

    /// Makes the set-up of mbarriers visible to the cluster and the async proxy; a barrier must follow.
    pub fn fence_mbarrier_init(&mut self) {
        self.push("fence.mbarrier_init.release.cluster", Vec::new());
    }

    /// Orders ordinary accesses to shared memory before later ones by TMA, wgmma and tcgen05.
    pub fn fence_proxy_async_shared(&mut self) {
        self.push("fence.proxy.async.shared::cta", Vec::new());
    }

    /// Orders ordinary accesses to any memory before later ones by the async proxy.
    pub fn fence_proxy_async(&mut self) {
        self.push("fence.proxy.async", Vec::new());
    }

    /// A fence for all memory; `semantics` is acquire-release, or acquire or release alone.
    pub fn fence(&mut self, semantics: Semantics, scope: Scope) {
        self.push(&format!("fence.{}.{}", semantics.as_str(), scope.as_str()), Vec::new());
    }
}
