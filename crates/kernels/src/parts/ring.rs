//! Rings in shared memory: of stages between threads that load and warps that multiply, or of accumulators between these
//! and stores.

use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::SmemRegion;

/// A place in a ring of `count`, and the parity to wait for there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Position {
    /// The place.
    pub index: Reg<U32>,
    /// The parity.
    pub phase: Reg<U32>,
    count: u32,
}

impl Position {
    /// At the start. Those who wait for a place to become free start at phase 1, which a fresh barrier lets pass.
    pub fn start(k: &mut Kernel, phase: u32, count: u32) -> Self {
        Self { index: k.mov::<U32>(0u32), phase: k.mov::<U32>(phase), count }
    }

    /// One place further.
    pub fn advance(self, k: &mut Kernel) {
        self.advance_with(k, None);
    }

    /// One place further, an offset that runs along with it.
    fn advance_with(self, k: &mut Kernel, along: Option<(Reg<U32>, u32)>) {
        k.to(self.index).eval(self.index + 1);
        if let Some((offset, step)) = along {
            k.to(offset).eval(offset + step);
        }
        let wrapped = k.compare(Cmp::Eq, self.index, self.count);
        k.when(wrapped).to(self.index).mov::<U32>(0u32);
        if let Some((offset, _)) = along {
            k.when(wrapped).to(offset).mov::<U32>(0u32);
        }
        k.when(wrapped).to(self.phase).eval(self.phase ^ 1);
    }

    /// The mbarrier of this place, of those from `first` on.
    pub fn barrier(self, k: &mut Kernel, first: Addr<Shared>) -> Addr<Shared> {
        k.offset(first, self.index << 3)
    }
}

/// A position with the offset of its stage, which runs along instead of being multiplied out for every stage: Hopper's
/// main loop has few instructions to spare beside decoding.
#[derive(Clone, Copy)]
pub(crate) struct Cursor {
    pub at: Position,
    /// `index · step`.
    pub offset: Reg<U32>,
    step: u32,
}

impl Cursor {
    /// At the start of a ring whose stages are `step` apart; with 0 there is no offset to keep.
    pub fn start(k: &mut Kernel, ring: &Ring, fills: bool, step: u32) -> Self {
        Self { at: ring.start(k, fills), offset: k.mov::<U32>(0u32), step }
    }

    /// Of those who take, `stages` behind the start.
    pub fn behind(k: &mut Kernel, ring: &Ring, stages: Reg<U32>, step: u32) -> Self {
        let index = k.eval(stages % ring.stages);
        let phase = k.eval((stages / ring.stages) & 1);
        Self { at: Position { index, phase, count: ring.stages }, offset: k.eval(index * step), step }
    }

    /// One stage further.
    pub fn advance(self, k: &mut Kernel) {
        self.at.advance_with(k, (self.step != 0).then_some((self.offset, self.step)));
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Ring {
    pub(crate) stages: u32,
    /// First "full" and first "empty" barrier.
    pub(crate) full: Addr<Shared>,
    pub(crate) empty: Addr<Shared>,
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
    pub(crate) fn start(&self, k: &mut Kernel, fills: bool) -> Position {
        Position::start(k, u32::from(fills), self.stages)
    }

    /// Waits until the stage is empty and gives its "full" barrier.
    pub(crate) fn wait_empty(&self, k: &mut Kernel, at: Position) -> Addr<Shared> {
        let empty = at.barrier(k, self.empty);
        k.mbarrier_wait(empty, at.phase, "empty");
        at.barrier(k, self.full)
    }

    pub(crate) fn wait_full(&self, k: &mut Kernel, at: Position) {
        let full = at.barrier(k, self.full);
        k.mbarrier_wait(full, at.phase, "full");
    }

    /// One arrival at the "empty" barrier of the stage, by the lane for which `first_lane` holds.
    pub(crate) fn release(&self, k: &mut Kernel, at: Position, first_lane: Reg<Pred>) {
        let empty = at.barrier(k, self.empty);
        k.when(first_lane).mbarrier_arrive(empty);
    }
}

/// Low word of a `wgmma` descriptor of a tile at `start`; `desc` is the tile's.
pub(crate) fn low_word(k: &mut Kernel, start: Addr<Shared>, desc: u64) -> Reg<U32> {
    let field = k.eval((start.base() + start.offset() as u32) >> 4);
    k.eval(field.cast::<B32>() | desc as u32).cast()
}
