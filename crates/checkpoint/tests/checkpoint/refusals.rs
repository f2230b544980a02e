//! What a file says of a weight and nobody knows: it refuses the weight, by name, and no other.

use crate::common::*;
use dualgemm_checkpoint::Dtype;
use serde_json::{Value, json};

/// Gate and up in every convention that has names for tensors under a weight.
fn fixtures() -> [(&'static str, Fixture); 7] {
    let w = || Weight::new(1, 64, 64);
    let codes = |f: &mut Fixture, weight: &str, dtype, columns: usize, scales: &str| {
        for module in [GATE, UP] {
            f.add(&format!("{module}.{weight}"), dtype, &[64, columns], w().codes);
            f.add(&format!("{module}.{scales}"), Dtype::U8, &[64, 4], w().scales);
        }
    };
    let mut mlx = Fixture::with(json!({ "quantization": { "group_size": 16, "bits": 4, "mode": "nvfp4" } }));
    codes(&mut mlx, "weight", Dtype::U32, 8, "scales");
    let mut torchao = Fixture::with(json!({ "quantization_config": { "quant_method": "torchao" } }));
    codes(&mut torchao, "_weight_qdata", Dtype::U8, 32, "_weight_scale");
    let level = json!([{ "dtype": "fp4", "group_size": 16 }, { "dtype": "fp8_e4m3" }]);
    let quark = json!({ "quantization_config": { "quant_method": "quark", "global_quant_config": { "weight": level } } });
    let auto_round = json!({ "quantization_config": { "quant_method": "auto-round", "bits": 4, "data_type": "nv_fp",
        "group_size": 16 } });
    let mut comfy = modelopt(Value::Null, None);
    comfy.config = None;
    comfy.metadata.insert("_quantization_metadata".into(), r#"{"format": "nvfp4"}"#.into());
    [
        ("modelopt", modelopt(modelopt_config("W4A16_NVFP4"), None)),
        ("compressed-tensors", compressed(compressed_config(&[(&["Linear"], 16, Value::Null)]), None)),
        ("auto-round", compressed(auto_round, None)),
        ("quark", modelopt(quark, None)),
        ("comfyui", comfy),
        ("mlx", mlx),
        ("torchao", torchao),
    ]
}

#[test]
fn tensors_under_a_weight_that_no_convention_has_refuse_it_by_name() {
    for ending in [
        ".weight_scale_3",
        ".zero_point",
        ".lora_a",
        ".lora_a.weight",
        ".smooth_factor",
        ".perm",
        ".weight_g_idx",
        ".weight.scale",
        ".weight_quantizer._amax",
        "_zero_point",
        ".lora_A.default.weight",
        ".weight_scale_inv",
    ] {
        for (convention, mut f) in fixtures() {
            let tensor = format!("{GATE}{ending}");
            f.f32(&tensor, &[1], &[1.0]);
            let c = f.open(&defaults()).unwrap();
            assert_eq!(c.convention().name, convention);
            let e = refusal(c.gate_up(0));
            let start = format!(
                "{tensor}: belongs to `{GATE}`, but its meaning is not known; valid in the {convention} convention"
            );
            assert_starts(&e, &start);
            let found = c.validate();
            assert!(found.iter().any(|f| f.rule.id == "unknown-tensor" && f.tensor == tensor), "{found:?}");
            // Its neighbours do not matter.
            c.linear(UP).unwrap();
        }
    }
    for (_, mut f) in fixtures() {
        // Of other modules, whatever their names have in common.
        f.f32("model.layers.0.mlp.gate.weight", &[1], &[1.0]).f32(
            "model.layers.0.mlp.gate.e_score_correction_bias",
            &[1],
            &[1.0],
        );
        f.f32("model.layers.0.self_attn.rotary_emb.inv_freq", &[1], &[1.0]).f32(
            "model.layers.0.mlp.num_batches_tracked",
            &[1],
            &[1.0],
        );
        f.f32("model.layers.0.self_attn.k_scale", &[1], &[1.0]);
        let c = f.open(&defaults()).unwrap();
        c.gate_up(0).unwrap();
        assert!(c.validate().iter().all(|f| f.rule.id != "unknown-tensor"));
    }
}

/// The gate projection is refused with this text, and the down projection is, or is not.
#[track_caller]
fn assert_transformed(f: &Fixture, says: Option<&str>, down: bool) {
    let c = f.open(&defaults()).unwrap();
    match says {
        Some(says) => {
            let e = refusal(c.gate_up(0));
            assert!(
                e.starts_with(&format!("{GATE}: `{says}")) && e.contains("changes what the weights mean"),
                "{e}"
            );
            assert!(c.validate().iter().any(|f| f.rule.id == "unsupported" && f.tensor == GATE));
        }
        None => drop(c.gate_up(0).unwrap()),
    }
    assert_eq!(c.down(0).is_err(), down);
}

#[test]
fn rotations_at_run_time_refuse_what_they_concern_in_every_convention() {
    let with = |mut config: Value, key: &str, value: &Value| {
        config["quantization_config"][key] = value.clone();
        config
    };
    let fixtures = |key: &str, value: &Value| {
        let auto_round = json!({ "quantization_config": { "quant_method": "auto-round", "bits": 4, "data_type": "nv_fp",
            "group_size": 16 } });
        let groups: [(&[&str], u64, Value); 1] = [(&["Linear"], 16, Value::Null)];
        vec![
            compressed(with(auto_round, key, value), None),
            compressed(with(compressed_config(&groups), key, value), None),
            modelopt(with(modelopt_config("W4A16_NVFP4"), key, value), None),
        ]
    };
    let level = json!([{ "dtype": "fp4", "group_size": 16 }, { "dtype": "fp8_e4m3" }]);
    let lines = include_str!("transforms.txt").lines().filter(|l| !l.is_empty() && !l.starts_with('#'));
    let mut lines = lines.peekable();
    let mut cases = 0;
    while let Some(case) = lines.next() {
        let (key, value) = case.split_once(" = ").unwrap();
        let value: Value = serde_json::from_str(value).unwrap();
        let refused = lines.next_if(|line| line.starts_with("    ")).unwrap_or_default().trim();
        let (gate, of_down) = match refused.strip_prefix("gate ") {
            Some(rest) => (Some(rest.trim_start_matches("down ")), rest.starts_with("down ")),
            None => (None, refused == "down"),
        };
        let fixtures = match key.strip_prefix("quark ") {
            None => fixtures(key, &value),
            Some(key) => vec![quark(json!({ "global_quant_config": { "weight": level }, key: value }))],
        };
        for f in fixtures {
            assert_transformed(&f, gate, of_down);
        }
        cases += 1;
    }
    assert_eq!(cases, 37);
    // The older file of ModelOpt, too.
    let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
    f.hf_quant_config = Some(json!({ "quantization": { "quant_algo": "W4A16_NVFP4", "rotate": true } }));
    assert_transformed(&f, Some("rotate: true`"), true);
}

fn quark(config: Value) -> Fixture {
    let mut config = json!({ "hidden_act": "silu", "quantization_config": config });
    config["quantization_config"]["quant_method"] = json!("quark");
    modelopt(config, None)
}
