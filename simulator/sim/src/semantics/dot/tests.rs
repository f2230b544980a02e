//! The model's rules one by one, its two implementations against each other, and both against exact sums.

use super::fused::element_by_element;
use super::*;
use proptest::prelude::*;

fn model(generation: Generation, family: Family, element: Element, k: usize) -> Model {
    Model::new(generation, family, element, Accumulator::F32, k)
}

fn hopper(k: usize) -> Model {
    model(Generation::Hopper, Family::Wgmma, Element::F16, k)
}

/// `c` plus the given products, the rest zero, through a one by one instruction.
fn sum(model: &Model, k: usize, c: f32, pairs: &[(f32, f32)]) -> f32 {
    let (mut a, mut b) = (vec![0.0; k], vec![0.0; k]);
    for (i, &(x, y)) in pairs.iter().enumerate() {
        (a[i], b[i]) = (x, y);
    }
    let mut d = [c];
    multiply(model, Shape { m: 1, n: 1, k }, &a, &b, &mut d);
    d[0]
}

const P: fn(i32) -> f32 = |n| 2f32.powi(n);

#[test]
fn terms_are_truncated_below_the_fraction_bits_exact() {
    let ampere = model(Generation::Ampere, Family::Mma, Element::F16, 8);
    let four = |n: i32| [(P(n / 2), P(n - n / 2)); 4];
    assert_eq!(sum(&hopper(16), 16, 1.0, &four(-25)), 1.0 + P(-23));
    assert_eq!(sum(&hopper(16), 16, 1.0, &four(-26)), 1.0);
    assert_eq!(sum(&ampere, 8, 1.0, &four(-24)), 1.0 + P(-22));
    assert_eq!(sum(&ampere, 8, 1.0, &four(-25)), 1.0);
    // Towards zero on both sides, in alignment and in the result.
    let almost = [(1.5 * P(-12), P(-11))];
    assert_eq!(sum(&hopper(16), 16, 1.0, &almost), 1.0 + P(-23));
    assert_eq!(sum(&hopper(16), 16, -1.0, &[(-1.5 * P(-12), P(-11))]), -1.0 - P(-23));
    // The largest exponent may be a product's, and C is then what is truncated.
    assert_eq!(sum(&hopper(16), 16, P(-10) + P(-30), &[(256.0, 256.0)]), 65536.0);
    assert_eq!(sum(&hopper(16), 16, P(-9) + P(-30), &[(256.0, 256.0), (-256.0, 256.0)]), P(-9));
}

#[test]
fn a_product_keeps_the_sum_of_its_operands_exponents_exact() {
    // 1.5 * 1.5 = 2.25 aligns at exponent 0, so a place 25 below 1 is kept, not 25 below 2.
    let pairs = [(1.5, 1.5), (P(-12), P(-13)), (-1.5, 1.5)];
    assert_eq!(sum(&hopper(16), 16, 0.0, &pairs), P(-25));
    // A subnormal operand keeps the exponent of the smallest normal number.
    let pairs = [(P(-24), P(-14)), (P(-24), P(-24)), (-P(-24), P(-14))];
    assert_eq!(sum(&hopper(16), 16, 0.0, &pairs), P(-48));
    let pairs = [(P(-14), P(-14)), (P(-24), P(-24)), (P(-14), -P(-14))];
    assert_eq!(sum(&Model { fraction_bits: 19, ..hopper(16) }, 16, 0.0, &pairs), 0.0);
}

