//! What may vary of the fused sm_120 kernel, and everything that follows from it. The only place that computes offsets.

use dualgemm_device::LaunchSpec;
use dualgemm_formats::BlockFormat;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::layout::{SmemLayout, SmemRegion};

use super::fused;
use crate::Error;
use crate::fused::{Fused, FusedArgs, Tile};
use crate::limits::{Rules, SHARED_LEAST, STAGES, Valid};
use crate::parts::format::{ATOM_LINES, Format, Formats, STEP_K, StagedOperand, atom_k};
use crate::parts::operand::gate_features;
use crate::parts::variant::Variant;

/// Features or tokens of a tile: whole matrix instructions, and parts of one atom of scales that begin nowhere else.
const SIDE: Valid = Valid::OneOf(&[16, 32, 64, 128]);
/// Features of one matrix instruction: eight rows of gate and eight of up.
pub const SLAB: u32 = 8;
/// Tokens that one `ldmatrix.x4` brings: two matrix instructions.
pub const TOKEN_PAIR: u32 = 16;
/// Floats between the ends of a row of staged sums and the next row, which spreads rows over the banks.
const PADDING: u32 = 4;

/// Tile, warps and pipeline of the fused kernel.
///
/// The warps that multiply are `feature_warps · token_warps · k_groups`; a warp has `features / feature_warps` features
/// and `tokens / token_warps` tokens, and takes every `k_groups`-th step of 64 K.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// What A and the weights are.
    pub format: BlockFormat,
    /// Features of the tile, at most those of one atom of scales.
    pub features: u32,
    /// Tokens of the tile.
    pub tokens: u32,
    /// Warps side by side along the features.
    pub feature_warps: u32,
    /// Warps side by side along the tokens.
    pub token_warps: u32,
    /// Warps that share a part of the tile and split K.
    pub k_groups: u32,
    /// K elements of a stage: 128 or 256.
    pub stage_k: u32,
    /// Stages of the ring.
    pub stages: u32,
}

/// Shared memory of a configuration.
#[derive(Debug, Clone)]
pub struct Layout {
    /// All of it.
    pub smem: SmemLayout,
    /// Stages: `[A][gate][up]` codes, then their scales.
    pub ring: SmemRegion,
    /// Offsets in a stage of the codes of A, gate and up.
    pub codes: [u32; 3],
    /// Offsets in a stage of the scales of A, gate and up.
    pub scales: [u32; 3],
    /// "Stage is full" barriers.
    pub full: SmemRegion,
    /// "Stage is empty" barriers.
    pub empty: SmemRegion,
}

const fn config(
    (features, tokens): (u32, u32),
    (feature_warps, token_warps, k_groups): (u32, u32, u32),
    (stage_k, stages): (u32, u32),
) -> Config {
    let format = BlockFormat::Nvfp4;
    Config { format, features, tokens, feature_warps, token_warps, k_groups, stage_k, stages }
}

impl Config {
    /// The configurations worth having, by their estimates (see `docs/kernels/blackwell.md`).
    pub const MENU: [Config; 4] = [
        config((32, 16), (2, 1, 4), (256, 5)),
        config((32, 64), (2, 1, 4), (256, 4)),
        config((64, 64), (4, 2, 1), (128, 6)),
        config((64, 128), (4, 2, 1), (128, 5)),
    ];

    /// The configurations worth having for operands of this format; those of nvfp4 are [`MENU`](Self::MENU).
    pub fn menu(format: BlockFormat) -> [Config; 4] {
        Self::MENU.map(|config| Config { format, ..config })
    }

    /// The first configuration of the menu whose tile holds `m` tokens, or the one with the largest tile.
    pub fn for_tokens(m: usize) -> Config {
        let [.., largest] = Self::MENU;
        Self::MENU.into_iter().find(|config| config.tokens as usize >= m).unwrap_or(largest)
    }

    /// Warps that multiply.
    pub const fn consumer_warps(&self) -> u32 {
        self.feature_warps * self.token_warps * self.k_groups
    }

    /// Threads of a CTA: those that multiply, and two warps that load.
    pub const fn threads(&self) -> u32 {
        (self.consumer_warps() + 2) * 32
    }

    /// Slabs of eight features of a warp.
    pub const fn slabs(&self) -> u32 {
        self.features / self.feature_warps / SLAB
    }

