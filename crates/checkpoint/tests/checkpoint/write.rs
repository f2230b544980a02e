//! Written checkpoints, read back.

mod refused;

use std::collections::BTreeSet;

use crate::common::*;
use dualgemm_checkpoint::write::{LinearOut, Model, Output, WriteReport, write};
use dualgemm_checkpoint::{
    Checkpoint, GateUpOrder, Half, JsonFile, OpenOptions, TensorFiles, Which, validate,
};
use dualgemm_formats::{GlobalScale, ScaleLayout};
use serde_json::{Value, json};

fn convert(c: &Checkpoint, to: &std::path::Path, output: Output) -> (Checkpoint, WriteReport) {
    // GGUF of these models, and what is read of it, is MLPs alone.
    let mlp_only = output == Output::Gguf || c.convention().name == "gguf";
    let report = write(to, output, &Model { mlp_only, ..c.export(output).unwrap() }).unwrap();
    for file in &report.files {
        assert!(file.exists(), "{}", file.display());
    }
    (Checkpoint::open(to, &defaults()).unwrap(), report)
}

fn bytes(files: &TensorFiles, name: &str) -> Vec<u8> {
    files.get(name).unwrap_or_else(|| panic!("{name}")).bytes.to_vec()
}

fn names(files: &TensorFiles) -> BTreeSet<String> {
    files.tensors().map(|t| t.name.to_string()).collect()
}

fn assert_same_layer(a: &Checkpoint, b: &Checkpoint) {
    let (x, y) = (a.gate_up(0).unwrap(), b.gate_up(0).unwrap());
    for (x, y) in [
        (&x.gate, &y.gate),
        (&x.up, &y.up),
        (a.down(0).unwrap().weight.blocks().unwrap(), b.down(0).unwrap().weight.blocks().unwrap()),
    ] {
        assert_eq!((x.rows(), x.k(), x.format()), (y.rows(), y.k(), y.format()));
        for row in 0..x.rows() {
            assert_eq!(x.row_codes(row), y.row_codes(row));
            assert!((0..x.blocks()).all(|b| x.scale_byte(row, b) == y.scale_byte(row, b)));
        }
    }
}

#[test]
fn the_same_convention_gives_the_same_tensors_exact() {
    let dir = tempfile::tempdir().unwrap();
    for (name, output) in [
        ("modelopt-nvfp4", Output::Modelopt),
        ("compressed-tensors-nvfp4", Output::CompressedTensors),
        ("compressed-tensors-nvfp4a16", Output::CompressedTensors),
    ] {
        let a = Checkpoint::open(&testdata(name), &defaults()).unwrap();
        let (b, report) = convert(&a, &dir.path().join(name), output);
        assert_eq!(names(a.files()), names(b.files()));
        assert_eq!(report.tensors, a.files().tensors().count());
        assert!(report.skipped.is_empty());
        for t in a.files().tensors() {
            let back = b.files().get(t.name).unwrap();
            assert_eq!((t.dtype, t.shape), (back.dtype, back.shape), "{}", t.name);
            assert!(t.bytes == back.bytes, "{}", t.name);
        }
        // Configurations say the same, apart from versions and observers.
        let config = |c: &Checkpoint| c.files().config().unwrap().value.clone();
        assert_eq!(config(&a)["hidden_size"], config(&b)["hidden_size"]);
        let q = |c: &Checkpoint, path| {
            config(c)["quantization_config"].pointer(path).cloned().unwrap_or(Value::Null)
        };
        for path in [
            "/quant_method",
            "/quant_algo",
            "/format",
            "/config_groups/group_0/targets",
            "/config_groups/group_0/weights/group_size",
            "/config_groups/group_0/input_activations/dynamic",
        ] {
            assert_eq!(q(&a, path), q(&b, path), "{path}");
        }
        assert!(validate(&dir.path().join(name), &defaults()).is_empty());
    }
}

#[test]
fn modelopt_to_compressed_tensors_and_back_keeps_every_weight() {
    let dir = tempfile::tempdir().unwrap();
    let a = Checkpoint::open(&testdata("modelopt-nvfp4"), &defaults()).unwrap();
    let (ct, _) = convert(&a, &dir.path().join("ct"), Output::CompressedTensors);
    assert_eq!(ct.convention().name, "compressed-tensors");
    let (back, _) = convert(&ct, &dir.path().join("back"), Output::Modelopt);
    assert_eq!(names(a.files()), names(back.files()));
    for t in a.files().tensors() {
        if t.name.ends_with("weight_scale_2") || t.name.ends_with("input_scale") {
            // The file in between holds a reciprocal: it comes back within one unit in the last place.
            let bits = |b: &[u8]| i64::from(u32::from_le_bytes(b.try_into().unwrap()));
            let back = bytes(back.files(), t.name);
            assert!((bits(t.bytes) - bits(&back)).abs() <= 1, "{}", t.name);
        } else {
            assert!(t.bytes == bytes(back.files(), t.name), "{}", t.name);
        }
    }
    assert_same_layer(&a, &back);
}

