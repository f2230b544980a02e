//! Which part of a model an MLP belongs to, told by its name. A configuration speaks for the language model alone: for
//! parts that are not known to be in it, nothing is assumed.

use crate::module::{ROUTED, SHARED};

/// Parts of names before the number of a layer, of language models of transformers, vLLM, SGLang, mlx-lm and llama.cpp,
/// and of wrappers around them.
#[rustfmt::skip]
const TRUNK: &[&str] = &[
    "_orig_mod", "backbone", "backbone_model", "base_model", "blk", "block", "blocks", "decoder",
    "decoder_layer", "decoder_layers", "gpt_neox", "h", "H_module", "L_module", "language_backbone",
    "language_model", "layer", "layers", "llama_model", "llm", "llm_model", "lm", "midlayer", "model",
    "module", "text_decoder", "text_model", "thinker", "transformer", "transformer_blocks",
    "transformer_layers",
];
/// Parts that predict further tokens, with layers of their own.
const MTP: &[&str] = &["mtp", "mtp_block", "mtp_layers", "nextn"];
/// Parts of names that have no number of a layer, beside those of experts.
const MLP: &[&str] = &["feed_forward", "ffn", "mixer", "mlp"];

/// Whose an MLP is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner<'n> {
    /// The language model's own layers.
    Trunk,
    /// Layers of the language model that predict further tokens.
    Mtp,
    /// This part of the name is not known.
    Unknown(&'n str),
}

/// The owner of an MLP, by the name that its modules have in common.
pub(crate) fn owner(path: &str) -> Owner<'_> {
    let parts = || path.split('.').filter(|part| !part.is_empty());
    let layer = parts().position(|part| part.parse::<usize>().is_ok());
    let of_mlp = |part: &str| {
        MLP.contains(&part) || ROUTED.contains(&part) || SHARED.iter().any(|shared| part.starts_with(shared))
    };
    let known = |at: usize, part: &str| match layer {
        // Code names the modules inside a layer as it likes.
        Some(layer) if at >= layer => !["vis", "audio"].iter().any(|tower| part.starts_with(tower)),
        Some(_) => TRUNK.contains(&part),
        None => TRUNK.contains(&part) || of_mlp(part),
    };
    let unknown = parts().enumerate().find(|&(at, part)| !MTP.contains(&part) && !known(at, part));
    match unknown {
        Some((_, part)) => Owner::Unknown(part),
        None if parts().any(|part| MTP.contains(&part)) => Owner::Mtp,
        None => Owner::Trunk,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_language_models_are_told_from_others() {
        for path in [
            "",
            "mlp",
            "experts",
            "midlayer.mlp",
            "blk.5",
            "layers.7.feed_forward",
            "model.layers.3.mlp.experts",
            "model.language_model.layers.3.mlp",
            "language_model.model.layers.3.feed_forward.shared_expert",
            "thinker.model.layers.0.mlp",
            "base_model.model.model.layers.0.mlp",
            "transformer.h.0.mlp",
            "transformer.blocks.0.ffn.experts.mlp",
            "transformer.decoder_layer.0.moe",
            "backbone.layers.1.mixer.experts",
            "model.H_module.layers.0.mlp",
            "model.layers.0.mlp_moe_gen",
            "model.layers.0.mlps.1",
        ] {
            assert_eq!(owner(path), Owner::Trunk, "{path}");
        }
        for path in
            ["mtp.0.ffn.experts", "mtp.layers.0.mlp", "model.mtp.layers.0.mlp", "model.mtp_layers.0.mlp"]
        {
            assert_eq!(owner(path), Owner::Mtp, "{path}");
        }
        for (path, part) in [
            ("v.blk.0", "v"),
            ("talker.model.layers.0.mlp", "talker"),
            ("code2wav.pre_transformer.layers.0.mlp", "code2wav"),
            ("vision_model.encoder.layers.0.mlp", "vision_model"),
            ("model.visual.blocks.0.mlp", "visual"),
            ("model.vit.layers.0.mlp", "vit"),
            ("image_model.layers.0.mlp", "image_model"),
            ("img_encoder.layers.0.mlp", "img_encoder"),
            ("siglip.layers.0.mlp", "siglip"),
            ("model.sam_model.layers.0.mlp", "sam_model"),
            ("speech_tower.layers.0.mlp", "speech_tower"),
            ("sound_tower.layers.0.mlp", "sound_tower"),
            ("mm_projector.0", "mm_projector"),
            ("multi_modal_projector.layers.0.mlp", "multi_modal_projector"),
            ("embed_vision.mlp", "embed_vision"),
            ("encoder.layers.0.mlp", "encoder"),
            ("model.encoder.layers.0.mlp", "encoder"),
            ("depth_decoder.model.layers.0.mlp", "depth_decoder"),
            ("action_expert.layers.0.mlp", "action_expert"),
            ("pixtral.layers.0.feed_forward", "pixtral"),
            ("model.layers.0.mlp.vision_mlp", "vision_mlp"),
        ] {
            assert_eq!(owner(path), Owner::Unknown(part), "{path}");
        }
    }
}
