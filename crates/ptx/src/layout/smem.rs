//! The shared memory of a kernel, declared once: the planner asks its size, the kernel its offsets.

use std::fmt;

/// A named piece of shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SmemRegion {
    /// Bytes from the start of the kernel's shared memory.
    pub offset: u32,
    /// Size in bytes of one of its parts.
    pub stride: u32,
    /// How many equal parts it has, e.g. pipeline stages.
    pub count: u32,
}

impl SmemRegion {
    /// Offset of part `i`.
    pub const fn part(&self, i: u32) -> u32 {
        self.offset + i * self.stride
    }

    /// Size in bytes of all parts.
    pub const fn bytes(&self) -> u32 {
        self.stride * self.count
    }
}

/// Regions one after another, each aligned as asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SmemLayout {
    regions: Vec<(String, SmemRegion)>,
    bytes: u32,
    alignment: u32,
}

impl SmemLayout {
    /// Nothing yet.
    pub fn new() -> SmemLayout {
        SmemLayout { regions: Vec::new(), bytes: 0, alignment: 16 }
    }

    /// Adds `bytes` bytes on a multiple of `align` (a power of two).
    pub fn alloc(&mut self, name: &str, bytes: u32, align: u32) -> SmemRegion {
        self.alloc_parts(name, bytes, 1, align)
    }

    /// Adds `count` parts of `bytes` bytes, each on a multiple of `align` (a power of two).
    pub fn alloc_parts(&mut self, name: &str, bytes: u32, count: u32, align: u32) -> SmemRegion {
        let align = align.next_power_of_two();
        let region = SmemRegion {
            offset: self.bytes.next_multiple_of(align),
            stride: if count > 1 { bytes.next_multiple_of(align) } else { bytes },
            count,
        };
        self.bytes = region.offset.saturating_add(region.stride.saturating_mul(count));
        self.alignment = self.alignment.max(align);
        self.regions.push((name.to_string(), region));
        region
    }

    /// Adds `count` mbarriers of 8 bytes.
    pub fn mbarriers(&mut self, name: &str, count: u32) -> SmemRegion {
        self.alloc_parts(name, 8, count, 8)
    }

    /// Total size in bytes: what the launch must provide.
    pub const fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Alignment of the start, in bytes.
    pub const fn alignment(&self) -> u32 {
        self.alignment
    }

    /// Every region with its name, in order of offset.
    pub fn regions(&self) -> impl Iterator<Item = (&str, SmemRegion)> {
        self.regions.iter().map(|(name, region)| (name.as_str(), *region))
    }
}

impl fmt::Display for SmemLayout {
    /// One line per region: offset, size, name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "shared memory: {} bytes, aligned to {}", self.bytes, self.alignment)?;
        for (name, region) in self.regions() {
            let (offset, stride, count) = (region.offset, region.stride, region.count);
            match count {
                1 => writeln!(f, "{offset:7} {name}: {stride} bytes")?,
                _ => writeln!(f, "{offset:7} {name}: {count} x {stride} bytes")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_and_do_not_overlap_exact() {
        let mut layout = SmemLayout::new();
        let small = layout.alloc("small", 10, 4);
        let tiles = layout.alloc_parts("tiles", 1000, 3, 1024);
        let barriers = layout.mbarriers("full", 3);
        assert_eq!((small.offset, small.bytes()), (0, 10));
        assert_eq!((tiles.offset, tiles.part(2), tiles.stride), (1024, 3072, 1024));
        assert_eq!((barriers.offset, barriers.part(1)), (4096, 4104));
        assert_eq!((layout.bytes(), layout.alignment()), (4120, 1024));
        assert_eq!(
            layout.to_string(),
            "shared memory: 4120 bytes, aligned to 1024\n      0 small: 10 bytes\n   1024 tiles: 3 x 1024 bytes\n   \
             4096 full: 3 x 8 bytes\n"
        );
    }
}
