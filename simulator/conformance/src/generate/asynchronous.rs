//! Address conversions, stores to other CTAs that signal a barrier, copies that arrive on one.

use super::raw::Raw;
use super::{Draft, is_generic, samples_of, set_bases};
use dualgemm_ptx::ast::Operand;

/// The files.
pub fn drafts() -> Vec<Draft> {
    let mut list = vec![addresses(), policies(), discard()];
    list.extend(["st_async", "st_async_vec", "red_async"].map(remote_store));
    list.extend(["cp_async_mbarrier", "cp_async_mbarrier_window"].map(copy_arrives));
    list.into_iter().map(Raw::draft).collect()
}

const ADDRESSES: &str = "// To generic addresses, through them, and back.
         .shared .align 16 .b32 box[32];
         .local .align 16 .b32 own[4];
         mov.u32 %r2, box;
         mad.lo.u32 %r2, %t, 4, %r2;
         st.shared.u32 [%r2], %gid;
         st.local.u32 [own+8], %t;
         cvt.u64.u32 %rd1, %r2;
         cvta.shared.u64 %rd2, %rd1;
         ld.u32 %r3, [%rd2];
         cvta.shared::cta.u64 %rd3, %rd1;
         sub.u64 %rd4, %rd3, %rd2;
         cvta.to.shared.u64 %rd5, %rd2;
         ld.shared.u32 %r4, [%rd5];
         cvta.to.shared::cta.u64 %rd5, %rd2;
         ld.shared::cta.u32 %r5, [%rd5];
         add.u32 %r3, %r3, %r4;
         add.u32 %r3, %r3, %r5;
         cvt.u32.u64 %r4, %rd4;
         add.u32 %r3, %r3, %r4;
         st.global.u32 [%out], %r3;
         mov.u64 %rd6, own;
         cvta.local.u64 %rd7, %rd6;
         ld.u32 %r6, [%rd7+8];
         cvta.to.local.u64 %rd8, %rd7;
         ld.local.u32 %r7, [%rd8+8];
         add.u32 %r6, %r6, %r7;
         st.global.u32 [%out+128], %r6;
         mov.u64 %rd9, everywhere;
         cvta.global.u64 %rd10, %rd9;
         ld.u32 %r8, [%rd10+4];
         cvta.to.global.u64 %rd11, %rd10;
         ld.global.u32 %r9, [%rd11+12];
         mov.u64 %rd12, fixed;
         cvta.const.u64 %rd13, %rd12;
         ld.u32 %r10, [%rd13+4];
         cvta.to.const.u64 %rd14, %rd13;
         ld.const.u32 %r11, [%rd14+8];
         mov.b64 %rd15, given;
         cvta.param.u64 %rd16, %rd15;
         ld.u32 %r12, [%rd16+4];
         cvta.to.param.u64 %rd17, %rd16;
         ld.param.u32 %r13, [%rd17+8];
         mad.lo.u32 %r8, %r8, 3, %r9;
         mad.lo.u32 %r8, %r8, 3, %r10;
         mad.lo.u32 %r8, %r8, 3, %r11;
         mad.lo.u32 %r8, %r8, 3, %r12;
         mad.lo.u32 %r8, %r8, 3, %r13;
         st.global.u32 [%out+256], %r8;
         isspacep.shared %p0, %rd2;
         isspacep.shared %p1, %rd10;
         isspacep.local %p2, %rd7;
         isspacep.local %p3, %rd2;
         isspacep.global %p4, %rd10;
         isspacep.global %p5, %rd2;
         isspacep.const %p6, %rd13;
         isspacep.const %p7, %rd10;
         selp.u32 %r14, 1, 0, %p0;
         selp.u32 %r15, 2, 0, %p1;
         selp.u32 %r16, 4, 0, %p2;
         selp.u32 %r17, 8, 0, %p3;
         selp.u32 %r18, 16, 0, %p4;
         selp.u32 %r19, 32, 0, %p5;
         selp.u32 %r20, 64, 0, %p6;
         selp.u32 %r21, 128, 0, %p7;
         add.u32 %r14, %r14, %r15;
         add.u32 %r14, %r14, %r16;
         add.u32 %r14, %r14, %r17;
         add.u32 %r14, %r14, %r18;
         add.u32 %r14, %r14, %r19;
         add.u32 %r14, %r14, %r20;
         add.u32 %r14, %r14, %r21;
         st.global.u32 [%out+384], %r14;";

