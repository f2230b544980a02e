//! Finding gate and up: shards, experts, fused orders, naming styles, several stacks of layers.

use crate::common::{
    Fixture, PROJECTIONS, Weight, assert_ends, assert_has, assert_starts, defaults, expert, expert_down,
    message, w4a16,
};
use dualgemm_checkpoint::{Checkpoint, Dtype, Error, GateUpOrder, Half, MlpKind, OpenOptions, Which};
use serde_json::json;

fn with_order(order: GateUpOrder) -> OpenOptions {
    OpenOptions { gate_up_order: Some(order), ..defaults() }
}

#[test]
fn gate_and_up_and_their_scales_may_lie_in_different_shards() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = w4a16();
    for e in 0..3 {
        f.modules(&format!("model.layers.5.block_sparse_moe.experts.{e}"), &["w1", "w3", "w2"], 10 * e);
    }
    // Every tensor of a module in another shard than its neighbours.
    f.write_sharded(dir.path(), |name| match name {
        _ if name.ends_with("weight_scale_2") => 2,
        _ if name.ends_with("weight_scale") => usize::from(name.contains("w1")),
        _ => usize::from(name.contains("w3")),
    });
    for path in [dir.path().to_path_buf(), dir.path().join("model.safetensors.index.json")] {
        let c = Checkpoint::open(&path, &defaults()).unwrap();
        assert_eq!(c.layers(), [5]);
        assert_eq!(c.experts(5).unwrap(), [0, 1, 2]);
        for e in 0..3 {
            let mlp = expert(&c, 5, e).unwrap();
            Weight::new(10 * e as u64, 64, 64).assert_is(&mlp.gate);
            Weight::new(10 * e as u64 + 1, 64, 64).assert_is(&mlp.up);
            Weight::new(10 * e as u64 + 2, 64, 64).assert_is(&expert_down(&c, 5, e).unwrap().weight);
        }
        let e = expert(&c, 5, 3).unwrap_err().to_string();
        assert_eq!(e, "model.layers.5.block_sparse_moe.experts: no expert 3; there are 0, 1, 2");
        let e = message(&c.gate_up(5).unwrap_err());
        assert_ends(
            &e,
            "layer 5 holds experts `model.layers.5.block_sparse_moe.experts`; it has no dense MLP: --expert 0 to 2 for \
                 one, --op moe for all",
        );
    }
}

#[test]
fn a_missing_expert_tensor_names_the_expert() {
    let mut f = w4a16();
    f.modules("model.layers.0.mlp.experts.7", &PROJECTIONS, 1);
    f.remove("model.layers.0.mlp.experts.7.up_proj.weight_scale_2");
    let c = f.open(&defaults()).unwrap();
    let e = message(&expert(&c, 0, 7).unwrap_err());
    assert_starts(&e, "model.layers.0.mlp.experts.7.up_proj.weight_scale_2: is missing from DIR;");
}

/// Gate and up arranged in an order, by the order's own index function, which has drawings of its own.
fn fuse(order: GateUpOrder, gate: &Weight, up: &Weight) -> Weight {
    let n = gate.rows;
    let both = gate.stacked(up);
    let mut source = vec![usize::MAX; 2 * n];
    for row in 0..n {
        source[order.fused_row(Half::Gate, row, n)] = row;
        source[order.fused_row(Half::Up, row, n)] = n + row;
    }
    both.rows_at(source)
}