    /// Groups of eight tokens of a warp.
    pub const fn token_groups(&self) -> u32 {
        self.tokens / self.token_warps / 8
    }

    /// Steps of 64 K in a stage.
    pub const fn steps(&self) -> u32 {
        self.stage_k / STEP_K
    }

    /// Steps whose scales one atom holds.
    pub const fn atom_steps(&self) -> u32 {
        atom_k(self.format) / STEP_K
    }

    /// What a CTA keeps of A, gate and up in a stage.
    pub const fn parts(&self) -> [StagedOperand; 3] {
        let format = Format::Block(self.format);
        let weights =
            StagedOperand { rows: self.features, atoms: 1, lines: ATOM_LINES, k: self.stage_k, format };
        [StagedOperand { rows: self.tokens, ..weights }, weights, weights]
    }

    /// Bytes that arrive per stage.
    pub fn stage_bytes(&self) -> u32 {
        self.parts().iter().map(|part| part.code_bytes() + part.scale_bytes()).sum()
    }

    /// Bytes from one token's staged sums to the next one's.
    pub const fn pitch(&self) -> u32 {
        (self.features + PADDING) * 4
    }

    /// Bytes of the sums of one product and one K group.
    pub const fn plane(&self) -> u32 {
        self.tokens * self.pitch()
    }

    /// Shared memory, or what does not fit.
    pub fn layout(&self) -> Result<Layout, Error> {
        let rules = self.rules();
        rules.check("features of the tile", self.features, SIDE)?;
        rules.check("tokens of the tile", self.tokens, SIDE)?;
        rules.check("K of a stage", self.stage_k, Valid::OneOf(&[128, 256]))?;
        rules.check("warps along the features", self.feature_warps, Valid::DivisorOf(self.features / 16))?;
        rules.check(
            "warps along the tokens",
            self.token_warps,
            Valid::DivisorOf(self.tokens / TOKEN_PAIR),
        )?;
        rules.check("K groups", self.k_groups, Valid::DivisorOf(self.steps()))?;
        rules.check("warps that multiply", self.consumer_warps(), Valid::range(1, 14))?;
        rules.check("stages", self.stages, STAGES)?;
        let (parts, mut stage) = (self.parts(), 0);
        let mut take = |bytes: u32| {
            stage += bytes;
            stage - bytes
        };
        let codes = parts.map(|part| take(part.code_bytes()));
        let scales = parts.map(|part| take(part.scale_bytes()));
        let mut smem = SmemLayout::new();
        let ring = smem.alloc_parts("stages", stage, self.stages, 1024);
        let sums = 2 * self.k_groups * self.plane();
        if sums > smem.bytes() {
            smem.alloc("sums", sums - smem.bytes(), 16);
        }
        let (full, empty) = (smem.mbarriers("full", self.stages), smem.mbarriers("empty", self.stages));
        rules.shared(smem.bytes(), SHARED_LEAST)?;
        Ok(Layout { smem, ring, codes, scales, full, empty })
    }

    /// CTAs for `m` tokens and `n` features.
    pub fn grid(&self, m: usize, n: usize) -> u32 {
        (m.div_ceil(self.tokens as usize) * n.div_ceil(self.features as usize)) as u32
    }

    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        let Self { features, tokens, feature_warps, token_warps, k_groups, stage_k, stages, .. } = self;
        let format = Formats::Scaled(self.format).suffix();
        format!(
            "sm120a_fused_{features}x{tokens}_w{feature_warps}x{token_warps}x{k_groups}_k{stage_k}_s{stages}{format}"
        )
    }
}

impl Tile for Config {
    fn rules(&self) -> Rules {
        Rules("sm120a fused")
    }

    fn generate(&self, variant: &Variant, target: Target) -> Result<Module, Error> {
        fused::generate(self, variant, target)
    }

    fn shared(&self, _: &Variant) -> Result<u32, Error> {
        Ok(self.layout()?.smem.bytes())
    }

    fn formats(&self, _: &Variant) -> (Format, Option<Format>) {
        (Format::Block(self.format), Some(Format::Block(self.format)))
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let features = gate_features(&kernel.variant, args.size.1).div_ceil(self.features as usize);
        let size = (args.tiles(self.tokens, features), 1, self.threads());
        args.launch_clusters(kernel, self.parts(), size, self.rules())
    }
}
