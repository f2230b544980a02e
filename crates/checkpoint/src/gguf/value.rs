//! Typed metadata values of a GGUF file.

macro_rules! values {
    ($($kind:literal $number:ident $ty:ident $name:literal,)*) => {
        /// A metadata value. Integers and floats keep the width the file gave them.
        #[derive(Debug, Clone, PartialEq)]
        pub enum GgufValue {
            $(#[doc = concat!("Type ", $kind, ".")] $number($ty),)*
            /// Type 7.
            Bool(bool),
            /// Type 8.
            String(String),
            /// Type 9. Elements stay encoded: a vocabulary held as values would take many times its size.
            Array {
                /// Element type.
                element: u32,
                /// Number of elements.
                len: u64,
                /// The elements as the file holds them, checked.
                bytes: Vec<u8>,
            },
        }

        impl GgufValue {
            pub(crate) const fn type_name(kind: u32) -> &'static str {
                match kind { $($kind => $name,)* 7 => "bool", 8 => "string", 9 => "array", _ => "unknown" }
            }

            /// Fewest bytes that a value of that type takes in a file; `None` for an unknown type.
            pub(crate) const fn min_len(kind: u32) -> Option<usize> {
                match kind {
                    $($kind => Some(size_of::<$ty>()),)*
                    7 => Some(1),
                    8 => Some(8),
                    Self::ARRAY => Some(12),
                    _ => None,
                }
            }

            /// Type number.
            pub const fn kind(&self) -> u32 {
                match self {
                    $(Self::$number(_) => $kind,)*
                    Self::Bool(_) => 7,
                    Self::String(_) => 8,
                    Self::Array { .. } => Self::ARRAY,
                }
            }

            /// The number that these bytes are, if the type is one of numbers and they are as many as it has.
            pub(crate) fn number(kind: u32, bytes: &[u8]) -> Option<Self> {
                match kind {
                    $($kind => Some(Self::$number($ty::from_le_bytes(bytes.try_into().ok()?))),)*
                    _ => None,
                }
            }

            /// Appends the value, without its type, as a file holds it.
            pub(crate) fn write(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$number(x) => out.extend(x.to_le_bytes()),)*
                    Self::Bool(x) => out.push(u8::from(*x)),
                    Self::String(s) => write_string(s, out),
                    Self::Array { element, len, bytes } => {
                        out.extend(element.to_le_bytes());
                        out.extend(len.to_le_bytes());
                        out.extend(bytes);
                    }
                }
            }
        }
    };
}

values! {
    0 U8 u8 "uint8",
    1 I8 i8 "int8",
    2 U16 u16 "uint16",
    3 I16 i16 "int16",
    4 U32 u32 "uint32",
    5 I32 i32 "int32",
    6 F32 f32 "float32",
    10 U64 u64 "uint64",
    11 I64 i64 "int64",
    12 F64 f64 "float64",
}

impl GgufValue {
    /// Number of an array's type.
    pub const ARRAY: u32 = 9;

    /// The value as an unsigned integer, if it is a non-negative one.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(x) => Some(x.into()),
            Self::U16(x) => Some(x.into()),
            Self::U32(x) => Some(x.into()),
            Self::U64(x) => Some(x),
            Self::I8(x) => x.try_into().ok(),
            Self::I16(x) => x.try_into().ok(),
            Self::I32(x) => x.try_into().ok(),
            Self::I64(x) => x.try_into().ok(),
            _ => None,
        }
    }

    /// The value as text, if it is text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(s) => Some(s),
            _ => None,
        }
    }
}

/// Appends a string: u64 length, then the bytes.
pub(crate) fn write_string(s: &str, out: &mut Vec<u8>) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}
