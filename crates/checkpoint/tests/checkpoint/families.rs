//! Which activation an MLP has, by family: right values, where they come from, and refusals. Files are written here.

use std::path::Path;

use crate::common::{
    Fixture, Weight, assert_has, assert_starts, defaults, gguf_mlps, message, modelopt_config, open_gguf,
};
use dualgemm_cases::fits;
use dualgemm_checkpoint::gguf::GgufValue;
use dualgemm_checkpoint::write::config_to_gguf;
use dualgemm_checkpoint::{Checkpoint, Family, JsonFile, MlpKind, OpenOptions, Stated};
use dualgemm_gemm::Activation;
use serde_json::{Value, json};

use MlpKind::{Dense, Experts, Shared};

/// MLPs of these names in nvfp4, under a configuration.
fn at(mlps: &[&str], config: &Value, options: &OpenOptions) -> Checkpoint {
    let mut all = modelopt_config("NVFP4");
    all.as_object_mut().unwrap().remove("hidden_act");
    all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    let mut f = Fixture::with(all);
    for mlp in mlps {
        for (projection, rows, k) in [("gate_proj", 16, 32), ("up_proj", 16, 32), ("down_proj", 32, 16)] {
            f.modelopt(&format!("{mlp}.{projection}"), &Weight::new(1, rows, k), 1e-3, Some(1.0));
        }
    }
    f.open(options).unwrap()
}

/// Two layers with an MLP of each kind, under a configuration.
fn safetensors(config: &Value) -> Checkpoint {
    let mlps = [0, 1].map(|layer| {
        ["mlp", "mlp.experts.0", "mlp.shared_experts"].map(|mlp| format!("model.layers.{layer}.{mlp}"))
    });
    at(&mlps.as_flattened().iter().map(String::as_str).collect::<Vec<_>>(), config, &defaults())
}

fn f32s(numbers: &[f32]) -> GgufValue {
    let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    GgufValue::Array { element: 6, len: numbers.len() as u64, bytes }
}

/// The same as a GGUF file; entries without their architecture.
fn gguf(architecture: &str, entries: &[(&str, GgufValue)]) -> Checkpoint {
    open_gguf(architecture, entries, &gguf_mlps(2, &["", "_exps", "_shexp"]), &defaults())
}

/// Entries of GGUF metadata: text, one f32, one f64, and lists of f32, in which null is NaN.
fn entries(json: &Value) -> Vec<(&str, GgufValue)> {
    let value = |value: &Value| match value {
        Value::String(text) => GgufValue::String(text.clone()),
        Value::Array(all) => {
            f32s(&all.iter().map(|x| x.as_f64().unwrap_or(f64::NAN) as f32).collect::<Vec<_>>())
        }
        Value::Number(number) => GgufValue::F32(number.as_f64().unwrap() as f32),
        other => GgufValue::F64(other["f64"].as_f64().unwrap()),
    };
    json.as_object().unwrap().iter().map(|(key, json)| (key.as_str(), value(json))).collect()
}

#[track_caller]
fn assert_states(c: &Checkpoint, layer: usize, kind: MlpKind, stated: &str) {
    assert_eq!(c.activation(layer, kind).unwrap().to_string(), stated);
}

#[track_caller]
fn refusal(c: &Checkpoint, layer: usize, kind: MlpKind) -> String {
    let text = message(&c.activation(layer, kind).unwrap_err());
    assert_has(&text, "an activation that is asked for (--activation, in Python activation=,");
    text
}

#[test]
fn checkpoints_say_which_activation_their_mlps_have() {
    let mut checkpoint = None;
    for (number, line) in (1..).zip(include_str!("families.txt").lines()) {
        let json = |text: &str| serde_json::from_str(text).unwrap_or_else(|e| panic!("line {number}: {e}"));
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(says) = line.strip_prefix("    ") {
            let mut words = says.splitn(3, ' ');
            let kind = match words.next() {
                Some("dense") => Dense,
                Some("shared") => Shared,
                Some("experts") => Experts,
                other => panic!("line {number}: {other:?}"),
            };
            let layer = words.next().unwrap().parse().unwrap();
            let (c, says): (&Checkpoint, _) = (checkpoint.as_ref().unwrap(), words.next().unwrap());
            match says.strip_prefix("! ") {
                Some(part) => {
                    let text = refusal(c, layer, kind);
                    assert!(text.contains(part), "line {number}: {text}");
                }
                None => {
                    let stated = c.activation(layer, kind).map(|stated| stated.to_string());
                    let found = stated.unwrap_or_else(|e| e.to_string());
                    assert!(fits(&found, says), "line {number}: {found}");
                }
            }
            continue;
        }
        checkpoint = Some(if let Some(gguf_file) = line.strip_prefix("gguf ") {
            let (architecture, metadata) = gguf_file.split_once(' ').unwrap_or((gguf_file, "{}"));
            gguf(architecture, &entries(&json(metadata)))
        } else if let Some(named) = line.strip_prefix("at ") {
            let (path, config) = named.split_once(' ').unwrap();
            at(&[path], &json(config), &defaults())
        } else {
            safetensors(&json(line))
        });
    }
}

