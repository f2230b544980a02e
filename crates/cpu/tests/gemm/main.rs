//! The whole operation through the public interface, against the f64 definition.

mod floats;
mod linear;
mod rows;
mod together;
mod token;

use std::borrow::Cow;

use dualgemm_cpu::{CpuGemm, CpuOptions, CpuPlan, Group, Input, Isa, PackedGateUp, Team};
use dualgemm_formats::quantize::quantize_with;
use dualgemm_formats::{
    BlockFormat, FloatMatrix, FloatType, GlobalScale, Matrix, Producer, QuantizedMatrix, ScaleLayout, Search,
    quantize,
};
use dualgemm_gemm::{
    AFormat, AOperand, Activation, Comparison, DualGemmDesc, Epilogue, GateUp, OutFormat, OutScale,
    OutputMut, QuantizeA, reference,
};
use half::{bf16, f16};

/// A generator of pseudo-random numbers.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn float(&mut self) -> f32 {
        self.bits() as f32 / (1u32 << 30) as f32 - 1.0
    }

    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }

    fn quantized(
        &mut self,
        format: BlockFormat,
        rows: usize,
        k: usize,
        scale: f32,
    ) -> QuantizedMatrix<'static> {
        let codes: Vec<u8> = (0..rows * k / 2).map(|_| self.bits() as u8).collect();
        let middle = match format {
            BlockFormat::Nvfp4 => 0x28,
            BlockFormat::Mxfp4 => 120,
        };
        let scales: Vec<u8> =
            (0..rows * k / format.block_len()).map(|_| middle + (self.bits() % 16) as u8).collect();
        let scale = GlobalScale::multiplier(scale);
        QuantizedMatrix::new("w", format, rows, k, codes, scales, ScaleLayout::Linear, scale).unwrap()
    }

    fn weights(&mut self, format: BlockFormat, n: usize, k: usize) -> GateUp<'static> {
        let mut pair = GateUp::new(self.quantized(format, n, k, 0.03), self.quantized(format, n, k, 0.05));
        pair.gate_bias = Some(Cow::Owned(self.floats(n)));
        pair.up_bias = Some(Cow::Owned(self.floats(n)));
        pair
    }

    fn activations(&mut self, format: AFormat, m: usize, k: usize) -> AOperand<'static> {
        let Some(float) = format.float_type() else {
            let scale = if format == AFormat::Nvfp4 { 0.5 } else { 1.0 };
            return AOperand::Quantized(self.quantized(format.block_format().unwrap(), m, k, scale));
        };
        let data = Random(9).floats(m * k).into_iter();
        let data = data.map(|x| if float == FloatType::F32 { x } else { 3.0 * x });
        AOperand::Float(FloatMatrix::rounded("a", float, m, k, data).unwrap())
    }
}

const A_FORMATS: [AFormat; 5] = [AFormat::F32, AFormat::F16, AFormat::Bf16, AFormat::Nvfp4, AFormat::Mxfp4];

fn desc(a: &AOperand<'_>, weights: &GateUp<'_>, activation: Activation) -> DualGemmDesc {
    let mut desc = DualGemmDesc::new(a.rows(), weights.n(), a.k(), AFormat::of(a), weights.gate.format());
    desc.epilogue = Epilogue { activation, alpha_gate: 1.5, alpha_up: -0.75, round_gate_up_to_bf16: false };
    desc
}

fn gemm(desc: &DualGemmDesc, isa: Isa) -> CpuGemm {
    gemm_with(desc, CpuOptions { isa: Some(isa), ..CpuOptions::default() })
}

fn gemm_with(desc: &DualGemmDesc, options: CpuOptions) -> CpuGemm {
    CpuGemm::new(&CpuPlan::new(desc, options).unwrap(), 4).unwrap()
}

fn run_f32(desc: &DualGemmDesc, isa: Isa, a: &AOperand<'_>, weights: &GateUp<'_>) -> Vec<f32> {
    let packed = PackedGateUp::pack(weights).unwrap();
    let mut c = vec![f32::NAN; a.rows() * weights.n()];
    let group = [Group { first_row: 0, rows: a.rows(), weights: &packed }];
    gemm(desc, isa).run(a, &group, OutputMut::F32(&mut c)).unwrap();
    c
}

/// CI runs ARM64's tests in an emulator, where these would take minutes.
const EMULATED: bool = cfg!(target_arch = "aarch64");

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

