//! Parts of a matrix for tensor parallelism. A part never splits a block, because a block has one scale.

use std::ops::Range;

use crate::{BlockFormat, Error, QuantizedMatrix};

impl BlockFormat {
    /// The part of K elements, or of features that are K of a matrix which follows, that belongs to one rank: whole blocks, as
    /// many for each. `tensor` is what the error calls the matrix.
    ///
    /// # Errors
    /// If `rank` is not below `ranks`, or several ranks would not have whole blocks.
    pub fn shard(self, tensor: &str, k: usize, rank: usize, ranks: usize) -> Result<Range<usize>, Error> {
        check_rank(tensor, rank, ranks)?;
        let block = self.block_len();
        if ranks > 1 && !(k.is_multiple_of(block) && (k / block).is_multiple_of(ranks)) {
            return Err(Error::ShardSplitsBlock { tensor: tensor.into(), k, ranks, format: self });
        }
        let k = k / ranks;
        Ok(rank * k..(rank + 1) * k)
    }
}

fn check_rank(tensor: &str, rank: usize, ranks: usize) -> Result<(), Error> {
    if rank < ranks { Ok(()) } else { Err(Error::ShardRank { tensor: tensor.into(), rank, ranks }) }
}

impl QuantizedMatrix<'_> {
    /// Consecutive rows of the matrix. Codes are borrowed, scales keep their layout.
    ///
    /// # Errors
    /// If `rows` is empty.
    ///
    /// # Panics
    /// If the matrix has not these rows.
    pub fn slice_rows(&self, rows: Range<usize>) -> Result<QuantizedMatrix<'_>, Error> {
        self.part(rows.start, rows.len(), 0, self.k())
    }

    /// Rows `rank · rows / ranks ..` of the matrix: the output features of one rank. Codes are borrowed.
    ///
    /// # Errors
    /// If `rank` is not below `ranks` or the rows do not divide evenly.
    pub fn shard_rows(&self, rank: usize, ranks: usize) -> Result<QuantizedMatrix<'_>, Error> {
        check_rank(self.name(), rank, ranks)?;
        if !self.rows().is_multiple_of(ranks) {
            let (tensor, rows) = (self.name().into(), self.rows());
            return Err(Error::ShardRows { tensor, rows, ranks });
        }
        let rows = self.rows() / ranks;
        self.slice_rows(rank * rows..(rank + 1) * rows)
    }

    /// Columns `rank · k / ranks ..` of the matrix: the input features of one rank. Codes are borrowed.
    ///
    /// # Errors
    /// If `rank` is not below `ranks` or a part would not be whole blocks.
    pub fn shard_k(&self, rank: usize, ranks: usize) -> Result<QuantizedMatrix<'_>, Error> {
        let columns = self.format().shard(self.name(), self.k(), rank, ranks)?;
        self.part(0, self.rows(), columns.start, columns.len())
    }

    /// `rows` rows from `row` and `k` elements from `first_k`, whole blocks; scales keep their layout.
    fn part(&self, row: usize, rows: usize, first_k: usize, k: usize) -> Result<QuantizedMatrix<'_>, Error> {
        let (block_len, layout) = (self.format().block_len(), self.scale_layout());
        let (first_block, blocks) = (first_k / block_len, k / block_len);
        let mut scales = vec![0; layout.len(rows, blocks)];
        for r in 0..rows {
            for block in 0..blocks {
                scales[layout.offset(r, block, blocks)] = self.scale_byte(row + r, first_block + block);
            }
        }
        QuantizedMatrix::strided(
            self.name(),
            self.format(),
            rows,
            k,
            self.row_stride(),
            &self.codes()[row * self.row_stride() + first_k / 2..],
            scales,
            layout,
            self.global_scale(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockFormat, GlobalScale, ScaleLayout};

    fn matrix(format: BlockFormat, rows: usize, k: usize) -> QuantizedMatrix<'static> {
        let codes: Vec<u8> = (0..rows * k / 2).map(|i| (i * 71 + i / 7) as u8).collect();
        let scales: Vec<u8> = (0..rows * k / format.block_len()).map(|i| (i % 100) as u8 + 20).collect();
        QuantizedMatrix::new("w", format, rows, k, codes, scales, ScaleLayout::Linear, GlobalScale::ONE)
            .unwrap()
    }

    #[test]
    fn parts_hold_the_values_of_the_whole() {
        for format in BlockFormat::ALL {
            let whole = matrix(format, 264, 320);
            for whole in ScaleLayout::ALL.map(|layout| whole.clone().with_scale_layout(layout)) {
                for ranks in [1, 2, 5] {
                    for rank in 0..ranks {
                        let part = whole.shard_k(rank, ranks).unwrap();
                        assert_eq!((part.rows(), part.k()), (264, 320 / ranks));
                        for (r, k) in (0..264).flat_map(|r| (0..part.k()).map(move |k| (r, k))) {
                            assert_eq!(part.value(r, k), whole.value(r, rank * part.k() + k));
                        }
                    }
                }
                for ranks in [1, 2, 3, 8] {
                    for rank in 0..ranks {
                        let part = whole.shard_rows(rank, ranks).unwrap();
                        assert_eq!((part.rows(), part.k()), (264 / ranks, 320));
                        for (r, k) in (0..part.rows()).flat_map(|r| (0..320).map(move |k| (r, k))) {
                            assert_eq!(part.value(r, k), whole.value(rank * part.rows() + r, k));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn parts_of_parts_hold_the_values_of_the_whole() {
        let whole = matrix(BlockFormat::Nvfp4, 8, 128);
        let columns = whole.shard_k(1, 2).unwrap();
        let part = columns.shard_rows(3, 4).unwrap();
        for (r, k) in (0..2).flat_map(|r| (0..64).map(move |k| (r, k))) {
            assert_eq!(part.value(r, k), whole.value(6 + r, 64 + k));
        }
    }

    #[test]
    fn uneven_shards_are_refused() {
        let message = |r: Result<QuantizedMatrix<'_>, Error>| r.unwrap_err().to_string();
        let w = matrix(BlockFormat::Nvfp4, 6, 1856);
        assert_eq!(
            message(w.shard_k(0, 8)),
            "w: K = 1856 cannot be split over 8 ranks: its 116 nvfp4 blocks of 16 are not a multiple of 8"
        );
        assert!(w.shard_k(3, 4).is_ok());
        assert_eq!(message(w.shard_rows(0, 4)), "w: 6 rows cannot be split evenly over 4 ranks");
        for (rank, ranks) in [(0, 0), (2, 2)] {
            assert_eq!(
                message(w.shard_rows(rank, ranks)),
                format!("w: rank {rank} of {ranks} does not exist; ranks count from 0")
            );
        }
    }
}
