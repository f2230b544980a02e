//! What the rules of the validator find beside the cases of `cases.txt`: in directories, padding and real scales.

use crate::common::{DOWN, Fixture, GATE, UP, Weight, defaults, findings, modelopt_config, testdata};
use dualgemm_checkpoint::validate::{RULES, Severity};
use dualgemm_checkpoint::{Checkpoint, OpenOptions, TensorFiles, validate};
use dualgemm_formats::ScaleLayout;
use serde_json::json;

fn healthy() -> Fixture {
    let mut f = Fixture::with(modelopt_config("NVFP4"));
    for (seed, module) in (0..).zip([GATE, UP, DOWN]) {
        f.modelopt(module, &Weight::new(seed, 64, 64), 1e-3, Some(0.5));
    }
    f
}

#[track_caller]
fn assert_finds(f: &Fixture, expected: &[(&str, &str, &str)]) {
    let found = findings(f);
    let got: Vec<_> = found.iter().map(|f| (f.rule.id, f.tensor.as_str(), f.value.as_str())).collect();
    assert_eq!(got, expected, "{found:#?}");
    for finding in &found {
        assert!(!finding.message.is_empty());
    }
}

#[test]
fn outside_of_what_was_asked_for_nothing_is_checked() {
    let mut f = healthy();
    f.modelopt("mtp.layers.0.mlp.gate_proj", &Weight::new(1, 64, 64), 0.0, None);
    let within = |prefix: &str| {
        let options = OpenOptions { within: Some(prefix.into()), ..defaults() };
        f.open(&options).unwrap().validate().len()
    };
    assert_eq!(within("model."), 0);
    assert!(within("mtp.") > 1 && within("") == within("mtp."));
}

#[test]
fn files_that_do_not_open_are_one_finding() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(validate(&dir.path().join("none"), &defaults())[0].rule.id, "readable");
    std::fs::write(dir.path().join("m.safetensors"), [0; 20]).unwrap();
    assert_eq!(validate(dir.path(), &defaults())[0].rule.id, "header");
}

#[test]
fn padding_that_is_not_zero_is_found() {
    let mut f = Fixture::with(json!({ "hidden_act": "silu" }));
    f.metadata.insert("_quantization_metadata".into(), r#"{"format": "nvfp4"}"#.into());
    for module in [GATE, UP] {
        let w = Weight::new(1, 100, 64);
        f.modelopt(module, &w, 1e-3, None);
        let t = f.tensor(&format!("{module}.weight_scale"));
        (t.shape, t.data) = (vec![128, 4], w.swizzled().into());
    }
    assert_finds(&f, &[]);
    // Row 127 is padding.
    let at = ScaleLayout::Sf128x4.offset(127, 0, 4);
    f.bytes(&format!("{GATE}.weight_scale"))[at] = 0x7F;
    assert_finds(&f, &[("scale-padding", &format!("{GATE}.weight"), "1 bytes")]);
}

/// Real weights under a convention with the other scale order: the heuristic speaks, and only then.
#[test]
fn real_scales_in_the_wrong_order_are_noticed_in_both_directions() {
    let files = TensorFiles::open(&testdata("modelopt-nvfp4")).unwrap();
    for swizzle_on_disk in [false, true] {
        let mut f = Fixture::with(modelopt_config("NVFP4"));
        for t in files.tensors().filter(|t| t.name.contains("gate_proj") || t.name.contains("up_proj")) {
            let bytes = if swizzle_on_disk && t.name.ends_with("weight_scale") {
                ScaleLayout::Linear.convert(t.bytes, ScaleLayout::Sf128x4, t.shape[0], t.shape[1])
            } else {
                t.bytes.to_vec()
            };
            f.add(t.name, t.dtype, t.shape, bytes);
        }
        for (read_as, wrong) in
            [(ScaleLayout::Linear, swizzle_on_disk), (ScaleLayout::Sf128x4, !swizzle_on_disk)]
        {
            let options = OpenOptions { scale_layout: Some(read_as), ..defaults() };
            let found: Checkpoint = f.open(&options).unwrap();
            let found: Vec<_> = found.validate().iter().map(|f| f.rule.id).collect();
            let expected: &[&str] = if wrong { &["scale-order", "scale-order"] } else { &[] };
            assert_eq!(found, expected, "on disk swizzled: {swizzle_on_disk}, read as {read_as}");
        }
    }
}

#[test]
fn every_rule_has_a_text_and_a_severity() {
    for rule in RULES {
        assert!(rule.doc.len() > 20, "{}", rule.id);
    }
    assert_eq!(RULES.iter().filter(|r| r.severity == Severity::Warning).count(), 6);
}
