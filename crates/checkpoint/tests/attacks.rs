//! A file for every way in which a header can lie, and the message that each must give.
//!
//! The files lie in `tests/attacks`, each beside its message. They are made here, from the table, so that each
//! byte has a reason; `UPDATE_ATTACKS=1 cargo test --test attacks` writes them anew.

use std::path::{Path, PathBuf};

use dualgemm_checkpoint::gguf::Gguf;
use dualgemm_checkpoint::safetensors::Header;

/// A safetensors file with that header, padded as writers pad it, and `data` bytes of data.
fn st(header: &str, data: usize) -> Vec<u8> {
    let padded = header.len().next_multiple_of(8);
    let mut out = (padded as u64).to_le_bytes().to_vec();
    out.extend(format!("{header:padded$}").bytes());
    out.resize(out.len() + data, 0);
    out
}

/// The same with another length in front.
fn st_len(len: u64, rest: &[u8]) -> Vec<u8> {
    [&len.to_le_bytes()[..], rest].concat()
}

/// A GGUF file in the making: numbers little-endian, strings with their length.
struct G(Vec<u8>);

impl G {
    fn new(version: u32, tensors: u64, entries: u64) -> Self {
        G(b"GGUF".to_vec()).u32(version).u64(tensors).u64(entries)
    }
    fn u32(mut self, x: u32) -> Self {
        self.0.extend(x.to_le_bytes());
        self
    }
    fn u64(mut self, x: u64) -> Self {
        self.0.extend(x.to_le_bytes());
        self
    }
    fn byte(mut self, x: u8) -> Self {
        self.0.push(x);
        self
    }
    fn str(mut self, s: &str) -> Self {
        self = self.u64(s.len() as u64);
        self.0.extend(s.bytes());
        self
    }
    /// A tensor info of one-dimensional f32.
    fn info(self, name: &str, n: u64, offset: u64) -> Self {
        self.str(name).u32(1).u64(n).u32(0).u64(offset)
    }
    /// Pads to the alignment and appends data.
    fn data(mut self, len: usize) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(32) + len, 0);
        self.0
    }
}

