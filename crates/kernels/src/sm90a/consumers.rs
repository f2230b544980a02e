//! The warpgroups that decode and multiply.

use dualgemm_ptx::builder::*;

use super::decode::{
    BF16_MAGNITUDE_MASK, BF16_SCALE_BASE, BF16_SCALE_MASK, FIELD_MASK, MAGNITUDE_MASK, SCALE_MASK, SIGN_MASK,
};
use super::fused::Fused;
use super::pack::{CHUNK_BYTES, CODE_BYTES};
use super::schedule::Tile;
use crate::parts::ring::{Cursor, low_word};

/// `(a & b) | c` as a truth table of `lop3`.
const AND_OR: u8 = 0xEA;

/// What a consumer keeps from tile to tile.
pub(super) struct Consumer {
    /// Row group and K group of the warpgroup, warp in the warpgroup.
    k_group: Reg<U32>,
    /// Addresses of this lane's codes and scales of its first block in stage 0.
    codes: [Addr<Shared>; 2],
    /// Low word of the descriptor of the tokens of its first block in stage 0.
    desc: Reg<U32>,
    /// Stage to load next, to multiply next, to release next.
    load: Cursor,
    multiply: Cursor,
    release: Cursor,
    raw: [Reg<B32>; 6],
    fragments: [[Reg<B32>; 16]; 2],
    first_lane: Reg<Pred>,
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
        let start = k.offset(self.shared(self.layout.weights.offset), group);
        let thread = k.eval((warp << 5) + self.lane);
        let codes = k.offset(start, thread << 4);
        let scales = k.offset(start.at(CODE_BYTES as i64), (thread >> 2) << 3);
        let raw = array(k);
        let fragments = [array(k), array(k)];
        let load = Cursor::start(k, &self.ring, false, self.layout.weights.stride);
        let multiply = Cursor::start(k, &self.ring, false, self.layout.tokens.stride / 16);
        let release = Cursor::start(k, &self.ring, false, 0);
        let mut desc = self.first_desc(k);
        if split {
            desc = k.eval(k_group * (self.config.tokens * 8) + desc);
        }
        let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
        Consumer {
            k_group,
            codes: [codes, scales],
            desc,
            load,
            multiply,
            release,
            raw,
            fragments,
            first_lane,
        }
    }

    /// Low word of the descriptor of block 0 of the tokens in stage 0; it alone changes from tile to tile, by bytes
    /// over 16.
    fn first_desc(&self, k: &mut Kernel) -> Reg<U32> {
        let start = self.shared(self.layout.tokens.offset);
        low_word(k, start, self.layout.token_tile.wgmma_desc())
    }

    /// Four code words and two scale words of block `block` of the stage that is loaded next.
    fn load_block(&self, k: &mut Kernel, consumer: &Consumer, block: u32) {
        let at = consumer.load.offset;
        let [codes, scales] =
            consumer.codes.map(|address| k.offset(address, at).at(block * CHUNK_BYTES as u32));
        let words: [Reg<B32>; 4] = k.ld_vector(codes);
        let pairs: [Reg<B32>; 2] = k.ld_vector(scales);
        for (to, from) in consumer.raw.iter().zip(words.into_iter().chain(pairs)) {
            k.assign(*to, from);
        }
    }

    fn wait_full(&self, k: &mut Kernel, consumer: &Consumer) {
        self.ring.wait_full(k, consumer.load.at);
    }

    /// Four `wgmma` on decoded fragments; `low` is the low word of the descriptor of the block's tokens.
    fn multiply_block(&self, k: &mut Kernel, acc: &[Reg<F32>], fragments: &[Reg<B32>; 16], low: Reg<U32>) {
        let high = k.mov::<B32>((self.layout.token_tile.wgmma_desc() >> 32) as u32);
        k.wgmma_fence();
        for step in 0..4 {
            let a = std::array::from_fn(|i| fragments[4 * step + i]);
            let advance = self.layout.token_tile.advance_k(32 * step as u32) as u32;
            let low = if step == 0 { low } else { k.eval(low + advance) };
            let desc = k.pack_64(low.cast::<B32>(), high);
            let format = WgmmaFormat::Half(self.variant.compute);
            k.wgmma(format, acc, WgmmaA::Regs(a), desc, true);
        }
        k.wgmma_commit();
    }

    /// All K blocks of a tile that are this warpgroup's. Fragments are double-buffered: while the tensor core
    /// multiplies block b from one set, the other set's multiplication (b − 1) ends and block b + 1 is decoded.
    ///
    /// With K groups a warpgroup takes one block of every stage, else all of them.
    pub(super) fn multiply(&self, k: &mut Kernel, consumer: &Consumer, tile: Tile, acc: &[Reg<F32>]) {
        let count = tile.block_count(k, self.blocks);
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
        match (k_groups, self.config.k_split) {
            (1, 1) => self.multiply_blocks(k, consumer, per_stage, mine, acc),
            _ => {
                let any = some_blocks(k);
                k.if_(any, "some_blocks", |k| self.multiply_blocks(k, consumer, per_stage, mine, acc));
            }
        }
        if !self.many_tiles() {
            return;
        }
        if k_groups == 1 {
            k.comment("The last stage, whole or not, is done with.");
            let ragged = k.compare(Cmp::Ne, count % per_stage, 0u32);
            k.if_(ragged, "ragged", |k| {
                consumer.load.advance(k);
                consumer.multiply.advance(k);
            });
            self.release(k, consumer);
        } else {
            let any = some_blocks(k);
            k.if_(any, "last_release", |k| self.release(k, consumer));
            k.comment("A last stage that holds no block of this K group.");
            let stages = k.eval(count.div_ceil(k_groups));
            let skipped = k.compare(Cmp::Lt, mine, stages);
            k.if_(skipped, "skip", |k| {
                self.wait_full(k, consumer);
                self.release(k, consumer);
                consumer.load.advance(k);
                consumer.multiply.advance(k);
            });
        }
    }

    fn multiply_blocks(
        &self,
        k: &mut Kernel,
        consumer: &Consumer,
        per_stage: u32,
        blocks: Reg<U32>,
        acc: &[Reg<F32>],
    ) {
        let Consumer { load, multiply, fragments, .. } = consumer;
        self.wait_full(k, consumer);
        self.load_block(k, consumer, 0);
        if per_stage == 1 {
            load.advance(k);
        }
        self.decode_block(k, &consumer.raw, &fragments[0]);

        // The loop body covers an even number of blocks (fragment sets alternate) and whole stages (the position
        // inside a stage is then known when the text is written).
        let unrolled = if per_stage.is_multiple_of(2) { per_stage } else { 2 * per_stage };
        k.for_range("k_blocks", 0u32, blocks, unrolled, |k, start, this| {
            for b in 0..unrolled {
                let block = k.eval(start + b);
                if b > 0 {
                    let done = k.compare(Cmp::Ge, block, blocks);
                    k.break_if(this, done);
                }
                let (now, next) = (&fragments[b as usize % 2], &fragments[(b as usize + 1) % 2]);
                let desc = consumer.desc + multiply.offset;
                let desc = k.eval(match b % per_stage {
                    0 => desc,
                    b => desc + b * self.config.tokens * 8,
                });
                self.multiply_block(k, acc, now, desc);
                if (b + 1) % per_stage == 0 {
                    multiply.advance(k);
                }
                let more = k.compare(Cmp::Lt, block + 1, blocks);
                k.if_(more, "load", |k| {
                    if (b + 1) % per_stage == 0 {
                        self.wait_full(k, consumer);
                    }
                    self.load_block(k, consumer, (b + 1) % per_stage);
                    if (b + 2).is_multiple_of(per_stage) {
                        load.advance(k);
                    }
                });
                k.comment("The previous block is multiplied: its fragments are free, and so is its stage if it was the last.");
                k.wgmma_wait(1);
                if b % per_stage == 0 {
                    match b {
                        0 => {
                            let previous = k.compare(Cmp::Ne, start, 0u32);
                            k.if_(previous, "release", |k| self.release(k, consumer));
                        }
                        _ => self.release(k, consumer),
                    }
                }
                self.decode_block(k, &consumer.raw, next);
            }
        });
        k.wgmma_wait(0);
    }

    /// Tells the producers that this warp is done with a stage.
    fn release(&self, k: &mut Kernel, consumer: &Consumer) {
        self.ring.release(k, consumer.release.at, consumer.first_lane);
        consumer.release.advance(k);
    }

    // ---- decoding: the operations of `decode.rs` ----

    /// 16 fragment registers of one block from four code words and two scale words.
    ///
    /// The order of the operations, here and below, is that of the fastest schedule that ptxas has made: with signs after
    /// magnitudes and scales after fields the same instructions took 4 to 6 % longer at 128-token tiles.
    fn decode_block(&self, k: &mut Kernel, raw: &[Reg<B32>; 6], fragments: &[Reg<B32>; 16]) {
        for pair in 0..2 {
            for (half, scale) in self.scale_pairs(k, raw[4 + pair]).into_iter().enumerate() {
                let step = 2 * pair + half;
                let to = &fragments[4 * step..4 * step + 4];
                match self.variant.compute {
                    HalfFormat::F16 => decode_word::<F16x2>(k, raw[step], scale, to, fields_f16),
                    HalfFormat::Bf16 => decode_word::<Bf16x2>(k, raw[step], scale, to, fields_bf16),
                }
            }
        }
    }

    /// Scales of gate and up of the two k16 blocks of a scale word.
    fn scale_pairs(&self, k: &mut Kernel, word: Reg<B32>) -> [Reg<B32>; 2] {
        match self.variant.compute {
            HalfFormat::F16 => {
                let first = k.eval(word & SCALE_MASK);
                let rotated = k.funnel_left(word, word, 8u32);
                [first, k.eval(rotated & SCALE_MASK)]
            }
            HalfFormat::Bf16 => {
                let base = k.mov::<B32>(BF16_SCALE_BASE);
                let shifted = k.eval(word.cast::<U32>() >> 3).cast();
                let first = k.lop3(shifted, BF16_SCALE_MASK, base, AND_OR);
                let rotated = k.funnel_left(word, word, 5u32);
                [first, k.lop3(rotated, BF16_SCALE_MASK, base, AND_OR)]
            }
        }
    }
}

