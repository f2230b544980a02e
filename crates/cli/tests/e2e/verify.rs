//! `verify` of values that underflow; what else it passes and fails is in `sessions/`.

use safetensors::Dtype;

use crate::common::{arg, json, write};

#[test]
fn values_that_underflow_are_right_unless_a_limit_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, dtype, bytes: Vec<u8>| {
        let path = dir.path().join(name);
        write(&path, &[("c", dtype, [1, 2], bytes)]);
        path
    };
    let result = file("c.safetensors", Dtype::F16, vec![0, 0, 1, 0]);
    let reference = file(
        "reference.safetensors",
        Dtype::F32,
        [2e-8f32, 4e-8].iter().flat_map(|x| x.to_le_bytes()).collect(),
    );
    let args = ["verify", arg(&result), "--reference", arg(&reference)];
    assert_eq!(json(&args, 0)["max_ulp"], 0);
    for limit in [["--min-cosine", "0.99"], ["--max-rel-l2", "0.1"]] {
        assert_eq!(json(&[&args[..], &limit].concat(), 1)["right"], false);
    }
}
