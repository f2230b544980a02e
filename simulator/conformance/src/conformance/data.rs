//! Input data by name: the same bytes on every machine, without files of data.

use half::{bf16, f16};

/// Elements made by a generator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Data {
    /// Element type: `u8` to `u64`, `f16 bf16 f32 f64`, pairs `f16x2 bf16x2`, `tf32 e4m3 e5m2 ue8m0`.
    pub ty: String,
    /// Generator, see [`GENERATORS`].
    pub generator: String,
    /// Distinguishes buffers of one generator.
    pub seed: u64,
    /// Elements.
    pub count: usize,
}

/// Generators and what they make.
pub const GENERATORS: &[(&str, &str)] = &[
    ("zero", "zeros"),
    ("iota", "0, 1, 2, …"),
    ("bits", "random bits"),
    (
        "edges",
        "256 elements with every pair of the 16 values where something changes (seed 0 runs fast, 1 slowly), then random bits",
    ),
    ("nonzero", "as edges, 1 instead of zero"),
    ("shift", "numbers around 0, 8, 16, 32 and 64, and very large ones"),
    ("field", "positions and lengths of bit fields, up to 255"),
    ("few", "0 to 3"),
    ("lane", "0 to 39"),
    ("small", "small whole numbers of either sign, exact in the type"),
    ("tiny", "subnormal numbers"),
    ("unit", "-3.2 to 3.2"),
    ("all16", "every 16-bit pattern in order"),
    ("scale", "scale factors from 1 to below 2"),
    ("halfway", "binary32 numbers at, beside and between the values of 16-bit and 8-bit formats"),
];

/// Bytes of an element of `ty`; `None` for an unknown type.
pub fn size(ty: &str) -> Option<usize> {
    Some(match ty {
        "u8" | "e4m3" | "e5m2" | "ue8m0" => 1,
        "u16" | "f16" | "bf16" => 2,
        "u32" | "f32" | "f16x2" | "bf16x2" | "tf32" => 4,
        "u64" | "f64" => 8,
        _ => return None,
    })
}

