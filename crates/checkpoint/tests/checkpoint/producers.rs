//! Checkpoints that producers wrote, against the values that their own code gives them. See `testdata/README.md`.

use std::path::{Path, PathBuf};

use crate::common::*;
use dualgemm_checkpoint::{Checkpoint, TensorFiles};
use dualgemm_formats::QuantizedMatrix;

fn produced(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/producers").join(name)
}

/// Producers multiply in f32, so that their values are the exact ones but for two roundings.
fn assert_values(ours: &QuantizedMatrix<'_>, expected: &[f32]) {
    assert_eq!(ours.rows() * ours.k(), expected.len());
    for (i, &theirs) in expected.iter().enumerate() {
        let (row, k) = (i / ours.k(), i % ours.k());
        let (found, theirs) = (ours.value(row, k), f64::from(theirs));
        assert!((found - theirs).abs() <= 2e-7 * theirs.abs(), "[{row}, {k}]: {found}, theirs {theirs}");
    }
}

fn expected(name: &str) -> Vec<f32> {
    let files = TensorFiles::open(&produced("expected.safetensors")).unwrap();
    let bytes = files.tensors().find(|t| t.name == name).unwrap().bytes;
    bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

#[test]
fn comfyui_has_even_elements_in_high_nibbles_and_rows_padded_to_16() {
    let c = Checkpoint::open(&produced("comfyui-nvfp4.safetensors"), &defaults()).unwrap();
    assert_eq!(c.convention().name, "comfyui");
    let mlp = c.gate_up(0).unwrap();
    assert_eq!(mlp.gate.rows(), 32, "of 20");
    assert_values(&mlp.gate, &expected("comfyui.gate_proj"));
    assert_values(&mlp.up, &expected("comfyui.up_proj"));
}

#[test]
fn mlx_stores_the_largest_magnitude_of_an_expert_as_its_scale() {
    let c = Checkpoint::open(&produced("mlx-nvfp4-experts"), &defaults()).unwrap();
    assert_eq!(c.convention().name, "mlx");
    let [gate, up] = ["mlx.gate_proj", "mlx.up_proj"].map(expected);
    for (e, (gate, up)) in gate.chunks(16 * 32).zip(up.chunks(16 * 32)).enumerate() {
        let mlp = expert(&c, 0, e).unwrap();
        assert_values(&mlp.gate, gate);
        assert_values(&mlp.up, up);
    }
    assert!(c.validate().iter().all(|f| f.rule.id == "halves-tensor-scale"), "{:?}", c.validate());
}