/// Asserts that each C is within its error bound: that of the sums carried through the activation, and the activation's roundings.
///
/// A term of a sum passes at most 256 + K/256 + 4 roundings in W4A16 (twice as many where multiply-adds are not
/// fused), K/16 + 2 in W4A4.
fn assert_close(cs: &[Vec<f32>], desc: &DualGemmDesc, a: &AOperand<'_>, weights: &GateUp<'_>) {
    let program = desc.epilogue.activation.program();
    let halves = [
        (&weights.gate, weights.gate_bias.as_ref(), desc.epilogue.alpha_gate),
        (&weights.up, weights.up_bias.as_ref(), desc.epilogue.alpha_up),
    ];
    let epsilon = 2.0 * (260.0 + desc.k as f64 / 16.0) * 2f64.powi(-24);
    for row in 0..a.rows() {
        for col in 0..desc.n {
            let [gate, up] = halves.map(|(b, bias, alpha)| {
                let bias = bias.map_or(0.0, |bias| f64::from(bias[col]));
                let terms = (0..desc.k).map(|k| f64::from(alpha) * a.value(row, k) * b.value(col, k));
                terms.fold((bias, epsilon * bias.abs()), |(sum, error), x| {
                    (sum + x, error + epsilon * x.abs())
                })
            });
            let want = program.eval_f64(gate.0, up.0);
            let corners = [(-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0)];
            let spread = corners.map(|(g, u)| program.eval_f64(gate.0 + g * gate.1, up.0 + u * up.1) - want);
            // The exponent of gelu is a cubic: its rounding is an absolute error of the factors, too.
            let own = (want.abs() + gate.0.abs() * up.0.abs()) * 16.0 * 2f64.powi(-24);
            let bound = spread.iter().fold(own, |bound, x| bound.max(own + 2.0 * x.abs()));
            for c in cs {
                let got = f64::from(c[row * desc.n + col]);
                assert!(
                    (got - want).abs() <= bound,
                    "{desc} at [{row}, {col}]: {got:e}, want {want:e} ± {bound:e}"
                );
            }
        }
    }
}

#[test]
fn every_pair_of_formats_is_close_to_f64() {
    for a_format in A_FORMATS {
        for b_format in BlockFormat::ALL {
            for (m, n, k) in [(1, 1, 32), (1, 150, 64), (2, 17, 64), (5, 33, 96), (11, 15, 320), (67, 20, 64)]
            {
                let mut random = Random(m as u64);
                let (a, weights) = (random.activations(a_format, m, k), random.weights(b_format, n, k));
                let desc = desc(&a, &weights, Activation::Silu);
                // Each processor's, so that the sums in f64 are formed once.
                let cs: Vec<_> = isas().map(|isa| run_f32(&desc, isa, &a, &weights)).collect();
                assert_close(&cs, &desc, &a, &weights);
            }
        }
    }
}

#[test]
fn every_activation_is_close_to_f64() {
    for activation in Activation::EXAMPLES {
        let mut random = Random(5);
        let (a, weights) =
            (random.activations(AFormat::Bf16, 9, 272), random.weights(BlockFormat::Nvfp4, 24, 272));
        let desc = desc(&a, &weights, activation);
        assert_close(&[run_f32(&desc, Isa::best(), &a, &weights)], &desc, &a, &weights);
    }
}

#[test]
fn f32_output_agrees_with_the_reference_to_one_in_a_million() {
    for a_format in A_FORMATS {
        let mut random = Random(6);
        let (a, weights) =
            (random.activations(a_format, 20, 2048), random.weights(BlockFormat::Nvfp4, 32, 2048));
        let desc = desc(&a, &weights, Activation::Silu);
        let want = reference(&desc.epilogue, &a, 0..20, &weights);
        for isa in isas() {
            let c = run_f32(&desc, isa, &a, &weights);
            let distance = Comparison::new(&c, &want, 32).unwrap();
            assert!(distance.rel_l2 <= 1e-6, "{a_format} {isa}: {distance:?}");
        }
    }
}

#[test]
fn f16_and_bf16_outputs_are_the_rounded_f32_output_exact() {
    let mut random = Random(7);
    let (a, weights) =
        (random.activations(AFormat::F16, 13, 512), random.weights(BlockFormat::Nvfp4, 40, 512));
    let packed = PackedGateUp::pack(&weights).unwrap();
    let group = [Group { first_row: 0, rows: 13, weights: &packed }];
    let mut desc = desc(&a, &weights, Activation::Silu);
    let wide = run_f32(&desc, Isa::best(), &a, &weights);
    let want = reference(&desc.epilogue, &a, 0..13, &weights);

    desc.out = OutFormat::F16;
    let mut c = vec![f16::NAN; 13 * 40];
    gemm(&desc, Isa::best()).run(&a, &group, OutputMut::F16(&mut c)).unwrap();
    assert!(c.iter().zip(&wide).all(|(c, &wide)| c.to_bits() == f16::from_f32(wide).to_bits()));
    // A sum that nearly cancels may be off by more; none of these cancels.
    assert_eq!(Comparison::new(&c, &want, 40).unwrap().over_1_ulp, 0);

    desc.out = OutFormat::Bf16;
    let mut c = vec![bf16::NAN; 13 * 40];
    gemm(&desc, Isa::best()).run(&a, &group, OutputMut::Bf16(&mut c)).unwrap();
    assert!(c.iter().zip(&wide).all(|(c, &wide)| c.to_bits() == bf16::from_f32(wide).to_bits()));
}

