//! A K-major tile of matrix operands in shared memory, and the 64-bit descriptors tensor cores read it by.
//! PTX ISA "Matrix descriptor format" of wgmma and "Shared memory descriptor" of tcgen05
//! <https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-shared-memory-descriptor>.

use super::{LayoutError, Swizzle, require};

/// Rows of K-contiguous bytes, as a TMA box of `swizzle.span()` bytes by `rows` leaves them.
///
/// A row longer than the span continues in the next panel, `rows * span` bytes later:
/// ```text
/// offset(row, byte) = swizzled( (byte / span) * rows * span  +  row * span  +  byte % span )
/// ```
/// Without swizzle the span is 16 bytes, which is the core-matrix layout: 8 rows of 16 bytes are 128
/// contiguous bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SmemTile {
    rows: u32,
    row_bytes: u32,
    swizzle: Swizzle,
}

impl SmemTile {
    /// A tile of `rows` rows of `row_bytes` bytes.
    ///
    /// # Errors
    /// If `rows` is no multiple of 8, `row_bytes` none of the swizzle's span, the swizzle moves more than 16 bytes at once,
    /// or the tile is larger than the 18 address bits a descriptor has.
    pub fn new(rows: u32, row_bytes: u32, swizzle: Swizzle) -> Result<SmemTile, LayoutError> {
        require(rows > 0 && rows.is_multiple_of(8), "tile rows", rows, "a positive multiple of 8 needed")?;
        require(
            row_bytes > 0 && row_bytes.is_multiple_of(swizzle.span()),
            "tile row bytes",
            row_bytes,
            "a positive multiple of the swizzle span needed",
        )?;
        require(swizzle.atom() == 16, "tile swizzle", format!("{swizzle:?}"), "atoms of 16 bytes needed")?;
        let bytes = u64::from(rows) * u64::from(row_bytes);
        require(bytes <= 1 << 18, "tile bytes", bytes, "at most 262144 possible")?;
        Ok(SmemTile { rows, row_bytes, swizzle })
    }

    /// Rows.
    pub const fn rows(&self) -> u32 {
        self.rows
    }

    /// Bytes of a row.
    pub const fn row_bytes(&self) -> u32 {
        self.row_bytes
    }

    /// The permutation.
    pub const fn swizzle(&self) -> Swizzle {
        self.swizzle
    }

    /// Size in bytes.
    pub const fn bytes(&self) -> u32 {
        self.rows * self.row_bytes
    }

    /// Alignment the start needs, in bytes: a whole pattern, so that the descriptor's base offset is 0.
    pub const fn alignment(&self) -> u32 {
        self.swizzle.span() * 8
    }

    /// Bytes of one panel: all rows of one span.
    pub const fn panel_bytes(&self) -> u32 {
        self.rows * self.swizzle.span()
    }

    /// Offset of byte `byte` of row `row` from an aligned start.
    pub const fn offset(&self, row: u32, byte: u32) -> u32 {
        let span = self.swizzle.span();
        self.swizzle.apply((byte / span) * self.panel_bytes() + row * span + byte % span)
    }

    /// Bytes between groups of 8 rows.
    pub const fn stride_bytes(&self) -> u32 {
        self.swizzle.span() * 8
    }

    /// Bytes between 16-byte chunks of a row; with swizzle ignored by the hardware and 16 by convention.
    pub const fn leading_bytes(&self) -> u32 {
        match self.swizzle {
            Swizzle::None => self.panel_bytes(),
            _ => 16,
        }
    }

    /// wgmma's descriptor of the tile at shared address 0: OR in [`address_field`](Self::address_field).
    pub const fn wgmma_desc(&self) -> u64 {
        wgmma_smem_desc(0, self.leading_bytes(), self.stride_bytes(), self.swizzle)
    }

    /// tcgen05's descriptor of the tile at shared address 0: OR in [`address_field`](Self::address_field).
    pub const fn tcgen05_desc(&self) -> u64 {
        tcgen05_smem_desc(0, self.leading_bytes(), self.stride_bytes(), self.swizzle)
    }

    /// The descriptor's address field: address in units of 16 bytes.
    pub const fn address_field(address: u32) -> u64 {
        encode(address)
    }

    /// What to add to a descriptor to start `byte` bytes further along K (a multiple of 16): an MMA step is 32
    /// bytes. The swizzle needs no care, since the row bits of the address do not change.
    pub const fn advance_k(&self, byte: u32) -> u64 {
        let span = self.swizzle.span();
        (((byte / span) * self.panel_bytes() + byte % span) >> 4) as u64
    }
}

