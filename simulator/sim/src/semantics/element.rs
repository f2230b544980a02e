//! The element types of matrix multiplicands and how each is stored.
//!
//! Flow: `exec/{mma,wgmma,tcgen05}` decodes operands once per instruction with [`Element::decode`] into slices
//! of f32 (every one of these types is exact in f32) and hands them to `semantics::dot`.
//! PTX ISA 5.2.3, 9.7.14.2, 9.7.16.2.1.

use super::float::{BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, Format, TF32, decode_ue8m0};
use crate::names::modifiers;

modifiers! {
    /// The type of an element of A or B.
    Element {
        F16 "f16", Bf16 "bf16",
        /// 32 bits, the low 13 ignored.
        Tf32 "tf32",
        E4m3 "e4m3", E5m2 "e5m2",
        /// Six bits.
        E2m3 "e2m3",
        /// Six bits.
        E3m2 "e3m2",
        /// Four bits.
        E2m1 "e2m1",
        S8 "s8", U8 "u8", S4 "s4", U4 "u4",
    }
}

impl Element {
    #[inline]
    pub const fn bits(self) -> u32 {
        match self {
            Element::Tf32 => 32,
            Element::F16 | Element::Bf16 => 16,
            Element::E4m3 | Element::E5m2 | Element::S8 | Element::U8 => 8,
            Element::E2m3 | Element::E3m2 => 6,
            Element::E2m1 | Element::S4 | Element::U4 => 4,
        }
    }

    /// The floating-point format, or `None` for an integer type.
    #[inline]
    pub const fn format(self) -> Option<Format> {
        match self {
            Element::F16 => Some(F16),
            Element::Bf16 => Some(BF16),
            Element::Tf32 => Some(TF32),
            Element::E4m3 => Some(E4M3),
            Element::E5m2 => Some(E5M2),
            Element::E2m3 => Some(E2M3),
            Element::E3m2 => Some(E3M2),
            Element::E2m1 => Some(E2M1),
            Element::S8 | Element::U8 | Element::S4 | Element::U4 => None,
        }
    }

    /// The value of a code, exact; bits above [`bits`](Self::bits) are ignored. Integers give their value.
    #[inline]
    pub fn decode(self, code: u32) -> f32 {
        match (self, self.format()) {
            (_, Some(format)) => format.decode(code as u64) as f32,
            (Element::S8, _) => code as i8 as f32,
            (Element::S4, _) => ((code << 28) as i32 >> 28) as f32,
            (Element::U4, _) => (code & 0xf) as f32,
            _ => (code & 0xff) as f32,
        }
    }
}

modifiers! {
    /// The type of a block scale (PTX ISA 9.7.14.3, 9.7.16.10.7).
    Scale {
        /// The non-negative half of e4m3; bit 7 must be zero and is ignored.
        Ue4m3 "ue4m3",
        /// A power of two.
        Ue8m0 "ue8m0",
    }
}

impl Scale {
    /// The exponent of the smallest normal number.
    pub const fn min_exponent(self) -> i32 {
        match self {
            Scale::Ue4m3 => -6,
            Scale::Ue8m0 => -127,
        }
    }

    /// The multiplier a code stands for, exact; NaN for the NaN code.
    #[inline]
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Scale::Ue4m3 => E4M3.decode(code as u64 & 0x7f) as f32,
            Scale::Ue8m0 => decode_ue8m0(code) as f32,
        }
    }
}
