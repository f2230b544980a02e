//! What a configuration says of the KV cache. Its scales are tensors like others, whose names vLLM knows in every convention.

use serde_json::{Value, json};

use crate::TensorFiles;
use crate::files::JsonFile;

/// The number format of the KV cache, as two files declare it; null where none does.
#[derive(Debug, Clone, Default)]
pub struct KvCache {
    /// `kv_cache_scheme` of `quantization_config`, in compressed-tensors and in ModelOpt.
    pub scheme: Value,
    /// `kv_cache_quant_algo` of ModelOpt's `hf_quant_config.json`.
    pub algo: Value,
}

impl KvCache {
    /// What a checkpoint declares. FP8 with scales in the file is known in both ways, so that either says the other.
    pub(super) fn of(files: &TensorFiles) -> Self {
        let at = |file: Option<&JsonFile>, pointer| {
            file.and_then(|file| file.value.pointer(pointer)).cloned().unwrap_or_default()
        };
        let mut scheme = at(files.config(), "/quantization_config/kv_cache_scheme");
        let mut algo = at(files.hf_quant_config(), "/quantization/kv_cache_quant_algo");
        let fp8 = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
        let is_fp8 =
            scheme["dynamic"] != true && ["num_bits", "type"].iter().all(|&key| scheme[key] == fp8[key]);
        if scheme.is_null() && algo == "FP8" {
            scheme = fp8;
        } else if algo.is_null() && is_fp8 {
            algo = "FP8".into();
        }
        Self { scheme, algo }
    }
}
