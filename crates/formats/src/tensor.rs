//! Quantized matrices with their scales; they borrow or own their bytes.

use std::borrow::Cow;
use std::ops::Range;

use crate::scalar::e2m1;
use crate::{BlockFormat, Error, GlobalScale, ScaleLayout};

/// A `[rows, k]` matrix of 4-bit codes with a scale per block of K and one per tensor.
///
/// Codes are row-major, two per byte, the even element in the low nibble; rows may be farther apart than
/// `k / 2` bytes (a view into a wider matrix). Scales follow a [`ScaleLayout`]. Sizes are checked once, here;
/// scale *values* are checked by [`check_scales`](Self::check_scales), because a reader may want to list faults.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedMatrix<'a> {
    name: Cow<'a, str>,
    format: BlockFormat,
    rows: usize,
    k: usize,
    row_stride: usize,
    codes: Cow<'a, [u8]>,
    scales: Cow<'a, [u8]>,
    scale_layout: ScaleLayout,
    global_scale: GlobalScale,
}

impl<'a> QuantizedMatrix<'a> {
    /// A dense matrix: `codes` is `[rows, k / 2]` bytes, `scales` is [`ScaleLayout::len`] of `rows` and `k / block_len`.
    /// `name` is what error messages call the tensor.
    ///
    /// # Errors
    /// If there is no row, K is not a whole number of blocks, a buffer has the wrong size, or the tensor scale is not a
    /// positive finite number.
    #[expect(clippy::too_many_arguments, reason = "the eight facts that make a quantized tensor")]
    pub fn new(
        name: impl Into<Cow<'a, str>>,
        format: BlockFormat,
        rows: usize,
        k: usize,
        codes: impl Into<Cow<'a, [u8]>>,
        scales: impl Into<Cow<'a, [u8]>>,
        scale_layout: ScaleLayout,
        global_scale: GlobalScale,
    ) -> Result<Self, Error> {
        let codes = codes.into();
        let this = Self::strided(name, format, rows, k, k / 2, codes, scales, scale_layout, global_scale)?;
        if this.codes.len() != rows * (k / 2) {
            return Err(this.codes_len(rows * (k / 2)));
        }
        Ok(this)
    }

    /// A view whose rows lie `row_stride` bytes apart; bytes between rows are never read.
    ///
    /// # Errors
    /// As [`new`](Self::new), except that `codes` may be longer than needed.
    #[expect(clippy::too_many_arguments, reason = "the nine facts that make a view of a quantized tensor")]
    pub fn strided(
        name: impl Into<Cow<'a, str>>,
        format: BlockFormat,
        rows: usize,
        k: usize,
        row_stride: usize,
        codes: impl Into<Cow<'a, [u8]>>,
        scales: impl Into<Cow<'a, [u8]>>,
        scale_layout: ScaleLayout,
        global_scale: GlobalScale,
    ) -> Result<Self, Error> {
        let (name, codes, scales) = (name.into(), codes.into(), scales.into());
        if rows == 0 {
            return Err(Error::NoRows { tensor: name.into() });
        }
        if k == 0 || !k.is_multiple_of(format.block_len()) {
            return Err(Error::KNotWholeBlocks { tensor: name.into(), format, k });
        }
        let blocks = k / format.block_len();
        let too_large = || Error::TooLarge { tensor: name.to_string(), rows, row_stride };
        let needed =
            (rows - 1).checked_mul(row_stride).and_then(|n| n.checked_add(k / 2)).ok_or_else(too_large)?;
        let scales_needed = scale_layout.checked_len(rows, blocks).ok_or_else(too_large)?;
        let this = Self { name, format, rows, k, row_stride, codes, scales, scale_layout, global_scale };
        if row_stride < k / 2 {
            return Err(Error::RowStride { tensor: this.name.into(), row_stride, row: k / 2, unit: "bytes" });
        }
        if this.codes.len() < needed {
            return Err(this.codes_len(needed));
        }
        if this.scales.len() != scales_needed {
            return Err(Error::ScalesLen {
                tensor: this.name.into(),
                rows,
                blocks,
                layout: scale_layout,
                found: this.scales.len(),
                needed: scales_needed,
            });
        }
        if !global_scale.is_valid() {
            return Err(Error::GlobalScale { tensor: this.name.into(), value: global_scale.held() });
        }
        Ok(this)
    }

