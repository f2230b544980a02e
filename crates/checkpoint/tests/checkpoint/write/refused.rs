//! What is not written, and what an error says and leaves behind.

use std::collections::BTreeSet;

use dualgemm_checkpoint::write::{LinearOut, Model, Output, write};
use dualgemm_checkpoint::{Checkpoint, Dtype, GateUpOrder, MlpKind, OpenOptions, TensorFiles, TensorOut};
use dualgemm_formats::GlobalScale;
use serde_json::{Value, json};

use super::{convert, linear};
use crate::common::*;

/// Every convention, and where it is written.
const OUTPUTS: [(Output, &str); 3] =
    [(Output::Modelopt, "m"), (Output::CompressedTensors, "c.safetensors"), (Output::Gguf, "g.gguf")];

#[test]
fn an_error_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let left = || dir.path().read_dir().unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
    let mut model = Model { mlp_only: true, ..Model::default() };
    model.linears.push(linear(GATE, 1, None));
    model.linears.push(linear(GATE, 2, None));
    for (output, name) in OUTPUTS {
        let e = refusal(write(&dir.path().join(name), output, &model));
        assert_has(&e, "found module `model.layers.0.mlp.gate_proj` twice; valid is distinct names");
        assert!(left().is_empty(), "{:?}", left());
    }
    // K = 64 fits GGUF; these experts leave a gap.
    model.linears.truncate(1);
    model.linears.push(linear("model.layers.1.mlp.experts.0.gate_proj", 1, None));
    model.linears.push(linear("model.layers.1.mlp.experts.2.gate_proj", 1, None));
    let e = refusal(write(&dir.path().join("m.gguf"), Output::Gguf, &model));
    assert_has(&e, "experts numbered from 0 without gaps");
    assert!(left().is_empty());
    // Wrong endings, occupied directories, missing parents.
    std::fs::create_dir(dir.path().join("full")).unwrap();
    std::fs::write(dir.path().join("full/a"), b"a").unwrap();
    for (name, output, says) in [
        ("m", Output::Gguf, "does not end in .gguf; GGUF output needs"),
        ("m.gguf", Output::Modelopt, "ends in .gguf, which modelopt cannot be"),
        ("none/m", Output::Modelopt, "none: no such directory; create it"),
        ("full", Output::Modelopt, "already exists; give a new or empty"),
    ] {
        assert_has(&refusal(write(&dir.path().join(name), output, &model)), says);
    }
    assert_eq!(left(), ["full"]);
}

#[test]
fn a_scale_without_a_reciprocal_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Model::default();
    let mut l = linear(GATE, 1, None);
    l.input_scale = Some(GlobalScale::multiplier(1e-45));
    model.linears.push(l);
    let e = refusal(write(&dir.path().join("m"), Output::CompressedTensors, &model));
    assert_starts(&e, "model.layers.0.mlp.gate_proj.input_global_scale: holds");
}

#[test]
fn other_quantizations_are_not_converted_silently() {
    let config = json!({ "quantization_config": { "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": { "model.layers.0.mlp": { "quant_algo": "W4A16_NVFP4" }, "model.layers.0.attn": { "quant_algo": "FP8" } } } });
    let mut f = Fixture::with(config);
    f.modules("model.layers.0.mlp", &PROJECTIONS[..2], 0);
    f.add("model.layers.0.attn.q.weight", Dtype::F8E4m3, &[4, 4], vec![0; 16]);
    f.f32("model.layers.0.attn.q.weight_scale", &[], &[1.0]);
    let dir = tempfile::tempdir().unwrap();
    let a = f.open(&defaults()).unwrap();
    for output in [Output::Modelopt, Output::CompressedTensors] {
        let path = dir.path().join(output.name());
        assert_eq!(
            refusal(write(&path, output, &a.export(output).unwrap())),
            "model.layers.0.attn.q: quant_algo FP8 is not supported; 4-bit blocks beside floats are; GGUF output takes the \
             MLPs alone"
        );
        assert!(!path.exists());
    }
    // GGUF has room for MLPs alone, and says what else there was.
    let (b, report) = convert(&a, &dir.path().join("m.gguf"), Output::Gguf);
    Weight::new(1, 64, 64).assert_is(&b.gate_up(0).unwrap().up);
    assert_eq!(report.skipped, ["model.layers.0.attn.q.weight", "model.layers.0.attn.q.weight_scale"]);
}

