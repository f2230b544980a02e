//! The XOR pattern that spreads the rows of a tile over the banks of shared memory.
//! PTX ISA "Asynchronous Operations: Swizzling modes"
//! <https://docs.nvidia.com/cuda/parallel-thread-execution/#tensor-swizzling-modes>.

/// How the 16-byte chunks of a row are permuted: address bits 4 to 6 are XORed with bits 7 to 9, as many as
/// the mode has. The XOR acts on the absolute shared address, so that a tile that starts on a whole pattern
/// sees the pattern from its first row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Swizzle {
    /// No permutation.
    None,
    /// Rows of 32 bytes.
    B32,
    /// Rows of 64 bytes.
    B64,
    /// Rows of 128 bytes.
    B128,
}

impl Swizzle {
    /// Every mode.
    pub const ALL: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

    /// Bytes of a row the pattern permutes; 16 without one.
    pub const fn span(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    /// Bytes after which the pattern repeats; a tile must start on a multiple.
    pub const fn pattern(self) -> u32 {
        self.span() * 8
    }

    /// Where the byte at `address` of the unpermuted tile lies.
    pub const fn apply(self, address: u32) -> u32 {
        let mask = match self {
            Swizzle::None => 0,
            Swizzle::B32 => 1,
            Swizzle::B64 => 3,
            Swizzle::B128 => 7,
        };
        address ^ (((address >> 7) & mask) << 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutation_stays_in_its_row_and_undoes_itself_exact() {
        for swizzle in Swizzle::ALL {
            for address in 0..4096 {
                let moved = swizzle.apply(address);
                assert_eq!(swizzle.apply(moved), address);
                assert_eq!(moved / swizzle.span(), address / swizzle.span(), "{swizzle:?} {address}");
            }
        }
    }

    /// The first chunk of each 128-byte row of the 128-byte pattern: the diagonal of the ISA's table.
    #[test]
    fn first_chunks_of_128_byte_rows_run_along_the_diagonal_exact() {
        let first: Vec<u32> = (0..8).map(|row| Swizzle::B128.apply(row * 128) % 128 / 16).collect();
        assert_eq!(first, [0, 1, 2, 3, 4, 5, 6, 7]);
        let second: Vec<u32> = (0..8).map(|row| Swizzle::B128.apply(row * 128 + 16) % 128 / 16).collect();
        assert_eq!(second, [1, 0, 3, 2, 5, 4, 7, 6]);
    }
}
