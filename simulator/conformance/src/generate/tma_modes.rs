//! Tensor copies that do not move a box: pixels under a filter, rows of a list; and copies of a pair of CTAs. What is
//! expected is computed here, element by element.

use super::Draft;
use super::raw::Raw;
use super::tensor::{Map, boxed, bytes, contents, maps, pitch, swizzled};
use super::tma::{POLICY, coordinates, parameters, store_body};

/// The files.
pub fn drafts() -> Vec<Draft> {
    let mut list: Vec<Draft> = (3..=5).map(im2col).collect();
    list.extend((3..=5).flat_map(|d| [im2col_store(d, false), im2col_store(d, true)]));
    list.push(gather());
    list.push(scatter());
    list.extend((1..=5).map(pair));
    list
}

/// Threads copy `size` bytes of shared memory from `%r{base}` on to `%out`, which is the same in all of them.
fn copy_out(label: &str, base: u32, size: usize, threads: usize) -> String {
    ptx!("copy_out", label, base, step = 4 * threads, size)
}

/// Zeros in `size` bytes from `%r{base}` on.
fn zeros(label: &str, base: u32, size: usize, threads: usize) -> String {
    format!(
        "shl.b32 %r7, %t, 2;
         mov.u32 %r9, 0;
         {label}:
         add.u32 %r8, %r{base}, %r7;
         st.shared.u32 [%r8], %r9;
         add.u32 %r7, %r7, {};
         setp.lt.u32 %p2, %r7, {size};
         @%p2 bra {label};\n",
        4 * threads
    )
}

/// A tensor of images and a column of pixels.
struct Column {
    lower: [i64; 3],
    upper: [i64; 3],
    step: usize,
    channels: usize,
    pixels: usize,
    swizzle: &'static str,
    /// Filter base in each dimension of space, image, offset in each dimension of space.
    base: [i64; 3],
    image: i64,
    offset: [i64; 3],
    channel: i64,
}

const fn column(
    lower: i64,
    upper: i64,
    step: usize,
    channels: usize,
    pixels: usize,
    swizzle: &'static str,
) -> Column {
    Column {
        lower: [lower; 3],
        upper: [upper; 3],
        step,
        channels,
        pixels,
        swizzle,
        base: [lower; 3],
        image: 0,
        offset: [0; 3],
        channel: 0,
    }
}

/// The columns that are loaded; `last` is the last image.
fn columns(last: i64) -> [Column; 9] {
    [
        // A filter of three with padding of one.
        column(-1, -1, 1, 32, 64, "B64"),
        Column { offset: [2, 1, 0], ..column(-1, -1, 1, 16, 50, "None") },
        Column { base: [4, 3, 2], offset: [1, 2, 2], image: 1, ..column(-1, -1, 1, 16, 100, "B32") },
        // Without padding.
        Column { offset: [2, 2, 2], channel: 16, ..column(0, -2, 1, 16, 64, "B32") },
        Column { base: [3, 2, 1], offset: [0, 2, 1], image: 1, ..column(0, -2, 1, 32, 33, "None") },
        // In steps of two.
        Column { offset: [1, 1, 1], ..column(-1, -1, 2, 32, 40, "B64") },
        Column { base: [3, 1, -1], offset: [2, 0, 1], image: 2, ..column(-1, -1, 2, 16, 60, "B32") },
        // A box of another width below than above, and past the last image.
        Column { lower: [-2, 0, -1], upper: [1, -1, 0], base: [-2, 0, -1], ..column(0, 0, 1, 32, 80, "B64") },
        Column { image: last, offset: [1, 0, 0], ..column(-1, 0, 1, 32, 128, "B64") },
    ]
}

