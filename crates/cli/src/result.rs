//! C as a matrix in one of the output formats: read from a result file, written to one, compared with f64 values.
//!
//! A float C is tensor `c` `[M,N]`; an nvfp4 one is the triple `c_packed` (U8 `[M,N/2]`), `c_scale` (F8_E4M3
//! `[M,N/16]`) and `c_scale_2` (F32 `[1]`, multiplier).

use std::path::Path;

use dualgemm::OwnedMatrix;
use dualgemm::check::RowSample;
use dualgemm::checkpoint::write::write_activations;
use dualgemm::checkpoint::{TensorFiles, activations};
use dualgemm::formats::quantize::te_codes;
use dualgemm::formats::scalar::{e2m1, e4m3};
use dualgemm::formats::{FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, match_floats};
use dualgemm::gemm::{AFormat, AOperand, Bounded, Comparer, Comparison, OutFormat, OutScale};

/// C, `[m, n]`, in the form in which A of the next layer would be given.
#[derive(Debug)]
pub struct ResultMatrix<'a>(AOperand<'a>);

impl<'a> ResultMatrix<'a> {
    /// Finds C in a file: the tensor named, or `c`, or the triple, or the only tensor there is.
    pub fn find(files: &'a TensorFiles, tensor: Option<&str>) -> anyhow::Result<Self> {
        let tensor = tensor.or_else(|| files.get("c").map(|c| c.name));
        Ok(Self(activations::read_result(files, tensor)?))
    }

    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.0.rows(), self.0.k())
    }

    /// Format of the elements.
    pub fn format(&self) -> AFormat {
        AFormat::of(&self.0)
    }

    /// The tensor scale of an nvfp4 C, a multiplier.
    pub fn tensor_scale(&self) -> Option<f32> {
        match &self.0 {
            AOperand::Quantized(m) => Some(m.global_scale().value()),
            AOperand::Float(_) => None,
        }
    }

    /// The format that a run which makes it was asked for.
    pub fn out(&self) -> OutFormat {
        match &self.0 {
            AOperand::Float(m) => m.float_type().into(),
            AOperand::Quantized(m) => OutFormat::Nvfp4 {
                scale_layout: m.scale_layout(),
                global_scale: OutScale::Static(m.global_scale().value()),
            },
        }
    }

    /// The values of the sampled rows as f64.
    pub fn to_f64(&self, sample: &RowSample) -> Vec<f64> {
        let row = |&row: &usize| (0..self.0.k()).map(move |col| self.0.value(row, col));
        sample.rows().iter().flat_map(row).collect()
    }

    /// Compares the sampled rows with the reference of those rows.
    pub fn compare<W: Copy + Into<Bounded>>(
        &self,
        want: &[W],
        sample: &RowSample,
    ) -> anyhow::Result<Comparison> {
        let mut comparing = Comparing::new(self);
        comparing.add(want, sample)?;
        comparing.finish()
    }
}

/// A result being compared, some rows at a time.
///
/// Of an nvfp4 result, relative L2 and cosine are those of its values; units in the last place are steps of the e2m1
/// grid under the scales that the result itself chose, and bits are codes. Its codes are held to the bounds of the values
/// under those scales, and its block scales to those of the largest in a block under its tensor scale.
#[derive(Debug)]
pub struct Comparing<'a> {
    result: &'a ResultMatrix<'a>,
    comparer: Comparer,
    rows: Vec<usize>,
    /// The most steps, and elements more than one step off.
    steps: (u64, usize),
    scale_steps: u64,
    /// What the reference comes to under the tensor scale of an nvfp4 result.
    nearest: Comparer,
}

impl<'a> Comparing<'a> {
    /// Nothing compared yet.
    pub fn new(result: &'a ResultMatrix<'a>) -> Self {
        Self {
            result,
            comparer: Comparer::new(result.0.k()),
            rows: Vec::new(),
            steps: (0, 0),
            scale_steps: 0,
            nearest: Comparer::new(result.0.k()),
        }
    }