/// A well-mixed 64-bit number from a counter (SplitMix64, Steele et al. 2014).
pub fn mix(seed: u64, i: u64) -> u64 {
    let mut z = (seed << 40).wrapping_add(i.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[rustfmt::skip]
const INTEGERS: [u64; 16] = [
    0, 1, 2, 7, 31, 32, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fff_ffff, 0x8000_0000,
    0x7fff_ffff_ffff_ffff, u64::MAX,
];
const SHIFTS: [u64; 16] = [0, 1, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 255, 256, 0xffff_ffff];
const FIELDS: [u64; 16] = [0, 1, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 100, 200, 255];
#[rustfmt::skip]
const F32: [u32; 16] = [
    0, 0x8000_0000, 1, 0x807f_ffff, 0x0080_0000, 0x3f80_0000, 0xbf80_0000, 0x3f7f_ffff, 0x3fc0_0000,
    0x4b00_0001, 0x7f7f_ffff, 0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0xffa1_2345, 0x4f00_0000,
];
const F16: [u16; 16] = [
    0, 0x8000, 1, 0x83ff, 0x0400, 0x3c00, 0xbc00, 0x3bff, 0x3e00, 0x6401, 0x7bff, 0x7c00, 0xfc00, 0x7e00,
    0xfd23, 0x7800,
];
const BF16: [u16; 16] = [
    0, 0x8000, 1, 0x807f, 0x0080, 0x3f80, 0xbf80, 0x3f7f, 0x3fc0, 0x4301, 0x7f7f, 0x7f80, 0xff80, 0x7fc0,
    0xffa1, 0x4f00,
];

impl Data {
    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.count * size(&self.ty).unwrap_or(1)
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The bytes, little-endian.
    pub fn bytes(&self) -> Vec<u8> {
        let width = size(&self.ty).unwrap_or(1);
        (0..self.count as u64).flat_map(|i| self.element(i).to_le_bytes().into_iter().take(width)).collect()
    }

    /// The bits of element `i`.
    fn element(&self, i: u64) -> u64 {
        let random = mix(self.seed, i);
        match self.generator.as_str() {
            "iota" => i,
            "bits" => random,
            "field" => FIELDS[self.edge(i)],
            "shift" => {
                if i < 256 {
                    SHIFTS[self.edge(i)]
                } else {
                    random % 70
                }
            }
            "few" => (random >> 20) % 4,
            "lane" => (random >> 20) % 40,
            "edges" if i < 256 => self.edge_value(self.edge(i)),
            "edges" => self.spread(random),
            "nonzero" => match if i < 256 { self.edge_value(self.edge(i)) } else { random } {
                v if v << (64 - 8 * size(&self.ty).unwrap_or(8)) == 0 => 1,
                v => v,
            },
            "small" => self.small((random >> 20) as i64 % 9 - 4),
            "tiny" => match self.ty.as_str() {
                "f16" => random & 0x83ff,
                "bf16" => random & 0x807f,
                "e4m3" => random & 0x87,
                "e5m2" => random & 0x83,
                _ => random & 0x807f_ffff,
            },
            "unit" => self.real((random >> 11) as f64 / (1u64 << 53) as f64 * 6.4 - 3.2),
            "all16" => i & 0xffff,
            "scale" => match self.ty.as_str() {
                "e4m3" => 0x38 | random >> 20 & 7,
                "ue8m0" => 127,
                _ => self.real(1.0 + (random >> 20 & 7) as f64 / 8.0),
            },
            "halfway" => u64::from(halfway(i, random)),
            _ => 0,
        }
    }

    fn edge(&self, i: u64) -> usize {
        (match self.seed % 3 {
            0 => i % 16,
            1 => i / 16 % 16,
            _ => mix(self.seed, i) % 16,
        }) as usize
    }

    fn edge_value(&self, i: usize) -> u64 {
        match self.ty.as_str() {
            "f32" | "tf32" => u64::from(F32[i]),
            "f64" => f64::from(f32::from_bits(F32[i])).to_bits() ^ u64::from(i == 9),
            "f16" => u64::from(F16[i]),
            "bf16" => u64::from(BF16[i]),
            "f16x2" => u64::from(F16[i]) | u64::from(F16[(i * 7 + 3) % 16]) << 16,
            "bf16x2" => u64::from(BF16[i]) | u64::from(BF16[(i * 7 + 3) % 16]) << 16,
            _ => INTEGERS[i],
        }
    }

    /// Random numbers of like size more often than random bits give them.
    fn spread(&self, random: u64) -> u64 {
        match self.ty.as_str() {
            "f32" if random >> 60 < 12 => {
                (random & 0x807f_ffff) | (0x3800_0000 + (random >> 33 & 0x0f80_0000))
            }
            "f64" if random >> 60 < 12 => {
                (random & 0x800f_ffff_ffff_ffff) | (1000 + (random >> 53 & 31)) << 52
            }
            _ => random,
        }
    }

    fn small(&self, v: i64) -> u64 {
        match self.ty.as_str() {
            // 0, ±0.5, ±1, ±2, ±4 as codes.
            "e4m3" => [0xc8, 0xc0, 0xb8, 0xb0, 0, 0x30, 0x38, 0x40, 0x48][(v + 4) as usize],
            "e5m2" => [0xc4, 0xc0, 0xbc, 0xb8, 0, 0x38, 0x3c, 0x40, 0x44][(v + 4) as usize],
            "ue8m0" => (127 + v / 2) as u64,
            "f16x2" => self.pair(u64::from(f16::from_f32(v as f32).to_bits())),
            "bf16x2" => self.pair(u64::from(bf16::from_f32(v as f32).to_bits())),
            _ => self.real(v as f64),
        }
    }

    fn pair(&self, half: u64) -> u64 {
        half | half << 16
    }

    fn real(&self, v: f64) -> u64 {
        match self.ty.as_str() {
            "f16" => u64::from(f16::from_f64(v).to_bits()),
            "bf16" => u64::from(bf16::from_f64(v).to_bits()),
            "f16x2" => self.pair(u64::from(f16::from_f64(v).to_bits())),
            "bf16x2" => self.pair(u64::from(bf16::from_f64(v).to_bits())),
            "f32" | "tf32" => u64::from((v as f32).to_bits()),
            "f64" => v.to_bits(),
            _ => v as i64 as u64,
        }
    }
}

/// A value of a narrow format, the midpoint to its neighbour, and the neighbours of the midpoint.
fn halfway(i: u64, random: u64) -> u32 {
    let code = random as u16;
    let next = code ^ 1;
    let (a, b) = match i / 4 % 4 {
        0 => (f16::from_bits(code).to_f32(), f16::from_bits(next).to_f32()),
        1 => (bf16::from_bits(code).to_f32(), bf16::from_bits(next).to_f32()),
        // e4m3 and e5m2 values are binary16 values with three or two bits of mantissa, within narrower ranges.
        2 => (
            f16::from_bits(0x2000 + (code & 0x9f80)).to_f32(),
            f16::from_bits(0x2000 + (code & 0x9f80) + 0x80).to_f32(),
        ),
        _ => (f16::from_bits(code & 0xff00).to_f32(), f16::from_bits((code & 0xff00) ^ 0x100).to_f32()),
    };
    // Which NaN arithmetic on NaN gives differs between machines.
    let nan = a.is_nan() || b.is_nan();
    let middle = if nan { a } else { ((f64::from(a) + f64::from(b)) / 2.0) as f32 };
    match i % 4 {
        0 => a.to_bits(),
        1 => middle.to_bits(),
        2 => middle.to_bits().wrapping_add(1),
        _ => middle.to_bits().wrapping_sub(1),
    }
}