fn array<const N: usize>(k: &mut Kernel) -> [Reg<B32>; N] {
    std::array::from_fn(|_| k.mov::<B32>(0u32))
}

/// Four fragment registers: fields 0 and 2 times the gate's scale, 1 and 3 times up's.
fn decode_word<T>(
    k: &mut Kernel,
    word: Reg<B32>,
    scale: Reg<B32>,
    to: &[Reg<B32>],
    fields: fn(&mut Kernel, Reg<B32>) -> [Reg<B32>; 4],
) where
    T: Number + RegType<Class = <B32 as RegType>::Class>,
{
    let (gate, up) = k.unpack_32(scale);
    let scales = [k.pack_32(gate, gate), k.pack_32(up, up)];
    for (i, field) in fields(k, word).into_iter().enumerate() {
        let product = k.mul(field.cast::<T>(), scales[i % 2].cast::<T>());
        k.assign(to[i], product.cast::<B32>());
    }
}

/// The bits of `mask` of the word shifted left by `magnitude`, and the sign bits of the word shifted left by `sign`.
fn field(k: &mut Kernel, word: Reg<B32>, mask: u32, magnitude: u32, sign: u32) -> Reg<B32> {
    let sign = k.eval((word << sign) & SIGN_MASK);
    let magnitude = k.eval(word << magnitude);
    k.lop3(magnitude, mask, sign, AND_OR)
}

pub(crate) fn fields_f16(k: &mut Kernel, word: Reg<B32>) -> [Reg<B32>; 4] {
    let first = k.eval(word & FIELD_MASK);
    let second = k.eval((word << 3) & FIELD_MASK);
    [first, second, field(k, word, MAGNITUDE_MASK, 6, 1), field(k, word, MAGNITUDE_MASK, 9, 2)]
}

pub(crate) fn fields_bf16(k: &mut Kernel, word: Reg<B32>) -> [Reg<B32>; 4] {
    let sign = k.eval(word & SIGN_MASK);
    let shifted = k.eval(word.cast::<U32>() >> 3).cast();
    let first = k.lop3(shifted, BF16_MAGNITUDE_MASK, sign, AND_OR);
    let sign = k.eval((word << 3) & SIGN_MASK);
    let second = k.lop3(word, BF16_MAGNITUDE_MASK, sign, AND_OR);
    [first, second, field(k, word, BF16_MAGNITUDE_MASK, 3, 1), field(k, word, BF16_MAGNITUDE_MASK, 6, 2)]
}
