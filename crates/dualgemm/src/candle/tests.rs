//! The operators on a processor and on simulated cards, which are close.

use super::*;
use crate::formats::{Producer, Search, quantize};
use crate::{GpuId, GpuOptions, SimArch};

const N: usize = 48;
const K: usize = 96;

fn weights() -> GateUp<'static> {
    let half = |name: &str, step: f32| {
        let values: Vec<f32> = (0..N * K).map(|i| (i as f32 * step).sin()).collect();
        let matrix = FloatMatrix::F32(Matrix::new(name, N, K, values).unwrap());
        quantize(name, &matrix, Producer::Te, Search::Plain).unwrap()
    };
    GateUp::new(half("gate", 0.37), half("up", 0.53))
}

/// C of `rows` rows.
fn c<T: Float>(packed: &Packed, rows: usize) -> Vec<f64> {
    let x: Vec<T> = (0..rows * K).map(|i| T::from_f64((i as f64 * 0.29).cos())).collect();
    let layout = Layout::contiguous((rows, K));
    let c = packed.cpu(&x, &layout, rows, None).unwrap_or_else(|e| panic!("{}: {e}", packed.layer.target));
    c.into_iter().map(T::to_f64).collect()
}

fn rel_l2(got: &[f64], want: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(want).map(|(got, want)| got - want)) / norm(&mut want.iter().copied())
}

/// The three operators of these weights, down being the first rows of gate, as many as K.
fn packed(what: usize, options: &Options, target: Target) -> Arc<Packed> {
    let layer = |rows, k| {
        let values: Vec<f32> = (0..rows * k).map(|i| (i as f32 * 0.41).sin()).collect();
        let matrix = FloatMatrix::F32(Matrix::new("w", rows, k, values).unwrap());
        gemm::Linear::new(quantize("w", &matrix, Producer::Te, Search::Plain).unwrap())
    };
    let packed = match what {
        0 => PackedLayer::product(&weights(), target),
        1 => PackedLayer::product(&layer(N, K), target),
        _ => PackedLayer::mlp(&gemm::GatedMlp { gate_up: weights(), down: layer(K, N) }, target),
    };
    Packed::new(packed.unwrap(), options)
}

/// Weights are packed once for whatever comes: plans of one card may read them in different orders.
#[test]
fn every_target_takes_every_type_of_tensor_close() {
    for (what, quantize_a) in [
        (0, QuantizeA::No),
        (0, QuantizeA::Dynamic),
        (1, QuantizeA::No),
        (1, QuantizeA::Dynamic),
        (2, QuantizeA::No),
    ] {
        let options = Options { quantize_a, ..Options::default() };
        let cpu = packed(what, &options, Target::default());
        for arch in SimArch::ALL {
            let card = packed(what, &options, Target::Gpu(GpuId::Sim(arch), GpuOptions::default()));
            for rows in [1, 5] {
                let errors = [
                    rel_l2(&c::<f16>(&card, rows), &c::<f16>(&cpu, rows)),
                    rel_l2(&c::<bf16>(&card, rows), &c::<bf16>(&cpu, rows)),
                ];
                assert!(
                    errors[0] < 1e-3 && errors[1] < 8e-3,
                    "{what} {arch:?} {quantize_a:?} {rows}: {errors:?}"
                );
            }
        }
    }
}
