//! The tensors of one quantized module, their shapes understood, and the matrices cut from them.
//!
//! Stored shapes, `E` only for experts in one tensor:
//!
//! ```text
//! codes U8 or I8 [E, rows, k / 2], F4 [E, rows, k]
//!                                               scales [E, rows, k / block]    the usual case
//! codes U8 [E * rows, k / 2]                    scales [E * rows, k / block]   experts one below the other
//! codes U32 [E, rows, k / 8]                    scales [E, rows, k / block]    MLX
//! codes U8 [E, rows, k / block, block / 2]      scales [E, rows, k / block]    blocks kept apart (gpt-oss)
//! codes U8 [E, k / 2, rows]                     scales [E, k / block, rows]    transposed back after packing
//! codes U8 [rows, k / 2]                        scales, any shape of the padded size, in 128x4 order
//! GGUF blocks [E, rows, k]                      scales inside
//! ```
//!
//! The two orders of a 3-D tensor cannot be confused: codes and scales share their row count, and it is the
//! same dimension of both.

use std::borrow::Cow;
use std::ops::Range;

use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout, gguf};

use crate::gate_up::{GateUpOrder, Half};
use crate::gguf::mxfp4;
use crate::{Dtype, Error, TensorView};

/// Bytes of GGUF blocks that are unpacked at a time where only their scales are kept.
const RUN_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Arrangement {
    /// Row-major scales `[rows, blocks]`, or one of the padded layouts, per expert.
    Rows(ScaleLayout),
    /// Codes `[k / 2, rows]` and scales `[blocks, rows]`.
    Transposed,
    /// Inside GGUF blocks.
    Gguf,
}

/// A quantized weight as stored: one matrix, or one for each expert.
#[derive(Debug, Clone)]
pub(crate) struct Stored<'a> {
    weight: TensorView<'a>,
    scales: Option<TensorView<'a>>,
    pub(crate) format: BlockFormat,
    pub(crate) experts: Option<usize>,
    pub(crate) rows: usize,
    pub(crate) k: usize,
    arrangement: Arrangement,
    swap_nibbles: bool,
}

impl<'a> Stored<'a> {
    pub(crate) fn gguf(weight: TensorView<'a>) -> Option<Self> {
        let format = match weight.dtype.ggml_id() {
            Some(Dtype::GGML_NVFP4) => BlockFormat::Nvfp4,
            Some(Dtype::GGML_MXFP4) => BlockFormat::Mxfp4,
            _ => return None,
        };
        let (experts, rows, k) = match *weight.shape {
            [rows, k] => (None, rows, k),
            [experts, rows, k] => (Some(experts), rows, k),
            _ => return None,
        };
        Some(Self {
            weight,
            scales: None,
            format,
            experts,
            rows,
            k,
            arrangement: Arrangement::Gguf,
            swap_nibbles: false,
        })
    }

