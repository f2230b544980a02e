//! What was measured to be fastest: a table that comes with the program, and one that the tuner writes on this machine.
//!
//! The tuner's file lies in the user's cache directory and is named for card, driver and program version, so that none
//! of them can change under it. It appears whole or not at all; one that cannot be read is left aside with a warning.

use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use dualgemm_device::{Device, DeviceInfo};
use dualgemm_gemm::DualGemmDesc;

use crate::plan::ChosenBy;
use crate::{Error, Gpu};

/// Measurements on an H200 of problems where the cost model would take another kernel, which is slower.
const SHIPPED: &str = include_str!("../tuned/hopper.json");

/// One measurement: a kernel of a strategy on a problem.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Choice {
    /// Rows.
    pub m: usize,
    /// Features.
    pub n: usize,
    /// Summed elements.
    pub k: usize,
    /// Format that A is multiplied in.
    pub a: String,
    /// Format of C.
    pub out: String,
    /// The strategy.
    pub strategy: String,
    /// Its kernel.
    pub kernel: String,
    /// Median, µs.
    pub median_us: f64,
}

impl Choice {
    /// What was measured on a problem.
    pub fn of(desc: &DualGemmDesc, strategy: &str, kernel: &str, median_us: f64) -> Self {
        let &DualGemmDesc { m, n, k, out, .. } = desc;
        let (a, out) = (desc.a_compute().to_string(), out.to_string());
        Self { m, n, k, a, out, strategy: strategy.into(), kernel: kernel.into(), median_us }
    }

    /// Whether it says something about a problem: the same formats and weights, and its rows fill the tile as well. Half as
    /// many would fit one of half the size.
    fn is_about(&self, desc: &DualGemmDesc) -> bool {
        (self.n, self.k) == (desc.n, desc.k)
            && (desc.m..desc.m.saturating_mul(2)).contains(&self.m)
            && self.a == desc.a_compute().to_string()
            && self.out == desc.out.to_string()
    }
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct File {
    card: String,
    driver: String,
    version: String,
    choices: Vec<Choice>,
}

/// All that is known about one card.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Choices {
    tuned: Vec<Choice>,
    shipped: Vec<Choice>,
}

impl Choices {
    /// What is known about a GPU: read once per process, so that planning costs no file access.
    pub fn of(gpu: &Gpu) -> Arc<Self> {
        if gpu.card().is_none() {
            return Arc::default();
        }
        let path = path(gpu);
        let mut loaded = loaded().lock().unwrap_or_else(PoisonError::into_inner);
        loaded.entry(path.clone()).or_insert_with(|| Arc::new(Self::read(&path, gpu.info()))).clone()
    }

    /// Only measurements of this machine.
    pub fn tuned(tuned: Vec<Choice>) -> Self {
        Self { tuned, shipped: Vec::new() }
    }

    fn read(path: &Path, info: &DeviceInfo) -> Self {
        let tuned = match read(path) {
            Ok(choices) => choices,
            Err(reason) => {
                tracing::warn!("{}: {reason}; left aside, `dualgemm tune` writes it anew", path.display());
                Vec::new()
            }
        };
        // Cards of a kind have as many multiprocessors, on which it depends how tiles are spread.
        let same = (info.arch.major, info.arch.minor, info.sm_count) == (9, 0, 132);
        Self { tuned, shipped: if same { shipped() } else { Vec::new() } }
    }

    /// The fastest choice for a problem among those that `known` says exist, of those measured for the nearest number of
    /// rows; what was measured here comes before what came with the program.
    pub fn best(
        &self,
        desc: &DualGemmDesc,
        known: &dyn Fn(&str, &str) -> bool,
    ) -> Option<(&Choice, ChosenBy)> {
        let here = self.tuned.iter().map(|c| (c, ChosenBy::Tuned));
        let all = here.chain(self.shipped.iter().map(|c| (c, ChosenBy::Shipped)));
        let rank = |(c, by): &(&Choice, ChosenBy)| (c.m, *by == ChosenBy::Shipped);
        all.filter(|(c, _)| c.is_about(desc) && known(&c.strategy, &c.kernel))
            .min_by(|a, b| rank(a).cmp(&rank(b)).then(a.0.median_us.total_cmp(&b.0.median_us)))
    }
}

fn shipped() -> Vec<Choice> {
    serde_json::from_str::<File>(SHIPPED).map(|file| file.choices).unwrap_or_default()
}

/// What this process has read, by file.
fn loaded() -> &'static Mutex<HashMap<PathBuf, Arc<Choices>>> {
    static LOADED: OnceLock<Mutex<HashMap<PathBuf, Arc<Choices>>>> = OnceLock::new();
    LOADED.get_or_init(Mutex::default)
}

/// Where the tuner keeps what it found for a GPU: `$XDG_CACHE_HOME/dualgemm` or `~/.cache/dualgemm`.
pub fn path(gpu: &Gpu) -> PathBuf {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir);
    let name = format!("{} {} {}", gpu.info().name, gpu.driver(), env!("CARGO_PKG_VERSION"));
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { '-' };
    cache.join("dualgemm").join(format!("{}.json", name.chars().map(plain).collect::<String>()))
}

