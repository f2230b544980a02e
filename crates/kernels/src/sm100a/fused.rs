//! The fused dual GEMM on sm_100a: nvfp4 or mxfp4 operands as they lie in a checkpoint, scales applied by the tensor
//! core; or A in 16 bits and nvfp4 weights, which become that on their way (`widen.rs`).
//!
//! ```text
//! warp 0, one lane   TMA of gate, up and their scales     ─┐ full[stage]        ┌─ empty[stage]
//! warp 1, one lane   TMA of A and its scales              ─┘   → warp 2 ────────┘
//! warp 2, one lane   per step of 64 K: scales to tensor memory (tcgen05.cp), two tcgen05.mma (gate, up)
//!                    → done[accumulators]                       ┌─ stored[accumulators]
//! warp 3             allocates tensor memory; moves scales      │
//! warps 4 to 7       tensor memory → registers → activation → C ┘
//! warps 8 to 15      only beside 16-bit A: codes times scales to tensor memory
//! ```
//!
//! Gate and up share one operand, so the second product of a step finds it in the collector buffer where it is the
//! one with 128 rows. Weights do not depend on the kernel before, so their loads start ahead of
//! `griddepcontrol.wait`; loads of A come from a warp of its own for that reason.
//!
//! With `cta_group` 2 the even CTA of a pair multiplies for both: each holds its own 128 tokens and half of the
//! features' rows. With `split_k`, CTAs or pairs of a cluster take consecutive parts of K and exchange their sums through
//! distributed shared memory, added in rank order, so that results do not depend on timing. A pair is two CTAs whose
//! ranks in the cluster differ in the last bit.
//!
//! Flow: [`Config`] → here → PTX. Roles: `roles.rs`, `scales.rs`, `half_atoms.rs`, `widen.rs`; stores: `store.rs`.
//! Spec: <https://docs.nvidia.com/cuda/parallel-thread-execution/#tensorcore-5th-generation-instructions>.

use dualgemm_ptx::Target;
use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::builder::*;

use super::config::{Config, Layout, Side, WIDENERS};
use crate::Error;
use crate::fused::{ENTRY, Tile as _};
use crate::parts::format::{ATOM_ROWS, STEP_K};
use crate::parts::operand::Maps;
use crate::parts::ring::Ring;
use crate::parts::rows::Rows;
use crate::parts::tiles::{Tile, Tiles};
use crate::parts::variant::Variant;

/// Registers of the first two groups of four warps beside warps that widen: 512 threads begin with 128 each.
const ISSUING_REGISTERS: u32 = 72;
const STORING_REGISTERS: u32 = 184;

/// Generates the kernel for `target`, sm_100a or sm_103a.
pub fn generate(config: &Config, variant: &Variant, target: Target) -> Result<Module, Error> {
    let layout = config.layout()?;
    config.rules().common(variant)?;
    let mut module = Builder::new(target, Version::new(8, 8));
    module.comment(&format!(
        "C = act(A B1^T, A B2^T), {}, C in {:?}: {}",
        config.formats,
        variant.out,
        config.name()
    ));
    module.kernel(ENTRY, |k| Fused::new(k, config, &layout, variant).emit(k));
    Ok(module.finish()?)
}

/// Values that every role reads.
pub(super) struct Fused<'a> {
    pub config: &'a Config,
    pub layout: &'a Layout,
    pub maps: Maps,
    pub rows: Rows,
    pub tiles: Tiles,
    pub grouped: bool,
    pub base: Addr<Shared>,
    pub ring: Ring,
    pub n: Reg<U32>,
    /// Stages of this CTA: from `first` below `end`.
    pub first_stage: Reg<U32>,
    pub end_stage: Reg<U32>,
    /// Steps of the whole K.
    pub steps: Reg<U32>,
    /// Rank in the cluster; 0 without.
    pub rank: Reg<U32>,
    /// Which of the pair: 1 is the odd one.
    pub half: Reg<U32>,
    /// Which part of K.
    pub part: Reg<U32>,
    pub warp: Reg<U32>,
    pub lane: Reg<U32>,
}

impl<'a> Fused<'a> {
    fn new(k: &mut Kernel, config: &'a Config, layout: &'a Layout, variant: &'a Variant) -> Self {
        k.required_threads(config.threads());
        k.min_ctas(1);
        let cluster = config.cluster();
        if cluster > 1 {
            k.cluster(cluster, 1, 1);
        }
        let maps = Maps::declare(k, config.formats);
        let [m, n, kk] = ["m", "n", "k"].map(|name| k.param::<U32>(name)).map(|param| k.ld_param(&param));
        let rows = Rows::declare_halves(k, variant, n);
        let base = k.shared(&layout.smem);
        let ring = Ring::new(base, config.stages, &layout.full, &layout.empty);
        let (rank, who) = match cluster {
            1 => (k.mov::<U32>(0u32), [Special::CtaidX, Special::NctaidX].map(|s| k.special(s))),
            _ => {
                let rank = k.special(Special::ClusterCtaRank);
                (rank, [Special::ClusterIdX, Special::NclusterIdX].map(|s| k.special(s)))
            }
        };
        let size = (config.tile_tokens(), config.tile_features());
        let tiled = match config.side {
            // Tiles of both halves of the last atom too.
            Side::HalfAtoms => k.eval((n + (ATOM_ROWS - 1)) & !(ATOM_ROWS - 1)),
            Side::Tokens | Side::Features => n,
        };
        let tiles = Tiles::declare(k, variant.grouped, size, (m, tiled), (who[0], who[1]));
        let [steps, stages] = [STEP_K, config.stage_k()].map(|by| k.eval(kk.div_ceil(by)));
        let half = k.eval(rank & (config.cta_group - 1));
        let part = k.eval(rank >> config.cta_group.ilog2());
        let (first_stage, end_stage) = match config.split_k {
            1 => (k.mov::<U32>(0u32), stages),
            parts => {
                let scaled = k.eval(stages * part);
                let next = k.eval(scaled + stages);
                (k.eval(scaled / parts), k.eval(next / parts))
            }
        };
        let warp = k.warp_index();
        let lane = k.special(Special::LaneId);
        let grouped = variant.grouped;
        Self {
            config,
            layout,
            maps,
            n: rows.n,
            rows,
            tiles,
            grouped,
            base,
            ring,
            first_stage,
            end_stage,
            steps,
            rank,
            half,
            part,
            warp,
            lane,
        }
    }

