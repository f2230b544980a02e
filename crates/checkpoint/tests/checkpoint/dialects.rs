//! What producers of one convention say in ways of their own: each value against a dequantization in f64 that is written
//! in `common`.

use crate::common::*;
use dualgemm_checkpoint::{
    Checkpoint, Dtype, GateUpOrder, GateUpSource, OpenOptions, ScaleOrigin, TensorOut, Which,
};
use dualgemm_formats::BlockFormat;
use serde_json::{Value, json};

fn within(prefix: &str) -> OpenOptions {
    OpenOptions { within: Some(prefix.into()), ..defaults() }
}

/// Gate, up and down of expert 0 below a path, each with a seed of its own.
fn projections(path: &str) -> [(String, u64); 3] {
    [("w1", 1), ("w3", 2), ("w2", 3)].map(|(p, seed)| (format!("{path}.experts.0.{p}"), seed))
}

/// nvfp4 experts of layer 0 by ModelOpt beside those of `mtp`, which stay as DeepSeek made them.
fn deepseek_nvfp4(quantization: Value) -> Fixture {
    let config =
        json!({ "model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": quantization });
    let mut f = Fixture::with(config);
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
        let source = c.gate_up_source(0, Which::Expert(0)).unwrap();
        let both = source.read().unwrap();
        assert_values(&both.gate, &Weight::new(1, 64, 64), f64::from(1e-2f32));
        assert_values(&both.up, &Weight::new(2, 64, 64), f64::from(1e-2f32));
        assert_eq!(source.input_scales().unwrap().unwrap().0.value(), 0.5);
        assert_eq!(rules(&c), [""; 0]);
        let c = f.open(&within("mtp")).unwrap();
        let source = c.gate_up_source(0, Which::Expert(0)).unwrap();
        let both = source.read().unwrap();
        assert_values(&both.up, &Weight::with_block(12, 64, 64, 32), 1.0);
        assert_eq!(source.input_scales().unwrap(), None);
        assert_eq!(rules(&f.open(&defaults()).unwrap()), [""; 0]);
    }
}

#[test]
fn deepseek_names_of_one_format_beside_the_other_are_refused() {
    let gate = "layers.0.ffn.experts.0.w1";
    let read = |f: &Fixture| refusal(expert(&f.open(&within("layers")).unwrap(), 0, 0));
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
    assert_starts(&refusal(expert(&c, 0, 0)), "mtp.0.ffn.experts.0.w1.scale: is missing");
    // What is outside is not checked, as it is not read.
    assert_eq!(rules(&c), ["missing-tensor"]);
    assert_eq!(rules(&f.open(&within("layers")).unwrap()), [""; 0]);
    // An algorithm that nobody knows is that of its own modules.
    let mut config = deepseek_config();
    config["quantized_layers"]["layers.0.ffn.experts"]["quant_algo"] = json!("IQ3_WIRE");
    let f = deepseek_nvfp4(config);
    assert_has(&read(&f), "quantized_layers.layers.0.ffn.experts.quant_algo is \"IQ3_WIRE\"; valid is NVFP4");
    assert!(expert(&f.open(&within("mtp")).unwrap(), 0, 0).is_ok());
    let mut config = deepseek_config();
    config.as_object_mut().unwrap().remove("quantized_layers");
    config["moe_quant_algo"] = json!("IQ3_WIRE");
    let f = deepseek_nvfp4(config);
    assert_has(&read(&f), "moe_quant_algo is \"IQ3_WIRE\"");
    assert_eq!(rules(&f.open(&within("layers")).unwrap()), ["config"]);
}

