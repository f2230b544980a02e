//! What the fused sm_100 kernel should take on a B200, with every number that the answer is made of.
//!
//! **An estimate: no Blackwell card has run this kernel.** A K step costs a CTA the slowest of filling its stage,
//! multiplying it and widening its weights beside a 16-bit A. The first two rates come from the best public kernels of the
//! GPU MODE task, whose times at M = 256 differ by 12 steps of 30720 bytes and whose times at M = 512 by what they multiply
//! (`docs/kernels/blackwell.md`). What CTAs that split K cost each other, how many clusters fit and the rate of memory come
//! from a public microbenchmark of a B200: <https://github.com/SemiAnalysisAI/microbench-blackwell>.

use dualgemm_device::DeviceInfo;
use dualgemm_kernels::Error;
use dualgemm_kernels::parts::operand::{ATOM_ROWS, Formats};
use dualgemm_kernels::sm100a::config::{Config, WIDENERS, tiles};
use dualgemm_kernels::sm120a::config::Config as Workstation;
use dualgemm_ptx::builder::HalfFormat;

/// Multiprocessors of a B200.
pub const MULTIPROCESSORS: u32 = 148;
/// Clocks per nanosecond, as the public kernels seem to have run.
pub const CLOCK: f64 = 1.94;
/// Bytes per nanosecond that reach the shared memory of a multiprocessor: 64 a clock.
pub const FILL: f64 = 124.0;
/// FLOP per nanosecond of a multiprocessor, as observed.
pub const MULTIPLY: f64 = 43_000.0;
/// Multiplications per clock of a multiprocessor at its peak: 9 PFLOP/s of 148 at 1.85 GHz.
pub const PEAK: u32 = 16384;
/// Clusters of four CTAs that run at once, one on a multiprocessor: a cluster stays within a group of multiprocessors, and
/// the B200 of the microbenchmark has groups of 20, 20, 20, 18, 18, 18, 18, 10 and 6.
pub const CLUSTERS_OF_FOUR: u32 = 34;
/// Bytes per nanosecond from memory to all multiprocessors: what loads by TMA got in the microbenchmark, nine tenths of the
/// data sheet's.
pub const MEMORY: f64 = 7200.0;
/// Bytes of sums per nanosecond that a CTA gets from others of its cluster: 14 a clock, as bulk copies around a cluster of
/// four got in the microbenchmark, 25728 bytes in 1842 clocks. An H100 agrees: 64 KB each way took it 5000 to 6000 clocks,
/// through distributed shared memory by loads, stores or bulk copies and through L2 alike.
pub const EXCHANGE: f64 = 27.0;
/// What an exchange takes besides, µs: about 600 clocks for sums to shared memory, an arrival at the other
/// multiprocessor and the first load from there.
pub const EXCHANGE_US: f64 = 0.3;
/// Instructions of each of the eight warps that widen 128 of K, for f16 and bf16, counted in the machine code. Four
/// schedulers issue one a clock.
const WIDEN: [u32; 2] = [193, 385];
/// Everything but the loop, µs, in the task's harness, which times single launches between two events.
pub const LAUNCH_US: f64 = 5.5;

/// FLOP per nanosecond of a multiprocessor of sm_120, bytes from memory, and bytes from L2 to its shared memory: an RTX PRO
/// 6000's 2.0 PFLOP/s, 1.79 TB/s and 14 TB/s over 188.
const WORKSTATION: (f64, f64, f64) = (10_700.0, 9.5, 74.0);