fn addresses() -> Raw {
    Raw::new("ld_st/addresses",
        "cvta cvta_to cvta_param cvta_cta isspacep",
        "block 32",
        "u32 128",
    )
    .arguments(&["bytes u32 bits 1 4"], ".param .u64 out, .param .align 16 .b8 given[16]")
    .globals(".global .align 16 .b32 everywhere[4] = {11, 22, 33, 44};\n.const .align 16 .b32 fixed[4] = {55, 66, 77, 88};\n")
    .body(
        ADDRESSES,
    )
}

fn policies() -> Raw {
    let mut body = String::from("ld.param.u64 %rd1, [given];\nmad.wide.u32 %rd1, %t, 4, %rd1;\n");
    let samples = samples_of("createpolicy_fractional");
    let count = samples.len();
    for (i, mut instruction) in samples.into_iter().enumerate() {
        instruction.operands[0] = Operand::Ident("%rd2".into());
        if let Some(fraction) = instruction.operands.get_mut(1) {
            *fraction = Operand::Imm(dualgemm_ptx::ast::Immediate::F32(0x3f00_0000));
        }
        body += &format!(
            "{instruction};\nld.global.L2::cache_hint.b32 %r2, [%rd1], %rd2;\nst.global.L2::cache_hint.b32 [%out+{}], %r2, %rd2;\n",
            i * 128
        );
    }
    Raw::new(
        "ld_st/createpolicy_fractional",
        "createpolicy_fractional",
        "block 32",
        &format!("u32 {}", 32 * count),
    )
    .arguments(&["in u32 bits 3 32"], ".param .u64 out, .param .u64 given")
    .body(&body)
}

fn discard() -> Raw {
    Raw::new("ld_st/discard", "discard", "block 1", "u32 32").body(
        "// What was discarded is undefined until it is written again.
         discard.global.L2 [%out], 128;
         mov.u32 %r2, 0;
         LOOP:
         mad.wide.u32 %rd1, %r2, 4, %out;
         st.global.u32 [%rd1], %r2;
         add.u32 %r2, %r2, 1;
         setp.lt.u32 %p0, %r2, 32;
         @%p0 bra LOOP;",
    )
}

