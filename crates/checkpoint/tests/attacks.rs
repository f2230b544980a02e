//! A file for every way in which a header can lie, and the message that each must give.
//!
//! The files lie in `tests/attacks`, each beside its message. They are made from the lines of `attacks.txt`, so that each
//! byte has a reason; `UPDATE_ATTACKS=1 cargo test --test attacks` writes them anew.

use std::path::{Path, PathBuf};

use dualgemm_checkpoint::gguf::Gguf;
use dualgemm_checkpoint::safetensors::Header;

/// The bytes of a text in which `\xNN` is a byte.
fn unescaped(text: &str) -> Vec<u8> {
    let mut parts = text.split("\\x");
    let mut out = parts.next().unwrap().as_bytes().to_vec();
    for part in parts {
        out.push(u8::from_str_radix(&part[..2], 16).unwrap());
        out.extend(part[2..].bytes());
    }
    out
}

fn made(of: &str) -> Vec<u8> {
    let mut out = Vec::new();
    if let Some((data, header)) = of.strip_prefix("header ").and_then(|of| of.split_once(' ')) {
        let mut header = unescaped(header);
        header.resize(header.len().next_multiple_of(8), b' ');
        out.extend((header.len() as u64).to_le_bytes());
        out.extend(header);
        out.resize(out.len() + data.parse::<usize>().unwrap(), 0);
        return out;
    }
    for word in of.split_whitespace() {
        let (kind, rest) = word.split_once(':').unwrap();
        let mut parts = rest.split(':');
        let mut number = || parts.next().unwrap().parse::<u64>().unwrap();
        match kind {
            "text" => out.extend(unescaped(rest)),
            "byte" => out.push(number() as u8),
            "u32" => out.extend((number() as u32).to_le_bytes()),
            "u64" => out.extend(number().to_le_bytes()),
            "data" => out.resize(out.len().next_multiple_of(32) + number() as usize, 0),
            "str" => out.extend([&(rest.len() as u64).to_le_bytes()[..], rest.as_bytes()].concat()),
            "gguf" => {
                out.extend(made(&format!("text:GGUF u32:{} u64:{} u64:{}", number(), number(), number())))
            }
            "info" => {
                let (name, rest) = rest.split_once(':').unwrap();
                let (n, offset) = rest.split_once(':').unwrap();
                out.extend(made(&format!("str:{name} u32:1 u64:{n} u32:0 u64:{offset}")));
            }
            other => panic!("`{other}`"),
        }
    }
    out
}

/// Names of files of a format, and their bytes.
fn attacks(kind: &str) -> Vec<(&'static str, Vec<u8>)> {
    let lines = include_str!("attacks.txt").lines();
    let of_kind = lines.filter_map(|line| line.strip_prefix(kind)?.strip_prefix(' '));
    of_kind
        .map(|line| line.split_once(' ').unwrap_or((line, "")))
        .map(|(name, of)| (name, made(of)))
        .collect()
}

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/attacks")
}

fn check(kind: &str, parse: fn(&[u8], &Path) -> Option<String>) {
    let update = std::env::var_os("UPDATE_ATTACKS").is_some();
    let attacks = attacks(kind);
    for (name, bytes) in &attacks {
        let file = format!("{name}.{kind}");
        let message = parse(bytes, Path::new(&file)).unwrap_or_else(|| panic!("{file} was accepted"));
        let (path, text_path) = (dir().join(&file), dir().join(format!("{file}.message")));
        if update {
            std::fs::write(&path, bytes).unwrap();
            std::fs::write(&text_path, format!("{message}\n")).unwrap();
        }
        let stored = std::fs::read(&path).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(stored == *bytes, "{file} is not what the table makes");
        assert_eq!(std::fs::read_to_string(&text_path).unwrap(), format!("{message}\n"), "{file}");
    }
    let suffix = format!(".{kind}");
    let names = std::fs::read_dir(dir()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let count = names.filter(|n| n.ends_with(&suffix)).count();
    assert_eq!(count, attacks.len(), "files and table");
}

#[test]
fn every_lying_safetensors_header_is_refused_with_its_message() {
    check("safetensors", |bytes, file| Header::parse(bytes, file).err().map(|e| e.to_string()));
}

#[test]
fn every_lying_gguf_header_is_refused_with_its_message() {
    check("gguf", |bytes, file| Gguf::parse(bytes, file).err().map(|e| e.to_string()));
}

#[test]
fn the_safetensors_crate_accepts_no_file_that_is_refused_here_for_its_format() {
    for (name, bytes) in attacks("safetensors") {
        // Its reader keeps the last of two equal names; that they are refused here is the point.
        let theirs_differ = ["name-twice", "name-twice-by-escape", "metadata-twice", "data-without-tensors"];
        let accepted = safetensors::SafeTensors::deserialize(&bytes).is_ok();
        assert!(!accepted || theirs_differ.contains(&name), "{name}");
    }
}

#[test]
fn a_header_over_100_megabytes_is_not_read() {
    let mut bytes = vec![b' '; 8 + 100_000_001];
    bytes[..8].copy_from_slice(&100_000_001u64.to_le_bytes());
    let e = Header::parse(&bytes, Path::new("x")).unwrap_err().to_string();
    assert!(e.contains("rule `header-length`: found a length of 100000001; valid is 2 to 100000000"), "{e}");
}
