//! Any bytes as a safetensors file: the reader returns, and what it accepts is true. Seeds: the attack corpus.

#![no_main]

use std::path::Path;

use dualgemm_checkpoint::safetensors::Header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = Header::parse(bytes, Path::new("fuzz")) else { return };
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let data: usize = header.tensors.iter().map(|t| t.range.len()).sum();
    assert_eq!(8 + header_len + data, bytes.len(), "every data byte belongs to one tensor");
    for t in &header.tensors {
        assert_eq!(t.dtype.byte_len(t.shape.iter().product()), Some(t.range.len()));
        assert!(bytes.get(t.range.clone()).is_some());
    }
});
