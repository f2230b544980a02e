//! The elementwise kernels against the formats crate and f64.

use dualgemm_bench::inputs::Inputs;
use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::quantize::Quantizer;
use dualgemm_formats::{
    BlockFormat, FloatMatrix, FloatType, GlobalScale, Matrix, Producer, QuantizedMatrix, ScaleLayout, Search,
    scalar::e2m1, scalar::e4m3,
};
use dualgemm_gemm::Activation;
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::expand::Expand;
use dualgemm_kernels::generic::quantize::{E4M3_FACTOR, Floats, Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::generic::silu_mul::{Products, SiluMul};
use dualgemm_kernels::plain::order::{SPAN, column};

use crate::common::*;

/// `code · scale` of every element.
fn image(matrix: &QuantizedMatrix<'_>) -> Vec<f32> {
    let (m, k) = (matrix.rows(), matrix.k());
    let place = (0..m).flat_map(|r| (0..k).map(move |c| (r, c)));
    place.map(|(r, c)| e2m1::decode(matrix.code(r, c)) * e4m3::decode(matrix.scale_byte(r, c / 16))).collect()
}

fn same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.to_bits(), want.to_bits(), "{what}: element {i} is {got}, not {want}");
    }
}

#[test]
fn expansion_holds_every_code_times_every_scale_exact() {
    let gpu = gpu();
    // 127 · 16 products in a row of 127 blocks, and a shape with tails.
    let codes: Vec<u8> =
        (0..127 * 8).map(|i| e2m1::pack((2 * (i % 8)) as u8, (2 * (i % 8) + 1) as u8)).collect();
    let all = QuantizedMatrix::new(
        "all",
        BlockFormat::Nvfp4,
        1,
        127 * 16,
        codes,
        (0..127).collect::<Vec<u8>>(),
        ScaleLayout::Linear,
        GlobalScale::ONE,
    );
    let all = all.unwrap();
    for layout in ScaleLayout::ALL {
        for ty in [FloatType::F16, FloatType::Bf16] {
            let kernel = Expand::new(gpu, layout, ty).unwrap();
            for matrix in [all.clone(), quantized("a", (131, 80), ScaleLayout::Linear)] {
                let matrix = matrix.with_scale_layout(layout);
                let a = upload_codes(gpu, &matrix);
                let got = made(gpu, a.m * a.k * 2, |out| kernel.spec(&a, out, a.k * 2));
                same_bits(&ty.values(&got), &image(&matrix), &format!("{layout} {ty:?}"));
            }
        }
    }
}

#[test]
fn blocks_of_columns_hold_what_rows_do_exact() {
    let gpu = gpu();
    for layout in ScaleLayout::ALL {
        let kernel = Expand::blocks(gpu, layout).unwrap();
        let matrix = quantized("a", (33, 192), layout);
        let a = upload_codes(gpu, &matrix);
        let got = FloatType::F16.values(&made(gpu, a.m * a.k * 2, |out| kernel.spec(&a, out, a.m * 128)));
        let rows = image(&matrix);
        let want: Vec<f32> = (0..a.k / 64)
            .flat_map(|block| (0..a.m).map(move |row| row * a.k + 64 * block))
            .flat_map(|at| rows[at..at + 64].to_vec())
            .collect();
        same_bits(&got, &want, &layout.to_string());
    }
    let matrix = quantized("a", (3, 80), ScaleLayout::Linear);
    let (a, kernel) = (upload_codes(gpu, &matrix), Expand::blocks(gpu, ScaleLayout::Linear).unwrap());
    let message = kernel.spec(&a, DevicePtr(256), a.m * 128).unwrap_err().to_string();
    assert!(message.contains("K = 80"), "{message}");
}

/// Activations, and in the first rows what is hard: zeros of both signs, NaN, infinities, ties, subnormals, steps.
fn hard_floats(ty: FloatType, m: usize, k: usize) -> FloatMatrix<'static> {
    #[rustfmt::skip]
    let hard = [
        0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-38, -3e-42, 6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25,
        -0.25, 65504.0, -1e-7,
    ];
    let base = Inputs::seeded(3).floats("a", FloatType::F32, m, k).unwrap();
    let value = |r: usize, c: usize| match (r, c / 16) {
        (0, 0) => 0.0,
        (0, 1) => f32::NAN,
        (0, 2) => hard[c % 16 + 2],
        (0, 3) => hard[5 + c % 13],
        (1, b) => base.value(r, c) * 2f32.powi(b as i32 * 3 - 20),
        _ => base.value(r, c),
    };
    let values = (0..m).flat_map(|r| (0..k).map(move |c| (r, c))).map(|(r, c)| value(r, c));
    FloatMatrix::rounded("a", ty, m, k, values).unwrap()
}

