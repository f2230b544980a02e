//! Files that commands write: never one that is read, never half of one.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use dualgemm::checkpoint::write::atomic::AtomicFile;

/// Refuses an output, given as the argument `name`, that would replace one of the inputs, a file in it, or one that says
/// how it is to be read: the configurations and indices beside it.
pub fn is_no_input<'a>(
    name: &str,
    output: &Path,
    inputs: impl IntoIterator<Item = &'a Path>,
) -> anyhow::Result<()> {
    // What does not exist yet replaces nothing.
    let Ok(real) = output.canonicalize() else { return Ok(()) };
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

/// Writes a file under a temporary name until it is whole.
pub fn write_whole(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes).with_context(|| path.display().to_string())?;
    Ok(file.commit()?)
}
