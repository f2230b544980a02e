//! ldmatrix and stmatrix: rows of 16 bytes at addresses that the lanes give.

use super::Draft;
use super::kernel::{registers, renamed, target};
use super::raw::Raw;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::AddressBase;
use dualgemm_ptx::ast::Operand;
use dualgemm_ptx::isa::{Family, Row};

/// The files.
pub fn drafts() -> Vec<Draft> {
    Family::Mma
        .rows()
        .iter()
        .filter(|r| r.name.contains("tmatrix") || r.name.starts_with("ldmatrix"))
        .map(draft)
        .collect()
}

fn draft(row: &'static Row) -> Draft {
    let store = row.name.starts_with("st");
    let samples = row.samples();
    let mut body = String::from(
        ".shared .align 128 .b8 tile[512];
         ld.param.u64 %rd1, [given];
         mad.wide.u32 %rd1, %lane, 16, %rd1;
         ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd1];
         mov.u32 %r2, tile;
         mad.lo.u32 %r3, %lane, 16, %r2;
         // Row i of the matrices lies at ((5 i + 3) mod 32) * 16.
         mad.lo.u32 %r4, %lane, 5, 3;
         and.b32 %r4, %r4, 31;
         mad.lo.u32 %r4, %r4, 16, %r2;
         cvt.u64.u32 %rd2, %r4;
         cvta.shared.u64 %rd2, %rd2;\n",
    );
    let fill = "st.shared.v4.b32 [%r3], {%r20, %r21, %r22, %r23};\nbar.warp.sync 0xffffffff;\n";
    let mut offset = 0;
    for sample in &samples {
        let instruction = &sample.instruction;
        let generic = !instruction.modifiers.iter().any(|m| m.as_str().starts_with("shared"));
        let vector = if store { 1 } else { 0 };
        let count = registers(&instruction.operands[vector]).len();
        let mut next = 0;
        let mut changed = renamed(instruction, &mut |at, name| {
            if at != vector {
                return name.to_string();
            }
            next += 1;
            format!("%r{}", next - 1 + if store { 20 } else { 10 })
        });
        for operand in &mut changed.operands {
            if let Operand::Address(address) = operand {
                address.base = AddressBase::Ident(if generic { "%rd2" } else { "%r4" }.into());
            }
        }
        body += fill;
        if store {
            body += &format!(
                "{changed};\nbar.warp.sync 0xffffffff;\nld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r3];\n"
            );
        } else {
            body += &format!("{changed};\n");
        }
        for i in 0..if store { 4 } else { count } {
            body += &format!("st.global.u32 [%out+{offset}], %r{};\n", 10 + i);
            offset += 128;
        }
        body += "bar.warp.sync 0xffffffff;\n";
    }
    let raw = Raw::new("mma", row.name, row.name, "block 32", &format!("u32 {}", offset / 4))
        .arguments(&["in u16 iota 0 256"], ".param .u64 out, .param .u64 given")
        .body(&body);
    match target(row) {
        Target::Sm90a => raw.draft(),
        other => raw.target(other.as_str(), "8.6").draft(),
    }
}