fn read(path: &Path) -> Result<Vec<Choice>, String> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.to_string()),
    };
    let file: File = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    match file.choices.iter().find(|c| !(c.median_us.is_finite() && c.median_us > 0.0)) {
        Some(bad) => Err(format!("a measurement of {} µs", bad.median_us)),
        None => Ok(file.choices),
    }
}

/// Adds measurements to the tuner's file; they take the place of older ones of the same kernel and problem. Returns
/// the file.
///
/// # Errors
/// If the file cannot be written.
pub fn remember(gpu: &Gpu, found: &[Choice]) -> Result<PathBuf, Error> {
    let path = path(gpu);
    let mut loaded = loaded().lock().unwrap_or_else(PoisonError::into_inner);
    let choices = write(&path, gpu, found)?;
    loaded.insert(path.clone(), Arc::new(Choices { tuned: choices, ..Choices::read(&path, gpu.info()) }));
    Ok(path)
}

fn write(path: &Path, gpu: &Gpu, found: &[Choice]) -> Result<Vec<Choice>, Error> {
    let failed = |reason: String| Error::Cache { path: path.into(), reason };
    let problem =
        |c: &Choice| (c.m, c.n, c.k, c.a.clone(), c.out.clone(), c.strategy.clone(), c.kernel.clone());
    // A file that cannot be read is overwritten: it holds nothing that cannot be measured again.
    let mut choices = read(path).unwrap_or_default();
    choices.retain(|old| !found.iter().any(|new| problem(new) == problem(old)));
    choices.extend_from_slice(found);
    let file = File {
        card: gpu.info().name.clone(),
        driver: gpu.driver().into(),
        version: env!("CARGO_PKG_VERSION").into(),
        choices,
    };
    let text = serde_json::to_string_pretty(&file).map_err(|e| failed(e.to_string()))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(|e| failed(e.to_string()))?;
    let mut temporary = tempfile::NamedTempFile::new_in(folder).map_err(|e| failed(e.to_string()))?;
    temporary.write_all(text.as_bytes()).map_err(|e| failed(e.to_string()))?;
    temporary.persist(path).map_err(|e| failed(e.error.to_string()))?;
    Ok(file.choices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_formats::BlockFormat;
    use dualgemm_gemm::AFormat;

    fn gpu() -> &'static Gpu {
        Gpu::of(Arc::new(dualgemm_sim::Gpu::new(dualgemm_sim::Config::default())))
    }

    fn choice(m: usize, kernel: &str, us: f64) -> Choice {
        Choice::of(&DualGemmDesc::new(m, 64, 64, AFormat::F16, BlockFormat::Nvfp4), "fused", kernel, us)
    }

    #[test]
    fn the_shipped_table_is_read_and_names_kernels_that_exist() {
        let choices = serde_json::from_str::<File>(SHIPPED).unwrap().choices;
        assert_eq!(choices, shipped());
        for c in &choices {
            let s = crate::strategy::strategy(&c.strategy).unwrap();
            assert!(c.median_us > 0.0, "{c:?}");
            let desc = DualGemmDesc::new(c.m, c.n, c.k, AFormat::F16, BlockFormat::Nvfp4);
            let desc = DualGemmDesc { out: dualgemm_gemm::OutFormat::F16, ..desc };
            assert!(s.kernels(&desc, 1, gpu().info()).unwrap().contains(&c.kernel), "{c:?}");
        }
    }

    #[test]
    fn what_is_remembered_is_read_back_and_newer_measurements_win() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/tuned.json");
        assert_eq!(read(&path), Ok(vec![]), "no file, no choices");
        write(&path, gpu(), &[choice(1, "a", 5.0), choice(2, "a", 6.0)]).unwrap();
        write(&path, gpu(), &[choice(1, "a", 4.0), choice(1, "b", 7.0)]).unwrap();
        let want = vec![choice(2, "a", 6.0), choice(1, "a", 4.0), choice(1, "b", 7.0)];
        assert_eq!(read(&path), Ok(want));
        let entries = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(entries, 1, "no temporary file stays");
    }

    #[test]
    fn a_broken_file_is_left_aside_and_written_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tuned.json");
        let whole = {
            write(&path, gpu(), &[choice(1, "a", 5.0)]).unwrap();
            std::fs::read_to_string(&path).unwrap()
        };
        let negative = whole.replace("5.0", "-5.0");
        for broken in ["", "{", &whole[..whole.len() / 2], "[1, 2]", "\u{0}\u{1}", &negative] {
            std::fs::write(&path, broken).unwrap();
            assert!(read(&path).is_err(), "{broken:?}");
            assert!(Choices::read(&path, gpu().info()).tuned.is_empty());
            write(&path, gpu(), &[choice(3, "c", 1.0)]).unwrap();
            assert_eq!(read(&path), Ok(vec![choice(3, "c", 1.0)]));
        }
    }

    #[test]
    fn a_folder_that_cannot_be_is_an_error_with_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let message = write(&file.join("tuned.json"), gpu(), &[]).unwrap_err().to_string();
        assert!(message.contains("file/tuned.json: "), "{message}");
    }
}
