//! `quantize` of models whose experts are in tensors of three dimensions.

use std::path::Path;

use dualgemm::checkpoint::{Checkpoint, OpenOptions, TensorFiles, Which};
use half::bf16;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::common::*;

const E: usize = 3;
/// Features of an expert, and of the model.
const N: usize = 32;
const K: usize = 48;

/// A weight: expert; row of gate, then of up, then of down; column. Each expert is larger than the one before.
fn weight(expert: usize, row: usize, col: usize) -> f32 {
    let x = (expert * 7919 + row * 104_729 + col * 1_299_709) % 1009;
    bf16::from_f32((x as f32 / 1009.0 - 0.5) * (1.0 + expert as f32)).to_f32()
}

/// Numbers that bf16 holds.
fn bias(expert: usize, row: usize) -> f32 {
    [1.0, -1.0, 1024.0][expert] * row as f32
}

type Floats = Vec<(String, Vec<usize>, Vec<f32>)>;

/// A directory with these tensors in bf16.
fn write(dir: &Path, model_type: &str, tensors: &Floats) {
    std::fs::create_dir(dir).unwrap();
    let config = json!({ "model_type": model_type, "hidden_act": "silu", "hidden_size": K });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let stored = |(name, shape, values): &(String, Vec<usize>, Vec<f32>)| {
        let bytes = values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect::<Vec<u8>>();
        (name.clone(), Dtype::BF16, shape.clone(), bytes)
    };
    crate::common::write(&dir.join("model.safetensors"), &tensors.iter().map(stored).collect::<Vec<_>>());
}

fn matrix(rows: usize, cols: usize, value: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    (0..rows * cols).map(|at| value(at / cols, at % cols)).collect()
}

/// Experts in two tensors of these names; alternating rows, swapped dimensions and biases as in gpt-oss.
fn fused(names: [&str; 2], transposed: bool, as_gpt_oss: bool) -> Floats {
    let order = |row: usize| if as_gpt_oss { row / 2 + row % 2 * N } else { row };
    let stack = |rows: usize, cols: usize, value: &dyn Fn(usize, usize, usize) -> f32| {
        let one = |e: usize| match transposed {
            false => matrix(rows, cols, |row, col| value(e, row, col)),
            true => matrix(cols, rows, |col, row| value(e, row, col)),
        };
        let shape = if transposed { vec![E, cols, rows] } else { vec![E, rows, cols] };
        (shape, (0..E).flat_map(one).collect::<Vec<f32>>())
    };
    let (both_shape, both) = stack(2 * N, K, &|e, row, col| weight(e, order(row), col));
    let (down_shape, down) = stack(K, N, &|e, row, col| weight(e, 2 * N + row, col));
    let mut tensors = vec![(names[0].into(), both_shape, both), (names[1].into(), down_shape, down)];
    if as_gpt_oss {
        let of = |rows: usize, value: &dyn Fn(usize, usize) -> f32| matrix(E, rows, value);
        let both = of(2 * N, &|e, row| bias(e, order(row)));
        tensors.push((format!("{}_bias", names[0]), vec![E, 2 * N], both));
        tensors.push((format!("{}_bias", names[1]), vec![E, K], of(K, &|e, row| bias(e, 2 * N + row))));
    }
    tensors
}

/// The same experts in tensors of their own below `path`.
fn apart(path: &str, biases: bool) -> Floats {
    let mut tensors = Floats::new();
    for e in 0..E {
        for (last, first, rows, cols) in [("gate", 0, N, K), ("up", N, N, K), ("down", 2 * N, K, N)] {
            let name = format!("{path}.{e}.{last}_proj");
            let values = matrix(rows, cols, |row, col| weight(e, first + row, col));
            tensors.push((format!("{name}.weight"), vec![rows, cols], values));
            if biases {
                let values = (0..rows).map(|row| bias(e, first + row)).collect();
                tensors.push((format!("{name}.bias"), vec![rows], values));
            }
        }
    }
    tensors
}

const NAMES: [&str; 2] = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"];
const PATH: &str = "model.layers.0.mlp.experts";

fn quantize(from: &Path, to: &Path, producer: &str, more: &[&str]) -> Value {
    json(&[&["quantize", arg(from), arg(to), "--producer", producer], more].concat(), 0)
}

