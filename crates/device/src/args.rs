//! Kernel arguments with their exact bytes and alignment, kept inline: making them allocates nothing, so an argument
//! list can be made for every call.

use smallvec::SmallVec;

use crate::DevicePtr;

/// One kernel argument, as the bytes that go to its `.param`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arg<'a> {
    bytes: &'a [u8],
    align: usize,
    kind: &'static str,
}

impl<'a> Arg<'a> {
    /// The bytes, little-endian.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The alignment the value has.
    pub fn align(&self) -> usize {
        self.align
    }

    /// What the host passed: `u32`, `f32`, `pointer`, `tensor map`, `bytes`.
    pub fn kind(&self) -> &'static str {
        self.kind
    }
}

/// Bytes that fit without the heap: three tensor maps and thirty words.
const INLINE_BYTES: usize = 512;
/// Arguments that fit without the heap.
const INLINE_ARGS: usize = 24;

/// Where an argument ends among the bytes, and what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    end: u32,
    align: u32,
    kind: &'static str,
}

/// The arguments of a launch, in the order of the kernel's parameters.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Args {
    bytes: SmallVec<[u8; INLINE_BYTES]>,
    entries: SmallVec<[Entry; INLINE_ARGS]>,
}

macro_rules! scalar {
    ($($name:ident $ty:ty),*) => {$(
        #[doc = concat!("Appends a `", stringify!($ty), "`.")]
        #[must_use]
        pub fn $name(self, value: $ty) -> Args {
            self.push(&value.to_le_bytes(), size_of::<$ty>(), stringify!($ty))
        }
    )*};
}

impl Args {
    /// No arguments yet.
    pub fn new() -> Args {
        Args::default()
    }

    fn push(mut self, bytes: &[u8], align: usize, kind: &'static str) -> Args {
        self.bytes.extend_from_slice(bytes);
        self.entries.push(Entry { end: self.bytes.len() as u32, align: align as u32, kind });
        self
    }

    scalar!(u8 u8, u16 u16, u32 u32, u64 u64, i32 i32, i64 i64, f32 f32, f64 f64);

    /// Appends a device address.
    #[must_use]
    pub fn ptr(self, ptr: DevicePtr) -> Args {
        self.push(&ptr.0.to_le_bytes(), 8, "pointer")
    }

    /// Appends an encoded tensor map (`CUtensorMap`: 128 opaque bytes, 64-byte aligned).
    #[must_use]
    pub fn tensor_map(self, map: [u8; 128]) -> Args {
        self.push(&map, 64, "tensor map")
    }

    /// Appends a structure passed by value.
    #[must_use]
    pub fn bytes(self, bytes: &[u8], align: usize) -> Args {
        self.push(bytes, align, "bytes")
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The arguments in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Arg<'_>> {
        let mut start = 0;
        self.entries.iter().map(move |entry| {
            let bytes = &self.bytes[start..entry.end as usize];
            start = entry.end as usize;
            Arg { bytes, align: entry.align as usize, kind: entry.kind }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_keep_their_order_bytes_and_alignment_exact() {
        let args =
            Args::new().u32(0x0403_0201).ptr(DevicePtr(0x10)).f32(1.0).tensor_map([7; 128]).bytes(&[1, 2], 1);
        let got: Vec<_> = args.iter().map(|a| (a.bytes().len(), a.align(), a.kind())).collect();
        assert_eq!(
            got,
            [(4, 4, "u32"), (8, 8, "pointer"), (4, 4, "f32"), (128, 64, "tensor map"), (2, 1, "bytes")]
        );
        let bytes: Vec<&[u8]> = args.iter().map(|a| a.bytes()).collect();
        assert_eq!(bytes[0], [1, 2, 3, 4]);
        assert_eq!(bytes[2], 1f32.to_bits().to_le_bytes());
        assert_eq!(bytes[4], [1, 2]);
        assert_eq!(args.len(), 5);
    }
}
