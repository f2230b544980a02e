//! Kernel arguments with their exact bytes and alignment.

use crate::DevicePtr;

/// One kernel argument, as the bytes that go to its `.param`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arg {
    bytes: Vec<u8>,
    align: usize,
    kind: &'static str,
}

impl Arg {
    /// The bytes, little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
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

/// The arguments of a launch, in the order of the kernel's parameters.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Args(Vec<Arg>);

macro_rules! scalar {
    ($($name:ident $ty:ty),*) => {$(
        #[doc = concat!("Appends a `", stringify!($ty), "`.")]
        #[must_use]
        pub fn $name(self, value: $ty) -> Args {
            self.push(value.to_le_bytes().to_vec(), size_of::<$ty>(), stringify!($ty))
        }
    )*};
}

impl Args {
    /// No arguments yet.
    pub fn new() -> Args {
        Args::default()
    }

    fn push(mut self, bytes: Vec<u8>, align: usize, kind: &'static str) -> Args {
        self.0.push(Arg { bytes, align, kind });
        self
    }

    scalar!(u8 u8, u16 u16, u32 u32, u64 u64, i32 i32, i64 i64, f32 f32, f64 f64);

    /// Appends a device address.
    #[must_use]
    pub fn ptr(self, ptr: DevicePtr) -> Args {
        self.push(ptr.0.to_le_bytes().to_vec(), 8, "pointer")
    }

    /// Appends an encoded tensor map (`CUtensorMap`: 128 opaque bytes, 64-byte aligned).
    #[must_use]
    pub fn tensor_map(self, map: [u8; 128]) -> Args {
        self.push(map.to_vec(), 64, "tensor map")
    }

    /// Appends a structure passed by value.
    #[must_use]
    pub fn bytes(self, bytes: &[u8], align: usize) -> Args {
        self.push(bytes.to_vec(), align, "bytes")
    }

    /// The arguments in order.
    pub fn as_slice(&self) -> &[Arg] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_keep_their_order_bytes_and_alignment_exact() {
        let args =
            Args::new().u32(0x0403_0201).ptr(DevicePtr(0x10)).f32(1.0).tensor_map([7; 128]).bytes(&[1, 2], 1);
        let got: Vec<_> = args.as_slice().iter().map(|a| (a.bytes().len(), a.align(), a.kind())).collect();
        assert_eq!(
            got,
            [(4, 4, "u32"), (8, 8, "pointer"), (4, 4, "f32"), (128, 64, "tensor map"), (2, 1, "bytes")]
        );
        assert_eq!(args.as_slice()[0].bytes(), [1, 2, 3, 4]);
        assert_eq!(args.as_slice()[2].bytes(), 1f32.to_bits().to_le_bytes());
    }
}
