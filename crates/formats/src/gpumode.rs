//! The six-dimensional scale view `[32, 4, M/128, 4, K/64, L]` of the GPU MODE kernel challenge, which is how
//! CuTe prints the 128x4 layout.
//!
//! Scale of row `r`, block `c`, batch entry `l`:
//!
//! ```text
//! index   (r % 32, r % 128 / 32, r / 128, c % 4, c / 4, l)
//! shape   (32, 4, rest_m, 4, rest_k, L)             rest_m = ⌈rows / 128⌉, rest_k = ⌈blocks / 4⌉
//! strides (16, 4, 512·rest_k, 1, 512, 512·rest_m·rest_k)
//! ```
//!
//! In memory that is `[L, rest_m, rest_k, 32, 4, 4]`: the bytes of [`ScaleLayout::Sf128x4`], each batch entry
//! padded alone, padding zero. Frameworks that copy the view before saving it write its six dimensions in row-major
//! order instead; [`GpuModeScales::contiguous`] describes that.
//!
//! Source: <https://github.com/gpu-mode/reference-kernels>, `problems/nvidia/nvfp4_dual_gemm`.

use crate::{Error, ScaleLayout};

/// Shape and strides of a six-dimensional scale view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuModeScales {
    rows: usize,
    blocks: usize,
    batch: usize,
    strides: [usize; 6],
}

impl GpuModeScales {
    /// The view of the scales of `batch` matrices of `rows` rows and `blocks` blocks per row, over 128x4 bytes.
    ///
    /// # Errors
    /// If a size is 0 or the product overflows; the message calls the tensor `name`.
    pub fn new(name: &str, rows: usize, blocks: usize, batch: usize) -> Result<Self, Error> {
        let fits = ScaleLayout::Sf128x4.checked_len(rows, blocks).and_then(|n| n.checked_mul(batch));
        if fits.is_none_or(|n| n == 0) {
            return Err(Error::GpuModeShape { tensor: name.into(), rows, blocks, batch });
        }
        let (rest_m, rest_k) = (rows.div_ceil(128), blocks.div_ceil(4));
        let strides = [16, 4, 512 * rest_k, 1, 512, 512 * rest_m * rest_k];
        Ok(Self { rows, blocks, batch, strides })
    }

    /// The same view over bytes in row-major order of the six dimensions.
    pub fn contiguous(mut self) -> Self {
        let shape = self.shape();
        self.strides = [1; 6];
        for d in (0..5).rev() {
            self.strides[d] = self.strides[d + 1] * shape[d + 1];
        }
        self
    }

    /// Extents of the six dimensions.
    pub fn shape(&self) -> [usize; 6] {
        [32, 4, self.rows.div_ceil(128), 4, self.blocks.div_ceil(4), self.batch]
    }

    /// Bytes from one index to the next, in each dimension.
    pub fn strides(&self) -> [usize; 6] {
        self.strides
    }

    /// Bytes in all, padding included.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Never: a view without bytes cannot be made.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Index of the scale of a row, a block and a batch entry.
    pub fn index(row: usize, block: usize, entry: usize) -> [usize; 6] {
        [row % 32, row % 128 / 32, row / 128, block % 4, block / 4, entry]
    }

    /// Byte offset of the scale of a row, a block and a batch entry, which are the view's: none is checked.
    pub fn offset(&self, row: usize, block: usize, entry: usize) -> usize {
        Self::index(row, block, entry).iter().zip(self.strides).map(|(i, stride)| i * stride).sum()
    }

    /// Bytes of this view from scales in `layout`, the batch entries one after the other, each
    /// `layout.len(rows, blocks)` bytes. Padding becomes zero.
    ///
    /// # Errors
    /// If `scales` has another size; the message calls the tensor `name`.
    pub fn gather(&self, name: &str, scales: &[u8], layout: ScaleLayout) -> Result<Vec<u8>, Error> {
        let entry_len = layout.len(self.rows, self.blocks);
        self.check_len(name, scales.len(), self.batch * entry_len)?;
        let mut out = vec![0; self.len()];
        self.for_each(|entry, row, block, at| {
            out[at] = scales[entry * entry_len + layout.offset(row, block, self.blocks)];
        });
        Ok(out)
    }

    /// The inverse of [`gather`](Self::gather): scales in `layout` from the bytes of this view.
    ///
    /// # Errors
    /// If `view` is not [`len`](Self::len) bytes long; the message calls the tensor `name`.
    pub fn scatter(&self, name: &str, view: &[u8], layout: ScaleLayout) -> Result<Vec<u8>, Error> {
        let entry_len = layout.len(self.rows, self.blocks);
        self.check_len(name, view.len(), self.len())?;
        let mut out = vec![0; self.batch * entry_len];
        self.for_each(|entry, row, block, at| {
            out[entry * entry_len + layout.offset(row, block, self.blocks)] = view[at];
        });
        Ok(out)
    }

