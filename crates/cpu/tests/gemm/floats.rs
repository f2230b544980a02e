//! Linear layers whose weights stay floats.

use dualgemm_cpu::FloatLinear;
use dualgemm_formats::{Float, FloatType, match_floats};
use dualgemm_gemm::{Linear, Weight, bounded_reference};

use super::*;

fn matrix(random: &mut Random, kind: FloatType, rows: usize, cols: usize) -> FloatMatrix<'static> {
    // Rows lie farther apart than they are long, with NaN between.
    let stride = cols + 3;
    let values: Vec<f32> =
        (0..rows * stride).map(|i| if i % stride < cols { 3.0 * random.float() } else { f32::NAN }).collect();
    let name = "matrix";
    fn of<T: Float>(values: Vec<f32>) -> Vec<T> {
        values.into_iter().map(T::nearest).collect()
    }
    match_floats!(kind, FloatType => FloatMatrix(Matrix::strided(name, rows, cols, stride, of(values)).unwrap()))
}

fn linear(rows: usize, k: usize, isa: Isa) -> FloatLinear {
    FloatLinear::new(rows, k, CpuOptions { isa: Some(isa), ..CpuOptions::default() }).unwrap()
}

#[test]
fn every_pair_of_types_is_within_the_bound_of_f64() {
    let pairs = FloatType::ALL.into_iter().flat_map(|a| FloatType::ALL.map(|w| (a, w)));
    for (a_type, w_type) in pairs {
        for (m, n, k) in [(1, 1, 1), (1, 300, 70), (3, 33, 64), (9, 31, 300), (16, 17, 40), (67, 70, 1100)] {
            let mut random = Random((m * n) as u64);
            let a = matrix(&mut random, a_type, m, k);
            let (w, bias) = (matrix(&mut random, w_type, n, k), random.floats(n));
            let layer =
                Linear { weight: Weight::Floats("w".into(), w.clone()), bias: Some(bias.clone().into()) };
            let of_a = AOperand::Float(a.clone());
            let want = bounded_reference(&Epilogue::default(), &of_a, 0..m, &layer);
            for isa in isas().filter(|isa| !EMULATED || *isa == Isa::best()) {
                let mut c = vec![f32::NAN; m * n];
                // A plan for more rows and an earlier run leave nothing behind.
                let mut linear = linear(m + 4, k, isa);
                let ones = FloatMatrix::F32(Matrix::new("ones", m + 4, k, vec![1.0; (m + 4) * k]).unwrap());
                linear.run(&ones, &w, None, OutputMut::F32(&mut vec![0.0; (m + 4) * n])).unwrap();
                linear.run(&a, &w, Some(&bias), OutputMut::F32(&mut c)).unwrap();
                for (at, (got, want)) in c.iter().zip(&want).enumerate() {
                    let off = (f64::from(*got) - want.value).abs();
                    assert!(
                        off <= want.error,
                        "{a_type:?}·{w_type:?} {m}x{n}x{k} {isa} at {at}: {got:e}, {want:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn threads_waves_and_types_of_c_change_nothing_exact() {
    let mut random = Random(5);
    let (m, n, k) = (1100, 40, 48);
    let (a, w) = (matrix(&mut random, FloatType::Bf16, m, k), matrix(&mut random, FloatType::Bf16, n, k));
    let run = |threads| {
        let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
        let mut c = vec![0.0; m * n];
        FloatLinear::new(m, k, options).unwrap().run(&a, &w, None, OutputMut::F32(&mut c)).unwrap();
        c
    };
    let c = run(1);
    assert_eq!(c, run(3));
    let mut narrow = (vec![bf16::ZERO; m * n], vec![f16::ZERO; m * n]);
    let mut linear = linear(m, k, Isa::best());
    linear.run(&a, &w, None, OutputMut::Bf16(&mut narrow.0)).unwrap();
    linear.run(&a, &w, None, OutputMut::F16(&mut narrow.1)).unwrap();
    assert_eq!(narrow.0, c.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>());
    assert_eq!(narrow.1, c.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>());
}

#[test]
fn a_number_that_is_not_finite_reaches_its_row_and_feature_alone() {
    for m in [1, 20] {
        for isa in isas() {
            let (mut a, mut w) = (vec![bf16::ONE; m * 40], vec![bf16::ONE; 36 * 40]);
            (a[39], w[35 * 40 + 7]) = (bf16::INFINITY, bf16::NAN);
            let a = FloatMatrix::Bf16(Matrix::new("a", m, 40, a).unwrap());
            let w = FloatMatrix::Bf16(Matrix::new("w", 36, 40, w).unwrap());
            let mut c = vec![0.0; m * 36];
            linear(m, 40, isa).run(&a, &w, None, OutputMut::F32(&mut c)).unwrap();
            for (at, c) in c.into_iter().enumerate() {
                match (at / 36, at % 36) {
                    (_, 35) => assert!(c.is_nan(), "{isa} {at}: {c}"),
                    (0, _) => assert_eq!(c, f32::INFINITY, "{isa} {at}"),
                    _ => assert_eq!(c, 40.0, "{isa} {at}"),
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let mut random = Random(1);
    let (a, w) = (matrix(&mut random, FloatType::F32, 3, 8), matrix(&mut random, FloatType::Bf16, 5, 8));
    let mut c = [7.0; 15];
    let mut message = |planned: (usize, usize), a, w, bias: Option<&[f32]>, len: usize| {
        let (rows, k) = planned;
        let out = OutputMut::F32(&mut c[..len]);
        linear(rows, k, Isa::best()).run(a, w, bias, out).unwrap_err().to_string()
    };
    assert_eq!(message((2, 8), &a, &w, None, 15), "A is [3, 8]; the plan was made for up to [2, 8]");
    assert_eq!(message((3, 9), &a, &w, None, 15), "A is [3, 8]; the plan was made for up to [3, 9]");
    let narrow = matrix(&mut random, FloatType::Bf16, 5, 7);
    assert_eq!(message((3, 8), &a, &narrow, None, 15), "W is [5, 7]; the plan was made for [N, 8]");
    assert!(message((3, 8), &a, &w, Some(&[1.0; 4]), 15).contains("4"));
    let short = "C is f32 of 14 values; the plan was made for f32 of 3 × 5 values";
    assert_eq!(message((3, 8), &a, &w, None, 14), short);
    let scales = &mut [0; 8][..];
    let nvfp4 = OutputMut::Nvfp4 { codes: &mut [0; 8], scales };
    let error = linear(3, 8, Isa::best()).run(&a, &w, None, nvfp4).unwrap_err().to_string();
    assert_eq!(error, "C is nvfp4; the plan was made for f32, f16 or bf16");
    assert_eq!(c, [7.0; 15]);
    let none = FloatLinear::new(1, 0, CpuOptions::default()).unwrap_err().to_string();
    assert_eq!(none, "K is 0; it must be at least 1");
    let huge = FloatLinear::new(1 << 40, 1 << 50, CpuOptions::default()).unwrap_err().to_string();
    assert!(huge.contains("do not fit the memory"), "{huge}");
}
