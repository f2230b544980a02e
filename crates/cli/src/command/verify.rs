//! `verify RESULT`: a result file against the f64 reference of a checkpoint's layer, or against another result.
//!
//! Both are compared block by block of rows, so that beside A the f64 values of one block are all that is in memory.
//!
//! Against a checkpoint each element has to be what a number within its bound rounds to (`dualgemm::gemm::bound`); against
//! another result there are limits on relative L2, cosine and an element beside its row, since its errors are not known.
//! A wrong result is compared with what known mistakes would give, and those that fit are named.

use std::fmt;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use dualgemm::check::{RowSample, bounded_rows, row_blocks};
use dualgemm::checkpoint::{Stated, TensorFiles};
use dualgemm::gemm::{AFormat, Bounded, Comparison, Epilogue};
use serde::Serialize;

use super::Verdict;
use crate::activation::{Activation, Source};
use crate::args::{ActivationArgs, EpilogueArgs, LayerArgs};
use crate::diagnosis::{Problem, diagnose};
use crate::layer::{self, Layer};
use crate::report::Output;
use crate::result::{Comparing, ResultMatrix};
use crate::scales::Scales;
use crate::tolerance::{Statement, Tolerance};

/// Arguments of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Safetensors file with C: tensor `c` of M x N, or c_packed, c_scale and c_scale_2.
    pub result: PathBuf,
    /// Which tensor of the file is C, where it is not called `c`.
    #[arg(long, value_name = "NAME")]
    pub tensor: Option<String>,
    #[command(flatten)]
    pub against: Against,
    #[command(flatten)]
    pub layer: LayerArgs,
    #[command(flatten)]
    pub activations: ActivationArgs,
    #[command(flatten)]
    pub epilogue: EpilogueArgs,
    /// Allow this relative L2 error, whatever single elements are. Without it, each element is held to its own bound against
    /// a checkpoint; against a file to 1e-5 for f32, 1e-3 for f16, 5e-3 for bf16, 0.15 for nvfp4, or 1 ulp everywhere.
    #[arg(long, value_name = "X", value_parser = positive)]
    pub max_rel_l2: Option<f64>,
    /// Least cosine allowed; by default 1 - X², X being the relative L2 error allowed.
    #[arg(long, value_name = "Y", value_parser = cosine)]
    pub min_cosine: Option<f64>,
}

/// What C is compared with.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Against {
    /// Safetensors file with another C.
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Checkpoint that C was computed from; --layer, --input and so on say how, as for run.
    #[arg(long, value_name = "CHECKPOINT")]
    pub checkpoint: Option<PathBuf>,
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x: &f64| x.is_finite() && *x > 0.0)
        .ok_or_else(|| "a positive number is needed".into())
}

fn cosine(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|x| (-1.0..=1.0).contains(x));
    found.ok_or_else(|| "a number from -1 to 1 is needed".into())
}

/// The activation of the reference, and what says so.
#[derive(Debug, Serialize)]
struct ActivationReport {
    activation: dualgemm::gemm::Activation,
    activation_from: String,
}

impl From<Stated> for ActivationReport {
    fn from(stated: Stated) -> Self {
        Self { activation: stated.activation, activation_from: stated.origin.to_string() }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    result: PathBuf,
    against: String,
    /// Which tensor scales the reference rests on.
    #[serde(skip_serializing_if = "Option::is_none")]
    scales: Option<Scales>,
    m: usize,
    n: usize,
    out_dtype: AFormat,
    #[serde(flatten)]
    activation: Option<ActivationReport>,
    #[serde(flatten)]
    comparison: Comparison,
    tolerance: Tolerance,
    right: bool,
    /// Known mistakes under which the result would be right.
    explanations: Vec<&'static str>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { m, n, out_dtype, comparison: c, .. } = self;
        writeln!(f, "{}: {out_dtype} [{m}, {n}], against {}", self.result.display(), self.against)?;
        if let Some(ActivationReport { activation, activation_from }) = &self.activation {
            writeln!(f, "  activation   {activation} ({activation_from})")?;
        }
        if let Some(Scales { gate, up, a }) = &self.scales {
            writeln!(f, "  gate         {gate}")?;
            writeln!(f, "  up           {up}")?;
            if let Some(a) = a {
                writeln!(f, "  A            {a}")?;
            }
        }
        let compared = format!("cosine {:.9}, all {} elements", c.cosine, c.elements);
        let statement = Statement { found: c, tolerance: &self.tolerance, compared }.to_string();
        write!(f, "  {}", statement.replace('\n', "\n  "))?;
        for explanation in &self.explanations {
            write!(f, "\n  explanation: it would be right if {explanation}")?;
        }
        Ok(())
    }
}

