//! The fused dual GEMM for few tokens: warps that share nothing until their sums meet.
//!
//! ```text
//! each warp, with a chunk's 64 weight rows (32 features, gate and up) and a part of K:
//!    one lane  bulk copies of packed chunks into the warp's own ring, ahead of `griddepcontrol.wait`
//!    all lanes per K block of 64: A's fragments (tokens.rs) · codes and scales → fragments · mma.m16n8k16
//! then         sums through shared memory, added in the order of K → activation → C
//! ```
//!
//! Two CTAs fit on a multiprocessor: while one ends, another's rings are full already, and it decodes as soon as A is there. If
//! a kernel has no more CTAs than there are multiprocessors, each has one to itself. Nothing but the end synchronizes warps, and
//! blocks of A that they share.
//!
//! Rows of a slab are eight gate rows and the eight up rows of the same features, so a thread's sums 0 and 1 are gate, 2
//! and 3 up, of one feature and two tokens. In the pack of a linear layer they are 16 features, and a thread has two.
//!
//! Rows in groups: CTAs along the tokens find their group themselves, and ask for weights only then. Of a few choices of tokens
//! they find the group in the router's list, and the tokens that chose it.
//!
//! Flow: [`Config`], [`Variant`] → here → PTX. Spec: PTX ISA, "Matrix Fragments for mma.m16n8k16".

use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;

use super::config::{Config, LIST, Layout, RULES, half_features};
use super::tokens::{Lane, Place, Tokens};
use crate::Error;
use crate::fused::ENTRY;
use crate::generic::fragments::decode_step;
use crate::generic::module;
use crate::parts::groups::GroupRows;
use crate::parts::ring::Position;
use crate::parts::rows::{PIECE, Rows};
use crate::parts::variant::Variant;
use crate::sm90a::pack::{CHUNK_BYTES, CODE_BYTES};

/// Slabs of 16 weight rows of a chunk.
const SLABS: u32 = 4;

/// Generates the kernel.
///
/// # Errors
/// If the configuration does not fit the architecture or the variant.
pub fn generate(config: &Config, variant: &Variant) -> Result<Module, Error> {
    let layout = config.layout(variant)?;
    RULES.common(&Variant { codes: None, choices: false, ..variant.clone() })?;
    if variant.choices && !variant.grouped {
        return RULES.refuse("choices are of groups");
    }
    if variant.codes.is_some() {
        if variant.grouped {
            return RULES.refuse("rows in groups are floats");
        }
        if variant.compute != HalfFormat::F16 {
            return RULES.refuse("codes of A are expanded to f16");
        }
        if !config.expands_codes() {
            return RULES.refuse(
                "codes of A are expanded for up to four tokens, and for eight of two chunks and more",
            );
        }
    }
    let about = format!("C = act(A B1^T, A B2^T), 4-bit weights, each warp by itself: {}", config.name());
    module(Target::Sm90a, &about, ENTRY, |k| Fused::new(k, config, &layout, variant).emit(k))
}

struct Fused<'a> {
    config: &'a Config,
    layout: &'a Layout,
    variant: &'a Variant,
    rows: Rows,
    tokens: Tokens,
    weights: PointerParam,
    groups: Option<Found>,
    base: Addr<Shared>,
    m: Reg<U32>,
    n: Reg<U32>,
    /// K, and its blocks of 64.
    k: Reg<U32>,
    blocks: Reg<U32>,
    /// Chunks that a warp asks for before it asks for A.
    first: Param<U32>,
}

/// Rows in groups: their table, where what is found there goes, and whether the table is there at once.
struct Found {
    rows: GroupRows,
    at: Addr<Shared>,
    settled: Param<U32>,
    /// Of choices: how many a row of A serves.
    per_row: Option<Param<U32>>,
}

/// A warp's share.
struct Share {
    /// Its first chunk, that chunk's K block, and how many follow each other.
    from: Addr<Global>,
    first: Reg<U32>,
    count: Reg<U32>,
    /// Its ring and the ring's barriers.
    ring: Addr<Shared>,
    full: Addr<Shared>,
    /// The row group and the part of K; whether there are such rows.
    group: Reg<U32>,
    part: Reg<U32>,
    any: Reg<Pred>,
    /// Which halves of the chunks are the CTA's, if it does not have whole ones.
    halves: Option<[Reg<Pred>; 2]>,
}

