//! Threads that stay awake between calls, for products of a few rows: a [`Team`], or the caller's own that it [lends](lend).
//!
//! rayon's threads look for work in each other's queues and sleep when they find none, which suits everything else. But on 16
//! threads of an Emerald Rapids it takes 9 µs until the last of them has work and the first knows that all are done, where one
//! token takes 140 µs. In a team a call is one word that all threads watch: 4 µs.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::Error;
use crate::threads::{self, Apart, wait_until};

/// How long a thread watches for the next call before it sleeps. Between two products of a model other layers take some ten
/// microseconds.
const AWAKE: Duration = Duration::from_micros(200);

/// Turns of a waiting loop between two looks at the clock.
const TURNS: u32 = 256;

/// Threads for products; the caller is one of them.
///
/// Inside [`install`](Self::install), plans are made for as many threads, and products and packs run on them instead of on a rayon
/// pool. The others stay awake for 200 µs after each call, and take a processor each while they do: a team should not have more
/// threads than there are processors with nothing else to do. Results do not depend on it.
#[derive(Debug)]
pub struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Taken by the thread that is inside.
    inside: Mutex<()>,
}

/// What the caller and the other threads share.
#[derive(Debug)]
struct Shared {
    /// The number of calls so far, or [`END`].
    calls: Apart<AtomicU64>,
    /// Threads inside the last call without the caller, and from [`PART`] on how many may take part: 0 once it has no work left. So
    /// nobody waits for a thread that has not even started.
    open: Apart<AtomicU64>,
    /// Threads that sleep, or are about to.
    asleep: Apart<AtomicUsize>,
    job: UnsafeCell<Job>,
    /// The first panic of a call.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    others: Mutex<Vec<Thread>>,
    /// Threads with the caller.
    count: usize,
}

/// The last value of [`Shared::calls`].
const END: u64 = u64::MAX;

/// The value of a thread that may take part, in [`Shared::open`].
const PART: u64 = 1 << 32;

/// A closure that takes a worker's number, and the function that calls it.
type Job = (unsafe fn(*const (), usize), *const ());

// SAFETY: `job` alone is not `Sync`. A caller writes it while `open` says that no thread may take part and none is inside. Threads
// read it between entering and leaving, and if they may take part.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is used only during the call whose closure it points to, and that closure is `Sync`.
unsafe impl Send for Shared {}

/// Threads of another library, such as those of an OpenMP runtime.
///
/// A program that computes with such a library and with this one, in turns, has twice as many threads as processors if each brings
/// its own, and those of one take time from those of the other while they wait for work.
pub trait LentThreads: Sync {
    /// Threads, the caller's among them.
    fn count(&self) -> usize;

    /// Calls `work`, which does not panic, on the caller's thread and at the same time on others, and returns when all have.
    fn run(&self, work: &(dyn Fn() + Sync));
}

/// Calls `body` on this thread, with products and packs on `threads`. Results do not depend on it.
pub fn lend<R>(threads: &dyn LentThreads, body: impl FnOnce() -> R) -> R {
    // SAFETY: the two types differ in the lifetime alone, and `Inside` takes the pointer away again before `threads` ends.
    let threads = unsafe { std::mem::transmute::<*const dyn LentThreads, *const dyn LentThreads>(threads) };
    let _inside = Inside::new(Some(Current::Lent(threads)));
    body()
}

/// What a thread is inside of.
#[derive(Clone, Copy)]
enum Current {
    Team(*const Shared),
    Lent(*const dyn LentThreads),
}

thread_local! {
    static CURRENT: Cell<Option<Current>> = const { Cell::new(None) };
}

/// What [`CURRENT`] was, and will be when this is dropped.
struct Inside(Option<Current>);