fn check_quantized(
    gpu: &dyn Device,
    a: &FloatMatrix<'_>,
    layout: ScaleLayout,
    scale: Scale,
    want: &QuantizedMatrix<'_>,
) {
    let ty = a.float_type();
    let on_device = upload_floats(gpu, a);
    let dynamic = matches!(scale, Scale::Dynamic { .. });
    if let Scale::Dynamic { parts, .. } = scale {
        run(gpu, &Amax::new(gpu, ty, false).unwrap().spec(&on_device, parts, None).unwrap());
    }
    let (m, k) = (a.rows(), a.cols());
    let len = layout.len(m, k / 16);
    let (codes, scales) = (poisoned(gpu, m * k / 2), poisoned(gpu, len));
    let kernel = Quantize::new(gpu, ty, Sink::Codes(layout), dynamic).unwrap();
    run(gpu, &kernel.spec(&on_device, &Out::Codes { codes, scales }, &scale).unwrap());
    let want = want.clone().with_scale_layout(layout);
    assert_eq!(read(gpu, scales, len), want.scales(), "{ty:?} {layout}: scales");
    assert_eq!(read(gpu, codes, m * k / 2), want.codes(), "{ty:?} {layout}: codes");

    let kernel = Quantize::new(gpu, ty, Sink::Image, dynamic).unwrap();
    let to = |values| Out::Image { values, pitch: k * 2 };
    let got = made(gpu, m * k * 2, |values| kernel.spec(&on_device, &to(values), &scale));
    same_bits(&FloatType::F16.values(&got), &image(&want), "image");
}

#[test]
fn static_quantization_is_transformer_engines_exact() {
    let gpu = gpu();
    let scales = [GlobalScale::multiplier(0.011), GlobalScale::divisor(3.7), GlobalScale::multiplier(2.5e-4)];
    for ((ty, layout), scale) in FloatType::ALL.into_iter().zip(ScaleLayout::ALL).zip(scales) {
        let a = hard_floats(ty, 5, 208);
        let want = Quantizer::new(Producer::Te, scale, ty, Search::Plain).matrix("a", &a).unwrap();
        check_quantized(gpu, &a, layout, Scale::Static(scale), &want);
    }
}

#[test]
fn dynamic_quantization_is_transformer_engines_exact() {
    let gpu = gpu();
    for (ty, (m, k)) in FloatType::ALL.into_iter().zip([(3, 80), (40, 1040), (1, 7168)]) {
        let mut inputs = Inputs::seeded(9);
        let a = inputs.floats("a", ty, m, k).unwrap();
        let want = dualgemm_formats::quantize("a", &a, Producer::Te, Search::Plain).unwrap();
        let (parts, scale) = (poisoned(gpu, MAX_PARTS as usize * 4), poisoned(gpu, 4));
        check_quantized(gpu, &a, ScaleLayout::Linear, Scale::Dynamic { parts, scale }, &want);
        let written = read(gpu, scale, 4);
        assert_eq!(f32::from_le_bytes(written.try_into().unwrap()), want.global_scale().value(), "{ty:?}");
    }
}

#[test]
fn a_matrix_of_zeros_and_one_with_infinity_have_a_usable_scale_exact() {
    let gpu = gpu();
    for values in [vec![0.0f32; 32], vec![f32::INFINITY; 32], vec![f32::NAN; 32]] {
        let a = FloatMatrix::F32(Matrix::new("a", 1, 32, values).unwrap());
        let want = dualgemm_formats::quantize("a", &a, Producer::Te, Search::Plain).unwrap();
        let (parts, scale) = (poisoned(gpu, MAX_PARTS as usize * 4), poisoned(gpu, 4));
        check_quantized(gpu, &a, ScaleLayout::Linear, Scale::Dynamic { parts, scale }, &want);
    }
}

