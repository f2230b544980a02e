//! Shared-memory matrix descriptors of wgmma and tcgen05: what they say, and where each element lies.
//!
//! Flow: `exec/{wgmma,tcgen05}` decodes a descriptor, then reads 16-byte chunks at [`SmemDesc::k_major`] or
//! [`SmemDesc::mn_major`]. PTX ISA 9.7.15.5.1.2 (wgmma), 9.7.16.3 and 9.7.16.4.1 (tcgen05).
//!
//! Both address functions are the canonical layouts of 9.7.16.3.3 in bytes. K-major, pitch `P` = swizzle span:
//!
//! ```text
//! swizzled:  (row / 8) * SBO + (row % 8) * P  + chunk * 16
//! none:      (row / 8) * SBO + (row % 8) * 16 + chunk * LBO
//! ```
//!
//! MN-major, where a chunk is 16 bytes along M or N and `C = P / 16` chunks make a row of the atom:
//!
//! ```text
//! swizzled:  (chunk / C) * LBO + (chunk % C) * 16 + (k % 8) * P + (k / 8) * SBO
//! none:      chunk * SBO + (k % 8) * 16 + (k / 8) * LBO
//! ```
//!
//! then the swizzle XORs the absolute address.

use super::misuse::{invalid, not_modelled, require};
use crate::trap::Fault;
use dualgemm_ptx::layout::Swizzle;

/// Which dimension of a multiplicand is contiguous in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Major {
    /// K, the untransposed layout.
    K,
    /// M of A or N of B, the transposed layout (8-bit tcgen05 and 16-bit types; 32-bit only on tcgen05 with
    /// 32-byte atoms).
    Mn,
}

/// A decoded matrix descriptor. Sizes in bytes, `start` an address in the CTA's shared window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SmemDesc {
    /// Matrix start address, a multiple of 16 below 256 KiB.
    pub start: u32,
    /// Leading dimension byte offset. Ignored by swizzled K-major layouts.
    pub lbo: u32,
    /// Stride dimension byte offset.
    pub sbo: u32,
    /// Swizzling mode.
    pub swizzle: Swizzle,
}

const WGMMA: &str = "wgmma matrix descriptor";
const TCGEN05: &str = "tcgen05 shared memory descriptor";

impl SmemDesc {
    /// Decodes a wgmma matrix descriptor (PTX ISA 9.7.15.5.1.2.2).
    ///
    /// # Errors
    /// Nonzero reserved bits; a start that is not at the beginning of the swizzle pattern's rows; a nonzero
    /// base offset (not modelled).
    pub fn decode_wgmma(bits: u64) -> Result<SmemDesc, Fault> {
        let reserved = bits & 0x3fff_c000_c000_c000 & !(7 << 49);
        require(reserved == 0, WGMMA, "reserved bits", reserved, "bits 14-15, 30-31, 46-48 and 52-61 are 0")?;
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        SmemDesc::checked(WGMMA, bits, swizzle)
    }

    /// Decodes a tcgen05 shared memory descriptor (PTX ISA 9.7.16.4.1).
    ///
    /// # Errors
    /// Reserved or constant bits with another value; an invalid swizzling mode; a start that is not at the
    /// beginning of the swizzle pattern's rows; a nonzero base offset or the absolute leading dimension of
    /// sm_103a (not modelled).
    pub fn decode_tcgen05(bits: u64) -> Result<SmemDesc, Fault> {
        let reserved = bits & 0x0000_c000_c000;
        require(reserved == 0, TCGEN05, "reserved bits", reserved, "bits 14-15 and 30-31 are 0")?;
        let constant = bits >> 46 & 7;
        require(constant == 1, TCGEN05, "constant in bits 46-48", constant, "it is 0b001")?;
        let zero = bits >> 53 & 0xff;
        require(zero == 0, TCGEN05, "constant in bits 53-60", zero, "it is 0")?;
        if bits >> 52 & 1 != 0 {
            let rule = "a relative leading dimension, bit 52 = 0";
            return Err(not_modelled(TCGEN05, "stride mode", 1, rule));
        }
        let swizzle = match bits >> 61 {
            0 => Swizzle::None,
            1 => Swizzle::B128Atom32,
            2 => Swizzle::B128,
            4 => Swizzle::B64,
            6 => Swizzle::B32,
            found => {
                let rule = "0, 1, 2, 4 and 6 are the modes";
                return Err(invalid(TCGEN05, "swizzling mode", found, rule));
            }
        };
        SmemDesc::checked(TCGEN05, bits, swizzle)
    }

