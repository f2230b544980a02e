//! The fused kernel for few tokens against the f64 reference.

use dualgemm_bench::inputs::Inputs;
use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::quantize::Quantizer;
use dualgemm_formats::{FloatMatrix, FloatType, GlobalScale, Matrix, Producer, ScaleLayout, Search};
use dualgemm_gemm::{AOperand, Activation, Epilogue, reference};
use dualgemm_kernels::parts::rows::{self, Out, Output};
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_kernels::warpwise::config::Config;
use dualgemm_kernels::warpwise::fused::{A, Variant};
use dualgemm_kernels::warpwise::host::{Fused, FusedArgs};
use dualgemm_ptx::builder::HalfFormat;

use crate::common::*;
use crate::sm80::{bound, error_of, weights};

const F16: A = A::Half(HalfFormat::F16);

fn out(ty: FloatType) -> Out {
    match ty {
        FloatType::F32 => Out::F32,
        FloatType::F16 => Out::F16,
        FloatType::Bf16 => Out::Bf16,
    }
}

fn check(
    gpu: &dyn Device,
    config: Config,
    (a, ty): (A, FloatType),
    activation: Activation,
    (m, n, k): (usize, usize, usize),
    more: bool,
) {
    let what = format!("{} {a:?} {ty:?} {m}x{n}x{k}", config.name());
    let size = if ty == FloatType::F32 { 4 } else { 2 };
    let mut weights = weights((n, k));
    let pack = Pack::new(&weights).unwrap();
    let rows =
        rows::Variant { out: out(ty), bias: more, a_scale: more, ..rows::Variant::new(activation.program()) };
    let variant = Variant { a, whole_blocks: k.is_multiple_of(64), rows: rows.for_features(n) };
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let c = poisoned(gpu, m * n * size + 64);
    let mut output = Output::new(c, pack.alpha());
    let (operand, (a, a_pitch, a_scales)) = match a {
        A::Half(format) => {
            let ty = if format == HalfFormat::F16 { FloatType::F16 } else { FloatType::Bf16 };
            let a = Inputs::seeded(5).floats("a", ty, m, k).unwrap();
            let there = upload_floats(gpu, &a);
            (AOperand::Float(a), (there.values, there.pitch, DevicePtr::NULL))
        }
        A::Nvfp4(layout) => {
            let a = quantized("a", (m, k), layout);
            let there = upload_codes(gpu, &a);
            output.alpha = output.alpha.map(|alpha| alpha * a.global_scale().value());
            (AOperand::Quantized(a), (there.codes, 0, there.scales))
        }
    };
    if more {
        let values: [Vec<f32>; 2] = [0.25f32, -0.5].map(|x| (0..n).map(|i| x + i as f32 * 0.01).collect());
        output.bias = [&values[0], &values[1]]
            .map(|bias| upload(gpu, &bias.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()));
        output.alpha = output.alpha.map(|alpha| alpha * 4.0);
        output.a_scale = upload(gpu, &0.25f32.to_le_bytes());
        let [gate, up] = values;
        (weights.gate_bias, weights.up_bias) = (Some(gate.into()), Some(up.into()));
    }
    let weights_there = upload(gpu, pack.bytes());
    let args = FusedArgs { size: (m, n, k), a, a_pitch, a_scales, weights: weights_there, output };
    let mut spec = kernel.spec(&args).unwrap();
    assert_eq!(spec.grid[0], gpu.info().sm_count, "a CTA for each multiprocessor");
    // One without features will do: they simulate as slowly as the others.
    spec.grid[0] = n.div_ceil(16 * config.halves as usize) as u32 + 1;
    run(gpu, &spec);
    let epilogue = Epilogue { activation, ..Epilogue::default() };
    let want = reference(&epilogue, &operand, 0..m, &weights);
    let got = read(gpu, c, m * n * size + 64);
    let error = error_of(&got[..m * n * size], ty, &want, n);
    assert!(error < bound(ty), "{what}: {error}");
    assert!(got[m * n * size..].iter().all(|&byte| byte == 0xA5), "{what} wrote behind C");
}

