//! Every subcommand's JSON and text, end to end on the shipped checkpoints.

use std::process::Stdio;

use crate::common::{arg, data, dualgemm, extract, json, refusal, run_json, text};

#[test]
fn validate_fails_a_broken_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let from = data("modelopt-nvfp4");
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), &bytes[..bytes.len() - 1]).unwrap();
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let report = json(&["validate", arg(dir.path())], 1);
    assert_eq!(report["findings"][0]["rule"]["id"], "header");
    dualgemm().args(["validate", arg(dir.path())]).assert().code(1);
}

#[test]
fn validate_names_what_a_configuration_and_the_tensors_say() {
    let dir = tempfile::tempdir().unwrap();
    crate::common::changed(dir.path(), |_| ());
    let config = dir.path().join("config.json");
    let mut said: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    for (key, value) in [("hidden_size", 577), ("intermediate_size", 1537), ("num_hidden_layers", 30)] {
        said[key] = value.into();
    }
    std::fs::write(&config, said.to_string()).unwrap();
    let text = text(&["validate", arg(dir.path())], 1);
    for line in [
        "hidden_size is 577, but the K of `model.layers.0.mlp.gate_proj` is 576",
        "intermediate_size is 1537, but the N of `model.layers.0.mlp.gate_proj` is 1536",
        "num_hidden_layers is 30, but there are 1 `model.layers.N`",
    ] {
        assert!(text.contains(line), "{text}");
    }
    // Nothing of this changes what is computed.
    run_json(&[arg(dir.path()), "--m", "1"], 0);
}

#[test]
fn more_threads_than_processors_are_a_warning() {
    let threads = std::thread::available_parallelism().unwrap().get() + 1;
    let ckpt = data("modelopt-nvfp4");
    let args = ["run", arg(&ckpt), "--m", "1", "--repeat", "1", "--no-roofline", "--threads"];
    let output = dualgemm().args(args).arg(threads.to_string()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.starts_with("warning: --threads "), "{stderr}");
}

#[test]
fn doctor_says_which_kernel_would_run_and_why() {
    let report = json(&["doctor"], 0);
    let isas = report["instruction_sets"].as_array().unwrap();
    assert_eq!(isas.iter().filter(|isa| isa["chosen"] == true).count(), 1);
    assert!(isas.iter().all(|isa| !isa["why"].as_str().unwrap().is_empty()));
    // Those of other architectures are left out.
    assert_eq!(isas.iter().any(|isa| isa["isa"] == "neon"), cfg!(target_arch = "aarch64"));
    let formats: Vec<&str> =
        report["kernels"].as_array().unwrap().iter().map(|k| k["a_format"].as_str().unwrap()).collect();
    for format in ["nvfp4", "mxfp4", "f32", "f16", "bf16"] {
        assert!(formats.contains(&format), "{format}");
    }
    // What would run on GPUs that this machine has not, too.
    for (arch, prefix, seen) in [
        ("sm_80", "sm80_", &["H100", "H200"][..]),
        ("sm_90a", "sm90a_", &["H100", "H200"]),
        ("sm_100a", "sm100a_", &[]),
        ("sm_103a", "sm100a_", &[]),
        ("sm_120a", "sm120a_", &[]),
        ("sm_121a", "sm120a_", &[]),
    ] {
        let kernels = report["gpu_kernels"].as_array().unwrap().iter().filter(|k| k["arch"] == arch);
        let kernels: Vec<_> = kernels.collect();
        assert_eq!(kernels.len(), 3, "{arch}");
        assert_ne!(kernels[0]["kernel"], kernels[2]["kernel"], "one token and 512");
        assert!(kernels.iter().all(|k| k["kernel"].as_str().unwrap().starts_with(prefix)), "{kernels:?}");
        for kernel in kernels {
            let cards = kernel["seen_on"].as_array().unwrap();
            assert_eq!(cards.is_empty(), seen.is_empty(), "{kernel}");
            assert!(cards.iter().all(|card| seen.contains(&card.as_str().unwrap())), "{kernel}");
        }
    }
    let text = text(&["doctor"], 0);
    assert!(
        text.contains("B200, GB200") && text.contains("sm90a_warpwise_") && !text.contains("on a card"),
        "{text}"
    );
    assert!(
        text.lines().any(|line| line.contains("A100") && line.trim_end().ends_with("on H100, H200")),
        "{text}"
    );
    let forced = dualgemm().env("DUALGEMM_ISA", "portable").args(["doctor", "--json"]).output().unwrap();
    let forced: serde_json::Value = serde_json::from_slice(&forced.stdout).unwrap();
    let chosen =
        forced["instruction_sets"].as_array().unwrap().iter().find(|isa| isa["chosen"] == true).unwrap();
    assert_eq!(chosen["isa"], "portable");
    assert!(chosen["why"].as_str().unwrap().contains("DUALGEMM_ISA"));
    assert!(
        forced["kernels"]
            .as_array()
            .unwrap()
            .iter()
            .all(|k| k["kernel"].as_str().unwrap().starts_with("portable"))
    );
}

