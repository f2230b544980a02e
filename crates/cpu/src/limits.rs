//! The most that this machine can do, measured: the roofline that products are compared with.
//!
//! Each figure is the best of many short samples over all threads, since other work on the machine can only lower
//! it. Measuring one takes about a quarter of a second.

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AFormat, DualGemmDesc, GateUp};

use crate::aligned::Aligned;
use crate::amx::Tiles;
use crate::pack::{CHUNK_K, PANEL, PackedGateUp};
use crate::tile::{Prepare, RowTile, TILE_COLS, TileKernel};
use crate::w4a4::{self, Source};
use crate::w4a16::tiles;
use crate::{CpuPlan, Error, Isa, threads, w4a16};

/// Rates of one instruction set on this machine.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Limits {
    /// Instruction set.
    pub isa: Isa,
    /// Threads that ran at once.
    pub threads: usize,
    /// Bytes per second read from memory that is in no cache.
    pub dram_read: f64,
    /// Additions and multiplications per second of byte dot products from registers, accumulated as integers.
    pub integer_dot: f64,
    /// The same for the W4A4 kernel with operands in the first-level cache. Its block scales cost as many instructions again.
    pub w4a4_tile: f64,
    /// Additions and multiplications per second of f32 multiply-adds from registers.
    pub f32_multiply_add: f64,
    /// The same of dot products of bf16 with operands in the first-level cache, by AMX or AVX512-BF16; 0 where there is neither.
    #[serde(default)]
    pub bf16_dot: f64,
}

impl Limits {
    /// The rate that bounds the arithmetic of a problem, and its name: one of the fields or a fraction of one. Several rows of
    /// f16 count as f32; blocks with few significant bits are multiplied as 16-bit integers and can be faster.
    pub fn operations(&self, desc: &DualGemmDesc) -> (&'static str, f64) {
        let floats = ("f32", self.f32_multiply_add);
        let others = match (desc.a_compute().block_format(), byte_products(desc)) {
            (Some(_), _) => ("W4A4", self.w4a4_tile),
            (_, Some(products)) if self.integer_dot / products > floats.1 => {
                (if products == 2.0 { "16-bit" } else { "24-bit" }, self.integer_dot / products)
            }
            _ => floats,
        };
        bf16_terms(self.isa, desc).map_or(others, |terms| ("bf16", self.bf16_dot / terms))
    }

    /// The least time, in seconds, for this many operations at `rate` (one of the fields) and bytes from memory.
    pub fn floor(&self, flops: f64, rate: f64, bytes: f64) -> f64 {
        (flops / rate).max(bytes / self.dram_read)
    }
}

/// The number of byte products in one product of a weight and an activation that W4A16 multiplies as integers: two for 16
/// bits, three for 24.
fn byte_products(desc: &DualGemmDesc) -> Option<f64> {
    desc.b.block_format()?;
    match desc.a_compute() {
        AFormat::Bf16 => Some(2.0),
        _ => (desc.m == 1).then_some(3.0),
    }
}

/// The number of bf16 into which each float of A is cut where all of its rows are multiplied as bf16.
fn bf16_terms(isa: Isa, desc: &DualGemmDesc) -> Option<f64> {
    let a = desc.a_compute();
    let terms = match (a.block_format(), desc.b) {
        (_, AFormat::Bf16) => (a == AFormat::Bf16 && isa.tiles() != Tiles::No).then_some(1),
        (Some(_), _) => w4a4::takes_tiles(isa, a, desc.b, desc.m, desc.k).then_some(1),
        (None, _) => w4a16::tile_terms(isa.tiles(), a, desc.b, desc.m, desc.k),
    };
    terms.map(|terms| terms as f64)
}

/// More bytes than the caches of this machine hold: twice its largest, and at least 192 MiB. Linux tells; elsewhere 192 MiB are
/// several times the last-level cache.
pub fn beyond_caches() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let size = |index: usize| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
            std::fs::read_to_string(path).ok()?.trim().strip_suffix('K')?.parse::<usize>().ok()
        };
        let largest = (0..8).filter_map(size).max().unwrap_or(0) << 10;
        (2 * largest).max(192 << 20)
    })
}

/// Measures all limits on up to `threads` threads of the current rayon pool.
///
/// # Errors
/// If this machine lacks the instruction set.
pub fn measure(isa: Isa, threads: usize) -> Result<Limits, Error> {
    let kernel = w4a4::Kernel::new(isa.checked()?);
    let threads = threads.max(1);
    Ok(Limits {
        isa,
        threads,
        dram_read: read_rate(kernel, threads, beyond_caches()),
        integer_dot: best(threads, 2.0, || kernel.spin_integer_dots()),
        w4a4_tile: w4a4_tile(kernel, threads)?,
        f32_multiply_add: best(threads, 2.0, || kernel.spin_multiply_adds()),
        bf16_dot: bf16_dot(isa, threads)?,
    })
}