#[test]
fn experts_in_mxfp4_beside_fp8_are_read_by_either_name_of_their_scales() {
    let mimo = json!({ "store_dtype": "mxfp4", "mxfp4_block_size": 32 });
    let ling = json!({ "routed_experts_quant_method": "mxfp4", "routed_experts_group_size": 32 });
    let fixture = |own: &Value, scale: (&str, Dtype)| {
        let mut config = json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128] });
        config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        let mut f = Fixture::with(json!({ "hidden_act": "silu", "quantization_config": config }));
        for (module, seed) in projections("model.layers.1.mlp") {
            mxfp4(&mut f, &module, &Weight::with_block(seed, 64, 64, 32), scale);
        }
        f.add("model.layers.0.mlp.gate_proj.weight", Dtype::F8E4m3, &[64, 64], vec![0; 4096]);
        f.f32("model.layers.0.mlp.gate_proj.weight_scale_inv", &[1, 1], &[1.0]);
        f
    };
    let read = |f: &Fixture| {
        expert(&f.open(&defaults()).unwrap(), 1, 0).map(|both| {
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
        assert_has(&refusal(c.linear("model.layers.0.mlp.gate_proj")), "is not quantized: fp8");
        // Two block scales, or another tensor scale, contradict the one there is.
        let gate = "model.layers.1.mlp.experts.0.w1";
        let other = if scale.0 == ".weight_scale" { "weight_scale_inv" } else { "weight_scale" };
        f.f32(&format!("{gate}.{other}"), &[1, 1], &[0.5]);
        assert_has(&refusal(read(&f)), &format!(": belongs to `{gate}`, but `{gate}.weight_scale"));
        let mut f = fixture(own, scale);
        f.f32(&format!("{gate}.weight_scale_2"), &[1], &[0.5]);
        assert_starts(&refusal(read(&f)), &format!("{gate}.weight_scale_2: belongs to `{gate}`"));
        let mut f = fixture(own, scale);
        f.remove(&format!("{gate}{}", scale.0));
        assert_has(&refusal(read(&f)), "is missing from DIR");
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
        assert_ends(&refusal(read(&fixture(&own, (".weight_scale", Dtype::U8)))), says);
    }
}

#[test]
fn experts_one_below_the_other_are_told_apart_by_their_number() {
    let [a, b] = [1, 2].map(|seed| Weight::new(seed, 64, 64));
    let fixture = |experts: Option<u64>, scales: &[f32]| {
        let mut config = compressed_config(&[(&["Linear"], 16, Value::Null)]);
        config["num_experts"] = json!(experts);
        let mut f = Fixture::with(config);
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
        assert_eq!((c.experts(0).unwrap(), rules(&c).is_empty()), (vec![0, 1], true));
        assert_values(&expert(&c, 0, 0).unwrap().up, &a.rows_at(32..64), 0.125);
        assert_values(&expert(&c, 0, 1).unwrap().gate, &b.rows_at(0..32), of_second);
        assert_values(&expert_down(&c, 0, 1).unwrap().weight, &b, of_second);
        assert_has(&refusal(expert(&c, 0, 2)), "no expert 2");
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
        assert_starts(&e, "model.layers.0.mlp.experts.gate_up_proj.weight_packed: shape [128, 32]");
        assert_has(&e, says);
        assert!(rules(&c).contains(&"shape"));
    }
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
        open_gguf("llama", &[], &all, &defaults())
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
        assert_starts(&refusal(c.gate_up(0)), &format!("{refused}: belongs to `blk.0.ffn_gate`"));
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
    let GateUpSource { gate, up } = c.gate_up_source(0, Which::Dense).unwrap();
    let of = |tensor: String, shard| ScaleOrigin::Tensor { tensor, file: dir.path().join(shard_name(shard)) };
    for (source, name, shard) in [(gate, GATE, 0), (up, UP, 1)] {
        assert_eq!(source.tensor_scale_from, of(format!("{name}.weight_scale_2"), shard));
        assert_eq!(source.input_scale_from, Some(of(format!("{name}.input_scale"), shard)));
    }
    let mut mx = Fixture::with(modelopt_config("MXFP4"));
    for module in [GATE, UP] {
        mxfp4(&mut mx, module, &Weight::with_block(1, 64, 64, 32), (".weight_scale", Dtype::U8));
    }
    let c = mx.open(&defaults()).unwrap();
    let gate = c.gate_up_source(0, Which::Dense).unwrap().gate;
    assert_eq!((gate.format(), gate.input_scale_from), (BlockFormat::Mxfp4, None));
    assert_eq!(gate.tensor_scale_from.to_string(), "1, by format (mxfp4)");
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

#[test]
fn experts_of_deepseek_are_fp4_where_nothing_says_otherwise() {
    for model_type in ["deepseek_v4", "deepseek_v41"] {
        let config = json!({ "model_type": model_type, "quantization_config": { "quant_method": "fp8" } });
        let mut f = Fixture::with(config);
        for (module, seed) in projections("layers.0.ffn") {
            mxfp4(&mut f, &module, &Weight::with_block(seed, 64, 64, 32), (".scale", Dtype::F8E8m0));
        }
        let c = f.open(&defaults()).unwrap();
        assert_eq!(c.convention().name, "deepseek");
        let both = expert(&c, 0, 0).unwrap();
        assert_values(&both.gate, &Weight::with_block(1, 64, 64, 32), 1.0);
        assert_values(&both.up, &Weight::with_block(2, 64, 64, 32), 1.0);
        f.config.as_mut().unwrap()["expert_dtype"] = json!("fp8");
        assert_has(&open_error(&f), r#"declares quant_method "fp8""#);
    }
}
