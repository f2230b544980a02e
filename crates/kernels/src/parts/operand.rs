//! An nvfp4 matrix as Blackwell's kernels take it, on the host, in device memory and on its way to shared memory: codes
//! row by row as a checkpoint has them, scales in 128x4 atoms. Nothing is packed in advance.

use dualgemm_device::{Args, Device, DevicePtr};
use dualgemm_formats::{BlockFormat, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::Error as OperandError;
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{Swizzle, TensorDataType, TensorMap};

use super::rows::{Output, Variant};
use super::tiles::GroupArgs;
use crate::Error;

/// Rows of a scale atom.
pub const ATOM_ROWS: u32 = 128;
/// K elements of a scale atom: those of one matrix instruction.
pub const STEP_K: u32 = 64;
/// Bytes of a scale atom.
pub const ATOM_BYTES: u32 = 512;

/// An nvfp4 matrix in device memory, `[rows, k]`.
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
    /// Atoms of scales along the rows: one per 128 rows, of grouped problems for each group by itself.
    pub atoms: usize,
}

/// What one launch of a fused kernel reads and writes.
#[derive(Debug, Clone, Copy)]
pub struct FusedArgs {
    /// A, `[m, k]`.
    pub a: Operand,
    /// B1, `[n, k]`, or `[groups, n, k]`.
    pub gate: Operand,
    /// B2, as B1.
    pub up: Operand,
    /// C and what belongs to it.
    pub output: Output,
    /// The groups of a grouped problem; gate and up are then those of all groups behind each other.
    pub groups: Option<GroupArgs>,
}

/// What one CTA keeps of an operand in a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boxed {
    /// Rows of codes.
    pub rows: u32,
    /// Atoms of scales along the rows.
    pub atoms: u32,
    /// K elements: 128 or 256.
    pub k: u32,
}

impl Boxed {
    /// Bytes of a row of codes.
    pub const fn row_bytes(self) -> u32 {
        self.k / 2
    }

    /// Bytes of scales of one atom's rows.
    pub const fn atom_bytes(self) -> u32 {
        self.k / STEP_K * ATOM_BYTES
    }

    /// How its codes are permuted in shared memory.
    pub const fn swizzle(self) -> Swizzle {
        if self.k == 256 { Swizzle::B128 } else { Swizzle::B64 }
    }

    /// Bytes of codes.
    pub const fn code_bytes(self) -> u32 {
        self.rows * self.row_bytes()
    }

    /// Bytes of scales.
    pub const fn scale_bytes(self) -> u32 {
        self.atoms * self.atom_bytes()
    }
}

impl Operand {
    /// Copies a matrix to the device, its scales brought into 128x4 order.
    ///
    /// # Errors
    /// If it is not nvfp4, or the device has no room.
    pub fn upload(device: &dyn Device, matrix: &QuantizedMatrix<'_>) -> Result<Self, Error> {
        Self::upload_groups(device, &[matrix])
    }

