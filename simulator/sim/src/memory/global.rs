//! Global memory: allocations far enough apart that a stray access hits none.
//!
//! CTAs run on several threads, so bytes are kept in atomic words and read and written with relaxed order. A
//! kernel without data races cannot tell; one with races is reported by the race checker.

use super::GLOBAL_BASE;
use crate::trap::{Check, Fault, fault};
use std::alloc::{Layout, alloc_zeroed};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Bytes between allocations at least.
const GUARD: u64 = 1 << 16;

#[derive(Debug)]
pub struct Allocation {
    base: u64,
    len: u64,
    words: Box<[AtomicU32]>,
    name: Option<String>,
}

impl Allocation {
    fn read(&self, offset: u64, out: &mut [u8]) {
        let (mut i, mut done) = (offset as usize / 4, 0);
        let skip = offset as usize % 4;
        if skip != 0 && !out.is_empty() {
            let word = self.words[i].load(Relaxed).to_le_bytes();
            let n = out.len().min(4 - skip);
            out[..n].copy_from_slice(&word[skip..skip + n]);
            (i, done) = (i + 1, n);
        }
        let mut chunks = out[done..].chunks_exact_mut(4);
        for chunk in &mut chunks {
            chunk.copy_from_slice(&self.words[i].load(Relaxed).to_le_bytes());
            i += 1;
        }
        let rest = chunks.into_remainder();
        if !rest.is_empty() {
            let word = self.words[i].load(Relaxed).to_le_bytes();
            rest.copy_from_slice(&word[..rest.len()]);
        }
    }

    /// Replaces bytes of a word without losing what another thread writes to its other bytes.
    fn merge(&self, i: usize, skip: usize, src: &[u8]) {
        let (mut mask, mut value) = ([0u8; 4], [0u8; 4]);
        mask[skip..skip + src.len()].fill(0xff);
        value[skip..skip + src.len()].copy_from_slice(src);
        let (mask, value) = (u32::from_le_bytes(mask), u32::from_le_bytes(value));
        // The closure never refuses, so the result carries nothing to handle.
        let _ = self.words[i].fetch_update(Relaxed, Relaxed, |old| Some(old & !mask | value));
    }

    fn write(&self, offset: u64, src: &[u8]) {
        let (mut i, mut done) = (offset as usize / 4, 0);
        let skip = offset as usize % 4;
        if skip != 0 && !src.is_empty() {
            let n = src.len().min(4 - skip);
            self.merge(i, skip, &src[..n]);
            (i, done) = (i + 1, n);
        }
        let mut chunks = src[done..].chunks_exact(4);
        for chunk in &mut chunks {
            let word = [chunk[0], chunk[1], chunk[2], chunk[3]];
            self.words[i].store(u32::from_le_bytes(word), Relaxed);
            i += 1;
        }
        if !chunks.remainder().is_empty() {
            self.merge(i, 0, chunks.remainder());
        }
    }

    fn describe(&self) -> String {
        match &self.name {
            Some(name) => format!("variable `{name}` of {} bytes at {:#x}", self.len, self.base),
            None => format!("allocation of {} bytes at {:#x}", self.len, self.base),
        }
    }
}

/// All of global memory.
#[derive(Debug)]
pub struct Global {
    /// Sorted by base; addresses are never reused, so that a stale pointer is always noticed.
    live: Vec<Allocation>,
    freed: Vec<(u64, u64)>,
    next: u64,
    used: u64,
    capacity: u64,
}

impl Global {
    /// Empty memory of `capacity` bytes.
    pub fn new(capacity: u64) -> Global {
        Global { live: Vec::new(), freed: Vec::new(), next: GLOBAL_BASE, used: 0, capacity }
    }

    /// Bytes not allocated.
    pub fn available(&self) -> u64 {
        self.capacity - self.used
    }

    /// Reserves `bytes` aligned to `align` (at least 256); `None` if they do not fit.
    pub fn alloc(&mut self, bytes: u64, align: u64, name: Option<String>) -> Option<u64> {
        if bytes > self.available() {
            return None;
        }
        let base = self.next.next_multiple_of(align.max(256));
        // Zeros that the host has ready: a large allocation costs what is touched of it.
        let layout = Layout::array::<AtomicU32>(bytes.div_ceil(4).max(1) as usize).ok()?;
        let count = layout.size() / size_of::<AtomicU32>();
        // SAFETY: the layout is of one number or more.
        let zeros = NonNull::new(unsafe { alloc_zeroed(layout) })?.cast();
        // SAFETY: these are `count` numbers, all zero, from the allocator that a box gives its memory back to.
        let words = unsafe { Box::from_raw(NonNull::slice_from_raw_parts(zeros, count).as_ptr()) };
        self.live.push(Allocation { base, len: bytes, words, name });
        self.next = base + bytes + GUARD;
        self.used += bytes;
        Some(base)
    }

