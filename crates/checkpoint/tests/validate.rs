//! Every rule finds what it is for, names it, and nothing else.

mod common;

use common::{
    DOWN, Fixture, GATE, PROJECTIONS, UP, Weight, assert_ends, assert_starts, compressed_config, defaults,
    local_activations, modelopt_config, testdata,
};
use dualgemm_checkpoint::validate::{Finding, RULES, Severity};
use dualgemm_checkpoint::{Checkpoint, Dtype, OpenOptions, TensorFiles, validate};
use dualgemm_formats::ScaleLayout;
use serde_json::{Value, json};

fn healthy() -> Fixture {
    let mut f = Fixture::with(modelopt_config("NVFP4"));
    for (seed, module) in (0..).zip([GATE, UP, DOWN]) {
        f.modelopt(module, &Weight::new(seed, 64, 64), 1e-3, Some(0.5));
    }
    f
}

fn compressed() -> Fixture {
    let groups: [(&[&str], u64, Value); 1] = [(&["Linear"], 16, local_activations())];
    let mut f = Fixture::with(compressed_config(&groups));
    for (seed, module) in (0..).zip([GATE, UP, DOWN]) {
        f.compressed(module, &Weight::new(seed, 64, 64), 1000.0, Some(8.0));
    }
    f
}

/// Makes a tensor one float.
fn set(f: &mut Fixture, tensor: &str, value: f32) {
    f.tensor(tensor).data = value.to_le_bytes().to_vec().into();
}

fn findings(f: &Fixture) -> Vec<Finding> {
    let dir = tempfile::tempdir().unwrap();
    f.write(dir.path());
    validate(dir.path(), &defaults())
}

#[track_caller]
fn assert_finds(f: &Fixture, expected: &[(&str, &str, &str)]) {
    let found = findings(f);
    let got: Vec<_> = found.iter().map(|f| (f.rule.id, f.tensor.as_str(), f.value.as_str())).collect();
    assert_eq!(got, expected, "{found:#?}");
    for finding in &found {
        assert!(!finding.message.is_empty());
    }
}

#[test]
fn healthy_checkpoints_have_no_findings() {
    assert_finds(&healthy(), &[]);
    assert_finds(&compressed(), &[]);
}

#[test]
fn scale_bytes_are_found_with_their_place_and_number() {
    let weight = format!("{GATE}.weight");
    for (byte, what) in [(0x7F, "NaN"), (0xFF, "NaN"), (0x80, "negative"), (0xB8, "negative")] {
        let mut f = healthy();
        let bytes = f.bytes(&format!("{GATE}.weight_scale"));
        (bytes[5], bytes[9]) = (byte, byte);
        assert_finds(&f, &[("scale-byte", &weight, "2 bytes")]);
        assert_eq!(
            findings(&f)[0].message,
            format!(
                "{weight}: block scale {byte:#04x} at row 1, block 1 is {what}; valid are 0x00..=0x7e (2 such bytes)"
            )
        );
    }
}

#[test]
fn tensor_scales_that_are_none_or_inverted_are_found() {
    let name = format!("{GATE}.weight_scale_2");
    for bad in [0.0f32, -1.0, f32::NAN, f32::INFINITY] {
        let mut f = healthy();
        set(&mut f, &name, bad);
        assert_finds(&f, &[("tensor-scale", &name, &bad.to_string())]);
    }
    let mut f = healthy();
    for module in [GATE, UP, DOWN] {
        set(&mut f, &format!("{module}.weight_scale_2"), 1000.0);
    }
    let found = findings(&f);
    assert_eq!(found.len(), 3);
    assert!(found.iter().all(|f| f.rule.id == "tensor-scale-sense" && f.rule.severity == Severity::Warning));
    let mut f = compressed();
    for module in [GATE, UP] {
        set(&mut f, &format!("{module}.weight_global_scale"), 0.001);
    }
    let found = findings(&f);
    assert_eq!(found.len(), 2);
    assert_eq!(
        found[0].message,
        format!(
            "{GATE}.weight_packed: tensor scale 0.001 as a divisor, which is above 1 unless |w| exceeds 2688"
        )
    );
}

