//! What holds for every producer: bounds, grids, degenerate inputs, groups, types. Known faults of other
//! quantizers are named where a test is of their kind.

use dualgemm_formats::quantize::{quantize_group, quantize_with, relative_l2, te_block};
use dualgemm_formats::scalar::{e2m1, e4m3};
use dualgemm_formats::{
    BlockFormat, Error, FloatMatrix, FloatType, GlobalScale, Matrix, Producer, QuantizedMatrix, Quantizer,
    ScaleLayout, Search, quantize,
};
use half::{bf16, f16};
use proptest::prelude::*;

fn f32_matrix(k: usize, x: &[f32]) -> FloatMatrix<'static> {
    FloatMatrix::F32(Matrix::new("x", x.len() / k, k, x.to_vec()).unwrap())
}

fn all_types(k: usize, x: &[f32]) -> [FloatMatrix<'static>; 3] {
    let rows = x.len() / k;
    let half: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
    let brain: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    [
        f32_matrix(k, x),
        FloatMatrix::F16(Matrix::new("x", rows, k, half).unwrap()),
        FloatMatrix::Bf16(Matrix::new("x", rows, k, brain).unwrap()),
    ]
}

/// Numbers that look random, roughly normal, the same on every machine.
fn noise(n: usize, mut state: u32) -> Vec<f32> {
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state >> 8) / f64::from(1 << 24)
    };
    (0..n).map(|_| ((0..6).map(|_| next()).sum::<f64>() - 3.0) as f32 * 0.03).collect()
}

fn ulp_steps(x: f32) -> [f32; 3] {
    [x.next_down(), x, x.next_up()]
}

/// aiter#974, #2247, #3992; compressed-tensors#824, where 2.500004, rounded through bf16, became 2: each tie, one ulp around
/// it, both signs. The block's scale is 1, so the elements are the numbers that are rounded.
#[test]
fn ties_and_their_neighbours_exact() {
    let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let even = [0, 2, 2, 4, 4, 6, 6];
    for producer in Producer::ALL {
        for (i, tie) in ties.into_iter().enumerate() {
            let [below, at, above] = ulp_steps(tie);
            let mut x = [0.0; 16];
            x[..7].copy_from_slice(&[below, at, above, -below, -at, -above, 6.0]);
            let global = GlobalScale::multiplier(1.0);
            let q = quantize_with("x", &f32_matrix(16, &x), producer, Search::Plain, global).unwrap();
            assert_eq!(q.scale_byte(0, 0), 0x38, "{producer}");
            let lower = i as u8;
            let tied = if producer == Producer::Ggml { lower } else { even[i] };
            let signed = |code| if code == 0 && producer == Producer::Ggml { 0 } else { code | 8 };
            let codes: Vec<u8> = (0..6).map(|k| q.code(0, k)).collect();
            let expected = [lower, tied, lower + 1, signed(lower), signed(tied), signed(lower + 1)];
            assert_eq!(codes, expected, "{producer} {tie}");
        }
    }
}

/// compressed-tensors#781: numbers on the grid give the same bytes from every type.
#[test]
fn grid_numbers_are_exact_in_every_type() {
    let grid: Vec<f32> = (0..64).map(|i| e2m1::decode(if i == 8 { 0 } else { i as u8 })).collect();
    for producer in Producer::ALL {
        for x in all_types(16, &grid) {
            let q = quantize_with("x", &x, producer, Search::Plain, GlobalScale::multiplier(1.0)).unwrap();
            for k in 0..16 {
                assert_eq!(q.value(3, k), f64::from(x.value(3, k)), "{producer} {:?}", x.float_type());
            }
        }
    }
}

