//! Fundamental types and state spaces (PTX ISA "State Spaces, Types, and Variables").

use std::fmt;

macro_rules! named_enum {
    ($(#[$meta:meta])* $name:ident { $($variant:ident $text:literal $doc:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum $name { $(#[doc = $doc] $variant,)* }

        impl $name {
            /// Every value, in declaration order.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// The spelling in PTX, without the leading dot.
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }

            /// The value spelled `text` (without the leading dot).
            pub fn from_name(text: &str) -> Option<$name> {
                match text { $($text => Some($name::$variant),)* _ => None }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

named_enum! {
    /// A type that a register or a variable may have.
    Type {
        Pred "pred" "Predicate.",
        B8 "b8" "8 untyped bits.",
        B16 "b16" "16 untyped bits.",
        B32 "b32" "32 untyped bits.",
        B64 "b64" "64 untyped bits.",
        B128 "b128" "128 untyped bits.",
        U8 "u8" "Unsigned 8-bit integer.",
        U16 "u16" "Unsigned 16-bit integer.",
        U32 "u32" "Unsigned 32-bit integer.",
        U64 "u64" "Unsigned 64-bit integer.",
        S8 "s8" "Signed 8-bit integer.",
        S16 "s16" "Signed 16-bit integer.",
        S32 "s32" "Signed 32-bit integer.",
        S64 "s64" "Signed 64-bit integer.",
        U16x2 "u16x2" "Two unsigned 16-bit integers, element 0 in the low half.",
        S16x2 "s16x2" "Two signed 16-bit integers, element 0 in the low half.",
        F16 "f16" "IEEE binary16.",
        F16x2 "f16x2" "Two binary16, element 0 in the low half.",
        Bf16 "bf16" "bfloat16.",
        Bf16x2 "bf16x2" "Two bfloat16, element 0 in the low half.",
        F32 "f32" "IEEE binary32.",
        F32x2 "f32x2" "Two binary32, element 0 in the low half.",
        F64 "f64" "IEEE binary64.",
        Texref "texref" "Opaque texture reference.",
        Samplerref "samplerref" "Opaque sampler reference.",
        Surfref "surfref" "Opaque surface reference.",
    }
}

impl Type {
    /// Width in bits: 1 for a predicate, 64 for the opaque references.
    pub const fn bits(self) -> u32 {
        match self {
            Type::Pred => 1,
            Type::B8 | Type::U8 | Type::S8 => 8,
            Type::B16 | Type::U16 | Type::S16 | Type::F16 | Type::Bf16 => 16,
            Type::B32 | Type::U32 | Type::S32 | Type::F32 => 32,
            Type::U16x2 | Type::S16x2 | Type::F16x2 | Type::Bf16x2 => 32,
            Type::B64 | Type::U64 | Type::S64 | Type::F64 | Type::F32x2 => 64,
            Type::Texref | Type::Samplerref | Type::Surfref => 64,
            Type::B128 => 128,
        }
    }

    /// Size in memory in bytes (a predicate, which memory cannot hold, counts as 1).
    pub const fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    /// True for `s8`, `s16`, `s32`, `s64` and `s16x2`.
    pub const fn is_signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64 | Type::S16x2)
    }

    /// True for the floating-point types, packed ones included.
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2 | Type::F32 | Type::F32x2 | Type::F64
        )
    }
}

named_enum! {
    /// A state space a variable can be declared in.
    Space {
        Reg "reg" "Registers of one thread.",
        Sreg "sreg" "Special registers.",
        Const "const" "Constant memory.",
        Global "global" "Global memory.",
        Local "local" "Memory private to a thread.",
        Param "param" "Kernel or function parameters.",
        Shared "shared" "Memory of one CTA.",
        Tex "tex" "Texture memory (deprecated spelling of a global reference).",
    }
}
