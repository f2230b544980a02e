//! Where the scale of row `r`, block `c` lies. One index function per layout, used everywhere.
//!
//! `Sf128x4` ("swizzled", "blocked") is what cuBLAS and CUTLASS read on Blackwell: the scales of 128 rows
//! and 4 blocks form one 512-byte atom, rows `i, i+32, i+64, i+96` side by side:
//!
//! ```text
//!             byte  0..4        4..8        8..12       12..16
//! 16-byte line 0:   row 0 c0-3  row 32 c0-3 row 64 c0-3 row 96 c0-3
//! 16-byte line 1:   row 1 c0-3  row 33 c0-3 row 65 c0-3 row 97 c0-3
//!         …
//! line 31:          row 31      row 63      row 95      row 127
//! ```
//!
//! Atoms follow each other along K, then along rows. `Sf8x4` (TensorRT-LLM, small M) has 32-byte atoms of
//! 8 rows × 4 blocks. Both pad rows and blocks up to whole atoms; padding bytes must be zero.
//!
//! Sources: `Sf128x4`, cuBLAS, "1D Block Scaling Factors Layout"
//! <https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout>; `Sf8x4`, `SfLayout.layout_8x4` in
//! `flashinfer/fp4_quantization.py` of <https://github.com/flashinfer-ai/flashinfer>.

crate::named! {
    /// How block scales are ordered in memory.
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum ScaleLayout {
        /// Row-major `[rows, blocks]`, no padding.
        Linear = "linear",
        /// Atoms of 128 rows × 4 blocks, 512 bytes each.
        Sf128x4 = "128x4",
        /// Atoms of 8 rows × 4 blocks, 32 bytes each.
        Sf8x4 = "8x4",
    }
}

impl ScaleLayout {
    /// Rows and blocks of an atom.
    pub(crate) const fn atom(self) -> (usize, usize) {
        match self {
            Self::Linear => (1, 1),
            Self::Sf128x4 => (128, 4),
            Self::Sf8x4 => (8, 4),
        }
    }

    /// Bytes that the scales of `[rows, blocks]` take, padding included; `None` if that overflows.
    pub const fn checked_len(self, rows: usize, blocks: usize) -> Option<usize> {
        let (atom_rows, atom_blocks) = self.atom();
        let (Some(rows), Some(blocks)) =
            (rows.checked_next_multiple_of(atom_rows), blocks.checked_next_multiple_of(atom_blocks))
        else {
            return None;
        };
        rows.checked_mul(blocks)
    }

    /// Bytes that the scales of `[rows, blocks]` take, padding included.
    ///
    /// # Panics
    /// If the size overflows; use [`checked_len`](Self::checked_len) for sizes from outside.
    pub const fn len(self, rows: usize, blocks: usize) -> usize {
        self.checked_len(rows, blocks).expect("scale buffer size overflows")
    }

    /// Byte offset of the scale of `row`, `block` in a matrix of `blocks` blocks per row. Neither is checked: of rows and
    /// blocks beyond the matrix it gives padding, or what lies past the buffer.
    #[inline]
    pub const fn offset(self, row: usize, block: usize, blocks: usize) -> usize {
        let atoms = blocks.div_ceil(4);
        match self {
            Self::Linear => row * blocks + block,
            Self::Sf128x4 => {
                (row / 128 * atoms + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4
            }
            Self::Sf8x4 => (row / 8 * atoms + block / 4) * 32 + row % 8 * 4 + block % 4,
        }
    }

    /// The scales of `[rows, blocks]` moved from this layout into another, padding zeroed.
    ///
    /// # Panics
    /// If `scales` is not [`len`](Self::len) bytes long, or either size overflows.
    pub fn convert(self, scales: &[u8], to: Self, rows: usize, blocks: usize) -> Vec<u8> {
        assert_eq!(scales.len(), self.len(rows, blocks), "scale buffer does not fit its layout");
        let mut out = vec![0; to.len(rows, blocks)];
        for row in 0..rows {
            for block in 0..blocks {
                out[to.offset(row, block, blocks)] = scales[self.offset(row, block, blocks)];
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// TransformerEngine#3048: floor where ceil is needed loses the second tile, which row 128 starts.
    #[test]
    fn check_values_of_128x4() {
        let at = |r, c| ScaleLayout::Sf128x4.offset(r, c, 29);
        assert_eq!(
            [at(0, 0), at(1, 0), at(32, 0), at(127, 3), at(0, 4), at(128, 0), at(199, 28)],
            [0, 16, 4, 511, 512, 4096, 7800]
        );
        assert_eq!(ScaleLayout::Sf128x4.len(200, 29), 8192);
        assert_eq!(ScaleLayout::Sf128x4.len(130, 5), 2048);
        assert_eq!([ScaleLayout::Sf128x4.len(1, 896), ScaleLayout::Linear.len(1, 896)], [114688, 896]);
    }

    #[test]
    fn every_layout_is_injective_and_in_bounds() {
        for layout in ScaleLayout::ALL {
            for (rows, blocks) in [1, 7, 33, 127, 128, 130, 576]
                .into_iter()
                .flat_map(|r| [1, 3, 4, 5, 8, 29, 36].into_iter().map(move |c| (r, c)))
            {
                let mut seen = vec![false; layout.len(rows, blocks)];
                for r in 0..rows {
                    for c in 0..blocks {
                        assert!(!std::mem::replace(&mut seen[layout.offset(r, c, blocks)], true));
                    }
                }
            }
        }
    }
}
