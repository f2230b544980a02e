//! The frame of Hopper's kernels whose operands TMA brings as tiles: one thread loads weights, one tokens, one or two
//! warpgroups multiply, and each CTA computes one tile.
//!
//! Flow: a kernel's configuration → [`Shape`] → [`CtaTile`], between which the kernel says how it multiplies.

use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{SmemLayout, SmemRegion, SmemTile};

use super::ring::{Position, Ring};
use super::rows::Rows;
use super::staged::{Staged, stage_over};
use super::variant::{Out, Variant};
use crate::Error;
use crate::limits::{Rules, SHARED_DATACENTER, STAGES, Valid};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Tokens and features of the tile.
    pub tokens: u32,
    pub features: u32,
    /// Warpgroups that multiply.
    pub row_groups: u32,
    /// Stages of the ring, and bytes of tokens and of gate and up in one.
    pub stages: u32,
    pub token_bytes: u32,
    pub weight_bytes: u32,
}

/// Shared memory of a configuration.
#[derive(Debug, Clone)]
pub struct Layout {
    /// All of it.
    pub smem: SmemLayout,
    /// Tokens, `[stages]`.
    pub tokens: SmemRegion,
    /// Rows of gate and up, `[stages][2][features]`.
    pub weights: SmemRegion,
    /// "Stage is full" barriers.
    pub full: SmemRegion,
    /// "Stage is empty" barriers.
    pub empty: SmemRegion,
    /// What `wgmma` reads by descriptors.
    pub tile: SmemTile,
}

impl Shape {
    /// Refuses a tile that is no shape.
    pub fn check(
        rules: Rules,
        row_groups: u32,
        (tokens, most): (u32, u32),
        stages: u32,
    ) -> Result<(), Error> {
        rules.check("warpgroups that multiply", row_groups, Valid::range(1, 2))?;
        rules.check("tokens of the tile", tokens, Valid::multiple(8, most))?;
        rules.check("stages", stages, STAGES)
    }

    /// Shared memory for output of this type, or what does not fit. The stages' weights begin at multiples of `align`.
    pub fn layout(self, rules: Rules, out: Out, align: u32, tile: SmemTile) -> Result<Layout, Error> {
        let mut smem = SmemLayout::new();
        let tokens = smem.alloc_parts("tokens", self.token_bytes, self.stages, 1024);
        let weights = smem.alloc_parts("weights", self.weight_bytes, self.stages, align);
        stage_over(&mut smem, out, self.tokens, self.features);
        let (full, empty) = (smem.mbarriers("full", self.stages), smem.mbarriers("empty", self.stages));
        rules.shared(smem.bytes(), SHARED_DATACENTER)?;
        Ok(Layout { smem, tokens, weights, full, empty, tile })
    }

    /// Threads that multiply.
    pub const fn consumer_threads(self) -> u32 {
        self.row_groups * 128
    }

    /// Threads of a CTA: consumers, and a warpgroup in which one warp loads weights and another tokens.
    pub const fn threads(self) -> u32 {
        self.consumer_threads() + 128
    }

    /// Registers of a producer thread and of a consumer thread after `setmaxnreg`, where the equal share at entry is too
    /// little for consumers.
    const fn registers(self) -> Option<(u32, u32)> {
        if self.row_groups == 2 { Some((40, 232)) } else { None }
    }

    /// CTAs for `m` tokens and `n` features: token tiles run fastest.
    pub const fn grid(self, m: usize, n: usize) -> [u32; 3] {
        [m.div_ceil(self.tokens as usize) as u32, n.div_ceil(self.features as usize) as u32, 1]
    }
}

/// What every role of a CTA reads.
pub(crate) struct CtaTile {
    pub shape: Shape,
    pub rows: Rows,
    pub ring: Ring,
    pub base: Addr<Shared>,
    pub warp: Reg<U32>,
    pub lane: Reg<U32>,
    first_lane: Reg<Pred>,
    /// First token and first feature of the tile.
    pub token: Reg<U32>,
    pub feature: Reg<U32>,
    /// Tokens of the problem; K counts what the kernel's third parameter does.
    pub m: Reg<U32>,
    pub k: Reg<U32>,
}

impl CtaTile {
    /// Reads the parameters.
    pub fn new(
        k: &mut Kernel,
        shape: Shape,
        layout: &Layout,
        sizes: [Param<U32>; 3],
        variant: &Variant,
    ) -> Self {
        k.required_threads(shape.threads());
        k.min_ctas(1);
        let base = k.shared(&layout.smem);
        let [m, n, blocks] = sizes.map(|size| k.ld_param(&size));
        let rows = Rows::declare(k, variant, n);
        let warp = k.warp_index();
        let thread = k.special(Special::TidX);
        let lane = k.eval(thread & 31);
        let first_lane = k.compare(Cmp::Eq, lane, 0u32);
        let (token_tile, feature_tile) = (k.special(Special::CtaidX), k.special(Special::CtaidY));
        let token = k.eval(token_tile * shape.tokens);
        let feature = k.eval(feature_tile * shape.features);
        let ring = Ring::new(base, shape.stages, &layout.full, &layout.empty);
        Self { shape, rows, ring, base, warp, lane, first_lane, token, feature, m, k: blocks }
    }

