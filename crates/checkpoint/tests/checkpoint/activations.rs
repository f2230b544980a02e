//! Operands and results in files.

use crate::common::Weight;
use dualgemm_checkpoint::TensorFiles;
use dualgemm_checkpoint::activations::read;
use dualgemm_checkpoint::write::write_activations;
use dualgemm_formats::{FloatMatrix, Matrix, ScaleLayout};
use dualgemm_gemm::AOperand;
use half::{bf16, f16};

#[test]
fn results_round_trip_in_every_type_exact() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.safetensors");
    let values: Vec<f32> = (0..40).map(|i| i as f32 - 20.5).collect();
    let dense = |v: &[f32]| Matrix::new("c", 4, 10, v.to_vec()).unwrap();
    let f16s: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
    let bf16s: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    for float in [
        FloatMatrix::F32(dense(&values)),
        FloatMatrix::F16(Matrix::new("c", 4, 10, f16s).unwrap()),
        FloatMatrix::Bf16(Matrix::new("c", 4, 10, bf16s).unwrap()),
    ] {
        let c = AOperand::Float(float);
        write_activations(&path, "c", &c).unwrap();
        let files = TensorFiles::open(&path).unwrap();
        assert_eq!(read(&files, Some("c")).unwrap(), c);
    }
    // Bytes between the rows of a view are not written.
    let view = FloatMatrix::F32(Matrix::strided("c", 4, 8, 10, values).unwrap());
    write_activations(&path, "c", &AOperand::Float(view.clone())).unwrap();
    let files = TensorFiles::open(&path).unwrap();
    let AOperand::Float(found) = read(&files, None).unwrap() else { panic!("floats") };
    assert_eq!((found.rows(), found.cols()), (4, 8));
    assert!((0..4).all(|r| (0..8).all(|c| found.value(r, c) == view.value(r, c))));
}

#[test]
fn quantized_results_round_trip_in_every_scale_layout_exact() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.safetensors");
    let w = Weight::new(9, 130, 80);
    let linear = w.matrix("c", 0.02);
    for layout in ScaleLayout::ALL {
        let c = AOperand::Quantized(linear.clone().with_scale_layout(layout));
        write_activations(&path, "c", &c).unwrap();
        let files = TensorFiles::open(&path).unwrap();
        let AOperand::Quantized(read) = read(&files, None).unwrap() else { panic!("the triple") };
        w.assert_is(&read);
        assert_eq!((read.scale_layout(), read.global_scale()), (layout, linear.global_scale()));
    }
}

/// Opening a pipe would wait for somebody to write to it.
#[test]
#[cfg(unix)]
fn a_pipe_is_refused_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("a.safetensors");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let message = TensorFiles::open(&pipe).unwrap_err().to_string();
    assert!(message.ends_with("is not a regular file; only regular files can be mapped"), "{message}");
}