    fn emit(&self, k: &mut Kernel) {
        self.set_up(k);
        let tmem = Addr::<Tmem>::new(k.ld(self.base.at(self.layout.tmem_address.offset)));
        k.launch_dependents();
        if self.grouped {
            k.comment("The sizes of the groups may come from the kernel before.");
            k.grid_dependency_wait();
        }
        match &self.layout.wide {
            None => {
                self.issue(k, tmem);
                let stores = k.compare(Cmp::Ge, self.warp, 4u32);
                k.if_(stores, "store", |k| self.store_tiles(k, tmem));
            }
            Some(wide) => {
                k.comment("Those that add the sums of several CTAs need more registers, single lanes fewer.");
                k.role(self.warp, 0..4, "issue", |k| {
                    k.setmaxnreg_dec(ISSUING_REGISTERS);
                    self.issue(k, tmem);
                });
                k.role(self.warp, 4..8, "store", |k| {
                    k.setmaxnreg_inc(STORING_REGISTERS);
                    self.store_tiles(k, tmem);
                });
                k.role(self.warp, 8..8 + WIDENERS, "widen", |k| self.widen(k, wide, tmem));
            }
        }
        // No CTA of a cluster leaves while another may still reach its shared memory.
        self.meet(k);
        let allocating = k.compare(Cmp::Eq, self.warp, 3u32);
        k.if_(allocating, "free", |k| k.tmem_dealloc(self.group(), tmem, self.layout.tmem_columns));
    }

    /// All threads of the CTA, or of the cluster, whose barrier wants the lanes of a warp together.
    fn meet(&self, k: &mut Kernel) {
        if self.config.cluster() > 1 {
            k.warp_sync();
            k.cluster_sync();
        } else {
            k.cta_sync();
        }
    }

    /// The roles of single lanes, and of the warp that moves scales.
    fn issue(&self, k: &mut Kernel, tmem: Addr<Tmem>) {
        self.one_lane(k, 0, "load weights", |k| self.load_weights(k));
        self.one_lane(k, 1, "load A", |k| self.load_a(k));
        self.one_lane(k, 2, "multiply", |k| self.multiply(k, tmem));
        if let Some(moved) = &self.layout.moved {
            k.role(self.warp, 3..4, "move scales", |k| self.move_scales(k, moved));
        }
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
            if let Some(scales) = &layout.moved {
                for stage in 0..config.stages {
                    k.mbarrier_init(base.at(scales.arrived.part(stage)), 1u32);
                    k.mbarrier_init(base.at(scales.moved.part(stage)), config.cta_group);
                }
            }
            if let Some(wide) = &layout.wide {
                (0..config.stages).for_each(|i| k.mbarrier_init(base.at(wide.tokens.part(i)), 1u32));
                for buffer in 0..wide.buffers {
                    k.mbarrier_init(base.at(wide.widened.part(buffer)), WIDENERS);
                    k.mbarrier_init(base.at(wide.taken.part(buffer)), 1u32);
                }
            }
            for pair in 0..config.accumulators {
                k.mbarrier_init(base.at(layout.done.part(pair)), 1u32);
            }
            if config.exchanges() {
                k.mbarrier_init(base.at(layout.put.offset), 4 * config.split_k);
            } else {
                for pair in 0..config.accumulators {
                    k.mbarrier_init(base.at(layout.stored.part(pair)), 4 * config.cta_group);
                }
            }
            k.fence_mbarrier_init();
        });
        let allocating = k.compare(Cmp::Eq, self.warp, 3u32);
        k.if_(allocating, "allocate", |k| {
            k.tmem_alloc(self.group(), base.at(layout.tmem_address.offset), layout.tmem_columns);
            k.tmem_relinquish(self.group());
        });
        self.meet(k);
    }

    /// One lane of a warp runs `body`.
    fn one_lane(&self, k: &mut Kernel, warp: u32, name: &str, body: impl FnOnce(&mut Kernel)) {
        k.role(self.warp, warp..warp + 1, name, |k| {
            let leader = k.elect();
            k.if_(leader, name, body);
        });
    }

    /// Rows that this CTA's own start behind the tile's: the odd CTA of a pair has the second 128.
    pub(super) fn own_rows(&self, k: &mut Kernel, row: Reg<U32>) -> Reg<U32> {
        if self.config.cta_group == 1 {
            return row;
        }
        k.eval(self.half * ATOM_ROWS + row)
    }

    /// The tile with the tokens that are this CTA's.
    pub(super) fn own(&self, k: &mut Kernel, tile: Tile) -> Tile {
        Tile { token: self.own_rows(k, tile.token), row: self.own_rows(k, tile.row), ..tile }
    }

    /// Whether the 128 rows of the matrix instruction are tokens.
    pub(super) fn rows_are_tokens(&self) -> bool {
        self.config.side != Side::Features
    }
}
