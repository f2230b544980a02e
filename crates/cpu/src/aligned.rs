//! Buffers that start on a cache line, so that vector loads of packed data do not straddle two.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};

#[derive(Debug, Clone, Copy, PartialEq, Zeroable, Pod)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A fixed number of `T`, zero at first, aligned to 64 bytes. `T` needs no larger alignment.
#[derive(Debug, PartialEq)]
pub(crate) struct Aligned<T> {
    lines: Vec<Line>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Aligned<T> {
    /// `len` zeros.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self::fill(Vec::with_capacity((len * size_of::<T>()).div_ceil(64)), len)
    }

    /// The same, or `None` if the system refuses so much memory, which would otherwise end the program.
    pub(crate) fn try_zeroed(len: usize) -> Option<Self> {
        let mut lines = Vec::new();
        lines.try_reserve_exact(len.checked_mul(size_of::<T>())?.div_ceil(64)).ok()?;
        Some(Self::fill(lines, len))
    }

    /// `len` zeros in `lines`, which has the capacity.
    fn fill(mut lines: Vec<Line>, len: usize) -> Self {
        advise_huge_pages(&mut lines);
        lines.resize((len * size_of::<T>()).div_ceil(64), Line([0; 64]));
        Self { lines, len, element: PhantomData }
    }
}

/// Asks for pages of 2 MiB before memory is first touched: weights stream through many pages, and each small one
/// costs a table walk (worse under virtualization). This is advice only, and not given for smaller buffers.
#[cfg(all(target_os = "linux", not(miri)))]
fn advise_huge_pages(lines: &mut Vec<Line>) {
    const HUGE: usize = 2 << 20;
    let start = lines.as_mut_ptr().addr();
    let (first, end) = (start.next_multiple_of(HUGE), start + lines.capacity() * 64);
    if first + HUGE <= end {
        let len = (end - first) / HUGE * HUGE;
        let address = lines.as_mut_ptr().wrapping_byte_add(first - start).cast();
        // SAFETY: the range lies inside the allocation, and the advice changes no contents.
        unsafe { libc::madvise(address, len, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise_huge_pages(_: &mut Vec<Line>) {}

impl<T: Pod> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes: &[u8] = bytemuck::cast_slice(&self.lines);
        bytemuck::cast_slice(&bytes[..self.len * size_of::<T>()])
    }
}

impl<T: Pod> Clone for Aligned<T> {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len);
        copy.copy_from_slice(self);
        copy
    }
}

impl<T: Pod> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.lines);
        bytemuck::cast_slice_mut(&mut bytes[..self.len * size_of::<T>()])
    }
}