    /// Compares the sampled rows with the reference of those rows.
    pub fn add<W: Copy + Into<Bounded>>(&mut self, want: &[W], sample: &RowSample) -> anyhow::Result<()> {
        fn pick<T: Copy>(m: &Matrix<'_, T>, sample: &RowSample) -> Vec<T> {
            sample.rows().iter().flat_map(|&row| m.row(row)).copied().collect()
        }
        match &self.result.0 {
            AOperand::Float(m) => {
                match_floats!(m, FloatMatrix(m) => self.comparer.add(&pick(m, sample), want)?);
            }
            AOperand::Quantized(m) => {
                let want: Vec<Bounded> = want.iter().map(|&want| want.into()).collect();
                let (mut values, mut stored) = (Vec::new(), Vec::with_capacity(want.len()));
                for (at, &want) in want.iter().enumerate() {
                    let (row, col) = (sample.rows()[at / m.k()], at % m.k());
                    let (code, nearest) = codes(m, row, col, want.value);
                    let off = steps(code, nearest);
                    self.steps.0 = self.steps.0.max(off);
                    self.steps.1 += usize::from(off > 1);
                    values.push(m.value(row, col) as f32);
                    stored.push(Bounded { error: want.error + code_error(m, row, col, want.value), ..want });
                }
                self.comparer.add(&values, &stored)?;
                let mut nearest = Vec::with_capacity(want.len());
                for (at, block) in want.as_chunks::<16>().0.iter().enumerate() {
                    let (row, block_of_row) = (sample.rows()[at / m.blocks()], at % m.blocks());
                    let (codes, scale) = te_codes(&block.map(|x| x.value as f32), m.global_scale());
                    let [low, high] = scale_range(block, m.global_scale());
                    let found = m.scale_byte(row, block_of_row);
                    // Nothing is known of a block with a number that exceeds f32 on its way.
                    let known = block.iter().all(|want| !want.error.is_nan());
                    let off =
                        if known { low.saturating_sub(found).max(found.saturating_sub(high)) } else { 0 };
                    self.scale_steps = self.scale_steps.max(off.into());
                    let scale = f64::from(m.format().decode_scale(scale)) * m.global_scale().exact();
                    nearest.extend(codes.map(|code| (f64::from(e2m1::decode(code)) * scale) as f32));
                }
                let want: Vec<f64> = want.iter().map(|want| want.value).collect();
                self.nearest.add(&nearest, &want)?;
            }
        }
        self.rows.extend(sample.rows());
        Ok(())
    }

    /// The comparison of all rows so far.
    pub fn finish(self) -> anyhow::Result<Comparison> {
        let mut found = self.comparer.finish()?;
        // The row within what was compared is of no use to anybody.
        let row = self.rows[found.worst.row];
        found.worst.row = row;
        if let AOperand::Quantized(m) = &self.result.0 {
            (found.max_ulp, found.over_1_ulp) = self.steps;
            found.max_scale_steps = Some(self.scale_steps);
            found.nearest_rel_l2 = Some(self.nearest.finish()?.rel_l2);
            let (code, nearest) = codes(m, row, found.worst.col, found.worst.want);
            (found.worst.got_bits, found.worst.want_bits) = (code.into(), nearest.into());
        }
        Ok(found)
    }
}

/// The code of an element and the one nearest to a value under the same scales. Under the scale zero every code is 0, and
/// so it should be for what is too small for another scale; for what is not, the least scale says how far off that is.
fn codes(m: &QuantizedMatrix<'_>, row: usize, col: usize, value: f64) -> (u8, u8) {
    let scale = m.format().decode_scale(m.scale_byte(row, col / m.format().block_len()));
    let under = |scale: f32| e2m1::encode((value / (f64::from(scale) * m.global_scale().exact())) as f32);
    if scale > 0.0 {
        return (m.code(row, col), under(scale));
    }
    // Magnitudes of up to 6 · 2⁻¹⁰ give a block the scale zero: those are up to 3 under the least scale, code 5.
    let code = under(e4m3::MIN_POSITIVE);
    (0, if code & 7 <= 5 { 0 } else { code })
}

/// What quantizers lose beside rounding to a code, of the value: a few roundings of reciprocals and products to f32.
const QUANTIZER_ERROR: f64 = 1.0 / (1 << 21) as f64;

