//! The host side of the fused Hopper kernel, the same on a simulated and on a real device.
//!
//! [`Variant`] and [`Config`] → [`Fused`], loaded once; [`FusedArgs`], plain device addresses → [`LaunchSpec`]. Making a
//! launch allocates no device memory and waits for nothing, so it can be recorded. [`operands`](super::operands) uploads
//! what tests and benchmarks launch on.

use std::ops::Range;

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};
use dualgemm_gemm::Error as OperandError;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_ptx::layout::{Interleave, L2Promotion, OutOfBounds, TensorDataType, TensorMap, TensorSwizzle};

use super::config::{Config, RULES};
use super::exchange::FLAG_BYTES;
use super::fused;
use super::pack::{CHUNK_BYTES, CHUNK_FEATURES, CHUNK_K};
use super::variant::{Out, Products, Scheduler, Variant};
use crate::Error;
use crate::limits::Valid;
use crate::parts::groups::Groups;
use crate::parts::loaded::Loaded;
use crate::parts::rows::{Output, check_address};
use crate::parts::tiles::GroupArgs;

/// CTAs along the second and the third dimension of a grid.
const GRID_YZ: Valid = Valid::range(1, 65535);

/// The operands of one launch, as device addresses. Those that the variant does not use are not looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedArgs {
    /// A, `[m, k]` in the variant's type, rows `lda` elements apart, on a multiple of 16 bytes.
    pub a: DevicePtr,
    /// Elements from one row of A to the next, a multiple of 8; at least `k`.
    pub lda: usize,
    /// Bytes of a [`Pack`](super::pack::Pack), on a multiple of 16.
    pub pack: DevicePtr,
    /// C. Alpha is [`Pack::alpha`](super::pack::Pack::alpha) times whatever belongs to A and the epilogue.
    pub output: Output,
    /// Rows of A; of all groups together.
    pub m: usize,
    /// Features.
    pub n: usize,
    /// Elements that are summed, a multiple of 16.
    pub k: usize,
    /// The groups of a grouped problem: experts, or entries of a batch. Their packs lie behind each other.
    pub groups: Option<GroupArgs>,
    /// [`Fused::gate_sums_bytes`] bytes, of products apart: the launch of gate writes them, that of up reads them. Both
    /// take the same arguments but for `pack`.
    pub gate_sums: DevicePtr,
    /// [`Fused::workspace_bytes`] bytes, zero before the first launch; launches that may run at once need their own.
    pub workspace: DevicePtr,
}

impl FusedArgs {
    /// One problem on a dense A.
    pub fn new(a: DevicePtr, pack: DevicePtr, output: Output, (m, n, k): (usize, usize, usize)) -> Self {
        let null = DevicePtr::NULL;
        Self { a, lda: k, pack, output, m, n, k, groups: None, gate_sums: null, workspace: null }
    }
}

/// The fused kernel, loaded on a device.
#[derive(Clone)]
pub struct Fused<'d> {
    loaded: Loaded<'d>,
    config: Config,
    variant: Variant,
}

impl std::fmt::Debug for Fused<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.config.name(), self.variant.name())
    }
}

fn refuse(tensor: &str, found: impl std::fmt::Display, expected: &str) -> Error {
    let (found, expected) = (found.to_string(), expected.to_string());
    OperandError::Operand { tensor: tensor.into(), found, expected }.into()
}

impl<'d> Fused<'d> {
    /// Generates and loads the kernel.
    ///
    /// # Errors
    /// If the configuration does not fit, the variant contradicts itself, or the device refuses the text.
    pub fn new(device: &'d dyn Device, config: Config, variant: &Variant) -> Result<Self, Error> {
        let memory = (fused::ENTRY, config.layout(variant)?.smem.bytes());
        let loaded = Loaded::new(device, &fused::generate(&config, variant)?, memory, &variant.rows())?;
        Ok(Self { loaded, config, variant: variant.clone() })
    }

    /// Tile and pipeline.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What it computes.
    pub fn variant(&self) -> &Variant {
        &self.variant
    }

    /// CTAs that the card holds at once.
    fn resident(&self) -> u32 {
        self.loaded.device.info().sm_count * self.config.ctas_per_sm
    }

    /// Bytes of [`FusedArgs::workspace`]; 0 for all schedulers but stream-K.
    pub fn workspace_bytes(&self) -> usize {
        match self.variant.scheduler {
            Scheduler::Grid | Scheduler::Persistent => 0,
            Scheduler::StreamK => FLAG_BYTES as usize + self.resident() as usize * self.config.tile_bytes(),
        }
    }

