//! The host side of the fused sm_100 kernel, the same on a simulated and on a real device.
//!
//! Flow: nvfp4 matrices → [`Operand`]s on the device; [`Config`] → [`Fused`] → launch → C.

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_formats::{BlockFormat, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{Error as OperandError, Program};
use dualgemm_ptx::Target;
use dualgemm_ptx::layout::{TensorDataType, TensorMap, TensorSwizzle};

use super::config::{self, ATOM_ROWS, ATOM_STAGE_BYTES, Config, STAGE_K, STEP_K, THREADS};
use super::fused::{self, Out};
use crate::Error;

/// An nvfp4 matrix in device memory, `[rows, k]`: codes row by row, two per byte, and scales in 128x4 atoms.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    /// Rows.
    pub rows: usize,
    /// Elements of a row, a multiple of 16.
    pub k: usize,
    /// Codes: `pitch` bytes from row to row; the address a multiple of 16.
    pub codes: DevicePtr,
    /// Bytes from one row of codes to the next: at least k/2, a multiple of 16.
    pub pitch: usize,
    /// Scales in [`ScaleLayout::Sf128x4`], padding zero; the address a multiple of 16.
    pub scales: DevicePtr,
}

impl Operand {
    /// Copies a matrix to the device, its scales brought into 128x4 order.
    ///
    /// # Errors
    /// If it is not nvfp4, or the device has no room.
    pub fn upload(device: &dyn Device, matrix: &QuantizedMatrix<'_>) -> Result<Self, Error> {
        if matrix.format() != BlockFormat::Nvfp4 {
            let (found, expected) = (matrix.format().to_string(), "nvfp4".into());
            return Err(OperandError::Operand { tensor: matrix.name().into(), found, expected }.into());
        }
        let (rows, k) = (matrix.rows(), matrix.k());
        let pitch = (k / 2).next_multiple_of(16);
        let mut codes = vec![0; rows * pitch];
        for (row, to) in codes.chunks_exact_mut(pitch).enumerate() {
            to[..k / 2].copy_from_slice(matrix.row_codes(row));
        }
        let scales =
            matrix.scale_layout().convert(matrix.scales(), ScaleLayout::Sf128x4, rows, matrix.blocks());
        let upload = |bytes: &[u8]| -> Result<DevicePtr, Error> {
            let ptr = device.alloc(bytes.len())?;
            device.copy_to(ptr, bytes)?;
            Ok(ptr)
        };
        Ok(Self { rows, k, codes: upload(&codes)?, pitch, scales: upload(&scales)? })
    }

    /// Gives the memory back.
    ///
    /// # Errors
    /// If it belongs to another device.
    pub fn free(self, device: &dyn Device) -> Result<(), Error> {
        device.free(self.codes)?;
        Ok(device.free(self.scales)?)
    }

    /// The tensor maps of codes and scales, for boxes of `rows` rows and `atoms` atoms.
    fn maps(&self, rows: u32, atoms: u32) -> [TensorMap; 2] {
        let codes = TensorMap::matrix(
            TensorDataType::U8,
            self.codes.0,
            (self.rows as u64, self.k as u64 / 2),
            self.pitch as u64,
            (rows, STAGE_K / 2),
            TensorSwizzle::B128,
        );
        let row_bytes = self.k.div_ceil(STEP_K as usize) as u64 * 512;
        let scales = TensorMap::matrix(
            TensorDataType::U64,
            self.scales.0,
            (self.rows.div_ceil(ATOM_ROWS as usize) as u64, row_bytes / 8),
            row_bytes,
            (atoms, ATOM_STAGE_BYTES / 8),
            TensorSwizzle::None,
        );
        [codes, scales]
    }
}

/// What one launch reads and writes.
#[derive(Debug, Clone, Copy)]
pub struct FusedArgs {
    /// A, `[m, k]`.
    pub a: Operand,
    /// B1, `[n, k]`.
    pub gate: Operand,
    /// B2, `[n, k]`.
    pub up: Operand,
    /// C, `[m, n]` row by row.
    pub c: DevicePtr,
    /// What the sums of gate and up are multiplied by: the product of their tensor scales with A's.
    pub alpha: [f32; 2],
}