    fn codes_len(&self, needed: usize) -> Error {
        Error::CodesLen {
            tensor: self.name.to_string(),
            rows: self.rows,
            k: self.k,
            row_stride: self.row_stride,
            found: self.codes.len(),
            needed,
        }
    }

    /// What error messages call this tensor.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Block format.
    pub fn format(&self) -> BlockFormat {
        self.format
    }

    /// Rows: M of an activation, N of a weight.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements per row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Blocks, and so scales, per row.
    pub fn blocks(&self) -> usize {
        self.k / self.format.block_len()
    }

    /// The `k / 2` code bytes of a row.
    ///
    /// # Panics
    /// If the row lies past the codes.
    #[inline]
    pub fn row_codes(&self, row: usize) -> &[u8] {
        let start = row * self.row_stride;
        &self.codes[start..start + self.k / 2]
    }

    /// Codes and block scales of some rows, copied, both dense and row by row.
    ///
    /// # Panics
    /// If a row is beyond the matrix.
    pub fn dense_rows(&self, rows: impl Iterator<Item = usize> + Clone) -> (Vec<u8>, Vec<u8>) {
        let codes = rows.clone().flat_map(|row| self.row_codes(row)).copied().collect();
        let scales = rows.flat_map(|row| (0..self.blocks()).map(move |b| self.scale_byte(row, b))).collect();
        (codes, scales)
    }