    fn checked(what: &'static str, bits: u64, swizzle: Swizzle) -> Result<SmemDesc, Fault> {
        let field = |at: u32| (bits >> at & 0x3fff) as u32 * 16;
        let desc = SmemDesc { start: field(0), lbo: field(16), sbo: field(32), swizzle };
        let base_offset = bits >> 49 & 7;
        if base_offset != 0 {
            let rule = "matrices whose swizzle pattern starts aligned to its repeat, base offset 0";
            return Err(not_modelled(what, "base offset", base_offset, rule));
        }
        // A start inside the first row is how K advances within an atom; any other row is not a pattern start.
        let phase = desc.start & (swizzle.repeat() - 1) & !(swizzle.span() - 1);
        require(
            phase == 0,
            what,
            "start address",
            desc.start as u64,
            "with base offset 0 the swizzle pattern starts on its 1024 (128B), 512 (64B) or 256 (32B) byte boundary",
        )?;
        Ok(desc)
    }

    /// The address of 16-byte chunk `chunk` along K of row `row` (of M or N) of a K-major matrix. A chunk holds
    /// 128 bits of K: 4 tf32, 8 f16, 16 e4m3 or 32 e2m1.
    #[inline]
    pub const fn k_major(&self, row: u32, chunk: u32) -> u32 {
        let column = match self.swizzle {
            Swizzle::None => chunk * self.lbo,
            _ => chunk * 16,
        };
        let offset = row / 8 * self.sbo + row % 8 * self.swizzle.span() + column;
        self.swizzle.apply(self.start + offset)
    }

    /// The address of 16-byte chunk `chunk` along M or N, at row `k` of K, of an MN-major matrix. With 32-byte
    /// atoms (tcgen05, 32-bit types) the atom is 4 rows of K deep (PTX ISA table 55), else 8.
    #[inline]
    pub const fn mn_major(&self, chunk: u32, k: u32) -> u32 {
        let offset = match self.swizzle {
            Swizzle::None => chunk * self.sbo + k % 8 * 16 + k / 8 * self.lbo,
            swizzle => {
                let per_row = swizzle.span() / 16;
                let depth = if swizzle.atom() == 32 { 4 } else { 8 };
                chunk / per_row * self.lbo
                    + chunk % per_row * 16
                    + k % depth * swizzle.span()
                    + k / depth * self.sbo
            }
        };
        self.swizzle.apply(self.start + offset)
    }
}

