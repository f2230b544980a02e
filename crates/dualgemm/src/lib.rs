#![doc = include_str!("../README.md")]
//!
//! # In the order of the data
//!
//! [`checkpoint`] reads weights and activations, [`gemm`] describes the problem, [`DualGemm::plan`] chooses how to compute it,
//! [`Plan::prepack`] brings the weights into kernel order once, [`Plan::run`] multiplies. [`check`] compares a result with the
//! f64 reference.

#[cfg(feature = "candle")]
pub mod candle;
pub mod check;
pub mod error;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod layer;
pub mod mixture;
pub mod mlp;
#[cfg(feature = "cuda")]
pub mod on_device;
pub mod operation;
pub mod owned;
pub mod packed;
pub mod plan;
pub mod runner;

pub use dualgemm_checkpoint as checkpoint;
pub use dualgemm_cpu as cpu;
#[cfg(feature = "cuda")]
pub use dualgemm_device as device;
pub use dualgemm_formats as formats;
pub use dualgemm_gemm as gemm;
#[cfg(feature = "cuda")]
pub use dualgemm_plan as strategies;
#[cfg(feature = "cuda")]
pub use dualgemm_plan::{DeviceA, DeviceC, DeviceCall, DeviceGateUp, GpuOptions, GroupedCall};

#[cfg(feature = "cuda")]
pub use dualgemm_plan::mixture::MixtureCall;
pub use error::Error;
#[cfg(feature = "cuda")]
pub use gpu::GpuId;
#[cfg(feature = "sim")]
pub use gpu::SimArch;
pub use layer::{LayerCall, LayerShape, PackedLayer};
pub use mixture::{MixtureDesc, MixturePlan, MixtureRunner, PackedMixture};
pub use mlp::{MlpPlan, MlpRunner, PackedMlp};
pub use operation::{AnyDesc, AnyPlan, AnyRunner, AnyWeights};
#[cfg(feature = "cuda")]
pub use operation::{DeviceRouting, Launchers};
pub use owned::OwnedMatrix;
pub use packed::{PackedExperts, PackedWeights};
pub use plan::{DualGemm, Plan, Target};
pub use runner::{Rows, Runner};

use dualgemm_formats::quantize::quantize_with;
use dualgemm_formats::{GlobalScale, Producer, Search};
use dualgemm_gemm::{AOperand, QuantizeA};

/// A as the product sees it: quantized, where it is quantized on the way in, by the rule that kernels follow (that
/// of Transformer Engine).
///
/// # Errors
/// If K is not a multiple of 16, or A is quantized already.
pub fn quantize_a<'a>(a: &AOperand<'a>, how: QuantizeA) -> Result<AOperand<'a>, Error> {
    let float = match (a, how) {
        (_, QuantizeA::No) => return Ok(a.clone()),
        (AOperand::Float(float), _) => float,
        (AOperand::Quantized(_), _) => {
            return Err(gemm::Error::AlreadyQuantized { a: gemm::AFormat::of(a) }.into());
        }
    };
    let quantized = match how {
        QuantizeA::Static(scale) => {
            quantize_with("A", float, Producer::Te, Search::Plain, GlobalScale::multiplier(scale))?
        }
        QuantizeA::Dynamic | QuantizeA::No => formats::quantize("A", float, Producer::Te, Search::Plain)?,
    };
    Ok(AOperand::Quantized(quantized))
}
