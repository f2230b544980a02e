//! Every subcommand's JSON and text, end to end on the shipped checkpoints.

use std::process::Stdio;

use crate::common::{arg, changed, data, dualgemm, extract, json, refusal, rel_l2, run_json, tensor, text};

const CHECKPOINTS: [(&str, &str); 4] = [
    ("modelopt-nvfp4", "modelopt"),
    ("compressed-tensors-nvfp4", "compressed-tensors"),
    ("compressed-tensors-nvfp4a16", "compressed-tensors"),
    ("mlp-nvfp4.gguf", "gguf"),
];

#[test]
fn run_reports_the_keys_that_scripts_rely_on() {
    let (checkpoint, hidden) = (data("modelopt-nvfp4"), data("hidden-states-f32.safetensors"));
    let report = json(&["run", arg(&checkpoint), "--layer", "0", "--input", arg(&hidden)], 0);
    for key in
        ["rel_l2", "cosine", "median_us", "floor_us", "roofline_fraction", "gflops", "gbps", "prepack_us"]
    {
        assert!(report[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {}", report[key]);
    }
    for key in ["kernel", "device", "device_name", "a", "convention", "bound", "a_format", "out_dtype"] {
        assert!(report[key].as_str().is_some_and(|x| !x.is_empty()), "{key}: {}", report[key]);
    }
    for (key, value) in [("m", 64), ("n", 1536), ("k", 576), ("layer", 0), ("rows_compared", 64)] {
        assert_eq!(report[key], value, "{key}");
    }
    assert!(report["max_ulp"].is_u64() && report["runs"].as_u64().unwrap() >= 1);
    assert_eq!(report["plan"]["desc"]["m"], 64);
    assert_eq!(report["matrices"][0]["name"], "model.layers.0.mlp.gate_proj.weight");
    assert_eq!(report["right"], true);
}

#[test]
fn formats_of_c_are_called_as_the_options_call_them() {
    for out_dtype in ["f32", "f16", "bf16", "nvfp4"] {
        let run = run_json(&[arg(&data("modelopt-nvfp4")), "--m", "2", "--out-dtype", out_dtype], 0);
        assert_eq!(run["out_dtype"], out_dtype);
    }
    // Each looks at the machine for a second first; nvfp4 alone has more to say than its name.
    let bench = json(&["bench", "--shapes", "2x32x64", "--smoke", "--out-dtype", "nvfp4"], 0);
    assert_eq!(bench["rows"][0]["out_dtype"], "nvfp4");
}

#[test]
fn a_sample_of_rows_says_that_it_is_one() {
    let checkpoint = data("modelopt-nvfp4");
    let run = |check: &str| run_json(&[arg(&checkpoint), "--m", "40", "--check", check], 0);
    assert_eq!(run("3")["rows_compared"], 3);
    assert_eq!(run("all")["rows_compared"], 40);
    assert!(run("none").get("rel_l2").is_none());
}

#[test]
fn inspect_shows_scales_of_both_halves() {
    for (name, convention) in CHECKPOINTS {
        let checkpoint = data(name);
        let report = json(&["inspect", arg(&checkpoint), "--tensors"], 0);
        assert_eq!(report["convention"], convention);
        let pair = &report["mlps"][0]["entries"][0]["pair"];
        assert_eq!((&pair["gate"]["n"], &pair["gate"]["k"]), (&1536.into(), &576.into()), "{name}");
        assert_eq!(pair["tensor_scale_ratio"], 1.0);
        assert_eq!(report["halves_differ"].as_array().unwrap().len(), 0);
        assert_eq!(
            report["tensors"].as_array().unwrap().len() as u64,
            report["tensor_count"].as_u64().unwrap()
        );
        dualgemm().args(["inspect", arg(&checkpoint)]).assert().success();
    }
}

#[test]
fn inspect_says_nothing_of_scales_that_it_cannot_read() {
    let dir = tempfile::tempdir().unwrap();
    let [half, ungated] = ["half", "ungated"].map(|name| dir.path().join(name));
    changed(&half, |all| all.retain(|tensor| tensor.0.starts_with("model.layers.0.mlp.gate_proj.")));
    let kept = ["up_proj", "down_proj"].map(|name| format!("model.layers.0.mlp.{name}.weight"));
    changed(&ungated, |all| all.retain(|tensor| kept.contains(&tensor.0)));
    for (checkpoint, ending) in [
        (&data("modelopt-nvfp4"), "everywhere"),
        (&half, "where both can be read"),
        (&ungated, "no gated MLP (`model.layers.0.mlp` has up and down projections, but no gate)"),
    ] {
        let printed = text(&["inspect", arg(checkpoint)], 0);
        assert!(printed.trim_end().ends_with(ending), "{printed}");
    }
}

#[test]
fn validate_passes_the_shipped_checkpoints_and_fails_a_broken_one() {
    for (name, _) in CHECKPOINTS {
        let report = json(&["validate", arg(&data(name))], 0);
        assert_eq!((&report["valid"], &report["errors"]), (&true.into(), &0.into()), "{name}: {report}");
    }
    let dir = tempfile::tempdir().unwrap();
    let from = data("modelopt-nvfp4");
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), &bytes[..bytes.len() - 1]).unwrap();
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let report = json(&["validate", arg(dir.path())], 1);
    assert_eq!(report["findings"][0]["rule"]["id"], "header");
    dualgemm().args(["validate", arg(dir.path())]).assert().code(1);
    let rules = json(&["validate", "--rules"], 0);
    assert!(rules["rules"].as_array().unwrap().len() > 10);
}

