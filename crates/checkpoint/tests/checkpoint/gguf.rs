//! GGUF files as llama.cpp writes them.

use crate::common::*;
use dualgemm_checkpoint::gguf::{GgufValue, write_to};
use dualgemm_checkpoint::{
    Checkpoint, Dtype, GateUpOrder,
    MlpKind::{Dense, Experts},
    OpenOptions, TensorOut,
};
use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout, gguf};

fn open(tensors: &[TensorOut<'_>], options: &OpenOptions) -> Checkpoint {
    open_gguf("llama", &[], tensors, options)
}

fn blocks(w: &Weight) -> Vec<u8> {
    let (codes, scales, global) = (w.codes.clone(), w.scales.clone(), GlobalScale::ONE);
    let m = QuantizedMatrix::new(
        "w",
        BlockFormat::Nvfp4,
        w.rows,
        w.k,
        codes,
        scales,
        ScaleLayout::Linear,
        global,
    );
    gguf::from_matrix(&m.unwrap()).unwrap()
}

fn weight(name: &str, shape: &[usize], bytes: Vec<u8>) -> TensorOut<'static> {
    TensorOut::new(name, Dtype::from_ggml(Dtype::GGML_NVFP4).unwrap(), shape, bytes)
}

fn floats(name: &str, values: &[f32]) -> TensorOut<'static> {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    TensorOut::new(name, Dtype::F32, [values.len()], bytes)
}

#[test]
fn a_missing_scale_is_1_and_a_stored_one_is_applied_once() {
    let (gate, up) = (Weight::new(1, 8, 64), Weight::new(2, 8, 64));
    let mut tensors = vec![
        weight("blk.0.ffn_gate.weight", &[8, 64], blocks(&gate)),
        weight("blk.0.ffn_up.weight", &[8, 64], blocks(&up)),
    ];
    let c = open(&tensors, &OpenOptions::default());
    let mlp = c.gate_up(0).unwrap();
    gate.assert_is(&mlp.gate);
    assert_eq!(mlp.gate.global_scale(), GlobalScale::ONE);
    assert_eq!(input_scales(&c).unwrap(), None);
    let plain = mlp.up.value(3, 5);
    tensors.push(floats("blk.0.ffn_up.scale", &[0.25]));
    tensors.push(floats("blk.0.ffn_gate.input_scale", &[0.5]));
    tensors.push(floats("blk.0.ffn_up.input_scale", &[0.5]));
    let c = open(&tensors, &OpenOptions::default());
    let mlp = c.gate_up(0).unwrap();
    assert_eq!(mlp.up.value(3, 5), plain * 0.25);
    assert_eq!(mlp.gate.global_scale(), GlobalScale::ONE);
    assert_eq!(input_scales(&c).unwrap().unwrap().0.value(), 0.5);
}

#[test]
fn fused_experts_are_gate_rows_then_up_rows_unless_named_otherwise() {
    let weights: Vec<Weight> = (0..2).map(|e| Weight::new(30 + e, 16, 128)).collect();
    let tensors = [
        weight("blk.3.ffn_gate_up_exps.weight", &[2, 16, 128], weights.iter().flat_map(blocks).collect()),
        floats("blk.3.ffn_gate_up_exps.scale", &[0.5, 0.25]),
        floats("blk.3.ffn_gate_up_exps.bias", &[0.0; 32]),
    ];
    let c = open(&tensors, &OpenOptions::default());
    for (e, w) in weights.iter().enumerate() {
        let mlp = expert(&c, 3, e).unwrap();
        w.rows_at(0..8).assert_is(&mlp.gate);
        w.rows_at(8..16).assert_is(&mlp.up);
        assert_eq!(mlp.up.global_scale().value(), [0.5, 0.25][e]);
        assert_eq!(mlp.gate_bias.unwrap().len(), 8);
    }
    let options = OpenOptions { gate_up_order: Some(GateUpOrder::UpGate), ..OpenOptions::default() };
    let c = open(&tensors, &options);
    weights[1].rows_at(0..8).assert_is(&expert(&c, 3, 1).unwrap().up);
}

#[test]
fn other_types_are_named_as_not_quantized() {
    let q8 = Dtype::from_ggml(8).unwrap();
    let tensors = [
        TensorOut::new("blk.0.ffn_gate.weight", q8, [2, 32], vec![0; 68]),
        TensorOut::new("blk.0.ffn_up.weight", q8, [2, 32], vec![0; 68]),
    ];
    let e = open(&tensors, &OpenOptions::default()).gate_up(0).unwrap_err().to_string();
    assert_eq!(
        e,
        "blk.0.ffn_gate: is not quantized: its type is Q8_0 [2, 32]; a 4-bit weight (nvfp4 or mxfp4) is needed"
    );
}

