//! Tiles of the e4m3 kernel and the shared memory that follows from them.

use dualgemm_device::{Args, LaunchSpec};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::layout::{SmemTile, Swizzle, TensorDataType, TensorMap};

use super::fused;
use crate::Error;
use crate::fused::{Fused, FusedArgs, Tile, Weights};
use crate::limits::Rules;
use crate::parts::format::Format;
use crate::parts::tma_tiles::{Layout, Shape};
use crate::parts::variant::{Out, Variant};

/// Features of a warpgroup: the M of `wgmma`.
pub const GROUP_FEATURES: u32 = 64;
/// K elements of a stage, a byte each: the span of the 128-byte swizzle.
pub const STAGE_K: u32 = 128;

/// A tile and its pipeline. A CTA computes `64 · row_groups` features for `tokens` tokens; a warpgroup has the sums of
/// gate and of up of its 64 features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// Warpgroups that multiply.
    pub row_groups: u32,
    /// Tokens of the tile: the N of `wgmma`.
    pub tokens: u32,
    /// Stages of 128 K.
    pub stages: u32,
}

impl Config {
    /// From few tokens to many.
    pub const MENU: [Config; 5] = [
        Config { row_groups: 1, tokens: 16, stages: 10 },
        Config { row_groups: 1, tokens: 64, stages: 8 },
        Config { row_groups: 1, tokens: 128, stages: 6 },
        Config { row_groups: 2, tokens: 64, stages: 5 },
        Config { row_groups: 2, tokens: 128, stages: 4 },
    ];

    /// Features of the tile.
    pub fn features(&self) -> u32 {
        self.row_groups * GROUP_FEATURES
    }

    /// What the kernel's frame is made of.
    pub(crate) fn shape(&self) -> Shape {
        let (&Self { tokens, row_groups, stages }, features) = (self, self.features());
        let (token_bytes, weight_bytes) = (tokens * STAGE_K, 2 * features * STAGE_K);
        Shape { tokens, features, row_groups, stages, token_bytes, weight_bytes }
    }

    /// Shared memory for output of this type, or what does not fit. A tile is 64 rows of weights, or the tokens.
    pub fn layout(&self, out: Out) -> Result<Layout, Error> {
        Shape::check(self.rules(), self.row_groups, (self.tokens, 128), self.stages)?;
        let tile = SmemTile::new(GROUP_FEATURES, STAGE_K, Swizzle::B128)?;
        self.shape().layout(self.rules(), out, 1024, tile)
    }

    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        let Self { row_groups, tokens, stages } = self;
        format!("sm90a_fp8_{}x{tokens}_s{stages}", row_groups * GROUP_FEATURES)
    }
}

impl Tile for Config {
    fn rules(&self) -> Rules {
        Rules("sm90a fp8")
    }

    fn generate(&self, variant: &Variant, _: Target) -> Result<Module, Error> {
        fused::generate(self, variant)
    }

    fn shared(&self, variant: &Variant) -> Result<u32, Error> {
        Ok(self.layout(variant.out)?.smem.bytes())
    }

    fn formats(&self, _: &Variant) -> (Format, Option<Format>) {
        (Format::E4m3, Some(Format::E4m3))
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        let mut list = Args::new();
        if let Weights::Rows([gate, up]) = args.weights {
            let (tokens, features) = (self.tokens, self.features());
            for (operand, tile) in [(args.a, tokens), (gate, features), (up, features)] {
                let (size, pitch) = ((operand.rows as u64, k as u64), operand.pitch as u64);
                let (ty, tile, swizzle) = (TensorDataType::U8, (tile, STAGE_K), Swizzle::B128);
                let map = TensorMap::matrix(ty, operand.codes.0, size, pitch, tile, swizzle);
                list = list.tensor_map(kernel.device.tensor_map(&map)?);
            }
        }
        let list = args.outputs(args.sizes(list, k.div_ceil(STAGE_K as usize)), &kernel.variant)?;
        let shape = self.shape();
        Ok(kernel.launch(shape.grid(m, n), shape.threads()).args(list))
    }
}