/// The two rates that bound repeated runs of one plan: operations per second ([`Limits::operations`]), and bytes per second
/// from the cache or memory where the plan's operands are when they are used again. Takes no more memory than the operands.
///
/// # Errors
/// If this machine lacks the plan's instruction set.
pub fn of_plan(plan: &CpuPlan) -> Result<(f64, f64), Error> {
    let kernel = w4a4::Kernel::new(plan.isa.checked()?);
    let operations = match (bf16_terms(plan.isa, &plan.desc), plan.desc.a_compute().block_format()) {
        (Some(terms), _) => bf16_dot(plan.isa, plan.threads)? / terms,
        (None, Some(_)) => w4a4_tile(kernel, plan.threads)?,
        (None, None) => {
            let floats = best(plan.threads, 2.0, || kernel.spin_multiply_adds());
            let integers = |products| best(plan.threads, 2.0, || kernel.spin_integer_dots()) / products;
            byte_products(&plan.desc).map_or(floats, |products| floats.max(integers(products)))
        }
    };
    let len = plan.bytes.min(beyond_caches() as f64) as usize;
    Ok((operations, read_rate(kernel, plan.threads, len)))
}

/// Best rate of `work`, which takes some microseconds and returns how many units of `weight` it has done.
fn best(threads: usize, weight: f64, work: impl Fn() -> usize + Sync) -> f64 {
    const SAMPLE: Duration = Duration::from_millis(5);
    let once = || {
        let start = Instant::now();
        work();
        start.elapsed().max(Duration::from_nanos(100))
    };
    once();
    let repeats = (SAMPLE.as_secs_f64() / once().as_secs_f64()).ceil() as usize;
    // Several items per thread, so that a thread that is held up does not delay the others.
    let items = repeats.min(4);
    let (begin, mut rate) = (Instant::now(), 0f64);
    while begin.elapsed() < 50 * SAMPLE {
        let start = Instant::now();
        let done = std::sync::atomic::AtomicUsize::new(0);
        let item = |(): &mut (), _| {
            let units: usize = (0..repeats.div_ceil(items)).map(|_| work()).sum();
            done.fetch_add(units, std::sync::atomic::Ordering::Relaxed);
        };
        threads::for_each(threads, items * threads, |_| (), item);
        rate = rate.max(done.into_inner() as f64 * weight / start.elapsed().as_secs_f64());
    }
    rate
}

/// The longest that reading all of the memory once may take; a slower machine reads less of it.
const MOST_OF_A_PASS: Duration = Duration::from_secs(1);

/// Bytes per second at which `len` bytes (a little more, to fill whole parts) are read again and again.
fn read_rate(kernel: w4a4::Kernel, threads: usize, len: usize) -> f64 {
    // Parts are read in order, as weights are. They are smaller if there is less to share among threads.
    let part = if len < 16 << 20 { 64 << 10 } else { 1 << 20 } / size_of::<f32>();
    let parts = len.div_ceil(part * size_of::<f32>()).max(1);
    let memory = Aligned::<f32>::zeroed(parts * part);
    // Reading all takes milliseconds on any processor, but not on one that is emulated.
    let start = Instant::now();
    kernel.spin_read(&memory[..part]);
    let parts =
        parts.min((MOST_OF_A_PASS.as_secs_f64() * threads as f64 / start.elapsed().as_secs_f64()) as usize);
    let memory = &memory[..parts.max(1) * part];
    let mut rate = 0f64;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(200) {
        let start = Instant::now();
        let read = |bytes: &mut usize, at: usize| *bytes += kernel.spin_read(&memory[at * part..][..part]);
        threads::for_each(threads, memory.len() / part, |_| 0, read);
        let bytes = size_of_val(memory) as f64;
        rate = rate.max(bytes / start.elapsed().max(Duration::from_nanos(100)).as_secs_f64());
    }
    rate
}

fn bf16_dot(isa: Isa, threads: usize) -> Result<f64, Error> {
    let isa = isa.checked()?;
    Ok(if isa.tiles == Tiles::No { 0.0 } else { best(threads, 2.0, || isa.dispatch(tiles::Spin(isa.tiles))) })
}