/// Where ModelOpt's two files declare the format of the KV cache, and compressed-tensors its own.
#[test]
fn the_format_of_the_kv_cache_is_declared_again() {
    let fp8 = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
    let dynamic = json!({ "dynamic": true, "num_bits": 8, "type": "float" });
    let nvfp4 = json!({ "dynamic": false, "num_bits": 4, "type": "float", "group_size": 16 });
    let none = Value::Null;
    for (scheme, algo, want) in [
        (&none, None, [&none, &none]),
        (&fp8, Some("FP8"), [&fp8, &json!("FP8")]),
        (&fp8, None, [&fp8, &json!("FP8")]),
        (&dynamic, None, [&dynamic, &none]),
        (&none, Some("FP8"), [&fp8, &json!("FP8")]),
        (&nvfp4, Some("NVFP4"), [&nvfp4, &json!("NVFP4")]),
        (&none, Some("NVFP4"), [&none, &json!("NVFP4")]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut f = crate::common::modelopt(json!({}), Some(1.0));
        let mut config = modelopt_config("NVFP4");
        config["quantization_config"]["kv_cache_scheme"] = scheme.clone();
        f.config = Some(config);
        f.hf_quant_config = Some(json!({
            "producer": { "name": "modelopt" },
            "quantization": { "quant_algo": "NVFP4", "kv_cache_quant_algo": algo },
        }));
        f.write(dir.path());
        let c = Checkpoint::open(dir.path(), &defaults()).unwrap();
        let declared = |c: &Checkpoint| {
            let at =
                |json: Option<&JsonFile>, pointer| json.and_then(|json| json.value.pointer(pointer).cloned());
            [
                at(c.files().config(), "/quantization_config/kv_cache_scheme").unwrap_or_default(),
                at(c.files().hf_quant_config(), "/quantization/kv_cache_quant_algo").unwrap_or_default(),
            ]
        };
        let (same, _) = convert(&c, &dir.path().join("same"), Output::Modelopt);
        assert_eq!(declared(&same).each_ref(), want, "{scheme} {algo:?}");
        if want[0].is_null() && !want[1].is_null() {
            let model = c.export(Output::CompressedTensors).unwrap();
            let e = write(&dir.path().join("ct"), Output::CompressedTensors, &model).unwrap_err();
            assert_eq!(
                e.to_string(),
                "kv_cache_quant_algo: \"NVFP4\" is not supported; compressed-tensors declares FP8, and what kv_cache_scheme says"
            );
            continue;
        }
        let (ct, _) = convert(&c, &dir.path().join("ct"), Output::CompressedTensors);
        assert_eq!(declared(&ct).each_ref(), [want[0], &none], "{scheme} {algo:?}");
        let (back, _) = convert(&ct, &dir.path().join("back"), Output::Modelopt);
        let algo_back = if *scheme == nvfp4 { &none } else { want[1] };
        assert_eq!(declared(&back).each_ref(), [want[0], algo_back], "{scheme} {algo:?}");
    }
}

#[test]
fn gguf_holds_the_gated_mlps_and_reports_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let a = Checkpoint::open(&testdata("modelopt-nvfp4"), &defaults()).unwrap();
    let path = dir.path().join("m.gguf");
    let (g, report) = convert(&a, &path, Output::Gguf);
    assert_same_layer(&a, &g);
    assert_eq!(g.gate_up(0).unwrap().gate.global_scale(), a.gate_up(0).unwrap().gate.global_scale());
    assert!(input_scales(&g).unwrap().is_some());
    assert!(report.skipped.iter().any(|n| n == "model.layers.0.self_attn.q_proj"));
    assert!(report.skipped.iter().any(|n| n == "model.embed_tokens.weight"));
    // The producer's own GGUF has the same bytes.
    let theirs = Checkpoint::open(&testdata("mlp-nvfp4.gguf"), &defaults()).unwrap();
    for t in theirs.files().tensors() {
        assert!(t.bytes == bytes(g.files(), t.name), "{}", t.name);
    }
    // And back into a directory of Hugging Face names.
    let (back, _) = convert(&g, &dir.path().join("hf"), Output::Modelopt);
    assert_same_layer(&a, &back);
    let name = "model.layers.0.mlp.up_proj.weight_scale_2";
    assert_eq!(bytes(a.files(), name), bytes(back.files(), name));
}

