//! A configuration fixture for every way a producer declares its tensors.

mod common;

use common::{Fixture, Weight, compressed_config, local_activations, message, modelopt_config};
use dualgemm_checkpoint::{BadInputScale, Checkpoint, Dtype, Error, NibbleOrder, OpenOptions};
use dualgemm_formats::{BlockFormat, ScaleLayout};
use serde_json::{Value, json};

const GATE: &str = "model.layers.0.mlp.gate_proj";
const UP: &str = "model.layers.0.mlp.up_proj";
const DOWN: &str = "model.layers.0.mlp.down_proj";

fn gate() -> Weight {
    Weight::new(1, 128, 64)
}

fn up() -> Weight {
    Weight::new(2, 128, 64)
}

fn down() -> Weight {
    Weight::new(3, 64, 128)
}

fn modelopt(config: Value, input: Option<f32>) -> Fixture {
    let mut f = Fixture { config: Some(config), ..Fixture::default() };
    f.modelopt(GATE, &gate(), 1e-3, input).modelopt(UP, &up(), 2e-3, input).modelopt(
        DOWN,
        &down(),
        3e-3,
        input,
    );
    f
}

fn compressed(config: Value, input: Option<f32>) -> Fixture {
    let mut f = Fixture { config: Some(config), ..Fixture::default() };
    f.compressed(GATE, &gate(), 1000.0, input).compressed(UP, &up(), 500.0, input).compressed(
        DOWN,
        &down(),
        250.0,
        input,
    );
    f
}

fn defaults() -> OpenOptions {
    OpenOptions::default()
}

#[track_caller]
fn assert_mlp(c: &Checkpoint, scales: [f32; 2], input: Option<f32>) {
    let mlp = c.gate_up(0).unwrap();
    gate().assert_is(&mlp.gate);
    up().assert_is(&mlp.up);
    assert_eq!([mlp.gate.global_scale().value(), mlp.up.global_scale().value()], scales);
    assert_eq!(mlp.input_scales().unwrap().map(|(g, _)| g.value()), input);
}

#[track_caller]
fn open_error(f: &Fixture) -> String {
    message(&f.open(&defaults()).unwrap_err())
}

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
    let config = json!({ "quantization_config": { "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp": { "quant_algo": "W4A16_NVFP4", "group_size": 16 },
            DOWN: { "quant_algo": "FP8" } } } });
    let c = modelopt(config, Some(0.5)).open(&defaults()).unwrap();
    assert_mlp(&c, [1e-3, 2e-3], None);
    let e = c.down(0).unwrap_err().to_string();
    assert_eq!(
        e,
        format!("{DOWN}: is not quantized: quant_algo FP8; a 4-bit weight (nvfp4 or mxfp4) is needed")
    );
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
    let mut f = Fixture { config: Some(modelopt_config("W4A8_MXFP4_FP8")), ..Fixture::default() };
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
        let mut f = Fixture { config: Some(config), ..Fixture::default() };
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
    assert!(e.contains("no config.json, hf_quant_config.json or file metadata declares"), "{e}");
    assert!(
        e.contains("weight_packed` looks like compressed-tensors); name the convention explicitly"),
        "{e}"
    );
    let options = OpenOptions { convention: Some("compressed-tensors".into()), ..defaults() };
    assert_mlp(&Checkpoint::open(dir.path(), &options).unwrap(), [1e-3, 2e-3], None);
}

