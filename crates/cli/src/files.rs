//! Files that commands write: never one that is read, never half of one.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use dualgemm::checkpoint::write::atomic::{AtomicDir, AtomicFile};
use dualgemm::checkpoint::{Error, TensorFiles};

use crate::args::WriteArgs;

/// Opens a file of activations or of a result.
///
/// # Errors
/// Those of [`TensorFiles::open`]; a file with an unknown ending is told the one that these have, not those of checkpoints.
pub fn open_activations(path: &Path) -> anyhow::Result<TensorFiles> {
    Ok(match TensorFiles::open(path) {
        Err(Error::Path { file, .. }) if file == path && path.is_file() => {
            bail!(
                "{}: is not a safetensors file; a result (activation) file ends in .safetensors",
                path.display()
            )
        }
        opened => opened?,
    })
}

/// Refuses an output, given as the argument `name`, that would replace one of the inputs, a file in it, or one that says
/// how to read it: the configurations and indices beside it; and one that would become a file of a directory that is read.
pub fn is_no_input<'a>(
    name: &str,
    output: &Path,
    inputs: impl IntoIterator<Item = &'a Path>,
) -> anyhow::Result<()> {
    let Ok(real) = output.canonicalize() else {
        // What does not exist yet replaces nothing.
        let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new(".")).canonicalize().ok();
        let joins = |input: &Path| input.is_dir() && input.canonicalize().ok() == parent;
        if output.extension().is_some_and(|ending| ending == "safetensors") && inputs.into_iter().any(joins) {
            bail!(
                "{name}: {} would become a part of the directory that is read; give another",
                output.display()
            );
        }
        return Ok(());
    };
    let is_json = real.extension().is_some_and(|extension| extension == "json");
    let replaced = |input: &Path| {
        real == input
            || input.is_dir() && real.starts_with(input)
            || is_json && input.is_file() && real.parent() == input.parent()
    };
    if inputs.into_iter().filter_map(|input| input.canonicalize().ok()).any(|input| replaced(&input)) {
        bail!("{name}: {} is one of the files that are read; give another name", output.display());
    }
    Ok(())
}

/// Where an output will be written, behind links too. To be asked before the work that it comes from: whether it can be
/// written, and what it would replace, is not found out hours later. Fails if its folder takes no files, or something
/// is there: a file without `--force`, or no regular file.
pub fn writable(output: &Path, args: WriteArgs) -> anyhow::Result<PathBuf> {
    drop(AtomicFile::create(output)?);
    if output.exists() && !args.force {
        bail!("{}: exists already; give another name, or --force to replace it", output.display());
    }
    Ok(output.canonicalize().unwrap_or_else(|_| output.into()))
}

/// As [`writable`], for a model, which is a directory unless its name is that of a file.
///
/// # Errors
/// As there, and if a directory is there that is not empty.
pub fn writable_model(output: &Path, args: WriteArgs) -> anyhow::Result<()> {
    match output.extension().is_some_and(|ending| ending == "safetensors" || ending == "gguf") {
        true => writable(output, args).map(drop),
        false => Ok(AtomicDir::create(output).map(drop)?),
    }
}

/// Writes a file under a temporary name until it is whole.
pub fn write_whole(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes).with_context(|| path.display().to_string())?;
    Ok(file.commit()?)
}
