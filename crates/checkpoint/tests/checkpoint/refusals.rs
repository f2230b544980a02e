//! What a file says of a weight and nobody knows: it refuses the weight, by name, and no other.

use crate::common::*;
use serde_json::{Value, json};

/// The gate projection is refused with this text, and the down projection is, or is not.
#[track_caller]
fn assert_transformed(f: &Fixture, says: Option<&str>, down: bool) {
    let c = f.open(&defaults()).unwrap();
    match says {
        Some(says) => {
            let e = refusal(c.gate_up(0));
            assert!(
                e.starts_with(&format!("{GATE}: `{says}")) && e.contains("changes what the weights mean"),
                "{e}"
            );
            assert!(c.validate().iter().any(|f| f.rule.id == "unsupported" && f.tensor == GATE));
        }
        None => drop(c.gate_up(0).unwrap()),
    }
    assert_eq!(c.down(0).is_err(), down);
}

#[test]
fn rotations_at_run_time_refuse_what_they_concern_in_every_convention() {
    let with = |mut config: Value, key: &str, value: &Value| {
        config["quantization_config"][key] = value.clone();
        config
    };
    let fixtures = |key: &str, value: &Value| {
        let auto_round = json!({ "quantization_config": { "quant_method": "auto-round", "bits": 4, "data_type": "nv_fp",
            "group_size": 16 } });
        let groups: [(&[&str], u64, Value); 1] = [(&["Linear"], 16, Value::Null)];
        vec![
            compressed(with(auto_round, key, value), None),
            compressed(with(compressed_config(&groups), key, value), None),
            modelopt(with(modelopt_config("W4A16_NVFP4"), key, value), None),
        ]
    };
    let level = json!([{ "dtype": "fp4", "group_size": 16 }, { "dtype": "fp8_e4m3" }]);
    let lines = include_str!("transforms.txt").lines().filter(|l| !l.is_empty() && !l.starts_with('#'));
    let mut lines = lines.peekable();
    let mut cases = 0;
    while let Some(case) = lines.next() {
        let (key, value) = case.split_once(" = ").unwrap();
        let value: Value = serde_json::from_str(value).unwrap();
        let refused = lines.next_if(|line| line.starts_with("    ")).unwrap_or_default().trim();
        let (gate, of_down) = match refused.strip_prefix("gate ") {
            Some(rest) => (Some(rest.trim_start_matches("down ")), rest.starts_with("down ")),
            None => (None, refused == "down"),
        };
        let fixtures = match key.strip_prefix("quark ") {
            None => fixtures(key, &value),
            Some(key) => vec![quark(json!({ "global_quant_config": { "weight": level }, key: value }))],
        };
        for f in fixtures {
            assert_transformed(&f, gate, of_down);
        }
        cases += 1;
    }
    assert_eq!(cases, 37);
    // The older file of ModelOpt, too.
    let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
    f.hf_quant_config = Some(json!({ "quantization": { "quant_algo": "W4A16_NVFP4", "rotate": true } }));
    assert_transformed(&f, Some("rotate: true`"), true);
}

fn quark(config: Value) -> Fixture {
    let mut config = json!({ "hidden_act": "silu", "quantization_config": config });
    config["quantization_config"]["quant_method"] = json!("quark");
    modelopt(config, None)
}
