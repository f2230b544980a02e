//! The kernel around tcgen05.mma: operands to where they belong, one of several instructions, D back.

use super::product::{COLUMNS, IMAGE, SCALE_WORDS, Variant};
use super::{Entry, barrier, commit, handover, registers, wait};

/// The instructions of a variant. What is used from the collector has been put there before.
fn instructions(variant: &Variant, group: u32, ts: bool, scaled: bool) -> String {
    let Variant { suffix, kind, collector, .. } = variant;
    let (mut setup, mut mask) = (String::new(), String::new());
    if let Some(words) = variant.mask {
        let count = 4 * group;
        (0..count).for_each(|i| setup += &format!("mov.b32 %r{}, {};\n", 20 + i, words[i as usize]));
        mask = format!(" {},", registers("r", 20, count));
    }
    let one = |collector: &str, predicate: &str| {
        let collector =
            if collector.is_empty() { String::new() } else { format!(".collector::a::{collector}") };
        let block = if scaled { ".block_scale" } else { "" };
        let a = if ts { "[%r14]" } else { "%rd1" };
        let scales = if scaled { " [%r15], [%r16]," } else { "" };
        let shift = variant.shift.map(|s| format!(", {s}")).unwrap_or_default();
        format!(
            "@%issue tcgen05.mma.cta_group::{group}.kind::{kind}{block}{suffix}{collector} [%r13], {a}, %rd2, %r12,{scales}{mask} {predicate}{shift};\n"
        )
    };
    if collector.ends_with("use") {
        return setup + &one("fill", "%p1") + &one(collector, "%p2");
    }
    setup + &one(collector, "%p1")
}

/// The images of A and B, descriptors, and D before.
fn given() -> String {
    format!(
        "// The images of A and B, of this CTA.
         mov.u32 %r10, tile_a;
         mov.u32 %r11, tile_b;
         ld.param.u64 %rd3, [a];
         ld.param.u64 %rd4, [b];
         mul.wide.u32 %rd5, %rank, {IMAGE};
         add.u64 %rd3, %rd3, %rd5;
         add.u64 %rd4, %rd4, %rd5;
         mul.lo.u32 %r0, %t, 16;
         IMAGE:
         cvt.u64.u32 %rd5, %r0;
         add.u64 %rd6, %rd3, %rd5;
         ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd6];
         add.u32 %r1, %r10, %r0;
         st.shared.v4.b32 [%r1], {{%v0, %v1, %v2, %v3}};
         add.u64 %rd6, %rd4, %rd5;
         ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd6];
         add.u32 %r1, %r11, %r0;
         st.shared.v4.b32 [%r1], {{%v0, %v1, %v2, %v3}};
         add.u32 %r0, %r0, 2048;
         setp.lt.u32 %p0, %r0, {IMAGE};
         @%p0 bra IMAGE;
         fence.proxy.async.shared::cta;
         // Descriptors.
         ld.param.u32 %r1, [a_low];
         ld.param.u32 %r2, [a_high];
         shr.u32 %r10, %r10, 4;
         add.u32 %r1, %r1, %r10;
         mov.b64 %rd1, {{%r1, %r2}};
         ld.param.u32 %r1, [b_low];
         ld.param.u32 %r2, [b_high];
         shr.u32 %r11, %r11, 4;
         add.u32 %r1, %r1, %r11;
         mov.b64 %rd2, {{%r1, %r2}};
         ld.param.u32 %r12, [idesc];
         ld.param.u32 %r13, [lane];
         shl.b32 %r13, %r13, 16;
         add.u32 %r13, %r13, %tm;
         add.u32 %r13, %r13, {};
         add.u32 %r14, %tm, {};
         add.u32 %r15, %tm, {};
         add.u32 %r16, %tm, {};
         ld.param.u32 %r17, [accumulate];
         setp.ne.u32 %p1, %r17, 0;
         setp.eq.u32 %p2, %t, %t;
         ld.param.u32 %r18, [end];
         // D before: small whole numbers of its type.
         ld.param.u32 %r19, [dtype];
         setp.eq.u32 %p3, %r19, 0;
         setp.eq.u32 %p4, %r19, 1;
         setp.eq.u32 %p5, %r19, 3;
         mov.u32 %r0, 0;
         BEFORE:
         mul.lo.u32 %r2, %t, 7;
         mad.lo.u32 %r2, %r0, 3, %r2;
         mad.lo.u32 %r2, %rank, 5, %r2;
         and.b32 %r2, %r2, 15;
         sub.s32 %r2, %r2, 8;
         cvt.rn.f16.s32 %rs1, %r2;
         cvt.u32.u16 %r3, %rs1;
         cvt.rn.f32.s32 %f0, %r2;
         mov.b32 %r4, %f0;
         add.u32 %r5, %r2, 0x7ffffff0;
         selp.b32 %r2, %r4, %r2, %p3;
         selp.b32 %r2, %r3, %r2, %p4;
         selp.b32 %v0, %r5, %r2, %p5;
         add.u32 %r1, %tw, %r0;
         tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {{%v0}};
         add.u32 %r0, %r0, 1;
         setp.lt.u32 %p0, %r0, %r18;
         @%p0 bra BEFORE;\n",
        COLUMNS[0], COLUMNS[1], COLUMNS[2], COLUMNS[3],
    )
}

