//! Runs every conformance case on CUDA device 0 and in the simulator and prints where they differ; exit code 1 if
//! they do: `cargo run --release -p dualgemm-testkit --example conformance_gpu [part of a file name]`.
//! `dualgemm conformance --device cuda:0` does the same with a report.

use dualgemm_cuda::Cuda;
use dualgemm_device::Device;
use dualgemm_ptx::Target;
use dualgemm_sim::report::Card;
use dualgemm_sim::{Config, Gpu};
use dualgemm_testkit::conformance::report::{Devices, run_all};
use std::collections::BTreeMap;
use std::process::ExitCode;

fn main() -> ExitCode {
    let simulator =
        |target: Target| -> Box<dyn Device> { Box::new(Gpu::new(Config::default().card(Card::of(target)))) };
    let card = || Cuda::open(0).map(|c| Box::new(c) as Box<dyn Device>);
    let mut counts = BTreeMap::new();
    let only = std::env::args().nth(1).unwrap_or_default();
    let devices = Devices { simulator: &simulator, card: Some(&card), only: &only };
    let run = run_all(&devices, |case, result| {
        *counts.entry(result.word()).or_insert(0) += 1;
        println!(
            "{}: {}",
            case.file,
            if result.is_failure() { result.to_string() } else { result.word().into() }
        );
    });
    println!("{counts:?}");
    match run {
        Ok(()) if !counts.keys().any(|k| k.contains("fail") || k.contains("differ")) => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}
