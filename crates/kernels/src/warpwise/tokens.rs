//! A's fragments, out of blocks in shared memory: lanes bring the next block there, 16-bit floats by `cp.async`, codes by
//! way of registers in which they are expanded. A warp has a block of its own, which it fills again as soon as all lanes
//! have read it, or shares two with the warps that have the same part of K.
//!
//! Weights widen to f16 in fewer instructions than to bf16. So a bf16 A of few rows goes through registers, too, and becomes f16:
//! a warp's share of each row is multiplied by the power of two that brings its largest magnitude to 2^14, and the sums by
//! the inverse. bf16 has eight significant bits, so what is up to 2^29 times less than the largest stays as it is, and of what is less
//! the error is 2^40 times less than the largest.

use dualgemm_formats::ScaleLayout;
use dualgemm_ptx::builder::*;

use super::config::{Config, ROW};
use crate::generic::rowwise::scale_offset;
use crate::generic::values::{bf16_to_f16, decode};

/// Elements that a lane reads of a row.
const PIECE: u32 = 8;
/// Rows that the lanes of a warp read at once.
pub(super) const ROWS: u32 = 4;
/// Blocks that a lane reads at once where it looks for the largest magnitude.
const AT_ONCE: u32 = 8;

/// The B operands of the four k16 steps of a block, for eight tokens.
pub(super) type Fragments = [[Reg<B32>; 2]; 4];

/// The parameters.
pub(super) enum Tokens {
    /// With `narrow`, bf16 that becomes f16.
    Half {
        start: PointerParam,
        pitch: Param<U32>,
        narrow: bool,
    },
    Codes {
        start: PointerParam,
        scales: PointerParam,
        layout: ScaleLayout,
    },
}

/// A warp's part of A.
pub(super) struct Place {
    pub lane: Reg<U32>,
    /// The last row of A.
    pub end: Reg<U32>,
    /// First K block of the share, and how many, at least one.
    pub first: Reg<U32>,
    pub count: Reg<U32>,
    /// Elements of a row, and whether they are whole blocks.
    pub k: Reg<U32>,
    pub whole: bool,
    /// The row group of the warp and its part of K.
    pub group: Reg<U32>,
    pub part: Reg<U32>,
    /// Its first block in shared memory: rows of 128 bytes, pieces of 16 exchanged by the row's low bits.
    pub block: Addr<Shared>,
}

/// What a lane keeps from block to block.
pub(super) struct Lane<'a> {
    config: &'a Config,
    pieces: Vec<Piece>,
    codes: Option<Codes>,
    narrow: Option<Narrow>,
    count: Reg<U32>,
    /// Blocks in which its pieces lie within the row, if that may be fewer.
    within: Option<Reg<S32>>,
    /// Where it reads, for `ldmatrix`: of the first and the second 32 K.
    from: [Addr<Shared>; 2],
    /// Blocks that there is room for.
    blocks: u32,
    /// Bytes from the first block to this one, if there are several.
    turn: Option<Reg<U32>>,
    /// The barrier at which warps meet that share blocks.
    barrier: Option<Reg<U32>>,
}

/// A piece of a row that the lane brings.
struct Piece {
    /// Where it is in the share's first block, and where it goes.
    from: Addr<Global>,
    to: Addr<Shared>,
    /// Whether there is one, if not all lanes have it.
    has: Option<Reg<Pred>>,
}

impl Piece {
    /// The next instruction is for lanes that have the piece.
    fn guarded<'k>(&self, k: &'k mut Kernel) -> &'k mut Kernel {
        match self.has {
            None => k,
            Some(has) => k.when(has),
        }
    }
}

/// What more it keeps if A is codes.
struct Codes {
    /// The scales of its pieces, and bytes from block to block of them.
    scales: Vec<Addr<Global>>,
    step: u32,
    /// Of each piece of the next block, the codes and the scale.
    next: Vec<[Reg<B32>; 2]>,
}

/// What more it keeps if A becomes f16: its piece of the next block, and in both halves of a word what its row is multiplied by.
struct Narrow {
    next: [Reg<B32>; 4],
    factor: Reg<B32>,
}

impl Tokens {
    pub fn declare(k: &mut Kernel, codes: Option<ScaleLayout>, narrow: bool) -> Self {
        let start = k.pointer("a");
        match codes {
            None => Self::Half { start, pitch: k.param("a_pitch"), narrow },
            Some(layout) => Self::Codes { start, scales: k.pointer("a_scales"), layout },
        }
    }

