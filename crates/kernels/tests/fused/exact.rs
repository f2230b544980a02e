//! Problems whose sums no rounding touches: C to the bit.

use dualgemm_formats::scalar::e4m3;
use dualgemm_formats::{BlockFormat, FloatMatrix, FloatType, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AOperand, Activation, Epilogue, GateUp, reference};
use dualgemm_kernels::fused::Config;
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::sm100a::config::{Config as Sm100, Side};
use dualgemm_kernels::sm120a::config::Config as Sm120;
use dualgemm_ptx::builder::HalfFormat;

use crate::blackwell::{FEATURES, TOKENS, WIDE};
use crate::problem::{float, gpu, run};

/// A matrix whose codes and scale bytes these functions of row and column, or block, give.
fn matrix(
    name: &'static str,
    format: BlockFormat,
    (rows, k): (usize, usize),
    code: impl Fn(usize, usize) -> u8,
    scale: impl Fn(usize, usize) -> u8,
) -> QuantizedMatrix<'static> {
    let blocks = k / format.block_len();
    let pack = |r, i| code(r, 2 * i) | code(r, 2 * i + 1) << 4;
    let codes: Vec<u8> =
        (0..rows).flat_map(|r| (0..k / 2).map(move |i| (r, i))).map(|(r, i)| pack(r, i)).collect();
    let scales: Vec<u8> =
        (0..rows).flat_map(|r| (0..blocks).map(move |b| (r, b))).map(|(r, b)| scale(r, b)).collect();
    let (layout, one) = (ScaleLayout::Linear, GlobalScale::ONE);
    QuantizedMatrix::new(name, format, rows, k, codes, scales, layout, one).unwrap()
}

/// A 4-bit code that differs between neighbours in every direction.
fn mixed(seed: usize) -> impl Fn(usize, usize) -> u8 {
    move |r, c| (((r * 7 + c * 5 + (r * c) / 3 + seed) * 0x9E37) >> 7) as u8 & 15
}

/// C of gate times up, which rounds the exact product once, as the reference's conversion to f32 does.
fn check_exact(config: Config, a: &AOperand<'_>, weights: &GateUp<'_>) {
    let variant = float(Activation::Identity);
    let got = run(&*gpu(&config), (config, &variant), a, std::slice::from_ref(weights), (&[], 1)).values;
    let epilogue = Epilogue { activation: Activation::Identity, ..Epilogue::default() };
    let want = reference(&epilogue, a, 0..a.rows(), weights);
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let want = want as f32;
        assert!(*got == want, "{} element {i}: {got}, not {want}", config.name());
    }
}

/// Every exponent of ue8m0 in A against about its opposite in the weights: products are few quarters, and their sums are
/// exact. What is left of the scales differs from block to block.
#[test]
fn mxfp4_scales_of_every_exponent_exact() {
    let (m, n, k) = (5, 24, 255 * 32);
    let format = BlockFormat::Mxfp4;
    let a = AOperand::Quantized(matrix("A", format, (m, k), mixed(1), |_, block| block as u8));
    let [gate, up] = [("gate", 2), ("up", 3)].map(|(name, seed)| {
        matrix(name, format, (n, k), mixed(seed), |_, block| (254 - block + block % 3) as u8)
    });
    let weights = GateUp::new(gate, up);
    let [sm120, ..] = Sm120::menu(format);
    check_exact(Config::Sm120a(sm120), &a, &weights);
    check_exact(Config::Sm100a(Sm100 { formats: Formats::MXFP4, ..FEATURES }), &a, &weights);
}

