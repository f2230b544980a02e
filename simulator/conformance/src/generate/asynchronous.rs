//! Address conversions, stores to other CTAs that signal a barrier, copies that arrive on one.

use super::raw::Raw;
use super::{Draft, is_generic, samples_of, set_bases};
use dualgemm_ptx::ast::Operand;

/// The files.
pub fn drafts() -> Vec<Draft> {
    let mut list =
        vec![addresses(), policies(), Raw::written("ld_st/discard", include_str!("ptx/discard.ptx"))];
    list.extend(["st_async", "st_async_vec", "red_async"].map(remote_store));
    list.extend(["cp_async_mbarrier", "cp_async_mbarrier_window"].map(copy_arrives));
    list.into_iter().map(Raw::draft).collect()
}

fn addresses() -> Raw {
    Raw::new("ld_st/addresses",
        "cvta cvta_to cvta_param cvta_cta isspacep",
        "block 32",
        "u32 128",
    )
    .arguments(&["bytes u32 bits 1 4"], ".param .u64 out, .param .align 16 .b8 given[16]")
    .globals(".global .align 16 .b32 everywhere[4] = {11, 22, 33, 44};\n.const .align 16 .b32 fixed[4] = {55, 66, 77, 88};\n")
    .body(
        include_str!("ptx/addresses.ptx"),
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

/// Every thread sends to its like in the other CTA.
fn remote_store(name: &'static str) -> Raw {
    let samples = samples_of(name);
    let mut body = String::from(include_str!("ptx/remote_store.ptx"));
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
        body += &ptx!(
            "remote_store_step",
            start,
            expected = bytes * 32,
            instruction,
            i,
            phase = i % 2,
            out0 = i * 1024,
            out1 = i * 1024 + 256,
            out2 = i * 1024 + 512,
            out3 = i * 1024 + 768
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
    let mut body = String::from(include_str!("ptx/copy_arrives.ptx"));
    for (i, sample) in samples.iter().enumerate() {
        let mut instruction = sample.clone();
        let base = if is_generic(&instruction) { "%rd2" } else { "%r4" };
        set_bases(&mut instruction, |_| Some(base));
        // Without `noinc` the copy brings its own arrival along.
        let own = if instruction.has("noinc") { "" } else { "mbarrier.arrive.shared.b64 _, [%r4];" };
        body += &ptx!("copy_arrives_step", instruction, own, i, out = i * 256);
    }
    Raw::new(&format!("ld_st/{name}"), name, "block 64", &format!("u32 {}", samples.len() * 64))
        .arguments(&["in u32 bits 6 256"], ".param .u64 out, .param .u64 given")
        .body(&body)
}
