//! Checkpoints in the forms in which models are published, beyond the conventions' own rules.

use crate::common::*;
use dualgemm_checkpoint::{Checkpoint, Dtype, MlpKind, Which};
use dualgemm_formats::BlockFormat;
use serde_json::{Value, json};

#[test]
fn shared_experts_are_known_by_every_name() {
    for name in ["share_expert", "mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp"] {
        let mut f = w4a16();
        f.modules(&format!("model.layers.1.{name}"), &PROJECTIONS, 1);
        let c = f.open(&defaults()).unwrap();
        Weight::new(1, 64, 64).assert_is(&c.gate_up_source(1, Which::Shared).unwrap().read().unwrap().gate);
        Weight::new(3, 64, 64).assert_is(&c.down_source(1, Which::Shared).unwrap().read().unwrap().weight);
    }
}

#[test]
fn experts_in_one_tensor_for_gate_and_one_for_up_are_read() {
    // Step: `moe.gate_proj.weight` of all experts.
    let mut f = w4a16();
    for (p, seeds) in [("gate_proj", [1, 2]), ("up_proj", [3, 4])] {
        let module = format!("model.layers.3.moe.{p}");
        let [a, b] = seeds.map(|seed| Weight::new(seed, 64, 64));
        f.add(&format!("{module}.weight"), Dtype::U8, &[2, 64, 32], [a.codes, b.codes].concat());
        f.add(&format!("{module}.weight_scale"), Dtype::F8E4m3, &[2, 64, 4], [a.scales, b.scales].concat());
        f.f32(&format!("{module}.weight_scale_2"), &[2], &[0.25, 0.5]);
    }
    let c = f.open(&defaults()).unwrap();
    let both = expert(&c, 3, 1).unwrap();
    Weight::new(2, 64, 64).assert_is(&both.gate);
    Weight::new(4, 64, 64).assert_is(&both.up);
    assert_eq!(both.up.global_scale().value(), 0.5);
}

#[test]
fn mlps_without_a_gate_are_said_to_be_such() {
    let mut f = w4a16();
    for p in ["up_proj", "down_proj"] {
        let module = format!("backbone.layers.1.mixer.experts.0.{p}");
        f.modelopt(&module, &Weight::new(1, 64, 64), 1e-3, None);
    }
    let c = f.open(&defaults()).unwrap();
    assert_eq!(
        message(&c.experts(1).unwrap_err()),
        "DIR: no gated MLP in layer 1; there is one in no layer (`backbone.layers.1.mixer.experts` has up and down \
         projections, but no gate)"
    );
    assert_ends(&c.validate()[0].message, "has up and down projections, but no gate)");
}

#[test]
fn mistral_keeps_its_configuration_in_params_json_and_its_tensors_in_consolidated_files() {
    for method in ["compressed-tensors", "compressed_tensors"] {
        let mut config = compressed_config(&[(&["Linear"], 16, Value::Null)]);
        config["quantization_config"]["quant_method"] = json!(method);
        let params = json!({ "dim": 64, "quantization": config["quantization_config"] });
        let dir = tempfile::tempdir().unwrap();
        let mut f = Fixture::default();
        for (p, seed) in [("w1", 1), ("w3", 2), ("w2", 3)] {
            f.compressed(&format!("layers.0.experts.0.{p}"), &Weight::new(seed, 64, 64), 1000.0, None);
        }
        f.write(dir.path());
        std::fs::write(dir.path().join("params.json"), params.to_string()).unwrap();
        let own = dir.path().join("consolidated.safetensors");
        std::fs::rename(dir.path().join("model.safetensors"), &own).unwrap();
        for path in [dir.path(), &own] {
            let c = Checkpoint::open(path, &defaults()).unwrap();
            let both = expert(&c, 0, 0).unwrap();
            Weight::new(1, 64, 64).assert_is(&both.gate);
            Weight::new(2, 64, 64).assert_is(&both.up);
        }
        // Hugging Face's names beside them are those that config.json is about.
        compressed(config, None).write(dir.path());
        let c = Checkpoint::open(dir.path(), &defaults()).unwrap();
        assert_eq!(c.mlps().len(), 1);
        assert_mlp(&c, [1e-3, 2e-3], None);
    }
}

