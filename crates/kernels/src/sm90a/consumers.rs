//! The warpgroups that decode and multiply.

use dualgemm_ptx::builder::*;

use super::fused::Fused;
use super::pack::{CHUNK_BYTES, CODE_BYTES};
use super::schedule::Tile;
use crate::generic::fragments::decode_step;
use crate::parts::ring::{Cursor, low_word};

/// What a consumer keeps from tile to tile.
#[derive(Clone, Copy)]
pub(super) struct Consumer {
    /// Row group and K group of the warpgroup, warp in the warpgroup.
    k_group: Reg<U32>,
    /// Addresses of this lane's codes and scales of its first block in stage 0.
    codes: [Addr<Shared>; 2],
    /// Descriptor of the tokens of its first block in stage 0. 64 bits: ptxas makes one instruction of adding a number to them,
    /// and three of adding it to the low word. Twice, for loops and halves of a loop that add the same numbers: ptxas takes equal sums
    /// for one value, which it keeps in words that are no pair, and a block has 12 instructions more.
    desc: [Reg<U64>; 2],
    place: Place,
    raw: [Reg<B32>; 6],
    fragments: [[Reg<B32>; 16]; 2],
    first_lane: Reg<Pred>,
}

/// Where a warpgroup is in the ring.
#[derive(Clone, Copy)]
enum Place {
    /// A CTA has one tile: the loop's body is whole turns of the ring, and what is in which stage is a number in the text. Cursors
    /// would be a tenth of the loop's instructions, with K groups a sixth. Kept is the parity of the turn's "full" barriers.
    Known(Reg<U32>),
    /// A tile begins in any stage: the next ones to load, to multiply and to release.
    Running { load: Cursor, multiply: Cursor, release: Cursor },
}