    /// A weight as codes and block scales. The order of both is the convention's or the caller's; `stacked` is how many
    /// experts a matrix holds one below the other.
    pub(crate) fn new(
        weight: TensorView<'a>,
        scales: TensorView<'a>,
        format: BlockFormat,
        (layout, swap_nibbles): (ScaleLayout, bool),
        stacked: Option<usize>,
    ) -> Result<Self, Error> {
        let fits = match format {
            BlockFormat::Nvfp4 => matches!(scales.dtype, Dtype::F8E4m3 | Dtype::U8),
            BlockFormat::Mxfp4 => matches!(scales.dtype, Dtype::F8E8m0 | Dtype::U8),
        };
        if !fits {
            return Err(match format {
                BlockFormat::Nvfp4 => scales.dtype_error("nvfp4 block scales", "F8_E4M3 or U8"),
                BlockFormat::Mxfp4 => scales.dtype_error("mxfp4 block scales", "F8_E8M0 or U8"),
            });
        }
        let codes_per_unit = match weight.dtype {
            Dtype::U32 => 8,
            Dtype::U8 | Dtype::I8 => 2,
            Dtype::F4 => 1,
            _ => return Err(weight.dtype_error("packed 4-bit codes", "U8, I8, U32 or F4")),
        };
        let (experts, outer, inner) = match *weight.shape {
            [outer, inner] => (stacked, outer / stacked.unwrap_or(1), inner),
            [experts, outer, inner] => (Some(experts), outer, inner),
            [experts, outer, blocks, bytes] if bytes * 2 == format.block_len() => {
                (Some(experts), outer, blocks * bytes)
            }
            _ => {
                let valid = "[rows, k / 2], [experts, rows, k / 2] or [experts, rows, blocks, block / 2]";
                return Err(weight.shape_error("packed 4-bit codes", valid.into()));
            }
        };
        let block = format.block_len();
        let mut this = Self {
            weight,
            scales: None,
            format,
            experts,
            rows: outer,
            k: 0,
            arrangement: Arrangement::Transposed,
            swap_nibbles,
        };
        let each = [outer, scales.shape.last().copied().unwrap_or(0)];
        let per_expert = match (experts, scales.shape) {
            (Some(_), &[all, _]) if stacked.is_some() && all == this.weight.shape[0] => Some(&each[..]),
            (Some(e), [first, rest @ ..]) if *first == e && !rest.is_empty() => Some(rest),
            (None, all) => Some(all),
            _ => None,
        };
        let transposed = experts.is_some()
            && stacked.is_none()
            && this.weight.dtype == Dtype::U8
            && matches!(per_expert, Some(&[blocks, rows]) if rows == inner && blocks * block == outer * 2);
        (this.rows, this.k) = if transposed { (inner, outer * 2) } else { (outer, inner * codes_per_unit) };
        if !this.k.is_multiple_of(block) {
            return Err(this.weight.shape_error(
                "a quantized weight",
                format!("at least one row and K a positive multiple of {block} ({format}); K is {}", this.k),
            ));
        }
        if !transposed {
            this.arrangement = Arrangement::Rows(this.scale_layout(&scales, per_expert, layout)?);
        }
        this.scales = Some(scales);
        Ok(this)
    }

    /// Decides the layout of stored scales, or refuses their shape.
    fn scale_layout(
        &self,
        scales: &TensorView<'_>,
        per_expert: Option<&[usize]>,
        layout: ScaleLayout,
    ) -> Result<ScaleLayout, Error> {
        let (rows, blocks) = (self.rows, self.k / self.format.block_len());
        let bytes = |layout: ScaleLayout| {
            layout.checked_len(rows, blocks).and_then(|n| n.checked_mul(self.experts.unwrap_or(1)))
        };
        // A flat byte scale comes from an operator that writes the order its kernel reads.
        let flat = scales.dtype == Dtype::U8 && per_expert.is_some_and(|s| s.len() == 1);
        let layout = if flat && layout == ScaleLayout::Linear { ScaleLayout::Sf128x4 } else { layout };
        let fits = match layout {
            ScaleLayout::Linear => per_expert == Some(&[rows, blocks]),
            ScaleLayout::Sf128x4 | ScaleLayout::Sf8x4 => bytes(layout) == Some(scales.bytes.len()),
        };
        if fits {
            return Ok(layout);
        }
        let other = ScaleLayout::ALL
            .into_iter()
            .find(|&other| other != layout && bytes(other) == Some(scales.bytes.len()))
            .map_or(String::new(), |other| {
                format!("; the size is that of {other} order, which can be named explicitly")
            });
        let lead = self.experts.map_or(String::new(), |e| format!("{e}, "));
        let shape = match layout {
            ScaleLayout::Linear => format!("[{lead}{rows}, {blocks}]"),
            _ => "any shape".into(),
        };
        let (name, k) = (self.weight.name, self.k);
        let size = bytes(layout).map_or("too many".into(), |n| n.to_string());
        let valid =
            format!("{shape} for `{name}` of {rows} rows and K = {k} in {layout} order, {size} bytes{other}");
        Err(scales.shape_error("block scales", valid))
    }

