//! A configuration fixture for every way a producer declares its tensors.

mod common;

use common::*;
use dualgemm_checkpoint::write::Output;
use dualgemm_checkpoint::{BadInputScale, Checkpoint, Dtype, Error, OpenOptions};
use dualgemm_formats::BlockFormat;
use serde_json::{Value, json};

#[test]
fn modelopt_algorithms_say_whether_activations_have_a_scale() {
    for (algo, input) in [
        ("NVFP4", Some(0.25)),
        ("W4A16_NVFP4", None),
        ("NVFP4_AWQ", Some(0.25)),
        // The activations are fp8: the scale in the file is theirs, not one of nvfp4.
        ("W4A8_NVFP4_FP8", None),
    ] {
        let c = modelopt(modelopt_config(algo), Some(0.25)).open(&defaults()).unwrap();
        assert_mlp(&c, [1e-3, 2e-3], input);
    }
}

#[test]
fn modelopt_is_declared_by_hf_quant_config_alone() {
    let mut f = modelopt(json!({ "hidden_size": 64 }), Some(0.5));
    f.hf_quant_config = Some(json!({ "producer": { "name": "modelopt" }, "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"] } }));
    assert_mlp(&f.open(&defaults()).unwrap(), [1e-3, 2e-3], Some(0.5));
}

#[test]
fn modelopt_mixed_precision_names_one_algorithm_per_module() {
    for algo in ["FP8", "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL", "W8A16"] {
        let config = json!({ "quantization_config": { "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp": { "quant_algo": "W4A16_NVFP4", "group_size": 16 },
                DOWN: { "quant_algo": algo } } } });
        let c = modelopt(config, Some(0.5)).open(&defaults()).unwrap();
        assert_mlp(&c, [1e-3, 2e-3], None);
        let e = c.down(0).unwrap_err().to_string();
        assert_eq!(
            e,
            format!("{DOWN}: is not quantized: quant_algo {algo}; a 4-bit weight (nvfp4 or mxfp4) is needed")
        );
    }
}

/// ModelOpt 0.47 spells what it has no name for as it does in its own code: all of a model in mxfp4, attention in fp8 blocks.
#[test]
fn modelopt_names_of_algorithms_may_be_lowercase() {
    let mut f = Fixture::with(json!({ "quantization_config": { "ignore": ["lm_head", "model.embed_tokens"],
            "quant_algo": "mxfp4", "producer": { "name": "modelopt", "version": "0.47.0" }, "quant_method": "modelopt" } }));
    for (m, seed) in [(GATE, 1), (UP, 2)] {
        let w = Weight::with_block(seed, 64, 64, 32);
        f.add(&format!("{m}.weight"), Dtype::U8, &[64, 32], w.codes);
        f.add(&format!("{m}.weight_scale"), Dtype::U8, &[64, 2], w.scales);
    }
    Weight::with_block(2, 64, 64, 32).assert_is(&f.open(&defaults()).unwrap().gate_up(0).unwrap().up);
    let config = json!({ "quantization_config": { "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp": { "quant_algo": "W4A16_NVFP4", "group_size": 16 },
            "model.layers.0.self_attn.q_proj": { "quant_algo": "fp8_pb_wo" },
            "model.layers.0.self_attn.k_proj": { "quant_algo": "fp8_pb_real" } } } });
    assert_mlp(&modelopt(config, Some(0.5)).open(&defaults()).unwrap(), [1e-3, 2e-3], None);
}

#[test]
fn modelopt_excluded_modules_are_not_read_as_codes() {
    let mut config = modelopt_config("NVFP4");
    config["quantization_config"]["ignore"] = json!(["model.layers.0.mlp.down*"]);
    let c = modelopt(config, Some(0.5)).open(&defaults()).unwrap();
    assert!(c.gate_up(0).is_ok());
    assert_eq!(
        c.down(0).unwrap_err().to_string(),
        format!(
            "{DOWN}: is not quantized: `model.layers.0.mlp.down*` in `ignore`, yet `{DOWN}.weight` is U8; \
             a 4-bit weight (nvfp4 or mxfp4) is needed"
        )
    );
}

