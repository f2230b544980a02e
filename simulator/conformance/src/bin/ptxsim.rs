//! `ptxsim FILE...` runs PTX files in the simulator, every check on, on the card that their target names. The head of a file
//! says how it is launched, on what, and what comes out ([`dualgemm_conformance::conformance`]). Exit code 1 if a kernel is
//! stopped or a result is another.

use dualgemm_conformance::conformance::{hash, load, run};
use dualgemm_ptx::Target;
use dualgemm_sim::{Card, Checks, Config, Gpu};
use std::process::ExitCode;

/// Runs a file and says what came out. Returns whether that is what its head expects.
fn run_file(path: &str) -> Result<bool, Box<dyn std::error::Error>> {
    let case = load(path, &std::fs::read_to_string(path)?)?;
    let name = case.target();
    let target =
        Target::from_name(name).ok_or(format!(".target {name} is not one that the simulator runs"))?;
    let gpu = Gpu::new(Config::default().card(Card::of(target)).checks(Checks::ALL));
    let outcome = run(&gpu, &case)?;
    for (launch, argument, bytes) in &outcome.0 {
        println!(
            "{path}: launch {launch}, argument {argument}: {} bytes, #{:016x}",
            bytes.len(),
            hash(bytes)
        );
    }
    let right = outcome.is_expected(&case);
    println!("{path}: {}", if right { "as its head expects" } else { "its head expects other results" });
    Ok(right)
}

fn main() -> ExitCode {
    let files: Vec<String> = std::env::args().skip(1).collect();
    if files.is_empty() {
        eprintln!("usage: ptxsim FILE...");
        return ExitCode::from(2);
    }
    let mut right = true;
    for path in files {
        right &= run_file(&path).unwrap_or_else(|error| {
            eprintln!("{path}: {error}");
            false
        });
    }
    if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