#[test]
fn deepseek_keeps_experts_in_mxfp4_beside_fp8() {
    let quantization = json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128] });
    let mut f = Fixture::default();
    for (p, seed) in [("w1", 1), ("w3", 2), ("w2", 3)] {
        let (module, w) = (format!("layers.0.ffn.experts.0.{p}"), Weight::with_block(seed, 64, 64, 32));
        f.add(&format!("{module}.weight"), Dtype::I8, &[64, 32], w.codes);
        f.add(&format!("{module}.scale"), Dtype::F8E8m0, &[64, 2], w.scales);
        let shared = format!("layers.0.ffn.shared_experts.{p}");
        f.add(&format!("{shared}.weight"), Dtype::F8E4m3, &[64, 64], vec![0; 64 * 64]);
        f.add(&format!("{shared}.scale"), Dtype::F8E8m0, &[1, 1], vec![120]);
    }
    for nested in [false, true] {
        let mut config = json!({ "model_type": "deepseek_v4", "quantization_config": quantization });
        let level = if nested { &mut config["quantization_config"] } else { &mut config };
        level["expert_dtype"] = json!("fp4");
        f.config = Some(config);
        let c = f.open(&defaults()).unwrap();
        assert_eq!(c.convention().name, "deepseek");
        let both = expert(&c, 0, 0).unwrap();
        assert_eq!((both.gate.format(), both.gate.k()), (BlockFormat::Mxfp4, 64));
        Weight::with_block(1, 64, 64, 32).assert_is(&both.gate);
        Weight::with_block(2, 64, 64, 32).assert_is(&both.up);
        assert_has(
            &c.gate_up_source(0, Which::Shared).unwrap_err().to_string(),
            "is not quantized: fp8 in blocks",
        );
        assert!(c.validate().is_empty(), "{:?}", c.validate());
    }
    f.config.as_mut().unwrap()["quantization_config"]["expert_dtype"] = json!("fp8");
    assert_has(&open_error(&f), r#"declares quant_method "fp8""#);
}

#[test]
fn mlx_packs_eight_codes_in_a_word() {
    for (mode, block, dtype) in [("mxfp4", 32, Dtype::U8), ("nvfp4", 16, Dtype::U8)] {
        let quantization = json!({ "group_size": block, "bits": 4, "mode": mode,
            "lm_head": { "group_size": 64, "bits": 8, "mode": "affine" }, "model.layers.0.mlp.gate": false });
        let mut f = Fixture::default();
        for (p, seed) in PROJECTIONS.iter().zip(1..) {
            let (module, w) = (format!("model.layers.0.mlp.{p}"), Weight::with_block(seed, 64, 64, block));
            f.add(&format!("{module}.weight"), Dtype::U32, &[64, 8], w.codes);
            f.add(&format!("{module}.scales"), dtype, &[64, 64 / block], w.scales);
        }
        let experts = [5, 6].map(|seed| Weight::with_block(seed, 64, 64, block));
        for p in ["gate_proj", "up_proj"] {
            let module = format!("model.layers.1.mlp.switch_mlp.{p}");
            let codes = experts.iter().flat_map(|w| w.codes.clone()).collect();
            let scales = experts.iter().flat_map(|w| w.scales.clone()).collect();
            f.add(&format!("{module}.weight"), Dtype::U32, &[2, 64, 8], codes);
            f.add(&format!("{module}.scales"), dtype, &[2, 64, 64 / block], scales);
        }
        f.add("lm_head.weight", Dtype::U32, &[8, 16], vec![0; 512]);
        f.add("lm_head.scales", Dtype::Bf16, &[8, 1], vec![0; 16]);
        for key in ["quantization", "quantization_config"] {
            f.config = Some(json!({ "hidden_act": "silu", key: quantization }));
            let c = f.open(&defaults()).unwrap();
            assert_eq!(c.convention().name, "mlx");
            let both = c.gate_up(0).unwrap();
            Weight::with_block(1, 64, 64, block).assert_is(&both.gate);
            Weight::with_block(2, 64, 64, block).assert_is(&both.up);
            assert_eq!(both.gate.global_scale().value(), 1.0);
            assert_eq!(c.mlps()[1].kind, MlpKind::Experts);
            experts[1].assert_is(&expert(&c, 1, 1).unwrap().up);
            assert!(c.validate().is_empty(), "{:?}", c.validate());
        }
        f.config = Some(json!({ "quantization": { "group_size": 64, "bits": 4, "mode": mode } }));
        assert_eq!(
            open_error(&f),
            format!("DIR/config.json: quantization.group_size is 64; valid is {block} for {mode}")
        );
    }
}