#[test]
fn modelopt_mxfp4_has_blocks_of_32_and_no_tensor_scale() {
    let w = Weight::with_block(5, 64, 64, 32);
    let mut f = Fixture::with(modelopt_config("W4A8_MXFP4_FP8"));
    for m in [GATE, UP] {
        f.add(&format!("{m}.weight"), Dtype::U8, &[64, 32], w.codes.clone());
        f.add(&format!("{m}.weight_scale"), Dtype::U8, &[64, 2], w.scales.clone());
    }
    let c = f.open(&defaults()).unwrap();
    let mlp = c.gate_up(0).unwrap();
    assert_eq!((mlp.gate.format(), mlp.gate.global_scale().value()), (BlockFormat::Mxfp4, 1.0));
    w.assert_is(&mlp.gate);
}

#[test]
fn awq_rotations_are_refused_not_ignored() {
    let mut f = modelopt(modelopt_config("NVFP4_AWQ"), Some(0.5));
    f.f32(&format!("{GATE}.pre_quant_scale"), &[64], &[1.0; 64]);
    let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
    assert_eq!(
        e,
        format!(
            "{GATE}: `{GATE}.pre_quant_scale`, which changes what the weights mean, is not supported; \
             plain block-scaled weights are"
        )
    );
}

#[test]
fn compressed_tensors_divisors_become_multipliers() {
    for (input, expected) in [(local_activations(), Some(0.125)), (Value::Null, None)] {
        let config = compressed_config(&[(&["Linear"], 16, input)]);
        let c = compressed(config, Some(8.0)).open(&defaults()).unwrap();
        assert_mlp(&c, [1.0 / 1000.0, 1.0 / 500.0], expected);
        assert_eq!(c.gate_up(0).unwrap().gate.global_scale().held(), 1000.0);
    }
}

#[test]
fn compressed_tensors_dynamic_activations_need_no_scale() {
    let mut input = local_activations();
    input["dynamic"] = json!(true);
    let c = compressed(compressed_config(&[(&["Linear"], 16, input)]), None).open(&defaults()).unwrap();
    assert_mlp(&c, [1e-3, 2e-3], None);
}

#[test]
fn compressed_tensors_first_matching_target_wins_and_names_come_before_the_class() {
    let mx = Weight::with_block(7, 64, 128, 32);
    let fixture = |groups: &[(&[&str], u64, Value)]| {
        let mut f = compressed(compressed_config(groups), Some(8.0));
        f.tensors.retain(|t| !t.name.starts_with(DOWN));
        f.compressed(DOWN, &mx, 0.0, None);
        f.open(&defaults()).unwrap().down(0).map(|d| {
            mx.assert_is(&d.weight);
            d.weight.format()
        })
    };
    // `Linear` stands first and would match; the pattern is more specific.
    let class_first: [(&[&str], u64, Value); 2] =
        [(&["Linear"], 16, local_activations()), (&[r"re:.*\.down_proj$"], 32, Value::Null)];
    assert_eq!(fixture(&class_first).unwrap(), BlockFormat::Mxfp4);
    // Of two patterns that match, the first.
    let overlap: [(&[&str], u64, Value); 2] =
        [(&["re:.*down"], 32, Value::Null), (&["re:.*mlp.*"], 16, local_activations())];
    assert_eq!(fixture(&overlap).unwrap(), BlockFormat::Mxfp4);
    // Groups go by their place in the file, not by the order of their names.
    let many: Vec<(&[&str], u64, Value)> = (0..12)
        .map(|i| {
            let targets: &[&str] = if i == 2 {
                &["re:.*down"]
            } else if i == 10 {
                &["re:.*"]
            } else {
                &["re:x"]
            };
            (targets, if i == 2 { 32 } else { 16 }, Value::Null)
        })
        .collect();
    assert_eq!(fixture(&many).unwrap(), BlockFormat::Mxfp4);
    // The other way round the shapes do not fit, and that is an error, not another guess.
    let wrong: [(&[&str], u64, Value); 2] =
        [(&["re:.*mlp.*"], 16, local_activations()), (&["re:.*down"], 32, Value::Null)];
    assert_eq!(
        fixture(&wrong).unwrap_err().to_string(),
        format!(
            "{DOWN}.weight_scale: shape [64, 4] cannot be block scales; valid is [64, 8] for \
             `{DOWN}.weight_packed` of 64 rows and K = 128 in linear order, 512 bytes"
        )
    );
}

