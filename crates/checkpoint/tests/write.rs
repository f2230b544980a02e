//! Written checkpoints, read back.

mod common;

use std::collections::BTreeSet;

use common::{
    Fixture, Weight, assert_has, assert_starts, compressed_config, message, modelopt_config, testdata,
};
use dualgemm_checkpoint::write::{LinearOut, Model, Output, WriteReport, write};
use dualgemm_checkpoint::{
    Checkpoint, Dtype, GateUpOrder, Half, OpenOptions, TensorFiles, TensorOut, validate,
};
use dualgemm_formats::{BlockFormat, GlobalScale, GlobalScaleSource, QuantizedMatrix, ScaleLayout};
use serde_json::{Value, json};

fn defaults() -> OpenOptions {
    OpenOptions::default()
}

fn convert(c: &Checkpoint, to: &std::path::Path, output: Output) -> (Checkpoint, WriteReport) {
    // GGUF of these models, and what is read of it, is MLPs alone.
    let mlp_only = output == Output::Gguf || c.convention().name == "gguf";
    let report = write(to, output, &Model { mlp_only, ..c.export().unwrap() }).unwrap();
    for file in &report.files {
        assert!(file.exists(), "{}", file.display());
    }
    (Checkpoint::open(to, &defaults()).unwrap(), report)
}

fn bytes(files: &TensorFiles, name: &str) -> Vec<u8> {
    files.get(name).unwrap_or_else(|| panic!("{name}")).bytes.to_vec()
}

fn names(files: &TensorFiles) -> BTreeSet<String> {
    files.tensors().map(|t| t.name.to_string()).collect()
}

fn assert_same_layer(a: &Checkpoint, b: &Checkpoint) {
    let (x, y) = (a.gate_up(0).unwrap(), b.gate_up(0).unwrap());
    for (x, y) in
        [(&x.gate, &y.gate), (&x.up, &y.up), (&a.down(0).unwrap().weight, &b.down(0).unwrap().weight)]
    {
        assert_eq!((x.rows(), x.k(), x.format()), (y.rows(), y.k(), y.format()));
        for row in 0..x.rows() {
            assert_eq!(x.row_codes(row), y.row_codes(row));
            assert!((0..x.blocks()).all(|b| x.scale_byte(row, b) == y.scale_byte(row, b)));
        }
    }
}

#[test]
fn the_same_convention_gives_the_same_tensors_exact() {
    let dir = tempfile::tempdir().unwrap();
    for (name, output) in [
        ("modelopt-nvfp4", Output::Modelopt),
        ("compressed-tensors-nvfp4", Output::CompressedTensors),
        ("compressed-tensors-nvfp4a16", Output::CompressedTensors),
    ] {
        let a = Checkpoint::open(&testdata(name), &defaults()).unwrap();
        let (b, report) = convert(&a, &dir.path().join(name), output);
        assert_eq!(names(a.files()), names(b.files()));
        assert_eq!(report.tensors, a.files().tensors().count());
        assert!(report.skipped.is_empty());
        for t in a.files().tensors() {
            let back = b.files().get(t.name).unwrap();
            assert_eq!((t.dtype, t.shape), (back.dtype, back.shape), "{}", t.name);
            assert!(t.bytes == back.bytes, "{}", t.name);
        }
        // Configurations say the same, apart from versions and observers.
        let config = |c: &Checkpoint| c.files().config().unwrap().value.clone();
        assert_eq!(config(&a)["hidden_size"], config(&b)["hidden_size"]);
        let q = |c: &Checkpoint, path| {
            config(c)["quantization_config"].pointer(path).cloned().unwrap_or(Value::Null)
        };
        for path in [
            "/quant_method",
            "/quant_algo",
            "/format",
            "/config_groups/group_0/targets",
            "/config_groups/group_0/weights/group_size",
            "/config_groups/group_0/input_activations/dynamic",
        ] {
            assert_eq!(q(&a, path), q(&b, path), "{path}");
        }
        assert!(validate(&dir.path().join(name), &defaults()).is_empty());
    }
}

