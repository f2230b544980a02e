//! Entries of a configuration that speak of an activation or a limit, told by the words of their names.
//!
//! A name is taken apart at `_`, `.`, `-` and capitals, so that `act` is found in `hidden_act` and `hiddenAct` and not in
//! `factor`.

use serde_json::{Map, Value};

#[rustfmt::skip]
const WORDS: &[&str] = &[
    "act", "acts", "activation", "activations", "alpha", "beta", "geglu", "gegelu", "glu", "limit",
    "limits", "nonlinearity", "reglu", "relu", "situ", "silu", "gelu", "softcap",
];
/// Parts of words.
const STEMS: &[&str] = &["swiglu", "clamp"];
/// Names without any of the words.
const NAMES: &[&str] = &["mlp_multipliers", "non_linearity", "feed_forward_proj"];

/// Names whose values may name a function.
const TYPES: &[&str] = &["ffn_type", "mlp_type"];

/// Words that say that an entry is about something else.
#[rustfmt::skip]
const ELSEWHERE: &[&str] = &[
    "activated", "adapter", "adapters", "altup", "attn", "attention", "audio", "aux", "classifier",
    "connector", "conv", "dropout", "dt", "focal", "image", "kda", "kqv", "layernorm", "lora", "loss",
    "mamba", "matcher", "pooler", "projection", "projector", "prompt", "quantize", "rope", "router",
    "speech", "ssm", "summary", "tokens", "vision", "visual", "xielu",
];
/// Entries about something else whose words do not say so, of transformers, vLLM, SGLang and mlx-lm.
#[rustfmt::skip]
const OTHERS: &[&str] = &[
    "act_dim", "activation_dtype", "activation_func_fp8_input_store", "alpha_initializer", "alpha_type",
    "alphas_initializer_range", "attractor_alpha", "bias_activation_fusion", "clamp_len", "clamp_temp",
    "csp_activation", "depth_decoder_activation", "encoder_feedforward_activation",
    "full_attn_alpha_factor", "full_attn_beta_factor", "gdn_activation_layout",
    "linear_attn_alpha_factor", "linear_attn_beta_factor", "linear_silu", "log_scaling_alpha",
    "mal_alpha", "mask_downsampler_hidden_act", "memory_fuser_hidden_act", "mlp_alpha_factor",
    "mlp_beta_factor", "moe_gate_act", "mup_output_alpha", "nemo_activation", "ngpt_alpha_init",
    "readout_activation", "scaling_alpha", "segmentation_head_activation_function", "stem_act_func",
    "time_sampling_beta_alpha", "time_sampling_beta_beta", "time_step_limit",
    "timm_override_act_layers",
];

/// Words of objects in a configuration that are about something else than the language model's MLPs, beside the others.
#[rustfmt::skip]
const OTHER_OBJECTS: &[&str] = &[
    "acoustic", "backbone", "code2wav", "codec", "compression", "decoder", "depth", "diffusion", "dit",
    "encoder", "generation", "head", "id2label", "img", "label2id", "perceiver", "qformer",
    "quantization", "sam", "semantic", "talker", "tokenizer", "vae", "video", "vit", "vocoder", "vq",
];

/// The words of a name, in small letters.
fn words(key: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_small = false;
    for letter in key.chars() {
        let ends = ['_', '.', '-'].contains(&letter);
        if ends || (was_small && letter.is_uppercase()) {
            words.push(String::new());
        }
        if let (false, Some(word)) = (ends, words.last_mut()) {
            word.extend(letter.to_lowercase());
        }
        was_small = letter.is_lowercase();
    }
    words
}

/// Whether an entry speaks of the activation of an MLP, as far as its name tells.
pub(crate) fn concerns(key: &str) -> bool {
    let words = words(key);
    let has = |list: &[&str]| words.iter().any(|word| list.contains(&word.as_str()));
    let stems = || STEMS.iter().any(|stem| key.to_lowercase().contains(stem));
    (NAMES.contains(&key) || has(WORDS) || stems()) && !OTHERS.contains(&key) && !has(ELSEWHERE)
}

/// The same, of a name whose value may name a function, too.
pub(crate) fn speaks(key: &str, value: &Value) -> bool {
    concerns(key) || (TYPES.contains(&key) && value.as_str().is_some_and(concerns))
}

/// Entries of an object inside a language model's configuration, unless it is about another model or another part of this.
pub(crate) fn inner<'v>(key: &str, value: &'v Value) -> Option<&'v Map<String, Value>> {
    let words = words(key);
    let elsewhere =
        |word: &String| [ELSEWHERE, OTHER_OBJECTS].iter().any(|list| list.contains(&word.as_str()));
    let object = value.as_object().filter(|object| !object.contains_key("model_type"));
    object.filter(|_| !words.iter().any(elsewhere))
}

