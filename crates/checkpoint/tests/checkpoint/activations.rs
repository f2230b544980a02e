//! Operands and results in files.

use crate::common::{Fixture, Weight, assert_starts};
use dualgemm_checkpoint::activations::read;
use dualgemm_checkpoint::safetensors::serialize;
use dualgemm_checkpoint::write::write_activations;
use dualgemm_checkpoint::{Dtype, TensorFiles};
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::AOperand;
use half::{bf16, f16};

fn files(f: &Fixture) -> (tempfile::TempDir, TensorFiles) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    std::fs::write(&path, serialize(&f.tensors, &f.metadata).unwrap()).unwrap();
    let files = TensorFiles::open(&path).unwrap();
    (dir, files)
}

fn read_error(f: &Fixture, tensor: Option<&str>) -> String {
    let (_dir, files) = files(f);
    crate::common::message(&read(&files, tensor).unwrap_err())
}

fn triple() -> Fixture {
    let w = Weight::new(3, 5, 64);
    let mut f = Fixture::default();
    f.add("a_packed", Dtype::U8, &[5, 32], w.codes);
    f.add("a_scale", Dtype::F8E4m3, &[5, 4], w.scales);
    f.f32("a_scale_2", &[1], &[0.01]);
    f
}

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
    let global = GlobalScale::multiplier(0.02);
    let linear = QuantizedMatrix::new(
        "c",
        BlockFormat::Nvfp4,
        130,
        80,
        w.codes.clone(),
        w.scales.clone(),
        ScaleLayout::Linear,
        global,
    )
    .unwrap();
    for layout in ScaleLayout::ALL {
        let c = AOperand::Quantized(linear.clone().with_scale_layout(layout));
        write_activations(&path, "c", &c).unwrap();
        let files = TensorFiles::open(&path).unwrap();
        let AOperand::Quantized(read) = read(&files, None).unwrap() else { panic!("the triple") };
        w.assert_is(&read);
        assert_eq!((read.scale_layout(), read.global_scale()), (layout, global));
    }
}

#[test]
fn a_triple_is_found_among_other_tensors() {
    let mut f = triple();
    f.f32("reference", &[2, 2], &[0.0; 4]);
    let (_dir, files) = files(&f);
    assert!(matches!(read(&files, None), Ok(AOperand::Quantized(q)) if q.rows() == 5));
    assert!(matches!(read(&files, Some("reference")), Ok(AOperand::Float(_))));
}

#[test]
fn unusable_activation_files_are_named() {
    let mut f = Fixture::default();
    let e = read_error(&f, None);
    assert_starts(&e, "DIR/a.safetensors: no tensor; valid is one F32, F16 or BF16 tensor");
    f.f32("x", &[1, 1], &[0.0]).f32("y", &[1, 1], &[0.0]);
    assert_starts(
        &read_error(&f, None),
        "DIR/a.safetensors: several tensors (x, y), and --input-tensor names none; valid is",
    );
    assert_starts(&read_error(&f, Some("z")), "DIR/a.safetensors: no tensor `z` among x, y; valid is");

    let mut f = Fixture::default();
    f.add("x", Dtype::I32, &[1, 1], vec![0; 4]);
    assert_eq!(read_error(&f, None), "x: stored as I32; a float matrix must be F32, F16 or BF16");
    let mut f = Fixture::default();
    f.f32("x", &[0, 4], &[]);
    assert_starts(&read_error(&f, None), "x: shape [0, 4] cannot be a matrix");

    type Change = (fn(&mut Fixture), &'static str);
    let changes: [Change; 6] = [
        (|f| f.tensors.truncate(2), "DIR/a.safetensors: `a_packed` without `a_scale_2`; valid is"),
        (
            |f| f.tensor("a_scale").shape = vec![4, 5],
            "a_scale: shape [4, 5] cannot be block scales; valid is [5, 4]",
        ),
        (
            |f| f.tensor("a_scale").shape = vec![20],
            "a_scale: shape [20] cannot be block scales; valid is [5, 4], or flat with `scale_layout` in the metadata",
        ),
        (
            |f| f.bytes("a_scale")[7] = 0x7F,
            "DIR/a.safetensors: a_packed: block scale 0x7f at row 1, block 3 is NaN; valid are 0x00..=0x7e",
        ),
        (
            |f| f.tensor("a_scale_2").data = vec![0; 4].into(),
            "DIR/a.safetensors: a_packed: tensor scale 0 and its reciprocal must be positive finite numbers",
        ),
        (|f| f.tensor("a_packed").dtype = Dtype::I8, "a_packed: stored as I8; packed activations must be U8"),
    ];
    for (change, expected) in changes {
        let mut f = triple();
        change(&mut f);
        assert_starts(&read_error(&f, None), expected);
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

#[test]
fn parts_of_an_nvfp4_operand_are_told_by_name() {
    let (_dir, open) = files(&triple());
    assert_eq!(read(&open, Some("a_packed")).unwrap(), read(&open, None).unwrap());
    for part in ["a_scale", "a_scale_2"] {
        let message = read_error(&triple(), Some(part));
        assert!(
            message.contains(&format!("`{part}` is a part of")) && message.contains("`a_packed`"),
            "{message}"
        );
    }
    for (lacking, there) in [("a_packed", "a_scale"), ("a_scale", "a_packed"), ("a_scale_2", "a_packed")] {
        let mut f = triple();
        f.tensors.retain(|t| t.name != lacking);
        let message = read_error(&f, None);
        assert!(message.contains(&format!("`{there}` without `{lacking}`")), "{message}");
    }
    let mut f = triple();
    f.tensors.iter_mut().for_each(|t| t.dtype = if t.name == "a_scale_2" { t.dtype } else { Dtype::U8 });
    f.tensor("a_packed").name = "x".into();
    f.tensor("a_scale").name = "a_packed".into();
    f.tensor("x").name = "a_scale".into();
    let message = read_error(&f, None);
    assert!(message.contains("`a_packed` [5, 4] and `a_scale` [5, 32], which are exchanged"), "{message}");
}
