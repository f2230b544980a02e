//! Tiles of the kernel for few tokens, and the shared memory that follows from them.

use dualgemm_ptx::layout::{SmemLayout, SmemRegion};

use crate::Error;
use crate::error::one_of;
use crate::limits::{Rules, Valid};
use crate::sm90a::pack::CHUNK_BYTES;

/// What refuses a configuration or operands.
pub(super) const RULES: Rules = Rules("sm90a warpwise");
/// Features of half a chunk of the pack: what CTAs are counted in.
pub const HALF_FEATURES: u32 = 16;
/// Shared memory of a CTA when two fit on a multiprocessor: half of its 228 KiB, less what the driver keeps.
const SHARED: u32 = (228 << 10) / 2 - (1 << 10);
/// Most warps of a CTA: with two CTAs, 64 registers for each thread.
const MOST_WARPS: u32 = 16;

/// Bytes of a row of a block of A: 64 elements of 16 bits.
pub(super) const ROW: u32 = 128;

/// A tile and its pipeline.
///
/// A CTA computes `16 · halves` features for `tokens` tokens. The chunks of the pack that hold them are its row groups;
/// each has `k_groups` warps, which take one part of K each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// Features of a CTA, in halves of chunks: what shares them evenly among multiprocessors.
    pub halves: u32,
    /// Tokens of the tile.
    pub tokens: u32,
    /// Warps that share a row group and split K.
    pub k_groups: u32,
    /// Chunks that a warp has room for.
    pub chunks: u32,
}

/// Shared memory of a configuration.
#[derive(Debug, Clone)]
pub struct Layout {
    /// All of it.
    pub smem: SmemLayout,
    /// Blocks of A, `[blocks][tokens][64]`, 16-byte pieces of a row exchanged by the row's low bits; at last the tile of
    /// C, f32.
    pub tokens: SmemRegion,
    /// Chunks, `[warps][chunks]`; at last each warp's sums.
    pub weights: SmemRegion,
    /// "Chunk is there" barriers, `[warps][chunks]`.
    pub full: SmemRegion,
}

impl Config {
    /// For up to 2, 4, 8 and 16 tokens, from few features to many: what was measured best somewhere. Two chunks of room
    /// are faster than three; twelve warps leave registers for 16 tokens, or for eight and their codes.
    pub fn menu() -> impl Iterator<Item = Config> {
        let wide = (1..=8).flat_map(|halves| {
            [2, 4, 8].map(|tokens| {
                let one = Config { halves, tokens, k_groups: 1, chunks: 2 };
                match (tokens, one.row_groups()) {
                    (8, 1) => Config { k_groups: 12, chunks: 3, ..one },
                    (_, groups) => Config { k_groups: MOST_WARPS / groups, ..one },
                }
            })
        });
        let many = [1, 2].map(|halves| Config { halves, tokens: 16, k_groups: 12, chunks: 2 });
        wide.chain(many)
    }

    /// The configuration of the menu that [`name`](Self::name) calls so.
    ///
    /// # Errors
    /// If there is none; the error lists the names.
    pub fn named(name: &str) -> Result<Config, Error> {
        one_of(name, Self::menu(), Self::name)
    }

    /// Chunks along the features that a CTA has a part of. An odd number of halves begins in the middle of a chunk in
    /// every other CTA.
    pub fn row_groups(&self) -> u32 {
        self.halves / 2 + self.halves % 2
    }

    /// Warps of a CTA.
    pub fn warps(&self) -> u32 {
        self.row_groups() * self.k_groups
    }

    /// Threads of a CTA.
    pub fn threads(&self) -> u32 {
        self.warps() * 32
    }

    /// Whether warps with the same part of K share its blocks of A, each bringing some of the rows: where they are so many
    /// that every warp by itself would take them from L2 faster than that gives.
    pub(super) fn shares_blocks(&self) -> bool {
        self.tokens > 4 && self.row_groups() > 1
    }

    /// Blocks of A that a CTA has room for: two for each part of K if warps share them, one for each warp otherwise.
    pub(super) fn blocks(&self) -> u32 {
        if self.shares_blocks() { 2 * self.k_groups } else { self.warps() }
    }

    /// Bytes of a block of A.
    pub(super) fn block_bytes(&self) -> u32 {
        self.tokens * ROW
    }

    /// Whether codes of A are expanded on the way: of more tokens that takes registers that there are not.
    pub fn expands_codes(&self) -> bool {
        self.tokens <= 8
    }

    /// Groups of eight tokens, the N of the matrix instruction.
    pub(super) fn token_groups(&self) -> u32 {
        self.tokens.div_ceil(8)
    }

    /// Bytes from one token's row of the tile of C to the next: 16 more than its features take, which spreads the rows
    /// over the banks.
    pub(super) fn pitch(&self) -> u32 {
        self.row_groups() * 32 * 4 + 16
    }

    /// Shared memory, or what does not fit.
    ///
    /// # Errors
    /// Names the rule and the value.
    pub fn layout(&self) -> Result<Layout, Error> {
        RULES.check("halves of chunks of a CTA", self.halves, Valid::range(1, 2 * MOST_WARPS))?;
        RULES.check("warps", self.warps(), Valid::range(1, MOST_WARPS))?;
        RULES.check("tokens of the tile", self.tokens, Valid::OneOf(&[1, 2, 4, 8, 16]))?;
        // A warp's sums take 2 KiB for eight tokens.
        RULES.check("chunks of a warp", self.chunks, Valid::range(self.token_groups(), 16))?;
        let mut smem = SmemLayout::new();
        let tokens = smem.alloc_parts("tokens", self.block_bytes(), self.blocks(), 128);
        let tile = self.tokens * self.pitch();
        if tile > smem.bytes() {
            smem.alloc("tile", tile - smem.bytes(), 16);
        }
        let weights = smem.alloc_parts("weights", CHUNK_BYTES as u32, self.warps() * self.chunks, 128);
        let full = smem.mbarriers("full", self.warps() * self.chunks);
        RULES.shared(smem.bytes(), SHARED)?;
        Ok(Layout { smem, tokens, weights, full })
    }

    /// CTAs for `m` tokens and `n` features on a card of `sms` multiprocessors: one for each at least. Those beyond the last
    /// feature keep a multiprocessor from getting two of the next kernel's, which would take twice as long: measured, 9.4
    /// instead of 20 to 30 µs with 128 of 132. They do so only if they end no earlier than that kernel's CTAs are placed:
    /// leaving at once, when the kernel before has ended, costs the same again.
    pub fn grid(&self, m: usize, n: usize, sms: u32) -> [u32; 3] {
        let halves = n.div_ceil(HALF_FEATURES as usize) as u32;
        [halves.div_ceil(self.halves).max(sms), m.div_ceil(self.tokens as usize) as u32, 1]
    }

    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        let Self { halves, tokens, k_groups, chunks } = self;
        format!("sm90a_warpwise_{}x{tokens}_kg{k_groups}_s{chunks}", halves * HALF_FEATURES)
    }
}
