//! tcgen05.mma: every row, with types, shapes, layouts and flags going round.
//!
//! A and B are images of shared memory (or tensor memory) filled linearly by a generator; which element lies where is
//! up to the descriptors. Products are summed in binary64, where all sums of these numbers are exact.

use super::layout::{Swizzle, Tile, bits, value};
use super::{Entry, barrier, commit, file, handover, registers, wait};
use crate::Draft;
use dualgemm_testkit::conformance::data::Data;

/// Bytes of shared memory for each of A and B in each CTA.
const IMAGE: usize = 16384;
/// Column of D relative to tensor memory, of A, of the scales of A and B.
const COLUMNS: [u32; 4] = [8, 320, 336, 352];
/// Words of a lane's scales in their image.
const SCALE_WORDS: u32 = 8;

/// The files.
pub fn drafts() -> Vec<Draft> {
    let plain = [
        "tcgen05_mma_ss",
        "tcgen05_mma_ts",
        "tcgen05_mma_ss_masked",
        "tcgen05_mma_ts_masked",
        "tcgen05_mma_scaled_d",
        "tcgen05_mma_i8",
        "tcgen05_mma_i8_ts",
        "tcgen05_mma_i8_masked",
        "tcgen05_mma_i8_ts_masked",
    ];
    let scaled: [(&str, &str, &[Format]); 9] = [
        ("tcgen05_mma_mxf8f6f4", "", &F8_SCALED),
        ("tcgen05_mma_mxf8f6f4_1x", ".scale_vec::1X", &F8_SCALED),
        ("tcgen05_mma_mxf4", "", &F4_SCALED),
        ("tcgen05_mma_mxf4_2x", ".scale_vec::2X", &F4_SCALED),
        ("tcgen05_mma_nvf4_2x", ".scale_vec::2X", &NVF4_2X),
        ("tcgen05_mma_nvf4_4x", ".scale_vec::4X", &NVF4_4X),
        ("tcgen05_mma_nvf4_4x_ts", ".scale_vec::4X", &NVF4_4X),
        ("tcgen05_mma_block16", ".block16", &NVF4_4X),
        ("tcgen05_mma_block16_ts", ".block16", &NVF4_4X),
    ];
    let mut list: Vec<Draft> = plain.into_iter().map(plain_row).collect();
    list.extend(scaled.into_iter().map(|(name, suffix, formats)| scaled_row(name, suffix, formats)));
    let block32: Vec<Format> = [F8_SCALED.as_slice(), &F4_SCALED, &NVF4_2X].concat();
    list.push(scaled_row("tcgen05_mma_block32", ".block32", &block32));
    list.push(scaled_row("tcgen05_mma_block32_ts", ".block32", &block32));
    list
}

