//! A model in ModelOpt's convention.

use std::path::Path;

use dualgemm_formats::BlockFormat;
use serde_json::{Map, Value, json};

use super::{Described, LinearOut, Model, WeightPart, float_modules, push_weight};
use crate::{Dtype, Error, TensorOut};

pub(super) fn describe<'m>(model: &'m Model<'_>, path: &Path) -> Result<Described<'m>, Error> {
    let mut tensors = Vec::new();
    for linear in &model.linears {
        if linear.weight.format() != BlockFormat::Nvfp4 {
            return Err(Error::Unsupported {
                module: format!("{}: {}", path.display(), linear.module),
                found: format!("{} in ModelOpt's convention", linear.weight.format()),
                supported: "nvfp4 is; compressed-tensors and GGUF hold mxfp4 too",
            });
        }
        let separator = if let Some(experts) = linear.experts {
            push_experts(&mut tensors, linear, experts);
            "_"
        } else {
            push_weight(&mut tensors, linear, ".weight", Dtype::F8E4m3);
            "."
        };
        let mut scale = |name, value| {
            tensors.push(TensorOut::scalar(format!("{}{separator}{name}", linear.module), &[], value));
        };
        scale("weight_scale_2", linear.weight.tensor_scale().value());
        if let Some(input) = linear.input_scale {
            scale("input_scale", input.value());
        }
    }
    let with_input = model.linears.iter().filter(|l| l.input_scale.is_some()).count();
    let algorithm = |input: bool| if input { "NVFP4" } else { "W4A16_NVFP4" };
    let ignore = float_modules(model);
    // Loaders take the dialect from the producer's name.
    let producer = json!({ "name": "modelopt", "version": concat!("dualgemm-", env!("CARGO_PKG_VERSION")) });
    let args = json!({ "dynamic": false, "num_bits": 4, "type": "float", "group_size": 16 });
    let mut config = json!({ "producer": producer, "quant_method": "modelopt" });
    let mut quantization = json!({ "kv_cache_quant_algo": model.kv_cache.algo });
    if !model.kv_cache.scheme.is_null() {
        config["kv_cache_scheme"] = model.kv_cache.scheme.clone();
    }
    if with_input == 0 || with_input == model.linears.len() {
        let input = with_input > 0;
        let mut group = json!({ "weights": args, "targets": ["Linear"] });
        if input {
            group["input_activations"] = args.clone();
        }
        config["config_groups"] = json!({ "group_0": group });
        config["ignore"] = json!(ignore);
        config["quant_algo"] = json!(algorithm(input));
        quantization["quant_algo"] = json!(algorithm(input));
        quantization["group_size"] = json!(16);
        quantization["exclude_modules"] = json!(ignore);
    } else {
        let layers: Map<String, Value> = model
            .linears
            .iter()
            .map(|l| {
                let algo = algorithm(l.input_scale.is_some());
                (l.module.clone(), json!({ "quant_algo": algo, "group_size": 16 }))
            })
            .collect();
        for json in [&mut config, &mut quantization] {
            json["quant_algo"] = json!("MIXED_PRECISION");
            json["quantized_layers"] = json!(layers);
        }
    }
    let legacy = json!({ "producer": producer, "quantization": quantization });
    Ok(Described { tensors, quantization_config: config, files: vec![("hf_quant_config.json", legacy)] })
}

/// All experts in one parameter, whose last two dimensions ModelOpt swaps back after packing.
fn push_experts<'m>(out: &mut Vec<TensorOut<'m>>, linear: &'m LinearOut<'_>, experts: usize) {
    let (module, w) = (&linear.module, &linear.weight);
    let mut push = |name: String, dtype, columns, part| {
        out.push(TensorOut::of_weights(name, dtype, [experts, columns, w.rows() / experts], part, vec![w]));
    };
    push(module.clone(), Dtype::U8, w.k() / 2, WeightPart::CodesTransposed(experts));
    push(format!("{module}_weight_scale"), Dtype::F8E4m3, w.blocks(), WeightPart::ScalesTransposed(experts));
}