/// `act(gate, up)` of two float matrices in f64, and where they lie on the device.
struct Gated {
    products: Products,
    want: Vec<f64>,
}

fn gated(
    gpu: &dyn Device,
    ty: FloatType,
    (m, n): (usize, usize),
    activation: Activation,
    biased: bool,
) -> Gated {
    let mut inputs = Inputs::seeded(21);
    let both = inputs.floats("gate and up", ty, m, 2 * n).unwrap();
    let bias = inputs.floats("bias", FloatType::F32, 2, n).unwrap();
    let alpha = [0.75, 1.5];
    let base = upload(gpu, &both.to_le_bytes());
    let bias_rows = bias.to_le_bytes();
    let program = activation.program();
    let product = |row: usize, feature: usize, half: usize| {
        let bias = if biased { bias.value(half, feature) } else { 0.0 };
        f64::from(both.value(row, half * n + feature)) * f64::from(alpha[half]) + f64::from(bias)
    };
    let place = (0..m).flat_map(|r| (0..n).map(move |c| (r, c)));
    let want = place.map(|(r, c)| program.eval_f64(product(r, c, 0), product(r, c, 1))).collect();
    let bias = match biased {
        true => [&bias_rows[..4 * n], &bias_rows[4 * n..]].map(|row| upload(gpu, row)),
        false => [DevicePtr::NULL; 2],
    };
    let products = Products {
        m,
        n,
        gate: base,
        up: base.offset((n * ty.bytes()) as u64),
        pitch: 2 * n * ty.bytes(),
        alpha,
        bias,
    };
    Gated { products, want }
}

#[test]
fn the_activation_alone_close() {
    let gpu = gpu();
    let mut activations = Activation::EXAMPLES.into_iter().cycle();
    for (ty, out) in FloatType::ALL.into_iter().flat_map(|ty| FloatType::ALL.map(|out| (ty, out))) {
        for (n, biased) in [(72, true), (40, false)] {
            let activation = activations.next().unwrap();
            let Gated { products, want } = gated(gpu, ty, (3, n), activation, biased);
            let kernel = SiluMul::new(gpu, (ty, false), Sink::Float(out), &activation.program()).unwrap();
            let (pitch, rows) = (n * out.bytes(), 3 * n * out.bytes());
            let to = |values| Out::Image { values, pitch };
            let got = made(gpu, rows, |values| kernel.spec(&products, &to(values), GlobalScale::ONE));
            let unit = match out {
                FloatType::F32 => 2e-6,
                FloatType::F16 => 5e-4,
                FloatType::Bf16 => 4e-3,
            };
            for (got, want) in out.values(&got).into_iter().zip(want) {
                let error = (f64::from(got) - want).abs();
                assert!(error <= unit * want.abs() + 1e-6, "{activation} {ty:?} {out:?}: {got}, not {want}");
            }
        }
    }
}

/// Every pair of these as gate and up, against the same expression in f64. All kernels share what evaluates it.
#[test]
fn what_is_not_finite_is_as_in_f64() {
    const INF: f32 = f32::INFINITY;
    let gpu = gpu();
    let values = [0.0, -0.0, 3.0, -3.0, -2000.0, 1e30, -1e30, f32::MAX, f32::MIN, INF, -INF, f32::NAN];
    let pairs: Vec<(f32, f32)> = values.iter().flat_map(|&g| values.map(|u| (g, u))).collect();
    let bytes =
        |half: fn(&(f32, f32)) -> f32| pairs.iter().flat_map(|p| half(p).to_le_bytes()).collect::<Vec<_>>();
    let n = pairs.len();
    let (gate, up) = (upload(gpu, &bytes(|p| p.0)), upload(gpu, &bytes(|p| p.1)));
    let none = DevicePtr::NULL;
    let (alpha, bias) = ([1.0; 2], [none; 2]);
    let products = Products { m: 1, n, gate, up, pitch: 4 * n, alpha, bias };
    let others = [-1.7, 0.0, 1e-40].map(|alpha| Activation::SwigluOai { alpha, beta: 1.0, limit: 7.0 });
    for activation in Activation::EXAMPLES.into_iter().chain(others) {
        let (program, ty) = (activation.program(), FloatType::F32);
        let kernel = SiluMul::new(gpu, (ty, false), Sink::Float(ty), &program).unwrap();
        let to = |values| Out::Image { values, pitch: 4 * n };
        let got = made(gpu, 4 * n, |values| kernel.spec(&products, &to(values), GlobalScale::ONE));
        for (&(gate, up), got) in pairs.iter().zip(ty.values(&got)) {
            let want = program.eval_f64(gate.into(), up.into()) as f32;
            let near = (got - want).abs() <= 1e-5 * want.abs();
            let same = near || got == want || got.is_nan() && want.is_nan();
            let sign = want.is_nan() || got.is_sign_negative() == want.is_sign_negative();
            assert!(same && sign, "{activation} of {gate:e} and {up:e}: {got:e}, not {want:e}");
        }
    }
}

