//! A: read from a file or generated, then brought into the format that was asked for.

use anyhow::{Context as _, bail};
use dualgemm::checkpoint::{TensorFiles, activations};
use dualgemm::formats::{FloatMatrix, FloatType};
use dualgemm::gemm::{AFormat, AOperand, QuantizeA};
use dualgemm_bench::inputs::Inputs;

use crate::args::{ActivationArgs, OpArg, QuantizeArg};
use crate::files::open_activations;
use crate::layer::InputScales;

/// Rows of a generated A.
const DEFAULT_M: usize = 64;
/// Seed of a generated A.
pub const DEFAULT_SEED: u64 = 0;

/// A ready to be multiplied.
#[derive(Debug)]
pub struct Activation<'a> {
    /// The operand.
    pub a: AOperand<'a>,
    /// Whether the operation quantizes it.
    pub quantize: QuantizeA,
    /// Where it comes from and what was done to it, for people.
    pub origin: String,
}

impl<'a> Activation<'a> {
    /// As an operation takes it. A dynamic scale is that of all tokens of a mixture, also of those without an expert.
    pub fn ready_for(self, op: OpArg) -> anyhow::Result<Self> {
        if op != OpArg::Moe || self.quantize != QuantizeA::Dynamic {
            return Ok(self);
        }
        let AOperand::Quantized(a) = dualgemm::quantize_a(&self.a, self.quantize)? else { return Ok(self) };
        Ok(Self { a: AOperand::Quantized(a), quantize: QuantizeA::No, origin: self.origin })
    }
}

/// The files that A comes from, kept open while A is in use.
#[derive(Debug)]
pub struct Source {
    files: Option<TensorFiles>,
}

impl Source {
    /// Opens `--input`, if there is one.
    pub fn open(args: &ActivationArgs) -> anyhow::Result<Self> {
        Ok(Self { files: args.input.as_deref().map(open_activations).transpose()? })
    }

    /// A for a layer whose weights have this K. `input_scales` is asked for the checkpoint's scales if A will be
    /// quantized.
    pub fn activation(
        &self,
        args: &ActivationArgs,
        k: usize,
        input_scales: impl FnOnce() -> anyhow::Result<Option<InputScales>>,
    ) -> anyhow::Result<Activation<'_>> {
        let (a, from) = match &self.files {
            Some(files) => {
                let a = activations::read(files, args.input_tensor.as_deref())?;
                if a.k() != k {
                    let (file, m, found) = (files.root().display(), a.rows(), a.k());
                    bail!("{file}: A is [{m}, {found}]; the weights of the layer need [M, {k}]");
                }
                (a, files.root().display().to_string())
            }
            None => {
                let seed = args.seed.unwrap_or(DEFAULT_SEED);
                (generate(args, k)?, format!("generated with seed {seed}"))
            }
        };
        let shape = format!("{from} [{}, {k}]", a.rows());
        let quantizes = args.a_format == Some(AFormat::Nvfp4) || args.quantize == Some(QuantizeArg::Static);
        let dynamic = args.quantize == Some(QuantizeArg::Dynamic);
        let is_float = matches!(a, AOperand::Float(_));
        prepare(a, shape, args, if is_float && quantizes && !dynamic { input_scales()? } else { None })
    }
}

/// Normally distributed numbers, bf16 unless another float format is asked for.
fn generate(args: &ActivationArgs, k: usize) -> anyhow::Result<AOperand<'static>> {
    let (m, seed) = (args.m.unwrap_or(DEFAULT_M), args.seed.unwrap_or(DEFAULT_SEED));
    if m == 0 {
        bail!("--m: is 0; at least one row is needed");
    }
    m.checked_mul(k).filter(|&n| n <= isize::MAX as usize / 8).with_context(|| {
        format!("--m: {m} rows of {k} do not fit the address space; fewer rows are needed")
    })?;
    // The memory is asked for where a refusal is an error.
    if Vec::<f32>::new().try_reserve_exact(m * k).is_err() {
        bail!("--m: {m} rows of {k} do not fit the memory; fewer rows are needed");
    }
    let dtype = args.a_format.and_then(AFormat::float_type).unwrap_or(FloatType::Bf16);
    Ok(AOperand::Float(Inputs::seeded(seed).floats("generated A", dtype, m, k)?))
}

