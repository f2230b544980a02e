//! The fused dual GEMM on e4m3: `wgmma` with both operands in shared memory, gate and up in accumulators of one thread.
//!
//! ```text
//! weight producer   1 thread   TMA of 64 · groups gate rows and as many up rows   ─┐ full[stage]     ┌─ empty[stage]
//! token producer    1 thread   TMA of tokens                                      ─┘ → consumers ────┘
//! consumers         1 or 2 warpgroups: four wgmma k32 for gate and four for up per stage of 128 K
//! epilogue          row scale, alpha, bias, activation, staged in shared memory, 16-byte stores
//! ```
//!
//! Flow: [`Config`] → here → PTX. Spec: <https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions>.

use dualgemm_formats::FloatType;
use dualgemm_gemm::Program;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;

use super::config::{Config, GROUP_FEATURES, Layout, STAGE_K};
use crate::Error;
use crate::generic::finish::{self, Finish, Staged};
use crate::generic::module;
use crate::parts::ring::{Ring, low_word};

/// Name of the kernel in its module.
pub const ENTRY: &str = "dual_gemm";

/// Generates the kernel with C of type `out`; `aligned` promises that rows of C start at multiples of 16 bytes.
///
/// # Errors
/// If the configuration does not fit.
pub fn generate(config: &Config, out: FloatType, program: &Program, aligned: bool) -> Result<Module, Error> {
    let layout = config.layout(out)?;
    let about = format!("C = act(A B1^T, A B2^T), e4m3: {}", config.name());
    module(Target::Sm90a, &about, ENTRY, |k| {
        Fused::new(k, config, &layout, out, program, aligned).emit(k);
    })
}

struct Fused<'a> {
    config: &'a Config,
    layout: &'a Layout,
    out: FloatType,
    finish: Finish<'a>,
    /// Tensor maps of A, gate, up.
    maps: [TensorMapParam; 3],
    row_scales: PointerParam,
    ring: Ring,
    base: Addr<Shared>,
    warp: Reg<U32>,
    lane: Reg<U32>,
    first_lane: Reg<Pred>,
    token: Reg<U32>,
    feature: Reg<U32>,
    m: Reg<U32>,
    n: Reg<U32>,
    /// Stages that K takes.
    blocks: Reg<U32>,
}

impl<'a> Fused<'a> {
    fn new(
        k: &mut Kernel,
        config: &'a Config,
        layout: &'a Layout,
        out: FloatType,
        program: &'a Program,
        aligned: bool,
    ) -> Self {
        k.required_threads(config.threads());
        k.min_ctas(1);
        let maps = ["tokens", "gate", "up"].map(|name| k.tensor_map(name));
        let sizes = [k.param::<U32>("m"), k.param::<U32>("n"), k.param::<U32>("blocks")];
        let row_scales = k.pointer("row_scales");
        let finish = Finish::declare(k, out, aligned, program);
        let base = k.shared(&layout.smem);
        let [m, n, blocks] = sizes.map(|size| k.ld_param(&size));
        let warp = k.warp_index();
        let thread = k.special(Special::TidX);
        let lane = k.and(thread, 31u32);
        let first_lane = k.compare(Cmp::Eq, lane, 0u32);
        let (token, feature) = (k.special(Special::CtaidX), k.special(Special::CtaidY));
        let token = k.mul(token, config.tokens);
        let feature = k.mul(feature, config.features());
        let ring = Ring::new(base, config.stages, &layout.full, &layout.empty);
        Self {
            config,
            layout,
            out,
            finish,
            maps,
            row_scales,
            ring,
            base,
            warp,
            lane,
            first_lane,
            token,
            feature,
            m,
            n,
            blocks,
        }
    }

    fn emit(&self, k: &mut Kernel) {
        let consumer_warps = self.config.consumer_threads() / 32;
        self.ring.init(k, 1, consumer_warps);
        k.launch_dependents();
        let produces = k.compare(Cmp::Ge, self.warp, consumer_warps);
        let registers = self.config.registers();
        k.if_else(
            produces,
            "producers",
            |k| {
                if let Some((few, _)) = registers {
                    k.setmaxnreg_dec(few);
                }
                k.role(self.warp, consumer_warps..consumer_warps + 1, "weights", |k| {
                    k.if_(self.first_lane, "issue_weights", |k| self.load_weights(k));
                });
                k.role(self.warp, consumer_warps + 1..consumer_warps + 2, "tokens", |k| {
                    k.grid_dependency_wait();
                    k.if_(self.first_lane, "issue_tokens", |k| self.load_tokens(k));
                });
            },
            |k| {
                if let Some((_, many)) = registers {
                    k.setmaxnreg_inc(many);
                }
                let sums = [0, 1].map(|_| k.zeros(self.config.tokens as usize / 2));
                self.multiply(k, &sums);
                self.store(k, &sums);
            },
        );
    }

