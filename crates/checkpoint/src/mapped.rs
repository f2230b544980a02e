//! A file mapped read-only into memory: opening one reads nothing, pages come in as they are touched.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::Error;

/// A mapped file. An empty file has no mapping and reads as no bytes.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Option<Mmap>,
}

impl MappedFile {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let io = |action, e| Error::io(path, action, e);
        // Opening a pipe would wait for somebody to write to it.
        if !std::fs::metadata(path).map_err(|e| io("open", e))?.is_file() {
            return Err(Error::Path {
                file: path.into(),
                found: "is not a regular file".into(),
                valid: "only regular files can be mapped",
            });
        }
        let file = File::open(path).map_err(|e| io("open", e))?;
        let meta = file.metadata().map_err(|e| io("read the size", e))?;
        // Another process truncating the file in place would raise SIGBUS, as for every mapped file.
        let map = (meta.len() > 0).then(|| {
            // SAFETY: the mapping is read-only and private to this value. Nothing in this program writes the
            // file: outputs are written under a temporary name and renamed, which leaves mapped files untouched.
            unsafe { Mmap::map(&file) }
        });
        let map = map.transpose().map_err(|e| io("map", e))?;
        if map.as_ref().is_some_and(|map| map.starts_with(b"version https://git-lfs")) {
            return Err(Error::Path {
                file: path.into(),
                found: "is a pointer of Git LFS, not the file itself".into(),
                valid: "`git lfs pull` downloads the file",
            });
        }
        Ok(Self { path: path.into(), map })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Lets go of the pages of some bytes; the next access reads them again.
    pub(crate) fn release_pages(&self, bytes: Range<usize>) {
        #[cfg(unix)]
        if let Some(map) = &self.map {
            let dont_need = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: pages of a read-only mapping are never dirty, so what is read again is what was there. A
            // refusal changes nothing.
            let _ = unsafe { map.unchecked_advise_range(dont_need, bytes.start, bytes.len()) };
        }
        #[cfg(not(unix))]
        let _ = bytes;
    }
}
