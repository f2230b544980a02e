//! The largest and the smallest factors of each format against f64: they obey the same bounds as others.

use super::super::preparation::SPAN_K;
use super::*;

/// Numbers of rows for each way to multiply: one, few, and groups of many.
const ROWS: [usize; 4] = [1, 2, 5, 13];
/// More than is prepared at a time.
const K: usize = SPAN_K + 64;
const N: usize = 3;

/// Mxfp4 weights with scales within `spread` of byte `around`. Every fifth block has the largest scale, and zero codes except
/// at [`hidden`].
fn around(name: &'static str, around: i32, spread: i32, random: &mut Random) -> QuantizedMatrix<'static> {
    let blocks = N * K / 32;
    let (mut codes, mut scales) = (vec![0; N * K / 2], vec![254; blocks]);
    for block in 0..blocks {
        if block % (K / 32) % 5 == 2 {
            codes[block * 16 + HIDDEN / 2] = random.bits() as u8;
        } else {
            scales[block] = (around - spread + random.bits() as i32 % (2 * spread + 1)).clamp(0, 254) as u8;
            codes[block * 16..][..16].fill_with(|| random.bits() as u8);
        }
    }
    QuantizedMatrix::new(name, BlockFormat::Mxfp4, N, K, codes, scales, ScaleLayout::Linear, GlobalScale::ONE)
        .unwrap()
}

/// This element and its neighbour may have codes other than zero under the largest scale.
const HIDDEN: usize = 6;

/// Whether activations are zero here, so that the largest scale has no effect.
fn hidden(k: usize) -> bool {
    k / 32 % 5 == 2 && k % 32 / 2 == HIDDEN / 2
}

/// Numbers of up to `2^exponent` in f32, f16 and bf16. Those of kind 1 spread over 2⁴⁰; in kind 2 only the first row is
/// large.
fn numbers(rows: usize, exponent: i32, kind: usize, random: &mut Random) -> [FloatMatrix<'static>; 3] {
    let data: Vec<f32> = (0..rows * K)
        .map(|i| {
            let down = match kind {
                1 => random.bits() as i32 % 40,
                2 if i >= K => 100,
                _ => 0,
            };
            let x = f64::from(random.float()) * 2f64.powi(exponent - down);
            if hidden(i % K) { 0.0 } else { (x as f32).clamp(-f32::MAX, f32::MAX) }
        })
        .collect();
    // Conversion may round up to infinity.
    let half = data.iter().map(|&x| f16::from_f32(x.clamp(-65504.0, 65504.0))).collect::<Vec<_>>();
    let largest = bf16::MAX.to_f32();
    let bfloat = data.iter().map(|&x| bf16::from_f32(x.clamp(-largest, largest))).collect::<Vec<_>>();
    [
        FloatMatrix::F32(Matrix::new("a", rows, K, data).unwrap()),
        FloatMatrix::F16(Matrix::new("a", rows, K, half).unwrap()),
        FloatMatrix::Bf16(Matrix::new("a", rows, K, bfloat).unwrap()),
    ]
}

/// Checks the sums whose products' magnitudes add up to less than 2¹²⁷, and returns how many.
fn check(isas: &[Isa], pair: &GateUp<'_>, a: &FloatMatrix<'_>, what: &str) -> usize {
    let (packed, rows) = (PackedGateUp::pack(pair).unwrap(), a.rows());
    let values = |matrix: &QuantizedMatrix<'_>| -> Vec<f64> {
        (0..N * K).map(|i| matrix.value(i / K, i % K)).collect()
    };
    let weights = [values(&pair.gate), values(&pair.up)];
    let activations: Vec<f64> = (0..rows * K).map(|i| f64::from(a.value(i / K, i % K))).collect();
    let got: Vec<_> =
        isas.iter().map(|&isa| sums(kernel(isa, pair.gate.format()), a, &one_tile(rows), &packed)).collect();
    let mut checked = 0;
    for i in 0..rows * 2 * N {
        let (row, half, n) = (i / N / 2, i / N % 2, i % N);
        let terms = activations[row * K..][..K].iter().zip(&weights[half][n * K..][..K]).map(|(a, w)| a * w);
        let (want, size) = terms.fold((0.0, 0.0), |(s, t), x| (s + x, t + x.abs()));
        if size >= 2f64.powi(127) {
            continue;
        }
        checked += 1;
        for (isa, got) in isas.iter().zip(&got) {
            // Each of K additions rounds, twice if not fused, in mxfp4 to multiples of 2⁻¹⁴⁷ at least.
            let bound = K as f64 * (size * 2f64.powi(-24) + 2f64.powi(-147));
            let error = (f64::from(got[i]) - want).abs();
            assert!(error <= bound, "{isa} {what}, row {row} of {rows}: {:e} {want:e}", got[i]);
        }
    }
    checked
}

#[test]
fn every_scale_of_mxfp4_with_activations_of_every_exponent_close() {
    let (isas, mut random) = (isas().collect::<Vec<_>>(), Random(11));
    for (scale, spread) in
        [(0, 2), (1, 6), (40, 6), (94, 2), (100, 30), (127, 6), (190, 6), (217, 2), (250, 6), (254, 1)]
    {
        let mut of = |name| around(name, scale, spread, &mut random);
        let pair = GateUp::new(of("gate"), of("up"));
        let mut checked = 0;
        for exponent in [-140, -127, -100, -80, -50, -14, 0, 16, 42, 60, 90, 128] {
            for kind in 0..3 {
                for rows in ROWS {
                    for (format, a) in numbers(rows, exponent, kind, &mut random).into_iter().enumerate() {
                        let what = format!(
                            "scales near {scale}, {} near 2^{exponent}",
                            ["f32", "f16", "bf16"][format]
                        );
                        checked += check(&isas, &pair, &a, &what);
                    }
                }
            }
        }
        assert!(checked > 1000, "{checked} sums near {scale}");
    }
}

#[test]
fn nvfp4_with_activations_of_every_exponent_close() {
    let (isas, mut random, mut checked) = (isas().collect::<Vec<_>>(), Random(12), 0);
    let pair = super::weights(BlockFormat::Nvfp4, N, K, 13);
    for exponent in [-140, -127, -80, -70, -50, 0, 27, 50, 64, 100, 115, 121] {
        for kind in 0..3 {
            for rows in ROWS {
                for a in numbers(rows, exponent, kind, &mut random) {
                    checked += check(&isas, &pair, &a, &format!("nvfp4, floats near 2^{exponent}"));
                }
            }
        }
    }
    assert!(checked > 10_000, "{checked} sums");
}

/// A number of 3e38 anywhere in a row, with scales that keep its product finite: few rows take another way then.
#[test]
fn one_number_near_the_largest_is_right_wherever_it_is_close() {
    let (isas, mut random) = (isas().collect::<Vec<_>>(), Random(14));
    let mut of = |name| around(name, 90, 3, &mut random);
    let pair = GateUp::new(of("gate"), of("up"));
    for rows in [1, 2, 4] {
        for at in [0, SPAN_K - 1, SPAN_K, rows * K - 1].into_iter().filter(|&at| !hidden(at % K)) {
            let mut data: Vec<f32> =
                (0..rows * K).map(|i| if hidden(i % K) { 0.0 } else { random.float() }).collect();
            data[at] = 3e38;
            let checked = check(&isas, &pair, &f32_matrix(rows, K, &data), "3e38");
            assert_eq!(checked, rows * 2 * N);
            assert_eq!(check(&isas, &pair, &as_bf16(rows, K, &data), "3e38"), checked);
        }
    }
}
