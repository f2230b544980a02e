//! Speed of the whole operation on this machine: prepare A, multiply, epilogue, write C as f16.
//!
//! `cargo run --release -p dualgemm-cpu --example gemm_speed [f32|f16|bf16|nvfp4] [ISA] [1t|2t|...] [4c] [32g] [100ms]
//! [limits] [team] [MxNxK ...]`. Packing is excluded. `4c` uses four copies of the weights in turn, so that caches do not hold
//! them; `32g` shares the rows among as many experts, each with weights of its own; `limits` holds each median against
//! the rate at which as many bytes are read. Activations are normally distributed, since their spread decides how few rows are
//! multiplied. Without a number of threads, one and two are measured. Calls come from inside a pool of that many, or a [`Team`].

use std::time::{Duration, Instant};

use dualgemm_cpu::{CpuGemm, CpuOptions, CpuPlan, Group, Isa, PackedGateUp, Team, limits};
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AFormat, AOperand, DualGemmDesc, GateUp, OutFormat, OutputMut};
use half::f16;

struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    fn normal(&mut self) -> f32 {
        let mut uniform = || (f64::from(self.bits()) + 0.5) / f64::from(u32::MAX);
        let (radius, angle) = ((-2.0 * uniform().ln()).sqrt(), std::f64::consts::TAU * uniform());
        (radius * angle.cos()) as f32
    }

    fn quantized(&mut self, rows: usize, k: usize) -> QuantizedMatrix<'static> {
        let codes: Vec<u8> = (0..rows * k / 2).map(|_| self.bits() as u8).collect();
        let scales: Vec<u8> = (0..rows * k / 16).map(|_| 0x20 + (self.bits() % 16) as u8).collect();
        let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
        let scale = GlobalScale::multiplier(1e-3);
        QuantizedMatrix::new("w", format, rows, k, codes, scales, layout, scale).expect("sizes agree")
    }

    fn activations(&mut self, format: AFormat, m: usize, k: usize) -> AOperand<'static> {
        if format.block_format().is_some() {
            return AOperand::Quantized(self.quantized(m, k));
        }
        let ty = format.float_type().expect("floats, if no blocks");
        let values = (0..m * k).map(|_| self.normal());
        AOperand::Float(FloatMatrix::rounded("a", ty, m, k, values).expect("sizes agree"))
    }
}

fn main() {
    let mut format = AFormat::Bf16;
    let (mut shapes, mut threads, mut time) = (Vec::<[usize; 3]>::new(), vec![], Duration::from_millis(500));
    let (mut copies, mut experts, mut isa, mut with_limits, mut with_team) = (1, 1, None, false, false);
    let number = |text: &str| text.parse().expect("a format, 2t, 4c, 500ms or MxNxK");
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "f32" => format = AFormat::F32,
            "f16" => format = AFormat::F16,
            "bf16" => format = AFormat::Bf16,
            "nvfp4" => format = AFormat::Nvfp4,
            "limits" => with_limits = true,
            "team" => with_team = true,
            name if name.parse::<Isa>().is_ok() => isa = name.parse().ok(),
            other => match other.split_at(other.find(char::is_alphabetic).unwrap_or(0)) {
                (millis, "ms") => time = Duration::from_millis(number(millis) as u64),
                (count, "t") => threads.push(number(count)),
                (count, "c") => copies = number(count),
                (count, "g") => experts = number(count),
                _ => {
                    let sizes: Vec<usize> = other.split('x').map(number).collect();
                    shapes.push(sizes.try_into().expect("MxNxK"));
                }
            },
        }
    }
    if shapes.is_empty() {
        shapes = [1, 2, 4, 8, 16, 64, 256].map(|m| [m, 4096, 7168]).to_vec();
    }
    if threads.is_empty() {
        threads = vec![1, 2];
    }
    let mut packed = Vec::<PackedGateUp>::new();
    for [m, n, k] in shapes {
        let mut random = Random(1);
        if packed.first().is_none_or(|weights| (weights.n(), weights.k()) != (n, k)) {
            let weights = GateUp::new(random.quantized(n, k), random.quantized(n, k));
            packed = vec![PackedGateUp::pack(&weights).expect("healthy weights"); copies * experts];
        }
        let a = random.activations(format, m, k);
        let mut desc = DualGemmDesc::new(m, n, k, format, BlockFormat::Nvfp4);
        desc.out = OutFormat::F16;
        let mut c = vec![f16::ZERO; m * n];
        for &threads in &threads {
            let options = CpuOptions { isa, threads: Some(threads), ..CpuOptions::default() };
            let plan = CpuPlan::new(&desc, options).expect("a healthy problem");
            let mut gemm = CpuGemm::new(&plan, experts).expect("an available instruction set");
            let (mut times, mut read) = (Vec::new(), 0.0);
            let bytes = plan.bytes + ((experts - 1) * packed[0].bytes()) as f64;
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            let measure = || {
                if with_limits {
                    let beyond = CpuPlan { bytes: (packed.len() * packed[0].bytes()) as f64, ..plan.clone() };
                    read = bytes / limits::of_plan(&beyond).expect("an available instruction set").1;
                }
                let start = Instant::now();
                while times.len() < 5 || (start.elapsed() < time && times.len() < 2000) {
                    let weights = &packed[times.len() % copies * experts..][..experts];
                    let of = |(i, weights)| {
                        let [first_row, end] = [i, i + 1].map(|i| m * i / experts);
                        Group { first_row, rows: end - first_row, weights }
                    };
                    let groups: Vec<Group<'_>> = weights.iter().enumerate().map(of).collect();
                    let t = Instant::now();
                    gemm.run(&a, &groups, OutputMut::F16(&mut c)).expect("fits the plan");
                    times.push(t.elapsed().as_secs_f64());
                }
            };
            if with_team {
                Team::new(threads).expect("threads").install(measure)
            } else {
                pool.install(measure)
            }
            times.sort_by(f64::total_cmp);
            let rate = |time: f64| (time * 1e3, plan.flops / time / 1e9, bytes / time / 1e9);
            let ((median, flops, bytes), best) = (rate(times[times.len() / 2]), rate(times[0]));
            println!(
                "{format} {m}x{n}x{k} {} {threads}t: {}median {median:.3} ms {flops:.1} GFLOP/s {bytes:.1} GB/s, best {:.3} ms {:.1} GFLOP/s {:.1} GB/s",
                plan.kernel,
                if with_limits { format!("read limit {:.3} ms, ", read * 1e3) } else { String::new() },
                best.0,
                best.1,
                best.2
            );
        }
    }
}