    /// Starts to read a warp's first blocks; `row_of` gives the row of A of a token of the tile, beyond the last one for those that
    /// there are not.
    pub fn start<'a>(
        &self,
        k: &mut Kernel,
        config: &'a Config,
        place: &Place,
        row_of: impl Fn(&mut Kernel, Reg<U32>) -> Reg<U32>,
    ) -> Lane<'a> {
        let &Place { lane, end, first, count, k: depth, whole, group, part, block } = place;
        let (row, piece) = (k.eval(lane >> 3), k.eval(lane & 7));
        let within = (!whole).then(|| {
            let blocks = k.eval((depth + 63 - piece * PIECE) >> 6);
            k.eval(blocks - first).cast()
        });
        k.comment("Rows beyond the last one read it again; their tokens are not stored.");
        // Rows of a tile are dealt out by fours, to all row groups if they share blocks.
        let shares = config.shares_blocks();
        let (row, step) = match shares {
            true => (k.eval(group * ROWS + row), config.row_groups() * ROWS),
            false => (row, ROWS),
        };
        let rows: Vec<Reg<U32>> = (0..config.tokens.div_ceil(step)).map(|i| k.eval(row + i * step)).collect();
        let narrow = matches!(self, Self::Half { narrow: true, .. });
        let of_a = rows.iter().map(|row| {
            // Lanes that bring none of few rows look for the largest magnitude.
            let row = if narrow { k.eval(*row & (config.tokens - 1)) } else { *row };
            let row = row_of(k, row);
            k.eval(row.min(end))
        });
        let of_a: Vec<Reg<U32>> = of_a.collect();
        let (from, codes) = self.pieces(k, &of_a, piece, (first, depth));
        let pieces = (1..).zip(from).zip(rows).map(|((i, from), row)| {
            let line = k.eval(row * ROW);
            let to = k.offset(block, ((piece ^ (row & 7)) << 4) + line);
            let has = (i * step > config.tokens).then(|| k.compare(Cmp::Lt, row, config.tokens));
            Piece { from, to, has }
        });
        let pieces = pieces.collect();
        k.comment(
            "`ldmatrix`: lane 8m + i gives row i of matrix m, here eight tokens and the m-th eight of 32 K.",
        );
        let row = k.eval((lane & 7).min(config.tokens - 1));
        let piece = k.eval((lane >> 3) ^ row);
        let line = k.eval(row * ROW);
        let from = [0u32, 4].map(|half| k.offset(block, ((piece ^ half) << 4) + line));
        let blocks = config.blocks(matches!(self, Self::Codes { .. }));
        let turn = (blocks > 1).then(|| k.mov::<U32>(0u32));
        let barrier = shares.then(|| k.eval(part + 1));
        let narrow =
            narrow.then(|| Narrow { next: std::array::from_fn(|_| k.mov(0u32)), factor: k.mov(0u32) });
        let this = Lane { config, pieces, codes, narrow, count, within, from, blocks, turn, barrier };
        for ahead in 0..if shares { 1 } else { blocks } {
            let unit = k.mov::<U32>(ahead);
            let turn = k.mov::<U32>(ahead * config.block_bytes());
            this.load(k, unit, turn);
        }
        this.find_factor(k);
        this
    }

    /// Piece `piece` of the share's first block in some rows; `first` is the block, `depth` the length of rows.
    fn pieces(
        &self,
        k: &mut Kernel,
        rows: &[Reg<U32>],
        piece: Reg<U32>,
        (first, depth): (Reg<U32>, Reg<U32>),
    ) -> (Vec<Addr<Global>>, Option<Codes>) {
        match self {
            Self::Half { start, pitch, .. } => {
                let (start, pitch) = (k.ld_pointer(start), k.ld_param(pitch));
                let within = k.eval((first << 7) + (piece << 4));
                let at = rows.iter().map(|row| k.offset(start, row.mul_wide(pitch) + within.widen()));
                (at.collect(), None)
            }
            Self::Codes { start, scales, layout } => {
                let (start, scales) = (k.ld_pointer(start), k.ld_pointer(scales));
                let of_row = k.eval(depth >> 1);
                let within = k.eval((first << 5) + (piece << 2));
                let at = rows.iter().map(|row| k.offset(start, row.mul_wide(of_row) + within.widen()));
                let at = at.collect();
                let (block, blocks) = (k.eval((first << 2) + (piece >> 1)), k.eval(depth >> 4));
                let scales = rows.iter().map(|row| {
                    let offset = scale_offset(k, *layout, *row, block, blocks);
                    k.offset(scales, offset)
                });
                let scales = scales.collect();
                // Four scales of a row are neighbours; the next four are in the next atom, if there are atoms.
                let step = match layout {
                    ScaleLayout::Linear => 4,
                    ScaleLayout::Sf128x4 => 512,
                    ScaleLayout::Sf8x4 => 32,
                };
                let next = rows.iter().map(|_| [k.mov(0u32), k.mov(0u32)]).collect();
                (at, Some(Codes { scales, step, next }))
            }
        }
    }
}

