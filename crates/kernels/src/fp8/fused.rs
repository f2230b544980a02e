//! The fused dual GEMM on e4m3: `wgmma` with both operands in shared memory, gate and up in accumulators of one thread.
//!
//! ```text
//! weight producer   1 thread   TMA of 64 · groups gate rows and as many up rows   ─┐ full[stage]     ┌─ empty[stage]
//! token producer    1 thread   TMA of tokens                                      ─┘ → consumers ────┘
//! consumers         1 or 2 warpgroups: four wgmma k32 for gate and four for up per stage of 128 K
//! epilogue          alpha, bias, activation, staged in shared memory, 16-byte stores
//! ```
//!
//! Flow: [`Config`] → here → PTX. Spec: <https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions>.

use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;

use super::config::{Config, GROUP_FEATURES, STAGE_K};
use crate::Error;
use crate::fused::{ENTRY, Tile as _};
use crate::generic::module;
use crate::parts::ring::low_word;
use crate::parts::tma_tiles::{CtaTile, Layout};
use crate::parts::variant::Variant;

/// Generates the kernel.
pub fn generate(config: &Config, variant: &Variant) -> Result<Module, Error> {
    let layout = config.layout(variant.out)?;
    config.rules().one_problem(variant)?;
    let about = format!("C = act(A B1^T, A B2^T), e4m3: {}", config.name());
    module(Target::Sm90a, &about, ENTRY, |k| {
        Fused::new(k, config, &layout, variant).emit(k);
    })
}

struct Fused<'a> {
    config: &'a Config,
    layout: &'a Layout,
    frame: CtaTile,
    /// Tensor maps of A, gate, up.
    maps: [TensorMapParam; 3],
}

impl<'a> Fused<'a> {
    fn new(k: &mut Kernel, config: &'a Config, layout: &'a Layout, variant: &Variant) -> Self {
        let maps = ["tokens", "gate", "up"].map(|name| k.tensor_map(name));
        let sizes = ["m", "n", "blocks"].map(|name| k.param(name));
        let frame = CtaTile::new(k, config.shape(), layout, sizes, variant);
        Self { config, layout, frame, maps }
    }

    fn emit(&self, k: &mut Kernel) {
        let Self { frame, layout, maps: [tokens, gate, up], .. } = self;
        frame.emit(
            k,
            |k| frame.load_weights(k, [gate, up], frame.k, (&layout.weights, STAGE_K)),
            |k| frame.load_tokens(k, tokens, frame.k, (&layout.tokens, &[0], STAGE_K)),
            |k| {
                let sums = [0, 1].map(|_| k.zeros(self.config.tokens as usize / 2));
                self.multiply(k, &sums);
                self.store(k, &sums);
            },
        );
    }

    fn multiply(&self, k: &mut Kernel, sums: &[Vec<Reg<F32>>; 2]) {
        let (desc, bytes) = (self.layout.tile.wgmma_desc(), self.config.features() * STAGE_K);
        let frame = &self.frame;
        let tokens = low_word(k, frame.base.at(self.layout.tokens.offset), desc);
        let weights = low_word(k, frame.base.at(self.layout.weights.offset), desc);
        let weights = k.eval((frame.warp >> 2) * (GROUP_FEATURES * STAGE_K / 16) + weights);
        let high = k.mov::<B32>((desc >> 32) as u32);
        let take = frame.ring.start(k, false);
        let release = frame.ring.start(k, false);
        k.for_range("k_stages", 0u32, frame.k, 1, |k, block, _| {
            frame.ring.wait_full(k, take);
            let tokens = k.eval(take.index * (self.layout.tokens.stride / 16) + tokens);
            let weights = k.eval(take.index * (self.layout.weights.stride / 16) + weights);
            k.wgmma_fence();
            for step in 0..STAGE_K / 32 {
                let advance = self.layout.tile.advance_k(32 * step) as u32;
                let b = k.eval(tokens + advance);
                let b = k.pack_64(b.cast::<B32>(), high);
                for (half, sums) in sums.iter().enumerate() {
                    let a = k.eval(weights + (advance + half as u32 * bytes / 16));
                    let a = k.pack_64(a.cast::<B32>(), high);
                    k.wgmma(WgmmaFormat::E4m3, sums, WgmmaA::Desc(a), b, true);
                }
            }
            k.wgmma_commit();
            take.advance(k);
            k.comment("The stage before is multiplied.");
            k.wgmma_wait(1);
            frame.release_before(k, block, release);
        });
        k.wgmma_wait(0);
    }

    fn store(&self, k: &mut Kernel, sums: &[Vec<Reg<F32>>; 2]) {
        let frame = &self.frame;
        let staged = frame.staged(k);
        let (g, q) = (k.eval(frame.lane >> 2), k.eval(frame.lane & 3));
        let feature = k.eval(frame.warp * 16 + g);
        let token = k.eval(q << 1);
        let factors = [0u32, 8].map(|h| {
            let feature_of_c = k.eval(frame.feature + feature + h);
            frame.rows.factors(k, None, feature_of_c)
        });
        let places = [0u32, 8].map(|h| {
            let feature = k.eval(feature + h);
            staged.place(k, token, feature)
        });
        for j in 0..self.config.tokens / 8 {
            for e in 0..2 {
                let in_tile = 8 * j + e;
                for h in 0..2u32 {
                    let at = (4 * j + 2 * h + e) as usize;
                    let program = &frame.rows.variant.program;
                    let value = factors[h as usize].activate(k, program, [sums[0][at], sums[1][at]]);
                    staged.store(k, places[h as usize].at(in_tile * staged.pitch()), value);
                }
            }
        }
        frame.copy_out(k, &staged);
    }
}
