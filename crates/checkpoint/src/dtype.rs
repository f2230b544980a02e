//! How the elements of a stored tensor are encoded: the safetensors types and the GGUF block types.
//!
//! Sources: <https://github.com/huggingface/safetensors#format>,
//! <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md> and `ggml.h` (type numbers and block sizes).

use dualgemm_formats::FloatType;

/// A GGUF type that groups elements into blocks: number, name, elements and bytes per block.
#[derive(Debug, PartialEq, Eq)]
pub struct GgmlType {
    /// Type number in the file.
    pub id: u32,
    /// ggml's name.
    pub name: &'static str,
    /// Elements per block.
    pub elements: usize,
    /// Bytes per block.
    pub bytes: usize,
}

macro_rules! dtypes {
    ($($variant:ident $name:literal $bits:literal $ggml:expr, $doc:literal;)*) => {
        /// Storage type of a tensor. Ordered as safetensors writers order tensors in a file.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Dtype {
            $(#[doc = $doc] $variant,)*
            /// A GGUF block type.
            Ggml(&'static GgmlType),
        }

        impl Dtype {
    /// Whether elements may be packed 4-bit codes, or blocks of them.
    pub(crate) fn holds_4_bits(self) -> bool {
        match self {
            Self::U8 | Self::I8 | Self::U32 | Self::F4 => true,
            Self::Ggml(t) => matches!(t.id, Self::GGML_NVFP4 | Self::GGML_MXFP4),
            _ => false,
        }
    }

            /// The safetensors types, in the order of the format's own enumeration.
            pub const SAFETENSORS: &'static [Self] = &[$(Self::$variant),*];

            /// Name in a safetensors header, or ggml's name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                    Self::Ggml(t) => t.name,
                }
            }

            /// Elements and bits of the smallest stored unit.
            const fn unit(self) -> (usize, usize) {
                match self {
                    $(Self::$variant => (1, $bits),)*
                    Self::Ggml(t) => (t.elements, t.bytes * 8),
                }
            }

            /// Type number in a GGUF file, if the type exists there.
            pub const fn ggml_id(self) -> Option<u32> {
                match self {
                    $(Self::$variant => $ggml,)*
                    Self::Ggml(t) => Some(t.id),
                }
            }
        }
    };
}

dtypes! {
    Bool "BOOL" 8 None, "A byte, 0 or 1.";
    F4 "F4" 4 None, "Two e2m1 codes per byte, even element in the low nibble; shapes count elements.";
    F6E2m3 "F6_E2M3" 6 None, "6-bit float.";
    F6E3m2 "F6_E3M2" 6 None, "6-bit float.";
    U8 "U8" 8 None, "Unsigned byte: packed codes, or scale bytes without a type.";
    I8 "I8" 8 Some(24), "Signed byte.";
    F8E5m2 "F8_E5M2" 8 None, "8-bit float.";
    F8E4m3 "F8_E4M3" 8 None, "8-bit float: nvfp4 block scales.";
    F8E8m0 "F8_E8M0" 8 None, "Power of two: mxfp4 block scales.";
    F8E4m3Fnuz "F8_E4M3FNUZ" 8 None, "8-bit float.";
    F8E5m2Fnuz "F8_E5M2FNUZ" 8 None, "8-bit float.";
    I16 "I16" 16 Some(25), "Signed integer.";
    U16 "U16" 16 None, "Unsigned integer.";
    F16 "F16" 16 Some(1), "IEEE half.";
    Bf16 "BF16" 16 Some(30), "bfloat16.";
    I32 "I32" 32 Some(26), "Signed integer.";
    U32 "U32" 32 None, "Unsigned integer.";
    F32 "F32" 32 Some(0), "IEEE single.";
    C64 "C64" 64 None, "Complex of two singles.";
    F64 "F64" 64 Some(28), "IEEE double.";
    I64 "I64" 64 Some(27), "Signed integer.";
    U64 "U64" 64 None, "Unsigned integer.";
}

macro_rules! ggml_types {
    ($($id:literal $name:literal $elements:literal $bytes:literal;)*) => {
        /// Every GGUF block type.
        pub const GGML_TYPES: &[GgmlType] =
            &[$(GgmlType { id: $id, name: $name, elements: $elements, bytes: $bytes }),*];
    };
}

