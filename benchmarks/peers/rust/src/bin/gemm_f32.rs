//! The `gemm` crate in f32 as a worker: one product with gate and up stacked, then silu·mul.

use dualgemm_peers::Job;
use gemm::Parallelism;
use rayon::prelude::*;

fn main() {
    let job = Job::from_args();
    rayon::ThreadPoolBuilder::new().num_threads(job.threads).build_global().expect("the first pool");
    let (m, n, k) = (job.m, job.n, job.k);
    let a = job.a();
    let weights = ["b1.f32", "b2.f32"].map(|name| job.numbers(name, n * k, f32::from_le_bytes)).concat();
    let weights_bytes = weights.len() * 4;
    let sets = vec![weights; job.sets(weights_bytes)];
    let mut gate_up = vec![0f32; m * 2 * n];
    job.serve(weights_bytes, |set, c| {
        let (width, depth) = (2 * n as isize, k as isize);
        // SAFETY: gate_up is [m, 2n], a is [m, k] and the weights are [2n, k], all row-major and of these sizes.
        unsafe {
            gemm::gemm(
                m,
                2 * n,
                k,
                gate_up.as_mut_ptr(),
                1,
                width,
                false,
                a.as_ptr(),
                1,
                depth,
                sets[set].as_ptr(),
                depth,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                Parallelism::Rayon(job.threads),
            );
        }
        gate_up.par_chunks(2 * n).zip(c.par_chunks_mut(n)).for_each(|(row, c)| {
            let (gate, up) = row.split_at(n);
            for ((c, g), u) in c.iter_mut().zip(gate).zip(up) {
                *c = g / (1.0 + (-g).exp()) * u;
            }
        });
    });
}
