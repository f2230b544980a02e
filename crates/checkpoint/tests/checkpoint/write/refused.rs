//! What is not written, and what an error says and leaves behind.

use dualgemm_checkpoint::TensorFiles;
use dualgemm_checkpoint::write::{LinearOut, Model, Output, write};
use serde_json::json;

use super::linear;
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

/// The same of the names of a checkpoint is in `cases/written.txt`.
#[test]
fn what_lies_in_an_mlp_of_a_gguf_file_is_not_left_out_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let linears = (1..).zip(["gate", "up", "down"]);
    let linears = linears.map(|(seed, p)| linear(&format!("model.layers.0.mlp.{p}_proj"), seed, None));
    let config = Some(json!({ "model_type": "llama", "hidden_act": "silu" }));
    let mut model = Model { linears: linears.collect(), config, mlp_only: true, ..Model::default() };
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
