//! Runs every conformance case on CUDA device 0 and in the simulator and prints where they differ; exit code 1 if
//! they do: `cargo run --release -p dualgemm-conformance --example conformance_gpu [PART [CARD]]`, with part of a case's name,
//! or "", and which card this is and when, such as "H100 2026-11-28": `cases.tsv` then says that it agreed.
//! `dualgemm conformance --device cuda:0` runs the same with a report.

use dualgemm_conformance::conformance::record::Records;
use dualgemm_conformance::conformance::report::{Devices, run_all};
use dualgemm_cuda::Cuda;
use dualgemm_device::Device;
use dualgemm_ptx::Target;
use dualgemm_sim::report::Card;
use dualgemm_sim::{Config, Gpu};
use std::collections::BTreeMap;
use std::process::ExitCode;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/cases.tsv");

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let simulator =
        |target: Target| -> Box<dyn Device> { Box::new(Gpu::new(Config::default().card(Card::of(target)))) };
    let open = || Cuda::open(0).map(|c| Box::new(c) as Box<dyn Device>);
    let mut arguments = std::env::args().skip(1);
    let (only, card) = (arguments.next().unwrap_or_default(), arguments.next());
    let mut records = Records::parse(&std::fs::read_to_string(PATH)?)?;
    let (mut counts, mut right) = (BTreeMap::new(), true);
    let devices = Devices { simulator: &simulator, card: Some(&open), only: &only };
    run_all(&devices, |case, result| {
        *counts.entry(result.word()).or_insert(0) += 1;
        right &= !result.is_failure();
        println!("{}: {result}", case.name);
        if let Some(card) = &card {
            records.certify(&case.name, result, card);
        }
    })?;
    println!("{counts:?}");
    if card.is_some() {
        std::fs::write(PATH, records.to_string())?;
    }
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
