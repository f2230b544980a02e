//! The fused dual GEMM by `mma.sync`: weights decoded in registers, tokens by `ldmatrix`.
//!
//! ```text
//! all threads   cp.async of stage b + stages − 1   ‖   multiply stage b
//!   per K block of 64 and warp: codes and scales of its slabs → 16 fragment registers each
//!                               ldmatrix of eight tokens × 64 K → four mma.m16n8k16 per slab
//! epilogue      activation in registers, staged in shared memory, 16-byte stores
//! ```
//!
//! Rows of a slab are eight gate rows and the eight up rows of the same features, so a thread's sums 0 and 1 are gate, 2
//! and 3 up, of one feature and two tokens. In the pack of a linear layer they are 16 features, and a thread has two.
//!
//! Flow: [`Config`] → here → PTX. Spec: PTX ISA, "Matrix Fragments for mma.m16n8k16".

use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;

use super::config::{Config, Layout};
use crate::Error;
use crate::fused::ENTRY;
use crate::generic::fragments::decode_step;
use crate::generic::{module, take_turn};
use crate::parts::epilogue::Factors;
use crate::parts::groups::GroupRows;
use crate::parts::rows::Rows;
use crate::parts::staged::Staged;
use crate::parts::variant::Variant;
use crate::sm90a::pack::{CHUNK_BYTES, CODE_BYTES};

/// Bytes of a row of a token tile: 64 elements of 16 bits.
const ROW: u32 = 128;

/// Generates the kernel.
pub fn generate(config: &Config, variant: &Variant, target: Target) -> Result<Module, Error> {
    let layout = config.layout(variant)?;
    let about = format!("C = act(A B1^T, A B2^T), 4-bit weights, mma.sync: {}", config.name());
    module(target, &about, ENTRY, |k| {
        Fused::new(k, config, &layout, variant, target).emit(k);
    })
}

struct Fused<'a> {
    config: &'a Config,
    layout: &'a Layout,
    variant: &'a Variant,
    rows: Rows,
    base: Addr<Shared>,
    thread: Reg<U32>,
    lane: Reg<U32>,
    warp: Reg<U32>,
    /// First token and first feature of the tile.
    token: Reg<U32>,
    feature: Reg<U32>,
    /// The end of the rows: all of them, or the group's.
    end: Reg<U32>,
    group: Option<Reg<U32>>,
    k: Reg<U32>,
    blocks: Reg<U32>,
    loads: Loads,
}

/// What a thread copies to shared memory in every stage.
struct Loads {
    /// Its first 16 bytes of a row of A, in K block 0, and bytes from there to its next row.
    a: Addr<Global>,
    rows_apart: Reg<U64>,
    /// Where they go, and the column of the first element.
    to: Reg<U32>,
    column: Reg<U32>,
    /// Rows of A from the thread's first one on.
    rows_left: Reg<U32>,
    /// Its first 16 bytes of every chunk, in K block 0.
    chunks: Vec<Addr<Global>>,
}

impl<'a> Fused<'a> {
    fn new(
        k: &mut Kernel,
        config: &'a Config,
        layout: &'a Layout,
        variant: &'a Variant,
        target: Target,
    ) -> Self {
        k.required_threads(config.threads());
        let (a, pitch, weights) = (k.pointer("a"), k.param::<U32>("a_pitch"), k.pointer("weights"));
        let groups = layout.found.as_ref().map(|found| (GroupRows::declare(k), found.offset));
        let sizes = [k.param::<U32>("m"), k.param::<U32>("n"), k.param::<U32>("k")];
        let base = k.shared(&layout.smem);
        take_turn(k, target);
        let [m, n, depth] = sizes.map(|size| k.ld_param(&size));
        let rows = Rows::declare(k, variant, n);
        let thread = k.special(Special::TidX);
        let lane = k.eval(thread & 31);
        let warp = k.eval(thread >> 5);
        let (token_tile, feature_tile) = (k.special(Special::CtaidX), k.special(Special::CtaidY));
        let (token, end, group) = match groups {
            None => (k.eval(token_tile * config.tokens), m, None),
            Some((groups, found)) => {
                groups.find_tile(k, Special::CtaidX, config.tokens, base.at(found));
                let [group, row, end, _]: [Reg<U32>; 4] = k.ld_vector(base.at(found));
                (row, end, Some(group))
            }
        };
        let feature = k.eval(feature_tile * config.features(variant));
        let blocks = k.eval((depth + 63) >> 6);

        let (a, pitch) = (k.ld_pointer(&a), k.ld_param(&pitch));
        let row = k.eval(thread >> 3);
        let piece = k.eval(thread & 7);
        let first = k.eval(token + row);
        let a = k.offset(a, piece.mul_wide(16) + first.mul_wide(pitch));
        let to = k.eval(row * ROW + ((piece ^ (row & 7)) << 4));
        let rows_apart = k.eval(pitch.mul_wide(config.threads() / 8));
        let rows_left = k.eval(end - first);
        let rows_left = {
            let beyond = k.compare(Cmp::Ge, first, end);
            k.select::<U32>(beyond, 0u32, rows_left)
        };
        k.comment("Row tiles beyond the last one read it again; their features are not stored.");
        let weights = k.ld_pointer(&weights);
        let in_chunk = variant.chunk_features();
        let last = k.eval(((n + (in_chunk - 1)) >> in_chunk.ilog2()) - 1);
        let chunks = (0..config.chunks)
            .map(|chunk| {
                let first = k.eval(feature_tile * config.chunks);
                let tile = k.eval((first + chunk).min(last));
                let tile = group.map_or(tile, |group| k.eval(group * (last + 1) + tile));
                k.offset(weights, thread.mul_wide(16) + tile.mul_wide(blocks) * CHUNK_BYTES as u64)
            })
            .collect();
        let column = k.eval(piece << 3);
        let loads = Loads { a, rows_apart, to, column, rows_left, chunks };
        Self {
            config,
            layout,
            variant,
            rows,
            base,
            thread,
            lane,
            warp,
            token,
            feature,
            end,
            group,
            k: depth,
            blocks,
            loads,
        }
    }

