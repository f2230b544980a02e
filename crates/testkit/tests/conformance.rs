//! Every conformance file gives in the simulator what it says, and every row of the instruction table has one.

use dualgemm_device::Device;
use dualgemm_ptx::{Target, isa, parse};
use dualgemm_sim::report::Card;
use dualgemm_sim::{Config, Gpu};
use dualgemm_testkit::conformance::report::{Devices, run_all};
use dualgemm_testkit::conformance::{data, load, load_all};
use rayon::prelude::*;
use std::collections::BTreeSet;

fn simulator(target: Target) -> Box<dyn Device> {
    Box::new(Gpu::new(Config::default().card(Card::of(target))))
}

#[test]
fn every_case_gives_in_the_simulator_what_its_file_says_exact() {
    let wrong: Vec<String> = load_all()
        .unwrap()
        .into_par_iter()
        .filter_map(|case| {
            let target = Target::from_name(case.target()).unwrap();
            match dualgemm_testkit::conformance::run(&*simulator(target), &case) {
                Ok(outcome) if outcome.is_expected(&case) => None,
                Ok(_) => Some(format!("{}: the result is not what the file says", case.file)),
                Err(error) => Some(error.to_string()),
            }
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_run_reports_each_case_once() {
    let mut seen = Vec::new();
    let devices = Devices { simulator: &simulator, card: None, only: "mma/ldmatrix" };
    run_all(&devices, |case, result| seen.push((case.file.clone(), result.word()))).unwrap();
    let names = ["ldmatrix", "ldmatrix_b8", "ldmatrix_unpack", "ldmatrix_window"];
    assert_eq!(seen, names.map(|n| (format!("mma/{n}.ptx"), "simulator only")));
}

#[test]
fn every_row_has_a_case() {
    let covered: BTreeSet<String> = load_all().unwrap().into_iter().flat_map(|c| c.rows).collect();
    for row in &covered {
        assert!(isa::row(row).is_some(), "{row} is no row of the table");
    }
    for row in isa::rows() {
        assert!(covered.contains(row.name), "{} has no case", row.name);
    }
}

/// A case covers a row only if it executes an instruction of it.
#[test]
fn every_case_contains_the_rows_that_it_names() {
    for case in load_all().unwrap() {
        let module = parse::module(&case.ptx).unwrap_or_else(|e| panic!("{}: {e}", case.file));
        let mut found = BTreeSet::new();
        for item in &module.items {
            let dualgemm_ptx::ast::Item::Function(f) = item else { continue };
            collect(f.body.as_deref().unwrap_or_default(), &mut found);
        }
        for row in &case.rows {
            assert!(found.contains(row.as_str()), "{} does not contain {row}", case.file);
        }
    }
}

fn collect(body: &[dualgemm_ptx::ast::Statement], found: &mut BTreeSet<&'static str>) {
    for statement in body {
        match statement {
            dualgemm_ptx::ast::Statement::Instruction(i) => {
                found.extend(isa::find(i).into_iter().map(|row| row.name));
            }
            dualgemm_ptx::ast::Statement::Block(inner) => collect(inner, found),
            _ => {}
        }
    }
}

#[test]
fn a_wrong_expectation_is_noticed() {
    let case = load_all().unwrap().into_iter().find(|c| c.file == "control/branches.ptx").unwrap();
    let at = case.ptx.find("= #").unwrap() + 3;
    let digit = if &case.ptx[at..=at] == "0" { "1" } else { "0" };
    let mut text = case.ptx.clone();
    text.replace_range(at..=at, digit);
    let broken = load(&case.file, &text).unwrap();
    let outcome = dualgemm_testkit::conformance::run(&*simulator(Target::Sm90a), &broken).unwrap();
    assert!(!outcome.is_expected(&broken));
}

#[test]
fn malformed_heads_are_refused_with_the_line() {
    for (head, message) in [
        ("//! launch k\n//! in f33 iota 0 4", "x, line 2: `f33` is no element type"),
        ("//! launch k\n//! in f32 random 0 4", "x, line 2: `random` is no generator"),
        ("//! launch k\n//! out u32 4", "x, line 2: `=` and what is expected are missing"),
        ("//! launch k grid many", "x, line 1: `many` where a number belongs"),
        ("//! in u32 iota 0 4", "x, line 1: an argument before any `launch`"),
        (".version 8.0", "x, line 1: no `launch` line before the module"),
    ] {
        assert_eq!(load("x", head).unwrap_err().to_string(), message);
    }
}

#[test]
fn generators_cover_what_they_promise_exact() {
    let data = |ty: &str, generator: &str, seed, count| data::Data {
        ty: ty.into(),
        generator: generator.into(),
        seed,
        count,
    };
    let words = |d: data::Data| -> Vec<u16> {
        d.bytes().chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    };
    assert_eq!(words(data("u16", "all16", 0, 65536)), (0..=u16::MAX).collect::<Vec<_>>());
    let pairs: BTreeSet<(u16, u16)> =
        words(data("f16", "edges", 0, 256)).into_iter().zip(words(data("f16", "edges", 1, 256))).collect();
    assert_eq!(pairs.len(), 256);
}
