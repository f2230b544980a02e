//! NVIDIA's assembler takes every configuration of the menu without spills and without its silent refusals.
//!
//! `ptxas` comes from the PyPI package nvidia-cuda-nvcc; the environment variable PTXAS names it if it is not on PATH.

use std::process::Command;

use dualgemm_gemm::Activation;
use dualgemm_kernels::sm90a::{config::Config, fused, variant::Variant};

/// C7508: `setmaxnreg` ignored. C7510 and its relatives: `wgmma` serialized.
const REFUSALS: [&str; 5] = ["C7508", "C7510", "C7512", "C7514", "C7515"];

#[test]
#[ignore = "needs ptxas"]
fn every_configuration_assembles_without_spills() {
    let ptxas = std::env::var_os("PTXAS").unwrap_or_else(|| "ptxas".into());
    let dir = tempfile::tempdir().unwrap();
    for config in Config::MENU {
        let variant = Variant::new(Activation::Silu.program()).for_weights(4096, 7168);
        let ptx = fused::generate(&config, &variant).unwrap().to_string();
        let (input, output) = (dir.path().join("k.ptx"), dir.path().join("k.cubin"));
        std::fs::write(&input, ptx).unwrap();
        let run = Command::new(&ptxas)
            .args(["-v", "-warn-spills", "-warn-lmem-usage", "-Werror", "-arch=sm_90a"])
            .arg(&input)
            .arg("-o")
            .arg(&output)
            .output()
            .unwrap_or_else(|e| panic!("{}: {e}; set PTXAS", ptxas.display()));
        let said =
            format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(run.status.success(), "{}: {said}", config.name());
        assert!(said.contains("0 bytes spill stores, 0 bytes spill loads"), "{}: {said}", config.name());
        assert!(!REFUSALS.iter().any(|code| said.contains(code)), "{}: {said}", config.name());
        let used = said.lines().find(|line| line.contains("Used")).unwrap_or_default();
        println!("{}: {}", config.name(), used.trim());
    }
}
