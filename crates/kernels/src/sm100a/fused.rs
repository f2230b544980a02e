//! The fused dual GEMM on sm_100a: nvfp4 operands as they lie in a checkpoint, scales applied by the tensor core.
//!
//! ```text
//! warp 0, one lane   TMA of gate, up and their scales     ─┐ full[stage]        ┌─ empty[stage]
//! warp 1, one lane   TMA of A and its scales              ─┘   → warp 2 ────────┘
//! warp 2, one lane   per step of 64 K: scales to tensor memory (tcgen05.cp), two tcgen05.mma (gate, up)
//!                    → done[accumulators]                       ┌─ stored[accumulators]
//! warp 3             allocates tensor memory                    │
//! warps 4 to 7       tensor memory → registers → activation → C ┘
//! ```
//!
//! Gate and up share one operand, so the second product of a step finds it in the collector buffer where it is the
//! one with 128 rows. Weights do not depend on the kernel before, so their loads start ahead of
//! `griddepcontrol.wait`; loads of A come from a warp of its own for that reason.
//!
//! With `cta_group` 2 the even CTA of a pair multiplies for both: each holds its own 128 tokens and half of the
//! features' rows. With `split_k`, CTAs of a cluster take consecutive parts of K and exchange their sums through
//! distributed shared memory, added in rank order, so that results do not depend on timing.
//!
//! Flow: [`Config`] → here → PTX. Roles: `roles.rs`; stores: `store.rs`.
//! Spec: <https://docs.nvidia.com/cuda/parallel-thread-execution/#tensorcore-5th-generation-instructions>.

use dualgemm_gemm::Program;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::builder::*;

use super::config::{Config, Layout, STAGE_K, Side, THREADS};
use crate::Error;
use crate::parts::operand::{ATOM_ROWS, Maps, STEP_K};
use crate::parts::rows::{Out, Rows};

/// Name of the kernel in its module.
pub const ENTRY: &str = "dual_gemm";

/// Generates the kernel for `target`, sm_100a or sm_103a. `aligned` promises that rows of C start at multiples of 16
/// bytes.
///
/// # Errors
/// If the configuration does not fit, or the target lacks an instruction.
pub fn generate(
    config: &Config,
    program: &Program,
    out: Out,
    aligned: bool,
    target: Target,
) -> Result<Module, Error> {
    let layout = config.layout()?;
    let mut module = Builder::new(target, Version::new(8, 8));
    module.comment(&format!("C = act(A B1^T, A B2^T), nvfp4 operands, {out:?} C: {}", config.name()));
    module.kernel(ENTRY, |k| Fused::new(k, config, &layout, program, out, aligned).emit(k));
    Ok(module.finish()?)
}

/// Values that every role reads.
pub(super) struct Fused<'a> {
    pub config: &'a Config,
    pub layout: &'a Layout,
    pub program: &'a Program,
    pub maps: Maps,
    pub rows: Rows,
    pub alpha: [Param<F32>; 2],
    pub base: Addr<Shared>,
    /// Stages of this CTA: from `first` below `end`.
    pub first_stage: Reg<U32>,
    pub end_stage: Reg<U32>,
    /// Steps of the whole K.
    pub steps: Reg<U32>,
    /// This cluster's first tile, the clusters of the grid, the number of tiles, and of those along the tokens.
    pub first_tile: Reg<U32>,
    pub tile_stride: Reg<U32>,
    pub tiles: Reg<U32>,
    pub token_tiles: Reg<U32>,
    /// Rank in the cluster; 0 without.
    pub rank: Reg<U32>,
    pub warp: Reg<U32>,
    pub lane: Reg<U32>,
}

impl<'a> Fused<'a> {
    fn new(
        k: &mut Kernel,
        config: &'a Config,
        layout: &'a Layout,
        program: &'a Program,
        out: Out,
        aligned: bool,
    ) -> Self {
        k.required_threads(THREADS);
        k.min_ctas(1);
        let cluster = config.cluster();
        if cluster > 1 {
            k.cluster(cluster, 1, 1);
        }
        let maps = Maps::declare(k);
        let start = k.pointer("out");
        let [m, n, kk] = ["m", "n", "k"].map(|name| k.param::<U32>(name)).map(|param| k.ld_param(&param));
        let alpha = [k.param::<F32>("alpha_gate"), k.param::<F32>("alpha_up")];
        let base = k.shared(&layout.smem);

        k.comment("Tiles: those of the tokens run fastest, so that clusters that run together read the same weights.");
        let ceil = |k: &mut Kernel, value: Reg<U32>, by: u32| {
            let up = k.add(value, by - 1);
            k.div(up, by)
        };
        let token_tiles = ceil(k, m, config.tile_tokens());
        let feature_tiles = ceil(k, n, config.tile_features());
        let tiles = k.mul(token_tiles, feature_tiles);
        let (rank, first_tile, tile_stride) = match cluster {
            1 => (k.mov::<U32>(0u32), k.special(Special::CtaidX), k.special(Special::NctaidX)),
            _ => {
                let special = [Special::ClusterCtaRank, Special::ClusterIdX, Special::NclusterIdX];
                let [rank, cluster, clusters] = special.map(|s| k.special(s));
                (rank, cluster, clusters)
            }
        };
        let (steps, stages) = (ceil(k, kk, STEP_K), ceil(k, kk, STAGE_K));
        let (first_stage, end_stage) = match config.split_k {
            1 => (k.mov::<U32>(0u32), stages),
            parts => {
                let mut bound = |rank: Reg<U32>| {
                    let scaled = k.mul(stages, rank);
                    k.div(scaled, parts)
                };
                let first = bound(rank);
                let next = k.add(rank, 1u32);
                let scaled = k.mul(stages, next);
                (first, k.div(scaled, parts))
            }
        };
        let warp = k.warp_index();
        let thread = k.special(Special::TidX);
        let lane = k.and(thread, 31u32);
        Self {
            config,
            layout,
            program,
            maps,
            rows: Rows { out, aligned, start, m, n },
            alpha,
            base,
            first_stage,
            end_stage,
            steps,
            first_tile,
            tile_stride,
            tiles,
            token_tiles,
            rank,
            warp,
            lane,
        }
    }

