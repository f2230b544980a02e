//! Hopper (sm_90a): no FP4 units, so weights are widened exactly to 16-bit floats in registers and multiplied by
//! `wgmma`.
//!
//! In reading order: [`pack`] and [`decode`] (what the kernel reads), [`config`] (with which tile), [`fused`] (the kernel: its parts, in files of their own, are the schedule, the producers, the consumers
//! and the stores), `host` (launching it).

mod apart;
pub mod config;
pub(crate) mod consumers;
pub mod decode;
mod exchange;
pub mod fused;
mod host;
pub mod pack;
mod producers;
mod schedule;
mod store;
