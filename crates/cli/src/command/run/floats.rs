//! `run --op linear` of a layer whose weights are floats: read where they lie, on the processor, and compared with f64.

use anyhow::bail;
use dualgemm::OwnedMatrix;
use dualgemm::check::RowSample;
use dualgemm::checkpoint::{Checkpoint, Dtype, TensorView, linear};
use dualgemm::cpu::{CpuOptions, FloatLinear, Isa};
use dualgemm::formats::{BlockFormat, FloatMatrix, ScaleLayout};
use dualgemm::gemm::{AFormat, AOperand, Bounded, DualGemmDesc, Epilogue, OutScale, QuantizeA};
use rayon::prelude::*;

use super::report::{ErrorReport, Report};
use super::{RunArgs, protocol, sample};
use crate::activation::{Activation, Source};
use crate::args::{DeviceArg, OpArg, OperationArgs, out_format};
use crate::machine::Machine;
use crate::result::{matrix_of, write};
use crate::tolerance::Tolerance;

/// The weight of the layer that is asked for, if it is in floats.
pub(super) fn weight<'c>(checkpoint: &'c Checkpoint, args: &OperationArgs) -> Option<TensorView<'c>> {
    let module = args.module.as_deref().filter(|_| args.op == OpArg::Linear)?;
    if checkpoint.quantized_modules().any(|quantized| quantized == module) {
        return None;
    }
    let files = checkpoint.files();
    let found = files.get(&format!("{module}.weight")).or_else(|| files.get(module))?;
    linear::linear_weight(found.name, found.dtype, found.shape).is_some().then_some(found)
}

/// Refuses what is for weights in 4 bits.
fn check(args: &RunArgs, dtype: Dtype, (a, quantize): (&AOperand<'_>, QuantizeA)) -> anyhow::Result<()> {
    let of_four_bits =
        |option: &str| anyhow::anyhow!("{option}: is for weights in 4 bits; these are {dtype}");
    if args.device != DeviceArg::Cpu {
        bail!("--device: weights in {dtype} are multiplied on the processor alone");
    }
    if quantize != QuantizeA::No || !matches!(a, AOperand::Float(_)) {
        return Err(of_four_bits(if args.problem.activations.quantize.is_some() {
            "--quantize"
        } else {
            "A in 4 bits"
        }));
    }
    let (epilogue, out) = (&args.problem.epilogue, args.out_dtype);
    for (option, asked) in [
        ("--strategy", args.strategy.is_some()),
        ("--activation", epilogue.activation.is_some()),
        ("--round-gate-up-to-bf16", epilogue.round_gate_up_to_bf16),
        ("--out-dtype nvfp4", out == AFormat::Nvfp4),
        ("--out-scale-layout", args.out_scale_layout.is_some()),
    ] {
        if asked {
            return Err(of_four_bits(option));
        }
    }
    Ok(())
}

/// Computes, compares, writes.
pub(super) fn run(
    args: &RunArgs,
    checkpoint: &Checkpoint,
    weight: &TensorView<'_>,
    source: &Source,
) -> anyhow::Result<Report> {
    let w = weight.float_matrix()?;
    let (n, k) = (w.rows(), w.cols());
    let module = args.problem.operation.module.as_deref().unwrap_or_default();
    let bias = checkpoint.files().get(&format!("{module}.bias"));
    let bias = bias.map(|bias| bias.to_f32("a bias")).transpose()?;
    let Activation { a, quantize, origin } = source.activation(&args.problem.activations, k, || Ok(None))?;
    check(args, weight.dtype, (&a, quantize))?;
    let format = AFormat::of(&a);
    let AOperand::Float(a) = a else { unreachable!("checked") };
    let m = a.rows();
    let out = out_format(args.out_dtype, ScaleLayout::Linear, OutScale::Dynamic);
    let desc = DualGemmDesc { out, ..DualGemmDesc::linear(m, n, k, format, BlockFormat::Nvfp4) };
    let options = CpuOptions { isa: args.processor.isa, ..CpuOptions::default() };
    let mut runner = FloatLinear::new(m, k, options)?;
    let mut c = OwnedMatrix::of_c("C", &desc)?;
    let timing = protocol(args.repeat.map(|runs| runs as usize), 1)
        .measure(|_| runner.run(&a, &w, bias.as_deref(), c.output(m, n)))?;
    if let Some(path) = &args.output {
        write(&c, path, (m, n))?;
    }
    let compare = |sample: RowSample| -> anyhow::Result<ErrorReport> {
        let want = reference(&a, &w, bias.as_deref(), &sample);
        let c = matrix_of(&c, (m, n))?;
        let tolerance = Tolerance::bounded(c.format(), &Epilogue::default());
        Ok(ErrorReport::new(c.compare(&want, &sample)?, tolerance, sample))
    };
    let isa = args.processor.isa.map_or_else(Isa::detect, Isa::require)?;
    Ok(Report {
        dtype: Some(weight.dtype.to_string()),
        a: origin,
        device_name: Machine::detect().cpu_model,
        kernel: format!("float-linear {isa}"),
        threads: rayon::current_num_threads(),
        gflops: Some(desc.flops() * 1e-3 / timing.median_us),
        gbps: Some(1e-3 * weight.bytes.len() as f64 / timing.median_us),
        error: sample(args.check, m, (n * k) as f64).map(compare).transpose()?,
        ..Report::new(args, checkpoint, desc, format, timing)
    })
}

/// C of the sampled rows in f64, and what f32 may be off by.
fn reference(
    a: &FloatMatrix<'_>,
    w: &FloatMatrix<'_>,
    bias: Option<&[f32]>,
    sample: &RowSample,
) -> Vec<Bounded> {
    let (n, k) = (w.rows(), w.cols());
    let element = |at: usize| {
        let (row, feature) = (sample.rows()[at / n], at % n);
        let products = (0..k).map(|k| f64::from(a.value(row, k)) * f64::from(w.value(feature, k)));
        let sums = products.fold([0.0, 0.0], |[sum, magnitudes], x| [sum + x, magnitudes + x.abs()]);
        Bounded::product(k, sums, 1.0, bias.map_or(0.0, |bias| bias[feature].into()))
    };
    (0..sample.rows().len() * n).into_par_iter().map(element).collect()
}
