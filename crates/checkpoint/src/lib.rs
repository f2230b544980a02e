//! Checkpoints of quantized models: safetensors and GGUF files, producer conventions, validation, writing.
