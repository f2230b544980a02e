//! ldmatrix and stmatrix: rows of 16 bytes at addresses that the lanes give. What is expected of the forms that only
//! Blackwell has is computed here.

use super::kernel::{registers, renamed, target};
use super::raw::Raw;
use super::{Draft, bytes_of, is_generic, samples, set_bases};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Instruction;
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
    let mut body = String::from(include_str!("ptx/matrix.ptx"));
    let fill = "st.shared.v4.b32 [%r3], {%r20, %r21, %r22, %r23};\nbar.warp.sync 0xffffffff;\n";
    let mut offset = 0;
    let mut expected: Vec<u8> = Vec::new();
    for instruction in &samples(row) {
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
        let base = if is_generic(instruction) { "%rd2" } else { "%r4" };
        set_bases(&mut changed, |_| Some(base));
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
        expected.extend(bytes_of(expected_words(instruction, count).concat()));
    }
    let raw = Raw::new(&format!("mma/{}", row.name), row.name, "block 32", &format!("u32 {}", offset / 4))
        .arguments(&["in u16 iota 0 256"], ".param .u64 out, .param .u64 given")
        .body(&body);
    match target(row) {
        Target::Sm90a => raw.draft(),
        other => raw.target(other.as_str(), "8.6").expects(vec![expected]).draft(),
    }
}

/// What is stored for an instruction on bytes, register after register: `[register][lane]`; nothing for `.b16`.
fn expected_words(instruction: &Instruction, count: usize) -> Vec<[u32; 32]> {
    let given: Vec<u8> = (0..256u16).flat_map(u16::to_le_bytes).collect();
    let mut memory = given.clone();
    // Where row i of the matrices lies.
    let row_at = |i: usize| (5 * i + 3) % 32 * 16;
    let mut words = vec![[0; 32]; count];
    if instruction.has("b16") {
        return Vec::new();
    }
    if instruction.has("m16n8") {
        for register in 0..count {
            for lane in 0..32 {
                for e in 0..4 {
                    // Figure 108: columns 2q and 2q + 1 of row g, then of row g + 8; columns lie in memory.
                    let (row, column) = (lane / 4 + 8 * (e / 2), 2 * (lane % 4) + e % 2);
                    memory[row_at(8 * register + column) + row] = given[16 * lane + 4 * register + e];
                }
            }
        }
        let word = |register: usize, lane: usize| {
            let at = 16 * lane + 4 * register;
            u32::from_le_bytes([memory[at], memory[at + 1], memory[at + 2], memory[at + 3]])
        };
        return (0..4).map(|register| std::array::from_fn(|lane| word(register, lane))).collect();
    }
    for (register, lanes) in words.iter_mut().enumerate() {
        for (lane, word) in lanes.iter_mut().enumerate() {
            for e in 0..4 {
                let (row, element) = (lane / 4, 4 * (lane % 4) + e);
                let byte = if instruction.has("m16n16") {
                    // Figure 105: four columns of row g in the first register, of row g + 8 in the second.
                    memory[row_at(16 * (register / 2) + element) + row + 8 * (register % 2)]
                } else {
                    // Figure 106, each element in the low bits of its byte.
                    let width = if instruction.has("b4x16_p64") { 4 } else { 6 };
                    let bit = |b: usize| memory[row_at(8 * register + row) + b / 8] >> (b % 8) & 1;
                    (0..width).fold(0, |code, b| code | bit(element * width + b) << b)
                };
                *word |= u32::from(byte) << (8 * e);
            }
        }
    }
    words
}