#[test]
fn modelopt_to_compressed_tensors_and_back_keeps_every_weight() {
    let dir = tempfile::tempdir().unwrap();
    let a = Checkpoint::open(&testdata("modelopt-nvfp4"), &defaults()).unwrap();
    let (ct, _) = convert(&a, &dir.path().join("ct"), Output::CompressedTensors);
    assert_eq!(ct.convention().name, "compressed-tensors");
    let (back, _) = convert(&ct, &dir.path().join("back"), Output::Modelopt);
    assert_eq!(names(a.files()), names(back.files()));
    for t in a.files().tensors() {
        if t.name.ends_with("weight_scale_2") || t.name.ends_with("input_scale") {
            // The file in between holds a reciprocal: it comes back within one unit in the last place.
            let bits = |b: &[u8]| i64::from(u32::from_le_bytes(b.try_into().unwrap()));
            let back = bytes(back.files(), t.name);
            assert!((bits(t.bytes) - bits(&back)).abs() <= 1, "{}", t.name);
        } else {
            assert!(t.bytes == bytes(back.files(), t.name), "{}", t.name);
        }
    }
    assert_same_layer(&a, &back);
}

#[test]
fn powers_of_two_survive_the_reciprocal_exact() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = Fixture { config: Some(modelopt_config("NVFP4")), ..Fixture::default() };
    for (i, p) in ["gate_proj", "up_proj", "down_proj"].iter().enumerate() {
        let scale = 2f32.powi(-8 - i as i32);
        f.modelopt(&format!("model.layers.0.mlp.{p}"), &Weight::new(i as u64, 64, 64), scale, Some(0.25));
    }
    let a = f.open(&defaults()).unwrap();
    let (ct, _) = convert(&a, &dir.path().join("ct"), Output::CompressedTensors);
    let (x, y) = (a.gate_up(0).unwrap(), ct.gate_up(0).unwrap());
    assert_eq!(y.gate.global_scale().source(), GlobalScaleSource::Divisor(256.0));
    for row in 0..64 {
        assert!((0..64).all(
            |k| x.gate.value(row, k) == y.gate.value(row, k) && x.up.value(row, k) == y.up.value(row, k)
        ));
    }
    let (back, _) = convert(&ct, &dir.path().join("back"), Output::Modelopt);
    for t in a.files().tensors() {
        assert!(t.bytes == bytes(back.files(), t.name), "{}", t.name);
    }
}

#[test]
fn gguf_holds_the_gated_mlps_and_reports_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let a = Checkpoint::open(&testdata("modelopt-nvfp4"), &defaults()).unwrap();
    let path = dir.path().join("m.gguf");
    let (g, report) = convert(&a, &path, Output::Gguf);
    assert_same_layer(&a, &g);
    assert_eq!(g.gate_up(0).unwrap().gate.global_scale(), a.gate_up(0).unwrap().gate.global_scale());
    assert!(g.gate_up(0).unwrap().input_scales().unwrap().is_some());
    assert!(report.skipped.iter().any(|n| n == "model.layers.0.self_attn.q_proj"));
    assert!(report.skipped.iter().any(|n| n == "model.embed_tokens.weight"));
    // The producer's own GGUF has the same bytes.
    let theirs = Checkpoint::open(&testdata("mlp-nvfp4.gguf"), &defaults()).unwrap();
    for t in theirs.files().tensors() {
        assert!(t.bytes == bytes(g.files(), t.name), "{}", t.name);
    }
    // And back into a directory of Hugging Face names.
    let (back, _) = convert(&g, &dir.path().join("hf"), Output::Modelopt);
    assert_same_layer(&a, &back);
    let name = "model.layers.0.mlp.up_proj.weight_scale_2";
    assert_eq!(bytes(a.files(), name), bytes(back.files(), name));
}

