//! Times the fused Hopper kernel on a real card: cold L2 (weights, A and C rotate beyond it), launches replayed from
//! a graph. `cargo run --release -p dualgemm-kernels --example sm90a_speed`.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_bench::{Shape, Timing};
use dualgemm_cuda::Cuda;
use dualgemm_device::{Device, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix};
use dualgemm_gemm::{AOperand, Activation, Comparison, Epilogue, GateUp, reference};
use dualgemm_kernels::sm90a::config::Config;
use dualgemm_kernels::sm90a::host::{Fused, Operands};
use dualgemm_kernels::sm90a::pack::Pack;
use half::f16;

const fn config(row_groups: u32, tokens: u32, blocks_per_stage: u32, stages: u32, k_groups: u32) -> Config {
    Config { row_groups, tokens, blocks_per_stage, stages, k_groups }
}

/// Weight bytes that must rotate for L2 (50 MB on an H100) to be cold.
const ROTATE: usize = 220 << 20;

fn measure(gpu: &Cuda, shape: Shape, configs: &[Config]) -> Result<(), Box<dyn std::error::Error>> {
    let Shape { m, n, k } = shape;
    let mut inputs = Inputs::seeded(1);
    let sets = (CodeSet::Full, ScaleSet::Full);
    let mut half =
        |name| inputs.quantized(name, BlockFormat::Nvfp4, (n, k), sets, GlobalScale::multiplier(1e-4));
    let weights = GateUp::new(half("gate")?, half("up")?);
    // A holds FP4 values: what W4A4 multiplies, and less power than Gaussian data (a power-limited card clocks 6 % lower
    // on those).
    let fp4 = inputs.quantized(
        "a",
        BlockFormat::Nvfp4,
        (m, k),
        (CodeSet::Full, ScaleSet::Unit),
        GlobalScale::ONE,
    )?;
    let values: Vec<f16> = (0..m)
        .flat_map(|r| (0..k).map(move |c| (r, c)))
        .map(|(r, c)| f16::from_f64(fp4.value(r, c)))
        .collect();
    let rows = Matrix::new("a", m, k, values)?;
    let pack = Pack::new(&weights)?;
    let copies = (ROTATE / pack.bytes().len()).max(2);
    let sets: Vec<Operands> =
        (0..copies).map(|_| Operands::upload(gpu, &rows, &pack)).collect::<Result<_, _>>()?;
    let sample: Vec<usize> = [0, m / 2, m - 1].into_iter().collect();
    let a = AOperand::Float(FloatMatrix::F16(rows));
    let want: Vec<f64> =
        sample.iter().flat_map(|&r| reference(&Epilogue::default(), &a, r..r + 1, &weights)).collect();
    for config in configs {
        let fused = Fused::new(gpu, *config, &Activation::Silu.program(), n)?;
        for programmatic in [false, true] {
            let specs: Vec<LaunchSpec> = sets
                .iter()
                .map(|set| Ok(fused.spec(set)?.programmatic(programmatic)))
                .collect::<Result<_, dualgemm_kernels::Error>>()?;
            let per_replay = (2500 / (m * n / 20000 + 12)).clamp(8, 200);
            let graph =
                gpu.record(|| (0..per_replay).try_for_each(|i| gpu.launch(&specs[i % specs.len()])))?;
            let mut times = Vec::new();
            for _ in 0..9 {
                std::thread::sleep(std::time::Duration::from_millis(8));
                graph.replay()?;
                times.push(gpu.time_us(|| graph.replay())? / per_replay as f64);
            }
            let t = Timing::from_times(times);
            let c = sets[(per_replay - 1) % sets.len()].read_c(gpu)?;
            let got: Vec<f16> = sample.iter().flat_map(|&r| &c[r * n..(r + 1) * n]).copied().collect();
            let error = Comparison::new(&got, &want, n)?.rel_l2;
            let tflops = 4e-6 * (m * n * k) as f64 / t.median_us;
            println!(
                "{shape:>16} {:<34} {} {:8.2} us ({:.2} .. {:.2})  {tflops:6.1} TFLOP/s  {:7.1} GB/s  rel {error:.2e}",
                config.name(),
                if programmatic { "pdl  " } else { "plain" },
                t.median_us,
                t.p10_us,
                t.p90_us,
                pack.bytes().len() as f64 / t.median_us * 1e-3,
            );
        }
    }
    sets.into_iter().try_for_each(|set| set.free(gpu))?;
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Cuda::open(0)?;
    println!("{} ({}), driver {}", gpu.info().name, gpu.info().arch, Cuda::driver_version()?);
    let shape = Shape::new;
    measure(&gpu, shape(256, 4096, 7168), &[config(2, 128, 2, 4, 1), config(2, 128, 1, 8, 1)])?;
    measure(&gpu, shape(512, 4096, 7168), &[config(2, 256, 2, 3, 1)])?;
    measure(&gpu, shape(256, 3072, 4096), &[config(2, 128, 2, 4, 1), config(3, 64, 4, 3, 1)])?;
    measure(&gpu, shape(512, 3072, 7168), &[config(3, 128, 2, 4, 1)])?;
    for m in [1, 16, 64] {
        let tokens = m.max(8) as u32;
        let stages = if m == 64 { 5 } else { 10 };
        measure(&gpu, shape(m, 4096, 7168), &[config(1, tokens, 4, stages, 4)])?;
        measure(
            &gpu,
            shape(m, 14336, 4096),
            &[
                config(1, tokens, 4, stages, 4),
                config(4, tokens, 2, 6 - 2 * (m as u32 / 64), 1),
                config(2, tokens, 2, 8 - 3 * (m as u32 / 64), 1),
            ],
        )?;
    }
    measure(&gpu, shape(2048, 14336, 4096), &[config(2, 256, 2, 3, 1)])?;
    Ok(())
}
