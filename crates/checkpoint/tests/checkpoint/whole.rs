//! Whole models as GGUF: names, order of rows, types, numbers and tokenizer, as llama.cpp takes them. What llama.cpp itself
//! makes of such a file is in `python/tests/test_llama_cpp.py`.

use std::path::Path;

use crate::common::{Fixture, Weight, assert_has, defaults, message, modelopt_config, testdata};
use dualgemm_checkpoint::gguf::GgufValue;
use dualgemm_checkpoint::write::{Model, Output, write};
use dualgemm_checkpoint::{Checkpoint, Dtype, TensorFiles};
use serde_json::{Value, json};

const HIDDEN: usize = 64;

fn config(model_type: &str) -> Value {
    let mut config = modelopt_config("W4A16_NVFP4");
    let more = json!({ "model_type": model_type, "hidden_act": "silu", "hidden_size": HIDDEN, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 64,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "vocab_size": 16, "tie_word_embeddings": true,
        "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

fn floats(f: &mut Fixture, name: &str, shape: &[usize]) {
    // Every element another bf16 number.
    let count: usize = shape.iter().product();
    let bytes = (0..count).flat_map(|i| (0x3c00 + i as u16 % 0x200).to_le_bytes()).collect();
    f.add(name, Dtype::Bf16, shape, bytes);
}

/// A model of one layer: q and v and the MLP quantized, k and o in floats.
pub fn model(model_type: &str) -> Fixture {
    let mut f = Fixture::with(config(model_type));
    floats(&mut f, "model.embed_tokens.weight", &[16, HIDDEN]);
    let layer = "model.layers.0";
    for (i, (module, rows)) in [
        ("self_attn.q_proj", 64),
        ("self_attn.v_proj", 32),
        ("mlp.gate_proj", 64),
        ("mlp.up_proj", 64),
        ("mlp.down_proj", 64),
    ]
    .iter()
    .enumerate()
    {
        f.modelopt(&format!("{layer}.{module}"), &Weight::new(i as u64, *rows, HIDDEN), 1e-3, None);
    }
    floats(&mut f, &format!("{layer}.self_attn.k_proj.weight"), &[32, HIDDEN]);
    floats(&mut f, &format!("{layer}.self_attn.o_proj.weight"), &[HIDDEN, 64]);
    let norms = [
        format!("{layer}.input_layernorm"),
        format!("{layer}.post_attention_layernorm"),
        "model.norm".into(),
    ];
    norms.iter().for_each(|norm| floats(&mut f, &format!("{norm}.weight"), &[HIDDEN]));
    if model_type == "qwen3" {
        for norm in ["q_norm", "k_norm"] {
            floats(&mut f, &format!("{layer}.self_attn.{norm}.weight"), &[32]);
        }
    }
    if model_type == "qwen2" {
        floats(&mut f, &format!("{layer}.self_attn.q_proj.bias"), &[64]);
    }
    f
}

fn to_gguf(f: &Fixture, beside: &[(&str, Value)]) -> Result<TensorFiles, String> {
    let dir = tempfile::tempdir().unwrap();
    f.write(dir.path());
    for (name, json) in beside {
        std::fs::write(dir.path().join(name), json.to_string()).unwrap();
    }
    let checkpoint = Checkpoint::open(dir.path(), &defaults()).unwrap();
    let path = dir.path().join("m.gguf");
    match write(&path, Output::Gguf, &checkpoint.export(Output::Gguf).unwrap()) {
        Ok(report) => {
            assert_eq!(report.skipped, [""; 0]);
            Ok(TensorFiles::open(&path).unwrap())
        }
        Err(e) => {
            assert!(!path.exists());
            let e = message(&e);
            assert!(!e.contains("m.gguf"), "names what is written, not what is wrong: {e}");
            Err(e)
        }
    }
}

fn entry(files: &TensorFiles, key: &str) -> Option<GgufValue> {
    let metadata = files.gguf_metadata().unwrap();
    metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value.clone())
}

fn text(s: &str) -> Option<GgufValue> {
    Some(GgufValue::String(s.into()))
}

/// llama.cpp's row of a head from Hugging Face's: neighbours are rotated instead of elements half a head apart.
fn theirs(row: usize, head: usize) -> usize {
    let (of, within) = (row / head, row % head);
    of * head + within / 2 + (within % 2) * (head / 2)
}

#[test]
fn every_tensor_is_there_under_llama_cpps_name_and_in_its_order() {
    for (family, architecture, rotated) in [
        ("llama", "llama", true),
        ("mistral", "llama", true),
        ("qwen2", "qwen2", false),
        ("qwen3", "qwen3", false),
    ] {
        let f = model(family);
        let g = to_gguf(&f, &[]).unwrap();
        assert_eq!(entry(&g, "general.architecture"), text(architecture));
        let names: Vec<&str> = g.tensors().map(|t| t.name).collect();
        for name in [
            "token_embd",
            "output_norm",
            "blk.0.attn_norm",
            "blk.0.ffn_norm",
            "blk.0.attn_output",
            "blk.0.ffn_down",
        ] {
            assert!(names.contains(&format!("{name}.weight").as_str()), "{family}: {names:?}");
        }
        assert!(!names.contains(&"output.weight"));
        let order = |row| if rotated { theirs(row, 32) } else { row };
        // Quantized.
        let dir = tempfile::tempdir().unwrap();
        f.write(dir.path());
        let hf = Checkpoint::open(dir.path(), &defaults()).unwrap();
        let gguf = Checkpoint::from_files(to_gguf(&f, &[]).unwrap(), &defaults()).unwrap();
        let (q, ours) = (
            hf.linear("model.layers.0.self_attn.q_proj").unwrap().weight,
            gguf.linear("blk.0.attn_q").unwrap().weight,
        );
        assert_eq!(ours.global_scale().value(), 1e-3);
        for row in 0..64 {
            assert!((0..HIDDEN).all(|k| ours.value(row, k) == q.value(order(row), k)), "{family}: row {row}");
        }
        // V has no positions.
        let (v, ours) = (
            hf.linear("model.layers.0.self_attn.v_proj").unwrap().weight,
            gguf.linear("blk.0.attn_v").unwrap().weight,
        );
        assert!((0..32).all(|row| (0..HIDDEN).all(|k| ours.value(row, k) == v.value(row, k))));
        // Floats.
        let (k, ours) = (
            hf.files().get("model.layers.0.self_attn.k_proj.weight").unwrap(),
            g.get("blk.0.attn_k.weight").unwrap(),
        );
        assert_eq!((ours.dtype.ggml_id(), ours.shape), (Dtype::Bf16.ggml_id(), k.shape));
        let row = |bytes: &[u8], row: usize| bytes[row * 2 * HIDDEN..(row + 1) * 2 * HIDDEN].to_vec();
        assert!((0..32).all(|r| row(ours.bytes, r) == row(k.bytes, order(r))));
        let (norm, ours) =
            (hf.files().get("model.norm.weight").unwrap(), g.get("output_norm.weight").unwrap());
        assert_eq!(ours.dtype, Dtype::F32);
        assert_eq!(ours.to_f32("x").unwrap(), norm.to_f32("x").unwrap());
        if family == "qwen2" {
            assert_eq!(g.get("blk.0.attn_q.bias").unwrap().shape, [64]);
        }
    }
}

#[test]
fn llama_3_divides_each_frequency_by_its_own_number() {
    let mut f = model("llama");
    f.config.as_mut().unwrap()["rope_parameters"] = json!({ "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 });
    let g = to_gguf(&f, &[]).unwrap();
    let factors = g.get("rope_freqs.weight").unwrap().to_f32("x").unwrap();
    assert_eq!(factors.len(), 16);
    // Wavelengths from 6 to 1.4 million: short ones are kept, long ones divided by 8, the one between by a number between.
    let wave = |pair: usize| 2.0 * std::f64::consts::PI * 5e5f64.powf(pair as f64 / 16.0);
    for (pair, &factor) in factors.iter().enumerate() {
        let expected = match wave(pair) {
            w if w < 8192.0 / 4.0 => 1.0,
            w if w > 8192.0 => 8.0,
            w => {
                let smooth = (8192.0 / w - 1.0) / 3.0;
                1.0 / ((1.0 - smooth) / 8.0 + smooth)
            }
        };
        assert!((f64::from(factor) - expected).abs() < 1e-5, "{pair}: {factor} {expected}");
    }
    assert!(factors[0] == 1.0 && factors[15] == 8.0 && factors.iter().any(|f| *f > 1.0 && *f < 8.0));
}

fn tokenizer(pre: Value) -> Value {
    let vocab: serde_json::Map<String, Value> =
        ["<s>", "a", "b", "ab", "Ġ"].iter().enumerate().map(|(i, t)| ((*t).into(), json!(i))).collect();
    json!({ "model": { "type": "BPE", "vocab": vocab, "merges": [["a", "b"], "Ġ a"] }, "pre_tokenizer": pre,
        "added_tokens": [{ "id": 0, "content": "<s>", "special": true }, { "id": 5, "content": "<|im_end|>", "special": false },
            { "id": 6, "content": "tool", "special": false }],
        "post_processor": { "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<s>" } }] } })
}

fn strings(value: Option<GgufValue>) -> Vec<String> {
    let Some(GgufValue::Array { element: 8, len, mut bytes }) = value else { panic!("{value:?}") };
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let rest = bytes.split_off(8);
        let len = u64::from_le_bytes(bytes.try_into().unwrap()) as usize;
        all.push(String::from_utf8(rest[..len].to_vec()).unwrap());
        bytes = rest[len..].to_vec();
    }
    assert_eq!(all.len() as u64, len);
    all
}

