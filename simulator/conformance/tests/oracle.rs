//! What conformance cases expect of arithmetic that Rust has itself, computed without the simulator.

use dualgemm_conformance::conformance::data::{Data, size};
use dualgemm_conformance::conformance::{Argument, load_all};
use dualgemm_ptx::isa;
use half::{bf16, f16};
use std::collections::BTreeMap;

/// The result of a form of a row on operands `[a, b, c]`, zero-extended.
type Oracle = fn(&str, &[&str], [u64; 3]) -> u64;

/// Sign- or zero-extended value of a whole number of type `ty`.
fn value(ty: &str, bits: u64) -> i128 {
    let n: u32 = ty[1..].parse().unwrap();
    let kept = bits << (64 - n);
    if ty.starts_with('s') { i128::from(kept as i64 >> (64 - n)) } else { i128::from(kept >> (64 - n)) }
}

fn f32s(x: [u64; 3]) -> [f32; 3] {
    x.map(|v| f32::from_bits(v as u32))
}

/// A result as a chip gives it: one NaN.
fn bits32(x: f32) -> u64 {
    if x.is_nan() { 0x7fff_ffff } else { u64::from(x.to_bits()) }
}

/// Flushes subnormals to zeros of their sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// A binary32 operation with `.ftz` and `.sat`; `wide` is the same in binary64. Chips flush what is tiny before it
/// is rounded.
fn single(mods: &[&str], x: [u64; 3], f: fn([f32; 3]) -> f32, wide: fn([f64; 3]) -> f64) -> u64 {
    let ftz = mods.contains(&"ftz");
    let x = if ftz { f32s(x).map(flush) } else { f32s(x) };
    let r = f(x);
    let tiny = wide(x.map(f64::from)).abs() < f64::from(f32::MIN_POSITIVE);
    let r = if ftz && tiny { 0f32.copysign(r) } else { r };
    match mods.contains(&"sat") {
        true if r.is_nan() => 0,
        // -0 becomes +0.
        true => u64::from((r.clamp(0.0, 1.0) + 0.0).to_bits()),
        false => bits32(r),
    }
}

/// The operation in both formats.
macro_rules! single {
    ($x:ident, $value:expr) => {
        |_, m, x| single(m, x, |$x| $value, |$x| $value)
    };
}

const ORACLES: &[(&str, Oracle)] = &[
    ("add_int", |t, _, [a, b, _]| (value(t, a) + value(t, b)) as u64),
    ("sub_int", |t, _, [a, b, _]| (value(t, a) - value(t, b)) as u64),
    ("add_sat", |_, _, [a, b, _]| (a as i32).saturating_add(b as i32) as u64),
    ("sub_sat", |_, _, [a, b, _]| (a as i32).saturating_sub(b as i32) as u64),
    ("mul_int", |t, m, [a, b, _]| {
        let product = value(t, a).wrapping_mul(value(t, b));
        let n: u32 = t[1..].parse().unwrap();
        (if m.contains(&"hi") { product >> n } else { product }) as u64
    }),
    ("mad_int", |t, m, [a, b, c]| {
        let product = value(t, a).wrapping_mul(value(t, b));
        let n: u32 = t[1..].parse().unwrap();
        let part = (if m.contains(&"hi") { product >> n } else { product }) as u64;
        part.wrapping_add(c)
    }),
    ("min_int", |t, _, [a, b, _]| value(t, a).min(value(t, b)) as u64),
    ("max_int", |t, _, [a, b, _]| value(t, a).max(value(t, b)) as u64),
    ("abs_int", |t, _, [a, ..]| value(t, a).unsigned_abs() as u64),
    ("neg_int", |t, _, [a, ..]| (-value(t, a)) as u64),
    ("div_int", |t, _, [a, b, _]| (value(t, a) / value(t, b)) as u64),
    ("rem", |t, _, [a, b, _]| (value(t, a) % value(t, b)) as u64),
    ("sad", |t, _, [a, b, c]| ((value(t, a) - value(t, b)).abs() + value(t, c)) as u64),
    ("popc", |_, _, [a, ..]| u64::from(a.count_ones())),
    ("clz", |t, _, [a, ..]| {
        u64::from(if t == "b32" { (a as u32).leading_zeros() } else { a.leading_zeros() })
    }),
    (
        "brev",
        |t, _, [a, ..]| if t == "b32" { u64::from((a as u32).reverse_bits()) } else { a.reverse_bits() },
    ),
    ("add_f32", single!(x, x[0] + x[1])),
    ("sub_f32", single!(x, x[0] - x[1])),
    ("mul_f32", single!(x, x[0] * x[1])),
    ("fma_f32", single!(x, x[0].mul_add(x[1], x[2]))),
    ("div_f32", single!(x, x[0] / x[1])),
    ("rcp_f32", single!(x, 1.0 / x[0])),
    ("sqrt_f32", single!(x, x[0].sqrt())),
    ("cvt_f16_f32", |_, m, [a, ..]| {
        let x = f32::from_bits(a as u32);
        let x = if m.contains(&"sat") { if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) + 0.0 } } else { x };
        if x.is_nan() { 0x7fff } else { u64::from(f16::from_f32(x).to_bits()) }
    }),
    ("cvt_bf16_f32", |_, m, [a, ..]| {
        let x = f32::from_bits(a as u32);
        let x = if m.contains(&"relu") && !x.is_nan() { x.max(0.0) + 0.0 } else { x };
        if x.is_nan() { 0x7fff } else { u64::from(bf16::from_f32(x).to_bits()) }
    }),
    ("cvt_f32_f16", |_, m, [a, ..]| {
        let x = f16::from_bits(a as u16).to_f32();
        match m.contains(&"sat") {
            true if x.is_nan() => 0,
            true => u64::from((x.clamp(0.0, 1.0) + 0.0).to_bits()),
            false => bits32(x),
        }
    }),
];

