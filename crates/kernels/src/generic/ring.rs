//! A ring of stages in shared memory between threads that load and warps that multiply.

use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::SmemRegion;

/// Barriers of the ring.
#[derive(Clone, Copy)]
pub(crate) struct Ring {
    pub(crate) stages: u32,
    /// First "full" and first "empty" barrier.
    pub(crate) full: Addr<Shared>,
    pub(crate) empty: Addr<Shared>,
}

/// Where a role stands in the ring.
#[derive(Clone, Copy)]
pub(crate) struct Cursor {
    pub(crate) stage: Reg<U32>,
    phase: Reg<U32>,
}

impl Ring {
    pub(crate) fn new(base: Addr<Shared>, stages: u32, full: &SmemRegion, empty: &SmemRegion) -> Self {
        Self { stages, full: base.at(full.offset), empty: base.at(empty.offset) }
    }

    /// Sets the barriers up: a stage is full after `fillers` arrivals and its bytes, empty after `takers`. All threads
    /// of the CTA are here.
    pub(crate) fn init(&self, k: &mut Kernel, fillers: u32, takers: u32) {
        let thread = k.special(Special::TidX);
        let first = k.compare(Cmp::Eq, thread, 0u32);
        k.if_(first, "init", |k| {
            for stage in 0..self.stages {
                k.mbarrier_init(self.full.at(8 * stage), fillers);
                k.mbarrier_init(self.empty.at(8 * stage), takers);
            }
            k.fence_mbarrier_init();
        });
        k.cta_sync();
    }

    /// The beginning for those who fill (all stages are empty) or for those who take.
    pub(crate) fn start(&self, k: &mut Kernel, fills: bool) -> Cursor {
        Cursor { stage: k.mov::<U32>(0u32), phase: k.mov::<U32>(u32::from(fills)) }
    }

    pub(crate) fn advance(&self, k: &mut Kernel, at: Cursor) {
        k.to(at.stage).add(at.stage, 1u32);
        let wrapped = k.compare(Cmp::Eq, at.stage, self.stages);
        k.when(wrapped).to(at.stage).mov::<U32>(0u32);
        k.when(wrapped).to(at.phase).xor(at.phase, 1u32);
    }

    fn barrier(&self, k: &mut Kernel, first: Addr<Shared>, at: Cursor) -> Addr<Shared> {
        let byte = k.shl(at.stage, 3u32);
        k.offset(first, byte.cast())
    }

    /// Waits until the stage is empty and gives its "full" barrier.
    pub(crate) fn wait_empty(&self, k: &mut Kernel, at: Cursor) -> Addr<Shared> {
        let empty = self.barrier(k, self.empty, at);
        k.mbarrier_wait(empty, at.phase, "empty");
        self.barrier(k, self.full, at)
    }

    pub(crate) fn wait_full(&self, k: &mut Kernel, at: Cursor) {
        let full = self.barrier(k, self.full, at);
        k.mbarrier_wait(full, at.phase, "full");
    }

    /// One arrival at the "empty" barrier of the stage, by the lane for which `first_lane` holds.
    pub(crate) fn release(&self, k: &mut Kernel, at: Cursor, first_lane: Reg<Pred>) {
        let empty = self.barrier(k, self.empty, at);
        k.when(first_lane).mbarrier_arrive(empty);
    }
}

/// Low word of a `wgmma` descriptor of a tile at `start`; `desc` is the tile's.
pub(crate) fn low_word(k: &mut Kernel, start: Addr<Shared>, desc: u64) -> Reg<U32> {
    let address = k.add(start.base().cast::<U32>(), start.offset() as u32);
    let field = k.shr(address, 4u32);
    k.or(field.cast::<B32>(), desc as u32).cast()
}
