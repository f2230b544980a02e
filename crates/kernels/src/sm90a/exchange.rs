//! Sums of tiles that several CTAs share.
//!
//! A pair that splits K (a cluster of two) exchanges halves through distributed shared memory: each CTA finishes half of
//! the tokens. With K groups it does so at the end. Else each CTA first multiplies blocks of K that are its own, sends the sums of the
//! other's tokens, and meanwhile multiplies some more blocks, which are both CTAs', by its own tokens alone.
//!
//! A pair with a row group in common: the first CTA leaves the sums of its half of K in the second's shared memory, which adds them
//! to its own when all of its warpgroups have multiplied; the others' activations hide the way.
//!
//! Stream-K: everyone but the owner of the tile's first block writes its sums to
//! the workspace and raises a flag; the owner adds them in the order of K, so that the bits do not depend on timing.
//!
//! ```text
//! workspace: [flags: one word per CTA, 4096 bytes] [sums of CTA 0: (groups of 8 tokens, threads, 4) f32] [CTA 1] …
//! ```
//!
//! A CTA has at most one part that is not a tile's first: the one it begins with. So its slot is its own, and the owner,
//! for whom the tile is the last one, rarely waits. Flags return to zero, ready for the next launch; with programmatic
//! dependent launch that one reads tokens only after this one has ended, and writes sums only after that.

use std::ops::Range;

use dualgemm_ptx::builder::*;

use super::config::ROW_GROUP_PLANE;
use super::fused::Fused;
use super::schedule::{Part, Tile};

/// Bytes of flags at the start of the workspace.
pub(super) const FLAG_BYTES: u32 = 4096;

