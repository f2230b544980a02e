//! The driver's enumerations: what a tensor map's elements are and how its boxes lie in shared memory. Numbers are those
//! of `cuda.h` <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html>.

macro_rules! driver_enum {
    ($(#[$meta:meta])* $name:ident { $($variant:ident = $value:literal $doc:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $(#[doc = $doc] $variant = $value,)* }

        impl $name {
            /// Every value, in the order of the driver's enumeration.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// The value with the driver's number `code`.
            pub fn from_code(code: u8) -> Option<$name> {
                match code { $($value => Some($name::$variant),)* _ => None }
            }
        }
    };
}

driver_enum! {
    /// Element type; the numbers are those of `CUtensorMapDataType`.
    TensorDataType {
        U8 = 0 "8 bits.",
        U16 = 1 "16 bits.",
        U32 = 2 "32 bits.",
        S32 = 3 "32 bits, signed in reductions.",
        U64 = 4 "64 bits.",
        S64 = 5 "64 bits, signed in reductions.",
        F16 = 6 "Binary16.",
        F32 = 7 "Binary32.",
        F64 = 8 "Binary64.",
        Bf16 = 9 "bfloat16.",
        F32Ftz = 10 "Binary32, subnormals flushed.",
        Tf32 = 11 "TF32.",
        Tf32Ftz = 12 "TF32, subnormals flushed.",
        U4Align8 = 13 "16 nibbles in 8 bytes, no gaps; sm_100 and later.",
        U4Align16 = 14 "16 nibbles in 8 bytes, each followed by 8 bytes of gap in shared memory; sm_100 and later.",
        U6Align16 = 15 "16 six-bit values in 12 bytes, each followed by 4 bytes of gap; sm_100 and later.",
    }
}

impl TensorDataType {
    /// Bits of an element in global memory.
    pub const fn bits(self) -> u32 {
        use TensorDataType::*;
        match self {
            U8 => 8,
            U16 | F16 | Bf16 => 16,
            U32 | S32 | F32 | F32Ftz | Tf32 | Tf32Ftz => 32,
            U64 | S64 | F64 => 64,
            U4Align8 | U4Align16 => 4,
            U6Align16 => 6,
        }
    }

    /// Whether out-of-bounds elements can be NaN.
    pub const fn is_float(self) -> bool {
        use TensorDataType::*;
        matches!(self, F16 | F32 | F64 | Bf16 | F32Ftz | Tf32 | Tf32Ftz)
    }

    /// Whether groups of 16 elements take 16 bytes of shared memory, whatever their size.
    pub const fn is_padded(self) -> bool {
        matches!(self, TensorDataType::U4Align16 | TensorDataType::U6Align16)
    }
}

driver_enum! {
    /// `CUtensorMapInterleave`.
    Interleave {
        None = 0 "Dense rows.",
        B16 = 1 "NC/8HWC8.",
        B32 = 2 "NC/16HWC16.",
    }
}

driver_enum! {
    /// `CUtensorMapSwizzle`: how chunks are permuted in shared memory.
    Swizzle {
        None = 0 "Not.",
        B32 = 1 "16-byte chunks within 32 bytes.",
        B64 = 2 "16-byte chunks within 64 bytes.",
        B128 = 3 "16-byte chunks within 128 bytes.",
        B128Atom32 = 4 "32-byte chunks within 128 bytes.",
        B128Atom32Flip8 = 5 "As `B128Atom32`, 8-byte halves swapped in alternate rows.",
        B128Atom64 = 6 "64-byte chunks within 128 bytes.",
    }
}

impl Swizzle {
    /// Where the byte at unswizzled shared address `address` lies: PTX ISA 5.5.7 as one XOR of the absolute address, by
    /// which a start that is not aligned to the pattern gets what the ISA's "base offset" formula says. An involution
    /// that moves whole atoms.
    #[inline]
    pub const fn apply(self, address: u32) -> u32 {
        // Bits 7 and up number the 128-byte lines.
        let line = address >> 7;
        address
            ^ match self {
                Swizzle::None => 0,
                Swizzle::B32 => (line & 1) << 4,
                Swizzle::B64 => (line & 3) << 4,
                Swizzle::B128 => (line & 7) << 4,
                Swizzle::B128Atom32 => (line & 3) << 5,
                Swizzle::B128Atom32Flip8 => (line & 3) << 5 | (line & 1) << 3,
                Swizzle::B128Atom64 => (line & 1) << 6,
            }
    }

    /// Bytes of a row within which atoms move, the longest box row with swizzling; 16 without, where a row of a canonical
    /// matrix layout is one 16-byte chunk.
    #[inline]
    pub const fn span(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            _ => 128,
        }
    }

    /// Bytes that move as one, which a destination must be aligned to at least.
    #[inline]
    pub const fn atom(self) -> u32 {
        match self {
            Swizzle::B128Atom32 | Swizzle::B128Atom32Flip8 => 32,
            Swizzle::B128Atom64 => 64,
            _ => 16,
        }
    }

    /// Bytes after which the pattern repeats; a pattern that starts at a multiple has base offset 0.
    #[inline]
    pub const fn repeat(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 256,
            Swizzle::B64 => 512,
            _ => 1024,
        }
    }
}

