//! Which activation an MLP has, by family: right values, where they come from, and refusals. Files are written here.

mod common;

use std::path::Path;

use common::{Fixture, Weight, defaults, message, modelopt_config};
use dualgemm_checkpoint::gguf::{GgufValue, write_to};
use dualgemm_checkpoint::write::config_to_gguf;
use dualgemm_checkpoint::{Checkpoint, Dtype, Family, JsonFile, MlpKind, OpenOptions, Stated, TensorOut};
use dualgemm_gemm::Activation;
use serde_json::{Value, json};

use MlpKind::{Dense, Experts, Shared};

/// Two layers with an MLP of each kind, under a configuration.
fn safetensors(config: &Value) -> Checkpoint {
    let mut all = modelopt_config("NVFP4");
    all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    all.as_object_mut().unwrap().retain(|key, _| key != "hidden_act" || config.get("hidden_act").is_some());
    let mut f = Fixture { config: Some(all), ..Fixture::default() };
    for layer in 0..2 {
        for mlp in ["mlp", "mlp.experts.0", "mlp.shared_experts"] {
            for (projection, rows, k) in [("gate_proj", 16, 32), ("up_proj", 16, 32), ("down_proj", 32, 16)] {
                let module = format!("model.layers.{layer}.{mlp}.{projection}");
                f.modelopt(&module, &Weight::new(layer, rows, k), 1e-3, Some(1.0));
            }
        }
    }
    f.open(&defaults()).unwrap()
}

fn f32s(numbers: &[f32]) -> GgufValue {
    let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    GgufValue::Array { element: 6, len: numbers.len() as u64, bytes }
}

/// The same as a GGUF file; entries without their architecture.
fn gguf(architecture: &str, entries: &[(&str, GgufValue)]) -> Checkpoint {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let dtype = Dtype::from_ggml(Dtype::GGML_MXFP4).unwrap();
    let mut tensors = Vec::new();
    for layer in 0..2 {
        for kind in ["", "_exps", "_shexp"] {
            for projection in ["gate", "up", "down"] {
                let lead: &[usize] = if kind == "_exps" { &[2] } else { &[] };
                let shape = [lead, &[32, 32]].concat();
                let bytes = vec![120; shape.iter().product::<usize>() / 32 * 17];
                let name = format!("blk.{layer}.ffn_{projection}{kind}.weight");
                tensors.push(TensorOut::new(name, dtype, shape, bytes));
            }
        }
    }
    let mut metadata = vec![("general.architecture".to_owned(), GgufValue::String(architecture.into()))];
    metadata.extend(entries.iter().map(|(key, value)| (format!("{architecture}.{key}"), value.clone())));
    write_to(&path, &metadata, &tensors).unwrap();
    // Mapped files outlive their names.
    Checkpoint::open(&path, &OpenOptions::default()).unwrap()
}

#[track_caller]
fn assert_states(c: &Checkpoint, layer: usize, kind: MlpKind, activation: &str, origin: &str) {
    let stated = c.activation(layer, kind).unwrap();
    assert_eq!(
        (stated.activation.to_string().as_str(), stated.origin.to_string().as_str()),
        (activation, origin)
    );
}

#[track_caller]
fn refusal(c: &Checkpoint, layer: usize, kind: MlpKind) -> String {
    let text = message(&c.activation(layer, kind).unwrap_err());
    assert!(text.contains("an activation that is asked for (--activation, in Python activation=,"), "{text}");
    text
}

#[test]
fn ling_has_a_limit_for_each_layer_and_another_for_shared_experts() {
    let c = safetensors(&json!({ "model_type": "bailing_hybrid", "hidden_act": "silu",
        "expert_swiglu_limit_list": [0, 4], "share_expert_swiglu_limit_list": [null, 5] }));
    let (routed, shared) = (
        "config.json: expert_swiglu_limit_list, hidden_act",
        "config.json: share_expert_swiglu_limit_list, hidden_act",
    );
    let of = |from: &str| format!("{from}; family bailing_hybrid");
    assert_states(&c, 0, Experts, "silu", routed);
    assert_states(&c, 1, Experts, "swiglustep:4", &of(routed));
    assert_states(&c, 0, Shared, "silu", shared);
    assert_states(&c, 1, Shared, "swiglustep:5", &of(shared));
    assert_states(&c, 1, Dense, "silu", "config.json: hidden_act");

    let entries = [("swiglu_clamp_exp", f32s(&[0.0, 4.0])), ("swiglu_clamp_shexp", f32s(&[0.0, 5.0]))];
    let c = gguf("bailingmoe3", &entries);
    let of = "m.gguf: bailingmoe3.swiglu_clamp_exp; family bailing_hybrid";
    assert_states(&c, 0, Experts, "silu", of);
    assert_states(&c, 1, Experts, "swiglustep:4", of);
    assert_eq!(c.activation(1, Shared).unwrap().activation, Activation::SwigluStep { limit: 5.0 });
    assert!(c.validate().iter().all(|f| f.rule.id != "activation"), "{:?}", c.validate());
}

