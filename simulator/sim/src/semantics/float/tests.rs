//! Conversions against the `half` and `float8` crates, and against a table oracle that knows no bit tricks.

use super::*;
use proptest::prelude::*;

const SMALL: [(&str, Format); 7] = [
    ("f16", F16),
    ("bf16", BF16),
    ("e4m3", E4M3),
    ("e5m2", E5M2),
    ("e2m1", E2M1),
    ("e2m3", E2M3),
    ("e3m2", E3M2),
];
const ROUNDS: [Round; 5] = [Round::NearestEven, Round::NearestAway, Round::Zero, Round::Down, Round::Up];

fn same(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[test]
fn decode_matches_the_half_crate_exact() {
    for bits in 0..=u16::MAX {
        assert!(same(F16.decode(bits as u64), half::f16::from_bits(bits).to_f64()), "f16 {bits:#06x}");
        assert!(same(BF16.decode(bits as u64), half::bf16::from_bits(bits).to_f64()), "bf16 {bits:#06x}");
    }
}

#[test]
fn decode_matches_the_float8_crate_exact() {
    for bits in 0..=u8::MAX {
        let (e4m3, e5m2) = (float8::F8E4M3::from_bits(bits), float8::F8E5M2::from_bits(bits));
        assert!(same(E4M3.decode(bits as u64), e4m3.to_f64()), "e4m3 {bits:#04x}");
        assert!(same(E5M2.decode(bits as u64), e5m2.to_f64()), "e5m2 {bits:#04x}");
    }
}

#[test]
fn four_and_six_bit_codes_have_the_values_of_the_ocp_tables() {
    let e2m1: Vec<f64> = (0..16).map(|c| E2M1.decode(c)).collect();
    assert_eq!(e2m1[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    assert_eq!(e2m1[9..], [-0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]);
    assert!(same(e2m1[8], -0.0));
    let steps: Vec<f64> = (0..32).map(|c| E2M3.decode(c) * 8.0).collect();
    let expected: Vec<f64> =
        (0..16).chain((16..32).step_by(2)).chain((32..64).step_by(4)).map(f64::from).collect();
    assert_eq!(steps, expected);
    let e3m2: Vec<f64> = (0..32).map(|c| E3M2.decode(c) * 16.0).collect();
    assert_eq!(e3m2[..8], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    assert_eq!(e3m2[28..], [256.0, 320.0, 384.0, 448.0]);
}

#[test]
fn every_code_encodes_back_to_itself_exact() {
    for (name, format) in SMALL {
        for code in 0..1u64 << format.width() {
            let x = format.decode(code);
            for round in ROUNDS {
                let back = format.encode(x, round, Clamp::default());
                if x.is_nan() {
                    assert_eq!(back, format.nan, "{name}");
                } else {
                    assert_eq!(back, code, "{name} {x} {round:?}");
                }
            }
        }
    }
}

/// The code that `x` takes, by looking between which two of the format's sorted values it lies. Past the last
/// value the next one is where the next code would be, and means overflow.
fn oracle(sorted: &[(f64, u64)], x: f64, round: Round) -> Option<u64> {
    let at = sorted.partition_point(|v| v.0 <= x);
    let (low, low_code) = sorted[at - 1];
    if low == x {
        return Some(low_code);
    }
    let last = sorted.len() - 1;
    let (high, high_code) = match sorted.get(at) {
        Some(&(high, code)) => (high, Some(code)),
        None => (2.0 * sorted[last].0 - sorted[last - 1].0, None),
    };
    let nearest = match (x - low).partial_cmp(&(high - x)).unwrap() {
        std::cmp::Ordering::Less => Some(low_code),
        std::cmp::Ordering::Greater => high_code,
        std::cmp::Ordering::Equal if round == Round::NearestAway => high_code,
        std::cmp::Ordering::Equal if low_code & 1 == 0 => Some(low_code),
        std::cmp::Ordering::Equal => high_code,
    };
    match round {
        Round::NearestEven | Round::NearestAway => nearest,
        Round::Zero | Round::Down => Some(low_code),
        Round::Up => high_code,
    }
}

#[test]
fn encode_rounds_like_the_table_in_every_mode_exact() {
    for (name, format) in SMALL {
        // Non-negative finite values in order; codes are in order too.
        let sorted: Vec<(f64, u64)> = (0..1u64 << (format.width() - 1))
            .map(|code| (format.decode(code), code))
            .take_while(|v| v.0.is_finite())
            .collect();
        let max = sorted[sorted.len() - 1];
        for pair in sorted.windows(2) {
            let (low, high) = (pair[0].0, pair[1].0);
            let mid = low + (high - low) / 2.0;
            for x in [low.next_up(), mid.next_down(), mid, mid.next_up(), high.next_down(), high] {
                check(name, format, &sorted, x);
            }
        }
        let beyond = max.0 + (max.0 - sorted[sorted.len() - 2].0) / 2.0;
        for x in [max.0.next_up(), beyond.next_down(), beyond, beyond.next_up(), 1e300] {
            check(name, format, &sorted, x);
        }
    }

    fn check(name: &str, format: Format, sorted: &[(f64, u64)], x: f64) {
        let sign = 1 << (format.width() - 1);
        let max = sorted[sorted.len() - 1].1;
        for round in ROUNDS {
            let positive = oracle(sorted, x, round);
            let mirrored = match round {
                Round::Down => oracle(sorted, x, Round::Up),
                Round::Up => oracle(sorted, x, Round::Down),
                same => oracle(sorted, x, same),
            };
            let no_sat = |code: Option<u64>, sign: u64| match (code, format.specials) {
                (Some(code), _) => sign | code,
                (None, Specials::Ieee) => sign | (max + 1),
                (None, Specials::NanOnly) => format.nan,
                (None, Specials::None) => sign | max,
            };
            let plain = Clamp::default();
            let finite = Clamp { satfinite: true, ..plain };
            let relu = Clamp { relu: true, ..plain };
            let context = format!("{name} {x:e} {round:?}");
            assert_eq!(format.encode(x, round, plain), no_sat(positive, 0), "{context}");
            assert_eq!(format.encode(-x, round, plain), no_sat(mirrored, sign), "-{context}");
            assert_eq!(format.encode(x, round, finite), positive.unwrap_or(max), "{context} satfinite");
            assert_eq!(
                format.encode(-x, round, finite),
                sign | mirrored.unwrap_or(max),
                "-{context} satfinite"
            );
            assert_eq!(format.encode(x, round, relu), no_sat(positive, 0), "{context} relu");
            assert_eq!(format.encode(-x, round, relu), 0, "-{context} relu");
        }
    }
}

#[test]
fn specials_follow_the_cvt_text_exact() {
    let plain = Clamp::default();
    let finite = Clamp { satfinite: true, ..plain };
    let rn = Round::NearestEven;
    let codes = |x: f64, clamp| SMALL.map(|(_, f)| f.encode(x, rn, clamp));
    assert_eq!(codes(f64::NAN, plain), [0x7fff, 0x7fff, 0x7f, 0x7f, 7, 0x1f, 0x1f]);
    assert_eq!(codes(f64::NAN, finite), [0x7fff, 0x7fff, 0x7f, 0x7f, 7, 0x1f, 0x1f]);
    assert_eq!(codes(f64::INFINITY, plain), [0x7c00, 0x7f80, 0x7f, 0x7c, 7, 0x1f, 0x1f]);
    assert_eq!(codes(f64::NEG_INFINITY, finite), [0xfbff, 0xff7f, 0xfe, 0xfb, 0xf, 0x3f, 0x3f]);
    let sat = Clamp { sat: true, ..plain };
    for (x, bits) in
        [(f64::NAN, 0), (-0.0, 0), (-3.0, 0), (0.5, 0x3800), (1.0, 0x3c00), (7.0, 0x3c00), (1e300, 0x3c00)]
    {
        assert_eq!(F16.encode(x, rn, sat), bits, "{x}");
    }
    assert_eq!(F32.encode(f64::NAN, rn, plain), 0x7fff_ffff);
    assert_eq!(TF32.encode(f64::NAN, rn, plain), 0x7fff_e000);
    assert_eq!(TF32.encode(1.0 + exp2(-11), Round::NearestAway, plain), 0x3f80_2000);
    assert_eq!(TF32.encode(1.0 + exp2(-11), rn, plain), 0x3f80_0000);
    assert_eq!(TF32.decode(0x3f80_3fff), 1.0 + exp2(-10));
}

#[test]
fn flush_keeps_the_sign_exact() {
    assert_eq!(F32.flush(0x807f_ffff), 0x8000_0000);
    assert_eq!(F32.flush(0x0080_0000), 0x0080_0000);
    assert_eq!(F32.flush(0x0000_0001), 0);
    for bits in 0..=u16::MAX {
        let value = half::f16::from_bits(bits);
        let subnormal = value.is_finite() && !value.is_normal() && value != half::f16::ZERO;
        assert_eq!(F16.is_subnormal(bits as u64), subnormal);
    }
}

#[test]
fn ue8m0_is_a_power_of_two_rounded_down_or_up_exact() {
    for code in 0..0xffu8 {
        let x = decode_ue8m0(code);
        assert_eq!(x, 2f64.powi(code as i32 - 127));
        for (x, down, up) in [(x, code, code), (x * 1.5, code, code + 1), (x.next_up(), code, code + 1)] {
            assert_eq!(encode_ue8m0(x, Round::Zero, false), down);
            assert_eq!(encode_ue8m0(-x, Round::Up, false), up);
            assert_eq!(encode_ue8m0(x, Round::Up, true), up.min(0xfe));
        }
    }
    assert!(decode_ue8m0(0xff).is_nan());
    assert_eq!(encode_ue8m0(f64::NAN, Round::Zero, true), 0xff);
    assert_eq!(encode_ue8m0(f64::INFINITY, Round::Zero, true), 0xfe);
    assert_eq!(encode_ue8m0(f64::INFINITY, Round::Zero, false), 0xff);
    assert_eq!(encode_ue8m0(0.0, Round::Up, true), 0);
    assert_eq!(encode_ue8m0(exp2(-128), Round::Up, true), 0);
}

#[test]
fn stochastic_rounding_carries_with_the_expected_frequency_exact() {
    // 1 + 0.3 ulp of f16: of the 8192 random values exactly those that carry round up.
    let discarded = 2458u32;
    let x = f32::from_bits(0x3f80_0000 | discarded);
    let ups = (0..8192).filter(|&r| encode_stochastic(F16, x, r, Clamp::default()) == 0x3c01).count();
    assert_eq!(ups as u32, discarded);
    for r in [0, 1, 8191] {
        assert_eq!(encode_stochastic(F16, 1.0, r, Clamp::default()), 0x3c00);
        assert_eq!(encode_stochastic(F16, -0.0, r, Clamp::default()), 0x8000);
    }
    let below_two = f32::from_bits(0x3fff_ffff);
    assert_eq!(encode_stochastic(BF16, below_two, 1, Clamp::default()), 0x4000);
    assert_eq!(encode_stochastic(BF16, below_two, 0, Clamp::default()), 0x3fff);
    assert_eq!(encode_stochastic(F16, 1e6, 0, Clamp { satfinite: true, ..Clamp::default() }), 0x7bff);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn f32_rounding_brackets_the_value_exact(bits in any::<u64>(), near in -160i32..140) {
        // Half of the mass inside the range of f32, subnormals included.
        let wide = f64::from_bits(bits);
        let close = f64::from_bits(bits & 0x800f_ffff_ffff_ffff | ((near + 1023) as u64) << 52);
        for x in [wide, close] {
            let code = |round| F32.encode(x, round, Clamp::default()) as u32;
            let nearest = code(Round::NearestEven);
            if x.is_nan() {
                prop_assert_eq!(nearest, 0x7fff_ffff);
                continue;
            }
            prop_assert_eq!(nearest, (x as f32).to_bits());
            let (down, up) = (f32::from_bits(code(Round::Down)), f32::from_bits(code(Round::Up)));
            prop_assert!(down as f64 <= x && x <= up as f64);
            prop_assert!(down == up || down.next_up() == up, "{} {}", down, up);
            prop_assert_eq!(code(Round::Zero), if x < 0.0 { up.to_bits() } else { down.to_bits() });
            prop_assert_eq!(F64.encode(x, Round::Up, Clamp::default()), x.to_bits());
            // `half` drops the low word of an f64, so give it none.
            let x = f64::from_bits(x.to_bits() >> 32 << 32);
            let half = half::f16::from_f64_const(x).to_bits() as u64;
            prop_assert_eq!(F16.encode(x, Round::NearestEven, Clamp::default()), half);
        }
    }

    #[test]
    fn narrowing_f32_matches_the_half_and_float8_crates_exact(bits in any::<u32>(), near in -30i32..20) {
        let close = bits & 0x807f_ffff | ((near + 127) as u32) << 23;
        for bits in [bits, close] {
            let x = f32::from_bits(bits);
            prop_assume!(!x.is_nan());
            let code = |format: Format| format.encode(x as f64, Round::NearestEven, Clamp::default());
            prop_assert_eq!(code(F16), half::f16::from_f32(x).to_bits() as u64);
            prop_assert_eq!(code(BF16), half::bf16::from_f32(x).to_bits() as u64);
            let finite = Clamp { satfinite: true, ..Clamp::default() };
            let e4m3 = E4M3.encode(x as f64, Round::NearestEven, finite);
            let e5m2 = E5M2.encode(x as f64, Round::NearestEven, finite);
            prop_assert_eq!(e4m3, float8::F8E4M3::from_f32(x).to_bits() as u64, "{}", x);
            prop_assert_eq!(e5m2, float8::F8E5M2::from_f32(x).to_bits() as u64, "{}", x);
        }
    }
}
