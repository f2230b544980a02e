//! GPU kernels without a GPU: their text, and their run in the simulator.

use crate::common::{json, refusal, text};

const SIM: [&str; 5] = ["sim", "--arch", "sm_90a", "--shape", "9x40x336"];

/// One configuration of each; the registry's own test generates all.
#[test]
fn every_listed_kernel_prints_its_text() {
    let (list, shown) = (json(&["ptx", "--list"], 0), text(&["ptx", "--list"], 0));
    for kernel in list["kernels"].as_array().unwrap() {
        let (name, arch) = (kernel["name"].as_str().unwrap(), kernel["arch"].as_str().unwrap());
        let config = kernel["configs"].as_array().unwrap().last().unwrap().as_str().unwrap();
        let printed = text(&["ptx", "--kernel", name, "--arch", arch, "--config", config], 0);
        assert!(printed.contains(&format!(".target {arch}\n")) && printed.contains(config), "{config}");
        assert!(shown.contains(&format!("--kernel {name} --arch {arch}")));
    }
}

#[test]
fn the_activation_and_the_alignment_of_n_are_in_the_text() {
    // One that stores rows of C in whole pieces, if it may.
    let kernel =
        ["ptx", "--kernel", "fused", "--arch", "sm_90a", "--config", "sm90a_fused_128x128_b2_s4_kg1"];
    let with = |more: &[&str]| text(&[&kernel[..], more].concat(), 0);
    let plain = with(&[]);
    assert!(plain == with(&["--activation", "silu"]), "silu is the default");
    assert!(plain != with(&["--activation", "relu2"]), "the activation is part of the kernel");
    let stores_pieces = |text: &str| text.contains("st.global.v4");
    assert!(stores_pieces(&plain) && !stores_pieces(&with(&["--unaligned"])));
}

#[test]
fn a_simulated_kernel_is_right_and_says_what_bounds_it() {
    let report = json(&[&SIM[..], &["--seed", "3"]].concat(), 0);
    assert_eq!((&report["right"], &report["seed"]), (&true.into(), &3.into()));
    assert!(report["rel_l2"].as_f64().unwrap() < 3e-4 && report.get("trap").is_none());
    let launch = &report["launch"];
    // Tiles of 16 tokens and 32 features, K rounded up to 6 blocks of 64.
    assert_eq!(launch["ctas"], 2);
    assert_eq!(launch["tensor_operations"], 2 * (2 * 64 * 16 * 384));
    assert!(launch["least_us"].as_f64().unwrap() > 0.0);
    assert!(launch["resources_us"].get(launch["bound"].as_str().unwrap()).is_some());
    let printed = text(&SIM, 0);
    for part in [
        "every check on",
        "\nright: relative L2 error ",
        "kernel dual_gemm: 2 CTAs of",
        " (virtual)\n",
        "\n  warp 0: ",
        "\n  warps 1-7: ",
        " µs, bound by ",
        "H100 SXM5 80GB: at least",
    ] {
        assert!(printed.contains(part), "no {part:?} in\n{printed}");
    }
}

#[test]
fn blackwells_kernels_are_right_and_say_that_no_card_ran_them() {
    for (arch, card) in
        [("sm_100a", "B200"), ("sm_103a", "B300"), ("sm_120a", "RTX PRO 6000"), ("sm_121a", "GB10")]
    {
        let args = |shape| ["sim", "--arch", arch, "--shape", shape];
        let report = json(&args("130x72x528"), 0);
        assert_eq!((&report["right"], &report["ran_on_silicon"]), (&true.into(), &false.into()), "{report}");
        assert_eq!(report["tolerance"]["max_rel_l2"], 1e-3, "C is f16");
        assert_eq!(report.get("estimate").is_some(), card == "B200", "{report}");
        let printed = text(&args("9x40x336"), 0);
        for part in ["\nright: ", "not yet run on silicon", card] {
            assert!(printed.contains(part), "no {part:?} in\n{printed}");
        }
        assert_eq!(printed.contains("estimate, not measured: "), card == "B200", "{printed}");
    }
}

