//! Where matrices, scales and register fragments lie in Tensor Memory.
//!
//! Flow: `exec/tcgen05` combines these index functions with the base address of an instruction. TMEM is 128
//! lanes by 512 columns of 32-bit words per CTA; an address is `lane << 16 | column` (PTX ISA 9.7.16.1.1).
//! Cells are relative to the operand's base address. The ISA draws the layouts as figures; the functions are
//! those figures as CUTLASS's `copy_traits_sm100.hpp` and `mma_traits_sm100.hpp` express them.

use super::misuse::require;
use crate::trap::Fault;
use std::ops::Add;

/// A place in Tensor Memory: one 32-bit word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cell {
    /// Lane, 0 to 127.
    pub lane: u32,
    /// Column, 0 to 511.
    pub column: u32,
}

impl Cell {
    /// The cell a TMEM address names (PTX ISA 9.7.16.1.1).
    pub const fn from_address(address: u32) -> Cell {
        Cell { lane: address >> 16, column: address & 0xffff }
    }

    /// The address that names it.
    pub const fn address(self) -> u32 {
        self.lane << 16 | self.column
    }
}

impl Add for Cell {
    type Output = Cell;

    /// A cell relative to a base.
    fn add(self, by: Cell) -> Cell {
        Cell { lane: self.lane + by.lane, column: self.column + by.column }
    }
}

/// How rows of D (and of A in TMEM) are spread over lanes and CTAs (PTX ISA 9.7.16.10.5). Layouts C (sparse),
/// E and G (`.ws`) are not modelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DataPath {
    /// M = 256, `cta_group::2`: each CTA holds half of the rows, one to a lane.
    A,
    /// M = 128, `cta_group::2`: each CTA holds 64 rows; the upper 64 lanes hold the right half of the columns.
    B,
    /// M = 128, `cta_group::1`: one row to a lane.
    D,
    /// M = 64, `cta_group::1`: 16 rows in each 32 lanes.
    F,
}

impl DataPath {
    /// The layout of a dense `tcgen05.mma` of `m` rows. `m` and `cta_group` must be valid together, as
    /// `InstrDesc::decode` checks.
    pub const fn new(m: u32, cta_group: u32) -> DataPath {
        match (cta_group, m) {
            (2, 256) => DataPath::A,
            (2, _) => DataPath::B,
            (_, 128) => DataPath::D,
            _ => DataPath::F,
        }
    }

    /// The CTA of the pair (0 even, 1 odd rank; always 0 for `cta_group::1`) and the cell that hold
    /// D\[row\]\[col\] of an instruction with `n` columns. An element of any type fills one word.
    #[inline]
    pub const fn accumulator(self, n: u32, row: u32, col: u32) -> (u32, Cell) {
        match self {
            DataPath::A => (row / 128, Cell { lane: row % 128, column: col }),
            DataPath::B => {
                let right = col / (n / 2);
                (row / 64, Cell { lane: row % 64 + 64 * right, column: col % (n / 2) })
            }
            DataPath::D => (0, Cell { lane: row, column: col }),
            DataPath::F => (0, Cell { lane: row / 16 * 32 + row % 16, column: col }),
        }
    }

    /// Columns of TMEM that D of `n` columns takes in each CTA.
    pub const fn accumulator_columns(self, n: u32) -> u32 {
        match self {
            DataPath::B => n / 2,
            _ => n,
        }
    }

    /// The CTA, the cell and the bit within its word of A\[row\]\[k\] in TMEM, for elements of `bits` width
    /// (8-bit containers for the narrow types of kind::f8f6f4 and mxf8f6f4; PTX ISA 9.7.16.10.4). In layout B
    /// each half of the lanes holds a copy of the CTA's 64 rows; this is the lower
    /// ([`copies`](Self::copies)).
    #[inline]
    pub const fn multiplicand(self, bits: u32, row: u32, k: u32) -> (u32, Cell, u32) {
        // A row of A lies in the lanes of the same row of D.
        let (cta, Cell { lane, .. }) = self.accumulator(2, row, 0);
        (cta, Cell { lane, column: k * bits / 32 }, k * bits % 32)
    }

    /// Lanes from one copy of a row of A in TMEM to the next, as many as there are: the datapaths of each half of
    /// layout B read their own (CUTLASS `TmemAllocMode::Duplicated`).
    pub const fn copies(self) -> &'static [u32] {
        match self {
            DataPath::B => &[0, 64],
            _ => &[0],
        }
    }

    /// Checks the lane of an accumulator's base address (PTX ISA 9.7.16.10.5, "datapath lane alignment").
    ///
    /// # Errors
    /// Anything but lane 0, or lane 16 for layout F.
    pub fn check_base(self, base: Cell) -> Result<(), Fault> {
        let (valid, rule) = match self {
            DataPath::F => (base.lane == 0 || base.lane == 16, "M = 64 starts at lane 0 or 16"),
            _ => (base.lane == 0, "the matrix starts at lane 0"),
        };
        require(valid, "tcgen05.mma", "lane of the D address", base.lane as u64, rule)
    }
}

