//! The loop around every kernel: which thread multiplies which rows and panels, and when.
//!
//! Tiles are the outer loop and panels the inner one, so that a tile's activations stay in the second-level cache while all
//! weights stream past. A tile and some consecutive panels are one item of work; each output belongs to exactly one item. Items get
//! smaller towards the end, so that threads end together.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::Isa;
use crate::aligned::Aligned;
use crate::pack::{PackedGateUp, panel_columns};
use crate::threads::{self, Apart, wait_until};
use crate::tile::{MAX_TILE_ROWS, Prepare, RowTile, TILE_COLS, Tile, TileKernel, TileSink};
use crate::w4a16::tiles::WHOLE_K;
use crate::workspace::Group;

/// Most panels in an item: a long stretch of memory to stream.
const MAX_PANELS: usize = 8;

/// Most rows of sums in an item, over all its panels: 64 KiB, which leaves room in the second-level cache.
const MAX_SUM_ROWS: usize = 512;
const _: () = assert!(MAX_TILE_ROWS <= MAX_SUM_ROWS);

/// The same for tiles of AMX, which take a panel of 256 rows in less time than its activations take from the last-level cache: they
/// are read once for eight panels. 256 KiB, in a second-level cache of 2 MiB that two threads share.
const MAX_SUM_ROWS_AMX: usize = 2048;

/// Rows whose places in C are fetched before the first sums.
const FETCHED_ROWS: usize = 64;

/// Rows of a tile that a thread multiplies with a panel.
fn rows_of_part(threads: usize) -> usize {
    match threads {
        1 => MAX_TILE_ROWS,
        2..8 => 256,
        _ => 128,
    }
}

/// Room for the sums of one worker's item.
pub(crate) type TileSums = Mutex<Aligned<f32>>;

/// Sums for each of `workers` workers.
pub(crate) fn tile_sums(isa: Isa, workers: usize) -> Vec<TileSums> {
    let rows = if isa == Isa::AmxBf16 { MAX_SUM_ROWS_AMX } else { MAX_SUM_ROWS };
    (0..workers).map(|_| Mutex::new(Aligned::zeroed(rows * TILE_COLS))).collect()
}

/// Replaces `tiles` by the tiles of row ranges, one range per group. Tiles of a group differ by at most one row and have at most
/// `most` rows. Groups without rows have no tiles.
pub(crate) fn cut(groups: impl Iterator<Item = Range<usize>>, most: usize, tiles: &mut Vec<RowTile>) {
    tiles.clear();
    for (group, rows) in groups.enumerate() {
        let count = rows.len().div_ceil(most);
        for tile in 0..count {
            let [start, end] = [tile, tile + 1].map(|i| rows.start + rows.len() * i / count);
            tiles.push(RowTile { group, first_row: start, rows: end - start });
        }
    }
}

/// Splits tiles into runs of tiles that span up to `most` rows.
pub(crate) fn waves(mut tiles: &[RowTile], most: usize) -> impl Iterator<Item = &[RowTile]> {
    std::iter::from_fn(move || {
        let first_row = tiles.first()?.first_row;
        let count = tiles.partition_point(|tile| tile.first_row + tile.rows <= first_row + most);
        let (wave, rest) = tiles.split_at(count);
        tiles = rest;
        Some(wave)
    })
}

/// The length of the next run, with `left` panels for each thread. One row takes fours and then twos, since so many panels are read at
/// once.
fn run_len(rows: usize, left: usize) -> usize {
    match (rows, left) {
        (1, 4..) => (3 * left / 16 * 4).clamp(4, MAX_PANELS),
        (1, 2..) => 2,
        _ => (3 * left / 4).clamp(1, MAX_PANELS),
    }
}

/// Rows of A that all threads prepare, each as soon as it comes, and the kernel that multiplies them.
struct Preparing<P: Prepare> {
    rows: P,
    /// The next part, and the number of those that are written.
    next: Apart<AtomicUsize>,
    written: Apart<AtomicUsize>,
    /// `None` if writing a part has panicked.
    kernel: Apart<OnceLock<Option<P::Kernel>>>,
}

impl<P: Prepare> Preparing<P> {
    fn new(rows: P) -> Self {
        Self { rows, next: Apart::default(), written: Apart::default(), kernel: Apart::default() }
    }

