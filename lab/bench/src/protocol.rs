//! The only stopwatch: warm up, repeat until time or count is up, report median and spread.
//!
//! Shared machines are noisy in one direction (something else ran), so the median and the tenth and ninetieth
//! percentile are given, never a mean. Operands rotate: the closure gets the index of the run and picks its set,
//! so that weights come from memory, not from a cache that a real decoder would not have them in.

use std::time::{Duration, Instant};

/// How long to measure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Protocol {
    /// Runs before the first timed one.
    pub warmup: usize,
    /// At least this many timed runs.
    pub min_runs: usize,
    /// At most this many.
    pub max_runs: usize,
    /// No new run starts after this long, once `min_runs` are done.
    pub budget: Duration,
}

impl Default for Protocol {
    fn default() -> Self {
        Self { warmup: 2, min_runs: 5, max_runs: 1000, budget: Duration::from_millis(500) }
    }
}

impl Protocol {
    /// One run each, to see that everything works.
    pub const SMOKE: Self = Self { warmup: 0, min_runs: 1, max_runs: 1, budget: Duration::ZERO };

    /// Times `run`, which gets the number of the run (warm-up included).
    ///
    /// # Errors
    /// Hands on the first error of `run`.
    pub fn measure<E>(&self, mut run: impl FnMut(usize) -> Result<(), E>) -> Result<Timing, E> {
        for index in 0..self.warmup {
            run(index)?;
        }
        let mut times_us = Vec::with_capacity(self.max_runs.min(4096));
        let start = Instant::now();
        while times_us.len() < self.max_runs.max(1)
            && (times_us.len() < self.min_runs || start.elapsed() < self.budget)
        {
            let begin = Instant::now();
            run(self.warmup + times_us.len())?;
            times_us.push(begin.elapsed().as_secs_f64() * 1e6);
        }
        Ok(Timing::from_times(times_us))
    }
}

/// Median and spread of some runs.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Timing {
    /// Median, µs.
    pub median_us: f64,
    /// A tenth of the runs were faster, µs.
    pub p10_us: f64,
    /// A tenth of the runs were slower, µs.
    pub p90_us: f64,
    /// Timed runs.
    pub runs: usize,
}

impl Timing {
    /// From the times of single runs in µs.
    ///
    /// # Panics
    /// If there are none.
    pub fn from_times(mut times_us: Vec<f64>) -> Self {
        assert!(!times_us.is_empty(), "no run was timed");
        times_us.sort_by(f64::total_cmp);
        let runs = times_us.len();
        let quantile = |q: f64| {
            let at = q * (runs - 1) as f64;
            let (low, high) = (times_us[at.floor() as usize], times_us[at.ceil() as usize]);
            low + (high - low) * at.fract()
        };
        Self { median_us: quantile(0.5), p10_us: quantile(0.1), p90_us: quantile(0.9), runs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[test]
    fn quantiles_of_known_times() {
        let t = Timing::from_times((0..=10).rev().map(f64::from).collect());
        assert_eq!((t.median_us, t.p10_us, t.p90_us, t.runs), (5.0, 1.0, 9.0, 11));
        let t = Timing::from_times(vec![1.0, 2.0]);
        assert_eq!(t.median_us, 1.5);
    }

    #[test]
    fn runs_are_counted_and_numbered() {
        let mut seen = Vec::new();
        let p = Protocol { warmup: 2, min_runs: 3, max_runs: 5, budget: Duration::ZERO };
        let t = p.measure(|i| {
            seen.push(i);
            Ok::<(), Infallible>(())
        });
        assert_eq!((t.unwrap().runs, seen), (3, vec![0, 1, 2, 3, 4]));
    }

    #[test]
    fn the_first_error_ends_it() {
        let result = Protocol::default().measure(|i| if i == 3 { Err("third") } else { Ok(()) });
        assert_eq!(result, Err("third"));
    }
}
