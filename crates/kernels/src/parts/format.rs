//! What operands of Blackwell's kernels hold, and what one CTA keeps of them in a stage.
//!
//! Flow: a kernel's `Config` names its [`Formats`]; [`StagedOperand`] follows from them, and tensor maps, shared memory and
//! descriptors from that.

use std::fmt;

use dualgemm_formats::BlockFormat;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_ptx::layout::Swizzle;

/// Rows of a scale atom.
pub const ATOM_ROWS: u32 = 128;
/// Bytes of a scale atom: four scales of each row.
pub const ATOM_BYTES: u32 = 512;
/// Lines of an atom, of 16 bytes: line l has the scales of rows l, l + 32, l + 64 and l + 96.
pub const ATOM_LINES: u32 = 32;
/// Bytes of eight lines, which tensor memory takes from one place; the next eight may lie anywhere.
pub const LINES_BYTES: u32 = 128;
/// K elements of one block-scaled matrix instruction.
pub const STEP_K: u32 = 64;
/// 16-bit elements that the span of the 128-byte swizzle holds.
pub const PANEL_K: u32 = 64;

/// What one matrix holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// 4-bit codes, row by row, and block scales in 128x4 atoms.
    Block(BlockFormat),
    /// f16 or bf16, row by row.
    Half(HalfFormat),
    /// e4m3, row by row.
    E4m3,
}

impl Format {
    /// Bytes of a row of `k` elements or codes.
    pub const fn row_bytes(self, k: usize) -> usize {
        match self {
            Self::Block(_) => k / 2,
            Self::Half(_) => k * 2,
            Self::E4m3 => k,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(format) => format.fmt(f),
            Self::Half(format) => f.write_str(format.as_str()),
            Self::E4m3 => f.write_str("e4m3"),
        }
    }
}

/// Formats of a kernel's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Formats {
    /// A and the weights in one 4-bit format: the tensor core applies the scales.
    Scaled(BlockFormat),
    /// A in 16 bits, weights in nvfp4: no instruction multiplies these, so the kernel makes the weights what A is.
    Wide(HalfFormat),
}

impl Formats {
    /// Both in nvfp4.
    pub const NVFP4: Self = Self::Scaled(BlockFormat::Nvfp4);
    /// Both in mxfp4.
    pub const MXFP4: Self = Self::Scaled(BlockFormat::Mxfp4);
    /// All that there are.
    pub const ALL: [Self; 4] =
        [Self::NVFP4, Self::MXFP4, Self::Wide(HalfFormat::F16), Self::Wide(HalfFormat::Bf16)];

    /// Of A.
    pub const fn a(self) -> Format {
        match self {
            Self::Scaled(format) => Format::Block(format),
            Self::Wide(format) => Format::Half(format),
        }
    }

    /// Of gate and up.
    pub const fn weights(self) -> BlockFormat {
        match self {
            Self::Scaled(format) => format,
            Self::Wide(_) => BlockFormat::Nvfp4,
        }
    }

    /// What a configuration's name says of them: nothing if they are nvfp4.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::Scaled(BlockFormat::Nvfp4) => "",
            Self::Scaled(BlockFormat::Mxfp4) => "_mxfp4",
            Self::Wide(HalfFormat::F16) => "_f16",
            Self::Wide(HalfFormat::Bf16) => "_bf16",
        }
    }
}

impl fmt::Display for Formats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scaled(format) => write!(f, "{format} operands"),
            Self::Wide(format) => write!(f, "A in {}, weights in {}", format.as_str(), self.weights()),
        }
    }
}

/// K elements whose scales are in one atom: 64 of nvfp4, 128 of mxfp4.
pub const fn atom_k(format: BlockFormat) -> u32 {
    4 * format.block_len() as u32
}

/// What one CTA keeps of an operand in a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagedOperand {
    /// Rows.
    pub rows: u32,
    /// Atoms of scales along the rows; 0 without scales.
    pub atoms: u32,
    /// Lines of each atom: all, or half of them where the rows are those of these lines.
    pub lines: u32,
    /// K elements: 128 or 256.
    pub k: u32,
    /// What they are.
    pub format: Format,
}

impl StagedOperand {
    /// Bytes of a row of codes or elements.
    pub const fn row_bytes(self) -> u32 {
        self.format.row_bytes(self.k as usize) as u32
    }

    /// Columns of the tensor map that a box takes: bytes of codes, or elements.
    pub const fn box_columns(self) -> u32 {
        match self.format {
            Format::Block(_) | Format::E4m3 => self.row_bytes(),
            Format::Half(_) => PANEL_K,
        }
    }

    /// Rows of the tensor map of codes that a box takes: those of half an atom come 16 at a time.
    pub const fn box_rows(self) -> u32 {
        if self.lines < ATOM_LINES { self.lines } else { self.rows }
    }

    /// Boxes, one behind the other: a row longer than the swizzle's span continues in the next.
    pub const fn boxes(self) -> u32 {
        match self.format {
            Format::Block(_) | Format::E4m3 => 1,
            Format::Half(_) => self.k / PANEL_K,
        }
    }

    /// Atoms along K; 0 without scales.
    pub const fn along_k(self) -> u32 {
        match self.format {
            Format::Block(format) => self.k / atom_k(format),
            Format::Half(_) | Format::E4m3 => 0,
        }
    }

    /// Bytes of scales of one atom's rows.
    pub const fn atom_bytes(self) -> u32 {
        self.along_k() * ATOM_BYTES / ATOM_LINES * self.lines
    }

    /// How it is permuted in shared memory.
    pub const fn swizzle(self) -> Swizzle {
        if self.row_bytes().is_multiple_of(128) { Swizzle::B128 } else { Swizzle::B64 }
    }

    /// Bytes of codes or elements.
    pub const fn code_bytes(self) -> u32 {
        self.rows * self.row_bytes()
    }

    /// Bytes of scales.
    pub const fn scale_bytes(self) -> u32 {
        self.atoms * self.atom_bytes()
    }
}
