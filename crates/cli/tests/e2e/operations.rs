//! `run`, `verify`, `bench` and `inspect` of linear layers, whole MLPs and mixtures of experts.

mod refused;

use std::path::{Path, PathBuf};

use crate::common::{Tensors, arg, data, dualgemm, json, refusal, run_json, tensor, text, write};
use half::bf16;
use safetensors::Dtype;

/// Numbers that look drawn, and are the same everywhere.
fn drawn(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1 << 24) as f32 - 0.5)
    };
    (0..len).flat_map(|_| next().to_le_bytes()).collect()
}

/// Weights that stay in floats, as lm_head does, with a bias, against sums in f64 made here.
#[test]
fn a_linear_layer_in_floats_is_computed_where_it_lies_close() {
    let dir = tempfile::tempdir().unwrap();
    let (from, path, c) =
        (dir.path().join("f.safetensors"), dir.path().join("q.safetensors"), dir.path().join("c"));
    let bytes = drawn(7, 40 * 48);
    write(
        &from,
        &[
            ("lm_head.weight", Dtype::BF16, vec![40, 48], bytes.clone()),
            ("lm_head.bias", Dtype::BF16, vec![40], drawn(8, 40)),
            ("model.layers.0.self_attn.o_proj.weight", Dtype::BF16, vec![48, 48], drawn(9, 48 * 48)),
        ],
    );
    json(&["quantize", arg(&from), arg(&path), "--producer", "modelopt"], 0);
    let a = dir.path().join("a.safetensors");
    write(&a, &[("a", Dtype::BF16, [3, 48], drawn(10, 3 * 48))]);
    let options = ["--op", "linear", "--module", "lm_head", "--input", arg(&a), "--output", arg(&c)];
    let report = run_json(&[&[arg(&path)], &options[..], &["--check", "all"]].concat(), 0);
    for (key, want) in [("m", 3), ("n", 40), ("k", 48), ("rows_compared", 3)] {
        assert_eq!(report[key], want, "{report}");
    }
    assert_eq!((&report["dtype"], &report["right"]), (&"BF16".into(), &true.into()));
    let (x, w, bias) = (tensor(&a, "a"), tensor(&path, "lm_head.weight"), tensor(&path, "lm_head.bias"));
    for (at, found) in tensor(&c, "c").into_iter().enumerate() {
        let (row, n) = (at / 40, at % 40);
        let want = bias[n] + (0..48).map(|k| x[row * 48 + k] * w[n * 48 + k]).sum::<f64>();
        assert!((found - want).abs() < 1e-5, "[{row}, {n}]: {found}, {want}");
    }
    let run = [&["run", arg(&path)], &options[..4]].concat();
    let text = text(&run, 0);
    assert!(text.contains("BF16 [40, 48], read where they lie") && text.contains("right"), "{text}");
    for (more, want) in [
        (&["--quantize", "dynamic"][..], "--quantize: is for weights in 4 bits; these are BF16"),
        (&["--out-dtype", "nvfp4"], "--out-dtype nvfp4: is for weights in 4 bits"),
        (&["--device", "sim:sm_90a"], "--device: weights in BF16 are multiplied on the processor alone"),
        (&["--activation", "relu"], "--activation: is for weights in 4 bits"),
    ] {
        let message = refusal(&[&run[..], more].concat(), 2);
        assert!(message.contains(want), "{message}");
    }
}

/// Routed experts alone, in a file of their own: N, K and the features of down.
fn mixture_of(dir: &Path, experts: &[usize], [n, k, h]: [usize; 3]) -> PathBuf {
    let mut floats: Tensors = Vec::new();
    for expert in experts {
        for (half, shape) in [("gate", [n, k]), ("up", [n, k]), ("down", [h, n])] {
            let name = format!("model.layers.5.mlp.experts.{expert}.{half}_proj.weight");
            floats.push((name, Dtype::BF16, shape.to_vec(), drawn(3, shape[0] * shape[1])));
        }
    }
    let (from, to) = (dir.join("others-floats.safetensors"), dir.join("others.safetensors"));
    write(&from, &floats);
    json(&["quantize", arg(&from), arg(&to), "--producer", "modelopt"], 0);
    to
}

