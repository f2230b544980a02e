//! Tensor maps that a kernel edits: each field of a map that the host encoded otherwise is replaced, then a box is
//! loaded with it. What is expected is the box of the map as it should be, element by element.

use super::Draft;
use super::raw::Raw;
use super::tensor::{Map, boxed, bytes};

const SIZE: usize = 2048;
const SCOPES: [&str; 4] = ["cta", "cluster", "gpu", "sys"];

/// The files: edits in shared memory with a copy to global memory, and edits in global memory.
pub fn drafts() -> Vec<Draft> {
    vec![draft("shared::cta"), draft("global")]
}

/// An edit: the map as the host encodes it, its address, the instruction's field, dimension and value, and the map
/// it becomes.
struct Edit {
    given: Map,
    address: usize,
    field: &'static str,
    operands: String,
    wide: bool,
    wanted: Map,
}

fn matrix() -> Map {
    Map::f16(vec![64, 20], vec![32, 8], "None")
}

fn edits() -> Vec<Edit> {
    let edit = |given: Map, field, operands: &str, wanted: Map| Edit {
        given,
        address: 0,
        field,
        operands: operands.into(),
        wide: false,
        wanted,
    };
    let mut list = vec![
        // The address that is wanted is in %rd6.
        Edit { address: 256, wide: true, ..edit(matrix(), "global_address", "%rd6", matrix()) },
        edit(
            Map { dims: vec![64, 20, 1], extents: vec![32, 8, 1], steps: vec![1, 1, 1], ..matrix() },
            "rank",
            "1",
            matrix(),
        ),
        edit(Map { extents: vec![16, 8], ..matrix() }, "box_dim", "0, 32", matrix()),
        edit(Map { extents: vec![32, 3], ..matrix() }, "box_dim", "1, 8", matrix()),
        edit(matrix(), "global_dim", "0, 40", Map { dims: vec![40, 20], ..matrix() }),
        edit(matrix(), "global_dim", "1, 10", Map { dims: vec![64, 10], ..matrix() }),
        edit(matrix(), "element_stride", "1, 2", Map { steps: vec![1, 2], ..matrix() }),
        Edit { wide: true, ..edit(matrix(), "global_stride", "0, 64", matrix()) },
        edit(
            Map { ty: "u8", size: 1, dims: vec![64, 20], ..matrix() },
            "elemtype",
            "1",
            Map { ty: "u16", dims: vec![64, 20], ..matrix() },
        ),
        edit(matrix(), "interleave_layout", "0", matrix()),
        edit(Map { fill: "Nan", ..matrix() }, "fill_mode", "0", matrix()),
    ];
    for (mode, swizzle, width) in [("1", "B32", 16), ("2", "B64", 32), ("3", "B128", 64)] {
        let of = |swizzle| Map { extents: vec![width, 8], swizzle, ..matrix() };
        list.push(edit(of("None"), "swizzle_mode", mode, of(swizzle)));
    }
    list
}

/// The edit whose number the kernel is given.
fn choice(space: &str, at: &str, edits: &[Edit]) -> String {
    let mut choice = String::new();
    for (i, edit) in edits.iter().enumerate() {
        let width = if edit.wide { "b64" } else { "b32" };
        choice += &format!(
            "setp.ne.u32 %p3, %r2, {i};
             @%p3 bra NOT{i};
             tensormap.replace.tile.{}.{space}.b1024.{width} [{at}], {};
             NOT{i}:\n",
            edit.field, edit.operands
        );
    }
    choice
}

/// What the kernel executes: one of the edits, then a load of a box.
fn body(space: &str, edits: &[Edit]) -> String {
    let shared = space == "shared::cta";
    let at = if shared { "%r3" } else { "%rd7" };
    let choice = choice(space, at, edits);
    let publish: String = match shared {
        true => SCOPES
            .iter()
            .map(|s| format!("@%p4 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.{s}.sync.aligned [%rd7], [%r3], 128;\n"))
            .collect(),
        false => SCOPES.iter().map(|s| format!("@%p0 fence.proxy.tensormap::generic.release.{s};\n")).collect(),
    };
    let acquire: String = SCOPES
        .iter()
        .map(|s| format!("@%p0 fence.proxy.tensormap::generic.acquire.{s} [%rd8], 128;\n"))
        .collect();
    let store = if shared {
        "mad.lo.u32 %r7, %t, 4, %r3;\n@%p4 st.shared.u32 [%r7], %r6;\n"
    } else {
        "mad.wide.u32 %rd2, %t, 4, %rd7;\n@%p4 st.global.u32 [%rd2], %r6;\n"
    };
    ptx!("tensor_map", size = SIZE, store, choice, publish, acquire)
}

fn draft(space: &'static str) -> Draft {
    let shared = space == "shared::cta";
    let edits = edits();
    let body = body(space, &edits);
    let mut rows = String::from(
        "tensormap_replace_address tensormap_replace_rank tensormap_replace_dim tensormap_replace_stride tensormap_replace_mode fence_proxy_tensormap_acquire",
    );
    rows += if shared { " tensormap_cp_fenceproxy" } else { " fence_proxy_tensormap_release" };
    let name = if shared { "tensormap_replace_shared" } else { "tensormap_replace_global" };
    let mut raw = Raw::new(&format!("tma/{name}"), &rows, "", "u32 1").body(&body);
    raw.head = vec![
        "-- Expected: the box of the map that was meant, element by element, not by the simulator.".into(),
    ];
    raw.parameters = ".param .u64 out, .param .u64 given, .param .u64 place, .param .align 64 .b8 map[128], .param .u32 which, .param .u32 bytes".into();
    let tensor = bytes("u16", "bits", 16, 2048);
    let mut outputs = Vec::new();
    for (i, edit) in edits.iter().enumerate() {
        let start = [8, 6];
        outputs.push(match edit.field {
            // Rows of 128 bytes that are 64 bytes apart; rows of 80 bytes that are 128 bytes apart.
            "global_stride" | "elemtype" => boxed(&edit.wanted, &rows_of(&tensor, 64, 128), &start, SIZE),
            "global_dim" if i == 4 => boxed(&edit.wanted, &rows_of(&tensor, 128, 80), &start, SIZE),
            _ => boxed(&edit.wanted, &tensor, &start, SIZE),
        });
        raw.head.push("launch k block 64".into());
        raw.head.push(format!("out u32 {} = ?", SIZE / 4));
        raw.head.push("in u16 bits 16 2048".into());
        raw.head.push("in u32 zero 0 64".into());
        let address = if edit.address > 0 { format!(" address {}", edit.address) } else { String::new() };
        raw.head.push(edit.given.head(1) + &address);
        raw.head.push(format!("u32 {i}"));
        raw.head.push(format!("u32 {}", edit.wanted.box_bytes()));
    }
    raw.expects(outputs).draft()
}

/// 20 rows of a tensor by their distance and length, one right after the other.
fn rows_of(tensor: &[u8], stride: usize, length: usize) -> Vec<u8> {
    (0..20).flat_map(|row| tensor[stride * row..][..length].to_vec()).collect()
}
