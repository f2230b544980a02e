//! Files and directories that appear whole or not at all: temporary name, fsync, rename.

use std::fs::{File, Permissions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::{TempDir, TempPath};

use crate::Error;

/// What this process has under temporary names.
static TEMPORARY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes all outputs of this process that are not committed. For when it is about to end without dropping them, as by a
/// signal: threads that create, commit or drop outputs stop.
pub fn remove_uncommitted() {
    let paths = temporary();
    for path in &*paths {
        if path.is_dir() {
            // A file may appear in it while it is emptied.
            let _ = (0..10).find(|_| std::fs::remove_dir_all(path).is_ok());
        } else {
            // Gone with its folder, if not there.
            let _ = std::fs::remove_file(path);
        }
    }
    // Never unlocked.
    std::mem::forget(paths);
}

fn temporary() -> MutexGuard<'static, Vec<PathBuf>> {
    TEMPORARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A path among [`TEMPORARY`].
#[derive(Debug)]
struct Temporary(PathBuf);

impl Temporary {
    /// Lists what `create` makes before anybody can miss it.
    fn list<T: AsRef<Path>>(create: impl FnOnce() -> io::Result<T>) -> io::Result<(T, Self)> {
        let mut paths = temporary();
        let made = create()?;
        paths.push(made.as_ref().into());
        let listed = Self(made.as_ref().into());
        Ok((made, listed))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        temporary().retain(|path| *path != self.0);
    }
}

/// A file that appears under its name only on [`commit`](Self::commit); dropped before, it leaves nothing.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    /// The mode of the file that is replaced.
    replaced: Option<Permissions>,
    /// Not as tempfile has it, whose errors name the temporary file.
    out: BufWriter<File>,
    temporary: TempPath,
    _listed: Temporary,
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

/// Why a temporary name could not be made beside a path.
fn no_place(path: &Path, action: &'static str, e: io::Error) -> Error {
    match parent(path) {
        // Of the error only its kind: tempfile's text has the temporary name.
        dir if dir.exists() => Error::io(path, action, e.kind().into()),
        dir => Error::Path { file: dir.into(), found: "no such directory".into(), valid: "create it first" },
    }
}

fn sync_dir(dir: &Path) -> Result<(), Error> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io(dir, "sync", e))
}

impl AtomicFile {
    /// Opens a temporary file beside `path`, or beside what it links to, even if that is not there.
    ///
    /// # Errors
    /// If the directory does not exist or cannot be written; if the name cannot be that of a file, or something is there
    /// that is no regular file, such as a directory or a device.
    pub fn create(path: &Path) -> Result<Self, Error> {
        let refused = |found: &str| Error::Path {
            file: path.into(),
            found: found.into(),
            valid: "give a regular file, or a name that is not taken",
        };
        let (path, replaced) = match std::fs::metadata(path) {
            Ok(there) if there.is_file() => {
                let path = path.canonicalize().map_err(|e| Error::io(path, "resolve", e))?;
                (path, Some(there.permissions()))
            }
            Ok(there) if there.is_dir() => return Err(refused("is a directory")),
            Ok(_) => return Err(refused("is no regular file")),
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Error::io(path, "look at", e)),
            Err(_) if path.as_os_str().as_encoded_bytes().ends_with(b"/") => {
                return Err(refused("is the name of a directory"));
            }
            Err(_) => (behind_links(path), None),
        };
        let (file, _listed) = Temporary::list(|| builder(0o666).tempfile_in(parent(&path)))
            .map_err(|e| no_place(&path, "create a temporary file beside it", e))?;
        let (file, temporary) = file.into_parts();
        let out = BufWriter::with_capacity(1 << 20, file);
        Ok(Self { path, replaced, out, temporary, _listed })
    }

    /// Syncs the data and renames it into place.
    ///
    /// # Errors
    /// If the system refuses; the temporary file is removed then.
    pub fn commit(self) -> Result<(), Error> {
        let Self { path, replaced, out, temporary, _listed } = self;
        let io = |action, e| Error::io(&path, action, e);
        let file = out.into_inner().map_err(|e| io("write", e.into_error()))?;
        if let Some(permissions) = replaced {
            file.set_permissions(permissions).map_err(|e| io("set the mode of", e))?;
        }
        file.sync_all().map_err(|e| io("sync", e))?;
        temporary.persist(&path).map_err(|e| io("rename", e.error))?;
        sync_dir(parent(&path))
    }
}

/// Temporary names, under a mode that the umask restricts: as readable as any file, unlike temporary ones
/// by themselves.
fn builder(mode: u32) -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".dualgemm-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(mode));
    #[cfg(not(unix))]
    let _ = mode;
    builder
}