/// A layer with these routed experts and perhaps a shared one, quantized: N = 64, K = 48.
fn mixture(dir: &Path, experts: &[usize], shared: bool) -> PathBuf {
    let mut floats: Tensors = Vec::new();
    let mut add = |path: String, seed: u64| {
        for (at, (half, shape)) in
            [("gate", [64, 48]), ("up", [64, 48]), ("down", [48, 64])].into_iter().enumerate()
        {
            let bytes = drawn(seed * 3 + at as u64 + 1, shape[0] * shape[1]);
            floats.push((format!("{path}.{half}_proj.weight"), Dtype::BF16, shape.to_vec(), bytes));
        }
    };
    for &expert in experts {
        add(format!("model.layers.5.mlp.experts.{expert}"), expert as u64);
    }
    if shared {
        add("model.layers.5.mlp.shared_experts".into(), 99);
    }
    floats.push(("lm_head.weight".into(), Dtype::BF16, vec![32, 48], drawn(7, 32 * 48)));
    let (from, to) = (dir.join("floats.safetensors"), dir.join("mixture.safetensors"));
    write(&from, &floats);
    json(&["quantize", arg(&from), arg(&to), "--producer", "modelopt"], 0);
    to
}

/// A routing with 64-bit or 32-bit numbers.
fn routing(path: &Path, ids: &[i64], weights: &[f32], shape: [usize; 2], wide: bool) {
    let (dtype, bytes) = match wide {
        true => (Dtype::I64, ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>()),
        false => (Dtype::I32, ids.iter().flat_map(|&id| (id as i32).to_le_bytes()).collect()),
    };
    let weights = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect::<Vec<u8>>();
    write(path, &[("topk_ids", dtype, shape, bytes), ("topk_weights", Dtype::F32, shape, weights)]);
}

#[test]
fn every_linear_layer_is_right_and_verifies() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("c.safetensors");
    for checkpoint in ["modelopt-nvfp4", "compressed-tensors-nvfp4a16"] {
        let checkpoint = data(checkpoint);
        for (module, shape) in [("self_attn.k_proj", [192, 576]), ("mlp.down_proj", [576, 1536])] {
            let module = format!("model.layers.0.{module}");
            let of = ["--op", "linear", "--module", &module];
            for how in [&["--m", "1"][..], &["--m", "17", "--a-format", "nvfp4"]] {
                let run = [&[arg(&checkpoint), "--output", arg(&out)], &of[..], how].concat();
                let report = run_json(&run, 0);
                assert_eq!(report["right"], true);
                assert_eq!((&report["op"], &report["module"]), (&"linear".into(), &module.as_str().into()));
                assert_eq!([&report["n"], &report["k"]], [shape[0], shape[1]]);
                let matrices = report["matrices"].as_array().unwrap();
                assert_eq!((matrices.len(), &matrices[0]["role"]), (1, &"linear".into()));
                assert!(report["layer"].is_null() && report.get("activation").is_none(), "{report}");
                let verify = ["verify", arg(&out), "--checkpoint", arg(&checkpoint)];
                json(&[&verify[..], &of, how].concat(), 0);
            }
            // Another layer's result is wrong.
            if shape == [192, 576] {
                let other = ["--op", "linear", "--module", "model.layers.0.self_attn.v_proj", "--m", "17"];
                let verify = ["verify", arg(&out), "--checkpoint", arg(&checkpoint)];
                json(&[&verify[..], &other, &["--a-format", "nvfp4"]].concat(), 1);
            }
        }
    }
}