impl Inside {
    fn new(current: Option<Current>) -> Self {
        Self(CURRENT.replace(current))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

impl Team {
    /// Starts `threads` threads less one, the caller's.
    ///
    /// # Errors
    /// If `threads` is not 1 to 65 535, or the system has no room for so many.
    pub fn new(threads: usize) -> Result<Self, Error> {
        let refused = |found: String| Error::NotPlanned {
            what: "a team",
            found,
            expected: "1 to 65535 threads that the system has room for".into(),
        };
        if !(1..1 << 16).contains(&threads) {
            return Err(refused(format!("of {threads} threads")));
        }
        let shared = Arc::new(Shared {
            calls: Apart::default(),
            open: Apart::default(),
            asleep: Apart::default(),
            job: UnsafeCell::new((nothing, std::ptr::null())),
            panic: Mutex::new(None),
            others: Mutex::new(Vec::new()),
            count: threads,
        });
        let mut team = Self { shared, threads: Vec::new(), inside: Mutex::new(()) };
        for worker in 1..threads {
            let shared = team.shared.clone();
            let thread = std::thread::Builder::new().name(format!("dualgemm-{worker}"));
            let thread = thread.spawn(move || shared.serve(worker));
            team.threads.push(thread.map_err(|e| refused(format!("of {threads} threads: {e}")))?);
        }
        *lock(&team.shared.others) = team.threads.iter().map(|thread| thread.thread().clone()).collect();
        Ok(team)
    }

    /// Calls `body` on this thread, with products and packs on the team's threads. Callers on several threads wait for each other; one that
    /// is inside already does not. The [sink](crate::TileSink) of a product must not call this.
    pub fn install<R>(&self, body: impl FnOnce() -> R) -> R {
        let shared: *const Shared = &*self.shared;
        if matches!(CURRENT.get(), Some(Current::Team(current)) if current == shared) {
            return body();
        }
        let _turn = lock(&self.inside);
        let _inside = Inside::new(Some(Current::Team(shared)));
        body()
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.calls.0.store(END, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // Panics of jobs are caught, and there are no others.
            _ = thread.join();
        }
    }
}

/// Threads for the products of a caller: those of the [`Team`] it is inside of, or lent ones, or else of the current rayon pool.
pub(crate) fn threads() -> usize {
    match CURRENT.get() {
        // SAFETY: `install` borrows the team until it takes the pointer away again.
        Some(Current::Team(team)) => unsafe { (*team).count },
        // SAFETY: `lend` borrows the threads until it takes the pointer away again.
        Some(Current::Lent(lent)) => unsafe { (*lent).count() },
        None => rayon::current_num_threads(),
    }
}

/// Calls `body` where products start without waking anything: on this thread inside of a [`Team`] or with lent threads, or else inside
/// of the current rayon pool, which each product would otherwise enter from outside.
pub fn enter<R: Send>(body: impl FnOnce() -> R + Send) -> R {
    if awake() { body() } else { rayon::scope(|_| body()) }
}

/// Calls `body` with the number of each part of `len` elements, and with the part, on all threads of the current [`Team`] or rayon
/// pool. The last part may be shorter.
///
/// # Panics
/// If `len` is 0.
pub fn for_each_part<T: Send>(slice: &mut [T], len: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    threads::for_each_part(threads(), slice, len, body);
}

/// Whether threads are awake to take shares of a few microseconds.
pub(crate) fn awake() -> bool {
    CURRENT.get().is_some()
}

/// Calls `work` with the numbers below `workers`, or fewer of them if there are fewer threads, on threads of the team that this one is
/// inside of, or on lent ones. Returns whether there are any.
pub(crate) fn run<W: Fn(usize) + Sync>(workers: usize, work: &W) -> bool {
    let Some(current) = CURRENT.get() else { return false };
    // What a job starts itself goes to rayon.
    let _outside = Inside::new(None);
    match current {
        // SAFETY: as in `threads`.
        Current::Team(team) => unsafe { (*team).run(workers.min((*team).count), work) },
        // SAFETY: as in `threads`.
        Current::Lent(lent) => run_lent(unsafe { &*lent }, workers, work),
    }
    true
}

/// Threads get numbers as they come; more than `workers` have nothing to do.
fn run_lent<W: Fn(usize) + Sync>(lent: &dyn LentThreads, workers: usize, work: &W) {
    let (next, panic) = (AtomicUsize::new(0), Mutex::new(None));
    lent.run(&|| {
        let worker = next.fetch_add(1, Ordering::Relaxed);
        if worker < workers
            && let Err(fault) = catch_unwind(AssertUnwindSafe(|| work(worker)))
        {
            lock(&panic).get_or_insert(fault);
        }
    });
    if let Some(fault) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
        resume_unwind(fault);
    }
}

/// # Safety
/// Any arguments will do.
unsafe fn nothing(_: *const (), _: usize) {}

/// # Safety
/// `work` points to a `W`.
unsafe fn call<W: Fn(usize) + Sync>(work: *const (), worker: usize) {
    // SAFETY: that is the contract.
    unsafe { (*work.cast::<W>())(worker) }
}

/// Ends a call when the caller's share is done or panics: other threads use its closure.
struct Call<'a>(&'a AtomicU64);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.fetch_and(PART - 1, Ordering::Relaxed);
        wait_until(|| self.0.load(Ordering::Acquire) == 0);
    }
}

