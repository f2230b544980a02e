//! Mutants of our kernels: which of them the simulator lets pass, and whether `survivors.tsv` says why.
//!
//! ```sh
//! cargo run --release -p dualgemm-kernels --example mutants -- --all            # every mutant of every case
//! cargo run --release -p dualgemm-kernels --example mutants -- --all sm90a      # of those whose name has this
//! cargo run --release -p dualgemm-kernels --example mutants -- --every 10       # every tenth
//! ```
//! It ends with exit code 1 if a mutant survives, or nothing executes what it changes, and the list does not explain it, or if a
//! line of the list explains none of all. `--verbose` says what became of each.

mod cases;
mod mixture;
#[path = "../../tests/fused/words.rs"]
mod words;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use cases::{Case, cases};
use dualgemm_mutate::{Fate, Host, Survivors, mutants};
use dualgemm_sim::{Checks, Config};

const SURVIVORS: &str = include_str!("survivors.tsv");
/// Each mutant runs under these.
const SEEDS: std::ops::Range<u64> = 0..4;

#[derive(Default)]
struct Summary {
    fates: BTreeMap<String, usize>,
    /// Mutants, and those that the list explains, by family of kernels.
    families: BTreeMap<String, [usize; 2]>,
    /// Survivors that the list has without a proof.
    open: usize,
    /// Those that it has not, and those that nothing executes.
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
    let family = case.name.split_once("_fused").map_or("elementwise", |(family, _)| family);
    let family = ["sm90a_plain", "sm90a_fp8", "sm90a_warpwise"]
        .into_iter()
        .find(|name| case.name.starts_with(name))
        .unwrap_or(family);
    let counts = summary.families.entry(family.into()).or_default();
    for (at, mutant) in sample.iter().enumerate() {
        let fate = host.run(mutant);
        counts[0] += 1;
        let kind = match &fate {
            Fate::Refused(_) => "refused".to_string(),
            other => other.to_string(),
        };
        *summary.fates.entry(kind).or_default() += 1;
        let line = format!("{}\t{}\tline {}: {}", case.name, mutant.kind, mutant.line, mutant.text);
        say(&format!("{at}/{} {:.0?}\t{line}\t{fate}", sample.len(), start.elapsed()));
        let row = match fate {
            Fate::Survived | Fate::NotReached => {
                survivors.explains(&case.name, mutant, fate == Fate::Survived)
            }
            _ => continue,
        };
        match row {
            Some(row) => {
                summary.used[row] += 1;
                match survivors.rows()[row].is_open() {
                    true => summary.open += 1,
                    false => counts[1] += 1,
                }
            }
            None => summary.unexplained.push(format!("{fate}\t{line}")),
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
    for (family, [mutants, harmless]) in &summary.families {
        println!("{family}: {mutants} mutants, {harmless} survive and are harmless");
    }
    println!("{} open, {} not in the list", summary.open, summary.unexplained.len());
    let complete = every == 1 && part.is_empty();
    let unused = survivors.rows().iter().zip(&summary.used).filter(|(_, used)| complete && **used == 0);
    let stale: Vec<String> =
        unused.map(|(row, _)| format!("{}\t{}\t{}", row.kernel, row.mutation, row.text)).collect();
    summary.unexplained.iter().for_each(|line| println!("NOT EXPLAINED\t{line}"));
    stale.iter().for_each(|line| println!("EXPLAINS NOTHING\t{line}"));
    if summary.unexplained.is_empty() && stale.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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
        let mutants: usize = summary.families.values().map(|[mutants, _]| mutants).sum();
        assert!(mutants > 15, "{mutants} mutants");
        let survived = summary.fates.get("survived").copied().unwrap_or(0);
        assert!(survived * 2 < mutants, "{survived} of {mutants} survive");
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
