//! What is known of packed weights beside their bytes, and what callers say of activations.

use dualgemm::checkpoint::LinearSource;
use dualgemm::formats::{Float, FloatType, GlobalScale, match_floats};
use dualgemm::gemm::{AFormat, QuantizeA, WeightRef};
use pyo3::prelude::*;

use crate::array::Array;
use crate::error::{Kind, refuse};

/// Of one product: gate and up, or a linear layer.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Of the tensors.
    pub names: Vec<String>,
    pub n: usize,
    pub k: usize,
    pub format: AFormat,
    /// One for each tensor, multipliers.
    pub global_scales: Vec<f32>,
    /// By which A is quantized, a multiplier.
    pub input_scale: Option<f32>,
}

impl Facts {
    /// Of a pair of weights, or a linear layer's.
    pub fn of<'w>(weights: impl Into<WeightRef<'w>>, input_scale: Option<f32>) -> Self {
        let weights = weights.into();
        let (format, n, k) = weights.shape();
        let matrices = match weights {
            WeightRef::GateUp(pair) => [&pair.gate, &pair.up].map(|m| (m.name(), m.global_scale())).into(),
            WeightRef::Linear(layer) => vec![(layer.weight.name(), layer.weight.global_scale())],
        };
        let (names, global_scales) =
            matrices.into_iter().map(|(name, scale)| (name.into(), scale.value())).unzip();
        Self { names, n, k, format, global_scales, input_scale }
    }

    /// Of `n` rows each of matrices of one shape in a checkpoint.
    pub fn found(sources: &[&LinearSource<'_>], n: usize, input_scale: Option<f32>) -> Self {
        Self {
            names: sources.iter().map(|source| source.name()).collect(),
            n,
            k: sources[0].k(),
            format: sources[0].format(),
            global_scales: sources.iter().map(|source| source.tensor_scale.value()).collect(),
            input_scale,
        }
    }

    /// How A is quantized, as a caller says it: None, "static", "dynamic" or a number.
    pub fn quantize(&self, argument: &str, how: &Bound<'_, PyAny>) -> PyResult<QuantizeA> {
        if how.is_none() {
            return Ok(QuantizeA::No);
        }
        // True is a number to Python, and numpy's too; as a tensor scale nobody means it.
        let is_bool = how.get_type().name()?.to_string().starts_with("bool");
        if let (false, Ok(scale)) = (is_bool, how.extract::<f64>()) {
            return Ok(QuantizeA::Static(scale as f32));
        }
        match how.str()?.extract::<String>()?.as_str() {
            // Both words are of the products in 4 bits.
            "dynamic" | "static" if self.format.block_format().is_none() => Ok(QuantizeA::No),
            "dynamic" => Ok(QuantizeA::Dynamic),
            "static" => self.input_scale.map(QuantizeA::Static).ok_or_else(|| {
                let name = &self.names[0];
                Kind::Operand.raise(format!(
                    "{name}: has no input scale; {argument}=\"dynamic\" or a number is needed"
                ))
            }),
            other => {
                let message = format!(
                    "{argument} `{other}` is unknown; valid are None, \"static\", \"dynamic\" or a number"
                );
                Err(Kind::Argument.raise(message))
            }
        }
    }
}

/// The scale of what goes into a linear layer of a checkpoint if there is a usable one: weights can be used without, and
/// `static` says so then.
pub fn linear_input_scale(linear: &LinearSource<'_>) -> Option<f32> {
    linear.input_scale().ok().flatten().map(GlobalScale::value)
}

/// An input scale as a caller gives it.
pub fn checked_input_scale(argument: &str, scale: Option<f32>) -> PyResult<()> {
    match scale {
        Some(scale) if !(scale > 0.0 && scale.is_finite()) => {
            Err(Kind::Operand.raise(format!("{argument}: is {scale}; a positive finite number is needed")))
        }
        _ => Ok(()),
    }
}

pub fn values(name: &str, bias: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<f32>>> {
    let Some(bias) = bias else { return Ok(None) };
    let array = Array::on_cpu(name, bias)?;
    if array.shape.len() != 1 {
        refuse!(Operand, "{name}: shape {:?}; [N] is needed", array.shape);
    }
    float_values(name, &array).map(Some)
}

/// All elements of an array of floats.
pub fn float_values(name: &str, array: &Array<'_>) -> PyResult<Vec<f32>> {
    Ok(match_floats!(array.float_type(name)?, FloatType[T] => {
        array.gather::<T>(name)?.into_iter().map(Float::value).collect()
    }))
}