#[test]
fn huge_sums_under_small_tensor_scales_fit_f16() {
    let k = 1024;
    let half = || {
        let (codes, scales) = (vec![0x77; 16 * k / 2], vec![0x7E; 16 * k / 16]);
        let scale = GlobalScale::multiplier(1e-5);
        QuantizedMatrix::new("w", BlockFormat::Nvfp4, 16, k, codes, scales, ScaleLayout::Linear, scale)
            .unwrap()
    };
    let weights = GateUp::new(half(), half());
    let packed = PackedGateUp::pack(&weights).unwrap();
    for (m, value) in [(1, 1.0), (20, 1.0)] {
        let a = AOperand::Float(FloatMatrix::F32(Matrix::new("a", m, k, vec![value; m * k]).unwrap()));
        let mut desc = DualGemmDesc::new(m, 16, k, AFormat::F32, BlockFormat::Nvfp4);
        desc.out = OutFormat::F16;
        let mut c = vec![f16::NAN; m * 16];
        let group = [Group { first_row: 0, rows: m, weights: &packed }];
        gemm(&desc, Isa::best()).run(&a, &group, OutputMut::F16(&mut c)).unwrap();
        // The sum is 6 · 448 · 1024 = 2752512, far beyond f16; the product with 10⁻⁵ is 27.5.
        let want = reference(&desc.epilogue, &a, 0..m, &weights);
        assert_eq!(Comparison::new(&c, &want, 16).unwrap().over_1_ulp, 0, "{c:?}");
    }
}

/// Scales of gate and of up that f32 cannot multiply by, which undo each other in C.
#[test]
fn tensor_scales_at_both_ends_of_f32_lose_nothing() {
    let mut random = Random(41);
    for a_format in [AFormat::Nvfp4, AFormat::F32, AFormat::Bf16] {
        for (gate, up) in [(1e-44, 1e20), (1e20, 1e-44), (f32::from_bits(1), 1.0)] {
            let format = BlockFormat::Nvfp4;
            let weights =
                GateUp::new(random.quantized(format, 16, 64, gate), random.quantized(format, 16, 64, up));
            let a = random.activations(a_format, 5, 64);
            let mut desc = desc(&a, &weights, Activation::Identity);
            // Makes the products large enough to be normal f32.
            (desc.epilogue.alpha_gate, desc.epilogue.alpha_up) = (1e10, 1e10);
            let want = reference(&desc.epilogue, &a, 0..5, &weights);
            for isa in isas() {
                let c = run_f32(&desc, isa, &a, &weights);
                let distance = Comparison::new(&c, &want, 16).unwrap();
                assert!(distance.rel_l2 <= 1e-6, "{a_format} {isa} {gate:e} {up:e}: {distance:?}");
            }
        }
    }
}

#[test]
fn w4a4_has_the_same_bits_on_every_isa_exact() {
    for (a_format, b_format) in [(AFormat::Nvfp4, BlockFormat::Nvfp4), (AFormat::Mxfp4, BlockFormat::Nvfp4)] {
        let mut random = Random(8);
        let (a, weights) = (random.activations(a_format, 19, 128), random.weights(b_format, 35, 128));
        for activation in Activation::EXAMPLES {
            let desc = desc(&a, &weights, activation);
            let want = run_f32(&desc, Isa::Portable, &a, &weights);
            for isa in isas() {
                let got = run_f32(&desc, isa, &a, &weights);
                assert!(got.iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits()), "{isa} {activation}");
            }
        }
    }
}