#[test]
fn fused_orders_are_undone_and_a_wrong_one_changes_the_result() {
    let (gate, up) = (Weight::new(1, 192, 64), Weight::new(2, 192, 64));
    for order in GateUpOrder::ALL {
        let fused = fuse(order, &gate, &up);
        for swizzled in [false, true] {
            let mut f = w4a16();
            f.modelopt_fused(&fused, swizzled);
            let c = f.open(&with_order(order)).unwrap();
            let mlp = c.gate_up(0).unwrap();
            gate.assert_is(&mlp.gate);
            up.assert_is(&mlp.up);
            let (gate_bias, up_bias) = (mlp.gate_bias.unwrap(), mlp.up_bias.unwrap());
            for row in 0..192 {
                assert_eq!(gate_bias[row] as usize, order.fused_row(Half::Gate, row, 192));
                assert_eq!(up_bias[row] as usize, order.fused_row(Half::Up, row, 192));
            }
            for wrong in GateUpOrder::ALL.into_iter().filter(|&o| o != order) {
                let c = f.open(&with_order(wrong)).unwrap();
                let read = c.gate_up(0).unwrap();
                let same = (0..192).all(|r| read.gate.row_codes(r) == &gate.codes[r * 32..(r + 1) * 32]);
                assert!(!same, "{order} read as {wrong}");
            }
        }
    }
}

#[test]
fn halves_are_views_and_other_orders_copies() {
    let (gate, up) = (Weight::new(1, 128, 64), Weight::new(2, 128, 64));
    for (order, borrowed) in
        [(GateUpOrder::GateUp, true), (GateUpOrder::UpGate, true), (GateUpOrder::GateUpRows, false)]
    {
        let mut f = w4a16();
        f.modelopt("model.layers.0.mlp.gate_up_proj", &fuse(order, &gate, &up), 1e-3, None);
        let c = f.open(&with_order(order)).unwrap();
        let file = c.files().get("model.layers.0.mlp.gate_up_proj.weight").unwrap().bytes.as_ptr_range();
        let mlp = c.gate_up(0).unwrap();
        assert_eq!(file.contains(&mlp.up.codes().as_ptr()), borrowed, "{order}");
    }
}

#[test]
fn a_fused_tensor_needs_an_order_that_fits() {
    let mut f = w4a16();
    f.modelopt("model.layers.0.mlp.gate_up_proj", &Weight::new(1, 96, 64), 1e-3, None);
    let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
    assert_eq!(
        e,
        "model.layers.0.mlp.gate_up_proj.weight: holds gate and up in one tensor; name their order explicitly, one of \
         gate-up, up-gate, up-gate-64, up-gate-32, gate-up-rows, up-gate-rows, trtllm-gen"
    );
    let e = f.open(&with_order(GateUpOrder::UpGate64)).unwrap().gate_up(0).unwrap_err().to_string();
    assert_eq!(
        e,
        "model.layers.0.mlp.gate_up_proj.weight: has 96 rows; order up-gate-64 needs a positive multiple of 128"
    );
}

/// Three experts in one parameter, with names without `.weight`.
fn stacked(weights: &[Weight], transposed: bool) -> Fixture {
    let mut f = w4a16();
    let (rows, k) = (weights[0].rows, weights[0].k);
    let lay = |bytes: &[u8], cols: usize| -> Vec<u8> {
        if !transposed {
            return bytes.to_vec();
        }
        (0..cols).flat_map(|c| (0..rows).map(move |r| bytes[r * cols + c])).collect()
    };
    let shape = |cols: usize| if transposed { [3, cols, rows] } else { [3, rows, cols] };
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let codes = weights.iter().flat_map(|w| lay(&w.codes, k / 2)).collect();
    let scales = weights.iter().flat_map(|w| lay(&w.scales, k / 16)).collect();
    f.add(name, Dtype::U8, &shape(k / 2), codes);
    f.add(&format!("{name}_weight_scale"), Dtype::F8E4m3, &shape(k / 16), scales);
    f.f32(&format!("{name}_weight_scale_2"), &[3, 1, 1], &[0.001, 0.002, 0.003]);
    f.f32(&format!("{name}_bias"), &[3, rows], &(0..3 * rows).map(|i| i as f32).collect::<Vec<_>>());
    f
}

