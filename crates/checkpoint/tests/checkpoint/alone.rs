//! Whole MLPs and mixtures are refused where a model has more in them than gate, up, down and a router.

use crate::common::{Fixture, Weight, assert_has, defaults, gguf_mlps, modelopt_config, open_gguf, refusal};
use dualgemm_checkpoint::{Checkpoint, Dtype, MlpKind, OpenOptions, TensorOut};
use dualgemm_gemm::RouterWeights;
use serde_json::{Value, json};

use MlpKind::{Dense, Experts, Shared};

/// These MLPs of a layer, a tensor beside them, and a configuration's entries.
fn open(mlps: &[&str], beside: &str, config: &Value) -> Checkpoint {
    open_of(&mlps.iter().map(|mlp| (*mlp, 16, 32)).collect::<Vec<_>>(), beside, config)
}

/// The same with N and K of each.
fn open_of(mlps: &[(&str, usize, usize)], beside: &str, config: &Value) -> Checkpoint {
    let mut all = modelopt_config("NVFP4");
    all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    let mut f = Fixture { config: Some(all), ..Fixture::default() };
    for &(mlp, n, k) in mlps {
        for (projection, rows, k) in [("gate_proj", n, k), ("up_proj", n, k), ("down_proj", k, n)] {
            f.modelopt(
                &format!("model.layers.0.{mlp}.{projection}"),
                &Weight::new(1, rows, k),
                1e-3,
                Some(1.0),
            );
        }
    }
    f.f32(&format!("model.layers.0.{beside}"), &[2], &[1.0; 2]);
    f.open(&OpenOptions::default()).unwrap()
}

const DENSE: &[&str] = &["mlp"];
const ROUTED: &[&str] = &["mlp.experts.0", "mlp.experts.1", "mlp.shared_experts"];

#[test]
fn what_is_no_projection_refuses_a_whole_mlp_by_name() {
    for (mlps, kind, beside, alone) in [
        (DENSE, Dense, "post_attention_layernorm.weight", true),
        (DENSE, Dense, "mlp_norm.weight", true),
        (DENSE, Dense, "mlp.ffn_sub_norm.weight", false),
        (DENSE, Dense, "mlp.global_scale", false),
        (DENSE, Dense, "mlp.router_gate.weight", false),
        (DENSE, Dense, "mlp.experts.down_embed.weight", false),
        (ROUTED, Experts, "mlp.gate.weight", true),
        (ROUTED, Experts, "mlp.bias", true),
        (ROUTED, Experts, "mlp.experts.1.sub_norm.weight", false),
        (ROUTED, Experts, "mlp.experts.0.scale", false),
        (ROUTED, Experts, "mlp.experts.post_expert_norm.weight", false),
        (ROUTED, Experts, "mlp.experts.gate_up_proj_bias", false),
        (ROUTED, Shared, "mlp.shared_expert_gate.weight", true),
        (ROUTED, Shared, "mlp.shared_experts.norm.weight", false),
    ] {
        let c = open(mlps, beside, &json!({}));
        match c.check_whole(0, kind) {
            Ok(()) => assert!(alone, "{beside}"),
            Err(e) => {
                assert!(!alone && e.to_string().starts_with(&format!("model.layers.0.{beside}: ")), "{e}")
            }
        }
    }
}

#[test]
fn what_is_no_expert_and_no_router_refuses_a_mixture_by_name() {
    for (beside, whole, routed_only) in [
        ("mlp.gate.weight", true, true),
        ("mlp.gate.wg.weight", true, true),
        ("mlp.router.per_expert_scale", true, true),
        ("mlp.e_score_correction_bias", true, true),
        ("mlp.moe_statics.e_score_correction_bias", true, true),
        ("mlp.expert_bias", true, true),
        ("self_attn.q_norm.weight", true, true),
        ("mlp.shared_experts.norm.weight", false, true),
        ("mlp.chunk_experts.0.down_proj.weight", false, false),
        ("mlp.experts.gate_up_proj_bias", false, false),
        ("mlp.pre_expert_norm.weight", false, false),
        ("mlp.fc1_latent_proj.weight", false, false),
        ("mlp.bias", false, false),
    ] {
        let c = open(ROUTED, beside, &json!({}));
        for (only, alone) in [(false, whole), (true, routed_only)] {
            assert_eq!(c.check_mixture(0, only).is_ok(), alone, "{beside}, routed only: {only}");
        }
    }
    // Experts beside their router in the layer itself, and below a block's own name.
    for (mlps, beside, alone) in [
        (&["experts.0"][..], "post_feedforward_layernorm_1.weight", true),
        (&["experts.0"], "router.scale", true),
        (&["experts.0"], "experts.norm.weight", false),
        (&["moe.0"], "moe.router_bias", true),
        (&["moe.0"], "moe.norm.weight", false),
    ] {
        assert_eq!(open(mlps, beside, &json!({})).check_mixture(0, false).is_ok(), alone, "{beside}");
    }
}

