//! Any bytes as a GGUF file: the reader returns, and what it accepts is true. Seeds: the attack corpus.

#![no_main]

use std::path::Path;

use dualgemm_checkpoint::gguf::Gguf;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::parse(bytes, Path::new("fuzz")) else { return };
    let mut end = 0;
    for t in &gguf.tensors {
        assert_eq!(t.dtype.byte_len(t.shape.iter().product()), Some(t.range.len()));
        assert!(t.range.start >= end && bytes.get(t.range.clone()).is_some(), "apart and inside");
        end = t.range.end;
    }
});
