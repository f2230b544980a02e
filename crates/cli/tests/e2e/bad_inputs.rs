//! Bad input and wrong usage: one line on stderr that says what, where and what would be valid; exit code 2, or 3 where it is
//! this machine or build that cannot; no output file, whole or partial.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Tensors, arg, changed, data, dualgemm, extract, filled, tensors, write};
use crate::operations::{drawn, mixture, mixture_of, routing};
use dualgemm_cases::fits;
use safetensors::Dtype;

/// A run of a mixture of experts 0, 1 and 3 and a shared one.
const MIXTURE: &str = "run {dir}/mixture/m.safetensors --activation silu --m 2 --output {dir}/c.safetensors";

/// Runs with the names of files filled in, and returns the error line. The directory stays as it is.
fn error_line(dir: &Path, args: &str, code: i32) -> String {
    let before = names(dir);
    let whole = filled(dir, &args.replace("{moe}", "{mixture} --op moe").replace("{mixture}", MIXTURE));
    let output = dualgemm().args(whole.split_whitespace()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{args}: {stderr}");
    assert!(output.stdout.is_empty(), "{args}: wrote to stdout");
    assert_eq!(stderr.lines().count(), 1, "{args}: {stderr}");
    assert_eq!(names(dir), before, "{args}: left something behind");
    stderr.trim_end().replace(arg(dir), "{dir}").replace(arg(&data("")), "")
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn prepare(dir: &Path) {
    std::fs::create_dir(dir.join("empty-dir")).unwrap();
    std::fs::create_dir(dir.join("full-dir")).unwrap();
    std::fs::write(dir.join("full-dir/file"), "x").unwrap();
    for name in ["text.txt", "text.safetensors", "text.gguf", "old.svg"] {
        std::fs::write(dir.join(name), "these are not the tensors you are looking for").unwrap();
    }
    std::fs::write(dir.join("empty.safetensors"), "").unwrap();
    let whole = std::fs::read(data("modelopt-nvfp4/model.safetensors")).unwrap();
    std::fs::write(dir.join("truncated.safetensors"), &whole[..whole.len() - 1]).unwrap();
    write(&dir.join("wide.safetensors"), &[("a", Dtype::F32, &[2, 592], &[0; 4 * 2 * 592])]);
    write(&dir.join("ints.safetensors"), &[("a", Dtype::I32, &[1, 576], &[0; 4 * 576])]);
    write(&dir.join("no-rows.safetensors"), &[("a", Dtype::F32, &[0, 576], &[])]);
    write(&dir.join("odd.safetensors"), &[("odd.weight", Dtype::F32, &[2, 24], &[0; 4 * 48])]);
    extract(&data("expected-modelopt-nvfp4.safetensors"), &["a_packed"], &dir.join("no-scale.safetensors"));
    changed(&dir.join("no-input-scale"), |all| {
        all.retain(|tensor| tensor.0 != "model.layers.0.mlp.gate_proj.input_scale");
    });
    changed(&dir.join("twice"), |_| ());
    let config = dir.join("twice/config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(config, text.replacen('{', r#"{ "hidden_act": "relu", "#, 1)).unwrap();
    let floats = ("b.weight", Dtype::F32, [16, 32], vec![0; 4 * 16 * 32]);
    let f8 = ("a.weight", Dtype::F8_E4M3, [16, 32], vec![0; 16 * 32]);
    write(&dir.join("f8.safetensors"), &[f8, floats.clone()]);
    std::fs::create_dir(dir.join("gpt2")).unwrap();
    write(&dir.join("gpt2/model.safetensors"), &[floats]);
    std::fs::write(dir.join("gpt2/config.json"), r#"{ "model_type": "gpt2" }"#).unwrap();
    let triple = |name: &str, scale: u8, global: f32| {
        let mut scales = [0x38; 36];
        scales[3] = scale;
        let global = global.to_le_bytes();
        let tensors: [(&str, Dtype, &[usize], &[u8]); 4] = [
            ("a_packed", Dtype::U8, &[1, 288], &[0x22; 288]),
            ("a_scale", Dtype::F8_E4M3, &[1, 36], &scales),
            ("a_scale_2", Dtype::F32, &[1], &global),
            ("a", Dtype::F32, &[1, 576], &[0; 4 * 576]),
        ];
        write(&dir.join(name), &tensors[..if name.starts_with("both") { 4 } else { 3 }]);
    };
    triple("both.safetensors", 0x38, 1.0);
    triple("nan-scale.safetensors", 0x7F, 1.0);
    triple("negative-scale.safetensors", 0x81, 1.0);
    triple("zero-global.safetensors", 0x38, 0.0);
    prepare_mixtures(dir);
}

/// Mixtures, routings of two tokens for them, and a number that nvfp4 does not have.
fn prepare_mixtures(dir: &Path) {
    let made = dir.join("made");
    std::fs::create_dir(&made).unwrap();
    let checkpoint = mixture(&made, &[0, 1, 3], true);
    let (whole, floats) = (tensors(&checkpoint), tensors(&made.join("floats.safetensors")));
    let keep = |name: &str, change: &dyn Fn(&mut Tensors), config: Option<&str>| {
        let (folder, mut all) = (dir.join(name), whole.clone());
        change(&mut all);
        std::fs::create_dir(&folder).unwrap();
        match config {
            None if name == "mixture" => {
                std::fs::copy(&checkpoint, folder.join("m.safetensors")).map(drop).unwrap();
            }
            _ => write(&folder.join("m.safetensors"), &all),
        }
        if let Some(text) = config {
            std::fs::write(folder.join("config.json"), text).unwrap();
        }
    };
    keep("mixture", &|_| (), None);
    keep("two-a-token", &|_| (), Some(r#"{"num_experts_per_tok": 2}"#));
    keep("none-a-token", &|_| (), Some(r#"{"num_experts_per_tok": 0}"#));
    // A shared expert in 16 bits, and what else may stand there: none of it is left out silently.
    let in_floats = |all: &mut Tensors, part: &str| {
        all.retain(|t| !t.0.contains("shared"));
        all.extend(floats.iter().filter(|t| t.0.contains(part)).cloned());
    };
    keep("float-shared", &|all| in_floats(all, "shared"), None);
    keep("shared-down", &|all| in_floats(all, "shared_experts.down"), None);
    let gate = ("model.layers.5.mlp.shared_gate.weight", Dtype::BF16, vec![1, 48], drawn(5, 48));
    keep("gated", &|all| all.push((gate.0.into(), gate.1, gate.2.clone(), gate.3.clone())), None);
    let huge =
        |t: &mut (String, Dtype, Vec<usize>, Vec<u8>)| t.0 = t.0.replace("experts.3.", "experts.2147483653.");
    keep("huge-number", &|all| all.iter_mut().for_each(huge), None);
    // The down projection of another expert has its shape in the place of gate and up: N = 48, K = 64.
    let other = tensors(&mixture_of(&made, &[1], [64, 64, 48]));
    let odd = |all: &mut Tensors| {
        all.retain(|t| !t.0.contains("experts.1."));
        all.extend(other.iter().filter(|t| t.0.contains("experts.1.")).cloned());
    };
    keep("odd-shape", &odd, None);
    keep("no-down", &|all| all.retain(|t| !t.0.contains("experts.1.down_proj")), None);
    for (name, ids, second, shape, wide) in [
        ("beyond", [0, 1, 3, 4], 0.5, [2, 2], true),
        ("negative", [0, 1, -2, 1], 0.5, [2, 2], true),
        ("absent", [0, 1, 2, 3], 0.5, [2, 2], false),
        ("beyond-32-bits", [0, 1, 3, i64::from(u32::MAX) + 2], 0.5, [2, 2], true),
        ("nan", [0, 1, 3, 0], f32::NAN, [2, 2], true),
        ("long", [0, 1, 3, 0], 0.5, [4, 1], true),
        ("routing", [0, 1, 3, 0], 0.5, [2, 2], true),
    ] {
        routing(&dir.join(format!("{name}.safetensors")), &ids, &[0.5, 0.5, second, 0.5], shape, wide);
    }
    let mut values = [1f32; 48];
    values[5] = f32::NAN;
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
    write(&dir.join("nan-a.safetensors"), &[("x", Dtype::F32, [1, 48], bytes)]);
}

#[test]
fn every_case_is_one_line_with_its_code_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let mut wrong = Vec::new();
    let case = |line: &'static str| {
        let of = |arrow, code| line.split_once(arrow).map(|(args, says)| (args, code, says));
        of(" => ", 2).or_else(|| of(" =3> ", 3))
    };
    for (args, code, says) in include_str!("bad_inputs.txt").lines().filter_map(case) {
        let line = error_line(dir.path(), args, code);
        if !fits(&line, &format!("error: {says}…")) {
            wrong.push(format!("dualgemm {args}\n    says   {line}\n    should {says}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn a_tensor_that_a_whole_mlp_knows_nothing_of_is_named() {
    let norm = ("model.layers.0.mlp.ffn_sub_norm.weight".into(), Dtype::F32, vec![1536], vec![0; 4 * 1536]);
    let dir = tempfile::tempdir().unwrap();
    changed(&dir.path().join("ckpt"), |all| all.push(norm));
    let line = error_line(dir.path(), "run {dir}/ckpt --op mlp --m 1 --output {dir}/c", 2);
    assert!(
        line.contains("model.layers.0.mlp.ffn_sub_norm.weight: a tensor in `model.layers.0.mlp`"),
        "{line}"
    );
    // Gate and up come before it.
    crate::common::run_json(&[arg(&dir.path().join("ckpt")), "--m", "1"], 0);
}

#[test]
fn outputs_replace_neither_shards_nor_configurations() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    changed(dir, |_| ());
    let whole = dir.join("model.safetensors");
    let (gate, rest): (Tensors, Tensors) =
        tensors(&whole).into_iter().partition(|t| t.0.contains("gate_proj"));
    std::fs::remove_file(whole).unwrap();
    let mut map = serde_json::Map::new();
    for (shard, tensors) in [("a.safetensors", gate), ("b.safetensors", rest)] {
        write(&dir.join(shard), &tensors);
        map.extend(tensors.into_iter().map(|tensor| (tensor.0, shard.into())));
    }
    let index = serde_json::json!({ "weight_map": map }).to_string();
    std::fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    for output in ["a.safetensors", "b.safetensors", "config.json", "model.safetensors.index.json"] {
        let index = "{dir}/model.safetensors.index.json";
        for args in [
            format!("run {index} --layer 0 --m 1 --output {{dir}}/{output}"),
            format!("convert {index} {{dir}}/{output} --to modelopt"),
        ] {
            let line = error_line(dir, &args, 2);
            assert!(line.contains("one of the files that are read"), "{args}: {line}");
        }
    }
}

#[test]
fn an_instruction_set_that_is_missing_here_is_refused() {
    let (doctor, dir) = (crate::common::json(&["doctor"], 0), tempfile::tempdir().unwrap());
    for isa in doctor["instruction_sets"].as_array().unwrap() {
        if isa["available"] == false {
            let name = isa["isa"].as_str().unwrap();
            let line = error_line(dir.path(), &format!("run {{ckpt}} --m 1 --isa {name}"), 3);
            assert!(line.contains(&format!("this machine has no {name}; its best is ")), "{line}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_report_that_cannot_be_written_says_where() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = std::process::Command::new(assert_cmd::cargo::cargo_bin("dualgemm"))
        .args(["bench", "--list"])
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let line = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(line.starts_with("error: stdout: No space left"), "{line}");
}

#[test]
fn a_failed_run_leaves_an_older_result_alone() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("c.safetensors");
    std::fs::write(&out, "older").unwrap();
    let (checkpoint, input) = (data("modelopt-nvfp4"), data("mlp-bf16.safetensors"));
    let args = ["run", "--force", arg(&checkpoint), "--input", arg(&input), "--output", arg(&out)];
    dualgemm().args(args).assert().code(2);
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "older");
}

/// A signal removes what is half written. When it arrives is a matter of luck: until it has hit often enough.
#[cfg(unix)]
#[test]
fn signals_leave_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let (from, out) = (data("mlp-bf16.safetensors"), dir.path().join("model"));
    let mut hits = 0;
    for signal in ["TERM", "INT", "HUP"].into_iter().cycle().take(300) {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("dualgemm"));
        let args = ["quantize", arg(&from), arg(&out), "--producer", "modelopt"];
        let mut child = command.args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while names(dir.path()).is_empty() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let kill = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        let ended = child.wait().unwrap();
        assert!(kill.is_ok());
        if ended.code().is_none() {
            hits += 1;
            let left = names(dir.path());
            assert!(left.iter().all(|name| name == "model"), "SIG{signal} left {left:?}");
        }
        let _ = std::fs::remove_dir_all(&out);
        if hits == 6 {
            return;
        }
    }
    panic!("{hits} of 300 runs were hit");
}

#[test]
fn names_that_json_cannot_hold_are_refused_before_the_work() {
    use std::os::unix::ffi::OsStrExt as _;
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join(std::ffi::OsStr::from_bytes(b"c\xff.safetensors"));
    let checkpoint = data("modelopt-nvfp4");
    let run = |json: &[&str]| {
        let args = ["run", arg(&checkpoint), "--m", "1", "--no-roofline", "--output"];
        dualgemm().args(args).arg(&out).args(json).output().unwrap()
    };
    let output = run(&["--json"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is not UTF-8, which JSON holds alone"));
    assert!(!out.exists());
    assert_eq!(run(&[]).status.code(), Some(0));
    assert!(out.exists());
}

#[test]
fn with_json_the_error_is_the_one_document() {
    for args in [&["run", "/nothing"][..], &["run", "--layer"], &["validate", "/nothing"]] {
        let report = crate::common::json(args, 2);
        assert_eq!(report["exit_code"], 2);
        assert!(!report["error"].as_str().unwrap().is_empty());
    }
}