/// petit-kernel#3 and the whole table: every code under every scale, and back.
#[test]
fn every_code_under_every_scale_decodes_and_encodes_exact() {
    for scale in 0..0x7Fu8 {
        let codes: Vec<u8> = (0..8).map(|i| e2m1::pack(2 * i, 2 * i + 1)).collect();
        let one = GlobalScale::multiplier(1.0);
        let format = BlockFormat::Nvfp4;
        let q =
            QuantizedMatrix::new("q", format, 1, 16, codes, vec![scale], ScaleLayout::Linear, one).unwrap();
        let values: Vec<f32> = (0..16).map(|k| q.value(0, k) as f32).collect();
        for (code, &value) in values.iter().enumerate() {
            assert_eq!(value, e2m1::decode(code as u8) * e4m3::decode(scale), "{code} {scale:#04x}");
        }
        for producer in Producer::ALL {
            let back = quantize_with("x", &f32_matrix(16, &values), producer, Search::Plain, one).unwrap();
            // torchao has no subnormal scales and ggml none between 240 and 448.
            let representable = match producer {
                Producer::Torchao => scale >= 8 || scale == 0,
                Producer::Ggml => scale < 0x78 || scale == 0x7E,
                _ => true,
            };
            if representable {
                (0..16).for_each(|k| assert_eq!(back.value(0, k), q.value(0, k), "{producer} {scale:#04x}"));
            }
        }
    }
}

/// vllm#35210: any number of blocks per row.
#[test]
fn every_k_from_16_to_256_quantizes_each_block_alone() {
    for k in (16..=256).step_by(16) {
        let x = f32_matrix(k, &noise(3 * k, k as u32));
        for producer in Producer::ALL {
            let q = quantize("x", &x, producer, Search::Plain).unwrap();
            let quantizer = Quantizer::new(producer, q.global_scale(), FloatType::F32, Search::Plain);
            for row in 0..3 {
                for block in 0..k / 16 {
                    let elements = std::array::from_fn(|i| x.value(row, block * 16 + i));
                    let (codes, scale) = quantizer.block(&elements);
                    assert_eq!(q.row_codes(row)[block * 8..][..8], codes);
                    assert_eq!(q.scale_byte(row, block), scale);
                }
            }
        }
    }
}

#[test]
fn k_that_splits_a_block_is_refused() {
    for k in [1, 15, 24, 464 + 8] {
        let error = quantize("w", &f32_matrix(k, &vec![1.0; k]), Producer::Te, Search::Plain).unwrap_err();
        assert!(matches!(error, Error::KNotWholeBlocks { k: found, .. } if found == k), "{error}");
    }
}

/// Model-Optimizer#1397, TRT-LLM#16447, compressed-tensors#595: zeros, NaN and infinities never reach a scale.
#[test]
fn degenerate_inputs_give_valid_scales() {
    let special =
        [0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-45, 1e-38, f32::MAX, 1.0];
    for &fill in &special {
        for &odd in &special {
            let mut x = [fill; 48];
            (x[3], x[20]) = (odd, -odd);
            x[32..].fill(0.0);
            for x in all_types(16, &x) {
                for (producer, search) in
                    Producer::ALL.into_iter().flat_map(|p| [(p, Search::Plain), (p, Search::Mse)])
                {
                    let q = quantize("x", &x, producer, search).unwrap();
                    q.check_scales().unwrap();
                    assert!(q.global_scale().value() > 0.0 && q.global_scale().value().is_finite());
                    assert!((0..48).all(|i| q.value(i / 16, i % 16).is_finite()));
                }
            }
        }
    }
}

/// The bytes that each producer gives a block of zeros, and what its scales look like when all is zero.
#[test]
fn zero_tensors_exact() {
    for (producer, byte, held) in [
        (Producer::ModelOpt, 0x38, 1.0 / 448.0),
        (Producer::CompressedTensors, 0x20, 1.0),
        (Producer::Torchao, 0x08, 1.0),
        (Producer::Te, 0x00, 1.0),
        (Producer::Ggml, 0x00, 1.0),
    ] {
        for search in [Search::Plain, Search::Mse] {
            let q = quantize("x", &f32_matrix(16, &[0.0; 16]), producer, search).unwrap();
            assert_eq!((q.scale_byte(0, 0), q.global_scale().held()), (byte, held), "{producer}");
            assert_eq!(q.codes(), [0; 8]);
        }
    }
}

/// The reciprocal of so small a global scale is infinite, and times zero no number.
#[test]
fn zeros_among_the_smallest_numbers_stay_zero() {
    let mut x = [1e-39; 32];
    (x[1], x[2], x[16]) = (0.0, -0.0, 0.0);
    for producer in Producer::ALL {
        let q = quantize("x", &f32_matrix(16, &x), producer, Search::Plain).unwrap();
        assert_eq!([(0, 1), (0, 2), (1, 0)].map(|(row, k)| q.code(row, k) & 7), [0; 3], "{producer}");
    }
}