/// A column by its definition: bases in order, from the given one on, through all images. For each byte its place in the
/// tensor, if it has one, and in shared memory.
fn places(column: &Column, map: &Map) -> Vec<(Option<usize>, usize)> {
    let (strides, _) = map.strides();
    let row = 2 * column.channels;
    let mut list = Vec::new();
    let space = map.dims.len() - 2;
    let mut base = column.base;
    let mut image = column.image;
    for pixel in 0..column.pixels {
        let mut from = 2 * column.channel + image * strides[space] as i64;
        let mut inside = (0..map.dims[space + 1] as i64).contains(&image);
        for i in 0..space {
            let at = base[i] + column.offset[i];
            inside &= (0..map.dims[i + 1] as i64).contains(&at);
            from += at * strides[i] as i64;
        }
        for b in 0..row {
            let inside = inside && column.channel as usize * 2 + b < 2 * map.dims[0];
            let tile = swizzled(column.swizzle, pixel * pitch(column.swizzle, row) + b);
            list.push((inside.then(|| from as usize + b), tile));
        }
        let mut i = 0;
        loop {
            if i == space {
                image += 1;
                break;
            }
            base[i] += column.step as i64;
            if base[i] <= map.dims[i + 1] as i64 - 1 + column.upper[i] {
                break;
            }
            base[i] = column.lower[i];
            i += 1;
        }
    }
    list
}

/// The tensors of images of `d` dimensions.
fn images(d: usize) -> Vec<usize> {
    match d {
        3 => vec![32, 9, 5],
        4 => vec![32, 9, 7, 4],
        _ => vec![32, 6, 5, 4, 3],
    }
}

impl Column {
    /// The map for it, and its line of the head.
    fn map(&self, dims: &[usize], argument: usize) -> (Map, String) {
        let d = dims.len();
        let steps = (0..d).map(|i| if i == 0 || i == d - 1 { 1 } else { self.step }).collect();
        let extents = vec![self.channels, self.pixels];
        let map = Map { steps, ..Map::f16(dims.to_vec(), extents, self.swizzle) };
        let corner = |c: &[i64; 3]| c[..d - 2].iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let head =
            format!("{} lower {} upper {}", map.head(argument), corner(&self.lower), corner(&self.upper));
        (map, head)
    }
}

/// Stores of columns to a tensor of zeros: as copies, or as reductions that add to them.
fn im2col_store(d: usize, add: bool) -> Draft {
    let (row, copy) = match add {
        true => ("tensor_reduce_im2col", "cp.reduce.async.bulk.tensor"),
        false => ("tensor_store_im2col", "cp.async.bulk.tensor"),
    };
    let operation = if add { ".add" } else { "" };
    let instruction = format!("{copy}.{d}d.global.shared::cta{operation}.im2col_no_offs.bulk_group");
    let origin = Some("computed from PTX ISA 5.5.4");
    let mut raw = Raw::of_launches(&format!("tma/{row}_{d}d"), row, origin, parameters(d))
        .body(&store_body(d, &instruction));
    let tile = bytes("f16", "small", 17, 2048);
    let dims = images(d);
    let mut outputs = Vec::new();
    for column in columns(dims[d - 1] as i64 - 1) {
        // What fits in the tile. A card stops at a store whose bounding box reaches out of the tensor.
        let [base, lower] = [column.base, column.lower].map(|corner| corner.map(|at| at.max(0)));
        let upper = column.upper.map(|at| at.min(0));
        let pixels = column.pixels.min(64);
        let column = Column { base, lower, upper, offset: [0; 3], pixels, ..column };
        let (map, head) = column.map(&dims, 0);
        let (_, size) = map.strides();
        let mut tensor = vec![0; size];
        for (to, from) in places(&column, &map) {
            if let Some(to) = to {
                tensor[to] = tile[from];
            }
        }
        outputs.push(tensor);
        let at = [&[column.channel], &column.base[..d - 2], &[column.image]].concat();
        let out = format!("out u16 {} = ?", size / 2);
        let bytes = 2 * column.channels * column.pixels;
        raw.launch("launch k block 64", &out, "in f16 small 17 2048", head, bytes, &at);
    }
    raw.expects(outputs).draft()
}

