//! Experts of a layer in two float tensors, taken apart.

use crate::common::*;
use dualgemm_checkpoint::{Dtype, FloatWeight, FusedExperts, TensorFiles, TensorOut};
use half::bf16;
use serde_json::{Value, json};

const E: usize = 3;
/// Features of an expert, and of the model.
const N: usize = 16;
const K: usize = 48;

/// A number that bf16 holds and that says where it is: expert, row of gate (below 16), up (from 16) or down (from 32), column.
fn number(expert: usize, row: usize, col: usize) -> f32 {
    (expert * 3 + 1) as f32 * 2f32.powi(row as i32 % 8 - 4) + (row / 8 * 48 + col) as f32 * 2f32.powi(-20)
}

/// `[E, 2N, K]` and `[E, K, N]`, gate and up in halves or alternating, perhaps with the last two dimensions swapped.
fn tensors(alternating: bool, transposed: bool) -> [(Vec<usize>, Vec<f32>); 2] {
    let matrices = |rows: usize, cols: usize, value: &dyn Fn(usize, usize, usize) -> f32| {
        let (a, b) = if transposed { (cols, rows) } else { (rows, cols) };
        let at = |e, i, j| if transposed { value(e, j, i) } else { value(e, i, j) };
        let all = (0..E).flat_map(|e| (0..a).flat_map(move |i| (0..b).map(move |j| (e, i, j))));
        (vec![E, a, b], all.map(|(e, i, j)| at(e, i, j)).collect())
    };
    let gate_up = |e, row, col| {
        let row = if alternating { row / 2 + row % 2 * N } else { row };
        number(e, row, col)
    };
    [matrices(2 * N, K, &gate_up), matrices(K, N, &|e, row, col| number(e, 2 * N + row, col))]
}

fn f32s(f: &mut Fixture, name: &str, (shape, values): &(Vec<usize>, Vec<f32>)) {
    f.f32(name, shape, values);
}

fn files(f: &Fixture) -> TensorFiles {
    let dir = tempfile::tempdir().unwrap();
    f.write(dir.path());
    TensorFiles::open(dir.path()).unwrap()
}

fn fused(config: Value, names: [&str; 2], alternating: bool, transposed: bool) -> Fixture {
    let mut f = Fixture::with(config);
    for (name, tensor) in names.iter().zip(tensors(alternating, transposed)) {
        f32s(&mut f, name, &tensor);
    }
    f
}

const NAMES: [&str; 2] = ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"];

#[track_caller]
fn assert_values(weight: &FloatWeight<'_>, rows: usize, k: usize, value: impl Fn(usize, usize) -> f32) {
    let x = weight.floats().unwrap();
    assert_eq!((x.rows(), x.cols(), weight.k()), (rows, k, k), "{}", weight.name);
    for row in 0..rows {
        assert!((0..k).all(|col| x.value(row, col) == value(row, col)), "{}: row {row}", weight.name);
    }
}

#[test]
fn every_element_of_every_expert_is_where_its_name_says() {
    let granite = [
        "model.layers.1.block_sparse_moe.input_linear.weight",
        "model.layers.1.block_sparse_moe.output_linear.weight",
    ];
    for (model_type, names, path, alternating, transposed, one_tensor) in [
        ("qwen3_moe", NAMES, "model.layers.1.mlp.experts", false, false, false),
        // Files of older versions.
        ("qwen3_vl_moe", NAMES, "model.layers.1.mlp.experts", false, true, false),
        ("llama4_text", NAMES, "model.layers.1.mlp.experts", false, true, true),
        ("gpt_oss", NAMES, "model.layers.1.mlp.experts", true, true, true),
        ("granitemoe", granite, "model.layers.1.block_sparse_moe.experts", false, false, false),
        ("gemma4_text", NAMES, "model.layers.1.mlp.experts", false, false, false),
    ] {
        let f = files(&fused(json!({ "model_type": model_type }), names, alternating, transposed));
        let (found, left) = FusedExperts::all(&f);
        assert!(left.is_empty(), "{model_type}: {left:?}");
        let [experts] = found.as_slice() else { panic!("{model_type}: {}", found.len()) };
        assert_eq!(experts.stays_one_in_modelopt(), one_tensor, "{model_type}");
        let apart = experts.apart();
        assert_eq!(apart.len(), 3 * E);
        for e in 0..E {
            for (last, first, rows, k) in
                [("gate_proj", 0, N, K), ("up_proj", N, N, K), ("down_proj", 2 * N, K, N)]
            {
                let name = format!("{path}.{e}.{last}.weight");
                let weight = apart.iter().find(|w| w.name == name).unwrap_or_else(|| panic!("{name}"));
                assert_eq!(weight.inputs, [format!("{path}.{e}.{last}")]);
                assert_values(weight, rows, k, |row, col| number(e, first + row, col));
            }
        }
        let [gate_up, down] = experts.together();
        assert_eq!([&gate_up.name, &down.name], names);
        assert_eq!((gate_up.experts, &gate_up.inputs[2]), (Some(E), &format!("{path}.2.gate_proj")));
        let order = |row: usize| if alternating { row / 2 + row % 2 * N } else { row };
        assert_values(&gate_up, E * 2 * N, K, |row, col| number(row / (2 * N), order(row % (2 * N)), col));
        assert_values(&down, E * K, N, |row, col| number(row / K, 2 * N + row % K, col));
    }
}

#[test]
fn biases_follow_their_rows_in_the_type_that_they_have() {
    let mut f = fused(json!({ "model_type": "gpt_oss" }), NAMES, true, true);
    let bf16s = |count: usize| (0..count).flat_map(|i| bf16::from_f32(i as f32).to_le_bytes()).collect();
    f.add(&format!("{}_bias", NAMES[0]), Dtype::Bf16, &[E, 2 * N], bf16s(E * 2 * N));
    f.add(&format!("{}_bias", NAMES[1]), Dtype::Bf16, &[E, K], bf16s(E * K));
    let files = files(&f);
    let biases = FusedExperts::all(&files).0[0].biases_apart();
    let find = |name: &str| {
        biases.iter().find(|t| t.name == format!("model.layers.1.mlp.experts.{name}.bias")).unwrap()
    };
    let values = |t: &TensorOut<'_>| {
        let dualgemm_checkpoint::TensorData::Bytes(bytes) = &t.data else { panic!() };
        assert_eq!(t.dtype, Dtype::Bf16);
        bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect::<Vec<_>>()
    };
    assert_eq!(biases.len(), 3 * E);
    let from = |first: usize, step: usize, count: usize| {
        (0..count).map(|i| (first + step * i) as f32).collect::<Vec<_>>()
    };
    assert_eq!(values(find("0.gate_proj")), from(0, 2, N));
    assert_eq!(values(find("1.up_proj")), from(33, 2, N));
    assert_eq!(values(find("2.down_proj")), from(2 * K, 1, K));
}
