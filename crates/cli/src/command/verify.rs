//! `verify RESULT`: a result file against the f64 reference of a checkpoint's layer, or against another result.
//!
//! Both are compared block by block of rows, so that beside A the f64 values of one block are all that is in memory.
//!
//! Against a checkpoint each element has to be what a number within its bound rounds to (`dualgemm::gemm::bound`); against
//! another result there are limits on relative L2, cosine and an element beside its row, since its errors are not known.
//! A wrong result is compared with what known mistakes would give, and those that fit are named.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use dualgemm::check::{RowSample, row_blocks};
use dualgemm::gemm::{AFormat, Bounded, Comparison, Epilogue};
use serde::Serialize;

use super::Verdict;
use super::run::reference;
use crate::activation::Source;
use crate::args::{MORE, ProblemArgs};
use crate::diagnosis::{self, diagnose};
use crate::files::open_activations;
use crate::layer;
use crate::operation::{Given, Operation};
use crate::report::Output;
use crate::result::{Comparing, ResultMatrix};
use crate::scales::{Basis, labelled};
use crate::tolerance::{Statement, Tolerance};

/// Arguments of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Safetensors file with C: tensor `c` of M x N, or c_packed, c_scale and c_scale_2.
    pub result: PathBuf,
    /// Which tensor of the file is C, where it is not called `c`.
    #[arg(long, hide_short_help = true, value_name = "NAME", help_heading = MORE)]
    pub tensor: Option<String>,
    #[command(flatten)]
    pub against: Against,
    #[command(flatten)]
    pub problem: ProblemArgs,
    /// Allow this relative L2 error, whatever single elements are.
    ///
    /// Without it, each element is held to its own bound against a checkpoint; against a file to 1e-5 for f32, 1e-3 for
    /// f16, 5e-3 for bf16, 0.15 for nvfp4, or 1 ulp everywhere.
    #[arg(long, hide_short_help = true, help_heading = LIMITS, value_name = "X", value_parser = positive)]
    pub max_rel_l2: Option<f64>,
    /// Least cosine allowed; by default 1 - X², X being the relative L2 error allowed.
    #[arg(long, hide_short_help = true, help_heading = LIMITS, value_name = "Y", value_parser = cosine)]
    pub min_cosine: Option<f64>,
}

const LIMITS: &str = "What is allowed";
/// Arguments, and groups of them, that say what is computed from a checkpoint.
const COMPUTED: [&str; 7] =
    ["layer", "expert", "shared_expert", "ReadArgs", "OperationArgs", "ActivationArgs", "EpilogueArgs"];

/// What C is compared with.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Against {
    /// Safetensors file with another C. Options that say what is computed belong to --checkpoint.
    #[arg(long, value_name = "FILE", conflicts_with_all = COMPUTED)]
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

#[derive(Debug, Serialize)]
struct Report {
    result: PathBuf,
    against: String,
    /// Where the reference's A comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    a: Option<String>,
    /// Of the reference of a checkpoint.
    #[serde(flatten)]
    basis: Basis,
    m: usize,
    n: usize,
    out_dtype: AFormat,
    #[serde(flatten)]
    comparison: Comparison,
    tolerance: Tolerance,
    right: bool,
    /// Known mistakes under which the result would be right.
    explanations: Vec<&'static str>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { m, n, out_dtype, comparison: c, basis, .. } = self;
        writeln!(f, "{}: {out_dtype} [{m}, {n}]\n  against    {}", self.result.display(), self.against)?;
        if let Some(a) = &self.a {
            basis.write(f, a)?;
        }
        let compared = format!(", cosine {:.9}, all {} elements", c.cosine, c.elements);
        labelled(f, "check", Statement { found: c, tolerance: &self.tolerance, compared })?;
        for explanation in &self.explanations {
            labelled(f, "why", format!("it would be right if {explanation}"))?;
        }
        // Two files have nothing in common that could be mistaken.
        if !self.right && self.explanations.is_empty() && self.a.is_some() {
            let asked =
                "no known mistake explains it; are --layer, --input, --seed and --a-format those of the run?";
            labelled(f, "why", asked)?;
        }
        Ok(())
    }
}

