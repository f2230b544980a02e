//! wgmma: every row, type, swizzle and several widths, on tiles whose bytes come straight from a generator.
//!
//! The tiles are filled linearly, so which element lies where is up to the descriptor: two devices agree only if
//! they read it alike. Small whole numbers (and subnormals times whole numbers) have exact sums.

use super::kernel::renamed;
use super::raw::Raw;
use super::tcgen05::layout::SWIZZLES;
use super::{Draft, samples};
use dualgemm_ptx::ast::{Immediate, Instruction, Operand};
use dualgemm_ptx::isa::{Family, Row};
use dualgemm_ptx::layout::Swizzle;
use std::collections::BTreeMap;

/// Bytes of the tiles; the widest instruction with the largest strides stays inside.
const A_BYTES: usize = 16384;
const B_BYTES: usize = 32768;

/// The files: one per row and kind of data.
pub fn drafts() -> Vec<Draft> {
    let rows = Family::Wgmma
        .rows()
        .iter()
        .filter(|r| !matches!(r.name, "wgmma_fence" | "wgmma_commit" | "wgmma_wait"));
    let mut list = Vec::new();
    for row in rows {
        list.push(draft(row, row.name, "small", "small", None));
        if row.name == "wgmma_f16_ss" || row.name == "wgmma_f16_rs" || row.name == "wgmma_f8_ss" {
            list.push(draft(row, &format!("{}_subnormal", row.name), "tiny", "small", None));
        }
        if row.name == "wgmma_f16_ss" || row.name == "wgmma_tf32_ss" {
            list.push(draft(row, &format!("{}_random", row.name), "unit", "unit", Some("0 1e-4")));
        }
    }
    list
}

fn width(instruction: &Instruction) -> usize {
    let shape = instruction.modifiers.iter().find_map(|m| m.as_str().strip_prefix("m64n"));
    shape.and_then(|s| s.split('k').next()?.parse().ok()).unwrap_or(8)
}

/// Types of A and B: the last two modifiers that are types.
fn types(instruction: &Instruction) -> (String, String) {
    let mods: Vec<&str> =
        instruction.modifiers.iter().map(|m| m.as_str()).filter(|m| *m != "satfinite").collect();
    let [.., a, b] = mods[..] else { return Default::default() };
    (a.into(), b.into())
}

fn element(ty: &str) -> &str {
    match ty {
        "s8" | "u8" => "u8",
        other => other,
    }
}

/// The wgmmas of one file: (instruction, swizzle, transposed A, transposed B, negated A).
fn chosen(row: &'static Row) -> Vec<(Instruction, Swizzle, u8, u8, i64)> {
    let mut by_type: BTreeMap<String, Vec<Instruction>> = BTreeMap::new();
    for i in samples(row) {
        let (a, b) = types(&i);
        by_type.entry(format!("{a} {b} {}", i.has("satfinite"))).or_default().push(i);
    }
    let kinds = by_type.len();
    let mut list = Vec::new();
    for (k, samples) in by_type.into_values().enumerate() {
        let of = |n: usize| samples.iter().find(|i| width(i) == n).cloned();
        for (s, swizzle) in SWIZZLES.into_iter().enumerate() {
            let transposes: &[(u8, u8)] = if row.name.starts_with("wgmma_f16") && s == 3 {
                &[(0, 0), (0, 1), (1, 0)]
            } else {
                &[(0, 0)]
            };
            for &(ta, tb) in transposes {
                let n = if kinds > 2 { [8, 24, 32, 64][s] } else { [8, 40, 24, 64][s] };
                list.extend(of(n).map(|i| (i, swizzle, ta, tb, if s == 1 { -1 } else { 1 })));
            }
        }
        if k == 0 {
            list.extend(of(128).map(|i| (i, Swizzle::B128, 0, 0, 1)));
            list.extend(of(256).map(|i| (i, Swizzle::B64, 0, 0, 1)));
        }
    }
    list
}

const TILES: &str = include_str!("ptx/wgmma.ptx");