/// Whether a tcgen05 multiplicand of `bits`-wide elements may have this majorness and swizzle (PTX ISA
/// 9.7.16.10.3, table 54).
///
/// # Errors
/// An MN-major 4- or 6-bit matrix, or a swizzle mode its element size excludes.
pub fn check_tcgen05_layout(bits: u32, major: Major, swizzle: Swizzle) -> Result<(), Fault> {
    if major == Major::K {
        return Ok(());
    }
    let what = TCGEN05;
    require(
        bits >= 8,
        what,
        "element bits of an MN-major matrix",
        bits as u64,
        "4- and 6-bit types are K-major",
    )?;
    let atom = swizzle.atom() as u64;
    if bits == 32 {
        require(
            atom == 32,
            what,
            "swizzle atom",
            atom,
            "MN-major 32-bit types need 128B swizzling with 32B atoms",
        )
    } else {
        require(atom == 16, what, "swizzle atom", atom, "MN-major 8- and 16-bit types exclude 32B atoms")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn known_constants_decode_exact() {
        let wgmma = SmemDesc::decode_wgmma(0x4000_0040_0001_0000 | 0x2400 >> 4).unwrap();
        assert_eq!(wgmma, SmemDesc { start: 0x2400, lbo: 16, sbo: 1024, swizzle: Swizzle::B128 });
        let tcgen05 = SmemDesc::decode_tcgen05(0x4000_4040_0001_0000).unwrap();
        assert_eq!(tcgen05, SmemDesc { start: 0, ..wgmma });
        let scales = SmemDesc::decode_tcgen05(0x0000_4008_0000_0000).unwrap();
        assert_eq!(scales, SmemDesc { start: 0, lbo: 0, sbo: 128, swizzle: Swizzle::None });
        // The scale source is 512 contiguous bytes, row i at 16 * i.
        assert!((0..32).all(|row| scales.k_major(row, 0) == 16 * row));
    }

    /// The builder's tiles and descriptors, written apart from this decoder, name the same bytes.
    #[test]
    fn descriptors_of_the_builder_mean_the_builders_tiles_exact() {
        use dualgemm_ptx::layout::{SmemTile, Swizzle};
        for swizzle in [Swizzle::B32, Swizzle::B64, Swizzle::B128] {
            for rows in [8, 64, 256] {
                let tile = SmemTile::new(rows, swizzle.span(), swizzle).unwrap();
                let start = 0x2000;
                for step in 0..swizzle.span() / 32 {
                    let at = SmemTile::address_field(start) + tile.advance_k(32 * step);
                    let descs = [
                        SmemDesc::decode_wgmma(tile.wgmma_desc() + at).unwrap(),
                        SmemDesc::decode_tcgen05(tile.tcgen05_desc() + at).unwrap(),
                    ];
                    for desc in descs {
                        for row in 0..rows {
                            for chunk in 0..2 {
                                let byte = 32 * step + 16 * chunk;
                                assert_eq!(desc.k_major(row, chunk), start + tile.offset(row, byte));
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn malformed_descriptors_name_the_field() {
        let good = 0x4000_4040_0001_0000u64;
        let message = |bits| SmemDesc::decode_tcgen05(bits).unwrap_err().message;
        assert_eq!(
            message(good & !(1 << 46)),
            "tcgen05 shared memory descriptor: constant in bits 46-48 is 0x0, but it is 0b001"
        );
        assert!(message(good | 1 << 55).contains("53-60"));
        assert!(message(good | 1 << 61).contains("swizzling mode is 0x3"));
        assert!(message(good | 1 << 52).contains("does not model"));
        assert!(message(good | 2 << 49).contains("base offset 0x2"));
        assert!(message(good | 1 << 15).contains("reserved bits is 0x8000"));
        assert!(message(good | 0x80 >> 4).contains("start address is 0x80"));
        assert!(SmemDesc::decode_tcgen05(good | 0x60 >> 4).is_ok(), "K advance inside the atom");
        for reserved in [14, 30, 46, 52, 61] {
            assert!(SmemDesc::decode_wgmma(1 << reserved).is_err(), "bit {reserved}");
        }
        assert!(SmemDesc::decode_wgmma(1 << 49).is_err());
        assert!(check_tcgen05_layout(4, Major::Mn, Swizzle::B128).is_err());
        assert!(check_tcgen05_layout(16, Major::Mn, Swizzle::B128Atom32).is_err());
        assert!(check_tcgen05_layout(32, Major::Mn, Swizzle::B128).is_err());
        assert!(check_tcgen05_layout(32, Major::Mn, Swizzle::B128Atom32).is_ok());
        assert!(check_tcgen05_layout(4, Major::K, Swizzle::B128Atom32).is_ok());
    }

    /// 64 x 32 tf32, MN-major with 32-byte atoms: 4 rows of K to an atom.
    #[test]
    fn tiles_of_32_byte_atoms_are_bijections() {
        let desc = SmemDesc { start: 0, lbo: 4096, sbo: 512, swizzle: Swizzle::B128Atom32 };
        let all: BTreeSet<u32> =
            (0..16).flat_map(|chunk| (0..32).map(move |k| desc.mn_major(chunk, k))).collect();
        assert_eq!((all.len(), *all.last().unwrap()), (16 * 32, 16 * (16 * 32 - 1)));
    }
}
