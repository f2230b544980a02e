//! The real checkpoints: layer 14 of SmolLM2-135M in every convention.

use crate::common::{Weight, assert_ends, assert_has, assert_runs, input_scales, testdata};
use dualgemm_checkpoint::activations::read;
use dualgemm_checkpoint::{Checkpoint, NibbleOrder, OpenOptions, Which, validate};
use dualgemm_formats::{FloatMatrix, GlobalScaleSource, QuantizedMatrix};
use dualgemm_gemm::AOperand;

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(&testdata(name), &OpenOptions::default()).unwrap()
}

fn assert_same_bytes(a: &QuantizedMatrix<'_>, b: &QuantizedMatrix<'_>) {
    assert_eq!((a.rows(), a.k()), (b.rows(), b.k()));
    for row in 0..a.rows() {
        assert_eq!(a.row_codes(row), b.row_codes(row), "{} row {row}", a.name());
        for block in 0..a.blocks() {
            assert_eq!(a.scale_byte(row, block), b.scale_byte(row, block), "{} row {row}", a.name());
        }
    }
}

#[test]
fn every_checkpoint_opens_with_its_own_convention() {
    for (name, convention, input) in [
        ("modelopt-nvfp4", "modelopt", true),
        ("compressed-tensors-nvfp4", "compressed-tensors", true),
        ("compressed-tensors-nvfp4a16", "compressed-tensors", false),
        ("mlp-nvfp4.gguf", "gguf", false),
    ] {
        let c = open(name);
        assert_eq!(c.convention().name, convention);
        assert_eq!(c.layers(), [0]);
        let mlp = c.gate_up(0).unwrap();
        assert_eq!((mlp.gate.rows(), mlp.gate.k(), mlp.up.rows(), mlp.up.k()), (1536, 576, 1536, 576));
        assert!(mlp.gate_bias.is_none() && mlp.up_bias.is_none());
        assert_eq!(input_scales(&c).unwrap().is_some(), input, "{name}");
        let down = c.down_source(0, Which::Dense).unwrap();
        assert_eq!((down.rows(), down.k()), (576, 1536));
        assert_eq!(down.input_scale().unwrap().is_some(), input, "{name}");
        let info = c.mlps();
        assert_eq!((info.len(), info[0].quantized, info[0].fused), (1, true, false));
    }
}

#[test]
fn a_run_of_features_is_the_same_run_of_the_whole() {
    for name in ["modelopt-nvfp4", "compressed-tensors-nvfp4", "mlp-nvfp4.gguf"] {
        for nibble_order in [NibbleOrder::LoHi, NibbleOrder::HiLo] {
            let options = OpenOptions { nibble_order: Some(nibble_order), ..OpenOptions::default() };
            let c = Checkpoint::open(&testdata(name), &options).unwrap();
            if name.ends_with(".gguf") && nibble_order == NibbleOrder::HiLo {
                // Its blocks fix the order: what was asked for would be left undone.
                let e = c.gate_up_source(0, Which::Dense).unwrap_err().to_string();
                assert_has(&e, "swapped nibbles in a GGUF file is not supported");
                continue;
            }
            let (source, whole) = (c.gate_up_source(0, Which::Dense).unwrap(), c.gate_up(0).unwrap());
            assert_runs(&source.gate, &Weight::of(&whole.gate));
            assert_runs(&source.up, &Weight::of(&whole.up));
        }
    }
}

#[test]
fn modelopt_and_gguf_hold_the_same_numbers_exact() {
    let (a, b) = (open("modelopt-nvfp4"), open("mlp-nvfp4.gguf"));
    let (x, y) = (a.gate_up(0).unwrap(), b.gate_up(0).unwrap());
    for (x, y) in [
        (&x.gate, &y.gate),
        (&x.up, &y.up),
        (a.down(0).unwrap().weight.blocks().unwrap(), b.down(0).unwrap().weight.blocks().unwrap()),
    ] {
        assert_same_bytes(x, y);
        assert_eq!(x.global_scale(), y.global_scale());
    }
}

