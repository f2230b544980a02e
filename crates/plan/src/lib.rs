//! How a dual GEMM runs on a GPU.
//!
//! ```text
//! DualGemmDesc ─► GpuPlan (strategy, kernel) ─► Prepared (kernels loaded, memory taken) ─► run(DeviceCall, DeviceWeights)
//!                    ▲ choices: shipped table, tuner's file, cost model
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`plan`] | [`GpuPlan`]: what is chosen, and why |
//! | [`strategy`](mod@strategy) | the ways to put the operation together, as a list |
//! | [`weights`], [`experts`], [`form`], [`call`], [`operands`] | operands in device memory |
//! | [`mixture`] | what stands around the products of a mixture of experts |
//! | [`gpu`] | a GPU with its loaded kernels; memory that frees itself |
//! | [`choices`], [`tune`] | what was measured fastest, and measuring it |
//! | [`blackwell`] | what the fused sm_100 kernel should take, an estimate |
//! | [`measure`] | the stopwatch for cards, and their limits |
//!
//! Where a function does not say when it fails: if memory does not fit, or, of what reads, if an earlier launch failed.
//!
//! Everything but graphs, second streams, NVIDIA's library and the stopwatch runs on the simulator as it does on a card.

pub mod blackwell;
pub mod call;
pub mod choices;
pub mod error;
pub mod experts;
pub mod form;
pub mod gpu;
mod launches;
pub mod measure;
pub mod mixture;
mod model;
pub mod operands;
pub mod plan;
mod prologue;
pub mod strategy;
pub mod tune;
mod upload;
pub mod weights;

pub use call::{DeviceA, DeviceC, DeviceCall, GroupedCall};
pub use error::Error;
pub use experts::DeviceExperts;
pub use form::WeightForm;
pub use gpu::{Buffer, Gpu};
pub use operands::Operands;
pub use plan::{ChosenBy, GpuOptions, GpuPlan};
pub use strategy::{Launches, Prepared, Rounding, STRATEGIES, Strategy, strategy};
pub use weights::{DeviceGateUp, DeviceWeights};
