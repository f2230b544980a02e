//! What `run` holds in memory at most: the weights once, C, and little else. The reference, which takes long on a layer
//! that is large beside the program, reads them again when they are gone.

use std::io::{Seek as _, SeekFrom, Write as _};

use crate::common::{arg, run_json};

/// A layer of zeros with N = 28672 and K = 4096, in a file with holes in place of its 126 MiB.
fn write_layer(path: &std::path::Path, n: usize, k: usize) {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    let mut add = |name: String, dtype: &str, shape: &[usize], bytes: usize| {
        let entry = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes] });
        header.insert(name, entry);
        end += bytes;
    };
    let halves = ["gate_proj", "up_proj"].map(|half| format!("model.layers.0.mlp.{half}"));
    for half in &halves {
        add(format!("{half}.weight_scale_2"), "F32", &[], 4);
    }
    for half in &halves {
        add(format!("{half}.weight"), "U8", &[n, k / 2], n * k / 2);
        add(format!("{half}.weight_scale"), "F8_E4M3", &[n, k / 16], n * k / 16);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let scales = [1f32, 1.0].map(f32::to_le_bytes).concat();
    file.write_all(&scales).unwrap();
    let data = file.seek(SeekFrom::Current(-8)).unwrap();
    file.set_len(data + end as u64).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn run_holds_the_weights_once_and_c_in_its_own_format() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("layer.safetensors");
    let check = |(n, k): (usize, usize), m: usize, formats: &[(&str, &str, f64)]| {
        write_layer(&path, n, k);
        for &(a, c, bytes_of_c) in formats {
            let rows = m.to_string();
            let reading = [arg(&path), "--convention", "modelopt", "--activation", "silu"];
            let checkpoint = [&reading[..], &["--m", &rows, "--check", "none"]].concat();
            let formats = ["--a-format", a, "--out-dtype", c];
            let report = run_json(&[&checkpoint[..], &formats].concat(), 0);
            let peak = report["peak_rss_bytes"].as_f64().unwrap();
            let needed = (2 * n * k * 9 / 16) as f64 + (m * n) as f64 * bytes_of_c;
            assert!(peak < 1.3 * needed, "A {a}, C {c}: {:.2} times weights and C", peak / needed);
        }
    };
    check((28672, 4096), 8, &[("bf16", "f32", 4.0), ("nvfp4", "f32", 4.0)]);
    check((28672, 2048), 192, &[("nvfp4", "nvfp4", 0.5625), ("nvfp4", "f16", 2.0)]);
}