#[test]
fn halves_that_differ_are_found_with_their_ratio() {
    let mut f = healthy();
    set(&mut f, &format!("{GATE}.weight_scale_2"), 3.85e-5);
    set(&mut f, &format!("{UP}.weight_scale_2"), 4.83e-5);
    set(&mut f, &format!("{UP}.input_scale"), 0.25);
    assert_finds(
        &f,
        &[
            ("halves-tensor-scale", GATE, "0.0000385 and 0.0000483"),
            ("halves-input-scale", GATE, "0.5 and 0.25"),
        ],
    );
    assert_eq!(
        findings(&f)[0].message,
        format!(
            "{GATE}: tensor scales of gate and up differ, 0.0000385 and 0.0000483 (x1.2545); each is kept here, but vLLM takes \
             one for all of them: quantize again from floats, with one scale for what is fused (`dualgemm quantize` gives \
             them one)"
        )
    );
    let by_one =
        |used: &str| format!("the one input of both is quantized by {used}, which saturates for neither");
    assert_ends(&findings(&f)[1].message.clone(), &format!("0.5 and 0.25 (x2.0000); {}", by_one("0.5")));
    // Of divisors the smaller one.
    let mut f = compressed();
    set(&mut f, "model.layers.0.mlp.up_proj.input_global_scale", 2.0);
    assert_ends(&findings(&f)[0].message.clone(), &format!("8 and 2 (x4.0000); {}", by_one("2")));
}

#[test]
fn missing_tensors_are_found_once_each() {
    for tensor in ["weight_scale", "weight_scale_2", "input_scale"] {
        let mut f = healthy();
        f.remove(&format!("{GATE}.{tensor}"));
        assert_finds(&f, &[("missing-tensor", &format!("{GATE}.{tensor}"), "missing")]);
    }
    let mut f = healthy();
    f.remove(&format!("{GATE}.weight"));
    assert_finds(&f, &[("missing-tensor", &format!("{GATE}.weight"), "missing")]);
}

#[test]
fn tensors_that_nobody_knows_are_found_under_4_bit_weights_alone() {
    let mut f = healthy();
    let unknown = format!("{GATE}.weight_scale_3");
    f.f32(&unknown, &[], &[1.0]).f32("model.layers.0.input_layernorm.weight_scale_3", &[], &[1.0]);
    f.add("model.norm.weight", Dtype::Bf16, &[64], vec![0; 128]).f32("model.norm.perm", &[], &[1.0]);
    assert_finds(&f, &[("unknown-tensor", &unknown, &format!("beside {GATE}"))]);
}

#[test]
fn outside_of_what_was_asked_for_nothing_is_checked() {
    let mut f = healthy();
    f.modelopt("mtp.layers.0.mlp.gate_proj", &Weight::new(1, 64, 64), 0.0, None);
    let within = |prefix: &str| {
        let options = OpenOptions { within: Some(prefix.into()), ..defaults() };
        f.open(&options).unwrap().validate().len()
    };
    assert_eq!(within("model."), 0);
    assert!(within("mtp.") > 1 && within("") == within("mtp."));
}

fn experts(numbers: &[u64]) -> Fixture {
    let mut f = Fixture::with(modelopt_config("NVFP4"));
    for &e in numbers {
        for p in PROJECTIONS {
            let module = format!("model.layers.0.mlp.experts.{e}.{p}");
            f.modelopt(&module, &Weight::new(e, 64, 64), 1e-3, Some(0.5));
        }
    }
    f
}