#[test]
fn compressed_tensors_ignored_and_untargeted_modules_are_floats() {
    for (ignore, targets) in [(json!([r"re:.*mlp\.gate"]), "Linear"), (json!([]), r"re:.*attn.*")] {
        let mut config = compressed_config(&[(&[targets], 16, Value::Null)]);
        config["quantization_config"]["ignore"] = ignore;
        let mut f = Fixture::with(config);
        f.add(&format!("{GATE}.weight"), Dtype::Bf16, &[4, 32], vec![0; 256]);
        f.add(&format!("{UP}.weight"), Dtype::Bf16, &[4, 32], vec![0; 256]);
        let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err();
        assert!(matches!(e, Error::NotQuantized { .. }), "{e}");
    }
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
    assert_has(&e, "weight_packed` looks like compressed-tensors); name the convention explicitly");
    let options = OpenOptions { convention: Some("compressed-tensors".into()), ..defaults() };
    assert_mlp(&Checkpoint::open(dir.path(), &options).unwrap(), [1e-3, 2e-3], None);
}

#[test]
fn unknown_methods_algorithms_and_group_sizes_are_named() {
    let config = |c: Value| open_error(&modelopt(json!({ "quantization_config": c }), None));
    let e = config(json!({ "quant_method": "gptq" }));
    assert_has(&e, r#"declares quant_method "gptq", which no convention has; name"#);
    assert_eq!(
        config(json!({ "quant_method": "modelopt", "quant_algo": "NVFP5" })),
        "DIR/config.json: quant_algo is \"NVFP5\"; valid is NVFP4, W4A16_NVFP4, NVFP4_AWQ, NVFP4_SVD, \
         W4A8_NVFP4_FP8, W4A8_MXFP4_FP8, MXFP4, MXFP8, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, INT4_AWQ and 6 more"
    );
    for size in [0, 32, 128] {
        assert_eq!(
            config(json!({ "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": size })),
            format!("DIR/config.json: group_size is {size}; valid is 16 for nvfp4")
        );
        if size != 32 {
            let c = compressed_config(&[(&["Linear"], size, Value::Null)]);
            assert_eq!(
                open_error(&compressed(c, None)),
                format!(
                    "DIR/config.json: config_groups.group_0.weights.group_size is {size}; valid is 16 (nvfp4) or 32 (mxfp4)"
                )
            );
        }
    }
    let mut c = compressed_config(&[(&["Linear"], 32, Value::Null)]);
    c["quantization_config"]["format"] = json!("nvfp4-pack-quantized");
    assert_ends(&open_error(&compressed(c.clone(), None)), "weights.group_size is 32; valid is 16");
    c["quantization_config"]["format"] = json!("marlin-24");
    let e = open_error(&compressed(c, None));
    assert_has(&e, "config_groups.group_0.format is \"marlin-24\"; valid is nvfp4-pack");
    let c = compressed_config(&[(&["re:("], 16, Value::Null)]);
    assert_has(&open_error(&compressed(c, None)), "config_groups.group_0.targets is `re:(` (");
    let c = compressed_config(&[(&[], 16, Value::Null)]);
    let e = open_error(&compressed(c, None));
    assert_ends(&e, "config_groups.group_0.targets is []; valid is at least one target");
}

/// A group as ModelOpt writes it: bits and group size of the weights, bits of the activations.
fn group(targets: &[&str], bits: u64, size: u64, input_bits: Option<u64>) -> Value {
    let args = |bits| json!({ "dynamic": false, "num_bits": bits, "type": "float", "group_size": size });
    let mut group = json!({ "weights": args(bits), "targets": targets });
    if let Some(bits) = input_bits {
        group["input_activations"] = args(bits);
    }
    group
}

#[test]
fn what_modelopt_says_of_groups_is_held_to_the_algorithm() {
    let fixture = |algo: &str, groups: Value| {
        let mut config = modelopt_config(algo);
        config["quantization_config"]["config_groups"] = groups;
        modelopt(config, Some(0.25))
    };
    // As ModelOpt's convert_hf_config.py writes them, early versions without targets.
    for (algo, groups) in [
        ("NVFP4", json!({ "group_0": group(&["Linear"], 4, 16, Some(4)) })),
        ("NVFP4", json!({ "group_0": group(&[], 4, 16, Some(4)) })),
        ("NVFP4", json!({ "group_0": { "weights": { "num_bits": 4 }, "input_activations": null } })),
        ("NVFP4", Value::Null),
        ("W4A16_NVFP4", json!({ "group_0": group(&["Linear"], 4, 16, None) })),
        ("NVFP4_AWQ", json!({ "group_0": group(&["Linear"], 4, 16, Some(8)) })),
        ("NVFP4_SVD", json!({ "group_0": group(&["Linear"], 4, 16, Some(4)) })),
        ("W4A8_NVFP4_FP8", json!({ "group_0": group(&["Linear"], 4, 16, Some(8)) })),
        ("W4A8_MXFP4_FP8", json!({ "group_0": group(&["Linear"], 4, 32, Some(8)) })),
        ("FP8", json!({ "group_0": group(&["Linear"], 8, 0, Some(8)) })),
    ] {
        fixture(algo, groups.clone()).open(&defaults()).unwrap_or_else(|e| panic!("{algo} {groups}: {e}"));
    }
    let healthy = group(&["Linear"], 4, 16, Some(4));
    for (part, field, value, valid) in [
        ("weights", "group_size", json!(0), "16 for nvfp4"),
        ("weights", "group_size", json!(32), "16 for nvfp4"),
        ("weights", "group_size", json!("16"), "16 for nvfp4"),
        ("weights", "num_bits", json!(8), "4 for nvfp4"),
        ("weights", "type", json!("int"), "\"float\" for nvfp4"),
        ("input_activations", "group_size", json!(0), "16 for nvfp4"),
        ("input_activations", "num_bits", json!(8), "4 for nvfp4"),
    ] {
        let mut lie = healthy.clone();
        lie[part][field] = value.clone();
        let message = |key: &str| {
            format!("DIR/config.json: config_groups.{key}.{part}.{field} is {value}; valid is {valid}")
        };
        // Wherever the group stands, and whichever file names the algorithm.
        let mut f = fixture("NVFP4", json!({ "group_0": healthy, "group_1": lie }));
        assert_eq!(open_error(&f), message("group_1"));
        f.config.as_mut().unwrap()["quantization_config"]["quant_algo"] = Value::Null;
        assert_eq!(open_error(&f), message("group_1"));
        f.hf_quant_config = Some(json!({ "quantization": { "quant_algo": "NVFP4" } }));
        assert_eq!(open_error(&f), message("group_1"));
    }
    for (groups, key) in [
        (json!([]), "config_groups"),
        (json!({ "group_0": 4 }), "config_groups.group_0"),
        (json!({ "group_0": { "weights": "nvfp4" } }), "config_groups.group_0.weights"),
    ] {
        let e = open_error(&fixture("NVFP4", groups));
        assert!(
            e.starts_with(&format!("DIR/config.json: {key} is ")) && e.contains("valid is an object"),
            "{e}"
        );
    }
}

#[test]
fn groups_of_mixed_precision_are_those_of_their_layers() {
    let open = |down: Value| {
        let config = json!({ "quantization_config": { "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                GATE: { "quant_algo": "NVFP4", "group_size": 16 },
                UP: { "quant_algo": "NVFP4", "group_size": 16 },
                DOWN: { "quant_algo": "FP8" } },
            "config_groups": { "group_0": group(&[GATE, UP], 4, 16, Some(4)), "group_1": down } } });
        modelopt(config, Some(0.25)).open(&defaults())
    };
    assert_mlp(&open(group(&[DOWN], 8, 0, Some(8))).unwrap(), [1e-3, 2e-3], Some(0.25));
    // What two places say differently of one module concerns no other.
    let c = open(group(&[DOWN, UP], 8, 0, Some(8))).unwrap();
    assert_eq!(
        message(&c.gate_up(0).unwrap_err()),
        "DIR/config.json: config_groups.group_1.weights.num_bits is 8; valid is 4 for nvfp4"
    );
    gate().assert_is(&c.linear(GATE).unwrap().weight);
}