    /// The roles of the CTA's threads. Weights do not depend on the kernel before; tokens do.
    pub fn emit(
        &self,
        k: &mut Kernel,
        load_weights: impl FnOnce(&mut Kernel),
        load_tokens: impl FnOnce(&mut Kernel),
        consume: impl FnOnce(&mut Kernel),
    ) {
        let consumer_warps = self.shape.consumer_threads() / 32;
        self.ring.init(k, 1, consumer_warps);
        k.launch_dependents();
        let produces = k.compare(Cmp::Ge, self.warp, consumer_warps);
        let registers = self.shape.registers();
        k.if_else(
            produces,
            "producers",
            |k| {
                if let Some((few, _)) = registers {
                    k.setmaxnreg_dec(few);
                }
                k.role(self.warp, consumer_warps..consumer_warps + 1, "weights", |k| {
                    k.if_(self.first_lane, "issue_weights", load_weights);
                });
                k.role(self.warp, consumer_warps + 1..consumer_warps + 2, "tokens", |k| {
                    k.grid_dependency_wait();
                    k.if_(self.first_lane, "issue_tokens", load_tokens);
                });
            },
            |k| {
                if let Some((_, many)) = registers {
                    k.setmaxnreg_inc(many);
                }
                consume(k);
            },
        );
    }

    /// Loads gate and up of every stage, `[2][features][bytes]`: columns of `bytes` bytes of each row, which arrive with
    /// everything else of the stage.
    pub fn load_weights(
        &self,
        k: &mut Kernel,
        maps: [&TensorMapParam; 2],
        stages: Reg<U32>,
        (region, bytes): (&SmemRegion, u32),
    ) {
        let maps = maps.map(|map| k.tensor_map_address(map));
        let at = self.ring.start(k, true);
        k.for_range("weight_stages", 0u32, stages, 1, |k, block, _| {
            let full = self.ring.wait_empty(k, at);
            k.mbarrier_arrive_expect_tx(full, self.shape.token_bytes + self.shape.weight_bytes);
            let slot = k.offset(self.base.at(region.offset), at.index * region.stride);
            let column = k.eval(block * bytes);
            let place = [column.cast::<S32>().into(), self.feature.cast::<S32>().into()];
            for (half, map) in maps.into_iter().enumerate() {
                let to = slot.at(half as u32 * self.shape.features * bytes);
                k.tensor_load(to, map, &place, full, &TmaOptions::default());
            }
            at.advance(k);
        });
    }

    /// Loads the tokens of every stage: for each of `panels`, offsets in the stage, `width` elements of K.
    pub fn load_tokens(
        &self,
        k: &mut Kernel,
        map: &TensorMapParam,
        stages: Reg<U32>,
        (region, panels, width): (&SmemRegion, &[u32], u32),
    ) {
        let map = k.tensor_map_address(map);
        let at = self.ring.start(k, true);
        k.for_range("token_stages", 0u32, stages, 1, |k, block, _| {
            let full = self.ring.wait_empty(k, at);
            let slot = k.offset(self.base.at(region.offset), at.index * region.stride);
            let first = k.eval(block * (width * panels.len() as u32));
            for (panel, &to) in (0..).zip(panels) {
                let column = if panel == 0 { first } else { k.eval(first + width * panel) };
                let place = [column.cast::<S32>().into(), self.token.cast::<S32>().into()];
                k.tensor_load(slot.at(to), map, &place, full, &TmaOptions::default());
            }
            at.advance(k);
        });
    }

    /// Gives the stage at `at` back unless `stage`, which is being multiplied, is the first.
    pub fn release_before(&self, k: &mut Kernel, stage: Reg<U32>, at: Position) {
        let previous = k.compare(Cmp::Ne, stage, 0u32);
        k.if_(previous, "release", |k| {
            self.ring.release(k, at, self.first_lane);
            at.advance(k);
        });
    }

    /// Where the ring was, once every warpgroup is done with it: the tile on its way to C. Whoever stores it has seen tokens
    /// arrive, whose producer waited for the launch before.
    pub fn staged(&self, k: &mut Kernel) -> Staged<'_> {
        k.comment("Every warpgroup is done with the ring, which becomes the staged tile.");
        let threads = self.shape.consumer_threads();
        k.bar_sync(1u32, threads);
        Staged { rows: &self.rows, start: self.base, features: self.shape.features, threads }
    }

    /// Stores the staged tile.
    pub fn copy_out(&self, k: &mut Kernel, staged: &Staged<'_>) {
        k.bar_sync(1u32, self.shape.consumer_threads());
        staged.copy_out(k, self.shape.tokens, (self.token, self.m), (self.feature, staged.rows.n));
    }
}
