//! Tiled tensor copies: which bytes of global memory a box covers and where each lies in shared memory.
//!
//! Flow: `tensor_map` makes a [`TiledTensor`] of a valid tensor map, `exec/tma` walks its
//! [`pieces`](TiledTensor::pieces) for a load, store or reduction; multicast and completion are its own. PTX ISA 5.5.3 (tiled mode), 5.5.7 (swizzling), 9.7.9.27.1; the rules of the map are those of
//! `cuTensorMapEncodeTiled`.
//!
//! The box is packed in shared memory, dimension 0 fastest, then the swizzle XORs the absolute address. Rows
//! are dense without swizzling; with it each takes the whole swizzle span, even if the box is narrower (seen
//! on sm_90; such a load still completes the bytes of the box only).
//! `rows` has the modes that move a list of rows instead of a box: gather4, scatter4 and im2col.
//! Modelled: no interleave, zero fill, every swizzle; loads of padded types, which leave the padding as it is.

mod rows;

use super::misuse::{not_modelled, require};
use crate::trap::Fault;
use dualgemm_ptx::layout::{Swizzle, TensorDataType};
pub use rows::Bounds;

/// A tensor map without interleave. Arrays have one entry per dimension, innermost first; those beyond `rank` are
/// ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiledTensor {
    pub ty: TensorDataType,
    /// Number of dimensions, 1 to 5.
    pub rank: usize,
    /// Address of element 0.
    pub base: u64,
    /// Size of each dimension, in elements.
    pub dims: [u64; 5],
    /// Distance between neighbours in each dimension, in bytes; that of dimension 0 is ignored (dense).
    pub strides: [u64; 5],
    /// Size of the box, in elements of the tensor; in im2col mode channels and pixels.
    pub box_dims: [u32; 5],
    /// Traversal stride; that of dimension 0 is ignored (1).
    pub element_strides: [u32; 5],
    /// Swizzling mode.
    pub swizzle: Swizzle,
    /// The bounding box of im2col mode; `None` in tiled mode.
    pub bounds: Option<Bounds>,
}

/// Which way a tensor copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Global to shared memory.
    Load,
    /// Shared to global memory, copy or reduction.
    Store,
}

/// Consecutive bytes that are consecutive on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Address in shared memory, swizzled.
    pub smem: u32,
    /// Address in global memory; `None` outside the tensor, where a load writes zeros and a store nothing.
    pub global: Option<u64>,
    /// Length.
    pub bytes: u32,
}

const WHAT: &str = "tensor map";
const WHAT_COPY: &str = "cp.async.bulk.tensor";

/// What the rows of a copy have in common.
#[derive(Debug, Clone, Copy)]
struct Walk {
    /// Innermost coordinate.
    first: i64,
    /// Its address in the first row of the tensor.
    start: i64,
    smem: u32,
    /// Bytes that stay together in shared memory.
    unit: u32,
    direction: Direction,
}

impl TiledTensor {
    /// Elements of the box along each dimension: `boxDim / elementStride`, rounded up.
    fn counts(&self) -> [u32; 5] {
        let mut counts = [1; 5];
        for (d, count) in counts.iter_mut().enumerate().take(self.rank) {
            // Pixels are counted as they are taken.
            let step = if d == 0 || self.bounds.is_some() { 1 } else { self.element_strides[d] };
            *count = self.box_dims[d].div_ceil(step);
        }
        counts
    }

    /// Bytes of one row of the box in shared memory, where padding makes a byte of each element.
    fn row_bytes(&self) -> u32 {
        let bits = if self.ty.is_padded() { 8 } else { self.ty.bits() };
        (self.box_dims[0] as u64 * u64::from(bits) / 8) as u32
    }

    /// Bytes from one row to the next in shared memory.
    fn row_pitch(&self) -> u32 {
        match self.swizzle {
            Swizzle::None => self.row_bytes(),
            swizzle => swizzle.span(),
        }
    }

    /// Bytes of the box, which is what a load adds to the barrier's completed bytes, elements outside the
    /// tensor included (PTX ISA 9.7.9.25.5.2).
    pub fn box_bytes(&self) -> u32 {
        self.counts()[1..].iter().product::<u32>() * self.row_bytes()
    }

    /// Checks operands of one copy and lists its pieces in order of the box: `coordinates` start the box, innermost
    /// first, and `smem` is the destination or source in the shared window.
    ///
    /// # Errors
    /// A misaligned shared address; a box that does not start on a whole 16 bytes of the innermost dimension, where an
    /// H100 stops with an illegal instruction; for stores, a negative coordinate.
    pub fn pieces(&self, coordinates: &[i32], smem: u32, direction: Direction) -> Result<Vec<Piece>, Fault> {
        let given = coordinates.len();
        let rule = "they are as many as the map's dimensions";
        require(given == self.rank, WHAT_COPY, "coordinates", given as u64, rule)?;
        self.check_mode(false)?;
        let walk = self.walk(coordinates, smem, direction)?;
        let counts = self.counts();
        let rows = (0..counts[1..].iter().product()).map(|mut row: u32| {
            self.row(
                &walk,
                coordinates[1..].iter().enumerate().map(|(d, &start)| {
                    let index = row % counts[d + 1];
                    row /= counts[d + 1];
                    i64::from(start) + i64::from(index) * i64::from(self.element_strides[d + 1])
                }),
            )
        });
        Ok(self.listed(&walk, rows))
    }