fn w4a4_tile(kernel: w4a4::Kernel, threads: usize) -> Result<f64, Error> {
    // 8 KiB of sums, 4.6 KiB of weights, 12 KiB of activations per chunk pair: all in a first-level cache.
    const K: usize = 8 * CHUNK_K;
    const TILE_ROWS: usize = w4a4::TILE_ROWS;
    let matrix = |name: &'static str, rows: usize| {
        let (codes, scales) = (vec![0x25; rows * K / 2], vec![0x38; rows * K / CHUNK_K]);
        let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
        QuantizedMatrix::new(name, format, rows, K, codes, scales, layout, GlobalScale::ONE)
    };
    let weights = PackedGateUp::pack(&GateUp::new(matrix("gate", PANEL)?, matrix("up", PANEL)?))?;
    let tile = RowTile { group: 0, first_row: 0, rows: TILE_ROWS };
    let mut blocks = Aligned::zeroed(TILE_ROWS * K / CHUNK_K);
    let a = matrix("a", TILE_ROWS)?;
    let (source, tiles) = (Source::Quantized(&a), [tile]);
    let bound = kernel.prepare(&source, None, &tiles, &mut blocks).all(1);
    Ok(best(threads, 2.0, || {
        let mut sums = [0.0; TILE_ROWS * TILE_COLS];
        bound.multiply(&tile, 0..TILE_ROWS, &weights, 0..1, &mut sums, |_, _, sums| _ = black_box(sums[0]));
        TILE_ROWS * TILE_COLS * K
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuOptions;

    #[test]
    fn the_rate_of_a_problem_is_that_of_its_kernel() {
        let limits = Limits {
            isa: Isa::Portable,
            threads: 1,
            dram_read: 1.0,
            integer_dot: 12.0,
            w4a4_tile: 7.0,
            f32_multiply_add: 3.0,
            bf16_dot: 0.0,
        };
        let operations =
            |m, a, limits: Limits| limits.operations(&DualGemmDesc::new(m, 64, 64, a, BlockFormat::Nvfp4));
        for m in [1, 2] {
            assert_eq!(operations(m, AFormat::Nvfp4, limits), ("W4A4", 7.0));
            assert_eq!(operations(m, AFormat::Bf16, limits), ("16-bit", 6.0));
            assert_eq!(operations(m, AFormat::Bf16, Limits { integer_dot: 5.0, ..limits }), ("f32", 3.0));
        }
        for a in [AFormat::F16, AFormat::F32] {
            assert_eq!(operations(1, a, limits), ("24-bit", 4.0));
            assert_eq!(operations(2, a, limits), ("f32", 3.0));
        }
    }

    #[test]
    fn what_is_multiplied_as_bf16_is_bounded_by_that() {
        let limits = |isa| Limits {
            isa,
            threads: 1,
            dram_read: 1.0,
            integer_dot: 12.0,
            w4a4_tile: 7.0,
            f32_multiply_add: 3.0,
            bf16_dot: 60.0,
        };
        let operations =
            |isa, m, a| limits(isa).operations(&DualGemmDesc::new(m, 64, 64, a, BlockFormat::Nvfp4));
        for (m, a, amx, vectors) in [
            (7, AFormat::Bf16, ("16-bit", 6.0), ("16-bit", 6.0)),
            (8, AFormat::Bf16, ("bf16", 60.0), ("bf16", 60.0)),
            (16, AFormat::F16, ("bf16", 30.0), ("f32", 3.0)),
            (16, AFormat::F32, ("bf16", 20.0), ("f32", 3.0)),
            (47, AFormat::Nvfp4, ("W4A4", 7.0), ("W4A4", 7.0)),
            (48, AFormat::Nvfp4, ("bf16", 60.0), ("W4A4", 7.0)),
            (48, AFormat::Mxfp4, ("W4A4", 7.0), ("W4A4", 7.0)),
        ] {
            if cfg!(target_arch = "x86_64") {
                assert_eq!(operations(Isa::AmxBf16, m, a), amx, "{m} {a}");
                assert_eq!(operations(Isa::Avx512Bf16, m, a), vectors, "{m} {a}");
            }
        }
    }

    #[test]
    fn rates_of_a_plan_are_those_of_its_arithmetic() {
        let rates = |a| {
            let desc = DualGemmDesc::new(4, 64, 64, a, BlockFormat::Nvfp4);
            of_plan(&CpuPlan::new(&desc, CpuOptions::default()).unwrap()).unwrap()
        };
        for (operations, bytes) in [rates(AFormat::Nvfp4), rates(AFormat::Bf16)] {
            assert!((1e8..1e13).contains(&operations) && (1e8..1e13).contains(&bytes));
        }
    }

    /// Checks orders of magnitude only: any machine does between 0.1 and 10⁴ of each per nanosecond and thread. The time that
    /// measuring takes is bounded.
    #[test]
    fn limits_are_plausible_and_quickly_measured() {
        let start = Instant::now();
        let limits = measure(Isa::best(), 1).unwrap();
        assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
        for rate in [limits.dram_read, limits.integer_dot, limits.w4a4_tile, limits.f32_multiply_add] {
            assert!((1e8..1e13).contains(&rate), "{limits:?}");
        }
        assert_eq!(limits.floor(4.0, 2.0, 0.0), 2.0);
        assert_eq!(limits.floor(0.0, 1.0, limits.dram_read), 1.0);
    }
}
