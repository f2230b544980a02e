//! `quantize`, and what the other commands make of the files that it writes.

use std::path::Path;

use safetensors::Dtype;
use serde_json::{Value, json};

use crate::common::{arg, held, json as run, refusal, write};

const PRODUCERS: [&str; 5] = ["modelopt", "compressed-tensors", "torchao", "te", "ggml"];

/// Quantizes and returns the report.
fn quantize(source: &Path, out: &Path, producer: &str, more: &[&str]) -> Value {
    run(&[&["quantize", arg(source), arg(out), "--producer", producer], more].concat(), 0)
}

/// A Llama of one layer in f32, with what lies beside such a model.
fn small_model(dir: &Path) {
    std::fs::create_dir(dir).unwrap();
    let mut state = 1u32;
    let mut values = |shape: &[usize], size: f32| -> Vec<u8> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / (1 << 24) as f32 - 0.5) * size
        };
        (0..shape.iter().product()).flat_map(|_: usize| next().to_le_bytes()).collect()
    };
    let modules = [
        ("model.embed_tokens", vec![64, 64]),
        ("lm_head", vec![64, 64]),
        ("model.norm", vec![64]),
        ("model.layers.0.input_layernorm", vec![64]),
        ("model.layers.0.post_attention_layernorm", vec![64]),
        ("model.layers.0.self_attn.q_proj", vec![64, 64]),
        ("model.layers.0.self_attn.k_proj", vec![32, 64]),
        ("model.layers.0.self_attn.v_proj", vec![32, 64]),
        ("model.layers.0.self_attn.o_proj", vec![64, 64]),
        ("model.layers.0.mlp.gate_proj", vec![128, 64]),
        ("model.layers.0.mlp.up_proj", vec![128, 64]),
        ("model.layers.0.mlp.down_proj", vec![64, 128]),
    ];
    // Every module with a magnitude of its own.
    let tensors = modules.into_iter().enumerate().map(|(i, (name, shape))| {
        let values = values(&shape, 0.1 + i as f32 / 10.0);
        (format!("{name}.weight"), Dtype::F32, shape, values)
    });
    write(&dir.join("model.safetensors"), &tensors.collect::<Vec<_>>());
    let config = json!({ "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 128,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "vocab_size": 64 });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.join("generation_config.json"), "{}").unwrap();
}

/// Codes of weights that are no numbers would be numbers; nothing is written.
#[test]
fn weights_that_are_not_finite_are_not_quantized() {
    let dir = tempfile::tempdir().unwrap();
    let (source, out) = (dir.path().join("w.safetensors"), dir.path().join("q.safetensors"));
    for (value, text) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let mut bytes = 1f32.to_le_bytes().repeat(4 * 64);
        bytes[(2 * 64 + 5) * 4..][..4].copy_from_slice(&value.to_le_bytes());
        write(&source, &[("x.up_proj.weight", Dtype::F32, [4, 64], bytes)]);
        for producer in PRODUCERS {
            let args = ["quantize", arg(&source), arg(&out), "--producer", producer];
            let message = refusal(&args, 2);
            let expected =
                format!("x.up_proj.weight: element [2, 5] is {text}; weights to quantize must be finite");
            assert!(message.contains(&expected), "{message}");
            assert!(!out.exists());
        }
    }
}

/// What the producers' own tools leave in floats stays, and layers that vLLM fuses share the scale of the largest.
#[test]
fn whole_models_are_quantized_as_their_loaders_read_them() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("model");
    small_model(&source);
    let float = source.join("model.safetensors");
    let validated = |out: &Path, warnings: u32| {
        let report = run(&["validate", arg(out)], 0);
        assert_eq!((&report["errors"], &report["warnings"]), (&0.into(), &warnings.into()), "{report}");
    };
    for (producer, scale, codes) in [
        ("modelopt", "weight_scale_2", "weight"),
        ("compressed-tensors", "weight_global_scale", "weight_packed"),
    ] {
        let out = dir.path().join(producer);
        let report = quantize(&source, &out, producer, &["--skip", "no_such_name"]);
        let [note] = report["notes"].as_array().unwrap().as_slice() else { panic!("{report}") };
        let note = note.as_str().unwrap();
        assert!(note.starts_with("--skip no_such_name: no tensor of"), "{note}");
        let kept = json!([{ "name": "lm_head.weight", "why": "the output head" },
            { "name": "model.embed_tokens.weight", "why": "an embedding" }]);
        assert_eq!(report["kept"], kept);
        let written = out.join("model.safetensors");
        for name in ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"] {
            assert_eq!(held(&written, name), held(&float, name), "{name}");
        }
        let part = |module: &str, part| held(&written, &format!("model.layers.0.{module}.{part}")).2;
        let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|p| part(&format!("self_attn.{p}"), scale));
        assert!(q == k && q == v);
        let [gate, up, down] =
            ["gate_proj", "up_proj", "down_proj"].map(|p| part(&format!("mlp.{p}"), scale));
        assert!(gate == up && up != down);
        assert!(out.join("generation_config.json").exists());
        validated(&out, 0);
        // The producer's arithmetic on q, k and v as the one matrix that engines make of them.
        let qkv = ["q_proj", "k_proj", "v_proj"].map(|p| format!("self_attn.{p}"));
        let floats = qkv.iter().flat_map(|m| held(&float, &format!("model.layers.0.{m}.weight")).2);
        let (lone, quantized) = (dir.path().join("fused.safetensors"), dir.path().join("qkv.safetensors"));
        write(&lone, &[("qkv.weight", Dtype::F32, [128, 64], floats.collect::<Vec<_>>())]);
        quantize(&lone, &quantized, producer, &[]);
        for name in [codes, "weight_scale"] {
            let parts: Vec<u8> = qkv.iter().flat_map(|m| part(m, name)).collect();
            assert!(parts == held(&quantized, &format!("qkv.{name}")).2, "{producer}: {name}");
        }
        assert_eq!(k, held(&quantized, &format!("qkv.{scale}")).2);
    }
    // Each its own, if asked for: validate warns of that, once.
    let out = dir.path().join("separate");
    quantize(&source, &out, "modelopt", &["--separate-scales"]);
    validated(&out, 1);
    // And as GGUF, whole.
    assert_eq!(quantize(&source, &dir.path().join("m.gguf"), "ggml", &[])["left_out"], json!([]));
}