/// Rounds or marks for quantization what `--a-format` and `--quantize` ask for. `input_scales` are the checkpoint's.
fn prepare<'a>(
    a: AOperand<'a>,
    from: String,
    args: &ActivationArgs,
    input_scales: Option<InputScales>,
) -> anyhow::Result<Activation<'a>> {
    let held = AFormat::of(&a);
    let float = match a {
        AOperand::Quantized(_) => {
            if args.quantize.is_some() {
                bail!("{from}: is {held} already; --quantize is for float activations");
            }
            return match args.a_format {
                None | Some(AFormat::Nvfp4) => {
                    Ok(Activation { a, quantize: QuantizeA::No, origin: format!("{from}, {held}") })
                }
                Some(other) => bail!("{from}: is {held}; --a-format {other} needs float activations"),
            };
        }
        AOperand::Float(float) => float,
    };
    let wants_nvfp4 = args.a_format == Some(AFormat::Nvfp4) || args.quantize.is_some();
    if !wants_nvfp4 {
        let (float, done) = round(float, args.a_format)?;
        let origin = format!("{from}, {}", done.unwrap_or_else(|| held.to_string()));
        return Ok(Activation { a: AOperand::Float(float), quantize: QuantizeA::No, origin });
    }
    // `--a-format bf16 --quantize dynamic` rounds first and quantizes then.
    let round_to = args.a_format.filter(|&f| f != AFormat::Nvfp4);
    let (float, done) = round(float, round_to)?;
    let rounded = done.unwrap_or_else(|| held.to_string());
    if let Some((row, col)) = float.not_finite() {
        // Quantizers make some finite code of it.
        bail!(
            "{from}: element [{row},{col}] is {} in {rounded}, which nvfp4 does not have; finite numbers are needed, or \
             activations that stay floats",
            float.value(row, col)
        );
    }
    let (quantize, how) = match (args.quantize, input_scales) {
        (Some(QuantizeArg::Dynamic), _) => (QuantizeA::Dynamic, "its own scale (dynamic)".to_string()),
        (None, None) => {
            (QuantizeA::Dynamic, "its own scale (dynamic: the checkpoint has no input scale)".to_string())
        }
        (Some(QuantizeArg::Static), None) => {
            bail!("--quantize static: the checkpoint has no input scale for this layer; dynamic is possible")
        }
        (Some(QuantizeArg::Static) | None, Some(scales)) => {
            (QuantizeA::Static(scales.used()), format!("the checkpoint's input scale {scales}"))
        }
    };
    let origin = format!("{from}, {rounded}, quantized to nvfp4 with {how}");
    Ok(Activation { a: AOperand::Float(float), quantize, origin })
}

/// The matrix in another float type; says what was done if anything was.
fn round(float: FloatMatrix<'_>, to: Option<AFormat>) -> anyhow::Result<(FloatMatrix<'_>, Option<String>)> {
    let from = float.float_type();
    let Some(to) = to.and_then(AFormat::float_type).filter(|&to| to != from) else {
        return Ok((float, None));
    };
    let how = if to == FloatType::F32 { "widened" } else { "rounded" };
    let said = format!("{} {how} to {}", AFormat::from(from), AFormat::from(to));
    Ok((FloatMatrix::rounded("A", to, float.rows(), float.cols(), float.values())?, Some(said)))
}

#[cfg(test)]
mod tests {
    use dualgemm::formats::Matrix;
    use half::bf16;

    use super::*;

    fn args(a_format: Option<AFormat>, quantize: Option<QuantizeArg>) -> ActivationArgs {
        ActivationArgs { input: None, input_tensor: None, a_format, quantize, m: None, seed: None }
    }

