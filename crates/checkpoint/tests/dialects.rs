//! What producers of one convention say in ways of their own, and what of it is refused: each value against a
//! dequantization in f64 that is written here.

mod common;

use common::*;
use dualgemm_checkpoint::gguf::{GgufValue, write_to};
use dualgemm_checkpoint::{Checkpoint, Dtype, Error, GateUpOrder, OpenOptions, ScaleOrigin, TensorOut};
use dualgemm_formats::{BlockFormat, QuantizedMatrix};
use serde_json::{Value, json};

/// That every element is code · block scale · tensor scale.
#[track_caller]
fn assert_values(m: &QuantizedMatrix<'_>, w: &Weight, tensor_scale: f64) {
    const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let e4m3 = |b: u8| match (b >> 3, f64::from(b & 7)) {
        (0, mantissa) => mantissa * 2f64.powi(-9),
        (exponent, mantissa) => (8.0 + mantissa) * 2f64.powi(i32::from(exponent) - 10),
    };
    assert_eq!((m.rows(), m.k()), (w.rows, w.k));
    for row in 0..w.rows {
        for k in 0..w.k {
            let code = w.codes[(row * w.k + k) / 2] >> (4 * (k % 2)) & 15;
            let scale = w.scales[(row * w.k + k) / w.block];
            let scale = if w.block == 16 { e4m3(scale) } else { 2f64.powi(i32::from(scale) - 127) };
            let sign = if code > 7 { -1.0 } else { 1.0 };
            let (want, found) = (sign * E2M1[usize::from(code & 7)] * scale * tensor_scale, m.value(row, k));
            assert!((found - want).abs() <= 1e-12 * want.abs(), "[{row}, {k}]: {found}, not {want}");
        }
    }
}

/// Gate, up and down of expert 0 below a path, each with a seed of its own.
fn projections(path: &str) -> [(String, u64); 3] {
    [("w1", 1), ("w3", 2), ("w2", 3)].map(|(p, seed)| (format!("{path}.experts.0.{p}"), seed))
}

fn refusal<T: std::fmt::Debug>(found: Result<T, Error>) -> String {
    message(&found.unwrap_err())
}

fn within(prefix: &str) -> OpenOptions {
    OpenOptions { within: Some(prefix.into()), ..defaults() }
}

fn rules(c: &Checkpoint) -> Vec<&'static str> {
    c.validate().iter().map(|f| f.rule.id).collect()
}

fn mxfp4(f: &mut Fixture, module: &str, w: &Weight, scale: (&str, Dtype)) {
    f.add(&format!("{module}.weight"), Dtype::U8, &[w.rows, w.k / 2], w.codes.clone());
    f.add(&format!("{module}{}", scale.0), scale.1, &[w.rows, w.k / 32], w.scales.clone());
}

/// nvfp4 experts of layer 0 by ModelOpt beside those of `mtp`, which stay as DeepSeek made them.
fn deepseek_nvfp4(quantization: Value) -> Fixture {
    let config =
        json!({ "model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": quantization });
    let mut f = Fixture { config: Some(config), ..Fixture::default() };
    for (module, seed) in projections("layers.0.ffn") {
        f.modelopt(&module, &Weight::new(seed, 64, 64), 1e-2, Some(0.5));
    }
    for (module, seed) in projections("mtp.0.ffn") {
        mxfp4(&mut f, &module, &Weight::with_block(10 + seed, 64, 64, 32), (".scale", Dtype::F8E8m0));
    }
    for (module, _) in projections("layers.0.ffn.shared") {
        let shared = module.replace("shared.experts.0", "shared_experts");
        f.add(&format!("{shared}.weight"), Dtype::F8E4m3, &[64, 64], vec![0; 64 * 64]);
        f.add(&format!("{shared}.scale"), Dtype::F8E8m0, &[1, 1], vec![120]);
    }
    f
}

fn deepseek_config() -> Value {
    json!({ "quant_method": "fp8", "activation_scheme": "dynamic", "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4", "group_size": 16, "weight_block_size": [128, 128],
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
        "quantized_layers": { "layers.0.ffn.experts": { "quant_algo": "NVFP4", "group_size": 16 } } })
}

