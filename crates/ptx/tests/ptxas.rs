//! NVIDIA's assembler agrees with the table: it takes every sample on every target a row claims, refuses every
//! sample on every other target, and takes every method of the builder without spills.
//!
//! `ptxas` comes from the PyPI package nvidia-cuda-nvcc (the table was checked against 13.0.88 and 13.5.37); the
//! environment variable PTXAS names it if it is not on PATH.

mod methods;
mod near;

use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::isa::{self, Family, Row, Sample};
use dualgemm_ptx::{Target, parse};
use std::collections::BTreeSet;
use std::process::Command;

/// Rows that ptxas 13.0 takes on targets that lack them; 13.5 refuses them there, as the specification says.
const LENIENT: [&str; 1] = ["fence_one_way"];

const NEWEST: Version = Version::new(9, 0);

/// What ptxas says about a module.
struct Verdict {
    success: bool,
    messages: String,
}

fn assemble(module: &Module, target: Target, flags: &[&str]) -> Verdict {
    let dir = tempfile::tempdir().unwrap();
    let (input, output) = (dir.path().join("in.ptx"), dir.path().join("out.cubin"));
    std::fs::write(&input, module.to_string()).unwrap();
    let ptxas = std::env::var_os("PTXAS").unwrap_or_else(|| "ptxas".into());
    let run = Command::new(&ptxas)
        .arg(format!("-arch={target}"))
        .args(flags)
        .arg(&input)
        .arg("-o")
        .arg(&output)
        .output()
        .unwrap_or_else(|e| panic!("{}: {e}; set PTXAS", ptxas.display()));
    let messages =
        format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    Verdict { success: run.status.success(), messages }
}

fn samples<'a>(rows: impl Iterator<Item = &'static Row> + 'a) -> Vec<Sample> {
    rows.flat_map(Row::samples).collect()
}

/// The instructions of `module` that a message of ptxas points at, as text.
fn refused(module: &Module, messages: &str) -> BTreeSet<(u32, String)> {
    let lines: BTreeSet<u32> = messages
        .match_indices("line ")
        .filter_map(|(at, _)| messages[at + 5..].split(|c: char| !c.is_ascii_digit()).next()?.parse().ok())
        .collect();
    // Long instructions take several lines; a message may name any of them.
    let read = parse::module(&module.to_string()).unwrap();
    let all: Vec<_> = read.functions().flat_map(|f| f.instructions()).collect();
    let mut found = BTreeSet::new();
    for line in lines {
        let at = all.partition_point(|i| i.line.0 <= line);
        if let Some(instruction) = at.checked_sub(1).map(|i| all[i]) {
            found.insert((instruction.line.0, instruction.to_string()));
        }
    }
    found
}

#[test]
#[ignore = "needs ptxas"]
fn every_sample_assembles_on_every_claimed_target() {
    for &family in Family::ALL {
        for &target in Target::ALL {
            let samples = samples(family.rows().iter().filter(|r| r.targets.contains(target)));
            if samples.is_empty() {
                continue;
            }
            let module = Row::sample_module(&samples, target, NEWEST);
            let verdict = assemble(&module, target, &["-O0"]);
            let refused = refused(&module, &verdict.messages);
            assert!(verdict.success, "{} on {target}: {refused:#?}\n{}", family.as_str(), verdict.messages);
        }
    }
}

#[test]
#[ignore = "needs ptxas"]
fn every_form_of_others_assembles() {
    for &target in Target::ALL {
        // Rows that are newer than the oldest assembler asked are taken on the word of nvcc's text.
        let known = |row: &&Row| row.targets.contains(target) && row.since <= NEWEST;
        let samples = samples(isa::foreign().filter(known));
        let module = Row::sample_module(&samples, target, NEWEST);
        let verdict = assemble(&module, target, &["-O0"]);
        let refused = refused(&module, &verdict.messages);
        assert!(verdict.success, "{target}: {refused:#?}\n{}", verdict.messages);
    }
}

#[test]
#[ignore = "needs ptxas"]
fn every_sample_is_refused_on_every_other_target() {
    for &family in Family::ALL {
        for &target in Target::ALL {
            let missing = |row: &&Row| !row.targets.contains(target) && !LENIENT.contains(&row.name);
            let samples = samples(family.rows().iter().filter(missing));
            if samples.is_empty() {
                continue;
            }
            let module = Row::sample_module(&samples, target, NEWEST);
            let verdict = assemble(&module, target, &["-O0"]);
            assert!(!verdict.success, "{} on {target}", family.as_str());
            let refused: BTreeSet<String> =
                refused(&module, &verdict.messages).into_iter().map(|(_, text)| text).collect();
            for sample in &samples {
                let text = sample.instruction.to_string();
                assert!(refused.contains(&text), "{target} takes {text} ({})", sample.row.name);
            }
        }
    }
}

#[test]
#[ignore = "needs ptxas"]
fn every_sample_assembles_in_its_first_version() {
    for &target in Target::ALL {
        let first = |row: &Row| row.since.max(target.since());
        let legal = || isa::rows().filter(move |row| row.targets.contains(target));
        for version in legal().map(first).collect::<BTreeSet<_>>() {
            let module =
                Row::sample_module(&samples(legal().filter(|r| first(r) == version)), target, version);
            let verdict = assemble(&module, target, &["-O0"]);
            let refused = refused(&module, &verdict.messages);
            assert!(verdict.success, "PTX {version} on {target}: {refused:#?}\n{}", verdict.messages);
        }
    }
}

#[test]
#[ignore = "needs ptxas"]
fn kernels_assemble_without_spills() {
    for kernel in methods::MODULES {
        let module = methods::module(&kernel).unwrap();
        let flags = ["-v", "-warn-spills", "-warn-lmem-usage", "-Werror"];
        let verdict = assemble(&module, kernel.1, &flags);
        assert!(verdict.success, "{} on {}:\n{}", kernel.0, kernel.1, verdict.messages);
        // setmaxnreg ignored (C7508), wgmma serialised (C7510, C7515): information, not warnings, to ptxas.
        for code in ["C7508", "C7510", "C7515"] {
            assert!(!verdict.messages.contains(code), "{} on {}:\n{}", kernel.0, kernel.1, verdict.messages);
        }
    }
}