fn linear(module: &str, seed: u64, input: Option<f32>) -> LinearOut<'static> {
    let weight = Weight::new(seed, 130, 64).matrix(module, 0.001).with_scale_layout(ScaleLayout::Sf128x4);
    LinearOut {
        module: module.into(),
        weight: weight.into(),
        input_scale: input.map(GlobalScale::multiplier),
        experts: None,
        bias: None,
    }
}

#[test]
fn mixed_activation_scales_are_declared_per_module_and_scales_are_unswizzled() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Model::default();
    for (seed, (module, input)) in (0..).zip([(GATE, Some(0.5)), (UP, Some(0.5)), (DOWN, None)]) {
        model.linears.push(linear(module, seed, input));
    }
    for output in [Output::Modelopt, Output::CompressedTensors] {
        let path = dir.path().join(output.name());
        write(&path, output, &model).unwrap();
        let c = Checkpoint::open(&path, &defaults()).unwrap();
        let mlp = c.gate_up(0).unwrap();
        Weight::new(0, 130, 64).assert_is(&mlp.gate);
        assert_eq!(mlp.gate.scale_layout(), ScaleLayout::Linear);
        assert_eq!(input_scales(&c).unwrap().unwrap().0.value(), 0.5);
        assert_eq!(c.down_source(0, Which::Dense).unwrap().input_scale().unwrap(), None);
    }
}

/// Matrices of more rows than are written at a time, the last run not a whole one.
#[test]
fn long_matrices_are_written_in_runs_exact() {
    let dir = tempfile::tempdir().unwrap();
    let fused = Weight::new(1, 2 * 35_008, 64);
    for (swizzled, order) in
        [(false, GateUpOrder::UpGate), (true, GateUpOrder::UpGate), (true, GateUpOrder::UpGate64)]
    {
        let mut f = w4a16();
        f.modelopt_fused(&fused, swizzled);
        let a = f.open(&OpenOptions { gate_up_order: Some(order), ..defaults() }).unwrap();
        let name = format!("{}-{swizzled}", order.name());
        for (from, output, to) in [
            (&a, Output::Modelopt, "m"),
            (&a, Output::CompressedTensors, "c.safetensors"),
            (&a, Output::Gguf, "g.gguf"),
        ] {
            let (b, _) = convert(from, &dir.path().join(format!("{name}-{to}")), output);
            let (back, _) = convert(&b, &dir.path().join(format!("{name}-back-{to}")), output);
            for c in [&b, &back] {
                let mlp = c.gate_up(0).unwrap();
                let rows = |half| (0..35_008).map(move |row| order.fused_row(half, row, 35_008));
                fused.rows_at(rows(Half::Gate)).assert_is(&mlp.gate);
                fused.rows_at(rows(Half::Up)).assert_is(&mlp.up);
            }
        }
    }
}

#[test]
fn the_models_configuration_goes_where_the_output_has_room_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = modelopt_config("NVFP4");
    config["model_type"] = json!("gemma2");
    config["hidden_activation"] = json!("gelu_pytorch_tanh");
    config["hidden_size"] = json!(64);
    let a = modelopt(config, Some(0.5)).open(&defaults()).unwrap();
    let held = |c: &Checkpoint, key: &str| c.files().config().unwrap().value.get(key).cloned();
    let (lone, _) = convert(&a, &dir.path().join("m.safetensors"), Output::CompressedTensors);
    let (gguf, _) = convert(&a, &dir.path().join("m.gguf"), Output::Gguf);
    let (back, _) = convert(&gguf, &dir.path().join("hf"), Output::Modelopt);
    for c in [&lone, &gguf, &back] {
        assert_eq!(held(c, "model_type"), Some(json!("gemma2")));
        assert_eq!(held(c, "hidden_activation"), Some(json!("gelu_pytorch_tanh")));
        assert_same_layer(&a, c);
    }
    assert_eq!(held(&lone, "hidden_size"), Some(json!(64)));
    // What lies beside a file that carries its own configuration is another model's.
    std::fs::write(dir.path().join("config.json"), r#"{ "hidden_act": "silu" }"#).unwrap();
    let again = Checkpoint::open(&dir.path().join("m.safetensors"), &defaults()).unwrap();
    assert_eq!(held(&again, "hidden_activation"), Some(json!("gelu_pytorch_tanh")));
}