#[test]
fn half_of_a_pair_is_written_and_scales_of_nothing_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = modelopt(modelopt_config("NVFP4"), Some(0.5));
    for suffix in ["weight", "weight_scale", "weight_scale_2", "input_scale"] {
        f.remove(&format!("{UP}.{suffix}"));
    }
    let up = format!("{UP}.weight");
    f.add(&up, Dtype::Bf16, &[128, 64], vec![0x3f; 128 * 64 * 2]);
    let a = f.open(&defaults()).unwrap();
    let model = a.export(Output::Modelopt).unwrap();
    let linears = |model: &Model<'_>| model.linears.iter().map(|l| l.module.clone()).collect::<BTreeSet<_>>();
    assert_eq!(linears(&model), BTreeSet::from([GATE.into(), DOWN.into()]));
    let found = model.linears.iter().find(|l| l.module == GATE).unwrap();
    gate().assert_is(&found.weight.read().unwrap());
    let report = write(&dir.path().join("ct"), Output::CompressedTensors, &model).unwrap();
    assert_eq!((report.tensors, report.skipped.len()), (9, 0));
    let model = Model { mlp_only: true, ..model };
    let report = write(&dir.path().join("m.gguf"), Output::Gguf, &model).unwrap();
    assert_eq!(report.skipped, std::slice::from_ref(&up));
    let gguf = TensorFiles::open(&dir.path().join("m.gguf")).unwrap();
    assert!(gguf.get("blk.0.ffn_gate.weight").is_some());

    let mut f = modelopt(modelopt_config("NVFP4"), Some(0.5));
    *f.tensor(&up) = TensorOut::new(up.clone(), Dtype::F32, [128, 32], vec![0; 128 * 32 * 4]);
    let e = refusal(f.open(&defaults()).unwrap().export(Output::Modelopt));
    assert_has(&e, &format!("`{up}` is F32; a 4-bit weight (nvfp4 or mxfp4) is needed"));
    f.remove(&up);
    assert_starts(
        &refusal(f.open(&defaults()).unwrap().export(Output::Modelopt)),
        &format!("{up}: is missing"),
    );
}

#[test]
fn block_scales_that_are_none_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    for (byte, what) in [(0x7F, "NaN"), (0x80, "negative")] {
        let mut f = modelopt(modelopt_config("NVFP4"), Some(0.5));
        f.bytes(&format!("{DOWN}.weight_scale"))[9] = byte;
        let a = f.open(&defaults()).unwrap();
        for (output, name) in OUTPUTS {
            let path = dir.path().join(name);
            let model = Model { mlp_only: true, ..a.export(Output::Modelopt).unwrap() };
            assert_has(&refusal(write(&path, output, &model)), &format!("row 1, block 1 is {what}"));
            assert!(!path.exists());
        }
    }
}

/// The row is that of the weight, however many are read at a time, and the file the one that is read.
#[test]
fn a_block_scale_far_down_is_named_by_its_own_row() {
    let dir = tempfile::tempdir().unwrap();
    let mut w = Weight::new(1, 2 * 66_048, 32);
    w.scales[2 * 66_000 * 2 + 1] = 0x80;
    let mut f = w4a16();
    f.modelopt_fused(&w, false);
    let options = OpenOptions { gate_up_order: Some(GateUpOrder::UpGateRows), ..defaults() };
    let a = f.open(&options).unwrap();
    let e = refusal(write(&dir.path().join("m"), Output::Modelopt, &a.export(Output::Modelopt).unwrap()));
    // The checkpoint, then the tensor.
    let found = "gate_up_proj.weight (up): block scale 0x80 at row 66000, block 1 is negative";
    assert_starts(&e, &format!("DIR: model.layers.0.mlp.{found}"));
}

