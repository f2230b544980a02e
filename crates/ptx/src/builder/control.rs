//! Barriers between threads, communication between lanes, launch control, special registers.

use super::addr::{Addr, Shared};
use super::reg::*;
use super::{Kernel, number, vector};
use crate::ast::Operand;

/// A special register of 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// Thread in the CTA.
    TidX,
    /// Threads of the CTA.
    NtidX,
    /// CTA in the grid.
    CtaidX,
    /// CTA in the grid, second dimension.
    CtaidY,
    /// CTA in the grid, third dimension.
    CtaidZ,
    /// CTAs of the grid.
    NctaidX,
    /// CTA in its cluster.
    ClusterCtaRank,
    /// Cluster in the grid.
    ClusterIdX,
    /// Clusters of the grid.
    NclusterIdX,
    /// Lane in the warp.
    LaneId,
    /// Multiprocessor.
    SmId,
}

impl Special {
    fn as_str(self) -> &'static str {
        match self {
            Special::TidX => "%tid.x",
            Special::NtidX => "%ntid.x",
            Special::CtaidX => "%ctaid.x",
            Special::CtaidY => "%ctaid.y",
            Special::CtaidZ => "%ctaid.z",
            Special::NctaidX => "%nctaid.x",
            Special::ClusterCtaRank => "%cluster_ctarank",
            Special::ClusterIdX => "%clusterid.x",
            Special::NclusterIdX => "%nclusterid.x",
            Special::LaneId => "%laneid",
            Special::SmId => "%smid",
        }
    }
}

/// How `shfl` picks the lane it reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shuffle {
    /// The lane given.
    Index,
    /// The own lane less the number given.
    Up,
    /// The own lane plus the number given.
    Down,
    /// The own lane XOR the number given.
    Xor,
}

/// How `redux` combines the lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Redux {
    /// Sum.
    Add,
    /// Minimum.
    Min,
    /// Maximum.
    Max,
}

/// All 32 lanes.
const ALL: u32 = u32::MAX;

fn all() -> Operand {
    Src::<B32>::operand(ALL)
}

impl Kernel {
    /// Reads a special register.
    pub fn special(&mut self, register: Special) -> Reg<U32> {
        self.give("mov.u32", vec![Operand::Ident(register.as_str().into())])
    }

    /// The clock of the multiprocessor.
    pub fn clock(&mut self) -> Reg<U64> {
        self.give("mov.u64", vec![Operand::Ident("%clock64".into())])
    }

    /// The warp's number in the CTA, in a form ptxas knows to be the same for all lanes (three instructions).
    pub fn warp_index(&mut self) -> Reg<U32> {
        let thread = self.special(Special::TidX);
        let warp = self.shr(thread, 5u32);
        self.shuffle(Shuffle::Index, warp, 0u32)
    }

    /// Waits until every thread of the CTA is here.
    pub fn cta_sync(&mut self) {
        self.push("barrier.sync.aligned", vec![number(0)]);
    }

    /// Waits at barrier `id` (0 to 15) until `threads` threads, a multiple of 32, are here. Warps come whole and
    /// converged.
    pub fn bar_sync(&mut self, id: impl Src<U32>, threads: impl Src<U32>) {
        self.push("barrier.sync.aligned", vec![id.operand(), threads.operand()]);
    }

    /// Arrives at barrier `id` for which `threads` threads count, without waiting. Warps come whole and converged.
    pub fn bar_arrive(&mut self, id: impl Src<U32>, threads: impl Src<U32>) {
        self.push("barrier.arrive.aligned", vec![id.operand(), threads.operand()]);
    }

    /// Waits until all lanes of the warp are here.
    pub fn warp_sync(&mut self) {
        self.push("bar.warp.sync", vec![all()]);
    }

    /// Arrives at the cluster barrier, releasing.
    pub fn cluster_arrive(&mut self) {
        self.push("barrier.cluster.arrive.release.aligned", Vec::new());
    }

    /// Waits until all threads of the cluster have arrived, acquiring.
    pub fn cluster_wait(&mut self) {
        self.push("barrier.cluster.wait.acquire.aligned", Vec::new());
    }

    /// Arrive and wait.
    pub fn cluster_sync(&mut self) {
        self.cluster_arrive();
        self.cluster_wait();
    }