/// Loads of columns, plain and with multicast and a cache policy.
fn im2col(d: usize) -> Draft {
    const SIZE: usize = 8192;
    let dims = images(d);
    let (list, loads) = coordinates(d);
    let offsets: Vec<String> = (0..d - 2).map(|i| format!("%rs{}", i + 1)).collect();
    let offset_loads: String =
        (0..d - 2).map(|i| format!("ld.param.u32 %r8, [o{i}];\ncvt.u16.u32 %rs{}, %r8;\n", i + 1)).collect();
    let instruction =
        format!("cp.async.bulk.tensor.{d}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes");
    let operands = format!("[%rd1, {{{list}}}], [%r5], {{{}}}", offsets.join(", "));
    let body = ptx!(
        "im2col",
        size = SIZE,
        policy = POLICY,
        loads,
        offset_loads,
        clear1 = zeros("CLEAR1", 3, SIZE, 64),
        clear2 = zeros("CLEAR2", 4, SIZE, 64),
        instruction,
        operands,
        copy1 = copy_out("COPY1", 3, SIZE, 64),
        copy2 = copy_out("COPY2", 4, SIZE, 64)
    );
    let rows = format!("tensor_load_im2col_{d}d");
    let parameters = (0..d - 2).fold(parameters(d), |p, i| format!("{p}, .param .u32 o{i}"));
    let origin = Some("computed from PTX ISA 5.5.4");
    let mut raw = Raw::of_launches(&format!("tma/{rows}"), &rows, origin, parameters).body(&body);
    let mut outputs = Vec::new();
    for column in &columns(dims[d - 1] as i64 - 1) {
        let (map, head) = column.map(&dims, 1);
        let (_, size) = map.strides();
        let tensor = bytes("u16", "bits", 13, size / 2);
        let mut tile = vec![0; SIZE];
        for (from, to) in places(column, &map) {
            tile[to] = from.map_or(0, |from| tensor[from]);
        }
        outputs.push([tile.clone(), tile].concat());
        let at =
            [&[column.channel], &column.base[..d - 2], &[column.image], &column.offset[..d - 2]].concat();
        let (out, given) = (format!("out u32 {} = ?", SIZE / 2), format!("in u16 bits 13 {}", size / 2));
        raw.launch("launch k block 64", &out, &given, head, 2 * column.channels * column.pixels, &at);
    }
    raw.expects(outputs).draft()
}

/// The map of single rows, and (column, rows) lists.
fn lists(swizzle: &'static str, width: usize) -> (Map, [[i64; 5]; 4]) {
    let map = Map::f16(vec![72, 24], vec![width, 1], swizzle);
    (map, [[0, 3, 1, 20, 7], [8, 5, 5, 0, 23], [64, 2, 30, 9, 1], [16, 23, 22, 21, 20]])
}

const ROWS: Option<&str> = Some("computed from PTX ISA 5.5.3.4");

/// Four rows under each other, for the CTA alone, with a pair's barrier, and for both CTAs of a cluster.
fn gather() -> Draft {
    const SIZE: usize = 2048;
    let instruction =
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes";
    let operands = "[%rd1, {%r40, %r41, %r42, %r43, %r44}], [%r5]";
    let body = ptx!(
        "gather4",
        size = SIZE,
        policy = POLICY,
        loads = coordinates(5).1,
        clear = zeros("CLEAR", 3, SIZE, 64),
        instruction,
        operands,
        copy = copy_out("COPY", 3, SIZE, 64)
    );
    let mut raw = Raw::of_launches("tma/tensor_gather4", "tensor_gather4", ROWS, parameters(5))
        .body(&body)
        .target("sm_100a", "8.6");
    let mut outputs = Vec::new();
    for (swizzle, width) in [("None", 64), ("B128", 64), ("B64", 32), ("B32", 16)] {
        let (map, lists) = lists(swizzle, width);
        let (_, size) = map.strides();
        let tensor = bytes("u16", "bits", 14, size / 2);
        for list in lists {
            let mut tile = vec![0; SIZE];
            for (i, &row) in list[1..].iter().enumerate() {
                let one = boxed(&Map { swizzle: "None", ..map.clone() }, &tensor, &[list[0], row], 2 * width);
                for copy in 0..4 {
                    for (b, byte) in one.iter().enumerate() {
                        tile[512 * copy
                            + swizzled_within(swizzle, i * pitch(swizzle, 2 * width) + b, 512 * copy)] =
                            *byte;
                    }
                }
            }
            outputs.push([tile.clone(), tile].concat());
            let (out, given) = (format!("out u32 {} = ?", SIZE / 2), format!("in u16 bits 14 {}", size / 2));
            raw.launch("launch k grid 2 block 64 cluster 2", &out, &given, map.head(1), 8 * width, &list);
        }
    }
    raw.expects(outputs).draft()
}