impl Shared {
    fn run<W: Fn(usize) + Sync>(&self, workers: usize, work: &W) {
        // SAFETY: no thread reads the job now: see `Sync`.
        unsafe { *self.job.get() = (call::<W>, std::ptr::from_ref(work).cast()) };
        self.open.0.fetch_add(workers as u64 * PART, Ordering::Release);
        let call = Call(&self.open.0);
        self.wake(self.calls.0.load(Ordering::Relaxed) + 1, workers - 1);
        work(0);
        drop(call);
        if let Some(panic) = lock(&self.panic).take() {
            resume_unwind(panic);
        }
    }

    /// Tells the first `others` threads besides the caller of a call.
    fn wake(&self, call: u64, others: usize) {
        // In one order with `asleep`: either this sees a thread that goes to sleep, or that thread sees the call.
        self.calls.0.store(call, Ordering::SeqCst);
        if self.asleep.0.load(Ordering::SeqCst) > 0 {
            lock(&self.others).iter().take(others).for_each(Thread::unpark);
        }
    }

    /// What a thread does.
    fn serve(&self, worker: usize) {
        let mut last = 0;
        loop {
            last = self.next(last);
            if last == END {
                return;
            }
            // This may be the call after `last`, too, which this thread then enters twice, one after the other.
            if (worker as u64) < self.open.0.fetch_add(1, Ordering::Acquire) / PART {
                // SAFETY: the caller wrote it before it opened the call, and waits for this thread.
                let (function, work) = unsafe { *self.job.get() };
                // SAFETY: the job is a function and what it takes.
                let done = catch_unwind(AssertUnwindSafe(|| unsafe { function(work, worker) }));
                if let Err(panic) = done {
                    lock(&self.panic).get_or_insert(panic);
                }
            }
            self.open.0.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for a call other than `last`.
    fn next(&self, last: u64) -> u64 {
        let start = Instant::now();
        while start.elapsed() < AWAKE {
            for _ in 0..TURNS {
                let call = self.calls.0.load(Ordering::Acquire);
                if call != last {
                    return call;
                }
                std::hint::spin_loop();
            }
        }
        self.asleep.0.fetch_add(1, Ordering::SeqCst);
        let call = loop {
            let call = self.calls.0.load(Ordering::SeqCst);
            if call != last {
                break call;
            }
            std::thread::park();
        };
        self.asleep.0.fetch_sub(1, Ordering::SeqCst);
        call
    }
}

/// What a panic left behind is whole.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::for_each;

    /// How often each of 100 items is done.
    fn counts(workers: usize) -> Vec<usize> {
        let counts: Vec<_> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        for_each(workers, 100, |_| (), |(), item| _ = counts[item].fetch_add(1, Ordering::Relaxed));
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn items_are_done_once_by_threads_awake_and_asleep() {
        for count in [1, 2, 5] {
            let team = Team::new(count).unwrap();
            for pause in [Duration::ZERO, 5 * AWAKE, Duration::ZERO] {
                std::thread::sleep(pause);
                // Fewer workers than threads, as many, and more.
                for workers in [1, 2, count, 9] {
                    team.install(|| assert_eq!(counts(workers), [1; 100], "{count} {workers} {pause:?}"));
                }
            }
        }
    }

    #[test]
    fn every_thread_takes_part() {
        let (team, here) = (Team::new(3).unwrap(), AtomicUsize::new(0));
        let all = |worker: usize| {
            here.fetch_add(1 << (8 * worker), Ordering::SeqCst);
            while here.load(Ordering::SeqCst) != 0x01_01_01 {
                std::thread::yield_now();
            }
        };
        team.install(|| assert!(run(3, &all)));
    }

    #[test]
    fn a_team_holds_inside_alone() {
        let team = Team::new(3).unwrap();
        assert!(!awake() && !run(2, &|_| ()));
        let inside = || (awake(), threads(), team.install(threads));
        assert_eq!(team.install(inside), (true, 3, 3));
        assert_eq!(threads(), rayon::current_num_threads());
        // A job of a job, while threads are busy with the first.
        team.install(|| for_each(2, 2, |_| (), |(), _| assert_eq!(counts(2), [1; 100])));
    }

    #[test]
    fn a_caller_enters_its_team_or_the_pool() {
        let (team, here) = (Team::new(2).unwrap(), || (awake(), std::thread::current().id()));
        assert_eq!(team.install(|| enter(here)), (true, std::thread::current().id()));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        pool.install(|| assert_eq!(enter(here), (false, std::thread::current().id())));
        assert_ne!(enter(here).1, std::thread::current().id());
    }

    /// Threads that are started for each call.
    struct Started(usize);

    impl LentThreads for Started {
        fn count(&self) -> usize {
            self.0
        }

        fn run(&self, work: &(dyn Fn() + Sync)) {
            std::thread::scope(|scope| {
                (1..self.0).for_each(|_| _ = scope.spawn(work));
                work();
            });
        }
    }

    #[test]
    fn lent_threads_do_items_once() {
        let inside = || {
            assert!(awake());
            for workers in [1, 2, 9] {
                assert_eq!(counts(workers), [1; 100], "{workers}");
            }
            // A job of a job.
            for_each(2, 2, |_| (), |(), _| assert_eq!(counts(2), [1; 100]));
            threads()
        };
        assert_eq!([1, 3].map(|count| lend(&Started(count), inside)), [1, 3]);
        assert!(!awake());
        let team = Team::new(2).unwrap();
        assert_eq!(lend(&Started(3), || [team.install(threads), threads()]), [2, 3]);
    }

    #[test]
    fn panics_of_lent_threads_reach_the_caller() {
        let fault = || run(3, &|worker| assert!(worker != 0, "worker {worker}"));
        let message = catch_unwind(|| lend(&Started(3), fault)).unwrap_err();
        assert_eq!(message.downcast_ref::<String>().unwrap(), "worker 0");
        assert!(!awake());
    }

    #[test]
    fn parts_are_numbered_and_cover_a_slice_once() {
        let team = Team::new(3).unwrap();
        for (all, len) in [(0, 3), (2, 3), (3, 3), (1000, 7)] {
            let fill = || {
                let mut data = vec![0; all];
                for_each_part(&mut data, len, |part, data| data.iter_mut().for_each(|x| *x += part + 1));
                data
            };
            let want: Vec<usize> = (0..all).map(|i| i / len + 1).collect();
            assert_eq!(fill(), want, "{all} {len}");
            assert_eq!(team.install(fill), want, "{all} {len}");
        }
    }

    #[test]
    fn callers_take_turns() {
        let team = Team::new(2).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..50).for_each(|_| team.install(|| assert_eq!(counts(2), [1; 100]))));
            }
        });
    }

    #[test]
    fn panics_reach_the_caller_and_the_team_goes_on() {
        let team = Team::new(2).unwrap();
        for bad in [0, 1] {
            // Both take part, so that the bad one panics.
            let here = AtomicUsize::new(0);
            let work = |worker: usize| {
                here.fetch_add(1, Ordering::SeqCst);
                while here.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
                assert!(worker != bad, "worker {bad}");
            };
            let message = catch_unwind(AssertUnwindSafe(|| team.install(|| run(2, &work)))).unwrap_err();
            assert_eq!(message.downcast_ref::<String>().unwrap(), &format!("worker {bad}"));
            team.install(|| assert_eq!(counts(2), [1; 100]));
        }
    }

    #[test]
    fn impossible_teams_are_refused() {
        for threads in [0, 1 << 16] {
            let message = Team::new(threads).unwrap_err().to_string();
            assert!(message.starts_with(&format!("a team is of {threads} threads; ")), "{message}");
        }
    }
}
