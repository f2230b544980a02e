//! Fetching weights into the first-level cache before they are used.

use crate::pack::CHUNK;

/// How many bytes ahead of their use weights are fetched, over all panels that are read at once. On Zen 3, one row from DRAM
/// takes 60 % longer without fetching, and 6 % longer if each of four panels is fetched 8 chunks ahead: a core cannot wait for so
/// many lines.
pub(crate) const AHEAD: usize = 8 * CHUNK;

/// The same on processors with AVX-512, which can wait for more lines. Compared with [`AHEAD`], W4A4 from the last-level cache
/// takes 26 % less time with one row and 38 % less with two on Zen 5; one row from DRAM takes 5 to 15 % less on Sapphire Rapids. 32
/// and 64 chunks take up to 7 % longer.
#[cfg(target_arch = "x86_64")]
pub(crate) const AHEAD_AVX512: usize = 48 * CHUNK;

/// What a loop over panels of one row fetches.
pub(crate) struct Ahead {
    bytes: usize,
    /// Bytes of a panel.
    len: usize,
    /// From a panel to what follows its end in the loop, less `len`.
    jump: usize,
}

impl Ahead {
    /// `bytes` ahead of their use, of `panels` panels of `len` bytes that are read at once, the first of `left` that a thread reads one
    /// after the other. Behind their ends are those that are read next in their places. Behind the last there is nothing to
    /// fetch: the next panels may be another thread's. With this, one row of bf16 on 16 threads of an Emerald Rapids takes 6 %
    /// less.
    #[inline(always)]
    pub(crate) fn new(bytes: usize, len: usize, panels: usize, left: usize) -> Self {
        let jump = match (left > panels, panels) {
            (true, _) => (panels - 1) * len,
            (false, 1) => 0usize.wrapping_sub(bytes),
            // The start of the neighbour, which is in a cache already, or the next panel of a thread alone.
            (false, _) => 0,
        };
        Self { bytes, len, jump }
    }

    /// Fetches for the chunk that is at byte `at` of its panel.
    #[inline(always)]
    pub(crate) fn fetch(&self, chunk: *const u8, at: usize) {
        let jump = if at + self.bytes < self.len { 0 } else { self.jump };
        fetch(chunk.wrapping_add(self.bytes).wrapping_add(jump));
    }
}

/// Prefetches the lines of a chunk. `chunk` may be any address, since prefetching never faults.
#[inline(always)]
pub(crate) fn fetch(chunk: *const u8) {
    for line in 0..CHUNK.div_ceil(64) {
        prefetch(chunk.wrapping_add(64 * line));
    }
}

/// Prefetches the line of an address, which may be any.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn prefetch(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: every x86-64 processor has the instruction, and it takes any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub(crate) fn prefetch(address: *const u8) {
    // SAFETY: the instruction takes any address and changes nothing but caches.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline(always)]
pub(crate) fn prefetch(_address: *const u8) {}