fn draft(row: &'static Row, name: &str, ga: &str, gb: &str, within: Option<&str>) -> Draft {
    let rs = row.name.ends_with("_rs");
    let half = row.name.contains("half");
    let mut body = String::from(TILES);
    let mut arguments = Vec::new();
    let mut parameters = String::from(".param .u64 out");
    let mut loaded: Option<(String, String)> = None;
    let mut buffers: BTreeMap<String, String> = BTreeMap::new();
    let mut registers: (usize, usize) = (0, 0);
    let mut offset = 0;
    let list = chosen(row);
    for (count, (instruction, swizzle, ta, tb, neg)) in list.iter().enumerate() {
        let (ta, tb) = (*ta, *tb);
        let (a, b) = types(instruction);
        let mut buffer = |ty: &str, generator: &str, seed: usize, bytes: usize| {
            let size = crate::conformance::data::size(element(ty)).unwrap_or(1);
            let generator = if element(ty) == "u8" { "bits" } else { generator };
            let head = format!("in {} {generator} {seed} {}", element(ty), bytes / size);
            let next = buffers.len();
            buffers
                .entry(head.clone())
                .or_insert_with(|| {
                    arguments.push(head);
                    parameters += &format!(", .param .u64 in{next}");
                    format!("in{next}")
                })
                .clone()
        };
        let from_a = buffer(&a, ga, 1, A_BYTES);
        let from_b = buffer(&b, gb, 2, B_BYTES);
        if loaded.as_ref() != Some(&(from_a.clone(), from_b.clone())) {
            body += &fill(count, &from_a, &from_b);
            loaded = Some((from_a.clone(), from_b));
        }
        let desc = descriptor(*swizzle, ta + tb > 0);
        body += &format!(
            "// swizzle {swizzle:?}
             cvt.u64.u32 %da, %r20;
             or.b64 %da, %da, {desc:#x};
             cvt.u64.u32 %db, %r21;
             or.b64 %db, %db, {desc:#x};\n"
        );
        if rs {
            body += &format!(
                "ld.param.u64 %src, [{from_a}];
                 mad.wide.u32 %src, %t, 16, %src;
                 ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%src];\n"
            );
        }
        let float = last_float(instruction);
        let results = if half { width(instruction) / 4 } else { width(instruction) / 2 };
        let prefix = if float { "%f" } else { "%d" };
        let declared = if float { &mut registers.0 } else { &mut registers.1 };
        *declared = results.max(*declared);
        let changed = operands(instruction, (prefix, results, rs), (ta, tb, *neg));
        // Every third adds to what is there: the value is the column's number.
        let adds = count % 3 == 2;
        for i in 0..results {
            let value = if float { format!("0f{:08X}", ((i % 7) as f32).to_bits()) } else { "0".into() };
            body += &format!("mov.b32 {prefix}{i}, {value};\n");
        }
        body += if adds { "setp.eq.u32 %p1, %t, %t;\n" } else { "setp.ne.u32 %p1, %t, %t;\n" };
        body += &format!(
            "wgmma.fence.sync.aligned;\n{changed};\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
        );
        let ty = if float { "f32" } else { "b32" };
        for i in 0..results {
            body += &format!("st.global.{ty} [%out+{offset}], {prefix}{i};\n");
            offset += 512;
        }
    }
    let declared = format!(".reg .f32 %f<{}>;\n.reg .b32 %d<{}>;\n", registers.0.max(1), registers.1.max(1));
    let tail = within.map(|w| format!(" within {w}")).unwrap_or_default();
    let ty = if within.is_some() { "f32" } else { "u32" };
    let mut raw = Raw::new(&format!("wgmma/{name}"), row.name, "block 128", &format!("{ty} {}", offset / 4));
    raw.head[1] += &tail;
    raw.head.extend(arguments);
    raw.parameters = parameters;
    raw.body(&(declared + &body)).directives(".reqntid 128, 1, 1\n").draft()
}

/// Without swizzle the two 16-byte columns of K lie LBO apart and groups of 8 rows SBO apart; with it, a group
/// of 8 rows is one pattern. Transposed tiles are as wide as the swizzle along M or N, LBO to the next.
fn descriptor(swizzle: Swizzle, transposed: bool) -> u64 {
    let span = swizzle.span();
    let (leading, stride) = match swizzle {
        Swizzle::None => (128, 256),
        _ if transposed => (2048, span * 8),
        _ => (16, span * 8),
    };
    dualgemm_ptx::layout::wgmma_smem_desc(0, leading, stride, swizzle)
}

/// The tiles, filled from these parameters.
fn fill(count: usize, from_a: &str, from_b: &str) -> String {
    let mut body = String::from("bar.sync 0;\n");
    for (tile, from, bytes) in [("%sa", from_a, A_BYTES), ("%sb", from_b, B_BYTES)] {
        body += &ptx!("wgmma_fill", from, tile, count, name = &tile[1..], bytes);
    }
    body += "fence.proxy.async.shared::cta;\nbar.sync 0;\n";
    body
}

/// The instruction on the registers of the kernel, with its signs and transposes.
fn operands(
    instruction: &Instruction,
    (prefix, results, rs): (&str, usize, bool),
    (ta, tb, neg): (u8, u8, i64),
) -> Instruction {
    let mut next = 0;
    let mut changed = renamed(instruction, &mut |at, _| {
        next += 1;
        match at {
            0 => format!("{prefix}{}", next - 1),
            1 if rs => format!("%a{}", next - 1 - results),
            1 => "%da".into(),
            2 => "%db".into(),
            _ => "%p1".into(),
        }
    });
    // p, then the signs of A and B, then the transposes of what lies in shared memory.
    let number = |v: i64| Operand::Imm(Immediate::Int(v));
    if changed.operands.len() >= 6 {
        changed.operands[4] = number(neg);
        changed.operands[5] = number(1);
    }
    match changed.operands.len() {
        8 => {
            changed.operands[6] = number(ta.into());
            changed.operands[7] = number(tb.into());
        }
        7 => changed.operands[6] = number(tb.into()),
        _ => {}
    }
    changed
}

fn last_float(instruction: &Instruction) -> bool {
    instruction.modifiers.iter().any(|m| m.as_str() == "f32")
}
