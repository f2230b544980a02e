//! What producers quantize and engines fuse, by the name of a module.
//!
//! The tools of ModelOpt, llm-compressor and torchao quantize the linear layers of the language model, and leave the output
//! head, routers, gates of linear attention, layers that predict further tokens and other modalities in floats. Embeddings
//! are no linear layers to them nor to the loaders of their files, which know no quantized ones. Engines read some layers
//! as one, with one tensor scale for all.
//!
//! Sources: `modelopt_recipes/configs/ptq/units/default_disabled_quantizers.yaml` of ModelOpt 0.47, `FUSED_LAYER_NAMES` of
//! llm-compressor 0.14, `packed_modules_mapping` of vLLM's models.

use crate::convention::Evidence;
use crate::{Dtype, Error, TensorFiles, TensorView};

dualgemm_formats::named! {
    /// What a module is that stays in floats.
    pub enum Kept {
        /// A table that is looked up.
        Embedding = "an embedding",
        /// What makes logits.
        Head = "the output head",
        /// A norm.
        Norm = "a norm",
        /// What chooses experts, or the gate of the shared one.
        Router = "a router",
        /// A convolution.
        Convolution = "a convolution",
        /// A part of linear attention with a row per head.
        HeadGate = "a gate of linear attention",
        /// A layer whose weights the model reads itself: Mamba's time step, and DeepSeek's indexer.
        Read = "a layer whose weights its model reads",
        /// Layers that predict further tokens.
        Prediction = "a layer that predicts further tokens",
        /// An encoder of images or sound, or what follows it.
        Modality = "a part for images or sound",
    }
}

/// Parts of a module's name that say what it is: any part that holds the text, in this order.
const ANYWHERE: &[(&str, Kept)] = &[
    ("vision", Kept::Modality),
    ("visual", Kept::Modality),
    ("image", Kept::Modality),
    ("audio", Kept::Modality),
    ("multi_modal", Kept::Modality),
    ("multimodal", Kept::Modality),
    ("mm_projector", Kept::Modality),
    ("embed", Kept::Embedding),
    ("embd", Kept::Embedding),
    ("pos_emb", Kept::Embedding),
    ("conv", Kept::Convolution),
    ("norm", Kept::Norm),
    ("lm_head", Kept::Head),
];
/// The last part of a module's name.
const LAST: &[(&str, Kept)] = &[
    ("wte", Kept::Embedding),
    ("wpe", Kept::Embedding),
    ("shared", Kept::Embedding),
    ("relative_attention_bias", Kept::Embedding),
    ("output_layer", Kept::Head),
    ("proj_out", Kept::Head),
    ("shared_expert_gate", Kept::Router),
    ("in_proj_a", Kept::HeadGate),
    ("in_proj_b", Kept::HeadGate),
    ("in_proj_ba", Kept::HeadGate),
    ("dt_proj", Kept::Read),
    ("weights_proj", Kept::Read),
];

/// What engines read as one layer: last parts of names below one module.
const FUSED: &[&[&str]] = &[
    &["gate_proj", "up_proj"],
    &["w1", "w3"],
    &["ffn_gate", "ffn_up"],
    &["q_proj", "k_proj", "v_proj"],
    &["wq", "wk", "wv"],
    &["attn_q", "attn_k", "attn_v"],
    &["q_a_proj", "kv_a_proj_with_mqa"],
    &["in_proj_qkv", "in_proj_z"],
];

/// Whether a name is of what chooses experts: a part of it is `gate` (HunYuan's is `gate.wg`), or speaks of a router.
pub(crate) fn is_router(name: &str) -> bool {
    name.split('.').any(|part| part == "gate" || part.contains("router") || part.starts_with("ffn_gate_inp"))
}

/// How tensors end that change which experts a router chooses.
const CORRECTIONS: &[&str] = &["e_score_correction_bias", "expert_bias", "tid2eid"];

/// Whether a tensor changes which experts a router chooses.
pub(crate) fn is_correction(name: &str) -> bool {
    CORRECTIONS.iter().any(|ending| name.ends_with(ending))
}

/// What a module is, if it is one that producers leave in floats.
pub fn kept(module: &str) -> Option<Kept> {
    let last = module.rsplit('.').next().unwrap_or(module);
    let whole = match module {
        "output" => Some(Kept::Head),
        "transformer.w" => Some(Kept::Embedding),
        _ => module.starts_with("mtp.").then_some(Kept::Prediction),
    };
    let anywhere = || ANYWHERE.iter().find(|(text, _)| module.contains(text)).map(|(_, kept)| *kept);
    let router = || is_router(module).then_some(Kept::Router);
    let at_end = || LAST.iter().find(|(name, _)| *name == last).map(|(_, kept)| *kept);
    whole.or_else(anywhere).or_else(router).or_else(at_end)
}

/// The module of a float tensor that is the weight of a linear layer: two-dimensional and `….weight`, or named without a dot
/// and no bias.
pub fn linear_weight<'n>(tensor: &'n str, dtype: Dtype, shape: &[usize]) -> Option<&'n str> {
    let alone = || (!tensor.contains('.') && !tensor.ends_with("bias")).then_some(tensor);
    let module = tensor.strip_suffix(".weight").or_else(alone)?;
    let linear = dtype.is_float() && shape.len() == 2;
    linear
        .then_some(module)
        .filter(|m| !matches!(kept(m), Some(Kept::Embedding | Kept::Norm | Kept::Convolution)))
}

