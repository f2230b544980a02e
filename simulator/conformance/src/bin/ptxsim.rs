//! `ptxsim [--values] FILE...` runs PTX files in the simulator, every check on, on the card that their target names. The head
//! of a file says how it is launched, on what, and what comes out ([`dualgemm_conformance::conformance`]). `--values` prints
//! the results element by element. Exit code 1 if a kernel is stopped or a result differs from the head's.

use dualgemm_conformance::conformance::{Argument, Case, data, hash, load, run};
use dualgemm_ptx::Target;
use dualgemm_sim::{Card, Checks, Config, Gpu};
use std::process::ExitCode;

/// The elements of a result, by the type that the head gives its buffer; types that Rust doesn't have as bits.
fn values(case: &Case, launch: usize, argument: usize, bytes: &[u8]) -> Vec<String> {
    let Argument::Buffer(buffer) = &case.launches[launch].arguments[argument] else { return Vec::new() };
    let ty = buffer.data.ty.as_str();
    let value = |element: &[u8]| {
        let bits = element.iter().rev().fold(0u64, |bits, &byte| bits << 8 | u64::from(byte));
        match ty {
            "f64" => f64::from_bits(bits).to_string(),
            "f32" => f32::from_bits(bits as u32).to_string(),
            "f16" => half::f16::from_bits(bits as u16).to_string(),
            "bf16" => half::bf16::from_bits(bits as u16).to_string(),
            "u8" | "u16" | "u32" | "u64" => bits.to_string(),
            _ => format!("{bits:#0width$x}", width = 2 + 2 * element.len()),
        }
    };
    bytes.chunks(data::size(ty).unwrap_or(1)).map(value).collect()
}

/// Runs a file and says what came out. Returns whether that is what its head expects.
fn run_file(path: &str, show: bool) -> Result<bool, Box<dyn std::error::Error>> {
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
        if show {
            println!("{}", values(&case, *launch, *argument, bytes).join(" "));
        }
    }
    let right = outcome.is_expected(&case);
    println!("{path}: {}", if right { "as its head expects" } else { "its head expects other results" });
    Ok(right)
}

fn main() -> ExitCode {
    let mut files: Vec<String> = std::env::args().skip(1).collect();
    let show = files.first().is_some_and(|first| first == "--values");
    files.drain(..usize::from(show));
    if files.is_empty() || files[0].starts_with('-') {
        eprintln!("usage: ptxsim [--values] FILE...");
        return ExitCode::from(2);
    }
    let mut right = true;
    for path in files {
        right &= run_file(&path, show).unwrap_or_else(|error| {
            eprintln!("{path}: {error}");
            false
        });
    }
    if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
