//! The documents show the program of `examples/first_kernel.rs`, its text and its messages as they are.

#[path = "../examples/first_kernel.rs"]
mod first_kernel;

use dualgemm_sim::{Config, Gpu};
use std::path::Path;

const EXAMPLE: &str = include_str!("../examples/first_kernel.rs");
const DOCUMENTS: [&str; 2] = ["README.md", "../../docs/simulator.md"];

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

fn assert_shows(document: &str, what: &str) {
    assert!(
        read(document).contains(&format!("\n{what}```")),
        "{document} does not show, as it is now:\n{what}"
    );
}

#[test]
fn the_example_runs() {
    first_kernel::main().unwrap();
}

#[test]
fn the_documents_show_the_example_its_text_and_its_trap_exact() {
    let program = EXAMPLE.trim_start_matches(|c| c != '\n');
    let program = &program[program.find("\nuse ").unwrap() + 1..];
    let gpu = Gpu::new(Config::default());
    let trap = first_kernel::run(&gpu, &first_kernel::iota(false).unwrap()).unwrap_err();
    for document in DOCUMENTS {
        assert_shows(document, &format!("{trap}\n"));
    }
    // The README is compiled and run as documentation.
    assert_shows(DOCUMENTS[0], program);
    assert_shows(DOCUMENTS[1], &first_kernel::iota(true).unwrap());
}

/// Rows are `| check | what | [case](link) | message |`; every directory of broken kernels has one.
#[test]
fn the_messages_of_the_table_of_checks_are_the_golden_ones_exact() {
    let document = read(DOCUMENTS[1]);
    let mut directories = Vec::new();
    for row in document.lines().filter(|line| line.contains("../simulator/sim/tests/fail/")) {
        let Some((head, message)) = row.trim_end_matches(" |").rsplit_once(" | ") else { continue };
        let Some((_, case)) = head.rsplit_once('[') else { continue };
        let (case, _) = case.split_once(']').unwrap();
        let golden = read(&format!("tests/fail/{case}.stderr"));
        assert_eq!(message.trim_matches('`'), golden.lines().next().unwrap(), "{case}");
        directories.push(case.split_once('/').unwrap().0.to_string());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fail");
    let all = std::fs::read_dir(root).unwrap().map(|d| d.unwrap().file_name().into_string().unwrap());
    directories.sort();
    let mut all: Vec<String> = all.collect();
    all.sort();
    assert_eq!(directories, all);
}