/// Microseconds of the sm_120 kernel, an estimate: waves of tiles, each as long as its products or its operands take, or all
/// bytes at the rate of memory.
pub(crate) fn workstation_us(
    config: &Workstation,
    (m, n, k): (usize, usize, usize),
    info: &DeviceInfo,
) -> f64 {
    let sms = info.sm_count.max(1);
    let tiles = m.div_ceil(config.tokens as usize) * n.div_ceil(config.features as usize);
    let waves = tiles.div_ceil(sms as usize) as f64;
    let products = 4.0 * f64::from(config.tokens * config.features) * k as f64 / WORKSTATION.0;
    let operands = f64::from(config.tokens + 2 * config.features) * k as f64 * 0.5625 / WORKSTATION.2;
    let tile = products.max(operands);
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
    /// Time of widening the step's weights, ns; 0 if the tensor core takes them as they are.
    pub widen_ns: f64,
    /// Columns of tensor memory that are taken, of 512.
    pub tmem_columns: u32,
    /// Shared memory of a CTA, bytes.
    pub shared_bytes: u32,
    /// All steps, µs.
    pub loop_us: f64,
    /// Bytes of sums that a CTA gets per tile from others that split K with it.
    pub exchange_bytes: u32,
    /// Time of these, in all waves, µs.
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
        let resident = if cluster == 4 { CLUSTERS_OF_FOUR } else { MULTIPROCESSORS / cluster };
        let (waves, steps) =
            (tiles.div_ceil(resident), k.div_ceil((step_k * config.split_k) as usize) as u32);
        // Gate and up, each 128 rows by n columns of this CTA; a pair's instruction is 256 rows on two tensor cores.
        let multiplications = 2 * ATOM_ROWS * config.n * step_k;
        let fill_ns = f64::from(step_bytes) / FILL;
        // 16-bit operands are multiplied at a quarter of the rate.
        let (rate, a_bytes, instructions) = match config.formats {
            Formats::Scaled(_) => (1, 0.5625, 0),
            Formats::Wide(HalfFormat::F16) => (4, 2.0, WIDEN[0]),
            Formats::Wide(HalfFormat::Bf16) => (4, 2.0, WIDEN[1]),
        };
        let multiply_ns = f64::from(rate) * 2.0 * f64::from(multiplications) / MULTIPLY;
        let widen_ns = f64::from(instructions * WIDENERS / 4) / CLOCK;
        let exchange_bytes = config.exchanged_bytes();
        let exchange_us = match config.split_k {
            1 => 0.0,
            _ => f64::from(waves) * (EXCHANGE_US + f64::from(exchange_bytes) / EXCHANGE / 1e3),
        };
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
            widen_ns,
            tmem_columns: layout.tmem_columns,
            shared_bytes: layout.smem.bytes(),
            loop_us: f64::from(waves) * f64::from(steps) * fill_ns.max(multiply_ns).max(widen_ns) / 1e3,
            exchange_bytes,
            exchange_us,
            memory_us: bytes / MEMORY / 1e3,
        })
    }

    /// The best of the menu for `(m, n, k)` on operands of these formats.
    ///
    /// # Errors
    /// None for sizes that count in 32 bits: every menu has tiles that take them.
    pub fn best(formats: Formats, (m, n, k): (usize, usize, usize)) -> Result<(Config, Self), Error> {
        let menu = Config::menu(formats);
        let valid = || menu.iter().map(Config::name).collect::<Vec<_>>().join(", ");
        let estimates = menu.iter().filter(|config| config.takes(m, k));
        let estimates = estimates.filter_map(|config| Some((*config, Self::new(config, (m, n, k)).ok()?)));
        estimates
            .min_by(|a, b| a.1.kernel_us().total_cmp(&b.1.kernel_us()))
            .ok_or_else(|| Error::NoConfig { found: format!("one for {m}x{n}x{k}"), valid: valid() })
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
    use dualgemm_kernels::sm100a::config::Side;

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

    const ALL: [Formats; 4] =
        [Formats::NVFP4, Formats::MXFP4, Formats::Wide(HalfFormat::F16), Formats::Wide(HalfFormat::Bf16)];

    #[test]
    fn every_shape_has_a_best_and_more_work_is_never_faster() {
        for formats in ALL {
            for (m, n, k) in
                [(1, 4096, 7168), (16, 3072, 4096), (256, 3072, 4096), (512, 3072, 7168), (4096, 14336, 4096)]
            {
                let (config, best) = Estimate::best(formats, (m, n, k)).unwrap();
                assert_eq!(config.formats, formats);
                for bigger in [(2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)] {
                    assert!(Estimate::best(formats, bigger).unwrap().1.kernel_us() >= best.kernel_us());
                }
            }
            for m in [1, 17, 64, 65, 200] {
                for k in [64, 256, 1024] {
                    let (config, estimate) = Estimate::best(formats, (m, 40, k)).unwrap();
                    assert!(config.takes(m, k) && estimate.kernel_us() > 0.0);
                }
            }
        }
    }

    #[test]
    fn decoding_is_bound_by_memory() {
        let (config, estimate) = Estimate::best(Formats::NVFP4, (1, 4096, 7168)).unwrap();
        assert_eq!((config.side, config.split_k), (Side::Features, 4));
        assert!((4.5..5.5).contains(&estimate.memory_us) && estimate.kernel_us() < 6.5, "{estimate:?}");
    }

    /// An H100 moved 64 KB each way in 5000 to 6000 clocks; two CTAs with 128 tokens and 128 features exchange as much.
    #[test]
    fn an_exchange_takes_what_a_hopper_took_at_this_clock_close() {
        let halves = Config::MENU.into_iter().find(|config| config.name().contains("n128_g2_k2")).unwrap();
        let estimate = Estimate::new(&halves, (256, 4096, 7168)).unwrap();
        assert_eq!(estimate.exchange_bytes, 64 << 10);
        let clocks = estimate.exchange_us * CLOCK * 1e3;
        assert!((5000.0..6000.0).contains(&clocks), "{clocks}");
    }

    /// 193 and 385 instructions of each of eight warps over four schedulers: few tokens wait for them.
    #[test]
    fn widening_bounds_the_steps_of_few_tokens() {
        for (half, n, bound) in [
            (HalfFormat::F16, 16, 199.0),
            (HalfFormat::Bf16, 16, 397.0),
            (HalfFormat::F16, 64, 390.0),
            (HalfFormat::Bf16, 64, 397.0),
        ] {
            let menu = Config::menu(Formats::Wide(half));
            let config = menu.iter().find(|config| config.n == n).unwrap();
            let estimate = Estimate::new(config, (n as usize, 4096, 7168)).unwrap();
            let step_ns = estimate.loop_us * 1e3 / f64::from(estimate.waves * estimate.steps);
            assert!((step_ns - bound).abs() < 1.0, "{}: {step_ns}", config.name());
        }
    }
}