#[test]
fn unknown_methods_algorithms_and_group_sizes_are_named() {
    let config = |c: Value| open_error(&modelopt(json!({ "quantization_config": c }), None));
    assert!(
        config(json!({ "quant_method": "gptq" }))
            .contains(r#"declares quant_method "gptq", which is none of the conventions; name"#)
    );
    assert_eq!(
        config(json!({ "quant_method": "modelopt", "quant_algo": "NVFP5" })),
        "DIR/config.json: quant_algo is \"NVFP5\"; valid is NVFP4, W4A16_NVFP4, NVFP4_AWQ, NVFP4_SVD, \
         W4A8_NVFP4_FP8, W4A8_MXFP4_FP8, MXFP4, MXFP8, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, INT4_AWQ and 2 more"
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
    assert!(open_error(&compressed(c.clone(), None)).ends_with("weights.group_size is 32; valid is 16"));
    c["quantization_config"]["format"] = json!("marlin-24");
    assert!(
        open_error(&compressed(c, None))
            .contains("config_groups.group_0.format is \"marlin-24\"; valid is nvfp4-pack")
    );
    let c = compressed_config(&[(&["re:("], 16, Value::Null)]);
    assert!(open_error(&compressed(c, None)).contains("config_groups.group_0.targets is `re:(` ("));
    let c = compressed_config(&[(&[], 16, Value::Null)]);
    assert!(
        open_error(&compressed(c, None))
            .ends_with("config_groups.group_0.targets is []; valid is at least one target")
    );
}

#[test]
fn two_declarations_are_refused() {
    let mut f = modelopt(modelopt_config("NVFP4"), None);
    f.add("x.comfy_quant", Dtype::U8, &[2], b"{}".to_vec());
    let e = open_error(&f);
    assert!(e.contains("declares several conventions: modelopt (quant_method in"), "{e}");
    assert!(e.contains("comfyui (tensor `x.comfy_quant`)"), "{e}");
}

#[test]
fn missing_tensors_are_named_with_who_needs_them() {
    for tensor in ["weight_scale", "weight_scale_2", "weight"] {
        let mut f = modelopt(modelopt_config("NVFP4"), Some(0.5));
        f.remove(&format!("{GATE}.{tensor}"));
        let e = message(&f.open(&defaults()).unwrap().gate_up(0).unwrap_err());
        assert!(e.starts_with(&format!("{GATE}.{tensor}: is missing from DIR; {GATE}")), "{e}");
    }
    let mut f = modelopt(modelopt_config("NVFP4"), Some(0.5));
    f.tensors.retain(|t| !t.name.starts_with(UP));
    let e = message(&f.open(&defaults()).unwrap().gate_up(0).unwrap_err());
    assert!(
        e.starts_with(&format!(
            "the up projection beside `{GATE}`: is missing from DIR; `model.layers.0.mlp`"
        )),
        "{e}"
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
        f.tensor(&format!("{GATE}.weight_global_scale")).bytes = bad.to_le_bytes().to_vec().into();
        let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
        let start = format!("{GATE}.weight_global_scale: holds {bad}; a tensor scale must be a positive");
        assert!(e.starts_with(&start), "{e}");

        let mut f = compressed(config, Some(8.0));
        f.tensor(&format!("{UP}.input_global_scale")).bytes = bad.to_le_bytes().to_vec().into();
        let c = f.open(&defaults()).unwrap();
        let e = c.gate_up(0).unwrap().input_scales().unwrap_err().to_string();
        assert!(
            e.starts_with(&format!("{UP}.input_global_scale: holds {bad}; an activation scale must")),
            "{e}"
        );
        let c = f.open(&OpenOptions { bad_input_scale: BadInputScale::One, ..defaults() }).unwrap();
        let (gate, up) = c.gate_up(0).unwrap().input_scales().unwrap().unwrap();
        assert_eq!([gate.value(), up.value()], [0.125, 1.0]);
    }
}

fn torchao(swizzled: bool) -> Fixture {
    let mut f = Fixture::default();
    for (m, w, s) in [(GATE, gate(), 1e-3), (UP, up(), 2e-3), (DOWN, down(), 3e-3)] {
        f.add(&format!("{m}._weight_qdata"), Dtype::U8, &[w.rows, w.k / 2], w.codes.clone());
        let (rows, cols) = (32 * w.rows.div_ceil(128), 16 * w.k.div_ceil(64));
        let (shape, scales) =
            if swizzled { ([rows, cols], w.swizzled()) } else { ([w.rows, w.k / 16], w.scales.clone()) };
        f.add(&format!("{m}._weight_scale"), Dtype::F8E4m3, &shape, scales);
        f.f32(&format!("{m}._weight_per_tensor_scale"), &[], &[s]);
        f.f32(&format!("{m}._weight_act_per_tensor_scale"), &[], &[0.5]);
        let data = json!({ "_type": "NVFP4Tensor", "_tensor_data_names": ["qdata", "scale"],
            "_data": { "block_size": 16, "is_swizzled_scales": swizzled } });
        f.metadata.insert(format!("{m}.weight"), data.to_string());
    }
    f.metadata.insert("tensor_names".into(), json!([format!("{GATE}.weight")]).to_string());
    f
}

#[test]
fn torchao_is_declared_by_metadata_in_both_scale_layouts() {
    for swizzled in [false, true] {
        let c = torchao(swizzled).open(&defaults()).unwrap();
        assert_eq!(c.convention().name, "torchao");
        assert_mlp(&c, [1e-3, 2e-3], Some(0.5));
        let layout = if swizzled { ScaleLayout::Sf128x4 } else { ScaleLayout::Linear };
        assert_eq!(c.gate_up(0).unwrap().gate.scale_layout(), layout);
        down().assert_is(&c.down(0).unwrap().weight);
    }
    let mut f = torchao(false);
    f.metadata.insert(
        format!("{GATE}.weight"),
        json!({ "_type": "NVFP4Tensor", "_data": { "block_size": 32 } }).to_string(),
    );
    assert!(open_error(&f).ends_with("block_size is 32; valid is 16"));
    let mut f = torchao(false);
    f.metadata.insert(format!("{GATE}.weight"), json!({ "_type": "Int4Tensor" }).to_string());
    let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
    assert!(e.contains(r#"is not quantized: tensor type "Int4Tensor""#), "{e}");
}

/// 100 rows, so that stored scales have padding rows.
fn comfyui(declare: impl Fn(&mut Fixture, &str)) -> Fixture {
    let mut f = Fixture::default();
    for (m, seed) in [(GATE, 11), (UP, 12)] {
        let w = Weight::new(seed, 100, 64);
        f.modelopt(m, &w, 1e-3, Some(0.5));
        let scale = f.tensor(&format!("{m}.weight_scale"));
        (scale.shape, scale.bytes) = (vec![128, 4], w.swizzled().into());
        declare(&mut f, m);
    }
    f
}

#[test]
fn comfyui_scales_are_read_in_their_own_order() {
    let marker = |f: &mut Fixture, m: &str| {
        f.add(&format!("{m}.comfy_quant"), Dtype::U8, &[19], br#"{"format": "nvfp4"}"#.to_vec());
    };
    let layers = |f: &mut Fixture, _: &str| {
        let layers = json!({ "layers": { GATE: { "format": "nvfp4" }, UP: { "format": "nvfp4" } } });
        f.metadata.insert("_quantization_metadata".into(), layers.to_string());
    };
    let all = |f: &mut Fixture, _: &str| {
        f.metadata.insert("_quantization_metadata".into(), r#"{"format": "nvfp4"}"#.into());
    };
    for f in [comfyui(marker), comfyui(layers), comfyui(all)] {
        let c = f.open(&defaults()).unwrap();
        assert_eq!(c.convention().name, "comfyui");
        let mlp = c.gate_up(0).unwrap();
        assert_eq!(mlp.gate.scale_layout(), ScaleLayout::Sf128x4);
        Weight::new(11, 100, 64).assert_is(&mlp.gate);
        Weight::new(12, 100, 64).assert_is(&mlp.up);
        assert!(mlp.input_scales().unwrap().is_some());
    }
    let fp8 = |f: &mut Fixture, m: &str| {
        f.add(&format!("{m}.comfy_quant"), Dtype::U8, &[26], br#"{"format":"float8_e4m3fn"}"#.to_vec());
    };
    let e = comfyui(fp8).open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
    assert!(e.contains(r#"is not quantized: format "float8_e4m3fn""#), "{e}");
}

#[test]
fn padded_scales_under_a_linear_convention_are_refused_with_the_way_out() {
    let mut f = comfyui(|_, _| ());
    f.config = Some(modelopt_config("NVFP4"));
    let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
    assert_eq!(
        e,
        format!(
            "{GATE}.weight_scale: shape [128, 4] cannot be block scales; valid is [100, 4] for `{GATE}.weight` of \
             100 rows and K = 64 in linear order, 400 bytes; the size is that of 128x4 order, which can be named \
             explicitly"
        )
    );
    let options = OpenOptions { scale_layout: Some(ScaleLayout::Sf128x4), ..defaults() };
    Weight::new(11, 100, 64).assert_is(&f.open(&options).unwrap().gate_up(0).unwrap().gate);
}

#[test]
fn flat_byte_scales_are_in_the_kernel_s_order() {
    for rows in [100, 128] {
        let w = Weight::new(21, rows, 64);
        let mut f = Fixture { config: Some(modelopt_config("W4A16_NVFP4")), ..Fixture::default() };
        for m in [GATE, UP] {
            f.modelopt(m, &w, 1e-3, None);
            let scale = f.tensor(&format!("{m}.weight_scale"));
            (scale.dtype, scale.shape, scale.bytes) = (Dtype::U8, vec![512], w.swizzled().into());
        }
        w.assert_is(&f.open(&defaults()).unwrap().gate_up(0).unwrap().gate);
        // Any other length is no layout of these codes.
        let scale = f.tensor(&format!("{GATE}.weight_scale"));
        (scale.shape, scale.bytes) = (vec![511], vec![0x38; 511].into());
        assert!(f.open(&defaults()).unwrap().gate_up(0).is_err());
    }
}

#[test]
fn swapped_nibbles_are_an_explicit_option() {
    let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
    for m in [GATE, UP] {
        let t = f.tensor(&format!("{m}.weight"));
        t.bytes = t.bytes.iter().map(|b| b.rotate_left(4)).collect();
    }
    let options = OpenOptions { nibble_order: NibbleOrder::HiLo, ..defaults() };
    assert_mlp(&f.open(&options).unwrap(), [1e-3, 2e-3], None);
    let c = f.open(&defaults()).unwrap();
    let read = c.gate_up(0).unwrap();
    assert_ne!(read.gate.row_codes(0), &gate().codes[..32]);
}

#[test]
fn f4_shapes_count_elements() {
    let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
    for m in [GATE, UP] {
        let t = f.tensor(&format!("{m}.weight"));
        (t.dtype, t.shape) = (Dtype::F4, vec![128, 64]);
    }
    assert_mlp(&f.open(&defaults()).unwrap(), [1e-3, 2e-3], None);
}

#[test]
fn wrong_storage_types_and_shapes_are_named() {
    type Change = (&'static str, fn(&mut Fixture), &'static str);
    let changes: [Change; 5] = [
        (
            "scale columns",
            |f| {
                let t = f.tensor("model.layers.0.mlp.gate_proj.weight_scale");
                (t.shape, t.bytes) = (vec![128, 5], vec![0x38; 640].into());
            },
            "model.layers.0.mlp.gate_proj.weight_scale: shape [128, 5] cannot be block scales; valid is [128, 4]",
        ),
        (
            "scale type",
            |f| f.tensor("model.layers.0.mlp.gate_proj.weight_scale").dtype = Dtype::F8E5m2,
            "model.layers.0.mlp.gate_proj.weight_scale: stored as F8_E5M2; nvfp4 block scales must be F8_E4M3 or U8",
        ),
        (
            "K",
            |f| {
                let t = f.tensor("model.layers.0.mlp.gate_proj.weight");
                (t.shape, t.bytes) = (vec![128, 33], vec![0; 128 * 33].into());
            },
            "model.layers.0.mlp.gate_proj.weight: shape [128, 33] cannot be a quantized weight; valid is at least one row and K a positive multiple of 16 (nvfp4); K is 66",
        ),
        (
            "tensor scale",
            |f| {
                let t = f.tensor("model.layers.0.mlp.gate_proj.weight_scale_2");
                (t.shape, t.bytes) = (vec![2], vec![0; 8].into());
            },
            "model.layers.0.mlp.gate_proj.weight_scale_2: shape [2] cannot be a tensor scale; valid is one value",
        ),
        (
            "halves",
            |f| {
                let w = Weight::new(9, 64, 64);
                f.tensors.retain(|t| !t.name.contains("up_proj"));
                f.modelopt("model.layers.0.mlp.up_proj", &w, 1e-3, None);
            },
            "model.layers.0.mlp.gate_proj.weight is nvfp4 [128, 64] and model.layers.0.mlp.up_proj.weight is nvfp4 [64, 64]; gate and up must have one shape",
        ),
    ];
    for (what, change, expected) in changes {
        let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
        change(&mut f);
        let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
        assert!(e.starts_with(expected), "{what}: {e}");
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
