//! The two threads that load: weights by bulk copies, tokens by the tensor memory accelerator.

use dualgemm_ptx::builder::*;

use super::fused::Fused;
use super::pack::CHUNK_BYTES;
use super::schedule::Tile;
use crate::parts::ring::Cursor;

impl Fused<'_> {
    /// Runs `load` for every stage of a tile: `load(k, (first block, blocks of this stage), half of the tokens only)`, after the
    /// stage is empty.
    fn fill_ring(
        &self,
        k: &mut Kernel,
        name: &str,
        tile: Tile,
        cursor: Cursor,
        load: impl Fn(&mut Kernel, (Reg<U32>, Reg<U32>), bool),
    ) {
        let blocks = tile.block_range(k, self.blocks);
        for ((first, end), half) in std::iter::once((blocks, false)).chain(tile.both.map(|both| (both, true)))
        {
            k.for_range(name, first, end, self.config.blocks_per_stage, |k, block, _| {
                let empty = cursor.at.barrier(k, self.ring.empty);
                k.mbarrier_wait(empty, cursor.at.phase, "empty");
                let count = k.eval((end - block).min(self.config.blocks_per_stage));
                load(k, (block, count), half);
                cursor.advance(k);
            });
        }
    }

    /// Runs `body` in one thread of a producer warp.
    fn as_one(&self, k: &mut Kernel, first_lane: Reg<Pred>, body: impl FnOnce(&mut Kernel)) {
        match self.warps_find_tiles() {
            true => k.if_(first_lane, "one_thread", body),
            false => body(k),
        }
    }

    /// Where the rows of each row group of a tile begin.
    fn weight_rows(&self, k: &mut Kernel, tile: Tile) -> Vec<Addr<Global>> {
        let mut weights = k.ld_pointer(&self.weights);
        if let Some(groups) = &self.groups {
            let stride = k.ld_param(&groups.stride);
            weights = self.of_group(k, weights, tile, stride);
        }
        k.comment("Row tiles beyond the last one read it again; their features are not stored.");
        let chunk = self.variant.chunk_features();
        let last = k.eval(((self.rows.n + (chunk - 1)) >> chunk.ilog2()) - 1);
        let own = self.config.own_groups();
        let row = |k: &mut Kernel, chunk: Reg<U32>| {
            let chunk = k.eval(chunk.min(last));
            k.offset(weights, chunk.mul_wide(self.blocks) * CHUNK_BYTES as u64)
        };
        let mut rows: Vec<_> = (0..own)
            .map(|group| {
                let chunk = k.eval(tile.chunk + group);
                row(k, chunk)
            })
            .collect();
        if self.config.common {
            k.comment("The row group in common is the last of the pair.");
            let rank = k.special(Special::ClusterCtaRank);
            let chunk = k.eval(tile.chunk + 2 * own - rank * own);
            let first = self.first_in_common(k);
            let row = row(k, chunk);
            rows.push(k.offset(row, first.mul_wide(CHUNK_BYTES as u32)));
        }
        rows
    }

    pub(super) fn load_weights(&self, k: &mut Kernel, tile: Option<Tile>, first_lane: Reg<Pred>) {
        // Weights that one CTA alone reads leave L2 first (measured: 1 to 3 % at one token); those that other token
        // tiles read too must stay.
        let l2 = (self.config.tokens <= 64).then_some(Eviction::First);
        let options = TmaOptions { l2, ..TmaOptions::default() };
        let cursor = Cursor::start(k, &self.ring, true, self.layout.weights.stride);
        // A comes behind all bytes that were asked for before it, and nothing is multiplied until it is there: of few tokens
        // and a CTA alone on its multiprocessor one stage is ahead of it (measured: 1 to 4 % at 16 to 64 tokens). Where two
        // share one, the other multiplies meanwhile.
        let hold = self.groups.is_none() && self.config.ctas_per_sm == 1 && self.config.tokens <= 64;
        self.for_each_tile(k, tile, |k, tile| {
            self.as_one(k, first_lane, |k| {
                let rows = self.weight_rows(k, tile);
                let second = hold.then(|| {
                    let (first, _) = tile.block_range(k, self.blocks);
                    k.eval(first + self.config.blocks_per_stage)
                });
                self.fill_ring(k, "weight_stages", tile, cursor, |k, (block, count), half| {
                    if let Some(second) = second {
                        let now = k.compare(Cmp::Eq, block, second);
                        k.when(now).grid_dependency_wait();
                    }
                    let full = cursor.at.barrier(k, self.ring.full);
                    // Of a common row group a stage has half of the blocks.
                    let common = self.config.common.then(|| self.blocks_in_common(k, count));
                    let own = self.config.own_groups();
                    let tokens = self.config.tokens / if half { 2 } else { 1 };
                    let bytes = match self.whole_stage_loads() {
                        // Blocks beyond K are filled with zeros, and count.
                        true => {
                            let bytes = k.eval(count * (own * CHUNK_BYTES as u32));
                            k.eval(bytes + self.config.token_bytes())
                        }
                        false => k.eval(count * (own * CHUNK_BYTES as u32 + tokens * 128)),
                    };
                    let bytes = match common {
                        None => bytes,
                        Some(common) => k.eval(common * CHUNK_BYTES as u32 + bytes),
                    };
                    k.mbarrier_arrive_expect_tx(full, bytes);
                    let bytes = k.eval(count * CHUNK_BYTES as u32);
                    let from = k.eval(block.mul_wide(CHUNK_BYTES as u32));
                    let slot = k.offset(self.shared(self.layout.weights.offset), cursor.offset);
                    let group_bytes = self.config.blocks_per_stage * CHUNK_BYTES as u32;
                    for (group, row) in rows.iter().enumerate() {
                        let from = k.offset(*row, from);
                        let slot = slot.at(group as u32 * group_bytes);
                        let Some(common) = common.filter(|_| group as u32 == own) else {
                            k.bulk_load(slot, from, bytes, full, &options);
                            continue;
                        };
                        let first = self.first_in_common(k);
                        let slot = k.offset(slot, first * CHUNK_BYTES as u32);
                        let bytes = k.eval(common * CHUNK_BYTES as u32);
                        let any = k.compare(Cmp::Gt, common, 0u32);
                        k.if_(any, "half", |k| k.bulk_load(slot, from, bytes, full, &options));
                    }
                });
            });
        });
    }

    /// First tokens of the boxes that are loaded for a block. Of a pair that exchanges sums each CTA has its own half in front.
    fn token_boxes(&self, k: &mut Kernel, tile: Tile) -> Vec<Reg<S32>> {
        if !self.config.exchanges() {
            return vec![tile.token.cast()];
        }
        let half = self.config.box_tokens();
        let rank = k.special(Special::ClusterCtaRank);
        let own = k.eval(tile.token + rank * half);
        let other = k.eval(tile.token + half - rank * half);
        vec![own.cast(), other.cast()]
    }

    pub(super) fn load_tokens(&self, k: &mut Kernel, tile: Option<Tile>, first_lane: Reg<Pred>) {
        let map = k.tensor_map_address(&self.map);
        k.prefetch_tensor_map(map);
        if self.groups.is_none() {
            k.grid_dependency_wait();
        }
        let options = TmaOptions::default();
        let cursor = Cursor::start(k, &self.ring, true, self.layout.tokens.stride);
        self.for_each_tile(k, tile, |k, tile| {
            self.as_one(k, first_lane, |k| {
                let tokens = self.token_boxes(k, tile);
                self.fill_ring(k, "token_stages", tile, cursor, |k, (block, count), half| {
                    let full = cursor.at.barrier(k, self.ring.full);
                    let slot = k.offset(self.shared(self.layout.tokens.offset), cursor.offset);
                    if self.whole_stage_loads() {
                        let place = [0i32.into(), tokens[0].into(), block.cast::<S32>().into()];
                        return k.tensor_load(slot, map, &place, full, &options);
                    }
                    for b in 0..self.config.blocks_per_stage {
                        let here = k.compare(Cmp::Gt, count, b);
                        k.if_(here, "token_block", |k| {
                            let column = k.eval((block + b) << 6);
                            let boxes = if half { &tokens[..1] } else { &tokens };
                            for (i, token) in boxes.iter().enumerate() {
                                let first = b * self.config.tokens + i as u32 * self.config.box_tokens();
                                let place = [column.cast::<S32>().into(), (*token).into()];
                                k.tensor_load(slot.at(first * 128), map, &place, full, &options);
                            }
                        });
                    }
                });
            });
        });
    }
}
