//! What llama.cpp has to know of a model beside its tensors, from `config.json`.

use std::f64::consts::PI;
use std::path::Path;

use dualgemm_gemm::Activation;
use serde_json::Value;

use crate::gguf::GgufValue;
use crate::model_config::model_field;
use crate::{Error, JsonFile, MlpKind, Stated};

#[derive(Debug)]
pub(super) struct Hparams {
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) vocabulary: usize,
    /// Whether the output head is the embedding.
    pub(super) tied: bool,
    /// What frequencies are divided by, where the model scales them one by one.
    pub(super) rope_factors: Option<Vec<f32>>,
    entries: Vec<(&'static str, GgufValue)>,
}

struct Reader<'c> {
    config: &'c Value,
    path: &'c Path,
}

impl<'c> Reader<'c> {
    fn fault(&self, key: &str, found: Option<&Value>, valid: &str) -> Error {
        Error::Config {
            file: self.path.into(),
            key: format!("`{key}` of the model's configuration"),
            found: found.map_or_else(|| "missing".into(), Value::to_string),
            valid: valid.into(),
        }
    }

    fn field(&self, key: &str) -> Option<&'c Value> {
        model_field(self.config, key)
    }

    fn count(&self, key: &str) -> Result<usize, Error> {
        let found = self.field(key);
        let count = found.and_then(Value::as_u64).filter(|&n| n > 0 && n <= u64::from(u32::MAX));
        count.map(|n| n as usize).ok_or_else(|| self.fault(key, found, "a positive number for GGUF"))
    }

    fn count_or(&self, key: &str, otherwise: usize) -> Result<usize, Error> {
        if self.field(key).is_none() { Ok(otherwise) } else { self.count(key) }
    }
}

fn float(value: Option<&Value>) -> Option<f64> {
    value.and_then(Value::as_f64).filter(|x| x.is_finite() && *x > 0.0)
}

fn u32_of(n: usize) -> GgufValue {
    GgufValue::U32(n as u32)
}

impl Hparams {
    /// Reads a configuration; `path` is where the model comes from. Fails if a number is missing, or the model does
    /// what llama.cpp does not.
    pub(super) fn of(config: &Value, path: &Path) -> Result<Self, Error> {
        let read = Reader { config, path };
        let json = JsonFile { path: path.into(), value: config.clone() };
        let stated = Stated::of_config(&json, 0, MlpKind::Dense)?;
        if stated.activation != Activation::Silu {
            let found = Value::from(stated.activation.to_string());
            return Err(read.fault(
                "hidden_act",
                Some(&found),
                "silu, which llama.cpp computes for this family",
            ));
        }
        let (hidden, heads) = (read.count("hidden_size")?, read.count("num_attention_heads")?);
        let head_dim = read.count_or("head_dim", hidden / heads)?;
        let kv_heads = read.count_or("num_key_value_heads", heads)?;
        let eps = read.field("rms_norm_eps");
        let eps = float(eps).ok_or_else(|| read.fault("rms_norm_eps", eps, "a positive number for GGUF"))?;
        let rope = read.field("rope_parameters").or_else(|| read.field("rope_scaling"));
        let theta = rope.and_then(|r| r.get("rope_theta")).or_else(|| read.field("rope_theta"));
        let theta = match theta {
            None => 10_000.0,
            found => float(found).ok_or_else(|| read.fault("rope_theta", found, "a positive number"))?,
        };
        let mut this = Self {
            layers: read.count("num_hidden_layers")?,
            heads,
            kv_heads,
            vocabulary: read.count("vocab_size")?,
            tied: read.field("tie_word_embeddings").is_some_and(|tied| tied == true),
            rope_factors: None,
            entries: Vec::new(),
        };
        this.entries = vec![
            ("block_count", u32_of(this.layers)),
            ("context_length", u32_of(context(&read)?)),
            ("embedding_length", u32_of(hidden)),
            ("feed_forward_length", u32_of(read.count("intermediate_size")?)),
            ("attention.head_count", u32_of(heads)),
            ("attention.head_count_kv", u32_of(kv_heads)),
            ("attention.key_length", u32_of(head_dim)),
            ("attention.value_length", u32_of(head_dim)),
            ("attention.layer_norm_rms_epsilon", GgufValue::F32(eps as f32)),
            ("rope.dimension_count", u32_of(head_dim)),
            ("rope.freq_base", GgufValue::F32(theta as f32)),
            ("vocab_size", u32_of(this.vocabulary)),
        ];
        let partial =
            rope.and_then(|r| r.get("partial_rotary_factor")).or(read.field("partial_rotary_factor"));
        if partial.is_some_and(|p| p.as_f64() != Some(1.0)) {
            return Err(read.fault("partial_rotary_factor", partial, "1 for GGUF"));
        }
        if let Some(rope) = rope {
            this.scale_rope(&read, rope, theta, head_dim)?;
        }
        Ok(this)
    }

