//! Bulk copies and reductions, and tensor copies with every swizzle, type and kind of boundary.

use super::kernel::last_type;
use super::raw::Raw;
use super::tensor::{Map, contents, maps};
use super::{Draft, samples_of, set_bases};
use dualgemm_ptx::ast::{Immediate, Instruction, Operand};

/// The files.
pub fn drafts() -> Vec<Draft> {
    let mut list: Vec<Raw> =
        ["bulk_load", "bulk_load_cta", "bulk_copy_cluster", "bulk_reduce_cluster"].map(to_shared).into();
    list.extend(
        ["bulk_store", "bulk_reduce_bits", "bulk_reduce_add", "bulk_reduce_add_half", "bulk_reduce_min_max"]
            .map(to_global),
    );
    list.push(prefetch());
    list.extend((1..=5).flat_map(|d| [tensor_load(d), tensor_store(d)]));
    list.extend(["add", "min", "max", "inc", "dec", "and", "or", "xor"].map(tensor_reduce));
    list.push(multicast());
    list.into_iter().map(Raw::draft).collect()
}

/// The samples of a row with these operands: by position from 0.
fn samples(row: &str, operands: &[(usize, &str)], bytes: i64) -> Vec<Instruction> {
    let mut samples = samples_of(row);
    for i in &mut samples {
        set_bases(i, |at| operands.iter().find(|(n, _)| *n == at).map(|(_, name)| *name));
        for operand in &mut i.operands {
            match operand {
                Operand::Ident(name) if name.as_str().starts_with("%rs") => *name = "%rs7".into(),
                Operand::Ident(name) if name.as_str().starts_with("%rd") => *name = "%rd31".into(),
                Operand::Ident(_) => *operand = Operand::Imm(Immediate::Int(bytes)),
                _ => {}
            }
        }
    }
    samples
}

pub const POLICY: &str = "createpolicy.fractional.L2::evict_first.b64 %rd31, 0f3F800000;\nmov.u16 %rs7, 3;\n";

/// 512 bytes to this CTA's or the other CTA's shared memory.
fn to_shared(name: &'static str) -> Raw {
    let remote = name.ends_with("cluster");
    let cta = name == "bulk_load_cta";
    let from = if remote { "%r3" } else { "%rd1" };
    let (to, bar) = if remote { ("%r6", "%r7") } else { ("%r2", "%r4") };
    let peer = match remote {
        true => {
            "xor.b32 %r8, %r5, 1;
             mapa.shared::cluster.u32 %r6, %r2, %r8;
             mapa.shared::cluster.u32 %r7, %r4, %r8;"
        }
        false => "",
    };
    let mut body = ptx!("bulk_to_shared", policy = POLICY, peer);
    let list = samples(name, &[(0, to), (1, from), (3, bar)], 512);
    let cluster = !cta;
    let sync = if cluster {
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
    } else {
        "bar.sync 0;"
    };
    for (i, instruction) in list.iter().enumerate() {
        // One CTA's data for both, or each its own.
        let guard = if instruction.has("multicast::cluster") { "%p2" } else { "%p0" };
        body += &ptx!("bulk_to_shared_step", sync, guard, instruction, i, phase = i % 2);
        for k in 0..4 {
            let threads = if cluster { 64 } else { 32 };
            body += &format!("st.global.u32 [%out+{}], %r{};\n", (i * 4 + k) * threads * 4, 11 + k);
        }
    }
    let (launch, threads) = if cluster { ("grid 2 block 32 cluster 2", 64) } else { ("block 32", 32) };
    Raw::new(&format!("tma/{name}"), name, launch, &format!("u32 {}", list.len() * 4 * threads))
        .arguments(&["in u32 bits 4 256"], ".param .u64 out, .param .u64 given")
        .body(&body)
}

/// 512 bytes from shared memory onto numbers in global memory.
fn to_global(name: &'static str) -> Raw {
    let list = samples(name, &[(0, "%rd3"), (1, "%r2")], 512);
    let mut groups: Vec<&str> = Vec::new();
    let mut body = format!(
        ".shared .align 128 .b8 box[512];
         {POLICY}
         mov.u32 %r2, box;
         mad.lo.u32 %r3, %t, 16, %r2;
         setp.eq.u32 %p0, %t, 0;\n"
    );
    let mut head = Vec::new();
    let mut parameters = String::from(".param .u64 out");
    for instruction in &list {
        let ty = match last_type(instruction) {
            t @ ("f16" | "bf16" | "f32" | "f64") => t,
            t if t.ends_with("64") => "u64",
            _ => "u32",
        };
        if !groups.contains(&ty) {
            groups.push(ty);
            parameters += &format!(", .param .u64 x_{ty}");
            let size = crate::conformance::data::size(ty).unwrap_or(4);
            let generator = if ty.starts_with('u') { "bits" } else { "small" };
            head.push(format!("in {ty} {generator} 5 {}", 512 / size));
        }
        body += &format!(
            "ld.param.u64 %rd1, [x_{ty}];
             mad.wide.u32 %rd2, %t, 16, %rd1;
             ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd2];
             st.shared.v4.b32 [%r3], {{%r21, %r23, %r20, %r22}};
             fence.proxy.async;
             bar.sync 0;\n"
        );
        let k = head.iter().filter(|h| h.starts_with("inout")).count();
        let size = crate::conformance::data::size(ty).unwrap_or(4);
        let generator = if ty.starts_with('u') { "bits" } else { "small" };
        head.push(format!("inout {ty} {generator} 6 {} = ?", 512 / size));
        parameters += &format!(", .param .u64 y{k}");
        body += &format!(
            "ld.param.u64 %rd3, [y{k}];
             @%p0 {instruction};
             @%p0 cp.async.bulk.commit_group;
             @%p0 cp.async.bulk.wait_group 0;
             bar.sync 0;\n"
        );
    }
    body += "st.global.u32 [%out], %t;\n";
    let mut raw = Raw::new(&format!("tma/{name}"), name, "block 32", "u32 32").body(&body);
    raw.head.extend(head);
    raw.parameters = parameters;
    raw
}