/// Kind, types of A and B, type of D, scales per row of an instruction, their type.
type Format = (&'static str, &'static str, &'static str, &'static str, u32, &'static str);

const PLAIN: [Format; 9] = [
    ("f16", "f16", "f16", "f32", 0, ""),
    ("f16", "bf16", "bf16", "f32", 0, ""),
    ("f16", "f16", "f16", "f16", 0, ""),
    ("tf32", "tf32", "tf32", "f32", 0, ""),
    ("f8f6f4", "e4m3", "e4m3", "f32", 0, ""),
    ("f8f6f4", "e5m2", "e4m3", "f16", 0, ""),
    ("f8f6f4", "e2m3", "e3m2", "f32", 0, ""),
    ("f8f6f4", "e2m1", "e5m2", "f32", 0, ""),
    ("f8f6f4", "e3m2", "e2m1", "f32", 0, ""),
];
const INTEGER: [Format; 4] = [
    ("i8", "s8", "s8", "s32", 0, ""),
    ("i8", "u8", "u8", "s32", 0, ""),
    ("i8", "s8", "u8", "s32", 0, ""),
    ("i8", "u8", "s8", "s32", 0, ""),
];
const F8_SCALED: [Format; 5] = [
    ("mxf8f6f4", "e4m3", "e5m2", "f32", 1, "ue8m0"),
    ("mxf8f6f4", "e2m1", "e2m1", "f32", 1, "ue8m0"),
    ("mxf8f6f4", "e3m2", "e4m3", "f32", 1, "ue8m0"),
    ("mxf8f6f4", "e2m3", "e3m2", "f32", 1, "ue8m0"),
    ("mxf8f6f4", "e5m2", "e2m3", "f32", 1, "ue8m0"),
];
const F4_SCALED: [Format; 1] = [("mxf4", "e2m1", "e2m1", "f32", 2, "ue8m0")];
const NVF4_2X: [Format; 1] = [("mxf4nvf4", "e2m1", "e2m1", "f32", 2, "ue8m0")];
const NVF4_4X: [Format; 2] =
    [("mxf4nvf4", "e2m1", "e2m1", "f32", 4, "e4m3"), ("mxf4nvf4", "e2m1", "e2m1", "f32", 4, "ue8m0")];

/// One product.
#[derive(Clone)]
struct Product {
    group: u32,
    format: Format,
    m: u32,
    n: u32,
    a: Tile,
    b: Tile,
    a_in_tensor_memory: bool,
    negate: (bool, bool),
    saturate: bool,
    accumulate: bool,
    /// D starts near the largest whole number.
    high: bool,
    /// Added to the address of D.
    lane: u32,
    ids: (u32, u32),
    variant: Variant,
}

/// What differs in the instruction's text.
#[derive(Clone, PartialEq)]
struct Variant {
    suffix: &'static str,
    kind: &'static str,
    collector: &'static str,
    mask: Option<[u32; 8]>,
    shift: Option<u32>,
}

const COLLECTORS: [&str; 5] = ["", "fill", "use", "lastuse", "discard"];

/// Kinds without block scales.
fn plain_row(name: &'static str) -> Draft {
    let ts = name.contains("_ts");
    let formats: &[Format] = if name.contains("i8") { &INTEGER } else { &PLAIN };
    let mut list = Vec::new();
    for group in [1, 2] {
        for (f, &format) in formats.iter().enumerate() {
            let half_of_d = format.3 == "f16";
            if name.ends_with("scaled_d") && (half_of_d || format.0 == "f8f6f4") {
                continue;
            }
            for turn in 0..3 {
                let count = list.len() as u32;
                let shapes: [(u32, u32); 6] = match group {
                    1 => [(64, 8), (128, 16), (64, 48), (128, 32), (128, 128), (64, 64)],
                    _ => [(128, 32), (256, 32), (256, 96), (128, 64), (256, 128), (128, 96)],
                };
                let (m, n) = shapes[(f + 2 * turn) % 6];
                let (m, n) = if format.0 == "f16" && turn == 2 && f == 0 { (m, 256) } else { (m, n) };
                // Transposed: 16-bit and 8-bit types, with a width of whole rows of the pattern.
                let transposable = ["f16", "bf16", "e4m3", "e5m2", "s8", "u8"];
                let transpose = |ty: &str, rows: u32, odd: usize| {
                    transposable.contains(&ty) && (turn + f) % 2 == odd && rows.is_multiple_of(64)
                };
                let (rows_a, rows_b) = (m / group, n / group);
                let shift = name.ends_with("scaled_d").then_some([0, 1, 7, 15][count as usize % 4]);
                // D scaled twice would not be exact.
                let collectors = if shift.is_some() { &COLLECTORS[..2] } else { &COLLECTORS };
                let variant = Variant {
                    suffix: "",
                    kind: format.0,
                    collector: collectors[count as usize % collectors.len()],
                    mask: name.ends_with("masked").then(|| masks(count)),
                    shift,
                };
                list.push(Product {
                    group,
                    format,
                    m,
                    n,
                    a: tile(format.1, rows_a, count, transpose(format.1, rows_a, 0) && !ts),
                    b: tile(format.2, rows_b, count + 1 + turn as u32, transpose(format.2, rows_b, 1)),
                    a_in_tensor_memory: ts,
                    negate: (format.0 != "i8" && count % 3 == 1, format.0 != "i8" && count % 4 == 2),
                    saturate: format.0 == "i8" && count % 2 == 1,
                    accumulate: count % 3 != 0 || variant.shift.is_some(),
                    high: format.0 == "i8" && turn == 2,
                    lane: if (group, m) == (1, 64) && turn == 2 && !ts { 16 } else { 0 },
                    ids: (0, 0),
                    variant,
                });
            }
        }
    }
    draft(name, "8.6", &list)
}

/// Kinds with block scales.
fn scaled_row(name: &'static str, suffix: &'static str, formats: &[Format]) -> Draft {
    let mut list = Vec::new();
    for group in [1, 2] {
        for &format in formats {
            for turn in 0..4u32 {
                let count = list.len() as u32;
                let (m, n) = match group {
                    1 => (128, [8, 32, 96, 256][(count % 4) as usize]),
                    _ => [(256, 16), (128, 64), (256, 256), (128, 256)][(count % 4) as usize],
                };
                let id = |step: u32| match format.4 {
                    1 => (turn + step) % 4,
                    2 => 2 * ((turn + step) % 2),
                    _ => 0,
                };
                list.push(Product {
                    group,
                    format,
                    m,
                    n,
                    a: tile(format.1, m / group, count, false),
                    b: tile(format.2, n / group, count + 2, false),
                    a_in_tensor_memory: name.ends_with("_ts"),
                    negate: (count % 3 == 1, count % 4 == 2),
                    saturate: false,
                    accumulate: count % 3 != 0,
                    high: false,
                    lane: 0,
                    ids: (id(0), id(1)),
                    variant: Variant {
                        suffix,
                        kind: format.0,
                        collector: COLLECTORS[(count + turn) as usize % 5],
                        mask: None,
                        shift: None,
                    },
                });
            }
        }
    }
    draft(name, "8.8", &list)
}

fn masks(count: u32) -> [u32; 8] {
    let first = [0x0000_ffff, 0xff00_ff00, 0x8000_0001, 0, u32::MAX];
    std::array::from_fn(|i| first[(count as usize + i) % 5])
}

/// A layout of `rows` rows of an operand that stays inside its image.
fn tile(ty: &str, rows: u32, turn: u32, transposed: bool) -> Tile {
    let swizzle = match Swizzle::ALL[turn as usize % 4] {
        // Rows of 128 bytes would not fit.
        Swizzle::B128 if rows > 128 && !transposed => Swizzle::B64,
        swizzle => swizzle,
    };
    let groups = rows.div_ceil(8);
    if !transposed {
        // 32 bytes of K. Inside a wide pattern K may start at its second quarter.
        return match swizzle {
            Swizzle::None if turn % 8 < 4 => {
                Tile { swizzle, transposed, start: 0, lbo: 128 * groups, sbo: 128 }
            }
            Swizzle::None => Tile { swizzle, transposed, start: 256, lbo: 128, sbo: 256 },
            Swizzle::B32 => Tile { swizzle, transposed, start: 0, lbo: 16, sbo: 256 },
            Swizzle::B64 => Tile { swizzle, transposed, start: 32 * (turn / 4 % 2), lbo: 16, sbo: 512 },
            Swizzle::B128 => Tile { swizzle, transposed, start: 32 * (turn / 4 % 4), lbo: 16, sbo: 1024 },
        };
    }
    // K rows of 16 bytes, 8 to a group; SBO and LBO go one way or the other.
    let k_groups = 32 / (bits(ty) / 8) / 8;
    let units = rows * bits(ty) / 128;
    match swizzle {
        Swizzle::None => Tile { swizzle, transposed, start: 0, lbo: 128, sbo: 128 * k_groups },
        Swizzle::B32 => Tile { swizzle, transposed, start: 0, lbo: 256 * k_groups, sbo: 256 },
        Swizzle::B64 => Tile { swizzle, transposed, start: 0, lbo: 512, sbo: 512 * units.div_ceil(4) },
        Swizzle::B128 => Tile { swizzle, transposed, start: 0, lbo: 1024, sbo: 1024 * units.div_ceil(8) },
    }
}

/// Types and generators of buffers of A and B: numbers whose products have exact sums.
fn contents(ty: &str) -> (&str, &'static str, usize) {
    match ty {
        "f16" | "bf16" => (ty, "small", 2),
        "tf32" => (ty, "small", 4),
        "e4m3" | "e5m2" => (ty, "small", 1),
        _ => ("u8", "bits", 1),
    }
}

fn scale_contents(ty: &str) -> (&'static str, &'static str) {
    if ty == "e4m3" { ("e4m3", "scale") } else { ("ue8m0", "small") }
}

impl Product {
    /// Elements of K: 32 bytes, where narrow types of the 8-bit kinds take a byte each.
    fn k(&self) -> u32 {
        match self.format.0 {
            "tf32" => 8,
            "f16" => 16,
            "mxf4" | "mxf4nvf4" => 64,
            _ => 32,
        }
    }

    /// Columns of tensor memory that D takes.
    fn columns(&self) -> u32 {
        if (self.group, self.m) == (2, 128) { self.n / 2 } else { self.n }
    }

    /// Columns that are filled before and read after.
    fn end(&self) -> u32 {
        (COLUMNS[0] + self.columns() + 8).next_multiple_of(8)
    }

    /// Tables 42 to 44 of 9.7.16.4.2.
    fn descriptor(&self) -> u32 {
        let (kind, a, b, d, scales, scale) = self.format;
        let code = |ty: &str| match (kind, ty) {
            ("f16", "f16") | (_, "e4m3") | (_, "u8") => 0,
            ("f16", _) | (_, "e5m2") | (_, "s8") => 1,
            ("tf32", _) => 2,
            (_, "e2m3") => 3,
            (_, "e3m2") => 4,
            ("mxf4" | "mxf4nvf4", _) => 1,
            _ => 5,
        };
        let flags = u32::from(self.negate.0) << 13
            | u32::from(self.negate.1) << 14
            | u32::from(self.a.transposed) << 15
            | u32::from(self.b.transposed) << 16;
        let common = code(a) << 7 | code(b) << 10 | flags | (self.n / 8) << 17;
        if scales > 0 {
            return common
                | self.ids.1 << 4
                | u32::from(scale == "ue8m0") << 23
                | (self.m / 128) << 27
                | self.ids.0 << 29;
        }
        let ty = match d {
            "f16" => 0,
            "f32" => 1,
            _ => 2,
        };
        common | u32::from(self.saturate) << 3 | ty << 4 | (self.m / 16) << 24
    }

    /// Where `D[row][col]` lies: CTA, lane, column (figures of 9.7.16.10.5).
    fn place(&self, row: u32, col: u32) -> (u32, u32, u32) {
        let (cta, lane, column) = match (self.group, self.m) {
            (1, 128) => (0, row, col),
            (1, _) => (0, row / 16 * 32 + row % 16, col),
            (_, 256) => (row / 128, row % 128, col),
            (_, _) => (row / 64, row % 64 + 64 * (col / (self.n / 2)), col % (self.n / 2)),
        };
        (cta, lane + self.lane, column + COLUMNS[0])
    }

    /// What a cell of D holds before.
    fn before(&self, rank: u32, lane: u32, column: u32) -> i64 {
        let small = i64::from((lane * 7 + column * 3 + rank * 5) & 15) - 8;
        if self.high { small + 0x7fff_fff0 } else { small }
    }

    fn encode(&self, v: f64) -> u32 {
        match self.format.3 {
            "f32" => (v as f32).to_bits(),
            "f16" => u32::from(half::f16::from_f64(v).to_bits()),
            _ if self.saturate => v.clamp(i32::MIN.into(), i32::MAX.into()) as i32 as u32,
            _ => v as i64 as u32,
        }
    }

    /// The rows of an operand in shared memory: `[row][k]`, rows of the second CTA after those of the first.
    fn operand(&self, image: &[u8], ty: &str, tile: Tile, rows: u32) -> Vec<Vec<f64>> {
        let width = bits(ty);
        let padded = width < 8 && !self.format.0.starts_with("mxf4");
        let per = if padded { 16 } else { 128 / width };
        let of = |cta: u32, row: u32, k: u32| {
            let (line, along) = if tile.transposed { (k, row) } else { (row, k) };
            let address = cta as usize * IMAGE + tile.unit(line, along / per) as usize;
            code(&image[address..address + 16], along % per, width)
        };
        let all = |cta| (0..rows).map(move |row| (cta, row));
        (0..self.group)
            .flat_map(all)
            .map(|(cta, row)| (0..self.k()).map(|k| value(ty, of(cta, row, k))).collect())
            .collect()
    }

    /// A in tensor memory: the lanes are those of D, 8-bit kinds keep narrow codes in the middle of bytes.
    fn operand_in_tensor_memory(&self, image: &[u8], ty: &str) -> Vec<Vec<f64>> {
        let width = bits(ty);
        let container = if width < 8 && !self.format.0.starts_with("mxf4") { 8 } else { width };
        let row = |row: u32| {
            let (cta, lane, _) = self.place(row, 0);
            let words = &image[cta as usize * IMAGE + 32 * lane as usize..][..32];
            (0..self.k()).map(|k| value(ty, code(words, k, container) >> ((container - width) / 2))).collect()
        };
        (0..self.m).map(row).collect()
    }

    /// `[row][block]` of the scales of A or B.
    fn scales(&self, image: &[u8], rows: u32, of_b: bool) -> Vec<Vec<f64>> {
        let (.., blocks, ty) = self.format;
        let id = if of_b { self.ids.1 } else { self.ids.0 };
        let byte = |sheet: u32, row: u32, block: u32| {
            let word = (sheet * 32 + row % 32) * SCALE_WORDS + row / 32;
            u32::from(image[(4 * word + id + block) as usize])
        };
        let row = |row: u32| {
            // Which of two images: A: that of its CTA. B: with M = 128 in a pair lanes 0 to 63 have the left columns.
            let (sheet, row) = match (of_b, self.group, self.m) {
                (false, 2, _) => (row / (self.m / 2), row % (self.m / 2)),
                (true, 2, 128) => (row / (self.n / 2), row % (self.n / 2)),
                _ => (0, row),
            };
            (0..blocks).map(|block| value(ty, byte(sheet, row, block))).collect()
        };
        (0..rows).map(row).collect()
    }

    /// All cells that are read back, `[(rank * 128 + lane) * end + column]`.
    fn expected(&self) -> Vec<u32> {
        let (_, a_ty, b_ty, .., blocks, scale_ty) = self.format;
        let image = |ty: &str, seed| {
            let (ty, generator, size) = contents(ty);
            let count = 2 * IMAGE / size;
            Data { ty: ty.into(), generator: generator.into(), seed, count }.bytes()
        };
        let scale_image = |seed| {
            let (ty, generator) = scale_contents(scale_ty);
            Data { ty: ty.into(), generator: generator.into(), seed, count: 2 * 32 * 4 * SCALE_WORDS as usize }.bytes()
        };
        let (a, b) = (image(a_ty, 3), image(b_ty, 4));
        let a = match self.a_in_tensor_memory {
            true => self.operand_in_tensor_memory(&a, a_ty),
            false => self.operand(&a, a_ty, self.a, self.m / self.group),
        };
        let b = self.operand(&b, b_ty, self.b, self.n / self.group);
        let (sa, sb) = match blocks {
            0 => (Vec::new(), Vec::new()),
            _ => (self.scales(&scale_image(5), self.m, false), self.scales(&scale_image(6), self.n, true)),
        };
        let end = self.end();
        let mask = if self.format.3 == "f16" { 0xffff } else { u32::MAX };
        let mut cells = Vec::new();
        for rank in 0..self.group {
            for lane in 0..128 {
                let row = (0..end).map(|column| self.encode(self.before(rank, lane, column) as f64) & mask);
                cells.extend(row);
            }
        }
        let sign = if self.negate.0 != self.negate.1 { -1.0 } else { 1.0 };
        let twice = if self.variant.collector.ends_with("use") { 2.0 } else { 1.0 };
        for row in 0..self.m as usize {
            for col in 0..self.n as usize {
                let (rank, lane, column) = self.place(row as u32, col as u32);
                if self.variant.mask.is_some_and(|m| m[(rank * 4 + lane / 32) as usize] >> (lane % 32) & 1 == 1) {
                    continue;
                }
                let mut sum = 0.0;
                for k in 0..self.k() as usize {
                    let mut product = a[row][k] * b[col][k];
                    if blocks > 0 {
                        let block = k * blocks as usize / self.k() as usize;
                        product *= sa[row][block] * sb[col][block];
                    }
                    sum += product;
                }
                let mut d = if self.accumulate { self.before(rank, lane, column) as f64 } else { 0.0 };
                d *= 2f64.powi(-(self.variant.shift.unwrap_or(0) as i32));
                let d = match self.saturate {
                    // Each instruction saturates.
                    true if twice == 2.0 => f64::from(self.encode(d + sum) as i32) + sum,
                    _ => d + sign * twice * sum,
                };
                cells[((rank * 128 + lane) * end + column) as usize] = self.encode(d) & mask;
            }
        }
        cells
    }
}

/// Element `index` of `width` bits.
fn code(bytes: &[u8], index: u32, width: u32) -> u32 {
    (0..width).fold(0, |code, b| {
        let at = index * width + b;
        code | u32::from(bytes[at as usize / 8] >> (at % 8) & 1) << b
    })
}

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
        let collector = if collector.is_empty() { String::new() } else { format!(".collector::a::{collector}") };
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

/// The kernel of a group: parameters say what is multiplied, a number which variant.
fn entry(group: u32, variants: &[Variant], ts: bool, scaled: bool) -> Entry {
    let parameter = |name: &str| format!(", .param .u32 {name}");
    let mut parameters = String::from(", .param .u64 a, .param .u64 b");
    if scaled {
        parameters += ", .param .u64 sa, .param .u64 sb";
    }
    for name in ["which", "a_low", "a_high", "b_low", "b_high", "idesc", "accumulate", "dtype", "end", "lane", "fold"] {
        parameters += &parameter(name);
    }
    let mut body = format!(
        "// The images of A and B, of this CTA.
         mov.u32 %r10, tile_a;
         mov.u32 %r11, tile_b;
         ld.param.u64 %rd3, [a];
         ld.param.u64 %rd4, [b];
         mul.wide.u32 %rd5, %rank, {IMAGE};
         add.u64 %rd3, %rd3, %rd5;
         add.u64 %rd4, %rd4, %rd5;
         mul.lo.u32 %r0, %t, 16;
         IMAGE:
         cvt.u64.u32 %rd5, %r0;
         add.u64 %rd6, %rd3, %rd5;
         ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd6];
         add.u32 %r1, %r10, %r0;
         st.shared.v4.b32 [%r1], {{%v0, %v1, %v2, %v3}};
         add.u64 %rd6, %rd4, %rd5;
         ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd6];
         add.u32 %r1, %r11, %r0;
         st.shared.v4.b32 [%r1], {{%v0, %v1, %v2, %v3}};
         add.u32 %r0, %r0, 2048;
         setp.lt.u32 %p0, %r0, {IMAGE};
         @%p0 bra IMAGE;
         fence.proxy.async.shared::cta;
         // Descriptors.
         ld.param.u32 %r1, [a_low];
         ld.param.u32 %r2, [a_high];
         shr.u32 %r10, %r10, 4;
         add.u32 %r1, %r1, %r10;
         mov.b64 %rd1, {{%r1, %r2}};
         ld.param.u32 %r1, [b_low];
         ld.param.u32 %r2, [b_high];
         shr.u32 %r11, %r11, 4;
         add.u32 %r1, %r1, %r11;
         mov.b64 %rd2, {{%r1, %r2}};
         ld.param.u32 %r12, [idesc];
         ld.param.u32 %r13, [lane];
         shl.b32 %r13, %r13, 16;
         add.u32 %r13, %r13, %tm;
         add.u32 %r13, %r13, {};
         add.u32 %r14, %tm, {};
         add.u32 %r15, %tm, {};
         add.u32 %r16, %tm, {};
         ld.param.u32 %r17, [accumulate];
         setp.ne.u32 %p1, %r17, 0;
         setp.eq.u32 %p2, %t, %t;
         ld.param.u32 %r18, [end];
         // D before: small whole numbers of its type.
         ld.param.u32 %r19, [dtype];
         setp.eq.u32 %p3, %r19, 0;
         setp.eq.u32 %p4, %r19, 1;
         setp.eq.u32 %p5, %r19, 3;
         mov.u32 %r0, 0;
         BEFORE:
         mul.lo.u32 %r2, %t, 7;
         mad.lo.u32 %r2, %r0, 3, %r2;
         mad.lo.u32 %r2, %rank, 5, %r2;
         and.b32 %r2, %r2, 15;
         sub.s32 %r2, %r2, 8;
         cvt.rn.f16.s32 %rs1, %r2;
         cvt.u32.u16 %r3, %rs1;
         cvt.rn.f32.s32 %f0, %r2;
         mov.b32 %r4, %f0;
         add.u32 %r5, %r2, 0x7ffffff0;
         selp.b32 %r2, %r4, %r2, %p3;
         selp.b32 %r2, %r3, %r2, %p4;
         selp.b32 %v0, %r5, %r2, %p5;
         add.u32 %r1, %tw, %r0;
         tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {{%v0}};
         add.u32 %r0, %r0, 1;
         setp.lt.u32 %p0, %r0, %r18;
         @%p0 bra BEFORE;\n",
        COLUMNS[0], COLUMNS[1], COLUMNS[2], COLUMNS[3],
    );
    if ts {
        // Lane l has the words of lane l, or of l mod 64 where both halves of the lanes need them.
        body += &format!(
            "ld.param.u32 %r1, [fold];
             sub.u32 %r1, %r1, 1;
             and.b32 %r1, %r1, %t;
             mad.wide.u32 %rd5, %r1, 32, %rd3;
             ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd5];
             ld.global.v4.b32 {{%v4, %v5, %v6, %v7}}, [%rd5+16];
             tcgen05.st.sync.aligned.32x32b.x8.b32 [%tw+{}], {};\n",
            COLUMNS[1],
            registers("v", 0, 8)
        );
    }
    if scaled {
        // Scales of A: the image of this CTA, alike in all warps. Scales of B: the first image in all warps, or,
        // where lanes 64 to 127 multiply other columns (fold 64), the second image in warps 2 and 3.
        body += &format!(
            "ld.param.u64 %rd5, [sa];
             and.b32 %r1, %t, 31;
             mad.lo.u32 %r2, %rank, 32, %r1;
             mad.wide.u32 %rd5, %r2, {bytes}, %rd5;
             ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd5];
             ld.global.v4.b32 {{%v4, %v5, %v6, %v7}}, [%rd5+16];
             tcgen05.st.sync.aligned.32x32b.x8.b32 [%tw+{}], {list};
             ld.param.u64 %rd5, [sb];
             ld.param.u32 %r3, [fold];
             setp.eq.u32 %p0, %r3, 64;
             shr.u32 %r2, %warp, 1;
             selp.b32 %r2, %r2, 0, %p0;
             mad.lo.u32 %r2, %r2, 32, %r1;
             mad.wide.u32 %rd5, %r2, {bytes}, %rd5;
             ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd5];
             ld.global.v4.b32 {{%v4, %v5, %v6, %v7}}, [%rd5+16];
             tcgen05.st.sync.aligned.32x32b.x8.b32 [%tw+{}], {list};\n",
            COLUMNS[2],
            COLUMNS[3],
            bytes = 4 * SCALE_WORDS,
            list = registers("v", 0, 8),
        );
    }
    body += &format!("tcgen05.wait::st.sync.aligned;\n{}\nld.param.u32 %r1, [which];\n", handover(group));
    for (i, variant) in variants.iter().enumerate() {
        body += &format!(
            "setp.ne.u32 %p6, %r1, {i};\n@%p6 bra NOT{i};\n{}bra DONE;\nNOT{i}:\n",
            instructions(variant, group, ts, scaled)
        );
    }
    body += &format!(
        "DONE:
         {}
         {}
         // D after: lanes and columns around it too. Of binary16 numbers the upper halves are not defined.
         mov.u32 %r6, 0xffffffff;
         selp.b32 %r6, 0xffff, %r6, %p4;
         mad.lo.u32 %r2, %rank, 128, %t;
         mul.lo.u32 %r2, %r2, %r18;
         mad.wide.u32 %out, %r2, 4, %out;
         mov.u32 %r0, 0;
         AFTER:
         add.u32 %r1, %tw, %r0;
         tcgen05.ld.sync.aligned.32x32b.x8.b32 {}, [%r1];
         tcgen05.wait::ld.sync.aligned;\n",
        commit(group),
        wait("WAIT", 0),
        registers("v", 0, 8)
    );
    (0..8).for_each(|i| body += &format!("and.b32 %v{i}, %v{i}, %r6;\n"));
    body += "st.global.v4.b32 [%out], {%v0, %v1, %v2, %v3};
         st.global.v4.b32 [%out+16], {%v4, %v5, %v6, %v7};
         add.u64 %out, %out, 32;
         add.u32 %r0, %r0, 8;
         setp.lt.u32 %p0, %r0, %r18;
         @%p0 bra AFTER;\n";
    body += barrier(group);
    let declared = format!(
        ".shared .align 1024 .b8 tile_a[{IMAGE}];\n.shared .align 1024 .b8 tile_b[{IMAGE}];\n.reg .f32 %f<2>;"
    );
    Entry { parameters, ..Entry::new(group, &declared, &body) }
}

