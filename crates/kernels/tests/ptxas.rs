//! NVIDIA's assembler takes every configuration of every kernel without spills and without its silent refusals.
//!
//! `ptxas` comes from the PyPI package nvidia-cuda-nvcc; the environment variable PTXAS names it if it is not on PATH.

use std::process::Command;

use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::Activation;
use dualgemm_kernels::parts::rows;
use dualgemm_kernels::registry::KERNELS;
use dualgemm_kernels::sm90a::variant::{Compute, Out, Products, Scheduler, Variant};
use dualgemm_kernels::sm90a::{config::Config, fused};
use dualgemm_kernels::{sm100a, sm120a};
use dualgemm_ptx::Target;

/// C7508: `setmaxnreg` ignored. C7510 and its relatives: `wgmma` serialized.
const REFUSALS: [&str; 5] = ["C7508", "C7510", "C7512", "C7514", "C7515"];

/// Assembles a module for `arch`; `what` is its name in messages.
fn assemble(what: &str, arch: &str, ptx: &str) {
    let ptxas = std::env::var_os("PTXAS").unwrap_or_else(|| "ptxas".into());
    let dir = tempfile::tempdir().unwrap();
    let (input, output) = (dir.path().join("k.ptx"), dir.path().join("k.cubin"));
    std::fs::write(&input, ptx).unwrap();
    let run = Command::new(&ptxas)
        .args(["-v", "-warn-spills", "-warn-lmem-usage", "-Werror"])
        .arg(format!("-arch={arch}"))
        .arg(&input)
        .arg("-o")
        .arg(&output)
        .output()
        .unwrap_or_else(|e| panic!("{}: {e}; set PTXAS", ptxas.display()));
    let said = format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{what}: {said}");
    assert!(said.contains("0 bytes spill stores, 0 bytes spill loads"), "{what}: {said}");
    assert!(!REFUSALS.iter().any(|code| said.contains(code)), "{what}: {said}");
    let used = said.lines().find(|line| line.contains("Used")).unwrap_or_default();
    println!("{what}: {}", used.trim());
}

#[test]
#[ignore = "needs ptxas"]
fn every_configuration_assembles_without_spills() {
    let program = Activation::Silu.program();
    for kernel in KERNELS {
        for config in (kernel.configs)() {
            let ptx = (kernel.generate)(&config, &program, true).unwrap().to_string();
            assemble(&format!("{} {} {config}", kernel.arch, kernel.name), kernel.arch.as_str(), &ptx);
        }
    }
}

#[test]
#[ignore = "needs ptxas"]
fn every_variant_of_the_fused_hopper_kernel_assembles_without_spills() {
    let variant = || Variant::new(Activation::SWIGLU_OAI.program()).for_weights(4096, 7168);
    let full = || Variant { bias: true, a_scale: true, round_gate_up_to_bf16: true, ..variant() };
    let variants = [
        Variant { compute: Compute::Bf16, out: Out::Bf16, aligned: false, whole_blocks: false, ..full() },
        Variant { out: Out::F32, ..full() },
        Variant { compute: Compute::Bf16, out: Out::Nvfp4 { scale_layout: ScaleLayout::Sf128x4 }, ..full() },
        Variant { grouped: true, ..full() },
        Variant { grouped: true, scheduler: Scheduler::Persistent, ..full() },
        Variant { scheduler: Scheduler::Persistent, ..full() },
        Variant { scheduler: Scheduler::StreamK, ..full() },
        full().gate_before(),
        Variant { products: Products::Up, ..variant() },
        Variant { products: Products::Up, out: Out::F32, aligned: false, whole_blocks: false, ..full() },
        Variant { products: Products::Up, out: Out::Nvfp4 { scale_layout: ScaleLayout::Linear }, ..full() },
    ];
    for config in Config::MENU {
        for variant in &variants {
            // Some do not fit the shared memory, or exclude each other.
            let Ok(module) = fused::generate(&config, variant) else { continue };
            assemble(&format!("{}, {}", config.name(), variant.name()), "sm_90a", &module.to_string());
        }
    }
}

#[test]
#[ignore = "needs ptxas"]
fn every_variant_of_blackwells_kernels_assembles_without_spills() {
    let full = || rows::Variant {
        bias: true,
        a_scale: true,
        aligned: true,
        ..rows::Variant::new(Activation::SWIGLU_OAI.program())
    };
    let nvfp4 = rows::Out::Nvfp4 { scale_layout: ScaleLayout::Sf128x4 };
    let variants = [
        rows::Variant { out: rows::Out::F32, aligned: false, ..full() },
        rows::Variant { out: nvfp4, ..full() },
        rows::Variant { out: rows::Out::Bf16, grouped: true, ..full() },
    ];
    for variant in &variants {
        for config in sm100a::config::Config::MENU {
            let ptx = sm100a::fused::generate(&config, variant, Target::Sm100a).unwrap().to_string();
            assemble(&format!("{}, {:?}", config.name(), variant.out), "sm_100a", &ptx);
        }
        for config in sm120a::config::Config::MENU {
            let ptx = sm120a::fused::generate(&config, variant, Target::Sm120a).unwrap().to_string();
            assemble(&format!("{}, {:?}", config.name(), variant.out), "sm_120a", &ptx);
        }
    }
}
