//! Which matrix element each register of each lane holds, for warp and warpgroup matrix instructions.
//!
//! Flow: `exec/mma` and `exec/wgmma` gather operands into matrices with these and scatter the result. All are
//! index functions `(lane, element) -> (row, column)`; `element` counts a lane's elements from the low bits of
//! its first register up.
//!
//! The dozen tables of PTX ISA 9.7.14.5 are one rule. Eight groups of four lanes (`g = lane / 4`,
//! `q = lane % 4`) cover eight rows (A, C) or columns (B); a lane's registers are 32 bits wide and lie along k.

use super::misuse::require;
use super::narrow::Narrow;
use crate::trap::Fault;

/// Elements a lane holds of a `rows` by `cols` operand spread over a warp.
#[inline]
pub const fn elements_per_lane(rows: u32, cols: u32) -> u32 {
    rows * cols / 32
}

/// Elements of `bits` width in one register. f64 takes a 64-bit register each.
#[inline]
const fn per_register(bits: u32) -> u32 {
    if bits >= 32 { 1 } else { 32 / bits }
}

/// `(row, k)` of element `i` of A of `mma.sync.mMnNkK`, with `m` 8 or 16 and elements of `bits` width in their
/// registers (4 for s4 and packed e2m1, 8 also for the narrow types of kind::f8f6f4, 64 for f64).
/// PTX ISA 9.7.14.5.2 to 9.7.14.5.11. With 16 rows the registers alternate between row `g` and row `g + 8`.
#[inline]
pub const fn mma_a(bits: u32, m: u32, lane: u32, i: u32) -> (u32, u32) {
    let (group, quad) = (lane / 4, lane % 4);
    let per = per_register(bits);
    let (register, e) = (i / per, i % per);
    let (half, step) = if m == 16 { (register % 2, register / 2) } else { (0, register) };
    (group + 8 * half, per * (quad + 4 * step) + e)
}

/// `(k, n)` of element `i` of B of `mma.sync.mMn8kK`. PTX ISA 9.7.14.5.2 to 9.7.14.5.11.
#[inline]
pub const fn mma_b(bits: u32, lane: u32, i: u32) -> (u32, u32) {
    let per = per_register(bits);
    let (register, e) = (i / per, i % per);
    (per * (lane % 4 + 4 * register) + e, lane / 4)
}

/// `(row, column)` of element `i` of C or D of `mma.sync.mMn8kK`, any type. PTX ISA 9.7.14.5.
#[inline]
pub const fn mma_c(lane: u32, i: u32) -> (u32, u32) {
    (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2)
}

/// `(row, k)` of element `i` of A of `mma.mMnNkK` and `wmma.mMnNkK`, and of the 16 rows that a warp has of `wgmma.m64nNkK`
/// (9.7.15.5.1.1). The ISA leaves the fragments of `wmma` open (9.7.14.4.1); here, as on chips, they are those of `mma` of up
/// to 16 rows, one after the other.
#[inline]
pub const fn fragment_a(bits: u32, (m, k): (u32, u32), lane: u32, i: u32) -> (u32, u32) {
    let rows = if m < 16 { m } else { 16 };
    let each = elements_per_lane(rows, k);
    let (row, kk) = mma_a(bits, rows, lane, i % each);
    (row + rows * (i / each), kk)
}

/// `(k, n)` of element `i` of B: fragments of 8 columns, one after the other.
#[inline]
pub const fn fragment_b(bits: u32, k: u32, lane: u32, i: u32) -> (u32, u32) {
    let each = elements_per_lane(k, 8);
    let (kk, n) = mma_b(bits, lane, i % each);
    (kk, n + 8 * (i / each))
}

/// `(row, column)` of element `i` of C or D: fragments of up to 16 rows and 8 columns, those
/// of the same rows one after the other.
#[inline]
pub const fn fragment_c((m, n): (u32, u32), lane: u32, i: u32) -> (u32, u32) {
    let rows = if m < 16 { m } else { 16 };
    let each = elements_per_lane(rows, 8);
    let (row, col) = mma_c(lane, i % each);
    let (tile, across) = (i / each, n / 8);
    (row + rows * (tile / across), col + 8 * (tile % across))
}

/// `(row, column)` within its 8x8 matrix of half `half` (0 low, 1 high) of a lane's register, for
/// `ldmatrix` and `stmatrix` `.m8n8.b16` (PTX ISA 9.7.14.5.15, 9.7.14.5.16). Row `r` of matrix `j` (register
/// `j`) is the 16 bytes at the address that lane `8 * j + r` gives, the same for `.x1 .x2 .x4`.
#[inline]
pub const fn matrix_b16(trans: bool, lane: u32, half: u32) -> (u32, u32) {
    let (row, col) = (lane / 4, 2 * (lane % 4) + half);
    if trans { (col, row) } else { (row, col) }
}