#[test]
fn the_activation_to_nvfp4_is_its_f32_quantized_exact() {
    let gpu = gpu();
    let (m, n, scale) = (3, 80, GlobalScale::multiplier(0.02));
    for layout in ScaleLayout::ALL {
        let Gated { products, .. } = gated(gpu, FloatType::F16, (m, n), Activation::Silu, true);
        let program = Activation::Silu.program();
        let kernel = |sink| SiluMul::new(gpu, (FloatType::F16, true), sink, &program).unwrap();
        let to = |values| Out::Image { values, pitch: n * 4 };
        let to_floats = kernel(Sink::Float(FloatType::F32));
        let c = made(gpu, m * n * 4, |values| to_floats.spec(&products, &to(values), scale));
        let c = FloatType::F32.values(&c);
        let c = FloatMatrix::F32(Matrix::new("c", m, n, c).unwrap());
        let want =
            Quantizer::new(Producer::Te, scale, FloatType::F32, Search::Plain).matrix("c", &c).unwrap();
        let want = want.with_scale_layout(layout);
        let (codes, scales) = (poisoned(gpu, m * n / 2), poisoned(gpu, want.scales().len()));
        let out = Out::Codes { codes, scales };
        run(gpu, &kernel(Sink::Codes(layout)).spec(&products, &out, scale).unwrap());
        assert_eq!(read(gpu, codes, m * n / 2), want.codes());
        assert_eq!(read(gpu, scales, want.scales().len()), want.scales());
    }
}

#[test]
fn bad_operands_are_refused_by_name() {
    let gpu = gpu();
    let kernel = Quantize::new(gpu, FloatType::F16, Sink::Image, false).unwrap();
    let values = gpu.alloc(4096).unwrap();
    let a = Floats { m: 2, k: 32, values, pitch: 64 };
    let out = Out::Image { values, pitch: 64 };
    let scale = Scale::Static(GlobalScale::ONE);
    let refused = |a: &Floats, out: &Out, scale: &Scale| kernel.spec(a, out, scale).unwrap_err().to_string();
    let message = refused(&Floats { k: 24, ..a }, &out, &scale);
    assert!(message.contains("A is [2, 24]"), "{message}");
    let message = refused(&Floats { pitch: 72, ..a }, &out, &scale);
    assert!(message.contains("row stride in bytes is 72") && message.contains("multiple of 16"), "{message}");
    let message = refused(&a, &Out::Codes { codes: values, scales: values }, &scale);
    assert!(
        message.contains("output is codes; the problem asks for as the kernel f16_to_image_f16"),
        "{message}"
    );
    let message = refused(&a, &out, &Scale::Dynamic { parts: values, scale: values });
    assert!(message.contains("with a dynamic scale"), "{message}");
}

#[test]
fn the_order_of_the_plain_kernel_and_its_padding_exact() {
    let gpu = gpu();
    let matrix = quantized("a", (3, 208), ScaleLayout::Linear);
    let padded = 208usize.next_multiple_of(SPAN);
    let want = |value: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
        let mut rows = vec![0.0; 3 * padded];
        for (r, c) in (0..3).flat_map(|r| (0..208).map(move |c| (r, c))) {
            rows[r * padded + column(c)] = value(r, c);
        }
        rows
    };
    let codes = upload_codes(gpu, &matrix);
    let kernel = Expand::permuted(gpu, ScaleLayout::Linear).unwrap();
    let values = image(&matrix);
    let got = made(gpu, 3 * padded * 2, |out| kernel.spec(&codes, out, padded * 2));
    same_bits(&FloatType::F16.values(&got), &want(&|r, c| values[r * 208 + c]), "codes");

    let a = Inputs::seeded(2).floats("a", FloatType::Bf16, 3, 208).unwrap();
    let kernel = Quantize::new(gpu, FloatType::Bf16, Sink::Permuted, false).unwrap();
    let to = |values| Out::Image { values, pitch: padded * 2 };
    let (from, scale) = (upload_floats(gpu, &a), Scale::Static(GlobalScale::ONE));
    let got = made(gpu, 3 * padded * 2, |values| kernel.spec(&from, &to(values), &scale));
    same_bits(&FloatType::F16.values(&got), &want(&|r, c| FloatType::F16.round(a.value(r, c))), "floats");
}