impl Fused<'_> {
    /// Sets up the barrier of sums from the other CTA: they arrive as bytes, or a warpgroup says that it has left them. The set-up of
    /// the ring follows.
    pub(super) fn init_from_other(&self, k: &mut Kernel) {
        let Some((_, there)) = &self.layout.from_other else { return };
        let thread = k.special(Special::TidX);
        let first = k.compare(Cmp::Eq, thread, 0u32);
        let there = self.shared(there.offset);
        match self.config.exchanges() {
            false => k.when(first).mbarrier_init(there, 128u32),
            true => k.if_(first, "from_other", |k| {
                k.mbarrier_init(there, 1u32);
                k.mbarrier_arrive_expect_tx(there, self.config.sums_from_other());
            }),
        }
    }

    /// Where this thread's sums from the other CTA of a pair are, and the barrier that says so. Of a common row group these are its
    /// warpgroup's threads.
    fn sums_of_other(&self, k: &mut Kernel) -> Option<[Addr<Shared>; 2]> {
        let (sums, there) = self.layout.from_other.as_ref()?;
        let thread = k.special(Special::TidX);
        let thread = if self.config.common { k.eval(thread & 127) } else { thread };
        Some([k.offset(self.shared(sums.offset), thread << 4), self.shared(there.offset)])
    }

    /// The same in the other CTA.
    pub(super) fn for_other(&self, k: &mut Kernel) -> Option<[Addr<Cluster>; 2]> {
        let own = self.sums_of_other(k)?;
        let rank = k.special(Special::ClusterCtaRank);
        let other = k.eval(rank ^ 1);
        Some(own.map(|own| k.map_to_rank(own, other)))
    }

    /// Sends sums to the other CTA: four f32 of each of those groups of eight tokens.
    pub(super) fn send(
        &self,
        k: &mut Kernel,
        [to, there]: [Addr<Cluster>; 2],
        acc: &[Reg<F32>],
        groups: Range<usize>,
    ) {
        for (j, sums) in acc.chunks_exact(4).enumerate().skip(groups.start).take(groups.len()) {
            k.st_async_vector(to.at(j as u32 * self.plane()), sums, there);
        }
    }

    /// Bytes of the sums for eight tokens that come from the other CTA.
    fn plane_from_other(&self) -> u32 {
        if self.config.common { ROW_GROUP_PLANE } else { self.plane() }
    }

    /// Adds what came from the other CTA.
    fn add_from_other(&self, k: &mut Kernel, acc: &[Reg<F32>]) {
        let Some([sums, there]) = self.sums_of_other(k) else { return };
        k.mbarrier_wait_cluster(there, 0u32, "from_other");
        for (j, four) in acc.chunks_exact(4).enumerate() {
            let more: [Reg<F32>; 4] = k.ld_vector(sums.at(j as u32 * self.plane_from_other()));
            four.iter().zip(more).for_each(|(sum, more)| {
                k.to(*sum).add(more, *sum);
            });
        }
    }

    /// The sums of this CTA's own half of the tokens, the first of `acc`, with those from the other CTA. The second half is on its way
    /// there.
    pub(super) fn own_half<'t, 'a>(
        &self,
        k: &mut Kernel,
        tile: Tile<'t>,
        acc: &'a [Reg<F32>],
    ) -> (Tile<'t>, &'a [Reg<F32>]) {
        let own = &acc[..acc.len() / 2];
        self.add_from_other(k, own);
        let rank = k.special(Special::ClusterCtaRank);
        let token = k.eval(tile.token + rank * (self.config.tokens / 2));
        (Tile { token, ..tile }, own)
    }

    /// The first CTA of a pair leaves a common row group's sums with the second.
    pub(super) fn leave_common(&self, k: &mut Kernel, acc: &[Reg<F32>]) {
        let rank = k.special(Special::ClusterCtaRank);
        let first = k.compare(Cmp::Eq, rank, 0u32);
        k.if_(first, "leave", |k| {
            k.comment("The second CTA has set its barrier up.");
            k.cluster_wait();
            let Some([sums, there]) = self.for_other(k) else { return };
            for (j, four) in acc.chunks_exact(4).enumerate() {
                k.st_vector(sums.at(j as u32 * ROW_GROUP_PLANE), four);
            }
            k.mbarrier_arrive_remote_release(there);
        });
    }

    /// The second adds them to its own.
    pub(super) fn add_common(&self, k: &mut Kernel, acc: &[Reg<F32>]) {
        let rank = k.special(Special::ClusterCtaRank);
        let common = self.is_common(k);
        let adds = k.compare_and(Cmp::Eq, rank, 1u32, common);
        k.if_(adds, "add_common", |k| self.add_from_other(k, acc));
    }

    /// Writes every thread's sums where the CTA that finishes them adds them up: `[groups of 8 tokens][parts][threads]`,
    /// four f32 each, a part for each K group of each CTA. Gives the tile of this CTA, its groups and the parts.
    pub(super) fn spread_sums<'t>(
        &self,
        k: &mut Kernel,
        tile: Tile<'t>,
        acc: &[Reg<F32>],
    ) -> (Tile<'t>, u32, u32) {
        let config = self.config;
        let (groups, parts) = (config.tokens / 8 / config.k_split, config.k_groups * config.k_split);
        let plane = self.plane() * parts;
        let thread = k.special(Special::TidX);
        let byte = k.eval(thread << 4);
        let start = self.shared(self.layout.epilogue);
        let quads = || acc.chunks_exact(4).enumerate().map(|(j, sums)| (j as u32, sums));
        if config.k_split == 1 {
            let own = k.offset(start, byte);
            quads().for_each(|(j, sums)| k.st_vector(own.at(j * plane), sums));
            return (tile, groups, parts);
        }
        let rank = k.special(Special::ClusterCtaRank);
        let own = k.offset(start, rank * (config.consumer_threads() * 16) + byte);
        let finishers = [k.map_to_rank(own, 0u32), k.map_to_rank(own, 1u32)];
        k.comment("The other CTA is done with its ring.");
        k.cluster_sync();
        quads().for_each(|(j, sums)| {
            k.st_vector(finishers[(j / groups) as usize].at(j % groups * plane), sums);
        });
        k.cluster_sync();
        let token = k.eval(tile.token + rank * (config.tokens / 2));
        (Tile { token, ..tile }, groups, parts)
    }

    fn flag(&self, k: &mut Kernel, part: Part, cta: Reg<U32>) -> Addr<Global> {
        let workspace = k.ld_pointer(part.workspace);
        k.offset(workspace, cta.mul_wide(4))
    }

    fn slot(&self, k: &mut Kernel, part: Part, cta: Reg<U32>) -> Addr<Global> {
        let workspace = k.ld_pointer(part.workspace);
        k.offset(workspace, cta.mul_wide(self.config.tile_bytes() as u32)).at(FLAG_BYTES)
    }

    /// Where this CTA's sums go.
    pub(super) fn own_slot(&self, k: &mut Kernel, part: Part) -> Addr<Global> {
        let cta = k.special(Special::CtaidX);
        self.slot(k, part, cta)
    }

    /// Place of the first four sums of thread `thread`, those of the first eight tokens; those of the next eight follow
    /// [`plane`](Self::plane) bytes later.
    pub(super) fn part_of_thread(
        &self,
        k: &mut Kernel,
        slot: Addr<Global>,
        thread: Reg<U32>,
    ) -> Addr<Global> {
        k.offset(slot, thread.mul_wide(16))
    }

    /// Bytes of the sums of all threads for eight tokens.
    pub(super) fn plane(&self) -> u32 {
        self.config.row_groups * ROW_GROUP_PLANE
    }

    /// All threads have written their sums: raises this CTA's flag.
    pub(super) fn publish_part(&self, k: &mut Kernel, part: Part) {
        k.bar_sync(1u32, self.config.consumer_threads());
        let thread = k.special(Special::TidX);
        let first = k.compare(Cmp::Eq, thread, 0u32);
        k.if_(first, "raise", |k| {
            let cta = k.special(Special::CtaidX);
            let flag = self.flag(k, part, cta);
            let one = k.mov::<U32>(1u32);
            k.st_release(Scope::Gpu, flag, one);
        });
        k.comment("The next tile's `wgmma` wants the lanes together again.");
        k.warp_sync();
    }

    /// Runs `body` for the slot of every other CTA that has a part of this tile, in the order of K.
    pub(super) fn for_each_part(
        &self,
        k: &mut Kernel,
        part: Part,
        body: impl FnOnce(&mut Kernel, Addr<Global>),
    ) {
        self.for_each_other(k, part, "add_parts", |k, cta| {
            let slot = self.slot(k, part, cta);
            body(k, slot);
        });
    }

    fn for_each_other(
        &self,
        k: &mut Kernel,
        part: Part,
        name: &str,
        body: impl FnOnce(&mut Kernel, Reg<U32>),
    ) {
        let own = k.special(Special::CtaidX);
        let cta = k.eval(own + 1);
        k.loop_(name, |k, this| {
            let start = part.shares.start(k, cta);
            let done = k.compare(Cmp::Ge, start, part.tile_end);
            k.break_if(this, done);
            body(k, cta);
            k.to(cta).eval(cta + 1);
        });
    }

    /// One thread waits until all other parts of the tile are there, and lowers their flags.
    pub(super) fn spin_for_parts(&self, k: &mut Kernel, part: Part) {
        self.for_each_other(k, part, "await_parts", |k, cta| {
            let flag = self.flag(k, part, cta);
            k.do_while("await_flag", |k| {
                let value: Reg<U32> = k.ld_acquire(Scope::Gpu, flag);
                k.compare(Cmp::Eq, value, 0u32)
            });
            let zero = k.mov::<U32>(0u32);
            k.st_release(Scope::Gpu, flag, zero);
        });
    }

    /// All consumers wait until all other parts of the tile are there.
    pub(super) fn await_parts(&self, k: &mut Kernel, part: Part) {
        let thread = k.special(Special::TidX);
        let first = k.compare(Cmp::Eq, thread, 0u32);
        k.if_(first, "first_thread", |k| self.spin_for_parts(k, part));
        k.bar_sync(1u32, self.config.consumer_threads());
    }
}