    /// Writes parts while there are any, and waits for those of other threads.
    fn kernel(&self) -> Option<&P::Kernel> {
        struct Panics<'a, K>(&'a OnceLock<Option<K>>);
        impl<K> Drop for Panics<'_, K> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    _ = self.0.set(None);
                }
            }
        }
        let (kernel, parts) = (&self.kernel.0, self.rows.parts());
        let panics = Panics(kernel);
        let next = || Some(self.next.0.fetch_add(1, Ordering::Relaxed)).filter(|&part| part < parts);
        while let Some(part) = next() {
            // SAFETY: each part comes once.
            unsafe { self.rows.write(part) };
            if self.written.0.fetch_add(1, Ordering::AcqRel) + 1 == parts {
                // SAFETY: all are written, and this is the last.
                _ = kernel.set(Some(unsafe { self.rows.bind() }));
            }
        }
        drop(panics);
        wait_until(|| kernel.get().is_some());
        kernel.get()?.as_ref()
    }
}

/// Weights of each group, and what becomes of their products.
pub(crate) struct Job<'a, S> {
    pub(crate) groups: &'a [Group<'a>],
    pub(crate) sink: S,
}

impl<S> Job<'_, S> {
    fn weights(&self, group: usize) -> &PackedGateUp {
        self.groups[group].weights
    }
}