#[test]
fn a_lone_file_carries_its_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let a = Checkpoint::open(&testdata("compressed-tensors-nvfp4"), &defaults()).unwrap();
    for output in [Output::Modelopt, Output::CompressedTensors] {
        let path = dir.path().join(format!("{}.safetensors", output.name()));
        let (b, report) = convert(&a, &path, output);
        assert_eq!(report.files, [path]);
        assert_eq!(b.convention().name, output.name());
        assert_same_layer(&a, &b);
        assert!(b.gate_up(0).unwrap().input_scales().unwrap().is_some());
    }
}

#[test]
fn fused_and_stacked_experts_are_taken_apart() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = Fixture { config: Some(modelopt_config("W4A16_NVFP4")), ..Fixture::default() };
    let weights: Vec<Weight> = (0..2).map(|e| Weight::new(e, 96, 64)).collect();
    let downs: Vec<Weight> = (0..2).map(|e| Weight::new(20 + e, 64, 48)).collect();
    let name = "model.layers.3.mlp.experts";
    for (p, w) in [("gate_up_proj", &weights), ("down_proj", &downs)] {
        let (rows, k) = (w[0].rows, w[0].k);
        let all = |f: fn(&Weight) -> &Vec<u8>| w.iter().flat_map(|w| f(w).clone()).collect::<Vec<u8>>();
        f.add(&format!("{name}.{p}"), Dtype::U8, &[2, rows, k / 2], all(|w| &w.codes));
        f.add(&format!("{name}.{p}_weight_scale"), Dtype::F8E4m3, &[2, rows, k / 16], all(|w| &w.scales));
        f.f32(&format!("{name}.{p}_weight_scale_2"), &[2], &[0.001, 0.002]);
    }
    f.f32(&format!("{name}.gate_up_proj_bias"), &[2, 96], &(0..192).map(|i| i as f32).collect::<Vec<_>>());
    let options = OpenOptions { gate_up_order: Some(GateUpOrder::UpGate), ..defaults() };
    let a = f.open(&options).unwrap();
    for output in [Output::Modelopt, Output::CompressedTensors] {
        let (b, _) = convert(&a, &dir.path().join(output.name()), output);
        let (x, y) = (a.experts(3).unwrap(), b.experts(3).unwrap());
        assert_eq!(y.ids(), [0, 1]);
        assert!(b.files().get(&format!("{name}.1.gate_proj.weight_scale")).is_some());
        for e in 0..2 {
            weights[e].rows_at(0..48).assert_is(&y.gate_up(e).unwrap().up);
            weights[e].rows_at(48..96).assert_is(&y.gate_up(e).unwrap().gate);
            downs[e].assert_is(&y.down(e).unwrap().weight);
            assert_eq!(x.gate_up(e).unwrap().bias, y.gate_up(e).unwrap().bias);
        }
    }
}

#[test]
fn experts_become_one_gguf_tensor_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = Fixture { config: Some(modelopt_config("NVFP4")), ..Fixture::default() };
    for e in 0..3u64 {
        for (i, p) in ["w1", "w3", "w2"].iter().enumerate() {
            let m = format!("model.layers.2.block_sparse_moe.experts.{e}.{p}");
            f.modelopt(&m, &Weight::new(10 * e + i as u64, 64, 64), 0.001 * (e + 1) as f32, Some(0.5));
        }
    }
    let a = f.open(&defaults()).unwrap();
    let path = dir.path().join("m.gguf");
    let (g, _) = convert(&a, &path, Output::Gguf);
    assert_eq!(g.files().get("blk.2.ffn_gate_exps.weight").unwrap().shape, [3, 64, 64]);
    let (hf, _) = convert(&g, &dir.path().join("hf"), Output::CompressedTensors);
    for c in [&g, &hf] {
        let experts = c.experts(2).unwrap();
        for e in 0..3 {
            let mlp = experts.gate_up(e).unwrap();
            Weight::new(10 * e as u64, 64, 64).assert_is(&mlp.gate);
            Weight::new(10 * e as u64 + 1, 64, 64).assert_is(&mlp.up);
            Weight::new(10 * e as u64 + 2, 64, 64).assert_is(&experts.down(e).unwrap().weight);
            let relative = mlp.gate.global_scale().value() / (0.001 * (e + 1) as f32);
            assert!((relative - 1.0).abs() < 1e-6);
        }
    }
}