#[test]
fn experts_in_one_tensor_are_read_in_both_dimension_orders() {
    let weights: Vec<Weight> = (0..3).map(|e| Weight::new(40 + e, 96, 64)).collect();
    for transposed in [false, true] {
        let mut f = stacked(&weights, transposed);
        f.config.as_mut().unwrap()["hidden_size"] = json!(64);
        let c = f.open(&with_order(GateUpOrder::GateUpRows)).unwrap();
        assert_eq!(c.experts(0).unwrap(), [0, 1, 2]);
        assert_eq!(c.mlps()[0].experts, 3);
        for (e, w) in weights.iter().enumerate() {
            let mlp = expert(&c, 0, e).unwrap();
            w.rows_at((0..48).map(|r| 2 * r)).assert_is(&mlp.gate);
            w.rows_at((0..48).map(|r| 2 * r + 1)).assert_is(&mlp.up);
            assert_eq!(mlp.up.global_scale().value(), [0.001, 0.002, 0.003][e]);
            assert_eq!(mlp.up_bias.unwrap()[1], (e * 96 + 3) as f32);
        }
        assert!(matches!(expert(&c, 0, 3), Err(Error::NoExpert { .. })));
    }
}

#[test]
fn a_stacked_tensor_that_contradicts_the_config_is_refused() {
    let mut f = stacked(&(0..3).map(|e| Weight::new(e, 96, 64)).collect::<Vec<_>>(), true);
    f.config.as_mut().unwrap()["hidden_size"] = json!(96);
    let c = f.open(&with_order(GateUpOrder::GateUp)).unwrap();
    let e = expert(&c, 0, 0).unwrap_err().to_string();
    assert_eq!(
        e,
        "model.layers.0.mlp.experts.gate_up_proj: shape [3, 96, 64] cannot be a projection of this model; valid is \
         K = 96, the hidden_size of config.json"
    );
}

#[test]
fn stacked_scales_that_fit_neither_order_are_refused() {
    let mut f = stacked(&(0..3).map(|e| Weight::new(e, 96, 64)).collect::<Vec<_>>(), false);
    let t = f.tensor("model.layers.0.mlp.experts.gate_up_proj_weight_scale");
    t.shape = vec![3, 4, 96];
    let c = f.open(&with_order(GateUpOrder::GateUp)).unwrap();
    let e = expert(&c, 0, 0).unwrap_err().to_string();
    assert_has(&e, "shape [3, 4, 96] cannot be block scales; valid is [3, 96, 4] for");
}

#[test]
fn gpt_oss_blocks_are_read_with_the_order_its_format_fixes() {
    let weights: Vec<Weight> = (0..2).map(|e| Weight::with_block(60 + e, 64, 96, 32)).collect();
    let config = json!({ "model_type": "gpt_oss", "hidden_size": 96, "quantization_config": { "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"] } });
    let mut f = Fixture::with(config);
    let name = "model.layers.4.mlp.experts.gate_up_proj";
    f.add(
        &format!("{name}_blocks"),
        Dtype::U8,
        &[2, 64, 3, 16],
        weights.iter().flat_map(|w| w.codes.clone()).collect(),
    );
    f.add(
        &format!("{name}_scales"),
        Dtype::U8,
        &[2, 64, 3],
        weights.iter().flat_map(|w| w.scales.clone()).collect(),
    );
    f.add(
        &format!("{name}_bias"),
        Dtype::Bf16,
        &[2, 64],
        (0..128u16).flat_map(|i| half::bf16::from_f32(f32::from(i)).to_le_bytes()).collect(),
    );
    f.add("model.layers.4.mlp.router.weight", Dtype::Bf16, &[2, 4], vec![0; 16]);
    let c = f.open(&defaults()).unwrap();
    assert_eq!(c.convention().name, "gpt-oss");
    assert_eq!(c.experts(4).unwrap(), [0, 1]);
    for (e, w) in weights.iter().enumerate() {
        let source = c.gate_up_source(4, Which::Expert(e)).unwrap();
        let mlp = source.read().unwrap();
        w.rows_at((0..32).map(|r| 2 * r)).assert_is(&mlp.gate);
        w.rows_at((0..32).map(|r| 2 * r + 1)).assert_is(&mlp.up);
        let (gate, up) = (mlp.gate_bias.unwrap(), mlp.up_bias.unwrap());
        assert_eq!((gate[1], up[1]), ((e * 64 + 2) as f32, (e * 64 + 3) as f32));
        assert_eq!(source.input_scales().unwrap(), None);
    }
    assert!(c.validate().is_empty(), "{:?}", c.validate());
}