/// A whole MLP is its two products, one after the other.
#[test]
fn an_mlp_is_gate_up_and_then_down_exact() {
    let dir = tempfile::tempdir().unwrap();
    let [between, chained, whole] =
        ["h", "y", "w"].map(|name| dir.path().join(format!("{name}.safetensors")));
    let checkpoint = data("modelopt-nvfp4");
    let input = ["--m", "17", "--a-format", "bf16"];
    for format in ["f32", "f16", "bf16", "nvfp4"] {
        let gate_up = [arg(&checkpoint), "--out-dtype", format, "--output", arg(&between)];
        run_json(&[&gate_up[..], &input].concat(), 0);
        let down = ["--op", "linear", "--module", "model.layers.0.mlp.down_proj", "--input", arg(&between)];
        run_json(&[&[arg(&checkpoint), "--output", arg(&chained)], &down[..]].concat(), 0);
        let mlp = ["--op", "mlp", "--between", format];
        let run = [&[arg(&checkpoint), "--output", arg(&whole)], &mlp[..], &input].concat();
        let report = run_json(&run, 0);
        assert_eq!((&report["right"], &report["rows_compared"]), (&true.into(), &17.into()));
        let roles: Vec<_> = report["matrices"].as_array().unwrap().iter().map(|m| &m["role"]).collect();
        assert_eq!(roles, ["gate", "up", "down"]);
        assert_eq!((&report["n"], &report["k"]), (&576.into(), &576.into()));
        assert!(tensor(&whole, "c") == tensor(&chained, "c"), "{format}");
        let verify = ["verify", arg(&whole), "--checkpoint", arg(&checkpoint)];
        json(&[&verify[..], &mlp, &input].concat(), 0);
        // What is between makes a difference that verify sees.
        let other = if format == "nvfp4" { "bf16" } else { "nvfp4" };
        json(&[&verify[..], &["--op", "mlp", "--between", other], &input].concat(), 1);
    }
}

/// Weights alone come with no scale for what is between, so nvfp4 takes that of all rows.
#[test]
fn a_dynamic_scale_between_is_that_of_every_row() {
    let checkpoint = data("compressed-tensors-nvfp4a16");
    let args = [arg(&checkpoint), "--op", "mlp", "--between", "nvfp4", "--m", "9", "--check", "2"];
    let report = run_json(&args, 0);
    assert_eq!((&report["right"], &report["rows_compared"]), (&true.into(), &2.into()));
    assert_eq!(report["between"]["nvfp4"]["global_scale"], "dynamic", "{}", report["between"]);
}

#[test]
fn a_mixture_of_one_expert_is_its_mlp_exact() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = mixture(dir.path(), &[0, 1, 3], false);
    let [file, one, whole] = ["r", "y", "w"].map(|name| dir.path().join(format!("{name}.safetensors")));
    let silu = ["--activation", "silu", "--m", "3"];
    for wide in [false, true] {
        routing(&file, &[3, 3, 3], &[1.0; 3], [3, 1], wide);
        let mlp = [arg(&checkpoint), "--op", "mlp", "--expert", "3", "--output", arg(&one)];
        run_json(&[&mlp[..], &silu].concat(), 0);
        let moe = [arg(&checkpoint), "--op", "moe", "--routing", arg(&file), "--output", arg(&whole)];
        let report = run_json(&[&moe[..], &silu].concat(), 0);
        assert_eq!((&report["routing"]["rows"], &report["routing"]["experts"]), (&3.into(), &1.into()));
        let experts: Vec<_> = report["matrices"].as_array().unwrap().iter().map(|m| &m["expert"]).collect();
        assert_eq!(experts, [3, 3, 3]);
        assert!(tensor(&whole, "c") == tensor(&one, "c"));
    }
    // Skipped experts leave zeros.
    routing(&file, &[-1, 3, -1], &[f32::NAN, 0.5, 1.0], [3, 1], true);
    let moe = [arg(&checkpoint), "--op", "moe", "--routing", arg(&file), "--output", arg(&whole)];
    assert_eq!(run_json(&[&moe[..], &silu].concat(), 0)["routing"]["rows"], 1);
    let c = tensor(&whole, "c");
    assert!(c[..48].iter().chain(&c[96..]).all(|c| *c == 0.0) && c[48..96].iter().all(|c| *c != 0.0));
    // No expert at all: nothing to compute, and no rate that is not a number.
    routing(&file, &[-1; 3], &[0.5; 3], [3, 1], true);
    let output = dualgemm()
        .args(["run", "--force", "--json", "--a-format", "nvfp4"])
        .args(moe)
        .args(silu)
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["routing"]["rows"], &report["right"]), (&0.into(), &true.into()));
    assert!(report["roofline_fraction"].as_f64() >= Some(0.0), "{report}");
    assert!(tensor(&whole, "c").iter().all(|c| *c == 0.0));
}