#[test]
fn experts_that_are_not_there_are_found() {
    assert_finds(&experts(&[0, 1, 2]), &[]);
    let path = "model.layers.0.mlp.experts";
    assert_finds(&experts(&[0, 3]), &[("layers", path, "2 experts")]);
    let message = &findings(&experts(&[0, 3]))[0].message;
    assert_eq!(message, &format!("{path}: has no expert 1 (2 of 4 are missing)"));
    assert_finds(&experts(&[u64::MAX]), &[("layers", path, &format!("{} experts", u64::MAX - 1))]);
    // Nothing but the configuration tells that the last ones are missing.
    for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
        let mut f = experts(&[0, 1]);
        f.config.as_mut().unwrap()[key] = json!(2);
        assert_finds(&f, &[]);
        f.config.as_mut().unwrap()[key] = json!(8);
        assert_finds(&f, &[("layers", path, "6 experts")]);
    }
}

#[test]
fn experts_that_lack_a_projection_are_found() {
    for (projection, name) in [("down_proj", "down"), ("up_proj", "up"), ("gate_proj", "gate")] {
        let mut f = experts(&[0, 1, 2]);
        let module = format!("model.layers.0.mlp.experts.1.{projection}.");
        f.tensors.retain(|t| !t.name.starts_with(&module));
        let found = findings(&f);
        let message = format!("expert 1 has no {name} projection (1 of 3 have none)");
        assert!(found.iter().any(|f| f.rule.id == "layers" && f.message.ends_with(&message)), "{found:#?}");
    }
}

#[test]
fn uncalibrated_experts_are_listed() {
    let mut f = experts(&[0, 1, 2]);
    let scale = |e: usize, p: &str| format!("model.layers.0.mlp.experts.{e}.{p}.input_scale");
    set(&mut f, &scale(1, "down_proj"), f32::INFINITY);
    set(&mut f, &scale(2, "gate_proj"), 0.0);
    f.remove(&scale(2, "up_proj"));
    assert_finds(
        &f,
        &[
            ("uncalibrated", &scale(1, "down_proj"), "inf"),
            ("uncalibrated", &scale(2, "gate_proj"), "0"),
            ("uncalibrated", &scale(2, "up_proj"), "missing"),
        ],
    );
}

#[test]
fn shapes_types_and_layers_are_found() {
    let mut f = healthy();
    let t = f.tensor(&format!("{GATE}.weight_scale"));
    (t.shape, t.data) = (vec![64, 5], vec![0x38; 320].into());
    assert_finds(&f, &[("shape", &format!("{GATE}.weight_scale"), "[64, 5]")]);
    let mut f = healthy();
    f.tensor(&format!("{GATE}.weight_scale")).dtype = Dtype::F8E5m2;
    assert_finds(&f, &[("storage-type", &format!("{GATE}.weight_scale"), "F8_E5M2")]);
    let mut f = healthy();
    f.tensors.retain(|t| !t.name.contains("up_proj"));
    assert_eq!(findings(&f)[0].rule.id, "missing-tensor");
    let mut f = healthy();
    f.tensors.retain(|t| !t.name.contains("gate_proj"));
    assert_eq!(findings(&f)[0].rule.id, "layers");
    let mut f = healthy();
    f.tensors.retain(|t| t.name.contains("down_proj"));
    f.modelopt("model.layers.0.mlp.gate_up_proj", &Weight::new(1, 64, 64), 1e-3, Some(0.5));
    assert_finds(&f, &[("fused-order", "model.layers.0.mlp.gate_up_proj.weight", "no order")]);
    let mut f = healthy();
    f.f32(&format!("{GATE}.pre_quant_scale"), &[64], &[1.0; 64]);
    assert_eq!(findings(&f)[0].rule.id, "unsupported");
}

#[test]
fn files_that_do_not_open_are_one_finding() {
    let mut f = healthy();
    f.config = Some(json!({ "quantization_config": { "quant_method": "awq" } }));
    assert_eq!(findings(&f)[0].rule.id, "convention");
    f.config = Some(modelopt_config("NVFP5"));
    assert_eq!(findings(&f)[0].rule.id, "config");
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(validate(&dir.path().join("none"), &defaults())[0].rule.id, "readable");
    std::fs::write(dir.path().join("m.safetensors"), [0; 20]).unwrap();
    assert_eq!(validate(dir.path(), &defaults())[0].rule.id, "header");
    let mut f = healthy();
    f.hf_quant_config = Some(json!({ "quantization": { "quant_algo": "FP8" } }));
    // Different names of one format.
    f.hf_quant_config = Some(json!({ "quantization": { "quant_algo": "NVFP4_AWQ" } }));
    let found = findings(&f);
    assert_eq!(
        (found.len(), found[0].rule.id, found[0].value.as_str()),
        (1, "config-agrees", "\"NVFP4_AWQ\"")
    );
}