#[test]
fn shared_and_routed_experts_and_dense_layers_are_told_apart() {
    let mut f = w4a16();
    f.modules("model.layers.0.mlp", &PROJECTIONS, 1);
    f.modules("model.layers.1.mlp.experts.0", &PROJECTIONS, 11);
    f.modules("model.layers.1.mlp.shared_experts", &PROJECTIONS, 21);
    f.add("model.layers.1.mlp.gate.weight", Dtype::Bf16, &[1, 64], vec![0; 128]);
    let c = f.open(&defaults()).unwrap();
    assert_eq!(c.layers(), [0, 1]);
    let kinds: Vec<_> = c.mlps().iter().map(|m| (m.layer, m.kind)).collect();
    assert_eq!(kinds, [(0, MlpKind::Dense), (1, MlpKind::Experts), (1, MlpKind::Shared)]);
    Weight::new(1, 64, 64).assert_is(&c.gate_up(0).unwrap().gate);
    Weight::new(11, 64, 64).assert_is(&expert(&c, 1, 0).unwrap().gate);
    Weight::new(22, 64, 64).assert_is(&c.gate_up_source(1, Which::Shared).unwrap().read().unwrap().up);
    Weight::new(23, 64, 64).assert_is(&c.down_source(1, Which::Shared).unwrap().read().unwrap().weight);
    assert!(matches!(c.experts(0), Err(Error::LayerKind { .. })));
    assert_ends(&message(&c.gate_up(7).unwrap_err()), "there is one in layers 0 to 1");
}

#[test]
fn two_stacks_of_layers_need_a_name() {
    let mut f = w4a16();
    for (stack, seed) in [("model.layers", 1), ("mtp.layers", 11)] {
        f.modules(&format!("{stack}.0.mlp"), &PROJECTIONS[..2], seed);
    }
    let e = message(&f.open(&defaults()).unwrap().gate_up(0).unwrap_err());
    assert!(
        e.ends_with("layer 0 holds several: `model.layers.0.mlp`, `mtp.layers.0.mlp`; say within which of these names to look (`within`)")
            || e.ends_with("layer 0 holds several: `mtp.layers.0.mlp`, `model.layers.0.mlp`; say within which of these names to look (`within`)"),
        "{e}"
    );
    let c = f.open(&OpenOptions { within: Some("mtp.".into()), ..defaults() }).unwrap();
    Weight::new(11, 64, 64).assert_is(&c.gate_up(0).unwrap().gate);
    // A vision tower in floats is no second answer.
    let mut f = w4a16();
    f.modules("model.layers.0.mlp", &PROJECTIONS[..2], 1);
    for p in &PROJECTIONS[..2] {
        f.add(&format!("visual.blocks.0.mlp.{p}.weight"), Dtype::Bf16, &[2, 2], vec![0; 8]);
    }
    Weight::new(1, 64, 64).assert_is(&f.open(&defaults()).unwrap().gate_up(0).unwrap().gate);
}

#[test]
fn gate_and_up_keep_their_own_tensor_scales() {
    for ratio in [1.2547f32, 2.14, 10.0] {
        let mut f = w4a16();
        f.modelopt("model.layers.0.mlp.gate_proj", &Weight::new(1, 64, 64), 3.85e-5, None);
        f.modelopt("model.layers.0.mlp.up_proj", &Weight::new(2, 64, 64), 3.85e-5 * ratio, None);
        let c = f.open(&defaults()).unwrap();
        let mlp = c.gate_up(0).unwrap();
        assert_eq!(
            [mlp.gate.global_scale().value(), mlp.up.global_scale().value()],
            [3.85e-5, 3.85e-5 * ratio]
        );
    }
}