#[test]
fn mxfp4_is_written_where_it_exists() {
    let dir = tempfile::tempdir().unwrap();
    let groups: [(&[&str], u64, Value); 1] = [(&["Linear"], 32, Value::Null)];
    let mut f = Fixture { config: Some(compressed_config(&groups)), ..Fixture::default() };
    for (i, p) in ["gate_proj", "up_proj", "down_proj"].iter().enumerate() {
        let w = Weight::with_block(i as u64, 64, 64, 32);
        f.compressed(&format!("model.layers.0.mlp.{p}"), &w, 0.0, None);
    }
    let a = f.open(&defaults()).unwrap();
    let (ct, _) = convert(&a, &dir.path().join("ct"), Output::CompressedTensors);
    let (g, _) = convert(&a, &dir.path().join("m.gguf"), Output::Gguf);
    for c in [&ct, &g] {
        assert_same_layer(&a, c);
        assert_eq!(c.gate_up(0).unwrap().gate.format(), BlockFormat::Mxfp4);
        assert_eq!(c.gate_up(0).unwrap().gate.global_scale(), GlobalScale::ONE);
    }
    let e = write(&dir.path().join("mo"), Output::Modelopt, &a.export().unwrap()).unwrap_err().to_string();
    assert_has(&e, "mxfp4 in ModelOpt's convention is not supported; nvfp4 is");
    assert!(!dir.path().join("mo").exists());
}

fn linear(module: &str, seed: u64, input: Option<f32>) -> LinearOut<'static> {
    let w = Weight::new(seed, 130, 64);
    let weight = QuantizedMatrix::new(
        module,
        BlockFormat::Nvfp4,
        130,
        64,
        w.codes.clone(),
        w.swizzled(),
        ScaleLayout::Sf128x4,
        GlobalScale::multiplier(0.001),
    );
    LinearOut {
        module: module.into(),
        weight: weight.unwrap().into(),
        input_scale: input.map(GlobalScale::multiplier),
        bias: None,
    }
}

#[test]
fn mixed_activation_scales_are_declared_per_module_and_scales_are_unswizzled() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Model::default();
    for (i, (p, input)) in
        [("gate_proj", Some(0.5)), ("up_proj", Some(0.5)), ("down_proj", None)].iter().enumerate()
    {
        model.linears.push(linear(&format!("model.layers.0.mlp.{p}"), i as u64, *input));
    }
    for output in [Output::Modelopt, Output::CompressedTensors] {
        let path = dir.path().join(output.name());
        write(&path, output, &model).unwrap();
        let c = Checkpoint::open(&path, &defaults()).unwrap();
        let mlp = c.gate_up(0).unwrap();
        Weight::new(0, 130, 64).assert_is(&mlp.gate);
        assert_eq!(mlp.gate.scale_layout(), ScaleLayout::Linear);
        assert_eq!(mlp.input_scales().unwrap().unwrap().0.value(), 0.5);
        assert_eq!(c.down(0).unwrap().input_scale().unwrap(), None);
    }
}