/// How far a value may be from the element that it was quantized to, under the scale that the result has: half a step of
/// the e2m1 grid toward it. Beyond the largest code there is none, and what the block scale may be says how far.
fn code_error(m: &QuantizedMatrix<'_>, row: usize, col: usize, value: f64) -> f64 {
    let held = f64::from(m.format().decode_scale(m.scale_byte(row, col / m.format().block_len())));
    let scale = |scale: f64| scale * m.global_scale().exact();
    let step = if held == 0.0 {
        // Magnitudes of up to 6 · 2⁻¹⁰ give a block the scale zero.
        scale(3.0 * f64::from(e4m3::MIN_POSITIVE))
    } else {
        let code = m.code(row, col);
        let away = (value < 0.0) == (code & 8 != 0) && value.abs() > m.value(row, col).abs() || code & 7 == 0;
        let at = |position: u8| f64::from(e2m1::decode(position));
        match (code & 7, away) {
            (7, true) => f64::MAX,
            (position, true) => scale(held) * (at(position + 1) - at(position)) / 2.0,
            (position, false) => scale(held) * (at(position) - at(position - 1)) / 2.0,
        }
    };
    step + value.abs() * QUANTIZER_ERROR
}

/// The least and the largest block scale that values within their bounds have; where bounds are not known, that of the
/// values.
fn scale_range(block: &[Bounded; 16], global_scale: GlobalScale) -> [u8; 2] {
    [-1.0, 1.0].map(|side| {
        let reach = |want: &Bounded| {
            let error =
                if want.error.is_finite() { want.error + want.value.abs() * QUANTIZER_ERROR } else { 0.0 };
            (want.value.abs() + side * error).max(0.0)
        };
        let largest = block.iter().map(reach).fold(0.0, f64::max);
        te_codes(&[largest as f32; 16], global_scale).1
    })
}

/// Steps of the e2m1 grid from one code to another.
fn steps(a: u8, b: u8) -> u64 {
    let position = |code: u8| if code & 8 == 0 { i64::from(code) } else { -i64::from(code & 7) };
    position(a).abs_diff(position(b))
}

/// C of a product, as a matrix that is compared.
pub fn matrix_of(c: &OwnedMatrix, (m, n): (usize, usize)) -> anyhow::Result<ResultMatrix<'_>> {
    Ok(ResultMatrix(c.operand("c", m, n)?))
}

