//! Bad input and wrong usage: one line on stderr that says what, where and what would be valid; exit code 2; no
//! output file, whole or partial.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{arg, data, dualgemm, extract};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// Runs in a fresh directory with `{dir}`, `{ckpt}`, `{hidden}`, `{expected}` and `{bf16}` filled in, and returns
/// the error line.
fn error_line(prepare: &dyn Fn(&Path), args: &str, code: i32) -> String {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let before = names(dir.path());
    let fill = |word: &str| {
        word.replace("{dir}", arg(dir.path()))
            .replace("{ckpt}", arg(&data("modelopt-nvfp4")))
            .replace("{a16}", arg(&data("compressed-tensors-nvfp4a16")))
            .replace("{gguf}", arg(&data("mlp-nvfp4.gguf")))
            .replace("{hidden}", arg(&data("hidden-states-f32.safetensors")))
            .replace("{expected}", arg(&data("expected-modelopt-nvfp4.safetensors")))
            .replace("{bf16}", arg(&data("mlp-bf16.safetensors")))
    };
    let output = dualgemm().args(args.split_whitespace().map(fill)).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{args}: {stderr}");
    assert!(output.stdout.is_empty(), "{args}: wrote to stdout");
    assert_eq!(stderr.lines().count(), 1, "{args}: {stderr}");
    assert_eq!(names(dir.path()), before, "{args}: left something behind");
    stderr.trim_end().replace(arg(dir.path()), "{dir}").replace(arg(&data("")), "")
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn write(path: &Path, tensors: &[(&str, Dtype, &[usize], &[u8])]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Arguments, and the parts of the line, in this order.
const CASES: &[(&str, &[&str])] = &[
    // Usage.
    ("", &["error: 'dualgemm' requires a subcommand"]),
    ("frobnicate", &["error: unrecognized subcommand 'frobnicate'"]),
    ("run", &["error: the following required arguments were not provided", "<CHECKPOINT>"]),
    ("run {ckpt} --layer x", &["'x' for '--layer <I>'", "invalid digit"]),
    ("run {ckpt} --out-dtype f64", &["'f64' for '--out-dtype", "possible values: f32, f16, bf16, nvfp4"]),
    ("run {ckpt} --a-format int8", &["'int8' for '--a-format", "possible values: f32, bf16, f16, nvfp4"]),
    ("run {ckpt} --device tpu", &["'tpu' for '--device", "valid are cpu, cuda"]),
    (
        "run {ckpt} --layer 0 --output {dir}",
        &["error: {dir}: is a directory; valid are names of regular files"],
    ),
    (
        "run {ckpt} --layer 0 --input {hidden} --output {hidden}",
        &["--output: ", "one of the files that are read"],
    ),
    (
        "run {ckpt} --layer 0 --output {ckpt}/model.safetensors",
        &["--output: ", "one of the files that are read"],
    ),
    (
        "quantize {bf16} {bf16} --producer te",
        &["OUT: mlp-bf16.safetensors is one of the files that are read"],
    ),
    ("convert {ckpt} {ckpt} --to modelopt", &["OUT: modelopt-nvfp4 is one of the files that are read"]),
    (
        "run {ckpt} --device sim:sm_90a --a-format f16 --repeat 1000",
        &["--device sim:sm_90a: at most 2^34 multiplications", "64x1536x576 1000 times is more"],
    ),
    ("run {ckpt} --device sim:sm_90a --isa avx2", &["--isa: sim:sm_90a is a GPU"]),
    ("run {ckpt} --device cuda:-1", &["'cuda:-1' for '--device", "valid are cpu, cuda"]),
    ("run {ckpt} --layer 0 --out-scale-layout 128x4", &["--out-scale-layout: C has no block scales"]),
    ("sim --arch sm_90a --shape 1x16x16 --max-instructions 0", &["'0' for '--max-instructions"]),
    ("run {ckpt} --layer 0 --m 4294967296000", &["--m: 4294967296000 rows of 576 do not fit the"]),
    ("tune --device sim:sm_90a --shapes 16x128x256", &["--device sim:sm_90a: a simulated GPU has no clock"]),
    ("bench --shapes 1x4294967296x4294967296", &["--shapes 1x4294967296x4294967296: B ["]),
    (
        "bench --shapes 99999999999x16x16 --smoke",
        &["--shapes 99999999999x16x16: takes ", "do not fit the memory"],
    ),
    ("bench --shapes 1x18446744073709551615x16", &["B [", "does not fit the memory"]),
    (
        "bench --shapes challenge --budget 600 --plot {dir}/roof.pdf",
        &["roof.pdf: plots are written as .svg or .png"],
    ),
    ("bench --shapes challenge --budget 600 --plot {dir}/no/roof.svg", &["{dir}/no/roof.svg: cannot "]),
    ("bench --shapes challenge --budget 600 --csv {dir}", &["error: {dir}: is a directory"]),
    ("estimate --shape 0x16x16", &["--shape 0x16x16: M is 0"]),
    ("estimate --shape 1x16x100", &["--shape 1x16x100: ", "K"]),
    ("estimate --shape 4294967295x65536x256", &["no launch is that large"]),
    (
        "estimate --shape 1x16x16 --config sm100a_fused_features_n8_g1_k4_s5_a1",
        &["--config sm100a_fused_features_n8_g1_k4_s5_a1: 4 CTAs split K; 1x16x16 has work for 1"],
    ),
    (
        "estimate --shape 9x16x1024 --config sm100a_fused_features_n8_g1_k4_s5_a1",
        &[
            "--config sm100a_fused_features_n8_g1_k4_s5_a1: a tile of 8 tokens holds all of them; 9x16x1024 has 9",
        ],
    ),
    ("export --target gpumode --shape 128x0x256 --output {dir}/s.py", &["--shape 128x0x256: N is 0"]),
    ("export --target gpumode --shape 128x4096x16 --output {dir}/s.py", &["K is 16; ", "multiple of 32"]),
    ("run {ckpt} --op dense", &["'dense' for '--op", "possible values: gate-up, linear, mlp, moe"]),
    ("run {ckpt} --op linear", &["--module: is needed for --op linear"]),
    (
        "run {ckpt} --op linear --module model.layers.0.self_attn.q_prj",
        &["model.layers.0.self_attn.q_prj: there is no such module in ", "self_attn.q_proj"],
    ),
    (
        "run {ckpt} --op linear --module model.embed_tokens",
        &["model.embed_tokens: is not quantized", "4-bit weight (nvfp4 or mxfp4) is needed"],
    ),
    (
        "run {ckpt} --op linear --module model.layers.0.mlp.down_proj --activation silu",
        &["--activation: a linear layer has no activation"],
    ),
    ("run {ckpt} --module lm_head", &["--module: is for --op linear; this is --op gate-up"]),
    ("run {ckpt} --op linear --between bf16", &["--between: is for --op mlp and moe; this is --op linear"]),
    ("run {ckpt} --op mlp --top-k 2", &["--top-k: is for --op moe; this is --op mlp"]),
    ("run {ckpt} --op moe --top-k 2", &["layer 0", "there are no experts in it"]),
    ("bench --op moe --experts 2 --top-k 3 --shapes 1x16x16", &["--top-k: is 3; there are 2 experts"]),
    ("bench --op linear --between bf16", &["--between: is for --op mlp and moe; this is --op linear"]),
    ("run {ckpt} --isa sse2", &["'sse2' for '--isa", "known are portable, avx2"]),
    ("run {ckpt} --threads 0", &["'0' for '--threads", "1..=4096"]),
    ("run {ckpt} --repeat 0", &["'0' for '--repeat"]),
    ("run {ckpt} --check some", &["'some' for '--check", "valid are all, none or a number of rows"]),
    ("run {ckpt} --activation swish", &["'swish' for '--activation", "valid are silu, clamped-silu[:LIMIT]"]),
    ("run {ckpt} --gate-up-order gateup", &["gate/up order `gateup` is unknown; valid are gate-up, up-gate"]),
    ("run {ckpt} --nibble-order x", &["'x' for '--nibble-order", "possible values: lo-hi, hi-lo"]),
    ("run {ckpt} --m 0", &["error: --m: is 0; at least one row is needed"]),
    ("run {ckpt} --m 999999999999999999", &["error: --m: 999999999999999999 rows of 576 do not fit"]),
    ("run {ckpt} --m 4 --input {hidden}", &["'--m <M>' cannot be used with '--input <FILE>'"]),
    ("quantize {bf16} {dir}/o.safetensors", &["required arguments were not provided", "--producer"]),
    (
        "quantize {bf16} {dir}/o.safetensors --producer x",
        &["valid are modelopt, compressed-tensors, torchao, te, ggml"],
    ),
    ("quantize {bf16} {dir}/o.safetensors --producer te --search x", &["possible values: mse"]),
    (
        "convert {ckpt} {dir}/o --to awq",
        &["output convention `awq` is unknown; valid are modelopt, compressed-tensors, gguf"],
    ),
    (
        "verify {expected} --tensor c_w4a4",
        &["required arguments were not provided", "--reference", "--checkpoint"],
    ),
    ("verify {expected} --reference {expected} --max-rel-l2 -1", &["error: "]),
    (
        "verify {expected} --reference {expected} --min-cosine 1.5",
        &["--min-cosine", "from -1 to 1 is needed"],
    ),
    (
        "verify {expected} --reference {expected} --min-cosine nan",
        &["--min-cosine", "from -1 to 1 is needed"],
    ),
    ("bench --shapes 3X5X48", &["--shapes 3X5X48: neither a shape such as 64x128x256 nor a set", "llama"]),
    (
        "conformance --only no-such-family/",
        &["--only no-such-family/: no conformance case has that in its name"],
    ),
    ("completions tcsh", &["'tcsh' for '<SHELL>'", "possible values: bash"]),
    // Files that are not there or are something else.
    ("run {dir}/nothing", &["error: {dir}/nothing: cannot open: No such file"]),
    ("run {dir}/empty-dir", &["{dir}/empty-dir: holds no safetensors file; valid are"]),
    ("run {dir}/text.txt", &["{dir}/text.txt: has an unknown ending; valid are"]),
    ("run {dir}/text.safetensors", &["{dir}/text.safetensors: header rule `"]),
    ("run {dir}/text.gguf", &["{dir}/text.gguf: header rule `magic`"]),
    ("run {dir}/empty.safetensors", &["{dir}/empty.safetensors: header rule `"]),
    ("run {dir}/truncated.safetensors", &["{dir}/truncated.safetensors: header rule `"]),
    ("run {gguf} --nibble-order hi-lo", &["swapped nibbles in a GGUF file is not supported"]),
    ("run {gguf} --scale-layout 128x4", &["128x4 order of scales in a GGUF file is not supported"]),
    ("run {bf16}", &["declares how it is quantized", "name the convention explicitly, one of modelopt"]),
    ("run {bf16} --convention modelopt --layer 14", &["is not quantized"]),
    ("run {ckpt} --convention gptq", &["convention `gptq` is unknown; valid are modelopt"]),
    ("run {ckpt} --layer 7", &["no gated MLP in layer 7; there is one in layer 0"]),
    ("run {ckpt} --layer 0 --expert 3", &["layer 0", "there are no experts in it"]),
    ("run {ckpt} --within vision", &["vision"]),
    ("inspect {dir}/nothing", &["{dir}/nothing: cannot open"]),
    ("validate {dir}/nothing", &["{dir}/nothing: cannot open"]),
    ("validate {dir}/text.txt", &["has an unknown ending"]),
    ("convert {dir}/nothing {dir}/o --to modelopt", &["{dir}/nothing: cannot open"]),
    // Activations.
    ("run {ckpt} --input {dir}/nothing.safetensors --output {dir}/o", &["nothing.safetensors: cannot open"]),
    (
        "run {ckpt} --input {bf16} --output {dir}/o",
        &["several tensors", "valid is one F32, F16 or BF16 tensor [M, K]"],
    ),
    ("run {ckpt} --input {bf16} --input-tensor x", &["no tensor `x`"]),
    (
        "run {ckpt} --input {dir}/wide.safetensors --output {dir}/o",
        &["A is [2, 592]; the weights of the layer need [M, 576]"],
    ),
    (
        "run {ckpt} --input {dir}/ints.safetensors --output {dir}/o",
        &["a: stored as I32; a float matrix must be F32, F16 or BF16"],
    ),
    ("run {ckpt} --input {dir}/no-rows.safetensors", &["shape [0, 576]", "at least one row"]),
    ("run {ckpt} --input {dir}/both.safetensors", &["both `a` and `a_packed`, and none is named"]),
    ("run {ckpt} --input {dir}/no-scale.safetensors", &["`a_packed` without `a_scale`"]),
    (
        "run {ckpt} --input {dir}/nan-scale.safetensors",
        &["block scale 0x7f at row 0, block 3 is NaN; valid are 0x00..=0x7e"],
    ),
    (
        "run {ckpt} --input {dir}/negative-scale.safetensors",
        &["block scale 0x81 at row 0, block 3 is negative"],
    ),
    ("run {ckpt} --input {dir}/zero-global.safetensors", &["tensor scale 0 is not a positive finite number"]),
    ("run {ckpt} --input {expected} --a-format bf16", &["is nvfp4; --a-format bf16 needs float activations"]),
    (
        "run {ckpt} --input {expected} --quantize dynamic",
        &["is nvfp4 already; --quantize is for float activations"],
    ),
    (
        "run {a16} --input {hidden} --quantize static",
        &["the checkpoint has no input scale for this layer; dynamic is possible"],
    ),
    // Outputs.
    (
        "run {ckpt} --m 1 --repeat 1 --output {dir}/no/such/c.safetensors",
        &["{dir}/no/such/c.safetensors: cannot "],
    ),
    (
        "quantize {bf16} {dir}/o.safetensors --producer te --mlp-only",
        &["--mlp-only is for .gguf files; {dir}/o.safetensors holds every tensor"],
    ),
    (
        "quantize {bf16} {dir}/o.gguf --producer ggml",
        &["o.gguf: a whole model without a config.json that names its type as GGUF is not supported"],
    ),
    (
        "convert {gguf} {dir}/o --to modelopt",
        &["of a GGUF file the gated MLPs alone are read; --mlp-only writes them"],
    ),
    (
        "convert {ckpt} {dir}/o --to modelopt --mlp-only",
        &["--mlp-only is for conversions to and from GGUF; modelopt holds every tensor"],
    ),
    ("quantize {bf16} {dir}/full-dir --producer te", &["{dir}/full-dir: exists already"]),
    ("quantize {bf16} {dir}/o.gguf --producer te", &["o.gguf: .gguf is written with --producer ggml only"]),
    (
        "quantize {bf16} {dir}/o --producer torchao",
        &["torchao tensors are written to a .safetensors file only"],
    ),
    (
        "quantize {dir}/odd.safetensors {dir}/o.safetensors --producer te",
        &["holds no linear layer to quantize", "(odd.weight is kept: K is 24, which is no multiple of 16)"],
    ),
    (
        "quantize {dir}/ints.safetensors {dir}/o.safetensors --producer te",
        &["holds no linear layer to quantize; 2-D tensors of F32, F16 or BF16"],
    ),
    (
        "quantize {ckpt} {dir}/o --producer modelopt",
        &[
            "modelopt-nvfp4: a source that is quantized already, as `quantization_config` in ",
            "F32, F16 and BF16",
        ],
    ),
    (
        "quantize {dir}/f8.safetensors {dir}/o.safetensors --producer te",
        &["f8.safetensors: `a.weight` in F8_E4M3 is not supported; weights in F32, F16 and BF16"],
    ),
    (
        "quantize {dir}/gpt2 {dir}/o --producer modelopt",
        &["{dir}/gpt2/config.json: model_type is gpt2, whose layers are Conv1D [in, out]"],
    ),
    (
        "quantize {gguf} {dir}/o.safetensors --producer te",
        &["is a GGUF file; a safetensors file with float tensors is needed"],
    ),
    ("quantize {bf16} {dir}/no/o.safetensors --producer te", &["{dir}/no/o.safetensors: cannot "]),
    ("convert {ckpt} {dir}/o.gguf --to modelopt", &["o.gguf: ends in .gguf"]),
    ("convert {ckpt} {dir}/o --to gguf", &["does not end in .gguf"]),
    ("convert {ckpt} {dir}/full-dir --to modelopt", &["{dir}/full-dir: "]),
    // Results.
    (
        "verify {dir}/wide.safetensors --checkpoint {ckpt} --input {hidden}",
        &["C is [2, 592]; the product is [64, 1536]"],
    ),
    ("verify {dir}/wide.safetensors --reference {hidden}", &["C is [2, 592]; the reference is [64, 576]"]),
    ("verify {expected} --tensor d --reference {hidden}", &["no tensor `d`"]),
];

fn prepare(dir: &Path) {
    std::fs::create_dir(dir.join("empty-dir")).unwrap();
    std::fs::create_dir(dir.join("full-dir")).unwrap();
    std::fs::write(dir.join("full-dir/file"), "x").unwrap();
    for name in ["text.txt", "text.safetensors", "text.gguf"] {
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
    let floats: (&str, Dtype, &[usize], &[u8]) = ("b.weight", Dtype::F32, &[16, 32], &[0; 4 * 16 * 32]);
    write(&dir.join("f8.safetensors"), &[("a.weight", Dtype::F8_E4M3, &[16, 32], &[0; 16 * 32]), floats]);
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
        write(&dir.join(name), if name.starts_with("both") { &tensors } else { &tensors[..3] });
    };
    triple("both.safetensors", 0x38, 1.0);
    triple("nan-scale.safetensors", 0x7F, 1.0);
    triple("negative-scale.safetensors", 0x81, 1.0);
    triple("zero-global.safetensors", 0x38, 0.0);
}

#[test]
fn every_case_is_one_line_with_code_2_and_leaves_nothing() {
    let mut wrong = Vec::new();
    for (args, parts) in CASES {
        let line = error_line(&prepare, args, 2);
        let mut rest = line.as_str();
        let found = line.starts_with("error: ")
            && parts.iter().all(|part| {
                let at = rest.find(part);
                rest = at.map_or(rest, |at| &rest[at + part.len()..]);
                at.is_some()
            });
        if !found {
            wrong.push(format!("dualgemm {args}\n    says   {line}\n    should {parts:?}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn a_missing_tensor_is_named_with_what_needs_it() {
    for (missing, needed) in [
        ("model.layers.0.mlp.up_proj.weight_scale_2", true),
        ("model.layers.0.mlp.gate_proj.weight_scale", true),
        ("model.layers.0.mlp.up_proj.weight", true),
        ("model.layers.0.mlp.gate_proj.input_scale", false),
    ] {
        let without = |dir: &Path| {
            let from = data("modelopt-nvfp4");
            let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let kept: Vec<&str> = tensors.names().into_iter().filter(|&name| name != missing).collect();
            std::fs::create_dir(dir.join("ckpt")).unwrap();
            extract(&from.join("model.safetensors"), &kept, &dir.join("ckpt/model.safetensors"));
            std::fs::copy(from.join("config.json"), dir.join("ckpt/config.json")).unwrap();
        };
        if needed {
            let line = error_line(&without, "run {dir}/ckpt --m 1 --output {dir}/c", 2);
            assert!(line.contains(missing.strip_suffix(".weight").unwrap_or(missing)), "{line}");
            assert!(line.contains("missing"), "{line}");
        } else {
            // Weights alone need no input scale: float activations still work, quantizing by it does not.
            let dir = tempfile::tempdir().unwrap();
            without(dir.path());
            let checkpoint = dir.path().join("ckpt");
            crate::common::run_json(&[arg(&checkpoint), "--m", "1"], 0);
            let line = error_line(&without, "run {dir}/ckpt --m 1 --a-format nvfp4 --output {dir}/c", 2);
            assert!(line.contains(missing), "{line}");
        }
    }
}

#[test]
fn a_tensor_that_a_whole_mlp_knows_nothing_of_is_named() {
    let normed = |dir: &Path| {
        let from = data("modelopt-nvfp4");
        let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
        let mut all = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors();
        let norm = TensorView::new(Dtype::F32, vec![1536], &[0; 4 * 1536]).unwrap();
        all.push(("model.layers.0.mlp.ffn_sub_norm.weight".into(), norm));
        std::fs::create_dir(dir.join("ckpt")).unwrap();
        safetensors::serialize_to_file(all, None, &dir.join("ckpt/model.safetensors")).unwrap();
        std::fs::copy(from.join("config.json"), dir.join("ckpt/config.json")).unwrap();
    };
    let line = error_line(&normed, "run {dir}/ckpt --op mlp --m 1 --output {dir}/c", 2);
    assert!(
        line.contains("model.layers.0.mlp.ffn_sub_norm.weight: a tensor in `model.layers.0.mlp`"),
        "{line}"
    );
    // Gate and up come before it.
    let dir = tempfile::tempdir().unwrap();
    normed(dir.path());
    crate::common::run_json(&[arg(&dir.path().join("ckpt")), "--m", "1"], 0);
}

#[test]
fn outputs_replace_neither_shards_nor_configurations() {
    let sharded = |dir: &Path| {
        let from = data("modelopt-nvfp4");
        let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let (gate, rest): (Vec<&str>, Vec<&str>) =
            tensors.names().into_iter().partition(|name| name.contains("gate_proj"));
        let mut map = serde_json::Map::new();
        for (shard, names) in [("a.safetensors", &gate), ("b.safetensors", &rest)] {
            extract(&from.join("model.safetensors"), names, &dir.join(shard));
            map.extend(names.iter().map(|name| (name.to_string(), shard.into())));
        }
        let index = serde_json::json!({ "weight_map": map }).to_string();
        std::fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
        std::fs::copy(from.join("config.json"), dir.join("config.json")).unwrap();
    };
    for output in ["a.safetensors", "b.safetensors", "config.json", "model.safetensors.index.json"] {
        let index = "{dir}/model.safetensors.index.json";
        for args in [
            format!("run {index} --layer 0 --m 1 --output {{dir}}/{output}"),
            format!("convert {index} {{dir}}/{output} --to modelopt"),
        ] {
            let line = error_line(&sharded, &args, 2);
            assert!(line.contains("one of the files that are read"), "{args}: {line}");
        }
    }
}

#[test]
fn an_instruction_set_that_is_missing_here_is_refused() {
    let doctor = crate::common::json(&["doctor"], 0);
    for isa in doctor["instruction_sets"].as_array().unwrap() {
        if isa["available"] == false {
            let name = isa["isa"].as_str().unwrap();
            let line = error_line(&|_| (), &format!("run {{ckpt}} --m 1 --isa {name}"), 3);
            assert!(line.contains(&format!("this machine has no {name}; its best is ")), "{line}");
        }
    }
}

#[test]
fn a_card_that_is_not_here_is_no_mistake_of_the_caller() {
    let nothing = |_: &Path| ();
    let processor = "--device cpu computes on the processor";
    let line = error_line(&nothing, "bench --shapes 1x16x16 --device cuda:999", 3);
    assert!(line.contains(processor), "{line}");
    for op in ["linear", "mlp", "moe"] {
        let line = error_line(&nothing, &format!("bench --op {op} --shapes 1x16x16 --device cuda:999"), 3);
        assert!(line.contains("--device cpu computes on the processor"), "{line}");
    }
    let line = error_line(&nothing, "tune --shapes 1x16x16 --device cuda:999", 3);
    // That the processor has nothing to tune is what `tune --device cpu` says.
    assert!(!line.contains(processor), "{line}");
    let line = error_line(&nothing, "conformance --device cuda:999", 3);
    assert!(line.contains("--device sim runs the cases in the simulator"), "{line}");
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
    dualgemm()
        .args(["run", arg(&checkpoint), "--input", arg(&input), "--output", arg(&out)])
        .assert()
        .code(2);
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "older");
}

#[cfg(target_os = "linux")]
/// A signal removes what is half written. When it arrives is a matter of luck: until it has hit often enough.
#[cfg(unix)]
#[test]
fn signals_leave_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let (from, out) = (data("mlp-bf16.safetensors"), dir.path().join("model"));
    let mut hits = 0;
    for signal in ["TERM", "INT", "HUP"].into_iter().cycle().take(300) {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("dualgemm"));
        let args = ["quantize", arg(&from), arg(&out), "--producer", "modelopt", "--search", "mse"];
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
    let full = std::fs::File::create("/dev/full").unwrap();
    let mut rules = std::process::Command::new(assert_cmd::cargo::cargo_bin("dualgemm"));
    let output = rules.args(["validate", "--rules"]).stdout(full).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: stdout: No space left"));
}

#[test]
fn with_json_the_error_is_the_one_document() {
    for args in [&["run", "/nothing"][..], &["run", "--layer"], &["validate", "/nothing"]] {
        let report = crate::common::json(args, 2);
        assert_eq!(report["exit_code"], 2);
        assert!(!report["error"].as_str().unwrap().is_empty());
    }
}