#[test]
fn experts_of_other_shapes_refuse_a_mixture_by_name() {
    let (first, second, shared) = ("mlp.experts.0", "mlp.experts.1", "mlp.shared_experts");
    for (odd, n, k, whole, routed_only) in
        [(second, 64, 32, false, false), (shared, 64, 32, true, true), (shared, 16, 64, false, true)]
    {
        let own = |mlp| if mlp == odd { (mlp, n, k) } else { (mlp, 16, 32) };
        let c = open_of(&[first, second, shared].map(own), "norm.weight", &json!({}));
        for (only, fits) in [(false, whole), (true, routed_only)] {
            match c.check_mixture(0, only) {
                Ok(()) => assert!(fits, "{odd} [{n}, {k}]"),
                Err(e) => {
                    let found = format!("model.layers.0.{odd}.gate_proj: is nvfp4 [{n}, {k}], and `");
                    assert!(!fits && e.to_string().starts_with(&found), "{e}");
                }
            }
        }
    }
}

#[test]
fn families_say_what_multiplies_in_their_mlps() {
    let of = |config: Value| open(ROUTED, "norm.weight", &config);
    for (model_type, weights) in [("llama4_text", RouterWeights::Input), ("qwen3_moe", RouterWeights::Output)]
    {
        let c = of(json!({ "model_type": model_type }));
        assert_eq!(c.router_weights(), weights);
        c.check_mixture(0, false).unwrap();
    }
    for (model_type, what) in
        [("inkling_text", "a gamma of the router"), ("minimax_text_01", "a coefficient of each token")]
    {
        let c = of(json!({ "model_type": model_type }));
        assert_has(&refusal(c.check_mixture(0, false)), &format!("shared_experts: {what}, which multiplies"));
        c.check_mixture(0, true).unwrap();
    }
    for (multipliers, gates, whole) in
        [([1.0, 1.0], true, true), ([1.0, 0.5], true, false), ([0.5, 1.0], false, true)]
    {
        let c =
            open(DENSE, "norm.weight", &json!({ "model_type": "falcon_h1", "mlp_multipliers": multipliers }));
        assert_eq!(c.activation(0, Dense).is_ok(), gates, "{multipliers:?}");
        match c.check_whole(0, Dense) {
            Ok(()) => assert!(whole, "{multipliers:?}"),
            Err(e) => {
                assert_has(&e.to_string(), "config.json: mlp_multipliers[1] is 0.5 for layer 0, which is")
            }
        }
    }
}

#[test]
fn of_a_layer_in_gguf_the_feed_forward_tensors_count() {
    for (beside, alone) in [
        ("attn_norm", true),
        ("ffn_norm", true),
        ("post_ffw_norm", true),
        ("ffn_gate_inp", true),
        ("exp_probs_b", true),
        ("ffn_sub_norm", false),
        ("ffn_up_chexps", false),
        ("ffn_latent_down", false),
    ] {
        let mut tensors = gguf_mlps(1, &["", "_exps"]);
        tensors.push(TensorOut::new(format!("blk.0.{beside}.weight"), Dtype::F32, [2], vec![0; 8]));
        let c = open_gguf("qwen3moe", &[], &tensors, &defaults());
        for found in [c.check_whole(0, Dense), c.check_whole(0, Experts), c.check_mixture(0, false)] {
            assert_eq!(found.is_ok(), alone, "{beside}: {found:?}");
        }
    }
}
