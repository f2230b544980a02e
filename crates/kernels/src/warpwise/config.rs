//! Tiles of the kernel for few tokens, and the shared memory that follows from them.

use dualgemm_device::{Args, LaunchSpec};
use dualgemm_formats::BlockFormat;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_ptx::layout::{SmemLayout, SmemRegion};

use super::fused;
use super::tokens::ROWS;
use crate::Error;
use crate::fused::{Fused, FusedArgs, Tile};
use crate::limits::{GRID_X, GRID_YZ, Rules, SHARED_DATACENTER, Valid, check_address, fits};
use crate::parts::format::Format;
use crate::parts::groups::most_tiles;
use crate::parts::variant::Variant;
use crate::sm90a::pack::{CHUNK_BYTES, CHUNK_K, chunk_features};

/// What refuses a configuration or operands.
pub(super) const RULES: Rules = Rules("sm90a warpwise");
/// Pairs of weight rows of half a chunk of the pack: what CTAs are counted in. 16 features with gate and up, 32 of a linear
/// layer.
const HALF_PAIRS: u32 = 16;
/// Shared memory of a CTA when two fit on a multiprocessor: half of its 228 KiB, less what the driver keeps.
pub(super) const SHARED: u32 = (228 << 10) / 2 - (1 << 10);
/// Where the list of choices begins behind their group.
pub(super) const LIST: u32 = 16;
/// Most warps of a CTA: with two CTAs, 64 registers for each thread.
const MOST_WARPS: u32 = 16;

/// Bytes of a row of a block of A: 64 elements of 16 bits.
pub(super) const ROW: u32 = 128;

/// A tile and its pipeline.
///
/// A CTA computes `16 · halves` features, or twice as many of a linear layer, for `tokens` tokens. The chunks of the pack that
/// hold them are its row groups; each has `k_groups` warps, which take one part of K each.
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
    /// Of groups: which one the CTA's rows belong to, the first of them, and the end of the group's. Of choices: which one, and from
    /// byte 16 on each row's choice.
    pub found: Option<SmemRegion>,
}

impl Config {
    /// For up to 2, 4, 8 and 16 tokens, from few features to many: what was measured best somewhere. Two chunks of room
    /// are faster than three.
    pub fn menu() -> impl Iterator<Item = Config> {
        let config = |halves, tokens, k_groups| Config { halves, tokens, k_groups, chunks: 2 };
        let wide = (1..=8u32).flat_map(move |halves| {
            [2, 4, 8].map(|tokens| config(halves, tokens, MOST_WARPS / halves.div_ceil(2)))
        });
        // Of experts, all CTAs of up to 4 tokens that choose 4 each run at once.
        let wide = wide.chain([config(12, 2, 2)]);
        let many = [(1, 12), (2, 12), (2, 8), (4, 4)];
        wide.chain(many.map(|(halves, k_groups)| config(halves, 16, k_groups)))
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

    /// CTAs that a multiprocessor has registers for: 16 rows in more than eight warps leave none for a second.
    pub fn ctas_per_sm(&self) -> u32 {
        if self.warps() * self.tokens <= 128 { 2 } else { 1 }
    }

    /// Blocks of A that a warp, or the warps that share them, have room for. The next one is on its way while warps that share
    /// them read one. A warp by itself has read one before it multiplies; that is soon enough for few rows, and for codes,
    /// which wait in registers.
    pub(super) fn blocks(&self, codes: bool) -> u32 {
        let ahead = self.shares_blocks() || (self.tokens > 4 && !codes);
        if ahead { 2 } else { 1 }
    }

    pub(super) fn block_bytes(&self) -> u32 {
        self.tokens * ROW
    }

    /// Chunks that a warp asks for ahead of A: all that it has room for where CTAs share multiprocessors, so that one has what it
    /// will read while the other ends. Of many tokens, and of CTAs that start together, A would come behind these bytes, and
    /// nothing be multiplied meanwhile.
    pub(super) fn chunks_before_a(&self, together: bool, codes: bool) -> u32 {
        let many = self.tokens >= if codes { 8 } else { 16 };
        if together || many { 1 } else { self.chunks }
    }

    /// Whether codes of A are expanded on the way: of more tokens that takes registers that there are not.
    pub fn expands_codes(&self) -> bool {
        self.tokens <= 4 || (self.tokens == 8 && self.shares_blocks())
    }

    /// Whether a bf16 A becomes f16 on the way, and weights widen to that. Of more rows it takes longer than it saves.
    pub(super) fn narrows(&self, variant: &Variant) -> bool {
        let most = if variant.is_linear() { ROWS / 2 } else { ROWS };
        variant.compute == HalfFormat::Bf16 && variant.whole_blocks && self.tokens <= most
    }

    /// Groups of eight tokens, the N of the matrix instruction.
    pub(super) fn token_groups(&self) -> u32 {
        self.tokens.div_ceil(8)
    }

    /// Bytes from one token's row of the tile of C to the next: 16 more than its features take, which spreads the rows
    /// over the banks.
    pub(super) fn pitch(&self, linear: bool) -> u32 {
        self.row_groups() * 2 * half_features(linear) * 4 + 16
    }

    /// Shared memory, or what does not fit.
    ///
    /// # Errors
    /// Names the rule and the value.
    pub fn layout(&self, variant: &Variant) -> Result<Layout, Error> {
        RULES.check("halves of chunks of a CTA", self.halves, Valid::range(1, 2 * MOST_WARPS))?;
        RULES.check("warps", self.warps(), Valid::range(1, MOST_WARPS))?;
        RULES.check("tokens of the tile", self.tokens, Valid::OneOf(&[1, 2, 4, 8, 16]))?;
        // A warp's sums take 2 KiB for eight tokens.
        RULES.check("chunks of a warp", self.chunks, Valid::range(self.token_groups(), 16))?;
        let mut smem = SmemLayout::new();
        let readers = if self.shares_blocks() { self.k_groups } else { self.warps() };
        let blocks = readers * self.blocks(variant.codes.is_some());
        let tokens = smem.alloc_parts("tokens", self.block_bytes(), blocks, 128);
        let tile = self.tokens * self.pitch(variant.is_linear());
        if tile > smem.bytes() {
            smem.alloc("tile", tile - smem.bytes(), 16);
        }
        let weights = smem.alloc_parts("weights", CHUNK_BYTES as u32, self.warps() * self.chunks, 128);
        let full = smem.mbarriers("full", self.warps() * self.chunks);
        let list = if variant.choices { 4 * self.tokens } else { 0 };
        let found = variant.grouped.then(|| smem.alloc("found", LIST + list, 16));
        RULES.shared(smem.bytes(), if self.ctas_per_sm() == 2 { SHARED } else { SHARED_DATACENTER })?;
        Ok(Layout { smem, tokens, weights, full, found })
    }

    /// CTAs for `m` tokens, in up to `groups` groups, and `n` features.
    pub(super) fn grid(&self, (m, n): (usize, usize), groups: Option<usize>, linear: bool) -> [u32; 3] {
        let ctas = n.div_ceil((self.halves * half_features(linear)) as usize) as u32;
        [ctas, most_tiles(m, self.tokens, groups) as u32, 1]
    }

    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        let Self { halves, tokens, k_groups, chunks } = self;
        format!("sm90a_warpwise_{}x{tokens}_kg{k_groups}_s{chunks}", halves * HALF_PAIRS)
    }
}