#[test]
fn e4m3_is_the_scaled_value_rounded_exact() {
    let gpu = gpu();
    let a = hard_floats(FloatType::F32, 4, 208);
    let kernel = Quantize::new(gpu, FloatType::F32, Sink::E4m3, false).unwrap();
    let scale = GlobalScale::multiplier(0.037);
    let (from, inverse) = (upload_floats(gpu, &a), 1.0 / scale.value());
    let to = |values| Out::Image { values, pitch: 208 };
    let got = made(gpu, 4 * 208, |values| kernel.spec(&from, &to(values), &Scale::Static(scale)));
    for (i, got) in got.into_iter().enumerate() {
        let x = a.value(i / 208, i % 208) * inverse;
        let want = if x.is_nan() { 0x7E } else { e4m3::encode(x) };
        let got = if x.is_nan() { got & 0x7F } else { got };
        assert_eq!(got, want, "{x}");
    }
}

#[test]
fn e4m3_of_codes_and_under_a_dynamic_scale_is_the_value_rounded_exact() {
    let gpu = gpu();
    let bytes = |from: DevicePtr, count: usize| read(gpu, from, count);
    for layout in ScaleLayout::ALL {
        let matrix = quantized("a", (131, 80), layout);
        let (kernel, codes) = (Expand::e4m3(gpu, layout, 6.0).unwrap(), upload_codes(gpu, &matrix));
        let want: Vec<u8> = image(&matrix).iter().map(|x| e4m3::encode(x * (1.0 / 6.0))).collect();
        assert!(made(gpu, 131 * 80, |out| kernel.spec(&codes, out, 80)) == want, "{layout}");
    }
    let message = Expand::e4m3(gpu, ScaleLayout::Linear, 0.0).unwrap_err().to_string();
    assert_eq!(message, "scale of e4m3 is 0; the problem asks for positive with a finite reciprocal");

    let a = Inputs::seeded(5).floats("a", FloatType::Bf16, 7, 1040).unwrap();
    let amax = (0..7 * 1040).map(|i| a.value(i / 1040, i % 1040).abs()).fold(0.0, f32::max);
    let [values, parts, scale] = [7 * 1040, 4 * MAX_PARTS as usize, 4].map(|bytes| poisoned(gpu, bytes));
    let on_device = upload_floats(gpu, &a);
    run(gpu, &Amax::new(gpu, FloatType::Bf16, false).unwrap().spec(&on_device, parts, None).unwrap());
    let kernel = Quantize::new(gpu, FloatType::Bf16, Sink::E4m3, true).unwrap();
    let to = Out::Image { values, pitch: 1040 };
    run(gpu, &kernel.spec(&on_device, &to, &Scale::Dynamic { parts, scale }).unwrap());
    let divisor = 2688.0 / amax;
    assert_eq!(FloatType::F32.values(&bytes(scale, 4)), [1.0 / divisor]);
    let got = bytes(values, 7 * 1040);
    for (i, got) in got.iter().enumerate() {
        assert_eq!(*got, e4m3::encode(a.value(i / 1040, i % 1040) * (divisor * (1.0 / 6.0))), "element {i}");
    }
    let largest = got.iter().map(|&byte| e4m3::decode(byte).abs()).fold(0.0, f32::max);
    assert_eq!(largest, 448.0);
    assert!((largest * E4M3_FACTOR / divisor / amax - 1.0).abs() < 1e-6);
    let static_scale = kernel.spec(&on_device, &to, &Scale::Static(GlobalScale::ONE)).unwrap_err();
    assert!(static_scale.to_string().contains("with a static scale"));
}
