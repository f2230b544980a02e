//! A tile of C in shared memory on its way to global memory: threads that hold single elements put them there, and all of
//! them then copy whole pieces of rows.

use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::SmemLayout;

use super::rows::Rows;
use super::variant::Out;

/// Bytes from row to row of a staged tile: 16 more than its features take, which spreads the rows over the banks.
pub(crate) const fn pitch(out: Out, features: u32) -> u32 {
    features * out.staged_bytes() + 16
}

/// Makes room for a staged tile over the stages, which are read by then, and behind them if they are smaller.
pub(crate) fn stage_over(smem: &mut SmemLayout, out: Out, tokens: u32, features: u32) {
    let staged = tokens * pitch(out, features);
    if staged > smem.bytes() {
        smem.alloc("staged", staged - smem.bytes(), 16);
    }
}

/// A tile of C in shared memory: a row for each token, rows [`pitch`] bytes apart. Nvfp4 is staged as f32.
pub(crate) struct Staged<'a> {
    pub rows: &'a Rows,
    /// The first element.
    pub start: Addr<Shared>,
    /// Features of the tile, and threads that copy it.
    pub features: u32,
    pub threads: u32,
}

impl Staged<'_> {
    pub fn pitch(&self) -> u32 {
        pitch(self.rows.variant.out, self.features)
    }

    /// Address of an element.
    pub fn place(&self, k: &mut Kernel, token: Reg<U32>, feature: Reg<U32>) -> Addr<Shared> {
        let row = token * self.pitch();
        k.offset(self.start, feature * self.rows.variant.out.staged_bytes() + row)
    }

    /// Rounds an element and stores it.
    pub fn store(&self, k: &mut Kernel, to: Addr<Shared>, value: Reg<F32>) {
        self.rows.variant.out.store(k, None, to, value);
    }

    /// The tile's first `tokens` rows to C, a piece at a time: to the rows from `first` on below `end`, the features from
    /// `feature` on below `last`. A barrier comes before. Lanes leave apart.
    pub fn copy_out(
        &self,
        k: &mut Kernel,
        tokens: u32,
        (first, end): (Reg<U32>, Reg<U32>),
        (feature, last): (Reg<U32>, Reg<U32>),
    ) {
        let (rows, out) = (self.rows, self.rows.variant.out);
        let (piece_features, bytes) = (out.piece(), out.staged_bytes());
        let pieces = self.features / piece_features;
        let thread = k.special(Special::TidX);
        k.for_range("store", thread, tokens * pieces, self.threads, |k, i, _| {
            let (token, piece) = (k.eval(i / pieces), k.eval(i % pieces));
            let row = token * self.pitch();
            let from = k.offset(self.start, piece * (piece_features * bytes) + row);
            let feature = k.eval(piece * piece_features + feature);
            let row = k.eval(first + token);
            let inside = k.compare(Cmp::Lt, row, end);
            if let Some(quantize) = &rows.quantize {
                let inside = k.compare_and(Cmp::Lt, feature, last, inside);
                k.if_(inside, "block", |k| {
                    let quarters: [[Reg<F32>; 4]; 4] =
                        [0u32, 16, 32, 48].map(|byte| k.ld_vector(from.at(byte)));
                    let values = std::array::from_fn(|i| quarters[i / 4][i % 4]);
                    rows.store_block(k, quantize, (row, feature), &values);
                });
                return;
            }
            if rows.variant.aligned {
                let inside = k.compare_and(Cmp::Lt, feature, last, inside);
                k.if_(inside, "piece", |k| {
                    let words: [Reg<B32>; 4] = k.ld_vector(from);
                    let to = rows.place(k, row, feature);
                    k.st_vector(to, &words);
                });
                return;
            }
            for element in 0..piece_features {
                let feature = k.eval(feature + element);
                let inside = k.compare_and(Cmp::Lt, feature, last, inside);
                k.if_(inside, "element", |k| {
                    let to = rows.place(k, row, feature);
                    let from = from.at(element * bytes);
                    if bytes == 2 {
                        let half: Reg<B16> = k.ld(from);
                        k.st(to, half);
                    } else {
                        let word: Reg<B32> = k.ld(from);
                        k.st(to, word);
                    }
                });
            }
        });
    }
}