/// How many panels of 16 features a thread has decides which loops take them: each number of them, on each instruction set.
#[test]
fn a_feature_depends_on_no_other_and_on_no_count_of_threads_exact() {
    let formats = [
        (AFormat::F32, BlockFormat::Mxfp4),
        (AFormat::Bf16, BlockFormat::Nvfp4),
        (AFormat::Bf16, BlockFormat::Mxfp4),
        (AFormat::Nvfp4, BlockFormat::Nvfp4),
        (AFormat::Nvfp4, BlockFormat::Mxfp4),
    ];
    for ((a_format, b_format), m) in formats.into_iter().flat_map(|of| [1, 2, 33].map(|m| (of, m))) {
        let mut random = Random(10);
        let (a, all) = (random.activations(a_format, m, 96), random.weights(b_format, 190, 96));
        for isa in isas() {
            let run = |weights: &GateUp<'_>, threads| {
                let packed = PackedGateUp::pack(weights).unwrap();
                let options = CpuOptions { isa: Some(isa), threads: Some(threads), ..CpuOptions::default() };
                let mut c = vec![f32::NAN; m * weights.n()];
                let group = [Group { first_row: 0, rows: m, weights: &packed }];
                gemm_with(&desc(&a, weights, Activation::Silu), options)
                    .run(&a, &group, OutputMut::F32(&mut c))
                    .unwrap();
                c
            };
            let want = run(&all, 1);
            assert_close(std::slice::from_ref(&want), &desc(&a, &all, Activation::Silu), &a, &all);
            let threads = if EMULATED { &[3][..] } else { &[1, 3, 8] };
            for (n, &threads) in (14..190).step_by(16).flat_map(|n| threads.iter().map(move |of| (n, of))) {
                let found = run(&all.features(0..n).unwrap(), threads);
                let same = |(row, found): (usize, &[f32])| found == &want[row * 190..][..n];
                assert!(
                    found.chunks(n).enumerate().all(same),
                    "{isa}, {a_format} × {b_format}, {m} × {n}, {threads} threads"
                );
            }
        }
    }
}

#[test]
fn rounding_gate_and_up_to_bf16_is_visible_and_close() {
    let mut random = Random(13);
    let (a, weights) =
        (random.activations(AFormat::Nvfp4, 4, 128), random.weights(BlockFormat::Nvfp4, 32, 128));
    let mut desc = desc(&a, &weights, Activation::Silu);
    let plain = run_f32(&desc, Isa::best(), &a, &weights);
    desc.epilogue.round_gate_up_to_bf16 = true;
    let rounded = run_f32(&desc, Isa::best(), &a, &weights);
    let want = reference(&desc.epilogue, &a, 0..4, &weights);
    // A product near a rounding boundary may go the other way, by one bf16 step; few do.
    let far = |c: &[f32]| {
        c.iter().zip(&want).filter(|(c, w)| (f64::from(**c) - **w).abs() > 1e-5 * w.abs()).count()
    };
    assert!(far(&rounded) <= 2, "{}", far(&rounded));
    assert!(far(&plain) > 100);
}

#[test]
fn nvfp4_output_is_the_quantized_f32_output_exact() {
    let (m, n, k) = (21, 80, 96);
    for a_format in [AFormat::Bf16, AFormat::Nvfp4] {
        let mut random = Random(14);
        let (a, weights) = (random.activations(a_format, m, k), random.weights(BlockFormat::Nvfp4, n, k));
        let packed = PackedGateUp::pack(&weights).unwrap();
        let group = [Group { first_row: 0, rows: m, weights: &packed }];
        let mut desc = desc(&a, &weights, Activation::Silu);
        let wide = run_f32(&desc, Isa::best(), &a, &weights);
        let wide = FloatMatrix::F32(Matrix::new("c", m, n, wide).unwrap());
        for scale_layout in ScaleLayout::ALL {
            let ways =
                [(OutScale::Static(0.01), true), (OutScale::Dynamic, false), (OutScale::Dynamic, true)];
            for (global_scale, dynamic_c_twice) in ways {
                desc.out = OutFormat::Nvfp4 { scale_layout, global_scale };
                let options = CpuOptions { dynamic_c_twice, ..CpuOptions::default() };
                let (mut codes, mut scales) =
                    (vec![0xEE; m * n / 2], vec![0xEE; scale_layout.len(m, n / 16)]);
                let out = OutputMut::Nvfp4 { codes: &mut codes, scales: &mut scales };
                let scale = gemm_with(&desc, options).run(&a, &group, out).unwrap().unwrap();
                let want = match global_scale {
                    OutScale::Static(x) => {
                        quantize_with("c", &wide, Producer::Te, Search::Plain, GlobalScale::multiplier(x))
                    }
                    OutScale::Dynamic => quantize::quantize("c", &wide, Producer::Te, Search::Plain),
                };
                let want = want.unwrap().with_scale_layout(scale_layout);
                assert_eq!(
                    (&codes[..], &scales[..], scale),
                    (want.codes(), want.scales(), want.global_scale())
                );
            }
        }
    }
}