/// Prepares the rows of A, multiplies every tile with every panel of its group's weights, those of the first job and then of others,
/// and hands the sums to the sinks. All of it is one call of the threads: on 16 threads of an Emerald Rapids a call takes 3 to 9 µs,
/// and one token 120.
pub(crate) fn run<S: TileSink>(
    sums: &[TileSums],
    tiles: &[RowTile],
    jobs: &[Job<'_, S>],
    rows_of_a: impl Prepare,
) {
    let Some(first) = tiles.first() else { return };
    let k = jobs[0].weights(first.group).k();
    let of_job = |job: &Job<'_, S>| job.weights(first.group).panels();
    let panels: usize = jobs.iter().map(of_job).sum();
    // The job of a panel, and the panel before its first one.
    let find = |panel: usize| {
        let mut before = 0;
        for job in jobs {
            if panel < before + of_job(job) {
                return (job, before);
            }
            before += of_job(job);
        }
        unreachable!("panel {panel} of {panels}")
    };
    let rows = tiles.iter().fold(1, |most, tile| most.max(tile.rows));
    let room = sums.first().map_or(0, |sums| lock(sums).len() / TILE_COLS);
    let most = room / rows;
    let preparing = Preparing::new(rows_of_a);
    let of_part = if k <= WHOLE_K { rows_of_part(sums.len()) } else { rows };
    let parts = rows.div_ceil(of_part);
    threads::for_each_run(
        sums.len(),
        tiles.len() * parts * panels,
        |first, left| {
            let (job, before) = find(first % panels);
            run_len(rows, left).min(most).min(before + of_job(job) - first % panels)
        },
        // Each worker has its own number, so the lock is free.
        |worker| (preparing.kernel(), lock(&sums[worker])),
        |(kernel, sums), items| {
            let Some(kernel) = kernel else { return };
            let (tile, part) = (tiles[items.start / panels / parts], items.start / panels % parts);
            let of_bf16 = kernel.bf16(&tile).is_some();
            let part = match of_bf16 {
                true => part * of_part..tile.rows.min((part + 1) * of_part),
                false if part == 0 => 0..tile.rows,
                false => return,
            };
            if part.is_empty() {
                return;
            }
            let (job, before) = find(items.start % panels);
            let (weights, sink) = (job.weights(tile.group), &job.sink);
            let first = items.start % panels - before;
            let panels = first..first + items.len();
            let (unit, n, columns) = (kernel.sum_unit(weights), weights.n(), panel_columns(weights.op()));
            let place = |panel: usize| (panel * columns, columns.min(n - panel * columns));
            let rows_of = |rows: &Range<usize>| RowTile {
                first_row: tile.first_row + rows.start,
                rows: rows.len(),
                ..tile
            };
            let fetch = |panel, rows: Range<usize>| {
                if panel < panels.end {
                    sink.fetch(&rows_of(&rows), place(panel).0, place(panel).1);
                }
            };
            fetch(panels.start, part.start..part.end.min(part.start + FETCHED_ROWS));
            kernel.multiply(&tile, part.clone(), weights, panels.clone(), sums, |panel, rows, sums| {
                match rows.end < part.end {
                    true => fetch(panel, rows.end..part.end.min(rows.end + rows.len())),
                    false => fetch(panel + 1, part.start..part.end.min(part.start + rows.len())),
                }
                let (first_col, cols) = place(panel);
                sink.store(&mut Tile { rows: rows_of(&rows), first_col, cols, unit, of_bf16, sums });
            });
        },
    );
}

/// Sums that a panic left behind are overwritten.
fn lock(sums: &TileSums) -> MutexGuard<'_, Aligned<f32>> {
    sums.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::w4a16::tiles::Bf16Tile;

    #[test]
    fn tiles_cover_every_row_once_and_are_even() {
        for (most, groups) in
            [(32, vec![0..33, 33..33, 40..41, 41..200]), (1, vec![0..5, 5..5]), (64, vec![0..64, 64..65])]
        {
            let mut tiles = vec![RowTile { group: 9, first_row: 9, rows: 9 }];
            cut(groups.iter().cloned(), most, &mut tiles);
            let rows = |group: usize| tiles.iter().filter(move |tile| tile.group == group);
            for (group, range) in groups.iter().enumerate() {
                let covered: Vec<usize> =
                    rows(group).flat_map(|t| t.first_row..t.first_row + t.rows).collect();
                assert_eq!(covered, range.clone().collect::<Vec<_>>());
                let sizes = rows(group).map(|t| t.rows);
                assert!(sizes.clone().all(|s| s <= most));
                assert!(sizes.clone().max().unwrap_or(0) - sizes.min().unwrap_or(0) <= 1);
            }
        }
    }

    #[test]
    fn runs_of_one_row_are_read_in_fours_and_twos() {
        let lengths = |rows| [0, 1, 2, 3, 4, 7, 8, 11, 16].map(|left| run_len(rows, left));
        assert_eq!(lengths(1), [1, 1, 2, 2, 4, 4, 4, 8, 8]);
        assert_eq!(lengths(2), [1, 1, 1, 2, 3, 5, 6, 8, 8]);
    }

    /// Parts that count how often they are written; one may panic.
    struct Parts {
        written: [AtomicUsize; 20],
        bad: usize,
    }

    struct Nothing;

    impl TileKernel for Nothing {
        fn bf16(&self, _: &RowTile) -> Option<Bf16Tile<'_>> {
            None
        }

        fn multiply_whole(&self, _: &RowTile, _: &PackedGateUp, _: Range<usize>, _: &mut [f32]) {}

        fn sum_unit(&self, _: &PackedGateUp) -> f32 {
            1.0
        }
    }

    impl Prepare for &Parts {
        type Kernel = Nothing;

        fn parts(&self) -> usize {
            self.written.len()
        }

        unsafe fn write(&self, part: usize) {
            assert!(part != self.bad, "part {part}");
            self.written[part].fetch_add(1, Ordering::Relaxed);
        }

        unsafe fn bind(&self) -> Nothing {
            assert!(self.written.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            Nothing
        }
    }

    #[test]
    fn rows_are_prepared_once_before_any_thread_multiplies() {
        for threads in [1, 3] {
            for bad in [usize::MAX, 0, 19] {
                let parts = Parts { written: Default::default(), bad };
                let preparing = Preparing::new(&parts);
                let kernels = std::thread::scope(|scope| {
                    let all: Vec<_> =
                        (0..threads).map(|_| scope.spawn(|| preparing.kernel().is_some())).collect();
                    all.into_iter().map(|thread| thread.join().ok()).collect::<Vec<_>>()
                });
                let panics = kernels.iter().filter(|kernel| kernel.is_none()).count();
                assert_eq!(panics, usize::from(bad != usize::MAX), "{kernels:?}");
                assert!(kernels.iter().flatten().all(|&kernel| kernel == (panics == 0)), "{kernels:?}");
            }
        }
    }

    #[test]
    fn waves_are_as_long_as_the_rows_they_span_allow() {
        let tile = |&(first_row, rows): &(usize, usize)| RowTile { group: 0, first_row, rows };
        let tiles: Vec<RowTile> =
            [(3, 4), (7, 4), (11, 4), (30, 8), (40, 8), (48, 1)].iter().map(tile).collect();
        let lengths = |most| waves(&tiles, most).map(<[RowTile]>::len).collect::<Vec<_>>();
        assert_eq!(lengths(8), [2, 1, 1, 1, 1]);
        assert_eq!(lengths(12), [3, 1, 2]);
        assert_eq!(lengths(46), [6]);
        assert!(waves(&tiles, 8).flatten().eq(&tiles));
        assert_eq!(waves(&[], 8).count(), 0);
    }
}