impl Lane<'_> {
    /// Finds what rows are multiplied by that become f16.
    fn find_factor(&self, k: &mut Kernel) {
        let (Some(narrow), [piece]) = (&self.narrow, &self.pieces[..]) else { return };
        let (largest, last) = (k.mov::<U32>(0u32), k.eval(self.count - 1));
        let (tokens, lane) = (self.config.tokens, k.special(Special::LaneId));
        let (lanes, own) = (ROWS / tokens, k.eval(lane / (8 * tokens)));
        k.for_range("largest", 0u32, self.count, AT_ONCE * lanes, |k, first, _| {
            let read = |i| {
                let unit = k.eval((first + own + i * lanes).min(last));
                let from = k.offset(piece.from, unit.mul_wide(ROW));
                k.ld_vector(from)
            };
            let words: Vec<[Reg<B32>; 4]> = (0..AT_ONCE).map(read).collect();
            for word in words.into_iter().flatten() {
                // What is below a magnitude in the upper half does not raise its exponent.
                for half in [k.eval(word & 0x7FFF_FFFF), k.eval((word << 16) & 0x7FFF_FFFF)] {
                    k.to(largest).max(largest, half.cast::<U32>());
                }
            }
        });
        for distance in [1u32, 2, 4, 8, 16].into_iter().filter(|&d| d < 8 || d >= 8 * tokens) {
            let other = k.shuffle(Shuffle::Xor, largest, distance);
            k.to(largest).max(largest, other);
        }
        // Of exponents: 127 + 14 - (x - 127), and one whose inverse is normal.
        let sum = k.mov(268u32);
        let exponent = k.eval((sum - (largest >> 23)).min(253));
        let factor = k.mul(exponent, 1u32 << 7 | 1 << 23);
        k.assign(narrow.factor, factor.cast());
    }

    /// Takes back what rows were multiplied by, from a thread's sums of two tokens in turn.
    pub fn scale_back(&self, k: &mut Kernel, sums: &[Reg<F32>]) {
        let Some(narrow) = &self.narrow else { return };
        let exponent = k.eval(narrow.factor & 0x7F80_0000).cast::<U32>();
        let sum = k.mov(0x7F00_0000u32);
        let inverse = k.eval(sum - exponent);
        let lane = k.special(Special::LaneId);
        let first = k.eval((lane & 3) << 4);
        let inverses = [0u32, 8].map(|next| {
            let of_row = k.eval(first + next);
            let inverse = k.shuffle(Shuffle::Index, inverse, of_row);
            k.from_bits(inverse)
        });
        for (i, &sum) in sums.iter().enumerate() {
            k.to(sum).mul(sum, inverses[i % 2]);
        }
    }

    /// Whether pieces go through registers.
    fn keeps(&self) -> bool {
        self.codes.is_some() || self.narrow.is_some()
    }

    /// Starts to read block `unit` of the share, if there is one, into the block `turn` bytes behind the first one.
    fn load(&self, k: &mut Kernel, unit: Reg<U32>, turn: Reg<U32>) {
        let exists = k.compare(Cmp::Lt, unit, self.count);
        k.if_(exists, "block_of_a", |k| self.load_existing(k, unit, turn));
        if !self.keeps() {
            // Also of nothing: what is waited for is counted from the end.
            k.cp_async_commit();
        }
    }

    /// The same between two blocks.
    fn load_next(&self, k: &mut Kernel, unit: Reg<U32>, turn: Reg<U32>) {
        self.load(k, unit, turn);
        if self.codes.is_some() && self.within.is_some() {
            // Lanes took different branches, and multiply together next.
            k.warp_sync();
        }
    }

    fn load_existing(&self, k: &mut Kernel, unit: Reg<U32>, turn: Reg<U32>) {
        if let (Some(narrow), [piece]) = (&self.narrow, &self.pieces[..]) {
            let from = k.offset(piece.from, unit.mul_wide(ROW));
            let words: [Reg<B32>; 4] = k.ld_vector(from);
            narrow.next.iter().zip(words).for_each(|(next, word)| k.assign(*next, word));
            return;
        }
        let there = self.within.map(|within| k.compare(Cmp::Lt, unit.cast::<S32>(), within));
        let Some(codes) = &self.codes else {
            for piece in &self.pieces {
                let from = k.offset(piece.from, unit.mul_wide(ROW));
                let to = if self.turn.is_some() { k.offset(piece.to, turn) } else { piece.to };
                let bytes = there.map(|there| k.select::<U32>(there, 16u32, 0u32));
                match bytes {
                    None => piece.guarded(k).cp_async_16(to, from),
                    Some(bytes) => piece.guarded(k).cp_async_16_partial(to, from, bytes),
                }
            }
            return;
        };
        for ((piece, scale), next) in self.pieces.iter().zip(&codes.scales).zip(&codes.next) {
            let load = |k: &mut Kernel| {
                let from = k.offset(piece.from, unit.mul_wide(ROW / 4));
                let scale = k.offset(*scale, unit.mul_wide(codes.step));
                k.to(next[0]).ld::<B32, _>(from);
                let scale = k.ld_byte(scale).cast();
                k.assign(next[1], scale);
            };
            match there {
                None => load(k),
                Some(there) => {
                    k.assign(next[1], 0u32);
                    k.if_(there, "within_row", load);
                }
            }
        }
    }

    /// Waits for block `unit` of the share. All who read the block before have done so.
    pub fn wait(&self, k: &mut Kernel, unit: Reg<U32>) {
        match (&self.codes, &self.narrow) {
            (None, Some(narrow)) => {
                for piece in &self.pieces {
                    let values = bf16_to_f16(k, narrow.next, narrow.factor);
                    piece.guarded(k).st_vector(piece.to, &values);
                }
            }
            (None, None) if self.barrier.is_some() => k.cp_async_wait(0),
            (None, None) => k.cp_async_wait(self.blocks - 1),
            (Some(codes), _) => {
                for (piece, &[codes, scale]) in self.pieces.iter().zip(&codes.next) {
                    let values = decode(k, codes, scale.cast());
                    let to = self.turn.map_or(piece.to, |turn| k.offset(piece.to, turn));
                    piece.guarded(k).st_vector(to, &values);
                }
            }
        }
        match self.barrier.zip(self.turn) {
            None => k.warp_sync(),
            Some((barrier, turn)) => {
                k.bar_sync(barrier, 32 * self.config.row_groups());
                let (next, other) = (k.eval(unit + 1), k.eval(turn ^ self.config.block_bytes()));
                self.load_next(k, next, other);
            }
        }
    }

    /// The fragments of block `unit`, for each eight tokens.
    pub fn read(&self, k: &mut Kernel, unit: Reg<U32>) -> Vec<Fragments> {
        let from = match self.turn {
            None => self.from,
            Some(turn) => self.from.map(|from| k.offset(from, turn)),
        };
        let fragments = (0..self.config.token_groups())
            .map(|group| {
                let [low, high] = from.map(|from| k.ldmatrix::<4>(false, from.at(group * 8 * ROW)));
                [[low[0], low[1]], [low[2], low[3]], [high[0], high[1]], [high[2], high[3]]]
            })
            .collect();
        if self.barrier.is_none() {
            // Copies overwrite what other lanes have read; codes wait in registers for the end of the chunk.
            if !self.keeps() {
                k.warp_sync();
            }
            let turn = self.turn.unwrap_or_else(|| k.mov::<U32>(0u32));
            let next = k.eval(unit + self.blocks);
            self.load_next(k, next, turn);
        }
        fragments
    }

    /// On to the next block.
    pub fn advance(&self, k: &mut Kernel) {
        if let Some(turn) = self.turn {
            k.to(turn).eval(turn ^ self.config.block_bytes());
        }
    }
}
