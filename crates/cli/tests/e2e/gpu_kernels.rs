//! GPU kernels without a GPU: their text, and their run in the simulator.

use crate::common::{json, text};

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

/// When the signal arrives is a matter of luck: later and later, until the simulation has begun.
#[cfg(unix)]
#[test]
fn an_interrupted_simulation_says_how_far_it_came() {
    use std::process::{Command, Stdio};
    use std::time::Duration;
    // Simulating takes four times what the operands take, so one of the delays falls into it.
    for delay in (0..16).map(|n| Duration::from_millis(200).mul_f64(1.5f64.powi(n))) {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("dualgemm"));
        let args = ["sim", "--arch", "sm_100a", "--shape", "2048x256x1024"];
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