/// What `ldmatrix` and `stmatrix` move: the shape says where each byte of a lane's registers lies in the rows of 16
/// bytes whose addresses the lanes give. The layouts of bytes are drawn only in the ISA (figures 105, 106 and 108);
/// these are CUTLASS's (`copy_traits_sm100.hpp`, `LDSM` and `STSM`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixShape {
    /// `.m8n8.b16`; `true`: `.trans`.
    M8n8(bool),
    /// `ldmatrix.m16n16.trans.b8`.
    M16n16,
    /// `stmatrix.m16n8.trans.b8`.
    M16n8,
    /// `ldmatrix.m8n16.b8x16`: elements of the format, widened to bytes.
    M8n16(Narrow),
}

impl MatrixShape {
    pub const fn rows(self) -> usize {
        match self {
            MatrixShape::M16n16 => 16,
            _ => 8,
        }
    }

    pub const fn registers(self) -> usize {
        match self {
            MatrixShape::M16n16 => 2,
            _ => 1,
        }
    }

    /// Row and byte within it of byte `byte` of register `register` of the matrix in `lane`.
    #[inline]
    pub const fn place(self, lane: u32, register: u32, byte: u32) -> (usize, usize) {
        let (group, quad) = (lane / 4, lane % 4);
        let (row, column) = match self {
            MatrixShape::M8n8(trans) => {
                let (row, column) = matrix_b16(trans, lane, byte / 2);
                (row, 2 * column + byte % 2)
            }
            MatrixShape::M16n16 => (4 * quad + byte, group + 8 * register),
            MatrixShape::M16n8 => (2 * quad + byte % 2, group + 8 * (byte / 2)),
            MatrixShape::M8n16(_) => (group, 4 * quad + byte),
        };
        (row as usize, column as usize)
    }
}

/// `(lane, half)` of the source register that half `half` of lane `lane` takes in
/// `movmatrix.m8n8.trans.b16` (PTX ISA 9.7.14.5.17).
#[inline]
pub const fn movmatrix_source(lane: u32, half: u32) -> (u32, u32) {
    let (row, col) = matrix_b16(true, lane, half);
    (4 * row + col / 2, col % 2)
}

/// The lane whose scale register serves row `row` (0..16) of A in `mma.sync … block_scale`, for `thread_id` 0
/// or 1: of the lane pair it selects in each quad, the even lane serves row `g`, the odd one row `g + 8`.
/// PTX ISA 9.7.14.3, figure 43.
#[inline]
pub const fn scale_a_lane(row: u32, thread_id: u32) -> u32 {
    4 * (row % 8) + 2 * thread_id + row / 8
}

/// The lane whose scale register serves column `n` (0..8) of B, for `thread_id` 0..4. PTX ISA 9.7.14.3,
/// figure 44.
#[inline]
pub const fn scale_b_lane(n: u32, thread_id: u32) -> u32 {
    4 * n + thread_id
}

/// The byte of the scale register that holds the scale of k-block `block`, for `scale_vec::{vec}X` with `vec`
/// 1, 2 or 4. PTX ISA 9.7.14.3, table 37.
///
/// # Errors
/// A `byte_id` the table does not allow.
#[inline]
pub fn scale_byte(vec: u32, byte_id: u32, block: u32) -> Result<u32, Fault> {
    let what = "mma block_scale";
    let found = byte_id as u64;
    match vec {
        1 => require(byte_id < 4, what, "byte-id", found, "scale_vec::1X takes 0 to 3")?,
        2 => require(byte_id == 0 || byte_id == 2, what, "byte-id", found, "scale_vec::2X takes 0 or 2")?,
        _ => require(byte_id == 0, what, "byte-id", found, "scale_vec::4X takes 0")?,
    }
    Ok(byte_id + block)
}

/// Checks the thread selectors of `mma.sync … block_scale`. PTX ISA 9.7.14.3, table 37.
///
/// # Errors
/// `thread-id-a` above 1 or `thread-id-b` above 3.
pub fn check_thread_ids(a: u32, b: u32) -> Result<(), Fault> {
    let what = "mma block_scale";
    require(a < 2, what, "thread-id-a", a as u64, "it selects a lane pair, 0 or 1")?;
    require(b < 4, what, "thread-id-b", b as u64, "it selects a lane of the quad, 0 to 3")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_selectors_pick_the_lanes_of_the_figures() {
        assert_eq!(
            (scale_a_lane(0, 0), scale_a_lane(8, 0), scale_a_lane(3, 1), scale_a_lane(11, 1)),
            (0, 1, 14, 15)
        );
        assert_eq!((scale_b_lane(0, 3), scale_b_lane(7, 0)), (3, 28));
        assert_eq!(scale_byte(4, 0, 3), Ok(3));
        assert_eq!(scale_byte(2, 2, 1), Ok(3));
        assert_eq!(scale_byte(1, 3, 0), Ok(3));
        let message = scale_byte(2, 1, 0).unwrap_err().message;
        assert_eq!(message, "mma block_scale: byte-id is 0x1, but scale_vec::2X takes 0 or 2");
        assert!(scale_byte(4, 2, 0).is_err() && scale_byte(1, 4, 0).is_err());
        assert!(check_thread_ids(1, 3).is_ok());
        assert!(check_thread_ids(2, 0).is_err() && check_thread_ids(0, 4).is_err());
    }
}