impl<'a> Fused<'a> {
    fn new(k: &mut Kernel, config: &'a Config, layout: &'a Layout, variant: &'a Variant) -> Self {
        k.required_threads(config.threads());
        k.min_ctas(config.ctas_per_sm());
        let tokens = Tokens::declare(k, variant.codes, config.narrows(variant));
        let weights = k.pointer("weights");
        let groups = layout.found.as_ref().map(|found| (GroupRows::declare(k), found.offset));
        let sizes = [k.param::<U32>("m"), k.param::<U32>("n"), k.param::<U32>("k")];
        let base = k.shared(&layout.smem);
        let first = k.param("first");
        let groups = groups.map(|(rows, found)| {
            let settled = k.param("settled");
            let per_row = variant.choices.then(|| k.param("per_row"));
            Found { rows, at: base.at(found), settled, per_row }
        });
        let [m, n, depth] = sizes.map(|size| k.ld_param(&size));
        let rows = Rows::declare(k, variant, n);
        let blocks = k.eval((depth + 63) >> 6);
        Self { config, layout, variant, rows, tokens, weights, groups, base, m, n, k: depth, blocks, first }
    }

    // Found where they are needed: registers are short in the loop.

    /// Row of C of a token of the tile; beyond [`end`](Self::end) if there is no such token.
    fn row(&self, k: &mut Kernel, token: Reg<U32>) -> Reg<U32> {
        let first = match &self.groups {
            Some(Found { at, per_row: Some(_), .. }) => {
                let token = k.eval(token.min(self.config.tokens - 1));
                let at = k.offset(at.at(LIST), token << 2);
                return k.ld(at);
            }
            Some(found) => k.ld(found.at.at(4u32)),
            None => {
                let tile = k.special(Special::CtaidY);
                k.eval(tile * self.config.tokens)
            }
        };
        k.eval(first + token)
    }

    /// The end of the rows of C that the CTA may have.
    fn end(&self, k: &mut Kernel) -> Reg<U32> {
        match &self.groups {
            Some(Found { at, per_row: None, .. }) => k.ld(at.at(8u32)),
            _ => self.m,
        }
    }

    /// The group whose rows the CTA has, if they come in groups.
    fn group(&self, k: &mut Kernel) -> Option<Reg<U32>> {
        self.groups.as_ref().map(|found| k.ld(found.at))
    }

    /// Features of half a chunk.
    fn half(&self) -> u32 {
        half_features(self.variant.is_linear())
    }

    /// First half of a chunk of the CTA, and the end.
    fn halves(&self, k: &mut Kernel) -> [Reg<U32>; 2] {
        let cta = k.special(Special::CtaidX);
        let all = k.eval(self.n.div_ceil(self.half()));
        let start = k.eval(cta * self.config.halves);
        [start, k.eval((start + self.config.halves).min(all))]
    }

    fn lane(&self, k: &mut Kernel) -> Reg<U32> {
        let thread = k.special(Special::TidX);
        k.eval(thread & 31)
    }

    fn emit(&self, k: &mut Kernel) {
        if let Some(Found { rows, at, settled, per_row }) = &self.groups {
            let settled = k.ld_param(settled);
            let written_before = k.compare(Cmp::Eq, settled, 0u32);
            k.if_(written_before, "rows", |k| k.grid_dependency_wait());
            k.comment("The next launch need not wait for the rows of the groups again.");
            k.launch_dependents();
            match per_row {
                None => rows.find_tile(k, Special::CtaidY, self.config.tokens, *at),
                Some(_) => {
                    rows.find_choices(k, (Special::CtaidY, self.m), self.config.tokens, (*at, at.at(LIST)));
                }
            }
        } else {
            k.launch_dependents();
        }
        let share = self.share(k);
        let elected = k.elect();
        k.if_(elected, "init", |k| {
            (0..self.config.chunks).for_each(|i| k.mbarrier_init(share.full.at(8 * i), 1u32));
            k.fence_mbarrier_init();
        });
        // The same lane again: PTX elects the same one each time.
        let elected = k.elect();
        k.if_(elected, "first_chunks", |k| {
            let first = k.ld_param(&self.first);
            self.ask_places(k, &share, 0u32, first);
        });
        // The other lanes come to the barriers after `Lane::wait`, which orders their initialization for them.
        let (group, [first, _]) = (self.group(k), self.halves(k));
        let first = k.eval(first * self.half());
        self.rows.prefetch(k, group, first, self.config.halves * self.half());
        k.grid_dependency_wait();
        let sums = k.zeros((SLABS * self.config.token_groups() * 4) as usize);
        let any = k.compare(Cmp::Gt, share.count, 0u32);
        k.if_(any, "share", |k| self.multiply(k, &share, &sums));
        k.comment("The ring is read (the last chunk's `bar.warp.sync`): the warp's sums take its place.");
        let lane = self.lane(k);
        let own = k.offset(share.ring, lane << 4);
        for (i, four) in (0u32..).zip(sums.chunks_exact(4)) {
            k.st_vector(own.at(i * 512), four);
        }
        k.cta_sync();
        self.reduce(k);
        k.cta_sync();
        self.store(k);
    }