#[test]
fn fp8_accumulates_in_fourteen_bits_on_hopper_exact() {
    let hopper = model(Generation::Hopper, Family::Wgmma, Element::E4m3, 32);
    let blackwell = model(Generation::Blackwell, Family::Tcgen05, Element::E4m3, 32);
    let small = [(P(-7), P(-7))];
    assert_eq!(sum(&hopper, 32, 1.0, &small), 1.0);
    assert_eq!(sum(&blackwell, 32, 1.0, &small), 1.0 + P(-14));
    assert_eq!(sum(&hopper, 32, 1.0, &[(P(-6), P(-7))]), 1.0 + P(-13));
    // Thirteen bits of the result, too.
    assert_eq!(sum(&hopper, 32, 0.0, &[(1.0, 1.0), (1.0, 1.0), (P(-6), P(-7))]), 2.0);
    assert_eq!(sum(&hopper, 32, 1.0 + P(-13) + P(-14), &[]), 1.0 + P(-13), "C alone, too");
    let mma = model(Generation::Hopper, Family::Mma, Element::E4m3, 32);
    assert_eq!((mma.fraction_bits, mma.result, mma.group), (25, Sum::F32, 16));
    let ada = model(Generation::Ada, Family::Mma, Element::E5m2, 32);
    assert_eq!((ada.fraction_bits, ada.group, ada.result), (13, 16, Sum::F32Short));
    assert_eq!(model(Generation::Ampere, Family::Mma, Element::Tf32, 8).group, 4);
    assert_eq!(model(Generation::Hopper, Family::Mma, Element::Tf32, 8).group, 8);
}

#[test]
fn fp8_mma_on_hopper_sums_pairs_and_adds_c_last_exact() {
    let mma = model(Generation::Hopper, Family::Mma, Element::E4m3, 32);
    // 2^-9 * 2^-8 = 2^-17 is far below 2^16: alone in the second sum it meets 2^16 - 2^16 = 0, in the first
    // it is lost.
    let (big, small) = ((256.0, 256.0), (P(-9), P(-8)));
    let cancel = |place: usize| {
        let mut pairs = [(0.0, 0.0); 8];
        (pairs[0], pairs[1], pairs[place]) = (big, (-256.0, 256.0), small);
        sum(&mma, 32, 0.0, &pairs)
    };
    assert_eq!([cancel(2), cancel(3), cancel(4), cancel(5), cancel(6)], [P(-17), P(-17), 0.0, 0.0, P(-17)]);
    // C is not truncated in alignment, and rounds to nearest.
    assert_eq!(sum(&mma, 32, 1.5 * P(-8), &[big]), 65536.0 + P(-7));
    assert_eq!(sum(&hopper(16), 16, 1.5 * P(-8), &[big]), 65536.0);
}

#[test]
fn results_at_the_edges_exact() {
    let h = hopper(16);
    let bits = |x: f32| x.to_bits();
    assert_eq!(bits(sum(&h, 16, -0.0, &[])), 0);
    assert_eq!(bits(sum(&h, 16, -1.0, &[(1.0, 1.0)])), 0);
    assert_eq!(sum(&h, 16, f32::from_bits(0x8000_0001), &[]), f32::from_bits(0x8000_0001));
    assert_eq!(sum(&h, 16, f32::MAX, &[]), f32::MAX);
    let bf16 = model(Generation::Hopper, Family::Wgmma, Element::Bf16, 16);
    assert_eq!(sum(&bf16, 16, 0.0, &[(P(100), P(100))]), f32::INFINITY);
    assert_eq!(sum(&bf16, 16, f32::MAX, &[(-P(64), P(63))]), f32::MAX - P(127));
    assert_eq!(sum(&bf16, 16, f32::MAX, &[(P(50), P(53))]), f32::MAX, "half a last place, truncated");
    assert_eq!(sum(&bf16, 16, f32::MAX, &[(P(64), P(63))]), f32::INFINITY);
    assert_eq!(sum(&bf16, 16, 0.0, &[(P(-70), P(-70)), (P(-70), P(-70))]), P(-139));
    assert_eq!(sum(&bf16, 16, 0.0, &[(P(-75), P(-75))]), 0.0);
    let (inf, nan) = (f32::INFINITY, 0x7fff_ffff);
    assert_eq!(sum(&h, 16, 1.0, &[(inf, -1.0)]), -inf);
    assert_eq!(bits(sum(&h, 16, 1.0, &[(inf, 0.0)])), nan);
    assert_eq!(bits(sum(&h, 16, -inf, &[(inf, 1.0)])), nan);
    assert_eq!(bits(sum(&h, 16, f32::from_bits(0xffc0_0001), &[])), nan);
}