    fn emit(&self, k: &mut Kernel) {
        let config = self.config;
        let sums = k.zeros((config.slabs() * config.warp_tokens() / 2) as usize);
        let write = k.mov::<U32>(0u32);
        for stage in 0..config.stages - 1 {
            let block = k.mov::<U32>(stage);
            self.load(k, block, write);
            self.advance(k, write);
        }
        let read = k.mov::<U32>(0u32);
        let places = self.places(k);
        k.for_range("k_blocks", 0u32, self.blocks, 1, |k, block, _| {
            k.cp_async_wait(config.stages - 2);
            k.comment("The stage has arrived for all threads, and all are done with the one before, which is refilled.");
            k.cta_sync();
            let next = k.eval(block + (config.stages - 1));
            self.load(k, next, write);
            self.advance(k, write);
            self.multiply(k, &places, read, &sums);
            self.advance(k, read);
        });
        k.comment("Copies of stages beyond the last block are empty; the ring becomes the staged tile.");
        k.cta_sync();
        self.store(k, &sums);
    }

    /// The next stage's number.
    fn advance(&self, k: &mut Kernel, stage: Reg<U32>) {
        k.to(stage).eval(stage + 1);
        let wrapped = k.compare(Cmp::Eq, stage, self.config.stages);
        k.when(wrapped).to(stage).mov::<U32>(0u32);
    }

    /// Starts the copies of a K block, if there is one, and closes the group.
    fn load(&self, k: &mut Kernel, block: Reg<U32>, stage: Reg<U32>) {
        let config = self.config;
        let exists = k.compare(Cmp::Lt, block, self.blocks);
        k.if_(exists, "load", |k| {
            let in_row = k.compare(Cmp::Lt, (block << 6) + self.loads.column, self.k);
            let mut from = k.offset(self.loads.a, block.mul_wide(ROW));
            let start = k.eval(stage * self.layout.tokens.stride);
            let to = k.offset(self.base.at(self.layout.tokens.offset), start + self.loads.to);
            let rows_at_once = config.threads() / 8;
            for first in (0..config.tokens).step_by(rows_at_once as usize) {
                if first > 0 {
                    from = k.offset(from, self.loads.rows_apart);
                }
                let inside = k.compare_and(Cmp::Gt, self.loads.rows_left, first, in_row);
                let bytes = k.select::<U32>(inside, 16u32, 0u32);
                let to = to.at(first * ROW);
                if config.tokens - first >= rows_at_once {
                    k.cp_async_16_partial(to, from, bytes);
                } else {
                    let mine = k.compare(Cmp::Lt, self.thread, (config.tokens - first) * 8);
                    k.when(mine).cp_async_16_partial(to, from, bytes);
                }
            }
            let skip = k.eval(block.mul_wide(CHUNK_BYTES as u32));
            let start = self.base.at(self.layout.weights.offset);
            let to = k.offset(start, self.thread * 16 + stage * self.layout.weights.stride);
            for (chunk, from) in self.loads.chunks.iter().enumerate() {
                let from = k.offset(*from, skip);
                let to = to.at((chunk * CHUNK_BYTES) as u32);
                let pieces = CHUNK_BYTES as u32 / 16;
                for first in (0..pieces).step_by(config.threads() as usize) {
                    let (to, from) = (to.at(first * 16), from.at(first * 16));
                    if pieces - first >= config.threads() {
                        k.cp_async_16(to, from);
                    } else {
                        let mine = k.compare(Cmp::Lt, self.thread, pieces - first);
                        k.when(mine).cp_async_16(to, from);
                    }
                }
            }
        });
        k.cp_async_commit();
    }

    /// Warp along the rows and along the tokens.
    fn warps(&self, k: &mut Kernel) -> [Reg<U32>; 2] {
        match self.config.token_warps {
            1 => [self.warp, k.mov::<U32>(0u32)],
            _ => [k.eval(self.warp % self.config.row_warps), k.eval(self.warp / self.config.row_warps)],
        }
    }

