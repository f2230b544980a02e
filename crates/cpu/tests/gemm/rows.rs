//! Any number of rows, the ends of K, and memory between rows, beside them or in rows of no group.

use super::*;

/// cutlass#3536, vllm#48491: rows and the ends of K that no whole tile holds. Sums of ones are exact.
#[test]
fn ones_sum_to_k_for_every_number_of_rows_and_ends_of_k_exact() {
    let n = 17;
    let ks = [16, 48, 272, 288, 464, 1024, 1056, 1152, 1280, 1312, 2176];
    let rows = (1..=130).filter(|m| !EMULATED || *m < 20 || (m + 1) % 16 < 3);
    for (m, k) in rows.map(|m| (m, 48)).chain(ks.into_iter().flat_map(|k| [(1, k), (7, k), (67, k)])) {
        let ones = |name: &'static str, rows| {
            let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
            let (codes, scales) = (vec![0x22; rows * k / 2], vec![0x38; rows * k / 16]);
            QuantizedMatrix::new(name, format, rows, k, codes, scales, layout, GlobalScale::ONE).unwrap()
        };
        let weights = GateUp::new(ones("gate", n), ones("up", n));
        let floats = FloatMatrix::F32(Matrix::new("a", m, k, vec![1.0; m * k]).unwrap());
        let halves = FloatMatrix::Bf16(Matrix::new("a", m, k, vec![bf16::ONE; m * k]).unwrap());
        for a in [AOperand::Quantized(ones("a", m)), AOperand::Float(floats), AOperand::Float(halves)] {
            let desc = desc(&a, &weights, Activation::Identity);
            let want = desc.epilogue.alpha_gate * desc.epilogue.alpha_up * (k * k) as f32;
            for isa in isas() {
                let c = run_f32(&desc, isa, &a, &weights);
                assert!(c.len() == m * n && c.iter().all(|&x| x == want), "{desc} {isa}");
            }
        }
    }
}

#[test]
fn poisoned_padding_and_gaps_between_rows_never_change_a_bit_exact() {
    let (m, n, k) = (5, 18, 80);
    let mut random = Random(11);
    let AOperand::Quantized(a) = random.activations(AFormat::Nvfp4, m, k) else { unreachable!() };
    let weights = random.weights(BlockFormat::Nvfp4, n, k);
    let desc = desc(&AOperand::Quantized(a.clone()), &weights, Activation::Silu);
    // The same values as a view with wide gaps and another scale layout, all padding set to `poison`.
    let poisoned = |x: &QuantizedMatrix<'_>, layout: ScaleLayout, poison: u8| {
        let (stride, blocks) = (k / 2 + 3, k / 16);
        let mut codes = vec![poison; x.rows() * stride];
        let mut scales = vec![poison; layout.len(x.rows(), blocks)];
        for row in 0..x.rows() {
            codes[row * stride..][..k / 2].copy_from_slice(x.row_codes(row));
            (0..blocks).for_each(|b| scales[layout.offset(row, b, blocks)] = x.scale_byte(row, b));
        }
        QuantizedMatrix::strided(
            "x",
            x.format(),
            x.rows(),
            k,
            stride,
            codes,
            scales,
            layout,
            x.global_scale(),
        )
        .unwrap()
    };
    for layout in ScaleLayout::ALL {
        for poison in [0x7E, 0x7F, 0xFF] {
            let mut pair =
                GateUp::new(poisoned(&weights.gate, layout, poison), poisoned(&weights.up, layout, poison));
            (pair.gate_bias, pair.up_bias) = (weights.gate_bias.clone(), weights.up_bias.clone());
            let [poisoned, plain] = [poisoned(&a, layout, poison), a.clone()].map(AOperand::Quantized);
            for isa in isas() {
                let (got, want) =
                    (run_f32(&desc, isa, &poisoned, &pair), run_f32(&desc, isa, &plain, &weights));
                assert!(
                    got.iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits()),
                    "{isa} {layout} {poison:#x}"
                );
            }
        }
    }
}

#[test]
fn nan_in_a_row_of_a_reaches_that_row_of_c_alone() {
    for (m, bad) in [(3, f32::NAN), (3, f32::INFINITY), (30, f32::NAN)] {
        let (n, k) = (17, 48);
        let mut random = Random(12);
        let (weights, mut data) = (random.weights(BlockFormat::Nvfp4, n, k), random.floats(m * k));
        data[k + 7] = bad;
        let a = AOperand::Float(FloatMatrix::F32(Matrix::new("a", m, k, data).unwrap()));
        let c = run_f32(&desc(&a, &weights, Activation::Silu), Isa::best(), &a, &weights);
        for (row, c) in c.chunks_exact(n).enumerate() {
            match row {
                1 if bad.is_nan() => assert!(c.iter().all(|x| x.is_nan())),
                1 => assert!(c.iter().all(|x| !x.is_finite() || *x == 0.0), "{c:?}"),
                _ => assert!(c.iter().all(|x| x.is_finite())),
            }
        }
    }
}

