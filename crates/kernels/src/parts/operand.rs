//! A matrix as Blackwell's kernels take it, on the host, in device memory and on its way to shared memory: codes row by
//! row as a checkpoint has them, scales in 128x4 atoms, or 16-bit elements. Nothing is packed in advance.

use dualgemm_device::{Args, Device, DevicePtr};
use dualgemm_formats::{FloatMatrix, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::Error as OperandError;
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{Swizzle, TensorDataType, TensorMap};

pub use super::format::{ATOM_BYTES, ATOM_ROWS, Format, Formats, STEP_K, StagedOperand};
use super::format::{ATOM_LINES, LINES_BYTES, atom_k};
use super::groups::most_tiles;
use super::rows::{Output, Variant};
use super::tiles::GroupArgs;
use crate::Error;

/// A matrix in device memory, `[rows, k]`.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    /// What it holds.
    pub format: Format,
    /// Rows.
    pub rows: usize,
    /// Elements of a row, a multiple of 16, and of the format's blocks.
    pub k: usize,
    /// Codes or elements: `pitch` bytes from row to row; the address a multiple of 16.
    pub codes: DevicePtr,
    /// Bytes from one row to the next: at least those of its elements, a multiple of 16.
    pub pitch: usize,
    /// Scales in [`ScaleLayout::Sf128x4`], padding zero; the address a multiple of 16. Not looked at without scales.
    pub scales: DevicePtr,
    /// Atoms of scales along the rows: one per 128 rows, of grouped problems for each group by itself.
    pub atoms: usize,
}

/// What one launch of a fused kernel reads and writes.
#[derive(Debug, Clone, Copy)]
pub struct FusedArgs {
    /// A, `[m, k]`.
    pub a: Operand,
    /// B1, `[n, k]`, or `[groups, n, k]`; or the matrix of a linear layer.
    pub gate: Operand,
    /// B2, as B1; of a linear layer the same matrix.
    pub up: Operand,
    /// C and what belongs to it.
    pub output: Output,
    /// The groups of a grouped problem; gate and up are then those of all groups behind each other.
    pub groups: Option<GroupArgs>,
}

impl Operand {
    /// Copies a matrix to the device, its scales brought into 128x4 order.
    ///
    /// # Errors
    /// If the device has no room.
    pub fn upload(device: &dyn Device, matrix: &QuantizedMatrix<'_>) -> Result<Self, Error> {
        Self::upload_groups(device, &[matrix])
    }