const fn encode(bytes: u32) -> u64 {
    ((bytes & 0x3FFFF) >> 4) as u64
}

/// The wgmma shared-memory descriptor (sm_90a): bits 0-13 start, 16-29 leading and 32-45 stride byte offset in
/// units of 16 bytes, 62-63 swizzle, one that moves 16 bytes at once. Start must lie on a whole swizzle pattern (base offset 0).
pub const fn wgmma_smem_desc(start: u32, leading: u32, stride: u32, swizzle: Swizzle) -> u64 {
    let mode = match swizzle {
        Swizzle::None => 0,
        Swizzle::B128 => 1,
        Swizzle::B64 => 2,
        _ => 3,
    };
    debug_assert!(swizzle.atom() == 16);
    encode(start) | encode(leading) << 16 | encode(stride) << 32 | mode << 62
}

/// The tcgen05 shared-memory descriptor (sm_100a): as wgmma's, but with the constant 1 in bits 46-48 and the
/// swizzle in bits 61-63.
pub const fn tcgen05_smem_desc(start: u32, leading: u32, stride: u32, swizzle: Swizzle) -> u64 {
    let mode = match swizzle {
        Swizzle::None => 0,
        Swizzle::B128 => 2,
        Swizzle::B64 => 4,
        _ => 6,
    };
    debug_assert!(swizzle.atom() == 16);
    encode(start) | encode(leading) << 16 | encode(stride) << 32 | 1 << 46 | mode << 61
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

    #[test]
    fn descriptors_equal_the_constants_of_nvidias_compilers_exact() {
        let tile = SmemTile::new(128, 128, Swizzle::B128).unwrap();
        assert_eq!(tile.wgmma_desc(), 0x4000_0040_0001_0000);
        assert_eq!(tile.tcgen05_desc(), 0x4000_4040_0001_0000);
        // Scale factors for tcgen05.cp: 32 rows of 16 bytes; the leading offset is irrelevant there.
        assert_eq!(tcgen05_smem_desc(0, 0, 128, Swizzle::None), 0x0000_4008_0000_0000);
        assert_eq!(wgmma_smem_desc(0x400, 16, 1024, Swizzle::B128), 0x4000_0040_0001_0040);
    }

    #[test]
    fn offsets_are_a_bijection_exact() {
        for swizzle in SWIZZLES {
            let tile = SmemTile::new(32, 256, swizzle).unwrap();
            let seen: HashSet<u32> =
                (0..32).flat_map(|r| (0..256).map(move |b| (r, b))).map(|(r, b)| tile.offset(r, b)).collect();
            assert_eq!(seen.len() as u32, tile.bytes());
            assert!(seen.iter().all(|&offset| offset < tile.bytes()));
        }
    }

    /// The address function of the hardware, from a descriptor: the tile's own offsets must agree.
    #[test]
    fn tile_and_descriptor_describe_the_same_bytes_exact() {
        for swizzle in SWIZZLES {
            let tile = SmemTile::new(64, 128, swizzle).unwrap();
            for step in 0..4 {
                let desc = tile.wgmma_desc() + tile.advance_k(step * 32);
                let start = ((desc & 0x3FFF) << 4) as u32;
                let leading = ((desc >> 16 & 0x3FFF) << 4) as u32;
                let stride = ((desc >> 32 & 0x3FFF) << 4) as u32;
                for row in 0..64 {
                    for chunk in 0..2 {
                        let offset = match swizzle {
                            Swizzle::None => row / 8 * stride + row % 8 * 16 + chunk * leading,
                            _ => row / 8 * stride + row % 8 * swizzle.span() + chunk * 16,
                        };
                        let address = swizzle.apply(start + offset);
                        assert_eq!(address, tile.offset(row, step * 32 + chunk * 16), "{swizzle:?} {step}");
                    }
                }
            }
        }
    }

    #[test]
    fn impossible_tiles_are_refused() {
        let error = |rows, bytes, swizzle| SmemTile::new(rows, bytes, swizzle).unwrap_err().to_string();
        assert_eq!(error(12, 128, Swizzle::B128), "tile rows: 12 found, a positive multiple of 8 needed");
        assert_eq!(
            error(8, 96, Swizzle::B64),
            "tile row bytes: 96 found, a positive multiple of the swizzle span needed"
        );
        assert_eq!(error(4096, 128, Swizzle::B128), "tile bytes: 524288 found, at most 262144 possible");
        assert!(SmemTile::new(u32::MAX - 7, u32::MAX - 127, Swizzle::B128).is_err());
    }
}
