//! What `run` reports.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use dualgemm::AnyPlan;
use dualgemm::check::RowSample;
use dualgemm::gemm::{AFormat, Comparison, OutFormat, OutScale};
use dualgemm_bench::report::above_the_limit;
use dualgemm_bench::{Bound, Timing, Work};
use serde::Serialize;

use crate::limits::Limits;
use crate::report::{Bytes, Time};
use crate::scales::{Basis, labelled};
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
    #[serde(flatten)]
    pub basis: Basis,
    /// Format between gate/up and the down projection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub between: Option<OutFormat>,
    /// Where A comes from and what was done to it.
    pub a: String,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a_format: AFormat,
    pub out_dtype: &'static str,
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

impl ErrorReport {
    pub fn new(comparison: Comparison, tolerance: Tolerance, sample: RowSample) -> Self {
        let (right, rows_compared) = (tolerance.holds(&comparison), sample.rows().len());
        Self { comparison, rows_compared, sample, tolerance, right }
    }
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
        let Self { basis, m, n, out_dtype, .. } = self;
        basis.write(f, &self.a)?;
        labelled(f, "plan", &self.plan)?;
        let Timing { median_us, p10_us, p90_us, runs } = self.timing;
        let time = |us: f64| Time(Duration::from_secs_f64(us * 1e-6));
        let packing = format!("; packing {}", time(self.prepack_us));
        match self.gflops.zip(self.gbps) {
            Some((gflops, gbps)) => {
                let spread = match runs {
                    1 => "one run".into(),
                    _ => format!("median of {runs}, 80 % within {} to {}", time(p10_us), time(p90_us)),
                };
                let rates = format!("{gflops:.1} GFLOP/s, {gbps:.1} GB/s");
                labelled(f, "time", format!("{} ({spread}), {rates}{packing}", time(median_us)))?;
            }
            None => labelled(f, "simulated", format!("in {} on this machine{packing}", time(median_us)))?,
        }
        if let Some(RooflineReport { floor_us, bound, roofline_fraction, limits }) = &self.roofline {
            let (share, floor) = (roofline_fraction * 100.0, time(*floor_us));
            let above = above_the_limit(*roofline_fraction).map_or(String::new(), |why| format!("\n{why}"));
            let allows = format!("{share:.0} % of what {} allows: {floor}", self.device_name);
            labelled(f, "roofline", format!("{allows} ({bound}: {limits}){above}"))?;
        }
        match &self.error {
            Some(e) => {
                let compared = format!(" against the f64 reference, {}", e.sample);
                labelled(f, "check", Statement { found: &e.comparison, tolerance: &e.tolerance, compared })?;
            }
            None => labelled(f, "check", "not compared")?,
        }
        if let Some(path) = &self.output {
            let scale = match self.plan.last().desc().out {
                OutFormat::Nvfp4 { global_scale: OutScale::Static(scale), .. } => {
                    format!(", tensor scale {scale:e} of the down projection,")
                }
                OutFormat::Nvfp4 { .. } => ", tensor scale of its largest value,".into(),
                _ => String::new(),
            };
            labelled(f, "output", format!("{out_dtype} [{m}, {n}]{scale} to {}", path.display()))?;
        }
        self.peak_rss_bytes.map_or(Ok(()), |bytes| labelled(f, "memory", format!("{} at most", Bytes(bytes))))
    }
}
