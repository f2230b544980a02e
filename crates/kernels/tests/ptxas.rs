//! NVIDIA's assembler takes every configuration of every kernel without spills and without its silent refusals.
//!
//! `ptxas` comes from the PyPI package nvidia-cuda-nvcc, `nvdisasm` from nvidia-cuda-nvdisasm; the environment variables
//! PTXAS and NVDISASM name them if they are not on PATH.

use std::ffi::OsString;
use std::process::Command;

use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::Activation;
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::rows;
use dualgemm_kernels::registry::{KERNELS, Kernel};
use dualgemm_kernels::sm90a::variant::{Out, Products, Scheduler, Variant};
use dualgemm_kernels::sm90a::{config::Config, fused};
use dualgemm_kernels::{sm80, sm100a, sm120a, warpwise};
use dualgemm_ptx::Target;
use dualgemm_ptx::builder::HalfFormat;
use rayon::prelude::*;
use tempfile::TempDir;

/// C7508: `setmaxnreg` ignored. C7510 and its relatives: `wgmma` serialized.
const REFUSALS: [&str; 5] = ["C7508", "C7510", "C7512", "C7514", "C7515"];

/// What the environment calls the program, or its name.
fn program(variable: &str, name: &str) -> OsString {
    std::env::var_os(variable).unwrap_or_else(|| name.into())
}

/// Assembles a module for `arch`; `what` is its name in messages. The folder holds `k.cubin`.
fn assemble(what: &str, arch: &str, ptx: &str) -> TempDir {
    let ptxas = program("PTXAS", "ptxas");
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
    dir
}

#[test]
#[ignore = "needs ptxas"]
fn every_configuration_assembles_without_spills() {
    let program = Activation::Silu.program();
    let all = KERNELS.iter().flat_map(|kernel| (kernel.configs)().into_iter().map(move |c| (kernel, c)));
    all.collect::<Vec<_>>().into_par_iter().for_each(|(kernel, config)| {
        let ptx = kernel.generate(&config, &program, true).unwrap().to_string();
        assemble(&format!("{} {} {config}", kernel.arch, kernel.name), kernel.arch.as_str(), &ptx);
    });
}

/// What `nvdisasm` prints of the matrix instructions, and of how scales or widened weights come to them.
fn instructions(kernel: &Kernel) -> Option<&'static [&'static str]> {
    Some(match (kernel.arch, kernel.name) {
        (Target::Sm100a, "fused") => &["UTCOMMA.2CTA.4X", "UTCCP.T.S.2CTA.4"],
        (Target::Sm103a, "fused") => &["UTCOMMA.2CTA.BLOCK16", "UTCCP.T.S.2CTA.4"],
        (Target::Sm100a | Target::Sm103a, "fused_mxfp4") => &["UTCOMMA.2CTA ", "UTCCP.T.S.2CTA.4"],
        (Target::Sm100a | Target::Sm103a, "fused_w4a16") => &["UTCHMMA", "STTM", "F2FP.F16.E2M1.UNPACK_B"],
        (Target::Sm120a | Target::Sm121a, "fused") => &["OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"],
        (Target::Sm120a | Target::Sm121a, "fused_mxfp4") => &["OMMA.SF.16864.F32.E2M1.E2M1.E8"],
        _ => return None,
    })
}

#[test]
#[ignore = "needs ptxas and nvdisasm"]
fn blackwells_kernels_multiply_on_the_tensor_cores_they_are_written_for() {
    let nvdisasm = program("NVDISASM", "nvdisasm");
    let mut seen = 0;
    for kernel in KERNELS {
        let Some(instructions) = instructions(kernel) else { continue };
        let what = format!("{} {}", kernel.arch, kernel.name);
        let config = (kernel.configs)().pop().unwrap();
        let ptx = kernel.generate(&config, &Activation::Silu.program(), true).unwrap().to_string();
        let dir = assemble(&what, kernel.arch.as_str(), &ptx);
        let run = Command::new(&nvdisasm).arg("-c").arg(dir.path().join("k.cubin")).output();
        let run = run.unwrap_or_else(|e| panic!("{}: {e}; set NVDISASM", nvdisasm.display()));
        let text = String::from_utf8_lossy(&run.stdout);
        for instruction in instructions {
            let count = text.matches(instruction).count();
            println!("{what} {config}: {count} {instruction}");
            assert!(count > 0, "{what} {config} has no {instruction}");
        }
        seen += 1;
    }
    assert_eq!(seen, 10, "kernels of Blackwell");
}