#[test]
fn a_checkpoint_says_so_to_its_validator_and_may_be_overruled() {
    let c = gguf("bailingmoe3", &[("swiglu_clamp_exp", f32s(&[0.0, 4.0]))]);
    assert!(c.validate().iter().all(|f| f.rule.id != "activation"), "{:?}", c.validate());
    // Without a configuration at all.
    let mut f = crate::common::modelopt(json!({}), Some(1.0));
    f.config = None;
    f.hf_quant_config = Some(json!({ "quantization": { "quant_algo": "NVFP4" } }));
    let e = refusal(&f.open(&defaults()).unwrap(), 0, Dense);
    assert_starts(&e, "DIR: config.json is missing, and nothing else says which activation");
    // Asked for, it is no question.
    let asked = OpenOptions { activation: Some(Activation::Relu), ..OpenOptions::default() };
    let c = f.open(&asked).unwrap();
    assert_states(&c, 0, Dense, "relu (as asked, --activation)");
    assert!(c.validate().iter().all(|finding| finding.rule.id != "activation"));
    let unasked = f.open(&defaults()).unwrap().validate();
    assert_eq!(unasked.iter().filter(|finding| finding.rule.id == "activation").count(), 1, "{unasked:?}");
    for path in ["v.blk.0", "talker.model.layers.0.mlp", "model.vit.layers.0.mlp", "embed_vision.mlp"] {
        let asked = OpenOptions { activation: Some(Activation::GeluTanh), ..defaults() };
        let c = at(&[path], &json!({ "model_type": "qwen3", "hidden_act": "silu" }), &asked);
        assert_states(&c, 0, Dense, "gelu-tanh (as asked, --activation)");
    }
}

#[test]
fn every_family_of_the_table_can_be_asked() {
    for family in Family::ALL {
        for name in family.model_types.iter().filter(|name| **name != "params.json") {
            let c = safetensors(&json!({ "model_type": name }));
            for kind in [Dense, Shared, Experts] {
                let refused = c.activation(1, kind).err().map(|e| e.to_string());
                assert!(refused.is_none_or(|e| e.contains("not implemented")), "{name}");
            }
        }
        for name in family.architectures {
            let refused = gguf(name, &[]).activation(1, Experts).err().map(|e| e.to_string());
            let known =
                |e: &String| ["not implemented", "clamp_exp is missing"].iter().any(|why| e.contains(why));
            assert!(refused.as_ref().is_none_or(known), "{name}: {refused:?}");
        }
    }
}

#[test]
fn the_corpus_of_configurations_gives_activations_or_refusals() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    let lines = include_str!("configs.txt").lines().filter(|line| !line.starts_with('#'));
    let corpus: Vec<_> = lines.map(|line| line.split_once(' ').unwrap_or((line, ""))).collect();
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), corpus.len());
    for (name, want) in corpus {
        let text = std::fs::read(folder.join(name)).unwrap();
        let config = JsonFile { path: "config.json".into(), value: serde_json::from_slice(&text).unwrap() };
        let got = Stated::of_config(&config, 1, Experts);
        let got_name = got.as_ref().map_or_else(|_| String::new(), |stated| stated.activation.to_string());
        assert_eq!(got_name, want, "{name}: {got:?}");
        // GGUF says the same, or what it has to refuse.
        let (_, metadata) = config_to_gguf(Some(&config.value), "unknown");
        for kind in [Dense, Shared, Experts] {
            let there = Stated::of_gguf(Path::new("m.gguf"), &metadata, 1, kind);
            match (Stated::of_config(&config, 1, kind), there) {
                (Ok(here), Ok(there)) => assert_eq!(here.activation, there.activation, "{name}"),
                (here, there) => assert!(there.is_err(), "{name}: {here:?}, in GGUF {there:?}"),
            }
        }
    }
}