#[test]
fn reports_say_which_activation_it_is_and_what_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let c = dir.path().join("c.safetensors");
    for (checkpoint, from) in
        [("modelopt-nvfp4", "config.json: hidden_act"), ("mlp-nvfp4.gguf", "family llama")]
    {
        let checkpoint = data(checkpoint);
        let run = ["--m", "2", "--output", arg(&c), "--force", "--repeat", "1", "--no-roofline"];
        let printed = text(&[&["run", arg(&checkpoint)], &run[..]].concat(), 0);
        assert!(printed.contains(&format!("\n  activation silu ({from})\n")), "{printed}");
        let verify = ["verify", arg(&c), "--checkpoint", arg(&checkpoint), "--m", "2"];
        let report = json(&verify, 0);
        assert_eq!((&report["activation"], &report["activation_from"]), (&"silu".into(), &from.into()));
        let printed = text(&verify, 0);
        assert!(printed.contains(&format!("\n  activation silu ({from})\n")), "{printed}");
        let asked = json(&[&verify[..], &["--activation", "relu"]].concat(), 1);
        assert_eq!(asked["activation_from"], "as asked, --activation");
        assert!(asked["explanations"].to_string().contains("silu"), "{asked}");
        let printed = text(&["inspect", arg(&checkpoint)], 0);
        assert!(printed.contains(&format!("activation of dense MLP 0: silu ({from})\n")), "{printed}");
    }
}

/// Codes and block scales never change. The tensor scale is written in the other sense between ModelOpt and
/// compressed-tensors, so C may move by the rounding of a reciprocal.
#[test]
fn conversions_keep_the_product() {
    let dir = tempfile::tempdir().unwrap();
    let input = data("expected-modelopt-nvfp4.safetensors");
    let c = |checkpoint: &std::path::Path| {
        let out = dir.path().join("c.safetensors");
        run_json(&[arg(checkpoint), "--input", arg(&input), "--output", arg(&out), "--check", "none"], 0);
        tensor(&out, "c")
    };
    for (name, _) in CHECKPOINTS {
        let original = c(&data(name));
        for (to, out) in [("modelopt", "m"), ("compressed-tensors", "c.safetensors"), ("gguf", "g.gguf")] {
            let converted = dir.path().join(format!("{name}-{out}"));
            let (from, mut args) = (data(name), vec!["convert"]);
            args.extend([arg(&from), arg(&converted), "--to", to]);
            args.extend(name.ends_with("gguf").then_some("--mlp-only"));
            let report = json(&args, 0);
            assert!(report["linears"].as_u64().unwrap() >= 3);
            let error = rel_l2(&c(&converted), &original);
            assert!(error <= 3e-7, "{name} to {to}: {error:e}");
            assert_eq!(json(&["validate", arg(&converted)], 0)["errors"], 0, "{name} to {to}");
        }
    }
}

#[test]
fn what_a_conversion_leaves_out_is_not_counted_as_written() {
    let dir = tempfile::tempdir().unwrap();
    let (from, out) = (data("modelopt-nvfp4"), dir.path().join("mlp.gguf"));
    let args = ["convert", arg(&from), arg(&out), "--to", "gguf", "--mlp-only"];
    let printed = text(&args, 0);
    assert!(printed.contains("modelopt to gguf, 3 quantized layers, 9 tensors in\n  "), "{printed}");
    assert!(
        printed.contains("left out: 4 tensors and 4 quantized layers:\n  model.embed_tokens.weight\n"),
        "{printed}"
    );
}

