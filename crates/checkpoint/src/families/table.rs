//! The table of families. Adding one is a row here and a test of its values in `tests/checkpoint/families.rs`.
//!
//! Sources are paths in public repositories: `transformers/` is huggingface/transformers, `llama.cpp/`
//! ggml-org/llama.cpp, `vllm/` vllm-project/vllm, `sglang/` sgl-project/sglang. Read at transformers 5.24.0, vllm 0.33.0,
//! sglang 0.5.23 and the llama.cpp of llama_cpp_python 0.3.36.

use super::{Absent, COMMON_KEYS, Clamp, Family, Function, Limit, NO_GATE, Neutral, Shape, Sum};
use crate::GateUpOrder::{GateUp, GateUpRows, UpGate};
use crate::module::MlpKind::{self, Dense, Experts, Shared};

const ALL: &[MlpKind] = &[Dense, Shared, Experts];
const SILU: Function = named(COMMON_KEYS, Shape::Silu);
const PLAIN: &str = "transformers/models, llama.cpp/src/models";
const DEEPSEEK: &str = "sglang/srt/models/deepseek_v2.py, llama.cpp/src/models/deepseek2.cpp";

/// The function that the first of these entries names, or else `otherwise`.
const fn named(keys: &'static [&'static str], otherwise: Shape) -> Function {
    Function::Named { keys, otherwise: Some(otherwise), also: &[] }
}

const fn fixed(shape: Shape, names: &'static [&'static str]) -> Function {
    Function::Fixed { shape, names }
}

/// silu, unless `hidden_act` names another function.
const fn plain(model_types: &'static [&'static str], architectures: &'static [&'static str]) -> Family {
    Family {
        model_types,
        architectures,
        function: SILU,
        clamp: Clamp::Before,
        limits: &[],
        neutral: &[],
        sum: Sum::Plain,
        ignored: &[],
        fused: &[],
        fused_up: false,
        source: PLAIN,
    }
}

/// gelu by tanh, unless `hidden_activation` names another function.
const fn gemma(model_types: &'static [&'static str], architectures: &'static [&'static str]) -> Family {
    let function = named(&["hidden_activation"], Shape::GeluTanh);
    // transformers reads the other entry alone; its `hidden_act` may say the exact gelu.
    Family { function, ignored: &["hidden_act"], ..plain(model_types, architectures) }
}

/// One that cannot be computed.
const fn missing(
    model_types: &'static [&'static str],
    architectures: &'static [&'static str],
    what: &'static str,
    source: &'static str,
) -> Family {
    Family { function: Function::Missing(what), source, ..plain(model_types, architectures) }
}

/// A limit for all MLPs of some kinds under one entry, in GGUF under `gguf`.
const fn limit(key: &'static str, gguf: &'static str, kinds: &'static [MlpKind]) -> Limit {
    Limit {
        kinds,
        key,
        gguf,
        list: false,
        absent: Absent::NoLimit,
        absent_in_gguf: Absent::NoLimit,
        in_mtp: Absent::Refused,
        negative: false,
    }
}

const fn limits(key: &'static str, gguf: &'static str, kinds: &'static [MlpKind]) -> Limit {
    Limit { list: true, ..limit(key, gguf, kinds) }
}

/// The same in a family whose layers that predict further tokens have none.
const fn limits_of_trunk(key: &'static str, gguf: &'static str, kinds: &'static [MlpKind]) -> Limit {
    Limit { in_mtp: Absent::NoLimit, ..limits(key, gguf, kinds) }
}

/// One of gate's and down's multipliers (Falcon-H1).
const fn multiplier(at: usize, after: bool) -> Neutral {
    Neutral { key: "mlp_multipliers", at: Some(at), neutral: 1.0, absent: &[], after }
}

/// Shared experts and dense MLPs have a limit of their own in GGUF, or else that of the routed experts.
const SHEXP: Limit = Limit {
    absent: Absent::Next,
    absent_in_gguf: Absent::Next,
    ..limit("swiglu_clamp_shexp", "swiglu_clamp_shexp", &[Dense, Shared])
};

