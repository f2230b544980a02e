//! Which forms of instructions are loaded: what an assembler refuses is refused, and what it takes and the simulator lacks is
//! refused by name. The lists are checked against the assembler in `crates/ptx/tests/near`.

use dualgemm_device::{Args, Device, LaunchSpec};
use dualgemm_ptx::ast::{Instruction, Version};
use dualgemm_ptx::isa::{self, Row, Sample};
use dualgemm_ptx::{Target, parse};
use dualgemm_sim::{Card, Config, Gpu};

/// What is said of the only instruction of a module, if it is not loaded.
fn refusal(sample: Sample, target: Target) -> Option<String> {
    let module = Row::sample_module(&[sample], target, Version::new(9, 0));
    Gpu::new(Config::default().card(Card::of(target)))
        .load(&module.to_string())
        .err()
        .map(|error| error.to_string())
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

/// A call through a pointer without result, `volatile` local memory, votes of some threads of a CTA, 128 bits at once.
const OTHERS: &str = include_str!("ptx/forms_of_others.ptx");

#[test]
fn forms_of_others_do_what_their_rows_say_exact() {
    let gpu = Gpu::new(Config::default());
    let module = gpu.load(OTHERS).unwrap();
    let kernel = gpu.function(module, "k").unwrap();
    let out = gpu.alloc(96 * 32).unwrap();
    let spec = LaunchSpec::new(kernel, [1, 1, 1], [96, 1, 1]).args(Args::new().ptr(out));
    gpu.launch(&spec).unwrap();
    let mut bytes = vec![0; 96 * 32];
    gpu.copy_from(&mut bytes, out).unwrap();
    let found = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    let want = (0..96).flat_map(|t| [if t < 64 { 105 << 32 | t } else { t }, 0, 3 * t, t]);
    assert!(found.eq(want), "{bytes:?}");
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