#[test]
fn a_blackwell_configuration_says_what_its_operands_are() {
    for (arch, config, kernel) in [
        ("sm_100a", "sm100a_fused_features_n16_g1_k4_s5_a1_mxfp4", "fused_mxfp4"),
        ("sm_100a", "sm100a_fused_features_n16_g1_k4_s9_a1_bf16", "fused_w4a16"),
        ("sm_103a", "sm100a_fused_features_n16_g1_k4_s9_a1_f16", "fused_w4a16"),
        ("sm_120a", "sm120a_fused_32x16_w2x1x4_k256_s5_mxfp4", "fused_mxfp4"),
    ] {
        let report = json(&["sim", "--arch", arch, "--shape", "9x40x1024", "--config", config], 0);
        assert_eq!((&report["right"], &report["kernel"]), (&true.into(), &kernel.into()), "{report}");
    }
}

#[test]
fn a_trap_is_a_wrong_kernel_and_its_message_is_the_report() {
    let args = [&SIM[..], &["--max-instructions", "50"]].concat();
    let report = json(&args, 1);
    let trap = report["trap"].as_str().unwrap();
    assert!(trap.starts_with("instruction limit: ") && trap.contains("\n  kernel: dual_gemm\n"), "{trap}");
    assert_eq!(report["right"], false);
    assert!(text(&args, 1).contains(trap));
}

#[test]
fn what_does_not_exist_is_named_with_what_does() {
    let refused = |args: &[&str], code: i32, parts: [&str; 2]| {
        let stderr = refusal(args, code);
        assert!(parts.iter().all(|part| stderr.contains(part)), "{stderr}");
    };
    let of = |kernel, arch| ["ptx", "--kernel", kernel, "--arch", arch];
    refused(&of("fused", "sm_70"), 2, ["--arch sm_70: kernel fused is written for sm_90a, ", "sm_121a"]);
    refused(&of("fast", "sm_90a"), 2, ["--kernel fast: there is no such kernel; there are ", "fused_mxfp4"]);
    for arch in ["sm_70", "sm_80"] {
        refused(&["sim", "--arch", arch, "--shape", "1x32x64"], 2, [arch, "valid are sm_90a, sm_100a"]);
    }
    let mxfp4 = "sm100a_fused_features_n16_g1_k4_s5_a1_mxfp4";
    let args = ["ptx", "--kernel", "fused", "--arch", "sm_100a", "--config", mxfp4];
    refused(
        &args,
        2,
        [mxfp4, "belongs to the kernel \"fused_mxfp4\" of sm_100a; this command runs \"fused\" of sm_100a"],
    );
    let generic = ["ptx", "--kernel", "expand", "--arch", "sm_80"];
    refused(
        &[&generic[..], &["--activation", "relu2"]].concat(),
        2,
        ["--activation relu2", "expand for sm_80"],
    );
    refused(&[&generic[..], &["--unaligned"]].concat(), 2, ["--unaligned", "leave it out"]);
    let config = ["--config", "none"];
    refused(&[&SIM[..], &config].concat(), 2, ["--config none: ", "no such configuration; the closest of "]);
    refused(&["sim", "--arch", "sm_90a", "--shape", "1x32"], 2, ["1x32", "64x128x256"]);
    refused(&["sim", "--arch", "sm_90a", "--shape", "1x32x65"], 2, ["K = 65", "16"]);
    refused(&["sim", "--arch", "sm_90a", "--shape", "1x99999999999x16"], 2, ["--shape", "2^34"]);
}

/// When the signal arrives is a matter of luck: later and later, until the simulation has begun.
#[cfg(unix)]
#[test]
fn an_interrupted_simulation_says_how_far_it_came() {
    use std::process::{Command, Stdio};
    use std::time::Duration;
    for delay in (1..100).map(|n| Duration::from_millis(200 * n)) {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("dualgemm"));
        let args = ["sim", "--arch", "sm_100a", "--shape", "4096x256x4096"];
        let child = command.args(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(delay);
        Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap();
        let ended = child.wait_with_output().unwrap();
        // A signal that comes before the launch ends the command as it always does.
        if let Some(code) = ended.status.code() {
            let said = String::from_utf8(ended.stderr).unwrap();
            assert_eq!(code, 130, "after {delay:?}: {said}");
            assert!(
                said.starts_with("error: interrupted: ")
                    && said.contains(" CTAs have finished; no check has failed")
            );
            return;
        }
    }
    panic!("no signal found a simulation");
}