#[test]
fn deepseek_experts_are_nvfp4_where_modelopt_made_them_so_and_mxfp4_elsewhere() {
    let mut by_name = deepseek_config();
    by_name.as_object_mut().unwrap().remove("quantized_layers");
    for config in [deepseek_config(), by_name] {
        let f = deepseek_nvfp4(config);
        let c = f.open(&within("layers")).unwrap();
        let both = c.experts(0).unwrap().gate_up(0).unwrap();
        assert_values(&both.gate, &Weight::new(1, 64, 64), f64::from(1e-2f32));
        assert_values(&both.up, &Weight::new(2, 64, 64), f64::from(1e-2f32));
        assert_eq!(both.input_scales().unwrap().unwrap().0.value(), 0.5);
        assert_eq!(rules(&c), [""; 0]);
        let c = f.open(&within("mtp")).unwrap();
        let both = c.experts(0).unwrap().gate_up(0).unwrap();
        assert_values(&both.up, &Weight::with_block(12, 64, 64, 32), 1.0);
        assert_eq!(both.input_scales().unwrap(), None);
        assert_eq!(rules(&f.open(&defaults()).unwrap()), [""; 0]);
    }
}

#[test]
fn deepseek_names_of_one_format_beside_the_other_are_refused() {
    let gate = "layers.0.ffn.experts.0.w1";
    let read = |f: &Fixture| refusal(f.open(&within("layers")).unwrap().experts(0).unwrap().gate_up(0));
    let mut f = deepseek_nvfp4(deepseek_config());
    f.add(&format!("{gate}.scale"), Dtype::F8E8m0, &[64, 2], vec![120; 128]);
    assert_eq!(
        read(&f),
        format!(
            "{gate}.scale: belongs to `{gate}`, but its meaning is not known; valid in the deepseek convention are one each \
             of .weight_scale_2, .weight_scale, .input_scale, .bias, .weight"
        )
    );
    for missing in ["weight_scale", "weight_scale_2"] {
        let mut f = deepseek_nvfp4(deepseek_config());
        f.remove(&format!("{gate}.{missing}"));
        assert!(read(&f).starts_with(&format!("{gate}.{missing}: is missing")), "{}", read(&f));
    }
    let mut f = deepseek_nvfp4(deepseek_config());
    f.remove("mtp.0.ffn.experts.0.w1.scale");
    let c = f.open(&within("mtp")).unwrap();
    let e = refusal(c.experts(0).unwrap().gate_up(0));
    assert!(e.starts_with("mtp.0.ffn.experts.0.w1.scale: is missing"), "{e}");
    // What is outside is not checked, as it is not read.
    assert_eq!(rules(&c), ["missing-tensor"]);
    assert_eq!(rules(&f.open(&within("layers")).unwrap()), [""; 0]);
    // An algorithm that nobody knows is that of its own modules.
    let mut config = deepseek_config();
    config["quantized_layers"]["layers.0.ffn.experts"]["quant_algo"] = json!("IQ3_WIRE");
    let f = deepseek_nvfp4(config);
    assert!(
        read(&f).contains("quantized_layers.layers.0.ffn.experts.quant_algo is \"IQ3_WIRE\"; valid is NVFP4")
    );
    assert!(f.open(&within("mtp")).unwrap().experts(0).unwrap().gate_up(0).is_ok());
    let mut config = deepseek_config();
    config.as_object_mut().unwrap().remove("quantized_layers");
    config["moe_quant_algo"] = json!("IQ3_WIRE");
    let f = deepseek_nvfp4(config);
    assert!(read(&f).contains("moe_quant_algo is \"IQ3_WIRE\""));
    assert_eq!(rules(&f.open(&within("layers")).unwrap()), ["config"]);
}

