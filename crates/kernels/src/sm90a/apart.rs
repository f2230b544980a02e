//! Gate and up in launches of their own: gate's sums go to memory, and up's epilogue reads them.
//!
//! ```text
//! sums: [feature tiles][groups of eight tokens][two features of a thread][threads], f32 of two tokens each
//! ```
//!
//! A launch for up has its tiles and threads where that for gate had them, so every thread finds what it wrote, and a warp
//! writes and reads whole lines. They are f32, 8 bytes of traffic for each element of C: C is then rounded once, as in one
//! launch, and sums need no scale to fit a smaller type. Threads that use them have seen tokens arrive, whose producer
//! waited for the launch before: it has written these sums, or read older ones.

use dualgemm_ptx::builder::*;

use super::config::ROW_GROUP_PLANE;
use super::fused::Fused;
use super::schedule::Tile;
use crate::parts::variant::Products;

/// Sums of gate and up of two tokens of one feature.
pub(super) struct FeatureSums {
    pub(super) gate: [Reg<F32>; 2],
    pub(super) up: [Reg<F32>; 2],
}

impl Fused<'_> {
    /// Where gate's sums of a thread are: those of the tile's first eight tokens.
    pub(super) fn gate_of_thread(
        &self,
        k: &mut Kernel,
        sums: &PointerParam,
        tile: Tile,
        thread: Reg<U32>,
    ) -> Addr<Global> {
        let sums = k.ld_pointer(sums);
        let [token_tiles, _] = self.tile_counts(k);
        let groups = k.eval(token_tiles * (self.config.tokens / 8));
        let before = k.eval(tile.chunk * groups);
        let start = k.offset(sums, before.mul_wide(ROW_GROUP_PLANE));
        let group = k.eval(tile.token >> 3);
        let start = k.offset(start, group.mul_wide(self.plane()));
        k.offset(start, thread.mul_wide(8))
    }

    /// Stores gate's sums of two features and two tokens.
    pub(super) fn keep_gate(&self, k: &mut Kernel, to: Addr<Global>, sums: &[Reg<F32>]) {
        for (feature, sums) in (0u32..).zip(sums.chunks_exact(2)) {
            k.st_vector(to.at(feature * self.plane() / 2), sums);
        }
    }

    /// Both sums of a thread's feature: of four sums of its own, or from memory and two of its own; of a linear layer twice the
    /// same.
    pub(super) fn feature_sums(
        &self,
        k: &mut Kernel,
        feature: usize,
        sums: &[Reg<F32>],
        gate: Option<Addr<Global>>,
    ) -> FeatureSums {
        let two = |first: usize| [sums[first], sums[first + 1]];
        match gate {
            None if self.variant.products == Products::Linear => {
                FeatureSums { gate: two(2 * feature), up: two(2 * feature) }
            }
            None => FeatureSums { gate: two(0), up: two(2) },
            Some(from) => {
                let gate = k.ld_vector(from.at(feature as u32 * self.plane() / 2));
                FeatureSums { gate, up: two(2 * feature) }
            }
        }
    }
}