#[test]
fn hf_quant_config_is_held_to_the_same_rule_beside_config_json() {
    let mut f = modelopt(modelopt_config("NVFP4"), Some(0.25));
    for (size, opens) in [(16, true), (0, false), (32, false)] {
        f.hf_quant_config = Some(json!({ "quantization": { "quant_algo": "NVFP4", "group_size": size } }));
        if opens {
            assert_mlp(&f.open(&defaults()).unwrap(), [1e-3, 2e-3], Some(0.25));
        } else {
            let expected = format!("DIR/hf_quant_config.json: group_size is {size}; valid is 16 for nvfp4");
            assert_eq!(open_error(&f), expected);
        }
    }
}

#[test]
fn asymmetric_groups_of_modelopt_are_refused() {
    let groups = |weights: Value, inputs: Value| {
        let level =
            |symmetric| json!({ "num_bits": 4, "type": "float", "group_size": 16, "symmetric": symmetric });
        let mut config = modelopt_config("NVFP4");
        config["quantization_config"]["config_groups"] = json!({ "group_0": { "targets": ["Linear"],
            "weights": level(weights), "input_activations": level(inputs) } });
        modelopt(config, Some(0.25))
    };
    for symmetric in [json!(true), Value::Null] {
        let c = groups(symmetric, json!(false)).open(&defaults()).unwrap();
        assert_mlp(&c, [1e-3, 2e-3], Some(0.25));
    }
    assert_eq!(
        open_error(&groups(json!(false), json!(true))),
        "DIR/config.json: config_groups.group_0.weights.symmetric is false; valid is true for nvfp4"
    );
}