#[test]
fn groups_have_their_own_weights_and_gaps_stay_untouched_exact() {
    let (n, k) = (32, 64);
    for a_format in [AFormat::F32, AFormat::Nvfp4] {
        let mut random = Random(16);
        let a = random.activations(a_format, 40, k);
        let pairs = [1, 2, 3].map(|seed| Random(seed).weights(BlockFormat::Nvfp4, n, k));
        let packed = [0, 1, 2].map(|i| PackedGateUp::pack(&pairs[i]).unwrap());
        let ranges = [0..20, 20..20, 25..40];
        let groups = [0, 1, 2].map(|i| Group {
            first_row: ranges[i].start,
            rows: ranges[i].len(),
            weights: &packed[i],
        });
        let mut desc = desc(&a, &pairs[0], Activation::Silu);
        for isa in isas() {
            let mut c = vec![-7.5f32; 40 * n];
            gemm(&desc, isa).run(&a, &groups, OutputMut::F32(&mut c)).unwrap();
            for (i, range) in [(0, 0..20), (2, 25..40)] {
                let want = reference(&desc.epilogue, &a, range.clone(), &pairs[i]);
                let distance = Comparison::new(&c[range.start * n..range.end * n], &want, n).unwrap();
                assert!(distance.rel_l2 < 1e-6, "{isa} {a_format}: {distance:?}");
            }
            assert!(c[20 * n..25 * n].iter().all(|&x| x == -7.5));
        }

        let scale_layout = ScaleLayout::Sf128x4;
        desc.out = OutFormat::Nvfp4 { scale_layout, global_scale: OutScale::Dynamic };
        for dynamic_c_twice in [false, true] {
            let (mut codes, mut scales) = (vec![0xEE; 40 * n / 2], vec![0xEE; scale_layout.len(40, n / 16)]);
            let out = OutputMut::Nvfp4 { codes: &mut codes, scales: &mut scales };
            let options = CpuOptions { dynamic_c_twice, ..CpuOptions::default() };
            gemm_with(&desc, options).run(&a, &groups, out).unwrap();
            assert!(codes[20 * n / 2..25 * n / 2].iter().all(|&x| x == 0xEE));
            assert!((20..25).all(|row| (0..2).all(|b| scales[scale_layout.offset(row, b, 2)] == 0)));
            assert!((25..40).all(|row| (0..2).any(|b| scales[scale_layout.offset(row, b, 2)] != 0)));
        }
    }
}

/// flashinfer#3057: rows of no group, as in a mixture that has room for more tokens than it got, may hold anything.
#[test]
fn rows_of_no_group_never_change_a_bit_exact() {
    let (n, k, ranges) = (16, 64, [0..3, 3..3, 7..12]);
    let weights = Random(18).weights(BlockFormat::Nvfp4, n, k);
    let packed = PackedGateUp::pack(&weights).unwrap();
    let groups =
        ranges.clone().map(|rows| Group { first_row: rows.start, rows: rows.len(), weights: &packed });
    let outside = |row: usize| !ranges.iter().any(|range| range.contains(&row));
    let run = |a: AOperand<'_>, quantize_a| {
        let mut desc = desc(&a, &weights, Activation::Silu);
        desc.quantize_a = quantize_a;
        let mut c = vec![0.0; 16 * n];
        gemm(&desc, Isa::best()).run(&a, &groups, OutputMut::F32(&mut c)).unwrap();
        c.iter().map(|x: &f32| x.to_bits()).collect::<Vec<_>>()
    };
    let floats = |poison: f32| {
        let mut data = Random(19).floats(16 * k);
        data.chunks_mut(k).enumerate().filter(|(row, _)| outside(*row)).for_each(|(_, row)| row.fill(poison));
        AOperand::Float(FloatMatrix::F32(Matrix::new("a", 16, k, data).unwrap()))
    };
    for poison in [f32::NAN, f32::INFINITY, 1e30] {
        for how in [QuantizeA::No, QuantizeA::Static(0.002), QuantizeA::Dynamic] {
            assert_eq!(run(floats(poison), how), run(floats(0.0), how), "{poison} {how:?}");
        }
    }
    let quantized = |poison: u8| {
        let AOperand::Quantized(a) = Random(20).activations(AFormat::Nvfp4, 16, k) else { unreachable!() };
        let mut scales = a.scales().to_vec();
        scales
            .chunks_mut(k / 16)
            .enumerate()
            .filter(|(row, _)| outside(*row))
            .for_each(|(_, row)| row.fill(poison));
        let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
        let codes = a.codes().to_vec();
        AOperand::Quantized(
            QuantizedMatrix::new("a", format, 16, k, codes, scales, layout, a.global_scale()).unwrap(),
        )
    };
    assert_eq!(run(quantized(0x7F), QuantizeA::No), run(quantized(0), QuantizeA::No));
}