    /// The rows and the K blocks of this warp.
    fn share(&self, k: &mut Kernel) -> Share {
        let (config, [start, end], warp) = (self.config, self.halves(k), k.warp_index());
        let (group, part) = match (config.row_groups(), config.k_groups) {
            (1, _) => (k.mov::<U32>(0u32), warp),
            (_, parts) => (k.eval(warp / parts), k.eval(warp % parts)),
        };
        let tile = k.eval((start >> 1) + group);
        let any = k.compare(Cmp::Lt, tile << 1, end);
        let [first, next] = match (config.row_groups(), config.k_groups) {
            // Warps that share blocks of A have the same parts.
            (3, 5) if !config.shares_blocks() => {
                k.comment("Of 15 warps the last scheduler has three, which take a quarter more of K.");
                [0u32, 1].map(|next| {
                    let part = k.eval(part + next);
                    let above = k.compare(Cmp::Gt, part + group, 3u32);
                    let above = k.select::<U32>(above, 1u32, 0u32);
                    k.eval((part * 4 + above) * self.blocks / 21)
                })
            }
            (_, parts) => [0u32, 1].map(|next| k.eval((part + next) * self.blocks / parts)),
        };
        let count = k.eval(next - first);
        // Warps without rows bring their part of A too.
        let count = if config.shares_blocks() { count } else { k.select::<U32>(any, count, 0u32) };
        let weights = k.ld_pointer(&self.weights);
        let of_groups = self.group(k).map(|group| {
            let tiles = k.eval(self.n.div_ceil(2 * self.half()));
            k.eval(group * tiles)
        });
        let row = of_groups.map_or(tile, |before| k.eval(before + tile));
        let chunk = k.eval(row.mul_wide(self.blocks) + first.widen());
        let from = k.offset(weights, chunk * CHUNK_BYTES as u64);
        let ring = self.base.at(self.layout.weights.offset);
        let ring = k.offset(ring, warp * (config.chunks * CHUNK_BYTES as u32));
        let full = self.base.at(self.layout.full.offset);
        let full = k.offset(full, warp * (8 * config.chunks));
        let halves = (config.halves % 2 == 1).then(|| {
            let half = k.eval(tile << 1);
            let low = k.compare(Cmp::Ge, half, start);
            let high = k.compare(Cmp::Lt, half + 1, end);
            [low, high]
        });
        Share { from, first, count, ring, full, group, part, any, halves }
    }

    /// Starts the first copies into some places of the ring, as far as the share has chunks.
    fn ask_places(&self, k: &mut Kernel, share: &Share, from: impl Src<U32>, to: impl Src<U32>) {
        k.for_range("places", from, to, 1, |k, at, _| {
            let there = k.compare_and(Cmp::Gt, share.count, at, share.any);
            k.if_(there, "place", |k| self.ask_weights(k, share, at, at));
        });
    }

    /// Starts the copy of chunk `unit` of the share, or of the half that is the CTA's, into place `at` of the ring.
    fn ask_weights(&self, k: &mut Kernel, share: &Share, unit: Reg<U32>, at: Reg<U32>) {
        const CODES: u32 = CODE_BYTES as u32;
        const CHUNK: u32 = CHUNK_BYTES as u32;
        let full = k.offset(share.full, at << 3);
        let to = k.offset(share.ring, at * CHUNK);
        let from = k.offset(share.from, unit.mul_wide(CHUNK));
        // Read once.
        let options = TmaOptions { l2: Some(Eviction::First), ..TmaOptions::default() };
        let whole = |k: &mut Kernel| {
            k.mbarrier_arrive_expect_tx(full, CHUNK);
            k.bulk_load(to, from, CHUNK, full, &options);
        };
        let Some([low, high]) = share.halves else { return whole(k) };
        let half = |k: &mut Kernel| {
            k.mbarrier_arrive_expect_tx(full, CHUNK / 2);
            let half = k.select::<U32>(low, 0u32, 1u32);
            for (start, bytes) in [(0, CODES / 2), (CODES, (CHUNK - CODES) / 2)] {
                let to = k.offset(to.at(start), half * bytes);
                let from = k.offset(from.at(start), half.mul_wide(bytes));
                k.bulk_load(to, from, bytes, full, &options);
            }
        };
        if self.config.halves == 1 {
            return half(k);
        }
        let both = k.select::<U32>(low, 1u32, 0u32);
        let both = k.compare_and(Cmp::Ne, both, 0u32, high);
        k.if_else(both, "whole", whole, half);
    }

