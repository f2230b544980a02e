//! Which forms of instructions are loaded: what an assembler refuses is refused, and what it takes and the simulator lacks is
//! refused by name. The lists are checked against the assembler in `crates/ptx/tests/near`.

use dualgemm_device::{Args, Device, LaunchSpec};
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

/// A call through a pointer without result, `volatile` local memory, votes of some threads of a CTA, 128 bits at once.
const OTHERS: &str = ".version 9.1 .target sm_90a .address_size 64
.func number(.param .b64 at) {
    .reg .b64 %at; .reg .b32 %t;
    ld.param.b64 %at, [at];
    mov.u32 %t, %tid.x;
    st.mmio.relaxed.sys.global.b32 [%at], %t;
    ret;
}
.visible .entry k(.param .u64 out) {
    .reg .pred %p<3>; .reg .b32 %r<3>; .reg .b64 %rd<8>; .reg .b128 %rq<1>;
    .local .align 16 .b8 own[16];
    .param .b64 at;
    type: .callprototype _ (.param .b64 _);
    ld.param.u64 %rd0, [out];
    mov.u32 %r0, %tid.x;
    mad.wide.u32 %rd0, %r0, 32, %rd0;
    mov.u64 %rd1, number;
    st.param.b64 [at], %rd0;
    call %rd1, (at), type;
    cvt.u64.u32 %rd2, %r0;
    mul.lo.u64 %rd3, %rd2, 3;
    st.volatile.local.v2.b64 [own], {%rd2, %rd3};
    ld.volatile.local.v2.u64 {%rd4, %rd5}, [own];
    mov.b128 %rq0, {%rd5, %rd4};
    st.relaxed.gpu.global.b128 [%rd0+16], %rq0;
    setp.ge.u32 %p0, %r0, 64;
    @%p0 ret;
    setp.lt.u32 %p1, %r0, 5;
    barrier.red.popc.u32 %r1, 1, 64, %p1;
    barrier.cta.red.and.aligned.pred %p2, 1, 64, %p1;
    @!%p2 add.u32 %r1, %r1, 100;
    st.global.u32 [%rd0+4], %r1;
}";

#[test]
fn forms_of_others_do_what_their_rows_say_exact() {
    let gpu = Gpu::new(Config::default());
    let module = gpu.load(OTHERS).unwrap();
    let kernel = gpu.function(module, "k").unwrap();
    let out = gpu.alloc(96 * 32).unwrap();
    let spec = LaunchSpec::new(kernel, [1, 1, 1], [96, 1, 1]).args(Args::new().ptr(out));
    // SAFETY: the device is simulated and fails a launch that leaves its memory.
    unsafe { gpu.launch(&spec) }.unwrap();
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
