//! Cases with a few words changed: whatever a text says, the simulator runs it or refuses it, soon and without a panic.
//! `MUTATIONS=100000 cargo test --release --test mutations` tries more, from `FROM` on.

use dualgemm_conformance::conformance::{Argument, data::mix, load, load_all, run};
use dualgemm_ptx::Target;
use dualgemm_sim::{Card, Checks, Config, Gpu};
use rayon::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Numbers at which something changes.
const NUMBERS: [&str; 14] = [
    "0",
    "1",
    "-1",
    "3",
    "7",
    "31",
    "32",
    "255",
    "65535",
    "1048576",
    "4294967295",
    "2147483648",
    "9223372036854775807",
    "18446744073709551615",
];

/// A word is a name or a number; what is between words stays.
fn words(line: &str) -> Vec<&str> {
    let inside = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '%');
    line.split_inclusive(|c| !inside(c))
        .flat_map(|part| {
            let end = part.trim_end_matches(|c| !inside(c)).len();
            [&part[..end], &part[end..]]
        })
        .filter(|part| !part.is_empty())
        .collect()
}

/// The text with up to four changes, drawn from `seed`.
fn mutated(text: &str, other: &str, seed: u64) -> String {
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    let mut draws = 0;
    let mut below = |n: usize| {
        draws += 1;
        (mix(seed, draws) % n.max(1) as u64) as usize
    };
    let others: Vec<&str> = other.lines().filter(|line| line.starts_with('\t')).collect();
    for _ in 0..=below(3) {
        let at = below(lines.len());
        let from = lines[below(text.lines().count().min(lines.len()))].clone();
        match below(8) {
            0 => drop(lines.remove(at)),
            1 => lines.insert(at, from),
            2 if !others.is_empty() => lines.insert(at, others[below(others.len())].into()),
            3 => {
                let with = below(lines.len());
                lines.swap(at, with);
            }
            _ => {
                let line = lines[at].clone();
                let mut list = words(&line);
                let place = below(list.len());
                let given = words(&from);
                let Some(word) = list.get_mut(place) else { continue };
                let number = word.starts_with(|c: char| c.is_ascii_digit());
                *word = match number && below(3) > 0 {
                    true => NUMBERS[below(NUMBERS.len())],
                    false => given.get(below(given.len())).copied().unwrap_or_default(),
                };
                lines[at] = list.concat();
            }
        }
    }
    lines.join("\n")
}

/// Runs a text as its head says; the head must not ask for more than a test has.
fn try_text(name: &str, text: &str) -> Result<(), String> {
    let case = load(name, text).map_err(|e| e.to_string())?;
    let bytes = |a: &Argument| if let Argument::Buffer(b) = a { b.data.len() } else { 0 };
    for l in &case.launches {
        let ctas = u64::from(l.grid) * u64::from(l.block.div_ceil(32));
        if ctas > 64 || l.arguments.iter().map(bytes).sum::<usize>() > 1 << 24 {
            return Ok(());
        }
    }
    let target = Target::from_name(case.target()).unwrap_or(Target::Sm90a);
    let checks = if text.len().is_multiple_of(2) { Checks::ALL } else { Checks::NONE };
    let config = Config { max_instructions: 3000, ..Config::default().card(Card::of(target)).checks(checks) };
    run(&Gpu::new(config), &case).map(drop).map_err(|e| e.to_string())
}

#[test]
fn mutated_cases_are_run_or_refused() {
    let cases = load_all().unwrap();
    let variable = |name: &str, default| std::env::var(name).map_or(default, |n| n.parse().unwrap());
    let (from, count) = (variable("FROM", 0), variable("MUTATIONS", 1500));
    let short: Vec<_> = cases.iter().filter(|case| case.ptx.len() < 30_000).collect();
    let bad: Vec<u64> = (from..from + count)
        .into_par_iter()
        .filter(|&seed| {
            let pick = |salt| short[(mix(seed, salt) % short.len() as u64) as usize];
            let text = mutated(&pick(1 << 32).ptx, &pick(2 << 32).ptx, seed);
            let began = std::time::Instant::now();
            let panicked = catch_unwind(AssertUnwindSafe(|| try_text("mutated", &text))).is_err();
            let slow = began.elapsed().as_secs() > 20;
            if panicked || slow {
                let file =
                    std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mutated-{seed}.ptx"));
                std::fs::write(&file, &text).unwrap();
                println!("{}: {}", file.display(), if slow { "slow" } else { "panics" });
            }
            panicked || slow
        })
        .collect();
    assert!(bad.is_empty(), "seeds {bad:?}: their texts are in {}", env!("CARGO_TARGET_TMPDIR"));
}
