//! A model in the compressed-tensors convention.

use dualgemm_formats::BlockFormat;
use serde_json::{Map, Value, json};

use super::{Described, KvCache, LinearOut, Model, divisor, float_modules, push_weight};
use crate::{Dtype, Error, TensorOut, linear};

/// What a group of layers has in common: block format, and whether activations have a stored scale.
type Kind = (BlockFormat, bool);

fn kind(linear: &LinearOut<'_>) -> Kind {
    (linear.weight.format(), linear.input_scale.is_some())
}

fn format_name(format: BlockFormat) -> &'static str {
    match format {
        BlockFormat::Nvfp4 => "nvfp4-pack-quantized",
        BlockFormat::Mxfp4 => "mxfp4-pack-quantized",
    }
}

fn group((format, input): Kind, targets: Vec<&str>) -> Value {
    let scale_dtype = match format {
        BlockFormat::Nvfp4 => "torch.float8_e4m3fn",
        BlockFormat::Mxfp4 => "torch.uint8",
    };
    let strategy = match format {
        BlockFormat::Nvfp4 => "tensor_group",
        BlockFormat::Mxfp4 => "group",
    };
    let args = |dynamic: Value| {
        json!({
            "num_bits": 4, "type": "float", "strategy": strategy, "group_size": format.block_len(),
            "symmetric": true, "dynamic": dynamic, "scale_dtype": scale_dtype,
        })
    };
    json!({
        "format": format_name(format),
        "targets": targets,
        "weights": args(json!(false)),
        "input_activations": if input { args(json!("local")) } else { Value::Null },
        "output_activations": null,
    })
}

pub(super) fn describe<'m>(model: &'m Model<'_>) -> Result<Described<'m>, Error> {
    let mut tensors = Vec::new();
    let mut kinds: Vec<Kind> = Vec::new();
    for linear in &model.linears {
        if !kinds.contains(&kind(linear)) {
            kinds.push(kind(linear));
        }
        let scale_dtype = match linear.weight.format() {
            BlockFormat::Nvfp4 => Dtype::F8E4m3,
            BlockFormat::Mxfp4 => Dtype::U8,
        };
        push_weight(&mut tensors, linear, ".weight_packed", scale_dtype);
        let mut scale = |name: &str, value| {
            let name = format!("{}.{name}", linear.module);
            tensors.push(TensorOut::scalar(name.as_str(), &[1], divisor(value, &name)?));
            Ok::<(), Error>(())
        };
        if linear.weight.format() == BlockFormat::Nvfp4 {
            scale("weight_global_scale", linear.weight.tensor_scale())?;
        }
        if let Some(input) = linear.input_scale {
            scale("input_global_scale", input)?;
        }
    }
    let one = kinds.len() <= 1;
    let groups: Map<String, Value> = kinds
        .iter()
        .enumerate()
        .map(|(i, &k)| {
            let names = || model.linears.iter().filter(|l| kind(l) == k).map(|l| l.module.as_str()).collect();
            (format!("group_{i}"), group(k, if one { vec!["Linear"] } else { names() }))
        })
        .collect();
    let format = match kinds.as_slice() {
        [(format, _)] => format_name(*format),
        [] => "dense",
        [..] => "mixed-precision",
    };
    // Its groups speak of linear layers alone.
    let is_linear = |module: &String| linear::kept(module) != Some(linear::Kept::Embedding);
    let ignore: Vec<String> = float_modules(model).into_iter().filter(is_linear).collect();
    let KvCache { scheme, algo } = &model.kv_cache;
    if scheme.is_null() && !algo.is_null() {
        return Err(Error::Unsupported {
            module: "kv_cache_quant_algo".into(),
            found: algo.to_string(),
            supported: "compressed-tensors declares FP8, and what kv_cache_scheme says",
        });
    }
    let config = json!({
        "config_groups": groups,
        "format": format,
        "ignore": ignore,
        "kv_cache_scheme": scheme,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    });
    Ok(Described { tensors, quantization_config: config, files: Vec::new() })
}
