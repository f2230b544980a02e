//! Copies of a list of rows: four rows of a matrix (`.tile::gather4`, `.tile::scatter4`; PTX ISA 5.5.3.4) and the
//! pixels that a convolution filter meets (`.im2col`; 5.5.4).

use super::{Direction, Piece, TiledTensor, WHAT, WHAT_COPY, Walk};
use crate::semantics::misuse::require;
use crate::trap::Fault;

/// The bounding box of im2col mode, for one to three dimensions of space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// First position, counted from 0.
    pub lower: [i32; 3],
    /// Last position, counted from the last element.
    pub upper: [i32; 3],
}

impl TiledTensor {
    /// The pieces of `rows`, each the row's first byte in global memory and whether it is inside.
    fn listed(&self, walk: &Walk, rows: impl Iterator<Item = (i64, bool)>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (number, row) in rows.enumerate() {
            let mut at = 0;
            while at < self.row_bytes() {
                let piece = self.piece(walk, number as u32, row, at);
                at += self.pitch(&piece);
                pieces.push(piece);
            }
        }
        pieces
    }

    /// Rows `rows` of a matrix from column `column` on, one below the other in shared memory.
    ///
    /// # Errors
    /// As [`pieces`](TiledTensor::pieces); a map that is not of two dimensions with a box of one row.
    pub fn scattered(
        &self,
        column: i32,
        rows: &[i32],
        smem: u32,
        direction: Direction,
    ) -> Result<Vec<Piece>, Fault> {
        self.check_mode(false)?;
        let single = self.rank == 2 && self.box_dims[1] == 1;
        let rule = "gather4 and scatter4 take maps of two dimensions whose box has one row";
        require(single, WHAT, "boxDim[1]", self.box_dims[1].into(), rule)?;
        let walk = self.walk(&[column], smem, direction)?;
        let start = self.base as i64 + walk.first * self.ty.bits() as i64 / 8;
        let row = |&row: &i32| {
            let inside = row >= 0 && i64::from(row) < self.dims[1] as i64;
            (start.wrapping_add(i64::from(row).wrapping_mul(self.strides[1] as i64)), inside)
        };
        Ok(self.listed(&walk, rows.iter().map(row)))
    }

    /// Bytes of four rows.
    pub fn scattered_bytes(&self, rows: usize) -> u32 {
        rows as u32 * self.row_bytes()
    }