#[test]
fn f16_sums_round_to_nearest_exact() {
    let h = Model::new(Generation::Hopper, Family::Wgmma, Element::F16, Accumulator::F16, 16);
    assert_eq!(sum(&h, 16, 1.0, &[(P(-6), P(-5))]), 1.0, "a tie goes to even");
    assert_eq!(sum(&h, 16, 1.0, &[(1.5 * P(-6), P(-5))]), 1.0 + P(-10));
    assert_eq!(sum(&h, 16, 65504.0, &[(4.0, 4.0)]), f32::INFINITY);
    assert_eq!(sum(&h, 16, 65504.0, &[(4.0, 2.0)]), 65504.0);
}

fn lcg(seed: &mut u64) -> u32 {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 33) as u32
}

fn random_codes(element: Element, count: usize, seed: &mut u64) -> Vec<f32> {
    let draw = |seed: &mut u64| match element {
        // Exponents of bf16 and tf32 near one another, or their sums are one term.
        Element::Bf16 => (lcg(seed) & 0x80ff) | (0x3780 + (lcg(seed) % 0x1000)) & 0x7f80,
        _ => lcg(seed),
    };
    (0..count)
        .map(|_| {
            loop {
                let x = element.decode(draw(seed));
                if x.is_finite() {
                    break if lcg(seed).is_multiple_of(11) { 0.0 } else { x };
                }
            }
        })
        .collect()
}

#[test]
fn lanes_and_elements_agree_on_every_type_exact() {
    let mut seed = 7;
    for (element, k) in [
        (Element::F16, 16),
        (Element::Bf16, 16),
        (Element::Tf32, 8),
        (Element::E4m3, 32),
        (Element::E5m2, 32),
        (Element::E2m1, 32),
    ] {
        for generation in [Generation::Ampere, Generation::Hopper, Generation::Blackwell] {
            for accumulator in [Accumulator::F32, Accumulator::F16] {
                let model = Model::new(generation, Family::Wgmma, element, accumulator, k);
                for round in 0..12 {
                    let shape = Shape { m: 5, n: 40, k: 2 * k };
                    let a = random_codes(element, shape.m * shape.k, &mut seed);
                    let b = random_codes(element, shape.n * shape.k, &mut seed);
                    let mut c: Vec<f32> = (0..shape.m * shape.n)
                        .map(|_| match (accumulator, round) {
                            (Accumulator::F16, _) => Element::F16.decode(lcg(&mut seed) & 0xbfff),
                            (_, 0) => 0.0,
                            (_, 1) => f32::from_bits(lcg(&mut seed) << 1 ^ lcg(&mut seed)),
                            _ => f32::from_bits(
                                lcg(&mut seed) & 0x80ff_ffff | (100 + lcg(&mut seed) % 50) << 23,
                            ),
                        })
                        .collect();
                    let mut expected = c.clone();
                    element_by_element(&model, shape, &a, &b, &mut expected);
                    multiply(&model, shape, &a, &b, &mut c);
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&c), bits(&expected), "{element:?} {generation:?} {round}");
                }
            }
        }
    }
}

impl Model {
    /// The largest error of a chain of instructions over `k` elements against the exact result, as a multiple
    /// of `|c| + sum |a * b|`, which bounds every term and partial sum.
    ///
    /// A fused sum of `g` products truncates `g + 1` terms by less than `2^-fraction_bits` of the largest
    /// exponent, then its result by less than one last place; a factor of 2 covers the growth of partial sums
    /// by those errors.
    fn tolerance(&self, k: usize) -> f64 {
        let sums = k.div_ceil(self.group) as f64;
        let alignment = (self.group + 1) as f64 * 2f64.powi(-(self.fraction_bits as i32));
        let result = match self.result {
            Sum::F32 => 2f64.powi(-23),
            Sum::F32Short => 2f64.powi(-13),
            Sum::F16 => 2f64.powi(-11),
        };
        2.0 * sums * (alignment + result)
    }
}