    /// How frequencies are scaled beyond the length that the model was trained on.
    fn scale_rope(
        &mut self,
        read: &Reader<'_>,
        rope: &Value,
        theta: f64,
        head_dim: usize,
    ) -> Result<(), Error> {
        let number = |key: &str| {
            let found = rope.get(key);
            float(found)
                .ok_or_else(|| read.fault(&format!("rope_parameters.{key}"), found, "a positive number"))
        };
        let kind = rope.get("rope_type").or_else(|| rope.get("type"));
        match kind.and_then(Value::as_str) {
            None | Some("default") => {}
            Some(name @ ("linear" | "yarn")) => {
                self.entries.push(("rope.scaling.type", GgufValue::String(name.into())));
                self.entries.push(("rope.scaling.factor", GgufValue::F32(number("factor")? as f32)));
                if name == "yarn" {
                    let odd = ["attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"];
                    let is_odd = |key: &&&str| rope.get(**key).is_some_and(|v| !v.is_null());
                    // llama.cpp rounds the ends of the ramp, as transformers does unless told not to.
                    let exact = rope.get("truncate").is_some_and(|v| v == false).then_some(&"truncate");
                    if let Some(key) = odd.iter().find(is_odd).or(exact) {
                        return Err(read.fault(
                            &format!("rope_parameters.{key}"),
                            rope.get(*key),
                            "left out: only YaRN's own numbers are written",
                        ));
                    }
                    let length = number("original_max_position_embeddings")? as usize;
                    self.entries.push(("rope.scaling.original_context_length", u32_of(length)));
                }
            }
            Some("llama3") => {
                let (factor, old) = (number("factor")?, number("original_max_position_embeddings")?);
                let (low, high) = (number("low_freq_factor")?, number("high_freq_factor")?);
                let factor_of = |pair: usize| {
                    let wave = 2.0 * PI * theta.powf(2.0 * pair as f64 / head_dim as f64);
                    let smooth = ((old / wave - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
                };
                self.rope_factors = Some((0..head_dim / 2).map(factor_of).collect());
            }
            Some(_) => {
                return Err(read.fault(
                    "rope_parameters.rope_type",
                    kind,
                    "default, linear, yarn or llama3 for GGUF",
                ));
            }
        }
        Ok(())
    }

    /// Entries of the metadata of an architecture.
    pub(super) fn metadata(&self, architecture: &str) -> impl Iterator<Item = (String, GgufValue)> {
        self.entries.iter().map(move |(key, value)| (format!("{architecture}.{key}"), value.clone()))
    }
}

/// Up to which length llama.cpp computes the model: it has no sliding windows in these families, which make no difference
/// up to their own length.
fn context(read: &Reader<'_>) -> Result<usize, Error> {
    let length = read.count("max_position_embeddings")?;
    let used = read.field("use_sliding_window").is_none_or(|used| used == true);
    Ok(if used { length.min(read.count_or("sliding_window", length)?) } else { length })
}