/// Compares.
pub fn run(args: &VerifyArgs, output: &Output) -> anyhow::Result<Verdict> {
    let files = TensorFiles::open(&args.result)?;
    let result = ResultMatrix::find(&files, args.tensor.as_deref())?;
    let (m, n) = result.shape();
    // A limit that was asked for holds for every result.
    let limited = |by_default: Tolerance| {
        let tolerance = args.max_rel_l2.map_or(by_default, Tolerance::from_rel_l2);
        match args.min_cosine {
            Some(min_cosine) => Tolerance { min_cosine, max_ulp: None, within_bound: false, ..tolerance },
            None => tolerance,
        }
    };
    let compare = |want: &dyn Fn(&RowSample) -> anyhow::Result<Vec<Bounded>>| {
        let mut comparing = Comparing::new(&result);
        for rows in row_blocks(m, n) {
            comparing.add(&want(&rows)?, &rows)?;
        }
        comparing.finish()
    };
    let finish = |stated: Option<(Scales, Stated)>,
                  against,
                  comparison,
                  tolerance: Tolerance,
                  explain: &dyn Fn() -> Vec<&'static str>| {
        let right = tolerance.holds(&comparison);
        let (scales, activation) = stated.unzip();
        output.emit(&Report {
            result: args.result.clone(),
            against,
            scales,
            m,
            n,
            out_dtype: result.format(),
            activation: activation.map(Into::into),
            comparison,
            tolerance,
            right,
            explanations: if right { Vec::new() } else { explain() },
        })?;
        Ok(right.into())
    };
    let same_shape = |what: &str, found: (usize, usize)| {
        if found != (m, n) {
            bail!("{}: C is [{m}, {n}]; {what} is [{}, {}]", args.result.display(), found.0, found.1);
        }
        Ok(())
    };
    match (&args.against.reference, &args.against.checkpoint) {
        (Some(path), _) => {
            let files = TensorFiles::open(path)?;
            let reference = ResultMatrix::find(&files, args.tensor.as_deref())?;
            same_shape("the reference", reference.shape())?;
            let comparison =
                compare(&|rows| Ok(reference.to_f64(rows).into_iter().map(Bounded::from).collect()))?;
            let tolerance = limited(Tolerance::of(result.format(), &Epilogue::default()));
            finish(None, path.display().to_string(), comparison, tolerance, &Vec::new)
        }
        (None, Some(path)) => {
            let checkpoint = layer::open(path, &args.layer.read, args.epilogue.activation)?;
            let layer = Layer::of(&checkpoint, &args.layer)?;
            let (epilogue, stated) = layer::epilogue(&layer, &args.epilogue)?;
            let weights = layer.weights()?;
            let (n, k) = (weights.n(), weights.k());
            let source = Source::open(&args.activations)?;
            let input_scales = || Ok(layer.input_scales()?);
            let Activation { a, quantize, origin } = source.activation(&args.activations, k, input_scales)?;
            let scales = layer.scales(&a, quantize);
            let a = dualgemm::quantize_a(&a, quantize)?;
            same_shape("the product", (a.rows(), n))?;
            let bar = output.progress("reference", n * row_blocks(m, n).count());
            let progress = |done: usize| bar.inc(done as u64);
            let comparison = compare(&|rows| Ok(bounded_rows(&epilogue, &a, rows, &weights, &progress)?))?;
            bar.finish_and_clear();
            let against =
                format!("the f64 reference of layer {} of {}, A {origin}", layer.number, path.display());
            let problem = Problem { a, weights, epilogue };
            let tolerance = limited(Tolerance::bounded(result.format(), &epilogue));
            let tolerance = match (result.tensor_scale(), layer.output_scale()) {
                (Some(found), Ok(Some(given))) if found == given && tolerance.within_bound => {
                    tolerance.under_given_scale()
                }
                _ => tolerance,
            };
            finish(Some((scales, stated)), against, comparison, tolerance, &|| {
                diagnose(&problem, &result, tolerance.max_rel_l2)
            })
        }
        (None, None) => bail!("--checkpoint or --reference: one of them is needed"),
    }
}