/// Rows of A and of B (columns of D) that each CTA keeps in its own shared memory (PTX ISA 9.7.16.10.5, CUTLASS
/// `mma_traits_sm100.hpp`): half of each with `cta_group::2`.
pub const fn operand_rows(m: u32, n: u32, cta_group: u32) -> (u32, u32) {
    (m / cta_group, n / cta_group)
}

/// The cell, relative to the scales' address and within one 32-lane partition, and the byte of its word, that
/// hold the scale of K-block `block` for row `row` of A or column `row` of B. `id` is the scale factor id of
/// the instruction descriptor. PTX ISA 9.7.16.10.7.2 and .3: 32 rows to a column; `scale_vec::1X` one byte at
/// `id`, `2X` two from `id`, `4X` four.
///
/// Every 32-lane partition holds a copy (of B in layout B: `scale_b_half`). With `cta_group::2` each CTA's TMEM has
/// the scales of its own rows of A, counted from 0, and of all columns of B.
#[inline]
pub const fn scale(row: u32, block: u32, id: u32) -> (Cell, u32) {
    (Cell { lane: row % 32, column: row / 32 }, id + block)
}

/// The half of the lanes whose datapaths use the scale of column `col` of B: `None` if all do. In layout B lanes 0 to
/// 63 make the left half of D and need the scales of its columns only, lanes 64 to 127 those of the right half, each
/// counted from 0 (CUTLASS `mma_traits_sm100_frag.hpp`, `ScaleFactorDuplicated2by2`).
pub const fn scale_b_half(path: DataPath, n: u32, col: u32) -> Option<u32> {
    match path {
        DataPath::B => Some(col / (n / 2)),
        _ => None,
    }
}

/// Lanes that `tcgen05.shift` moves: those of one warp.
pub const SHIFT_LANES: u32 = 32;
/// Columns that `tcgen05.shift` moves: 32 bytes. PTX ISA 9.7.16.9.3: "downwards across all the rows, except the
/// last". That a row takes its successor follows from `tcgen05.cp.4x256b`, which exists to refresh the last lanes
/// afterwards (CUTLASS `copy_traits_sm100.hpp`).
pub const SHIFT_COLUMNS: u32 = 8;

/// Shape and multicast of `tcgen05.cp` (PTX ISA 9.7.16.9.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopyShape {
    /// `.128x256b`.
    S128x256b,
    /// `.4x256b`: row i to lane 32 i.
    S4x256b,
    /// `.128x128b`.
    S128x128b,
    /// `.64x128b.warpx2::02_13`: rows 0-31 to the lanes of warps 0 and 2, rows 32-63 to those of 1 and 3.
    S64x128bWarps02And13,
    /// `.64x128b.warpx2::01_23`: rows 0-31 to the lanes of warps 0 and 1, rows 32-63 to those of 2 and 3.
    S64x128bWarps01And23,
    /// `.32x128b.warpx4`: every row to all four warps.
    S32x128bWarpx4,
}

impl CopyShape {
    /// Rows of the source.
    pub const fn rows(self) -> u32 {
        match self {
            CopyShape::S128x256b | CopyShape::S128x128b => 128,
            CopyShape::S4x256b => 4,
            CopyShape::S64x128bWarps02And13 | CopyShape::S64x128bWarps01And23 => 64,
            CopyShape::S32x128bWarpx4 => 32,
        }
    }

    /// 16-byte chunks of a source row, which fill four columns each. The chunks lie where
    /// [`SmemDesc::k_major`](super::smem_desc::SmemDesc::k_major) says.
    pub const fn chunks(self) -> u32 {
        match self {
            CopyShape::S128x256b | CopyShape::S4x256b => 2,
            _ => 1,
        }
    }

    /// The lanes, relative to the address, that receive source row `row`.
    pub fn lanes(self, row: u32) -> impl Iterator<Item = u32> {
        let (first, step, copies) = match self {
            CopyShape::S128x256b | CopyShape::S128x128b => (row, 0, 1),
            CopyShape::S4x256b => (32 * row, 0, 1),
            CopyShape::S64x128bWarps02And13 => (row, 64, 2),
            CopyShape::S64x128bWarps01And23 => (row / 32 * 64 + row % 32, 32, 2),
            CopyShape::S32x128bWarpx4 => (row, 32, 4),
        };
        (0..copies).map(move |copy| first + step * copy)
    }
}

