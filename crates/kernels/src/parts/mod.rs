//! Pieces that kernels of every architecture are made of.

pub mod epilogue;
pub mod format;
pub mod groups;
pub(crate) mod nvfp4;
pub mod operand;
pub(crate) mod ring;
pub mod rows;
pub(crate) mod staged;
pub(crate) mod tiles;
pub(crate) mod tma_tiles;
pub mod variant;
