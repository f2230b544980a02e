//! The dual GEMM problem as values: `C = act(A · B1ᵀ, A · B2ᵀ)`.
//!
//! In reading order:
//!
//! | module | what |
//! |---|---|
//! | [`mod@reference`] | the operation in f64, the definition everything is tested against |
//! | [`operands`] | [`AOperand`], [`GateUp`], [`Linear`], [`Weight`], [`OutputMut`]: the tensors of one call |
//! | [`epilogue`] | [`Expr`], [`Activation`], [`Epilogue`]: what happens between accumulator and store |
//! | [`desc`] | [`DualGemmDesc`]: shapes and formats, known before any tensor is |
//! | [`mlp`] | [`MlpDesc`], [`GatedMlp`], [`Routing`]: the whole MLP and mixtures, with their references |
//! | [`bound`] | [`Bounded`]: how far from it a right result may be |
//! | [`compare`] | [`Comparison`]: how far a result is from the reference |

pub mod bound;
pub mod compare;
pub mod desc;
pub mod epilogue;
pub mod error;
pub mod mlp;
pub mod operands;
pub mod reference;

pub use bound::Bounded;
pub use compare::{Comparer, Comparison};
pub use desc::{AFormat, DualGemmDesc, Operation, OutFormat, OutScale, QuantizeA};
pub use epilogue::{Activation, Epilogue, Expr, Node, Op, Program, Slot};
pub use error::Error;
pub use mlp::{GatedMlp, MlpDesc, RouterWeights, Routing, mixture_reference, mlp_reference, stored};
pub use operands::{AOperand, GateUp, Linear, OutputMut, Weight, WeightRef};
pub use reference::{bounded_reference, reference, reference_of};
