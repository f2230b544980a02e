//! `conformance`: runs the PTX conformance files, which are inside this binary, in the simulator and on a card.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::bail;
use clap::Args;
use dualgemm_cuda::Cuda;
use dualgemm_device::Device;
use dualgemm_ptx::Target;
use dualgemm_sim::{Card, Config, Gpu};
use dualgemm_testkit::conformance::report::{Devices, run_all};
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
    /// Only files whose name contains this, e.g. `wgmma/`.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
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

/// One file.
#[derive(Debug, Serialize)]
struct CaseReport {
    file: String,
    target: String,
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for case in self.cases.iter().filter(|c| c.detail.is_some()) {
            writeln!(f, "{}: {}", case.file, case.detail.as_deref().unwrap_or_default())?;
        }
        let driver = self.driver.as_ref().map(|d| format!(", driver {d}")).unwrap_or_default();
        writeln!(f, "{}{driver}: {} conformance files", self.device, self.cases.len())?;
        self.counts.iter().try_for_each(|(what, n)| writeln!(f, "  {n:5} {what}"))
    }
}

/// The simulator of the card that has `target`.
fn simulator(target: Target) -> Box<dyn Device> {
    Box::new(Gpu::new(Config::default().card(Card::of(target))))
}

/// Tells that a card is not to be had from what is wrong with the input.
fn opened<T>(result: Result<T, dualgemm_device::Error>) -> Result<T, Unsupported> {
    let instead = "--device sim runs the files in the simulator";
    result.map_err(|error| Unsupported { what: error.to_string(), instead: instead.into() })
}

/// Runs the files and says where card, simulator and files disagree.
pub fn run(args: &ConformanceArgs, output: &Output) -> anyhow::Result<Verdict> {
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
            file: case.file.clone(),
            target: case.target().into(),
            result: result.word(),
            detail: result.is_failure().then(|| result.to_string()),
        });
    })?;
    if cases.is_empty() {
        bail!("--only {}: no conformance file has that in its name", args.only);
    }
    output.emit(&Report { version: env!("CARGO_PKG_VERSION"), device: name, driver, counts, cases })?;
    Ok(Verdict::from(right))
}
