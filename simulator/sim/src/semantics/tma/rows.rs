//! Copies of a list of rows: four rows of a matrix (`.tile::gather4`, `.tile::scatter4`; PTX ISA 5.5.3.4) and the
//! pixels that a convolution filter meets (`.im2col`; 5.5.4).

use super::{Direction, Piece, TiledTensor, WHAT, WHAT_COPY};
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
        let rows = rows.iter().map(|&row| self.row(&walk, std::iter::once(row.into())));
        Ok(self.listed(&walk, rows))
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
            let offset = |d: usize| offsets.get(d).map_or(0, |&o| o.into());
            rows.push(self.row(&walk, base.iter().enumerate().map(|(d, at)| at + offset(d))));
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
    use dualgemm_ptx::layout::{Swizzle, TensorDataType};

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
}