/// NaN becomes +6 and leaves its block's scale alone; infinity saturates the block.
#[test]
fn nan_and_infinity_exact() {
    let mut x = [1.0; 32];
    (x[4], x[5]) = (f32::NAN, 6.0);
    (x[20], x[21]) = (f32::INFINITY, f32::NEG_INFINITY);
    for producer in Producer::ALL {
        let global = GlobalScale::multiplier(1.0);
        let q = quantize_with("x", &f32_matrix(16, &x), producer, Search::Plain, global).unwrap();
        assert_eq!(q.scales(), [0x38, 0x7E], "{producer}");
        let expected = if producer == Producer::Ggml { [0, 0, 0] } else { [7, 7, 15] };
        assert_eq!([q.code(0, 4), q.code(1, 4), q.code(1, 5)], expected, "{producer}");
        assert_eq!([q.code(0, 0), q.code(0, 5)], [2, 7], "{producer}");
    }
    // Transformer Engine's amax passes over NaN; torch's does not, so there the tensor counts as uncalibrated.
    let x = f32_matrix(16, &x[..16]);
    assert_eq!(quantize("x", &x, Producer::Te, Search::Plain).unwrap().global_scale().held(), 448.0);
    assert_eq!(
        quantize("x", &x, Producer::CompressedTensors, Search::Plain).unwrap().global_scale().held(),
        1.0
    );
}

/// A divisor computed in the tensor's type, by a reciprocal and a product: 608 is what llm-compressor wrote for an
/// activation, and no single rounding of `2688 / amax` gives it.
#[test]
fn compressed_tensors_divisor_takes_the_type_and_two_roundings() {
    let divisor = |amax: f32, ty| Producer::CompressedTensors.global_scale(amax, ty).held();
    assert_eq!([divisor(4.406_25, FloatType::Bf16), divisor(0.279_296_88, FloatType::Bf16)], [608.0, 9600.0]);
    assert_eq!(bf16::from_f32(2688.0 / 4.406_25).to_f32(), 612.0);
    // 2688 / 0.03 overflows f16, which counts as uncalibrated.
    assert_eq!([divisor(0.03, FloatType::F16), divisor(0.05, FloatType::F16)], [1.0, 53760.0]);
    assert_eq!(divisor(2.625, FloatType::F32), 1024.0);
}

/// llm-compressor#1869, vllm#47515: a fused group shares the global scale of its largest member.
#[test]
fn groups_share_the_scale_of_the_largest_member() {
    let (gate, up) = (f32_matrix(64, &noise(256, 1)), f32_matrix(64, &noise(512, 2).repeat(1)));
    let larger = f32_matrix(64, &noise(256, 1).iter().map(|x| x * 2.14).collect::<Vec<_>>());
    for producer in Producer::ALL {
        for search in [Search::Plain, Search::Mse] {
            let group = [("gate", &gate), ("up", &up), ("larger", &larger)];
            let quantized = quantize_group(&group, producer, search).unwrap();
            let alone = quantize("larger", &larger, producer, Search::Plain).unwrap();
            for (q, (name, _)) in quantized.iter().zip(group) {
                assert_eq!(q.name(), name);
                assert_eq!(q.global_scale(), quantized[2].global_scale());
            }
            if search == Search::Plain {
                assert_eq!(quantized[2], alone);
            }
        }
    }
    assert!(quantize_group(&[], Producer::Te, Search::Plain).unwrap().is_empty());
}

/// modular#6600: the same weights under a power-of-two global scale are the same values, as multiplier or divisor.
#[test]
fn multiplier_and_divisor_of_a_power_of_two_agree_exact() {
    let mut x = noise(256, 3);
    x[17] = 2688.0 / 4096.0;
    let x = f32_matrix(64, &x);
    let multiplier = quantize("w", &x, Producer::ModelOpt, Search::Plain).unwrap();
    let divisor = quantize("w", &x, Producer::CompressedTensors, Search::Plain).unwrap();
    assert_eq!([multiplier.global_scale().held(), divisor.global_scale().held()], [1.0 / 4096.0, 4096.0]);
    for (r, k) in (0..4).flat_map(|r| (0..64).map(move |k| (r, k))) {
        assert_eq!(multiplier.value(r, k), divisor.value(r, k));
    }
}

