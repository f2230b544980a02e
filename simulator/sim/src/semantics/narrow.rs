//! Elements of 4 and 6 bits that are packed in memory and lie one to a byte where they are used.
//!
//! Flow: `exec/tcgen05` (`tcgen05.cp` with decompression) and `exec/ld_st` (`ldmatrix` with `.b8x16`) widen chunks of
//! 16 bytes; `exec/tcgen05/multiply` finds the element in its byte. PTX ISA 9.7.16.9.1 and 9.7.14.5.15. Which bits
//! of the byte an element takes is drawn only; CUTLASS names them: the middle ones in tensor memory (`00xxxx00`,
//! `0xxxxxx0`, `tcgen05/cp_narrow_a_to_tmem_mma.py`), the low ones after `ldmatrix` (`mma_traits_sm120.hpp`).

use crate::names::modifiers;

modifiers! {
    /// A source format: 16 elements, then padding up to 16 bytes.
    Narrow { B4 "b4x16_p64", B6 "b6x16_p32" }
}

impl Narrow {
    /// Bits of an element.
    pub const fn bits(self) -> u32 {
        match self {
            Narrow::B4 => 4,
            Narrow::B6 => 6,
        }
    }

    /// Bytes of a chunk that hold elements; the padding after them is not read.
    pub const fn packed_bytes(self) -> usize {
        2 * self.bits() as usize
    }

    /// The lowest bit an element takes of its byte in tensor memory.
    pub const fn tensor_shift(self) -> u32 {
        (8 - self.bits()) / 2
    }

    /// The 16 elements of `chunk`, each in its byte from bit `shift` on, zeros around it.
    pub fn widen(self, chunk: [u8; 16], shift: u32) -> [u8; 16] {
        let packed = u128::from_le_bytes(chunk);
        let mask = (1 << self.bits()) - 1;
        std::array::from_fn(|i| ((packed >> (i as u32 * self.bits())) as u8 & mask) << shift)
    }
}