    /// Some rows, copied; their block scales are row by row. `name` is what error messages call them.
    ///
    /// # Errors
    /// If there is none.
    ///
    /// # Panics
    /// If a row is beyond the matrix.
    pub fn pick(&self, name: impl Into<String>, rows: &[usize]) -> Result<QuantizedMatrix<'static>, Error> {
        let (codes, scales) = self.dense_rows(rows.iter().copied());
        let (linear, global) = (ScaleLayout::Linear, self.global_scale);
        QuantizedMatrix::new(name.into(), self.format, rows.len(), self.k, codes, scales, linear, global)
    }

    /// All code bytes as held, rows [`row_stride`](Self::row_stride) apart.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Bytes from one row of codes to the next.
    pub fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// All scale bytes as held, in [`scale_layout`](Self::scale_layout) order.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// Order of the scale bytes.
    pub fn scale_layout(&self) -> ScaleLayout {
        self.scale_layout
    }

    /// The scale of the whole tensor.
    pub fn global_scale(&self) -> GlobalScale {
        self.global_scale
    }

    /// The e2m1 code of an element, 0 to 15.
    ///
    /// # Panics
    /// As [`row_codes`](Self::row_codes), and if `k` lies past the row.
    #[inline]
    pub fn code(&self, row: usize, k: usize) -> u8 {
        let (even, odd) = e2m1::unpack(self.row_codes(row)[k / 2]);
        if k.is_multiple_of(2) { even } else { odd }
    }

    /// The scale byte of a block, e4m3 in nvfp4 and ue8m0 in mxfp4; [`BlockFormat::decode_scale`] gives its value.
    ///
    /// # Panics
    /// If its [`offset`](ScaleLayout::offset) lies past the scales. A block beyond the matrix may also give another byte.
    #[inline]
    pub fn scale_byte(&self, row: usize, block: usize) -> u8 {
        self.scales[self.scale_layout.offset(row, block, self.blocks())]
    }

    /// The value of an element, `code · block scale · tensor scale`, in f64: exact but for the product with the tensor
    /// scale.
    ///
    /// # Panics
    /// As [`code`](Self::code).
    pub fn value(&self, row: usize, k: usize) -> f64 {
        let scale = self.format.decode_scale(self.scale_byte(row, k / self.format.block_len()));
        f64::from(e2m1::decode(self.code(row, k))) * f64::from(scale) * self.global_scale.exact()
    }

    /// Checks every scale byte; padding is not looked at.
    ///
    /// # Errors
    /// Names the first NaN or negative scale.
    pub fn check_scales(&self) -> Result<(), Error> {
        // Vectors of bytes see at once that all are sound, as they nearly always are, padding included.
        let faulty = self.format.first_faulty_scale();
        if self.scales.iter().fold(true, |sound, &byte| sound & (byte < faulty)) {
            return Ok(());
        }
        self.check_scales_of(0..self.rows)
    }

    /// As [`check_scales`](Self::check_scales), of some rows.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If `rows` reaches past the matrix.
    pub fn check_scales_of(&self, rows: Range<usize>) -> Result<(), Error> {
        for row in rows {
            for block in 0..self.blocks() {
                self.format.check_scale(&self.name, (row, block), self.scale_byte(row, block))?;
            }
        }
        Ok(())
    }

    /// The same matrix with its scales in another layout.
    pub fn with_scale_layout(mut self, layout: ScaleLayout) -> Self {
        if layout != self.scale_layout {
            let scales = self.scale_layout.convert(&self.scales, layout, self.rows, self.blocks());
            self.scales = Cow::Owned(scales);
            self.scale_layout = layout;
        }
        self
    }

    /// Consecutive rows. What is borrowed stays so; scales keep their layout, and are copied, their padding zeroed, where these
    /// rows are not whole atoms of it.
    ///
    /// # Errors
    /// If `rows` is empty.
    ///
    /// # Panics
    /// If the matrix has not these rows.
    pub fn into_rows(self, rows: Range<usize>) -> Result<Self, Error> {
        if rows.is_empty() {
            return Err(Error::NoRows { tensor: self.name.into() });
        }
        assert!(rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let (layout, blocks) = (self.scale_layout, self.blocks());
        let (atom_rows, atom_blocks) = layout.atom();
        let whole_atoms = [rows.start, rows.end].iter().all(|row| row.is_multiple_of(atom_rows))
            && blocks.is_multiple_of(atom_blocks);
        let scales = if whole_atoms {
            let start = layout.offset(rows.start, 0, blocks);
            part(&self.scales, start..start + layout.len(rows.len(), blocks))
        } else {
            Cow::Owned(self.scales_of(rows.clone(), 0..blocks))
        };
        let codes = rows.start * self.row_stride..(rows.end - 1) * self.row_stride + self.k / 2;
        Ok(Self { rows: rows.len(), codes: part(&self.codes, codes), scales, ..self })
    }

    /// The block scales of some rows and blocks, in the layout of the whole.
    pub(crate) fn scales_of(&self, rows: Range<usize>, blocks: Range<usize>) -> Vec<u8> {
        let mut scales = vec![0; self.scale_layout.len(rows.len(), blocks.len())];
        for (r, row) in rows.enumerate() {
            for (b, block) in blocks.clone().enumerate() {
                scales[self.scale_layout.offset(r, b, blocks.len())] = self.scale_byte(row, block);
            }
        }
        scales
    }

    /// The same matrix, borrowing its bytes from this one.
    pub(crate) fn borrowed(&self) -> QuantizedMatrix<'_> {
        let (name, codes, scales) = ((&*self.name).into(), (&*self.codes).into(), (&*self.scales).into());
        QuantizedMatrix { name, codes, scales, ..*self }
    }

    /// The same matrix with the nibbles of every byte of codes exchanged.
    pub fn with_swapped_nibbles(mut self) -> Self {
        self.codes.to_mut().iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
        self
    }

    /// The same matrix, owning its bytes.
    pub fn into_owned(self) -> QuantizedMatrix<'static> {
        QuantizedMatrix {
            name: Cow::Owned(self.name.into_owned()),
            format: self.format,
            rows: self.rows,
            k: self.k,
            row_stride: self.row_stride,
            codes: Cow::Owned(self.codes.into_owned()),
            scales: Cow::Owned(self.scales.into_owned()),
            scale_layout: self.scale_layout,
            global_scale: self.global_scale,
        }
    }
}