/// Shape of `tcgen05.ld` and `tcgen05.st` (PTX ISA 9.7.16.2.3, figures 183 to 187).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessShape {
    /// `.32x32b`.
    S32x32b,
    /// `.16x64b`.
    S16x64b,
    /// `.16x128b`.
    S16x128b,
    /// `.16x256b`.
    S16x256b,
    /// `.16x32bx2` with its `immHalfSplitoff`, in columns.
    S16x32bx2 {
        /// Columns from the first access to the second.
        split: u32,
    },
}

impl AccessShape {
    /// Registers per thread with repetition `num` (PTX ISA tables 49 and 50).
    pub const fn registers(self, num: u32) -> u32 {
        match self {
            AccessShape::S16x128b => 2 * num,
            AccessShape::S16x256b => 4 * num,
            _ => num,
        }
    }

    /// The cell, relative to the address, that `register` of `thread` loads from or stores to.
    #[inline]
    pub const fn cell(self, thread: u32, register: u32) -> Cell {
        let (group, quad) = (thread / 4, thread % 4);
        let (lane, column) = match self {
            AccessShape::S32x32b => (thread, register),
            AccessShape::S16x64b => (group + 8 * (thread % 2), quad / 2 + 2 * register),
            AccessShape::S16x128b => (group + 8 * (register % 2), quad + 4 * (register / 2)),
            AccessShape::S16x256b => {
                (group + 8 * (register / 2 % 2), 2 * quad + register % 2 + 8 * (register / 4))
            }
            AccessShape::S16x32bx2 { split } => (thread % 16, thread / 16 * split + register),
        };
        Cell { lane, column }
    }

    /// The cells of the low and the high half of `register` with `.pack::16b` or `.unpack::16b`: the low 16
    /// bits of two neighbouring columns (PTX ISA 9.7.16.8.2).
    #[inline]
    pub const fn packed_cells(self, thread: u32, register: u32) -> [Cell; 2] {
        let (Cell { lane, column }, split) = match self {
            // The split stays as given; the columns within each access double.
            AccessShape::S16x32bx2 { split } => {
                (AccessShape::S16x32bx2 { split: 0 }.cell(thread, register), thread / 16 * split)
            }
            other => (other.cell(thread, register), 0),
        };
        let low = split + 2 * column;
        [Cell { lane, column: low }, Cell { lane, column: low + 1 }]
    }

    /// Checks the lane of an access by `warp` (its index in the CTA): each warp of a warpgroup reaches its
    /// own 32 lanes (PTX ISA 9.7.16.8.1), and a 16-lane shape starts at the first or the middle of them.
    ///
    /// # Errors
    /// A lane outside the warp's chunk or in the midst of it.
    pub fn check_base(self, base: Cell, warp: u32) -> Result<(), Fault> {
        let chunk = 32 * (warp % 4);
        let valid = match self {
            AccessShape::S32x32b => base.lane == chunk,
            _ => base.lane == chunk || base.lane == chunk + 16,
        };
        let rule = match self {
            AccessShape::S32x32b => {
                "a warp accesses lanes 32 * (warp % 4) and up, and .32x32b all 32 of them"
            }
            _ => "a warp accesses lanes 32 * (warp % 4) to + 31, and a 16-lane shape starts at + 0 or + 16",
        };
        require(valid, "tcgen05.ld/st", "lane of the address", base.lane as u64, rule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_out_of_reach_are_named() {
        let cell = Cell::from_address(0x0060_0103);
        assert_eq!(cell, Cell { lane: 96, column: 0x103 });
        assert_eq!(cell.address(), 0x0060_0103);
        assert!(AccessShape::S32x32b.check_base(cell, 7).is_ok());
        let message = AccessShape::S32x32b.check_base(cell, 2).unwrap_err().message;
        assert_eq!(
            message,
            "tcgen05.ld/st: lane of the address is 0x60, but a warp accesses lanes 32 * (warp % 4) and up, and .32x32b \
             all 32 of them"
        );
        let middle = Cell { lane: 16, column: 0 };
        assert!(AccessShape::S16x64b.check_base(middle, 4).is_ok());
        assert!(AccessShape::S32x32b.check_base(middle, 4).is_err());
        assert!(DataPath::F.check_base(middle).is_ok() && DataPath::D.check_base(middle).is_err());
        assert_eq!(operand_rows(256, 128, 2), (128, 64));
    }
}