/// Matrices of more rows than are written at a time, the last run not a whole one.
#[test]
fn long_matrices_are_written_in_runs_exact() {
    let dir = tempfile::tempdir().unwrap();
    let fused = Weight::new(1, 2 * 35_008, 64);
    for (swizzled, order) in
        [(false, GateUpOrder::UpGate), (true, GateUpOrder::UpGate), (true, GateUpOrder::UpGate64)]
    {
        let mut f = Fixture { config: Some(modelopt_config("W4A16_NVFP4")), ..Fixture::default() };
        f.modelopt_fused(&fused, swizzled);
        let a = f.open(&OpenOptions { gate_up_order: Some(order), ..defaults() }).unwrap();
        let name = format!("{}-{swizzled}", order.name());
        for (from, output, to) in [
            (&a, Output::Modelopt, "m"),
            (&a, Output::CompressedTensors, "c.safetensors"),
            (&a, Output::Gguf, "g.gguf"),
        ] {
            let (b, _) = convert(from, &dir.path().join(format!("{name}-{to}")), output);
            let (back, _) = convert(&b, &dir.path().join(format!("{name}-back-{to}")), output);
            for c in [&b, &back] {
                let mlp = c.gate_up(0).unwrap();
                let rows = |half| (0..35_008).map(move |row| order.fused_row(half, row, 35_008));
                fused.rows_at(rows(Half::Gate)).assert_is(&mlp.gate);
                fused.rows_at(rows(Half::Up)).assert_is(&mlp.up);
            }
        }
    }
}

#[test]
fn an_error_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let left = || dir.path().read_dir().unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
    let mut model = Model { mlp_only: true, ..Model::default() };
    model.linears.push(linear("model.layers.0.mlp.gate_proj", 1, None));
    model.linears.push(linear("model.layers.0.mlp.gate_proj", 2, None));
    for (output, name) in
        [(Output::Modelopt, "m"), (Output::CompressedTensors, "m"), (Output::Gguf, "m.gguf")]
    {
        let e = message(&write(&dir.path().join(name), output, &model).unwrap_err());
        assert_has(&e, "found module `model.layers.0.mlp.gate_proj` twice; valid is distinct names");
        assert!(left().is_empty(), "{:?}", left());
    }
    // K = 64 fits GGUF; these experts leave a gap.
    model.linears.truncate(1);
    model.linears.push(linear("model.layers.1.mlp.experts.0.gate_proj", 1, None));
    model.linears.push(linear("model.layers.1.mlp.experts.2.gate_proj", 1, None));
    let e = message(&write(&dir.path().join("m.gguf"), Output::Gguf, &model).unwrap_err());
    assert_has(&e, "experts numbered from 0 without gaps");
    assert!(left().is_empty());
    // Wrong endings, occupied directories, missing parents.
    let error = |path: &std::path::Path, output| message(&write(path, output, &model).unwrap_err());
    assert_has(&error(&dir.path().join("m"), Output::Gguf), "does not end in .gguf; valid are a .gguf file");
    assert_has(
        &error(&dir.path().join("m.gguf"), Output::Modelopt),
        "ends in .gguf, which modelopt cannot be",
    );
    assert_has(
        &error(&dir.path().join("none/m"), Output::Modelopt),
        "cannot create a temporary directory beside",
    );
    std::fs::create_dir(dir.path().join("full")).unwrap();
    std::fs::write(dir.path().join("full/a"), b"a").unwrap();
    assert_has(
        &error(&dir.path().join("full"), Output::Modelopt),
        "exists already; valid are a new or empty",
    );
    assert_eq!(left(), ["full"]);
}

#[test]
fn a_scale_without_a_reciprocal_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Model::default();
    let mut l = linear("model.layers.0.mlp.gate_proj", 1, None);
    l.input_scale = Some(GlobalScale::multiplier(1e-45));
    model.linears.push(l);
    let e = write(&dir.path().join("m"), Output::CompressedTensors, &model).unwrap_err().to_string();
    assert_starts(&e, "model.layers.0.mlp.gate_proj.input_global_scale: holds");
}

