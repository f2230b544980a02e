//! How much is asked of the simulator at most, and how long it takes about.
//!
//! Simulated time grows with the work of the kernel, padding included. Nothing that takes hours is begun: a layer of
//! the largest open models does not fit, one of an 8B model at 64 tokens takes some minutes.

use std::time::Duration;

use anyhow::bail;

/// Multiplications of one product, over all runs.
const MOST_WORK: usize = 1 << 34;
/// Elements of an operand.
const MOST_ELEMENTS: usize = 1 << 28;
/// Tokens that a kernel multiplies at least, whether they are there or not.
const LEAST_TOKENS: usize = 64;
/// Multiplications of one product per second: what the slowest of the kernels, that of sm_100a on f16, came to on two
/// cores at 64x1536x576. The others do up to five times as many.
const WORK_PER_S: f64 = 14e6;

/// Refuses a problem of M tokens, N features and K elements that would take too long in all its `runs`, or else says how
/// long they take at most, about. `asked` is the argument that asks for the simulator.
pub fn fits((m, n, k): (usize, usize, usize), runs: usize, asked: &str) -> anyhow::Result<Duration> {
    let at_most = |limit: usize, factors: &[usize]| {
        factors.iter().try_fold(1usize, |product, &f| product.checked_mul(f)).is_some_and(|x| x <= limit)
    };
    if !at_most(MOST_WORK, &[m, n, k, runs]) || !at_most(MOST_ELEMENTS, &[m.max(n), k]) {
        let times = if runs > 1 { format!(" {runs} times") } else { String::new() };
        bail!(
            "{asked}: at most 2^34 multiplications of 2^28 elements are simulated; {m}x{n}x{k}{times} is more; \
             fewer tokens or a smaller layer are needed"
        );
    }
    let work = m.max(LEAST_TOKENS) as f64 * n as f64 * k as f64 * runs as f64;
    Ok(Duration::from_secs_f64(work / WORK_PER_S))
}

/// The time that is left when `done` of `all` steps took so long; `None` while too few are done to tell.
pub fn left(took: Duration, done: u64, all: u64) -> Option<Duration> {
    let (done, all) = (done as f64, all as f64);
    (done >= all / 100.0).then(|| took.mul_f64((all / done - 1.0).max(0.0)))
}

/// A time that is known about, in whole seconds or minutes.
pub fn about(time: Duration) -> String {
    match time.as_secs_f64() {
        s if s < 90.0 => format!("{:.0} s", s.ceil()),
        s => format!("{:.0} min", (s / 60.0).ceil()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_are_round() {
        let of = |s| about(Duration::from_secs_f64(s));
        assert_eq!(
            [of(0.2), of(4.04), of(89.0), of(91.0), of(1200.0)],
            ["1 s", "5 s", "89 s", "2 min", "20 min"]
        );
    }

    #[test]
    fn what_is_left_follows_from_what_is_done() {
        let took = Duration::from_secs(3);
        assert_eq!(left(took, 25, 100), Some(Duration::from_secs(9)));
        // More than was expected, because of padding.
        assert_eq!(left(took, 110, 100), Some(Duration::ZERO));
        assert_eq!((left(took, 9, 1000), left(took, 0, 0)), (None, None));
    }

    #[test]
    fn what_takes_hours_is_refused_with_its_size() {
        assert!(fits((64, 14336, 4096), 1, "x").unwrap() < Duration::from_secs(600));
        assert_eq!(fits((1, 1536, 576), 1, "x").unwrap(), fits((64, 1536, 576), 1, "x").unwrap());
        for (shape, runs) in
            [((512, 14336, 4096), 1), ((64, 14336, 4096), 9), ((1, 53248, 16384), 1), ((usize::MAX, 2, 2), 1)]
        {
            let message = fits(shape, runs, "--device sim:sm_90a").unwrap_err().to_string();
            let (m, n, k) = shape;
            assert!(message.starts_with("--device sim:sm_90a: at most 2^34 "), "{message}");
            assert!(message.contains(&format!("{m}x{n}x{k}")), "{message}");
        }
    }
}
