//! What a device says about itself.

use std::fmt;

/// A compute capability, such as 9.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// The part before the dot.
    pub major: u32,
    /// The part after the dot.
    pub minor: u32,
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

/// The properties of a device that host programs plan with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Product name.
    pub name: String,
    /// Compute capability.
    pub arch: Arch,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Largest dynamic plus static shared memory of one CTA, bytes (the opt-in limit).
    pub shared_per_cta: u32,
    /// Shared memory of one multiprocessor, bytes.
    pub shared_per_sm: u32,
    /// 32-bit registers of one multiprocessor.
    pub registers_per_sm: u32,
    /// Level-2 cache, bytes.
    pub l2_bytes: u64,
    /// Global memory, bytes.
    pub memory_bytes: u64,
}
