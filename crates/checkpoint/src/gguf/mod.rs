//! GGUF files, versions 2 and 3: metadata, tensor infos, data; reader and writer.
//!
//! ```text
//! "GGUF" │ u32 version │ u64 tensors │ u64 metadata entries
//! │ metadata: string key, u32 type, value …
//! │ infos: string name, u32 dims, u64 dim… (innermost first), u32 type, u64 offset …
//! │ padding to `general.alignment` (32) │ tensor data, each padded to the alignment
//! ```
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>

pub(crate) mod mxfp4;
mod read;
pub(crate) mod split;
mod value;
#[cfg(feature = "write")]
mod write;

pub use read::Gguf;
pub use value::GgufValue;
#[cfg(feature = "write")]
pub use write::write_to;

pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
pub(crate) const DEFAULT_ALIGNMENT: usize = 32;
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";