/// Writes the result file, under a temporary name until it is whole.
pub fn write(c: &OwnedMatrix, path: &Path, (m, n): (usize, usize)) -> anyhow::Result<()> {
    Ok(write_activations(path, "c", &c.operand("c", m, n)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm::formats::quantize::te_block;
    use dualgemm::formats::{BlockFormat, ScaleLayout};

    fn nvfp4(codes: Vec<u8>, scales: Vec<u8>, global_scale: f32) -> OwnedMatrix {
        let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
        let [codes, scales] = [codes, scales].map(|bytes| bytes.into_iter().collect());
        OwnedMatrix::Quantized { format, codes, scales, layout, global_scale }
    }

    #[test]
    fn nvfp4_results_count_steps_of_their_own_grid() {
        let result = nvfp4(vec![0x72; 16], vec![0x38, 0x40], 0.5);
        let matrix = matrix_of(&result, (2, 16)).unwrap();
        let mut want = matrix.to_f64(&RowSample::all(2));
        let same = matrix.compare(&want, &RowSample::all(2)).unwrap();
        assert_eq!((same.max_ulp, same.rel_l2), (0, 0.0));
        // Code 2 stands for 1 · 1 · ½; 1.9 · ½ is nearest to 2 · ½, two codes on.
        want[0] = 0.95;
        let off = matrix.compare(&want, &RowSample::all(2)).unwrap();
        assert_eq!((off.max_ulp, off.over_1_ulp), (2, 1));
        assert_eq!((off.worst.row, off.worst.col), (0, 0));
        assert_eq!((off.worst.got_bits, off.worst.want_bits), (2, 4));
    }

    #[test]
    fn under_the_scale_zero_any_code_is_right_for_what_is_too_small_for_another() {
        let result = nvfp4(vec![0x77; 8], vec![0], 0.5);
        let matrix = matrix_of(&result, (1, 16)).unwrap();
        let least = f64::from(e4m3::MIN_POSITIVE) * 0.5;
        let steps = |value: f64| matrix.compare(&[value; 16], &RowSample::all(1)).unwrap().max_ulp;
        assert_eq!([steps(0.0), steps(2.9 * least), steps(-2.9 * least)], [0; 3]);
        // A block of such values has a scale, and codes that are not zero.
        assert_eq!([steps(4.1 * least), steps(-100.0), steps(100.0)], [6, 7, 7]);
    }

    #[test]
    fn what_a_given_tensor_scale_cannot_hold_is_right_as_it_is() {
        use crate::tolerance::Tolerance;
        use dualgemm::gemm::Epilogue;
        let mut want: Vec<f64> = (0..16).map(|i| f64::from(i) - 5.5).collect();
        let tolerance = Tolerance::of(AFormat::Nvfp4, &Epilogue::default());
        // The largest value is 9.5: 448 · 6 · 2⁻¹² is less, and half of the least scale of 2¹² more.
        for global_scale in [1.0 / 4096.0, 4096.0] {
            let block = std::array::from_fn(|i| want[i] as f32);
            let (codes, scale) = te_block(&block, GlobalScale::multiplier(global_scale));
            let compare = |scale, want: &[f64]| {
                let result = nvfp4(codes.to_vec(), vec![scale], global_scale);
                matrix_of(&result, (1, 16)).unwrap().compare(want, &RowSample::all(1)).unwrap()
            };
            let lost = compare(scale, &want);
            assert!(lost.rel_l2 > 0.5 && (lost.max_ulp, lost.max_scale_steps) == (0, Some(0)), "{lost:?}");
            assert!(!tolerance.holds(&lost) && tolerance.under_given_scale().holds(&lost));
            let verdict = tolerance.under_given_scale().verdict(&lost);
            assert_eq!(verdict, "right, but its tensor scale does not fit the values");
            let wrong = compare(scale.abs_diff(2), &want);
            assert!(!tolerance.under_given_scale().holds(&wrong));
            let usual = std::mem::replace(&mut want[15], f64::NAN);
            assert!(!tolerance.under_given_scale().holds(&compare(scale, &want)));
            want[15] = usual;
        }
    }

    #[test]
    fn block_scales_of_what_exceeds_f32_are_not_compared() {
        let result = nvfp4(vec![0x77; 16], vec![0x7E, 0x38], 1.0);
        let of = |value, error| [Bounded { value, error }; 16];
        let want = [of(1e39, f64::NAN), of(6.0, 0.0)].concat();
        let found = matrix_of(&result, (1, 32)).unwrap().compare(&want, &RowSample::all(1)).unwrap();
        assert_eq!((found.overflowed, found.over_bound, found.max_scale_steps), (16, 0, Some(0)));
        let want = [of(6.0, 0.0), of(6.0, 0.0)].concat();
        let found = matrix_of(&result, (1, 32)).unwrap().compare(&want, &RowSample::all(1)).unwrap();
        assert!(found.max_scale_steps > Some(0));
    }

    #[test]
    fn codes_that_are_cut_off_are_wrong_under_a_given_tensor_scale() {
        use crate::tolerance::Tolerance;
        use dualgemm::gemm::Epilogue;
        let want: Vec<f64> = (0..4096).map(|i| f64::from(i * 37 % 1024) / 512.0 - 1.0).collect();
        let global_scale = 1.0 / 2688.0;
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for block in want.as_chunks::<16>().0 {
            let (mut of_block, scale) =
                te_codes(&block.map(|x| x as f32), GlobalScale::multiplier(global_scale));
            for (code, value) in of_block.iter_mut().zip(block) {
                let step = f64::from(BlockFormat::Nvfp4.decode_scale(scale)) * f64::from(global_scale);
                *code -= u8::from(f64::from(e2m1::decode(*code).abs()) * step > value.abs() * 1.001);
            }
            codes.extend(of_block.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4));
            scales.push(scale);
        }
        let result = nvfp4(codes, scales, global_scale);
        let cut = matrix_of(&result, (1, 4096)).unwrap().compare(&want, &RowSample::all(1)).unwrap();
        assert_eq!((cut.max_ulp, cut.max_scale_steps), (1, Some(0)));
        let tolerance = Tolerance::of(AFormat::Nvfp4, &Epilogue::default());
        assert!(!tolerance.holds(&cut) && !tolerance.under_given_scale().holds(&cut), "{cut:?}");
    }

    #[test]
    fn the_worst_element_is_named_by_its_row_in_the_whole_result() {
        let result = OwnedMatrix::F32((0..40).map(|i| if i == 39 { 2.0 } else { 1.0 }).collect());
        for sample in [RowSample::spread(10, 3), RowSample::all(10)] {
            let want = vec![1.0; sample.rows().len() * 4];
            let found = matrix_of(&result, (10, 4)).unwrap().compare(&want, &sample).unwrap();
            assert_eq!((found.worst.row, found.worst.col), (9, 3));
        }
    }
}