#[test]
fn two_declarations_are_refused() {
    let mut f = modelopt(modelopt_config("NVFP4"), None);
    f.add("x.comfy_quant", Dtype::U8, &[2], b"{}".to_vec());
    let e = open_error(&f);
    assert_has(&e, "declares several conventions: modelopt (quant_method in");
    assert_has(&e, "comfyui (tensor `x.comfy_quant`)");
}

#[test]
fn missing_tensors_are_named_with_who_needs_them() {
    for tensor in ["weight_scale", "weight_scale_2", "weight"] {
        let mut f = modelopt(modelopt_config("NVFP4"), Some(0.5));
        f.remove(&format!("{GATE}.{tensor}"));
        let e = message(&f.open(&defaults()).unwrap().gate_up(0).unwrap_err());
        assert_starts(&e, &format!("{GATE}.{tensor}: is missing from DIR; {GATE}"));
    }
    let mut f = modelopt(modelopt_config("NVFP4"), Some(0.5));
    f.tensors.retain(|t| !t.name.starts_with(UP));
    let e = message(&f.open(&defaults()).unwrap().gate_up(0).unwrap_err());
    assert_starts(
        &e,
        &format!("the up projection beside `{GATE}`: is missing from DIR; `model.layers.0.mlp`"),
    );
}

#[test]
fn a_missing_input_scale_is_named_and_leaves_the_weights_usable() {
    let mut f = modelopt(modelopt_config("NVFP4"), Some(0.5));
    f.remove(&format!("{UP}.input_scale"));
    let c = f.open(&defaults()).unwrap();
    let mlp = c.gate_up(0).unwrap();
    up().assert_is(&mlp.up);
    assert_eq!(
        message(&mlp.input_scales().unwrap_err()),
        format!("{UP}.input_scale: is missing from DIR; {UP}.weight needs it (modelopt convention)")
    );
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
        let e = c.gate_up(0).unwrap().input_scales().unwrap_err().to_string();
        assert_starts(&e, &format!("{UP}.input_global_scale: holds {bad}; an activation scale must"));
        let c = f.open(&OpenOptions { bad_input_scale: BadInputScale::One, ..defaults() }).unwrap();
        let (gate, up) = c.gate_up(0).unwrap().input_scales().unwrap().unwrap();
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
    let experts = c.experts(0).unwrap();
    let mlp = experts.gate_up(1).unwrap();
    both.rows_at(64..96).assert_is(&mlp.gate);
    both.rows_at(96..128).assert_is(&mlp.up);
    assert_eq!(mlp.up.global_scale().value(), 1.0 / 250.0);
    down.rows_at(0..32).assert_is(&experts.down(0).unwrap().weight);
    assert_eq!(rules(&c), [""; 0]);
}
