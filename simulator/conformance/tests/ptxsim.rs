//! The simulator's own command, on a case as `dualgemm conformance --write` writes it, and on cases that are wrong.

use dualgemm_conformance::conformance::load_all;
use std::process::{Command, Output};

fn ptxsim(name: &str, ptx: &str) -> Output {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, ptx).unwrap();
    Command::new(env!("CARGO_BIN_EXE_ptxsim")).arg("--values").arg(path).output().unwrap()
}

#[test]
fn files_run_by_their_heads_exact() {
    let case = load_all().unwrap().into_iter().find(|case| case.name == "control/branches").unwrap();
    let output = ptxsim("right.ptx", &case.ptx);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("launch 0, argument 0: 512 bytes, #"), "{text}");
    assert!(text.ends_with("right.ptx: as its head expects\n"), "{text}");
    assert_eq!(
        text.lines().nth(1).unwrap().split(' ').count(),
        128,
        "the values of 512 bytes of u32: {text}"
    );

    let other = case.ptx.replacen("add.u32 %r2, %r2, 1000;", "add.u32 %r2, %r2, 1001;", 1);
    let output = ptxsim("other.ptx", &other);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.code() == Some(1) && text.contains("its head expects other results"), "{text}");

    let stopped = case.ptx.replacen("st.global.u32 [%out]", "st.global.u32 [%out+512]", 1);
    let output = ptxsim("stopped.ptx", &stopped);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && text.contains("out of bounds: write of 4 bytes"), "{text}");
}
