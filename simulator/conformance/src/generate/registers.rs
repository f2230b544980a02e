//! Rows whose operands are all registers and numbers: arithmetic, conversions, moves, lane communication, `mma`.

use super::kernel::{CLASSES, Kernel, Source, class, last_type, registers, renamed};
use super::{Draft, samples};
use dualgemm_ptx::ast::{Immediate, Instruction, Operand, Version};
use dualgemm_ptx::isa::{Family, Row};
use std::fmt::Write as _;

/// Rows that write no register and need no address: executed, then the thread's number is stored.
#[rustfmt::skip]
const SILENT: &[&str] = &[
    "nanosleep", "membar", "fence", "fence_cluster", "fence_one_way", "fence_proxy_alias",
    "fence_proxy_async", "fence_mbarrier_init", "fence_proxy_tensormap_release",
    "fence_acquire_restrict", "fence_release_restrict", "fence_proxy_async_generic_acquire",
    "fence_proxy_async_generic_release", "bar_warp_sync", "griddepcontrol", "cp_async_commit",
    "cp_async_wait", "cp_async_wait_all", "bulk_commit", "bulk_wait", "wgmma_fence", "wgmma_commit",
    "wgmma_wait",
];

/// Rows of other modules, or whose results depend on where things lie.
#[rustfmt::skip]
const ELSEWHERE: &[&str] = &[
    "cvta", "cvta_to", "cvta_param", "cvta_cta", "cvta_cluster", "isspacep", "mapa", "getctarank",
    "elect", "createpolicy_fractional", "bra", "ret", "exit", "trap", "brkpt", "setmaxnreg",
    "clc_is_canceled", "clc_first_ctaid", "clc_first_ctaid_dim", "mbarrier_pending_count",
    "cvt_rs_f8x4_f32", "cvt_rs_e2m1x4_f32", "tcgen05_dealloc", "tcgen05_relinquish", "tcgen05_wait",
    "tcgen05_fence", "barrier_cluster_arrive", "barrier_cluster_arrive_sem", "barrier_cluster_wait",
    "barrier_cluster_wait_sem",
];

/// How far the results of approximate instructions may be apart: ulp and absolute, from the errors the ISA
/// states, twice since both sides may err.
fn tolerance(row: &Row) -> &'static str {
    match row.name {
        "div_f32_approx" | "rcp_approx" | "ex2_f32" | "sqrt_approx" | "rsqrt_f32" => "4 0",
        "sin" | "cos" => "0 1e-6",
        "lg2" => "4 5e-7",
        "tanh_f32" => "16384 0",
        "ex2_f16" | "ex2_bf16" => "2 0",
        "tanh_f16" => "2 1e-3",
        "tanh_bf16" => "2 8e-3",
        // The lower half of the result is zero on hardware: 20 bits of mantissa.
        "rcp_approx_f64" | "rsqrt_f64_ftz" | "rsqrt_f64" => "8589934592 0",
        _ => "",
    }
}

/// Rows that are run on every 16-bit pattern, and those run on numbers around the values of narrow formats.
fn threads(row: &Row) -> usize {
    match row.name {
        "cvt_f32_f16" | "cvt_f16x2_f8x2" | "cvt_f32_bf16" | "cvt_f64_float" | "cvt_f16_round"
        | "cvt_f16x2_e2m1x2" | "cvt_f16x2_f6x2" | "cvt_bf16x2_ue8m0x2" | "ex2_f16" | "ex2_bf16"
        | "tanh_f16" | "tanh_bf16" | "abs_f16" | "neg_f16" | "abs_bf16" | "neg_bf16" => 65536,
        _ if row.family == Family::Cvt && takes_f32(row) => 8192,
        _ if row.family == Family::Mma => 128,
        _ => 512,
    }
}

fn takes_f32(row: &Row) -> bool {
    [
        "cvt_f16_f32",
        "cvt_bf16_f32",
        "cvt_x2_f32",
        "cvt_tf32",
        "cvt_f8x2_f32",
        "cvt_e2m1",
        "cvt_f6x2_f32",
        "cvt_ue8m0x2_f32",
    ]
    .iter()
    .any(|p| row.name.starts_with(p))
}

/// What operand `position` (from 0, the result not counted) of a class reads.
fn source(row: &Row, instruction: &Instruction, position: usize, class: usize) -> Source {
    let (name, _, fallback, bytes) = CLASSES[class];
    let seed = position as u64;
    if name == "p" {
        return Source::new("u32", "bits", seed);
    }
    let ty = last_type(instruction);
    let shift = match row.name {
        "shl" | "shr" | "szext" => position >= 1,
        "shf" => position >= 2,
        "bmsk" => true,
        "fns" => position >= 1,
        _ => false,
    };
    match row.name {
        // Positions and lengths above 255 are not defined.
        "bfe" if position >= 1 => return Source::new("u32", "field", seed),
        "bfi" if position >= 2 => return Source::new("u32", "field", seed),
        _ if shift => return Source::new(fallback, "shift", seed),
        "shfl" if position == 1 => return Source::new("u32", "lane", seed),
        "match_any" | "match_all" => return Source::new(fallback, "few", seed),
        // Division by zero has no defined result.
        "div_int" | "rem" if position == 1 => return Source::new(fallback, "nonzero", seed),
        "sin" | "cos" => return Source::new("f32", "unit", seed),
        _ => {}
    }
    if threads(row) == 65536 && bytes < 4 {
        return Source::new("u16", "all16", 0);
    }
    if threads(row) == 65536 && ty.ends_with("16x2") {
        return Source::new("u32", "bits", 0);
    }
    if threads(row) == 8192 && name == "f" {
        return Source::new("f32", "halfway", seed);
    }
    let element = match (name, ty) {
        ("rs", "f16" | "bf16") | ("r", "f16x2" | "bf16x2") => ty,
        ("rd", "f32x2") => "f32",
        _ => fallback,
    };
    Source::new(element, "edges", seed)
}

