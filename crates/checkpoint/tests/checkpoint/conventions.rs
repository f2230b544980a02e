//! A configuration fixture for every way a producer declares its tensors.

use crate::common::*;
use dualgemm_checkpoint::write::Output;
use dualgemm_checkpoint::{BadInputScale, Checkpoint, Dtype, OpenOptions};
use serde_json::{Value, json};

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
    assert_has(&e, "weight_packed` looks like compressed-tensors); name the convention explicitly");
    let options = OpenOptions { convention: Some("compressed-tensors".into()), ..defaults() };
    assert_mlp(&Checkpoint::open(dir.path(), &options).unwrap(), [1e-3, 2e-3], None);
}

#[test]
fn unusable_tensor_scales_are_refused_by_name() {
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45] {
        let config = compressed_config(&[(&["Linear"], 16, local_activations())]);
        let mut f = compressed(config.clone(), Some(8.0));
        f.tensor(&format!("{GATE}.weight_global_scale")).data = bad.to_le_bytes().to_vec().into();
        let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
        let start = format!("{GATE}.weight_global_scale: holds {bad}; a tensor scale must be a positive");
        assert_starts(&e, &start);

        let mut f = compressed(config, Some(8.0));
        f.tensor(&format!("{UP}.input_global_scale")).data = bad.to_le_bytes().to_vec().into();
        let c = f.open(&defaults()).unwrap();
        let e = input_scales(&c).unwrap_err().to_string();
        assert_starts(&e, &format!("{UP}.input_global_scale: holds {bad}; an activation scale must"));
        let c = f.open(&OpenOptions { bad_input_scale: BadInputScale::One, ..defaults() }).unwrap();
        let (gate, up) = input_scales(&c).unwrap().unwrap();
        assert_eq!([gate.value(), up.value()], [0.125, 1.0]);
    }
}

#[test]
fn a_quantized_output_head_is_a_module_like_any_other() {
    let mut f = modelopt(modelopt_config("NVFP4"), Some(0.5));
    f.config.as_mut().unwrap()["quantization_config"]["ignore"] = json!([]);
    let head = Weight::new(8, 32, 64);
    f.modelopt("lm_head", &head, 1e-3, Some(0.5));
    let c = f.open(&defaults()).unwrap();
    head.assert_is(&c.linear("lm_head").unwrap().weight);
    assert!(c.export(Output::Modelopt).unwrap().linears.iter().any(|l| l.module == "lm_head"));
}

#[test]
fn compressed_tensors_experts_in_one_tensor_have_endings_of_their_own() {
    let groups: [(&[&str], u64, Value); 1] = [(&["Linear"], 16, Value::Null)];
    let mut config = compressed_config(&groups);
    config["model_type"] = "qwen3_vl_moe_text".into();
    let mut f = Fixture { config: Some(config), ..Fixture::default() };
    let (both, down) = (Weight::new(1, 2 * 64, 32), Weight::new(2, 2 * 32, 32));
    for (projection, w) in [("gate_up_proj", &both), ("down_proj", &down)] {
        let name = format!("model.layers.0.mlp.experts.{projection}");
        f.add(&format!("{name}_packed"), Dtype::U8, &[2, w.rows / 2, w.k / 2], w.codes.clone());
        f.add(&format!("{name}_scale"), Dtype::F8E4m3, &[2, w.rows / 2, w.k / 16], w.scales.clone());
        f.f32(&format!("{name}_global_scale"), &[2, 1], &[500.0, 250.0]);
    }
    let c = f.open(&defaults()).unwrap();
    let mlp = expert(&c, 0, 1).unwrap();
    both.rows_at(64..96).assert_is(&mlp.gate);
    both.rows_at(96..128).assert_is(&mlp.up);
    assert_eq!(mlp.up.global_scale().value(), 1.0 / 250.0);
    down.rows_at(0..32).assert_is(&expert_down(&c, 0, 0).unwrap().weight);
    assert_eq!(rules(&c), [""; 0]);
}
