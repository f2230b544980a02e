//! The table agrees with itself: each row's sample instructions are legal exactly where the row says, survive
//! printing and reading, and are recognised as that row.

use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::isa::{self, Row};
use dualgemm_ptx::legal::{self, Illegal, Problem};
use dualgemm_ptx::{Target, parse};

const NEWEST: Version = Version::new(9, 0);

#[test]
fn every_sample_is_legal_on_every_claimed_target() {
    for row in isa::rows() {
        let samples = row.samples();
        assert!(!samples.is_empty(), "{}", row.name);
        for target in row.targets.iter() {
            let illegal = legal::check(&Row::sample_module(&samples, target, NEWEST));
            assert!(illegal.is_empty(), "{} on {target}: {}", row.name, illegal[0]);
        }
    }
}

#[test]
fn every_sample_is_refused_on_every_other_target() {
    for row in isa::rows() {
        let samples = row.samples();
        for target in Target::ALL.iter().filter(|t| !row.targets.contains(**t)) {
            let illegal = legal::check(&Row::sample_module(&samples, *target, NEWEST));
            assert_eq!(illegal.len(), samples.len(), "{} on {target}", row.name);
            for error in illegal {
                assert!(
                    matches!(error, Illegal::Instruction { problem: Problem::Target { .. }, .. }),
                    "{error}"
                );
            }
        }
    }
}

#[test]
fn every_sample_is_refused_before_its_version() {
    for row in isa::rows().filter(|row| row.since > Version::new(7, 0)) {
        let target = row.targets.iter().next().unwrap();
        let before = Version::new(row.since.major - (row.since.minor == 0) as u16, (row.since.minor + 8) % 9);
        let samples = row.samples();
        for sample in &samples {
            let illegal = legal::check(&Row::sample_module(std::slice::from_ref(sample), target, before));
            let version =
                |e: &Illegal| matches!(e, Illegal::Instruction { problem: Problem::Version { .. }, .. });
            let refused = illegal.iter().any(version);
            // Without any of its options, a form can coincide with one of another row.
            let shared = illegal.is_empty() && isa::find(&sample.instruction).len() > 1;
            assert!(refused || shared, "{}: {} in {before}: {illegal:?}", row.name, sample.instruction);
        }
    }
}

#[test]
fn every_sample_reads_back_as_its_row() {
    for row in isa::rows() {
        let samples = row.samples();
        let target = row.targets.iter().next().unwrap();
        let module = Row::sample_module(&samples, target, NEWEST);
        let read = parse::module(&module.to_string()).unwrap_or_else(|e| panic!("{}: {e}", row.name));
        assert_eq!(read, module, "{}", row.name);
        for sample in samples {
            assert!(isa::find(&sample.instruction).contains(&row), "{}: {}", row.name, sample.instruction);
        }
    }
}

fn first_error(target: &str, version: &str, statements: &str) -> String {
    let text = format!(
        ".version {version}\n.target {target}\n.entry k() {{\n.reg .pred p; .reg .b32 r<8>; .reg .b64 rd<4>; \
         .reg .f32 f<64>; .reg .b16 h;\n{statements}\n}}"
    );
    let module: Module = parse::module(&text).unwrap();
    legal::check(&module).first().map(ToString::to_string).unwrap_or_default()
}

#[test]
fn messages_name_the_instruction_and_what_it_needs() {
    let lines = include_str!("messages.txt").lines().filter(|line| !line.starts_with('#'));
    let mut lines = lines.peekable();
    while let Some(case) = lines.next() {
        let mut parts = case.splitn(3, ' ');
        let [target, version, statement] = [(); 3].map(|()| parts.next().unwrap());
        let message = lines.next_if(|line| line.starts_with("    ")).unwrap_or_default().trim_start();
        assert_eq!(first_error(target, version, statement), message, "{statement}");
    }
}

#[test]
fn handwritten_and_compiled_files_are_legal() {
    for (name, text) in [
        ("sm90a_wgmma", include_str!("data/sm90a_wgmma.ptx")),
        ("sm100a_nvfp4", include_str!("data/sm100a_nvfp4.ptx")),
        ("sm120a_nvfp4", include_str!("data/sm120a_nvfp4.ptx")),
        ("nvcc_small", include_str!("data/nvcc_small.ptx")),
    ] {
        let illegal = legal::check(&parse::module(text).unwrap());
        assert!(illegal.is_empty(), "{name}: {illegal:#?}");
    }
}