/// Versions of the operands of `mma`: type of A, of B, generator of A, of B and C, tolerance.
fn mma_sources(row: &Row, instruction: &Instruction) -> Vec<(Vec<Source>, &'static str)> {
    let types: Vec<&str> = instruction
        .modifiers
        .iter()
        .map(|m| m.as_str())
        .filter(|m| {
            [
                "f64", "f32", "f16", "bf16", "tf32", "s4", "u4", "s8", "u8", "s32", "e4m3", "e5m2", "e2m1",
                "e3m2", "e2m3",
            ]
            .contains(m)
        })
        .collect();
    let [d, a, b, ..] = types[..] else { return Vec::new() };
    let known = |ty: &str| match ty {
        "e4m3" | "e5m2" | "f16" | "bf16" | "tf32" | "f64" => ty.to_string(),
        _ => "u8".to_string(),
    };
    let (a, b) = (known(a), known(b));
    let operand = |ty: &str, generator, seed| match ty {
        "u8" => Source::new("u8", "bits", seed),
        _ => Source::new(ty, generator, seed),
    };
    // Two accumulators of 16 bits share a register.
    let c = |generator, seed| match d {
        "f16" | "f64" => Source::new(d, generator, seed),
        "s32" => Source::new("u32", "bits", seed),
        _ => Source::new("f32", generator, seed),
    };
    let mut scales = Vec::new();
    if row.name.contains("nvf4") {
        scales.extend([Source::new("e4m3", "few", 8), Source::new("e4m3", "few", 9)]);
    } else if row.name.starts_with("mma_mx") {
        scales.extend([Source::new("ue8m0", "small", 8), Source::new("ue8m0", "small", 9)]);
    }
    let set = |ga, gb, gc, within| {
        let mut list = vec![operand(&a, ga, 3), operand(&b, gb, 4), c(gc, 5)];
        list.extend(scales.iter().cloned());
        (list, within)
    };
    let mut versions = vec![set("small", "small", "small", "")];
    if row.targets.contains(dualgemm_ptx::Target::Sm90a)
        && a != "u8"
        && a != "bf16"
        && a != "tf32"
        && d == "f32"
    {
        versions.push(set("tiny", "small", "zero", ""));
    }
    if ["f16", "bf16", "tf32"].contains(&a.as_str()) && d == "f32" {
        versions.push(set("unit", "unit", "unit", "0 1e-4"));
    }
    versions
}

/// What executes around the sample so that its effect can be seen.
fn around(row: &Row, instruction: &Instruction, registers: &[String]) -> (String, String) {
    let ty = last_type(instruction);
    let width = &ty[1..];
    let zero = if width == "64" { "%x3" } else { "%w3" };
    let before = match (row.name, registers) {
        ("addc" | "madc", [_, a, b, ..]) => format!("\tadd.cc.u{width} {zero}, {a}, {b};\n"),
        ("subc", [_, a, b, ..]) => format!("\tsub.cc.u{width} {zero}, {b}, {a};\n"),
        _ => String::new(),
    };
    let carries = instruction.has("cc");
    let after = match row.name {
        _ if !carries => String::new(),
        "sub_cc" | "subc" => format!("\tsubc.u{width} {zero}, 0, 0;\n"),
        _ => format!("\taddc.u{width} {zero}, 0, 0;\n"),
    };
    (before, after)
}