    /// Bytes of [`FusedArgs::gate_sums`] for `m` rows and `n` features: f32, whole tiles; 0 if both products are one
    /// launch.
    pub fn gate_sums_bytes(&self, m: usize, n: usize) -> usize {
        match self.variant.products {
            Products::Both | Products::Linear => 0,
            Products::Gate | Products::Up => {
                let [tokens, features] = self.tiles(m, n);
                tokens as usize * features as usize * self.config.tile_bytes()
            }
        }
    }

    /// Tiles along the tokens and along the features.
    fn tiles(&self, m: usize, n: usize) -> [u32; 2] {
        self.config.tiles(m, n.div_ceil(self.variant.products.features_per_thread() as usize))
    }

    fn check(&self, args: &FusedArgs) -> Result<(), Error> {
        let FusedArgs { m, n, k, lda, .. } = *args;
        for (dim, value) in [("M", m), ("N", n), ("K", k)] {
            if value == 0 {
                return Err(OperandError::ZeroDim { dim }.into());
            }
            if value > i32::MAX as usize {
                return Err(refuse(dim, value, "at most 2147483647"));
            }
        }
        if !k.is_multiple_of(16) {
            return Err(refuse("K", k, "a multiple of 16"));
        }
        self.loaded.rows.check(n)?;
        if self.variant.whole_blocks && !k.is_multiple_of(CHUNK_K) {
            return Err(refuse("K", k, &format!("a multiple of {CHUNK_K}, which the kernel was made for")));
        }
        if lda < k || !lda.is_multiple_of(8) {
            return Err(refuse("A's row stride", lda, &format!("a multiple of 8 elements, at least {k}")));
        }
        check_address("A", args.a, 16)?;
        check_address("pack", args.pack, 16)?;
        if self.variant.products.apart() {
            check_address("gate's sums", args.gate_sums, 16)?;
        }
        if self.variant.scheduler == Scheduler::StreamK {
            check_address("workspace", args.workspace, 16)?;
            RULES.check("CTAs that share tiles", self.resident(), Valid::range(1, FLAG_BYTES / 4))?;
        }
        Ok(())
    }

    /// CTAs of a launch, in x, y, z.
    fn grid(&self, args: &FusedArgs) -> Result<[u32; 3], Error> {
        let [token_tiles, feature_tiles] = self.tiles(args.m, args.n);
        // Of ragged groups each adds one tile at most.
        let ragged = args.groups.map_or(0, |groups| groups.count.min(args.m) as u64);
        let tiles = match ragged {
            0 => u64::from(token_tiles) * u64::from(feature_tiles),
            _ => (args.m as u64 / u64::from(self.config.tokens) + ragged) * u64::from(feature_tiles),
        };
        let stages = args.k.div_ceil(CHUNK_K).div_ceil(self.config.blocks_per_stage as usize) as u64;
        // The kernel counts them in 32 bits.
        RULES.check("stages of all tiles", tiles.saturating_mul(stages), Valid::range(1, i32::MAX as u32))?;
        let resident = u64::from(self.resident());
        Ok(match self.variant.scheduler {
            Scheduler::Grid if self.variant.grouped => [tiles as u32, 1, 1],
            Scheduler::Grid => {
                let panels = token_tiles.div_ceil(self.config.panel());
                RULES.check("tiles along the features", feature_tiles, GRID_YZ)?;
                RULES.check("panels of 2048 tokens", panels, GRID_YZ)?;
                [token_tiles.min(self.config.panel()) * self.config.k_split, feature_tiles, panels]
            }
            Scheduler::Persistent => [tiles.min(resident) as u32, 1, 1],
            Scheduler::StreamK => [(tiles * stages).min(resident) as u32, 1, 1],
        })
    }

    fn tensor_map(&self, args: &FusedArgs) -> TensorMap {
        let (m, k, stride) = (args.m as u64, args.k as u64, args.lda as u64 * 2);
        let swizzle = TensorSwizzle::B128;
        let data_type = match self.variant.compute {
            HalfFormat::F16 => TensorDataType::F16,
            HalfFormat::Bf16 => TensorDataType::Bf16,
        };
        let box_rows = self.config.tokens;
        if !(self.variant.whole_blocks && self.config.whole_stage_loads()) {
            let tile = (box_rows, CHUNK_K as u32);
            return TensorMap::matrix(data_type, args.a.0, (m, k), stride, tile, swizzle);
        }
        // Blocks of 64 columns as a dimension of their own: a box of several leaves them one after another.
        TensorMap {
            data_type,
            address: args.a.0,
            dims: vec![CHUNK_K as u64, m, k / CHUNK_K as u64],
            strides: vec![stride, CHUNK_K as u64 * 2],
            box_dims: vec![CHUNK_K as u32, box_rows, self.config.blocks_per_stage],
            element_strides: vec![1; 3],
            interleave: Interleave::None,
            swizzle,
            l2_promotion: L2Promotion::B256,
            out_of_bounds: OutOfBounds::Zero,
            im2col: None,
        }
    }