    /// Copies matrices of one format and K to the device, behind each other.
    ///
    /// # Errors
    /// If the list is empty, formats or K differ, or the device has no room.
    pub fn upload_groups(device: &dyn Device, groups: &[&QuantizedMatrix<'_>]) -> Result<Self, Error> {
        let [first, ..] = groups else {
            let (found, expected) = ("no matrix".into(), "one at least".into());
            return Err(OperandError::Operand { tensor: "the groups".into(), found, expected }.into());
        };
        let (format, k) = (first.format(), first.k());
        let pitch = (k / 2).next_multiple_of(16);
        let (mut codes, mut scales, mut rows, mut atoms) = (Vec::new(), Vec::new(), 0, 0);
        for matrix in groups {
            if (matrix.format(), matrix.k()) != (format, k) {
                let found = format!("{} [{}, {}]", matrix.format(), matrix.rows(), matrix.k());
                let expected = format!("{format} with {k} elements a row, as {} is", first.name());
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
        let (codes, scales) = (copy(device, &codes)?, copy(device, &scales)?);
        Ok(Self { format: Format::Block(format), rows, k, codes, pitch, scales, atoms })
    }

    /// Copies A in f16 or bf16 to the device, or the rows of every group behind each other.
    ///
    /// # Errors
    /// If it is f32, or the device has no room.
    pub fn upload_floats(device: &dyn Device, matrix: &FloatMatrix<'_>) -> Result<Self, Error> {
        let (rows, k) = (matrix.rows(), matrix.cols());
        let pitch = (2 * k).next_multiple_of(16);
        let padded = |row: Vec<u8>| row.into_iter().chain(std::iter::repeat(0)).take(pitch);
        let (format, bytes): (_, Vec<u8>) = match matrix {
            FloatMatrix::F32(_) => {
                let (found, expected) = ("f32".into(), "f16 or bf16".into());
                return Err(OperandError::Operand { tensor: "A".into(), found, expected }.into());
            }
            FloatMatrix::F16(a) => {
                let row = |r| a.row(r).iter().flat_map(|x| x.to_le_bytes()).collect();
                (HalfFormat::F16, (0..rows).map(row).flat_map(padded).collect())
            }
            FloatMatrix::Bf16(a) => {
                let row = |r| a.row(r).iter().flat_map(|x| x.to_le_bytes()).collect();
                (HalfFormat::Bf16, (0..rows).map(row).flat_map(padded).collect())
            }
        };
        let (codes, scales) = (copy(device, &bytes)?, DevicePtr::NULL);
        Ok(Self { format: Format::Half(format), rows, k, codes, pitch, scales, atoms: 0 })
    }

    /// The rows from `first` on, a multiple of 128; all of them if there are no more.
    fn rows_from(self, first: usize) -> Self {
        let atoms = first / ATOM_ROWS as usize;
        let Format::Block(format) = self.format else { return self };
        if first >= self.rows || atoms >= self.atoms {
            return self;
        }
        let atom_row = self.k.div_ceil(atom_k(format) as usize) * ATOM_BYTES as usize;
        Self {
            rows: self.rows - first,
            codes: self.codes.offset((first * self.pitch) as u64),
            scales: self.scales.offset((atoms * atom_row) as u64),
            atoms: self.atoms - atoms,
            ..self
        }
    }

    /// Gives the memory back.
    ///
    /// # Errors
    /// If it belongs to another device.
    pub fn free(self, device: &dyn Device) -> Result<(), Error> {
        device.free(self.codes)?;
        match self.format {
            Format::Block(_) => Ok(device.free(self.scales)?),
            Format::Half(_) => Ok(()),
        }
    }

    /// The tensor maps of codes and scales, or of the elements.
    fn maps(&self, part: StagedOperand) -> (TensorMap, Option<TensorMap>) {
        let (data_type, columns) = match self.format {
            Format::Block(_) => (TensorDataType::U8, self.k / 2),
            Format::Half(_) => (TensorDataType::U16, self.k),
        };
        let codes = TensorMap::matrix(
            data_type,
            self.codes.0,
            (self.rows as u64, columns as u64),
            self.pitch as u64,
            (part.box_rows(), part.box_columns()),
            part.swizzle(),
        );
        let Format::Block(format) = self.format else { return (codes, None) };
        let (along_k, bytes) = (self.k.div_ceil(atom_k(format) as usize) as u64, u64::from(ATOM_BYTES));
        // Rows of 8-byte words: all atoms along K, or one atom each where boxes have a part of an atom's lines.
        let (rows, row_bytes, boxed) = if part.lines < ATOM_LINES {
            (self.atoms as u64 * along_k, bytes, (part.along_k(), LINES_BYTES / 8))
        } else {
            (self.atoms as u64, along_k * bytes, (part.atoms, part.atom_bytes() / 8))
        };
        let scales = TensorMap::matrix(
            TensorDataType::U64,
            self.scales.0,
            (rows, row_bytes / 8),
            row_bytes,
            boxed,
            Swizzle::None,
        );
        (codes, Some(scales))
    }
}

fn copy(device: &dyn Device, bytes: &[u8]) -> Result<DevicePtr, Error> {
    let ptr = device.alloc(bytes.len())?;
    device.copy_to(ptr, bytes)?;
    Ok(ptr)
}

impl FusedArgs {
    /// M and K.
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.a.rows, self.a.k)
    }

    /// Tiles of `tokens` at most, with so many along the features.
    pub(crate) fn tiles(&self, tokens: u32, feature_tiles: usize) -> usize {
        most_tiles(self.a.rows, tokens, self.groups.map(|groups| groups.count)) * feature_tiles
    }

    /// Refuses operands that do not belong together, for a kernel of `n` features and these formats.
    ///
    /// # Errors
    /// Names the operand.
    pub(crate) fn check(&self, n: usize, formats: Formats, variant: &Variant) -> Result<(), Error> {
        let refuse = |tensor: &str, found: String, expected: String| {
            Err(OperandError::Operand { tensor: tensor.into(), found, expected }.into())
        };
        if self.groups.is_some() != variant.grouped {
            let (found, expected) = ("groups or none".into(), "what the kernel was made for".into());
            return refuse("the groups", found, expected);
        }
        let operands = [("A", &self.a), ("gate", &self.gate), ("up", &self.up)];
        let weights = Format::Block(formats.weights());
        for ((tensor, operand), format) in operands.into_iter().zip([formats.a(), weights, weights]) {
            if operand.format != format {
                return refuse(
                    tensor,
                    operand.format.to_string(),
                    format!("{format}, for which the kernel is"),
                );
            }
        }
        let ((m, k), block) = (self.shape(), formats.weights().block_len());
        if m == 0 || k == 0 || !k.is_multiple_of(block) || u32::try_from(m.max(k)).is_err() {
            return refuse(
                "A",
                format!("[{m}, {k}]"),
                format!("[M, K] of at least one row, K a multiple of {block}"),
            );
        }
        let rows = n * self.groups.map_or(1, |groups| groups.count);
        for (tensor, weight) in [("gate", &self.gate), ("up", &self.up)] {
            if (weight.rows, weight.k) != (rows, k) {
                let found = format!("[{}, {}]", weight.rows, weight.k);
                return refuse(tensor, found, format!("[{rows}, {k}], for which the kernel and A are"));
            }
        }
        for (tensor, operand) in operands {
            let row = operand.format.row_bytes(k);
            if operand.pitch < row || !operand.pitch.is_multiple_of(16) {
                let expected = format!("a multiple of 16 bytes, at least {row}");
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
        parts: [StagedOperand; 3],
        n: usize,
        variant: &Variant,
    ) -> Result<Args, Error> {
        let (mut args, mut of_scales) = (Args::new(), Vec::with_capacity(3));
        let gate_features = variant.gate_features(n);
        let up = if variant.linear { self.up.rows_from(gate_features) } else { self.up };
        for (operand, part) in [&self.a, &self.gate, &up].into_iter().zip(parts) {
            let (codes, scales) = operand.maps(part);
            args = args.tensor_map(device.tensor_map(&codes)?);
            of_scales.extend(scales);
        }
        for map in &of_scales {
            args = args.tensor_map(device.tensor_map(map)?);
        }
        let (m, k) = self.shape();
        let mut args = args.u32(m as u32).u32(gate_features as u32).u32(k as u32);
        if variant.linear {
            args = args.u32(n as u32);
        }
        let args = self.output.args(args, variant, self.groups.map(|groups| groups.alphas))?;
        self.groups.map_or(Ok(args.clone()), |groups| groups.args(args))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperandIndex {
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
    /// None of A in 16 bits.
    scales: [Option<TensorMapParam>; 3],
}

impl Maps {
    /// Declares them.
    pub fn declare(k: &mut Kernel, formats: Formats) -> Self {
        let codes = ["a_codes", "gate_codes", "up_codes"].map(|name| k.tensor_map(name));
        let of_a = matches!(formats.a(), Format::Block(_)).then(|| k.tensor_map("a_scales"));
        let [gate, up] = ["gate_scales", "up_scales"].map(|name| k.tensor_map(name));
        Self { codes, scales: [of_a, Some(gate), Some(up)] }
    }

    /// Fetches the maps of an operand ahead of their first use.
    pub fn prefetch(&self, k: &mut Kernel, which: OperandIndex) {
        let scales = self.scales[which as usize].as_ref();
        for map in [&self.codes[which as usize]].into_iter().chain(scales) {
            let map = k.tensor_map_address(map);
            k.prefetch_tensor_map(map);
        }
    }

    /// Loads stage `stage` of an operand: its codes or elements from row `row` on to the first of `to`, its scales from
    /// atom `atom` on to the second; bytes are completed on `full`, of codes on the first and of scales on the second.
    pub fn load(
        &self,
        k: &mut Kernel,
        (which, part): (OperandIndex, StagedOperand),
        stage: Reg<U32>,
        to: [Addr<Shared>; 2],
        (row, atom): (Reg<U32>, Reg<U32>),
        (full, options): ([Addr<Shared>; 2], &TmaOptions),
    ) {
        let first = k.eval(stage * (part.box_columns() * part.boxes()));
        for panel in 0..part.boxes() {
            let column = if panel == 0 { first } else { k.eval(first + panel * part.box_columns()) };
            let to = to[0].at(panel * part.code_bytes() / part.boxes());
            self.load_codes(k, which, to, (column, row), (full[0], options));
        }
        // Scale maps count in 8 bytes.
        let word = k.eval(stage * (part.atom_bytes() / 8));
        self.load_scales(k, which, to[1], (word, atom), (full[1], options));
    }

    /// Loads the box of codes or elements at `(column, row)`.
    pub fn load_codes(
        &self,
        k: &mut Kernel,
        which: OperandIndex,
        to: Addr<Shared>,
        (column, row): (Reg<U32>, Reg<U32>),
        (full, options): (Addr<Shared>, &TmaOptions),
    ) {
        let map = k.tensor_map_address(&self.codes[which as usize]);
        let place = [column.cast::<S32>().into(), row.cast::<S32>().into()];
        k.tensor_load(to, map, &place, full, options);
    }

    /// Loads the box of scales at `(word, row)`, if there are any.
    pub fn load_scales(
        &self,
        k: &mut Kernel,
        which: OperandIndex,
        to: Addr<Shared>,
        (word, row): (Reg<U32>, Reg<U32>),
        (full, options): (Addr<Shared>, &TmaOptions),
    ) {
        let Some(map) = &self.scales[which as usize] else { return };
        let map = k.tensor_map_address(map);
        let place = [word.cast::<S32>().into(), row.cast::<S32>().into()];
        k.tensor_load(to, map, &place, full, options);
    }
}
