//! Where things lie and what codes mean, restated from the PTX ISA and CUTLASS.

use dualgemm_ptx::layout::Swizzle;

/// Modes `(size, stride)` of a CuTe layout, the first fastest.
pub type Modes = Vec<(u32, u32)>;

/// The image of `index` under a layout.
pub fn cute(modes: &[(u32, u32)], mut index: u32) -> u32 {
    let mut sum = 0;
    for &(size, stride) in modes {
        sum += index % size * stride;
        index /= size;
    }
    sum
}

/// The modes of a `tcgen05.ld`/`st` shape: of the thread and of the bit within the thread's registers, both to the
/// logical bit of the accessed matrix (CUTLASS `copy_traits_sm100.hpp`, `DstLayout`); bits of one matrix row.
pub fn access(shape: &str, num: u32) -> (Modes, Modes, u32) {
    match shape {
        "32x32b" => (vec![(32, 32 * num)], vec![(32 * num, 1)], 32 * num),
        "16x64b" => {
            let row = 64 * num;
            (vec![(2, 8 * row), (2, 32), (8, row)], vec![(32, 1), (num, 64)], row)
        }
        "16x128b" => {
            let row = 128 * num;
            (vec![(4, 32), (8, row)], vec![(32, 1), (2, 8 * row), (num, 128)], row)
        }
        "16x256b" => {
            let row = 256 * num;
            (vec![(4, 64), (8, row)], vec![(64, 1), (2, 8 * row), (num, 256)], row)
        }
        // Two accesses of 16 lanes side by side.
        _ => (vec![(16, 64 * num), (2, 32 * num)], vec![(32 * num, 1)], 64 * num),
    }
}

/// The swizzles of matrices whose elements lie in 16-byte units.
pub const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

/// Bits 61 to 63 of a descriptor.
fn code(swizzle: Swizzle) -> u32 {
    match swizzle {
        Swizzle::None => 0,
        Swizzle::B32 => 6,
        Swizzle::B64 => 4,
        _ => 2,
    }
}

/// 16-byte units in a row of the pattern.
fn units(swizzle: Swizzle) -> u32 {
    match swizzle {
        Swizzle::None => 1,
        Swizzle::B32 => 2,
        Swizzle::B64 => 4,
        _ => 8,
    }
}

/// A matrix in shared memory: canonical layout of 9.7.16.3.3 with its strides in bytes, from byte `start` on.
#[derive(Debug, Clone, Copy)]
pub struct Tile {
    pub swizzle: Swizzle,
    /// M or N is contiguous.
    pub transposed: bool,
    pub start: u32,
    pub lbo: u32,
    pub sbo: u32,
}

impl Tile {
    /// The words of its descriptor, the address of the tile not added.
    pub fn descriptor(&self) -> (u32, u32) {
        let [start, lbo, sbo] = [self.start, self.lbo, self.sbo].map(|bytes| bytes / 16);
        (start | lbo << 16, sbo | 1 << 14 | code(self.swizzle) << 29)
    }

    /// The byte address of unit `unit` (16 bytes along the contiguous dimension) of line `line`.
    pub fn unit(&self, line: u32, unit: u32) -> u32 {
        let c = units(self.swizzle);
        let offset = match (self.transposed, self.swizzle) {
            // ((8,m),(T,2k)):((1T,SBO),(1,LBO))
            (false, Swizzle::None) => line % 8 * 16 + line / 8 * self.sbo + unit * self.lbo,
            // ((8,m),(T,2k)):((cT,SBO),(1,T))
            (false, _) => line % 8 * 16 * c + line / 8 * self.sbo + unit * 16,
            // ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))
            (true, Swizzle::None) => unit * self.sbo + line % 8 * 16 + line / 8 * self.lbo,
            // ((T,c,m),(8,k)):((1,T,LBO),(cT,SBO))
            (true, _) => unit % c * 16 + unit / c * self.lbo + line % 8 * 16 * c + line / 8 * self.sbo,
        };
        // Swizzle<B, 4, 3> on a byte address.
        let address = self.start + offset;
        address ^ (address >> 7 & (c - 1)) << 4
    }
}

/// Width and value of the codes of an element type.
pub fn bits(ty: &str) -> u32 {
    match ty {
        "tf32" => 32,
        "f16" | "bf16" => 16,
        "e2m3" | "e3m2" => 6,
        "e2m1" => 4,
        _ => 8,
    }
}

/// The number a code stands for; no code given is a NaN or an infinity.
pub fn value(ty: &str, code: u32) -> f64 {
    match ty {
        "s8" => f64::from(code as u8 as i8),
        "u8" => f64::from(code as u8),
        "ue8m0" => 2f64.powi(code as i32 - 127),
        "tf32" => float(code >> 13, 8, 10),
        "bf16" => float(code, 8, 7),
        "f16" => float(code, 5, 10),
        "e5m2" => float(code, 5, 2),
        "e3m2" => float(code, 3, 2),
        "e2m3" => float(code, 2, 3),
        "e2m1" => float(code, 2, 1),
        // e4m3, and ue4m3 without its sign.
        _ => float(code, 4, 3),
    }
}

fn float(code: u32, exponent: u32, mantissa: u32) -> f64 {
    let bias = (1 << (exponent - 1)) - 1;
    let sign = if code >> (exponent + mantissa) & 1 == 1 { -1.0 } else { 1.0 };
    let e = (code >> mantissa & ((1 << exponent) - 1)) as i32;
    let m = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let magnitude = if e == 0 { m * 2f64.powi(1 - bias) } else { (1.0 + m) * 2f64.powi(e - bias) };
    sign * magnitude
}
