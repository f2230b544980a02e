//! NVIDIA's assembler takes every configuration of every kernel without spills and without its silent refusals.
//!
//! `ptxas` comes from the PyPI package nvidia-cuda-nvcc; the environment variable PTXAS names it if it is not on PATH.

use std::process::Command;

use dualgemm_gemm::Activation;
use dualgemm_kernels::registry::KERNELS;

/// C7508: `setmaxnreg` ignored. C7510 and its relatives: `wgmma` serialized.
const REFUSALS: [&str; 5] = ["C7508", "C7510", "C7512", "C7514", "C7515"];

#[test]
#[ignore = "needs ptxas"]
fn every_configuration_assembles_without_spills() {
    let ptxas = std::env::var_os("PTXAS").unwrap_or_else(|| "ptxas".into());
    let dir = tempfile::tempdir().unwrap();
    let program = Activation::Silu.program();
    let all =
        KERNELS.iter().flat_map(|kernel| (kernel.configs)().into_iter().map(move |name| (kernel, name)));
    for (kernel, config) in all {
        let what = format!("{} {} {config}", kernel.arch, kernel.name);
        let ptx = (kernel.generate)(&config, &program, true).unwrap().to_string();
        let (input, output) = (dir.path().join("k.ptx"), dir.path().join("k.cubin"));
        std::fs::write(&input, ptx).unwrap();
        let run = Command::new(&ptxas)
            .args(["-v", "-warn-spills", "-warn-lmem-usage", "-Werror"])
            .arg(format!("-arch={}", kernel.arch))
            .arg(&input)
            .arg("-o")
            .arg(&output)
            .output()
            .unwrap_or_else(|e| panic!("{}: {e}; set PTXAS", ptxas.display()));
        let said =
            format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(run.status.success(), "{what}: {said}");
        assert!(said.contains("0 bytes spill stores, 0 bytes spill loads"), "{what}: {said}");
        assert!(!REFUSALS.iter().any(|code| said.contains(code)), "{what}: {said}");
        let used = said.lines().find(|line| line.contains("Used")).unwrap_or_default();
        println!("{what}: {}", used.trim());
    }
}