/// Apart, every byte is that of a source whose experts are apart; its loaders and ours read the result.
#[test]
fn experts_in_one_tensor_become_those_of_a_model_that_has_each_its_own() {
    let granite = [
        "model.layers.0.block_sparse_moe.input_linear.weight",
        "model.layers.0.block_sparse_moe.output_linear.weight",
    ];
    let of_granite = "model.layers.0.block_sparse_moe.experts";
    for (model_type, names, path, transposed, producers) in [
        ("gpt_oss", NAMES, PATH, true, &["compressed-tensors", "te"][..]),
        ("llama4_text", NAMES, PATH, true, &["compressed-tensors"]),
        ("qwen3_moe", NAMES, PATH, false, &["modelopt", "compressed-tensors"]),
        ("granitemoe", granite, of_granite, false, &["modelopt", "compressed-tensors"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (one, many) = (dir.path().join("one"), dir.path().join("many"));
        let as_gpt_oss = model_type == "gpt_oss";
        write(&one, model_type, &fused(names, transposed, as_gpt_oss));
        write(&many, model_type, &apart(path, as_gpt_oss));
        for producer in producers {
            let outs = ["out-one", "out-many"].map(|name| dir.path().join(format!("{name}-{producer}")));
            let report = quantize(&one, &outs[0], producer, &[]);
            assert_eq!(report["tensors"].as_array().unwrap().len(), 3 * E, "{model_type} {producer}");
            assert_eq!(report["kept"], json!([]));
            quantize(&many, &outs[1], producer, &[]);
            let [ours, theirs] = [&outs[0], &outs[1]].map(|out| TensorFiles::open(out).unwrap());
            assert_eq!(ours.tensors().count(), theirs.tensors().count());
            for t in theirs.tensors() {
                let found = ours.get(t.name).unwrap_or_else(|| panic!("{producer}: no {}", t.name));
                assert!(found == t, "{model_type} {producer}: {}", t.name);
            }
            assert_eq!(ours.config().unwrap().value, theirs.config().unwrap().value);
            let validated = json(&["validate", arg(&outs[0])], 0);
            assert_eq!(validated["errors"], 0, "{validated}");
        }
    }
}

/// As `_export_quantized_weight` of ModelOpt does: one tensor scale for all, dimensions swapped back after packing.
#[test]
fn modelopt_keeps_those_of_llama_4_and_gpt_oss_in_one_tensor() {
    for (model_type, as_gpt_oss) in [("gpt_oss", true), ("llama4_text", false)] {
        let dir = tempfile::tempdir().unwrap();
        let (source, out) = (dir.path().join("source"), dir.path().join("out"));
        write(&source, model_type, &fused(NAMES, true, as_gpt_oss));
        let inputs = (0..E).flat_map(|e| {
            [("gate", 2.0), ("up", 2.0), ("down", 8.0)]
                .map(|(last, amax)| (format!("{PATH}.{e}.{last}_proj"), json!(amax + e as f64)))
        });
        let calibration = dir.path().join("calibration.json");
        let amax: serde_json::Map<String, Value> = inputs.collect();
        std::fs::write(&calibration, json!({ "dtype": "bf16", "amax": amax }).to_string()).unwrap();
        let report = quantize(&source, &out, "modelopt", &["--calibration", arg(&calibration)]);
        assert_eq!(report["tensors"][0]["shape"], json!([E * 2 * N, K]));
        let files = TensorFiles::open(&out).unwrap();
        let shape = |name: &str| files.get(&format!("{}{name}", NAMES[0])).unwrap().shape.to_vec();
        assert_eq!(
            [shape(""), shape("_weight_scale"), shape("_weight_scale_2")],
            [vec![E, K / 2, 2 * N], vec![E, K / 16, 2 * N], vec![]]
        );
        let c = Checkpoint::open(&out, &OpenOptions::default()).unwrap();
        let all = || {
            (0..E).flat_map(|e| (0..2 * N).flat_map(move |row| (0..K).map(move |col| weight(e, row, col))))
        };
        let largest = all().fold(0f32, |m, x| m.max(x.abs()));
        for e in 0..E {
            let source = c.gate_up_source(0, Which::Expert(e)).unwrap();
            let mlp = source.read().unwrap();
            assert_eq!(mlp.gate.global_scale().value(), largest / 2688.0);
            // The largest input of any expert.
            assert_eq!(source.input_scales().unwrap().unwrap().0.value(), (2.0 + 2.0) / 2688.0);
            for (half, first) in [(&mlp.gate, 0), (&mlp.up, N)] {
                for (row, col) in (0..N).flat_map(|row| (0..K).map(move |col| (row, col))) {
                    let (found, exact) = (half.value(row, col), f64::from(weight(e, first + row, col)));
                    // Half a step of e2m1 between 4 and 6, where the block's largest is 6, and the scale's own rounding.
                    let block = (0..16).map(|i| weight(e, first + row, col / 16 * 16 + i).abs());
                    let largest = f64::from(block.fold(0f32, f32::max));
                    assert!(
                        (found - exact).abs() <= largest * 0.24,
                        "{model_type} {e} [{row}, {col}]: {found}, {exact}"
                    );
                }
            }
            let expected: Vec<f32> = (0..N).map(|row| bias(e, row)).collect();
            assert_eq!(source.gate.bias, as_gpt_oss.then_some(expected));
        }
        assert_eq!(json(&["validate", arg(&out)], 0)["errors"], 0);
    }
}

#[test]
fn what_stays_in_floats_is_said_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = fused(NAMES, false, false);
    tensors.push((
        "model.layers.0.mamba.x_proj.weight".into(),
        vec![16, 40],
        matrix(16, 40, |i, j| weight(0, i, j)),
    ));
    tensors.push((
        "model.layers.0.self_attn.o_proj.weight".into(),
        vec![K, K],
        matrix(K, K, |i, j| weight(0, i, j)),
    ));
    let known = dir.path().join("known");
    write(&known, "qwen3_moe", &tensors);
    let unknown = dir.path().join("unknown");
    write(&unknown, "new_moe", &tensors);
    let kept = |report: &Value| {
        let kept = report["kept"].as_array().unwrap().iter();
        kept.map(|k| format!("{}: {}", k["name"].as_str().unwrap(), k["why"].as_str().unwrap()))
            .collect::<Vec<_>>()
    };
    let out = |name: &str| dir.path().join(name);
    let x_proj = "model.layers.0.mamba.x_proj.weight: K is 40, which is no multiple of 16";
    let report = quantize(&known, &out("m"), "modelopt", &[]);
    assert_eq!(kept(&report), [x_proj]);
    // Its loaders are told, and it is there as it was.
    let files = TensorFiles::open(&out("m")).unwrap();
    let ignored = &files.config().unwrap().value["quantization_config"]["ignore"];
    assert!(ignored.as_array().unwrap().contains(&json!("model.layers.0.mamba.x_proj")), "{ignored}");
    assert_eq!(files.get("model.layers.0.mamba.x_proj.weight").unwrap().shape, [16, 40]);

    let why = "experts whose rows of gate and up are in an order that is not known of new_moe";
    let report = quantize(&unknown, &out("u"), "modelopt", &[]);
    assert_eq!(kept(&report), [&format!("{}: {why}", NAMES[1]), &format!("{}: {why}", NAMES[0]), x_proj]);
    let report = quantize(&known, &out("skip"), "compressed-tensors", &["--skip", "experts.down_proj"]);
    let why = "--skip experts.down_proj";
    assert_eq!(kept(&report), [&format!("{}: {why}", NAMES[0]), &format!("{}: {why}", NAMES[1]), x_proj]);
    let report = quantize(&known, &out("t.safetensors"), "torchao", &[]);
    assert_eq!(
        kept(&report)[0],
        format!("{}: experts in one tensor, which torchao's NVFP4 does not quantize", NAMES[0])
    );
    // People read a line for all experts of a projection.
    let lines = out("lines");
    let args = ["quantize", arg(&known), arg(&lines), "--producer", "modelopt"];
    let printed = text(&args, 0);
    let line = printed.lines().find(|line| line.contains("experts.*.gate_proj.weight (3)")).expect(&printed);
    assert!(line.contains(" to ") && line.contains("≤ 0.") && !printed.contains("experts.0."), "{printed}");
    let printed = text(&["inspect", arg(&lines)], 0);
    assert!(printed.contains("  0      model.layers.0.mlp.experts[0 to 2]  experts  nvfp4 "), "{printed}");
    // Blocks of GGUF have 64 elements.
    let mut tensors = apart(PATH, false);
    tensors.push((
        "model.layers.0.mlp.shared_expert.up_proj.weight".into(),
        vec![16, 128],
        matrix(16, 128, |i, j| weight(0, i, j)),
    ));
    write(&out("many"), "qwen3_moe", &tensors);
    let report = quantize(&out("many"), &out("g.gguf"), "ggml", &["--mlp-only"]);
    assert_eq!(report["kept"].as_array().unwrap().len(), 3 * E);
    assert!(kept(&report).iter().all(|k| k.ends_with("which is no multiple of 64")), "{report}");
    // What it has no room for is not listed as written.
    assert_eq!((report["tensors"].as_array().unwrap().len(), &report["copied"]), (1, &json!([])));
    assert!(
        report["left_out"].as_array().unwrap().contains(&kept(&report)[0].split(':').next().unwrap().into())
    );
}
