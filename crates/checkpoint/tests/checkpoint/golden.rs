//! Bytes of written files, and agreement with the reference implementation.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use crate::common::Bytes;
use dualgemm_checkpoint::gguf::{Gguf, GgufValue, write_to};
use dualgemm_checkpoint::safetensors::{Header, serialize};
use dualgemm_checkpoint::{Dtype, TensorOut};
use proptest::prelude::*;

#[test]
fn safetensors_header_bytes_exact() {
    let tensors = [
        TensorOut::new("b.weight", Dtype::U8, [2, 3], vec![1, 2, 3, 4, 5, 6]),
        TensorOut::scalar("a.weight_scale_2", &[], 0.5),
        TensorOut::new("b.weight_scale", Dtype::F8E4m3, [2, 1], vec![0x38, 0x40]),
    ];
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let bytes = serialize(&tensors, &metadata).unwrap();
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"#,
        r#""a.weight_scale_2":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"#,
        r#""b.weight_scale":{"dtype":"F8_E4M3","shape":[2,1],"data_offsets":[4,6]},"#,
        r#""b.weight":{"dtype":"U8","shape":[2,3],"data_offsets":[6,12]}}"#,
    );
    let padded = header.len().next_multiple_of(8);
    let mut expected = (padded as u64).to_le_bytes().to_vec();
    expected.extend(format!("{header:padded$}").bytes());
    expected.extend([0, 0, 0, 0x3F, 0x38, 0x40, 1, 2, 3, 4, 5, 6]);
    assert_eq!(bytes, expected);
}

#[test]
fn gguf_bytes_exact() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let metadata = [
        ("general.architecture".to_string(), GgufValue::String("llama".into())),
        ("n".to_string(), GgufValue::U32(7)),
    ];
    let nvfp4 = Dtype::from_ggml(40).unwrap();
    let tensors = [
        TensorOut::scalar("s", &[1], 2.0),
        TensorOut::new("w", nvfp4, [1, 64], (0..36).collect::<Vec<u8>>()),
    ];
    write_to(&path, &metadata, &tensors).unwrap();
    let mut e = b"GGUF\x03\0\0\0".to_vec();
    let u64 = |e: &mut Vec<u8>, x: u64| e.extend(x.to_le_bytes());
    let u32 = |e: &mut Vec<u8>, x: u32| e.extend(x.to_le_bytes());
    let text = |e: &mut Vec<u8>, s: &str| {
        e.extend((s.len() as u64).to_le_bytes());
        e.extend(s.bytes());
    };
    u64(&mut e, 2);
    u64(&mut e, 2);
    text(&mut e, "general.architecture");
    u32(&mut e, 8);
    text(&mut e, "llama");
    text(&mut e, "n");
    u32(&mut e, 4);
    u32(&mut e, 7);
    text(&mut e, "s");
    u32(&mut e, 1);
    u64(&mut e, 1);
    u32(&mut e, 0);
    u64(&mut e, 0);
    text(&mut e, "w");
    u32(&mut e, 2);
    // Innermost dimension first.
    u64(&mut e, 64);
    u64(&mut e, 1);
    u32(&mut e, 40);
    u64(&mut e, 32);
    e.resize(e.len().next_multiple_of(32), 0);
    e.extend(2.0f32.to_le_bytes());
    e.resize(e.len() + 28, 0);
    e.extend(0..36u8);
    e.resize(e.len() + 28, 0);
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes, e);
    let read = Gguf::parse(&bytes, &path).unwrap();
    assert_eq!(read.metadata, metadata);
    assert_eq!(read.tensors[1].shape, [1, 64]);
    assert_eq!(&bytes[read.tensors[1].range.clone()], &(0..36).collect::<Vec<u8>>()[..]);
}

