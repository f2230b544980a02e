//! Kernels without instructions of one architecture: they run on every GPU from sm_80 on.
//!
//! Most of them are one shape ([`rowwise`]): a thread takes eight neighbouring elements of a row from a source, and
//! gives them to a sink. [`expand`], [`quantize`] and [`silu_mul`] are pairs of both; [`pack`] writes
//! the weight pack of [`sm90a`](crate::sm90a) on the GPU, [`atoms`] the scales of Blackwell's kernels, whose codes [`copy`] brings along.
//! [`mixture`] sorts rows by expert and sums what comes out.
//!
//! All are safe to record into a graph: no allocation, no host synchronization, pointers from the caller. From sm_90 on
//! they take part in programmatic dependent launch: the next kernel may start at once
//! (`griddepcontrol.launch_dependents` comes first), and nothing is read or written before the kernel before has ended,
//! though codes may be brought into L2.

pub mod amax;
pub mod atoms;
pub mod copy;
pub mod expand;
pub(crate) mod fragments;
pub mod mixture;
pub mod pack;
pub mod quantize;
pub mod rowwise;
pub mod silu_mul;
mod sink;
pub(crate) mod values;

use dualgemm_device::{Arch, Device, FunctionId};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::builder::{Builder, Kernel};

use crate::Error;

/// The target these kernels are written for on a card: sm_80, or sm_90a on Hopper and the card's own family beyond it,
/// which programmatic dependent launch needs.
pub fn target_for(arch: Arch) -> Target {
    match (arch.major, arch.minor) {
        (..=8, _) => Target::Sm80,
        (9, _) => Target::Sm90a,
        (10, 3) => Target::Sm103a,
        (10, _) => Target::Sm100a,
        (12, 1) => Target::Sm121a,
        (12, _) => Target::Sm120a,
        _ => Target::Sm80,
    }
}

/// A module of one kernel for `target`, in the oldest PTX version that has it.
pub(crate) fn module(
    target: Target,
    about: &str,
    entry: &str,
    build: impl FnOnce(&mut Kernel),
) -> Result<Module, Error> {
    let mut module = Builder::new(target, target.since().max(Version::new(7, 1)));
    module.comment(about);
    module.kernel(entry, build);
    Ok(module.finish()?)
}

/// Whether kernels for `target` can wait for the kernel before themselves.
fn has_dependent_launch(target: Target) -> bool {
    !matches!(target, Target::Sm80 | Target::Sm89)
}

/// First instructions of every kernel: the next kernel may start, and the one before has ended.
pub(crate) fn take_turn(k: &mut Kernel, target: Target) {
    if has_dependent_launch(target) {
        k.launch_dependents();
        k.grid_dependency_wait();
    }
}

pub(crate) fn load(device: &dyn Device, module: &Module, entry: &str) -> Result<FunctionId, Error> {
    Ok(device.function(device.load(&module.to_string())?, entry)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_gemm::Activation;

    #[test]
    fn every_elementwise_kernel_is_legal_on_every_target() {
        let program = Activation::SWIGLU_OAI.program();
        let configs =
            [expand::Expand::configs(), quantize::Quantize::configs(), silu_mul::SiluMul::configs()];
        for &target in Target::ALL {
            for config in configs.iter().flatten() {
                let text = rowwise::generate(config, &program, target).unwrap().to_string();
                assert_eq!(text.contains("griddepcontrol.wait"), has_dependent_launch(target), "{target}");
            }
        }
    }
}
