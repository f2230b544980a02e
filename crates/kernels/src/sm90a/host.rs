//! The host side of the fused Hopper kernel.

use std::ops::Range;

use dualgemm_device::{Args, LaunchSpec};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_ptx::layout::{Interleave, L2Promotion, OutOfBounds, Swizzle, TensorDataType, TensorMap};

use super::config::{Config, RULES};
use super::exchange::FLAG_BYTES;
use super::fused;
use super::pack::{CHUNK_BYTES, CHUNK_FEATURES, CHUNK_K};
use crate::Error;
use crate::error::refused;
use crate::fused::{Fused, FusedArgs, Tile, Weights};
use crate::limits::{GRID_YZ, Rules, Valid, check_address};
use crate::parts::format::Format;
use crate::parts::operand::Operand;
use crate::parts::rows::Output;
use crate::parts::variant::{Out, Products, Scheduler, Variant};

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
        (Format::Half(variant.compute), None)
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        self.launch_of(kernel, args, self.grid(kernel, args)?)
    }
}

impl Config {
    /// CTAs that the card holds at once.
    fn resident(&self, kernel: &Fused<'_>) -> u32 {
        kernel.device.info().sm_count * self.ctas_per_sm
    }

    /// See [`Fused::workspace_bytes`].
    pub(crate) fn workspace_bytes(&self, kernel: &Fused<'_>) -> usize {
        match kernel.variant.scheduler {
            Scheduler::Grid | Scheduler::Persistent => 0,
            Scheduler::StreamK => FLAG_BYTES as usize + self.resident(kernel) as usize * self.tile_bytes(),
        }
    }

    /// See [`Fused::gate_sums_bytes`].
    pub(crate) fn gate_sums_bytes(&self, variant: &Variant, m: usize, n: usize) -> usize {
        match variant.products.apart() {
            false => 0,
            true => {
                self.tiles_of(variant, m, n).iter().map(|&tiles| tiles as usize).product::<usize>()
                    * self.tile_bytes()
            }
        }
    }

    /// Tiles along the tokens and along the features.
    fn tiles_of(&self, variant: &Variant, m: usize, n: usize) -> [u32; 2] {
        self.tiles(m, n.div_ceil(variant.products.features_per_thread() as usize))
    }

