//! Rows with one address: loads, stores, atomics, prefetches, non-bulk asynchronous copies.
//!
//! Every thread has 32 bytes of its own in each state space. Loads store what they read; after stores and atomics
//! the 32 bytes go to the output.

use super::kernel::{CLASSES, Kernel, Source, class, last_type, registers, renamed};
use super::{Draft, samples, set_bases};
use dualgemm_ptx::ast::{Immediate, Instruction, Operand, Version};
use dualgemm_ptx::isa::{Family, Row};
use std::fmt::Write as _;

const THREADS: usize = 64;

/// Rows with their own kernels, or that need more than an address.
const ELSEWHERE: &[&str] = &[
    "st_async",
    "st_async_vec",
    "red_async",
    "st_param",
    "cp_async_mbarrier",
    "cp_async_mbarrier_window",
    "discard",
];

/// Where the address of an instruction points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Global,
    Shared,
    Cluster,
    Local,
    Const,
    Param,
}

fn place(instruction: &Instruction) -> Place {
    // `cp.async` names its destination first.
    for modifier in &instruction.modifiers {
        return match modifier.as_str() {
            "shared" | "shared::cta" => Place::Shared,
            "shared::cluster" => Place::Cluster,
            "local" => Place::Local,
            "const" => Place::Const,
            "param" => Place::Param,
            "global" => Place::Global,
            _ => continue,
        };
    }
    Place::Global
}

/// The file of a row of this kind.
pub fn draft(row: &'static Row) -> Option<Draft> {
    if row.family != Family::LdSt || ELSEWHERE.contains(&row.name) {
        return None;
    }
    let list = samples(row);
    if !list.iter().any(|i| i.operands.iter().any(|o| matches!(o, Operand::Address(_)))) || row.name == "mov"
    {
        return None;
    }
    let mut kernel = Kernel::new(row, THREADS);
    if list.iter().any(|i| place(i) == Place::Cluster) {
        kernel.cluster = 2;
        kernel.block = THREADS / 2;
        kernel.grid = 2;
    }
    declare(&mut kernel, &list);
    if list.iter().any(|i| i.to_string().contains("%rq")) {
        kernel.at_least(Version::new(8, 3));
    }
    if list.iter().any(|i| i.operands.iter().flat_map(registers).any(|r| r.starts_with("%rd")) && hinted(i)) {
        kernel.at_least(Version::new(7, 4));
    }
    for instruction in &list {
        for variant in variants(row, instruction) {
            sample(&mut kernel, row, &variant);
        }
    }
    if kernel.cluster > 1 {
        kernel.body += CLUSTER_BARRIER;
    }
    Some(kernel.draft())
}

fn hinted(instruction: &Instruction) -> bool {
    instruction.has("L2::cache_hint")
}

/// `cp.async` with every size and with part of the source only.
fn variants(row: &Row, instruction: &Instruction) -> Vec<Instruction> {
    if instruction.root != "cp" {
        return vec![instruction.clone()];
    }
    let ca = row.name.starts_with("cp_async_ca");
    let sizes: &[i64] = if ca { &[4, 8, 16] } else { &[16] };
    let mut list = Vec::new();
    for &size in sizes {
        let mut sized = instruction.clone();
        sized.operands[2] = Operand::Imm(Immediate::Int(size));
        if instruction.operands.len() == 4 && !hinted(instruction) {
            for part in [0, 1, size - 1, size] {
                let mut partial = sized.clone();
                partial.operands[3] = Operand::Imm(Immediate::Int(part));
                list.push(partial);
            }
        } else {
            list.push(sized);
        }
    }
    list
}