#[test]
fn files_that_say_different_things_of_a_module_refuse_it() {
    let mut f = healthy();
    let modules = [DOWN, GATE, UP];
    for (quantization, concerned, says) in [
        (json!({ "quant_algo": "FP8" }), &modules[..], "quant_algo FP8"),
        (json!({ "quant_algo": "W4A8_MXFP4_FP8" }), &modules[..], "mxfp4"),
        (
            json!({ "quant_algo": "NVFP4", "exclude_modules": ["*gate_proj"] }),
            &modules[1..2],
            "left in floats by `*gate_proj` in `exclude_modules`",
        ),
    ] {
        f.hf_quant_config = Some(json!({ "quantization": quantization }));
        let found = findings(&f);
        assert_eq!(found.len(), concerned.len(), "{found:#?}");
        for (finding, module) in found.iter().zip(concerned) {
            assert_eq!((finding.rule.id, finding.rule.severity), ("config", Severity::Error));
            let start =
                format!("hf_quant_config.json: what is said of `{module}` is {says}; valid is nvfp4, as ");
            assert!(finding.message.contains(&start), "{}", finding.message);
            assert!(finding.message.ends_with("config.json says"), "{}", finding.message);
        }
    }
    // Less is said in one of them.
    for quantization in [
        json!({ "quant_algo": "MIXED_PRECISION", "quantized_layers": { GATE: { "quant_algo": "NVFP4" } } }),
        json!({ "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*self_attn*"] }),
        json!({ "kv_cache_quant_algo": "FP8" }),
    ] {
        f.hf_quant_config = Some(json!({ "quantization": quantization }));
        assert!(findings(&f).iter().all(|f| f.rule.severity == Severity::Warning), "{:#?}", findings(&f));
    }
}

#[test]
fn a_half_that_is_left_in_floats_is_found() {
    for (module, other) in [(GATE, UP), (UP, GATE)] {
        let mut f = healthy();
        f.tensors.retain(|t| !t.name.starts_with(module));
        f.add(&format!("{module}.weight"), Dtype::Bf16, &[64, 64], vec![0; 64 * 64 * 2]);
        f.config.as_mut().unwrap()["quantization_config"]["ignore"] = json!([module]);
        let found = format!("`{module}` in `ignore`, and `{module}.weight` is BF16");
        assert_finds(&f, &[("layers", module, &found)]);
        f.open(&defaults()).unwrap().linear(other).unwrap();
        assert!(f.open(&defaults()).unwrap().gate_up(0).is_err());
    }
}

