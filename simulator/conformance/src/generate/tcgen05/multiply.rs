//! tcgen05.mma: every row, with types, shapes, layouts and flags going round.
//!
//! A and B are images of shared memory (or tensor memory) filled linearly by a generator; which element lies where is
//! up to the descriptors. Products are summed in binary64, where all sums of these numbers are exact.

use super::file;
use super::issue::entry;
use super::layout::{SWIZZLES, Tile, bits};
use super::product::{Format, IMAGE, Product, SCALE_WORDS, Variant, contents, scale_contents};
use crate::generate::Draft;
use dualgemm_ptx::layout::Swizzle;

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

const COLLECTORS: [&str; 5] = ["", "fill", "use", "lastuse", "discard"];

/// Kinds without block scales.
fn plain_row(name: &'static str) -> Draft {
    let ts = name.contains("_ts");
    let formats: &[Format] = if name.contains("i8") { &INTEGER } else { &PLAIN };
    let mut list = Vec::new();
    // Masks are about lanes, not types.
    let turns = if name.ends_with("masked") { 2 } else { 3 };
    for group in [1, 2] {
        for (f, &format) in formats.iter().enumerate() {
            let half_of_d = format.3 == "f16";
            if name.ends_with("scaled_d") && (half_of_d || format.0 == "f8f6f4") {
                continue;
            }
            for turn in 0..turns {
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
                    accumulate: !count.is_multiple_of(3) || variant.shift.is_some(),
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
    // All ids of the scales, or all types: not all of both.
    let turns = if formats.len() > 2 { 2 } else { 4 };
    for group in [1, 2] {
        let first = list.len() as u32;
        for &format in formats {
            for turn in 0..turns {
                let count = list.len() as u32;
                let (m, n) = match (group, (count - first) % 4) {
                    // The widest, once for each layout of D.
                    (1, _) if count == 3 => (128, 256),
                    (2, _) if count - first == 2 => (256, 256),
                    (2, _) if count - first == 3 => (128, 256),
                    (1, i) => (128, [8, 32, 96, 16][i as usize]),
                    (_, i) => [(256, 16), (128, 64), (256, 48), (128, 32)][i as usize],
                };
                let id = |step: u32| match format.4 {
                    1 => (count + turn + step) % 4,
                    2 => 2 * ((count + turn / 2 + step) % 2),
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
                    accumulate: !count.is_multiple_of(3),
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
    let swizzle = match SWIZZLES[turn as usize % 4] {
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
            _ => Tile { swizzle, transposed, start: 32 * (turn / 4 % 4), lbo: 16, sbo: 1024 },
        };
    }
    // K rows of 16 bytes, 8 to a group; SBO and LBO go one way or the other.
    let k_groups = 32 / (bits(ty) / 8) / 8;
    let units = rows * bits(ty) / 128;
    match swizzle {
        Swizzle::None => Tile { swizzle, transposed, start: 0, lbo: 128, sbo: 128 * k_groups },
        Swizzle::B32 => Tile { swizzle, transposed, start: 0, lbo: 256 * k_groups, sbo: 256 },
        Swizzle::B64 => Tile { swizzle, transposed, start: 0, lbo: 512, sbo: 512 * units.div_ceil(4) },
        _ => Tile { swizzle, transposed, start: 0, lbo: 1024, sbo: 1024 * units.div_ceil(8) },
    }
}

fn draft(name: &str, version: &str, list: &[Product]) -> Draft {
    let ts = list[0].a_in_tensor_memory;
    let scaled = list[0].format.4 > 0;
    let (mut entries, mut head) = (Vec::new(), Vec::new());
    for group in [1, 2] {
        let mut variants: Vec<Variant> = Vec::new();
        for product in list.iter().filter(|p| p.group == group) {
            if !variants.contains(&product.variant) {
                variants.push(product.variant.clone());
            }
        }
        let entry = entry(group, &variants, ts, scaled);
        for product in list.iter().filter(|p| p.group == group) {
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
            head.push(format!("out u32 {} = ?", group * 128 * product.end()));
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
        }
        entries.push(entry);
    }
    let products = list.to_vec();
    file(name, name, version, &head, &entries, move || products.iter().map(Product::expected).collect())
}
