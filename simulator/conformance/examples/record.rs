//! Writes `cases.tsv` anew: `cargo run --release -p dualgemm-conformance --example record`.
//!
//! Each draft runs in the simulator, and its text's hash and the outputs' are recorded. Drafts that bring along what is
//! expected must agree with the simulator. A draft that fails keeps the line it had; all failures are listed at the
//! end. What a card said stays with the lines that stay as they are.

use dualgemm_conformance::conformance::record::{Record, Records};
use dualgemm_conformance::conformance::{self, hash};
use dualgemm_conformance::generate::{BLANK, Draft, drafts};
use dualgemm_ptx::Target;
use dualgemm_sim::report::Card;
use dualgemm_sim::{Config, Gpu};
use rayon::prelude::*;
use std::process::ExitCode;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/cases.tsv");

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let before = Records::parse(&std::fs::read_to_string(PATH)?)?;
    let list: Vec<_> = drafts().into_par_iter().map(|draft| (draft.name.clone(), record(draft))).collect();
    let (mut after, mut failures) = (Records::default(), 0);
    for (name, result) in list {
        let old = before.0.get(&name);
        let new = result.map(|new| match old {
            Some(old) if (old.text, &old.expected) == (new.text, &new.expected) => old.clone(),
            Some(Record { certified: Some(certified), .. }) => {
                println!("{name}: changed; that a card agreed ({certified}) holds no longer");
                new
            }
            Some(_) => {
                println!("{name}: changed");
                new
            }
            None => {
                println!("{name}: new");
                new
            }
        });
        let kept = new.or_else(|failure| {
            println!("{name}: {failure}");
            failures += 1;
            old.cloned().ok_or(())
        });
        after.0.extend(kept.ok().map(|record| (name, record)));
    }
    for name in before.0.keys().filter(|name| !after.0.contains_key(*name)) {
        println!("{name}: removed");
    }
    std::fs::write(PATH, after.to_string())?;
    println!("{} cases, {failures} failures", after.0.len());
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn record(draft: Draft) -> Result<Record, String> {
    let case =
        conformance::load(&draft.name, &draft.text.replace(BLANK, "= #0")).map_err(|e| e.to_string())?;
    let target = Target::from_name(case.target()).ok_or("its target is unknown")?;
    let gpu = Gpu::new(Config::default().card(Card::of(target)));
    let run = std::panic::AssertUnwindSafe(|| conformance::run(&gpu, &case));
    let outcome =
        std::panic::catch_unwind(run).map_err(|_| "the simulator panicked")?.map_err(|e| e.to_string())?;
    for (number, want) in (draft.expected)().iter().enumerate() {
        let (launch, _, found) = outcome.0.get(number).ok_or("an output is missing")?;
        if let Some(difference) = difference(found, want) {
            return Err(format!("launch {launch}: {difference}"));
        }
    }
    let expected = outcome.0.iter().map(|(_, _, bytes)| hash(bytes)).collect();
    Ok(Record { text: hash(draft.text.as_bytes()), certified: None, expected })
}

/// Where the simulator and what is known differ, in words.
fn difference(found: &[u8], want: &[u8]) -> Option<String> {
    let words = |bytes: &[u8]| -> Vec<u32> {
        bytes.chunks(4).map(|w| w.iter().rev().fold(0, |v, &b| v << 8 | u32::from(b))).collect()
    };
    let (found, want) = (words(found), words(want));
    if found.len() != want.len() {
        return Some(format!("{} words where {} are expected", found.len(), want.len()));
    }
    let wrong: Vec<usize> = (0..found.len()).filter(|&i| found[i] != want[i]).collect();
    let first = *wrong.first()?;
    let (count, of) = (wrong.len(), found.len());
    Some(format!(
        "{count} of {of} words differ, first [{first}]: {:#x}, {:#x} expected",
        found[first], want[first]
    ))
}