driver_enum! {
    /// `CUtensorMapL2promotion`: how much L2 fetches at once. No effect on results.
    L2Promotion {
        None = 0 "As little as needed.",
        B64 = 1 "64 bytes.",
        B128 = 2 "128 bytes.",
        B256 = 3 "256 bytes.",
    }
}

driver_enum! {
    /// `CUtensorMapFloatOOBfill`: what elements outside the tensor read as.
    OutOfBounds {
        Zero = 0 "Zero.",
        Nan = 1 "A NaN that a following FMA treats as zero; floating-point types only.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tables of PTX ISA 5.5.7: which 16-byte chunk of the source each place of the destination holds.
    #[test]
    fn patterns_are_the_tables_of_the_isa_exact() {
        let tables: [(Swizzle, &[&str]); 6] = [
            (Swizzle::None, &["01234567", "01234567"]),
            (Swizzle::B32, &["01234567", "10325476"]),
            (Swizzle::B64, &["01234567", "10325476", "23016745", "32107654"]),
            (
                Swizzle::B128,
                &[
                    "01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301",
                    "76543210",
                ],
            ),
            (Swizzle::B128Atom32, &["01234567", "23016745", "45670123", "67452301"]),
            (Swizzle::B128Atom64, &["01234567", "45670123"]),
        ];
        for (swizzle, rows) in tables {
            for line in 0..64u32 {
                let row = rows[line as usize % rows.len()].as_bytes();
                for place in 0..8u32 {
                    let source = (row[place as usize] - b'0') as u32;
                    let from = swizzle.apply(line * 128 + source * 16);
                    assert_eq!(from, line * 128 + place * 16, "{swizzle:?} line {line}");
                }
            }
        }
    }

    #[test]
    fn every_pattern_is_an_involution_that_keeps_atoms_whole() {
        for &swizzle in Swizzle::ALL {
            for address in 0..4096 {
                let moved = swizzle.apply(address);
                assert_eq!(swizzle.apply(moved), address);
                assert_eq!(moved / swizzle.span().max(128), address / swizzle.span().max(128));
                let flip = if swizzle == Swizzle::B128Atom32Flip8 { 8 } else { 0 };
                assert_eq!((moved ^ address) & (swizzle.atom() - 1) & !flip, 0);
                assert_eq!(swizzle.apply(address + swizzle.repeat()), moved + swizzle.repeat());
            }
        }
        assert_eq!(Swizzle::B128Atom32Flip8.apply(128), 128 + 32 + 8);
        assert_eq!(Swizzle::B128Atom32Flip8.apply(256), 256 + 64);
    }
}
