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
use dualgemm::check::{RowSample, row_blocks};
use dualgemm::checkpoint::{Stated, TensorFiles};
use dualgemm::gemm::{AFormat, Bounded, Comparison, Epilogue};
use serde::Serialize;

use super::Verdict;
use super::run::reference;
use super::run::report::RoutingReport;
use crate::activation::{Activation, Source};
use crate::args::{ActivationArgs, EpilogueArgs, LayerArgs, OperationArgs};
use crate::diagnosis::{Problem, diagnose};
use crate::layer;
use crate::operation::Operation;
use crate::report::Output;
use crate::result::{Comparing, ResultMatrix};
use crate::scales::{ActivationReport, InputScale, MatrixReport, write_matrices};
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
    pub operation: OperationArgs,
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

/// What the reference of a checkpoint rests on.
#[derive(Default)]
struct Basis {
    matrices: Vec<MatrixReport>,
    input_scale: Option<InputScale>,
    stated: Option<Stated>,
    routing: Option<RoutingReport>,
}

type Explained = anyhow::Result<Vec<&'static str>>;

#[derive(Debug, Serialize)]
struct Report {
    result: PathBuf,
    against: String,
    /// The weights that the reference rests on, with their tensor scales.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    matrices: Vec<MatrixReport>,
    /// The tensor scale that quantizes A.
    #[serde(skip_serializing_if = "Option::is_none")]
    input_scale: Option<InputScale>,
    m: usize,
    n: usize,
    out_dtype: AFormat,
    #[serde(skip_serializing_if = "Option::is_none")]
    routing: Option<RoutingReport>,
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
        write_matrices(f, &self.matrices, 12)?;
        if let Some(a) = &self.input_scale {
            writeln!(f, "  A            {a}")?;
        }
        if let Some(routing) = &self.routing {
            writeln!(f, "  routing      {routing}")?;
        }
        let compared = format!("cosine {:.9}, all {} elements", c.cosine, c.elements);
        let statement = Statement { found: c, tolerance: &self.tolerance, compared }.to_string();
        write!(f, "  {}", statement.replace('\n', "\n  "))?;
        for explanation in &self.explanations {
            write!(f, "\n  explanation: it would be right if {explanation}")?;
        }
        // Two files have nothing in common that could be mistaken.
        if !self.right && self.explanations.is_empty() && !self.matrices.is_empty() {
            f.write_str("\n  no known mistake explains it; are --layer, --input, --seed and --a-format those of the run?")?;
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
    let finish =
        |basis: Basis, against, comparison, tolerance: Tolerance, explain: &dyn Fn() -> Explained| {
            let right = tolerance.holds(&comparison);
            let Basis { matrices, input_scale, stated, routing } = basis;
            let explanations = if right { Vec::new() } else { explain()? };
            output.emit(&Report {
                result: args.result.clone(),
                against,
                matrices,
                input_scale,
                m,
                n,
                out_dtype: result.format(),
                routing,
                activation: stated.map(Into::into),
                comparison,
                tolerance,
                right,
                explanations,
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
            finish(Basis::default(), path.display().to_string(), comparison, tolerance, &|| Ok(Vec::new()))
        }
        (None, Some(path)) => {
            let checkpoint = layer::open(path, &args.layer.read, args.epilogue.activation)?;
            let operation = Operation::of(&checkpoint, &args.operation, &args.layer)?;
            let (epilogue, stated) = operation.epilogue(&args.epilogue)?;
            let source = Source::open(&args.activations)?;
            let given = source.activation(&args.activations, operation.k()?, || operation.input_scales())?;
            let input_scale =
                InputScale::of(&given.a, given.quantize, |value| operation.input_scale_from(value));
            let Activation { a, quantize, origin } = given.ready_for(args.operation.op)?;
            let options = (&args.operation, &args.activations);
            let problem = operation.problem((&a, quantize), options, &args.epilogue, result.out())?;
            same_shape("the product", (a.rows(), problem.desc.last().n))?;
            let comparison =
                compare(&|rows| reference(&checkpoint, &operation, (&problem, &a), rows, output))?;
            let against =
                format!("the f64 reference of {} of {}, A {origin}", operation.name(), path.display());
            let tolerance = limited(Tolerance::bounded(result.format(), &problem.desc.last().epilogue));
            let tolerance = match (result.tensor_scale(), operation.output_scale()) {
                (Some(found), Ok(Some(given))) if found == given && tolerance.within_bound => {
                    tolerance.under_given_scale()
                }
                _ => tolerance,
            };
            let routing = problem.routing.as_ref();
            let matrices = operation.matrices(routing);
            let routing =
                routing.map(|routing| RoutingReport::new(routing, operation.router_weights(&args.operation)));
            let basis = Basis { matrices, input_scale, stated, routing };
            finish(basis, against, comparison, tolerance, &|| {
                // The mistakes that are known are those of gate and up.
                let Operation::GateUp(layer) = &operation else { return Ok(Vec::new()) };
                let a = dualgemm::quantize_a(&a, quantize)?;
                let problem = Problem { a, weights: layer.weights()?, epilogue };
                Ok(diagnose(&problem, &result, tolerance.max_rel_l2))
            })
        }
        (None, None) => bail!("--checkpoint or --reference: one of them is needed"),
    }
}
