//! NVIDIA's assembler takes every configuration of every kernel without spills and without its silent refusals.
//!
//! `ptxas` comes from the PyPI package nvidia-cuda-nvcc, `nvdisasm` from nvidia-cuda-nvdisasm; the environment variables
//! PTXAS and NVDISASM name them if they are not on PATH.

use std::ffi::OsString;
use std::process::Command;

use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::Activation;
use dualgemm_kernels::fused::Config;
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::variant::{Out, Products, Scheduler, Variant};
use dualgemm_kernels::registry::{KERNELS, Kernel};
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
    let all = KERNELS.iter().flat_map(|kernel| kernel.configs().into_iter().map(move |c| (kernel, c)));
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
        let config = kernel.configs().pop().unwrap();
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

/// Variants of each kernel: what its roles depend on. On Blackwell they do not depend on the 4-bit format.
fn variants() -> Vec<(Vec<Config>, Target, Vec<Variant>)> {
    let oai = || Variant::new(Activation::SWIGLU_OAI.program()).for_weights(4096, 7168);
    let both = || Variant { bias: true, a_scale: true, ..oai() };
    let full = || Variant { round_gate_up_to_bf16: true, ..both() };
    let bf16 = |variant| Variant { compute: HalfFormat::Bf16, ..variant };
    let ragged = |variant| Variant { aligned: false, whole_blocks: false, ..variant };
    let unaligned = |variant| Variant { out: Out::F32, aligned: false, ..variant };
    let linear = |variant| Variant { products: Products::Linear, ..variant };
    let grouped = |variant| Variant { grouped: true, ..variant };
    let up = |variant| Variant { products: Products::Up, ..variant };
    let float = |variant| Variant { out: Out::F32, ..variant };
    let nvfp4 = |scale_layout| Out::Nvfp4 { scale_layout };
    let codes = |layout| Variant { codes: Some(layout), ..both() };
    let hopper = vec![
        ragged(bf16(Variant { out: Out::Bf16, ..full() })),
        float(full()),
        bf16(Variant { out: nvfp4(ScaleLayout::Sf128x4), ..full() }),
        grouped(full()),
        Variant { scheduler: Scheduler::Persistent, ..grouped(full()) },
        Variant { scheduler: Scheduler::Persistent, ..full() },
        Variant { scheduler: Scheduler::StreamK, ..full() },
        linear(oai()),
        linear(grouped(float(full()))),
        full().gate_before(),
        up(oai()),
        ragged(up(float(full()))),
        up(Variant { out: nvfp4(ScaleLayout::Linear), ..full() }),
    ];
    let of_experts = || bf16(grouped(Variant { bias: true, ..oai() }));
    let few_tokens = vec![
        bf16(ragged(float(both()))),
        Variant { out: nvfp4(ScaleLayout::Sf128x4), ..both() },
        of_experts(),
        linear(of_experts()),
        Variant { choices: true, ..of_experts() },
        linear(Variant { choices: true, out: Out::F32, ..of_experts() }),
        linear(codes(ScaleLayout::Linear)),
        Variant { out: Out::Bf16, whole_blocks: false, ..codes(ScaleLayout::Sf128x4) },
    ];
    let portable = vec![
        linear(grouped(unaligned(Variant { bias: true, ..oai() }))),
        linear(bf16(Variant { bias: true, ..oai() })),
        bf16(grouped(both())),
    ];
    let blackwell = vec![
        unaligned(both()),
        Variant { out: nvfp4(ScaleLayout::Sf128x4), ..both() },
        grouped(Variant { out: Out::Bf16, ..both() }),
        linear(Variant { out: Out::Bf16, ..both() }),
        linear(grouped(unaligned(both()))),
    ];
    let of = |wanted: fn(&Config) -> bool| Config::all().filter(wanted).collect::<Vec<_>>();
    let sm100 = of(
        |c| matches!(c, Config::Sm100a(c) if [Formats::NVFP4, Formats::Wide(HalfFormat::F16)].contains(&c.formats)),
    );
    let sm120 = of(|c| matches!(c, Config::Sm120a(c) if c.format == BlockFormat::Nvfp4));
    vec![
        (of(|c| matches!(c, Config::Sm90a(_))), Target::Sm90a, hopper),
        (of(|c| matches!(c, Config::Warpwise(_))), Target::Sm90a, few_tokens),
        (of(|c| matches!(c, Config::Sm80(_))), Target::Sm80, portable),
        (sm100, Target::Sm100a, blackwell.clone()),
        (sm120, Target::Sm120a, blackwell),
    ]
}

/// Assembles each configuration with each variant for which `wanted` of their places is true.
fn assemble_variants(wanted: fn(usize, usize) -> bool) {
    for (configs, target, variants) in variants() {
        let all = configs.iter().enumerate().flat_map(|(i, config)| {
            variants.iter().enumerate().filter(move |(j, _)| wanted(i, *j)).map(move |(_, v)| (config, v))
        });
        let assembled = all.collect::<Vec<_>>().into_par_iter().filter(|(config, variant)| {
            // Some do not fit the shared memory, or exclude each other; codes of A are for few tokens.
            let Ok(module) = config.generate(variant, target) else { return false };
            let what = format!("{}, {}", config.name(), variant.name());
            assemble(&what, target.as_str(), &module.to_string());
            true
        });
        assert!(assembled.count() > 0, "{target}");
    }
}

#[test]
#[ignore = "needs ptxas"]
fn variants_in_turns_over_the_fused_kernels_assemble_without_spills() {
    assemble_variants(|config, variant| (config + variant) % 4 == 0);
}

#[test]
#[ignore = "needs ptxas"]
fn every_variant_of_the_fused_kernels_assembles_without_spills() {
    assemble_variants(|_, _| true);
}

/// Every variant is one that some configuration takes.
#[test]
fn every_variant_is_generated() {
    for (configs, target, variants) in variants() {
        for variant in variants {
            let generated = configs.iter().any(|config| config.generate(&variant, target).is_ok());
            assert!(generated, "{target}: {}", variant.name());
        }
    }
}
