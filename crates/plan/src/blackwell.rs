//! What the fused sm_100 kernel should take on a B200, with every number that the answer is made of.
//!
//! **An estimate: no Blackwell card has run this kernel.** A K step costs a CTA the slower of filling its stage and
//! multiplying it. Both rates come from the best public kernels of the GPU MODE task, whose times at M = 256 differ by
//! 12 steps of 30720 bytes and whose times at M = 512 by what they multiply (`docs/kernels/blackwell.md`).

use dualgemm_device::DeviceInfo;
use dualgemm_kernels::Error;
use dualgemm_kernels::parts::operand::{ATOM_ROWS, Formats};
use dualgemm_kernels::sm100a::config::{Config, Side, tiles};
use dualgemm_kernels::sm120a::config::Config as Workstation;

/// Multiprocessors of a B200.
pub const MULTIPROCESSORS: u32 = 148;
/// Bytes per nanosecond that reach the shared memory of a multiprocessor: 64 a clock at 1.94 GHz.
pub const FILL: f64 = 124.0;
/// FLOP per nanosecond of a multiprocessor, as observed.
pub const MULTIPLY: f64 = 43_000.0;
/// Multiplications per clock of a multiprocessor at its peak: 9 PFLOP/s of 148 at 1.85 GHz.
pub const PEAK: u32 = 16384;
/// Bytes per nanosecond from memory to all multiprocessors: nine tenths of the data sheet's.
pub const MEMORY: f64 = 7200.0;
/// Sums of CTAs that split K, through distributed shared memory, µs.
pub const EXCHANGE_US: f64 = 0.8;
/// Everything but the loop, µs, in the task's harness, which times single launches between two events.
pub const LAUNCH_US: f64 = 5.5;

/// FLOP per nanosecond of a multiprocessor of sm_120, and bytes from memory: an RTX PRO 6000's 2.0 PFLOP/s and 1.79 TB/s
/// over 188.
const WORKSTATION: (f64, f64) = (10_700.0, 9.5);

/// Microseconds of the sm_120 kernel, an estimate: waves of tiles at the matrix rate, or the bytes at that of memory.
pub(crate) fn workstation_us(
    config: &Workstation,
    (m, n, k): (usize, usize, usize),
    info: &DeviceInfo,
) -> f64 {
    let sms = info.sm_count.max(1);
    let tiles = m.div_ceil(config.tokens as usize) * n.div_ceil(config.features as usize);
    let waves = tiles.div_ceil(sms as usize) as f64;
    let tile = 4.0 * f64::from(config.tokens * config.features) * k as f64 / WORKSTATION.0;
    let bytes = (m * k + 2 * n * k) as f64 * 0.5625 + 2.0 * (m * n) as f64;
    (waves * tile).max(bytes / (WORKSTATION.1 * f64::from(sms))) / 1e3
}

/// The estimate of a launch.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Estimate {
    /// The configuration.
    pub kernel: String,
    /// CTAs, and how often each multiprocessor gets one.
    pub ctas: u32,
    /// Rounds of tiles.
    pub waves: u32,
    /// K steps of a CTA and tile.
    pub steps: u32,
    /// K elements of a step.
    pub step_k: u32,
    /// Bytes into shared memory per step and CTA.
    pub step_bytes: u32,
    /// Time of these bytes, ns.
    pub fill_ns: f64,
    /// Clocks of the step's matrix instructions at their peak rate.
    pub multiply_clocks: u32,
    /// Time of the step's matrix instructions at the rate that was observed, ns.
    pub multiply_ns: f64,
    /// Columns of tensor memory that are taken, of 512.
    pub tmem_columns: u32,
    /// Shared memory of a CTA, bytes.
    pub shared_bytes: u32,
    /// All steps, µs.
    pub loop_us: f64,
    /// Adding up what CTAs that split K have, µs.
    pub exchange_us: f64,
    /// Every operand and C once from or to memory, µs.
    pub memory_us: f64,
}