    fn f32_row() -> AOperand<'static> {
        let values: Vec<f32> = (0..16).map(|i| 1.0 + i as f32 * 1e-4).collect();
        AOperand::Float(FloatMatrix::F32(Matrix::new("A", 1, 16, values).unwrap()))
    }

    fn prepared(
        a_format: Option<AFormat>,
        quantize: Option<QuantizeArg>,
        scale: Option<f32>,
    ) -> Activation<'static> {
        let scales = scale.map(|scale| InputScales { gate: scale, up: scale });
        prepare(f32_row(), "x".into(), &args(a_format, quantize), scales).unwrap()
    }

    #[test]
    fn floats_stay_as_they_are_unless_asked() {
        let a = prepared(None, None, Some(0.5));
        assert_eq!((a.a, a.quantize, a.origin.as_str()), (f32_row(), QuantizeA::No, "x, f32"));
    }

    #[test]
    fn rounding_is_to_the_nearest_value() {
        let a = prepared(Some(AFormat::Bf16), None, None);
        assert_eq!(AFormat::of(&a.a), AFormat::Bf16);
        assert_eq!(a.a.value(0, 15), f64::from(bf16::from_f32(1.0015).to_f32()));
        assert_eq!(a.origin, "x, f32 rounded to bf16");
    }

    #[test]
    fn what_nvfp4_does_not_have_is_refused_where_it_would_be_quantized() {
        let of = |value: f32, a_format, quantize| {
            let mut values = [1.0; 32];
            values[17] = value;
            let a = AOperand::Float(FloatMatrix::F32(Matrix::new("A", 2, 16, values.to_vec()).unwrap()));
            prepare(a, "x".into(), &args(a_format, quantize), None).map_err(|e| e.to_string())
        };
        let (nvfp4, dynamic) = (Some(AFormat::Nvfp4), Some(QuantizeArg::Dynamic));
        for (value, a_format, quantize) in [
            (f32::NAN, nvfp4, None),
            (f32::INFINITY, None, dynamic),
            // Rounded to infinity first.
            (1e30, Some(AFormat::F16), dynamic),
        ] {
            let message = of(value, a_format, quantize).unwrap_err();
            assert!(message.starts_with("x: element [1,1] is ") && message.contains("nvfp4"), "{message}");
        }
        assert!(of(f32::NAN, None, None).is_ok() && of(1e30, nvfp4, None).is_ok());
    }

    #[test]
    fn nvfp4_takes_the_checkpoints_scale_and_says_so_or_falls_back_to_its_own() {
        let of = |a: Activation<'_>| (AFormat::of(&a.a), a.quantize);
        let nvfp4 = Some(AFormat::Nvfp4);
        assert_eq!(of(prepared(nvfp4, None, Some(0.5))), (AFormat::F32, QuantizeA::Static(0.5)));
        assert_eq!(of(prepared(nvfp4, None, None)), (AFormat::F32, QuantizeA::Dynamic));
        assert_eq!(
            of(prepared(nvfp4, Some(QuantizeArg::Dynamic), Some(0.5))),
            (AFormat::F32, QuantizeA::Dynamic)
        );
        let bf16 = Some(AFormat::Bf16);
        assert_eq!(
            of(prepared(bf16, Some(QuantizeArg::Static), Some(0.5))),
            (AFormat::Bf16, QuantizeA::Static(0.5))
        );
        let error =
            prepare(f32_row(), "x".into(), &args(nvfp4, Some(QuantizeArg::Static)), None).unwrap_err();
        assert!(error.to_string().contains("no input scale"), "{error}");
    }

    #[test]
    fn of_two_input_scales_the_larger_is_taken_and_named() {
        for (gate, up, said) in [
            (1e-3, 3e-2, "3e-2 of up (static; the larger of two, that of gate is 1e-3)"),
            (3e-2, 1e-3, "3e-2 of gate (static; the larger of two, that of up is 1e-3)"),
            (3e-2, 3e-2, "3e-2 (static)"),
        ] {
            let args = args(Some(AFormat::Nvfp4), None);
            let a = prepare(f32_row(), "x".into(), &args, Some(InputScales { gate, up })).unwrap();
            assert_eq!(a.quantize, QuantizeA::Static(3e-2));
            assert_eq!(
                a.origin,
                format!("x, f32, quantized to nvfp4 with the checkpoint's input scale {said}")
            );
        }
    }

    #[test]
    fn generated_rows_follow_the_seed() {
        let make = |seed, m| {
            let args = ActivationArgs { m: Some(m), seed: Some(seed), ..args(None, None) };
            generate(&args, 32)
        };
        assert_eq!(make(1, 3).unwrap(), make(1, 3).unwrap());
        assert_ne!(make(1, 3).unwrap(), make(2, 3).unwrap());
        assert_eq!(make(1, 0).unwrap_err().to_string(), "--m: is 0; at least one row is needed");
        assert!(make(1, usize::MAX).is_err());
    }
}