/// D = A·B + C with every product and sum in f64 and one rounding at the end, to nearest: what a
/// [`Model`] must come to within its tolerance.
fn multiply_exact(shape: Shape, a: &[f32], b: &[f32], c: &mut [f32]) {
    for (row, c_row) in c.chunks_exact_mut(shape.n).enumerate() {
        let a_row = &a[row * shape.k..][..shape.k];
        for (c, b_row) in c_row.iter_mut().zip(b.chunks_exact(shape.k)) {
            let sum: f64 = a_row.iter().zip(b_row).map(|(&x, &y)| x as f64 * y as f64).sum();
            *c = (sum + *c as f64) as f32;
        }
    }
}

/// Worst error over the tolerance, on sums of many like terms, which is where truncation drifts.
fn worst(model: &Model, element: Element, k: usize, positive: bool) -> f64 {
    let mut seed = 3;
    let shape = Shape { m: 16, n: 16, k };
    let mut draw = |count| {
        let mut x = random_codes(element, count, &mut seed);
        x.iter_mut().for_each(|x| *x = if positive { x.abs() } else { *x }.clamp(-8.0, 8.0));
        x
    };
    let (a, b) = (draw(16 * k), draw(16 * k));
    let (mut got, mut exact, mut magnitude) = ([0f32; 256], [0f32; 256], [0f32; 256]);
    let absolute = |x: &[f32]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
    multiply(model, shape, &a, &b, &mut got);
    multiply_exact(shape, &a, &b, &mut exact);
    multiply_exact(shape, &absolute(&a), &absolute(&b), &mut magnitude);
    (0..256).fold(0.0, |worst: f64, i| {
        worst.max((got[i] as f64 - exact[i] as f64).abs() / (model.tolerance(k) * magnitude[i] as f64))
    })
}

#[test]
fn sums_lie_within_the_tolerance_close() {
    for positive in [false, true] {
        for (element, k) in
            [(Element::F16, 1024), (Element::E4m3, 1024), (Element::E5m2, 256), (Element::Bf16, 512)]
        {
            for generation in [Generation::Ampere, Generation::Hopper, Generation::Blackwell] {
                let model = model(generation, Family::Wgmma, element, 512 / element.bits() as usize / 2);
                let worst = worst(&model, element, k, positive);
                assert!(worst <= 1.0, "{element:?} {generation:?} {worst}");
            }
        }
    }
    // The bound is not so loose that it could not tell fourteen bits from twenty-five.
    let short = model(Generation::Hopper, Family::Wgmma, Element::E4m3, 32);
    let long = model(Generation::Blackwell, Family::Tcgen05, Element::E4m3, 32);
    let ratio = short.tolerance(1024) / long.tolerance(1024);
    assert!(worst(&short, Element::E4m3, 1024, true) * ratio > 1.0);
}

fn scales<'s>(a: &'s [f32], b: &'s [f32], blocks: usize, min_exponent: i32) -> BlockScales<'s> {
    BlockScales { a, b, blocks, min_exponent }
}

fn nvfp4() -> Model {
    model(Generation::Blackwell, Family::Tcgen05, Element::E2m1, 64)
}

