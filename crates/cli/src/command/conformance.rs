//! `conformance`: generates the PTX conformance cases and runs them in the simulator and on a card, or writes them out.

use std::collections::BTreeMap;
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
use serde_json::json;

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

/// The simulator of the card that has `target`.
fn simulator(target: Target) -> Box<dyn Device> {
    Box::new(Gpu::new(Config::default().card(Card::of(target))))
}

/// Tells that a card is not to be had from what is wrong with the input.
fn opened<T>(result: Result<T, dualgemm_device::Error>) -> Result<T, Unsupported> {
    let instead = "--device sim runs the cases in the simulator";
    result.map_err(|error| Unsupported { what: error.to_string(), instead: instead.into() })
}

/// Writes the cases whose name contains `only` into a new folder.
fn write(folder: &Path, only: &str) -> anyhow::Result<usize> {
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
    Ok(cases.len())
}

fn no_case(only: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "--only {only}: no conformance case has that in its name; they are named as in `wgmma/wgmma_f16_ss`"
    )
}

/// Runs the cases and says where card, simulator and record disagree; or writes them.
pub fn run(args: &ConformanceArgs, output: &Output) -> anyhow::Result<Verdict> {
    if let Some(folder) = &args.write {
        let (cases, folder) = (write(folder, &args.only)?, folder.display().to_string());
        output.say(
            &json!({ "folder": folder, "cases": cases }),
            &format!("{folder}: {cases} conformance cases"),
        )?;
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
    let (mut counts, mut cases, mut text) = (BTreeMap::new(), Vec::new(), String::new());
    run_all(&devices, |case, result| {
        *counts.entry(result.word()).or_insert(0) += 1;
        // How a card agreed before, which, and when.
        let certified = &case.certified;
        let mut object = json!({ "case": case.name, "target": case.target(), "result": result.word(), "certified": certified });
        if result.is_failure() {
            object["detail"] = result.to_string().into();
            text += &format!("{}: {result}\n", case.name);
        }
        cases.push(object);
    })?;
    if cases.is_empty() {
        return Err(no_case(&args.only));
    }
    let right = text.is_empty();
    let on = driver.as_ref().map(|d| format!(", driver {d}")).unwrap_or_default();
    text += &format!("{name}{on}: {} conformance cases\n", cases.len());
    let said = |what: &str| what.replace("simulator only", "ran in the simulator, no card compared");
    text.extend(counts.iter().map(|(what, n)| format!("  {n:5} {}\n", said(what))));
    let document = json!({ "version": env!("CARGO_PKG_VERSION"), "device": name, "driver": driver, "counts": counts,
        "cases": cases });
    output.say(&document, &text)?;
    Ok(Verdict::from(right))
}