    /// Where a lane reads in stage 0.
    fn places(&self, k: &mut Kernel) -> Places {
        let [row_warp, token_warp] = self.warps(k);
        let (slabs, g) = (self.config.slabs(), k.eval(self.lane >> 2));
        let first = k.eval(row_warp * slabs);
        let slabs = (0..slabs)
            .map(|slab| {
                let slab = k.eval(first + slab);
                let (chunk, within) = (k.eval(slab >> 2), k.eval(slab & 3));
                let chunk = k.eval(chunk * CHUNK_BYTES as u32);
                let codes = k.eval(((within << 5) + self.lane) * 16 + chunk);
                let scales = k.eval(((within << 3) + g) * 8 + chunk);
                let start = self.base.at(self.layout.weights.offset);
                let codes = k.offset(start, codes);
                [codes, k.offset(start.at(CODE_BYTES as i64), scales)]
            })
            .collect();
        k.comment(
            "`ldmatrix`: lane 8m + i gives row i of matrix m, here eight tokens and the m-th eight of 32 K.",
        );
        let row = k.eval(self.lane & 7);
        let piece = k.eval((self.lane >> 3) ^ row);
        let first = k.eval(token_warp * self.config.warp_tokens());
        let rows = k.eval((first + row) * ROW);
        let tokens = [0u32, 4].map(|half| {
            let piece = if half == 0 { piece } else { k.eval(piece ^ half) };
            k.offset(self.base.at(self.layout.tokens.offset), piece * 16 + rows)
        });
        Places { slabs, tokens }
    }

    /// Multiplies the K block in a stage.
    fn multiply(&self, k: &mut Kernel, places: &Places, stage: Reg<U32>, sums: &[Reg<F32>]) {
        let weights = k.eval(stage * self.layout.weights.stride);
        let fragments: Vec<[[Reg<B32>; 4]; 4]> = places
            .slabs
            .iter()
            .map(|slab| {
                let [codes, scales] = slab.map(|place| k.offset(place, weights));
                let words: [Reg<B32>; 4] = k.ld_vector(codes);
                let pairs: [Reg<B32>; 2] = k.ld_vector(scales);
                std::array::from_fn(|step| {
                    decode_step(k, self.variant.compute, words[step], pairs[step / 2], step % 2)
                })
            })
            .collect();
        let at = k.eval(stage * self.layout.tokens.stride);
        let tokens = places.tokens.map(|place| k.offset(place, at));
        let groups = self.config.warp_tokens() / 8;
        for group in 0..groups {
            for (half, place) in tokens.into_iter().enumerate() {
                let b: [Reg<B32>; 4] = k.ldmatrix(false, place.at(group * 8 * ROW));
                for (slab, fragments) in fragments.iter().enumerate() {
                    let first = (slab as u32 * groups + group) as usize * 4;
                    let acc: [Reg<F32>; 4] = std::array::from_fn(|i| sums[first + i]);
                    for step in 0..2 {
                        let b = [b[2 * step], b[2 * step + 1]];
                        k.mma_half(self.variant.compute, &acc, &fragments[2 * half + step], &b);
                    }
                }
            }
        }
    }

    fn store(&self, k: &mut Kernel, sums: &[Reg<F32>]) {
        let config = self.config;
        let linear = self.variant.is_linear();
        let (features, threads) = (config.features(self.variant), config.threads());
        let staged = Staged { rows: &self.rows, start: self.base, features, threads };
        let [row_warp, token_warp] = self.warps(k);
        let groups = config.warp_tokens() / 8;
        let (g, q) = (k.eval(self.lane >> 2), k.eval(self.lane & 3));
        let token = k.eval(token_warp * config.warp_tokens() + (q << 1));
        for slab in 0..config.slabs() {
            let first = k.eval(row_warp * config.slabs());
            let feature = k.eval((first + slab) * (self.variant.chunk_features() / 4) + g);
            let place = staged.place(k, token, feature);
            // Of a linear layer the second sums are of the feature eight further.
            let features: &[u32] = if linear { &[0, 8] } else { &[0] };
            let bytes = self.rows.variant.out.staged_bytes();
            let factors: Vec<Factors> = features
                .iter()
                .map(|&next| {
                    let of_c = k.eval(self.feature + feature + next);
                    self.rows.factors(k, self.group, of_c)
                })
                .collect();
            for group in 0..groups {
                let first = (slab * groups + group) as usize * 4;
                for e in 0..2 {
                    let sums = [sums[first + e], sums[first + e + 2]];
                    let to = place.at((group * 8 + e as u32) * staged.pitch());
                    for ((&next, factors), sum) in features.iter().zip(&factors).zip(sums) {
                        let value = match linear {
                            false => factors.activate(k, &self.rows.variant.program, sums),
                            true => factors.product(k, 0, sum),
                        };
                        staged.store(k, to.at(next * bytes), value);
                    }
                }
            }
        }
        k.cta_sync();
        staged.copy_out(k, config.tokens, (self.token, self.end), (self.feature, self.rows.n));
    }
}

/// Where a lane reads in stage 0.
struct Places {
    /// Codes and scales of each slab.
    slabs: Vec<[Addr<Shared>; 2]>,
    /// Tokens, the first and the second 32 K.
    tokens: [Addr<Shared>; 2],
}
