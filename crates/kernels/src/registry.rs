//! Every kernel of this crate, as a list. To add a kernel, add a row.

use dualgemm_gemm::Program;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;

use crate::Error;
use crate::sm90a::{config::Config, fused, variant::Variant};

/// A kernel that can be generated.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    /// Its name, unique for its architecture.
    pub name: &'static str,
    /// What it computes, in one line.
    pub doc: &'static str,
    /// What it is written for.
    pub arch: Target,
    /// The names of its configurations.
    pub configs: fn() -> Vec<String>,
    /// Its text: `generate(configuration, activation, aligned)`, where `aligned` promises that rows of C start at
    /// multiples of 16 bytes (N is a multiple of 8).
    ///
    /// # Errors
    /// If no configuration has that name.
    pub generate: fn(&str, &Program, bool) -> Result<Module, Error>,
}

/// Every kernel.
pub const KERNELS: &[Kernel] = &[Kernel {
    name: "fused",
    doc: "C = act(A B1^T, A B2^T): 4-bit weights widened to f16 in registers, f16 A and C",
    arch: Target::Sm90a,
    configs: || Config::MENU.map(|config| config.name()).into(),
    generate: |config, program, aligned| {
        let variant = Variant { aligned, whole_blocks: true, ..Variant::new(program.clone()) };
        fused::generate(&Config::named(config)?, &variant)
    },
}];

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_gemm::Activation;
    use std::collections::HashSet;

    #[test]
    fn every_kernel_generates_every_configuration_under_a_name_of_its_own() {
        let mut seen = HashSet::new();
        for kernel in KERNELS {
            for config in (kernel.configs)() {
                let module = (kernel.generate)(&config, &Activation::Silu.program(), true).unwrap();
                let target = format!(".target {}", kernel.arch);
                assert!(module.to_string().contains(&target), "{} {config}", kernel.name);
                assert!(seen.insert((kernel.arch, kernel.name, config)));
            }
            let message =
                (kernel.generate)("none", &Activation::Silu.program(), true).unwrap_err().to_string();
            assert!(message.contains(&(kernel.configs)()[0]), "{message}");
        }
    }
}
