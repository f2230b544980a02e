//! The e4m3 kernel against f64.

use dualgemm_bench::inputs::Inputs;
use dualgemm_formats::{FloatMatrix, FloatType, scalar::e4m3};
use dualgemm_gemm::Activation;
use dualgemm_kernels::fp8::config::Config;
use dualgemm_kernels::fp8::host::{Fused, FusedArgs};
use dualgemm_kernels::parts::rows::{Out, Output, Variant};

use crate::common::*;
use crate::sm80::error_of;

/// Hopper keeps about 14 bits of the sums of e4m3 products.
const BOUND: f64 = 4e-3;

fn bytes(matrix: &FloatMatrix<'_>) -> Vec<u8> {
    let place = (0..matrix.rows()).flat_map(|r| (0..matrix.cols()).map(move |c| (r, c)));
    place.map(|(r, c)| e4m3::encode(matrix.value(r, c))).collect()
}

fn check(config: Config, out: FloatType, activation: Activation, (m, n, k): (usize, usize, usize)) {
    let gpu = gpu();
    let mut inputs = Inputs::seeded(31);
    let mut matrix = |name, rows| bytes(&inputs.floats(name, FloatType::F32, rows, k).unwrap());
    let (a, gate, up) = (matrix("a", m), matrix("gate", n), matrix("up", n));
    let size = if out == FloatType::F32 { 4 } else { 2 };
    let variant = Variant { out: Out::float(out), ..Variant::new(activation.program()) }.for_features(n);
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let c = poisoned(gpu, m * n * size);
    let alpha = [0.03, 0.07];
    let args = FusedArgs {
        size: (m, n, k),
        a: upload(gpu, &a),
        gate: upload(gpu, &gate),
        up: upload(gpu, &up),
        output: Output::new(c, alpha),
    };
    run(gpu, &kernel.spec(&args).unwrap());
    let program = activation.program();
    let dot = |row: usize, weights: &[u8], feature: usize| -> f64 {
        let pairs = a[row * k..][..k].iter().zip(&weights[feature * k..][..k]);
        pairs.map(|(&x, &w)| f64::from(e4m3::decode(x)) * f64::from(e4m3::decode(w))).sum()
    };
    let place = (0..m).flat_map(|r| (0..n).map(move |f| (r, f)));
    let want: Vec<f64> = place
        .map(|(row, feature)| {
            let product = |weights, half: usize| dot(row, weights, feature) * f64::from(alpha[half]);
            program.eval_f64(product(&gate, 0), product(&up, 1))
        })
        .collect();
    let error = error_of(&read(gpu, c, m * n * size), out, &want, n);
    assert!(error < BOUND, "{} {out:?} {m}x{n}x{k}: {error}", config.name());
}

#[test]
fn every_tile_of_the_fp8_kernel_close() {
    for config in Config::MENU {
        check(config, FloatType::F16, Activation::Silu, (config.tokens as usize, 128, 256));
    }
}

#[test]
fn tails_of_the_fp8_kernel_close() {
    let [few, .., many] = Config::MENU;
    check(few, FloatType::F32, Activation::GeluTanh, (3, 37, 80));
    check(many, FloatType::F16, Activation::Silu, (131, 72, 1424));
}
