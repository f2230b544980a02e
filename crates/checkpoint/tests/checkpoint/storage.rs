//! How codes and scales are stored: swizzled, padded, flat, swapped, in typed and untyped bytes.

use crate::common::*;
use dualgemm_checkpoint::{Checkpoint, Dtype, NibbleOrder, OpenOptions};
use dualgemm_formats::ScaleLayout;
use serde_json::{Value, json};

fn torchao(swizzled: bool) -> Fixture {
    let mut f = Fixture::default();
    for (m, w, s) in [(GATE, gate(), 1e-3), (UP, up(), 2e-3), (DOWN, down(), 3e-3)] {
        f.add(&format!("{m}._weight_qdata"), Dtype::U8, &[w.rows, w.k / 2], w.codes.clone());
        let (rows, cols) = (32 * w.rows.div_ceil(128), 16 * w.k.div_ceil(64));
        let (shape, scales) =
            if swizzled { ([rows, cols], w.swizzled()) } else { ([w.rows, w.k / 16], w.scales.clone()) };
        f.add(&format!("{m}._weight_scale"), Dtype::F8E4m3, &shape, scales);
        f.f32(&format!("{m}._weight_per_tensor_scale"), &[], &[s]);
        f.f32(&format!("{m}._weight_act_per_tensor_scale"), &[], &[0.5]);
        let data = json!({ "_type": "NVFP4Tensor", "_tensor_data_names": ["qdata", "scale"],
            "_data": { "block_size": 16, "is_swizzled_scales": swizzled } });
        f.metadata.insert(format!("{m}.weight"), data.to_string());
    }
    f.metadata.insert("tensor_names".into(), json!([format!("{GATE}.weight")]).to_string());
    f
}

