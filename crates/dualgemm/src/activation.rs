//! What a model's configuration says about the activation of its MLPs.

use dualgemm_checkpoint::{Checkpoint, Error, MlpKind, hidden_activation, model_field};
use dualgemm_gemm::Activation;
use serde_json::Value;

/// The activation that the configuration of a checkpoint names for an MLP of a layer, if it names one. A plan knows nothing
/// of checkpoints: it computes the one of its description, which is SiLU unless that says otherwise.
///
/// # Errors
/// If it names one that is not implemented, or a limit that is none.
pub fn activation(
    checkpoint: &Checkpoint,
    layer: usize,
    kind: MlpKind,
) -> Result<Option<Activation>, crate::Error> {
    let Some(config) = checkpoint.files().config() else { return Ok(None) };
    named(&config.value, layer, kind).map_err(|Fault { key, found, valid }| {
        let valid = format!("{valid}; an activation that is asked for (--activation) overrides it");
        Error::Config { file: config.path.clone(), key, found, valid }.into()
    })
}

/// An entry that cannot be followed.
#[derive(Debug)]
struct Fault {
    key: String,
    found: String,
    valid: &'static str,
}

fn positive(key: String, limit: &Value) -> Result<f32, Fault> {
    let number = limit.as_f64().map(|limit| limit as f32);
    let number = number.filter(|limit| *limit > 0.0 && limit.is_finite());
    number.ok_or_else(|| Fault { key, found: limit.to_string(), valid: "a positive number" })
}