#[test]
fn indices_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = w4a16();
    f.modules("model.layers.0.mlp", &PROJECTIONS[..2], 1);
    f.write_sharded(dir.path(), |name| usize::from(name.contains("up_proj")));
    let index = dir.path().join("model.safetensors.index.json");
    let honest: serde_json::Value = serde_json::from_slice(&std::fs::read(&index).unwrap()).unwrap();
    let error = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut json = honest.clone();
        change(&mut json);
        std::fs::write(&index, json.to_string()).unwrap();
        message(&Checkpoint::open(dir.path(), &defaults()).unwrap_err())
    };
    let up = "model.layers.0.mlp.up_proj.weight";
    assert_eq!(
        error(&|j| j["weight_map"][up] = json!("model-00000.safetensors")),
        format!(
            "DIR/model.safetensors.index.json: header rule `weight-map`: found tensor `{up}` in \
             model-00000.safetensors, which does not hold it; valid is the file that holds each tensor"
        )
    );
    let e = error(&|j| drop(j["weight_map"].as_object_mut().unwrap().remove(up)));
    assert_has(&e, &format!("no entry for tensor `{up}`"));
    let e = error(&|j| j["weight_map"][up] = json!("../secret.safetensors"));
    assert_has(&e, "rule `shard-name`: found \"../secret.safetensors\"");
    assert_has(&error(&|j| j["weight_map"][up] = json!("/etc/passwd")), "rule `shard-name`");
    assert_has(&error(&|j| j["weight_map"][up] = json!(3)), "rule `shard-name`: found 3 for tensor");
    assert_has(&error(&|j| j["weight_map"] = json!({})), "an empty `weight_map`");
    assert_has(&error(&|j| j["weight_map"] = json!([])), "no object `weight_map`");
    assert_has(
        &error(&|j| j["weight_map"][up] = json!("model-00009.safetensors")),
        &format!("rule `weight-map`: found tensor `{up}` in model-00009.safetensors, which is not there"),
    );
}

#[test]
fn paths_that_are_no_checkpoint_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &std::path::Path| message(&Checkpoint::open(path, &defaults()).unwrap_err());
    assert_starts(&open(dir.path()), "DIR: holds no safetensors file; give a directory with");
    assert_starts(&open(&dir.path().join("none")), "DIR/none: cannot open: No such file");
    std::fs::write(dir.path().join("model.bin"), b"x").unwrap();
    assert_starts(&open(&dir.path().join("model.bin")), "DIR/model.bin: has an unknown ending; give a");
    std::fs::write(dir.path().join("config.json"), b"[1]").unwrap();
    std::fs::write(dir.path().join("m.safetensors"), b"").unwrap();
    assert_has(&open(dir.path()), "rule `length-prefix`: found a file of 0 bytes");
}

#[test]
fn linear_layers_are_listed_and_names_that_are_not_there_bring_those_most_like_them() {
    let mut f = w4a16();
    for (seed, name) in ["mlp.down_proj", "self_attn.k_proj", "self_attn.q_proj"].into_iter().enumerate() {
        f.modelopt(&format!("model.layers.0.{name}"), &Weight::new(seed as u64, 64, 64), 1e-3, None);
    }
    let c = f.open(&defaults()).unwrap();
    let names: Vec<String> =
        c.modules().iter().map(|m| format!("{} {} {:?}", m.name, m.format, m.shape)).collect();
    let of = |name: &str| format!("model.layers.0.{name} nvfp4 [64, 64]");
    assert_eq!(names, ["mlp.down_proj", "self_attn.k_proj", "self_attn.q_proj"].map(of));
    let error = message(&c.linear("model.layers.0.self_attn.qproj").unwrap_err());
    let near = "the closest names are model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, ";
    assert!(error.contains("there is no such module in ") && error.contains(near), "{error}");
    // A run of features is a part of the whole.
    let (source, whole) = (
        c.linear_source("model.layers.0.mlp.down_proj").unwrap(),
        c.linear("model.layers.0.mlp.down_proj").unwrap(),
    );
    let part = source.features(16..32).unwrap();
    assert_eq!(part.weight.row_codes(3), whole.weight.row_codes(19));
}
