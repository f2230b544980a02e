//! The fused dual GEMM on sm_90a: `Cᵀ = act(W · Aᵀ)`, weights as the register operand of `wgmma`.
//!
//! ```text
//! weight producer   1 thread   bulk copies of packed chunks        ─┐ full[stage]      ┌─ empty[stage]
//! token producer    1 thread   TMA of A, 128-byte swizzle           ─┘  → consumers ──┘
//! consumers         1..4 warpgroups: 64 weight rows (32 features, gate and up) × all tokens of the tile
//!    per K block of 64: 4 wgmma on decoded fragments · load the next block's codes · wait for the previous
//!    wgmmas · release their stage · decode the next block
//! epilogue          activation in registers, transposed through shared memory, 16-byte stores
//! ```
//!
//! Two threads load, because one is too slow: issuing a bulk copy from a single lane costs about 100 clocks, and a
//! stage of 128 K needs six of them. Weights do not depend on the kernel before, so they start ahead of
//! `griddepcontrol.wait`.
//!
//! Flow: [`Config`], [`Variant`] → here → PTX. This file has the parameters and the roles; then read
//! `schedule.rs` (which tile), `producers.rs`, `consumers.rs`, `store.rs`.
//! Spec: <https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions>.

use dualgemm_ptx::Target;
use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::builder::*;

use super::config::{Config, Layout};
use super::schedule::Tile;
use crate::Error;
use crate::fused::ENTRY;
use crate::parts::ring::Ring;
use crate::parts::rows::Rows;
use crate::parts::variant::{Products, Scheduler, Variant};

/// Generates the kernel.
pub fn generate(config: &Config, variant: &Variant) -> Result<Module, Error> {
    let layout = config.layout(variant)?;
    let mut module = Builder::new(Target::Sm90a, Version::new(8, 1));
    module.comment(&format!(
        "C = act(A B1^T, A B2^T), weights of 4 bits, {}: {}",
        variant.name(),
        config.name()
    ));
    module.kernel(ENTRY, |k| Fused::new(k, config, variant, &layout).emit(k));
    Ok(module.finish()?)
}

/// Parameters, and values that every role reads. The parameters are declared in the order in which
/// [`host`](super::host) passes them.
pub(super) struct Fused<'a> {
    pub(super) config: &'a Config,
    pub(super) variant: &'a Variant,
    pub(super) layout: &'a Layout,
    pub(super) map: TensorMapParam,
    pub(super) weights: PointerParam,
    pub(super) m: Reg<U32>,
    /// K blocks of 64.
    pub(super) blocks: Reg<U32>,
    pub(super) rows: Rows,
    pub(super) groups: Option<Groups>,
    /// Of stream-K.
    pub(super) workspace: Option<PointerParam>,
    pub(super) gate_sums: GateSums,
    pub(super) base: Addr<Shared>,
    pub(super) ring: Ring,
    pub(super) warp: Reg<U32>,
    pub(super) lane: Reg<U32>,
}

/// Where gate's sums are, of products apart.
pub(super) enum GateSums {
    /// All sums are computed here.
    None,
    /// Gate is: its sums go there.
    Kept(PointerParam),
    /// Up is: gate's sums come from there.
    Read(PointerParam),
}

pub(super) struct Groups {
    /// First row of each group, and one more.
    pub(super) offsets: PointerParam,
    pub(super) count: Param<U32>,
    /// Bytes from one group's weights to the next one's.
    pub(super) stride: Param<U64>,
}

impl<'a> Fused<'a> {
    fn new(k: &mut Kernel, config: &'a Config, variant: &'a Variant, layout: &'a Layout) -> Self {
        k.required_threads(config.threads());
        k.min_ctas(config.ctas_per_sm);
        if config.cluster() > 1 {
            k.cluster(config.cluster(), 1, 1);
        }
        let map = k.tensor_map("tokens");
        let weights = k.pointer("weights");
        let sizes = [k.param::<U32>("m"), k.param::<U32>("n"), k.param::<U32>("k_blocks")];
        let base = k.shared(&layout.smem);
        let ring = Ring::new(base, config.stages, &layout.full, &layout.empty);
        let [m, n, blocks] = sizes.map(|param| k.ld_param(&param));
        let rows = Rows::declare(k, variant, n);
        let groups = variant.grouped.then(|| Groups {
            offsets: k.pointer("group_rows"),
            count: k.param("groups"),
            stride: k.param("group_stride"),
        });
        let workspace = (variant.scheduler == Scheduler::StreamK).then(|| k.pointer("workspace"));
        let gate_sums = match variant.products {
            Products::Both | Products::Linear => GateSums::None,
            Products::Gate => GateSums::Kept(k.pointer("gate_sums")),
            Products::Up => GateSums::Read(k.pointer("gate_sums")),
        };
        let warp = k.warp_index();
        let thread = k.special(Special::TidX);
        let lane = k.eval(thread & 31);
        Self {
            config,
            variant,
            layout,
            map,
            weights,
            m,
            blocks,
            rows,
            groups,
            workspace,
            gate_sums,
            base,
            ring,
            warp,
            lane,
        }
    }

