//! How small a fault is told from rounding: results of a real layer in which one code of one weight is a step off.

use std::path::Path;

use dualgemm::check::{Reference, RowSample};
use dualgemm::checkpoint::{Checkpoint, OpenOptions, TensorFiles, activations};
use dualgemm::formats::{QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{AFormat, AOperand, Bounded, DualGemmDesc, Epilogue, GateUp, OutFormat, OutScale};
use dualgemm::{DualGemm, OwnedMatrix, Target};

use crate::result::matrix_of;
use crate::tolerance::Tolerance;

/// Features that are computed with each flip, and flips of each kind of result.
const FEATURES: usize = 16;
const FLIPS: usize = 96;

fn data(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/smollm2-135m-layer14").join(name)
}

/// The same matrix with code `element` of `row` one step of the e2m1 grid larger in magnitude, or smaller if it is 6.
fn flipped(m: &QuantizedMatrix<'_>, row: usize, element: usize) -> QuantizedMatrix<'static> {
    let (mut codes, scales) = m.dense_rows(0..m.rows());
    let (byte, shift) = (&mut codes[(row * m.k() + element) / 2], 4 * (element % 2));
    let code = *byte >> shift & 15;
    let next = if code & 7 == 7 { code - 1 } else { code + 1 };
    *byte = *byte & !(15 << shift) | next << shift;
    QuantizedMatrix::new(
        m.name().to_owned(),
        m.format(),
        m.rows(),
        m.k(),
        codes,
        scales,
        ScaleLayout::Linear,
        m.global_scale(),
    )
    .unwrap()
}

fn compute(desc: &DualGemmDesc, a: &AOperand<'_>, weights: &GateUp<'_>) -> OwnedMatrix {
    let plan = DualGemm::plan(desc, &Target::default()).unwrap();
    let mut c = OwnedMatrix::of_c("C", desc).unwrap();
    let scale =
        plan.runner(1).unwrap().run(a, &plan.prepack(weights).unwrap(), c.output(desc.m, desc.n)).unwrap();
    c.set_global_scale(scale);
    c
}

/// Of [`FLIPS`] flips, those that the bounds catch. Every one that moves an element by more than both bounds and a step of
/// the format is among them.
fn caught(a: &AOperand<'_>, out: OutFormat, step: f64) -> usize {
    let checkpoint = Checkpoint::open(&data("modelopt-nvfp4"), &OpenOptions::default()).unwrap();
    let args = crate::args::LayerArgs::default();
    let layer = crate::layer::Layer::of(&checkpoint, &args).unwrap();
    let (m, k, epilogue) = (a.rows(), layer.k(), Epilogue::default());
    let desc = DualGemmDesc { out, ..DualGemmDesc::new(m, FEATURES, k, AFormat::of(a), layer.format()) };
    let all = RowSample::all(m);
    let want_of = |weights: &GateUp<'_>| Reference::new(a, &all).bounded(&epilogue, weights).unwrap();
    let mut count = 0;
    for flip in 0..FLIPS {
        let first = flip * 53 % (layer.n() / FEATURES) * FEATURES;
        let right = layer.features(first..first + FEATURES).unwrap();
        let want = want_of(&right);
        let (row, element) = (flip * 7 % FEATURES, flip * 131 % k);
        let mut wrong = right.clone();
        let half = if flip % 2 == 0 { &mut wrong.gate } else { &mut wrong.up };
        *half = flipped(half, row, element);
        let check = |weights: &GateUp<'_>| {
            let c = compute(&desc, a, weights);
            let c = matrix_of(&c, (m, FEATURES)).unwrap();
            let found = c.compare(&want, &all).unwrap();
            let tolerance = Tolerance::bounded(c.format(), &epilogue);
            (tolerance.holds(&found), found)
        };
        let (holds, found) = check(&right);
        assert!(holds, "flip {flip}, not made: {found:?}");
        let (holds, found) = check(&wrong);
        let apart = |(&l, r): (&Bounded, Bounded)| {
            (l.value - r.value).abs() > l.error + r.error + step * l.value.abs().max(r.value.abs())
        };
        let moved = step < 1.0 && want.iter().zip(want_of(&wrong)).any(apart);
        assert!(!moved || !holds, "flip {flip} is not caught: {found:?}");
        count += usize::from(!holds);
    }
    count
}

#[test]
fn one_code_that_is_one_step_off_is_told_from_rounding() {
    let files = TensorFiles::open(&data("hidden-states-f32.safetensors")).unwrap();
    let floats = activations::read(&files, None).unwrap();
    let quantized = dualgemm::quantize_a(&floats, dualgemm::gemm::QuantizeA::Dynamic).unwrap();
    let nvfp4 = OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale: OutScale::Static(0.01) };
    for a in [&floats, &quantized] {
        let outs = [
            (OutFormat::F32, 2f64.powi(-23), FLIPS),
            (OutFormat::F16, 2f64.powi(-10), FLIPS),
            (OutFormat::Bf16, 2f64.powi(-7), FLIPS),
            // Measured 67 and 68: docs/formats.md says so.
            (nvfp4, 1.0, FLIPS * 2 / 3),
        ];
        for (out, step, least) in outs {
            let caught = caught(a, out, step);
            assert!(caught >= least, "{out}: {caught} of {FLIPS}");
        }
    }
}
