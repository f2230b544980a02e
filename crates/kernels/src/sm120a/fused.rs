//! The fused dual GEMM on sm_120a: nvfp4 or mxfp4 operands as they lie in a checkpoint, `mma.sync` with block scales.
//!
//! ```text
//! one lane   TMA of gate, up and their scales  ─┐ full[stage]    ┌─ empty[stage]
//! one lane   TMA of A and its scales            ─┘  → 8 warps ───┘
//! 8 warps    per step of 64 K: ldmatrix of weights (eight rows of gate, eight of up) and of tokens, scales by
//!            plain loads, mma.m16n8k64
//! then       sums through shared memory → activation → C (store.rs)
//! ```
//!
//! The 16 rows of a matrix instruction are eight features of gate and the same of up, so both sums of a feature are in
//! one thread. Operands are loaded to shared memory as the checkpoint has them, so nothing is packed in advance:
//! `ldmatrix` puts 16-byte pieces of rows (32 codes) where the instruction wants them.
//!
//! Flow: [`Config`] → here → PTX.
//! Spec: <https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16864>.

use dualgemm_formats::BlockFormat;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::Swizzle;

use super::config::{Config, Layout, SLAB, TOKEN_PAIR};
use crate::Error;
use crate::fused::{ENTRY, Tile as _};
use crate::parts::format::{ATOM_BYTES, ATOM_ROWS, Formats, STEP_K};
use crate::parts::operand::{Maps, OperandIndex};
use crate::parts::ring::Ring;
use crate::parts::rows::Rows;
use crate::parts::tiles::{Tile, Tiles};
use crate::parts::variant::Variant;

