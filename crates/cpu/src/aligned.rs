//! Buffers that start on a cache line, so that vector loads of packed data do not straddle two.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;

/// Bytes of a cache line.
const LINE: usize = 64;

/// A fixed number of `T`, zero at first, aligned to 64 bytes; on pages of 2 MiB where the system has them. `T` needs no larger alignment
/// than 16.
#[derive(Debug)]
pub struct Aligned<T> {
    /// What the elements are in, and up to a line more.
    words: Vec<u128>,
    /// Words before the first element.
    start: usize,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Aligned<T> {
    /// `len` zeros.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self::fill(Vec::with_capacity(words(len * size_of::<T>())), len)
    }

    /// The same, or `None` if the system refuses so much memory, which would otherwise end the program.
    pub fn try_zeroed(len: usize) -> Option<Self> {
        let mut room = Vec::new();
        room.try_reserve_exact(words(len.checked_mul(size_of::<T>())?)).ok()?;
        Some(Self::fill(room, len))
    }

    /// `len` zeros in `room`, which has the capacity.
    fn fill(mut room: Vec<u128>, len: usize) -> Self {
        advise_huge_pages(&mut room);
        room.resize(words(len * size_of::<T>()), 0);
        Self::new(room, len)
    }

    /// The same in memory that nothing has touched yet: the system places each page on the node of the thread that first writes it.
    pub(crate) fn untouched(len: usize) -> Self {
        let mut room = vec![0; words(len * size_of::<T>())];
        advise_huge_pages(&mut room);
        Self::new(room, len)
    }

    fn new(words: Vec<u128>, len: usize) -> Self {
        let start = words.as_ptr().addr().wrapping_neg() % LINE / size_of::<u128>();
        Self { words, start, len, element: PhantomData }
    }
}

/// Words that hold so many bytes from a line on.
fn words(bytes: usize) -> usize {
    bytes.saturating_add(LINE).div_ceil(size_of::<u128>())
}

/// Asks for pages of 2 MiB before memory is first touched: weights stream through many pages, and each small one
/// costs a table walk (worse under virtualization). This is advice only, and not given for smaller buffers.
#[cfg(all(target_os = "linux", not(miri)))]
fn advise_huge_pages(words: &mut Vec<u128>) {
    const HUGE: usize = 2 << 20;
    let start = words.as_mut_ptr().addr();
    let (first, end) = (start.next_multiple_of(HUGE), start + words.capacity() * size_of::<u128>());
    if first + HUGE <= end {
        let len = (end - first) / HUGE * HUGE;
        let address = words.as_mut_ptr().wrapping_byte_add(first - start).cast();
        // SAFETY: the range lies inside the allocation, and the advice changes no contents.
        unsafe { libc::madvise(address, len, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise_huge_pages(_: &mut Vec<u128>) {}

impl<T: Pod> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words[self.start..]);
        bytemuck::cast_slice(&bytes[..self.len * size_of::<T>()])
    }
}

impl<T: Pod> FromIterator<T> for Aligned<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let values: Vec<T> = values.into_iter().collect();
        let mut new = Self::zeroed(values.len());
        new.copy_from_slice(&values);
        new
    }
}

impl<T: Pod> Clone for Aligned<T> {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len);
        copy.copy_from_slice(self);
        copy
    }
}

impl<T: Pod + PartialEq> PartialEq for Aligned<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Pod> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words[self.start..]);
        bytemuck::cast_slice_mut(&mut bytes[..self.len * size_of::<T>()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zero_and_start_on_a_line() {
        for len in [0, 1, 63, 64, 65, 1000, 5 << 20] {
            for buffer in
                [Aligned::<u8>::zeroed(len), Aligned::try_zeroed(len).unwrap(), Aligned::untouched(len)]
            {
                assert_eq!((buffer.len(), buffer.as_ptr().addr() % LINE), (len, 0));
                assert!(buffer.iter().all(|&byte| byte == 0));
                let mut copy = buffer.clone();
                assert!(copy == buffer && copy.as_ptr().addr() % LINE == 0);
                copy.last_mut().into_iter().for_each(|last| *last = 1);
                assert_eq!(copy == buffer, len == 0);
            }
        }
        assert!(Aligned::<u64>::try_zeroed(usize::MAX).is_none());
        assert!(Aligned::<u8>::try_zeroed(usize::MAX).is_none());
    }
}