/// Where a chain of links leads whose last link leads nowhere.
fn behind_links(path: &Path) -> PathBuf {
    let mut path = path.to_path_buf();
    // Links in a circle are found by who looks at what is there.
    while let Ok(target) = std::fs::read_link(&path) {
        path = parent(&path).join(target);
    }
    path
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
    _temporary: Temporary,
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
                    found: "already exists".into(),
                    valid: "give a new or empty directory",
                });
            }
        }
        let (temp, _temporary) = Temporary::list(|| builder(0o777).tempdir_in(parent(path)))
            .map_err(|e| no_place(path, "create a temporary directory beside it", e))?;
        Ok(Self { path: path.into(), temp, _temporary })
    }

    /// Where to write the files.
    pub fn dir(&self) -> &Path {
        self.temp.path()
    }

    /// An error of writing one of the files, under the name that it will have.
    pub(crate) fn renamed(&self, error: Error) -> Error {
        match error {
            Error::Io { file, action, source } => {
                let file = file.strip_prefix(self.dir()).map_or(file.clone(), |name| self.path.join(name));
                Error::Io { file, action, source }
            }
            other => other,
        }
    }

    /// Renames the directory into place.
    ///
    /// # Errors
    /// If the system refuses; the temporary directory is removed then.
    pub fn commit(self) -> Result<(), Error> {
        let Self { path, temp, _temporary } = self;
        let io = |action, e| Error::io(&path, action, e);
        File::open(temp.path()).and_then(|d| d.sync_all()).map_err(|e| io("sync", e))?;
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

    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_that_takes_no_files_is_refused_without_the_temporary_name() {
        let file = AtomicFile::create(Path::new("/proc/a")).unwrap_err().to_string();
        assert!(file.starts_with("/proc/a: cannot create a temporary file beside it: "), "{file}");
        let dir = AtomicDir::create(Path::new("/proc/a")).unwrap_err().to_string();
        assert!(!(file + &dir).contains(".dualgemm-"), "{dir}");
    }

    #[test]
    fn only_regular_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let message = AtomicFile::create(dir.path()).unwrap_err().to_string();
        assert!(message.contains(": is a directory; give a regular file"), "{message}");
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
    fn names_that_no_file_can_have_are_refused_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let message = AtomicFile::create(&dir.path().join("x/")).unwrap_err().to_string();
        assert!(message.contains("x/: is the name of a directory; give a"), "{message}");
        assert!(AtomicFile::create(&dir.path().join("x".repeat(300))).is_err());
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }

    #[cfg(unix)]
    #[test]
    fn links_that_lead_nowhere_are_followed_and_modes_kept() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let [path, link, other, circle] =
            ["out.bin", "link", "other", "circle"].map(|name| dir.path().join(name));
        symlink("link", &other).unwrap();
        symlink("out.bin", &link).unwrap();
        symlink("circle", &circle).unwrap();
        AtomicFile::create(&other).unwrap().commit().unwrap();
        assert!(other.is_symlink() && link.is_symlink() && path.metadata().unwrap().is_file());
        let plain = dir.path().join("plain");
        std::fs::write(&plain, b"").unwrap();
        assert_eq!(path.metadata().unwrap().mode(), plain.metadata().unwrap().mode());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        AtomicFile::create(&path).unwrap().commit().unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        assert!(AtomicFile::create(&circle).is_err() && circle.is_symlink());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_told_by_the_name_that_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let model = AtomicDir::create(&dir.path().join("model")).unwrap();
        let mut file = AtomicFile::create(&model.dir().join("out.bin")).unwrap();
        file.out = BufWriter::new(File::options().write(true).open("/dev/full").unwrap());
        file.write_all(b"much").unwrap();
        let message = model.renamed(file.commit().unwrap_err()).to_string();
        let (named, why) = message.split_once(": ").unwrap();
        assert_eq!(Path::new(named), dir.path().join("model/out.bin"));
        assert!(why.starts_with("cannot write: No space") && !why.contains(".dualgemm-"), "{why}");
    }

    #[test]
    fn what_is_not_committed_is_listed() {
        let dir = tempfile::tempdir().unwrap();
        let listed = || temporary().iter().filter(|path| path.starts_with(dir.path())).count();
        let file = AtomicFile::create(&dir.path().join("out.bin")).unwrap();
        let model = AtomicDir::create(&dir.path().join("model")).unwrap();
        assert_eq!(listed(), 2);
        model.commit().unwrap();
        assert_eq!(listed(), 1);
        drop(file);
        assert_eq!(listed(), 0);
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
