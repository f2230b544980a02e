//! Linear layers: the same packs and kernels, with all sums stored.

use dualgemm_gemm::{Linear, bounded_reference};

use super::*;

fn layer(random: &mut Random, format: BlockFormat, n: usize, k: usize) -> Linear<'static> {
    Linear { weight: random.quantized(format, n, k, 0.03).into(), bias: Some(Cow::Owned(random.floats(n))) }
}

fn desc(a: &AOperand<'_>, layer: &Linear<'_>) -> DualGemmDesc {
    let mut desc = DualGemmDesc::linear(a.rows(), layer.n(), a.k(), AFormat::of(a), layer.weight.format());
    desc.epilogue.alpha_gate = 1.5;
    desc
}

fn run(desc: &DualGemmDesc, isa: Isa, a: &AOperand<'_>, layer: &Linear<'_>) -> Vec<f32> {
    let packed = PackedGateUp::pack(layer).unwrap();
    let mut c = vec![f32::NAN; a.rows() * layer.n()];
    let group = [Group { first_row: 0, rows: a.rows(), weights: &packed }];
    gemm(desc, isa).run(a, &group, OutputMut::F32(&mut c)).unwrap();
    c
}

#[test]
fn every_pair_of_formats_is_within_the_bound_of_f64() {
    for (a_format, b_format) in A_FORMATS.into_iter().flat_map(|a| BlockFormat::ALL.map(|b| (a, b))) {
        for (m, n, k) in [(1, 1, 32), (1, 300, 64), (2, 17, 64), (5, 33, 96), (11, 15, 320), (67, 32, 64)] {
            let mut random = Random(m as u64);
            let (a, layer) = (random.activations(a_format, m, k), layer(&mut random, b_format, n, k));
            let desc = desc(&a, &layer);
            let want = bounded_reference(&desc.epilogue, &a, 0..m, &layer);
            for isa in isas() {
                for (at, (got, want)) in run(&desc, isa, &a, &layer).iter().zip(&want).enumerate() {
                    let off = (f64::from(*got) - want.value).abs();
                    assert!(off <= want.error, "{desc} {isa} at {at}: {got:e}, want {want:?}");
                }
            }
        }
    }
}

/// Where a feature lies in its panel and what else the layer has makes no difference.
#[test]
fn features_do_not_depend_on_their_neighbours_exact() {
    for a_format in A_FORMATS {
        for m in [1, 3, 40] {
            let mut random = Random(3);
            let (a, whole) =
                (random.activations(a_format, m, 96), layer(&mut random, BlockFormat::Nvfp4, 77, 96));
            let wide = run(&desc(&a, &whole), Isa::best(), &a, &whole);
            for first in [0, 5, 16, 41] {
                let rows = first..77;
                let part = Linear {
                    weight: whole.weight.slice_rows(rows.clone()).unwrap(),
                    bias: whole.bias.as_ref().map(|bias| bias[rows.clone()].into()),
                };
                let narrow = run(&desc(&a, &part), Isa::best(), &a, &part);
                for (row, narrow) in narrow.chunks(rows.len()).enumerate() {
                    assert_eq!(narrow, &wide[row * 77..][rows.clone()], "{a_format}, {m} rows from {first}");
                }
            }
        }
    }
}

#[test]
fn nvfp4_output_is_the_quantized_f32_output_exact() {
    for (n, layout) in [(16, ScaleLayout::Linear), (48, ScaleLayout::Linear), (80, ScaleLayout::Sf128x4)] {
        let mut random = Random(8);
        let (a, layer) =
            (random.activations(AFormat::Bf16, 9, 64), layer(&mut random, BlockFormat::Mxfp4, n, 64));
        let wide = Matrix::new("c", 9, n, run(&desc(&a, &layer), Isa::best(), &a, &layer)).unwrap();
        for global_scale in [OutScale::Static(0.125), OutScale::Dynamic] {
            let packed = PackedGateUp::pack(&layer).unwrap();
            let desc = DualGemmDesc {
                out: OutFormat::Nvfp4 { scale_layout: layout, global_scale },
                ..desc(&a, &layer)
            };
            let (mut codes, mut scales) = (vec![0xAA; 9 * n / 2], vec![0xAA; layout.len(9, n / 16)]);
            let group = [Group { first_row: 0, rows: 9, weights: &packed }];
            let c = OutputMut::Nvfp4 { codes: &mut codes, scales: &mut scales };
            let scale = gemm(&desc, Isa::best()).run(&a, &group, c).unwrap().unwrap();
            let want =
                quantize_with("c", &FloatMatrix::F32(wide.clone()), Producer::Te, Search::Plain, scale)
                    .unwrap()
                    .with_scale_layout(layout);
            assert_eq!(
                (&codes[..], &scales[..]),
                (want.codes(), want.scales()),
                "{n} {layout} {global_scale:?}"
            );
        }
    }
}

#[test]
fn weights_of_the_other_operation_are_refused() {
    let mut random = Random(1);
    let (a, layer) =
        (random.activations(AFormat::F32, 1, 32), layer(&mut random, BlockFormat::Nvfp4, 16, 32));
    let pair = random.weights(BlockFormat::Nvfp4, 16, 32);
    let packed = PackedGateUp::pack(&pair).unwrap();
    let group = [Group { first_row: 0, rows: 1, weights: &packed }];
    let mut c = [7.0; 16];
    let error = gemm(&desc(&a, &layer), Isa::best()).run(&a, &group, OutputMut::F32(&mut c)).unwrap_err();
    let want = "a pack of weights is nvfp4 [16, 32] for gate and up; the plan was made for nvfp4 [16, 32] for a linear layer";
    assert_eq!((error.to_string().as_str(), c), (want, [7.0; 16]));
}
