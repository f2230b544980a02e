//! `include/dualgemm.h` is what cbindgen makes of the crate, and C programs that include it run.

use std::path::{Path, PathBuf};
use std::process::Command;

use dualgemm::checkpoint::{Checkpoint, OpenOptions};
use dualgemm::formats::{FloatMatrix, Matrix};
use dualgemm::gemm::{AFormat, AOperand, DualGemmDesc};
use dualgemm::{DualGemm, Target};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// `UPDATE_HEADER=1 cargo test -p dualgemm-capi` writes it anew.
#[test]
fn the_header_is_current() {
    let dir = env!("CARGO_MANIFEST_DIR");
    let mut text = Vec::new();
    cbindgen::generate(dir).unwrap().write(&mut text);
    let text = String::from_utf8(text).unwrap();
    let path = Path::new(dir).join("include/dualgemm.h");
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "UPDATE_HEADER=1 writes it anew");
}

/// Where the library that belongs to this test was built: beside the test, `target/PROFILE/deps`.
fn library_dir() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_path_buf()
}

fn compile(compiler: &str, flags: &[&str], example: &str, out: &Path) {
    let status = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Werror", "-O1"])
        .args(flags)
        .arg("-I")
        .arg(root().join("crates/capi/include"))
        .arg(root().join("examples/c").join(example))
        // What follows is no source in the language that a flag may have named.
        .args(["-x", "none"])
        .arg("-L")
        .arg(library_dir())
        .args(["-ldualgemm_c", "-lm", "-ldl", "-o"])
        .arg(out)
        .status()
        .unwrap_or_else(|e| panic!("{compiler}: {e}; a C compiler is needed, as for linking Rust"));
    assert!(status.success(), "{compiler} {flags:?}");
}

fn run(program: &Path, argument: impl AsRef<std::ffi::OsStr>) -> std::process::Output {
    Command::new(program).arg(argument).env("LD_LIBRARY_PATH", library_dir()).output().unwrap()
}

#[test]
fn the_c_example_computes_what_rust_computes_exact() {
    let program = std::env::temp_dir().join(format!("dualgemm-c-example-{}", std::process::id()));
    compile("cc", &["-std=c11"], "layer.c", &program);
    let path = root().join("testdata/smollm2-135m-layer14/modelopt-nvfp4");
    let output = run(&program, &path);
    let failed = run(&program, Path::new("no-such-checkpoint.gguf"));
    std::fs::remove_file(&program).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found = String::from_utf8(output.stdout).unwrap();
    let found: Vec<f32> = found.split_whitespace().map(|x| x.parse().unwrap()).collect();

    let checkpoint = Checkpoint::open(&path, &OpenOptions::default()).unwrap();
    let weights = checkpoint.gate_up(0).unwrap();
    let (m, n, k) = (4, weights.n(), weights.k());
    let a: Vec<f32> = (0..m * k).map(|i| (i % 23) as f32 / 8.0 - 1.0).collect();
    let a = AOperand::Float(FloatMatrix::F32(Matrix::new("a", m, k, a).unwrap()));
    let desc = DualGemmDesc::new(m, n, k, AFormat::F32, weights.gate.format());
    let plan = DualGemm::plan(&desc, &Target::default()).unwrap();
    assert_eq!(found, plan.run_to_vec(&a, &plan.prepack(&weights).unwrap()).unwrap());

    assert_eq!(failed.status.code(), Some(1));
    let message = String::from_utf8(failed.stderr).unwrap();
    assert!(message.starts_with("error: no-such-checkpoint.gguf: cannot open"), "{message}");
}

/// Tried where there is one; the header is C++ too.
#[test]
fn the_header_is_cpp() {
    if Command::new("c++").arg("--version").output().is_err() {
        eprintln!("skipped: no c++");
        return;
    }
    let out = std::env::temp_dir().join(format!("dualgemm-cpp-example-{}", std::process::id()));
    // `{0}` is all zeros in both languages, but C++ compilers would rather see every member.
    for example in ["layer.c", "device.c"] {
        compile("c++", &["-x", "c++", "-std=c++17", "-Wno-missing-field-initializers"], example, &out);
    }
    std::fs::remove_file(&out).unwrap();
}

/// Runs the example on a target; what it prints, and what it says when there is no such GPU.
fn run_device_example(target: &str) -> (std::process::Output, String) {
    let name = format!("dualgemm-c-device-{}-{}", target.replace(':', "-"), std::process::id());
    let program = std::env::temp_dir().join(name);
    compile("cc", &["-std=c11"], "device.c", &program);
    let (output, failed) = (run(&program, target), run(&program, "cuda:1000"));
    std::fs::remove_file(&program).unwrap();
    assert_eq!(failed.status.code(), Some(1));
    (output, String::from_utf8(failed.stderr).unwrap())
}

/// The example compares its result with the definition and fails if it is off.
#[test]
fn the_c_example_on_device_memory_is_right_close() {
    let (output, failed) = run_device_example("sim:sm_90a");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stdout));
    assert!(text.contains("by sm90a_fused") && text.contains("the default stream"), "{text}");
    assert!(failed.starts_with("error: "), "{failed}");
}

#[test]
#[ignore = "needs an sm_90 GPU"]
fn the_c_example_on_a_card_and_a_stream_of_its_own_is_right_close() {
    let (output, failed) = run_device_example("cuda:0");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stdout));
    assert!(text.contains("a stream of our own"), "{text}");
    assert!(failed.contains("there is no GPU 1000"), "{failed}");
}