/// Every thread sends to its like in the other CTA.
fn remote_store(name: &'static str) -> Raw {
    let samples = samples_of(name);
    let mut body = String::from(
        ".shared .align 16 .b8 box[512];
         .shared .align 8 .b64 full;
         .reg .f32 %f<8>;
         .reg .f64 %fd<8>;
         ld.param.u64 %rd20, [given];
         mad.wide.u32 %rd20, %gid, 16, %rd20;
         ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd20];
         mov.b64 %rd21, {%r20, %r21};
         mov.b64 %fd0, %rd21;
         mov.b32 %f0, %r20; mov.b32 %f1, %r21; mov.b32 %f2, %r22; mov.b32 %f3, %r23;
         mov.u32 %r2, box;
         mad.lo.u32 %r3, %t, 16, %r2;
         mov.u32 %r4, full;
         mov.u32 %r5, %cluster_ctarank;
         xor.b32 %r5, %r5, 1;
         mapa.shared::cluster.u32 %r6, %r3, %r5;
         mapa.shared::cluster.u32 %r7, %r4, %r5;
         setp.eq.u32 %p0, %t, 0;
         @%p0 mbarrier.init.shared::cta.b64 [%r4], 1;
         @%p0 fence.mbarrier_init.release.cluster;\n",
    );
    for (i, sample) in samples.iter().enumerate() {
        let mut instruction = sample.clone();
        let ty = super::kernel::last_type(&instruction);
        let vector = match &instruction.operands[1] {
            Operand::Vector(list) => list.len(),
            _ => 1,
        };
        let bytes = vector * if ty.ends_with("64") { 8 } else { 4 };
        let register = |k: usize| match ty {
            "f32" => format!("%f{k}"),
            "f64" => "%fd0".into(),
            t if t.ends_with("64") => "%rd21".into(),
            _ => format!("%r{}", 20 + k),
        };
        let name_of = |k: usize| Operand::Ident(register(k).as_str().into());
        instruction.operands[1] = match vector {
            1 => name_of(0),
            n => Operand::Vector((0..n).map(name_of).collect()),
        };
        set_bases(&mut instruction, |at| Some(if at == 0 { "%r6" } else { "%r7" }));
        let start = if name == "red_async" { "%r21, %r22, %r23, %r20" } else { "%gid, %gid, %gid, %gid" };
        body += &format!(
            "st.shared.v4.b32 [%r3], {{{start}}};
             fence.proxy.async;
             @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], {};
             barrier.cluster.arrive.aligned;
             barrier.cluster.wait.aligned;
             {instruction};
             WAIT{i}:
             mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], {};
             @!%p1 bra WAIT{i};
             ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r3];
             st.global.u32 [%out+{}], %r10;
             st.global.u32 [%out+{}], %r11;
             st.global.u32 [%out+{}], %r12;
             st.global.u32 [%out+{}], %r13;
             barrier.cluster.arrive.aligned;
             barrier.cluster.wait.aligned;\n",
            bytes * 32,
            i % 2,
            i * 1024,
            i * 1024 + 256,
            i * 1024 + 512,
            i * 1024 + 768,
        );
    }
    let output = format!("u32 {}", samples.len() * 256);
    Raw::new(&format!("ld_st/{name}"), name, "grid 2 block 32 cluster 2", &output)
        .arguments(&["in u32 bits 5 256"], ".param .u64 out, .param .u64 given")
        .body(&body)
}

/// Each thread's copy arrives on a barrier that all wait for.
fn copy_arrives(name: &'static str) -> Raw {
    let samples = samples_of(name);
    let mut body = String::from(
        ".shared .align 16 .b8 box[1024];
         .shared .align 8 .b64 full;
         ld.param.u64 %rd20, [given];
         mad.wide.u32 %rd20, %t, 16, %rd20;
         mov.u32 %r2, box;
         mad.lo.u32 %r3, %t, 16, %r2;
         mov.u32 %r4, full;
         cvt.u64.u32 %rd1, %r4;
         cvta.shared.u64 %rd2, %rd1;
         xor.b32 %r5, %t, 31;
         mad.lo.u32 %r5, %r5, 16, %r2;
         setp.eq.u32 %p0, %t, 0;\n",
    );
    for (i, sample) in samples.iter().enumerate() {
        let mut instruction = sample.clone();
        let base = if is_generic(&instruction) { "%rd2" } else { "%r4" };
        set_bases(&mut instruction, |_| Some(base));
        // Without `noinc` the copy brings its own arrival along.
        let own = if instruction.has("noinc") { "" } else { "mbarrier.arrive.shared.b64 _, [%r4];" };
        body += &format!(
            "@%p0 mbarrier.init.shared.b64 [%r4], 64;
             bar.sync 0;
             cp.async.ca.shared.global [%r3], [%rd20], 16;
             {instruction};
             {own}
             WAIT{i}:
             mbarrier.test_wait.parity.shared.b64 %p1, [%r4], 0;
             @!%p1 bra WAIT{i};
             ld.shared.u32 %r10, [%r5+4];
             st.global.u32 [%out+{}], %r10;
             bar.sync 0;
             @%p0 mbarrier.inval.shared.b64 [%r4];
             bar.sync 0;\n",
            i * 256
        );
    }
    Raw::new(&format!("ld_st/{name}"), name, "block 64", &format!("u32 {}", samples.len() * 64))
        .arguments(&["in u32 bits 6 256"], ".param .u64 out, .param .u64 given")
        .body(&body)
}
