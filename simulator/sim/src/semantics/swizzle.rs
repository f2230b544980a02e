//! The XOR patterns of shared memory, the same for TMA, wgmma and tcgen05.
//!
//! Flow: `tma` writes a box with them, `smem_desc` reads operands with them. PTX ISA 5.5.7. The ISA draws each
//! pattern from an aligned start; as an operation on the absolute shared-memory address it is one XOR, and a
//! start that is not aligned to the pattern gets what the ISA's "base offset" formula says.

/// A swizzling mode with its atomicity (PTX ISA table 14). Interleaved 96-byte swizzling is not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// No swizzling.
    None,
    /// 32-byte mode, 16-byte atoms.
    B32,
    /// 64-byte mode, 16-byte atoms.
    B64,
    /// 128-byte mode, 16-byte atoms.
    B128,
    /// 128-byte mode, 32-byte atoms.
    B128Atom32,
    /// 128-byte mode, 32-byte atoms, the 8-byte halves of each 16 exchanged in every odd 128-byte line.
    B128Atom32Flip8,
    /// 128-byte mode, 64-byte atoms.
    B128Atom64,
}

impl Swizzle {
    /// Where the byte at unswizzled shared address `address` lies. An involution that moves whole atoms.
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

    /// Bytes of a row within which atoms move: 32, 64 or 128; 16 without swizzling, where a row of a canonical
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
        for swizzle in [
            Swizzle::None,
            Swizzle::B32,
            Swizzle::B64,
            Swizzle::B128,
            Swizzle::B128Atom32,
            Swizzle::B128Atom32Flip8,
            Swizzle::B128Atom64,
        ] {
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
