//! Tiles of the fused kernel for sm_80, and the shared memory that follows from them.

use dualgemm_device::{Args, LaunchSpec};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::layout::{SmemLayout, SmemRegion};

use super::fused;
use crate::Error;
use crate::fused::{Fused, FusedArgs, Tile};
use crate::limits::{GRID_X, GRID_YZ, Rules, SHARED_LEAST, STAGES, Valid};
use crate::parts::format::Format;
use crate::parts::groups::most_tiles;
use crate::parts::staged::stage_over;
use crate::parts::variant::Variant;
use crate::sm90a::pack::CHUNK_BYTES;

/// A tile and its pipeline.
///
/// A CTA computes `32 · chunks` features, or twice as many of a linear layer, for `tokens` tokens. A warp takes `4 · chunks / row_warps` slabs of 16 weight
/// rows and `tokens / token_warps` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// Chunks of 64 weight rows.
    pub chunks: u32,
    /// Warps side by side along the rows.
    pub row_warps: u32,
    /// Warps side by side along the tokens.
    pub token_warps: u32,
    /// Tokens of the tile.
    pub tokens: u32,
    /// Stages of 64 K.
    pub stages: u32,
}

/// Shared memory of a configuration.
#[derive(Debug, Clone)]
pub struct Layout {
    /// All of it.
    pub smem: SmemLayout,
    /// Tokens, `[stages][tokens][64]`, rows of 128 bytes whose 16-byte pieces are exchanged by the row's low bits.
    pub tokens: SmemRegion,
    /// Weight chunks, `[stages][chunks]`.
    pub weights: SmemRegion,
    /// Where the group of the tile's rows is put, if they come in groups.
    pub found: Option<SmemRegion>,
}

impl Config {
    /// From few tokens to many.
    pub const MENU: [Config; 5] = [
        Config { chunks: 1, row_warps: 4, token_warps: 1, tokens: 8, stages: 8 },
        Config { chunks: 1, row_warps: 4, token_warps: 1, tokens: 16, stages: 8 },
        Config { chunks: 1, row_warps: 4, token_warps: 1, tokens: 32, stages: 6 },
        Config { chunks: 2, row_warps: 4, token_warps: 1, tokens: 64, stages: 4 },
        Config { chunks: 2, row_warps: 4, token_warps: 2, tokens: 128, stages: 4 },
    ];

    /// The first configuration of the menu whose tile holds `m` tokens, or the one with the largest tile.
    pub fn for_tokens(m: usize) -> Config {
        let [.., largest] = Self::MENU;
        Self::MENU.into_iter().find(|config| config.tokens as usize >= m).unwrap_or(largest)
    }

    /// Threads of a CTA.
    pub fn threads(&self) -> u32 {
        self.row_warps * self.token_warps * 32
    }

    /// Features of the tile.
    pub fn features(&self, variant: &Variant) -> u32 {
        self.chunks * variant.chunk_features()
    }

    /// Slabs of 16 weight rows of a warp.
    pub fn slabs(&self) -> u32 {
        4 * self.chunks / self.row_warps
    }

    /// Tokens of a warp.
    pub fn warp_tokens(&self) -> u32 {
        self.tokens / self.token_warps
    }

    /// Shared memory of a variant, or what does not fit.
    pub fn layout(&self, variant: &Variant) -> Result<Layout, Error> {
        let rules = self.rules();
        rules.common(variant)?;
        rules.check("warps", self.row_warps.saturating_mul(self.token_warps), Valid::range(1, 8))?;
        // A thread has four sums of a slab for eight tokens, 64 in all.
        let slabs = Valid::multiple(self.row_warps, 16 * self.row_warps);
        rules.check("slabs of 16 weight rows of a tile", self.chunks.saturating_mul(4), slabs)?;
        let tokens = Valid::multiple(8 * self.token_warps, 16 / self.slabs() * 8 * self.token_warps);
        rules.check("tokens of the tile", self.tokens, tokens)?;
        rules.check("stages", self.stages, STAGES)?;
        let mut smem = SmemLayout::new();
        let tokens = smem.alloc_parts("tokens", self.tokens * 128, self.stages, 128);
        let weights = smem.alloc_parts("weights", self.chunks * CHUNK_BYTES as u32, self.stages, 128);
        stage_over(&mut smem, variant.out, self.tokens, self.features(variant));
        let found = variant.grouped.then(|| smem.alloc("found", 16, 16));
        rules.shared(smem.bytes(), SHARED_LEAST)?;
        Ok(Layout { smem, tokens, weights, found })
    }

    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        let Self { chunks, row_warps, token_warps, tokens, stages } = self;
        format!("sm80_fused_{}x{tokens}_w{row_warps}x{token_warps}_s{stages}", chunks * 64)
    }
}

impl Tile for Config {
    fn rules(&self) -> Rules {
        Rules("sm80 fused")
    }

    fn generate(&self, variant: &Variant, target: Target) -> Result<Module, Error> {
        fused::generate(self, variant, target)
    }

    fn shared(&self, variant: &Variant) -> Result<u32, Error> {
        Ok(self.layout(variant)?.smem.bytes())
    }

    fn formats(&self, variant: &Variant) -> (Format, Option<Format>) {
        (Format::Half(variant.compute), None)
    }

    /// Token tiles run fastest, so that CTAs that run together read the same weights.
    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        let list = args.group_rows(args.pack(args.a_rows(Args::new())))?;
        let list = args.outputs(args.sizes(list, k), &kernel.variant)?;
        let features = self.features(&kernel.variant) as usize;
        let (tokens, features) =
            (most_tiles(m, self.tokens, args.count()) as u32, n.div_ceil(features) as u32);
        self.rules().check("tiles of tokens", tokens, GRID_X)?;
        self.rules().check("tiles of features", features, GRID_YZ)?;
        Ok(kernel.launch([tokens, features, 1], self.threads()).args(list))
    }
}