/// Generates the kernel for `target`, sm_120a or sm_121a.
pub fn generate(config: &Config, variant: &Variant, target: Target) -> Result<Module, Error> {
    let layout = config.layout()?;
    config.rules().common(variant)?;
    let mut module = Builder::new(target, Version::new(8, 8));
    module.comment(&format!(
        "C = act(A B1^T, A B2^T), {} operands, C in {:?}: {}",
        config.format,
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
    grouped: bool,
    maps: Maps,
    pub rows: Rows,
    tiles: Tiles,
    pub base: Addr<Shared>,
    ring: Ring,
    n: Reg<U32>,
    stages: Reg<U32>,
    steps: Reg<U32>,
    pub warp: Reg<U32>,
    pub lane: Reg<U32>,
}

/// Where a lane finds its pieces in stage 0.
struct LaneAddresses {
    /// Of each step this warp may take: the row of weights of slab 0, and of tokens of group 0.
    weights: Vec<Addr<Shared>>,
    tokens: Vec<Addr<Shared>>,
    /// Scale words of step 0 of slab 0, and of token group 0.
    weight_scales: Addr<Shared>,
    token_scales: Addr<Shared>,
}

impl<'a> Fused<'a> {
    fn new(k: &mut Kernel, config: &'a Config, layout: &'a Layout, variant: &'a Variant) -> Self {
        k.required_threads(config.threads());
        k.min_ctas(1);
        let maps = Maps::declare(k, Formats::Scaled(config.format));
        let [m, n, kk] = ["m", "n", "k"].map(|name| k.param::<U32>(name)).map(|param| k.ld_param(&param));
        let rows = Rows::declare_halves(k, variant, n);
        let base = k.shared(&layout.smem);
        let ring = Ring::new(base, config.stages, &layout.full, &layout.empty);
        let [cta, ctas] = [Special::CtaidX, Special::NctaidX].map(|special| k.special(special));
        let size = (config.tokens, config.features);
        let tiles = Tiles::declare(k, variant.grouped, size, (m, n), (cta, ctas));
        let [stages, steps] = [config.stage_k, STEP_K].map(|by| k.eval(kk.div_ceil(by)));
        let warp = k.warp_index();
        let lane = k.special(Special::LaneId);
        Self {
            config,
            layout,
            grouped: variant.grouped,
            maps,
            n: rows.n,
            rows,
            tiles,
            base,
            ring,
            stages,
            steps,
            warp,
            lane,
        }
    }

    fn emit(&self, k: &mut Kernel) {
        let warps = self.config.consumer_warps();
        let thread = k.special(Special::TidX);
        let first = k.compare(Cmp::Eq, thread, 0u32);
        k.if_(first, "barriers", |k| {
            for stage in 0..self.config.stages {
                k.mbarrier_init(self.base.at(self.layout.full.part(stage)), 1u32);
                k.mbarrier_init(self.base.at(self.layout.empty.part(stage)), warps);
            }
            k.fence_mbarrier_init();
        });
        k.cta_sync();
        k.launch_dependents();
        if self.grouped {
            k.comment("The sizes of the groups may come from the kernel before.");
            k.grid_dependency_wait();
        }
        self.one_lane(k, warps, "load weights", |k| self.load_weights(k));
        self.one_lane(k, warps + 1, "load A", |k| self.load_a(k));
        let multiplies = k.compare(Cmp::Lt, self.warp, warps);
        k.if_(multiplies, "multiply", |k| {
            self.tiles.for_each(k, "tiles", |k, tile| {
                let sums = self.multiply(k, tile);
                k.comment("Every warp is done with the ring; there is one tile for a CTA.");
                k.bar_sync(1u32, warps * 32);
                self.stage(k, &sums);
                k.bar_sync(1u32, warps * 32);
                self.store(k, tile);
            });
        });
    }

    fn one_lane(&self, k: &mut Kernel, warp: u32, name: &str, body: impl FnOnce(&mut Kernel)) {
        k.role(self.warp, warp..warp + 1, name, |k| {
            let leader = k.elect();
            k.if_(leader, name, body);
        });
    }

    // ---- producers ----

    fn load(
        &self,
        k: &mut Kernel,
        name: &str,
        operands: &[OperandIndex],
        from: (Reg<U32>, Reg<U32>),
        announce: bool,
        options: &TmaOptions,
    ) {
        let at = self.ring.start(k, true);
        k.for_range(name, 0u32, self.stages, 1, |k, stage, _| {
            let full = self.ring.wait_empty(k, at);
            if announce {
                k.mbarrier_arrive_expect_tx(full, self.config.stage_bytes());
            }
            let start = self.base.at(self.layout.ring.offset);
            let slot = k.offset(start, at.index * self.layout.ring.stride);
            for &which in operands {
                let to =
                    [self.layout.codes, self.layout.scales].map(|offset| slot.at(offset[which as usize]));
                let part = self.config.parts()[which as usize];
                self.maps.load(k, (which, part), stage, to, from, ([full; 2], options));
            }
            at.advance(k);
        });
    }

    fn load_weights(&self, k: &mut Kernel) {
        let halves = [OperandIndex::Gate, OperandIndex::Up];
        halves.into_iter().for_each(|half| self.maps.prefetch(k, half));
        // Weights that one CTA alone reads leave L2 first.
        let l2 = (self.config.tokens <= 64).then_some(Eviction::First);
        let options = TmaOptions { l2, own_cta: true, ..TmaOptions::default() };
        self.tiles.for_each(k, "weight_tiles", |k, tile| {
            let row = tile.weight_row(k, self.n, tile.feature);
            let atom = tile.weight_atom(k, self.n, tile.feature);
            self.load(k, "weight_stages", &halves, (row, atom), true, &options);
        });
    }

    fn load_a(&self, k: &mut Kernel) {
        self.maps.prefetch(k, OperandIndex::A);
        if !self.grouped {
            k.grid_dependency_wait();
        }
        let options = TmaOptions { own_cta: true, ..TmaOptions::default() };
        self.tiles.for_each(k, "a_tiles", |k, tile| {
            let atom = k.eval(tile.atom + (tile.row >> ATOM_ROWS.ilog2()));
            self.load(k, "a_stages", &[OperandIndex::A], (tile.token, atom), false, &options);
        });
    }

    // ---- consumers ----

    /// Warp along the features, along the tokens, and K group.
    pub(super) fn place(&self, k: &mut Kernel) -> [Reg<U32>; 3] {
        let Config { feature_warps, token_warps, .. } = *self.config;
        let along = k.eval(self.warp % feature_warps);
        let rest = k.eval(self.warp / feature_warps);
        [along, k.eval(rest % token_warps), k.eval(rest / token_warps)]
    }

    /// A lane's row of a matrix of `ldmatrix`: `row` rows below `start`, at 16-byte piece `piece` (0 or 1) of step
    /// `step`. Codes lie permuted as the TMA unit left them.
    fn lane_row(
        &self,
        k: &mut Kernel,
        start: Addr<Shared>,
        row: Reg<U32>,
        piece: Reg<U32>,
        step: u32,
    ) -> Addr<Shared> {
        let part = self.config.parts()[0];
        let line = k.eval(row * part.row_bytes());
        // The same permutation as `Swizzle::apply`: bits 4 to 6 change with bits 7 to 9.
        let mask = if part.swizzle() == Swizzle::B128 { 0x70 } else { 0x30 };
        let bits = k.eval((line >> 3) & mask);
        k.offset(start, line + (((piece << 4) + step * 32) ^ bits))
    }

    /// The scale word of step 0 of a row of an operand: rows of an atom lie 32 apart side by side.
    fn scale_word(&self, k: &mut Kernel, start: Addr<Shared>, row: Reg<U32>) -> Addr<Shared> {
        let row = k.eval(row % ATOM_ROWS);
        k.offset(start, ((row & 31) << 4) + ((row >> 5) << 2))
    }

    fn lane_addresses(&self, k: &mut Kernel, tile: Tile, [along, beside, _]: [Reg<U32>; 3]) -> LaneAddresses {
        let (config, layout) = (self.config, self.layout);
        let ring = self.base.at(layout.ring.offset);
        let row = k.eval(self.lane & 7);
        let (low, high) = (k.eval((self.lane >> 3) & 1), k.eval(self.lane >> 4));

        k.comment("Weights: matrices are gate and up of piece 0, gate and up of piece 1.");
        let first = k.eval(along * (config.slabs() * SLAB));
        let feature_row = k.eval(first + row);
        let [_, gate, up] = layout.codes;
        let start = k.offset(ring.at(gate), low * (up - gate));
        let weights =
            (0..config.steps()).map(|step| self.lane_row(k, start, feature_row, high, step)).collect();

        k.comment("Tokens: matrices are pieces 0 and 1 of eight tokens, then of the next eight.");
        let first_token = k.eval(beside * (config.token_groups() * 8));
        let group = k.eval(high << 3);
        let token_row = k.eval(first_token + row + group);
        let start = ring.at(layout.codes[OperandIndex::A as usize]);
        let tokens = (0..config.steps()).map(|step| self.lane_row(k, start, token_row, low, step)).collect();

        k.comment(
            "Scales: lane 4g gives those of row g, lane 4g + 1 of row g + 8; of B, lane 4g of column g.",
        );
        let g = k.eval(self.lane >> 2);
        let [_, gate, up] = layout.scales;
        let start = k.offset(ring.at(gate), (self.lane & 1) * (up - gate));
        let feature = k.eval(tile.feature + first + g);
        let weight_scales = self.scale_word(k, start, feature);
        let token = k.eval(tile.row + first_token + g);
        let token_scales = self.scale_word(k, ring.at(layout.scales[OperandIndex::A as usize]), token);
        LaneAddresses { weights, tokens, weight_scales, token_scales }
    }

    /// The main loop of a warp: sums `[slab][token group][4]`.
    fn multiply(&self, k: &mut Kernel, tile: Tile) -> Vec<[Reg<F32>; 4]> {
        let config = self.config;
        let place = self.place(k);
        let lane = self.lane_addresses(k, tile, place);
        let count = config.slabs() * config.token_groups();
        let sums: Vec<[Reg<F32>; 4]> =
            (0..count).map(|_| std::array::from_fn(|_| k.mov::<F32>(0.0f32))).collect();
        let at = self.ring.start(k, false);
        let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
        k.for_range("stages", 0u32, self.stages, 1, |k, stage, _| {
            self.ring.wait_full(k, at);
            let offset = k.eval(at.index * self.layout.ring.stride);
            let first = k.eval(stage * config.steps());
            for step in 0..config.steps() {
                let mut here = k.compare(Cmp::Lt, first + step, self.steps);
                if config.k_groups > 1 {
                    here = k.compare_and(Cmp::Eq, place[2], step % config.k_groups, here);
                }
                k.if_(here, "step", |k| self.multiply_step(k, &lane, offset, step, &sums));
            }
            k.warp_sync();
            self.ring.release(k, at, first_lane);
            at.advance(k);
        });
        sums
    }

    fn multiply_step(
        &self,
        k: &mut Kernel,
        lane: &LaneAddresses,
        offset: Reg<U32>,
        step: u32,
        sums: &[[Reg<F32>; 4]],
    ) {
        let config = self.config;
        let row_bytes = config.parts()[0].row_bytes();
        // An atom of mxfp4 has the scales of two steps.
        let (of_atom, atom) = (step % config.atom_steps(), step / config.atom_steps());
        let select = |register| ScaleSelect { register, byte: 2 * of_atom as u16, thread: 0 };
        let weights = k.offset(lane.weights[step as usize], offset);
        let weight_scales = k.offset(lane.weight_scales.at(atom * ATOM_BYTES), offset);
        // Eight rows further is eight lines of 16 bytes further, and four bytes further after 32 rows.
        let scale_at = |rows: u32| rows % 32 * 16 + rows / 32 * 4;
        let a: Vec<([Reg<B32>; 4], Reg<B32>)> = (0..config.slabs())
            .map(|slab| {
                let rows = slab * SLAB;
                let fragment = k.ldmatrix::<4>(false, weights.at(rows * row_bytes));
                (fragment, k.ld(weight_scales.at(scale_at(rows))))
            })
            .collect();
        let tokens = k.offset(lane.tokens[step as usize], offset);
        let token_scales = k.offset(lane.token_scales.at(atom * ATOM_BYTES), offset);
        for pair in 0..config.token_groups() / 2 {
            let rows = pair * TOKEN_PAIR;
            let [b0, b1, b2, b3] = k.ldmatrix::<4>(false, tokens.at(rows * row_bytes));
            for (half, b) in [(0, [b0, b1]), (1, [b2, b3])] {
                let scale = k.ld(token_scales.at(scale_at(rows + 8 * half)));
                for (slab, (a, sfa)) in a.iter().enumerate() {
                    let sum = &sums[slab * config.token_groups() as usize + (2 * pair + half) as usize];
                    let (sfa, sfb) = (select(*sfa), select(scale));
                    match config.format {
                        BlockFormat::Nvfp4 => k.mma_nvfp4(sum, a, &b, sfa, sfb),
                        BlockFormat::Mxfp4 => k.mma_mxfp4(sum, a, &b, sfa, sfb),
                    }
                }
            }
        }
    }
}
