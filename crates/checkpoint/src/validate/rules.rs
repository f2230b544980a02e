//! Every rule a checkpoint is checked against, as a list.

/// How bad a broken rule is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Results are as computed, but something may not be as meant.
    Warning,
    /// The tensor cannot be used, or gives wrong results.
    Error,
}

/// One rule.
#[derive(Debug, PartialEq, Eq, serde::Serialize)]
pub struct Rule {
    /// Name.
    pub id: &'static str,
    /// What must hold.
    pub doc: &'static str,
    /// What breaking it means.
    pub severity: Severity,
}

const fn error(id: &'static str, doc: &'static str) -> Rule {
    Rule { id, doc, severity: Severity::Error }
}

const fn warning(id: &'static str, doc: &'static str) -> Rule {
    Rule { id, doc, severity: Severity::Warning }
}

/// Every rule, in the order in which a file meets them.
pub const RULES: &[Rule] = &[
    error("readable", "the path is a checkpoint and its files can be read"),
    error("header", "headers and shard indices are whole and tell the truth about the file"),
    error(
        "config",
        "config.json, hf_quant_config.json and file metadata hold known values; bits, type and group_size fit the format",
    ),
    error(
        "activation",
        "the activation of every gated MLP is stated, by the configuration or the model's family, and is implemented",
    ),
    error("convention", "exactly one known convention is declared or named"),
    warning(
        "config-agrees",
        "config.json, its text_config and hf_quant_config.json say the same; where the two files mean different formats, that is \
         an error",
    ),
    error(
        "layers",
        "gate, up and down of an MLP belong together and can be found, no expert of a layer is missing, and all are of one shape and format",
    ),
    warning("one-mlp", "a layer has one 4-bit MLP of a kind; otherwise `within` must say which one is meant"),
    error("hidden-size", "K of gate and up is the hidden_size of config.json, the embedding_length of GGUF"),
    warning(
        "intermediate-size",
        "N of gate and up is a number that config.json has between up and down, unless the family computes it from others",
    ),
    warning(
        "layer-count",
        "the files have as many layers as num_hidden_layers of config.json, block_count of GGUF, says",
    ),
    error(
        "expert-count",
        "layers have as many experts as num_experts of config.json, expert_count of GGUF, says",
    ),
    warning(
        "attention-size",
        "keys, values and the output of attention have the heads and lengths that the metadata of GGUF says",
    ),
    error(
        "missing-tensor",
        "every quantized weight has its block scales, tensor scale and declared activation scale",
    ),
    error(
        "unknown-tensor",
        "every tensor under the name of a 4-bit weight is one that its convention has, once, or one known to change nothing",
    ),
    error("storage-type", "codes are U8, I8, U32 or F4, scales F8_E4M3, F8_E8M0, U8 or F32"),
    error(
        "shape",
        "scales fit their codes: K / 16 (nvfp4) or K / 32 (mxfp4) columns, or the padded size of their layout",
    ),
    error("fused-order", "a fused gate/up tensor comes with an order that its rows fit"),
    error("unsupported", "a module declared as 4-bit blocks is one, and nothing else changes its meaning"),
    error("scale-byte", "no block scale is NaN or negative"),
    warning("scale-padding", "padding of 128x4 and 8x4 scales is zero"),
    warning(
        "scale-order",
        "block scales vary from row to row, as weights do; if they do so more in another order, the layout is wrong",
    ),
    error("tensor-scale", "tensor scales and activation scales are positive and finite"),
    warning(
        "tensor-scale-sense",
        "multipliers are below 1 and divisors above 1; otherwise the convention may be the wrong way round",
    ),
    error("bias", "every element of a bias is finite"),
    error("uncalibrated", "every expert's activation scale was calibrated: present, positive and finite"),
    error(
        "declared",
        "weights are in 4 bits where the configuration says so, embeddings are floats, as loaders expect, and 8-bit weights are declared",
    ),
    warning(
        "halves-tensor-scale",
        "layers that engines read as one (gate and up; q, k and v) share a tensor scale, as engines assume",
    ),
    warning("halves-input-scale", "gate and up share an activation scale: their input is the same"),
    error("activations", "an activation file holds one float tensor or one nvfp4 triple"),
];

impl Rule {
    /// The rule of that name. Rules are named in this crate only, and a test walks all names.
    pub(crate) fn named(id: &str) -> &'static Self {
        RULES.iter().find(|r| r.id == id).unwrap_or(&RULES[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct() {
        for (i, rule) in RULES.iter().enumerate() {
            assert!(RULES[..i].iter().all(|r| r.id != rule.id), "{}", rule.id);
            assert_eq!(Rule::named(rule.id), rule);
        }
    }
}