#[test]
fn a_file_that_was_split_is_opened_whole_by_the_name_of_any_part() {
    let (gate, up) = (Weight::new(1, 8, 64), Weight::new(2, 8, 64));
    let tensors = [
        vec![weight("blk.0.ffn_gate.weight", &[8, 64], blocks(&gate))],
        vec![weight("blk.0.ffn_up.weight", &[8, 64], blocks(&up))],
    ];
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

#[test]
fn architectures_that_fuse_gate_into_up_are_read_as_they_are() {
    let (gate, up) = (Weight::new(1, 8, 64), Weight::new(2, 8, 64));
    let both = weight("blk.0.ffn_up.weight", &[16, 64], blocks(&gate.stacked(&up)));
    let apart = [
        weight("blk.0.ffn_gate.weight", &[8, 64], blocks(&gate)),
        weight("blk.0.ffn_up.weight", &[8, 64], blocks(&up)),
    ];
    let open = |architecture: &str, tensors: &[TensorOut<'_>]| {
        open_gguf(architecture, &[], tensors, &OpenOptions::default())
    };
    for architecture in ["phi3", "glm4", "chatglm", "plamo2", "plamo3"] {
        for tensors in [std::slice::from_ref(&both), &apart] {
            let c = open(architecture, tensors);
            let mlp = c.gate_up(0).unwrap();
            gate.assert_is(&mlp.gate);
            up.assert_is(&mlp.up);
            assert!(c.validate().is_empty(), "{:?}", c.validate());
        }
    }
    let e = open("starcoder2", &[both]).gate_up(0).unwrap_err().to_string();
    assert_ends(&e, "(`blk.0` has up and down projections, but no gate)");
}

#[test]
fn gguf_scales_have_two_names_and_no_third() {
    let open = |tensors: &[(&str, f32)]| {
        let w = Weight::with_block(1, 32, 64, 32);
        let mut blocks = Vec::new();
        for (codes, scale) in w.codes.chunks(16).zip(&w.scales) {
            let code = |k: usize| codes[k / 2] >> (4 * (k % 2)) & 15;
            blocks.push(*scale);
            blocks.extend((0..16).map(|j| code(j) | code(j + 16) << 4));
        }
        let dtype = Dtype::from_ggml(Dtype::GGML_MXFP4).unwrap();
        let mut all: Vec<TensorOut<'_>> = ["gate", "up"]
            .map(|p| TensorOut::new(format!("blk.0.ffn_{p}.weight"), dtype, [32, 64], blocks.clone()))
            .into();
        all.extend(tensors.iter().map(|(name, value)| TensorOut::scalar(*name, &[1], *value)));
        open_gguf("llama", &[], &all, &defaults())
    };
    let w = Weight::with_block(1, 32, 64, 32);
    let c = open(&[("blk.0.ffn_gate.weight.scale", 0.25), ("blk.0.ffn_up.scale", 0.5)]);
    let both = c.gate_up(0).unwrap();
    assert_values(&both.gate, &w, 0.25);
    assert_values(&both.up, &w, 0.5);
    for (names, refused) in [
        (&["blk.0.ffn_gate.weight_scale"][..], "blk.0.ffn_gate.weight_scale"),
        (&["blk.0.ffn_gate.weight.scale2"], "blk.0.ffn_gate.weight.scale2"),
        (&["blk.0.ffn_gate.lora_a"], "blk.0.ffn_gate.lora_a"),
        (&["blk.0.ffn_gate.scale", "blk.0.ffn_gate.weight.scale"], "blk.0.ffn_gate.weight.scale"),
    ] {
        let c = open(&names.iter().map(|name| (*name, 0.5)).collect::<Vec<_>>());
        assert_starts(&refusal(c.gate_up(0)), &format!("{refused}: belongs to `blk.0.ffn_gate`"));
        assert_eq!(rules(&c), ["unknown-tensor"]);
    }
    assert_eq!(rules(&open(&[("blk.0.ffn_gate_inp.weight", 0.5), ("blk.0.exp_probs_b.bias", 0.5)])), [""; 0]);
}

#[test]
fn of_a_layer_in_gguf_the_feed_forward_tensors_count() {
    for (beside, alone) in [
        ("attn_norm", true),
        ("ffn_norm", true),
        ("post_ffw_norm", true),
        ("ffn_gate_inp", true),
        ("exp_probs_b", true),
        ("ffn_sub_norm", false),
        ("ffn_up_chexps", false),
        ("ffn_latent_down", false),
    ] {
        let mut tensors = gguf_mlps(1, &["", "_exps"]);
        tensors.push(TensorOut::new(format!("blk.0.{beside}.weight"), Dtype::F32, [2], vec![0; 8]));
        let c = open_gguf("qwen3moe", &[], &tensors, &defaults());
        for found in [c.check_whole(0, Dense), c.check_whole(0, Experts), c.check_mixture(0, false)] {
            assert_eq!(found.is_ok(), alone, "{beside}: {found:?}");
        }
    }
}