/// Checks that weights of these files are floats that nothing was done to: quantizing again what is quantized in part would
/// lose what says how the rest is.
///
/// # Errors
/// If the configuration or the metadata declares a quantization, or a weight is in another type than F32, F16 and BF16.
pub fn check_floats(files: &TensorFiles) -> Result<(), Error> {
    let declared = Evidence::new(files)?.declared();
    let declared = declared.map(|by| format!("a source that is quantized already, as {by} says,"));
    let found = declared.or_else(|| {
        let weight = |t: &TensorView<'_>| {
            t.shape.len() > 1 && (t.name.ends_with("weight") || t.dtype.is_8_bit_float())
        };
        let tensor = files.tensors().find(|t| weight(t) && !t.dtype.is_float())?;
        Some(format!("`{}` in {}", tensor.name, tensor.dtype))
    });
    match found {
        None => Ok(()),
        Some(found) => Err(Error::Unsupported {
            module: files.root().display().to_string(),
            found,
            supported: "weights in F32, F16 and BF16 alone are",
        }),
    }
}

/// Layers that engines read as one: the module above them, and their names below it.
pub type Set<'n> = (&'n str, &'static [&'static str]);

/// What engines read as one with this module.
pub fn fused(module: &str) -> Option<Set<'_>> {
    let (parent, last) = module.rsplit_once('.').unwrap_or(("", module));
    FUSED.iter().find(|names| names.contains(&last)).map(|names| (parent, *names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_what_the_producers_take_them_for() {
        for (module, expected) in [
            ("model.embed_tokens", Some(Kept::Embedding)),
            ("transformer.wte", Some(Kept::Embedding)),
            ("token_embd", Some(Kept::Embedding)),
            ("shared", Some(Kept::Embedding)),
            ("model.shared", Some(Kept::Embedding)),
            ("model.layers.0.mlp.shared.up_proj", None),
            ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", Some(Kept::Embedding)),
            ("encoder.layers.0.attn.rel_pos_emb", Some(Kept::Embedding)),
            ("transformer.w", Some(Kept::Embedding)),
            ("lm_head", Some(Kept::Head)),
            ("language_model.lm_head", Some(Kept::Head)),
            ("lm_head.dense", Some(Kept::Head)),
            ("output", Some(Kept::Head)),
            ("blk.0.attn_output", None),
            ("encoder.layer.0.attention.output", None),
            ("model.layers.0.mlp.gate", Some(Kept::Router)),
            ("model.layers.0.block_sparse_moe.gate", Some(Kept::Router)),
            ("model.layers.0.mlp.shared_expert_gate", Some(Kept::Router)),
            ("model.layers.0.feed_forward.router", Some(Kept::Router)),
            ("model.layers.0.mlp.gate.wg", Some(Kept::Router)),
            ("model.layers.0.moe.gate.proj", Some(Kept::Router)),
            ("model.layers.0.mlp.router.classifier", Some(Kept::Router)),
            ("model.layers.0.router.norm", Some(Kept::Norm)),
            ("blk.0.ffn_gate_inp_shexp", Some(Kept::Router)),
            ("blk.0.ffn_gate", None),
            ("model.layers.0.mlp.gate_proj", None),
            ("model.layers.0.mlp.experts.3.w2", None),
            ("model.layers.0.self_attn.o_proj", None),
            ("model.layers.0.linear_attn.in_proj_a", Some(Kept::HeadGate)),
            ("model.layers.0.linear_attn.in_proj_qkv", None),
            ("model.layers.0.linear_attn.conv1d", Some(Kept::Convolution)),
            ("model.layers.0.input_layernorm", Some(Kept::Norm)),
            ("model.visual.blocks.0.mlp.gate_proj", Some(Kept::Modality)),
            ("vision_tower.layers.0.self_attn.q_proj", Some(Kept::Modality)),
            ("multi_modal_projector.linear_1", Some(Kept::Modality)),
            ("mtp.layers.0.mlp.gate_proj", Some(Kept::Prediction)),
        ] {
            assert_eq!(kept(module), expected, "{module}");
        }
    }

    #[test]
    fn only_weights_of_linear_layers_are() {
        let of = |name, shape: &[usize]| linear_weight(name, Dtype::Bf16, shape);
        assert_eq!(of("a.q_proj.weight", &[4, 16]), Some("a.q_proj"));
        assert_eq!(of("w", &[4, 16]), Some("w"));
        assert_eq!(of("lm_head.weight", &[4, 16]), Some("lm_head"));
        for (name, shape) in [
            ("a.q_proj.weight", &[16][..]),
            ("a.experts.gate_up_proj", &[4, 16]),
            ("model.embed_tokens.weight", &[4, 16]),
            ("a.conv1d.weight", &[4, 1, 4]),
            ("final_logits_bias", &[1, 16]),
        ] {
            assert_eq!(of(name, shape), None, "{name}");
        }
        assert_eq!(linear_weight("a.q_proj.weight", Dtype::U8, &[4, 16]), None);
    }

    #[test]
    fn what_engines_fuse_is_found_below_one_module() {
        let of = |module| fused(module).map(|(parent, names)| (parent, names.len()));
        assert_eq!(of("model.layers.0.self_attn.k_proj"), Some(("model.layers.0.self_attn", 3)));
        assert_eq!(of("m.experts.7.w3"), Some(("m.experts.7", 2)));
        assert_eq!(of("m.self_attn.kv_a_proj_with_mqa"), Some(("m.self_attn", 2)));
        assert_eq!(of("gate_proj"), Some(("", 2)));
        assert_eq!(of("m.self_attn.o_proj"), None);
    }
}