    /// A column of pixels: from the filter base at `coordinates` (channel, space, image) the base moves through
    /// the bounding box in steps of the traversal stride, innermost dimension first, image after image; each pixel
    /// lies `offsets` further in space; a store has none (`.im2col_no_offs`).
    ///
    /// # Errors
    /// As [`pieces`](TiledTensor::pieces); a map of the tiled mode; another number of coordinates or offsets than
    /// its dimensions need.
    pub fn columns(
        &self,
        coordinates: &[i32],
        offsets: &[u32],
        smem: u32,
        direction: Direction,
    ) -> Result<Vec<Piece>, Fault> {
        self.check_mode(true)?;
        let given = coordinates.len();
        let rule = "they are as many as the map's dimensions, and a load's offsets two fewer";
        let wanted = if direction == Direction::Load { given.saturating_sub(2) } else { 0 };
        let fits = given == self.rank && offsets.len() == wanted;
        require(fits, WHAT_COPY, "coordinates", given as u64, rule)?;
        let Some(bounds) = self.bounds else { return Ok(Vec::new()) };
        let walk = self.walk(coordinates, smem, direction)?;
        let space = self.rank - 2;
        if direction == Direction::Store {
            // An H200 stops with an illegal instruction, even where all pixels are inside.
            let rule = "a store's bounding box lies in the tensor: lower corners >= 0, upper ones <= 0";
            for (lower, upper) in bounds.lower[..space].iter().zip(&bounds.upper) {
                require(*lower >= 0, WHAT, "lower corner", *lower as u32 as u64, rule)?;
                require(*upper <= 0, WHAT, "upper corner", *upper as u32 as u64, rule)?;
            }
        }
        let mut base: Vec<i64> = coordinates[1..].iter().map(|&c| c.into()).collect();
        let mut rows = Vec::new();
        for _ in 0..self.box_dims[1] {
            let mut address = self.base as i64 + walk.first * self.ty.bits() as i64 / 8;
            let mut inside = true;
            for (d, &at) in base.iter().enumerate() {
                let at = at + offsets.get(d).map_or(0, |&o| o.into());
                inside &= at >= 0 && at < self.dims[d + 1] as i64;
                address = address.wrapping_add(at.wrapping_mul(self.strides[d + 1] as i64));
            }
            rows.push((address, inside));
            // Like the digits of a number: a dimension that is past its end starts anew and the next one moves.
            let past_all = (0..space).all(|d| {
                base[d] += i64::from(self.element_strides[d + 1]);
                let past = base[d] >= self.dims[d + 1] as i64 + i64::from(bounds.upper[d]);
                if past {
                    base[d] = bounds.lower[d].into();
                }
                past
            });
            base[space] += i64::from(past_all);
        }
        Ok(self.listed(&walk, rows.into_iter()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_ptx::layout::{TensorDataType, TensorSwizzle as Swizzle};

    fn images(bounds: Option<Bounds>, box_dims: [u32; 2]) -> TiledTensor {
        TiledTensor {
            ty: TensorDataType::U8,
            rank: 4,
            base: 0x1_0000,
            dims: [64, 9, 14, 64, 1],
            strides: [0, 64, 64 * 9, 64 * 9 * 14, 0],
            box_dims: [box_dims[0], box_dims[1], 1, 1, 1],
            element_strides: [1; 5],
            swizzle: Swizzle::None,
            bounds,
        }
    }

    /// Example 2 of PTX ISA 5.5.4.1: a filter of three by three without padding; its last position.
    #[test]
    fn a_column_walks_the_bounding_box_exact() {
        let bounds = Bounds { lower: [0; 3], upper: [-2; 3] };
        let tensor = images(Some(bounds), [16, 64]);
        let pieces = tensor.columns(&[0, 6, 7, 4], &[2, 2], 0, Direction::Load).unwrap();
        assert_eq!(pieces.len(), 64);
        let pixel = |w: u64, h: u64, n: u64| Some(0x1_0000 + 64 * (w + 9 * (h + 14 * n)));
        // Base (6, 7) is the last of its row of 7; then (0, 8) and so on to (6, 11), then the next image.
        assert_eq!(pieces[0].global, pixel(8, 9, 4));
        assert_eq!(pieces[1].global, pixel(2, 10, 4));
        assert_eq!(pieces[28].global, pixel(8, 13, 4));
        assert_eq!(pieces[29].global, pixel(2, 2, 5));
        assert!(pieces.iter().enumerate().all(|(i, p)| (p.smem, p.bytes) == (16 * i as u32, 16)));
    }

    #[test]
    fn modes_of_map_and_copy_agree() {
        let tiled = images(None, [16, 1]);
        assert!(
            tiled.columns(&[0; 4], &[0; 2], 0, Direction::Load).unwrap_err().message.contains("mode is 0x0")
        );
        let bounds = Bounds { lower: [0; 3], upper: [0; 3] };
        let column = images(Some(bounds), [16, 8]);
        assert!(column.pieces(&[0; 4], 0, Direction::Load).unwrap_err().message.contains("mode is 0x1"));
        let gather = tiled.scattered(0, &[0; 4], 0, Direction::Load).unwrap_err().message;
        assert!(gather.contains("two dimensions"), "{gather}");
    }

    /// An H200 stops at a store whose bounding box reaches out of the tensor.
    #[test]
    fn stores_of_columns_start_inside() {
        let store = |lower, upper, from| {
            let bounds = Bounds { lower: [0, lower, 0], upper: [0, upper, 0] };
            let columns = images(Some(bounds), [16, 8]).columns(&[0, from, 0, 0], &[], 0, Direction::Store);
            columns.map_err(|fault| fault.message)
        };
        assert_eq!(store(0, 0, 0).unwrap().len(), 8);
        assert!(store(0, 0, -1).unwrap_err().contains("a store starts at coordinates >= 0"));
        assert!(store(-1, 0, 0).unwrap_err().contains("lower corner is 0xffffffff"));
        assert!(store(0, 1, 0).unwrap_err().contains("upper corner is 0x1"));
    }

    #[test]
    fn rows_are_gathered_in_their_order_exact() {
        let matrix = TiledTensor { rank: 2, ..images(None, [32, 1]) };
        let pieces = matrix.scattered(48, &[7, -1, 9, 0], 128, Direction::Load).unwrap();
        let found: Vec<_> = pieces.iter().map(|p| (p.smem, p.global, p.bytes)).collect();
        let at = |row: u64| Some(0x1_0000 + 64 * row + 48);
        // Half of each row is past the tensor, rows -1 and 9 are outside.
        let want = [
            (128, at(7), 16),
            (144, None, 16),
            (160, None, 32),
            (192, None, 32),
            (224, at(0), 16),
            (240, None, 16),
        ];
        assert_eq!(found, want);
        assert_eq!(matrix.scattered_bytes(4), 128);
    }
}
