//! A matrix as kernels take it in device memory, and on its way to shared memory where nothing is packed in advance: codes
//! row by row as a checkpoint has them, with block scales, or elements of 16 or 8 bits.

use dualgemm_device::{Args, DevicePtr, LaunchSpec};
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{Swizzle, TensorDataType, TensorMap};

pub use super::format::{ATOM_BYTES, ATOM_ROWS, Format, Formats, STEP_K, StagedOperand};
use super::format::{ATOM_LINES, LINES_BYTES, atom_k};
use super::groups::most_tiles;
use super::variant::Variant;
use crate::Error;
use crate::error::refused;
use crate::fused::{Fused, FusedArgs, Weights};
use crate::limits::{GRID_X, Rules, check_address, fits};

/// A matrix in device memory, `[rows, k]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Operand {
    /// What it holds.
    pub format: Format,
    /// Rows.
    pub rows: usize,
    /// Elements of a row, a multiple of 16, and of the format's blocks.
    pub k: usize,
    /// Codes or elements: `pitch` bytes from row to row; the address a multiple of 16.
    pub codes: DevicePtr,
    /// Bytes from one row to the next: at least those of its elements, a multiple of 16. Codes that a kernel expands itself are
    /// dense.
    pub pitch: usize,
    /// Whether elements of 16 bits lie in blocks of 64 columns, `[k / 64][rows][64]`, and not row by row: what one copy to shared memory
    /// brings is then one piece. `pitch` is 128.
    pub blocked: bool,
    /// Block scales in the order that the kernel reads, where there are any: that of a configuration or variant that names one,
    /// or [`Sf128x4`](dualgemm_formats::ScaleLayout::Sf128x4), padding zero, the address a multiple of 16.
    pub scales: DevicePtr,
    /// Atoms of scales in the latter order along the rows: one per 128 rows, of grouped problems for each group by itself.
    pub atoms: usize,
}

impl Operand {
    /// A matrix of dense rows by itself.
    pub fn new(format: Format, (rows, k): (usize, usize), codes: DevicePtr, scales: DevicePtr) -> Self {
        let (pitch, atoms) = (format.row_bytes(k), rows.div_ceil(ATOM_ROWS as usize));
        Self { format, rows, k, codes, pitch, blocked: false, scales, atoms }
    }

    /// Refuses another format or shape than the kernel's problem has, and a stride or an address that breaks a rule.
    pub(crate) fn check(
        &self,
        tensor: &str,
        format: Format,
        (rows, k): (usize, usize),
        dense: bool,
    ) -> Result<(), Error> {
        if self.format != format {
            return refused(tensor, self.format.to_string(), format!("{format}, for which the kernel is"));
        }
        if (self.rows, self.k) != (rows, k) {
            return refused(tensor, format!("[{}, {}]", self.rows, self.k), format!("[{rows}, {k}]"));
        }
        if let Format::Block(block) = format
            && !k.is_multiple_of(block.block_len())
        {
            let expected = format!("K a multiple of {}, as {format} has blocks", block.block_len());
            return refused(tensor, format!("[{rows}, {k}]"), expected);
        }
        match dense {
            true if self.pitch != format.row_bytes(k) => {
                return refused(tensor, format!("rows {} bytes apart", self.pitch), "dense rows");
            }
            _ if self.blocked => fits(tensor, "row stride in blocks in bytes", self.pitch, 128, 128)?,
            true => {}
            false => fits(tensor, "row stride in bytes", self.pitch, format.row_bytes(k), 16)?,
        }
        check_address(tensor, self.codes, 16)
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

    /// The tensor maps of codes and scales, or of the elements.
    fn maps(&self, part: StagedOperand) -> (TensorMap, Option<TensorMap>) {
        let (data_type, columns) = match self.format {
            Format::Block(_) => (TensorDataType::U8, self.k / 2),
            Format::Half(_) => (TensorDataType::U16, self.k),
            Format::E4m3 => (TensorDataType::U8, self.k),
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

impl FusedArgs {
    /// Tiles of `tokens` at most, with so many along the features.
    pub(crate) fn tiles(&self, tokens: u32, feature_tiles: usize) -> usize {
        most_tiles(self.a.rows, tokens, self.count()) * feature_tiles
    }

    /// A launch of `clusters` clusters of `cluster` CTAs on rows with scales in atoms. A stage of a CTA holds `parts` of them.
    pub(crate) fn launch_clusters(
        &self,
        kernel: &Fused<'_>,
        parts: [StagedOperand; 3],
        (clusters, cluster, threads): (usize, u32, u32),
        rules: Rules,
    ) -> Result<LaunchSpec, Error> {
        let grid = clusters as u64 * u64::from(cluster);
        rules.check("CTAs", grid, GRID_X)?;
        let args = self.args(kernel, parts)?;
        Ok(kernel.launch([grid as u32, 1, 1], threads).cluster([cluster, 1, 1]).args(args))
    }

    /// The arguments of a kernel that declared [`Maps`], its sizes, [`Rows`](super::rows::Rows) and then
    /// [`Tiles`](super::tiles::Tiles). Fails if an operand cannot be described to the TMA unit.
    fn args(&self, kernel: &Fused<'_>, parts: [StagedOperand; 3]) -> Result<Args, Error> {
        let Weights::Rows([gate, up]) = self.weights else { return Ok(Args::new()) };
        let (variant, (m, n, k)) = (&kernel.variant, self.size);
        let (mut args, mut of_scales) = (Args::new(), Vec::with_capacity(3));
        let gate_features = gate_features(variant, n);
        let up = if variant.is_linear() { up.rows_from(gate_features) } else { up };
        for (operand, part) in [self.a, gate, up].into_iter().zip(parts) {
            let (codes, scales) = operand.maps(part);
            args = args.tensor_map(kernel.device.tensor_map(&codes)?);
            of_scales.extend(scales);
        }
        for map in &of_scales {
            args = args.tensor_map(kernel.device.tensor_map(map)?);
        }
        let mut args = args.u32(m as u32).u32(gate_features as u32).u32(k as u32);
        if variant.is_linear() {
            args = args.u32(n as u32);
        }
        self.group_rows(self.outputs(args, variant)?)
    }
}

/// Features of gate, the first of `n`: all of them, or of a linear layer half of them in whole atoms of scales.
pub(crate) fn gate_features(variant: &Variant, n: usize) -> usize {
    if variant.is_linear() { n.div_ceil(2).next_multiple_of(ATOM_ROWS as usize) } else { n }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperandIndex {
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