/// C depends on how a checkpoint is read, so reports say what was asked for against the checkpoint's own word.
#[test]
fn options_that_override_a_checkpoint_are_in_the_report() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, out) = (data("modelopt-nvfp4"), dir.path().join("c.safetensors"));
    let [ct, c] = [dir.path().join("ct"), out].map(|path| path.to_str().unwrap().to_owned());
    let reading = ["--nibble-order", "hi-lo", "--scale-layout", "linear"];
    let want = serde_json::json!(["--nibble-order hi-lo", "--scale-layout linear"]);
    for args in [
        &["run", "--m", "2", "--no-roofline", "--output", &c, arg(&checkpoint)][..],
        &["verify", "--m", "2", &c, "--checkpoint", arg(&checkpoint)],
        &["inspect", arg(&checkpoint)],
        &["validate", arg(&checkpoint)],
        &["convert", "--to", "compressed-tensors", arg(&checkpoint), &ct],
    ] {
        let args = [args, &reading].concat();
        assert_eq!(json(&args, 0)["overrides"], want, "{args:?}");
        if args[0] == "convert" {
            std::fs::remove_dir_all(&ct).unwrap();
        }
        let force: &[&str] = if args[0] == "run" { &["--force"] } else { &[] };
        let printed = text(&[&args[..], force].concat(), 0);
        assert!(printed.contains("--nibble-order hi-lo --scale-layout linear"), "{printed}");
    }
    assert!(json(&["inspect", arg(&checkpoint)], 0).get("overrides").is_none());
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
        assert!(kernels.iter().all(|k| k["kernel"].as_str().unwrap().starts_with(prefix)), "{kernels:?}");
        assert!(kernels.iter().all(|k| k["seen_on"] == serde_json::json!(seen)));
    }
    let text = text(&["doctor"], 0);
    assert!(
        text.contains("B200, GB200")
            && text.contains("tile of the fused kernel")
            && !text.contains("on a card"),
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

#[test]
fn completions_exist_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = text(&["completions", shell], 0);
        for word in ["dualgemm", "quantize", "gate-up-order"] {
            assert!(script.contains(word), "{shell} knows no {word}");
        }
        assert!(json(&["completions", shell], 0)["script"].as_str().unwrap().contains("dualgemm"));
    }
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
    // A newcomer's help fits a screen; the whole one has headings.
    let [short, long] = ["-h", "--help"].map(|how| text(&["run", how], 0));
    assert!(short.lines().count() <= 50 && !short.contains("--nibble-order"), "{short}");
    for part in [
        "--nibble-order",
        "\nMixtures of experts:\n",
        "\nReading a checkpoint that does not describe itself:\n",
    ] {
        assert!(long.contains(part), "no {part:?} in\n{long}");
    }
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
fn activations_of_every_float_type_and_both_triples_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = data("modelopt-nvfp4");
    let triple = dir.path().join("triple.safetensors");
    extract(&data("expected-modelopt-nvfp4.safetensors"), &["a_packed", "a_scale", "a_scale_2"], &triple);
    assert_eq!(run_json(&[arg(&checkpoint), "--input", arg(&triple)], 0)["a_format"], "nvfp4");
    for format in ["f32", "f16", "bf16"] {
        let args = [arg(&checkpoint), "--m", "2", "--a-format", format];
        assert_eq!(run_json(&args, 0)["a_format"], format);
    }
}

#[test]
fn activation_functions_are_applied() {
    let checkpoint = data("modelopt-nvfp4");
    for (name, kind) in [
        ("silu", "silu"),
        ("clamped-silu:0.5", "clamped_silu"),
        ("swiglustep:0.5", "swiglu_step"),
        ("swigluoai", "swiglu_oai"),
        ("gelu-tanh", "gelu_tanh"),
        ("relu", "relu"),
        ("relu2", "relu2"),
        ("identity", "identity"),
    ] {
        let args = [arg(&checkpoint), "--m", "3", "--activation", name, "--round-gate-up-to-bf16"];
        let report = run_json(&args, 0);
        let found = &report["activation"];
        let found =
            found.as_str().or_else(|| found.as_object().and_then(|o| o.keys().next()).map(String::as_str));
        assert_eq!((found, &report["activation_from"]), (Some(kind), &"as asked, --activation".into()));
    }
    let report = run_json(&[arg(&checkpoint), "--m", "1"], 0);
    assert_eq!(report["activation_from"], "config.json: hidden_act");
}

#[test]
fn plans_on_a_simulated_blackwell_card_take_the_native_kernel_and_are_right() {
    let checkpoint = data("modelopt-nvfp4");
    let args =
        [arg(&checkpoint), "--layer", "0", "--m", "2", "--a-format", "nvfp4", "--device", "sim:sm_120a"];
    // Not run_json, which says how often: without a clock it is once.
    let report = json(&[&["run"], &args[..]].concat(), 0);
    assert_eq!(report["runs"], 1);
    assert_eq!(report["plan"]["plan"]["strategy"], "native");
    assert!(report["kernel"].as_str().unwrap().starts_with("sm120a_fused"), "{report}");
    assert_eq!(report["simulated"], true);
    assert!(report.get("gflops").is_none(), "a simulated card has no clock");
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