#[test]
fn other_quantizations_are_not_converted_silently() {
    let config = json!({ "quantization_config": { "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": { "model.layers.0.mlp": { "quant_algo": "W4A16_NVFP4" }, "model.layers.0.attn": { "quant_algo": "FP8" } } } });
    let mut f = Fixture { config: Some(config), ..Fixture::default() };
    for p in ["gate_proj", "up_proj"] {
        f.modelopt(&format!("model.layers.0.mlp.{p}"), &Weight::new(1, 64, 64), 1e-3, None);
    }
    f.add("model.layers.0.attn.q.weight", Dtype::F8E4m3, &[4, 4], vec![0; 16]);
    f.f32("model.layers.0.attn.q.weight_scale", &[], &[1.0]);
    let dir = tempfile::tempdir().unwrap();
    let a = f.open(&defaults()).unwrap();
    for output in [Output::Modelopt, Output::CompressedTensors] {
        let path = dir.path().join(output.name());
        assert_eq!(
            write(&path, output, &a.export().unwrap()).unwrap_err().to_string(),
            "model.layers.0.attn.q: quant_algo FP8 is not supported; 4-bit blocks beside floats are; GGUF output takes the \
             MLPs alone"
        );
        assert!(!path.exists());
    }
    // GGUF has room for MLPs alone, and says what else there was.
    let (b, report) = convert(&a, &dir.path().join("m.gguf"), Output::Gguf);
    Weight::new(1, 64, 64).assert_is(&b.gate_up(0).unwrap().up);
    assert_eq!(report.skipped, ["model.layers.0.attn.q.weight", "model.layers.0.attn.q.weight_scale"]);
}

#[test]
fn half_of_a_pair_is_written_and_scales_of_nothing_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = common::modelopt(modelopt_config("NVFP4"), Some(0.5));
    for suffix in ["weight", "weight_scale", "weight_scale_2", "input_scale"] {
        f.remove(&format!("{}.{suffix}", common::UP));
    }
    let up = format!("{}.weight", common::UP);
    f.add(&up, Dtype::Bf16, &[128, 64], vec![0x3f; 128 * 64 * 2]);
    let a = f.open(&defaults()).unwrap();
    let model = a.export().unwrap();
    let linears = |model: &Model<'_>| model.linears.iter().map(|l| l.module.clone()).collect::<BTreeSet<_>>();
    assert_eq!(linears(&model), BTreeSet::from([common::GATE.into(), common::DOWN.into()]));
    let gate = model.linears.iter().find(|l| l.module == common::GATE).unwrap();
    common::gate().assert_is(&gate.weight.read().unwrap());
    let report = write(&dir.path().join("ct"), Output::CompressedTensors, &model).unwrap();
    assert_eq!((report.tensors, report.skipped.len()), (9, 0));
    let model = Model { mlp_only: true, ..model };
    let report = write(&dir.path().join("m.gguf"), Output::Gguf, &model).unwrap();
    assert_eq!(report.skipped, std::slice::from_ref(&up));
    let gguf = TensorFiles::open(&dir.path().join("m.gguf")).unwrap();
    assert!(gguf.get("blk.0.ffn_gate.weight").is_some());

    let mut f = common::modelopt(modelopt_config("NVFP4"), Some(0.5));
    *f.tensor(&up) = TensorOut::new(up.clone(), Dtype::F32, [128, 32], vec![0; 128 * 32 * 4]);
    let e = message(&f.open(&defaults()).unwrap().export().unwrap_err());
    assert_has(&e, &format!("`{up}` is F32; a 4-bit weight (nvfp4 or mxfp4) is needed"));
    f.remove(&up);
    let e = message(&f.open(&defaults()).unwrap().export().unwrap_err());
    assert_starts(&e, &format!("{up}: is missing"));
}