    /// Copies matrices of one K to the device, behind each other.
    ///
    /// # Errors
    /// If one is not nvfp4 or has another K, there is none, or the device has no room.
    pub fn upload_groups(device: &dyn Device, groups: &[&QuantizedMatrix<'_>]) -> Result<Self, Error> {
        let k = groups.first().map_or(0, |first| first.k());
        let pitch = (k / 2).next_multiple_of(16);
        let (mut codes, mut scales, mut rows, mut atoms) = (Vec::new(), Vec::new(), 0, 0);
        for matrix in groups {
            if matrix.format() != BlockFormat::Nvfp4 || matrix.k() != k || k == 0 {
                let found = format!("{} [{}, {}]", matrix.format(), matrix.rows(), matrix.k());
                let expected = format!("nvfp4 with {} elements a row", k.max(16));
                return Err(OperandError::Operand { tensor: matrix.name().into(), found, expected }.into());
            }
            for row in 0..matrix.rows() {
                codes.extend_from_slice(matrix.row_codes(row));
                codes.resize(codes.len().next_multiple_of(pitch), 0);
            }
            let layout = matrix.scale_layout();
            scales.extend(layout.convert(
                matrix.scales(),
                ScaleLayout::Sf128x4,
                matrix.rows(),
                matrix.blocks(),
            ));
            rows += matrix.rows();
            atoms += matrix.rows().div_ceil(ATOM_ROWS as usize);
        }
        let upload = |bytes: &[u8]| -> Result<DevicePtr, Error> {
            let ptr = device.alloc(bytes.len())?;
            device.copy_to(ptr, bytes)?;
            Ok(ptr)
        };
        Ok(Self { rows, k, codes: upload(&codes)?, pitch, scales: upload(&scales)?, atoms })
    }

    /// Gives the memory back.
    ///
    /// # Errors
    /// If it belongs to another device.
    pub fn free(self, device: &dyn Device) -> Result<(), Error> {
        device.free(self.codes)?;
        Ok(device.free(self.scales)?)
    }

    /// The tensor maps of codes and scales.
    fn maps(&self, part: Boxed) -> [TensorMap; 2] {
        let codes = TensorMap::matrix(
            TensorDataType::U8,
            self.codes.0,
            (self.rows as u64, self.k as u64 / 2),
            self.pitch as u64,
            (part.rows, part.row_bytes()),
            part.swizzle(),
        );
        let row_bytes = self.k.div_ceil(STEP_K as usize) as u64 * u64::from(ATOM_BYTES);
        let scales = TensorMap::matrix(
            TensorDataType::U64,
            self.scales.0,
            (self.atoms as u64, row_bytes / 8),
            row_bytes,
            (part.atoms, part.atom_bytes() / 8),
            Swizzle::None,
        );
        [codes, scales]
    }
}

impl FusedArgs {
    /// M and K.
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.a.rows, self.a.k)
    }

    /// How many groups there are at most that a tile is counted for.
    pub(crate) fn group_count(&self) -> usize {
        self.groups.map_or(1, |groups| groups.count)
    }

    /// Refuses operands that do not belong together, for a kernel of `n` features.
    ///
    /// # Errors
    /// Names the operand.
    pub(crate) fn check(&self, n: usize, variant: &Variant) -> Result<(), Error> {
        let refuse = |tensor: &str, found: String, expected: String| {
            Err(OperandError::Operand { tensor: tensor.into(), found, expected }.into())
        };
        if self.groups.is_some() != variant.grouped {
            let (found, expected) = ("groups or none".into(), "what the kernel was made for".into());
            return refuse("the groups", found, expected);
        }
        let (m, k) = self.shape();
        if m == 0 || k == 0 || !k.is_multiple_of(16) || u32::try_from(m.max(k)).is_err() {
            return refuse(
                "A",
                format!("[{m}, {k}]"),
                "[M, K] of at least one row, K a multiple of 16".into(),
            );
        }
        let rows = n * self.group_count();
        for (tensor, weight) in [("gate", &self.gate), ("up", &self.up)] {
            if (weight.rows, weight.k) != (rows, k) {
                let found = format!("[{}, {}]", weight.rows, weight.k);
                return refuse(tensor, found, format!("[{rows}, {k}], for which the kernel and A are"));
            }
        }
        for (tensor, operand) in [("A", &self.a), ("gate", &self.gate), ("up", &self.up)] {
            if operand.pitch < k / 2 || !operand.pitch.is_multiple_of(16) {
                let expected = format!("a multiple of 16 bytes, at least {}", k / 2);
                return refuse(tensor, format!("rows {} bytes apart", operand.pitch), expected);
            }
        }
        Ok(())
    }

    /// The arguments of a kernel that declared [`Maps`], its sizes, [`Rows`](super::rows::Rows) and then
    /// [`Tiles`](super::tiles::Tiles).
    ///
    /// # Errors
    /// If an operand cannot be described to the TMA unit.
    pub(crate) fn args(
        &self,
        device: &dyn Device,
        parts: [Boxed; 3],
        n: usize,
        variant: &Variant,
    ) -> Result<Args, Error> {
        let mut maps = Vec::with_capacity(6);
        for (operand, part) in [&self.a, &self.gate, &self.up].into_iter().zip(parts) {
            for map in operand.maps(part) {
                maps.push(device.tensor_map(&map)?);
            }
        }
        let args = [0, 2, 4, 1, 3, 5].into_iter().fold(Args::new(), |args, i| args.tensor_map(maps[i]));
        let (m, k) = self.shape();
        let args = args.u32(m as u32).u32(n as u32).u32(k as u32);
        let args = self.output.args(args, variant, self.groups.map(|groups| groups.alphas))?;
        self.groups.map_or(Ok(args.clone()), |groups| groups.args(args))
    }
}

/// Which operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    /// A.
    A = 0,
    /// B1.
    Gate = 1,
    /// B2.
    Up = 2,
}

/// The tensor maps of a kernel's three operands, its first parameters.
pub(crate) struct Maps {
    codes: [TensorMapParam; 3],
    scales: [TensorMapParam; 3],
}

impl Maps {
    /// Declares them.
    pub fn declare(k: &mut Kernel) -> Self {
        Self {
            codes: ["a_codes", "gate_codes", "up_codes"].map(|name| k.tensor_map(name)),
            scales: ["a_scales", "gate_scales", "up_scales"].map(|name| k.tensor_map(name)),
        }
    }

    /// Fetches the maps of an operand ahead of their first use.
    pub fn prefetch(&self, k: &mut Kernel, which: Which) {
        for map in [&self.codes[which as usize], &self.scales[which as usize]] {
            let map = k.tensor_map_address(map);
            k.prefetch_tensor_map(map);
        }
    }

    /// Loads stage `stage` of an operand: its codes from row `row` on to the first of `to`, its scales from atom `atom`
    /// on to the second; bytes are completed on `full`.
    pub fn load(
        &self,
        k: &mut Kernel,
        (which, part): (Which, Boxed),
        stage: Reg<U32>,
        to: [Addr<Shared>; 2],
        (row, atom): (Reg<U32>, Reg<U32>),
        (full, options): (Addr<Shared>, &TmaOptions),
    ) {
        let byte = k.mul(stage, part.row_bytes());
        let codes = k.tensor_map_address(&self.codes[which as usize]);
        let place = [byte.cast::<S32>().into(), row.cast::<S32>().into()];
        k.tensor_load(to[0], codes, &place, full, options);
        // Scale maps count in 8 bytes.
        let word = k.mul(stage, part.atom_bytes() / 8);
        let scales = k.tensor_map_address(&self.scales[which as usize]);
        let place = [word.cast::<S32>().into(), atom.cast::<S32>().into()];
        k.tensor_load(to[1], scales, &place, full, options);
    }
}
