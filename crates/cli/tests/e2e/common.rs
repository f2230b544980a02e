//! What the end-to-end tests share: the command, the test data, its outputs read with the reference implementation
//! of safetensors.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// The command, whatever the environment of the tests asks of it.
pub fn dualgemm() -> Command {
    let mut command = Command::cargo_bin("dualgemm").expect("the binary is built with the tests");
    command.env_remove("DUALGEMM_ISA").env_remove("DUALGEMM_LOG");
    command
}

/// A file under `testdata/smollm2-135m-layer14`.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/smollm2-135m-layer14").join(name)
}

/// Runs with `--json`, expects this exit code, and reads stdout as exactly one JSON document.
pub fn json(args: &[&str], code: i32) -> Value {
    let output = dualgemm().args(args).arg("--json").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| {
        panic!("{args:?}: stdout is not one JSON document: {e}\n{}", String::from_utf8_lossy(&output.stdout))
    })
}

/// `run` with `--json`, once, without measuring the machine.
pub fn run_json(args: &[&str], code: i32) -> Value {
    json(&[&["run", "--repeat", "1", "--no-roofline"], args].concat(), code)
}

/// A path as an argument.
pub fn arg(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

/// A tensor of a file as f64.
pub fn tensor(file: &Path, name: &str) -> Vec<f64> {
    let bytes = std::fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let view = tensors.tensor(name).unwrap();
    let data = view.data();
    match view.dtype() {
        Dtype::F32 => {
            data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect()
        }
        Dtype::F16 => {
            data.chunks_exact(2).map(|b| f16::from_le_bytes(b.try_into().unwrap()).into()).collect()
        }
        Dtype::BF16 => {
            data.chunks_exact(2).map(|b| bf16::from_le_bytes(b.try_into().unwrap()).into()).collect()
        }
        other => panic!("{name} is {other:?}"),
    }
}

/// Some tensors of a file, written to another one.
pub fn extract(from: &Path, names: &[&str], to: &Path) {
    let bytes = std::fs::read(from).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let views: Vec<_> = names.iter().map(|&name| (name, tensors.tensor(name).unwrap())).collect();
    safetensors::serialize_to_file(views, None, to).unwrap();
}

/// `‖got - want‖ / ‖want‖`.
pub fn rel_l2(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    (error / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
}