#[test]
fn a_quantized_on_the_way_in_equals_a_quantized_before_exact() {
    let (m, n, k) = (70, 24, 160);
    let kinds = [QuantizeA::Static(0.002), QuantizeA::Dynamic];
    for (format, how) in A_FORMATS[..3].iter().flat_map(|&format| kinds.map(|how| (format, how))) {
        let mut random = Random(15);
        let (a, weights) = (random.activations(format, m, k), random.weights(BlockFormat::Nvfp4, n, k));
        let AOperand::Float(float) = &a else { unreachable!() };
        let mut desc = desc(&a, &weights, Activation::Silu);
        desc.quantize_a = how;
        let got = isas().map(|isa| (isa, run_f32(&desc, isa, &a, &weights))).collect::<Vec<_>>();
        let before = match how {
            QuantizeA::Static(x) => {
                quantize_with("a", float, Producer::Te, Search::Plain, GlobalScale::multiplier(x))
            }
            _ => quantize::quantize("a", float, Producer::Te, Search::Plain),
        };
        let before = AOperand::Quantized(before.unwrap());
        (desc.a, desc.quantize_a) = (AFormat::Nvfp4, QuantizeA::No);
        for (isa, got) in got {
            let want = run_f32(&desc, isa, &before, &weights);
            assert!(got.iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits()), "{isa} {format} {how:?}");
        }
    }
}

/// A is prepared in waves of rows, whose buffers are reused. Each row's result is the same wherever the row lies.
#[test]
fn more_rows_than_are_prepared_at_a_time_are_each_right() {
    let (m, n, k) = (2600, 20, 32);
    for a_format in [AFormat::Nvfp4, AFormat::F32, AFormat::Bf16] {
        let mut random = Random(18);
        let a = random.activations(a_format, m, k);
        let pairs = [1, 2].map(|seed| Random(seed).weights(BlockFormat::Nvfp4, n, k));
        let packed = [0, 1].map(|i| PackedGateUp::pack(&pairs[i]).unwrap());
        let ranges = [5..1300, 1301..1302, 1400..2599];
        let groups = [0, 1, 2].map(|i| Group {
            first_row: ranges[i].start,
            rows: ranges[i].len(),
            weights: &packed[i % 2],
        });
        let desc = desc(&a, &pairs[0], Activation::Silu);
        let mut c = vec![-7.5f32; m * n];
        gemm(&desc, Isa::best()).run(&a, &groups, OutputMut::F32(&mut c)).unwrap();
        for (i, range) in ranges.iter().enumerate() {
            let got = &c[range.start * n..range.end * n];
            let want = reference(&desc.epilogue, &a, range.clone(), &pairs[i % 2]);
            let distance = Comparison::new(got, &want, n).unwrap();
            assert!(distance.rel_l2 < 1e-6, "{a_format}: {distance:?}");
            // Sums over floats take an order that depends on how many rows there are, and rows that are too few for tiles of AMX
            // become C in steps that round more often.
            let exact = a_format == AFormat::Nvfp4 && Isa::best() != Isa::AmxBf16;
            let mut alone = vec![-7.5f32; m * n];
            for first in range.clone().step_by(64).filter(|_| exact) {
                let rows = (range.end - first).min(64);
                let group = Group { first_row: first, rows, weights: &packed[i % 2] };
                gemm(&desc, Isa::best()).run(&a, &[group], OutputMut::F32(&mut alone)).unwrap();
                let values = first * n..(first + rows) * n;
                assert!(c[values.clone()] == alone[values], "{a_format}, rows from {first}");
            }
        }
        assert!(
            [0..5, 1300..1301, 1302..1400, 2599..2600].into_iter().flatten().all(|row| c[row * n] == -7.5)
        );
    }
}

#[test]
fn a_c_of_another_format_or_size_is_refused_by_name() {
    let mut random = Random(17);
    let (a, weights) = (random.activations(AFormat::F32, 2, 32), random.weights(BlockFormat::Nvfp4, 16, 32));
    let packed = PackedGateUp::pack(&weights).unwrap();
    let group = [Group { first_row: 0, rows: 2, weights: &packed }];
    let mut gemm = gemm(&desc(&a, &weights, Activation::Silu), Isa::best());
    let mut message = |c: OutputMut<'_>| gemm.run(&a, &group, c).unwrap_err().to_string();
    assert_eq!(
        message(OutputMut::F32(&mut [0.0; 31])),
        "C is f32 of 31 values; the plan was made for f32 of 2 × 16 values"
    );
    assert_eq!(message(OutputMut::F16(&mut [f16::ZERO; 32])), "C is f16; the plan was made for f32");
}
