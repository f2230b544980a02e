//! The GGUF writer, version 3.

use std::io::Write;
use std::path::Path;

use super::value::write_string;
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, GgufValue, MAGIC};
use crate::write::atomic::AtomicFile;
use crate::{Error, TensorOut};

/// Writes a file under a temporary name, syncs it and renames it into place. Tensors keep their order;
/// `general.alignment` is left out, so that the default of 32 holds.
///
/// # Errors
/// If a tensor's type does not exist in GGUF, its bytes do not fit its shape, or the system refuses; nothing
/// is left behind then.
pub fn write_to(
    path: &Path,
    metadata: &[(String, GgufValue)],
    tensors: &[TensorOut<'_>],
) -> Result<(), Error> {
    let metadata: Vec<_> = metadata.iter().filter(|(key, _)| key != ALIGNMENT_KEY).collect();
    let mut header = MAGIC.to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        write_string(key, &mut header);
        header.extend(value.kind().to_le_bytes());
        value.write(&mut header);
    }
    let mut offset = 0usize;
    for t in tensors {
        let elements = t.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let fits = elements.and_then(|n| t.dtype.byte_len(n)) == Some(t.byte_len());
        let Some(id) = t.dtype.ggml_id().filter(|_| fits && t.shape.len() <= 4) else {
            return Err(Error::header(
                path,
                "writable",
                format!("tensor `{}`, {} {:?} in {} bytes", t.name, t.dtype, t.shape, t.byte_len()),
                "a GGUF type, at most 4 dimensions and a fitting size",
            ));
        };
        write_string(&t.name, &mut header);
        header.extend((t.shape.len() as u32).to_le_bytes());
        for &d in t.shape.iter().rev() {
            header.extend((d as u64).to_le_bytes());
        }
        header.extend(id.to_le_bytes());
        header.extend((offset as u64).to_le_bytes());
        offset = (offset + t.byte_len()).next_multiple_of(DEFAULT_ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(DEFAULT_ALIGNMENT), 0);

    let io = |e| Error::io(path, "write", e);
    let mut file = AtomicFile::create(path)?;
    file.write_all(&header).map_err(io)?;
    for t in tensors {
        t.write_data(path, &mut file)?;
        let padding = t.byte_len().next_multiple_of(DEFAULT_ALIGNMENT) - t.byte_len();
        file.write_all(&[0; DEFAULT_ALIGNMENT][..padding]).map_err(io)?;
    }
    file.commit()
}