#[test]
fn rows_in_parts_are_the_rows_of_the_whole() {
    let x = f32_matrix(48, &noise(48 * 10, 5));
    for producer in Producer::ALL {
        let whole = quantize("x", &x, producer, Search::Plain).unwrap();
        let quantizer = Quantizer::new(producer, whole.global_scale(), FloatType::F32, Search::Plain);
        let (mut codes, mut scales) = (vec![0; 4 * 24], vec![0; 4 * 3]);
        quantizer.rows(&x, 3..7, &mut codes, &mut scales);
        assert_eq!((&codes[..], &scales[..]), (&whole.codes()[3 * 24..7 * 24], &whole.scales()[9..21]));
        let amax = producer.amax(&x, 0..3).max(producer.amax(&x, 3..10));
        assert_eq!(producer.amax(&x, 0..10), amax);
    }
}

/// vllm#49092: a view of a wider matrix.
#[test]
fn strided_rows_quantize_as_dense_ones() {
    let wide = noise(5 * 100, 6);
    let dense: Vec<f32> = wide.chunks(100).flat_map(|row| row[..64].to_vec()).collect();
    let view = FloatMatrix::F32(Matrix::strided("x", 5, 64, 100, &wide[..]).unwrap());
    for producer in Producer::ALL {
        let of = |x| quantize("x", x, producer, Search::Plain).unwrap();
        assert_eq!(of(&view), of(&f32_matrix(64, &dense)));
    }
}

#[test]
fn te_block_is_the_te_producer() {
    for (i, x) in noise(16 * 500, 7).as_chunks::<16>().0.iter().enumerate() {
        let gs = 2688.0 / (0.05 + i as f32 * 0.001);
        let q = quantize_with("x", &f32_matrix(16, x), Producer::Te, Search::Plain, GlobalScale::divisor(gs))
            .unwrap();
        assert_eq!(
            te_block(x, GlobalScale::divisor(gs)),
            (q.codes().try_into().unwrap(), q.scale_byte(0, 0))
        );
    }
}

/// The relative L2 error by the producer's rule, and by the search.
fn losses(x: &FloatMatrix<'_>, producer: Producer) -> [f64; 2] {
    [Search::Plain, Search::Mse].map(|search| {
        let q = quantize("x", x, producer, search).unwrap();
        q.check_scales().unwrap();
        relative_l2(&q, x)
    })
}

/// The error that healthy nvfp4 weights have is about 0.095; the search is better by a tenth and more.
#[test]
fn search_beats_every_producer() {
    let x = f32_matrix(256, &noise(64 * 256, 8));
    for producer in Producer::ALL {
        let [plain, found] = losses(&x, producer);
        if producer != Producer::Ggml {
            assert!((0.08..0.11).contains(&plain), "{producer}: {plain}");
        }
        assert!(found < 0.93 * plain, "{producer}: {found} {plain}");
    }
}

/// Four over six needs headroom above the scale of the largest block: 4 maps to 4 where 6 would need 448 · 6/4.
#[test]
fn search_leaves_the_largest_block_a_choice() {
    let mut x = [2.0; 16];
    x[..4].copy_from_slice(&[4.0, 3.0, -4.0, -3.0]);
    for producer in [Producer::ModelOpt, Producer::Torchao, Producer::Te] {
        let [plain, found] = losses(&f32_matrix(16, &x), producer);
        assert!(found < 1e-6 && plain > 0.04, "{producer}: {found} {plain}");
    }
}

#[test]
fn a_wrong_layout_shows_in_the_error() {
    let x = f32_matrix(256, &noise(128 * 256, 9));
    let x = {
        // Rows of different size, as weights have them; else shuffled scales change little.
        let FloatMatrix::F32(m) = &x else { unreachable!() };
        let scaled = (0..128).flat_map(|r| m.row(r).iter().map(move |x| x * (1.0 + (r % 13) as f32)));
        f32_matrix(256, &scaled.collect::<Vec<_>>())
    };
    let q = quantize("w", &x, Producer::ModelOpt, Search::Plain).unwrap();
    let swizzled = q.clone().with_scale_layout(ScaleLayout::Sf128x4);
    assert_eq!(relative_l2(&swizzled, &x), relative_l2(&q, &x));
    let read = |codes: Vec<u8>, scales: &[u8]| {
        let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
        let q = QuantizedMatrix::new("w", format, 128, 256, codes, scales, layout, q.global_scale()).unwrap();
        relative_l2(&q, &x)
    };
    assert!(read(q.codes().to_vec(), q.scales()) < 0.11);
    assert!(read(q.codes().to_vec(), swizzled.scales()) > 0.3, "128x4 scales read as linear");
    assert!(read(e2m1::swap_nibbles(q.codes()), q.scales()) > 0.3, "nibbles swapped");
}