    /// What error messages call the matrix of an expert.
    pub(crate) fn name(&self, expert: Option<usize>) -> String {
        match expert.filter(|_| self.experts.is_some()) {
            Some(e) => format!("{} [expert {e}]", self.weight.name),
            None => self.weight.name.into(),
        }
    }

    pub(crate) fn weight_name(&self) -> &'a str {
        self.weight.name
    }

    /// The part of a tensor that belongs to an expert.
    fn part(&self, bytes: &'a [u8], expert: Option<usize>) -> &'a [u8] {
        match (self.experts, expert) {
            (Some(count), Some(e)) => {
                let len = bytes.len() / count;
                &bytes[e * len..(e + 1) * len]
            }
            _ => bytes,
        }
    }

    /// Names of the tensors it is made of.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &'a str> {
        [Some(self.weight.name), self.scales.as_ref().map(|s| s.name)].into_iter().flatten()
    }

    /// Some rows of the matrix, or of that of an expert, whose number is below [`experts`](Self::experts). What is not
    /// stored as rows is brought into rows for these alone. `name` is what error messages call it.
    pub(crate) fn matrix(
        &self,
        name: String,
        expert: Option<usize>,
        global: GlobalScale,
        rows: Range<usize>,
    ) -> Result<QuantizedMatrix<'a>, dualgemm_formats::Error> {
        let codes = self.part(self.weight.bytes, expert);
        let scales = self.part(self.scales.as_ref().map_or(&[][..], |s| s.bytes), expert);
        let owned = |(codes, scales): (Vec<u8>, Vec<u8>)| {
            (Cow::Owned(codes), Cow::Owned(scales), ScaleLayout::Linear, rows.len())
        };
        let (codes, scales, layout, count) = match self.arrangement {
            Arrangement::Rows(layout) => (codes.into(), scales.into(), layout, self.rows),
            Arrangement::Transposed => {
                let transposed = |bytes| transpose(bytes, self.rows, rows.clone());
                owned((transposed(codes), transposed(scales)))
            }
            Arrangement::Gguf => owned(self.unpacked(codes, rows.clone())),
        };
        let matrix = QuantizedMatrix::new(name, self.format, count, self.k, codes, scales, layout, global)?;
        let matrix = if count == rows.len() { matrix } else { matrix.into_rows(rows)? };
        Ok(if self.swap_nibbles { matrix.with_swapped_nibbles() } else { matrix })
    }

    /// Codes and scales of some rows of GGUF blocks.
    fn unpacked(&self, blocks: &[u8], rows: Range<usize>) -> (Vec<u8>, Vec<u8>) {
        let row_bytes = blocks.len() / self.rows;
        let blocks = &blocks[rows.start * row_bytes..rows.end * row_bytes];
        match self.format {
            BlockFormat::Nvfp4 => {
                let (mut codes, mut scales) =
                    (vec![0; rows.len() * (self.k / 2)], vec![0; rows.len() * (self.k / 16)]);
                gguf::unpack_row(blocks, &mut codes, &mut scales);
                (codes, scales)
            }
            BlockFormat::Mxfp4 => mxfp4::unpack(blocks),
        }
    }

    /// The block scales of the matrix, or of that of an expert. Where codes lie between them, they are read too, a run
    /// of rows at a time, and `release` is called after each.
    pub(crate) fn scales(&self, expert: Option<usize>, release: impl Fn()) -> BlockScales<'a> {
        let stored = self.part(self.scales.as_ref().map_or(&[][..], |s| s.bytes), expert);
        let (bytes, layout) = match self.arrangement {
            Arrangement::Rows(layout) => (stored.into(), layout),
            Arrangement::Transposed => {
                (transpose(stored, self.rows, 0..self.rows).into(), ScaleLayout::Linear)
            }
            Arrangement::Gguf => {
                let run = (RUN_BYTES / (self.k / 2)).max(1);
                let mut scales = Vec::with_capacity(self.rows * (self.k / self.format.block_len()));
                for first in (0..self.rows).step_by(run) {
                    let rows = first..self.rows.min(first + run);
                    let blocks = self.part(self.weight.bytes, expert);
                    scales.extend_from_slice(&self.unpacked(blocks, rows).1);
                    release();
                }
                (scales.into(), ScaleLayout::Linear)
            }
        };
        let blocks = self.k / self.format.block_len();
        BlockScales { name: self.name(expert), format: self.format, rows: self.rows, blocks, bytes, layout }
    }

    /// What error messages call a half of a fused weight.
    pub(crate) fn half_name(&self, expert: Option<usize>, half: Half) -> String {
        self.name(expert) + if half == Half::Gate { " (gate)" } else { " (up)" }
    }

    /// Checks that the rows of a fused weight fit an order.
    pub(crate) fn check_order(&self, order: GateUpOrder) -> Result<(), Error> {
        let multiple = order.row_multiple();
        if self.rows.is_multiple_of(multiple) {
            return Ok(());
        }
        Err(Error::FusedRows { tensor: self.name(None), order: order.name(), rows: self.rows, multiple })
    }

    /// Some rows of gate or of up of a fused weight in an order that fits it. Halves that lie in one piece are
    /// views where rows are; other orders copy these rows.
    pub(crate) fn half(
        &self,
        expert: Option<usize>,
        global: GlobalScale,
        (order, half): (GateUpOrder, Half),
        rows: Range<usize>,
    ) -> Result<QuantizedMatrix<'a>, dualgemm_formats::Error> {
        let name = self.half_name(expert, half);
        if let Some(first) = order.contiguous(half, self.rows / 2) {
            return self.matrix(name, expert, global, first + rows.start..first + rows.end);
        }
        // Alternating orders repeat: whole periods of fused rows hold the same run of both halves.
        let period = order.row_multiple() / 2;
        let (start, end) = (rows.start / period * period, rows.end.next_multiple_of(period));
        let both = self.matrix(self.name(expert), expert, global, 2 * start..2 * end)?;
        let rows: Vec<usize> = rows.map(|row| order.fused_row(half, row - start, end - start)).collect();
        both.pick(name, &rows)
    }
}