#[test]
fn a_tokenizer_beside_the_model_goes_along() {
    let byte_level = json!({ "type": "ByteLevel", "use_regex": true });
    let digits = json!({ "type": "Sequence", "pretokenizers": [{ "type": "Digits", "individual_digits": true }, byte_level] });
    let settings = json!({ "eos_token": { "content": "<|im_end|>" }, "chat_template": "{{ x }}" });
    for (pre, name) in [(byte_level, "gpt-2"), (digits, "smollm")] {
        let g = to_gguf(
            &model("llama"),
            &[("tokenizer.json", tokenizer(pre)), ("tokenizer_config.json", settings.clone())],
        );
        let g = g.unwrap();
        assert_eq!(entry(&g, "tokenizer.ggml.pre"), text(name));
        let tokens = strings(entry(&g, "tokenizer.ggml.tokens"));
        assert_eq!(tokens.len(), 16);
        assert_eq!(tokens[..8], ["<s>", "a", "b", "ab", "Ġ", "<|im_end|>", "tool", "[PAD7]"]);
        assert_eq!(strings(entry(&g, "tokenizer.ggml.merges")), ["a b", "Ġ a"]);
        let Some(GgufValue::Array { element: 5, bytes, .. }) = entry(&g, "tokenizer.ggml.token_type") else {
            panic!()
        };
        let types: Vec<u8> = bytes.chunks(4).map(|b| b[0]).collect();
        assert_eq!(types[..8], [3, 1, 1, 1, 1, 3, 4, 5]);
        assert_eq!(entry(&g, "tokenizer.ggml.eos_token_id"), Some(GgufValue::U32(5)));
        assert_eq!(entry(&g, "tokenizer.ggml.add_bos_token"), Some(GgufValue::Bool(true)));
        assert_eq!(entry(&g, "tokenizer.chat_template"), text("{{ x }}"));
    }
}

