//! GGUF files that were split; those in one piece are in `cases/gguf.txt`.

use super::cases::gguf_blocks;
use crate::common::*;
use dualgemm_checkpoint::gguf::{GgufValue, write_to};
use dualgemm_checkpoint::{Checkpoint, OpenOptions, TensorOut};

#[test]
fn a_file_that_was_split_is_opened_whole_by_the_name_of_any_part() {
    let (gate, up) = (Weight::new(1, 8, 64), Weight::new(2, 8, 64));
    let tensors = [("gate", &gate), ("up", &up)].map(|(half, w)| {
        let (dtype, bytes) = gguf_blocks(w);
        vec![TensorOut::new(format!("blk.0.ffn_{half}.weight"), dtype, [8, 64], bytes)]
    });
    let dir = tempfile::tempdir().unwrap();
    let part = |n: usize| dir.path().join(format!("m-{n:05}-of-00002.gguf"));
    for (n, tensors) in (1..).zip(&tensors) {
        let mut metadata = vec![("split.count".to_string(), GgufValue::U16(2))];
        // Only the first part has the metadata of the model.
        if n == 1 {
            metadata.push(("general.architecture".into(), GgufValue::String("gemma3".into())));
        }
        write_to(&part(n), &metadata, tensors).unwrap();
    }
    for n in [1, 2] {
        let c = Checkpoint::open(&part(n), &OpenOptions::default()).unwrap();
        let mlp = c.gate_up(0).unwrap();
        gate.assert_is(&mlp.gate);
        up.assert_is(&mlp.up);
        assert_eq!(c.files().config().unwrap().value["model_type"], "gemma3_text");
        assert!(c.validate().is_empty(), "{:?}", c.validate());
    }
    let twice = [tensors[0].clone(), tensors[1].clone()].concat();
    write_to(&part(2), &[], &twice).unwrap();
    let e = Checkpoint::open(&part(1), &OpenOptions::default()).unwrap_err().to_string();
    assert_has(&e, "header rule `duplicate`: found tensor `blk.0.ffn_gate.weight`, which");
    std::fs::remove_file(part(2)).unwrap();
    let e = Checkpoint::open(&part(1), &OpenOptions::default()).unwrap_err().to_string();
    assert_has(&e, "m-00002-of-00002.gguf: cannot open");
}