    /// Releases the allocation that starts at `base`; `false` if none does.
    pub fn free(&mut self, base: u64) -> bool {
        let Ok(i) = self.live.binary_search_by_key(&base, |a| a.base) else { return false };
        let gone = self.live.remove(i);
        self.used -= gone.len;
        self.freed.push((gone.base, gone.len));
        true
    }

    /// The allocation that holds all of `bytes` bytes at `address`, or the reason why none does.
    #[inline]
    pub fn find(&self, address: u64, bytes: u64) -> Result<&Allocation, String> {
        let i = self.live.partition_point(|a| a.base <= address);
        if let Some(a) = i.checked_sub(1).map(|i| &self.live[i])
            && address - a.base + bytes <= a.len
        {
            return Ok(a);
        }
        Err(self.explain(address, bytes, i))
    }

    fn explain(&self, address: u64, bytes: u64, i: usize) -> String {
        if address < WINDOW_LOW {
            return "this is close to address 0: a null pointer, or an address of another state space".into();
        }
        if let Some((base, len)) = self.freed.iter().find(|(b, l)| (*b..b + l.max(&1)).contains(&address)) {
            return format!("this is inside an allocation of {len} bytes at {base:#x} that was freed");
        }
        let before = i.checked_sub(1).map(|i| &self.live[i]);
        match (before, self.live.get(i)) {
            (Some(a), _) if address - a.base < a.len + GUARD => {
                let over = address + bytes - (a.base + a.len);
                format!("this ends {over} bytes past the end of the {}", a.describe())
            }
            (_, Some(a)) if a.base - address <= GUARD => {
                format!("this starts {} bytes before the {}", a.base - address, a.describe())
            }
            _ => "this is not near any allocation".into(),
        }
    }

    /// Reads bytes.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Fault> {
        let a =
            self.find(address, out.len() as u64).map_err(|why| bounds(address, out.len(), "read", why))?;
        a.read(address - a.base, out);
        Ok(())
    }

    /// Writes bytes.
    pub fn write(&self, address: u64, src: &[u8]) -> Result<(), Fault> {
        let a =
            self.find(address, src.len() as u64).map_err(|why| bounds(address, src.len(), "write", why))?;
        a.write(address - a.base, src);
        Ok(())
    }
}

/// Addresses below this cannot be an offset from any real pointer.
const WINDOW_LOW: u64 = 1 << 20;

fn bounds(address: u64, bytes: usize, verb: &str, why: String) -> Fault {
    fault!(Check::Bounds, "{verb} of {bytes} bytes of global memory: {why}")
        .at(format_args!("global {address:#x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_at_every_alignment_exact() {
        let mut g = Global::new(1 << 20);
        let base = g.alloc(64, 1, None).unwrap();
        for start in 0..8u64 {
            for len in 0..12usize {
                let src: Vec<u8> = (0..len as u8).map(|i| i + 1).collect();
                g.write(base, &[0xee; 24]).unwrap();
                g.write(base + start, &src).unwrap();
                let mut all = [0u8; 24];
                g.read(base, &mut all).unwrap();
                let s = start as usize;
                assert!(all[..s].iter().chain(&all[s + len..]).all(|&b| b == 0xee));
                assert_eq!(&all[s..s + len], &src[..]);
                let mut some = vec![0; len];
                g.read(base + start, &mut some).unwrap();
                assert_eq!(some, src);
            }
        }
    }

    #[test]
    fn stray_addresses_are_explained_exact() {
        let mut g = Global::new(1 << 20);
        let a = g.alloc(100, 1, None).unwrap();
        let b = g.alloc(8, 1, Some("table".into())).unwrap();
        let why = |at, n: usize| g.read(at, &mut vec![0; n]).unwrap_err().message;
        assert_eq!(
            why(a + 96, 8),
            format!(
                "read of 8 bytes of global memory: this ends 4 bytes past the end of the allocation of 100 bytes at {a:#x}"
            )
        );
        assert!(
            why(b - 4, 4)
                .ends_with(&format!("starts 4 bytes before the variable `table` of 8 bytes at {b:#x}"))
        );
        assert!(why(8, 4).contains("close to address 0"));
        assert!(g.free(a) && !g.free(a));
        let why = g.read(a, &mut [0]).unwrap_err().message;
        assert!(why.contains("was freed"), "{why}");
    }

    #[test]
    fn capacity_is_a_limit_exact() {
        let mut g = Global::new(1000);
        assert!(g.alloc(1001, 1, None).is_none());
        let a = g.alloc(1000, 1, None).unwrap();
        assert!(g.alloc(1, 1, None).is_none());
        assert!(g.free(a));
        assert!(g.alloc(1, 1, None).is_some());
    }
}
