//! Seeds decide the interleaving and nothing else does.

use dualgemm_device::{Args, Device, Error, LaunchSpec};
use dualgemm_sim::report::Counters;
use dualgemm_sim::{Check, Checks, Config, Gpu, explore};
use std::collections::BTreeSet;

/// Loads 128 bytes by bulk copy and stores what it finds; `WAIT` is replaced.
const LOAD: &str = include_str!("ptx/bulk_load.ptx");

fn results(ptx: &str, seeds: u64) -> BTreeSet<Vec<u8>> {
    let config = Config::default().checks(Checks::NONE);
    let run = |gpu: &Gpu| -> Result<Vec<u8>, Error> {
        let f = gpu.function(gpu.load(ptx)?, "k")?;
        let (src, out) = (gpu.alloc(128)?, gpu.alloc(128)?);
        gpu.memset(src, 0xab, 128)?;
        let args = Args::new().ptr(src).ptr(out);
        gpu.launch(&LaunchSpec::new(f, [1, 1, 1], [32, 1, 1]).dynamic_shared(512).args(args))?;
        let mut bytes = vec![0; 128];
        gpu.copy_from(&mut bytes, out)?;
        Ok(bytes)
    };
    explore(&config, 0..seeds, run).unwrap().into_iter().collect()
}

#[test]
fn a_missing_wait_shows_in_the_result_of_some_seed() {
    let waits = "W: mbarrier.try_wait.parity.shared::cta.b64 q, [r1+256], 0; @!q bra W;";
    assert_eq!(results(&LOAD.replace("WAIT", waits), 32).len(), 1);
    assert!(results(&LOAD.replace("WAIT", ""), 32).len() > 1);
}

/// Float atomics from many CTAs: the sum depends on their order.
const SUM: &str = include_str!("ptx/float_atomics.ptx");

fn on_threads<T: Send>(threads: usize, run: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run)
}

fn sum(seed: u64, threads: usize) -> [u8; 4] {
    on_threads(threads, || {
        let gpu = Gpu::new(Config::default().seed(seed));
        let f = gpu.function(gpu.load(SUM).unwrap(), "k").unwrap();
        let out = gpu.alloc(4).unwrap();
        gpu.memset(out, 0, 4).unwrap();
        gpu.launch(&LaunchSpec::new(f, [50, 1, 1], [64, 1, 1]).args(Args::new().ptr(out))).unwrap();
        let mut bytes = [0; 4];
        gpu.copy_from(&mut bytes, out).unwrap();
        bytes
    })
}

#[test]
fn results_do_not_depend_on_the_number_of_threads_exact() {
    for seed in 0..3 {
        let one = sum(seed, 1);
        for threads in [2, 3, 8] {
            for _ in 0..3 {
                assert_eq!(sum(seed, threads), one);
            }
        }
    }
}

/// The fill of the speed example; `edit` changes its text. What it leaves behind and what was counted, or the report.
fn fill(edit: (&str, &str), threads: usize) -> Result<(Vec<u8>, Counters), String> {
    let run = || -> Result<(Vec<u8>, Counters), Error> {
        let gpu = Gpu::new(Config::default());
        let text = include_str!("ptx/fill.ptx").replace(edit.0, edit.1);
        let kernel = gpu.function(gpu.load(&text)?, "fill")?;
        let mut bytes = vec![0; 20 * 128 * 3 * 2];
        let (out, matrix) = (gpu.alloc(bytes.len())?, gpu.alloc(640)?);
        gpu.copy_to(matrix, &(0..640u32).map(|i| (i * i % 251) as u8).collect::<Vec<_>>())?;
        let args = Args::new().ptr(out).ptr(matrix).u32(bytes.len() as u32 / 2);
        gpu.launch(&LaunchSpec::new(kernel, [20, 1, 1], [128, 1, 1]).args(args))?;
        gpu.copy_from(&mut bytes, out)?;
        Ok((bytes, gpu.take_outcome().unwrap().counters))
    };
    on_threads(threads, || run().map_err(|error| error.to_string()))
}

#[test]
fn memory_counts_and_reports_do_not_depend_on_the_number_of_threads_exact() {
    // From thread 2000 on, in CTA 15, all threads store to the same places.
    let clash = ("mov.u32 digits, thread;", "min.u32 thread, thread, 2000; mov.u32 digits, thread;");
    let (right, report) = (fill(("", ""), 1).unwrap(), fill(clash, 1).unwrap_err());
    assert_eq!(right.1.global_written, right.0.len() as u64);
    assert!(report.contains("data race: write of global memory is not ordered"), "{report}");
    assert!(report.contains("CTA (16, 0, 0)") && report.contains("CTA (15, 0, 0)"), "{report}");
    for threads in [2, 8] {
        assert_eq!(fill(("", ""), threads).as_ref(), Ok(&right));
        assert_eq!(fill(clash, threads).as_ref(), Err(&report));
    }
}

#[test]
fn a_launch_that_the_host_stops_says_how_far_it_came() {
    let gpu = Gpu::new(Config::default());
    let kernel = gpu.function(gpu.load(SUM).unwrap(), "k").unwrap();
    let out = gpu.alloc(4).unwrap();
    let spec = LaunchSpec::new(kernel, [50, 1, 1], [64, 1, 1]).args(Args::new().ptr(out));
    gpu.launch(&spec).unwrap();
    assert_eq!(gpu.progress().ctas(), (50, 50));
    gpu.progress().stop();
    gpu.launch(&spec).unwrap_err();
    let trap = gpu.take_trap().unwrap();
    let message = "the host stopped the launch when 0 of 50 CTAs had finished";
    assert_eq!((trap.check, trap.message.as_str()), (Check::Stopped, message));
}