#[test]
fn experts_in_mxfp4_beside_fp8_are_read_by_either_name_of_their_scales() {
    let mimo = json!({ "store_dtype": "mxfp4", "mxfp4_block_size": 32 });
    let ling = json!({ "routed_experts_quant_method": "mxfp4", "routed_experts_group_size": 32 });
    let fixture = |own: &Value, scale: (&str, Dtype)| {
        let mut config = json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128] });
        config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        let mut f = Fixture { config: Some(json!({ "quantization_config": config })), ..Fixture::default() };
        for (module, seed) in projections("model.layers.1.mlp") {
            mxfp4(&mut f, &module, &Weight::with_block(seed, 64, 64, 32), scale);
        }
        f.add("model.layers.0.mlp.gate_proj.weight", Dtype::F8E4m3, &[64, 64], vec![0; 4096]);
        f.f32("model.layers.0.mlp.gate_proj.weight_scale_inv", &[1, 1], &[1.0]);
        f
    };
    let read = |f: &Fixture| {
        f.open(&defaults()).unwrap().experts(1).unwrap().gate_up(0).map(|both| {
            assert_values(&both.gate, &Weight::with_block(1, 64, 64, 32), 1.0);
            assert_values(&both.up, &Weight::with_block(2, 64, 64, 32), 1.0);
        })
    };
    for (own, scale) in [(&mimo, (".weight_scale", Dtype::U8)), (&ling, (".weight_scale_inv", Dtype::F8E8m0))]
    {
        let mut f = fixture(own, scale);
        let c = f.open(&defaults()).unwrap();
        assert_eq!((c.convention().name, rules(&c)), ("fp8-mxfp4", vec![]));
        read(&f).unwrap();
        assert!(refusal(c.linear("model.layers.0.mlp.gate_proj")).contains("is not quantized: fp8"));
        // Two block scales, or another tensor scale, contradict the one there is.
        let gate = "model.layers.1.mlp.experts.0.w1";
        let other = if scale.0 == ".weight_scale" { "weight_scale_inv" } else { "weight_scale" };
        f.f32(&format!("{gate}.{other}"), &[1, 1], &[0.5]);
        assert!(refusal(read(&f)).contains(&format!(": belongs to `{gate}`, but `{gate}.weight_scale")));
        let mut f = fixture(own, scale);
        f.f32(&format!("{gate}.weight_scale_2"), &[1], &[0.5]);
        assert!(refusal(read(&f)).starts_with(&format!("{gate}.weight_scale_2: belongs to `{gate}`")));
        let mut f = fixture(own, scale);
        f.remove(&format!("{gate}{}", scale.0));
        assert!(refusal(read(&f)).contains("is missing from DIR"));
    }
    for (own, says) in [
        (json!({ "store_dtype": "nvfp4" }), "store_dtype is \"nvfp4\"; valid is \"mxfp4\""),
        (
            json!({ "store_dtype": "mxfp4", "mxfp4_block_size": 16 }),
            "mxfp4_block_size is 16; valid is 32 for mxfp4",
        ),
        (
            json!({ "routed_experts_quant_method": "fp8" }),
            "routed_experts_quant_method is \"fp8\"; valid is \"mxfp4\"",
        ),
    ] {
        let e = refusal(read(&fixture(&own, (".weight_scale", Dtype::U8))));
        assert!(e.ends_with(says), "{e}");
    }
}

#[test]
fn mxfp4_has_no_tensor_scale_that_could_be_meant() {
    let mut f = Fixture { config: Some(modelopt_config("MXFP4")), ..Fixture::default() };
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
    assert!(
        open_error(&f).starts_with(&format!("{GATE}.weight_scale_2: belongs to `{GATE}`, but mxfp4 has no"))
    );
}

#[test]
fn quark_scales_have_two_names() {
    let level = json!({ "dtype": "fp4", "group_size": 32, "scale_format": "e8m0" });
    let config = json!({ "quant_method": "quark", "global_quant_config": { "weight": level } });
    for [gate, up] in
        [[".weight_scale"; 2], [".weight_quantizer.scale"; 2], [".weight_scale", ".weight_quantizer.scale"]]
    {
        let mut f = Fixture { config: Some(json!({ "quantization_config": config })), ..Fixture::default() };
        for (module, seed, scale) in [(GATE, 1, gate), (UP, 2, up)] {
            mxfp4(&mut f, module, &Weight::with_block(seed, 64, 64, 32), (scale, Dtype::U8));
        }
        let c = f.open(&defaults()).unwrap();
        assert_values(&c.gate_up(0).unwrap().gate, &Weight::with_block(1, 64, 64, 32), 1.0);
        assert_values(&c.gate_up(0).unwrap().up, &Weight::with_block(2, 64, 64, 32), 1.0);
        f.f32(&format!("{GATE}.input_quantizer.scale"), &[], &[0.5]);
        assert!(open_error(&f).starts_with(&format!("{GATE}.input_quantizer.scale: belongs to")));
    }
}

