//! Checkpoints of quantized models: safetensors and GGUF files, producer conventions, validation, writing.
//!
//! Bytes ↔ named tensors ↔ [`QuantizedMatrix`](dualgemm_formats::QuantizedMatrix). Knows files and names, not
//! arithmetic. In the order of the data flow:
//!
//! | module | what |
//! |---|---|
//! | [`safetensors`], [`gguf`] | headers, checked against an adversary; writers |
//! | [`TensorFiles`] | the files of a checkpoint, mapped, as one set of [`TensorView`]s |
//! | [`convention`] | names, reciprocals and configurations of each producer |
//! | [`Checkpoint`] | layers, experts, fused and separate gate/up, as matrices that borrow the files |
//! | [`validate`](mod@validate) | every rule, every finding |
//! | [`Activations`] | operands and results of the product |
//! | [`write`](mod@write) | ModelOpt, compressed-tensors and GGUF, whole or not at all |

pub mod activations;
pub mod convention;
pub mod gguf;
pub mod safetensors;
pub mod validate;
pub mod write;

mod checkpoint;
mod dtype;
mod error;
mod files;
mod gate_up;
mod mapped;
mod module;
mod packed;
mod scheme;
mod tensor;

pub use activations::Activations;
pub use checkpoint::{BadInputScale, Checkpoint, Experts, GateUp, Linear, MlpInfo, NibbleOrder, OpenOptions};
pub use dtype::{Dtype, GGML_TYPES, GgmlType};
pub use error::Error;
pub use files::{JsonFile, TensorFiles};
pub use gate_up::{GateUpOrder, Half};
pub use module::MlpKind;
pub use tensor::{TensorOut, TensorView};
pub use validate::validate;
