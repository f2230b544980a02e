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
    for (target, version, statement, message) in [
        (
            "sm_100a",
            "9.0",
            "wgmma.fence.sync.aligned;",
            "k, line 5: `wgmma.fence.sync.aligned` does not exist on sm_100a; wgmma_fence needs sm_90a",
        ),
        (
            "sm_90a",
            "9.0",
            "tcgen05.wait::ld.sync.aligned;",
            "k, line 5: `tcgen05.wait::ld.sync.aligned` does not exist on sm_90a; tcgen05_wait needs sm_100a, \
             sm_100f, sm_103a",
        ),
        (
            "sm_90a",
            "7.8",
            "elect.sync _|p, -1;",
            "target sm_90a needs PTX 8.0, the module is written for PTX 7.8",
        ),
        (
            "sm_100a",
            "8.6",
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [r0], rd0, rd1, r1, [r2], [r3], p;",
            "k, line 5: `tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [r0], rd0, rd1, r1, [r2], \
             [r3], p` does not exist in PTX 8.6; tcgen05_mma_block16 needs PTX 8.8",
        ),
        (
            "sm_80",
            "8.0",
            "add.u32 r0, r1, f2;",
            "k, line 5: `add.u32 r0, r1, f2`: operand 3 must be `b`: a .u32 register or a number (add_int)",
        ),
        (
            "sm_80",
            "8.0",
            "add.f32 f0, f1;",
            "k, line 5: `add.f32 f0, f1`: operand 3 must be `b`: a .f32 register or a number (add_f32)",
        ),
        (
            "sm_80",
            "8.0",
            "ld.global.b32 r0, [r1];",
            "k, line 5: `ld.global.b32 r0, [r1]`: operand 2 must be `[a]`: an address in the global space (ld)",
        ),
        (
            "sm_80",
            "8.0",
            "cp.async.cg.shared.global [r0], [rd0], 8;",
            "k, line 5: `cp.async.cg.shared.global [r0], [rd0], 8`: operand 3 must be `n`: the number 16 \
             (cp_async_cg)",
        ),
        (
            "sm_90a",
            "8.0",
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {f0, f1, f2}, rd0, rd1, p, 1, 1, 0, 0;",
            "k, line 5: `wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {f0, f1, f2}, rd0, rd1, p, 1, 1, 0, 0`: \
             operand 1 must be `{ }` of 4 times `d`: a .f32 register (wgmma_f16_ss)",
        ),
        ("sm_80", "8.0", "@r1 ret;", "k, line 5: `@r1 ret`: the guard r1 is not a predicate register"),
        (
            "sm_80",
            "8.0",
            "cnot.b8 h, h;",
            "k, line 5: `cnot.b8 h, h`: no such instruction is known; the nearest forms are: cnot.<T=b16|b32|b64>  \
             d:T, a:T",
        ),
        (
            "sm_42",
            "8.0",
            "ret;",
            "target sm_42 is not known; known are sm_80, sm_89, sm_90a, sm_100a, sm_100f, sm_103a, sm_120a, sm_120f, sm_121a",
        ),
        (
            "sm_80",
            "8.0",
            "lop3.b32 r0, r1, r2, r3, 0xFE; mov.b64 rd0, {r1, 0}; mov.u32 r1, %tid.x; @!p bra END; END: ret;",
            "",
        ),
    ] {
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