impl Fused<'_> {
    /// Warpgroup's row group and K group, warp in the warpgroup.
    pub(super) fn place(&self, k: &mut Kernel) -> [Reg<U32>; 3] {
        let warpgroup = k.eval(self.warp >> 2);
        let (rows, k_group) = match (self.config.row_groups, self.config.k_groups) {
            (_, 1) => (warpgroup, k.mov::<U32>(0u32)),
            (1, _) => (k.mov::<U32>(0u32), warpgroup),
            (groups, _) => (k.eval(warpgroup % groups), k.eval(warpgroup / groups)),
        };
        [rows, k_group, k.eval(self.warp & 3)]
    }

    /// Sets up what a consumer keeps.
    pub(super) fn consumer(&self, k: &mut Kernel) -> Consumer {
        let [row_group, k_group, warp] = self.place(k);
        let split = self.config.k_groups > 1;
        let mut group = k.eval(row_group * (self.config.blocks_per_stage * CHUNK_BYTES as u32));
        if split {
            group = k.eval(k_group * CHUNK_BYTES as u32 + group);
        }
        let skipped = self.config.common.then(|| {
            let common = self.is_common(k);
            let first = self.first_in_common(k);
            k.select::<U32>(common, first, 0u32)
        });
        if let Some(skipped) = skipped {
            group = k.eval(skipped * CHUNK_BYTES as u32 + group);
        }
        let start = k.offset(self.shared(self.layout.weights.offset), group);
        let thread = k.eval((warp << 5) + self.lane);
        let codes = k.offset(start, thread << 4);
        let scales = k.offset(start.at(CODE_BYTES as i64), (thread >> 2) << 3);
        let raw = array(k);
        let fragments = [array(k), array(k)];
        let mut cursor = |step| Cursor::start(k, &self.ring, false, step);
        let place = match self.many_tiles() {
            false => Place::Known(k.mov::<U32>(0u32)),
            true => Place::Running {
                load: cursor(self.layout.weights.stride),
                multiply: cursor(self.layout.tokens.stride / 16),
                release: cursor(0),
            },
        };
        let mut low = self.first_desc(k);
        if split {
            low = k.eval(k_group * (self.config.tokens * 8) + low);
        }
        if let Some(skipped) = skipped {
            low = k.eval(skipped * (self.config.tokens * 8) + low);
        }
        let high = k.mov::<B32>((self.layout.token_tile.wgmma_desc() >> 32) as u32);
        let desc: Reg<U64> = k.pack_64(low.cast::<B32>(), high).cast();
        let nothing = k.eval(self.blocks >> 31);
        let desc = [desc, k.eval(nothing.widen() + desc)];
        let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
        Consumer { k_group, codes: [codes, scales], desc, place, raw, fragments, first_lane }
    }

    /// Low word of the descriptor of block 0 of the tokens in stage 0; it alone changes from tile to tile, by bytes
    /// over 16.
    fn first_desc(&self, k: &mut Kernel) -> Reg<U32> {
        let start = self.shared(self.layout.tokens.offset);
        low_word(k, start, self.layout.token_tile.wgmma_desc())
    }

    /// Waits for stage `stage` of the loop's body, counted on behind its end. The first of a turn is waited for once.
    fn wait_full(&self, k: &mut Kernel, consumer: &Consumer, stage: u32) {
        match &consumer.place {
            Place::Running { load, .. } => self.ring.wait_full(k, load.at),
            Place::Known(parity) => {
                let index = stage % self.config.stages;
                if stage > 0 && index == 0 {
                    k.to(*parity).eval(*parity ^ 1);
                }
                k.mbarrier_wait(self.ring.full.at(8 * index), *parity, "full");
            }
        }
    }

    /// Four code words and two scale words of block `block` of the loop's body; a stage has `per_stage` blocks.
    fn load_block(&self, k: &mut Kernel, consumer: &Consumer, block: u32, per_stage: u32) {
        let within = block % per_stage * CHUNK_BYTES as u32;
        let [codes, scales] = consumer.codes.map(|address| match &consumer.place {
            Place::Running { load, .. } => k.offset(address, load.offset).at(within),
            Place::Known(_) => {
                let stage = block / per_stage % self.config.stages;
                address.at(stage * self.layout.weights.stride + within)
            }
        });
        let words: [Reg<B32>; 4] = k.ld_vector(codes);
        let pairs: [Reg<B32>; 2] = k.ld_vector(scales);
        for (to, from) in consumer.raw.iter().zip(words.into_iter().chain(pairs)) {
            k.assign(*to, from);
        }
        if let (Place::Running { load, .. }, 0) = (&consumer.place, (block + 1) % per_stage) {
            load.advance(k);
        }
    }

    /// Descriptor of the tokens of block `block` of the loop's body.
    fn desc(&self, k: &mut Kernel, consumer: &Consumer, block: u32, per_stage: u32) -> Reg<U64> {
        let within = block % per_stage * (self.config.tokens * 8);
        match &consumer.place {
            Place::Running { multiply, .. } => {
                let desc = k.eval(consumer.desc[0] + multiply.offset.widen() + u64::from(within));
                if (block + 1).is_multiple_of(per_stage) {
                    multiply.advance(k);
                }
                desc
            }
            Place::Known(_) => {
                let (turn, stage) =
                    (block / per_stage / self.config.stages, block / per_stage % self.config.stages);
                k.eval(
                    consumer.desc[turn as usize]
                        + u64::from(stage * (self.layout.tokens.stride / 16) + within),
                )
            }
        }
    }

    /// Four `wgmma` on decoded fragments; `desc` is that of the block's tokens.
    fn multiply_block(&self, k: &mut Kernel, acc: &[Reg<F32>], fragments: &[Reg<B32>; 16], desc: Reg<U64>) {
        k.wgmma_fence();
        for step in 0..4 {
            let a = std::array::from_fn(|i| fragments[4 * step + i]);
            let desc = match step {
                0 => desc,
                _ => k.eval(desc + self.layout.token_tile.advance_k(32 * step as u32)),
            };
            k.wgmma(WgmmaFormat::Half(self.variant.compute), acc, WgmmaA::Regs(a), desc.cast(), true);
        }
        k.wgmma_commit();
    }

    /// All K blocks of a tile that are this warpgroup's. Fragments are double-buffered: while the tensor core
    /// multiplies block b from one set, the other set's multiplication (b − 1) ends and block b + 1 is decoded.
    ///
    /// With K groups a warpgroup takes one block of every stage, else all of them.
    pub(super) fn multiply(&self, k: &mut Kernel, consumer: &Consumer, tile: Tile, acc: &[Reg<F32>]) {
        if self.config.common {
            return self.multiply_common(k, consumer, acc);
        }
        let count = tile.block_count(k, self.blocks);
        if let Some(both) = tile.both {
            return self.multiply_and_exchange(k, consumer, (count, both), acc);
        }
        let k_groups = self.config.k_groups;
        let per_stage = if k_groups > 1 { 1 } else { self.config.blocks_per_stage };
        let mine = match k_groups {
            1 => count,
            _ => k.eval((count + (k_groups - 1) - consumer.k_group) / k_groups),
        };
        if self.many_tiles() {
            for sum in acc {
                k.assign(*sum, 0.0f32);
            }
        }
        let some_blocks = |k: &mut Kernel| k.compare(Cmp::Gt, mine, 0u32);
        match k_groups {
            1 => self.multiply_blocks(k, consumer, per_stage, mine, acc),
            _ => {
                let any = some_blocks(k);
                k.if_(any, "some_blocks", |k| self.multiply_blocks(k, consumer, per_stage, mine, acc));
            }
        }
        let Place::Running { load, multiply, .. } = &consumer.place else { return };
        if k_groups == 1 {
            k.comment("The last stage, whole or not, is done with.");
            let ragged = k.compare(Cmp::Ne, count % per_stage, 0u32);
            k.if_(ragged, "ragged", |k| {
                load.advance(k);
                multiply.advance(k);
            });
            self.release(k, consumer, 0);
        } else {
            let any = some_blocks(k);
            k.if_(any, "last_release", |k| self.release(k, consumer, 0));
            k.comment("A last stage that holds no block of this K group.");
            let stages = k.eval(count.div_ceil(k_groups));
            let skipped = k.compare(Cmp::Lt, mine, stages);
            k.if_(skipped, "skip", |k| {
                self.wait_full(k, consumer, 0);
                self.release(k, consumer, 0);
                load.advance(k);
                multiply.advance(k);
            });
        }
    }

    /// As [`multiply`](Self::multiply) of a pair with a row group in common: its warpgroup has half of the blocks of each stage.
    fn multiply_common(&self, k: &mut Kernel, consumer: &Consumer, acc: &[Reg<F32>]) {
        let stage = self.config.blocks_per_stage;
        let common = self.is_common(k);
        k.if_else(
            common,
            "half_of_blocks",
            |k| {
                let last = k.eval(self.blocks % stage);
                let of_last = self.blocks_in_common(k, last);
                let mine = k.eval(self.blocks / stage * (stage / 2) + of_last);
                let any = k.compare(Cmp::Gt, mine, 0u32);
                k.if_(any, "some_blocks", |k| self.multiply_blocks(k, consumer, stage / 2, mine, acc));
                self.leave_common(k, acc);
            },
            |k| {
                let consumer = Consumer { desc: [consumer.desc[1]; 2], ..*consumer };
                self.multiply_blocks(k, &consumer, stage, self.blocks, acc);
            },
        );
    }

    /// As [`multiply`](Self::multiply) of a pair that exchanges halves: `count` blocks of its own, then those of both CTAs by its own
    /// half of the tokens, with the sums of the other half sent in between.
    fn multiply_and_exchange(
        &self,
        k: &mut Kernel,
        consumer: &Consumer,
        (count, (first, end)): (Reg<U32>, (Reg<U32>, Reg<U32>)),
        acc: &[Reg<F32>],
    ) {
        let stage = self.config.blocks_per_stage;
        let any = k.compare(Cmp::Gt, count, 0u32);
        k.if_(any, "some_blocks", |k| self.multiply_blocks(k, consumer, stage, count, acc));
        let Some(to) = self.for_other(k) else { return };
        let (own, others) = acc.split_at(acc.len() / 2);
        let groups = others.len() / 4;
        let some = k.compare(Cmp::Gt, end, first);
        k.if_else(
            some,
            "blocks_of_both",
            |k| {
                let stages = k.eval(count.div_ceil(stage));
                let last = k.eval(stages - 1);
                let last = Cursor::behind(k, &self.ring, last, 0);
                self.ring.release(k, last.at, consumer.first_lane);
                let mut cursor = |step| Cursor::behind(k, &self.ring, stages, step);
                let place = Place::Running {
                    load: cursor(self.layout.weights.stride),
                    multiply: cursor(self.layout.tokens.stride / 16),
                    release: cursor(0),
                };
                let (blocks, both) = (self.config.blocks_of_both(), k.eval(end - first));
                let each = groups.div_ceil(blocks as usize);
                let body = (stage, blocks.next_multiple_of(2));
                self.multiply_turns(k, &Consumer { place, ..*consumer }, body, both, own, |k, block| {
                    let first = block as usize * each;
                    self.send(k, to, others, first..first + each);
                });
            },
            |k| self.send(k, to, others, 0..groups),
        );
    }

    fn multiply_blocks(
        &self,
        k: &mut Kernel,
        consumer: &Consumer,
        per_stage: u32,
        blocks: Reg<U32>,
        acc: &[Reg<F32>],
    ) {
        let stages = match consumer.place {
            Place::Known(_) => self.config.stages,
            Place::Running { .. } => 1,
        };
        // The body covers an even number of blocks (fragment sets alternate) and whole stages.
        let turn = stages * per_stage;
        let body = if turn.is_multiple_of(2) { turn } else { 2 * turn };
        self.multiply_turns(k, consumer, (per_stage, body), blocks, acc, |_, _| ());
    }

    /// Multiplies blocks, `body` of them in the text of the loop, and runs `between` while each is multiplied.
    fn multiply_turns(
        &self,
        k: &mut Kernel,
        consumer: &Consumer,
        (per_stage, body): (u32, u32),
        blocks: Reg<U32>,
        acc: &[Reg<F32>],
        between: impl Fn(&mut Kernel, u32),
    ) {
        self.wait_full(k, consumer, 0);
        self.load_block(k, consumer, 0, per_stage);
        self.decode_block(k, &consumer.raw, &consumer.fragments[0]);
        let left = k.mov(blocks);
        k.loop_("k_blocks", |k, this| {
            for b in 0..body {
                let desc = self.desc(k, consumer, b, per_stage);
                self.multiply_block(k, acc, &consumer.fragments[b as usize % 2], desc);
                between(k, b);
                let more = k.compare(Cmp::Gt, left, b + 1);
                k.if_(more, "load", |k| {
                    if (b + 1).is_multiple_of(per_stage) {
                        self.wait_full(k, consumer, (b + 1) / per_stage);
                    }
                    self.load_block(k, consumer, b + 1, per_stage);
                });
                k.comment("The previous block is multiplied: its fragments are free, and so is its stage if it was the last.");
                k.wgmma_wait(1);
                match b {
                    0 => {
                        let previous = k.compare(Cmp::Ne, left, blocks);
                        k.if_(previous, "release", |k| self.release(k, consumer, body / per_stage - 1));
                    }
                    b if b % per_stage == 0 => self.release(k, consumer, b / per_stage - 1),
                    _ => {}
                }
                // Here and not sooner: ptxas serializes `wgmma` if the loop is left with two blocks under way.
                k.break_if(this, !more);
                self.decode_block(k, &consumer.raw, &consumer.fragments[(b as usize + 1) % 2]);
            }
            k.to(left).eval(left - body);
        });
        k.wgmma_wait(0);
    }

    /// Tells the producers that this warp is done with stage `stage` of the loop's body.
    fn release(&self, k: &mut Kernel, consumer: &Consumer, stage: u32) {
        match &consumer.place {
            Place::Running { release, .. } => {
                self.ring.release(k, release.at, consumer.first_lane);
                release.advance(k);
            }
            Place::Known(_) => {
                let empty = self.ring.empty.at(8 * (stage % self.config.stages));
                k.when(consumer.first_lane).mbarrier_arrive(empty);
            }
        }
    }

    /// 16 fragment registers of one block from four code words and two scale words.
    fn decode_block(&self, k: &mut Kernel, raw: &[Reg<B32>; 6], fragments: &[Reg<B32>; 16]) {
        for (step, to) in fragments.chunks_exact(4).enumerate() {
            let from = decode_step(k, self.variant.compute, raw[step], raw[4 + step / 2], step % 2);
            to.iter().zip(from).for_each(|(to, from)| {
                k.assign(*to, from);
            });
        }
    }
}

fn array<const N: usize>(k: &mut Kernel) -> [Reg<B32>; N] {
    std::array::from_fn(|_| k.mov::<B32>(0u32))
}