/// A team writes the spans of one row apart, and joins them where it can: not where chunks are all zeros, leave rests or are floats.
#[test]
fn a_team_changes_no_bit_exact() {
    let (n, k, team) = (40, 2320, Team::new(3).unwrap());
    let mut random = Random(14);
    let weights = random.weights(BlockFormat::Nvfp4, n, k);
    let floats = random.floats(k);
    let with = |at: std::ops::Range<usize>, value: f32| {
        let mut floats = floats.clone();
        floats[at].fill(value);
        floats
    };
    let rows =
        [floats.clone(), with(1040..1056, 0.0), with(2319..2320, 3e4), with(1500..1501, f32::MIN_POSITIVE)];
    for (case, row) in rows.iter().enumerate() {
        for float in FloatType::ALL {
            let a = AOperand::Float(FloatMatrix::rounded("a", float, 1, k, row.iter().copied()).unwrap());
            let desc = desc(&a, &weights, Activation::Silu);
            for isa in isas() {
                let [alone, together] =
                    [run_f32(&desc, isa, &a, &weights), team.install(|| run_f32(&desc, isa, &a, &weights))];
                let bits = |c: &[f32]| c.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&alone), bits(&together), "{isa} {desc} {case}");
            }
        }
    }
}

/// The rows of a list, one after the other.
fn copied(a: &AOperand<'_>, list: &[u32]) -> AOperand<'static> {
    let (rows, k) = (list.len(), a.k());
    let places = || list.iter().map(|&row| row as usize);
    AOperand::Float(match a {
        AOperand::Float(a) => a.pick("a", &places().collect::<Vec<_>>()).unwrap(),
        AOperand::Quantized(a) => {
            let codes = places().flat_map(|row| a.row_codes(row).to_vec()).collect::<Vec<_>>();
            let scales: Vec<u8> =
                places().flat_map(|row| (0..a.blocks()).map(move |block| a.scale_byte(row, block))).collect();
            let (format, layout, scale) = (a.format(), ScaleLayout::Linear, a.global_scale());
            return AOperand::Quantized(
                QuantizedMatrix::new("a", format, rows, k, codes, scales, layout, scale).unwrap(),
            );
        }
    })
}

#[test]
fn rows_of_a_list_are_those_of_a_copy_exact() {
    let (n, k) = (40, 288);
    let mut random = Random(21);
    let packed = PackedGateUp::pack(&random.weights(BlockFormat::Nvfp4, n, k)).unwrap();
    for format in A_FORMATS {
        let a = random.activations(format, 7, k);
        let quantized = (format == AFormat::F32).then_some(QuantizeA::Dynamic);
        for (quantize_a, len) in
            [QuantizeA::No].into_iter().chain(quantized).flat_map(|q| [1, 3, 70].map(|len| (q, len)))
        {
            let list: Vec<u32> = (0..len).map(|i| (5 * i + 4) % 6).collect();
            let copy = copied(&a, &list);
            let mut desc = DualGemmDesc::new(len as usize, n, k, format, BlockFormat::Nvfp4);
            desc.quantize_a = quantize_a;
            // Two groups, and a row of none between them.
            let rows = list.len();
            let groups = [(0, rows / 2), (rows.div_ceil(2), rows / 2)];
            let groups = groups.map(|(first_row, rows)| Group { first_row, rows, weights: &packed });
            for isa in isas() {
                let (mut c, mut want) = (vec![0.0; rows * n], vec![0.0; rows * n]);
                gemm(&desc, isa).run(&copy, &groups, OutputMut::F32(&mut want)).unwrap();
                gemm(&desc, isa).run(Input::listed(&a, &list), &groups, OutputMut::F32(&mut c)).unwrap();
                assert!(rows == 1 || want.iter().any(|x| *x != 0.0));
                assert_eq!(c, want, "{isa} {format} {quantize_a:?} {len}");
            }
        }
    }
}

#[test]
fn lists_that_do_not_fit_are_refused() {
    let a = Random(3).activations(AFormat::Bf16, 7, 32);
    let mut runner = gemm(&DualGemmDesc::new(2, 16, 32, AFormat::Bf16, BlockFormat::Nvfp4), Isa::Portable);
    for (list, len, message) in [
        (
            &[6, 7][..],
            2,
            "the list of rows is row 7 at place 1; the plan was made for rows below 7, those of A",
        ),
        (&[0; 3], 3, "A is bf16 [3, 32]; the plan was made for bf16 with up to 2 rows and K = 32"),
        (&[0], 2, "C is f32 of 32 values; the plan was made for f32 of 1 × 16 values"),
    ] {
        let c = &mut vec![0.0; len * 16];
        let error = runner.run(Input::listed(&a, list), &[], OutputMut::F32(c)).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}
