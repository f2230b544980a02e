//! Every checkpoint that the repository ships gives the outputs that numpy computed from its bytes in f64.

use crate::common::{arg, changed, data, json, rel_l2, run_json, tensor};
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
fn reproduce(
    checkpoint: &str,
    expected: &str,
    which: &str,
    out_dtype: &str,
) -> (Vec<f64>, Vec<f64>, serde_json::Value) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("c.safetensors");
    let (checkpoint, expected) = (data(checkpoint), data(expected));
    let hidden = data("hidden-states-f32.safetensors");
    let mut args = vec![arg(&checkpoint), "--layer", "0", "--out-dtype", out_dtype, "--output", arg(&out)];
    args.extend(["--device", "cpu"]);
    // Its own check is that of f32: this test compares every element anyway.
    args.extend((out_dtype != "f32").then_some(["--check", "none"]).into_iter().flatten());
    match which {
        "c_w4a16" => args.extend(["--input", arg(&hidden), "--a-format", "bf16"]),
        _ => args.extend(["--input", arg(&expected)]),
    }
    let report = run_json(&args, 0);
    (tensor(&out, "c"), tensor(&expected, which), report)
}

#[test]
fn f32_outputs_are_within_1e6_close() {
    for (checkpoint, expected) in CHECKPOINTS {
        for which in ["c_w4a16", "c_w4a4"] {
            let (got, want, report) = reproduce(checkpoint, expected, which, "f32");
            let error = rel_l2(&got, &want);
            assert!(error <= 1e-6, "{checkpoint} {which}: {error:e}");
            let reported = report["rel_l2"].as_f64().unwrap();
            assert!(reported <= 1e-6, "{checkpoint} {which} reports {reported:e}");
            assert_eq!(report["rows_compared"], 64);
        }
    }
}

/// Cancellation in a sum leaves an absolute error of the size of its terms' last places, which may be many units in
/// the last place of a tiny result; there are few such elements and they are counted.
#[test]
fn f16_outputs_are_within_one_unit_in_the_last_place() {
    for (checkpoint, expected) in CHECKPOINTS {
        for which in ["c_w4a16", "c_w4a4"] {
            let (got, want, _) = reproduce(checkpoint, expected, which, "f16");
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

/// C as nvfp4 is what the quantizer makes of the f32 C: same grid, so at most one step apart where a value lies on
/// the border between two.
#[test]
fn nvfp4_outputs_are_one_step_close_and_feed_the_next_product() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, hidden) = (data("modelopt-nvfp4"), data("hidden-states-f32.safetensors"));
    for layout in ["linear", "128x4"] {
        let out = dir.path().join(format!("{layout}.safetensors"));
        let report = run_json(
            &[
                arg(&checkpoint),
                "--input",
                arg(&hidden),
                "--out-dtype",
                "nvfp4",
                "--out-scale-layout",
                layout,
                "--output",
                arg(&out),
            ],
            0,
        );
        assert!(report["max_ulp"].as_u64().unwrap() <= 1, "{layout}: {}", report["max_ulp"]);
        let error = report["rel_l2"].as_f64().unwrap();
        assert!(error > 0.01 && error < 0.15, "{layout}: {error}");
        let verified =
            json(&["verify", arg(&out), "--checkpoint", arg(&checkpoint), "--input", arg(&hidden)], 0);
        assert_eq!(verified["out_dtype"], "nvfp4");
        assert_eq!(verified["rel_l2"], report["rel_l2"]);
    }
}

/// A part of a checkpoint, with gate and up alone, says no scale for C.
#[test]
fn nvfp4_outputs_without_a_down_projection_take_a_scale_of_their_own() {
    let hidden = data("hidden-states-f32.safetensors");
    let without = |lost: &str, code: i32| {
        let dir = tempfile::tempdir().unwrap();
        changed(dir.path(), |all| {
            let before = all.len();
            all.retain(|tensor| !tensor.0.contains(lost));
            assert!(all.len() < before);
        });
        run_json(&[arg(dir.path()), "--input", arg(&hidden), "--out-dtype", "nvfp4"], code)
    };
    for lost in ["down_proj.weight_scale", "down_proj.weight_scale_2", "down_proj.input_scale"] {
        assert!(
            without(lost, 2)["error"].as_str().unwrap().contains(lost),
            "a damaged one is none that is not there"
        );
    }
    let report = without("down_proj", 0);
    assert_eq!(report["plan"]["desc"]["out"]["nvfp4"]["global_scale"], "dynamic", "{report}");
    assert!(report["max_ulp"].as_u64().unwrap() <= 1, "{}", report["max_ulp"]);
}

#[test]
fn quantizing_on_the_way_in_says_which_scale_it_takes() {
    let hidden = data("hidden-states-f32.safetensors");
    let a = |checkpoint: &str, more: &[&str]| {
        let checkpoint = data(checkpoint);
        let mut args = vec![arg(&checkpoint), "--input", arg(&hidden)];
        args.extend(more);
        let report = run_json(&args, 0);
        assert_eq!(report["a_format"], "nvfp4");
        report["a"].as_str().unwrap().to_string()
    };
    let nvfp4 = ["--a-format", "nvfp4"];
    assert!(a("modelopt-nvfp4", &nvfp4).contains("input scale 1.3950893e-3 (static)"));
    assert!(a("compressed-tensors-nvfp4a16", &nvfp4).contains("dynamic: the checkpoint has no input scale"));
    assert!(a("modelopt-nvfp4", &["--quantize", "dynamic"]).contains("its own scale (dynamic)"));
}

#[test]
fn a_generated_input_depends_on_its_seed_only() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = data("modelopt-nvfp4");
    let run = |seed: &str, name: &str| {
        let out = dir.path().join(name);
        run_json(&[arg(&checkpoint), "--m", "5", "--seed", seed, "--output", arg(&out)], 0);
        tensor(&out, "c")
    };
    let first = run("7", "a");
    assert_eq!(first.len(), 5 * 1536);
    assert_eq!(first, run("7", "b"));
    assert_ne!(first, run("8", "c"));
}
