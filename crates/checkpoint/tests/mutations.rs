//! A bounded fuzz run without a fuzzer: seeded mutations of the attack corpus and of healthy files. Readers must
//! return; they must not panic, hang or allocate without bound. What they accept must tell the truth. Then the
//! same with whole checkpoints, through everything that takes a matrix from one.
//!
//! The same two readers are libFuzzer targets in `fuzz/`, guided by coverage: `.ci/fuzz`.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::Bytes;
use dualgemm_checkpoint::gguf::Gguf;
use dualgemm_checkpoint::safetensors::Header;
use dualgemm_checkpoint::write::{Model, Output, write};
use dualgemm_checkpoint::{Checkpoint, MlpKind, OpenOptions, Which};

const BUDGET: Duration = Duration::from_secs(2);
/// Enough for every kind of mutation to meet every file, also on a slow machine.
const LEAST: usize = 20_000;

fn corpus(kind: &str, healthy: Vec<u8>) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/attacks");
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let mut out: Vec<Vec<u8>> = files
        .iter()
        .filter(|p| p.extension().is_some_and(|e| e == kind))
        .map(|p| std::fs::read(p).unwrap())
        .collect();
    assert!(out.len() > 20, "the corpus of {kind}");
    out.push(healthy);
    out
}

fn mutate(bytes: &mut Vec<u8>, other: &[u8], r: &mut Bytes) {
    let at = |len: usize, r: &mut Bytes| (r.next() >> 16) as usize % len.max(1);
    for _ in 0..1 + r.next() % 4 {
        let len = bytes.len();
        match (r.next() >> 8) % 7 {
            0 if len > 0 => bytes[at(len, r)] ^= 1 << (r.next() % 8),
            1 if len > 0 => bytes[at(len, r)] = [0, 1, 0x7F, 0x80, 0xFF, b'"', b'{', b'9'][at(8, r)],
            2 => bytes.truncate(at(len + 1, r)),
            3 => {
                let (i, n) = (at(len + 1, r), at(9, r));
                bytes.splice(i..i, std::iter::repeat_n((r.next() >> 8) as u8, n));
            }
            4 if len > 8 => {
                // A length or offset becomes an extreme one.
                let i = at(len - 8, r);
                let x = [0, 1, u64::MAX, u64::MAX / 2, 1 << 32, len as u64, 1 << 62][at(7, r)];
                bytes[i..i + 8].copy_from_slice(&x.to_le_bytes());
            }
            5 if len > 0 && !other.is_empty() => {
                let (i, j) = (at(len, r), at(other.len(), r));
                let n = at(32, r).min(len - i).min(other.len() - j);
                bytes[i..i + n].copy_from_slice(&other[j..j + n]);
            }
            6 if len > 0 => {
                let i = at(len, r);
                let n = at(16, r).min(len - i);
                bytes.drain(i..i + n);
            }
            _ => bytes.push(r.next() as u8),
        }
    }
}

/// Runs `check` on at least that many mutated files; it says whether one was accepted.
fn run(corpus: &[Vec<u8>], seed: u64, least: usize, check: impl Fn(&[u8]) -> bool) -> usize {
    let mut r = Bytes::new(seed);
    let (start, mut done, mut accepted) = (Instant::now(), 0, 0);
    while done < least || start.elapsed() < BUDGET {
        let pick = |r: &mut Bytes| (r.next() >> 16) as usize % corpus.len();
        // Half of the runs start from the healthy file, whose mutants get deepest.
        let i = if r.next() >> 63 == 0 { corpus.len() - 1 } else { pick(&mut r) };
        let mut bytes = corpus[i].clone();
        let other = &corpus[pick(&mut r)];
        mutate(&mut bytes, other, &mut r);
        accepted += usize::from(check(&bytes));
        done += 1;
    }
    accepted
}

#[test]
fn mutated_safetensors_headers_are_refused_or_true() {
    let mut random = Bytes::new(1);
    let tensors: Vec<_> = ["a.weight", "a.weight_scale", "b"]
        .into_iter()
        .map(|n| {
            dualgemm_checkpoint::TensorOut::new(n, dualgemm_checkpoint::Dtype::U8, [4, 8], random.codes(32))
        })
        .collect();
    let healthy = dualgemm_checkpoint::safetensors::serialize(&tensors, &Default::default()).unwrap();
    let accepted = run(&corpus("safetensors", healthy), 7, LEAST, |bytes| {
        let Ok(header) = Header::parse(bytes, Path::new("x")) else { return false };
        let total: usize = header.tensors.iter().map(|t| t.range.len()).sum();
        let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(total + 8 + header_len, bytes.len(), "every data byte belongs to one tensor");
        for t in &header.tensors {
            assert_eq!(t.dtype.byte_len(t.shape.iter().product()), Some(t.range.len()));
        }
        // What is accepted here, the reference implementation accepts.
        if !header.tensors.is_empty() {
            safetensors::SafeTensors::deserialize(bytes).unwrap();
        }
        true
    });
    assert!(accepted > 0, "some mutants, of data bytes, stay healthy");
}

