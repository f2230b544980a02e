//! `run`, `verify`, `bench` and `inspect` of linear layers, whole MLPs and mixtures of experts.

use std::path::{Path, PathBuf};

use crate::common::{Tensors, arg, json, run_json, tensor, text, write};
use half::bf16;
use safetensors::Dtype;

/// Numbers that look drawn, and are the same everywhere.
pub fn drawn(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1 << 24) as f32 - 0.5)
    };
    (0..len).flat_map(|_| next().to_le_bytes()).collect()
}

/// Weights that stay in floats, as lm_head does, with a bias, against sums in f64 made here.
#[test]
fn a_linear_layer_in_floats_is_computed_close() {
    let dir = tempfile::tempdir().unwrap();
    let (from, path, c) =
        (dir.path().join("f.safetensors"), dir.path().join("q.safetensors"), dir.path().join("c"));
    let bytes = drawn(7, 40 * 48);
    write(
        &from,
        &[
            ("lm_head.weight", Dtype::BF16, vec![40, 48], bytes.clone()),
            ("lm_head.bias", Dtype::BF16, vec![40], drawn(8, 40)),
            ("model.layers.0.self_attn.o_proj.weight", Dtype::BF16, vec![48, 48], drawn(9, 48 * 48)),
        ],
    );
    json(&["quantize", arg(&from), arg(&path), "--producer", "modelopt"], 0);
    let a = dir.path().join("a.safetensors");
    write(&a, &[("a", Dtype::BF16, [3, 48], drawn(10, 3 * 48))]);
    let options = ["--op", "linear", "--module", "lm_head", "--input", arg(&a), "--output", arg(&c)];
    let report = run_json(&[&[arg(&path)], &options[..], &["--check", "all"]].concat(), 0);
    for (key, want) in [("m", 3), ("n", 40), ("k", 48), ("rows_compared", 3)] {
        assert_eq!(report[key], want, "{report}");
    }
    assert_eq!((&report["matrices"][0]["format"], &report["right"]), (&"bf16 [40, 48]".into(), &true.into()));
    let (x, w, bias) = (tensor(&a, "a"), tensor(&path, "lm_head.weight"), tensor(&path, "lm_head.bias"));
    for (at, found) in tensor(&c, "c").into_iter().enumerate() {
        let (row, n) = (at / 40, at % 40);
        let want = bias[n] + (0..48).map(|k| x[row * 48 + k] * w[n * 48 + k]).sum::<f64>();
        assert!((found - want).abs() < 1e-5, "[{row}, {n}]: {found}, {want}");
    }
    let run = [&["run", arg(&path)], &options[..4]].concat();
    let text = text(&run, 0);
    assert!(text.contains("lm_head.weight, bf16 [40, 48]") && text.contains("right"), "{text}");
}

/// Routed experts alone, in a file of their own: N, K and the features of down.
pub fn mixture_of(dir: &Path, experts: &[usize], [n, k, h]: [usize; 3]) -> PathBuf {
    let mut floats: Tensors = Vec::new();
    for expert in experts {
        for (half, shape) in [("gate", [n, k]), ("up", [n, k]), ("down", [h, n])] {
            let name = format!("model.layers.5.mlp.experts.{expert}.{half}_proj.weight");
            floats.push((name, Dtype::BF16, shape.to_vec(), drawn(3, shape[0] * shape[1])));
        }
    }
    let (from, to) = (dir.join("others-floats.safetensors"), dir.join("others.safetensors"));
    write(&from, &floats);
    json(&["quantize", arg(&from), arg(&to), "--producer", "modelopt"], 0);
    to
}

/// A layer with these routed experts and perhaps a shared one, quantized: N = 64, K = 48.
pub fn mixture(dir: &Path, experts: &[usize], shared: bool) -> PathBuf {
    let mut floats: Tensors = Vec::new();
    let mut add = |path: String, seed: u64| {
        for (at, (half, shape)) in
            [("gate", [64, 48]), ("up", [64, 48]), ("down", [48, 64])].into_iter().enumerate()
        {
            let bytes = drawn(seed * 3 + at as u64 + 1, shape[0] * shape[1]);
            floats.push((format!("{path}.{half}_proj.weight"), Dtype::BF16, shape.to_vec(), bytes));
        }
    };
    for &expert in experts {
        add(format!("model.layers.5.mlp.experts.{expert}"), expert as u64);
    }
    if shared {
        add("model.layers.5.mlp.shared_experts".into(), 99);
    }
    floats.push(("lm_head.weight".into(), Dtype::BF16, vec![32, 48], drawn(7, 32 * 48)));
    let (from, to) = (dir.join("floats.safetensors"), dir.join("mixture.safetensors"));
    write(&from, &floats);
    json(&["quantize", arg(&from), arg(&to), "--producer", "modelopt"], 0);
    to
}

/// A routing with 64-bit or 32-bit numbers.
pub fn routing(path: &Path, ids: &[i64], weights: &[f32], shape: [usize; 2], wide: bool) {
    let (dtype, bytes) = match wide {
        true => (Dtype::I64, ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>()),
        false => (Dtype::I32, ids.iter().flat_map(|&id| (id as i32).to_le_bytes()).collect()),
    };
    let weights = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect::<Vec<u8>>();
    write(path, &[("topk_ids", dtype, shape, bytes), ("topk_weights", Dtype::F32, shape, weights)]);
}

#[test]
fn matrices_of_pictures_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let pictures = dir.path().join("pictures.safetensors");
    let name = "model.visual.blocks.0.mlp.gate_proj.weight";
    write(&pictures, &[(name, Dtype::BF16, [32, 48], drawn(7, 32 * 48))]);
    let seen = text(&["inspect", arg(&pictures), "--convention", "modelopt"], 0);
    let line = "1 matrix of pictures and sound, such as model.visual.blocks.0.mlp.gate_proj: bf16\n";
    assert!(seen.contains(line), "{seen}");
}