/// Features of half a chunk.
pub(super) fn half_features(linear: bool) -> u32 {
    chunk_features(linear) / 2
}

impl Tile for Config {
    fn rules(&self) -> Rules {
        RULES
    }

    fn generate(&self, variant: &Variant, _: Target) -> Result<Module, Error> {
        fused::generate(self, variant)
    }

    fn shared(&self, variant: &Variant) -> Result<u32, Error> {
        Ok(self.layout(variant)?.smem.bytes())
    }

    fn formats(&self, variant: &Variant) -> (Format, Option<Format>) {
        match variant.codes {
            None => (Format::Half(variant.compute), None),
            Some(_) => (Format::Block(BlockFormat::Nvfp4), None),
        }
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let ((m, n, k), variant) = (args.size, &kernel.variant);
        let groups = if variant.choices { Some(m) } else { args.count() };
        let grid = self.grid((m, n), groups, variant.is_linear());
        RULES.check("CTAs along the features", grid[0], GRID_X)?;
        RULES.check("tiles of tokens", grid[1], GRID_YZ)?;
        let list = match variant.codes {
            None => args.a_rows(Args::new()),
            Some(_) => {
                check_address("A's scales", args.a.scales, 1)?;
                Args::new().ptr(args.a.codes).ptr(args.a.scales)
            }
        };
        if variant.whole_blocks {
            fits("A", "elements of a row", k, 1, CHUNK_K)?;
        }
        let list = args.group_rows(args.pack(list))?;
        // Where each CTA can have a multiprocessor to itself, two must not come to lie on one, which would take twice as long:
        // they do behind a kernel that leaves some multiprocessors before others (measured: 41 instead of 34 µs for an MLP).
        let (ctas, sms) = (grid[0].saturating_mul(grid[1]), kernel.device.info().sm_count);
        let alone = ctas <= sms;
        // CTAs on choices know their weights no sooner than A. If all start at once, A would come behind what all have room for.
        let together = args.choices.is_some() && ctas <= self.ctas_per_sm() * sms;
        let first = self.chunks_before_a(alone || together, variant.codes.is_some());
        let list = args.sizes(list, k).u32(first);
        let list = if args.groups.is_some() { list.u32(args.settled.into()) } else { list };
        let list = if let Some(per_row) = args.choices { list.u32(per_row as u32) } else { list };
        let spec = kernel.launch(grid, self.threads()).args(args.outputs(list, variant)?);
        let more_than_half = spec.dynamic_shared.max(SHARED + 1);
        Ok(if alone { spec.dynamic_shared(more_than_half) } else { spec })
    }
}