#[test]
fn mixtures_are_right_and_verify_with_the_same_options_only() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = mixture(dir.path(), &[0, 1, 2, 3, 4], true);
    let out = dir.path().join("c.safetensors");
    let of = ["--op", "moe", "--layer", "5", "--activation", "silu", "--top-k", "2"];
    let ways = [
        &["--m", "40"][..],
        &["--m", "1", "--a-format", "nvfp4", "--out-dtype", "bf16"],
        &["--m", "6", "--router-weights", "input", "--between", "f32"],
        &["--m", "6", "--routed-only", "--out-dtype", "f16", "--seed", "3"],
    ];
    for how in ways {
        let report = run_json(&[&[arg(&checkpoint), "--output", arg(&out)], &of[..], how].concat(), 0);
        assert_eq!(report["right"], true, "{how:?}");
        let shared = report["matrices"].as_array().unwrap().iter().filter(|m| m["shared"] == true).count();
        assert_eq!(shared, if how.contains(&"--routed-only") { 0 } else { 3 });
        let options: Vec<&str> = match how.iter().position(|arg| *arg == "--out-dtype") {
            Some(at) => [&how[..at], &how[at + 2..]].concat(),
            None => how.to_vec(),
        };
        let verify = ["verify", arg(&out), "--checkpoint", arg(&checkpoint)];
        let verified = json(&[&verify[..], &of, &options].concat(), 0);
        assert_eq!(verified["routing"], report["routing"]);
        let other = match how.contains(&"--seed") {
            true => options.iter().map(|arg| if *arg == "3" { "4" } else { arg }).collect(),
            false => [&options[..], &["--routed-only"]].concat(),
        };
        json(&[&verify[..], &of, &other].concat(), 1);
    }
}

/// Llama 4 multiplies what goes into its experts.
#[test]
fn weights_of_a_router_go_where_the_family_has_them() {
    let dir = tempfile::tempdir().unwrap();
    mixture(dir.path(), &[0, 1, 2], true);
    let [from, to, out] = ["from", "to", "c.safetensors"].map(|name| dir.path().join(name));
    std::fs::create_dir(&from).unwrap();
    std::fs::rename(dir.path().join("floats.safetensors"), from.join("model.safetensors")).unwrap();
    let outputs = |model_type: &str, how: &[&str]| {
        let config = serde_json::json!({ "model_type": model_type, "num_experts_per_tok": 2 });
        std::fs::write(from.join("config.json"), config.to_string()).unwrap();
        let _ = std::fs::remove_dir_all(&to);
        json(&["quantize", arg(&from), arg(&to), "--producer", "modelopt"], 0);
        let moe = [arg(&to), "--op", "moe", "--m", "3", "--output", arg(&out)];
        let report = run_json(&[&moe[..], how].concat(), 0);
        (report["routing"]["router_weights"].clone(), tensor(&out, "c"))
    };
    let inputs = outputs("qwen3_moe", &["--router-weights", "input"]);
    assert!(outputs("llama4_text", &[]) == inputs);
    assert_eq!(inputs.0, "input");
    let plain = outputs("qwen3_moe", &[]);
    assert!(outputs("llama4_text", &["--router-weights", "output"]) == plain && plain.1 != inputs.1);
}

