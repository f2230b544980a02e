#![doc = include_str!("../README.md")]
//!
//! # How it works, in the order of processing
//! `decode` turns the syntax tree of `dualgemm-ptx` into a [`program::Kernel`]; `machine` runs grids, clusters,
//! CTAs and warps; `exec` executes one operation, with the values computed by the pure functions of
//! [`semantics`]; `memory` holds the state spaces; `check` the bookkeeping of races and unwritten memory.
//!
//! # What is assumed
//! - **Order.** Lanes that execute an instruction together are ordered with what they executed together before,
//!   as if `__syncwarp` stood between: hardware does so, old programs rely on it; for strict checks lanes are threads
//!   like others (`check::lanes`). Everything else is ordered only by
//!   barriers, mbarriers, fences with atomics, and the end of asynchronous operations. A race is a pair of
//!   accesses that these do not order, found whatever the interleaving was. Writes of one value to one place by
//!   threads of a cluster are none: compilers make them, and chips give that value.
//! - **Asynchronous operations** complete at a later point drawn from the seed, never at issue. `wgmma` is one
//!   operation of the four warps of a warpgroup, which have all issued it before it starts. Those of a warpgroup,
//!   and tensor-core operations of a CTA, complete in order; everything else in any order.
//! - **Proxies.** A generic write that the async proxy reads or overwrites needs a `fence.proxy.async` between
//!   them, on either side of the synchronization. `cp.async` (not bulk) goes through the generic proxy.
//! - **Divergence.** Lanes that part meet again at the immediate post-dominator; the wait there is given up when
//!   nothing else can go on, so lanes may wait for each other in loops.
//! - **Clusters on several threads** give results that depend on the seed only: accesses whose order can be
//!   noticed are carried out in turns.
//! - **`tcgen05`** between threads is ordered by a release and an acquire, as other accesses are; `tcgen05.fence` is
//!   demanded after relaxed waits and for what is not complete. [`Checks::strict`] demands `tcgen05.wait::ld`.
//! - **Tensor cores** compute as `semantics::dot` says; approximate functions within PTX's stated error.
//! - Launches run one after the other; races are looked for as if those with the programmatic attribute overlapped with the
//!   launches before, up to `griddepcontrol.wait`. Every CTA is launched, so `clusterlaunchcontrol.try_cancel` always answers
//!   "not cancelled".
//! - System scope is GPU scope: there is one device.

mod check;
mod config;
mod decode;
mod error;
mod exec;
mod gpu;
mod machine;
mod memory;
mod names;
mod program;
mod progress;
pub mod report;
mod semantics;
mod tensor_map;
mod trap;

pub use config::{Checks, Config};
pub use error::Error;
pub use gpu::{Gpu, Outcome, explore};
pub use program::Kernel;
pub use progress::Progress;
pub use report::Card;
pub use trap::{Check, Trap};

/// Where `tcgen05` keeps the elements of its operands in tensor memory.
pub mod tcgen05 {
    pub use crate::semantics::tcgen05::{Cell, DataPath, scale};
}