    /// All chunks of the warp's share.
    fn multiply(&self, k: &mut Kernel, share: &Share, sums: &[Reg<F32>]) {
        let (config, warp, lane) = (self.config, k.warp_index(), self.lane(k));
        let codes = k.offset(share.ring, lane << 4);
        let scales = k.offset(share.ring.at(CODE_BYTES as u32), (lane >> 2) << 3);
        let block = self.base.at(self.layout.tokens.offset);
        let reader = if config.shares_blocks() { share.part } else { warp };
        let block =
            k.offset(block, reader * (config.blocks(self.variant.codes.is_some()) * config.block_bytes()));
        let end = self.end(k);
        let end = k.eval(end - 1);
        let per_row = self.groups.as_ref().and_then(|groups| groups.per_row.as_ref());
        let per_row = per_row.map(|per_row| k.ld_param(per_row));
        let of_a = |k: &mut Kernel, row: Reg<U32>| per_row.map_or(row, |per_row| k.eval(row / per_row));
        let place = Place {
            lane,
            end: of_a(k, end),
            first: share.first,
            count: share.count,
            k: self.k,
            whole: self.variant.whole_blocks,
            group: share.group,
            part: share.part,
            block,
        };
        let tokens = self.tokens.start(k, config, &place, |k, token| {
            let row = self.row(k, token);
            of_a(k, row)
        });
        let elected = k.elect();
        k.if_(elected, "other_chunks", |k| {
            let first = k.ld_param(&self.first);
            self.ask_places(k, share, first, config.chunks);
        });
        let at = Position::start(k, 0, config.chunks);
        k.for_range("k_blocks", 0u32, share.count, 1, |k, unit, _| {
            tokens.wait(k, unit);
            let body = |k: &mut Kernel| {
                let full = at.barrier(k, share.full);
                k.mbarrier_wait(full, at.phase, "chunk");
                let skip = k.eval(at.index * CHUNK_BYTES as u32);
                let chunk = [k.offset(codes, skip), k.offset(scales, skip)];
                self.multiply_chunk(k, share, (&tokens, unit), chunk, sums);
            };
            match config.shares_blocks() {
                true => k.if_(share.any, "rows", body),
                false => body(k),
            }
            tokens.advance(k);
            k.comment("All lanes have read the chunk: another takes its place.");
            k.warp_sync();
            let next = k.eval(unit + config.chunks);
            let more = k.compare_and(Cmp::Lt, next, share.count, share.any);
            k.if_(more, "refill", |k| {
                let elected = k.elect();
                k.if_(elected, "next_chunk", |k| self.ask_weights(k, share, next, at.index));
            });
            at.advance(k);
        });
        tokens.scale_back(k, sums);
    }