/// The same with nvfp4's powers of two, in tiles of tokens too.
#[test]
fn scales_of_powers_of_two_exact() {
    let power = |exponent: i32| e4m3::encode(2f32.powi(exponent));
    for format in BlockFormat::ALL {
        let (m, n, k) = (130, 72, 17 * 32);
        let scale = |sign: i32, block: usize| {
            let exponent = sign * (block as i32 % 14 - 7) + (sign < 0 && block % 3 == 1) as i32;
            match format {
                BlockFormat::Nvfp4 => power(exponent),
                BlockFormat::Mxfp4 => (127 + exponent) as u8,
            }
        };
        let a = AOperand::Quantized(matrix("A", format, (m, k), mixed(1), |_, b| scale(1, b)));
        let [gate, up] = [("gate", 2), ("up", 3)]
            .map(|(name, seed)| matrix(name, format, (n, k), mixed(seed), |_, b| scale(-1, b)));
        let weights = GateUp::new(gate, up);
        let formats = Formats::Scaled(format);
        check_exact(Config::Sm100a(Sm100 { formats, ..TOKENS }), &a, &weights);
        let pairs = Sm100 { formats, cta_group: 2, ..TOKENS };
        check_exact(Config::Sm100a(pairs), &a, &weights);
        check_exact(Config::Sm100a(Sm100 { split_k: 2, accumulators: 1, ..pairs }), &a, &weights);
        check_exact(Config::Sm100a(Sm100 { n: 48, ..pairs }), &a, &weights);
        check_exact(Config::Sm100a(Sm100 { side: Side::HalfAtoms, ..pairs }), &a, &weights);
        let [.., sm120] = Sm120::menu(format);
        check_exact(Config::Sm120a(sm120), &a, &weights);
    }
}

fn halves(
    format: HalfFormat,
    (rows, k): (usize, usize),
    value: impl Fn(usize, usize) -> f32,
) -> AOperand<'static> {
    let ty = if format == HalfFormat::Bf16 { FloatType::Bf16 } else { FloatType::F16 };
    let values = (0..rows).flat_map(|r| (0..k).map(move |c| (r, c))).map(|(r, c)| value(r, c));
    AOperand::Float(FloatMatrix::rounded("A", ty, rows, k, values).unwrap())
}

/// Every code with every scale: token t picks column t, feature n has scale byte n.
#[test]
fn wide_every_code_and_every_scale_exact() {
    let (m, n, k) = (16, 127, 64);
    let format = BlockFormat::Nvfp4;
    let one = |name| matrix(name, format, (n, k), |_, _| 2, |_, _| e4m3::encode(1.0));
    let all = |name| matrix(name, format, (n, k), |_, column| (column % 16) as u8, |row, _| row as u8);
    for half in [HalfFormat::F16, HalfFormat::Bf16] {
        // A's ones move along with the token through all four blocks.
        let a = halves(half, (m, k), |t, column| if column == t + 16 * (t % 4) { 1.0 } else { 0.0 });
        let config = Config::Sm100a(Sm100 { formats: Formats::Wide(half), ..WIDE });
        check_exact(config, &a, &GateUp::new(all("gate"), one("up")));
        check_exact(config, &a, &GateUp::new(one("gate"), all("up")));
    }
}

/// Small integers, so that sums are exact, in every place of several stages, tiles and parts of K.
#[test]
fn wide_integers_exact() {
    let (m, n, k) = (37, 140, 592);
    let format = BlockFormat::Nvfp4;
    let scale = |row: usize, block: usize| e4m3::encode(2f32.powi((row + block) as i32 % 5 - 2));
    let [gate, up] =
        [("gate", 2), ("up", 3)].map(|(name, seed)| matrix(name, format, (n, k), mixed(seed), scale));
    let weights = GateUp::new(gate, up);
    for half in [HalfFormat::F16, HalfFormat::Bf16] {
        let value = mixed(1);
        let a = halves(half, (m, k), |r, c| f32::from(value(r, c)) - 8.0);
        for config in [Sm100 { stages: 3, ..WIDE }, Sm100 { n: 48, split_k: 2, ..WIDE }] {
            check_exact(Config::Sm100a(Sm100 { formats: Formats::Wide(half), ..config }), &a, &weights);
        }
    }
}
