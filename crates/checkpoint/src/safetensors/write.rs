//! The safetensors writer: byte for byte what the reference implementation writes.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde::Serialize;

use crate::write::atomic::AtomicFile;
use crate::{Error, TensorOut};

/// What errors call a file in memory.
const IN_MEMORY: &str = "(memory)";

#[derive(Serialize)]
struct Entry<'a> {
    dtype: &'static str,
    shape: &'a [usize],
    data_offsets: (usize, usize),
}

/// Header bytes, length prefix included, and the order in which the data follows.
fn plan<'t, 'a>(
    tensors: &'t [TensorOut<'a>],
    metadata: &BTreeMap<String, String>,
    file: &Path,
) -> Result<(Vec<u8>, Vec<&'t TensorOut<'a>>), Error> {
    let mut order: Vec<&TensorOut<'_>> = tensors.iter().collect();
    // Widest types first keeps every tensor aligned.
    order.sort_by(|a, b| b.dtype.rank().cmp(&a.dtype.rank()).then_with(|| a.name.cmp(&b.name)));
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        header.insert("__metadata__".into(), serde_json::json!(metadata));
    }
    let mut offset = 0;
    for t in &order {
        let elements = t.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let len = elements.and_then(|n| t.dtype.byte_len(n));
        let storable = t.dtype.rank() != usize::MAX && len == Some(t.byte_len());
        let entry =
            Entry { dtype: t.dtype.name(), shape: &t.shape, data_offsets: (offset, offset + t.byte_len()) };
        if !storable || header.insert(t.name.clone(), serde_json::json!(entry)).is_some() {
            return Err(Error::header(
                file,
                "writable",
                format!("tensor `{}`, {} {:?} in {} bytes", t.name, t.dtype, t.shape, t.byte_len()),
                "a safetensors type, a fitting size and a name used once",
            ));
        }
        offset += t.byte_len();
    }
    let mut json = serde_json::Value::Object(header).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok((bytes, order))
}

/// A whole file in memory.
///
/// # Errors
/// If a tensor's bytes do not fit its shape, its type is not a safetensors type, or a name occurs twice.
pub fn serialize(tensors: &[TensorOut<'_>], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>, Error> {
    let (mut bytes, order) = plan(tensors, metadata, Path::new(IN_MEMORY))?;
    for t in order {
        t.write_data(Path::new(IN_MEMORY), &mut bytes)?;
    }
    Ok(bytes)
}

/// Writes a file under a temporary name, syncs it and renames it into place.
///
/// # Errors
/// As [`serialize`], or if the system refuses; nothing is left behind then.
pub fn write_to(
    path: &Path,
    tensors: &[TensorOut<'_>],
    metadata: &BTreeMap<String, String>,
) -> Result<(), Error> {
    let (header, order) = plan(tensors, metadata, path)?;
    let mut file = AtomicFile::create(path)?;
    file.write_all(&header).map_err(|e| Error::io(path, "write", e))?;
    for t in order {
        t.write_data(path, &mut file)?;
    }
    file.commit()
}
