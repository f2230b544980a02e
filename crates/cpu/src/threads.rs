//! Work shared among threads: numbered items, which free threads claim in order, one by one or in runs.
//!
//! An item's result depends on the item alone, so the number of threads and their timing do not change results. Nothing here
//! allocates.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

use crate::fetch::prefetch;
use crate::team;

/// What lies on cache lines of its own. Processors fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub(crate) T);

/// Turns of a waiting loop before it gives its processor to the threads that it waits for: there may be more threads than processors.
const TURNS: u32 = 1 << 14;

/// Waits for something that other threads are about to do.
pub(crate) fn wait_until(done: impl Fn() -> bool) {
    let mut turns = 0;
    while !done() {
        if turns < TURNS {
            turns += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

/// Calls `body` once for each of `0..items`, on up to `threads` threads of the current [team](crate::Team) or rayon pool.
///
/// Every participant gets its own worker number below `threads`, and keeps the state that `state(worker)` returns.
pub(crate) fn for_each<S>(
    threads: usize,
    items: usize,
    state: impl Fn(usize) -> S + Sync,
    body: impl Fn(&mut S, usize) + Sync,
) {
    for_each_run(threads, items, |_, _| 1, state, |state, run| body(state, run.start));
}

/// The same for runs of items, which cover `0..items`. `len(first, left)` is the length, at least 1, of a run that starts at item
/// `first`, when `left` items are left for each thread.
pub(crate) fn for_each_run<S>(
    threads: usize,
    items: usize,
    len: impl Fn(usize, usize) -> usize + Sync,
    state: impl Fn(usize) -> S + Sync,
    body: impl Fn(&mut S, Range<usize>) + Sync,
) {
    let (next, workers) = (Apart(AtomicUsize::new(0)), threads.min(items).max(1));
    let claim = || {
        let end =
            |first: usize| (first < items).then(|| items.min(first + len(first, (items - first) / workers)));
        let first = next.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end).ok()?;
        end(first).map(|end| first..end)
    };
    let work = |worker| {
        let mut state = state(worker);
        while let Some(items) = claim() {
            body(&mut state, items);
        }
    };
    match workers {
        1 => work(0),
        workers if team::run(workers, &work) => {}
        workers => (0..workers).into_par_iter().with_max_len(1).for_each(work),
    }
}

/// Calls `body` with the number of each part of `len` elements, and with the part, which may be shorter at the end.
pub(crate) fn for_each_part<T: Send>(
    threads: usize,
    slice: &mut [T],
    len: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    let (all, parts) = (slice.len(), SharedSlice::new(slice));
    let run = |_, left: usize| (left / 2).clamp(1, 16);
    for_each_run(
        threads,
        all.div_ceil(len),
        run,
        |_| (),
        |(), run| {
            for part in run {
                let start = part * len;
                // SAFETY: `for_each_run` hands out each part once, and parts do not overlap.
                body(part, unsafe { parts.part(start, len.min(all - start)) });
            }
        },
    );
}

/// A mutable slice whose disjoint parts threads write.
#[derive(Debug)]
pub(crate) struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `part`, whose contract makes parts in use disjoint. So sharing this sends disjoint `&mut [T]`
// to threads.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}
// SAFETY: it stands for the `&mut [T]` it was made from, which may be sent.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Takes over the slice for as long as it is borrowed.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Fetches the lines of `len` elements from `start` on.
    pub(crate) fn fetch(&self, start: usize, len: usize) {
        let lines = (0..len).step_by(64 / size_of::<T>());
        lines.for_each(|at| prefetch(self.start.wrapping_add(start + at).cast()));
    }

    /// All of it, to be read.
    ///
    /// # Safety
    /// No part may be in use, and none may be taken any more.
    pub(crate) unsafe fn all(&self) -> &'a [T] {
        // SAFETY: the slice is borrowed for `'a`, and this function's contract excludes that anybody writes it.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// `len` elements from `start`.
    ///
    /// # Safety
    /// No other part that is in use may overlap this one.
    ///
    /// # Panics
    /// If the part exceeds the slice.
    #[inline]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part {start}+{len} of {}", self.len);
        // SAFETY: the assertion keeps the part inside the slice, which is borrowed for `'a`, and this function's contract
        // excludes aliasing.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_whatever_the_thread_count() {
        for threads in [1, 2, 3, 8] {
            for items in [0, 1, 2, 7, 1000] {
                let mut counts = vec![0u32; items];
                let shared = SharedSlice::new(&mut counts);
                let count = |(): &mut (), item| {
                    // SAFETY: each item is claimed once, so parts do not overlap.
                    let count = unsafe { shared.part(item, 1) };
                    count[0] += 1;
                };
                for_each(threads, items, |_| (), count);
                assert!(counts.iter().all(|&count| count == 1), "{threads} threads, {items} items");
            }
        }
    }

    #[test]
    fn runs_cover_every_item_once() {
        for threads in [1, 3, 8] {
            let counts: Vec<_> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
            // Runs end at multiples of 7, and get shorter towards the end.
            let len = |first: usize, left: usize| (left / 2).clamp(1, 7 - first % 7);
            for_each_run(
                threads,
                counts.len(),
                len,
                |_| (),
                |(), run| {
                    assert!(run.start / 7 == (run.end - 1) / 7, "{run:?}");
                    run.for_each(|item| _ = counts[item].fetch_add(1, Ordering::Relaxed));
                },
            );
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads} threads");
        }
    }

    #[test]
    fn worker_numbers_are_below_the_thread_count_and_unique() {
        let seen: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
        for_each(3, 100, |worker| seen[worker].fetch_add(1, Ordering::Relaxed), |_, _| ());
        assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) <= 1));
    }

    #[test]
    #[should_panic(expected = "part 2+3 of 4")]
    fn a_part_beyond_the_slice_is_refused() {
        let mut data = [0; 4];
        // SAFETY: the only part.
        unsafe { SharedSlice::new(&mut data).part(2, 3) };
    }
}