#[test]
fn torchao_is_declared_by_metadata_in_both_scale_layouts() {
    for swizzled in [false, true] {
        let c = torchao(swizzled).open(&defaults()).unwrap();
        assert_eq!(c.convention().name, "torchao");
        assert_mlp(&c, [1e-3, 2e-3], Some(0.5));
        let layout = if swizzled { ScaleLayout::Sf128x4 } else { ScaleLayout::Linear };
        assert_eq!(c.gate_up(0).unwrap().gate.scale_layout(), layout);
        down().assert_is(&c.down(0).unwrap().weight);
    }
    let mut f = torchao(false);
    f.metadata.insert(
        format!("{GATE}.weight"),
        json!({ "_type": "NVFP4Tensor", "_data": { "block_size": 32 } }).to_string(),
    );
    assert_ends(&open_error(&f), "block_size is 32; valid is 16");
    let mut f = torchao(false);
    f.metadata.insert(format!("{GATE}.weight"), json!({ "_type": "Int4Tensor" }).to_string());
    assert_has(&open_error(&f), r#"is not quantized: tensor type "Int4Tensor""#);
}

/// 100 rows, so that stored scales have padding rows.
fn comfyui(declare: impl Fn(&mut Fixture, &str)) -> Fixture {
    let mut f = Fixture::default();
    for (m, seed) in [(GATE, 11), (UP, 12)] {
        let w = Weight::new(seed, 100, 64);
        f.modelopt(m, &w, 1e-3, Some(0.5));
        let scale = f.tensor(&format!("{m}.weight_scale"));
        (scale.shape, scale.data) = (vec![128, 4], w.swizzled().into());
        swap_nibbles(&mut f, m);
        declare(&mut f, m);
    }
    f
}

fn swap_nibbles(f: &mut Fixture, module: &str) {
    f.bytes(&format!("{module}.weight")).iter_mut().for_each(|b| *b = b.rotate_left(4));
}

#[test]
fn comfyui_scales_and_nibbles_are_read_in_their_own_order() {
    let marker = |f: &mut Fixture, m: &str| {
        f.add(&format!("{m}.comfy_quant"), Dtype::U8, &[19], br#"{"format": "nvfp4"}"#.to_vec());
    };
    let layers = |f: &mut Fixture, _: &str| {
        let layers = json!({ "layers": { GATE: { "format": "nvfp4" }, UP: { "format": "nvfp4" } } });
        f.metadata.insert("_quantization_metadata".into(), layers.to_string());
    };
    let all = |f: &mut Fixture, _: &str| {
        f.metadata.insert("_quantization_metadata".into(), r#"{"format": "nvfp4"}"#.into());
    };
    for f in [comfyui(marker), comfyui(layers), comfyui(all)] {
        let c = f.open(&defaults()).unwrap();
        assert_eq!(c.convention().name, "comfyui");
        let mlp = c.gate_up(0).unwrap();
        assert_eq!(mlp.gate.scale_layout(), ScaleLayout::Sf128x4);
        Weight::new(11, 100, 64).assert_is(&mlp.gate);
        Weight::new(12, 100, 64).assert_is(&mlp.up);
        assert!(input_scales(&c).unwrap().is_some());
        let options = OpenOptions { nibble_order: Some(NibbleOrder::LoHi), ..defaults() };
        let swapped = Weight::new(11, 100, 64).codes[0].rotate_left(4);
        assert_eq!(f.open(&options).unwrap().gate_up(0).unwrap().gate.row_codes(0)[0], swapped);
    }
    let fp8 = |f: &mut Fixture, m: &str| {
        f.add(&format!("{m}.comfy_quant"), Dtype::U8, &[26], br#"{"format":"float8_e4m3fn"}"#.to_vec());
    };
    let e = comfyui(fp8).open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
    assert_has(&e, r#"is not quantized: format "float8_e4m3fn""#);
}

#[test]
fn padded_scales_under_a_linear_convention_are_refused_with_the_way_out() {
    let mut f = comfyui(|_, _| ());
    f.config = Some(modelopt_config("NVFP4"));
    let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
    assert_eq!(
        e,
        format!(
            "{GATE}.weight_scale: shape [128, 4] cannot be block scales; valid is [100, 4] for `{GATE}.weight` of \
             100 rows and K = 64 in linear order, 400 bytes; the size is that of 128x4 order, which can be named \
             explicitly"
        )
    );
    let (scale_layout, nibble_order) = (Some(ScaleLayout::Sf128x4), Some(NibbleOrder::HiLo));
    let options = OpenOptions { scale_layout, nibble_order, ..defaults() };
    Weight::new(11, 100, 64).assert_is(&f.open(&options).unwrap().gate_up(0).unwrap().gate);
}

#[test]
fn flat_byte_scales_are_in_the_kernel_s_order() {
    for rows in [100, 128] {
        let w = Weight::new(21, rows, 64);
        let mut f = w4a16();
        for m in [GATE, UP] {
            f.modelopt(m, &w, 1e-3, None);
            let scale = f.tensor(&format!("{m}.weight_scale"));
            (scale.dtype, scale.shape, scale.data) = (Dtype::U8, vec![512], w.swizzled().into());
        }
        w.assert_is(&f.open(&defaults()).unwrap().gate_up(0).unwrap().gate);
        // Any other length is no layout of these codes.
        let scale = f.tensor(&format!("{GATE}.weight_scale"));
        (scale.shape, scale.data) = (vec![511], vec![0x38; 511].into());
        assert!(f.open(&defaults()).unwrap().gate_up(0).is_err());
    }
}

#[test]
fn swapped_nibbles_are_an_explicit_option() {
    let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
    for m in [GATE, UP] {
        swap_nibbles(&mut f, m);
    }
    let options = OpenOptions { nibble_order: Some(NibbleOrder::HiLo), ..defaults() };
    assert_mlp(&f.open(&options).unwrap(), [1e-3, 2e-3], None);
    let c = f.open(&defaults()).unwrap();
    let read = c.gate_up(0).unwrap();
    assert_ne!(read.gate.row_codes(0), &gate().codes[..32]);
}

#[test]
fn f4_shapes_count_elements() {
    let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
    for m in [GATE, UP] {
        let t = f.tensor(&format!("{m}.weight"));
        (t.dtype, t.shape) = (Dtype::F4, vec![128, 64]);
    }
    assert_mlp(&f.open(&defaults()).unwrap(), [1e-3, 2e-3], None);
}

#[test]
fn wrong_storage_types_and_shapes_are_named() {
    type Change = (&'static str, fn(&mut Fixture), &'static str);
    let changes: [Change; 5] = [
        (
            "scale columns",
            |f| {
                let t = f.tensor("model.layers.0.mlp.gate_proj.weight_scale");
                (t.shape, t.data) = (vec![128, 5], vec![0x38; 640].into());
            },
            "model.layers.0.mlp.gate_proj.weight_scale: shape [128, 5] cannot be block scales; valid is [128, 4]",
        ),
        (
            "scale type",
            |f| f.tensor("model.layers.0.mlp.gate_proj.weight_scale").dtype = Dtype::F8E5m2,
            "model.layers.0.mlp.gate_proj.weight_scale: stored as F8_E5M2; nvfp4 block scales must be F8_E4M3 or U8",
        ),
        (
            "K",
            |f| {
                let t = f.tensor("model.layers.0.mlp.gate_proj.weight");
                (t.shape, t.data) = (vec![128, 33], vec![0; 128 * 33].into());
            },
            "model.layers.0.mlp.gate_proj.weight: shape [128, 33] cannot be a quantized weight; valid is at least one row and K a positive multiple of 16 (nvfp4); K is 66",
        ),
        (
            "tensor scale",
            |f| {
                let t = f.tensor("model.layers.0.mlp.gate_proj.weight_scale_2");
                (t.shape, t.data) = (vec![2], vec![0; 8].into());
            },
            "model.layers.0.mlp.gate_proj.weight_scale_2: shape [2] cannot be a tensor scale; valid is one value",
        ),
        (
            "halves",
            |f| {
                let w = Weight::new(9, 64, 64);
                f.tensors.retain(|t| !t.name.contains("up_proj"));
                f.modelopt("model.layers.0.mlp.up_proj", &w, 1e-3, None);
            },
            "model.layers.0.mlp.gate_proj.weight is nvfp4 [128, 64] and model.layers.0.mlp.up_proj.weight is nvfp4 [64, 64]; gate and up must have one shape",
        ),
    ];
    for (what, change, expected) in changes {
        let mut f = modelopt(modelopt_config("W4A16_NVFP4"), None);
        change(&mut f);
        let e = f.open(&defaults()).unwrap().gate_up(0).unwrap_err().to_string();
        assert!(e.starts_with(expected), "{what}: {e}");
    }
}

#[test]
fn a_lone_file_can_describe_itself() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = modelopt(Value::Null, None);
    f.config = Some(json!({ "quantization_config": { "quant_method": "compressed-tensors" } }));
    let config = json!({ "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4" });
    f.metadata.insert("quantization_config".into(), config.to_string());
    f.write(dir.path());
    // What happens to lie beside it says nothing about it.
    let c = Checkpoint::open(&dir.path().join("model.safetensors"), &defaults()).unwrap();
    assert_mlp(&c, [1e-3, 2e-3], None);
}
