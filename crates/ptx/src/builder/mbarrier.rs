//! Memory barriers in shared memory, and fences.

use super::Kernel;
use super::addr::{Addr, Cluster, Shared};
use super::memory::{Scope, Semantics};
use super::reg::*;
use crate::ast::Operand;

instructions! {
    /// Sets up an mbarrier that completes a phase after `count` arrivals. Other threads may use it after a barrier;
    /// other CTAs and the async proxy after [`fence_mbarrier_init`](Self::fence_mbarrier_init) and a barrier.
    mbarrier_init(mbarrier: Addr<Shared>, count: impl Src<U32>) = "mbarrier.init.shared::cta.b64";
    /// Arrives once, releasing to the CTA.
    mbarrier_arrive(mbarrier: Addr<Shared>)
        = "mbarrier.arrive.shared::cta.b64", [Operand::Sink, mbarrier.operand()];
    /// Arrives once at an mbarrier of any CTA of the cluster, releasing to the cluster.
    mbarrier_arrive_remote_release(mbarrier: Addr<Cluster>)
        = "mbarrier.arrive.release.cluster.shared::cluster.b64", [Operand::Sink, mbarrier.operand()];
    /// Announces `bytes` that asynchronous copies will complete, then arrives once.
    mbarrier_arrive_expect_tx(mbarrier: Addr<Shared>, bytes: impl Src<U32>)
        = "mbarrier.arrive.expect_tx.shared::cta.b64", [Operand::Sink, mbarrier.operand(), bytes.operand()];
    /// Whether the phase of this parity is complete; may wait a while first.
    mbarrier_try_wait(mbarrier: Addr<Shared>, parity: impl Src<U32>) -> Pred
        = "mbarrier.try_wait.parity.shared::cta.b64";

    /// Makes the set-up of mbarriers visible to the cluster and the async proxy; a barrier must follow.
    fence_mbarrier_init() = "fence.mbarrier_init.release.cluster";
    /// Orders ordinary accesses to shared memory before later ones by TMA, wgmma and tcgen05.
    fence_proxy_async_shared() = "fence.proxy.async.shared::cta";
    /// A fence for all memory; `semantics` is acquire-release, or acquire or release alone.
    fence(semantics: Semantics, scope: Scope) = format!("fence.{}.{}", semantics.as_str(), scope.as_str()), [];
}

impl Kernel {
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
}