impl Estimate {
    /// The estimate for `(m, n, k)` on the configuration's operands with f16 C.
    ///
    /// # Errors
    /// If the configuration does not fit a multiprocessor.
    pub fn new(config: &Config, (m, n, k): (usize, usize, usize)) -> Result<Self, Error> {
        let layout = config.layout()?;
        let step_k = config.parts()[0].k;
        let step_bytes = config.stage_bytes() / config.cta_group;
        let (tiles, cluster) = (tiles(config, m, n), config.cluster());
        let resident = (MULTIPROCESSORS / cluster).max(1);
        let (waves, steps) =
            (tiles.div_ceil(resident), k.div_ceil((step_k * config.split_k) as usize) as u32);
        // Gate and up, each 128 rows by n columns of this CTA; a pair's instruction is 256 rows on two tensor cores.
        let multiplications = 2 * ATOM_ROWS * config.n * step_k;
        let fill_ns = f64::from(step_bytes) / FILL;
        // 16-bit operands are multiplied at a quarter of the rate.
        let (rate, a_bytes) = match config.formats {
            Formats::Scaled(_) => (1, 0.5625),
            Formats::Wide(_) => (4, 2.0),
        };
        let multiply_ns = f64::from(rate) * 2.0 * f64::from(multiplications) / MULTIPLY;
        let bytes = (m * k) as f64 * a_bytes + (2 * n * k) as f64 * 0.5625 + 2.0 * (m * n) as f64;
        Ok(Self {
            kernel: config.name(),
            ctas: tiles * cluster,
            waves,
            steps,
            step_k,
            step_bytes,
            fill_ns,
            multiply_clocks: rate * multiplications / PEAK,
            multiply_ns,
            tmem_columns: layout.tmem_columns,
            shared_bytes: layout.smem.bytes(),
            loop_us: f64::from(waves * steps) * fill_ns.max(multiply_ns) / 1e3,
            exchange_us: if config.split_k > 1 { EXCHANGE_US } else { 0.0 },
            memory_us: bytes / MEMORY / 1e3,
        })
    }

    /// The best of the menu for `(m, n, k)`. Tiles of features hold all tokens, and split K no further than there are
    /// steps.
    pub fn best((m, n, k): (usize, usize, usize)) -> Option<(Config, Self)> {
        let fits = |config: &Config| match config.side {
            Side::Tokens => true,
            Side::Features => m <= config.n as usize && config.split_k * config.parts()[0].k <= k as u32,
        };
        let estimates = Config::MENU.into_iter().filter(fits);
        let estimates = estimates.filter_map(|config| Some((config, Self::new(&config, (m, n, k)).ok()?)));
        estimates.min_by(|a, b| a.1.kernel_us().total_cmp(&b.1.kernel_us()))
    }

    /// The kernel without what every launch costs, µs.
    pub fn kernel_us(&self) -> f64 {
        self.loop_us.max(self.memory_us) + self.exchange_us
    }

    /// As the task's harness would time it, µs.
    pub fn total_us(&self) -> f64 {
        self.kernel_us() + LAUNCH_US
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernels whose times the rates come from: pairs with 64 features at M = 256, with 128 at M = 512.
    #[test]
    fn the_rates_give_back_the_times_that_they_come_from_close() {
        for (shape, name, published) in [
            ((256, 4096, 7168), "n64_g2", 12.4),
            ((256, 3072, 4096), "n64_g2", 9.43),
            ((512, 4096, 7168), "n128_g2", 16.4),
            ((512, 3072, 7168), "n128_g2", 16.3),
        ] {
            let config = Config::MENU.into_iter().find(|config| config.name().contains(name)).unwrap();
            let estimate = Estimate::new(&config, shape).unwrap();
            assert!((estimate.total_us() - published).abs() < 0.15, "{shape:?}: {}", estimate.total_us());
        }
    }

    #[test]
    fn the_best_is_no_slower_than_what_the_kernel_would_choose_and_more_work_never_faster() {
        for (m, n, k) in
            [(1, 4096, 7168), (16, 3072, 4096), (256, 3072, 4096), (512, 3072, 7168), (4096, 14336, 4096)]
        {
            let (_, best) = Estimate::best((m, n, k)).unwrap();
            let guess = Config::for_shape((m, n, k), MULTIPROCESSORS);
            assert!(best.kernel_us() <= Estimate::new(&guess, (m, n, k)).unwrap().kernel_us());
            for bigger in [(2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)] {
                assert!(Estimate::best(bigger).unwrap().1.kernel_us() >= best.kernel_us(), "{bigger:?}");
            }
        }
    }

    #[test]
    fn decoding_is_bound_by_memory() {
        let (config, estimate) = Estimate::best((1, 4096, 7168)).unwrap();
        assert_eq!((config.side, config.split_k), (Side::Features, 4));
        assert!((4.5..5.5).contains(&estimate.memory_us) && estimate.kernel_us() < 6.5, "{estimate:?}");
    }
}