/// Compares.
pub fn run(args: &VerifyArgs, output: &Output) -> anyhow::Result<Verdict> {
    let files = open_activations(&args.result)?;
    let result = ResultMatrix::find(&files, args.tensor.as_deref())?;
    let report = match (&args.against.reference, &args.against.checkpoint) {
        (Some(path), _) => against_file(args, &result, path)?,
        (None, Some(path)) => against_checkpoint(args, &result, path, output)?,
        (None, None) => bail!("--checkpoint or --reference: one of them is needed"),
    };
    output.emit(&report)?;
    Ok(report.right.into())
}

impl VerifyArgs {
    /// A limit that was asked for holds for every result.
    fn limited(&self, by_default: Tolerance) -> Tolerance {
        let tolerance = self.max_rel_l2.map_or(by_default, Tolerance::from_rel_l2);
        match self.min_cosine {
            Some(min_cosine) => Tolerance { min_cosine, max_ulp: None, within_bound: false, ..tolerance },
            None => tolerance,
        }
    }

    fn same_shape(&self, result: &ResultMatrix<'_>, what: &str, found: (usize, usize)) -> anyhow::Result<()> {
        let (m, n) = result.shape();
        if found != (m, n) {
            bail!("{}: C is [{m}, {n}]; {what} is [{}, {}]", self.result.display(), found.0, found.1);
        }
        Ok(())
    }

    fn report(
        &self,
        result: &ResultMatrix<'_>,
        against: String,
        tolerance: Tolerance,
        want: impl Fn(&RowSample) -> anyhow::Result<Vec<Bounded>>,
    ) -> anyhow::Result<Report> {
        let (m, n) = result.shape();
        let mut comparing = Comparing::new(result);
        for rows in row_blocks(m, n) {
            comparing.add(&want(&rows)?, &rows)?;
        }
        let comparison = comparing.finish()?;
        let (result, out_dtype, right) = (self.result.clone(), result.format(), tolerance.holds(&comparison));
        let (a, basis, explanations) = Default::default();
        Ok(Report { result, against, a, basis, m, n, out_dtype, comparison, tolerance, right, explanations })
    }
}

fn against_file(args: &VerifyArgs, result: &ResultMatrix<'_>, path: &Path) -> anyhow::Result<Report> {
    let files = open_activations(path)?;
    let reference = ResultMatrix::find(&files, args.tensor.as_deref())?;
    args.same_shape(result, "the reference", reference.shape())?;
    let tolerance = args.limited(Tolerance::of(result.format(), &Epilogue::default()));
    let want = |rows: &RowSample| Ok(reference.to_f64(rows).into_iter().map(Bounded::from).collect());
    args.report(result, path.display().to_string(), tolerance, want)
}

fn against_checkpoint(
    args: &VerifyArgs,
    result: &ResultMatrix<'_>,
    path: &Path,
    output: &Output,
) -> anyhow::Result<Report> {
    let ProblemArgs { layer, activations, epilogue, .. } = &args.problem;
    let checkpoint = layer::open(path, &layer.read, epilogue.activation)?;
    let source = Source::open(activations)?;
    let given = Given::of(&checkpoint, &args.problem, &source)?;
    let (operation, a) = (&given.operation, &given.a);
    let problem = given.problem(&args.problem, result.out())?;
    let (first, last) = (problem.desc.first(), problem.desc.last());
    args.same_shape(result, "the product", (first.m, last.n))?;
    let against = format!("the f64 reference of {} of {}", operation.name(), path.display());
    let mut tolerance = args.limited(Tolerance::bounded(result.format(), &last.epilogue));
    if let (Some(found), Ok(Some(given))) = (result.tensor_scale(), operation.output_scale())
        && found == given
        && tolerance.within_bound
    {
        tolerance = tolerance.under_given_scale();
    }
    let want = |rows: &RowSample| reference(&checkpoint, operation, (&problem, &a.a), rows, output);
    let mut report = args.report(result, against, tolerance, want)?;
    report.a = Some(a.origin.clone());
    // The mistakes that are known are those of gate and up.
    if let (false, Operation::GateUp(layer)) = (report.right, operation) {
        let a = dualgemm::quantize_a(&a.a, a.quantize)?;
        let problem = diagnosis::Problem { a, weights: layer.weights()?, epilogue: given.epilogue };
        report.explanations = diagnose(&problem, result, tolerance.max_rel_l2);
    }
    report.basis = given.basis(&args.problem, problem.routing.as_ref());
    Ok(report)
}
