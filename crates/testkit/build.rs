//! Lists the conformance files, so that the binary that runs them needs nothing beside itself.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("ptx");
    println!("cargo::rerun-if-changed={}", root.display());
    let mut list = String::from("[");
    for family in sorted(&root)? {
        println!("cargo::rerun-if-changed={}", root.join(&family).display());
        for file in sorted(&root.join(&family))? {
            let path = root.join(&family).join(&file);
            // Debug formatting escapes the path as a string literal.
            let _ = write!(list, "({:?}, include_str!({path:?})),", format!("{family}/{file}"));
        }
    }
    list.push(']');
    fs::write(Path::new(&env::var("OUT_DIR").unwrap_or_default()).join("files.rs"), list)
}

fn sorted(folder: &Path) -> io::Result<Vec<String>> {
    let mut names: Vec<String> = fs::read_dir(folder)?
        .map(|entry| entry.map(|e| e.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<_>>()?;
    names.sort();
    Ok(names)
}
