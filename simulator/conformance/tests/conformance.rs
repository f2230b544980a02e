//! Every conformance case gives in the simulator what is recorded, no case changes unnoticed, and every row of the
//! instruction table has one.

use dualgemm_conformance::conformance::record::{RECORDED, Records};
use dualgemm_conformance::conformance::report::{Devices, Result as Agreement, run_all};
use dualgemm_conformance::conformance::{Argument, Case, data, hash, load, load_all};
use dualgemm_conformance::generate::{BLANK, Draft, drafts};
use dualgemm_device::Device;
use dualgemm_ptx::{Target, isa, parse};
use dualgemm_sim::report::Card;
use dualgemm_sim::{Config, Gpu};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::sync::LazyLock;

static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| load_all().unwrap_or_else(|e| panic!("{e}")));

fn simulator(target: Target) -> Box<dyn Device> {
    Box::new(Gpu::new(Config::default().card(Card::of(target))))
}

#[test]
fn every_case_gives_in_the_simulator_what_is_recorded_exact() {
    let wrong: Vec<String> = CASES
        .par_iter()
        .filter_map(|case| {
            let target = Target::from_name(case.target()).unwrap();
            match dualgemm_conformance::conformance::run(&*simulator(target), case) {
                Ok(outcome) if outcome.is_expected(case) => None,
                Ok(_) => Some(format!("{}: the result is not what is recorded", case.name)),
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
    run_all(&devices, |case, result| seen.push((case.name.clone(), result.word()))).unwrap();
    let names = ["ldmatrix", "ldmatrix_b8", "ldmatrix_unpack", "ldmatrix_window"];
    assert_eq!(seen, names.map(|n| (format!("mma/{n}"), "simulator only")));
}

#[test]
fn every_row_has_a_case() {
    let covered: BTreeSet<String> = CASES.iter().flat_map(|c| c.rows.clone()).collect();
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
    for case in CASES.iter() {
        let module = parse::module(&case.ptx).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let mut found = BTreeSet::new();
        for item in &module.items {
            let dualgemm_ptx::ast::Item::Function(f) = item else { continue };
            collect(f.body.as_deref().unwrap_or_default(), &mut found);
        }
        for row in &case.rows {
            assert!(found.contains(row.as_str()), "{} does not contain {row}", case.name);
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

fn draft(name: &str, text: &str) -> Draft {
    Draft { name: name.into(), text: text.into(), expected: Box::new(Vec::new) }
}

/// What cards agreed with stays: the counts of `benchmarks/record/conformance-h100-2026-11-28.md`. Later cases wait for a card.
#[test]
fn cards_agreed_with_as_many_cases_as_the_record_of_their_run_says() {
    let count = |word: &str| {
        let said = |c: &&Case| c.certified.as_deref().is_some_and(|said| said.starts_with(word));
        CASES.iter().filter(said).count()
    };
    assert_eq!((CASES.len(), count("equal "), count("close ")), (502, 404, 16));
    assert_eq!(Records::parse(RECORDED).unwrap().to_string(), RECORDED, "cases.tsv is not as it is written");
}

#[test]
fn what_a_card_says_of_a_case_is_kept() {
    let mut records = Records::parse("a/x\t07\tequal H100 2026-11-28\t07\n").unwrap();
    let mut after = |name: &str, result: Agreement| {
        records.certify(name, &result, "H200 2026-12-01");
        records.0["a/x"].certified.clone()
    };
    assert_eq!(after("a/x", Agreement::SimulatorOnly).unwrap(), "equal H100 2026-11-28");
    assert_eq!(after("a/y", Agreement::Equal).unwrap(), "equal H100 2026-11-28");
    assert_eq!(after("a/x", Agreement::Close).unwrap(), "close H200 2026-12-01");
    assert_eq!(after("a/x", Agreement::Equal).unwrap(), "equal H200 2026-12-01");
    assert_eq!(after("a/x", Agreement::Card("stopped".into())), None);
}

#[test]
fn a_case_that_is_not_as_recorded_is_refused_with_what_to_do() {
    let text = format!("//! launch k\n//! out u32 4 {BLANK}\n");
    let line = format!("a/x\t{:016x}\tequal H100 2026-11-28\t0000000000000007\n", hash(text.as_bytes()));
    let complete = |tsv: &str, drafts| Records::parse(tsv).and_then(|records| records.complete(drafts));
    let cases = complete(&line, vec![draft("a/x", &text)]).unwrap();
    assert_eq!(cases[0].ptx, text.replace(BLANK, "= #0000000000000007"));
    assert_eq!(cases[0].certified.as_deref(), Some("equal H100 2026-11-28"));

    let refused = |tsv: &str, drafts| complete(tsv, drafts).unwrap_err().to_string();
    let record = "`cargo run --release -p dualgemm-conformance --example record`";
    let changed = format!("{text}// More.\n");
    assert_eq!(
        refused(&line, vec![draft("a/x", &changed)]),
        format!(
            "a/x: the generated text has the hash {:016x}, not that of the text recorded in cases.tsv, {:016x}, which a \
             card agreed with (equal H100 2026-11-28). If the change is meant, {record} records it, and a card has to agree \
             again; if not, what generates it (src/generate, the row's samples) has to change back",
            hash(changed.as_bytes()),
            hash(text.as_bytes())
        )
    );
    let both = vec![draft("a/x", &text), draft("a/y", &text)];
    assert_eq!(refused(&line, both), format!("a/y: cases.tsv has no line for it; {record} writes one"));
    assert_eq!(
        refused(&line, Vec::new()),
        format!("a/x: cases.tsv has a line for it, but nothing generates it; {record} removes the line")
    );
    assert_eq!(
        refused(&line.replace("\t0000000000000007", "\t"), vec![draft("a/x", &text)]),
        format!("a/x: cases.tsv has 0 outputs of it where 1 belong; {record} writes them")
    );
    assert_eq!(
        refused("a/x\tzero\t-\t0\n", Vec::new()),
        "a/x: its line in cases.tsv is not name, hash, card and hashes, separated by tabs"
    );
}

/// What the drafts of chips that were not at hand compute by themselves is what is recorded, so what the simulator gives.
#[test]
fn what_is_known_without_the_simulator_is_recorded_exact() {
    let known: Vec<(String, Vec<u64>)> = drafts()
        .into_par_iter()
        .map(|draft| (draft.name, (draft.expected)().iter().map(|bytes| hash(bytes)).collect()))
        .filter(|(_, outputs): &(_, Vec<u64>)| !outputs.is_empty())
        .collect();
    for (name, outputs) in &known {
        let case = CASES.iter().find(|case| case.name == *name).unwrap();
        let arguments = case.launches.iter().flat_map(|launch| &launch.arguments);
        let expected: Vec<u64> = arguments
            .filter_map(|argument| match argument {
                Argument::Buffer(buffer) => buffer.expected,
                _ => None,
            })
            .collect();
        assert_eq!(*outputs, expected, "{name}");
    }
    let of_tcgen05 = |name: &str| name.starts_with("tcgen05/");
    let computed = known.iter().filter(|(name, _)| of_tcgen05(name)).count();
    assert_eq!(computed, CASES.iter().filter(|case| of_tcgen05(&case.name)).count());
    assert!(known.len() >= 54, "{}", known.len());
}

#[test]
fn a_wrong_expectation_is_noticed() {
    let case = CASES.iter().find(|c| c.name == "control/branches").unwrap();
    let at = case.ptx.find("= #").unwrap() + 3;
    let digit = if &case.ptx[at..=at] == "0" { "1" } else { "0" };
    let mut text = case.ptx.clone();
    text.replace_range(at..=at, digit);
    let broken = load(&case.name, &text).unwrap();
    let outcome = dualgemm_conformance::conformance::run(&*simulator(Target::Sm90a), &broken).unwrap();
    assert!(!outcome.is_expected(&broken));
}

#[test]
fn malformed_heads_are_refused_with_the_line() {
    for (head, message) in [
        ("//! launch k\n//! in f33 iota 0 4", "x, line 2: `f33` is no element type"),
        ("//! launch k\n//! in f32 random 0 4", "x, line 2: `random` is no generator"),
        ("//! launch k\n//! out u32 4", "x, line 2: `=` and what is expected are missing"),
        ("//! launch k\n//! out u32 4 = 17", "x, line 2: `17` where `#` and a hash in hexadecimal belong"),
        ("//! launch k\n//! out u32 4 = #17 about", "x, line 2: `about` where `within` or nothing belongs"),
        ("//! launch k grid many", "x, line 1: `many` where a number belongs"),
        ("//! in u32 iota 0 4", "x, line 1: an argument before any `launch`"),
        (
            "//! launch k\n//! in u64 iota 0 134217729",
            "x, line 2: 134217729 elements of u64: a buffer has at most 1073741824 bytes",
        ),
        (
            "//! launch k\n//! u32 1\n//! map 0 u8 dims 64",
            "x, line 3: a map of argument 0, which is no buffer before it",
        ),
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
