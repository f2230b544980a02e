//! safetensors files: the header reader, which assumes an adversary, and the writer.
//!
//! ```text
//! 8 bytes: n, little-endian │ n bytes: JSON header │ tensor data
//! ```
//!
//! The header maps names to `{dtype, shape, data_offsets: [begin, end]}`, offsets counted from the start of the
//! data, and `__metadata__` to a map of strings. Every byte of data belongs to exactly one tensor.
//!
//! Format: <https://github.com/huggingface/safetensors#format>

mod read;
#[cfg(feature = "write")]
mod write;

pub use read::Header;
#[cfg(feature = "write")]
pub use write::{serialize, write_to};