/// The spaces that the samples use, with 32 bytes per thread that hold data.
fn declare(kernel: &mut Kernel, list: &[Instruction]) {
    let places: Vec<Place> = list.iter().map(place).collect();
    let has = |p| places.contains(&p);
    let header = format!("in u32 bits 11 {}", THREADS * 8);
    let global = kernel.buffer(header);
    let _ = write!(
        kernel.setup,
        "\tmad.wide.u32 %g, %gid, 32, {global};\n\tld.global.v4.b32 {{%u0, %u1, %u2, %u3}}, [%g];\n\t\
         ld.global.v4.b32 {{%u4, %u5, %u6, %u7}}, [%g+16];\n\tmov.u32 %w0, %tid.x;\n\tmov.u64 %policy, 0;\n"
    );
    kernel.locals += "\t.reg .b64 %g, %policy, %place;\n\t.reg .b32 %sa, %u<8>, %v<8>;\n";
    if list.iter().any(hinted) {
        kernel.setup += "\tcreatepolicy.fractional.L2::evict_first.b64 %policy, 0f3F000000;\n";
    }
    if has(Place::Shared) || has(Place::Cluster) {
        let _ = writeln!(kernel.locals, "\t.shared .align 32 .b8 window[{}];", THREADS * 32);
        kernel.setup += "\tmov.u32 %sa, window;\n\tmad.lo.u32 %sa, %w0, 32, %sa;\n";
        kernel.setup += &store("shared", "%sa");
    }
    if has(Place::Cluster) {
        kernel.locals += "\t.reg .b32 %peer;\n";
        kernel.setup += "\tmov.u32 %w1, %cluster_ctarank;\n\txor.b32 %w1, %w1, 1;\n\t\
                         mapa.shared::cluster.u32 %peer, %sa, %w1;\n";
        kernel.setup += CLUSTER_BARRIER;
    }
    if has(Place::Local) {
        kernel.locals += "\t.local .align 32 .b8 own[32];\n\t.reg .b64 %own;\n";
        kernel.setup += "\tmov.u64 %own, own;\n";
        kernel.setup += &store("local", "%own");
    }
    if has(Place::Const) {
        kernel.globals += ".const .align 32 .b32 table[8] = {305419896, 2596069104, 4275878552, 19088743, 2147483648, 1, 4294967295, 1065353216};\n";
    }
    if has(Place::Param) {
        kernel.argument("bytes u32 bits 12 8".into(), ".align 16 .b8 @[32]");
    }
}

/// State space and register of a thread's own 32 bytes that samples write.
fn written(place: Place) -> (&'static str, &'static str) {
    match place {
        Place::Shared | Place::Cluster => ("shared", "%sa"),
        Place::Local => ("local", "%own"),
        _ => ("global", "%place"),
    }
}

const CLUSTER_BARRIER: &str = "\tbarrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;\n";

/// The written bytes are an output of 8 words per thread and sample.
fn read_back(kernel: &mut Kernel, place: Place) {
    let (space, base) = written(place);
    let barrier = if place == Place::Cluster { CLUSTER_BARRIER } else { "" };
    kernel.body += barrier;
    let _ = write!(
        kernel.body,
        "\tld.{space}.v4.b32 {{%v0, %v1, %v2, %v3}}, [{base}];\n\tld.{space}.v4.b32 {{%v4, %v5, %v6, %v7}}, [{base}+16];\n"
    );
    for i in 0..8 {
        kernel.store(3, &format!("%v{i}"), "u32", "");
    }
    kernel.body += barrier;
}

/// Stores the 32 bytes that a thread starts from.
fn store(space: &str, base: &str) -> String {
    format!(
        "\tst.{space}.v4.b32 [{base}], {{%u0, %u1, %u2, %u3}};\n\tst.{space}.v4.b32 [{base}+16], {{%u4, %u5, %u6, %u7}};\n"
    )
}

fn reset(kernel: &mut Kernel, place: Place) {
    let (space, base) = written(place);
    kernel.body += &store(space, base);
    if place == Place::Cluster {
        kernel.body += CLUSTER_BARRIER;
    }
}