#[test]
fn every_gguf_value_type_round_trips() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let strings: Vec<u8> = [3u64.to_le_bytes().as_slice(), b"abc", &0u64.to_le_bytes()].concat();
    let inner: Vec<u8> = [&4u32.to_le_bytes()[..], &1u64.to_le_bytes(), &9u32.to_le_bytes()].concat();
    let metadata: Vec<(String, GgufValue)> = [
        GgufValue::U8(200),
        GgufValue::I8(-5),
        GgufValue::U16(60000),
        GgufValue::I16(-300),
        GgufValue::U32(1 << 31),
        GgufValue::I32(-7),
        GgufValue::F32(0.25),
        GgufValue::Bool(true),
        GgufValue::String("κ".into()),
        GgufValue::Array { element: 5, len: 2, bytes: vec![1, 0, 0, 0, 2, 0, 0, 0] },
        GgufValue::Array { element: 8, len: 2, bytes: strings },
        GgufValue::Array { element: 9, len: 1, bytes: inner },
        GgufValue::Array { element: 7, len: 0, bytes: vec![] },
        GgufValue::U64(u64::MAX),
        GgufValue::I64(i64::MIN),
        GgufValue::F64(-1.5),
    ]
    .into_iter()
    .enumerate()
    .map(|(i, v)| (format!("k{i}"), v))
    .collect();
    write_to(&path, &metadata, &[]).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    assert_eq!(Gguf::parse(&bytes, &path).unwrap().metadata, metadata);
    // Version 2 differs in its number only.
    bytes[4] = 2;
    let v2 = Gguf::parse(&bytes, &path).unwrap();
    assert_eq!((v2.version, v2.metadata), (2, metadata));
}

#[test]
fn gguf_alignment_of_the_file_is_kept_to() {
    let mut b = b"GGUF\x03\0\0\0".to_vec();
    b.extend(2u64.to_le_bytes());
    b.extend(1u64.to_le_bytes());
    b.extend(17u64.to_le_bytes());
    b.extend(b"general.alignment");
    b.extend(4u32.to_le_bytes());
    b.extend(64u32.to_le_bytes());
    for (name, offset) in [(b"a", 0u64), (b"b", 64)] {
        b.extend(1u64.to_le_bytes());
        b.extend(name);
        b.extend(1u32.to_le_bytes());
        b.extend(2u64.to_le_bytes());
        b.extend(0u32.to_le_bytes());
        b.extend(offset.to_le_bytes());
    }
    b.resize(b.len().next_multiple_of(64) + 64 + 8, 0);
    let g = Gguf::parse(&b, Path::new("m.gguf")).unwrap();
    assert_eq!(g.tensors[1].range.start % 64, 0);
    assert_eq!(g.tensors[1].range.end, b.len(), "the last tensor need not be padded");
}

fn dtype() -> impl Strategy<Value = Dtype> {
    (0..Dtype::SAFETENSORS.len()).prop_map(|i| Dtype::SAFETENSORS[i])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn written_files_are_the_reference_implementation_s_exact(
        specs in proptest::collection::btree_map("[a-z.]{1,12}", (dtype(), proptest::collection::vec(0usize..5, 0..4)), 0..8),
        seed: u64,
    ) {
        let mut random = Bytes::new(seed);
        let (tensors, bytes): (Vec<TensorOut<'_>>, Vec<Vec<u8>>) = specs
            .into_iter()
            .map(|(name, (dtype, mut shape))| {
                shape.push(4); // whole bytes for the 4- and 6-bit types
                let len = dtype.byte_len(shape.iter().product()).unwrap();
                let bytes = random.codes(len);
                (TensorOut::new(name, dtype, shape, bytes.clone()), bytes)
            })
            .unzip();
        let ours = serialize(&tensors, &BTreeMap::new()).unwrap();
        let views: Vec<(String, safetensors::tensor::TensorView<'_>)> = tensors
            .iter()
            .zip(&bytes)
            .map(|(t, bytes)| {
                let dtype: safetensors::Dtype = serde_json::from_value(t.dtype.name().into()).unwrap();
                (t.name.clone(), safetensors::tensor::TensorView::new(dtype, t.shape.clone(), bytes).unwrap())
            })
            .collect();
        let theirs = safetensors::serialize(views, None::<HashMap<String, String>>).unwrap();
        prop_assert_eq!(&ours, &theirs);

        let header = Header::parse(&ours, Path::new("m.safetensors")).unwrap();
        prop_assert_eq!(header.tensors.len(), tensors.len());
        for (t, bytes) in tensors.iter().zip(&bytes) {
            let found = header.tensors.iter().find(|x| x.name == t.name).unwrap();
            prop_assert_eq!((found.dtype, &found.shape), (t.dtype, &t.shape));
            prop_assert_eq!(&ours[found.range.clone()], &bytes[..]);
        }
    }
}