/// Columns of a row-major matrix of `row_len` bytes per row, each as a row.
fn transpose(bytes: &[u8], row_len: usize, columns: Range<usize>) -> Vec<u8> {
    let rows = bytes.len() / row_len;
    let mut out = vec![0; columns.len() * rows];
    for (r, row) in bytes.chunks_exact(row_len).enumerate() {
        for (c, &b) in row[columns.clone()].iter().enumerate() {
            out[c * rows + r] = b;
        }
    }
    out
}

/// The block scales of one matrix, without its codes.
#[derive(Debug, Clone)]
pub(crate) struct BlockScales<'a> {
    pub(crate) name: String,
    pub(crate) format: BlockFormat,
    pub(crate) rows: usize,
    pub(crate) blocks: usize,
    /// All bytes, padding included, in the order of `layout`.
    pub(crate) bytes: Cow<'a, [u8]>,
    pub(crate) layout: ScaleLayout,
}

impl BlockScales<'_> {
    /// Row, block and byte of every scale.
    pub(crate) fn iter(&self) -> impl Iterator<Item = ((usize, usize), u8)> {
        let places = (0..self.rows).flat_map(|row| (0..self.blocks).map(move |block| (row, block)));
        places.map(|(row, block)| ((row, block), self.bytes[self.layout.offset(row, block, self.blocks)]))
    }
}
