//! Quantizing speed of one core: `cargo bench -p dualgemm-formats`. Prints the best of several passes over
//! 4 M elements, in millions of elements per second.

use std::hint::black_box;
use std::time::{Duration, Instant};

use dualgemm_formats::quantize::{mxfp4, te_block};
use dualgemm_formats::{FloatMatrix, GlobalScale, Matrix, Producer, Search, quantize};
use half::{bf16, f16};

const ROWS: usize = 1024;
const K: usize = 4096;

fn main() {
    let mut state = 1u32;
    let x: Vec<f32> = (0..ROWS * K)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (f64::from(state >> 8) / f64::from(1 << 23) - 1.0).powi(3) as f32
        })
        .collect();
    let half: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
    let brain: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let inputs = [
        ("f32", FloatMatrix::F32(Matrix::new("x", ROWS, K, &x).unwrap())),
        ("f16", FloatMatrix::F16(Matrix::new("x", ROWS, K, &half).unwrap())),
        ("bf16", FloatMatrix::Bf16(Matrix::new("x", ROWS, K, &brain).unwrap())),
    ];
    for (ty, x) in &inputs {
        for (producer, search) in
            Producer::ALL.into_iter().map(|p| (p, Search::Plain)).chain([(Producer::ModelOpt, Search::Mse)])
        {
            report(&format!("{producer} {search:?} {ty}"), || {
                black_box(quantize("x", x, producer, search).unwrap());
            });
        }
        report(&format!("mxfp4 {ty}"), || {
            black_box(mxfp4::quantize_mxfp4("x", x).unwrap());
        });
    }
    report("te_block", || {
        for block in x.as_chunks::<16>().0 {
            black_box(te_block(black_box(block), GlobalScale::divisor(1000.0)));
        }
    });
}

fn report(what: &str, mut pass: impl FnMut()) {
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        pass();
        best = best.min(start.elapsed());
    }
    println!("{what:<40} {:7.1} M elements/s", (ROWS * K) as f64 / best.as_secs_f64() / 1e6);
}