/// `gate_up_proj` as the family's own code splits it.
const HALVES: &[(&str, crate::GateUpOrder)] = &[("gate_up_proj", GateUp)];
const INPUT_LINEAR: &[(&str, crate::GateUpOrder)] = &[("input_linear", GateUp)];
const HUNYUAN: &[(&str, crate::GateUpOrder)] = &[("gate_and_up_proj", UpGate)];

pub(super) const FAMILIES: &[Family] = &[
    // The gpt-oss activation.
    Family {
        function: fixed(Shape::Oai, &["silu", "swigluoai"]),
        fused: &[("gate_up_proj", GateUpRows)],
        source: "transformers/models/gpt_oss, sglang/srt/models/gpt_oss.py, llama.cpp/src/llama-graph.cpp",
        ..plain(&["gpt_oss"], &["gpt-oss"])
    },
    Family {
        function: fixed(Shape::Oai, &["silu", "swigluoai"]),
        fused: HALVES,
        source: "transformers/models/openai_privacy_filter",
        ..plain(&["openai_privacy_filter"], &[])
    },
    Family {
        function: fixed(Shape::Oai, &["silu", "swigluoai"]),
        fused: HALVES,
        source: "transformers/models/minimax_m3_vl, vllm/models/minimax_m3, llama.cpp/src/models/minimax-m3.cpp",
        ..plain(&["minimax_m3_vl_text", "minimax_m3_vl", "minimax_m3"], &["minimax-m3"])
    },
    // Limits before silu.
    Family {
        limits: &[
            SHEXP,
            Limit {
                absent: Absent::Is(10.0),
                absent_in_gguf: Absent::Refused,
                ..limit("swiglu_limit", "swiglu_clamp_exp", ALL)
            },
        ],
        source: "transformers/models/deepseek_v4, llama.cpp/src/models/deepseek4.cpp",
        ..plain(&["deepseek_v4", "deepseek_v41"], &["deepseek4", "deepseek41"])
    },
    Family {
        limits: &[
            SHEXP,
            Limit { absent: Absent::Is(10.0), ..limit("swiglu_limit", "swiglu_clamp_exp", ALL) },
        ],
        source: "transformers/models/glm5_next, llama.cpp/src/models/glm5-next.cpp",
        ..plain(&["glm5_next_text", "glm5_next"], &["glm5-next", "glm5next"])
    },
    Family {
        limits: &[Limit {
            absent: Absent::Is(10.0),
            negative: true,
            ..limit("swiglu_limit", "swiglu_clamp_exp", &[Experts])
        }],
        source: "transformers/models/hy_v4, vllm/models/hy_v4, llama.cpp/src/models/hy-v4.cpp",
        ..plain(&["hy_v4", "hy_v4_vl_text", "hy_v4_vl"], &["hy_v4"])
    },
    Family {
        limits: &[Limit { negative: true, ..limits_of_trunk("swiglu_limits", "swiglu_limits", ALL) }],
        source: "vllm/model_executor/models/exaone_moe.py, llama.cpp/src/models/exaone-moe.cpp",
        ..plain(&["exaone_moe"], &["exaone-moe"])
    },
    Family {
        limits: &[limit("swiglu_limit", "swiglu_limit", ALL)],
        source: "sglang/srt/models/gigachat35.py",
        ..plain(&["gigachat35"], &[])
    },
    Family {
        limits: &[limit("swiglu_limit", "swiglu_limit", ALL)],
        source: DEEPSEEK,
        ..plain(
            &["deepseek_v3", "deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text", "kimi_k2"],
            &["deepseek2", "deepseek2-ocr"],
        )
    },
    Family {
        limits: &[limit("swiglu_limit", "swiglu_limit", ALL)],
        source: DEEPSEEK,
        ..plain(&["deepseek_v32"], &["deepseek32"])
    },
    Family {
        limits: &[Limit {
            absent: Absent::Is(7.0),
            absent_in_gguf: Absent::Refused,
            ..limit("swiglu_limit", "swiglu_clamp_exp", &[Experts])
        }],
        source: "llama.cpp/src/models/maple.cpp, llama.cpp/conversion/maple.py",
        ..plain(&["maple"], &["maple"])
    },
    // Limits after silu.
    Family {
        clamp: Clamp::After,
        limits: &[
            limits_of_trunk("swiglu_limits", "swiglu_clamp_exp", &[Experts]),
            limits_of_trunk("swiglu_limits_shared", "swiglu_clamp_shexp", &[Dense, Shared]),
        ],
        source: "transformers/models/step3p7, vllm/model_executor/models/step3p5.py, llama.cpp/src/models/step35.cpp",
        ..plain(&["step3p5", "step3p7", "step5"], &["step35"])
    },
    Family {
        clamp: Clamp::After,
        limits: &[
            limits("expert_swiglu_limit_list", "swiglu_clamp_exp", &[Experts]),
            limits("share_expert_swiglu_limit_list", "swiglu_clamp_shexp", &[Shared]),
        ],
        source: "vllm/model_executor/models/bailing_moe_v3.py, sglang/srt/models/bailing_moe_v3.py, llama.cpp/src/models/bailingmoe3.cpp",
        ..plain(&["bailing_hybrid", "bailing_moe_v3"], &["bailingmoe3"])
    },
    // Other functions.
    Family {
        function: Function::Named {
            keys: &["hidden_activation", "hidden_act"],
            otherwise: Some(Shape::GeluTanh),
            // The official files say so and mean the other form, as transformers warns.
            also: &[("gelu", Shape::GeluTanh)],
        },
        source: "transformers/models/gemma, llama.cpp/src/models/gemma.cpp",
        ..plain(&["gemma"], &["gemma"])
    },
    gemma(&["gemma2"], &["gemma2"]),
    gemma(&["gemma3_text", "gemma3"], &["gemma3", "gemma-embedding"]),
    gemma(
        &["gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"],
        &["gemma4", "gemma4-assistant"],
    ),
    gemma(&["diffusion_gemma_text", "embedding_gemma2_text", "vaultgemma", "recurrent_gemma"], &[]),
    Family {
        neutral: &[Neutral {
            key: "activation_sparsity_pattern",
            at: None,
            neutral: 0.0,
            absent: &[0.95; 10],
            after: false,
        }],
        // llama.cpp has the ten layers and their number built in.
        ignored: &["hidden_act", "activation_sparsity_scale"],
        source: "transformers/models/gemma3n, llama.cpp/src/models/gemma3n.cpp",
        ..gemma(&["gemma3n_text", "gemma3n"], &["gemma3n"])
    },
    Family {
        function: fixed(Shape::GeluTanh, &["gelu", "gelu_pytorch_tanh", "gelu_tanh"]),
        source: "sglang/srt/models/grok.py, llama.cpp/src/models/grok.cpp",
        ..plain(&["grok-1"], &["grok"])
    },
    Family {
        // Hugging Face's and MLX's code do not agree on which gelu it is; llama.cpp has one alone.
        function: fixed(Shape::GeluTanh, &["gelu", "gelu_pytorch_tanh"]),
        source: "llama.cpp/src/models/spark2-5.cpp",
        ..plain(&[], &["spark2_5"])
    },
    Family {
        function: fixed(Shape::Relu, &["relu"]),
        source: "llama.cpp/src/models/smallthinker.cpp",
        ..plain(&["smallthinker"], &["smallthinker"])
    },
    Family {
        function: named(COMMON_KEYS, Shape::Relu2),
        source: "transformers/models/bitnet",
        ..plain(&["bitnet"], &[])
    },
    Family {
        neutral: &[multiplier(0, false), multiplier(1, true)],
        source: "transformers/models/falcon_h1, llama.cpp/conversion/falcon_h1.py",
        ..plain(&["falcon_h1"], &["falcon-h1"])
    },
    // Functions that are not implemented.
    missing(
        &[],
        &["bitnet"],
        "relu² in transformers and silu in llama.cpp",
        "transformers/models/bitnet, llama.cpp/src/models/bitnet.cpp",
    ),
    missing(
        &["kimi_k3"],
        &["kimi-k3"],
        "SiTU, beta · tanh(g / beta) · sigmoid(g) · linear_beta · tanh(u / linear_beta)",
        "llama.cpp/src/models/kimi-k3.cpp, vllm/models/kimi_k3",
    ),
    missing(
        &["inkling2_text", "inkling2_loop_text"],
        &[],
        "silu with soft caps, which are tanh, on gate and up",
        "transformers/models/inkling2",
    ),
    missing(&["phi3small"], &[], "gegelu", "sglang/srt/models/phi3_small.py"),
    missing(&["dory"], &["dory"], "silu of gates that are scaled by vectors", "transformers/models/dory"),
    missing(&["zamba", "zamba2"], &[], "the exact gelu", "transformers/models/zamba2"),
    missing(NO_GATE[0], NO_GATE[1], "they have no gate, or there are none", PLAIN),
    // silu under other names.
    Family {
        function: named(&["activation"], Shape::Silu),
        source: "vllm/transformers_utils/configs/mistral.py, llama.cpp/conversion/mistral.py",
        ..plain(&["params.json"], &[])
    },
    Family {
        function: named(&["ffn_config.ffn_act_fn.name"], Shape::Silu),
        source: "transformers/models/dbrx, llama.cpp/src/models/dbrx.cpp",
        ..plain(&["dbrx"], &["dbrx"])
    },
    Family {
        function: named(&["activation_function", "hidden_act"], Shape::Silu),
        fused: INPUT_LINEAR,
        source: "transformers/models/jetmoe",
        ..plain(&["jetmoe"], &[])
    },
    Family {
        function: named(&["activation_function", "hidden_act"], Shape::Silu),
        source: "transformers/models/exaone, llama.cpp/src/models/exaone.cpp",
        ..plain(&["exaone"], &["exaone"])
    },
    Family {
        function: named(&["activation_function"], Shape::Silu),
        source: "llama.cpp/conversion/jais.py",
        ..plain(&[], &["jais"])
    },
    // silu, with fused tensors whose rows the family defines.
    Family {
        fused: HALVES,
        fused_up: true,
        source: "transformers/models/phi3, llama.cpp/src/models/phi3.cpp",
        ..plain(&["phi3", "phi4_multimodal"], &["phi3"])
    },
    Family {
        fused: HALVES,
        fused_up: true,
        source: "transformers/models/glm, llama.cpp/src/models/chatglm.cpp",
        ..plain(&["glm", "chatglm"], &["chatglm"])
    },
    Family {
        fused: HALVES,
        fused_up: true,
        source: "transformers/models/glm4, llama.cpp/src/models/glm4.cpp",
        ..plain(
            &["glm4", "glm4v_text", "glm4v", "glm_ocr_text", "glm_ocr", "glm_image_text", "glm_image"],
            &["glm4"],
        )
    },
    Family {
        fused: HALVES,
        sum: Sum::WeighsInputs,
        source: "transformers/models/llama4, llama.cpp/src/models/llama4.cpp",
        ..plain(&["llama4_text", "llama4"], &["llama4"])
    },
    Family {
        fused: HALVES,
        source: "transformers/models/qwen3_vl_moe, llama.cpp/src/models/qwen3vlmoe.cpp",
        ..plain(
            &["qwen3_vl_moe_text", "qwen3_vl_moe", "qwen3_omni_moe_text", "qwen3_omni_moe"],
            &["qwen3vlmoe"],
        )
    },
    Family {
        fused: INPUT_LINEAR,
        source: "transformers/models/granitemoe, llama.cpp/src/models/granite-moe.cpp",
        ..plain(&["granitemoe", "granitemoeshared"], &["granitemoe"])
    },
    Family {
        fused: INPUT_LINEAR,
        source: "transformers/models/granitemoehybrid, llama.cpp/src/models/granite-hybrid.cpp",
        ..plain(&["granitemoehybrid", "bamba"], &["granitehybrid"])
    },
    Family {
        fused: INPUT_LINEAR,
        fused_up: true,
        source: "transformers/models/granitemoe_swa, llama.cpp/src/models/granite-swa.cpp",
        ..plain(&["granite_swa", "granitemoe_swa"], &["granite_swa"])
    },
    Family {
        fused: HUNYUAN,
        source: "sglang/srt/models/hunyuan.py, llama.cpp/src/models/hunyuan-moe.cpp",
        ..plain(&["hunyuan_v1_moe", "hunyuan"], &["hunyuan-moe"])
    },
    Family {
        fused: HUNYUAN,
        source: "sglang/srt/models/hunyuan.py, llama.cpp/src/models/hunyuan-dense.cpp",
        ..plain(&["hunyuan_v1_dense"], &["hunyuan-dense"])
    },
    Family {
        fused: HUNYUAN,
        source: "vllm/model_executor/models/hy_v3_mtp.py, llama.cpp/src/models/hy-v3.cpp",
        ..plain(&["hy_v3"], &["hy_v3"])
    },
    Family { fused_up: true, ..plain(&["plamo2"], &["plamo2"]) },
    Family { fused_up: true, ..plain(&["plamo3"], &["plamo3"]) },
    // silu.
    plain(&["afmoe"], &["afmoe"]),
    plain(&["arctic"], &["arctic"]),
    plain(&["baichuan"], &["baichuan"]),
    plain(&["bailing_moe"], &["bailingmoe"]),
    plain(&["bailing_moe_v2", "sarvam_moe"], &["bailingmoe2"]),
    plain(&["chameleon"], &["chameleon"]),
    plain(&["cohere"], &["command-r"]),
    plain(&["cohere2"], &["cohere2"]),
    plain(&["cohere2_moe"], &["cohere2moe"]),
    plain(&["deepseek"], &["deepseek"]),
    plain(&["deci", "nemotron-nas"], &["deci"]),
    plain(&["dots1"], &["dots1"]),
    plain(&["dots3_note_text", "dots3_note"], &["dots3note"]),
    plain(&[], &["dream"]),
    plain(&["ernie4_5"], &["ernie4_5"]),
    plain(&["ernie4_5_moe", "ernie4_5_vl_moe_text", "ernie4_5_vl_moe"], &["ernie4_5-moe"]),
    plain(&["exaone4"], &["exaone4"]),
    plain(&["glm4_moe", "glm4v_moe_text", "glm4v_moe", "solar_open"], &["glm4moe"]),
    plain(&["glm4_moe_lite"], &[]),
    plain(&["glm_moe_dsa"], &["glm-dsa"]),
    plain(&["granite", "granite_docling_text"], &["granite"]),
    plain(&[], &["graniteswitch"]),
    plain(&[], &["grovemoe"]),
    plain(&["hrm_text"], &["hrm_text"]),
    plain(&["hunyuan_vl_text", "hunyuan_vl"], &["hunyuan_vl"]),
    plain(&["internlm2"], &["internlm2"]),
    plain(&["jamba"], &["jamba"]),
    Family {
        source: "sglang/srt/models/kimi_linear.py, llama.cpp/src/models/kimi-linear.cpp",
        ..plain(&["kimi_linear"], &["kimi-linear"])
    },
    plain(&["laguna"], &["laguna"]),
    plain(&["lfm2"], &["lfm2"]),
    plain(&["lfm2_moe"], &["lfm2moe"]),
    plain(&[], &["llada"]),
    plain(&[], &["llada-moe"]),
    plain(&["llama", "mllama_text_model", "mllama", "internlm3"], &["llama", "llama-embed"]),
    plain(&["maincoder"], &["maincoder"]),
    plain(&["mellum"], &["mellum"]),
    plain(&["mimo_v2_flash"], &["mimo2"]),
    plain(&["minicpm"], &["minicpm"]),
    plain(&["minicpm3"], &["minicpm3"]),
    Family {
        sum: Sum::WeighsShared("a coefficient of each token"),
        source: "vllm/model_executor/models/minimax_text_01.py, llama.cpp/src/models",
        ..plain(&["minimax", "minimax_m1", "minimax_text_01"], &["minimax-01"])
    },
    plain(&["minimax_m2"], &["minimax-m2"]),
    plain(&["mistral"], &[]),
    plain(&["mixtral"], &[]),
    plain(&["ministral3", "mistral3", "ministral"], &["mistral3"]),
    plain(&["mistral4"], &["mistral4"]),
    plain(&["muse_glimmer_text", "muse_glimmer"], &["muse-glimmer"]),
    plain(&[], &["nanbeige"]),
    plain(&["olmo"], &["olmo"]),
    plain(&["olmo2", "olmo3"], &["olmo2"]),
    plain(&["olmoe"], &["olmoe"]),
    plain(&[], &["openelm"]),
    plain(&["orion"], &["orion"]),
    plain(&["paddleocr_vl_text", "paddleocr_vl"], &["paddleocr"]),
    plain(&[], &["pangu-embedded"]),
    plain(&["phimoe"], &["phimoe"]),
    plain(&["plamo"], &["plamo"]),
    plain(&[], &["qwen"]),
    plain(&["qwen2", "dots_ocr"], &["qwen2"]),
    plain(&["qwen2_moe"], &["qwen2moe"]),
    plain(
        &["qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl", "qwen2_5_omni_text", "qwen2_5_omni"],
        &["qwen2vl"],
    ),
    plain(&["qwen3"], &["qwen3"]),
    plain(&["qwen3_moe"], &["qwen3moe"]),
    plain(&["qwen3_next"], &["qwen3next"]),
    plain(&["qwen3_vl_text", "qwen3_vl"], &["qwen3vl"]),
    plain(&["qwen3_5_text", "qwen3_5"], &["qwen35"]),
    plain(&["qwen3_5_moe_text", "qwen3_5_moe"], &["qwen35moe"]),
    plain(&["qwen4_exp_text", "qwen4_exp"], &["qwen4exp"]),
    plain(&[], &["refact"]),
    plain(&[], &["rnd1"]),
    plain(&[], &["rwkv6qwen2"]),
    plain(&[], &["arwkv7"]),
    plain(&["seed_oss"], &["seed_oss"]),
    plain(&["smollm3"], &["smollm3"]),
    plain(&["stablelm"], &["stablelm"]),
    plain(&[], &["talkie"]),
    plain(&["xverse"], &["xverse"]),
    plain(&[], &["cogvlm"]),
    plain(&[], &["eagle3"]),
    plain(&["aria_text", "aria"], &[]),
    plain(&["axk1"], &[]),
    plain(&["axk2"], &[]),
    plain(&["beam"], &[]),
    plain(&["cohere_compass_text"], &[]),
    plain(&["csm"], &[]),
    plain(&["cwm"], &[]),
    plain(&["diffllama"], &[]),
    plain(&["doge"], &[]),
    plain(&["emu3_text_model"], &[]),
    plain(&["flex_olmo"], &[]),
    plain(&["flint"], &[]),
    plain(&["helium"], &[]),
    plain(&["hyperclovax"], &[]),
    // The other entry is of its router.
    Family {
        ignored: &["gate_activation"],
        sum: Sum::WeighsShared("a gamma of the router"),
        source: "transformers/models/inkling",
        ..plain(&["inkling_text"], &[])
    },
    plain(&["kolibri1"], &[]),
    plain(&["lara_mini"], &[]),
    plain(&["longcat_flash"], &[]),
    plain(&["mistral_large4_text", "mistral_large4"], &[]),
    plain(&["molmo2_text"], &[]),
    plain(&["muse_spark_text"], &[]),
    plain(&["olmo_hybrid"], &[]),
    plain(&["sarvam_mla"], &[]),
    plain(&["voxtral_realtime_text"], &[]),
    plain(&["youtu"], &[]),
    plain(&["zaya"], &[]),
];