    /// A chunk, its codes and scales at `chunk` for this lane, with a block of A.
    fn multiply_chunk(
        &self,
        k: &mut Kernel,
        share: &Share,
        (tokens, unit): (&Lane<'_>, Reg<U32>),
        [codes, scales]: [Addr<Shared>; 2],
        sums: &[Reg<F32>],
    ) {
        let compute = if self.config.narrows(self.variant) { HalfFormat::F16 } else { self.variant.compute };
        let fragments = tokens.read(k, unit);
        let slabs = |k: &mut Kernel, range: std::ops::Range<u32>| {
            let read = |k: &mut Kernel, slab: u32| -> ([Reg<B32>; 4], [Reg<B32>; 2]) {
                (k.ld_vector(codes.at(slab * 512)), k.ld_vector(scales.at(slab * 64)))
            };
            let words: Vec<_> = range.clone().map(|slab| read(k, slab)).collect();
            // Slab after slab: a product waits for the one before if that has the same sums.
            for step in 0..4 {
                for (slab, (words, pairs)) in range.clone().zip(&words) {
                    let a = decode_step(k, compute, words[step], pairs[step / 2], step % 2);
                    for (group, fragments) in fragments.iter().enumerate() {
                        let first = (group * SLABS as usize + slab as usize) * 4;
                        let acc: [Reg<F32>; 4] = std::array::from_fn(|i| sums[first + i]);
                        k.mma_half(compute, &acc, &a, &fragments[step]);
                    }
                }
            }
        };
        match share.halves {
            None => slabs(k, 0..SLABS),
            Some(halves) => {
                for (half, there) in (0u32..).zip(halves) {
                    k.if_(there, "half", |k| slabs(k, 2 * half..2 * half + 2));
                }
            }
        }
    }

    /// Adds the sums of the warps of each row group in the order of K and makes elements of C of them:
    /// `[token][feature]` f32 where A was.
    fn reduce(&self, k: &mut Kernel) {
        let config = self.config;
        let groups = config.token_groups();
        let group = self.group(k);
        let alpha = self.rows.alpha(k, group);
        let (thread, lane, [first, _]) = (k.special(Special::TidX), self.lane(k), self.halves(k));
        let region = config.chunks * CHUNK_BYTES as u32;
        let count = config.row_groups() * groups * SLABS * 32;
        k.for_range("reduce", thread, count, config.threads(), |k, item, _| {
            let row_group = k.eval(item / (groups * SLABS * 32));
            let within = k.eval(item % (groups * SLABS * 32));
            let start = self.base.at(self.layout.weights.offset);
            let from = k.offset(start, row_group * (config.k_groups * region) + (within << 4));
            let sums: [Reg<F32>; 4] = std::array::from_fn(|_| k.mov(0.0f32));
            // All at once would take more registers than there are.
            let at_once = if config.k_groups.is_multiple_of(4) { 4 } else { config.k_groups };
            k.for_range("parts", 0u32, config.k_groups, at_once, |k, first, _| {
                let from = k.offset(from, first * region);
                for part in 0..at_once {
                    let more: [Reg<F32>; 4] = k.ld_vector(from.at(part * region));
                    sums.iter().zip(more).for_each(|(sum, more)| {
                        k.to(*sum).add(*sum, more);
                    });
                }
            });
            let slab = k.eval((within >> 5) & (SLABS - 1));
            let chunk = 2 * self.half();
            let feature = k.eval(row_group * chunk + slab * (chunk / SLABS) + (lane >> 2));
            let token = k.eval(((within >> 7) << 3) + ((lane & 3) << 1));
            let of_c = k.eval((first >> 1) * chunk + feature);
            let tile = self.base.at(self.layout.tokens.offset);
            let pitch = config.pitch(self.variant.is_linear());
            let to = k.offset(tile, token * pitch + (feature << 2));
            for e in 0..2u32 {
                let pair = [sums[e as usize], sums[e as usize + 2]];
                let inside = k.compare(Cmp::Lt, token + e, config.tokens);
                let to = to.at(e * pitch);
                if !self.variant.is_linear() {
                    let value = self.rows.activate(k, alpha, (group, of_c), pair);
                    k.when(inside).st(to, value);
                    continue;
                }
                for (next, sum) in [0u32, 8].into_iter().zip(pair) {
                    let of_c = k.eval(of_c + next);
                    let value = self.rows.product(k, alpha, (group, of_c), sum);
                    k.when(inside).st(to.at(next * 4), value);
                }
            }
        });
    }

    /// The tile of C to memory, 16 features of a token at a time.
    fn store(&self, k: &mut Kernel) {
        let (config, [start, end], thread) = (self.config, self.halves(k), k.special(Special::TidX));
        let in_half = self.half() / PIECE;
        let pieces = config.halves * in_half;
        let count = config.tokens * pieces;
        let last = self.end(k);
        k.comment("Whole warps: what is beyond the tile is not stored.");
        k.for_range("store", thread, count.next_multiple_of(32), config.threads(), |k, item, _| {
            let (token, piece) = (k.eval(item / pieces), k.eval(item % pieces));
            let piece = k.eval(piece + start * in_half);
            let there = k.compare(Cmp::Lt, item, count);
            let end = k.eval(end * in_half);
            let there = k.compare_and(Cmp::Lt, piece, end, there);
            let tile = self.base.at(self.layout.tokens.offset);
            let within = k.eval((piece - (start >> 1) * (2 * in_half)) * (PIECE * 4));
            let within = k.eval(token * config.pitch(self.variant.is_linear()) + within);
            let within = k.select::<U32>(there, within, 0u32);
            let from = k.offset(tile, within);
            let quarters: [[Reg<F32>; 4]; 4] = [0u32, 16, 32, 48].map(|byte| k.ld_vector(from.at(byte)));
            let values = std::array::from_fn(|i| quarters[i / 4][i % 4]);
            let row = self.row(k, token);
            let row = k.select::<U32>(there, row, last);
            let feature = k.eval(piece * PIECE);
            self.rows.store(k, (row, last), feature, &values);
        });
    }
}