#[test]
fn conventions_agree_with_the_unquantized_weights_close() {
    let files = dualgemm_checkpoint::TensorFiles::open(&testdata("mlp-bf16.safetensors")).unwrap();
    let float = |name: &str| {
        let view = files.get(&format!("model.layers.14.mlp.{name}.weight")).unwrap();
        view.float_matrix().unwrap()
    };
    let rel = |m: &QuantizedMatrix<'_>, f: &FloatMatrix<'_>| {
        let (mut err, mut sum) = (0.0, 0.0);
        for r in 0..m.rows() {
            for k in 0..m.k() {
                let x = f64::from(f.value(r, k));
                err += (m.value(r, k) - x).powi(2);
                sum += x * x;
            }
        }
        (err / sum).sqrt()
    };
    for name in ["modelopt-nvfp4", "compressed-tensors-nvfp4", "compressed-tensors-nvfp4a16"] {
        let c = open(name);
        let mlp = c.gate_up(0).unwrap();
        for (m, f) in [
            (&mlp.gate, "gate_proj"),
            (&mlp.up, "up_proj"),
            (c.down(0).unwrap().weight.blocks().unwrap(), "down_proj"),
        ] {
            let e = rel(m, &float(f));
            // A wrong layout gives about 0.57, a wrong nibble order about 1.
            assert!((0.05..0.12).contains(&e), "{name} {f}: {e}");
        }
    }
}

#[test]
fn scales_keep_the_file_s_own_number() {
    let c = open("compressed-tensors-nvfp4");
    let mlp = c.gate_up(0).unwrap();
    let held = c.files().get("model.layers.0.mlp.gate_proj.weight_global_scale").unwrap();
    let held = held.to_f32("scale").unwrap()[0];
    assert_eq!(mlp.gate.global_scale().source(), GlobalScaleSource::Divisor(held));
    let (gate, up) = input_scales(&c).unwrap().unwrap();
    assert!(gate.value() < 1.0 && gate.value() == up.value());
    let m = open("modelopt-nvfp4");
    assert_eq!(m.gate_up(0).unwrap().gate.global_scale().source(), GlobalScaleSource::Multiplier);
}

#[test]
fn matrices_borrow_the_mapped_file() {
    let c = open("modelopt-nvfp4");
    let view = c.files().get("model.layers.0.mlp.gate_proj.weight").unwrap();
    let scales = c.files().get("model.layers.0.mlp.gate_proj.weight_scale").unwrap();
    let mlp = c.gate_up(0).unwrap();
    assert_eq!(mlp.gate.codes().as_ptr(), view.bytes.as_ptr());
    assert_eq!(mlp.gate.scales().as_ptr(), scales.bytes.as_ptr());
}

#[test]
fn real_checkpoints_break_no_rule() {
    for name in
        ["modelopt-nvfp4", "compressed-tensors-nvfp4", "compressed-tensors-nvfp4a16", "mlp-nvfp4.gguf"]
    {
        let findings = validate(&testdata(name), &OpenOptions::default());
        let messages: Vec<_> = findings.iter().map(|f| f.message.as_str()).collect();
        assert!(messages.is_empty(), "{name}: {messages:#?}");
    }
}

#[test]
fn a_missing_layer_says_which_exist() {
    let e = open("modelopt-nvfp4").gate_up(14).unwrap_err().to_string();
    assert_ends(&e, "modelopt-nvfp4: no gated MLP in layer 14; there is one in layer 0");
}

#[test]
fn float_checkpoints_are_not_taken_for_quantized_ones() {
    let path = testdata("mlp-bf16.safetensors");
    let e = Checkpoint::open(&path, &OpenOptions::default()).unwrap_err().to_string();
    assert_has(&e, "its weights are floats (BF16), not 4 bits; quantize it first: dualgemm quantize ");
    let options = OpenOptions { convention: Some("modelopt".into()), ..Default::default() };
    let c = Checkpoint::open(&path, &options).unwrap();
    assert_eq!(
        c.gate_up(14).unwrap_err().to_string(),
        "model.layers.14.mlp.gate_proj: is not quantized: `model.layers.14.mlp.gate_proj.weight` is BF16; \
         a 4-bit weight (nvfp4 or mxfp4) is needed"
    );
}

#[test]
fn activations_are_found_in_float_files_and_triples() {
    let files = dualgemm_checkpoint::TensorFiles::open(&testdata("hidden-states-f32.safetensors")).unwrap();
    let a = read(&files, None).unwrap();
    assert_eq!((a.rows(), a.k()), (64, 576));
    assert!(matches!(a, AOperand::Float(FloatMatrix::F32(_))));
    let files =
        dualgemm_checkpoint::TensorFiles::open(&testdata("expected-modelopt-nvfp4.safetensors")).unwrap();
    let AOperand::Quantized(q) = read(&files, None).unwrap() else { panic!("the triple") };
    assert_eq!((q.rows(), q.k()), (64, 576));
    let c = read(&files, Some("c_w4a4")).unwrap();
    assert_eq!((c.rows(), c.k()), (64, 1536));
}