    fn emit(&self, k: &mut Kernel) {
        self.init_from_other(k);
        self.ring.init(k, 1, self.config.consumer_threads() / 32);
        if self.layout.from_other.is_some() {
            k.cluster_arrive_relaxed();
        }
        if self.groups.is_some() {
            k.comment("Rows of the groups may come from the kernel before; the next one need not wait for them again.");
            k.grid_dependency_wait();
        }
        k.launch_dependents();
        // With one tile per CTA every role has the same.
        let tile = (self.variant.scheduler == Scheduler::Grid).then(|| self.grid_tile(k));
        let consumer_warps = self.config.consumer_threads() / 32;
        let (producer_registers, consumer_registers) = self.config.registers();
        let is_producer = k.compare(Cmp::Ge, self.warp, consumer_warps);
        k.if_else(
            is_producer,
            "producer",
            |k| {
                k.setmaxnreg_dec(producer_registers);
                let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
                // One thread each; or a warp whose lanes all look for the tile's group and one of which loads.
                let member = |k: &mut Kernel, warp| match self.warps_find_tiles() {
                    true => k.compare(Cmp::Eq, self.warp, warp),
                    false => k.compare_and(Cmp::Eq, self.warp, warp, first_lane),
                };
                let weights = member(k, consumer_warps);
                k.if_(weights, "weights", |k| self.load_weights(k, tile, first_lane));
                let tokens = member(k, consumer_warps + 1);
                k.if_(tokens, "tokens", |k| self.load_tokens(k, tile, first_lane));
            },
            |k| {
                k.setmaxnreg_inc(consumer_registers);
                let pair = self.config.exchanges();
                if pair {
                    k.comment("The other CTA has set its barrier up.");
                    k.cluster_wait();
                }
                let acc: Vec<Reg<F32>> = k.zeros(self.config.tokens as usize / 2);
                let consumer = self.consumer(k);
                self.for_each_tile(k, tile, |k, tile| {
                    self.multiply(k, &consumer, tile, &acc);
                    k.comment("Every warpgroup is done with the ring, or with the last tile's stores.");
                    k.bar_sync(1u32, self.config.consumer_threads());
                    self.finish(k, tile, &acc);
                });
                if pair {
                    k.comment("What was sent has arrived.");
                    k.cluster_wait();
                }
            },
        );
    }

    pub(super) fn features(&self) -> u32 {
        self.config.variant_features(self.variant)
    }

    /// Whether a CTA has more than one tile.
    pub(super) fn many_tiles(&self) -> bool {
        self.variant.scheduler != Scheduler::Grid
    }

    /// Whether roles find their tiles themselves, and need all lanes of a warp for that.
    pub(super) fn warps_find_tiles(&self) -> bool {
        self.many_tiles() && self.groups.is_some()
    }

    /// Whether one instruction loads the tokens of a whole stage.
    pub(super) fn whole_stage_loads(&self) -> bool {
        self.variant.whole_blocks && self.config.whole_stage_loads()
    }

    /// A constant offset in shared memory.
    pub(super) fn shared(&self, offset: u32) -> Addr<Shared> {
        self.base.at(offset)
    }

    /// Address of a group's part of a table with `bytes` bytes for each group; the start without groups.
    pub(super) fn of_group(
        &self,
        k: &mut Kernel,
        table: Addr<Global>,
        tile: Tile,
        bytes: Reg<U64>,
    ) -> Addr<Global> {
        match tile.group {
            None => table,
            Some(group) => k.offset(table, group.widen() * bytes),
        }
    }
}
