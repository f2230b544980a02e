//! mbarriers: every form, on a barrier of each thread's own, with the phases observed.

use super::kernel::renamed;
use super::raw::Raw;
use super::{Draft, is_generic, samples, set_bases};
use dualgemm_ptx::ast::{Immediate, Instruction, Operand};
use dualgemm_ptx::isa::{Family, Row};

/// The files.
pub fn drafts() -> Vec<Draft> {
    let rows = Family::Mbarrier.rows().iter().filter(|r| r.name.starts_with("mbarrier"));
    rows.map(draft).chain([shared_barrier()]).collect()
}

/// The barrier of 3 phases that all threads of a CTA share.
fn shared_barrier() -> Draft {
    Raw::new(
        "mbarrier/phases",
        "mbarrier_init_window mbarrier_arrive_window mbarrier_try_wait_parity mbarrier_inval_window",
        "block 128",
        "u32 128",
    )
    .body(include_str!("ptx/phases.ptx"))
    .draft()
}

/// A barrier of each thread's own, by a shared and by a generic address.
const BARRIERS: &str = ".shared .align 8 .b64 barriers[32];
     mov.u32 %r2, barriers;
     mad.lo.u32 %r3, %t, 8, %r2;
     cvt.u64.u32 %rd1, %r3;
     cvta.shared.u64 %rd2, %rd1;\n";

fn draft(row: &'static Row) -> Draft {
    let name = row.name;
    let remote = name.contains("remote");
    let mut samples = samples(row);
    if name == "mbarrier_pending_count" {
        samples.truncate(1);
    }
    let (launch, threads) = if remote { ("grid 2 block 32 cluster 2", 64) } else { ("block 32", 32) };
    let count = samples.len() * 5 * threads;
    let mut body = String::from(BARRIERS);
    let mut sync = String::new();
    if remote {
        body +=
            "mov.u32 %r4, %cluster_ctarank;\nxor.b32 %r4, %r4, 1;\nmapa.shared::cluster.u32 %r5, %r3, %r4;\n";
        sync += "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n";
    }
    for (i, sample) in samples.iter().enumerate() {
        let expects = name.contains("expect_tx") || name.contains("complete_tx");
        let waits = name.contains("test_wait") || name.contains("try_wait");
        let changed = adapted(name, sample, (expects, waits, remote));
        let init = if name.starts_with("mbarrier_init") {
            String::new()
        } else {
            "mbarrier.init.shared.b64 [%r3], 2;\n".into()
        };
        body += &format!("// {sample}\n{init}mov.u64 %rd10, 0;\nmov.u32 %r6, 0;\nsetp.ne.u32 %p1, %t, %t;\n");
        if remote {
            body += "fence.mbarrier_init.release.cluster;\n";
        }
        body += &sync;
        if name == "mbarrier_complete_tx" {
            body += "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r3], 16;\n";
        }
        if name == "mbarrier_pending_count" || waits {
            body += "mbarrier.arrive.shared.b64 %rd10, [%r3];\n";
        }
        if waits {
            body += "mbarrier.arrive.shared.b64 _, [%r3];\n";
        }
        if name.starts_with("mbarrier_inval") {
            body += "mbarrier.arrive.shared.b64 _, [%r3];\n";
            body += &format!("{changed};\nmbarrier.init.shared.b64 [%r3], 2;\n");
        } else {
            body += &format!("{changed};\n");
        }
        body += &sync;
        let dest =
            matches!(sample.operands.first(), Some(Operand::Ident(r)) if r.as_str().starts_with("%rd"));
        if dest {
            body += "mbarrier.pending_count.b64 %r6, %rd10;\n";
        }
        let at = |k: usize| (i * 5 + k) * threads * 4;
        let store =
            |k: usize, p: &str| format!("selp.u32 %r7, 1, 0, {p};\nst.global.u32 [%out+{}], %r7;\n", at(k));
        body += &format!("st.global.u32 [%out+{}], %r6;\n", at(0));
        body += &store(1, "%p1");
        body += &format!("mbarrier.test_wait.parity.shared.b64 %p2, [%r3], 0;\n{}", store(2, "%p2"));
        // To the end of the first phase, then one arrival of the second.
        let arrives = name.contains("arrive") || name == "mbarrier_pending_count";
        let left = match () {
            () if waits => 0,
            () if arrives => 1,
            () => 2,
        };
        for _ in 0..left {
            body += "mbarrier.arrive.shared.b64 _, [%r3];\n";
        }
        if expects && name != "mbarrier_complete_tx" {
            body += "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r3], 16;\n";
        }
        body += &format!("mbarrier.test_wait.parity.shared.b64 %p2, [%r3], 0;\n{}", store(3, "%p2"));
        body += "mbarrier.arrive.shared.b64 _, [%r3];\n";
        body += &format!("mbarrier.test_wait.parity.shared.b64 %p2, [%r3], 1;\n{}", store(4, "%p2"));
        body += &sync;
        body += "mbarrier.inval.shared.b64 [%r3];\n";
    }
    Raw::new(&format!("mbarrier/{name}"), name, launch, &format!("u32 {count}")).body(&body).draft()
}

/// A sample on the registers of the kernel and with numbers that fit.
fn adapted(name: &str, sample: &Instruction, (expects, waits, remote): (bool, bool, bool)) -> Instruction {
    let bytes = expects as i64 * 15 + 1;
    let mut changed = renamed(sample, &mut |_, register| match register {
        r if r.starts_with("%p") => "%p1".into(),
        r if r.starts_with("%rd") => "%rd10".into(),
        _ => "%r9".into(),
    });
    let base = match (is_generic(sample), remote) {
        (true, _) => "%rd2",
        (false, true) => "%r5",
        (false, false) => "%r3",
    };
    set_bases(&mut changed, |_| Some(base));
    let number = |value| Operand::Imm(Immediate::Int(value));
    for operand in &mut changed.operands {
        if matches!(operand, Operand::Ident(register) if register.as_str() == "%r9") {
            *operand = number(if waits { 0 } else { bytes });
        }
    }
    if name.starts_with("mbarrier_init") {
        changed.operands[1] = number(2);
    }
    // A suspend-time hint is a time, not a parity.
    if waits && changed.operands.len() == 4 {
        changed.operands[3] = number(1000);
    }
    if name == "mbarrier_pending_count" {
        changed.operands[0] = Operand::Ident("%r6".into());
    }
    changed
}