/// Width in bits of an operand of type `ty`.
fn width(ty: &str) -> u32 {
    ty.trim_start_matches("bf").trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse().unwrap()
}

/// Whole numbers and round-to-nearest forms. What the simulator gives is first held against the record, so that it is
/// the record that is checked.
#[test]
fn cases_expect_what_rust_computes_exact() {
    let cases = load_all().unwrap();
    for (name, oracle) in ORACLES {
        let case = cases.iter().find(|c| c.name.ends_with(&format!("/{name}"))).unwrap();
        let simulated = simulate(case);
        let launch = &case.launches[0];
        let inputs: Vec<&Data> = launch
            .arguments
            .iter()
            .filter_map(|a| match a {
                Argument::Buffer(b) if b.expected.is_none() => Some(&b.data),
                _ => None,
            })
            .collect();
        let threads = inputs[0].count;
        let mut used: BTreeMap<String, usize> = BTreeMap::new();
        let mut compared = 0;
        for sample in isa::row(name).unwrap().samples() {
            let mods: Vec<&str> = sample.instruction.modifiers.iter().map(|m| m.as_str()).collect();
            let ty = *mods.last().unwrap();
            // Outputs are grouped by the class of the result's register.
            let result = sample.instruction.operands[0].to_string();
            let class = match result.trim_end_matches(|c: char| c.is_ascii_digit()) {
                "%rs" => "u16",
                "%rd" => "u64",
                "%f" => "f32",
                _ => "u32",
            };
            let slot = used.entry(class.into()).or_default();
            let first = *slot * threads;
            *slot += 1;
            if mods.iter().any(|m| ["rz", "rm", "rp"].contains(m)) {
                continue;
            }
            let operand = |position: u64| -> Vec<u64> {
                let fits = |d: &&&Data| {
                    size(&d.ty).unwrap() as u32 * 8 == width(ty)
                        && (d.seed == position || ["all16", "halfway"].contains(&d.generator.as_str()))
                };
                let Some(data) = inputs.iter().find(fits) else { return vec![0; threads] };
                let n = size(&data.ty).unwrap();
                let word = |b: &[u8]| b.iter().rev().fold(0, |v, &b| v << 8 | u64::from(b));
                data.bytes().chunks_exact(n).map(word).collect()
            };
            let (a, b, c) = (operand(0), operand(1), operand(2));
            let out = &simulated[class];
            let n = size(class).unwrap();
            for (i, ((&a, &b), &c)) in a.iter().zip(&b).zip(&c).enumerate() {
                let want = oracle(ty, &mods, [a, b, c]) & (u64::MAX >> (64 - 8 * n));
                let at = (first + i) * n;
                let got = out[at..at + n].iter().rev().fold(0, |v, &b| v << 8 | u64::from(b));
                let operands = [a, b, c];
                assert_eq!(got, want, "{}: {operands:x?}: {got:#x}, Rust {want:#x}", sample.instruction);
                compared += 1;
            }
        }
        assert!(compared >= 512, "{name}: {compared}");
    }
}

/// The output buffers of a case by element type, after checking that they are what is recorded.
fn simulate(case: &dualgemm_conformance::conformance::Case) -> BTreeMap<String, Vec<u8>> {
    let gpu = dualgemm_sim::Gpu::new(dualgemm_sim::Config::default());
    let outcome = dualgemm_conformance::conformance::run(&gpu, case).unwrap();
    assert!(outcome.is_expected(case), "{}", case.name);
    let buffers = outcome.0.into_iter().map(|(launch, argument, bytes)| {
        let Argument::Buffer(b) = &case.launches[launch].arguments[argument] else { unreachable!() };
        (b.data.ty.clone(), bytes)
    });
    buffers.collect()
}