fn sample(kernel: &mut Kernel, row: &Row, instruction: &Instruction) {
    let place = place(instruction);
    let root = instruction.root.as_str();
    let writes = matches!(root, "st" | "atom" | "red" | "cp");
    let ty = last_type(instruction);
    if writes && place == Place::Global && !kernel.locals.contains("%scratch") {
        // Working memory of 32 bytes per thread.
        let scratch = kernel.buffer(format!("in u32 zero 0 {}", THREADS * 8));
        let _ = writeln!(kernel.setup, "\tmad.wide.u32 %place, %gid, 32, {scratch};");
        kernel.locals += "\t// %place: working memory in global memory (%scratch).\n";
    }
    let atomic = matches!(root, "atom" | "red");
    let result = matches!(root, "ld" | "atom" | "createpolicy");
    let loaded = operands(kernel, row, instruction, result, atomic);
    if writes {
        // Floating-point atomics start from numbers.
        if atomic && (ty.starts_with('f') || ty.starts_with("bf") || row.name == "atom_cas") {
            let source = value(row, ty, 9, 3, true);
            let words = kernel.load(&source, &[3; 8]);
            for (i, word) in words.iter().enumerate() {
                let _ = writeln!(kernel.body, "\tmov.b32 %u{i}, {word};");
            }
        }
        reset(kernel, place);
    }
    let mut next = vec![0; instruction.operands.len()];
    let mut results = Vec::new();
    let mut changed = renamed(instruction, &mut |at, name| {
        let class = class(name);
        if let Some(register) = loaded.get(at).and_then(|l| l.get(next[at])) {
            next[at] += 1;
            return register.clone();
        }
        if at == 0 && result {
            let register = kernel.register(class, 'd', next[at]);
            next[at] += 1;
            results.push((class, register.clone()));
            return register;
        }
        name.to_string()
    });
    set_bases(&mut changed, |at| {
        Some(match place {
            Place::Shared if at == 0 || root != "cp" => "%sa",
            Place::Shared => "%g",
            Place::Cluster => "%peer",
            Place::Local => "%own",
            Place::Const => "table",
            Place::Param => "p1",
            Place::Global if writes => "%place",
            Place::Global => "%g",
        })
    });
    let _ = writeln!(kernel.body, "\t{changed};");
    if root == "cp" {
        kernel.body += "\tcp.async.wait_all;\n";
    }
    if root == "createpolicy" {
        // A policy is opaque; a load that uses it reads what any load reads.
        let (_, register) = &results[0];
        let _ = writeln!(kernel.body, "\tld.global.L2::cache_hint.b32 %v0, [%g], {register};");
        kernel.store(3, "%v0", "u32", "");
        return;
    }
    for (class, register) in &results {
        kernel.store(*class, register, CLASSES[*class].2, "");
    }
    if writes {
        read_back(kernel, place);
    } else if results.is_empty() {
        kernel.store(3, "%gid", "u32", "");
    }
}

/// Loads what each operand holds: its registers.
fn operands(
    kernel: &mut Kernel,
    row: &Row,
    instruction: &Instruction,
    result: bool,
    atomic: bool,
) -> Vec<Vec<String>> {
    let ty = last_type(instruction);
    let mut loaded: Vec<Vec<String>> = Vec::new();
    for (at, operand) in instruction.operands.iter().enumerate() {
        let names = match operand {
            Operand::Address(_) => Vec::new(),
            _ if at == 0 && result => Vec::new(),
            _ => registers(operand),
        };
        let policy = hinted(instruction) && at + 1 == instruction.operands.len();
        if policy {
            loaded.push(vec!["%policy".into()]);
        } else if names.is_empty() {
            loaded.push(Vec::new());
        } else {
            let classes: Vec<usize> = names.iter().map(|n| class(n)).collect();
            loaded.push(kernel.load(&value(row, ty, at, classes[0], atomic), &classes));
        }
    }
    loaded
}

/// What the operand at `at` holds.
fn value(row: &Row, ty: &str, at: usize, class: usize, atomic: bool) -> Source {
    let fallback = CLASSES[class].2;
    let seed = at as u64;
    match ty {
        _ if !atomic => Source::new(fallback, "bits", seed),
        "f16" | "f16x2" | "bf16" | "bf16x2" if row.name != "atom_cas" => {
            Source::new(ty.trim_end_matches("x2"), "small", seed)
        }
        "f32" | "f64" if row.name != "atom_cas" => Source::new(ty, "small", seed),
        _ if row.name == "atom_cas" || row.name.ends_with("inc_dec") => Source::new(fallback, "few", seed),
        _ => Source::new(fallback, "bits", seed),
    }
}