    fn for_each(&self, mut f: impl FnMut(usize, usize, usize, usize)) {
        for entry in 0..self.batch {
            for row in 0..self.rows {
                for block in 0..self.blocks {
                    f(entry, row, block, self.offset(row, block, entry));
                }
            }
        }
    }

    fn check_len(&self, name: &str, found: usize, needed: usize) -> Result<(), Error> {
        if found == needed {
            return Ok(());
        }
        let Self { rows, blocks, batch, .. } = *self;
        Err(Error::GpuModeLen { tensor: name.into(), rows, blocks, batch, found, needed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: [usize; 5] = [1, 33, 127, 130, 576];
    const BLOCKS: [usize; 6] = [1, 3, 5, 8, 29, 36];

    #[test]
    fn shape_strides_and_check_values() {
        let view = GpuModeScales::new("sfa", 200, 29, 3).unwrap();
        assert_eq!(view.shape(), [32, 4, 2, 4, 8, 3]);
        assert_eq!(view.strides(), [16, 4, 4096, 1, 512, 8192]);
        let at = |r, c| view.offset(r, c, 0);
        assert_eq!(
            [at(0, 0), at(1, 0), at(32, 0), at(127, 3), at(0, 4), at(128, 0), at(199, 28)],
            [0, 16, 4, 511, 512, 4096, 7800]
        );
        assert_eq!([view.offset(199, 28, 2), view.len()], [2 * 8192 + 7800, 3 * 8192]);
    }

    #[test]
    fn storage_bytes_are_those_of_128x4() {
        for rows in ROWS {
            for blocks in BLOCKS {
                let view = GpuModeScales::new("sf", rows, blocks, 1).unwrap();
                assert_eq!(view.len(), ScaleLayout::Sf128x4.len(rows, blocks));
                for row in 0..rows {
                    for block in 0..blocks {
                        let swizzled = ScaleLayout::Sf128x4.offset(row, block, blocks);
                        assert_eq!(view.offset(row, block, 0), swizzled);
                    }
                }
            }
        }
    }

    #[test]
    fn round_trips_from_every_layout_and_zeroes_the_padding() {
        for rows in ROWS {
            for blocks in BLOCKS {
                let view = GpuModeScales::new("sf", rows, blocks, 3).unwrap();
                let linear: Vec<u8> = (0..3 * rows * blocks).map(|i| (i % 126) as u8 + 1).collect();
                for view in [view, view.contiguous()] {
                    let bytes = view.gather("sf", &linear, ScaleLayout::Linear).unwrap();
                    assert_eq!(bytes.iter().filter(|&&b| b != 0).count(), linear.len());
                    for layout in ScaleLayout::ALL {
                        let there = view.scatter("sf", &bytes, layout).unwrap();
                        assert_eq!(view.gather("sf", &there, layout).unwrap(), bytes);
                    }
                    assert_eq!(view.scatter("sf", &bytes, ScaleLayout::Linear).unwrap(), linear);
                }
            }
        }
    }

    #[test]
    fn batch_entries_are_padded_alone() {
        let view = GpuModeScales::new("sf", 1, 1, 2).unwrap();
        let bytes = view.gather("sf", &[5, 7], ScaleLayout::Linear).unwrap();
        assert_eq!((bytes.len(), bytes[0], bytes[512]), (1024, 5, 7));
        assert_eq!(view.contiguous().gather("sf", &[5, 7], ScaleLayout::Linear).unwrap()[..3], [5, 7, 0]);
    }

    #[test]
    fn empty_huge_and_wrong_sizes_are_refused() {
        for (rows, blocks, batch) in
            [(0, 1, 1), (1, 0, 1), (1, 1, 0), (usize::MAX, 1, 1), (1 << 40, 1 << 20, 16)]
        {
            assert!(GpuModeScales::new("sf", rows, blocks, batch).is_err());
        }
        let view = GpuModeScales::new("sf", 2, 3, 1).unwrap();
        assert_eq!(
            view.gather("sf", &[0; 5], ScaleLayout::Linear).unwrap_err().to_string(),
            "sf: scales hold 5 bytes; 1 × 2 rows of 3 blocks need 6"
        );
        assert!(view.scatter("sf", &[0; 511], ScaleLayout::Linear).is_err());
    }
}
