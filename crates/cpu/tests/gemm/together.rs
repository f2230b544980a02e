//! Products that share A, and products that follow each other.

use dualgemm_cpu::Product;
use dualgemm_gemm::Linear;

use super::*;

fn linear(random: &mut Random, n: usize, k: usize) -> PackedGateUp {
    let weight = random.quantized(BlockFormat::Nvfp4, n, k, 0.03);
    PackedGateUp::pack(&Linear { weight: weight.into(), bias: Some(Cow::Owned(random.floats(n))) }).unwrap()
}

fn plan(m: usize, n: usize, k: usize, a: AFormat, threads: usize) -> CpuGemm {
    let mut desc = DualGemmDesc::linear(m, n, k, a, BlockFormat::Nvfp4);
    desc.out = OutFormat::Bf16;
    gemm_with(&desc, CpuOptions { threads: Some(threads), ..CpuOptions::default() })
}

fn run(gemm: &mut CpuGemm, a: &AOperand<'_>, weights: &PackedGateUp) -> Vec<bf16> {
    let mut c = vec![bf16::NAN; a.rows() * weights.n()];
    let group = [Group { first_row: 0, rows: a.rows(), weights }];
    gemm.run(a, &group, OutputMut::Bf16(&mut c)).unwrap();
    c
}

/// A in 4 bits is not shared; features that are no whole panels, and tiles of several parts.
#[test]
fn several_products_are_what_each_is_alone_exact() {
    for (a_format, threads) in [(AFormat::Bf16, 1), (AFormat::Bf16, 3), (AFormat::Nvfp4, 2)] {
        for (m, k) in [(1, 64), (5, 96), (40, 320), (530, 64)] {
            let (mut random, features) = (Random(m as u64), [80, 17, 33]);
            let a = random.activations(a_format, m, k);
            let weights = features.map(|n| linear(&mut random, n, k));
            let mut gemms = features.map(|n| plan(m, n, k, a_format, threads));
            let want = [0, 1, 2].map(|i| run(&mut gemms[i], &a, &weights[i]));
            let mut got = features.map(|n| vec![bf16::NAN; m * n]);
            let products = gemms.iter_mut().zip(&weights).zip(&mut got);
            let mut products: Vec<_> = products
                .map(|((gemm, weights), c)| Product { gemm, weights, c: OutputMut::Bf16(c) })
                .collect();
            CpuGemm::run_all(&a, &mut products).unwrap();
            assert_eq!(got, want, "{a_format} {m} x {k}, {threads} threads");
        }
    }
    let a = Random(1).activations(AFormat::Bf16, 2, 64);
    let [of_this, other] = [linear(&mut Random(1), 16, 64), linear(&mut Random(1), 16, 32)];
    let (mut first, mut second) = (plan(2, 16, 64, AFormat::Bf16, 1), plan(2, 16, 64, AFormat::Bf16, 1));
    let [mut c, mut d] = [[bf16::ZERO; 32]; 2];
    let mut products = [
        Product { gemm: &mut first, weights: &of_this, c: OutputMut::Bf16(&mut c) },
        Product { gemm: &mut second, weights: &other, c: OutputMut::Bf16(&mut d) },
    ];
    let error = CpuGemm::run_all(&a, &mut products).unwrap_err().to_string();
    assert!(error.starts_with("a pack of weights is nvfp4 [16, 32]"), "{error}");
    assert_eq!((c, d), ([bf16::ZERO; 32], [bf16::ZERO; 32]));
}

/// Where tiles multiply the second; elsewhere the first says that it cannot. A gate of -100 makes values that tiles do not take.
#[test]
fn a_product_leaves_its_rows_where_the_next_one_reads_them_exact() {
    // Vectors in the place of tiles take other numbers of rows.
    let has_vectors = matches!(Isa::best(), Isa::Avx512Bf16 | Isa::NeonBf16);
    let has_tiles = Isa::best() == Isa::AmxBf16;
    for (m, [n, k, of_next], threads) in [
        (8, [64, 32, 40], 1),
        (100, [320, 64, 32], 3),
        (530, [576, 64, 70], 2),
        (600, [1600, 32, 32], 2),
        (4, [32, 32, 32], 1),
    ] {
        let mut random = Random(m as u64);
        let a = random.activations(AFormat::Bf16, m, k);
        for gate_bias in [0.5, -80.0] {
            let mut pair = random.weights(BlockFormat::Nvfp4, n, k);
            pair.gate_bias = Some(Cow::Owned(vec![gate_bias; n]));
            let (packed, next) = (PackedGateUp::pack(&pair).unwrap(), linear(&mut random, of_next, n));
            let mut desc = desc(&a, &pair, Activation::Silu);
            desc.out = OutFormat::Bf16;
            let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
            let (mut gate_up, mut down) =
                (gemm_with(&desc, options), plan(m, of_next, n, AFormat::Bf16, threads));
            let between = run(&mut gate_up, &a, &packed);
            let between = AOperand::Float(FloatMatrix::Bf16(Matrix::new("b", m, n, between).unwrap()));
            let want = run(&mut down, &between, &next);
            let done = gate_up.run_before(&a, &packed, &mut down).unwrap();
            let fits = (m <= 256 || n <= 1536) && m >= 8;
            let expected = if has_vectors { done } else { has_tiles && fits };
            assert_eq!(done, expected && gate_bias > 0.0, "{m} x {n}, {gate_bias}");
            if done {
                let mut got = vec![bf16::NAN; m * of_next];
                down.run_ahead(m, &next, OutputMut::Bf16(&mut got)).unwrap();
                assert_eq!(got, want, "{m} x {n}");
            }
        }
    }
}