#[test]
fn every_tile_of_the_kernel_for_few_tokens_close() {
    // Half a chunk, whole ones, and both.
    let sizes = Config::menu().filter(|config| [1, 2, 3, 7].contains(&config.halves));
    for (i, config) in sizes.enumerate() {
        let a = if i % 2 == 0 || config.tokens > 8 { F16 } else { A::Nvfp4(ScaleLayout::Linear) };
        // More than one CTA, the last one not full; a warp's ring goes round.
        let n = config.halves as usize * 16 * 2 + 8;
        let blocks = (config.k_groups * (config.chunks + 1) + 1).min(30) as usize;
        let shape = (config.tokens as usize, n, 64 * blocks);
        check(gpu(), config, (a, FloatType::F16), Activation::Silu, shape, false);
    }
}

/// An nvfp4 C is what the CPU path makes of the same kernel's f32 C, and every launch leaves the same bits.
#[test]
fn an_nvfp4_c_of_few_tokens_is_its_f32_quantized_exact() {
    let (gpu, (m, n, k), scale) = (gpu(), (3, 80, 448), 0.003);
    let config = Config { halves: 3, tokens: 4, k_groups: 2, chunks: 2 };
    let a = upload_floats(gpu, &Inputs::seeded(5).floats("a", FloatType::F16, m, k).unwrap());
    let pack = Pack::new(&weights((n, k))).unwrap();
    let pack_there = upload(gpu, pack.bytes());
    let launch = |out, bytes| {
        let rows = rows::Variant { out, ..rows::Variant::new(Activation::Silu.program()) };
        let variant = Variant { a: F16, whole_blocks: true, rows: rows.for_features(n) };
        let (c, scales) = (poisoned(gpu, bytes), poisoned(gpu, m * n / 16));
        let output = Output { scales, scale, ..Output::new(c, pack.alpha()) };
        let (a, a_pitch, a_scales) = (a.values, a.pitch, DevicePtr::NULL);
        let args = FusedArgs { size: (m, n, k), a, a_pitch, a_scales, weights: pack_there, output };
        let kernel = Fused::new(gpu, config, &variant).unwrap();
        run(gpu, &kernel.spec(&args).unwrap());
        let first = (read(gpu, c, bytes), read(gpu, scales, m * n / 16));
        run(gpu, &kernel.spec(&args).unwrap());
        assert!(first == (read(gpu, c, bytes), read(gpu, scales, m * n / 16)), "other bits");
        first
    };
    let (floats, _) = launch(Out::F32, m * n * 4);
    let values: Vec<f32> = floats.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect();
    let scale = GlobalScale::multiplier(scale);
    let quantizer = Quantizer::new(Producer::Te, scale, FloatType::F32, Search::Plain);
    let want = quantizer.matrix("c", &FloatMatrix::F32(Matrix::new("c", m, n, values).unwrap())).unwrap();
    let (codes, scales) = launch(Out::Nvfp4 { scale_layout: ScaleLayout::Linear }, m * n / 2);
    assert!(codes == want.codes(), "codes");
    assert!(scales == want.scales(), "scales");
}

#[test]
fn tails_and_types_of_the_kernel_for_few_tokens_close() {
    let gelu = Activation::GeluTanh;
    for (i, layout) in ScaleLayout::ALL.into_iter().enumerate() {
        let config = Config { halves: 2 + 2 * (i as u32 % 2), tokens: 2 << i, k_groups: 2, chunks: 3 };
        check(gpu(), config, (A::Nvfp4(layout), FloatType::F32), gelu, (21, 37, 208), true);
        check(gpu(), config, (F16, FloatType::F32), gelu, (3, 37, 80), true);
        let bf16 = A::Half(HalfFormat::Bf16);
        check(gpu(), Config { halves: 3, ..config }, (bf16, FloatType::Bf16), gelu, (7, 100, 144), true);
    }
    // Fewer blocks than warps.
    let config = Config { halves: 1, tokens: 1, k_groups: 16, chunks: 3 };
    check(gpu(), config, (F16, FloatType::F16), Activation::SWIGLU_OAI, (2, 40, 16), true);
}