#[test]
fn padding_that_is_not_zero_is_found() {
    let mut f = Fixture::with(json!({ "hidden_act": "silu" }));
    f.metadata.insert("_quantization_metadata".into(), r#"{"format": "nvfp4"}"#.into());
    for module in [GATE, UP] {
        let w = Weight::new(1, 100, 64);
        f.modelopt(module, &w, 1e-3, None);
        let t = f.tensor(&format!("{module}.weight_scale"));
        (t.shape, t.data) = (vec![128, 4], w.swizzled().into());
    }
    assert_finds(&f, &[]);
    // Row 127 is padding.
    let at = ScaleLayout::Sf128x4.offset(127, 0, 4);
    f.bytes(&format!("{GATE}.weight_scale"))[at] = 0x7F;
    assert_finds(&f, &[("scale-padding", &format!("{GATE}.weight"), "1 bytes")]);
}

/// Real weights under a convention with the other scale order: the heuristic speaks, and only then.
#[test]
fn real_scales_in_the_wrong_order_are_noticed_in_both_directions() {
    let files = TensorFiles::open(&testdata("modelopt-nvfp4")).unwrap();
    for swizzle_on_disk in [false, true] {
        let mut f = Fixture::with(modelopt_config("NVFP4"));
        for t in files.tensors().filter(|t| t.name.contains("gate_proj") || t.name.contains("up_proj")) {
            let bytes = if swizzle_on_disk && t.name.ends_with("weight_scale") {
                ScaleLayout::Linear.convert(t.bytes, ScaleLayout::Sf128x4, t.shape[0], t.shape[1])
            } else {
                t.bytes.to_vec()
            };
            f.add(t.name, t.dtype, t.shape, bytes);
        }
        for (read_as, wrong) in
            [(ScaleLayout::Linear, swizzle_on_disk), (ScaleLayout::Sf128x4, !swizzle_on_disk)]
        {
            let options = OpenOptions { scale_layout: Some(read_as), ..defaults() };
            let found: Checkpoint = f.open(&options).unwrap();
            let found: Vec<_> = found.validate().iter().map(|f| f.rule.id).collect();
            let expected: &[&str] = if wrong { &["scale-order", "scale-order"] } else { &[] };
            assert_eq!(found, expected, "on disk swizzled: {swizzle_on_disk}, read as {read_as}");
        }
    }
}

#[test]
fn every_rule_has_a_text_and_a_severity() {
    for rule in RULES {
        assert!(rule.doc.len() > 20, "{}", rule.id);
    }
    assert_eq!(RULES.iter().filter(|r| r.severity == Severity::Warning).count(), 6);
}

/// Two layers of attention, whose tensor scales are given, and their MLPs.
fn attention(mut f: Fixture, scales: [[f32; 3]; 2]) -> Fixture {
    for (layer, scales) in scales.iter().enumerate() {
        for (i, p) in ["q_proj", "k_proj", "v_proj"].iter().enumerate() {
            let module = format!("model.layers.{layer}.self_attn.{p}");
            f.compressed(&module, &Weight::new(40 + i as u64, 64, 64), scales[i], Some(8.0));
        }
    }
    f
}

#[test]
fn scales_of_what_engines_fuse_are_one_finding() {
    assert_finds(&attention(compressed(), [[1000.0; 3], [500.0; 3]]), &[]);
    let mut f = attention(compressed(), [[1000.0, 800.0, 900.0], [1000.0, 250.0, 500.0]]);
    set(&mut f, "model.layers.0.mlp.up_proj.weight_global_scale", 2000.0);
    // Of the two sets of attention and the one of the MLP, that of layer 1 is the worst.
    assert_finds(&f, &[("halves-tensor-scale", "model.layers.1.self_attn.k_proj", "1000 and 250")]);
    let message = &findings(&f)[0].message;
    assert_starts(
        message,
        "model.layers.1.self_attn.k_proj: tensor scales of q_proj, k_proj, v_proj differ, 1000 and 250 (x4.0000); each is \
             kept here, but vLLM takes one for all of them: quantize again from floats",
    );
    assert_ends(message, "; the worst of 3 sets of layers");
}

#[test]
fn files_that_contradict_their_configuration_are_found() {
    // In 4 bits, and loaders look for floats.
    let mut f = compressed();
    f.compressed("model.embed_tokens", &Weight::new(9, 64, 64), 1000.0, Some(8.0));
    assert_finds(&f, &[("declared", "model.embed_tokens", "nvfp4")]);
    assert_eq!(
        findings(&f)[0].message,
        "model.embed_tokens: is an embedding in nvfp4; loaders of compressed-tensors read embeddings as floats alone, and \
         leave this one as it was made"
    );
    // Named in `ignore`, or no target.
    for (key, value, why) in [
        ("ignore", json!([GATE]), format!("`{GATE}` in `ignore`")),
        ("targets", json!(["re:.*(up|down)_proj"]), "no target of `config_groups` matches it".into()),
    ] {
        let mut f = compressed();
        let config = &mut f.config.as_mut().unwrap()["quantization_config"];
        if key == "ignore" {
            config["ignore"] = value;
        } else {
            config["config_groups"]["group_0"]["targets"] = value;
        }
        let found = findings(&f);
        assert_eq!((found[0].rule.severity, found[0].tensor.as_str()), (Severity::Error, GATE), "{found:?}");
        assert!(found[0].message.contains(&why), "{found:?}");
    }
    // In floats, and the configuration says 4 bits.
    let mut f = compressed();
    for p in ["q_proj", "k_proj"] {
        f.add(&format!("model.layers.0.self_attn.{p}.weight"), Dtype::Bf16, &[4, 4], vec![0; 32]);
    }
    // What the loaders take for floats, whatever the configuration says.
    for name in ["model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"] {
        f.add(&format!("{name}.weight"), Dtype::Bf16, &[4, 4], vec![0; 32]);
    }
    assert_finds(&f, &[("declared", "model.layers.0.self_attn.k_proj", "BF16")]);
    assert_eq!(
        findings(&f)[0].message,
        "model.layers.0.self_attn.k_proj: is BF16, but the configuration says nvfp4; what stays in floats must be named in \
         `ignore` (1 more like it)"
    );
    f.config.as_mut().unwrap()["quantization_config"]["ignore"] = json!(["lm_head", "re:.*self_attn.*"]);
    assert_finds(&f, &[]);
    // The output head is a linear layer to compressed-tensors.
    f.add("lm_head.weight", Dtype::Bf16, &[4, 4], vec![0; 32]);
    assert_finds(&f, &[]);
    f.config.as_mut().unwrap()["quantization_config"]["ignore"] = json!(["re:.*self_attn.*"]);
    assert_finds(&f, &[("declared", "lm_head", "BF16")]);
}

#[test]
fn weights_in_8_bits_need_something_that_says_so() {
    for name in ["model.layers.0.self_attn.q_proj", "lm_head"] {
        let mut f = healthy();
        f.add(&format!("{name}.weight"), Dtype::F8E4m3, &[32, 64], vec![0x38; 32 * 64]);
        assert_finds(&f, &[("declared", name, "F8_E4M3")]);
    }
    // What scales them is declared.
    let layers = json!({ "model.layers.0.mlp.gate_proj": { "quant_algo": "NVFP4" }, "model.layers.0.mlp.up_proj": { "quant_algo": "NVFP4" },
        "model.layers.0.mlp.down_proj": { "quant_algo": "NVFP4" }, "lm_head": { "quant_algo": "FP8" } });
    let mut f = healthy();
    f.config = Some(json!({ "hidden_act": "silu", "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers } }));
    f.add("lm_head.weight", Dtype::F8E4m3, &[32, 64], vec![0x38; 32 * 64]);
    assert_finds(&f, &[]);
}

#[test]
fn biases_of_mlps_are_there_where_the_configuration_says_so() {
    let (down, bias) = ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj.bias");
    let with = |stated: Value, biases: &[&str]| {
        let mut f = healthy();
        f.config.as_mut().unwrap()["mlp_bias"] = stated;
        for projection in biases {
            f.f32(&format!("model.layers.0.mlp.{projection}_proj.bias"), &[64], &[1.0; 64]);
        }
        f
    };
    assert_finds(&with(json!(true), &["gate", "up", "down"]), &[]);
    assert_finds(&with(json!(false), &[]), &[]);
    assert_finds(&with(json!(true), &["gate", "up"]), &[("missing-tensor", bias, "missing")]);
    let unwanted = with(json!(false), &["down"]);
    let found = findings(&unwanted);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_ends(&found[0].message, &format!("mlp_bias is false; valid is true, as `{bias}` is there"));
    // What computes refuses it, too.
    assert!(unwanted.open(&OpenOptions::default()).unwrap().linear(down).is_err());
    assert!(with(json!(true), &["down"]).open(&OpenOptions::default()).unwrap().gate_up(0).is_err());
}
