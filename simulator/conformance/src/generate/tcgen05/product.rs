//! One product of tcgen05.mma: its descriptor, where D lies, and what D becomes, with plain loops in binary64.

use super::layout::{Tile, bits, value};
use crate::generate::tensor::bytes;

/// Bytes of shared memory for each of A and B in each CTA.
pub const IMAGE: usize = 16384;
/// Column of D relative to tensor memory, of A, of the scales of A and B.
pub const COLUMNS: [u32; 4] = [8, 320, 336, 352];
/// Words of a lane's scales in their image.
pub const SCALE_WORDS: u32 = 8;

/// Kind, types of A and B, type of D, scales per row of an instruction, their type.
pub type Format = (&'static str, &'static str, &'static str, &'static str, u32, &'static str);

#[derive(Clone)]
pub struct Product {
    pub group: u32,
    pub format: Format,
    pub m: u32,
    pub n: u32,
    pub a: Tile,
    pub b: Tile,
    pub a_in_tensor_memory: bool,
    pub negate: (bool, bool),
    pub saturate: bool,
    pub accumulate: bool,
    /// D starts near the largest whole number.
    pub high: bool,
    /// Added to the address of D.
    pub lane: u32,
    pub ids: (u32, u32),
    pub variant: Variant,
}

/// What differs in the instruction's text.
#[derive(Clone, PartialEq)]
pub struct Variant {
    pub suffix: &'static str,
    pub kind: &'static str,
    pub collector: &'static str,
    pub mask: Option<[u32; 8]>,
    pub shift: Option<u32>,
}

/// Types and generators of buffers of A and B: numbers whose products have exact sums.
pub fn contents(ty: &str) -> (&str, &'static str, usize) {
    match ty {
        "f16" | "bf16" => (ty, "small", 2),
        "tf32" => (ty, "small", 4),
        "e4m3" | "e5m2" => (ty, "small", 1),
        _ => ("u8", "bits", 1),
    }
}

pub fn scale_contents(ty: &str) -> (&'static str, &'static str) {
    if ty == "e4m3" { ("e4m3", "scale") } else { ("ue8m0", "small") }
}

impl Product {
    /// Elements of K: 32 bytes, where narrow types of the 8-bit kinds take a byte each.
    pub fn k(&self) -> u32 {
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
    pub fn end(&self) -> u32 {
        (COLUMNS[0] + self.columns() + 8).next_multiple_of(8)
    }

    /// Tables 42 to 44 of 9.7.16.4.2.
    pub fn descriptor(&self) -> u32 {
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
    pub fn expected(&self) -> Vec<u32> {
        let (_, a_ty, b_ty, .., blocks, scale_ty) = self.format;
        let image = |ty: &str, seed| {
            let (ty, generator, size) = contents(ty);
            let count = 2 * IMAGE / size;
            bytes(ty, generator, seed, count)
        };
        let scale_image = |seed| {
            let (ty, generator) = scale_contents(scale_ty);
            bytes(ty, generator, seed, 2 * 32 * 4 * SCALE_WORDS as usize)
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
                if self
                    .variant
                    .mask
                    .is_some_and(|m| m[(rank * 4 + lane / 32) as usize] >> (lane % 32) & 1 == 1)
                {
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

fn code(bytes: &[u8], index: u32, width: u32) -> u32 {
    (0..width).fold(0, |code, b| {
        let at = index * width + b;
        code | u32::from(bytes[at as usize / 8] >> (at % 8) & 1) << b
    })
}
