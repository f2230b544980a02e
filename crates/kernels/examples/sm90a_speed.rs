//! Times the fused Hopper kernel on a real card: cold L2 (weights, A and C rotate beyond it), launches replayed from
//! a graph. `cargo run --release -p dualgemm-kernels --example sm90a_speed -- [SHAPE CONFIG...]...`
//!
//! A shape is `MxNxK`. A configuration is `ROW_GROUPS,TOKENS,BLOCKS_PER_STAGE,STAGES,K_GROUPS`, and behind it any of
//! `:persistent`, `:stream-k`, `:split` (two CTAs split K), `:two` (two CTAs per multiprocessor), `:ragged` (as if K were no multiple of 64). Without arguments the shapes of `benchmarks/record/` are
//! measured.

use std::time::Duration;

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_bench::{Shape, Timing};
use dualgemm_cuda::Cuda;
use dualgemm_device::{Device, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix};
use dualgemm_gemm::{AOperand, Activation, Comparison, Epilogue, GateUp, reference};
use dualgemm_kernels::sm90a::config::Config;
use dualgemm_kernels::sm90a::host::Fused;
use dualgemm_kernels::sm90a::operands::Operands;
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_kernels::sm90a::variant::{Scheduler, Variant};
use half::f16;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// What the record measures.
const RECORD: &str = "
    256x4096x7168 2,256,2,3,1:split 2,128,2,4,1
    512x4096x7168 2,256,2,3,1
    256x3072x4096 3,128,2,4,1:split 2,128,2,4,1
    512x3072x7168 3,128,2,4,1
    1x4096x7168 1,8,4,10,4
    8x4096x7168 1,8,4,10,4
    16x4096x7168 1,16,4,10,4
    32x4096x7168 1,32,4,8,4
    64x4096x7168 1,64,3,6,3 1,64,4,5,4
    128x4096x7168 2,128,2,4,1:split
    1x14336x4096 2,8,2,10,1:two 4,8,2,6,1
    16x14336x4096 2,16,2,8,1:two 4,16,2,6,1
    64x14336x4096 4,64,2,4,1
    512x14336x4096 2,256,2,3,1 3,128,2,4,1 3,128,2,4,1:persistent 2,128,2,4,1
    2048x14336x4096 2,256,2,3,1 2,256,1,5,1:persistent
    8192x14336x4096 2,256,2,3,1 2,256,1,5,1:persistent";

/// Weight bytes that must rotate for L2 (50 MB on an H100) to be cold.
const ROTATE: usize = 220 << 20;

/// A configuration, its scheduler, and whether K is treated as ragged.
type Choice = (Config, Scheduler, bool);

fn config(text: &str) -> Option<Choice> {
    let mut words = text.split(':');
    let numbers: Vec<u32> = words.next()?.split(',').map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let &[rows, tokens, blocks, stages, k_groups] = numbers.as_slice() else { return None };
    let start = (Config::new(rows, tokens, blocks, stages, k_groups), Scheduler::Grid, false);
    words.try_fold(start, |(config, scheduler, ragged), word| {
        Some(match word {
            "persistent" => (config, Scheduler::Persistent, ragged),
            "stream-k" => (config, Scheduler::StreamK, ragged),
            "split" => (config.split_k(), scheduler, ragged),
            "two" => (config.two_per_sm(), scheduler, ragged),
            "ragged" => (config, scheduler, true),
            _ => return None,
        })
    })
}

fn shape(text: &str) -> Option<Shape> {
    let numbers: Vec<usize> = text.split('x').map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let &[m, n, k] = numbers.as_slice() else { return None };
    Some(Shape::new(m, n, k))
}

