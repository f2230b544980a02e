//! What the producers' own CPU code made of eight cases, and of the weights of a real layer, byte for byte. See
//! `testdata/README.md`.

use std::path::Path;

use dualgemm_formats::quantize::quantize_group;
use dualgemm_formats::{FloatMatrix, Matrix, Producer, Search, quantize};
use half::bf16;
use safetensors::{Dtype, SafeTensors};

const CASES: [&str; 8] =
    ["normal", "one_block_row", "outliers", "producers_differ", "ties", "tiny", "wide_range", "zero_rows"];

fn read(file: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata").join(file);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn bf16_matrix(file: &SafeTensors<'_>, name: &str) -> FloatMatrix<'static> {
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), Dtype::BF16, "{name}");
    let [rows, k] = tensor.shape().try_into().unwrap();
    let data: Vec<bf16> = tensor.data().as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b)).collect();
    FloatMatrix::Bf16(Matrix::new(name, rows, k, data).unwrap())
}

fn check_cases(file: &str, producer: Producer, global_scale: &str) {
    let bytes = read(&format!("quantize-golden/{file}"));
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    for case in CASES {
        let tensor = |part: &str, dtype: Dtype| {
            let tensor = golden.tensor(&format!("{case}.{part}")).unwrap();
            assert_eq!(tensor.dtype(), dtype, "{case}.{part}");
            tensor
        };
        let x = bf16_matrix(&golden, &format!("{case}.input"));
        let quantized = quantize(case, &x, producer, Search::Plain).unwrap();
        let held = quantized.global_scale().held();
        assert_eq!(
            held.to_le_bytes(),
            tensor(global_scale, Dtype::F32).data(),
            "{case}: global scale {held}"
        );
        let (scales, codes) = (tensor("block_scale", Dtype::F8_E4M3), tensor("codes", Dtype::U8));
        let differing = |ours: &[u8], theirs: &[u8]| {
            assert_eq!(ours.len(), theirs.len(), "{case}");
            ours.iter().zip(theirs).position(|(a, b)| a != b).map(|i| (i, ours[i], theirs[i]))
        };
        assert_eq!(differing(quantized.scales(), scales.data()), None, "{case}: scale (index, ours, theirs)");
        assert_eq!(differing(quantized.codes(), codes.data()), None, "{case}: code (index, ours, theirs)");
    }
}

#[test]
fn modelopt_exact() {
    check_cases("modelopt.safetensors", Producer::ModelOpt, "global_scale");
}

#[test]
fn compressed_tensors_exact() {
    check_cases("compressed_tensors.safetensors", Producer::CompressedTensors, "global_scale_divisor");
}

#[test]
fn torchao_exact() {
    check_cases("torchao.safetensors", Producer::Torchao, "global_scale");
}

/// Real weights: layer 14 of SmolLM2-135M-Instruct, whose exporters fuse gate and up.
fn check_checkpoint(directory: &str, producer: Producer, codes: &str, global_scale: &str) {
    let weights = read("smollm2-135m-layer14/mlp-bf16.safetensors");
    let weights = SafeTensors::deserialize(&weights).unwrap();
    let checkpoint = read(&format!("smollm2-135m-layer14/{directory}/model.safetensors"));
    let checkpoint = SafeTensors::deserialize(&checkpoint).unwrap();

    let weight = |name: &str| bf16_matrix(&weights, &format!("model.layers.14.mlp.{name}.weight"));
    let (gate, up, down) = (weight("gate_proj"), weight("up_proj"), weight("down_proj"));
    let fused = [("gate_proj", &gate), ("up_proj", &up)];
    let mut quantized = quantize_group(&fused, producer, Search::Plain).unwrap();
    quantized.push(quantize("down_proj", &down, producer, Search::Plain).unwrap());
    for q in &quantized {
        let tensor = |part: &str| {
            checkpoint.tensor(&format!("model.layers.0.mlp.{}.{part}", q.name())).unwrap().data().to_vec()
        };
        assert_eq!(q.global_scale().held().to_le_bytes(), *tensor(global_scale), "{}", q.name());
        assert!(q.scales() == tensor("weight_scale"), "{}: scales", q.name());
        assert!(q.codes() == tensor(codes), "{}: codes", q.name());
    }
}

#[test]
fn modelopt_checkpoint_exact() {
    check_checkpoint("modelopt-nvfp4", Producer::ModelOpt, "weight", "weight_scale_2");
}

#[test]
fn compressed_tensors_checkpoints_exact() {
    for directory in ["compressed-tensors-nvfp4", "compressed-tensors-nvfp4a16"] {
        check_checkpoint(directory, Producer::CompressedTensors, "weight_packed", "weight_global_scale");
    }
}

/// A real activation, quantized dynamically from f32: what the expected outputs of that layer start from.
#[test]
fn dynamic_activation_exact() {
    let hidden = read("smollm2-135m-layer14/hidden-states-f32.safetensors");
    let hidden = SafeTensors::deserialize(&hidden).unwrap().tensor("hidden_states").unwrap().data().to_vec();
    let hidden: Vec<f32> = hidden.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
    let x = FloatMatrix::F32(Matrix::new("hidden_states", 64, 576, hidden).unwrap());
    let expected = read("smollm2-135m-layer14/expected-modelopt-nvfp4.safetensors");
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let tensor = |name: &str| expected.tensor(name).unwrap().data().to_vec();
    for producer in [Producer::ModelOpt, Producer::Torchao] {
        let a = quantize("a", &x, producer, Search::Plain).unwrap();
        assert_eq!(a.global_scale().held().to_le_bytes(), *tensor("a_scale_2"), "{producer}");
        assert!(a.scales() == tensor("a_scale"), "{producer}: scales");
        assert!(a.codes() == tensor("a_packed"), "{producer}: codes");
    }
}
