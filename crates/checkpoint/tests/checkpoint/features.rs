//! A run of features is the same run of the whole, however the file stores it.

use crate::common::*;
use dualgemm_checkpoint::{
    Checkpoint, Dtype, GateUpOrder, GateUpSource, Half, NibbleOrder, OpenOptions, Which,
};
use dualgemm_gemm::GateUp;
use serde_json::json;

/// Runs that start and end at blocks, atoms and periods, and beside them.
#[track_caller]
fn assert_runs(source: &GateUpSource<'_>, whole: &GateUp<'_>) {
    let n = whole.gate.rows();
    assert_eq!((source.n(), source.k(), source.format()), (n, whole.gate.k(), whole.gate.format()));
    for (source, whole, bias) in
        [(&source.gate, &whole.gate, &whole.gate_bias), (&source.up, &whole.up, &whole.up_bias)]
    {
        assert_eq!((&*source.name(), source.tensor_scale), (whole.name(), whole.global_scale()));
        assert_eq!(source.bias.as_deref(), bias.as_deref());
    }
    for rows in
        [0..n, 0..1, 7..33, 64..128, 96..n, n - 1..n].into_iter().filter(|r| r.start < r.end && r.end <= n)
    {
        let part = source.features(rows.clone()).unwrap();
        for (part, whole) in [(&part.gate, &whole.gate), (&part.up, &whole.up)] {
            assert_eq!((part.name(), part.global_scale()), (whole.name(), whole.global_scale()));
            assert_eq!(
                part.dense_rows(0..rows.len()),
                whole.dense_rows(rows.clone()),
                "{} {rows:?}",
                whole.name()
            );
        }
        for (part, whole) in [(&part.gate_bias, &whole.gate_bias), (&part.up_bias, &whole.up_bias)] {
            assert_eq!(part.as_deref(), whole.as_ref().map(|bias| &bias[rows.clone()]));
        }
    }
    assert!(source.features(3..3).is_err(), "no features are no matrix");
}

#[test]
fn of_every_real_checkpoint() {
    for name in ["modelopt-nvfp4", "compressed-tensors-nvfp4", "mlp-nvfp4.gguf"] {
        for nibble_order in [NibbleOrder::LoHi, NibbleOrder::HiLo] {
            let c = Checkpoint::open(
                &testdata(name),
                &OpenOptions { nibble_order: Some(nibble_order), ..defaults() },
            )
            .unwrap();
            if name.ends_with(".gguf") && nibble_order == NibbleOrder::HiLo {
                // Its blocks fix the order: what was asked for would be left undone.
                let e = c.gate_up_source(0, Which::Dense).unwrap_err().to_string();
                assert_has(&e, "swapped nibbles in a GGUF file is not supported");
                continue;
            }
            assert_runs(&c.gate_up_source(0, Which::Dense).unwrap(), &c.gate_up(0).unwrap());
        }
    }
}

#[test]
fn of_fused_tensors_in_every_order_and_scale_layout() {
    let fused = Weight::new(1, 384, 64);
    for order in GateUpOrder::ALL {
        for swizzled in [false, true] {
            let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
            f.tensors.retain(|t| !t.name.contains("gate_proj") && !t.name.contains("up_proj"));
            f.modelopt_fused(&fused, swizzled);
            let c = f.open(&OpenOptions { gate_up_order: Some(order), ..defaults() }).unwrap();
            let whole = c.gate_up(0).unwrap();
            fused.rows_at((0..192).map(|r| order.fused_row(Half::Gate, r, 192))).assert_is(&whole.gate);
            fused.rows_at((0..192).map(|r| order.fused_row(Half::Up, r, 192))).assert_is(&whole.up);
            assert_runs(&c.gate_up_source(0, Which::Dense).unwrap(), &whole);
        }
    }
}

#[test]
fn of_transposed_experts_in_one_tensor() {
    let (experts, rows, k) = (3, 96, 64);
    let mut b = Bytes::new(9);
    let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
    f.tensors.clear();
    f.config.as_mut().unwrap()["hidden_size"] = json!(k);
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    f.add(name, Dtype::U8, &[experts, k / 2, rows], b.codes(experts * rows * k / 2));
    f.add(
        &format!("{name}_weight_scale"),
        Dtype::F8E4m3,
        &[experts, k / 16, rows],
        b.scales(experts * rows * k / 16),
    );
    f.f32(&format!("{name}_weight_scale_2"), &[experts, 1, 1], &[0.001, 0.002, 0.003]);
    let c = f.open(&OpenOptions { gate_up_order: Some(GateUpOrder::GateUpRows), ..defaults() }).unwrap();
    for e in c.experts(0).unwrap() {
        assert_runs(&c.gate_up_source(0, Which::Expert(e)).unwrap(), &expert(&c, 0, e).unwrap());
    }
    assert!(c.gate_up_source(0, Which::Expert(3)).is_err());
}
