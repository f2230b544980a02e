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
    ptx!(
        "tcgen05_mma_given",
        image = IMAGE,
        d = COLUMNS[0],
        a = COLUMNS[1],
        scales_a = COLUMNS[2],
        scales_b = COLUMNS[3]
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
    ptx!(
        "tcgen05_mma_scales",
        bytes = 4 * SCALE_WORDS,
        a = COLUMNS[2],
        list = registers("v", 0, 8),
        b = COLUMNS[3]
    )
}

/// What waits for the product and stores D.
fn result(group: u32) -> String {
    let mut body = ptx!(
        "tcgen05_mma_result",
        commit = commit(group),
        wait = wait("WAIT", 0),
        registers = registers("v", 0, 8)
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