#[test]
fn experts_one_below_the_other_are_told_apart_by_their_number() {
    let [a, b] = [1, 2].map(|seed| Weight::new(seed, 64, 64));
    let fixture = |experts: Option<u64>, scales: &[f32]| {
        let mut config = compressed_config(&[(&["Linear"], 16, Value::Null)]);
        config["num_experts"] = json!(experts);
        let mut f = Fixture { config: Some(config), ..Fixture::default() };
        for p in ["gate_up_proj", "down_proj"] {
            let module = format!("model.layers.0.mlp.experts.{p}");
            f.compressed(&module, &a.stacked(&b), 1.0, None);
            f.remove(&format!("{module}.weight_global_scale"));
            f.f32(&format!("{module}.weight_global_scale"), &[scales.len()], scales);
        }
        f
    };
    let options = || OpenOptions { gate_up_order: Some(GateUpOrder::GateUp), ..defaults() };
    for (experts, scales, of_second) in
        [(Some(2), &[8.0][..], 0.125), (Some(2), &[8.0, 4.0], 0.25), (None, &[8.0, 4.0], 0.25)]
    {
        let c = fixture(experts, scales).open(&options()).unwrap();
        let found = c.experts(0).unwrap();
        assert_eq!((found.ids(), rules(&c).is_empty()), (&[0, 1][..], true));
        assert_values(&found.gate_up(0).unwrap().up, &a.rows_at(32..64), 0.125);
        assert_values(&found.gate_up(1).unwrap().gate, &b.rows_at(0..32), of_second);
        assert_values(&found.down(1).unwrap().weight, &b, of_second);
        assert!(refusal(found.gate_up(2)).contains("no expert 2"));
        assert_eq!(c.mlps()[0].experts, 2);
    }
    for (experts, scales, says) in [
        (None, &[8.0][..], "num_experts, num_local_experts or n_routed_experts of config.json says how many"),
        (Some(3), &[8.0], "found 3 (the configuration)"),
        (Some(4), &[8.0, 4.0], "found 4 (the configuration), 2 (the number of tensor scales)"),
        (Some(0), &[8.0], "found 0 (the configuration)"),
    ] {
        let c = fixture(experts, scales).open(&options()).unwrap();
        let e = refusal(c.experts(0));
        assert!(
            e.starts_with("model.layers.0.mlp.experts.gate_up_proj.weight_packed: shape [128, 32]"),
            "{e}"
        );
        assert!(e.contains(says), "{e}");
        assert!(rules(&c).contains(&"shape"));
    }
}

#[test]
fn modelopt_without_activation_scales_is_weights_alone_where_it_says_so() {
    let weights = json!({ "num_bits": 4, "type": "float", "group_size": 16 });
    let group =
        json!({ "group_0": { "weights": weights, "input_activations": null, "targets": ["Linear"] } });
    let with = |key: &str, value: Value| {
        let mut config = modelopt_config("NVFP4");
        config["quantization_config"][key] = value;
        modelopt(config, None)
    };
    for f in [
        with("config_groups", group.clone()),
        with("activation_scheme", json!("dynamic")),
        modelopt(modelopt_config("W4A16_NVFP4"), None),
    ] {
        let c = f.open(&defaults()).unwrap();
        assert_mlp(&c, [1e-3, 2e-3], None);
        assert!(rules(&c).iter().all(|&rule| rule == "halves-tensor-scale"), "{:?}", rules(&c));
    }
    // One group with activations is one too many to leave their scales out.
    let mut some = group.clone();
    some["group_1"] = json!({ "weights": weights, "input_activations": weights, "targets": ["Linear"] });
    let c = with("config_groups", some).open(&defaults()).unwrap();
    assert!(rules(&c).contains(&"missing-tensor"));
    // In a mixed file it is a matter of each layer's group.
    let layers = json!({ GATE: { "quant_algo": "NVFP4" }, UP: { "quant_algo": "NVFP4" }, DOWN: { "quant_algo": "NVFP4" } });
    let config = json!({ "quantization_config": { "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers, "config_groups": {
            "group_0": { "weights": weights, "input_activations": null, "targets": [GATE, UP] },
            "group_1": { "weights": weights, "input_activations": weights, "targets": [DOWN] } } } });
    let c = modelopt(config, None).open(&defaults()).unwrap();
    assert_mlp(&c, [1e-3, 2e-3], None);
    assert!(refusal(c.down(0).unwrap().input_scale()).contains("input_scale: is missing"));
}