ggml_types! {
    2 "Q4_0" 32 18;
    3 "Q4_1" 32 20;
    6 "Q5_0" 32 22;
    7 "Q5_1" 32 24;
    8 "Q8_0" 32 34;
    9 "Q8_1" 32 36;
    10 "Q2_K" 256 84;
    11 "Q3_K" 256 110;
    12 "Q4_K" 256 144;
    13 "Q5_K" 256 176;
    14 "Q6_K" 256 210;
    15 "Q8_K" 256 292;
    16 "IQ2_XXS" 256 66;
    17 "IQ2_XS" 256 74;
    18 "IQ3_XXS" 256 98;
    19 "IQ1_S" 256 50;
    20 "IQ4_NL" 32 18;
    21 "IQ3_S" 256 110;
    22 "IQ2_S" 256 82;
    23 "IQ4_XS" 256 136;
    29 "IQ1_M" 256 56;
    34 "TQ1_0" 256 54;
    35 "TQ2_0" 256 66;
    39 "MXFP4" 32 17;
    40 "NVFP4" 64 36;
}

impl Dtype {
    /// Type number of GGUF MXFP4.
    pub const GGML_MXFP4: u32 = 39;
    /// Type number of GGUF NVFP4.
    pub const GGML_NVFP4: u32 = 40;

    /// The safetensors type of that name.
    pub fn from_safetensors(name: &str) -> Option<Self> {
        Self::SAFETENSORS.iter().copied().find(|d| d.name() == name)
    }

    /// The type of that GGUF number.
    pub fn from_ggml(id: u32) -> Option<Self> {
        let block = || GGML_TYPES.iter().find(|t| t.id == id).map(Self::Ggml);
        Self::SAFETENSORS.iter().copied().find(|d| d.ggml_id() == Some(id)).or_else(block)
    }

    /// Bytes that `elements` elements take; `None` if they are no whole number of bytes or blocks, or overflow.
    pub fn byte_len(self, elements: usize) -> Option<usize> {
        let (unit, bits) = self.unit();
        if !elements.is_multiple_of(unit) {
            return None;
        }
        let bits = (elements / unit).checked_mul(bits)?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// Elements per stored unit: 1, or the block length of a GGUF type.
    pub const fn block_elements(self) -> usize {
        self.unit().0
    }

    /// The type of floats that matrices come in, if it is one: f32, f16, bf16.
    pub const fn float_type(self) -> Option<FloatType> {
        match self {
            Self::F32 => Some(FloatType::F32),
            Self::F16 => Some(FloatType::F16),
            Self::Bf16 => Some(FloatType::Bf16),
            _ => None,
        }
    }

    /// Whether it is one.
    pub const fn is_float(self) -> bool {
        self.float_type().is_some()
    }

    /// Whether it is an 8-bit float that weights may be in.
    pub const fn is_8_bit_float(self) -> bool {
        matches!(self, Self::F8E4m3 | Self::F8E5m2 | Self::F8E4m3Fnuz | Self::F8E5m2Fnuz)
    }

    /// Position in the order of safetensors' own enumeration; block types come last.
    pub(crate) fn rank(self) -> usize {
        Self::SAFETENSORS.iter().position(|&d| d == self).unwrap_or(usize::MAX)
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_agree_with_the_safetensors_crate() {
        use safetensors::Dtype::*;
        #[rustfmt::skip]
        let theirs = [
            BOOL, F4, F6_E2M3, F6_E3M2, U8, I8, F8_E5M2, F8_E4M3, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ, I16, U16, F16,
            BF16, I32, U32, F32, C64, F64, I64, U64,
        ];
        assert_eq!(theirs.len(), Dtype::SAFETENSORS.len());
        for (ours, theirs) in Dtype::SAFETENSORS.iter().zip(theirs) {
            assert_eq!(ours.name(), theirs.to_string());
            assert_eq!(ours.byte_len(8), Some(theirs.bitsize()));
            assert_eq!(Dtype::from_safetensors(ours.name()), Some(*ours));
        }
        assert!(theirs.is_sorted(), "the order of tensors in a file");
    }

    #[test]
    fn part_bytes_part_blocks_and_overflow_have_no_size() {
        assert_eq!(Dtype::F4.byte_len(3), None);
        assert_eq!(Dtype::F32.byte_len(usize::MAX), None);
        let nvfp4 = Dtype::from_ggml(40).unwrap();
        assert_eq!((nvfp4.byte_len(128), nvfp4.byte_len(16)), (Some(72), None));
        assert_eq!(Dtype::from_ggml(4), None, "a removed type");
        for t in GGML_TYPES {
            assert_eq!(Dtype::from_ggml(t.id).unwrap().ggml_id(), Some(t.id));
        }
    }
}
