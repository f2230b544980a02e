//! Where a role stands in a ring: of stages between loads and multiplications, or of accumulators between these and
//! stores.

use dualgemm_ptx::builder::*;

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
    /// At the start. Who waits for something to become free begins with phase 1, which a fresh barrier lets pass.
    pub fn start(k: &mut Kernel, phase: u32, count: u32) -> Self {
        Self { index: k.mov::<U32>(0u32), phase: k.mov::<U32>(phase), count }
    }

    /// One place further.
    pub fn advance(self, k: &mut Kernel) {
        k.to(self.index).add(self.index, 1u32);
        let wrapped = k.compare(Cmp::Eq, self.index, self.count);
        k.when(wrapped).to(self.index).mov::<U32>(0u32);
        k.when(wrapped).to(self.phase).xor(self.phase, 1u32);
    }

    /// The mbarrier of this place, of those from `first` on.
    pub fn barrier(self, k: &mut Kernel, first: Addr<Shared>) -> Addr<Shared> {
        let offset = k.shl(self.index, 3u32);
        k.offset(first, offset.cast())
    }
}
