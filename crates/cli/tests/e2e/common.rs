//! What the end-to-end tests share: the command, the test data, its outputs read with the reference implementation
//! of safetensors.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use half::{bf16, f16};
use safetensors::tensor::TensorView;
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

pub fn filled(dir: &Path, line: &str) -> String {
    let names = [
        ("{ckpt}", "modelopt-nvfp4"),
        ("{ct}", "compressed-tensors-nvfp4"),
        ("{a16}", "compressed-tensors-nvfp4a16"),
        ("{gguf}", "mlp-nvfp4.gguf"),
        ("{bf16}", "mlp-bf16.safetensors"),
        ("{hidden}", "hidden-states-f32.safetensors"),
        ("{expected}", "expected-modelopt-nvfp4.safetensors"),
        ("{data}/", ""),
    ];
    let line = line.replace("{c}", "{dir}/c.safetensors").replace("{dir}", arg(dir));
    names.iter().fold(line, |line, (name, file)| line.replace(name, arg(&data(file))))
}

/// Runs with `--json`, expects this exit code, and reads stdout as exactly one JSON document. Files of an earlier run are
/// replaced.
pub fn json(args: &[&str], code: i32) -> Value {
    let writes = ["--output", "--plot", "--csv"].iter().any(|option| args.contains(option));
    let writes = writes || ["quantize", "convert"].contains(&args[0]);
    let output = dualgemm().args(args).arg("--json").args(writes.then_some("--force")).output().unwrap();
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

/// What the command prints, which ends with this exit code.
pub fn text(args: &[&str], code: i32) -> String {
    let output = dualgemm().args(args).output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The one line that says why the command ends with this exit code.
pub fn refusal(args: &[&str], code: i32) -> String {
    let output = dualgemm().args(args).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(code), 1), "{args:?}: {stderr}");
    stderr
}

/// Name, type, shape and bytes.
pub type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

/// Every tensor of a file.
pub fn tensors(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    let owned = |(name, view): (String, TensorView<'_>)| {
        (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())
    };
    tensors.into_iter().map(owned).collect()
}

/// Type, shape and bytes of a tensor.
pub fn held(path: &Path, name: &str) -> (Dtype, Vec<usize>, Vec<u8>) {
    let found = tensors(path).into_iter().find(|tensor| tensor.0 == name);
    let (_, dtype, shape, bytes) = found.unwrap_or_else(|| panic!("{}: no {name}", path.display()));
    (dtype, shape, bytes)
}

/// A file of these tensors.
pub fn write<N: AsRef<str>, S: AsRef<[usize]>, B: AsRef<[u8]>>(path: &Path, tensors: &[(N, Dtype, S, B)]) {
    let view = |dtype, shape: &S, bytes| TensorView::new(dtype, shape.as_ref().to_vec(), bytes).unwrap();
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.as_ref(), view(*dtype, shape, bytes.as_ref())));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// The ModelOpt checkpoint with other tensors, in a folder that may be there.
pub fn changed(folder: &Path, change: impl FnOnce(&mut Tensors)) {
    let from = data("modelopt-nvfp4");
    let mut all = tensors(&from.join("model.safetensors"));
    change(&mut all);
    std::fs::create_dir_all(folder).unwrap();
    write(&folder.join("model.safetensors"), &all);
    std::fs::copy(from.join("config.json"), folder.join("config.json")).unwrap();
}

/// A tensor of a file as f64.
pub fn tensor(file: &Path, name: &str) -> Vec<f64> {
    let (dtype, _, data) = held(file, name);
    match dtype {
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
    let mut kept = tensors(from);
    kept.retain(|tensor| names.contains(&tensor.0.as_str()));
    assert_eq!(kept.len(), names.len(), "{names:?}");
    write(to, &kept);
}

/// `‖got - want‖ / ‖want‖`.
pub fn rel_l2(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    (error / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
}