/// Whether a value leaves everything as it is: null, false, nothing at all, or a limit of 0.
pub(crate) fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(set) => !set,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(all) => all.iter().all(says_nothing),
        Value::Object(all) => all.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_about_activations_are_told_from_others() {
        for key in OURS {
            assert!(concerns(key), "{key}");
        }
        for key in OTHERS.iter().chain(REAL) {
            assert!(!concerns(key), "{key}");
        }
    }

    #[rustfmt::skip]
    const OURS: &[&str] = &[
        "hidden_act", "hidden_activation", "hidden_act_alpha", "hidden_act_param", "activation",
        "activation_function", "activation_func", "activation_fn_name", "activation_type",
        "non_linearity", "mlp_hidden_act", "ffn_act_fn", "dense_act_fn", "feed_forward_proj",
        "ff_activation", "gelu_activation", "decoder_hidden_act", "swiglu_limit", "swiglu_limits",
        "swiglu_limits_shared", "swiglu_alpha", "swiglu_beta", "expert_swiglu_limit_list",
        "share_expert_swiglu_limit_list", "gegelu_limit", "activation_situ_beta",
        "activation_situ_linear_beta", "activation_sparsity_pattern", "mlp_multipliers",
        "mlp_gate_softcap", "mlp_up_softcap", "use_swiglu_ffn", "swiglu_clamp_exp",
        "activation.situ_beta", "moe_swiglu_limit", "mlp_clamp", "expert_limit", "swiglulimit",
        "hiddenAct", "mlpActivation", "SwiGLULimit", "nonlinearity", "ffn_nonlinearity",
    ];

    /// Real entries about something else: transformers 5.24.0, all configurations; GGUF; remote code of published models.
    #[rustfmt::skip]
    const REAL: &[&str] = &[
        "activation_dropout", "projector_hidden_act", "projection_hidden_act", "time_step_limit",
        "mamba_hidden_act", "hidden_mamba_act", "log_scaling_alpha", "altup_active_idx",
        "summary_activation", "classifier_activation", "focal_alpha", "matcher_alpha",
        "focal_loss_alpha", "pooler_hidden_act", "pooler_act", "memory_attention_mlp_hidden_act",
        "mask_downsampler_hidden_act", "memory_fuser_hidden_act", "conv_norm_activation",
        "conv_activation", "segmentation_head_activation_function",
        "memory_attention_feed_forward_hidden_act", "speech_encoder_hidden_act", "stem_act_func",
        "depth_decoder_activation", "adapter_act", "prompt_alpha", "prompt_hidden_act",
        "moe_router_activation", "moe_router_activation_func", "router_activation",
        "gate_attn_act_mode", "aux_loss_alpha", "seq_aux_loss_alpha", "scaling_alpha", "lora_alpha",
        "mamba_dt_limit", "layernorm_full_attention_alpha", "layernorm_mlp_beta",
        "layernorm_linear_attention_beta", "connector_act", "projector_act", "num_activated_experts",
        "n_activated_experts", "quantize_activations", "kda_gate_lower_bound", "initializer_factor",
        "autocorrelation_factor", "routed_scaling_factor", "downsample_factor",
        "mtp_loss_scaling_factor", "width_factor", "slow_but_exact", "reassemble_factors",
        "extract_layers", "action_tanh", "partial_rotary_factor", "router_scaling_factor",
        "temporal_downsample_factor", "reduction_factor", "scale_factor", "feat_extract_norm",
        "sampling_factor", "projector_scale_factors", "num_character_labels",
        "initializer_cutoff_factor", "embedding_fraction", "speaker_activity_threshold",
        "moe_eval_capacity_token_fraction", "max_action_dim", "num_attractors", "attractor_kind",
        "router_aux_loss_coef", "architectures", "interaction_blocks", "attn_logit_softcapping",
        "final_logit_softcapping", "moe_router_logit_softcapping", "attention_multiplier",
        "residual_multiplier", "embedding_multiplier", "ssm_multipliers", "ffn_dim_multiplier",
        "ffn_multipliers", "attention.clamp_kqv", "adapters.token_ids_activate", "altup.active_idx",
        "rope.scaling.alpha", "rope.scaling.factor", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow", "ple.layer_multipliers", "kda.gate_lower_bound",
        "max_position_embeddings", "intermediate_size", "expert_gating_func", "use_cache",
        "routerActivation", "H_cycles", "transformersVersion", "mlp_type",
    ];

    #[test]
    fn types_and_objects_are_about_activations_where_they_say_so() {
        use serde_json::json;
        for name in ["geglu", "SwiGLU", "gated-gelu"] {
            assert!(speaks("mlp_type", &json!(name)), "{name}");
        }
        for name in ["dense", "vanilla_mlp", "GatedMLP"] {
            assert!(!speaks("mlp_type", &json!(name)), "{name}");
        }
        for name in ["moe_config", "ffn_config", "mlp", "extra"] {
            assert!(inner(name, &json!({ "activation": "gelu" })).is_some(), "{name}");
            assert!(inner(name, &json!({ "model_type": "other", "activation": "gelu" })).is_none(), "{name}");
        }
        for name in
            ["vision_config", "quantization_config", "rope_parameters", "attn_config", "talker_config"]
        {
            assert!(inner(name, &json!({ "activation": "gelu" })).is_none(), "{name}");
        }
    }

    #[test]
    fn values_that_leave_everything_as_it_is_say_nothing() {
        use serde_json::json;
        for value in
            [json!(null), json!(false), json!([]), json!(0), json!([0, null, 0.0]), json!(""), json!({})]
        {
            assert!(says_nothing(&value), "{value}");
        }
        for value in [json!(true), json!("silu"), json!(7.0), json!([0, 7]), json!({ "name": "silu" })] {
            assert!(!says_nothing(&value), "{value}");
        }
    }
}