    fn check_memory(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<(), Error> {
        let (variant, k) = (&kernel.variant, args.size.2);
        if variant.whole_blocks && !k.is_multiple_of(CHUNK_K) {
            let expected = format!("a multiple of {CHUNK_K}, which the kernel was made for");
            return refused("K", k.to_string(), expected);
        }
        if variant.products.apart() {
            check_address("gate's sums", args.gate_sums, 16)?;
        }
        if variant.scheduler == Scheduler::StreamK {
            check_address("workspace", args.workspace, 16)?;
            RULES.check("CTAs that share tiles", self.resident(kernel), Valid::range(1, FLAG_BYTES / 4))?;
        }
        Ok(())
    }

    /// CTAs of a launch, in x, y, z.
    fn grid(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<[u32; 3], Error> {
        let ((m, n, k), variant) = (args.size, &kernel.variant);
        let [token_tiles, feature_tiles] = self.tiles_of(variant, m, n);
        // Of ragged groups each adds one tile at most.
        let ragged = args.count().map_or(0, |count| count.min(m) as u64);
        let tiles = match ragged {
            0 => u64::from(token_tiles) * u64::from(feature_tiles),
            _ => (m as u64 / u64::from(self.tokens) + ragged) * u64::from(feature_tiles),
        };
        let stages = k.div_ceil(CHUNK_K).div_ceil(self.blocks_per_stage as usize) as u64;
        // The kernel counts them in 32 bits.
        RULES.check("stages of all tiles", tiles.saturating_mul(stages), Valid::range(1, i32::MAX as u32))?;
        let resident = u64::from(self.resident(kernel));
        Ok(match variant.scheduler {
            Scheduler::Grid if variant.grouped => [tiles as u32, 1, 1],
            Scheduler::Grid => {
                let panels = token_tiles.div_ceil(self.panel());
                RULES.check("tiles along the features", feature_tiles, GRID_YZ)?;
                RULES.check("panels of 2048 tokens", panels, GRID_YZ)?;
                let tiles = if self.common { feature_tiles / 2 } else { feature_tiles };
                [token_tiles.min(self.panel()) * self.cluster(), tiles, panels]
            }
            Scheduler::Persistent => [tiles.min(resident) as u32, 1, 1],
            Scheduler::StreamK => [(tiles * stages).min(resident) as u32, 1, 1],
        })
    }

    fn tensor_map(&self, variant: &Variant, a: &Operand) -> TensorMap {
        let (m, k, stride) = (a.rows as u64, a.k as u64, a.pitch as u64);
        let swizzle = Swizzle::B128;
        let data_type = match variant.compute {
            HalfFormat::F16 => TensorDataType::F16,
            HalfFormat::Bf16 => TensorDataType::Bf16,
        };
        let box_rows = self.box_tokens();
        if !(variant.whole_blocks && self.whole_stage_loads()) {
            let tile = (box_rows, CHUNK_K as u32);
            return TensorMap::matrix(data_type, a.codes.0, (m, k), stride, tile, swizzle);
        }
        // Blocks of 64 columns as a dimension of their own: a box of several leaves them one after another.
        let block = if a.blocked { m * stride } else { CHUNK_K as u64 * 2 };
        TensorMap {
            data_type,
            address: a.codes.0,
            dims: vec![CHUNK_K as u64, m, k / CHUNK_K as u64],
            strides: vec![stride, block],
            box_dims: vec![CHUNK_K as u32, box_rows, self.blocks_per_stage],
            element_strides: vec![1; 3],
            interleave: Interleave::None,
            swizzle,
            l2_promotion: L2Promotion::B256,
            out_of_bounds: OutOfBounds::Zero,
            im2col: None,
        }
    }

    /// See [`Fused::spec_of`].
    pub(crate) fn launch_part(
        &self,
        kernel: &Fused<'_>,
        args: &FusedArgs,
        features: Range<usize>,
    ) -> Result<LaunchSpec, Error> {
        let ((m, n, k), variant) = (args.size, &kernel.variant);
        let count = features.len();
        let tile = self.features() as usize;
        if count == 0 || features.end > n || !features.start.is_multiple_of(CHUNK_FEATURES) {
            return RULES.refuse("a range of features begins at a multiple of 32 and ends within N");
        }
        if !count.is_multiple_of(tile) {
            return RULES.refuse("a range of features has whole tiles");
        }
        if variant.grouped || variant.scheduler != Scheduler::Grid || !variant.aligned {
            return RULES
                .refuse("a range of features is for one problem on the grid scheduler, rows of C aligned");
        }
        if variant.products != Products::Both {
            return RULES.refuse("a range of features is for both products in one launch");
        }
        if let Out::Nvfp4 { .. } = variant.out {
            return RULES.refuse("a range of features is for a C of floats");
        }
        let grid = self.grid(kernel, &FusedArgs { size: (m, count, k), ..*args })?;
        let chunks = features.start / CHUNK_FEATURES * k.div_ceil(CHUNK_K);
        let start = features.start as u64;
        let part = FusedArgs {
            weights: match args.weights {
                Weights::Pack(pack) => Weights::Pack(pack.offset((chunks * CHUNK_BYTES) as u64)),
                rows @ Weights::Rows(_) => rows,
            },
            output: Output {
                c: args.output.c.offset(variant.out.row_bytes(features.start) as u64),
                bias: args.output.bias.map(|bias| bias.offset(start * 4)),
                ..args.output
            },
            ..*args
        };
        self.launch_of(kernel, &part, grid)
    }

    fn launch_of(&self, kernel: &Fused<'_>, args: &FusedArgs, grid: [u32; 3]) -> Result<LaunchSpec, Error> {
        self.check_memory(kernel, args)?;
        let ((_, n, k), variant) = (args.size, &kernel.variant);
        let blocks = k.div_ceil(CHUNK_K);
        let map = kernel.device.tensor_map(&self.tensor_map(variant, &args.a))?;
        let list = args.sizes(args.pack(Args::new().tensor_map(map)), blocks);
        let mut list = args.group_rows(args.outputs(list, variant)?)?;
        if args.groups.is_some() {
            let chunks = n.div_ceil(variant.chunk_features() as usize) * blocks;
            list = list.u64((chunks * CHUNK_BYTES) as u64);
        }
        if variant.scheduler == Scheduler::StreamK {
            list = list.ptr(args.workspace);
        }
        if variant.products.apart() {
            list = list.ptr(args.gate_sums);
        }
        Ok(kernel.launch(grid, self.threads()).cluster([self.cluster(), 1, 1]).args(list))
    }
}
