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
    /// Consecutive rows of the matrix, borrowed; see [`into_rows`](Self::into_rows).
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn slice_rows(&self, rows: Range<usize>) -> Result<QuantizedMatrix<'_>, Error> {
        self.borrowed().into_rows(rows)
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
        let block_len = self.format().block_len();
        QuantizedMatrix::strided(
            self.name(),
            self.format(),
            self.rows(),
            columns.len(),
            self.row_stride(),
            &self.codes()[columns.start / 2..],
            self.scales_of(0..self.rows(), columns.start / block_len..columns.end / block_len),
            self.scale_layout(),
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
                        let first = rank * part.rows();
                        let picked: Vec<usize> = (first..first + part.rows()).collect();
                        let picked = whole.pick("picked", &picked).unwrap();
                        let owned = whole.clone().into_rows(first..first + part.rows()).unwrap();
                        for (r, k) in (0..part.rows()).flat_map(|r| (0..320).map(move |k| (r, k))) {
                            let want = whole.value(first + r, k);
                            assert_eq!([&part, &picked, &owned].map(|m| m.value(r, k)), [want; 3]);
                        }
                        assert_eq!(
                            [&part, &owned].map(QuantizedMatrix::scale_layout),
                            [whole.scale_layout(); 2]
                        );
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
    fn no_rows_are_refused_and_nibbles_change_places() {
        let whole = matrix(BlockFormat::Nvfp4, 8, 32);
        for none in [whole.slice_rows(3..3), whole.pick("w", &[])] {
            assert_eq!(none.unwrap_err().to_string(), matrix_of_no_rows());
        }
        let swapped = whole.clone().with_swapped_nibbles();
        assert!((0..32).all(|k| swapped.code(5, k) == whole.code(5, k ^ 1)));
    }

    fn matrix_of_no_rows() -> String {
        Error::NoRows { tensor: "w".into() }.to_string()
    }

    /// vllm#49949: a split of K inside a block is an error that names K and the ranks.
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
        for (rank, ranks, why) in [
            (0, 0, "cannot be split over 0 ranks; at least 1 is needed"),
            (2, 2, "rank 2 of 2 does not exist; ranks count from 0"),
        ] {
            assert_eq!(message(w.shard_rows(rank, ranks)), format!("w: {why}"));
            assert_eq!(message(w.shard_k(rank, ranks)), format!("w: {why}"));
        }
    }
}