#[test]
fn experts_that_differ_in_bias_or_input_scale_are_not_made_alike() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut model = Model { mlp_only: true, ..Model::default() };
    for expert in 0..2 {
        let module = format!("model.layers.0.mlp.experts.{expert}.gate_proj");
        model.linears.push(linear(&module, expert, (expert == 1).then_some(0.5)));
    }
    let report = write(&path, Output::Gguf, &model).unwrap();
    assert_eq!(report.skipped, ["input scale of model.layers.0.mlp.experts.1.gate_proj"]);
    std::fs::remove_file(&path).unwrap();
    model.linears[0].bias = Some(vec![1.0; 130]);
    let e = refusal(write(&path, Output::Gguf, &model));
    assert_has(&e, "a bias for 1 of 2 experts is not supported; one for each or none at all is");
    assert!(!path.exists());
}

#[test]
fn one_parameter_of_all_experts_is_modelopts_alone() {
    let dir = tempfile::tempdir().unwrap();
    let name = "model.layers.0.mlp.experts.down_proj";
    let mut model = Model { mlp_only: true, ..Model::default() };
    model.linears.push(LinearOut { experts: Some(2), ..linear(name, 7, Some(0.5)) });
    for (output, file) in &OUTPUTS[1..] {
        let e = refusal(write(&dir.path().join(file), *output, &model));
        let found =
            format!("{name}: one parameter of 130 rows for 2 experts in {} is not supported", output.name());
        assert_has(&e, &found);
    }
    for experts in [0, 3] {
        model.linears[0].experts = Some(experts);
        let e = refusal(write(&dir.path().join("m"), Output::Modelopt, &model));
        assert_has(&e, &format!("130 rows for {experts} experts in modelopt"));
    }
    model.linears[0].experts = Some(2);
    write(&dir.path().join("m"), Output::Modelopt, &model).unwrap();
    let files = TensorFiles::open(&dir.path().join("m")).unwrap();
    let w = Weight::new(7, 130, 64);
    for (tensor, columns, all) in
        [(name.to_owned(), 32, &w.codes), (format!("{name}_weight_scale"), 4, &w.scales)]
    {
        let t = files.get(&tensor).unwrap();
        assert_eq!(t.shape, [2, columns, 65], "{tensor}");
        for (at, byte) in t.bytes.iter().enumerate() {
            let (expert, column, row) = (at / (columns * 65), at / 65 % columns, at % 65);
            assert_eq!(*byte, all[(expert * 65 + row) * columns + column], "{tensor}: {at}");
        }
    }
    let scalar = |ending: &str| files.get(&format!("{name}_{ending}")).unwrap().to_f32("").unwrap();
    assert_eq!((scalar("weight_scale_2"), scalar("input_scale")), (vec![0.001], vec![0.5]));
}

#[test]
fn what_lies_in_an_mlp_is_not_left_out_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let with = |name: &str, values: &[f32]| {
        let mut model = mlps(&["model.layers.0.mlp"], json!({ "model_type": "llama", "hidden_act": "silu" }));
        model.others.push(TensorOut::floats(name, [values.len()], values));
        model
    };
    // A bias among the other tensors is that of its projection.
    let bias: Vec<f32> = (0..130).map(|row| row as f32).collect();
    let report = write(&path, Output::Gguf, &with(&format!("{UP}.bias"), &bias)).unwrap();
    assert_eq!(report.skipped, [""; 0]);
    let read = Checkpoint::open(&path, &defaults()).unwrap();
    assert_eq!(read.linear_source("blk.0.ffn_up").unwrap().bias, Some(bias));
    std::fs::remove_file(&path).unwrap();
    for name in ["model.layers.0.mlp.ffn_sub_norm.weight", "model.layers.0.mlp.scale"] {
        let e = refusal(write(&path, Output::Gguf, &with(name, &[1.0])));
        assert_has(
            &e,
            &format!("{name}: a tensor in an MLP that is no projection and no bias of one is not supported"),
        );
        assert!(!path.exists());
    }
    // What is not in an MLP, and what routes to it, is left out and said to be.
    for name in [
        "model.layers.0.mlp_norm.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.e_score_correction_bias",
    ] {
        assert_eq!(write(&path, Output::Gguf, &with(name, &[1.0])).unwrap().skipped, [name]);
    }
    // The same of the names of a GGUF file.
    let mut model = with("model.norm.weight", &[1.0]);
    for (name, refused) in [
        ("blk.0.ffn_norm.weight", false),
        ("blk.0.ffn_gate_inp.weight", false),
        ("blk.0.ffn_sub_norm.weight", true),
    ] {
        model.skipped = vec![name.into()];
        let found = write(&path, Output::Gguf, &model);
        assert_eq!(found.is_err(), refused, "{name}: {found:?}");
    }
}

