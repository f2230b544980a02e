//! Where gate and up, their scales and what is said of them are: shards, indices, configurations in files and beside them;
//! and the orders of fused rows.

use crate::common::*;
use dualgemm_checkpoint::{
    Checkpoint, Dtype, GateUpOrder, GateUpSource, Half, OpenOptions, ScaleOrigin, Which,
};
use dualgemm_gemm::AFormat;
use serde_json::{Value, json};

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
            Weight::new(10 * e as u64 + 2, 64, 64)
                .assert_is(expert_down(&c, 5, e).unwrap().weight.blocks().unwrap());
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
            let source = c.gate_up_source(0, Which::Dense).unwrap();
            assert_runs(&source.gate, &gate);
            assert_runs(&source.up, &up);
            let mlp = c.gate_up(0).unwrap();
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
fn scales_say_which_tensor_of_which_file_they_are() {
    let f = modelopt(modelopt_config("NVFP4"), Some(0.5));
    let dir = tempfile::tempdir().unwrap();
    f.write_sharded(dir.path(), |name| usize::from(name.contains("up_proj")));
    let c = Checkpoint::open(dir.path(), &defaults()).unwrap();
    let GateUpSource { gate, up } = c.gate_up_source(0, Which::Dense).unwrap();
    let of = |tensor: String, shard| ScaleOrigin::Tensor { tensor, file: dir.path().join(shard_name(shard)) };
    for (source, name, shard) in [(gate, GATE, 0), (up, UP, 1)] {
        assert_eq!(source.tensor_scale_from, of(format!("{name}.weight_scale_2"), shard));
        assert_eq!(source.input_scale_from, Some(of(format!("{name}.input_scale"), shard)));
    }
    let mut mx = Fixture::with(modelopt_config("MXFP4"));
    for module in [GATE, UP] {
        mxfp4(&mut mx, module, &Weight::with_block(1, 64, 64, 32), (".weight_scale", Dtype::U8));
    }
    let c = mx.open(&defaults()).unwrap();
    let gate = c.gate_up_source(0, Which::Dense).unwrap().gate;
    assert_eq!((gate.format(), gate.input_scale_from), (AFormat::Mxfp4, None));
    assert_eq!(gate.tensor_scale_from.to_string(), "1, by format (mxfp4)");
}

#[test]
fn recipe_yaml_decides_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = compressed(json!({ "hidden_size": 64 }), None);
    f.config = None;
    f.write(dir.path());
    std::fs::write(dir.path().join("recipe.yaml"), "quant_method: compressed-tensors\nscheme: NVFP4\n")
        .unwrap();
    let e = message(&Checkpoint::open(dir.path(), &defaults()).unwrap_err());
    assert_has(&e, "no config.json, hf_quant_config.json or file metadata declares");
    assert_has(
        &e,
        "weight_packed` looks like compressed-tensors); name the convention (--convention, in Python convention=), one of ",
    );
    let options = OpenOptions { convention: Some("compressed-tensors".into()), ..defaults() };
    assert_mlp(&Checkpoint::open(dir.path(), &options).unwrap(), [1e-3, 2e-3], None);
}

#[test]
fn mistral_keeps_its_configuration_in_params_json_and_its_tensors_in_consolidated_files() {
    for method in ["compressed-tensors", "compressed_tensors"] {
        let mut config = compressed_config(&[(&["Linear"], 16, Value::Null)]);
        config["quantization_config"]["quant_method"] = json!(method);
        let params = json!({ "dim": 64, "quantization": config["quantization_config"] });
        let dir = tempfile::tempdir().unwrap();
        let mut f = Fixture::default();
        for (p, seed) in [("w1", 1), ("w3", 2), ("w2", 3)] {
            f.compressed(&format!("layers.0.experts.0.{p}"), &Weight::new(seed, 64, 64), 1000.0, None);
        }
        f.write(dir.path());
        std::fs::write(dir.path().join("params.json"), params.to_string()).unwrap();
        let own = dir.path().join("consolidated.safetensors");
        std::fs::rename(dir.path().join("model.safetensors"), &own).unwrap();
        for path in [dir.path(), &own] {
            let c = Checkpoint::open(path, &defaults()).unwrap();
            let both = expert(&c, 0, 0).unwrap();
            Weight::new(1, 64, 64).assert_is(&both.gate);
            Weight::new(2, 64, 64).assert_is(&both.up);
        }
        // Hugging Face's names beside them are those that config.json is about.
        compressed(config, None).write(dir.path());
        let c = Checkpoint::open(dir.path(), &defaults()).unwrap();
        assert_eq!(c.mlps().len(), 1);
        assert_mlp(&c, [1e-3, 2e-3], None);
    }
}

#[test]
fn a_lone_file_can_describe_itself() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = modelopt(Value::Null, None);
    f.config = Some(json!({ "quantization_config": { "quant_method": "compressed-tensors" } }));
    let config = json!({ "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4" });
    f.metadata.insert("quantization_config".into(), config.to_string());
    f.write(dir.path());
    // What happens to lie beside it says nothing about it.
    let c = Checkpoint::open(&dir.path().join("model.safetensors"), &defaults()).unwrap();
    assert_mlp(&c, [1e-3, 2e-3], None);
}