/// The kernels that a card runs, on a simulated one: the same reports, checked against the same reference.
#[test]
fn whole_mlps_and_mixtures_run_on_a_simulated_card() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = mixture(dir.path(), &[0, 1, 3], true);
    let [out, file] = ["c", "r"].map(|name| dir.path().join(format!("{name}.safetensors")));
    let common = [arg(&checkpoint), "--activation", "silu"];
    let card = ["--device", "sim:sm_90a", "--output", arg(&out)];
    // Expert 1 has no token, so 3 is the second that is packed.
    routing(&file, &[3, 0, -1, 3, 0, 3], &[0.5, 1.5, 1.0, 2.0, -0.25, 1.0], [3, 2], false);
    let ways = [
        &["--op", "mlp", "--expert", "1", "--m", "5", "--a-format", "bf16"][..],
        &["--op", "mlp", "--expert", "3", "--m", "2", "--a-format", "f16", "--between", "f16"],
        &["--op", "moe", "--top-k", "2", "--m", "5", "--a-format", "bf16"],
        &["--op", "moe", "--routing", arg(&file), "--m", "3", "--a-format", "f16", "--routed-only"],
    ];
    for how in ways {
        for out_dtype in ["f32", "bf16"] {
            let run = [&common[..], &card, how, &["--out-dtype", out_dtype]].concat();
            let report = run_json(&run, 0);
            assert_eq!((&report["right"], &report["simulated"]), (&true.into(), &true.into()), "{how:?}");
            assert_eq!(report["device"], "sim:sm_90a");
            let verify = ["verify", arg(&out), "--checkpoint"];
            json(&[&verify[..], &common, how].concat(), 0);
        }
    }
    let refused = |more: &[&str], want: &[&str]| {
        let stderr = refusal(&[&["run", "--force"], &common[..], &card, more].concat(), 3);
        assert!(want.iter().all(|want| stderr.contains(want)), "{more:?}: {stderr}");
    };
    let moe = ["--op", "moe", "--top-k", "2", "--m", "2"];
    let f32 = ["--a-format", "f32"];
    refused(
        &[&moe[..], &f32].concat(),
        &["A of a mixture is f32; on a GPU f16 or bf16 is needed", "--device cpu computes"],
    );
    refused(
        &[&moe[..], &["--a-format", "f16", "--router-weights", "input"]].concat(),
        &["what the router's weights multiply is A; on a GPU the output of the experts is needed"],
    );
    let mlp = ["--op", "mlp", "--expert", "1", "--m", "2"];
    refused(&[&mlp[..], &f32].concat(), &["A is f32, which tensor cores do not multiply"]);
    refused(
        &[&mlp[..], &["--a-format", "f16", "--between", "nvfp4"]].concat(),
        &["C of gate and up is nvfp4", "with a dynamic scale; on a GPU a static scale, or f16 or bf16"],
    );
}

#[test]
fn bench_measures_every_operation() {
    for (op, more, name, flops) in [
        ("linear", &[][..], "linear", 2.0 * 3.0 * 32.0 * 64.0),
        ("mlp", &["--between", "f16", "--team"], "mlp", 6.0 * 3.0 * 32.0 * 64.0),
        ("moe", &["--experts", "5", "--top-k", "2"], "moe 2 of 5", 12.0 * 3.0 * 32.0 * 64.0),
    ] {
        let args = ["bench", "--shapes", "3x32x64", "--smoke", "--a-format", "bf16,nvfp4", "--op", op];
        let report = json(&[&args[..], more].concat(), 0);
        let rows = report["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 2);
        for row in rows {
            assert_eq!(row["op"], name);
            let between = match op {
                "linear" => serde_json::Value::Null,
                "mlp" => "f16".into(),
                _ => "bf16".into(),
            };
            assert_eq!(row["between"], between);
            assert!(row["rel_l2"].as_f64().unwrap() < 1e-2, "{row}");
            let found = row["gflops"].as_f64().unwrap() * row["median_us"].as_f64().unwrap() * 1e3;
            assert!((found / flops - 1.0).abs() < 1e-9, "{op}: {found}, want {flops}");
        }
    }
}

#[test]
fn inspect_tells_of_every_matrix() {
    let checkpoint = data("modelopt-nvfp4");
    let report = json(&["inspect", arg(&checkpoint)], 0);
    let modules = report["modules"].as_array().unwrap();
    let of = |name: &str| modules.iter().find(|m| m["name"] == name).map(|m| (&m["format"], &m["shape"]));
    let shape = serde_json::json!([192, 576]);
    assert_eq!(of("model.layers.0.self_attn.k_proj"), Some((&"nvfp4".into(), &shape)));
    assert_eq!(of("model.layers.0.input_layernorm"), None);
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = mixture(dir.path(), &[0, 1, 3], true);
    let shown = text(&["inspect", arg(&checkpoint)], 0);
    let pictures = dir.path().join("pictures.safetensors");
    let name = "model.visual.blocks.0.mlp.gate_proj.weight";
    write(&pictures, &[(name, Dtype::BF16, [32, 48], drawn(7, 32 * 48))]);
    let seen = text(&["inspect", arg(&pictures), "--convention", "modelopt"], 0);
    let line = "1 matrix of pictures and sound, such as model.visual.blocks.0.mlp.gate_proj: bf16\n";
    assert!(seen.contains(line), "{seen}");
    for line in [
        "matrices of model.layers.5\n",
        "  nvfp4 [48, 64]           mlp.experts.*.down_proj (3), mlp.shared_experts.down_proj\n",
        "lm_head                    bf16 [32, 48]\n",
    ] {
        assert!(shown.contains(line), "no {line:?} in\n{shown}");
    }
}
