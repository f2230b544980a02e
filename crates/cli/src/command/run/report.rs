//! What `run` reports.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use dualgemm::AnyPlan;
use dualgemm::check::RowSample;
use dualgemm::gemm::{AFormat, Comparison, OutFormat, OutScale, RouterWeights};
use dualgemm_bench::{Bound, Timing, Work};
use serde::Serialize;

use crate::computation::Routed;
use crate::limits::Limits;
use crate::report::{Bytes, Time, counted};
use crate::routing::OwnedRouting;
use crate::scales::{ActivationReport, InputScale, MatrixReport, write_matrices};
use crate::tolerance::{Statement, Tolerance};

#[derive(Debug, Serialize)]
pub struct Report {
    pub checkpoint: PathBuf,
    pub convention: &'static str,
    pub op: &'static str,
    /// None of a linear layer, which has a name.
    pub layer: Option<usize>,
    pub expert: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// The weights that were read, with their tensor scales.
    pub matrices: Vec<MatrixReport>,
    /// The tensor scale that quantizes A.
    pub input_scale: Option<InputScale>,
    /// Format between gate/up and the down projection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub between: Option<OutFormat>,
    /// Which experts tokens go to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing: Option<RoutingReport>,
    /// Where A comes from and what was done to it.
    pub a: String,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a_format: AFormat,
    pub out_dtype: &'static str,
    #[serde(flatten)]
    pub activation: Option<ActivationReport>,
    pub device: String,
    pub device_name: String,
    pub kernel: String,
    pub threads: usize,
    pub plan: AnyPlan,
    pub prepack_us: f64,
    #[serde(flatten)]
    pub timing: Timing,
    /// A simulated GPU has no clock: the time is this machine's, and says nothing about a card.
    pub simulated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gflops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gbps: Option<f64>,
    #[serde(flatten)]
    pub roofline: Option<RooflineReport>,
    #[serde(flatten)]
    pub error: Option<ErrorReport>,
    pub output: Option<PathBuf>,
    pub peak_rss_bytes: Option<u64>,
}

/// The routing of a mixture.
#[derive(Debug, Serialize)]
pub struct RoutingReport {
    pub from: String,
    pub top_k: usize,
    /// Rows that experts computed.
    pub rows: usize,
    /// Experts that had one.
    pub experts: usize,
    /// output or input.
    pub router_weights: &'static str,
}

impl RoutingReport {
    pub fn new(routing: &OwnedRouting, router_weights: RouterWeights) -> Self {
        let Routed { rows, experts } = routing.routed();
        let router_weights = match router_weights {
            RouterWeights::Input => "input",
            RouterWeights::Output => "output",
        };
        Self { from: routing.origin.clone(), top_k: routing.top_k, rows, experts, router_weights }
    }
}

impl fmt::Display for RoutingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, rows, experts, router_weights, .. } = self;
        write!(
            f,
            "{from}: {} of {}, weights on the {router_weights}",
            counted(*rows, "row"),
            counted(*experts, "expert")
        )
    }
}

#[derive(Debug, Serialize)]
pub struct RooflineReport {
    pub floor_us: f64,
    pub bound: Bound,
    pub roofline_fraction: f64,
    pub limits: Limits,
}

impl RooflineReport {
    pub fn new(limits: Limits, work: Work, timing: &Timing) -> Self {
        let roofline = limits.roofline();
        let floor_us = roofline.floor_us(work);
        let roofline_fraction = floor_us / timing.median_us;
        Self { floor_us, bound: roofline.bound(work), roofline_fraction, limits }
    }
}

#[derive(Debug, Serialize)]
pub struct ErrorReport {
    #[serde(flatten)]
    pub comparison: Comparison,
    pub rows_compared: usize,
    #[serde(skip)]
    pub sample: RowSample,
    pub tolerance: Tolerance,
    pub right: bool,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let expert = self.expert.map_or(String::new(), |e| format!(", expert {e}"));
        let of = match (&self.module, self.layer) {
            (Some(module), _) => module.clone(),
            (None, layer) => format!("layer {}", layer.unwrap_or_default()),
        };
        let op = if self.op == "gate-up" { String::new() } else { format!("{} of ", self.op) };
        writeln!(f, "{op}{of}{expert} of {} ({})", self.checkpoint.display(), self.convention)?;
        write_matrices(f, &self.matrices, 8)?;
        let static_scale = self.input_scale.as_ref().filter(|scale| scale.value.is_some());
        let from = static_scale.map_or(String::new(), |scale| format!(", {}", scale.from));
        writeln!(f, "  A        {}{from}", self.a)?;
        if let Some(ActivationReport { activation, activation_from }) = &self.activation {
            writeln!(f, "  activation {activation} ({activation_from})")?;
        }
        if let Some(routing) = &self.routing {
            writeln!(f, "  routing  {routing}")?;
        }
        writeln!(f, "  plan     {}", self.plan.to_string().replace('\n', "\n         "))?;
        let Timing { median_us, p10_us, p90_us, runs } = self.timing;
        let time = |us: f64| Time(Duration::from_secs_f64(us * 1e-6));
        let packing = time(self.prepack_us);
        match self.gflops.zip(self.gbps) {
            Some((gflops, gbps)) => writeln!(
                f,
                "  time     {} (median of {runs}, 80 % within {} to {}), {gflops:.1} GFLOP/s, {gbps:.1} GB/s; packing \
                 {packing}",
                time(median_us),
                time(p10_us),
                time(p90_us),
            )?,
            None => writeln!(f, "  simulated in {} on this machine; packing {packing}", time(median_us))?,
        }
        if let Some(r) = &self.roofline {
            writeln!(
                f,
                "  roofline {:.0} % of what {} allows: {} ({}: {})",
                r.roofline_fraction * 100.0,
                self.device_name,
                time(r.floor_us),
                r.bound,
                r.limits,
            )?;
        }
        match &self.error {
            Some(e) => {
                let compared = format!("against the f64 reference, {}", e.sample);
                let statement = Statement { found: &e.comparison, tolerance: &e.tolerance, compared };
                writeln!(f, "  error    {}", statement.to_string().replace('\n', "\n           "))?;
            }
            None => writeln!(f, "  error    not compared")?,
        }
        if let Some(path) = &self.output {
            let scale = match self.plan.last().desc().out {
                OutFormat::Nvfp4 { global_scale: OutScale::Static(scale), .. } => {
                    format!(", tensor scale {scale:e} of the down projection,")
                }
                OutFormat::Nvfp4 { .. } => ", tensor scale of its largest value,".into(),
                _ => String::new(),
            };
            let Self { out_dtype, m, n, .. } = self;
            writeln!(f, "  output   {out_dtype} [{m}, {n}]{scale} to {}", path.display())?;
        }
        match self.peak_rss_bytes {
            Some(bytes) => write!(f, "  memory   {} at most", Bytes(bytes)),
            None => Ok(()),
        }
    }
}
