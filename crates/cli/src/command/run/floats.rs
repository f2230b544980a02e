//! `run --op linear` of a layer whose weights are floats: read where they lie, on the processor, and compared with f64.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use dualgemm::OwnedMatrix;
use dualgemm::check::RowSample;
use dualgemm::checkpoint::{Checkpoint, Dtype, TensorView, linear};
use dualgemm::cpu::{CpuOptions, FloatLinear, Isa};
use dualgemm::formats::{BlockFormat, FloatMatrix};
use dualgemm::gemm::{AFormat, AOperand, Bounded, DualGemmDesc, Epilogue, OutFormat, QuantizeA};
use dualgemm_bench::Timing;
use rayon::prelude::*;
use serde::Serialize;

use super::report::ErrorReport;
use super::{RunArgs, protocol, sample};
use crate::activation::{Activation, Source};
use crate::args::{DeviceArg, OpArg, OperationArgs};
use crate::command::Verdict;
use crate::machine::Machine;
use crate::report::{Output, Time};
use crate::result::{matrix_of, write};
use crate::tolerance::{Statement, Tolerance};

#[derive(Debug, Serialize)]
struct Report {
    checkpoint: PathBuf,
    convention: &'static str,
    op: &'static str,
    module: String,
    /// Of the weights.
    dtype: String,
    a: String,
    m: usize,
    n: usize,
    k: usize,
    a_format: AFormat,
    out_dtype: &'static str,
    device: &'static str,
    device_name: String,
    kernel: String,
    threads: usize,
    #[serde(flatten)]
    timing: Timing,
    gflops: f64,
    /// Of the weights, which are read once.
    gbps: f64,
    #[serde(flatten)]
    error: Option<ErrorReport>,
    output: Option<PathBuf>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { module, dtype, m, n, k, kernel, threads, timing, .. } = self;
        writeln!(f, "linear of {module} of {} ({})", self.checkpoint.display(), self.convention)?;
        writeln!(f, "  weights  {dtype} [{n}, {k}], read where they lie")?;
        writeln!(f, "  A        {}", self.a)?;
        writeln!(f, "  kernel   {kernel}, {threads} threads on {}", self.device_name)?;
        let time = |us: f64| Time(Duration::from_secs_f64(us * 1e-6));
        let Timing { median_us, p10_us, p90_us, runs } = *timing;
        writeln!(
            f,
            "  time     {} (median of {runs}, 80 % within {} to {}), {:.1} GFLOP/s, {:.1} GB/s of weights",
            time(median_us),
            time(p10_us),
            time(p90_us),
            self.gflops,
            self.gbps
        )?;
        match &self.error {
            Some(e) => {
                let compared = format!("against the f64 reference, {}", e.sample);
                let statement = Statement { found: &e.comparison, tolerance: &e.tolerance, compared };
                write!(f, "  error    {}", statement.to_string().replace('\n', "\n           "))?;
            }
            None => write!(f, "  error    not compared")?,
        }
        match &self.output {
            Some(path) => write!(f, "\n  output   {} [{m}, {n}] to {}", self.out_dtype, path.display()),
            None => Ok(()),
        }
    }
}

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
        return Err(of_four_bits(if args.activations.quantize.is_some() {
            "--quantize"
        } else {
            "A in 4 bits"
        }));
    }
    let (epilogue, out) = (&args.epilogue, args.out_dtype);
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
    output: &Output,
) -> anyhow::Result<Verdict> {
    let w = weight.float_matrix()?;
    let (n, k, module) = (w.rows(), w.cols(), args.operation.module.clone().unwrap_or_default());
    let bias = checkpoint.files().get(&format!("{module}.bias"));
    let bias = bias.map(|bias| bias.to_f32("a bias")).transpose()?;
    let source = Source::open(&args.activations)?;
    let Activation { a, quantize, origin } = source.activation(&args.activations, k, || Ok(None))?;
    check(args, weight.dtype, (&a, quantize))?;
    let AOperand::Float(a) = a else { unreachable!("checked") };
    let m = a.rows();
    let out = match args.out_dtype {
        AFormat::F16 => OutFormat::F16,
        AFormat::Bf16 => OutFormat::Bf16,
        _ => OutFormat::F32,
    };
    let options = CpuOptions { isa: args.isa, ..CpuOptions::default() };
    let mut runner = FloatLinear::new(m, k, options)?;
    let format = AFormat::of(&AOperand::Float(a.clone()));
    let desc = DualGemmDesc { out, ..DualGemmDesc::linear(m, n, k, format, BlockFormat::Nvfp4) };
    let mut c = OwnedMatrix::of_c("C", &desc)?;
    let timing = protocol(args.repeat.map(|runs| runs as usize), 1)
        .measure(|_| runner.run(&a, &w, bias.as_deref(), c.output(m, n)))?;
    if let Some(path) = &args.output {
        write(&c, path, (m, n))?;
    }
    let compare = |sample: RowSample| -> anyhow::Result<ErrorReport> {
        let want = reference(&a, &w, bias.as_deref(), &sample);
        let c = matrix_of(&c, (m, n))?;
        let (comparison, tolerance) =
            (c.compare(&want, &sample)?, Tolerance::bounded(c.format(), &Epilogue::default()));
        let right = tolerance.holds(&comparison);
        Ok(ErrorReport { comparison, rows_compared: sample.rows().len(), sample, tolerance, right })
    };
    let error = sample(args.check, m, (n * k) as f64).map(compare).transpose()?;
    let right = error.as_ref().is_none_or(|e| e.right);
    let isa = args.isa.map_or_else(Isa::detect, Isa::require)?;
    output.emit(&Report {
        checkpoint: args.checkpoint.clone(),
        convention: checkpoint.convention().name,
        op: args.operation.op.name(),
        module,
        dtype: weight.dtype.to_string(),
        a: origin,
        m,
        n,
        k,
        a_format: format,
        out_dtype: out.name(),
        device: "cpu",
        device_name: Machine::detect().cpu_model,
        kernel: format!("float-linear {isa}"),
        threads: rayon::current_num_threads(),
        timing,
        gflops: 2e-3 * (m * n) as f64 * k as f64 / timing.median_us,
        gbps: 1e-3 * weight.bytes.len() as f64 / timing.median_us,
        error,
        output: args.output.clone(),
    })?;
    Ok(right.into())
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