#[test]
fn block_scales_that_are_none_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    for (byte, what) in [(0x7F, "NaN"), (0x80, "negative")] {
        let mut f = common::modelopt(modelopt_config("NVFP4"), Some(0.5));
        f.bytes(&format!("{}.weight_scale", common::DOWN))[9] = byte;
        let a = f.open(&defaults()).unwrap();
        for (output, name) in
            [(Output::Modelopt, "m"), (Output::CompressedTensors, "c.safetensors"), (Output::Gguf, "g.gguf")]
        {
            let path = dir.path().join(name);
            let model = Model { mlp_only: true, ..a.export().unwrap() };
            let e = message(&write(&path, output, &model).unwrap_err());
            assert_has(&e, &format!("row 1, block 1 is {what}"));
            assert!(!path.exists());
        }
    }
}

/// The row is that of the weight, however many are read at a time, and the file the one that is read.
#[test]
fn a_block_scale_far_down_is_named_by_its_own_row() {
    let dir = tempfile::tempdir().unwrap();
    let mut w = Weight::new(1, 2 * 66_048, 32);
    w.scales[2 * 66_000 * 2 + 1] = 0x80;
    let mut f = Fixture { config: Some(modelopt_config("W4A16_NVFP4")), ..Fixture::default() };
    f.modelopt_fused(&w, false);
    let options = OpenOptions { gate_up_order: Some(GateUpOrder::UpGateRows), ..defaults() };
    let a = f.open(&options).unwrap();
    let e = write(&dir.path().join("m"), Output::Modelopt, &a.export().unwrap()).unwrap_err().to_string();
    let root = a.files().root().display();
    let found = "gate_up_proj.weight (up): block scale 0x80 at row 66000, block 1 is negative";
    assert_starts(&e, &format!("{root}: model.layers.0.mlp.{found}"));
}

#[test]
fn experts_that_differ_in_bias_or_input_scale_are_not_made_alike() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut model = Model { mlp_only: true, ..Model::default() };
    for expert in 0..2 {
        let module = format!("model.layers.0.mlp.experts.{expert}.gate_proj");
        model.linears.push(linear(&module, expert, (expert == 1).then_some(0.5)));
    }
    let report = write(&path, Output::Gguf, &model).unwrap();
    assert_eq!(report.skipped, ["input scale of model.layers.0.mlp.experts.1.gate_proj"]);
    std::fs::remove_file(&path).unwrap();
    model.linears[0].bias = Some(vec![1.0; 130]);
    let e = message(&write(&path, Output::Gguf, &model).unwrap_err());
    assert_has(&e, "a bias for 1 of 2 experts is not supported; one for each or none at all is");
    assert!(!path.exists());
}

#[test]
fn the_models_configuration_goes_where_the_output_has_room_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = modelopt_config("NVFP4");
    config["model_type"] = json!("gemma2");
    config["hidden_activation"] = json!("gelu_pytorch_tanh");
    config["hidden_size"] = json!(64);
    let a = common::modelopt(config, Some(0.5)).open(&defaults()).unwrap();
    let held = |c: &Checkpoint, key: &str| c.files().config().unwrap().value.get(key).cloned();
    let (lone, _) = convert(&a, &dir.path().join("m.safetensors"), Output::CompressedTensors);
    let (gguf, _) = convert(&a, &dir.path().join("m.gguf"), Output::Gguf);
    let (back, _) = convert(&gguf, &dir.path().join("hf"), Output::Modelopt);
    for c in [&lone, &gguf, &back] {
        assert_eq!(held(c, "model_type"), Some(json!("gemma2")));
        assert_eq!(held(c, "hidden_activation"), Some(json!("gelu_pytorch_tanh")));
        assert_same_layer(&a, c);
    }
    assert_eq!(held(&lone, "hidden_size"), Some(json!(64)));
    // What lies beside a file that carries its own configuration is another model's.
    std::fs::write(dir.path().join("config.json"), r#"{ "hidden_act": "silu" }"#).unwrap();
    let again = Checkpoint::open(&dir.path().join("m.safetensors"), &defaults()).unwrap();
    assert_eq!(held(&again, "hidden_activation"), Some(json!("gelu_pytorch_tanh")));
}