/// A part of bytes, borrowed if they are.
fn part<'a>(bytes: &Cow<'a, [u8]>, range: Range<usize>) -> Cow<'a, [u8]> {
    match bytes {
        Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[range]),
        Cow::Owned(bytes) => Cow::Owned(bytes[range].to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(
        k: usize,
        codes: Vec<u8>,
        scales: Vec<u8>,
        global: GlobalScale,
    ) -> Result<QuantizedMatrix<'static>, Error> {
        QuantizedMatrix::new("w", BlockFormat::Nvfp4, 2, k, codes, scales, ScaleLayout::Linear, global)
    }

    #[test]
    fn value_is_code_times_both_scales() {
        let mut codes = vec![0; 16];
        codes[8] = e2m1::pack(7, 9);
        let m = matrix(16, codes, vec![0x38, 0x40], GlobalScale::divisor(4.0)).unwrap();
        assert_eq!([m.value(1, 0), m.value(1, 1), m.value(0, 5)], [3.0, -0.25, 0.0]);
    }

    #[test]
    fn sizes_are_checked_and_errors_say_what_would_fit() {
        let one = GlobalScale::ONE;
        let message = |r: Result<QuantizedMatrix<'_>, Error>| r.unwrap_err().to_string();
        assert_eq!(
            message(matrix(24, vec![0; 24], vec![0; 2], one)),
            "w: K = 24 is not a positive multiple of 16, the nvfp4 block length"
        );
        assert_eq!(
            message(matrix(32, vec![0; 31], vec![0; 4], one)),
            "w: codes hold 31 bytes; [2, 32] with a row stride of 16 bytes needs 32"
        );
        assert_eq!(
            message(matrix(32, vec![0; 32], vec![0; 3], one)),
            "w: scales hold 3 bytes; 2 rows of 2 blocks in linear layout need 4"
        );
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(matrix(32, vec![0; 32], vec![0; 4], GlobalScale::multiplier(bad)).is_err());
            assert!(matrix(32, vec![0; 32], vec![0; 4], GlobalScale::divisor(bad)).is_err());
        }
    }

    #[test]
    fn overflowing_sizes_are_refused() {
        let r = QuantizedMatrix::new(
            "w",
            BlockFormat::Nvfp4,
            usize::MAX / 8,
            16,
            vec![],
            vec![],
            ScaleLayout::Linear,
            GlobalScale::ONE,
        );
        assert!(matches!(r, Err(Error::CodesLen { .. } | Error::TooLarge { .. })));
    }

    #[test]
    fn rows_that_overlap_are_refused_by_what_they_hold() {
        let (format, layout, one) = (BlockFormat::Nvfp4, ScaleLayout::Linear, GlobalScale::ONE);
        let view = QuantizedMatrix::strided("w", format, 2, 16, 7, vec![0; 16], vec![0; 2], layout, one);
        let message = view.unwrap_err().to_string();
        assert_eq!(message, "w: a row stride of 7 bytes; a row has 8, so at least that is needed");
    }

    #[test]
    fn views_skip_the_bytes_between_rows() {
        let mut codes = vec![0xEE; 8 + 4 + 8];
        codes[..8].fill(0x11);
        codes[12..].fill(0x22);
        let m = QuantizedMatrix::strided(
            "a",
            BlockFormat::Nvfp4,
            2,
            16,
            12,
            codes,
            vec![0x38; 2],
            ScaleLayout::Linear,
            GlobalScale::ONE,
        )
        .unwrap();
        assert!((0..16).all(|k| m.value(0, k) == 0.5 && m.value(1, k) == 1.0));
    }

    #[test]
    fn bad_scale_bytes_are_named() {
        let m = matrix(32, vec![0; 32], vec![0x38, 0x38, 0x38, 0x7F], GlobalScale::ONE).unwrap();
        assert_eq!(
            m.check_scales().unwrap_err().to_string(),
            "w: block scale 0x7f at row 1, block 1 is NaN; valid are 0x00..=0x7e"
        );
    }

    #[test]
    fn relayout_keeps_every_value() {
        let scales: Vec<u8> = (0..10).map(|i| 0x30 + i).collect();
        let m = matrix(80, (0..80).collect(), scales, GlobalScale::ONE).unwrap();
        let swizzled = m.clone().with_scale_layout(ScaleLayout::Sf128x4);
        assert!((0..80).all(|k| m.value(1, k) == swizzled.value(1, k)));
        assert_eq!(swizzled.with_scale_layout(ScaleLayout::Linear), m);
    }
}
