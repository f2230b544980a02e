//! Buffers that start on a cache line, so that vector loads of packed data do not straddle two.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};

#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: 64 bytes without padding, of which every pattern, zero included, is valid.
unsafe impl Zeroable for Line {}
// SAFETY: as above; it is `Copy`, `repr(C)`, and holds no pointer.
unsafe impl Pod for Line {}

/// A fixed number of `T`, zero at first, aligned to 64 bytes. `T` is aligned to at most that.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Aligned<T> {
    lines: Vec<Line>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Aligned<T> {
    /// `len` zeros.
    pub(crate) fn zeroed(len: usize) -> Self {
        let lines = vec![Line([0; 64]); (len * size_of::<T>()).div_ceil(64)];
        Self { lines, len, element: PhantomData }
    }
}

impl<T: Pod> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes: &[u8] = bytemuck::cast_slice(&self.lines);
        bytemuck::cast_slice(&bytes[..self.len * size_of::<T>()])
    }
}

impl<T: Pod> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.lines);
        bytemuck::cast_slice_mut(&mut bytes[..self.len * size_of::<T>()])
    }
}