    /// The address of a row's first byte, and whether the row is inside the tensor: its coordinates from the second on.
    fn row(&self, walk: &Walk, outer: impl Iterator<Item = i64>) -> (i64, bool) {
        (1..).zip(outer).fold((walk.start, true), |(address, inside), (d, at): (usize, i64)| {
            let here = at >= 0 && at < self.dims[d] as i64;
            (address.wrapping_add(at.wrapping_mul(self.strides[d] as i64)), inside && here)
        })
    }

    /// The pieces of `rows`, each the row's first byte in global memory and whether it is inside.
    fn listed(&self, walk: &Walk, rows: impl Iterator<Item = (i64, bool)>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (number, row) in rows.enumerate() {
            let mut at = 0;
            while at < self.row_bytes() {
                let piece = self.piece(walk, number as u32, row, at);
                // Sixteen padded elements take as many bytes of shared memory.
                at += if self.ty.is_padded() { 16 } else { piece.bytes };
                pieces.push(piece);
            }
        }
        pieces
    }

    /// A copy says im2col if and only if its map does.
    fn check_mode(&self, im2col: bool) -> Result<(), Fault> {
        let found = u64::from(self.bounds.is_some());
        require(self.bounds.is_some() == im2col, WHAT, "mode", found, "that of the copy: 0 tiled, 1 im2col")
    }

    /// What all rows of a copy have in common.
    fn walk(&self, coordinates: &[i32], smem: u32, direction: Direction) -> Result<Walk, Fault> {
        let first = coordinates[0];
        // 128 bytes is the rule of the CUDA programming guide; atoms of 32 and 64 bytes are within it.
        let rule = "it is a multiple of 128";
        require(smem.is_multiple_of(128), WHAT_COPY, "shared memory address", smem as u64, rule)?;
        let bits = i64::from(first) * i64::from(self.ty.bits());
        let rule = "the box starts on a multiple of 16 bytes";
        require(bits % 128 == 0, WHAT_COPY, "innermost coordinate", first as u32 as u64, rule)?;
        for &c in coordinates {
            let rule = "a store starts at coordinates >= 0";
            require(c >= 0 || direction == Direction::Load, WHAT_COPY, "coordinate", c as u32 as u64, rule)?;
        }
        if self.ty.is_padded() {
            let rule = "the box of a padded type starts on a multiple of 128 elements";
            require(first % 128 == 0, WHAT_COPY, "innermost coordinate", first as u32 as u64, rule)?;
            if direction == Direction::Store {
                let rule = "types without padding";
                return Err(not_modelled(WHAT, "data type of a store", self.ty as u64, rule));
            }
        }
        let unit = if self.swizzle == Swizzle::B128Atom32Flip8 { 8 } else { self.swizzle.atom() };
        let unit = if self.swizzle == Swizzle::None { self.row_bytes() } else { unit };
        let start = (self.base as i64).wrapping_add(bits / 8);
        Ok(Walk { first: first.into(), start, smem, unit, direction })
    }

    /// The piece of row `row` of the box that begins at its byte `at`. The row's first byte is at `row_start` of
    /// global memory; all of it is outside unless `inside`.
    fn piece(&self, walk: &Walk, row: u32, (row_start, inside): (i64, bool), at: u32) -> Piece {
        let linear = walk.smem + row * self.row_pitch() + at;
        if self.ty.is_padded() {
            // Sixteen elements take as many bytes, the last of which nothing is written to.
            let inside = inside && (0..self.dims[0] as i64).contains(&(walk.first + i64::from(at)));
            let bytes = 2 * self.ty.bits();
            let global = inside.then(|| (row_start + i64::from(at / 16 * bytes)) as u64);
            return Piece { smem: self.swizzle.apply(linear), global, bytes };
        }
        let (first, end) = self.row_window(walk.first, walk.direction);
        let mut limit = ((at / walk.unit + 1) * walk.unit).min(self.row_bytes());
        // A piece is all inside or all outside: it ends where the tensor begins or ends.
        for edge in [first, end] {
            if inside && edge > at as i64 && edge < limit as i64 {
                limit = edge as u32;
            }
        }
        let inside = inside && at as i64 >= first && (at as i64) < end;
        Piece {
            smem: self.swizzle.apply(linear),
            global: inside.then(|| (row_start + at as i64) as u64),
            bytes: limit - at,
        }
    }

    /// The byte range of dimension 0 that a copy reads or writes, relative to the row's first byte: what lies inside
    /// the tensor, and for stores and reductions the whole last 16 bytes of it, as an H100 does.
    fn row_window(&self, start: i64, direction: Direction) -> (i64, i64) {
        let bits = i64::from(self.ty.bits());
        let first = -start * bits / 8;
        let row = self.dims[0] as i64 * bits / 8;
        let row = match direction {
            Direction::Load => row,
            Direction::Store => (row + 15) / 16 * 16,
        };
        (first, first + row)
    }
}

#[cfg(test)]
mod tests;