type Attack = (&'static str, fn() -> Vec<u8>);

const SAFETENSORS: &[Attack] = &[
    ("empty", Vec::new),
    ("length-cut-off", || vec![2, 0, 0]),
    ("length-past-end", || st_len(1000, b"{}")),
    ("length-huge", || st_len(u64::MAX, b"{}")),
    ("length-zero", || st_len(0, b"")),
    ("not-json", || st("hello, world", 0)),
    ("not-utf8", || st_len(8, b"{\"\xff\xfe\":0}")),
    ("not-utf8-in-a-skipped-value", || {
        let text = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":"?"}}"#;
        let mut out = st(text, 4);
        out[8 + text.len() - 4] = 0xFF;
        out
    }),
    ("array", || st("[]", 0)),
    ("trailing-garbage-in-header", || st("{} x", 0)),
    ("nested-too-deep", || st(&format!("{{\"a\":{{\"x\":{}{}}}}}", "[".repeat(200), "]".repeat(200)), 0)),
    ("name-twice", || {
        st(
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#,
            8,
        )
    }),
    ("name-twice-by-escape", || {
        st(
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"\u0061":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#,
            8,
        )
    }),
    ("metadata-twice", || st(r#"{"__metadata__":{},"__metadata__":{}}"#, 0)),
    ("metadata-not-strings", || st(r#"{"__metadata__":{"a":1}}"#, 0)),
    ("field-missing", || st(r#"{"a":{"dtype":"U8","shape":[4]}}"#, 4)),
    ("field-twice", || st(r#"{"a":{"dtype":"U8","dtype":"F32","shape":[4],"data_offsets":[0,4]}}"#, 4)),
    ("dtype-unknown", || st(r#"{"a":{"dtype":"F2","shape":[4],"data_offsets":[0,1]}}"#, 1)),
    ("shape-negative", || st(r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#, 1)),
    ("shape-fraction", || st(r#"{"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}}"#, 1)),
    ("shape-overflows", || {
        st(r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#, 0)
    }),
    ("shape-overflows-to-zero-bytes", || {
        st(r#"{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}}"#, 0)
    }),
    ("f4-half-a-byte", || st(r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#, 2)),
    ("offsets-reversed", || st(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#, 4)),
    ("offsets-past-end", || st(r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#, 4)),
    ("offsets-huge", || {
        st(
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}}"#,
            4,
        )
    }),
    ("size-is-not-the-shape-s", || st(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}"#, 8)),
    ("overlap", || {
        st(
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
            6,
        )
    }),
    ("same-bytes-twice", || {
        st(
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            4,
        )
    }),
    ("hole", || {
        st(
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}}"#,
            12,
        )
    }),
    ("hole-at-start", || st(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#, 8)),
    ("data-left-over", || st(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 12)),
    ("data-without-tensors", || st("{}", 16)),
];

const GGUF: &[Attack] = &[
    ("empty", Vec::new),
    ("magic", || b"GGML\x03\0\0\0".to_vec()),
    ("version-1", || G::new(1, 0, 0).0),
    ("version-99", || G::new(99, 0, 0).0),
    ("big-endian", || G::new(3u32.swap_bytes(), 0, 0).0),
    ("cut-off-after-version", || b"GGUF\x03\0\0\0".to_vec()),
    ("tensor-count-huge", || G::new(3, u64::MAX, 0).0),
    ("metadata-count-huge", || G::new(3, 0, u64::MAX).0),
    ("key-longer-than-file", || G::new(3, 0, 1).u64(1 << 40).u64(0).0),
    ("key-not-utf8", || G::new(3, 0, 1).u64(1).byte(0xFF).u32(0).byte(0).0),
    ("key-twice", || G::new(3, 0, 2).str("a").u32(0).byte(1).str("a").u32(0).byte(2).0),
    ("value-type-unknown", || G::new(3, 0, 1).str("a").u32(13).u64(0).0),
    ("value-cut-off", || G::new(3, 0, 1).str("a").u32(10).u32(0).0),
    ("bool-is-2", || G::new(3, 0, 1).str("a").u32(7).byte(2).0),
    ("array-longer-than-file", || G::new(3, 0, 1).str("a").u32(9).u32(10).u64(u64::MAX / 8).0),
    ("array-type-unknown", || G::new(3, 0, 1).str("a").u32(9).u32(77).u64(0).0),
    ("array-string-not-utf8", || G::new(3, 0, 1).str("a").u32(9).u32(8).u64(1).u64(1).byte(0xC0).0),
    ("arrays-too-deep", || {
        (0..5).fold(G::new(3, 0, 1).str("a").u32(9), |g, _| g.u32(9).u64(1)).u32(0).u64(0).0
    }),
    ("alignment-0", || G::new(3, 0, 1).str("general.alignment").u32(4).u32(0).0),
    ("alignment-not-a-power-of-two", || G::new(3, 0, 1).str("general.alignment").u32(4).u32(24).0),
    ("alignment-is-text", || G::new(3, 0, 1).str("general.alignment").u32(8).str("32").0),
    ("five-dimensions", || {
        G::new(3, 1, 0).str("a").u32(5).u64(1).u64(1).u64(1).u64(1).u64(1).u32(0).u64(0).0
    }),
    ("dimensions-overflow", || {
        G::new(3, 1, 0).str("a").u32(2).u64(1 << 40).u64(1 << 40).u32(0).u64(0).data(0)
    }),
    ("tensor-type-unknown", || G::new(3, 1, 0).str("a").u32(1).u64(4).u32(41).u64(0).data(16)),
    ("tensor-type-removed", || G::new(3, 1, 0).str("a").u32(1).u64(32).u32(4).u64(0).data(32)),
    ("nvfp4-row-of-half-a-block", || G::new(3, 1, 0).str("a").u32(2).u64(32).u64(2).u32(40).u64(0).data(36)),
    ("tensor-name-twice", || G::new(3, 2, 0).info("a", 8, 0).info("a", 8, 32).data(64)),
    ("offset-past-end", || G::new(3, 1, 0).info("a", 8, 1 << 40).data(32)),
    ("offset-not-aligned", || G::new(3, 2, 0).info("a", 8, 0).info("b", 8, 36).data(96)),
    ("offsets-overlap", || G::new(3, 2, 0).info("a", 16, 0).info("b", 8, 32).data(96)),
    ("data-cut-off", || G::new(3, 1, 0).info("a", 1024, 0).data(100)),
    ("data-left-over", || G::new(3, 1, 0).info("a", 8, 0).data(96)),
    ("info-cut-off", || G::new(3, 1, 0).str("a").u32(4).u64(1).u64(1).0),
];

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/attacks")
}

fn check(kind: &str, attacks: &[Attack], parse: fn(&[u8], &Path) -> Option<String>) {
    let update = std::env::var_os("UPDATE_ATTACKS").is_some();
    for (name, make) in attacks {
        let (file, bytes) = (format!("{name}.{kind}"), make());
        let message = parse(&bytes, Path::new(&file)).unwrap_or_else(|| panic!("{file} was accepted"));
        let (path, text_path) = (dir().join(&file), dir().join(format!("{file}.message")));
        if update {
            std::fs::write(&path, &bytes).unwrap();
            std::fs::write(&text_path, format!("{message}\n")).unwrap();
        }
        let stored = std::fs::read(&path).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(stored == bytes, "{file} is not what the table makes");
        assert_eq!(std::fs::read_to_string(&text_path).unwrap(), format!("{message}\n"), "{file}");
    }
    let suffix = format!(".{kind}");
    let names = std::fs::read_dir(dir()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let count = names.filter(|n| n.ends_with(&suffix)).count();
    assert_eq!(count, attacks.len(), "files and table");
}

#[test]
fn every_lying_safetensors_header_is_refused_with_its_message() {
    check("safetensors", SAFETENSORS, |bytes, file| Header::parse(bytes, file).err().map(|e| e.to_string()));
}

#[test]
fn every_lying_gguf_header_is_refused_with_its_message() {
    check("gguf", GGUF, |bytes, file| Gguf::parse(bytes, file).err().map(|e| e.to_string()));
}

#[test]
fn the_safetensors_crate_accepts_no_file_that_is_refused_here_for_its_format() {
    for (name, make) in SAFETENSORS {
        // Its reader keeps the last of two equal names; that they are refused here is the point.
        let theirs_differ = ["name-twice", "name-twice-by-escape", "metadata-twice", "data-without-tensors"];
        let accepted = safetensors::SafeTensors::deserialize(&make()).is_ok();
        assert!(!accepted || theirs_differ.contains(name), "{name}");
    }
}

#[test]
fn a_header_over_100_megabytes_is_not_read() {
    let mut bytes = vec![b' '; 8 + 100_000_001];
    bytes[..8].copy_from_slice(&100_000_001u64.to_le_bytes());
    let e = Header::parse(&bytes, Path::new("x")).unwrap_err().to_string();
    assert!(e.contains("rule `header-length`: found a length of 100000001; valid is 2 to 100000000"), "{e}");
}
