//! What lies beside the weights of a model: tokenizer, chat template, generation settings, code.

use std::path::{Path, PathBuf};

use super::atomic::AtomicFile;
use crate::{Error, TensorFiles};

/// Endings of files that hold weights, whole or in part, or say where they are.
#[rustfmt::skip]
const WEIGHTS: &[&str] = &[
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data",
    ".h5", ".msgpack", ".tflite",
];
/// What says how the weights that are read are quantized, or holds those weights' configuration.
const REPLACED: &[&str] = &["config.json", "hf_quant_config.json", "params.json", "recipe.yaml"];

/// Files to be copied: those of the directory that was opened, by name or by its shard index, but for weights and
/// configurations of weights. Nothing is known to belong to a file that stands alone.
///
/// # Errors
/// If the directory cannot be listed.
pub fn beside(files: &TensorFiles) -> Result<Vec<PathBuf>, Error> {
    let root = files.root();
    let name = |path: &Path| path.file_name().and_then(|n| n.to_str()).map(str::to_owned);
    let dir = match root.parent() {
        _ if root.is_dir() => root,
        Some(parent) if name(root).is_some_and(|n| n.ends_with(".index.json")) => {
            if parent.as_os_str().is_empty() { Path::new(".") } else { parent }
        }
        _ => return Ok(Vec::new()),
    };
    let io = |e| Error::io(dir, "list", e);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let Some(name) = name(&path) else { continue };
        let other = name.starts_with('.')
            || REPLACED.contains(&name.as_str())
            || WEIGHTS.iter().any(|ending| name.ends_with(ending));
        // Links are followed: caches of models hold nothing else.
        if !other && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Copies files into a directory that is being made, which `to` will be.
pub(super) fn copy(files: &[PathBuf], dir: &Path, to: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut copied = Vec::new();
    for from in files {
        let Some(name) = from.file_name() else { continue };
        let mut input = std::fs::File::open(from).map_err(|e| Error::io(from, "open", e))?;
        let mut out = AtomicFile::create(&dir.join(name))?;
        std::io::copy(&mut input, &mut out).map_err(|e| Error::io(from, "copy", e))?;
        out.commit()?;
        copied.push(to.join(name));
    }
    Ok(copied)
}