#[test]
fn modelopt_says_what_mixed_layers_are_in_a_list_or_in_groups_and_in_either_file() {
    let args = |bits: u64, size: u64| json!({ "num_bits": bits, "type": "float", "group_size": size });
    let groups = json!({
        "group_0": { "weights": args(8, 0), "input_activations": args(8, 0), "targets": [DOWN] },
        "group_1": { "weights": args(4, 16), "input_activations": args(4, 16), "targets": [GATE, UP] } });
    let config = json!({ "quantization_config": { "quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION",
        "config_groups": groups } });
    let c = modelopt(config, Some(0.25)).open(&defaults()).unwrap();
    assert_mlp(&c, [1e-3, 2e-3], Some(0.25));
    assert!(refusal(c.down(0)).contains("is not quantized: 8 bits of type \"float\""));
    let mut f = modelopt(modelopt_config("MIXED_PRECISION"), Some(0.25));
    f.hf_quant_config = Some(json!({ "quantization": { "quant_algo": "MIXED_PRECISION",
        "quantized_layers": { "model.layers.0.mlp": { "quant_algo": "NVFP4", "group_size": 16 } } } }));
    assert_mlp(&f.open(&defaults()).unwrap(), [1e-3, 2e-3], Some(0.25));
}

/// A fault of the configuration is that of the modules that it concerns: those of the gate projection here.
#[test]
fn what_is_not_known_of_one_module_leaves_the_others_readable() {
    let check = |f: &Fixture, says: &str| {
        let c = f.open(&defaults()).unwrap();
        assert!(refusal(c.linear(GATE)).contains(says), "{}", refusal(c.linear(GATE)));
        assert!(refusal(c.gate_up(0)).contains(says));
        c.linear(UP).unwrap();
        assert!(c.validate().iter().any(|f| f.rule.id == "config" && f.message.contains(says)));
        // Nothing is written of it that would read as something else.
        assert!(c.export().is_err());
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
    assert!(refusal(c.down(0)).contains("in `ignore`"));
    assert!(
        open_error(&with(json!({ "format": "mxfp4-pack-quantized" })))
            .contains("but mxfp4 has no tensor scale; valid")
    );
    assert!(open_error(&with(json!({ "format": "float-quantized" }))).contains("is not quantized: format"));
    assert!(
        open_error(&with(json!({ "format": "nvfp5" }))).contains("format is \"nvfp5\"; valid is nvfp4-pack")
    );
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
    assert!(open_error(&f).starts_with(&format!("{GATE}._weight_per_tensor_scale: is missing")));
    for module in [GATE, UP] {
        f.f32(&format!("{module}._weight_per_tensor_scale"), &[], &[0.25]);
    }
    let c = f.open(&defaults()).unwrap();
    assert_values(&c.gate_up(0).unwrap().up, &Weight::new(1, 64, 64), 0.25);
}

#[test]
fn tensors_under_a_weight_that_no_convention_has_refuse_it_by_name() {
    let fixtures = || {
        let w = || Weight::new(1, 64, 64);
        let codes = |f: &mut Fixture, weight: &str, dtype, columns: usize, scales: &str| {
            for module in [GATE, UP] {
                f.add(&format!("{module}.{weight}"), dtype, &[64, columns], w().codes);
                f.add(&format!("{module}.{scales}"), Dtype::U8, &[64, 4], w().scales);
            }
        };
        let mut mlx = Fixture {
            config: Some(json!({ "quantization": { "group_size": 16, "bits": 4, "mode": "nvfp4" } })),
            ..Fixture::default()
        };
        codes(&mut mlx, "weight", Dtype::U32, 8, "scales");
        let mut torchao = Fixture {
            config: Some(json!({ "quantization_config": { "quant_method": "torchao" } })),
            ..Fixture::default()
        };
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
    };
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
            assert!(e.starts_with(&start), "{e}");
            let found = c.validate();
            assert!(found.iter().any(|f| f.rule.id == "unknown-tensor" && f.tensor == tensor), "{found:?}");
            // It is no matter of its neighbours.
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
    assert!(open_error(&f).starts_with(&format!("{GATE}.k_scale: belongs to")));
    // The float that a weight was packed from says nothing new; a second packed one does.
    let config = || compressed_config(&[(&["Linear"], 16, Value::Null)]);
    let mut f = compressed(config(), None);
    f.add(&format!("{GATE}.weight"), Dtype::Bf16, &[128, 64], vec![0; 128 * 64 * 2]);
    f.add(&format!("{GATE}.weight_shape"), Dtype::I64, &[2], vec![0; 16]);
    assert_mlp(&f.open(&defaults()).unwrap(), [1e-3, 2e-3], None);
    let mut f = compressed(config(), None);
    f.add(&format!("{GATE}.weight"), Dtype::U8, &[128, 32], gate().codes);
    assert!(open_error(&f).contains(&format!(": belongs to `{GATE}`, but `{GATE}.weight")));
}

#[test]
fn gguf_scales_have_two_names_and_no_third() {
    let open = |tensors: &[(&str, f32)]| {
        let w = Weight::with_block(1, 32, 64, 32);
        let mut blocks = Vec::new();
        for (codes, scale) in w.codes.chunks(16).zip(&w.scales) {
            let code = |k: usize| codes[k / 2] >> (4 * (k % 2)) & 15;
            blocks.push(*scale);
            blocks.extend((0..16).map(|j| code(j) | code(j + 16) << 4));
        }
        let dtype = Dtype::from_ggml(Dtype::GGML_MXFP4).unwrap();
        let mut all: Vec<TensorOut<'_>> = ["gate", "up"]
            .map(|p| TensorOut::new(format!("blk.0.ffn_{p}.weight"), dtype, [32, 64], blocks.clone()))
            .into();
        all.extend(tensors.iter().map(|(name, value)| TensorOut::scalar(*name, &[1], *value)));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let metadata = [("general.architecture".to_string(), GgufValue::String("llama".into()))];
        write_to(&path, &metadata, &all).unwrap();
        Checkpoint::open(&path, &defaults()).unwrap()
    };
    let w = Weight::with_block(1, 32, 64, 32);
    let c = open(&[("blk.0.ffn_gate.weight.scale", 0.25), ("blk.0.ffn_up.scale", 0.5)]);
    let both = c.gate_up(0).unwrap();
    assert_values(&both.gate, &w, 0.25);
    assert_values(&both.up, &w, 0.5);
    for (names, refused) in [
        (&["blk.0.ffn_gate.weight_scale"][..], "blk.0.ffn_gate.weight_scale"),
        (&["blk.0.ffn_gate.weight.scale2"], "blk.0.ffn_gate.weight.scale2"),
        (&["blk.0.ffn_gate.lora_a"], "blk.0.ffn_gate.lora_a"),
        (&["blk.0.ffn_gate.scale", "blk.0.ffn_gate.weight.scale"], "blk.0.ffn_gate.weight.scale"),
    ] {
        let c = open(&names.iter().map(|name| (*name, 0.5)).collect::<Vec<_>>());
        assert!(refusal(c.gate_up(0)).starts_with(&format!("{refused}: belongs to `blk.0.ffn_gate`")));
        assert_eq!(rules(&c), ["unknown-tensor"]);
    }
    assert_eq!(rules(&open(&[("blk.0.ffn_gate_inp.weight", 0.5), ("blk.0.exp_probs_b.bias", 0.5)])), [""; 0]);
}

#[test]
fn scales_say_which_tensor_of_which_file_they_are() {
    let f = modelopt(modelopt_config("NVFP4"), Some(0.5));
    let dir = tempfile::tempdir().unwrap();
    f.write_sharded(dir.path(), |name| usize::from(name.contains("up_proj")));
    let c = Checkpoint::open(dir.path(), &defaults()).unwrap();
    let source = c.gate_up_source(0).unwrap();
    let of = |tensor: String, shard| ScaleOrigin::Tensor { tensor, file: dir.path().join(shard_name(shard)) };
    let (gate, up) = source.tensor_scales_from();
    assert_eq!(gate, &of(format!("{GATE}.weight_scale_2"), 0));
    assert_eq!(up, &of(format!("{UP}.weight_scale_2"), 1));
    let (gate, up) = source.input_scales_from().unwrap();
    assert_eq!((gate, up), (&of(format!("{GATE}.input_scale"), 0), &of(format!("{UP}.input_scale"), 1)));
    let mut mx = Fixture { config: Some(modelopt_config("MXFP4")), ..Fixture::default() };
    for module in [GATE, UP] {
        mxfp4(&mut mx, module, &Weight::with_block(1, 64, 64, 32), (".weight_scale", Dtype::U8));
    }
    let c = mx.open(&defaults()).unwrap();
    let source = c.gate_up_source(0).unwrap();
    assert_eq!((source.format(), source.input_scales_from()), (BlockFormat::Mxfp4, None));
    assert_eq!(source.tensor_scales_from().0.to_string(), "1, by format (mxfp4)");
}

#[test]
fn the_least_tensor_scales_are_kept_as_they_are() {
    let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
    f.tensor(&format!("{GATE}.weight_scale_2")).data = 1e-44f32.to_le_bytes().to_vec().into();
    let c = f.open(&defaults()).unwrap();
    let both = c.gate_up(0).unwrap();
    assert_eq!(both.gate.global_scale().value().to_bits(), 7);
    assert_values(&both.gate, &gate(), 7.0 * 2f64.powi(-149));
}