fn a_in_tensor_memory() -> String {
    // Lane l has the words of lane l, or of l mod 64 where both halves of the lanes need them.
    format!(
        "ld.param.u32 %r1, [fold];
         sub.u32 %r1, %r1, 1;
         and.b32 %r1, %r1, %t;
         mad.wide.u32 %rd5, %r1, 32, %rd3;
         ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd5];
         ld.global.v4.b32 {{%v4, %v5, %v6, %v7}}, [%rd5+16];
         tcgen05.st.sync.aligned.32x32b.x8.b32 [%tw+{}], {};\n",
        COLUMNS[1],
        registers("v", 0, 8)
    )
}

fn scales() -> String {
    // Scales of A: the image of this CTA, alike in all warps. Scales of B: the first image in all warps, or,
    // where lanes 64 to 127 multiply other columns (fold 64), the second image in warps 2 and 3.
    format!(
        "ld.param.u64 %rd5, [sa];
         and.b32 %r1, %t, 31;
         mad.lo.u32 %r2, %rank, 32, %r1;
         mad.wide.u32 %rd5, %r2, {bytes}, %rd5;
         ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd5];
         ld.global.v4.b32 {{%v4, %v5, %v6, %v7}}, [%rd5+16];
         tcgen05.st.sync.aligned.32x32b.x8.b32 [%tw+{}], {list};
         ld.param.u64 %rd5, [sb];
         ld.param.u32 %r3, [fold];
         setp.eq.u32 %p0, %r3, 64;
         shr.u32 %r2, %warp, 1;
         selp.b32 %r2, %r2, 0, %p0;
         mad.lo.u32 %r2, %r2, 32, %r1;
         mad.wide.u32 %rd5, %r2, {bytes}, %rd5;
         ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd5];
         ld.global.v4.b32 {{%v4, %v5, %v6, %v7}}, [%rd5+16];
         tcgen05.st.sync.aligned.32x32b.x8.b32 [%tw+{}], {list};\n",
        COLUMNS[2],
        COLUMNS[3],
        bytes = 4 * SCALE_WORDS,
        list = registers("v", 0, 8),
    )
}

/// What waits for the product and stores D.
fn result(group: u32) -> String {
    let mut body = format!(
        "DONE:
         {}
         {}
         // D after: lanes and columns around it too. Of binary16 numbers the upper halves are not defined.
         mov.u32 %r6, 0xffffffff;
         selp.b32 %r6, 0xffff, %r6, %p4;
         mad.lo.u32 %r2, %rank, 128, %t;
         mul.lo.u32 %r2, %r2, %r18;
         mad.wide.u32 %out, %r2, 4, %out;
         mov.u32 %r0, 0;
         AFTER:
         add.u32 %r1, %tw, %r0;
         tcgen05.ld.sync.aligned.32x32b.x8.b32 {}, [%r1];
         tcgen05.wait::ld.sync.aligned;\n",
        commit(group),
        wait("WAIT", 0),
        registers("v", 0, 8)
    );
    (0..8).for_each(|i| body += &format!("and.b32 %v{i}, %v{i}, %r6;\n"));
    body += "st.global.v4.b32 [%out], {%v0, %v1, %v2, %v3};
         st.global.v4.b32 [%out+16], {%v4, %v5, %v6, %v7};
         add.u64 %out, %out, 32;
         add.u32 %r0, %r0, 8;
         setp.lt.u32 %p0, %r0, %r18;
         @%p0 bra AFTER;\n";
    body
}

/// The kernel of a group: parameters say what is multiplied, a number which variant.
pub fn entry(group: u32, variants: &[Variant], ts: bool, scaled: bool) -> Entry {
    let parameter = |name: &str| format!(", .param .u32 {name}");
    let mut parameters = String::from(", .param .u64 a, .param .u64 b");
    if scaled {
        parameters += ", .param .u64 sa, .param .u64 sb";
    }
    for name in
        ["which", "a_low", "a_high", "b_low", "b_high", "idesc", "accumulate", "dtype", "end", "lane", "fold"]
    {
        parameters += &parameter(name);
    }
    let mut body = given();
    if ts {
        body += &a_in_tensor_memory();
    }
    if scaled {
        body += &scales();
    }
    body += &format!("tcgen05.wait::st.sync.aligned;\n{}\nld.param.u32 %r1, [which];\n", handover(group));
    for (i, variant) in variants.iter().enumerate() {
        body += &format!(
            "setp.ne.u32 %p6, %r1, {i};\n@%p6 bra NOT{i};\n{}bra DONE;\nNOT{i}:\n",
            instructions(variant, group, ts, scaled)
        );
    }
    body += &result(group);
    body += barrier(group);
    let declared = format!(
        ".shared .align 1024 .b8 tile_a[{IMAGE}];\n.shared .align 1024 .b8 tile_b[{IMAGE}];\n.reg .f32 %f<2>;"
    );
    Entry { parameters, ..Entry::new(group, &declared, &body) }
}
