//! Barriers between threads, communication between lanes, launch control, special registers.

use super::addr::{Addr, Shared};
use super::reg::*;
use super::{Integer, Kernel, number};
use crate::ast::Operand;

words! {
    /// A special register of 32 bits.
    Special {
        TidX "%tid.x" "Thread in the CTA.",
        NtidX "%ntid.x" "Threads of the CTA.",
        CtaidX "%ctaid.x" "CTA in the grid.",
        CtaidY "%ctaid.y" "CTA in the grid, second dimension.",
        CtaidZ "%ctaid.z" "CTA in the grid, third dimension.",
        NctaidX "%nctaid.x" "CTAs of the grid.",
        ClusterCtaRank "%cluster_ctarank" "CTA in its cluster.",
        ClusterIdX "%clusterid.x" "Cluster in the grid.",
        NclusterIdX "%nclusterid.x" "Clusters of the grid.",
        LaneId "%laneid" "Lane in the warp.",
        SmId "%smid" "Multiprocessor.",
    }

    /// How `shfl` picks the lane it reads.
    Shuffle {
        Index "idx" "The lane given.",
        Up "up" "The own lane less the number given.",
        Down "down" "The own lane plus the number given.",
        Xor "bfly" "The own lane XOR the number given.",
    }

    /// How `redux` combines the lanes.
    Redux {
        Add "add" "Sum.",
        Min "min" "Minimum.",
        Max "max" "Maximum.",
    }
}

fn all() -> Operand {
    Src::<B32>::operand(u32::MAX)
}

instructions! {
    /// Reads a special register.
    special(register: Special) -> U32 = "mov.u32", [Operand::Ident(register.as_str().into())];
    /// The clock of the multiprocessor.
    clock() -> U64 = "mov.u64", [Operand::Ident("%clock64".into())];

    /// Waits until every thread of the CTA is here.
    cta_sync() = "barrier.sync.aligned", [number(0)];
    /// Waits at barrier `id` (0 to 15) until `threads` threads, a multiple of 32, are here. Warps come whole and
    /// converged.
    bar_sync(id: impl Src<U32>, threads: impl Src<U32>) = "barrier.sync.aligned";
    /// Waits until all lanes of the warp are here.
    warp_sync() = "bar.warp.sync", [all()];
    /// Arrives at the cluster barrier, releasing.
    cluster_arrive() = "barrier.cluster.arrive.release.aligned";
    /// Arrives at the cluster barrier behind a fence that releases.
    cluster_arrive_relaxed() = "barrier.cluster.arrive.relaxed.aligned";
    /// Waits until all threads of the cluster have arrived, acquiring.
    cluster_wait() = "barrier.cluster.wait.acquire.aligned";

    /// `a` of another lane.
    shuffle<T: RegType>(how: Shuffle, a: Reg<T>, lane: impl Src<U32>) -> T
        = format!("shfl.sync.{}.b32", how.as_str()),
        [a.operand(), lane.operand(), number(if how == Shuffle::Up { 0 } else { 31 }), all()];
    /// The lanes for which `p` holds, as bits.
    ballot(p: impl Into<Cond>) -> B32 = "vote.sync.ballot.b32", [p.into().operand(), all()];
    /// The integers of all lanes combined.
    redux<T: Integer>(op: Redux, a: Reg<T>) -> T
        = format!("redux.sync.{}.{}", op.as_str(), T::TYPE), [a.operand(), all()];

    /// The warpgroup takes registers up to `count` per thread (a multiple of 8).
    setmaxnreg_inc(count: u32) = "setmaxnreg.inc.sync.aligned.u32", [number(count.into())];
    /// The warpgroup gives registers back down to `count` per thread (a multiple of 8).
    setmaxnreg_dec(count: u32) = "setmaxnreg.dec.sync.aligned.u32", [number(count.into())];
    /// Waits until the kernels this one depends on are done and their writes visible.
    grid_dependency_wait() = "griddepcontrol.wait";
    /// Lets dependent kernels start.
    launch_dependents() = "griddepcontrol.launch_dependents";

    /// Asks for a cluster that has not started, to do its work: the 16-byte answer goes to `answer`, its bytes are
    /// completed on `mbarrier`.
    try_cancel(answer: Addr<Shared>, mbarrier: Addr<Shared>)
        = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128";
}

impl Kernel {
    /// The warp's number in the CTA, in a form ptxas knows to be the same for all lanes (three instructions).
    pub fn warp_index(&mut self) -> Reg<U32> {
        let thread = self.special(Special::TidX);
        let warp = self.shr(thread, 5u32);
        self.shuffle(Shuffle::Index, warp, 0u32)
    }

    /// Arrives at the cluster barrier and waits.
    pub fn cluster_sync(&mut self) {
        self.cluster_arrive();
        self.cluster_wait();
    }

    /// True for exactly one lane of the warp. All lanes must be here.
    pub fn elect(&mut self) -> Reg<Pred> {
        let leader = self.result::<Pred>();
        let pair = Operand::Pair(Box::new(Operand::Sink), Box::new(leader.operand()));
        self.push("elect.sync", vec![pair, all()]);
        leader
    }
}