fn named(config: &Value, layer: usize, kind: MlpKind) -> Result<Option<Activation>, Fault> {
    let field = |key| model_field(config, key);
    // Gemma 3n keeps the largest gates of some layers alone; Falcon-H1 scales its gate.
    let sparsity = field("activation_sparsity_pattern").and_then(|all| all.get(layer));
    let scale = field("mlp_multipliers").and_then(|all| all.get(0));
    for (key, number, none, valid) in [
        ("activation_sparsity_pattern", sparsity, 0.0, "0"),
        ("mlp_multipliers", scale, 1.0, "1 for the gate"),
    ] {
        if let Some(number) = number.filter(|number| number.as_f64() != Some(none)) {
            let found = format!("{number} for layer {layer}, which is not implemented");
            return Err(Fault { key: key.into(), found, valid });
        }
    }
    // Step has a limit for each layer, which is null or 0 where there is none.
    let by_layer = match kind {
        MlpKind::Experts => "swiglu_limits",
        MlpKind::Dense | MlpKind::Shared => "swiglu_limits_shared",
    };
    let limits = field(by_layer).and_then(|limits| limits.get(layer));
    if let Some(limit) = limits.filter(|limit| !limit.is_null() && limit.as_f64() != Some(0.0)) {
        let limit = positive(format!("{by_layer}[{layer}]"), limit)?;
        return Ok(Some(Activation::SwigluStep { limit }));
    }
    let limit = field("swiglu_limit").map(|limit| positive("swiglu_limit".into(), limit)).transpose()?;
    // Whoever limits it and says no more means silu.
    let silu = Value::from("silu");
    let Some(name) = hidden_activation(config).or(limit.and(Some(&silu))) else { return Ok(None) };
    // MiniMax-M3 names the function, which transformers saves as silu; the slope stays.
    let number = |key| field(key).and_then(Value::as_f64).map(|number| number as f32);
    let alpha = number("swiglu_alpha");
    let oai = alpha.is_some() || field("model_type").and_then(Value::as_str) == Some("gpt_oss");
    Ok(Some(match (name.as_str(), limit) {
        (Some("silu" | "swish" | "swigluoai"), _) if oai || name == "swigluoai" => {
            let (alpha, beta) = (alpha.unwrap_or(1.702), number("swiglu_beta").unwrap_or(1.0));
            Activation::SwigluOai { alpha, beta, limit: limit.unwrap_or(7.0) }
        }
        (Some("silu" | "swish"), Some(limit)) => Activation::ClampedSilu { limit },
        (Some("silu" | "swish"), None) => Activation::Silu,
        (Some("gelu_pytorch_tanh" | "gelu_new"), _) => Activation::GeluTanh,
        (Some("relu2"), _) => Activation::Relu2,
        _ => {
            let found = format!("{name}, which is not implemented");
            let valid = "silu, swish, swigluoai, gelu_pytorch_tanh, gelu_new or relu2";
            return Err(Fault { key: "hidden_act".into(), found, valid });
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn activations_are_read_from_the_configuration() {
        let named = |config| super::named(&config, 0, MlpKind::Dense).unwrap();
        assert_eq!(named(json!({ "hidden_act": "silu" })), Some(Activation::Silu));
        assert_eq!(
            named(json!({ "text_config": { "hidden_activation": "gelu_pytorch_tanh" } })),
            Some(Activation::GeluTanh)
        );
        assert_eq!(
            named(json!({ "model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0 })),
            Some(Activation::SWIGLU_OAI)
        );
        let minimax = json!({ "hidden_act": "swigluoai", "swiglu_limit": 6.0 });
        let oai = |alpha| Some(Activation::SwigluOai { alpha, beta: 1.0, limit: 6.0 });
        assert_eq!(named(minimax), oai(1.702));
        let saved =
            json!({ "text_config": { "hidden_act": "silu", "swiglu_limit": 6.0, "swiglu_alpha": 1.5 } });
        assert_eq!(named(saved), oai(1.5));
        assert_eq!(
            named(json!({ "hidden_act": "silu", "swiglu_limit": 10.0 })),
            Some(Activation::ClampedSilu { limit: 10.0 })
        );
        assert_eq!(
            named(json!({ "model_type": "own", "swiglu_limit": 10.0 })),
            Some(Activation::ClampedSilu { limit: 10.0 })
        );
        assert_eq!(named(json!({ "hidden_size": 576 })), None);
        assert!(super::named(&json!({ "hidden_act": "gelu" }), 0, MlpKind::Dense).is_err());
        for limit in [json!(0), json!(-7.0), json!(1e300), json!("7")] {
            let config = json!({ "hidden_act": "silu", "swiglu_limit": limit });
            let fault = super::named(&config, 0, MlpKind::Dense).unwrap_err();
            assert_eq!((fault.key.as_str(), fault.found), ("swiglu_limit", limit.to_string()));
        }
    }

    #[test]
    fn what_else_is_done_to_gates_is_refused() {
        let of = |config: Value, layer| super::named(&config, layer, MlpKind::Dense);
        let gemma = json!({ "text_config": {
            "hidden_activation": "gelu_pytorch_tanh", "activation_sparsity_pattern": [0.95, 0.0] } });
        let fault = of(gemma.clone(), 0).unwrap_err();
        assert_eq!(fault.key, "activation_sparsity_pattern");
        assert_eq!(fault.found, "0.95 for layer 0, which is not implemented");
        assert_eq!(of(gemma, 1).unwrap(), Some(Activation::GeluTanh));
        let falcon = |gate| json!({ "hidden_act": "silu", "mlp_multipliers": [gate, 0.5] });
        assert!(of(falcon(0.88), 3).is_err());
        assert_eq!(of(falcon(1.0), 3).unwrap(), Some(Activation::Silu));
    }

    #[test]
    fn limits_by_layer_are_those_of_the_layer_and_of_its_kind() {
        let config = json!({ "swiglu_limits": [null, 0.0, 7.0, -1.0], "swiglu_limits_shared": [0, 0, 16.0] });
        let named = |layer, which| super::named(&config, layer, which);
        let step = |limit| Some(Activation::SwigluStep { limit });
        assert_eq!(named(2, MlpKind::Experts).unwrap(), step(7.0));
        assert_eq!(named(2, MlpKind::Shared).unwrap(), step(16.0));
        assert_eq!(named(2, MlpKind::Dense).unwrap(), step(16.0));
        for layer in [0, 1, 4] {
            assert_eq!(named(layer, MlpKind::Experts).unwrap(), None);
        }
        let fault = named(3, MlpKind::Experts).unwrap_err();
        assert_eq!((fault.key.as_str(), fault.found.as_str()), ("swiglu_limits[3]", "-1.0"));
    }
}
