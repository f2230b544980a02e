//! Files and directories that appear whole or not at all: temporary name, fsync, rename.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::{NamedTempFile, TempDir};

use crate::Error;

/// A file that appears under its name only on [`commit`](Self::commit); dropped before, it leaves nothing.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    out: BufWriter<NamedTempFile>,
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

fn sync_dir(dir: &Path) -> Result<(), Error> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io(dir, "sync", e))
}

impl AtomicFile {
    /// Opens a temporary file beside `path`, or beside what it links to.
    ///
    /// # Errors
    /// If the directory does not exist or cannot be written; if something is there that is no regular file, such as a
    /// directory or a device.
    pub fn create(path: &Path) -> Result<Self, Error> {
        let path = match std::fs::metadata(path) {
            Ok(there) if there.is_file() => path.canonicalize().map_err(|e| Error::io(path, "resolve", e))?,
            Ok(there) => {
                let found = if there.is_dir() { "is a directory" } else { "is no regular file" }.into();
                let valid = "names of regular files, and names that are not taken";
                return Err(Error::Path { file: path.into(), found, valid });
            }
            Err(_) => path.into(),
        };
        let file = tempfile::Builder::new()
            .prefix(".dualgemm-")
            .tempfile_in(parent(&path))
            .map_err(|e| Error::io(&path, "create a temporary file beside", e))?;
        Ok(Self { path, out: BufWriter::with_capacity(1 << 20, file) })
    }

    /// Syncs the data and renames it into place.
    ///
    /// # Errors
    /// If the system refuses; the temporary file is removed then.
    pub fn commit(self) -> Result<(), Error> {
        let Self { path, out } = self;
        let io = |action, e| Error::io(&path, action, e);
        let file = out.into_inner().map_err(|e| io("write", e.into_error()))?;
        let permissions = umask_permissions(file.as_file()).map_err(|e| io("set the mode of", e))?;
        file.as_file().set_permissions(permissions).map_err(|e| io("set the mode of", e))?;
        file.as_file().sync_all().map_err(|e| io("sync", e))?;
        file.persist(&path).map_err(|e| io("rename", e.error))?;
        sync_dir(parent(&path))
    }
}

/// Temporary files are private to their owner; results are as readable as any file: `rw-r--r--`.
fn umask_permissions(file: &File) -> io::Result<std::fs::Permissions> {
    let mut permissions = file.metadata()?.permissions();
    #[cfg(unix)]
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o644);
    #[cfg(not(unix))]
    permissions.set_readonly(false);
    Ok(permissions)
}

impl Write for AtomicFile {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.out.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A directory that appears under its name only on [`commit`](Self::commit).
#[derive(Debug)]
pub struct AtomicDir {
    path: PathBuf,
    temp: TempDir,
}

impl AtomicDir {
    /// Opens a temporary directory beside `path`.
    ///
    /// # Errors
    /// If `path` exists and is not an empty directory, or its parent cannot be written.
    pub fn create(path: &Path) -> Result<Self, Error> {
        let io = |action, e| Error::io(path, action, e);
        if path.exists() {
            let occupied = !path.is_dir() || path.read_dir().map_err(|e| io("list", e))?.next().is_some();
            if occupied {
                return Err(Error::Path {
                    file: path.into(),
                    found: "exists already".into(),
                    valid: "a new or empty directory",
                });
            }
        }
        let temp = tempfile::Builder::new()
            .prefix(".dualgemm-")
            .tempdir_in(parent(path))
            .map_err(|e| io("create a temporary directory beside", e))?;
        Ok(Self { path: path.into(), temp })
    }

    /// Where to write the files.
    pub fn dir(&self) -> &Path {
        self.temp.path()
    }

    /// Renames the directory into place.
    ///
    /// # Errors
    /// If the system refuses; the temporary directory is removed then.
    pub fn commit(self) -> Result<(), Error> {
        let Self { path, temp } = self;
        let io = |action, e| Error::io(&path, action, e);
        #[cfg(unix)]
        {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(temp.path(), mode).map_err(|e| io("set the mode of", e))?;
        }
        sync_dir(temp.path())?;
        if path.exists() {
            std::fs::remove_dir(&path).map_err(|e| io("replace", e))?;
        }
        std::fs::rename(temp.path(), &path).map_err(|e| io("rename", e))?;
        // The directory has moved; there is nothing left to remove.
        let _moved: PathBuf = temp.keep();
        sync_dir(parent(&path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_outputs_leave_nothing_and_keep_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.bin");
        std::fs::write(&path, b"old").unwrap();
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"half").unwrap();
        file.flush().unwrap();
        drop(file);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        let half = AtomicDir::create(&dir.path().join("model")).unwrap();
        std::fs::write(half.dir().join("config.json"), b"{}").unwrap();
        drop(half);
        assert_eq!(dir.path().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn only_regular_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let message = AtomicFile::create(dir.path()).unwrap_err().to_string();
        assert!(message.contains(": is a directory; valid are names of regular files"), "{message}");
        #[cfg(unix)]
        {
            let message = AtomicFile::create(Path::new("/dev/null")).unwrap_err().to_string();
            assert!(message.starts_with("/dev/null: is no regular file; "), "{message}");
            let (path, link) = (dir.path().join("out.bin"), dir.path().join("link"));
            std::fs::write(&path, b"old").unwrap();
            std::os::unix::fs::symlink(&path, &link).unwrap();
            let mut file = AtomicFile::create(&link).unwrap();
            file.write_all(b"new").unwrap();
            file.commit().unwrap();
            assert!(link.is_symlink());
            assert_eq!(std::fs::read(&path).unwrap(), b"new");
        }
    }

    #[test]
    fn committed_outputs_are_whole_and_occupied_directories_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.bin");
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"whole").unwrap();
        file.commit().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
        let model = dir.path().join("model");
        std::fs::create_dir(&model).unwrap();
        let out = AtomicDir::create(&model).unwrap();
        std::fs::write(out.dir().join("a"), b"a").unwrap();
        out.commit().unwrap();
        assert_eq!(std::fs::read(model.join("a")).unwrap(), b"a");
        assert!(matches!(AtomicDir::create(&model), Err(Error::Path { .. })));
        assert_eq!(dir.path().read_dir().unwrap().count(), 2);
    }
}