#[test]
fn functions_that_are_not_silu_are_theirs_or_refused() {
    let text = refusal(&gguf("kimi-k3", &[]), 0, Experts);
    assert!(
        text.contains("general.architecture is \"kimi-k3\", whose activation is not implemented: SiTU"),
        "{text}"
    );
    let c = safetensors(
        &json!({ "model_type": "kimi_k3", "text_config": { "model_type": "kimi_linear", "hidden_act": "situ" } }),
    );
    let text = refusal(&c, 0, Experts);
    assert!(text.contains("hidden_act is \"situ\", which is not implemented"), "{text}");
    assert_states(&gguf("smallthinker", &[]), 0, Experts, "relu", "family smallthinker");
    assert_states(&gguf("gemma3", &[]), 0, Dense, "gelu-tanh", "family gemma3_text");
    assert_states(&gguf("grok", &[]), 0, Experts, "gelu-tanh", "family grok-1");
    assert_states(&gguf("spark2_5", &[]), 0, Dense, "gelu-tanh", "family spark2_5");
    assert_states(&gguf("gpt-oss", &[]), 0, Experts, "swigluoai:1.702,1,7", "family gpt_oss");
    assert_states(&gguf("minimax-m3", &[]), 0, Shared, "swigluoai:1.702,1,7", "family minimax_m3_vl_text");
    let c = safetensors(
        &json!({ "model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 6.0, "swiglu_alpha": 1.5 }),
    );
    assert_states(
        &c,
        0,
        Experts,
        "swigluoai:1.5,1,6",
        "config.json: swiglu_limit, swiglu_alpha; family gpt_oss",
    );
    let c = safetensors(&json!({ "model_type": "gemma", "hidden_act": "gelu" }));
    assert_states(&c, 0, Dense, "gelu-tanh", "config.json: hidden_act");
    let c = safetensors(
        &json!({ "model_type": "gemma2", "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh" }),
    );
    assert_states(&c, 0, Dense, "gelu-tanh", "config.json: hidden_activation");
    let c = safetensors(&json!({ "model_type": "bitnet" }));
    assert_states(&c, 0, Dense, "relu2", "family bitnet");
    let c = safetensors(&json!({ "model_type": "dbrx", "ffn_config": { "ffn_act_fn": { "name": "silu" } } }));
    assert_states(&c, 0, Experts, "silu", "config.json: ffn_config.ffn_act_fn.name");
    let c = safetensors(&json!({ "model_type": "exaone", "activation_function": "silu" }));
    assert_states(&c, 0, Dense, "silu", "config.json: activation_function");
    let blocks = json!([{ "ffn": { "hidden_act": "relu2" } }, { "ffn": { "hidden_act": "silu" } }]);
    let c =
        safetensors(&json!({ "model_type": "nemotron-nas", "hidden_act": "silu", "block_configs": blocks }));
    assert_states(&c, 0, Dense, "relu2", "config.json: block_configs.0.ffn.hidden_act");
    assert_states(&c, 1, Dense, "silu", "config.json: block_configs.1.ffn.hidden_act");
}

#[test]
fn a_limit_of_routed_experts_is_theirs_alone() {
    for c in [
        safetensors(&json!({ "model_type": "hy_v4", "hidden_act": "silu", "swiglu_limit": 10.0 })),
        gguf("hy_v4", &[("swiglu_clamp_exp", f32s(&[10.0, 10.0]))]),
    ] {
        let activation = |kind| c.activation(1, kind).unwrap().activation;
        assert_eq!(activation(Experts), Activation::ClampedSilu { limit: 10.0 });
        assert_eq!((activation(Shared), activation(Dense)), (Activation::Silu, Activation::Silu));
    }
    assert_states(&gguf("hy_v4", &[]), 0, Experts, "silu", "family hy_v4");
}

#[test]
fn one_limit_and_a_list_of_limits_are_read_alike() {
    for (architecture, kind, want) in [
        ("deepseek4", Experts, "clamped-silu:10"),
        ("deepseek4", Shared, "clamped-silu:10"),
        ("glm5-next", Experts, "clamped-silu:10"),
        ("glm5-next", Dense, "clamped-silu:10"),
        ("maple", Experts, "clamped-silu:10"),
        ("step35", Experts, "swiglustep:10"),
        // Nothing falls back to the routed experts' here.
        ("step35", Shared, "silu"),
        ("bailingmoe3", Experts, "swiglustep:10"),
    ] {
        for limit in [GgufValue::F32(10.0), GgufValue::F64(10.0), f32s(&[10.0, 10.0])] {
            let c = gguf(architecture, &[("swiglu_clamp_exp", limit)]);
            assert_eq!(c.activation(1, kind).unwrap().activation.to_string(), want, "{architecture} {kind}");
        }
    }
    let both = [("swiglu_clamp_exp", f32s(&[10.0, 0.0])), ("swiglu_clamp_shexp", f32s(&[0.0, 5.0]))];
    let c = gguf("deepseek4", &both);
    let of = |layer, kind| c.activation(layer, kind).unwrap().activation.to_string();
    assert_eq!(
        [of(0, Experts), of(1, Experts), of(0, Shared), of(1, Shared)],
        ["clamped-silu:10", "silu", "silu", "clamped-silu:5"]
    );
    // llama.cpp does not load such a file.
    let text = refusal(&gguf("deepseek4", &[]), 0, Experts);
    assert!(text.contains("deepseek4.swiglu_clamp_exp is missing"), "{text}");
    assert_states(&gguf("glm5-next", &[]), 0, Experts, "silu", "family glm5_next_text");
    let c = safetensors(&json!({ "model_type": "deepseek_v4", "hidden_act": "silu" }));
    assert_states(&c, 0, Experts, "clamped-silu:10", "config.json: hidden_act; family deepseek_v4");
    let c =
        safetensors(&json!({ "model_type": "exaone_moe", "hidden_act": "silu", "swiglu_limits": [0, 7.0] }));
    assert_eq!(c.activation(1, Dense).unwrap().activation, Activation::ClampedSilu { limit: 7.0 });
}

#[test]
fn limits_that_are_none_are_refused_by_their_element() {
    let of = |limits: Value| {
        safetensors(&json!({ "model_type": "step3p5", "hidden_act": "silu", "swiglu_limits": limits }))
    };
    for (limits, want) in [
        (json!([0.0, -1.0]), "swiglu_limits[1] is -1.0"),
        (json!([0.0, "7"]), "swiglu_limits[1] is \"7\""),
        (json!([0.0, 1e300]), "swiglu_limits[1] is 1e+300"),
        (
            json!([7.0]),
            "swiglu_limits[1] is missing: the list has 1 numbers; valid is a number for each layer",
        ),
    ] {
        let text = refusal(&of(limits), 1, Experts);
        assert!(text.starts_with("DIR/config.json: ") && text.contains(want), "{text}");
    }
    let c = gguf("step35", &[("swiglu_clamp_exp", f32s(&[f32::NAN, 7.0]))]);
    let text = refusal(&c, 0, Experts);
    assert!(text.contains("step35.swiglu_clamp_exp[0] is \"NaN\""), "{text}");
    let text = refusal(&safetensors(&json!({ "model_type": "gpt_oss", "swiglu_limit": -7.0 })), 0, Experts);
    assert!(text.contains("swiglu_limit is swigluoai:1.702,1,-7: limit is -7"), "{text}");
    let c = safetensors(&json!({ "model_type": "hy_v4", "hidden_act": "relu", "swiglu_limit": 10.0 }));
    assert!(refusal(&c, 0, Experts).contains("swiglu_limit is 10 beside relu"));
}

#[test]
fn negative_limits_are_none_where_code_reads_them_so() {
    for (model_type, key, limit) in
        [("hy_v4", "swiglu_limit", json!(-1)), ("exaone_moe", "swiglu_limits", json!([0, -1.0]))]
    {
        let c = safetensors(&json!({ "model_type": model_type, "hidden_act": "silu", key: limit }));
        assert_states(&c, 1, Experts, "silu", &format!("config.json: {key}, hidden_act"));
    }
    assert_eq!(
        gguf("hy_v4", &[("swiglu_clamp_exp", f32s(&[-1.0, -1.0]))])
            .activation(0, Experts)
            .unwrap()
            .activation,
        Activation::Silu
    );
    assert_states(&gguf("minicpm", &[]), 0, Dense, "silu", "family minicpm");
    let c =
        safetensors(&json!({ "model_type": "minicpm", "hidden_act": "fatrelu", "hidden_act_param": 0.1 }));
    assert!(refusal(&c, 0, Dense).contains("hidden_act is \"fatrelu\", which is not implemented"));
}

#[test]
fn what_else_is_done_to_gates_is_refused() {
    let gemma = |pattern: Value| {
        safetensors(
            &json!({ "text_config": { "model_type": "gemma3n_text", "activation_sparsity_pattern": pattern } }),
        )
    };
    let text = refusal(&gemma(json!([0.95, 0.0])), 0, Dense);
    assert!(
        text.contains(
            "activation_sparsity_pattern is 0.95 for layer 0, which is not implemented; valid is 0"
        ),
        "{text}"
    );
    assert_states(&gemma(json!([0.95, 0.0])), 1, Dense, "gelu-tanh", "family gemma3n_text");
    assert!(refusal(&gemma(Value::Null), 1, Dense).contains("is 0.95 for layer 1"));
    assert!(
        refusal(&gguf("gemma3n", &[("activation_sparsity_scale", f32s(&[1.0]))]), 1, Dense).contains("0.95")
    );
    let falcon = |gate: f64| {
        safetensors(
            &json!({ "model_type": "falcon_h1", "hidden_act": "silu", "mlp_multipliers": [gate, 0.5] }),
        )
    };
    assert!(refusal(&falcon(0.88), 1, Dense).contains("mlp_multipliers is 0.88"));
    assert_states(&falcon(1.0), 1, Dense, "silu", "config.json: hidden_act");
    // Their converter puts the factors into the weights.
    assert_states(&gguf("falcon-h1", &[]), 1, Dense, "silu", "family falcon_h1");
}

#[test]
fn nothing_is_assumed_of_a_family_that_is_not_known() {
    let text = refusal(&gguf("foo", &[]), 0, Dense);
    let want = "general.architecture is \"foo\", a family that is not known, and no foo.hidden_activation says which";
    assert!(text.contains(want), "{text}");
    let named = gguf("foo", &[("hidden_activation", GgufValue::String("silu".into()))]);
    assert_states(&named, 0, Dense, "silu", "m.gguf: foo.hidden_activation");
    // The configuration's own word for it is one, too.
    let text = |name: &str| GgufValue::String(name.into());
    let own = gguf("foo", &[("hidden_act", text("relu"))]);
    assert_states(&own, 0, Dense, "relu", "m.gguf: foo.hidden_act");
    for (first, second) in [("relu", "silu"), ("silu", "relu")] {
        let both = gguf("foo", &[("hidden_act", text(first)), ("hidden_activation", text(second))]);
        let text = refusal(&both, 0, Dense);
        assert!(
            text.contains(&format!("foo.hidden_act is \"{first} and {second}\", which is not implemented")),
            "{text}"
        );
    }
    assert!(
        refusal(&safetensors(&json!({ "model_type": "foo" })), 0, Dense).contains("model_type is \"foo\"")
    );
    assert!(refusal(&safetensors(&json!({})), 0, Dense).contains("model_type is missing"));
    let c = safetensors(&json!({ "model_type": "foo", "text_config": { "hidden_act": "silu" } }));
    assert_states(&c, 0, Dense, "silu", "config.json: hidden_act");
    let c = safetensors(&json!({ "model_type": "foo", "hidden_act": "swigluoai", "swiglu_limit": 6.0 }));
    assert_states(&c, 0, Dense, "swigluoai:1.702,1,6", "config.json: swiglu_limit, hidden_act");
    let c = safetensors(&json!({ "hidden_act": "silu", "hidden_activation": "relu" }));
    assert!(
        refusal(&c, 0, Dense)
            .contains("hidden_activation is \"relu\", another function; valid is what hidden_act says")
    );
    for name in ["gelu", "mish", "quick_gelu"] {
        let text = refusal(&safetensors(&json!({ "hidden_act": name })), 0, Dense);
        assert!(
            text.contains(&format!("hidden_act is \"{name}\", which is not implemented; valid is silu")),
            "{text}"
        );
    }
    // Without a configuration at all.
    let mut f = common::modelopt(json!({}), Some(1.0));
    f.config = None;
    f.hf_quant_config = Some(json!({ "quantization": { "quant_algo": "NVFP4" } }));
    let text = refusal(&f.open(&defaults()).unwrap(), 0, Dense);
    assert!(
        text.starts_with("DIR: config.json is missing, and nothing else says which activation"),
        "{text}"
    );
    // Asked for, it is no question.
    let asked = OpenOptions { activation: Some(Activation::Relu), ..OpenOptions::default() };
    let c = f.open(&asked).unwrap();
    assert_states(&c, 0, Dense, "relu", "as asked, --activation");
    assert!(c.validate().iter().all(|finding| finding.rule.id != "activation"));
    let unasked = f.open(&defaults()).unwrap().validate();
    assert_eq!(unasked.iter().filter(|finding| finding.rule.id == "activation").count(), 1, "{unasked:?}");
}

#[test]
fn entries_about_activations_that_are_not_understood_are_refused_by_name() {
    for (key, value) in [
        ("swiglu_limit", json!(10.0)),
        ("swiglu_limits", json!([0.0, 7.0])),
        ("swiglu_alpha", json!(1.7)),
        ("mlp_clamp", json!(true)),
        ("moe_act_beta", json!(0.5)),
        ("activation_function", json!("gelu")),
        ("hidden_act_param", json!(0.1)),
        ("mlp_up_softcap", json!(25.0)),
    ] {
        for model_type in ["llama", "foo"] {
            let text = refusal(
                &safetensors(&json!({ "model_type": model_type, "hidden_act": "silu", key: value })),
                0,
                Dense,
            );
            assert!(
                text.contains(&format!("config.json: {key} is {value}, which is not understood in ")),
                "{text}"
            );
        }
    }
    let c = gguf("llama", &[("swiglu_clamp_exp", f32s(&[7.0]))]);
    assert!(
        refusal(&c, 0, Dense)
            .contains("m.gguf: llama.swiglu_clamp_exp is [7.0], which is not understood in family \"llama\"")
    );
    // Inside objects of the language model's part, in other spelling, or as a type.
    for (entry, named) in [
        (json!({ "moe_config": { "swiglu_limit": 3.0 } }), "moe_config.swiglu_limit is 3.0"),
        (json!({ "ffn_config": { "activation": "gelu" } }), "ffn_config.activation is \"gelu\""),
        (json!({ "text_config": { "mlp": { "hidden_act": "relu" } } }), "mlp.hidden_act is \"relu\""),
        (json!({ "hiddenAct": "gelu" }), "hiddenAct is \"gelu\""),
        (json!({ "nonlinearity": "gelu" }), "nonlinearity is \"gelu\""),
        (json!({ "mlp_type": "geglu" }), "mlp_type is \"geglu\""),
    ] {
        let mut config = json!({ "model_type": "qwen3", "hidden_act": "silu" });
        config.as_object_mut().unwrap().extend(entry.as_object().unwrap().clone());
        let text = refusal(&safetensors(&config), 0, Dense);
        assert!(text.contains(&format!("config.json: {named}, which is not understood in ")), "{text}");
    }
    // What says nothing, agrees, or is about something else.
    let c = safetensors(
        &json!({ "model_type": "qwen3", "hidden_act": "silu", "mlp_type": "SwiGLU", "moe_config": { "swiglu_limit": 0 },
        "mlp": { "activation": "swish" }, "attn_config": { "clamp": 8.0 }, "talker_config": { "hidden_act": "gelu" },
        "decoder": { "model_type": "x", "hidden_act": "gelu" } }),
    );
    assert_states(&c, 0, Dense, "silu", "config.json: hidden_act");
    let c = safetensors(
        &json!({ "model_type": "llama", "hidden_act": "silu", "swiglu_limit": null, "swiglu_limits": [0, 0],
        "activation_function": "swish", "activation_dropout": 0.1, "rope_scaling": { "alpha": 2.0 },
        "vision_config": { "hidden_act": "quick_gelu", "swiglu_limit": 3.0 }, "projector_hidden_act": "gelu",
        "time_step_limit": [0.0, 1.0], "routed_scaling_factor": 2.5, "lora_alpha": 16 }),
    );
    assert_states(&c, 0, Dense, "silu", "config.json: hidden_act");
}

#[test]
fn towers_are_not_taken_for_the_language_model() {
    let mut f = common::modelopt(modelopt_config("NVFP4"), Some(1.0));
    for tensor in &mut f.tensors {
        tensor.name = tensor.name.replace("model.", "model.visual.");
    }
    let text = refusal(&f.open(&defaults()).unwrap(), 0, Dense);
    assert!(text.contains("not read for names with `visual`, which is not known"), "{text}");
    // GGUF's projectors for images, and parts with a configuration of their own.
    for (path, part) in [
        ("v.blk.0", "v"),
        ("talker.model.layers.0.mlp", "talker"),
        ("model.vit.layers.0.mlp", "vit"),
        ("embed_vision.mlp", "embed_vision"),
    ] {
        let c = at(path, &json!({ "model_type": "qwen3", "hidden_act": "silu" }), &defaults());
        assert!(refusal(&c, 0, Dense).contains(&format!("names with `{part}`")), "{path}");
        let asked = OpenOptions { activation: Some(Activation::GeluTanh), ..defaults() };
        let c = at(path, &json!({ "model_type": "qwen3", "hidden_act": "silu" }), &asked);
        assert_states(&c, 0, Dense, "gelu-tanh", "as asked, --activation");
    }
    for path in ["model.language_model.layers.0.mlp", "thinker.model.layers.0.mlp", "midlayer.mlp", "mlp"] {
        let c = at(path, &json!({ "model_type": "qwen3", "hidden_act": "relu" }), &defaults());
        assert_states(&c, 0, Dense, "relu", "config.json: hidden_act");
    }
}

/// One MLP of that name.
fn at(path: &str, config: &Value, options: &OpenOptions) -> Checkpoint {
    let mut all = modelopt_config("NVFP4");
    all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    let mut f = Fixture { config: Some(all), ..Fixture::default() };
    for (projection, rows, k) in [("gate_proj", 16, 32), ("up_proj", 16, 32), ("down_proj", 32, 16)] {
        f.modelopt(&format!("{path}.{projection}"), &Weight::new(1, rows, k), 1e-3, Some(1.0));
    }
    f.open(options).unwrap()
}

#[test]
fn limits_of_layers_hold_for_those_that_predict_further_tokens_only_where_code_says_so() {
    let exaone = |limits: Value| json!({ "model_type": "exaone_moe", "hidden_act": "silu", "swiglu_limits": limits, "num_hidden_layers": 1 });
    let (mtp, beyond) = ("mtp.layers.0.mlp", "model.layers.1.mlp");
    let c = at("model.layers.0.mlp", &exaone(json!([4.0])), &defaults());
    assert_states(
        &c,
        0,
        Dense,
        "clamped-silu:4",
        "config.json: swiglu_limits, hidden_act; family exaone_moe",
    );
    let plain = "config.json: hidden_act; family exaone_moe";
    assert_states(&at(mtp, &exaone(json!([4.0])), &defaults()), 0, Dense, "silu", plain);
    assert_states(&at(beyond, &exaone(json!([4.0])), &defaults()), 1, Dense, "silu", plain);
    assert_states(&at(beyond, &exaone(json!([4.0, 0.0])), &defaults()), 1, Dense, "silu", plain);
    let text = refusal(&at(beyond, &exaone(json!([4.0, 5.0])), &defaults()), 1, Dense);
    assert!(text.contains("swiglu_limits is 5.0, which is not known to hold in layer 1"), "{text}");
    let step = json!({ "model_type": "step3p5", "hidden_act": "silu", "swiglu_limits_shared": [4.0] });
    let c = at("model.mtp.layers.0.mlp", &step, &defaults());
    assert_states(&c, 0, Dense, "silu", "config.json: hidden_act; family step3p5");
    // Nothing says so of this one.
    let ling =
        json!({ "model_type": "bailing_hybrid", "hidden_act": "silu", "expert_swiglu_limit_list": [4.0] });
    let text = refusal(&at("model.mtp.layers.0.mlp.experts.0", &ling, &defaults()), 0, Experts);
    assert!(
        text.contains("expert_swiglu_limit_list is one limit for each layer, which is not known"),
        "{text}"
    );
    // One limit for all layers is theirs, too.
    let hy = json!({ "model_type": "hy_v4", "hidden_act": "silu", "swiglu_limit": 4.0 });
    let c = at("mtp.layers.0.mlp.experts.0", &hy, &defaults());
    assert_eq!(c.activation(0, Experts).unwrap().activation, Activation::ClampedSilu { limit: 4.0 });
    let c = at(mtp, &json!({ "model_type": "qwen3_next", "hidden_act": "silu" }), &defaults());
    assert_states(&c, 0, Dense, "silu", "config.json: hidden_act");
}

/// Rows of `order`, which the family defines.
#[track_caller]
fn assert_fused(model_type: &str, mlp: &str, projection: &str, up_first: bool) {
    let (gate, up) = (Weight::new(1, 16, 32), Weight::new(2, 16, 32));
    let both = if up_first { up.stacked(&gate) } else { gate.stacked(&up) };
    let mut config = modelopt_config("NVFP4");
    config["model_type"] = json!(model_type);
    let mut f = Fixture { config: Some(config), ..Fixture::default() };
    f.modelopt(&format!("model.layers.0.{mlp}.{projection}"), &both, 1e-3, Some(1.0));
    let c = f.open(&defaults()).unwrap();
    let read = if mlp == "mlp" { c.gate_up(0) } else { c.shared_gate_up(0) };
    let read = read.unwrap_or_else(|e| panic!("{model_type}: {e}"));
    gate.assert_is(&read.gate);
    up.assert_is(&read.up);
}

#[test]
fn fused_modules_are_read_in_the_order_of_their_family() {
    assert_fused("phi3", "mlp", "gate_up_proj", false);
    assert_fused("glm4", "mlp", "gate_up_proj", false);
    assert_fused("hunyuan_v1_moe", "mlp", "gate_and_up_proj", true);
    assert_fused("granitemoeshared", "shared_mlp", "input_linear", false);
    // Experts in one tensor.
    let (gate, up) = (Weight::new(1, 16, 32), Weight::new(2, 16, 32));
    let mut all = gate.stacked(&up);
    let second = all.clone();
    all = all.stacked(&second);
    let mut config = modelopt_config("NVFP4");
    config["model_type"] = json!("granitemoe");
    let mut f = Fixture { config: Some(config), ..Fixture::default() };
    f.modelopt("model.layers.0.block_sparse_moe.input_linear", &all, 1e-3, Some(1.0));
    for (ending, shape) in [("weight", vec![2, 32, 16]), ("weight_scale", vec![2, 32, 2])] {
        f.tensor(&format!("model.layers.0.block_sparse_moe.input_linear.{ending}")).shape = shape;
    }
    let c = f.open(&defaults()).unwrap();
    let read = c.experts(0).unwrap().gate_up(1).unwrap();
    gate.assert_is(&read.gate);
    up.assert_is(&read.up);
    // Where no family says so, the order is asked for.
    let mut config = modelopt_config("NVFP4");
    config["model_type"] = json!("foo");
    let mut f = Fixture { config: Some(config), ..Fixture::default() };
    f.modelopt("model.layers.0.mlp.gate_and_up_proj", &gate.stacked(&up), 1e-3, Some(1.0));
    let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
    assert!(e.contains("model.layers.0.mlp.gate_and_up_proj.weight") && e.contains("order"), "{e}");
}

#[test]
fn every_family_of_the_table_can_be_asked() {
    for family in Family::ALL {
        for name in family.model_types.iter().filter(|name| **name != "params.json") {
            let c = safetensors(&json!({ "model_type": name }));
            for kind in [Dense, Shared, Experts] {
                let refused = c.activation(1, kind).err().map(|e| e.to_string());
                assert!(refused.is_none_or(|e| e.contains("not implemented")), "{name}");
            }
        }
        for name in family.architectures {
            let refused = gguf(name, &[]).activation(1, Experts).err().map(|e| e.to_string());
            let known =
                |e: &String| ["not implemented", "clamp_exp is missing"].iter().any(|why| e.contains(why));
            assert!(refused.as_ref().is_none_or(known), "{name}: {refused:?}");
        }
    }
}

/// Small configurations as models publish them and as they could lie, with the activation of layer 1's experts.
const CORPUS: &[(&str, &str)] = &[
    ("bailing-v3.json", "swiglustep:4"),
    ("bailing-short-list.json", ""),
    ("dbrx.json", "silu"),
    ("deep-nesting.json", ""),
    ("deepseek-v3.json", "silu"),
    ("deepseek-v4.json", "clamped-silu:10"),
    ("exaone-moe.json", "clamped-silu:7"),
    ("falcon-h1.json", ""),
    ("gemma3.json", "gelu-tanh"),
    ("gemma3n.json", ""),
    ("glm5-next.json", "clamped-silu:10"),
    ("gpt-oss.json", "swigluoai:1.702,1,7"),
    ("hy-v4.json", "clamped-silu:10"),
    ("inkling2.json", ""),
    ("kimi-k3.json", ""),
    ("limit-of-text.json", ""),
    ("llama.json", "silu"),
    ("minimax-m3.json", "swigluoai:1.702,1,7"),
    ("minimax-text-01.json", "silu"),
    ("nemotron-nas.json", "relu2"),
    ("qwen3-vl-moe.json", "silu"),
    ("step3p5.json", "swiglustep:7"),
    ("two-names.json", ""),
    ("unknown-family.json", ""),
    ("unknown-family-named.json", "silu"),
    ("unknown-family-limit.json", ""),
];

#[test]
fn the_corpus_of_configurations_gives_activations_or_refusals() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), CORPUS.len());
    for (name, want) in CORPUS {
        let text = std::fs::read(folder.join(name)).unwrap();
        let config = JsonFile { path: "config.json".into(), value: serde_json::from_slice(&text).unwrap() };
        let got = Stated::of_config(&config, 1, Experts);
        let got_name = got.as_ref().map_or_else(|_| String::new(), |stated| stated.activation.to_string());
        assert_eq!(got_name, *want, "{name}: {got:?}");
        // GGUF says the same, or what it has to refuse.
        let (_, metadata) = config_to_gguf(Some(&config.value), "unknown");
        for kind in [Dense, Shared, Experts] {
            let there = Stated::of_gguf(Path::new("m.gguf"), &metadata, 1, kind);
            match (Stated::of_config(&config, 1, kind), there) {
                (Ok(here), Ok(there)) => assert_eq!(here.activation, there.activation, "{name}"),
                (here, there) => assert!(there.is_err(), "{name}: {here:?}, in GGUF {there:?}"),
            }
        }
    }
}