/// A model with MLPs of these names.
fn mlps(names: &[&str], config: Value) -> Model<'static> {
    let module = |path: &str, projection: &str| format!("{path}.{projection}_proj");
    let all = names.iter().flat_map(|path| ["gate", "up", "down"].map(|p| module(path, p)));
    let linears = all.zip(1..).map(|(module, seed)| linear(&module, seed, None)).collect();
    Model { linears, config: Some(config), mlp_only: true, ..Model::default() }
}

#[test]
fn layers_of_other_parts_are_not_the_language_models_in_gguf() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let qwen = || json!({ "model_type": "qwen3_vl", "hidden_act": "silu" });
    let names = ["model.language_model.layers.0.mlp", "model.visual.blocks.1.mlp", "mtp.layers.0.mlp"];
    let report = write(&path, Output::Gguf, &mlps(&names, qwen())).unwrap();
    assert_eq!(report.skipped.len(), 6, "{:?}", report.skipped);
    assert!(report.skipped.iter().all(|name| name.starts_with("model.visual.") || name.starts_with("mtp.")));
    let read = Checkpoint::open(&path, &defaults()).unwrap();
    assert_eq!(read.layers(), [0]);
    let gate = linear("blk.0.ffn_gate", 1, None);
    assert_eq!(read.gate_up(0).unwrap().gate.row_codes(3), gate.weight.read().unwrap().row_codes(3));

    let refused = |model: &Model<'_>| {
        let path = dir.path().join("refused.gguf");
        let e = message(&write(&path, Output::Gguf, model).unwrap_err());
        assert!(!path.exists());
        e
    };
    let e = refused(&mlps(&["model.visual.blocks.1.mlp"], qwen()));
    assert_has(&e, "without a quantized MLP in a language model's layers (`model.visual.blocks.1.mlp.");
    // Longcat has two in each layer.
    let e = refused(&mlps(&["model.layers.0.mlps.0", "model.layers.0.mlps.1"], qwen()));
    assert_has(&e, "two MLPs of layer 0 of one kind, `model.layers.0.mlps.0` and `model.layers.0.mlps.1`");
}

#[test]
fn activations_that_gguf_would_not_give_back_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let blocks = json!([{ "ffn": { "hidden_act": "relu" } }, { "ffn": { "hidden_act": "silu" } }]);
    for (config, why) in [
        (
            json!({ "model_type": "bitnet" }),
            "layer 0, whose activation is relu2, which would not be read back",
        ),
        (
            json!({ "model_type": "nemotron-nas", "hidden_act": "silu", "block_configs": blocks }),
            "layer 0, whose activation is relu, which would not be read back",
        ),
        (
            json!({ "model_type": "dbrx", "ffn_config": { "ffn_act_fn": { "name": "relu" } } }),
            "which would not be read back: dbrx.hidden_act is \"relu\", which is not understood",
        ),
    ] {
        let names = ["model.layers.0.mlp", "model.layers.1.mlp"];
        let e = message(&write(&path, Output::Gguf, &mlps(&names, config)).unwrap_err());
        assert_has(&e, why);
        assert!(!path.exists());
    }
    // What is named is carried.
    for (config, activation) in [
        (json!({ "model_type": "dbrx", "ffn_config": { "ffn_act_fn": { "name": "silu" } } }), "silu"),
        (json!({ "model_type": "smallthinker" }), "relu"),
        (json!({ "model_type": "hy_v4", "swiglu_limit": -1 }), "silu"),
    ] {
        write(&path, Output::Gguf, &mlps(&["model.layers.0.mlp"], config)).unwrap();
        let read = Checkpoint::open(&path, &defaults()).unwrap();
        let stated = read.activation(0, dualgemm_checkpoint::MlpKind::Dense).unwrap();
        assert_eq!(stated.activation.to_string(), activation);
    }
}
