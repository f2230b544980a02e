//! Peak memory of loading. One test to a binary: the kernel's high-water mark is the process's.

mod common;

use std::io::Write;

use dualgemm_checkpoint::write::{Model, Output, write};
use dualgemm_checkpoint::{Checkpoint, Dtype, OpenOptions, Which};

/// High-water mark of resident memory, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[cfg_attr(not(target_os = "linux"), ignore = "needs /proc")]
#[test]
fn memory_stays_below_the_files() {
    // The mark never falls: what holds least comes first.
    gguf_is_looked_at_without_codes_and_validated_and_converted_in_pieces();
    loading_maps_and_does_not_copy();
}

fn gguf_is_looked_at_without_codes_and_validated_and_converted_in_pieces() {
    // Gate and up of one layer, [28672, 4096] each: 132 MB of zeros, sparse on disk.
    let (n, k) = (28672usize, 4096usize);
    let bytes = n * k / 64 * 36;
    let string = |s: &str| [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat();
    let mut header = b"GGUF\x03\0\0\0".to_vec();
    header.extend([2u64, 1].map(u64::to_le_bytes).concat());
    header.extend([string("general.architecture"), 8u32.to_le_bytes().into(), string("llama")].concat());
    for (i, half) in ["gate", "up"].iter().enumerate() {
        header.extend(string(&format!("blk.0.ffn_{half}.weight")));
        header.extend(2u32.to_le_bytes());
        header.extend([k as u64, n as u64].map(u64::to_le_bytes).concat());
        header.extend(Dtype::GGML_NVFP4.to_le_bytes());
        header.extend(((i * bytes) as u64).to_le_bytes());
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&header).unwrap();
    let size = (header.len().next_multiple_of(32) + 2 * bytes) as u64;
    file.set_len(size).unwrap();

    let before = peak();
    let checkpoint = Checkpoint::open(&path, &OpenOptions::default()).unwrap();
    let source = checkpoint.gate_up_source(0, Which::Dense).unwrap();
    assert_eq!((source.n(), source.k()), (n, k));
    assert_eq!(source.up.name(), "blk.0.ffn_up.weight");
    assert_eq!(source.gate.tensor_scale.value(), 1.0);
    let looked = peak() - before;
    assert!(looked < size / 20, "looking at the layer took {looked} of {size} bytes");
    assert_eq!(checkpoint.validate(), []);
    let validated = peak() - before;
    assert!(validated < size / 5, "validating took {validated} of {size} bytes");
    for (output, name) in [(Output::Modelopt, "modelopt"), (Output::Gguf, "again.gguf")] {
        let mlp_only = output == Output::Gguf;
        let model = Model { mlp_only, ..checkpoint.export(output).unwrap() };
        write(&dir.path().join(name), output, &model).unwrap();
        let converted = peak() - before;
        assert!(converted < size / 5, "converting to {} took {converted} of {size} bytes", output.name());
    }
}

fn loading_maps_and_does_not_copy() {
    // 12 layers of gate and up, [4096, 4096] each: 200 MB, sparse on disk.
    const LAYERS: usize = 12;
    let (codes, scales) = (4096 * 2048, 4096 * 256);
    let mut header = String::from("{");
    let mut at = 0;
    let mut add = |name: String, dtype, shape: &str, len| {
        let comma = if header.len() > 1 { "," } else { "" };
        let end = at + len;
        header +=
            &format!(r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{at},{end}]}}"#);
        at = end;
    };
    for layer in 0..LAYERS {
        for p in ["gate_proj", "up_proj"] {
            let m = format!("model.layers.{layer}.mlp.{p}");
            add(format!("{m}.weight"), "U8", "[4096,2048]", codes);
            add(format!("{m}.weight_scale"), "F8_E4M3", "[4096,256]", scales);
            add(format!("{m}._weight_per_tensor_scale"), "F32", "[]", 4);
        }
    }
    header += "}";
    let header =
        header.replace(".weight_scale\"", "._weight_scale\"").replace(".weight\"", "._weight_qdata\"");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let size = (8 + header.len() + at) as u64;
    file.set_len(size).unwrap();
    // The tensor scales are the only bytes that must not be zero.
    for layer in 0..2 * LAYERS {
        let offset = 8 + header.len() + (layer + 1) * (codes + scales + 4) - 4;
        std::os::unix::fs::FileExt::write_all_at(&file, &0.001f32.to_le_bytes(), offset as u64).unwrap();
    }
    assert!(size > 200_000_000);

    let before = peak();
    let options = OpenOptions { convention: Some("torchao".into()), ..OpenOptions::default() };
    let checkpoint = Checkpoint::open(&path, &options).unwrap();
    let mlps: Vec<_> = (0..LAYERS).map(|l| checkpoint.gate_up(l).unwrap()).collect();
    let opened = peak() - before;
    assert!(opened < size / 20, "opening and taking every matrix took {opened} of {size} bytes");

    let mut sum = 0u64;
    for mlp in &mlps {
        for m in [&mlp.gate, &mlp.up] {
            sum += m.codes().iter().chain(m.scales()).map(|&b| u64::from(b)).sum::<u64>();
        }
    }
    assert_eq!(sum, 0);
    let read = peak() - before;
    assert!(read < size + size / 5, "reading every byte took {read} of {size} bytes");
    assert!(read > size / 2, "the measurement sees mapped pages: {read}");
}