/// A model with MLPs of these names.
fn mlps(names: &[&str], config: Value) -> Model<'static> {
    let module = |path: &str, projection: &str| format!("{path}.{projection}_proj");
    let all = names.iter().flat_map(|path| ["gate", "up", "down"].map(|p| module(path, p)));
    let linears = all.zip(1..).map(|(module, seed)| linear(&module, seed, None)).collect();
    Model { linears, config: Some(config), mlp_only: true, ..Model::default() }
}

#[test]
fn layers_of_other_parts_are_not_the_language_models_in_gguf() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let qwen = || json!({ "model_type": "qwen3_vl", "hidden_act": "silu" });
    let names = ["model.language_model.layers.0.mlp", "model.visual.blocks.1.mlp", "mtp.layers.0.mlp"];
    let report = write(&path, Output::Gguf, &mlps(&names, qwen())).unwrap();
    assert_eq!(report.skipped.len(), 6, "{:?}", report.skipped);
    assert!(report.skipped.iter().all(|name| name.starts_with("model.visual.") || name.starts_with("mtp.")));
    let read = Checkpoint::open(&path, &defaults()).unwrap();
    assert_eq!(read.layers(), [0]);
    let gate = linear("blk.0.ffn_gate", 1, None);
    assert_eq!(read.gate_up(0).unwrap().gate.row_codes(3), gate.weight.read().unwrap().row_codes(3));

    let refused = |model: &Model<'_>| {
        let path = dir.path().join("refused.gguf");
        let e = refusal(write(&path, Output::Gguf, model));
        assert!(!path.exists());
        e
    };
    let e = refused(&mlps(&["model.visual.blocks.1.mlp"], qwen()));
    assert_has(&e, "without a quantized MLP in a language model's layers (`model.visual.blocks.1.mlp.");
    // Longcat has two in each layer.
    let e = refused(&mlps(&["model.layers.0.mlps.0", "model.layers.0.mlps.1"], qwen()));
    assert_has(&e, "two MLPs of layer 0 of one kind, `model.layers.0.mlps.0` and `model.layers.0.mlps.1`");
}

#[test]
fn activations_that_gguf_would_not_give_back_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let blocks = json!([{ "ffn": { "hidden_act": "relu" } }, { "ffn": { "hidden_act": "silu" } }]);
    for (config, why) in [
        (
            json!({ "model_type": "bitnet" }),
            "layer 0, whose activation is relu2, which would not be read back",
        ),
        (
            json!({ "model_type": "nemotron-nas", "hidden_act": "silu", "block_configs": blocks }),
            "layer 0, whose activation is relu, which would not be read back",
        ),
        (
            json!({ "model_type": "dbrx", "ffn_config": { "ffn_act_fn": { "name": "relu" } } }),
            "which would not be read back: dbrx.hidden_act is \"relu\", which is not understood",
        ),
    ] {
        let names = ["model.layers.0.mlp", "model.layers.1.mlp"];
        assert_has(&refusal(write(&path, Output::Gguf, &mlps(&names, config))), why);
        assert!(!path.exists());
    }
    // What is named is carried.
    for (config, activation) in [
        (json!({ "model_type": "dbrx", "ffn_config": { "ffn_act_fn": { "name": "silu" } } }), "silu"),
        (json!({ "model_type": "smallthinker" }), "relu"),
        (json!({ "model_type": "hy_v4", "swiglu_limit": -1 }), "silu"),
    ] {
        write(&path, Output::Gguf, &mlps(&["model.layers.0.mlp"], config)).unwrap();
        let read = Checkpoint::open(&path, &defaults()).unwrap();
        let stated = read.activation(0, MlpKind::Dense).unwrap();
        assert_eq!(stated.activation.to_string(), activation);
    }
}
