//! Every checkpoint that the repository ships gives the outputs that numpy computed from its bytes in f64: f32 in
//! `sessions/commands.txt`, and f16 here.

use crate::common::{arg, data, run_json, tensor};
use half::f16;

/// Checkpoint, and the file of its expected outputs.
const CHECKPOINTS: [(&str, &str); 4] = [
    ("modelopt-nvfp4", "expected-modelopt-nvfp4.safetensors"),
    ("compressed-tensors-nvfp4", "expected-compressed-tensors-nvfp4.safetensors"),
    ("compressed-tensors-nvfp4a16", "expected-compressed-tensors-nvfp4a16.safetensors"),
    ("mlp-nvfp4.gguf", "expected-modelopt-nvfp4.safetensors"),
];

/// Runs a checkpoint on the real hidden states rounded to bf16 (`c_w4a16`) or on the nvfp4 triple beside the
/// expected outputs (`c_w4a4`).
fn reproduce(checkpoint: &str, expected: &str, which: &str) -> (Vec<f64>, Vec<f64>) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("c.safetensors");
    let (checkpoint, expected) = (data(checkpoint), data(expected));
    let hidden = data("hidden-states-f32.safetensors");
    let mut args = vec![arg(&checkpoint), "--layer", "0", "--out-dtype", "f16", "--output", arg(&out)];
    // The test compares every element.
    args.extend(["--device", "cpu", "--check", "none"]);
    match which {
        "c_w4a16" => args.extend(["--input", arg(&hidden), "--a-format", "bf16"]),
        _ => args.extend(["--input", arg(&expected)]),
    }
    run_json(&args, 0);
    (tensor(&out, "c"), tensor(&expected, which))
}

/// Cancellation in a sum leaves an absolute error of the size of its terms' last places, which may be many units in
/// the last place of a tiny result; there are few such elements and they are counted.
#[test]
fn f16_outputs_are_within_one_unit_in_the_last_place() {
    for (checkpoint, expected) in CHECKPOINTS {
        for which in ["c_w4a16", "c_w4a4"] {
            let (got, want) = reproduce(checkpoint, expected, which);
            let rms = (want.iter().map(|w| w * w).sum::<f64>() / want.len() as f64).sqrt();
            let mut cancelled = 0;
            for (i, (&got, &want)) in got.iter().zip(&want).enumerate() {
                let position = |x: f64| {
                    let bits = f16::from_f64(x).to_bits();
                    let magnitude = i32::from(bits & 0x7FFF);
                    if bits >> 15 == 1 { -magnitude } else { magnitude }
                };
                if position(got).abs_diff(position(want)) > 1 {
                    assert!((got - want).abs() <= 1e-6 * rms, "{checkpoint} {which} [{i}]: {got} for {want}");
                    cancelled += 1;
                }
            }
            println!(
                "{checkpoint} {which}: {cancelled} of {} elements over 1 ulp by cancellation",
                want.len()
            );
            assert!(cancelled * 1000 <= want.len(), "{checkpoint} {which}: {cancelled} elements over 1 ulp");
        }
    }
}

/// That the bits are the same on every instruction set and number of threads is what `crates/cpu` tests.
#[test]
fn the_instruction_set_and_the_threads_are_those_asked_for_exact() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, out) = (data("modelopt-nvfp4"), dir.path().join("c.safetensors"));
    let run = |how: &[&str]| {
        let given = [arg(&checkpoint), "--m", "9", "--a-format", "nvfp4", "--output", arg(&out)];
        let report = run_json(&[&given[..], how].concat(), 0);
        (report, std::fs::read(&out).unwrap())
    };
    let (asked, c) = run(&["--isa", "portable", "--threads", "1"]);
    assert_eq!(
        (&asked["plan"]["isa"], &asked["plan"]["threads"]),
        (&"portable".into(), &1.into()),
        "{asked}"
    );
    assert!(c == run(&[]).1);
}