fn measure(gpu: &Cuda, shape: Shape, configs: &[Choice]) -> Outcome<()> {
    let Shape { m, n, k } = shape;
    let mut inputs = Inputs::seeded(1);
    let sets = (CodeSet::Full, ScaleSet::Full);
    let mut half =
        |name| inputs.quantized(name, BlockFormat::Nvfp4, (n, k), sets, GlobalScale::multiplier(1e-4));
    let weights = GateUp::new(half("gate")?, half("up")?);
    // A holds FP4 values: what W4A4 multiplies, and less power than Gaussian data (a power-limited card clocks 6 % lower
    // on those).
    let sets = (CodeSet::Full, ScaleSet::Unit);
    let fp4 = inputs.quantized("a", BlockFormat::Nvfp4, (m, k), sets, GlobalScale::ONE)?;
    let values: Vec<f16> = (0..m)
        .flat_map(|r| (0..k).map(move |c| (r, c)))
        .map(|(r, c)| f16::from_f64(fp4.value(r, c)))
        .collect();
    let rows = FloatMatrix::F16(Matrix::new("a", m, k, values)?);
    let pack = Pack::new(&weights)?;
    let sample: Vec<usize> = [0, m - 1].into_iter().collect();
    let a = AOperand::Float(rows.clone());
    let want: Vec<f64> =
        sample.iter().flat_map(|&r| reference(&Epilogue::default(), &a, r..r + 1, &weights)).collect();
    let copies = (ROTATE / pack.bytes().len()).max(2);
    let mut shared: Option<Vec<Operands>> = None;
    for &(config, scheduler, ragged) in configs {
        let variant = Variant { scheduler, ..Variant::new(Activation::Silu.program()) }.for_weights(n, k);
        let variant = Variant { whole_blocks: variant.whole_blocks && !ragged, ..variant };
        let fused = match Fused::new(gpu, config, &variant) {
            Ok(fused) => fused,
            Err(error) => {
                println!("{shape:>16} {}: {error}", config.name());
                continue;
            }
        };
        if shared.is_none() {
            let upload = |_| Operands::upload(gpu, &fused, &rows, &pack);
            shared = Some((0..copies).map(upload).collect::<Result<_, _>>()?);
        }
        let sets = shared.as_deref().unwrap_or_default();
        let bytes = fused.workspace_bytes();
        let workspace = gpu.alloc(bytes.max(16))?;
        gpu.memset(workspace, 0, bytes.max(16))?;
        for programmatic in [false, true] {
            let specs: Vec<LaunchSpec> = sets
                .iter()
                .map(|set| {
                    let mut args = *set.args();
                    args.workspace = workspace;
                    Ok(fused.spec(&args)?.programmatic(programmatic))
                })
                .collect::<Result<_, dualgemm_kernels::Error>>()?;
            let per_replay = (2500 / (m * n / 20000 + 12)).clamp(8, 200);
            let graph = gpu.record(|| {
                // SAFETY: the operands are as large as the launches say, and are there to the end.
                (0..per_replay).try_for_each(|i| unsafe { gpu.launch(&specs[i % specs.len()]) })
            })?;
            // SAFETY: as above.
            let replay = || unsafe { graph.replay() };
            let mut times = Vec::new();
            for _ in 0..9 {
                std::thread::sleep(Duration::from_millis(8));
                replay()?;
                times.push(gpu.time_us(replay)? / per_replay as f64);
            }
            let t = Timing::from_times(times);
            let mut worst = 0.0f64;
            for set in sets {
                let c = set.read_values(gpu)?;
                let got: Vec<f16> =
                    sample.iter().flat_map(|&r| &c[r * n..(r + 1) * n]).map(|&x| f16::from_f32(x)).collect();
                worst = worst.max(Comparison::new(&got, &want, n)?.rel_l2);
            }
            println!(
                "{shape:>16} {:<40} {} {:8.2} us ({:.2} .. {:.2}) {:6.1} TFLOP/s {:7.1} GB/s  rel {worst:.2e}",
                format!("{}{}{}", config.name(), suffix(scheduler), if ragged { " ragged" } else { "" }),
                if programmatic { "pdl  " } else { "plain" },
                t.median_us,
                t.p10_us,
                t.p90_us,
                4e-6 * (m * n * k) as f64 / t.median_us,
                pack.bytes().len() as f64 / t.median_us * 1e-3,
            );
        }
        gpu.free(workspace)?;
    }
    shared.into_iter().flatten().try_for_each(|set| set.free(gpu))?;
    Ok(())
}

fn suffix(scheduler: Scheduler) -> &'static str {
    match scheduler {
        Scheduler::Grid => "",
        Scheduler::Persistent => " persistent",
        Scheduler::StreamK => " stream-k",
    }
}

fn main() -> Outcome<()> {
    let gpu = Cuda::open(0)?;
    println!("{} ({}), driver {}", gpu.info().name, gpu.info().arch, Cuda::driver_version()?);
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    if words.is_empty() {
        words = RECORD.split_whitespace().map(Into::into).collect();
    }
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let shape = shape(word).ok_or_else(|| format!("{word:?} is no shape MxNxK"))?;
        let mut configs = Vec::new();
        while let Some(config) = words.peek().and_then(|word| config(word)) {
            configs.push(config);
            words.next();
        }
        if let Err(error) = measure(&gpu, shape, &configs) {
            println!("{shape}: {error}");
        }
    }
    Ok(())
}
