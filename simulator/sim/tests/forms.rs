//! Which forms of instructions are loaded: what an assembler refuses is refused, and what it takes and the simulator lacks is
//! refused by name. The lists are checked against the assembler in `crates/ptx/tests/near`.

use dualgemm_device::Device;
use dualgemm_ptx::ast::{Instruction, Version};
use dualgemm_ptx::isa::{self, Row, Sample};
use dualgemm_ptx::{Target, parse};
use dualgemm_sim::{Card, Config, Gpu};

/// What is said of the only instruction of a module, if it is not loaded.
fn refusal(sample: Sample, target: Target) -> Option<String> {
    let card = match target.as_str() {
        name if name.starts_with("sm_12") => Card::RtxPro6000,
        name if name.starts_with("sm_10") => Card::B200,
        _ => Card::H100,
    };
    let module = Row::sample_module(&[sample], target, Version::new(9, 0));
    Gpu::new(Config::default().card(card)).load(&module.to_string()).err().map(|error| error.to_string())
}

fn instruction(text: &str) -> Instruction {
    let text = format!(".version 9.0 .target sm_90a .address_size 64 .visible .entry k() {{ {text}; }}");
    let module = parse::module(&text).unwrap();
    let mut all = module.functions().flat_map(|function| function.instructions());
    all.next().unwrap().clone()
}

#[test]
fn forms_that_are_lacking_are_refused_by_name() {
    let list = include_str!("../../../crates/ptx/tests/near/lacking.tsv");
    for line in list.lines() {
        let [row, target, text] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let sample = Sample { row: isa::row(row).unwrap(), instruction: instruction(text) };
        let refusal = refusal(sample, Target::from_name(target).unwrap()).unwrap_or_else(|| panic!("{line}"));
        assert!(
            refusal.starts_with("cannot load the PTX: the simulator has no such form: kernel_"),
            "{refusal}"
        );
    }
    assert!(list.lines().count() > 400);
}

#[test]
fn forms_of_others_are_loaded() {
    for row in isa::foreign() {
        let target = row.targets.iter().next().unwrap();
        for sample in row.samples() {
            let text = sample.instruction.to_string();
            assert_eq!(refusal(sample, target), None, "{}: {text}", row.name);
        }
    }
}

#[test]
fn no_modifier_is_taken_twice() {
    for row in isa::rows() {
        let target = row.targets.iter().next().unwrap();
        let sample = row.samples().swap_remove(0);
        for at in 0..sample.instruction.modifiers.len() {
            let mut twice = sample.clone();
            twice.instruction.modifiers.insert(at, sample.instruction.modifiers[at].clone());
            let text = twice.instruction.to_string();
            // A second type makes another form of some: `setp.ne.s32.s32` it does not.
            if isa::find(&twice.instruction).is_empty() {
                assert!(refusal(twice, target).is_some(), "{}: {text}", row.name);
            }
        }
    }
}