    fn load_weights(&self, k: &mut Kernel) {
        let maps = [1, 2].map(|map| k.tensor_map_address(&self.maps[map]));
        let at = self.ring.start(k, true);
        let bytes = self.config.features() * STAGE_K;
        k.for_range("weight_stages", 0u32, self.blocks, 1, |k, block, _| {
            let full = self.ring.wait_empty(k, at);
            k.mbarrier_arrive_expect_tx(full, self.config.stage_bytes());
            let offset = k.mul(at.index, self.layout.weights.stride);
            let slot = k.offset(self.base.at(self.layout.weights.offset), offset.cast());
            let column = k.mul(block, STAGE_K);
            let place = [column.cast::<S32>().into(), self.feature.cast::<S32>().into()];
            for (half, map) in maps.into_iter().enumerate() {
                k.tensor_load(slot.at(half as u32 * bytes), map, &place, full, &TmaOptions::default());
            }
            at.advance(k);
        });
    }

    fn load_tokens(&self, k: &mut Kernel) {
        let map = k.tensor_map_address(&self.maps[0]);
        let at = self.ring.start(k, true);
        k.for_range("token_stages", 0u32, self.blocks, 1, |k, block, _| {
            let full = self.ring.wait_empty(k, at);
            let offset = k.mul(at.index, self.layout.tokens.stride);
            let slot = k.offset(self.base.at(self.layout.tokens.offset), offset.cast());
            let column = k.mul(block, STAGE_K);
            let place = [column.cast::<S32>().into(), self.token.cast::<S32>().into()];
            k.tensor_load(slot, map, &place, full, &TmaOptions::default());
            at.advance(k);
        });
    }

    fn multiply(&self, k: &mut Kernel, sums: &[Vec<Reg<F32>>; 2]) {
        let (desc, bytes) = (self.layout.tile.wgmma_desc(), self.config.features() * STAGE_K);
        let tokens = low_word(k, self.base.at(self.layout.tokens.offset), desc);
        let weights = low_word(k, self.base.at(self.layout.weights.offset), desc);
        let group = k.shr(self.warp, 2u32);
        let weights = k.mad(group, GROUP_FEATURES * STAGE_K / 16, weights);
        let high = k.mov::<B32>((desc >> 32) as u32);
        let take = self.ring.start(k, false);
        let release = self.ring.start(k, false);
        k.for_range("k_stages", 0u32, self.blocks, 1, |k, block, _| {
            self.ring.wait_full(k, take);
            let tokens = k.mad(take.index, self.layout.tokens.stride / 16, tokens);
            let weights = k.mad(take.index, self.layout.weights.stride / 16, weights);
            k.wgmma_fence();
            for step in 0..STAGE_K / 32 {
                let advance = self.layout.tile.advance_k(32 * step) as u32;
                let b = k.add(tokens, advance);
                let b = k.pack_64(b.cast::<B32>(), high);
                for (half, sums) in sums.iter().enumerate() {
                    let a = k.add(weights, advance + half as u32 * bytes / 16);
                    let a = k.pack_64(a.cast::<B32>(), high);
                    k.wgmma(WgmmaFormat::E4m3, sums, WgmmaA::Desc(a), b, true);
                }
            }
            k.wgmma_commit();
            take.advance(k);
            k.comment("The stage before is multiplied.");
            k.wgmma_wait(1);
            let previous = k.compare(Cmp::Ne, block, 0u32);
            k.if_(previous, "release", |k| {
                self.ring.release(k, release, self.first_lane);
                release.advance(k);
            });
        });
        k.wgmma_wait(0);
    }

    fn store(&self, k: &mut Kernel, sums: &[Vec<Reg<F32>>; 2]) {
        k.grid_dependency_wait();
        k.comment("Every warpgroup is done with the ring, which becomes the staged tile.");
        k.bar_sync(1u32, self.config.consumer_threads());
        let staged = Staged {
            start: self.base,
            tokens: self.config.tokens,
            features: self.config.features(),
            threads: self.config.consumer_threads(),
            token: self.token,
            feature: self.feature,
            m: self.m,
            n: self.n,
        };
        let (g, q) = (k.shr(self.lane, 2u32), k.and(self.lane, 3u32));
        let feature = k.mad(self.warp, 16u32, g);
        let token = k.shl(q, 1u32);
        let scales = k.ld_pointer(&self.row_scales);
        let scaled = k.compare(Cmp::Ne, scales.base(), 0u64);
        let factors = [0u32, 8].map(|h| {
            let feature = k.add(self.feature, feature);
            let feature = k.add(feature, h);
            self.finish.factors(k, feature, self.n)
        });
        let places = [0u32, 8].map(|h| {
            let feature = k.add(feature, h);
            self.finish.place(k, &staged, token, feature)
        });
        let pitch = finish::pitch(self.out, staged.features);
        for j in 0..self.config.tokens / 8 {
            for e in 0..2 {
                let in_tile = 8 * j + e;
                let scale = k.mov(1.0f32);
                let row = k.add(token, in_tile);
                let row = k.add(row, self.token);
                let inside = k.compare_and(Cmp::Lt, row, self.m, scaled);
                let byte = k.mul_wide(row, 4u32);
                let from = k.offset(scales, byte);
                k.when(inside).to(scale).ld::<F32, _>(from);
                for h in 0..2u32 {
                    let at = (4 * j + 2 * h + e) as usize;
                    let products = [k.mul(sums[0][at], scale), k.mul(sums[1][at], scale)];
                    let value = self.finish.activate(k, &factors[h as usize], products);
                    self.finish.stage(k, places[h as usize].at(in_tile * pitch), value);
                }
            }
        }
        k.bar_sync(1u32, self.config.consumer_threads());
        self.finish.copy_out(k, &staged);
    }
}
