//! Mutants of our kernels: which of them the simulator lets pass, and whether `survivors.tsv` says why.
//!
//! ```sh
//! cargo run --release -p dualgemm-kernels --example mutants -- --all            # every mutant of every case
//! cargo run --release -p dualgemm-kernels --example mutants -- --all sm90a      # of those whose name has this
//! cargo run --release -p dualgemm-kernels --example mutants -- --every 10       # every tenth
//! ```
//! It ends with exit code 1 if a mutant survives that the list does not explain. `--verbose` says what became of each.

mod cases;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use cases::{Case, cases};
use dualgemm_mutate::{Fate, Host, Survivors, mutants};
use dualgemm_sim::{Checks, Config};

/// The list, beside this file.
const SURVIVORS: &str = include_str!("survivors.tsv");
/// Each mutant runs under these.
const SEEDS: std::ops::Range<u64> = 0..2;

/// What was found.
#[derive(Default)]
struct Summary {
    mutants: usize,
    fates: BTreeMap<String, usize>,
    explained: usize,
    /// Survivors that the list has without a proof.
    open: usize,
    unexplained: Vec<String>,
    /// How many mutants each line of the list explained.
    used: Vec<usize>,
}

/// Runs every `every`-th mutant of a case, from `first` on.
fn run(case: &Case, survivors: &Survivors, every: usize, summary: &mut Summary, say: impl Fn(&str)) -> usize {
    let config = Config::default().card(case.card).checks(Checks::ALL);
    let host =
        Host::new(case.module, config, SEEDS, &*case.run).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let all = mutants(host.module());
    let start = Instant::now();
    let sample: Vec<_> = all.iter().step_by(every).collect();
    for (at, mutant) in sample.iter().enumerate() {
        let fate = host.run(mutant);
        summary.mutants += 1;
        let kind = match &fate {
            Fate::Refused(_) => "refused".to_string(),
            other => other.to_string(),
        };
        *summary.fates.entry(kind).or_default() += 1;
        let line = format!("{}\t{}\tline {}: {}", case.name, mutant.kind, mutant.line, mutant.text);
        say(&format!("{at}/{} {:.0?}\t{line}\t{fate}", sample.len(), start.elapsed()));
        if fate == Fate::Survived {
            match survivors.explains(&case.name, mutant) {
                Some(row) => {
                    match survivors.rows()[row].is_open() {
                        true => summary.open += 1,
                        false => summary.explained += 1,
                    }
                    summary.used[row] += 1;
                }
                None => summary.unexplained.push(line),
            }
        }
    }
    sample.len()
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    let value = |flag: &str| args.iter().position(|arg| arg == flag).and_then(|at| args.get(at + 1));
    let every = match (has("--all"), value("--every").and_then(|n| n.parse().ok())) {
        (true, None) => 1,
        (false, Some(every)) if every > 0 => every,
        _ => {
            eprintln!(
                "say --all, or --every N with N at least 1; then a part of a case's name, and --verbose"
            );
            return ExitCode::from(2);
        }
    };
    let part = args
        .iter()
        .enumerate()
        .find(|(at, arg)| !arg.starts_with("--") && (*at == 0 || args[at - 1] != "--every"));
    let part = part.map_or("", |(_, part)| part);
    let survivors = match Survivors::parse(SURVIVORS) {
        Ok(survivors) => survivors,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let mut summary = Summary { used: vec![0; survivors.rows().len()], ..Summary::default() };
    let chosen: Vec<Case> = cases().into_iter().filter(|case| case.name.contains(part)).collect();
    let (start, total) = (Instant::now(), chosen.len());
    for (at, case) in chosen.iter().enumerate() {
        let count = run(case, &survivors, every, &mut summary, |line| {
            if has("--verbose") {
                println!("{line}");
            }
        });
        let seconds = start.elapsed().as_secs();
        println!("{} of {total}: {}, {count} mutants, {seconds} s", at + 1, case.name);
    }
    for (fate, count) in &summary.fates {
        println!("{count:6} {fate}");
    }
    let Summary { mutants, explained, open, unexplained, .. } = &summary;
    println!(
        "{mutants:6} mutants; survivors: {explained} harmless, {open} open, {} not in the list",
        unexplained.len()
    );
    for (row, _) in survivors.rows().iter().zip(&summary.used).filter(|(_, used)| **used == 0) {
        println!("explains nothing: {}\t{}\t{}", row.kernel, row.mutation, row.text);
    }
    for line in &summary.unexplained {
        println!("NOT EXPLAINED\t{line}");
    }
    if summary.unexplained.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every so-many-th mutant of three small cases: what CI can run of it.
    #[test]
    fn a_sample_is_stopped_or_explained() {
        let survivors = Survivors::parse(SURVIVORS).unwrap();
        let mut summary = Summary { used: vec![0; survivors.rows().len()], ..Summary::default() };
        for part in ["quantize", "sm80", "ragged k"] {
            let case = cases().into_iter().find(|case| case.name.contains(part)).unwrap();
            run(&case, &survivors, 5, &mut summary, |_| {});
        }
        assert!(summary.mutants > 15, "{} mutants", summary.mutants);
        let survived = summary.fates.get("survived").copied().unwrap_or(0);
        assert!(survived * 2 < summary.mutants, "{survived} of {} survive", summary.mutants);
        assert!(summary.unexplained.is_empty(), "{:#?}", summary.unexplained);
    }

    #[test]
    fn cases_have_names_of_their_own() {
        let mut names: Vec<String> = cases().into_iter().map(|case| case.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