    /// The launch on these operands; it can be repeated and recorded. With [`LaunchSpec::programmatic`] it may start
    /// before the launch ahead of it has ended: it reads weights and biases at once, everything else after that end.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        self.check(args)?;
        self.launch_of(args, self.grid(args)?)
    }

    /// The launch on some of the features, whole tiles of this configuration from a multiple of 32 on: launches of several
    /// configurations can share a problem, so that none leaves its last wave of CTAs half empty.
    ///
    /// # Errors
    /// As [`spec`](Self::spec), and if the range or the variant does not allow it.
    pub fn spec_of(&self, args: &FusedArgs, features: Range<usize>) -> Result<LaunchSpec, Error> {
        self.check(args)?;
        let rule = |rule| Err(Error::Combination { kernel: "sm90a fused", rule });
        let count = features.len();
        let tile = self.config.features() as usize;
        if count == 0 || features.end > args.n || !features.start.is_multiple_of(CHUNK_FEATURES) {
            return rule("a range of features begins at a multiple of 32 and ends within N");
        }
        if !count.is_multiple_of(tile) {
            return rule("a range of features has whole tiles");
        }
        if self.variant.grouped || self.variant.scheduler != Scheduler::Grid || !self.variant.aligned {
            return rule("a range of features is for one problem on the grid scheduler, rows of C aligned");
        }
        if self.variant.products != Products::Both {
            return rule("a range of features is for both products in one launch");
        }
        if let Out::Nvfp4 { .. } = self.variant.out {
            return rule("a range of features is for a C of floats");
        }
        let grid = self.grid(&FusedArgs { n: count, ..*args })?;
        let chunks = features.start / CHUNK_FEATURES * args.k.div_ceil(CHUNK_K);
        let start = features.start as u64;
        let part = FusedArgs {
            pack: args.pack.offset((chunks * CHUNK_BYTES) as u64),
            output: Output {
                c: args.output.c.offset(self.variant.out.row_bytes(features.start) as u64),
                bias: args.output.bias.map(|bias| bias.offset(start * 4)),
                ..args.output
            },
            ..*args
        };
        self.launch_of(&part, grid)
    }

    fn launch_of(&self, args: &FusedArgs, grid: [u32; 3]) -> Result<LaunchSpec, Error> {
        let map = self.loaded.device.tensor_map(&self.tensor_map(args))?;
        let sizes = [args.m, args.n, args.k.div_ceil(CHUNK_K)].map(|size| size as u32);
        let list = sizes.into_iter().fold(Args::new().tensor_map(map).ptr(args.pack), Args::u32);
        let alphas = args.groups.map(|groups| groups.alphas);
        let list = args.output.args(list, &self.loaded.rows, alphas)?;
        let rows = args.groups.map(|groups| Groups { count: groups.count, rows: groups.rows });
        let mut list = Groups::args_if(rows.as_ref(), self.variant.grouped, "A", list)?;
        if rows.is_some() {
            let chunks = args.n.div_ceil(self.variant.chunk_features() as usize) * args.k.div_ceil(CHUNK_K);
            list = list.u64((chunks * CHUNK_BYTES) as u64);
        }
        if self.variant.scheduler == Scheduler::StreamK {
            list = list.ptr(args.workspace);
        }
        if self.variant.products.apart() {
            list = list.ptr(args.gate_sums);
        }
        let spec = self.loaded.launch(grid, self.config.threads());
        Ok(spec.cluster([self.config.k_split, 1, 1]).args(list))
    }

    /// Starts the kernel.
    ///
    /// # Safety
    /// The addresses are those of operands of the sizes that `args` says, in the sense of [`Device::launch_on`].
    pub unsafe fn launch(&self, args: &FusedArgs) -> Result<(), Error> {
        let spec = self.spec(args)?;
        // SAFETY: the kernel stays within its operands, for which the caller vouches.
        Ok(unsafe { self.loaded.device.launch(&spec) }?)
    }
}