proptest! {
    /// Half the widest gap of the grid, plus what rounding the scale to e4m3 adds, and saturation at a scale that
    /// was rounded down.
    #[test]
    fn error_is_bounded_by_the_block(
        x in prop::collection::vec(prop_oneof![4 => -1.0f32..1.0, 1 => -20.0f32..20.0, 1 => Just(0.0f32)], 64),
    ) {
        for x in all_types(16, &x) {
            let amax = Producer::Te.amax(&x, 0..4);
            for producer in [Producer::ModelOpt, Producer::CompressedTensors, Producer::Torchao, Producer::Te] {
                let q = quantize("x", &x, producer, Search::Plain).unwrap();
                q.check_scales().unwrap();
                for row in 0..4 {
                    let block_amax = (0..16).fold(0f32, |m, k| m.max(x.value(row, k).abs()));
                    // Scales step by 1/16 at most (half a step of 1/8), or by 2⁻⁶ at the bottom of the range.
                    let smallest = f64::from(amax) / 448.0 / 64.0;
                    let bound = f64::from(block_amax) * (1.0 / 6.0 + 1.0 / 16.0 + 0.01) + smallest;
                    for k in 0..16 {
                        let (value, exact) = (q.value(row, k), f64::from(x.value(row, k)));
                        prop_assert!((value - exact).abs() <= bound, "{producer}: {exact} became {value}");
                        prop_assert!(value * exact >= 0.0, "{producer}: {exact} became {value}");
                    }
                }
            }
        }
    }

    /// Neither as a whole nor in any block, under the tensor scale that is found or under the plain one, not even among the
    /// smallest numbers, where a producer's own products overflow.
    #[test]
    fn search_is_never_worse(
        x in prop::collection::vec(prop_oneof![4 => -1.0f32..1.0, 1 => -20.0f32..20.0, 1 => Just(0.0f32)], 64),
        magnitude in prop::sample::select(vec![1.0f32, 1e-40, 1e-37, 1e-30, 1e30]),
    ) {
        let x: Vec<f32> = x.iter().map(|x| x * magnitude).collect();
        for producer in Producer::ALL {
            let [plain, found] = losses(&f32_matrix(16, &x), producer);
            prop_assert!(found <= plain, "{producer}: {found} {plain}");
            let global = quantize("x", &f32_matrix(16, &x), producer, Search::Plain).unwrap().global_scale();
            let whole = quantize("x", &f32_matrix(16, &x), producer, Search::Mse).unwrap();
            for (row, block) in x.chunks(16).enumerate() {
                let matrix = f32_matrix(16, block);
                let error = |search| {
                    relative_l2(&quantize_with("x", &matrix, producer, search, global).unwrap(), &matrix)
                };
                let [plain, found] = [Search::Plain, Search::Mse].map(error);
                prop_assert!(found <= plain, "{producer}: {found} {plain}");
                let squared = |k: usize| (f64::from(block[k]) - whole.value(row, k)).powi(2);
                let [error, norm] = [(0..16).map(squared).sum(), block.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>()];
                prop_assert!(error <= plain * plain * norm * (1.0 + 1e-9), "{producer}: {error}");
            }
        }
    }

    /// Dequantized numbers quantize to themselves.
    #[test]
    fn quantizing_twice_changes_nothing(x in prop::collection::vec(-1.0f32..1.0, 64)) {
        for producer in [Producer::ModelOpt, Producer::CompressedTensors, Producer::Te] {
            let global = GlobalScale::multiplier(2f32.powi(-11));
            let once = quantize_with("x", &f32_matrix(16, &x), producer, Search::Plain, global).unwrap();
            let values: Vec<f32> = (0..64).map(|i| once.value(i / 16, i % 16) as f32).collect();
            let twice = quantize_with("x", &f32_matrix(16, &values), producer, Search::Plain, global).unwrap();
            for i in 0..64 {
                prop_assert_eq!(twice.value(i / 16, i % 16), once.value(i / 16, i % 16));
            }
        }
    }
}