#[cfg(unix)]
#[test]
fn a_plot_goes_where_its_link_leads() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real.svg"), dir.path().join("link.svg"));
    std::fs::write(&real, "old").unwrap();
    std::os::unix::fs::symlink("real.svg", &link).unwrap();
    json(&["bench", "--shapes", "1x16x16", "--smoke", "--plot", arg(&link)], 0);
    assert!(link.symlink_metadata().unwrap().is_symlink());
    assert!(std::fs::read_to_string(&real).unwrap().contains("<svg"));
}

#[test]
fn help_and_version_go_to_stdout() {
    for args in [&["--help"][..], &["run", "--help"], &["--version"], &["help", "verify"]] {
        let output = dualgemm().args(args).assert().success();
        assert!(!output.get_output().stdout.is_empty() && output.get_output().stderr.is_empty());
    }
    // A newcomer's help fits a screen.
    assert!(text(&["run", "-h"], 0).lines().count() <= 50);
}

#[test]
fn logs_are_asked_for_by_option_or_variable_and_have_no_colors_in_a_file() {
    let checkpoint = data("modelopt-nvfp4");
    let run = |log: Option<&str>, more: &[&str]| {
        let mut command = dualgemm();
        command.args(["run", arg(&checkpoint), "--layer", "0", "--m", "1"]).args(more);
        let assert = command.envs(log.map(|log| ("DUALGEMM_LOG", log))).assert().success();
        String::from_utf8_lossy(&assert.get_output().stderr).into_owned()
    };
    for log in [run(Some("info"), &[]), run(None, &["-v"])] {
        assert!(log.contains("planned") && !log.contains('\x1b'), "{log:?}");
    }
    assert_eq!(run(Some("off"), &["-v"]), "");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let program = assert_cmd::cargo::cargo_bin("dualgemm");
    let mut child = std::process::Command::new(program)
        .args(["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_activation_in_three_tensors_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = data("modelopt-nvfp4");
    let triple = dir.path().join("triple.safetensors");
    extract(&data("expected-modelopt-nvfp4.safetensors"), &["a_packed", "a_scale", "a_scale_2"], &triple);
    assert_eq!(run_json(&[arg(&checkpoint), "--input", arg(&triple)], 0)["a_format"], "nvfp4");
}

#[cfg(feature = "lab")]
#[test]
fn conformance_writes_its_cases_out() {
    let folder = tempfile::tempdir().unwrap();
    let cases = folder.path().join("cases");
    let written = json(&["conformance", "--only", "mma/ldmatrix", "--write", arg(&cases)], 0);
    assert_eq!((&written["cases"], &written["folder"]), (&4.into(), &arg(&cases).into()));
    for name in ["ldmatrix", "ldmatrix_b8", "ldmatrix_unpack", "ldmatrix_window"] {
        let text = std::fs::read_to_string(cases.join(format!("mma/{name}.ptx"))).unwrap();
        let case = dualgemm_conformance::conformance::load(name, &text).unwrap();
        assert!(case.rows.contains(&name.to_string()) && !case.launches.is_empty(), "{text}");
    }
    let line = refusal(&["conformance", "--write", arg(&cases)], 2);
    assert!(line.contains("already exists; give a new or empty directory"), "{line}");
}