#[test]
fn block_scaled_sums_follow_the_scales_exact() {
    let shape = Shape { m: 1, n: 1, k: 64 };
    let six = [6.0; 64];
    let run = |a: &[f32], b: &[f32], sa: &[f32], sb: &[f32], c: f32| {
        let mut d = [c];
        multiply_scaled(&nvfp4(), shape, a, b, scales(sa, sb, sa.len(), -6), &mut d);
        d[0]
    };
    assert_eq!(run(&six, &six, &[448.0; 4], &[448.0; 4], 0.0), 64.0 * 36.0 * 448.0 * 448.0);
    assert_eq!(
        run(&six, &six, &[1.0, 2.0, 0.0, P(-9)], &[1.0, 0.5, 3.0, 1.0], 0.25),
        0.25 + 576.0 * (2.0 + P(-9))
    );
    // Two scales cover two groups of sixteen each.
    assert_eq!(run(&six, &six, &[1.0, 2.0], &[1.0, 4.0], 0.0), 1152.0 * 9.0);
    // The largest scales set the alignment even where their dot product is zero: 35 places below 2^16.
    let mut half = [0.0; 64];
    half[16..].fill(1.0);
    let (sa, sb) = ([256.0, P(-9), 0.0, 0.0], [256.0, P(-9), 1.0, 1.0]);
    assert_eq!(run(&half, &six, &sa, &sb, P(-19) + P(-20)), 96.0 * P(-18) + P(-19));
    assert_eq!(run(&half, &six, &sa, &sb, f32::INFINITY), f32::INFINITY);
    assert_eq!(run(&half, &six, &[f32::NAN, 1.0, 1.0, 1.0], &sb, 0.0).to_bits(), 0x7fff_ffff);
    assert_eq!(run(&half, &six, &sa, &sb, f32::NAN).to_bits(), 0x7fff_ffff);
    assert_eq!(run(&[-0.0; 64], &six, &sa, &sb, -0.0).to_bits(), 0);
}

#[test]
fn one_scale_per_row_moves_the_exponents_exact() {
    let m = model(Generation::Blackwell, Family::Tcgen05, Element::E4m3, 32);
    let shape = Shape { m: 1, n: 1, k: 32 };
    let run = |sa: f32, sb: f32, c: f32| {
        let mut d = [c];
        multiply_scaled(&m, shape, &[1.5; 32], &[2.0; 32], scales(&[sa], &[sb], 1, -127), &mut d);
        d[0]
    };
    assert_eq!(run(P(3), P(-5), 0.5), 24.5);
    assert_eq!(run(P(127), P(-127), 0.0), 96.0);
    assert_eq!(run(P(127), P(127), 0.0), f32::INFINITY);
    assert!(run(f32::NAN, 1.0, 0.0).is_nan());
    assert_eq!(run(P(-100), P(-100), 1.0), 1.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn nvfp4_is_exact_where_f32_holds_the_sum_close(seed in any::<u64>()) {
        let mut seed = seed;
        let shape = Shape { m: 4, n: 8, k: 64 };
        let a: Vec<f32> = (0..256).map(|_| Element::E2m1.decode(lcg(&mut seed))).collect();
        let b: Vec<f32> = (0..512).map(|_| Element::E2m1.decode(lcg(&mut seed))).collect();
        let mut scale = |count: usize| -> Vec<f32> {
            (0..count).map(|_| crate::semantics::element::Scale::Ue4m3.decode((lcg(&mut seed) % 0x7f) as u8)).collect()
        };
        let (sa, sb) = (scale(16), scale(32));
        let mut d = vec![0.0; 32];
        multiply_scaled(&nvfp4(), shape, &a, &b, scales(&sa, &sb, 4, -6), &mut d);
        for row in 0..4 {
            for col in 0..8 {
                let exact: f64 = (0..64)
                    .map(|k| a[row * 64 + k] as f64 * sa[row * 4 + k / 16] as f64 * b[col * 64 + k] as f64 * sb[col * 4 + k / 16] as f64)
                    .sum();
                // Terms have at most 12 + 8 bits and the scales' exponents differ by at most 2 * 14: nothing
                // is lost in alignment but what lies 35 places down.
                let cut = (exact.abs() * 2f64.powi(-23)).max(2f64.powi(17 - 35) * 4.0);
                let error = exact - d[row * 8 + col] as f64;
                prop_assert!(error.abs() <= cut, "{} {}", exact, error);
            }
        }
    }
}