#[test]
fn mutated_gguf_headers_are_refused_or_true() {
    let healthy = std::fs::read(common::testdata("mlp-nvfp4.gguf")).unwrap();
    // The header and nothing but enough data would not parse; take a small file of the same shape.
    let gguf = Gguf::parse(&healthy, Path::new("x")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let tensors: Vec<_> = gguf
        .tensors
        .iter()
        .map(|t| {
            let len = t.dtype.byte_len(64).unwrap();
            dualgemm_checkpoint::TensorOut::new(t.name.clone(), t.dtype, [1, 64], healthy[..len].to_vec())
        })
        .collect();
    dualgemm_checkpoint::gguf::write_to(&path, &gguf.metadata, &tensors).unwrap();
    let accepted = run(&corpus("gguf", std::fs::read(&path).unwrap()), 8, LEAST, |bytes| {
        let Ok(gguf) = Gguf::parse(bytes, Path::new("x")) else { return false };
        let mut end = 0;
        for t in &gguf.tensors {
            assert_eq!(t.dtype.byte_len(t.shape.iter().product()), Some(t.range.len()));
            assert!(t.range.start >= end && t.range.end <= bytes.len(), "apart and inside");
            end = t.range.end;
        }
        true
    });
    assert!(accepted > 0, "some mutants, of data bytes, stay healthy");
}

/// A model with a dense layer, experts and biases, in one file.
fn small_model() -> Model<'static> {
    let mut model = Model::default();
    let mut add = |module: String, seed, rows| {
        let weight = common::Weight::new(seed, rows, 64).matrix(&module, 0.001);
        model.linears.push(dualgemm_checkpoint::write::LinearOut {
            module,
            weight: weight.into(),
            input_scale: Some(dualgemm_formats::GlobalScale::multiplier(0.5)),
            experts: None,
            bias: Some(vec![1.0; rows]),
        });
    };
    for (i, p) in ["gate_proj", "up_proj", "down_proj"].iter().enumerate() {
        add(format!("model.layers.0.mlp.{p}"), i as u64, 2);
        add(format!("model.layers.1.mlp.experts.0.{p}"), 10 + i as u64, 2);
        add(format!("model.layers.1.mlp.experts.1.{p}"), 20 + i as u64, 2);
    }
    model
}

#[test]
fn mutated_checkpoints_give_matrices_or_errors() {
    for (output, ending) in [
        (Output::Modelopt, "safetensors"),
        (Output::CompressedTensors, "safetensors"),
        (Output::Gguf, "gguf"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("m.{ending}"));
        let mlp_only = output == Output::Gguf;
        write(&path, output, &Model { mlp_only, ..small_model() }).unwrap();
        let mut healthy = vec![std::fs::read(&path).unwrap()];
        // Also with dimensions swapped about: experts in one tensor, a zero dimension, other ranks.
        for (from, to) in
            [("[2,32]", "[0,32]"), ("[2,32]", "[64,]"), ("[2,32]", "[2,1,32]"), ("[2,4]", "[8]")]
        {
            let text = healthy[0].clone();
            let mut at = 0;
            let mut out = text.clone();
            while let Some(i) = out[at..].windows(from.len()).position(|w| w == from.as_bytes()) {
                let to = format!("{to:<width$}", width = from.len());
                out.splice(at + i..at + i + from.len(), to.bytes());
                at += i + to.len();
            }
            let header = u64::from_le_bytes(text[..8].try_into().unwrap());
            let longer = out.len() - text.len();
            if longer > 0 && ending == "safetensors" {
                out[..8].copy_from_slice(&(header + longer as u64).to_le_bytes());
            }
            healthy.push(out);
        }
        let defaults = OpenOptions::default();
        let options = OpenOptions { gate_up_order: Some("gate-up".parse().unwrap()), ..defaults.clone() };
        let accepted = run(&healthy, 9, 1_000, |bytes| {
            std::fs::write(&path, bytes).unwrap();
            // An order is refused where gate and up are two tensors.
            let opened = Checkpoint::open(&path, &options).or_else(|_| Checkpoint::open(&path, &defaults));
            let Ok(c) = opened else { return false };
            let findings = c.validate();
            for mlp in c.mlps() {
                // A file may hold gate and up alone: a missing down projection is no finding.
                let which = match mlp.kind {
                    MlpKind::Dense => Ok(vec![Which::Dense]),
                    MlpKind::Shared => Ok(vec![Which::Shared]),
                    MlpKind::Experts => {
                        c.experts(mlp.layer).map(|ids| ids.into_iter().map(Which::Expert).collect())
                    }
                };
                let reads = |&which: &Which| {
                    let _down = c.down_source(mlp.layer, which).and_then(|down| down.read());
                    c.gate_up_source(mlp.layer, which).and_then(|source| source.read()).is_ok()
                };
                let read = which.is_ok_and(|which| which.iter().all(reads));
                assert!(
                    read || !findings.is_empty(),
                    "{mlp:?} cannot be read and is no finding: {:?}",
                    c.export(Output::Modelopt).err()
                );
            }
            let export = c.export(Output::Modelopt);
            assert!(export.is_ok() || !findings.is_empty(), "{:?}", export.err());
            true
        });
        assert!(accepted > 0, "{}", output.name());
    }
}
