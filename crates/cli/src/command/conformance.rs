//! `conformance`: generates the PTX conformance cases and runs them in the simulator and on a card, or writes them out.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use dualgemm::checkpoint::write::atomic::AtomicDir;
use dualgemm_conformance::conformance::load_all;
use dualgemm_conformance::conformance::report::{Devices, run_all};
use dualgemm_cuda::Cuda;
use dualgemm_device::Device;
use dualgemm_ptx::Target;
use dualgemm_sim::{Card, Config, Gpu};
use serde::Serialize;

use super::Verdict;
use crate::failure::Unsupported;
use crate::report::Output;

/// Arguments of `conformance`.
#[derive(Debug, Args)]
pub struct ConformanceArgs {
    /// Where to run: `sim`, or `cuda:0` for a card, which is compared with the simulator bit for bit.
    #[arg(long, value_name = "DEVICE", default_value = "sim", value_parser = device)]
    device: DeviceArg,
    /// Only cases whose name contains this, e.g. `wgmma/`.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Run nothing; write the cases as files DIR/family/name.ptx, whose heads say how they are launched, on what, and what
    /// comes out.
    #[arg(long, value_name = "DIR", conflicts_with = "device")]
    write: Option<PathBuf>,
}

/// Where to run.
#[derive(Debug, Clone, Copy)]
enum DeviceArg {
    Simulator,
    Cuda(i32),
}

fn device(text: &str) -> Result<DeviceArg, String> {
    match text.split_once(':') {
        None if text == "sim" => Ok(DeviceArg::Simulator),
        None if text == "cuda" => Ok(DeviceArg::Cuda(0)),
        Some(("cuda", n)) if n.parse::<u16>().is_ok() => Ok(DeviceArg::Cuda(n.parse().unwrap_or(0))),
        _ => Err("sim, cuda or cuda:N expected".into()),
    }
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    device: String,
    driver: Option<String>,
    counts: BTreeMap<&'static str, usize>,
    cases: Vec<CaseReport>,
}

/// One case.
#[derive(Debug, Serialize)]
struct CaseReport {
    case: String,
    target: String,
    result: &'static str,
    /// How a card agreed before, which, and when.
    certified: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for case in self.cases.iter().filter(|c| c.detail.is_some()) {
            writeln!(f, "{}: {}", case.case, case.detail.as_deref().unwrap_or_default())?;
        }
        let driver = self.driver.as_ref().map(|d| format!(", driver {d}")).unwrap_or_default();
        writeln!(f, "{}{driver}: {} conformance cases", self.device, self.cases.len())?;
        self.counts.iter().try_for_each(|(what, n)| writeln!(f, "  {n:5} {what}"))
    }
}

/// The simulator of the card that has `target`.
fn simulator(target: Target) -> Box<dyn Device> {
    Box::new(Gpu::new(Config::default().card(Card::of(target))))
}

/// Tells that a card is not to be had from what is wrong with the input.
fn opened<T>(result: Result<T, dualgemm_device::Error>) -> Result<T, Unsupported> {
    let instead = "--device sim runs the cases in the simulator";
    result.map_err(|error| Unsupported { what: error.to_string(), instead: instead.into() })
}

/// What `--write` has done.
#[derive(Debug, Serialize)]
struct Written {
    folder: PathBuf,
    cases: usize,
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} conformance cases", self.folder.display(), self.cases)
    }
}

/// Writes the cases whose name contains `only` into a new folder.
fn write(folder: &Path, only: &str) -> anyhow::Result<Written> {
    let cases: Vec<_> = load_all()?.into_iter().filter(|case| case.name.contains(only)).collect();
    if cases.is_empty() {
        return Err(no_case(only));
    }
    let whole = AtomicDir::create(folder)?;
    for case in &cases {
        let path = whole.dir().join(format!("{}.ptx", case.name));
        let family = path.parent().unwrap_or(&path);
        fs::create_dir_all(family)
            .and_then(|()| fs::write(&path, &case.ptx))
            .context(folder.display().to_string())?;
    }
    whole.commit()?;
    Ok(Written { folder: folder.into(), cases: cases.len() })
}

fn no_case(only: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "--only {only}: no conformance case has that in its name; they are named as in `wgmma/wgmma_f16_ss`"
    )
}

/// Runs the cases and says where card, simulator and record disagree; or writes them.
pub fn run(args: &ConformanceArgs, output: &Output) -> anyhow::Result<Verdict> {
    if let Some(folder) = &args.write {
        output.emit(&write(folder, &args.only)?)?;
        return Ok(Verdict::Right);
    }
    let (ordinal, name, driver) = match args.device {
        DeviceArg::Simulator => (None, "simulator".to_string(), None),
        DeviceArg::Cuda(n) => {
            let version = opened(Cuda::driver_version())?;
            let name = opened(Cuda::open(n))?.info().name.clone();
            (Some(n), name, Some(format!("{}.{}", version / 1000, version % 1000 / 10)))
        }
    };
    let open = || Cuda::open(ordinal.unwrap_or(0)).map(|c| Box::new(c) as Box<dyn Device>);
    let card: Option<&dyn Fn() -> Result<Box<dyn Device>, dualgemm_device::Error>> = match ordinal {
        Some(_) => Some(&open),
        None => None,
    };
    let devices = Devices { simulator: &simulator, card, only: &args.only };
    let (mut counts, mut cases, mut right) = (BTreeMap::new(), Vec::new(), true);
    run_all(&devices, |case, result| {
        *counts.entry(result.word()).or_insert(0) += 1;
        right &= !result.is_failure();
        cases.push(CaseReport {
            case: case.name.clone(),
            target: case.target().into(),
            result: result.word(),
            certified: case.certified.clone(),
            detail: result.is_failure().then(|| result.to_string()),
        });
    })?;
    if cases.is_empty() {
        return Err(no_case(&args.only));
    }
    output.emit(&Report { version: env!("CARGO_PKG_VERSION"), device: name, driver, counts, cases })?;
    Ok(Verdict::from(right))
}