/// Instructions of the row: its samples, with numbers that matter varied.
fn instructions(row: &'static Row) -> Vec<Instruction> {
    let samples = samples(row).into_iter();
    let number = |instruction: &Instruction, at: usize, value: i64| {
        let mut changed = instruction.clone();
        changed.operands[at] = Operand::Imm(Immediate::Int(value));
        changed
    };
    match row.name {
        "lop3" => samples.flat_map(|s| (0..256).map(move |lut| number(&s, 4, lut))).collect(),
        "lop3_bool" => samples.flat_map(|s| (0..8).map(move |i| number(&s, 4, i * 37 % 256))).collect(),
        "shfl" => samples
            .flat_map(|s| [0x1f, 0x181f, 0x1007].map(|clamp| number(&number(&s, 3, clamp), 4, 0xffff_ffff)))
            .collect(),
        "vote_bool" | "vote_ballot" | "match_any" | "match_all" | "redux_int" | "redux_bits"
        | "redux_f32" => samples.map(|s| number(&s, 2, 0xffff_ffff)).collect(),
        // The simulator executes the forms of 8 bits only.
        "cvt_pack_8" => samples.filter(|s| s.has("u8") || s.has("s8")).collect(),
        "bar_warp_sync" => samples.map(|s| number(&s, 0, 0xffff_ffff)).collect(),
        "nanosleep" => samples.map(|s| number(&s, 0, 20)).collect(),
        name if name.starts_with("mma_") && name.contains("mx") || name.starts_with("mma_nvf4") => samples
            .map(|mut s| {
                // Byte and thread selectors: numbers.
                for operand in &mut s.operands {
                    if let Operand::Vector(list) = operand
                        && list.len() == 2
                        && registers(&list[0].clone()).first().is_some_and(|r| r.starts_with("%rs"))
                    {
                        *list = vec![Operand::Imm(Immediate::Int(0)), Operand::Imm(Immediate::Int(0))];
                    }
                }
                s
            })
            .collect(),
        _ => samples.collect(),
    }
}

/// The file of a row of this kind.
pub fn draft(row: &'static Row) -> Option<Draft> {
    let silent = SILENT.contains(&row.name);
    let plain = |o: &Operand| !matches!(o, Operand::Address(_) | Operand::List(_) | Operand::Group(_));
    let list = instructions(row);
    let of_memory = list.iter().any(|i| !i.operands.iter().all(plain));
    let bar = row.name.starts_with("bar_") && row.name != "bar_warp_sync" || row.name.starts_with("barrier_");
    let special = of_memory && row.name != "mov" || ELSEWHERE.contains(&row.name) || bar;
    let matrix = matches!(row.family, Family::Wgmma | Family::Tcgen05);
    if special || matrix && !silent || list.iter().any(|i| i.root == "call" || i.root == "brx") {
        return None;
    }
    let threads = if silent { 128 } else { threads(row) };
    let mut kernel = Kernel::new(row, threads);
    let within = tolerance(row);
    for instruction in &list {
        if silent {
            silent_sample(&mut kernel, row, instruction);
            continue;
        }
        let versions = match row.family {
            Family::Mma if instruction.root == "mma" => mma_sources(row, instruction),
            _ => vec![(Vec::new(), within)],
        };
        for (sources, within) in versions {
            sample(&mut kernel, row, instruction, &sources, within);
        }
    }
    if list.iter().any(|i| i.to_string().contains("%rq")) {
        kernel.at_least(Version::new(8, 3));
    }
    Some(kernel.draft())
}

fn silent_sample(kernel: &mut Kernel, row: &Row, instruction: &Instruction) {
    let changed = renamed(instruction, &mut |_, name| kernel.register(class(name), 's', 0));
    if row.name == "wgmma_wait" {
        kernel.body += "\twgmma.fence.sync.aligned;\n\twgmma.commit_group.sync.aligned;\n";
    }
    let _ = writeln!(kernel.body, "\t{changed};");
    kernel.store(3, "%gid", "u32", "");
}

fn sample(kernel: &mut Kernel, row: &Row, instruction: &Instruction, sources: &[Source], within: &str) {
    // Operand by operand, so that the registers of a vector are loaded together.
    let mut loaded: Vec<Vec<String>> = Vec::new();
    let mut position = 0;
    for operand in instruction.operands.iter().skip(1) {
        let names = registers(operand);
        if names.is_empty() {
            loaded.push(Vec::new());
            continue;
        }
        let classes: Vec<usize> = names.iter().map(|n| class(n)).collect();
        let mut source = match sources.get(position) {
            Some(given) => given.clone(),
            None => source(row, instruction, position, classes[0]),
        };
        if row.name.starts_with("mov_pack") || row.name == "mov_b128" {
            source = Source::new(CLASSES[classes[0]].2, "bits", 7);
        }
        position += 1;
        loaded.push(kernel.load(&source, &classes));
    }
    let mut next = vec![0; instruction.operands.len()];
    let mut results = Vec::new();
    let changed = renamed(instruction, &mut |at, name| {
        let class = class(name);
        let i = next[at];
        next[at] += 1;
        match at {
            0 => {
                let register = kernel.register(class, 'd', i);
                results.push((class, register.clone()));
                register
            }
            _ => loaded[at - 1][i].clone(),
        }
    });
    let names: Vec<String> = changed.operands.iter().flat_map(registers).collect();
    let (before, after) = around(row, instruction, &names);
    let _ = write!(kernel.body, "{before}\t{changed};\n{after}");
    let ty = instruction.modifiers.iter().map(|m| m.as_str()).find(|m| {
        !within.is_empty() && ["f16", "bf16", "f16x2", "bf16x2"].contains(m) && row.family != Family::Mma
    });
    for (class, register) in &results {
        kernel.store(*class, register, ty.unwrap_or(CLASSES[*class].2), within);
    }
    if !after.is_empty() {
        let wide = last_type(instruction).ends_with("64");
        let (class, register) = if wide { (4, "%x3") } else { (3, "%w3") };
        kernel.store(class, register, CLASSES[class].2, "");
    }
}