/// The fused kernel, loaded on a device for one N.
#[derive(Clone, Copy)]
pub struct Fused<'d> {
    device: &'d dyn Device,
    config: Config,
    function: FunctionId,
    n: usize,
    shared: u32,
}

impl<'d> Fused<'d> {
    /// Generates and loads the kernel for `n` features.
    ///
    /// # Errors
    /// If the configuration does not fit, or the device refuses the text.
    pub fn new(
        device: &'d dyn Device,
        config: Config,
        program: &Program,
        out: Out,
        n: usize,
    ) -> Result<Self, Error> {
        let aligned = (n * out.bytes() as usize).is_multiple_of(16);
        let target = match device.info().arch.minor {
            3 => Target::Sm103a,
            _ => Target::Sm100a,
        };
        let ptx = fused::generate(&config, program, out, aligned, target)?.to_string();
        let function = device.function(device.load(&ptx)?, fused::ENTRY)?;
        Ok(Self { device, config, function, n, shared: config.layout()?.smem.bytes() })
    }

    /// The launch on these operands; it can be repeated and recorded.
    ///
    /// # Errors
    /// If the operands do not belong together, or do not fit the configuration.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let FusedArgs { a, gate, up, c, alpha } = args;
        let (m, n, k) = (a.rows, self.n, a.k);
        for (tensor, weight) in [("gate", gate), ("up", up)] {
            if (weight.rows, weight.k) != (n, k) {
                let found = format!("[{}, {}]", weight.rows, weight.k);
                let expected = format!("[{n}, {k}], for which the kernel and A are");
                return Err(OperandError::Operand { tensor: tensor.into(), found, expected }.into());
            }
        }
        let unsupported =
            |rule, value, limit| Err(Error::Unsupported { kernel: "sm100a fused", rule, value, limit });
        let stages = (k as u32).div_ceil(STAGE_K);
        if stages < self.config.split_k {
            return unsupported("CTAs that split K, each at least 256 of it", self.config.split_k, stages);
        }
        if !self.config.tile_tokens().is_multiple_of(32) && m > self.config.tile_tokens() as usize {
            return unsupported("tokens with tiles of less than 32", m as u32, self.config.tile_tokens());
        }
        let (rows, atoms) = (self.config.smem_rows(), self.config.atoms());
        let mut maps = Vec::with_capacity(6);
        for (i, operand) in [a, gate, up].into_iter().enumerate() {
            for map in operand.maps(rows[i], atoms[i]) {
                maps.push(self.device.tensor_map(&map)?);
            }
        }
        // All codes, then all scales.
        let order = [0, 2, 4, 1, 3, 5];
        let args = order.into_iter().fold(Args::new(), |args, i| args.tensor_map(maps[i]));
        let args = args.ptr(*c).u32(m as u32).u32(n as u32).u32(k as u32).f32(alpha[0]).f32(alpha[1]);
        let cluster = self.config.cluster();
        let tiles = config::tiles(&self.config, m, n);
        // A ring is reused for the exchange of sums, so a cluster that splits K takes one tile.
        let resident = self.device.info().sm_count / cluster;
        let clusters = if self.config.split_k > 1 { tiles } else { tiles.min(resident.max(1)) };
        Ok(LaunchSpec::new(self.function, [clusters * cluster, 1, 1], [THREADS, 1, 1])
            .cluster([cluster, 1, 1])
            .dynamic_shared(self.shared)
            .args(args))
    }

    /// Starts the kernel.
    ///
    /// # Errors
    /// As [`spec`](Self::spec), and what the device says of the launch.
    pub fn launch(&self, args: &FusedArgs) -> Result<(), Error> {
        Ok(self.device.launch(&self.spec(args)?)?)
    }
}
