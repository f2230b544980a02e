//! Tiles of the kernel without prepack, and the shared memory that follows from them.

use dualgemm_device::{Args, LaunchSpec};
use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_ptx::layout::{SmemTile, Swizzle, TensorDataType, TensorMap};

use super::fused;
use super::order::SPAN;
use crate::Error;
use crate::error::{one_of, refused};
use crate::fused::{Fused, FusedArgs, Tile, Weights};
use crate::limits::{Rules, check_address, fits};
use crate::parts::format::Format;
use crate::parts::tma_tiles::{Layout, Shape};
use crate::parts::variant::{Out, Variant};

/// Features of a warpgroup, which multiplies 64 rows: gate and up of each.
pub const GROUP_FEATURES: u32 = 32;
/// Bytes of codes of a row in a stage.
pub const ROW_BYTES: u32 = SPAN as u32 / 2;

/// A tile and its pipeline. A CTA computes `32 · row_groups` features for `tokens` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// Warpgroups that multiply.
    pub row_groups: u32,
    /// Tokens of the tile: the N of `wgmma`.
    pub tokens: u32,
    /// Stages of 128 K.
    pub stages: u32,
    /// Order of the scale bytes; linear or 128x4.
    pub scale_layout: ScaleLayout,
}

impl Config {
    /// From few tokens to many, for linear scales.
    pub const MENU: [Config; 5] = [
        Config::linear(1, 16, 16),
        Config::linear(1, 64, 8),
        Config::linear(1, 128, 6),
        Config::linear(2, 128, 5),
        Config::linear(2, 256, 3),
    ];

    const fn linear(row_groups: u32, tokens: u32, stages: u32) -> Config {
        Config { row_groups, tokens, stages, scale_layout: ScaleLayout::Linear }
    }

    /// The menu, for both layouts of scales.
    pub fn menu() -> impl Iterator<Item = Config> {
        let layouts = [ScaleLayout::Linear, ScaleLayout::Sf128x4].into_iter();
        layouts.flat_map(|scale_layout| Self::MENU.map(|config| Config { scale_layout, ..config }))
    }

    /// The configuration of the menu that [`name`](Self::name) calls so.
    pub fn named(name: &str) -> Result<Config, Error> {
        one_of(name, Self::menu(), Self::name)
    }

    /// Features of the tile.
    pub fn features(&self) -> u32 {
        self.row_groups * GROUP_FEATURES
    }

    /// Bytes of one panel of 64 K of tokens.
    pub fn panel_bytes(&self) -> u32 {
        self.tokens * 128
    }

    /// What the kernel's frame is made of: of tokens two panels, of weights codes.
    pub(crate) fn shape(&self) -> Shape {
        let (&Self { tokens, row_groups, stages, .. }, features) = (self, self.features());
        let (token_bytes, weight_bytes) = (2 * self.panel_bytes(), 2 * features * ROW_BYTES);
        Shape { tokens, features, row_groups, stages, token_bytes, weight_bytes }
    }

    /// Shared memory for output of this type, or what does not fit. A tile is 64 K of tokens.
    pub fn layout(&self, out: Out) -> Result<Layout, Error> {
        Shape::check(self.rules(), self.row_groups, (self.tokens, 256), self.stages)?;
        if self.scale_layout == ScaleLayout::Sf8x4 {
            return self.rules().refuse("scales are linear or 128x4");
        }
        let tile = SmemTile::new(self.tokens, 128, Swizzle::B128)?;
        self.shape().layout(self.rules(), out, 128, tile)
    }

    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        let Self { row_groups, tokens, stages, scale_layout } = self;
        format!("sm90a_plain_{}x{tokens}_s{stages}_{scale_layout}", row_groups * 64)
    }
}

impl Tile for Config {
    fn rules(&self) -> Rules {
        Rules("sm90a plain")
    }

    fn generate(&self, variant: &Variant, _: Target) -> Result<Module, Error> {
        fused::generate(self, variant)
    }

    fn shared(&self, variant: &Variant) -> Result<u32, Error> {
        Ok(self.layout(variant.out)?.smem.bytes())
    }

    /// A is padded by zeros to a multiple of 128 of K and in the order of [`order`](super::order), what a kernel with the sink
    /// `Permuted` writes; alpha is the tensor scale of each half times [`WEIGHT_FACTOR`](crate::sm90a::decode::WEIGHT_FACTOR).
    fn formats(&self, _: &Variant) -> (Format, Option<Format>) {
        (Format::Half(HalfFormat::F16), Some(Format::Block(BlockFormat::Nvfp4)))
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        if !k.is_multiple_of(32) {
            let expected = "K a multiple of 32, which rows of codes need for the TMA unit";
            return refused("A", format!("[{m}, {k}]"), expected);
        }
        let padded = k.next_multiple_of(SPAN);
        fits("A", "row stride in bytes", args.a.pitch, 2 * padded, 16)?;
        let matrix = |ty, address, (rows, columns): (usize, usize), pitch, tile, swizzle| {
            let size = (rows as u64, columns as u64);
            kernel.device.tensor_map(&TensorMap::matrix(ty, address, size, pitch as u64, tile, swizzle))
        };
        let (a, tile) = (args.a, (self.tokens, 64));
        let map = matrix(TensorDataType::F16, a.codes.0, (m, padded), a.pitch, tile, Swizzle::B128)?;
        let (mut list, mut scales) = (Args::new().tensor_map(map), Vec::new());
        if let Weights::Rows(halves) = args.weights {
            for (tensor, half) in ["the scales of gate", "the scales of up"].into_iter().zip(halves) {
                check_address(tensor, half.scales, 2)?;
                let (codes, tile) = (half.codes.0, (self.features(), ROW_BYTES));
                let swizzle = Swizzle::None;
                let map = matrix(TensorDataType::U8, codes, (n, k / 2), half.pitch, tile, swizzle)?;
                list = list.tensor_map(map);
                scales.push(half.scales);
            }
        }
        let list = args.sizes(scales.into_iter().fold(list, Args::ptr), k / 16);
        let list = args.outputs(list, &kernel.variant)?;
        let shape = self.shape();
        Ok(kernel.launch(shape.grid(m, n), shape.threads()).args(list))
    }
}
