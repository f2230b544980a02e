//! Speed of the whole W4A4 operation (silu, f32 output) on this machine: median and best over repeated runs, by shape
//! and thread count, beside the limits of the machine.
//!
//! `cargo run --release -p dualgemm-cpu --example w4a4_speed [MxNxK ...]`. Packing is excluded; preparing A is not.

use std::time::Instant;

use dualgemm_cpu::{CpuGemm, CpuOptions, CpuPlan, Group, Isa, PackedGateUp, limits};
use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AFormat, AOperand, DualGemmDesc, GateUp, OutputMut};

fn matrix(name: &'static str, rows: usize, k: usize, seed: u64) -> QuantizedMatrix<'static> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    let codes: Vec<u8> = (0..rows * k / 2).map(|_| next()).collect();
    let scales: Vec<u8> = (0..rows * k / 16).map(|_| 0x30 + next() % 16).collect();
    let (format, layout) = (BlockFormat::Nvfp4, ScaleLayout::Linear);
    QuantizedMatrix::new(name, format, rows, k, codes, scales, layout, GlobalScale::ONE).expect("sizes agree")
}

fn main() {
    let mut shapes: Vec<[usize; 3]> = std::env::args()
        .skip(1)
        .map(|shape| {
            let sizes: Vec<usize> = shape.split('x').map(|s| s.parse().expect("MxNxK")).collect();
            sizes.try_into().expect("MxNxK")
        })
        .collect();
    if shapes.is_empty() {
        shapes = [1, 2, 3, 4, 8, 16, 64, 256].map(|m| [m, 4096, 7168]).to_vec();
        shapes.push([256, 3072, 4096]);
    }
    for threads in [1, 2] {
        let limits = limits::measure(Isa::best(), threads).expect("an available instruction set");
        println!(
            "limits of {}, {threads}t: integer dots {:.0} GOP/s, W4A4 tile {:.0} GFLOP/s, f32 {:.0} GFLOP/s, DRAM {:.1} GB/s",
            limits.isa,
            limits.integer_dot / 1e9,
            limits.w4a4_tile / 1e9,
            limits.f32_multiply_add / 1e9,
            limits.dram_read / 1e9
        );
    }
    let mut packed: Option<PackedGateUp> = None;
    for [m, n, k] in shapes {
        let weights = match packed.take() {
            Some(weights) if (weights.n(), weights.k()) == (n, k) => weights,
            _ => PackedGateUp::pack(&GateUp::new(matrix("gate", n, k, 1), matrix("up", n, k, 2)))
                .expect("healthy weights"),
        };
        let a = AOperand::Quantized(matrix("a", m, k, 3));
        let desc = DualGemmDesc::new(m, n, k, AFormat::Nvfp4, BlockFormat::Nvfp4);
        for threads in [1, 2] {
            let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
            let plan = CpuPlan::new(&desc, options).expect("a healthy problem");
            let mut gemm = CpuGemm::new(&plan, 1).expect("an available instruction set");
            let mut c = vec![0.0; m * n];
            // With few rows, caches would still hold the weights from the turn before: several copies take turns.
            let copies: Vec<PackedGateUp> =
                (1..if m <= 4 { 4 } else { 1 }).map(|_| weights.clone()).collect();
            let mut turns = std::iter::once(&weights).chain(&copies).cycle();
            let mut times = Vec::new();
            let start = Instant::now();
            while times.len() < 5 || (start.elapsed().as_secs_f64() < 0.8 && times.len() < 20000) {
                let group = [Group { first_row: 0, rows: m, weights: turns.next().expect("endless") }];
                let t = Instant::now();
                gemm.run(&a, &group, OutputMut::F32(&mut c)).expect("fits the plan");
                times.push(t.elapsed().as_secs_f64());
            }
            times.sort_by(f64::total_cmp);
            let (best, median) = (times[0], times[times.len() / 2]);
            println!(
                "{m:4}x{n}x{k} {:22} {threads}t: median {:8.3} ms {:6.1} GFLOP/s {:5.1} GB/s, best {:8.3} ms {:6.1} GFLOP/s {:5.1} GB/s",
                plan.kernel,
                median * 1e3,
                plan.flops / median / 1e9,
                plan.bytes / median / 1e9,
                best * 1e3,
                plan.flops / best / 1e9,
                plan.bytes / best / 1e9
            );
        }
        packed = Some(weights);
    }
}