    fn emit(&self, k: &mut Kernel) {
        let clustered = self.config.cluster() > 1;
        self.set_up(k);
        let tmem = Addr::<Tmem>::new(k.ld(self.base.at(self.layout.tmem_address.offset)));
        k.launch_dependents();
        self.one_lane(k, 0, "load weights", |k| self.load_weights(k));
        self.one_lane(k, 1, "load A", |k| self.load_a(k));
        self.one_lane(k, 2, "multiply", |k| self.multiply(k, tmem));
        let stores = |k: &mut Kernel| k.compare(Cmp::Ge, self.warp, 4u32);
        match self.config.split_k {
            1 => {
                let storing = stores(k);
                k.if_(storing, "store", |k| self.store_tiles(k, tmem));
            }
            _ => {
                k.comment("Every CTA puts its sums where its ring was; then each stores a part of the tile.");
                let storing = stores(k);
                k.if_(storing, "put", |k| self.put_sums(k, tmem));
                k.warp_sync();
                k.cluster_sync();
                let storing = stores(k);
                k.if_(storing, "add", |k| self.add_sums(k));
            }
        }
        k.tcgen05_fence_before();
        k.warp_sync();
        if clustered {
            k.comment("No CTA leaves while another may still reach its shared memory.");
            k.cluster_sync();
        } else {
            k.cta_sync();
        }
        let allocating = k.compare(Cmp::Eq, self.warp, 3u32);
        k.if_(allocating, "free", |k| {
            k.tcgen05_fence_after();
            k.tmem_dealloc(self.group(), tmem, self.layout.tmem_columns);
        });
    }

    pub(super) fn group(&self) -> CtaGroup {
        if self.config.cta_group == 2 { CtaGroup::Two } else { CtaGroup::One }
    }

    fn set_up(&self, k: &mut Kernel) {
        let Self { config, layout, base, .. } = self;
        let thread = k.special(Special::TidX);
        let first = k.compare(Cmp::Eq, thread, 0u32);
        k.if_(first, "barriers", |k| {
            for stage in 0..config.stages {
                k.mbarrier_init(base.at(layout.full.part(stage)), 1u32);
                k.mbarrier_init(base.at(layout.empty.part(stage)), 1u32);
            }
            for pair in 0..config.accumulators {
                k.mbarrier_init(base.at(layout.done.part(pair)), 1u32);
                k.mbarrier_init(base.at(layout.stored.part(pair)), 4 * config.cta_group);
            }
            k.fence_mbarrier_init();
        });
        let allocating = k.compare(Cmp::Eq, self.warp, 3u32);
        k.if_(allocating, "allocate", |k| {
            k.tmem_alloc(self.group(), base.at(layout.tmem_address.offset), layout.tmem_columns);
            k.tmem_relinquish(self.group());
        });
        k.tcgen05_fence_before();
        k.warp_sync();
        if config.cluster() > 1 {
            k.cluster_sync();
        } else {
            k.cta_sync();
        }
        k.tcgen05_fence_after();
    }

    /// One lane of a warp runs `body`.
    fn one_lane(&self, k: &mut Kernel, warp: u32, name: &str, body: impl FnOnce(&mut Kernel)) {
        k.role(self.warp, warp..warp + 1, name, |k| {
            let leader = k.elect();
            k.if_(leader, name, body);
            k.warp_sync();
        });
    }

    /// Runs `body` for every tile of this cluster: `body(k, first token, first feature)`.
    pub(super) fn for_tiles(
        &self,
        k: &mut Kernel,
        name: &str,
        body: impl FnOnce(&mut Kernel, Reg<U32>, Reg<U32>),
    ) {
        let tile = k.mov::<U32>(self.first_tile);
        k.loop_(name, |k, this| {
            let end = k.compare(Cmp::Ge, tile, self.tiles);
            k.break_if(this, end);
            let feature = k.div(tile, self.token_tiles);
            let token = k.rem(tile, self.token_tiles);
            let feature = k.mul(feature, self.config.tile_features());
            let token = k.mul(token, self.config.tile_tokens());
            body(k, token, feature);
            k.to(tile).add(tile, self.tile_stride);
        });
    }

    /// The token of this CTA's first row: the tile's, or for the odd CTA of a pair 128 further.
    pub(super) fn own_token(&self, k: &mut Kernel, token: Reg<U32>) -> Reg<U32> {
        if self.config.cta_group == 1 {
            return token;
        }
        let rows = k.mul(self.rank, ATOM_ROWS);
        k.add(token, rows)
    }

    /// Whether the 128 rows of the matrix instruction are tokens.
    pub(super) fn rows_are_tokens(&self) -> bool {
        self.config.side == Side::Tokens
    }
}