/// The swizzled place of byte `at` of a part that starts at `start`, relative to it: the pattern follows addresses.
fn swizzled_within(swizzle: &str, at: usize, start: usize) -> usize {
    swizzled(swizzle, start + at) - start
}

/// Four rows of shared memory to rows of a tensor.
fn scatter() -> Draft {
    let instruction = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group";
    let body = ptx!("scatter4", policy = POLICY, loads = coordinates(5).1, instruction);
    let mut raw = Raw::of_launches("tma/tensor_scatter4", "tensor_scatter4", ROWS, parameters(5))
        .body(&body)
        .target("sm_100a", "8.6");
    let mut outputs = Vec::new();
    for (turn, (swizzle, width)) in
        [("None", 64), ("B128", 64), ("B64", 32), ("B32", 16)].into_iter().enumerate()
    {
        let (map, lists) = lists(swizzle, width);
        let (strides, size) = map.strides();
        let tile = bytes("u32", "bits", 15, 128);
        // Rows that are written twice race.
        for list in [lists[0], lists[2], lists[3]] {
            let mut tensor = vec![0; size];
            for (i, &row) in list[1..].iter().enumerate() {
                for b in 0..2 * width {
                    let column = 2 * list[0] as usize + b;
                    if (row as usize) < map.dims[1] && column < 2 * map.dims[0] {
                        let from = swizzled(swizzle, i * pitch(swizzle, 2 * width) + b);
                        tensor[row as usize * strides[0] + column] = tile[from];
                    }
                }
            }
            outputs.push(tensor);
            let out = format!("out u16 {} = ?", size / 2);
            raw.launch("launch k block 64", &out, "in u32 bits 15 128", map.head(0), turn % 2, &list);
        }
    }
    raw.expects(outputs).draft()
}

/// Boxes for each CTA of a pair: with the own barrier, with that of the even CTA, and from one CTA for both.
fn pair(d: usize) -> Draft {
    const SIZE: usize = 4096;
    let (list, loads) = coordinates(d);
    let head = format!("cp.async.bulk.tensor.{d}d");
    let tail = "shared::cluster.global.tile.mbarrier::complete_tx::bytes";
    let operands = format!("[%rd1, {{{list}}}]");
    let body = ptx!(
        "tensor_pair",
        all = 3 * SIZE,
        policy = POLICY,
        loads,
        clear = zeros("CLEAR", 3, 3 * SIZE, 64),
        size = SIZE,
        third = 2 * SIZE,
        head,
        tail,
        operands,
        copy = copy_out("COPY", 3, 3 * SIZE, 64)
    );
    let name = format!("tensor_load_pair_{d}d");
    let rows = "tensor_load_pair tensor_load_pair_first";
    let mut raw =
        Raw::of_launches(&format!("tma/{name}"), rows, Some("computed element by element"), parameters(d))
            .body(&body)
            .target("sm_100a", "8.6");
    let mut outputs = Vec::new();
    for (map, at) in maps(d).into_iter().step_by(3) {
        let (_, size) = map.strides();
        let (ty, generator, width) = contents(map.ty);
        let tile = boxed(&map, &bytes(ty, generator, 9, size / width), &at, SIZE);
        outputs.push(tile.repeat(6));
        let out = format!("out u32 {} = ?", 6 * SIZE / 4);
        let given = format!("in {ty} {generator} 9 {}", size / width);
        raw.launch("launch k grid 2 block 64 cluster 2", &out, &given, map.head(1), map.box_bytes(), &at);
    }
    raw.expects(outputs).draft()
}