fn prefetch() -> Raw {
    let list = samples("bulk_prefetch", &[(0, "%rd1")], 512);
    let mut body = format!("{POLICY}ld.param.u64 %rd1, [given];\n");
    for instruction in &list {
        body += &format!("{instruction};\n");
    }
    body += "mad.wide.u32 %rd2, %t, 4, %rd1;\nld.global.u32 %r2, [%rd2];\nst.global.u32 [%out], %r2;\n";
    Raw::new("tma/bulk_prefetch", "bulk_prefetch", "block 32", "u32 32")
        .arguments(&["in u32 bits 4 128"], ".param .u64 out, .param .u64 given")
        .body(&body)
}

pub fn coordinates(d: usize) -> (String, String) {
    let registers: Vec<String> = (0..d).map(|i| format!("%r{}", 40 + i)).collect();
    let loads: Vec<String> = (0..d).map(|i| format!("ld.param.u32 %r{}, [c{i}];\n", 40 + i)).collect();
    (registers.join(", "), loads.concat())
}

const PARAMETERS: &str =
    ".param .u64 out, .param .u64 given, .param .align 64 .b8 map[128], .param .u32 bytes";

pub fn parameters(d: usize) -> String {
    (0..d).fold(PARAMETERS.to_string(), |p, i| format!("{p}, .param .u32 c{i}"))
}

fn tensor_load(d: usize) -> Raw {
    let (list, loads) = coordinates(d);
    let body = ptx!("tensor_load", loads, d, list);
    let rows = "tensor_load tensor_load_cta tensor_prefetch prefetch_tensormap";
    let mut raw = Raw::of_launches(&format!("tma/tensor_load_{d}d"), rows, None, parameters(d)).body(&body);
    for (map, at) in maps(d) {
        let (_, bytes) = map.strides();
        let (ty, generator, size) = contents(map.ty);
        let given = format!("in {ty} {generator} 9 {}", bytes / size);
        raw.launch("launch k block 64", "out u32 2048 = ?", &given, map.head(1), map.box_bytes(), &at);
    }
    raw
}

/// The tile is filled from `given`; `out` is the tensor.
pub fn store_body(d: usize, instruction: &str) -> String {
    let (list, loads) = coordinates(d);
    ptx!("tensor_store", loads, instruction, list)
}

fn tensor_store(d: usize) -> Raw {
    let body = store_body(d, &format!("cp.async.bulk.tensor.{d}d.global.shared::cta.tile.bulk_group"));
    let mut raw =
        Raw::of_launches(&format!("tma/tensor_store_{d}d"), "tensor_store", None, parameters(d)).body(&body);
    // A store's box starts inside.
    for (map, at) in maps(d).into_iter().map(|(m, at)| (m, at.iter().map(|c| c.abs()).collect::<Vec<_>>())) {
        let (_, bytes) = map.strides();
        let (ty, generator, size) = contents(map.ty);
        let out = format!("out {ty} {} = ?", bytes / size);
        let tile = format!("in {ty} {generator} 10 {}", 4096 / size);
        raw.launch("launch k block 64", &out, &tile, map.head(0), map.box_bytes(), &at);
    }
    raw
}

fn tensor_reduce(op: &'static str) -> Raw {
    let body =
        store_body(2, &format!("cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group"));
    let mut raw = Raw::of_launches(&format!("tma/tensor_reduce_{op}"), "tensor_reduce", None, parameters(2))
        .body(&body);
    let types: &[_] = match op {
        "add" => &["u32", "s32", "u64", "f16", "bf16", "f32"],
        "min" | "max" => &["u32", "s32", "u64", "s64", "f16", "bf16"],
        "inc" | "dec" => &["u32"],
        _ => &["u32", "u64"],
    };
    for &ty in types {
        let element = ty.replace('s', "u");
        let (_, _, size) = contents(ty);
        for (swizzle, at) in [("None", [0, 0]), ("B64", [64 - 16 / size as i64, 40])] {
            let map = Map {
                ty,
                size,
                dims: vec![70, 50],
                extents: vec![64 / size, 16],
                steps: vec![1, 1],
                swizzle,
                fill: "Zero",
            };
            let (_, bytes) = map.strides();
            let generator = match op {
                "inc" | "dec" => "few",
                _ if element.starts_with('u') => "bits",
                _ => "small",
            };
            let out = format!("inout {element} {generator} 11 {} = ?", bytes / size);
            let tile = format!("in {element} {generator} 12 {}", 4096 / size);
            raw.launch("launch k block 64", &out, &tile, map.head(0), map.box_bytes(), &at);
        }
    }
    raw
}

/// A tensor load by each of two CTAs for both, with a cache policy.
fn multicast() -> Raw {
    let body = ptx!("tensor_multicast", policy = POLICY);
    Raw::new("tma/tensor_load_multicast", "tensor_load", "grid 2 block 128 cluster 2", "u32 1024")
        .arguments(
            &[
                "in u16 iota 0 1600",
                "map 1 f16 dims 80 20 strides 160 box 64 8 steps 1 1 swizzle B128 fill Zero",
            ],
            ".param .u64 out, .param .u64 given, .param .align 64 .b8 map[128]",
        )
        .body(&body)
}