#[test]
#[ignore = "needs ptxas"]
fn every_variant_of_the_fused_hopper_kernel_assembles_without_spills() {
    let variant = || Variant::new(Activation::SWIGLU_OAI.program()).for_weights(4096, 7168);
    let full = || Variant { bias: true, a_scale: true, round_gate_up_to_bf16: true, ..variant() };
    let variants = [
        Variant { compute: HalfFormat::Bf16, out: Out::Bf16, aligned: false, whole_blocks: false, ..full() },
        Variant { out: Out::F32, ..full() },
        Variant {
            compute: HalfFormat::Bf16,
            out: Out::Nvfp4 { scale_layout: ScaleLayout::Sf128x4 },
            ..full()
        },
        Variant { grouped: true, ..full() },
        Variant { grouped: true, scheduler: Scheduler::Persistent, ..full() },
        Variant { scheduler: Scheduler::Persistent, ..full() },
        Variant { scheduler: Scheduler::StreamK, ..full() },
        Variant { products: Products::Linear, ..variant() },
        Variant { products: Products::Linear, out: Out::F32, grouped: true, ..full() },
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
fn every_variant_of_the_kernel_for_few_tokens_assembles_without_spills() {
    use warpwise::fused::A;
    let full = || rows::Variant {
        bias: true,
        a_scale: true,
        aligned: true,
        ..rows::Variant::new(Activation::SWIGLU_OAI.program())
    };
    let nvfp4 = rows::Out::Nvfp4 { scale_layout: ScaleLayout::Sf128x4 };
    let variants = [
        (
            A::Half(HalfFormat::Bf16),
            false,
            false,
            rows::Variant { out: rows::Out::F32, aligned: false, ..full() },
        ),
        (A::Half(HalfFormat::F16), true, false, rows::Variant { out: nvfp4, ..full() }),
        (A::Half(HalfFormat::Bf16), true, false, rows::Variant { grouped: true, a_scale: false, ..full() }),
        (A::Half(HalfFormat::Bf16), true, true, rows::Variant { grouped: true, a_scale: false, ..full() }),
        (A::Nvfp4(ScaleLayout::Linear), true, true, full()),
        (A::Nvfp4(ScaleLayout::Sf128x4), false, false, rows::Variant { out: rows::Out::Bf16, ..full() }),
    ];
    let configs: Vec<_> = warpwise::config::Config::menu().collect();
    configs.into_par_iter().for_each(|config| {
        for (a, whole_blocks, linear, rows) in variants.clone() {
            let what = format!("{}, {a:?} to {:?}, linear: {linear}", config.name(), rows.out);
            let variant = warpwise::fused::Variant { a, whole_blocks, linear, rows };
            // Codes of A are for few tokens.
            let Ok(module) = warpwise::fused::generate(&config, &variant) else { continue };
            assemble(&what, "sm_90a", &module.to_string());
        }
    });
}

#[test]
#[ignore = "needs ptxas"]
fn every_variant_of_the_portable_kernel_assembles_without_spills() {
    let full = || rows::Variant { bias: true, ..rows::Variant::new(Activation::SWIGLU_OAI.program()) };
    let variants = [
        (HalfFormat::F16, true, rows::Variant { out: rows::Out::F32, grouped: true, ..full() }),
        (HalfFormat::Bf16, true, rows::Variant { aligned: true, ..full() }),
        (HalfFormat::Bf16, false, rows::Variant { grouped: true, a_scale: true, aligned: true, ..full() }),
    ];
    for config in sm80::config::Config::MENU {
        for (compute, linear, rows) in variants.clone() {
            let variant = sm80::fused::Variant { compute, linear, rows };
            let module = sm80::fused::generate(&config, &variant, Target::Sm80).unwrap();
            assemble(&format!("{}, linear: {linear}", config.name()), "sm_80", &module.to_string());
        }
    }
}

/// A configuration of one of Blackwell's kernels.
enum Blackwell {
    Sm100(sm100a::config::Config),
    Sm120(sm120a::config::Config),
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
        rows::Variant { out: rows::Out::Bf16, linear: true, ..full() },
        rows::Variant { out: rows::Out::F32, linear: true, grouped: true, aligned: false, ..full() },
    ];
    // The roles that a variant changes do not depend on the 4-bit format.
    let menu = |formats| sm100a::config::Config::menu(formats);
    let sm100 = [Formats::NVFP4, Formats::Wide(HalfFormat::F16)].into_iter().flat_map(menu);
    let sm100 = sm100.map(|config| (config.name(), "sm_100a", Blackwell::Sm100(config)));
    let sm120 = sm120a::config::Config::menu(BlockFormat::Nvfp4).into_iter();
    let sm120 = sm120.map(|config| (config.name(), "sm_120a", Blackwell::Sm120(config)));
    sm100.chain(sm120).collect::<Vec<_>>().into_par_iter().for_each(|(name, arch, config)| {
        for variant in &variants {
            let module = match config {
                Blackwell::Sm100(config) => sm100a::fused::generate(&config, variant, Target::Sm100a),
                Blackwell::Sm120(config) => sm120a::fused::generate(&config, variant, Target::Sm120a),
            };
            assemble(&format!("{name}, {:?}", variant.out), arch, &module.unwrap().to_string());
        }
    });
}