#[test]
fn tensors_stored_as_gpt_oss_stores_them_are_not_taken_for_silu() {
    let open = |config: Value| {
        let mut all = json!({ "quantization_config": { "quant_method": "mxfp4" } });
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        let mut f = Fixture { config: Some(all), ..Fixture::default() };
        let module = "model.layers.0.mlp.experts.gate_up_proj";
        f.add(&format!("{module}_blocks"), Dtype::U8, &[1, 32, 1, 16], vec![0x21; 32 * 16]);
        f.add(&format!("{module}_scales"), Dtype::U8, &[1, 32, 1], vec![120; 32]);
        f.open(&defaults()).unwrap()
    };
    let c = open(json!({ "model_type": "gpt_oss", "hidden_act": "silu" }));
    assert_states(&c, 0, Experts, "swigluoai:1.702,1,7", "family gpt_oss");
    let text = refusal(&open(json!({ "model_type": "gpt_oss_puzzle", "hidden_act": "silu" })), 0, Experts);
    assert!(text.contains("says silu, and its tensors are stored as gpt-oss stores them"), "{text}");
    let c = open(json!({ "model_type": "gpt_oss_puzzle", "hidden_act": "swigluoai" }));
    assert_states(&c, 0, Experts, "swigluoai:1.702,1,7", "config.json: hidden_act");
}
