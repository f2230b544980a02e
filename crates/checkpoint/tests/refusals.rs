//! What a file says of a weight and nobody knows: it refuses the weight, by name, and no other.

mod common;

use common::*;
use dualgemm_checkpoint::Dtype;
use dualgemm_checkpoint::write::Output;
use serde_json::{Value, json};

/// A fault of the configuration is that of the modules that it concerns: those of the gate projection here.
#[test]
fn what_is_not_known_of_one_module_leaves_the_others_readable() {
    let check = |f: &Fixture, says: &str| {
        let c = f.open(&defaults()).unwrap();
        assert!(refusal(c.linear(GATE)).contains(says), "{}", refusal(c.linear(GATE)));
        assert_has(&refusal(c.gate_up(0)), says);
        c.linear(UP).unwrap();
        assert!(c.validate().iter().any(|f| f.rule.id == "config" && f.message.contains(says)));
        // Nothing is written of it that would read as something else.
        assert!(c.export(Output::Modelopt).is_err());
    };
    for algo in ["FP8_BLOCK_SCALES", "NVFP4_MSE"] {
        let layers = json!({ "model.layers.0.mlp": { "quant_algo": "NVFP4" }, GATE: { "quant_algo": algo } });
        let config = json!({ "quantization_config": { "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers } });
        let says = format!("quantized_layers.{GATE}.quant_algo is \"{algo}\"; valid is NVFP4");
        check(&modelopt(config, Some(0.5)), &says);
    }
    let groups: [(&[&str], u64, Value); 2] = [(&[GATE], 16, Value::Null), (&["Linear"], 16, Value::Null)];
    for (part, value, says) in [
        ("/format", json!("mixfp4-pack-quantized"), "group_0.format is \"mixfp4-pack-quantized\"; valid is"),
        ("/weights/group_size", json!(64), "group_0.weights.group_size is 64; valid is 16 (nvfp4) or 32"),
        (
            "/weights/scale_dtype",
            json!("torch.uint8"),
            "scale_dtype is \"torch.uint8\"; valid is torch.float8_e4m3fn for nvfp4",
        ),
        ("/weights/symmetric", json!(false), "group_0.weights.symmetric is false; valid is true"),
    ] {
        let mut config = compressed_config(&groups);
        let group = &mut config["quantization_config"]["config_groups"]["group_0"];
        group["format"] = Value::Null;
        group["weights"]["symmetric"] = json!(true);
        group["weights"]["scale_dtype"] = json!("torch.float8_e4m3fn");
        *group.pointer_mut(part).unwrap() = value;
        check(&compressed(config, None), says);
    }
    let fp4 = |size: u64| json!([{ "dtype": "fp4", "group_size": size }, { "dtype": "fp8_e4m3" }]);
    for (weight, says) in [
        (
            json!({ "dtype": "fp4_e3m0" }),
            "layer_quant_config.*gate_proj.weight.dtype is \"fp4_e3m0\"; valid is fp4, ",
        ),
        (fp4(64), "layer_quant_config.*gate_proj.weight is ["),
    ] {
        let config = json!({ "quantization_config": { "quant_method": "quark",
            "layer_quant_config": { "*gate_proj": { "weight": weight } }, "global_quant_config": { "weight": fp4(16) } } });
        check(&modelopt(config, None), says);
    }
    let auto_round = |extra: Value| {
        let config = json!({ "quantization_config": { "quant_method": "auto-round", "bits": 4, "data_type": "nv_fp",
            "group_size": 16, "extra_config": { GATE: extra } } });
        compressed(config, None)
    };
    check(
        &auto_round(json!({ "data_type": "af_fp4" })),
        "data_type is \"af_fp4\"; valid is nv_fp, mx_fp, or",
    );
    check(&auto_round(json!({ "group_size": 64 })), "group_size is 64; valid is 16 for nvfp4");
    let comfy = |gate: &str| {
        let mut f = Fixture::default();
        let layers = json!({ "layers": { GATE: { "format": gate }, UP: { "format": "nvfp4" } } });
        f.metadata.insert("_quantization_metadata".into(), layers.to_string());
        for (module, w) in [(GATE, gate_of_comfy()), (UP, gate_of_comfy())] {
            f.modelopt(module, &w, 1e-3, None);
        }
        f
    };
    check(&comfy("nvfp4_v2"), "format is \"nvfp4_v2\"; valid is nvfp4, or one that starts with float8_");
    let mut f = Fixture::default();
    let level = |mode: &str| json!({ "group_size": 16, "bits": 4, "mode": mode });
    let mut config = level("nvfp4");
    config[GATE] = level("nvfp4_v2");
    f.config = Some(json!({ "quantization": config }));
    for module in [GATE, UP] {
        let w = Weight::new(1, 64, 64);
        f.add(&format!("{module}.weight"), Dtype::U32, &[64, 8], w.codes);
        f.add(&format!("{module}.scales"), Dtype::U8, &[64, 4], w.scales);
    }
    check(&f, &format!("quantization.{GATE}.mode is \"nvfp4_v2\"; valid is mxfp4, nvfp4, affine"));
}

/// Whole atoms of 128x4, so that both orders have the same size.
fn gate_of_comfy() -> Weight {
    Weight::new(1, 128, 64)
}

#[test]
fn a_file_without_groups_is_what_its_format_says() {
    let with = |config: Value| {
        let mut config = config;
        config["quant_method"] = json!("compressed-tensors");
        compressed(json!({ "quantization_config": config }), None)
    };
    let c = with(json!({ "format": "nvfp4-pack-quantized", "ignore": [DOWN] })).open(&defaults()).unwrap();
    assert_mlp(&c, [1e-3, 2e-3], None);
    assert_has(&refusal(c.down(0)), "in `ignore`");
    let e = open_error(&with(json!({ "format": "mxfp4-pack-quantized" })));
    assert_has(&e, "but mxfp4 has no tensor scale; valid");
    assert_has(&open_error(&with(json!({ "format": "float-quantized" }))), "is not quantized: format");
    assert_has(&open_error(&with(json!({ "format": "nvfp5" }))), "format is \"nvfp5\"; valid is nvfp4-pack");
}

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

#[test]
fn what_is_known_to_change_nothing_is_let_pass() {
    let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
    for (p, scale) in [("k_proj", "k_scale"), ("v_proj", "v_scale")] {
        let module = format!("model.layers.0.self_attn.{p}");
        f.modelopt(&module, &gate(), 1e-3, None).f32(&format!("{module}.{scale}"), &[], &[0.5]);
    }
    f.modelopt("model.layers.0.mlp.gate", &gate(), 1e-3, None);
    f.f32("model.layers.0.mlp.gate.e_score_correction_bias", &[4], &[1.0; 4]);
    let c = f.open(&defaults()).unwrap();
    for module in ["self_attn.k_proj", "self_attn.v_proj", "mlp.gate"] {
        c.linear(&format!("model.layers.0.{module}")).unwrap();
    }
    assert!(rules(&c).iter().all(|&rule| rule == "halves-tensor-scale"), "{:?}", rules(&c));
    // The same ending means nothing of the kind beside another weight.
    f.f32(&format!("{GATE}.k_scale"), &[], &[0.5]);
    assert_starts(&open_error(&f), &format!("{GATE}.k_scale: belongs to"));
    // The float that a weight was packed from says nothing new; a second packed one does.
    let config = || compressed_config(&[(&["Linear"], 16, Value::Null)]);
    let mut f = compressed(config(), None);
    f.add(&format!("{GATE}.weight"), Dtype::Bf16, &[128, 64], vec![0; 128 * 64 * 2]);
    f.add(&format!("{GATE}.weight_shape"), Dtype::I64, &[2], vec![0; 16]);
    assert_mlp(&f.open(&defaults()).unwrap(), [1e-3, 2e-3], None);
    let mut f = compressed(config(), None);
    f.add(&format!("{GATE}.weight"), Dtype::U8, &[128, 32], gate().codes);
    assert_has(&open_error(&f), &format!(": belongs to `{GATE}`, but `{GATE}.weight"));
}

#[test]
fn mxfp4_has_no_tensor_scale_that_could_be_meant() {
    let mut f = Fixture::with(modelopt_config("MXFP4"));
    for module in [GATE, UP] {
        mxfp4(&mut f, module, &Weight::with_block(1, 64, 64, 32), (".weight_scale", Dtype::U8));
    }
    f.f32(&format!("{GATE}.input_scale"), &[], &[0.5]);
    assert_values(
        &f.open(&defaults()).unwrap().gate_up(0).unwrap().gate,
        &Weight::with_block(1, 64, 64, 32),
        1.0,
    );
    f.f32(&format!("{GATE}.weight_scale_2"), &[], &[0.5]);
    assert_starts(&open_error(&f), &format!("{GATE}.weight_scale_2: belongs to `{GATE}`, but mxfp4 has no"));
}

#[test]
fn torchao_scales_that_its_metadata_lists_are_needed() {
    let mut f = Fixture::default();
    for module in [GATE, UP] {
        let w = Weight::new(1, 64, 64);
        f.add(&format!("{module}._weight_qdata"), Dtype::U8, &[64, 32], w.codes);
        f.add(&format!("{module}._weight_scale"), Dtype::F8E4m3, &[64, 4], w.scales);
        let names = ["qdata", "scale", "per_tensor_scale"];
        let value =
            json!({ "_type": "NVFP4Tensor", "_data": { "block_size": 16 }, "_tensor_data_names": names });
        f.metadata.insert(format!("{module}.weight"), value.to_string());
    }
    assert_starts(&open_error(&f), &format!("{GATE}._weight_per_tensor_scale: is missing"));
    for module in [GATE, UP] {
        f.f32(&format!("{module}._weight_per_tensor_scale"), &[], &[0.25]);
    }
    let c = f.open(&defaults()).unwrap();
    assert_values(&c.gate_up(0).unwrap().up, &Weight::new(1, 64, 64), 0.25);
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
    assert_eq!(cases, 36);
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

#[test]
fn quark_says_what_linear_layers_are_by_their_class_too() {
    let level = json!([{ "dtype": "fp4", "group_size": 16 }, { "dtype": "fp8_e4m3" }]);
    let c = quark(json!({ "global_quant_config": { "weight": null }, "exclude": [DOWN],
        "layer_type_quant_config": { "Conv2d": { "weight": { "dtype": "int8" } }, "Linear": { "weight": level } } }));
    let c = c.open(&defaults()).unwrap();
    assert_mlp(&c, [1e-3, 2e-3], None);
    assert_has(&refusal(c.down(0)), "in `exclude`");
    // It goes before what is said of everything, and after what is said of a name.
    let global = json!({ "weight": level });
    let int8 = json!({ "weight": { "dtype": "int8" } });
    let c = quark(json!({ "global_quant_config": global, "layer_quant_config": { "*up_proj": global },
        "layer_type_quant_config": { "Linear": int8 } }));
    let c = c.open(&defaults()).unwrap();
    c.linear(UP).unwrap();
    assert_starts(&refusal(c.gate_up(0)), &format!("{GATE}: is not quantized: dtype \"int8\""));
    let e = open_error(&quark(
        json!({ "global_quant_config": global, "layer_type_quant_config": { "MoeMLP": global } }),
    ));
    assert!(
        e.contains("layer_type_quant_config.MoeMLP is {")
            && e.ends_with("valid is Linear, Conv2d or ConvTranspose2d as a class"),
        "{e}"
    );
    let e =
        open_error(&quark(json!({ "global_quant_config": global, "layer_type_quant_config": ["Linear"] })));
    assert_has(&e, "layer_type_quant_config is [\"Linear\"]; valid is an object of classes");
}