#[test]
fn a_tokenizer_that_is_not_byte_level_is_refused() {
    let odd = [("tokenizer.json", tokenizer(json!({ "type": "Metaspace" })))];
    let e = to_gguf(&model("llama"), &odd).unwrap_err();
    assert_has(&e, "pre_tokenizer is {\"type\":\"Metaspace\"}; valid is byte-level BPE");
}

#[test]
fn of_gguf_only_mlps_are_read_and_that_has_to_be_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let real = Checkpoint::open(&testdata("modelopt-nvfp4"), &defaults()).unwrap();
    let path = dir.path().join("m.gguf");
    let report = write(&path, Output::Gguf, &real.export(Output::Gguf).unwrap()).unwrap();
    // 11 weights, and a scale and an input scale for each of the 7 in 4 bits.
    assert_eq!((report.tensors, report.skipped.len()), (25, 0));
    let gguf = Checkpoint::open(&path, &defaults()).unwrap();
    let out = dir.path().join("hf");
    let e = message(&write(&out, Output::Modelopt, &gguf.export(Output::Gguf).unwrap()).unwrap_err());
    assert_has(&e, "of a GGUF file the gated MLPs can be written, if asked for");
    let model = Model { mlp_only: true, ..gguf.export(Output::Gguf).unwrap() };
    let report = write(&out, Output::Modelopt, &model).unwrap();
    assert!(report.skipped.contains(&"blk.0.attn_q.weight".into()));
}

#[test]
fn what_lies_beside_a_model_is_copied_and_weights_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    std::fs::create_dir_all(from.join("onnx")).unwrap();
    model("llama").write(&from);
    for name in [
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "vocab.txt",
        "modeling_own.py",
        "pytorch_model.bin",
        "recipe.yaml",
        ".gitattributes",
    ] {
        std::fs::write(from.join(name), name).unwrap();
    }
    #[cfg(unix)]
    std::os::unix::fs::symlink(from.join("vocab.txt"), from.join("link.txt")).unwrap();
    let out = dir.path().join("out");
    let model = Checkpoint::open(&from, &defaults()).unwrap();
    let report =
        write(&out, Output::CompressedTensors, &model.export(Output::CompressedTensors).unwrap()).unwrap();
    let names = |path: &Path| {
        let mut names: Vec<String> =
            path.read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let mut expected = vec![
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_own.py",
        "tokenizer.json",
        "vocab.txt",
    ];
    if cfg!(unix) {
        expected.insert(3, "link.txt");
    }
    assert_eq!(names(&out), expected);
    assert_eq!(report.files.len(), expected.len());
    assert_eq!(std::fs::read_to_string(out.join("tokenizer.json")).unwrap(), "tokenizer.json");
}