    /// `a` of another lane.
    pub fn shuffle<T: RegType>(&mut self, how: Shuffle, a: Reg<T>, lane: impl Src<U32>) -> Reg<T> {
        let (mode, clamp) = match how {
            Shuffle::Index => ("idx", 31),
            Shuffle::Up => ("up", 0),
            Shuffle::Down => ("down", 31),
            Shuffle::Xor => ("bfly", 31),
        };
        let sources = vec![a.operand(), lane.operand(), number(clamp), all()];
        self.give(&format!("shfl.sync.{mode}.b32"), sources)
    }

    /// The lanes for which `p` holds, as bits.
    pub fn ballot(&mut self, p: impl Into<Cond>) -> Reg<B32> {
        self.give("vote.sync.ballot.b32", vec![p.into().operand(), all()])
    }

    /// Whether `p` holds for any lane.
    pub fn vote_any(&mut self, p: impl Into<Cond>) -> Reg<Pred> {
        self.give("vote.sync.any.pred", vec![p.into().operand(), all()])
    }

    /// Whether `p` holds for all lanes.
    pub fn vote_all(&mut self, p: impl Into<Cond>) -> Reg<Pred> {
        self.give("vote.sync.all.pred", vec![p.into().operand(), all()])
    }

    /// True for exactly one lane of the warp. All lanes must be here.
    pub fn elect(&mut self) -> Reg<Pred> {
        let leader = self.result::<Pred>();
        let pair = Operand::Pair(Box::new(Operand::Sink), Box::new(leader.operand()));
        self.push("elect.sync", vec![pair, all()]);
        leader
    }

    /// The integers of all lanes combined.
    pub fn redux<T: super::Integer>(&mut self, op: Redux, a: Reg<T>) -> Reg<T> {
        let op = match op {
            Redux::Add => "add",
            Redux::Min => "min",
            Redux::Max => "max",
        };
        self.give(&format!("redux.sync.{op}.{}", T::TYPE), vec![a.operand(), all()])
    }

    /// The warpgroup takes registers up to `count` per thread (a multiple of 8).
    pub fn setmaxnreg_inc(&mut self, count: u32) {
        self.push("setmaxnreg.inc.sync.aligned.u32", vec![number(count.into())]);
    }

    /// The warpgroup gives registers back down to `count` per thread (a multiple of 8).
    pub fn setmaxnreg_dec(&mut self, count: u32) {
        self.push("setmaxnreg.dec.sync.aligned.u32", vec![number(count.into())]);
    }

    /// Waits until the kernels this one depends on are done and their writes visible.
    pub fn grid_dependency_wait(&mut self) {
        self.push("griddepcontrol.wait", Vec::new());
    }

    /// Lets dependent kernels start.
    pub fn launch_dependents(&mut self) {
        self.push("griddepcontrol.launch_dependents", Vec::new());
    }

    /// Sleeps for about `ns` nanoseconds.
    pub fn nanosleep(&mut self, ns: impl Src<U32>) {
        self.push("nanosleep.u32", vec![ns.operand()]);
    }

    /// Asks for a cluster that has not started, to do its work: the 16-byte answer goes to `answer`, its bytes are
    /// completed on `mbarrier`.
    pub fn try_cancel(&mut self, answer: Addr<Shared>, mbarrier: Addr<Shared>) {
        let opcode = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128";
        self.push(opcode, vec![answer.operand(), mbarrier.operand()]);
    }

    /// As [`try_cancel`](Self::try_cancel), answering every CTA of the cluster.
    pub fn try_cancel_multicast(&mut self, answer: Addr<Shared>, mbarrier: Addr<Shared>) {
        let opcode = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes\
                      .multicast::cluster::all.b128";
        self.push(opcode, vec![answer.operand(), mbarrier.operand()]);
    }

    /// Whether an answer names a cluster.
    pub fn is_canceled(&mut self, answer: Reg<B128>) -> Reg<Pred> {
        self.give("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", vec![answer.operand()])
    }

    /// The first CTA (x, y, z) of the cluster an answer names.
    pub fn first_ctaid(&mut self, answer: Reg<B128>) -> [Reg<B32>; 3] {
        let id: [Reg<B32>; 3] = std::array::from_fn(|_| self.register());
        let Operand::Vector(mut elements) = vector(&id) else { return id };
        elements.push(Operand::Sink);
        let opcode = "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128";
        self.push(opcode, vec![Operand::Vector(elements), answer.operand()]);
        id
    }
}
