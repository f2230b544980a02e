//! The driver's enumerations: what a tensor map's elements are and how its boxes lie in shared memory. Numbers are those
//! of `cuda.h` <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html>.

use crate::layout::Swizzle;

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
    TensorSwizzle {
        None = 0 "Not.",
        B32 = 1 "16-byte chunks within 32 bytes.",
        B64 = 2 "16-byte chunks within 64 bytes.",
        B128 = 3 "16-byte chunks within 128 bytes.",
        B128Atom32 = 4 "32-byte chunks within 128 bytes.",
        B128Atom32Flip8 = 5 "As `B128Atom32`, 8-byte halves swapped in alternate rows.",
        B128Atom64 = 6 "64-byte chunks within 128 bytes.",
    }
}

impl TensorSwizzle {
    /// Longest box row in bytes; `None`: no limit.
    pub const fn span(self) -> Option<u32> {
        match self {
            TensorSwizzle::None => None,
            TensorSwizzle::B32 => Some(32),
            TensorSwizzle::B64 => Some(64),
            _ => Some(128),
        }
    }
}

impl From<Swizzle> for TensorSwizzle {
    fn from(swizzle: Swizzle) -> TensorSwizzle {
        match swizzle {
            Swizzle::None => TensorSwizzle::None,
            Swizzle::B32 => TensorSwizzle::B32,
            Swizzle::B64 => TensorSwizzle::B64,
            Swizzle::B128 => TensorSwizzle::B128,
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