fn draft(name: &str, version: &str, list: &[Product]) -> Draft {
    let ts = list[0].a_in_tensor_memory;
    let scaled = list[0].format.4 > 0;
    let (mut entries, mut head, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    for group in [1, 2] {
        let mut variants: Vec<Variant> = Vec::new();
        for product in list.iter().filter(|p| p.group == group) {
            if !variants.contains(&product.variant) {
                variants.push(product.variant.clone());
            }
        }
        let entry = entry(group, &variants, ts, scaled);
        for product in list.iter().filter(|p| p.group == group) {
            let cells = product.expected();
            let (_, a, b, d, .., scale) = product.format;
            let which = variants.iter().position(|v| *v == product.variant).unwrap_or(0);
            let dtype = match (d, product.high) {
                ("f32", _) => 0,
                ("f16", _) => 1,
                (_, false) => 2,
                _ => 3,
            };
            head.push(format!("-- {} x {}, M {} N {} K {}", a, b, product.m, product.n, product.k()));
            head.push(super::launch(&entry));
            head.push(format!("out u32 {} = ?", cells.len()));
            for (ty, seed) in [(a, 3), (b, 4)] {
                let (ty, generator, size) = contents(ty);
                head.push(format!("in {ty} {generator} {seed} {}", 2 * IMAGE / size));
            }
            if scaled {
                let (ty, generator) = scale_contents(scale);
                for seed in [5, 6] {
                    head.push(format!("in {ty} {generator} {seed} {}", 2 * 32 * 4 * SCALE_WORDS));
                }
            }
            let ((a_low, a_high), (b_low, b_high)) = (product.a.descriptor(), product.b.descriptor());
            let fold = if (group, product.m) == (2, 128) { 64 } else { 128 };
            for number in [
                which as u32,
                a_low,
                a_high,
                b_low,
                b_high,
                product.descriptor(),
                u32::from(product.accumulate),
                dtype,
                product.end(),
                product.lane,
                fold,
            ] {
                head.push(format!("u32 {number}"));
            }
            expected.push(cells);
        }
        entries.push(entry);
    }
    file(name, name, version, &head, &entries, expected)
}
