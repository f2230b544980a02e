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
//! | [`Family`] | families of models: which activation each has, and what says so |
//! | [`Checkpoint`] | layers, experts, fused and separate gate/up, as matrices that borrow the files |
//! | [`validate`](mod@validate) | every rule, every finding |
//! | [`linear`] | what producers quantize and engines fuse, by name |
//! | [`FusedExperts`] | experts in two float tensors, taken apart as producers do |
//! | [`activations`] | operands and results of the product |
//! | [`write`](mod@write) | ModelOpt, compressed-tensors and GGUF, whole or not at all |
//!
//! ```
//! use dualgemm_checkpoint::{Checkpoint, Error, OpenOptions, Which};
//!
//! # fn main() -> Result<(), Error> {
//! # let path = std::path::Path::new("../../testdata/smollm2-135m-layer14/modelopt-nvfp4");
//! let checkpoint = Checkpoint::open(path, &OpenOptions::default())?;
//! let mlp = checkpoint.gate_up(0)?;
//! assert_eq!((mlp.gate.rows(), mlp.gate.k()), (1536, 576));
//! assert!(checkpoint.gate_up_source(0, Which::Dense)?.input_scales()?.is_some());
//! # Ok(())
//! # }
//! ```

#![cfg_attr(
    not(feature = "write"),
    expect(dead_code, reason = "what only writing uses is small; the feature spares its dependencies")
)]

pub mod activations;
pub mod convention;
pub mod gguf;
pub mod linear;
pub mod safetensors;
pub mod validate;
#[cfg(feature = "write")]
pub mod write;

mod checkpoint;
mod dtype;
mod error;
mod families;
mod files;
mod fused_experts;
mod gate_up;
mod json;
mod mapped;
mod model_config;
mod module;
mod packed;
mod scheme;
mod source;
mod tensor;

pub use checkpoint::{BadInputScale, Checkpoint, MlpInfo, ModuleInfo, NibbleOrder, OpenOptions};
pub use dtype::{Dtype, GGML_TYPES, GgmlType};
pub use error::Error;
pub use families::{Family, Origin, Stated};
pub use files::{JsonFile, TensorFiles};
pub use fused_experts::{FloatWeight, FusedExperts};
pub use gate_up::{GateUpOrder, Half};
pub use model_config::{EXPERTS_PER_TOKEN, model_field};
pub use module::{MlpKind, Which};
pub use source::{GateUpSource, LinearSource, ScaleOrigin};
pub use tensor::{TensorInfo, TensorView};
pub use validate::validate;
#[cfg(feature = "write")]
pub use write::{TensorData, TensorOut};
