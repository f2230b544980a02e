//! What the rules of the validator find beside the cases of `cases/`: in directories and real scales.

use crate::common::{Fixture, defaults, modelopt_config, testdata};
use dualgemm_checkpoint::validate::{RULES, Severity};
use dualgemm_checkpoint::{Checkpoint, OpenOptions, TensorFiles, validate};
use dualgemm_formats::ScaleLayout;

#[test]
fn files_that_do_not_open_are_one_finding() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(validate(&dir.path().join("none"), &defaults())[0].rule.id, "readable");
    std::fs::write(dir.path().join("m.safetensors"), [0; 20]).unwrap();
    assert_eq!(validate(dir.path(), &defaults())[0].rule.id, "header");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n";
    std::fs::write(dir.path().join("m.safetensors"), pointer).unwrap();
    assert!(validate(dir.path(), &defaults())[0].message.contains("is a pointer of Git LFS"));
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
    assert_eq!(RULES.iter().filter(|r| r.severity == Severity::Warning).count(), 10);
}
