//! Measurements as a table for people, JSON and CSV for scripts.

use std::fmt::Write as _;

use dualgemm_gemm::DualGemmDesc;

use crate::challenge::Ranking;
use crate::{Bound, Roofline, Timing, Work};

/// What has to be said of a share of the roofline above 100 %.
pub fn above_the_limit(fraction: f64) -> Option<&'static str> {
    let why = "faster than the limits allow: the machine ran slower while they were measured, or operands came from a cache";
    (fraction > 1.0).then_some(why)
}

/// One measured problem.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Row {
    /// Who and what was measured.
    #[serde(flatten)]
    pub subject: Subject,
    /// What was computed: `gate-up`, `linear`, `mlp`, or `moe` with how many experts each token has of how many.
    #[serde(default = "gate_up")]
    pub op: String,
    /// Rows of A.
    pub m: usize,
    /// Features.
    pub n: usize,
    /// Summed elements.
    pub k: usize,
    /// Format of A as given.
    pub a_format: String,
    /// Format between the products, where there are two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between: Option<String>,
    /// Format of C.
    pub out_dtype: String,
    /// Median and spread.
    #[serde(flatten)]
    pub timing: Timing,
    /// The time no kernel can beat, µs.
    pub floor_us: f64,
    /// `floor_us / median_us`.
    pub roofline_fraction: f64,
    /// What sets the floor.
    pub bound: Bound,
    /// Arithmetic rate reached, GFLOP/s.
    pub gflops: f64,
    /// Memory rate reached if every operand moved once, GB/s.
    pub gbps: f64,
    /// Arithmetic intensity, FLOP per byte.
    pub flops_per_byte: f64,
    /// Relative L2 error against the f64 reference on sampled rows; none where it was not checked.
    pub rel_l2: Option<f64>,
}

/// What reports that do not say it measured.
fn gate_up() -> String {
    "gate-up".into()
}

/// Who and what was measured, the part of a [`Row`] that does not follow from the problem and its time.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Subject {
    /// Machine or card.
    pub device: String,
    /// Driver version, empty on a CPU.
    pub driver: String,
    /// Version of the program that measured.
    pub commit: String,
    /// How the operation was put together.
    pub strategy: String,
    /// Kernel that ran.
    pub kernel: String,
    /// Threads, 0 where that means nothing.
    pub threads: usize,
}

impl Row {
    /// Derives rates, floor and bound from a problem and its time.
    pub fn new(
        subject: Subject,
        desc: &DualGemmDesc,
        roofline: &Roofline,
        timing: Timing,
        rel_l2: Option<f64>,
    ) -> Self {
        Self::of(subject, (desc.op.name(), desc, desc.into()), roofline, timing, rel_l2)
    }

    /// The same for an operation of several products: its name, the one that has its shape, format of A and of C, and what all
    /// have to do.
    pub fn of(
        subject: Subject,
        (op, desc, work): (&str, &DualGemmDesc, Work),
        roofline: &Roofline,
        timing: Timing,
        rel_l2: Option<f64>,
    ) -> Self {
        let floor_us = roofline.floor_us(work);
        Self {
            subject,
            op: op.into(),
            m: desc.m,
            n: desc.n,
            k: desc.k,
            a_format: desc.a.to_string(),
            between: None,
            out_dtype: desc.out.name().into(),
            timing,
            floor_us,
            roofline_fraction: floor_us / timing.median_us,
            bound: roofline.bound(work),
            gflops: work.flops / timing.median_us * 1e-3,
            gbps: work.bytes / timing.median_us * 1e-3,
            flops_per_byte: work.flops / work.bytes,
            rel_l2,
        }
    }
}

/// Measurements of one machine, with the roofline they were compared to.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Report {
    /// Measured rates of the machine, one per kind of arithmetic that occurs.
    pub rooflines: Vec<NamedRoofline>,
    /// The measurements.
    pub rows: Vec<Row>,
    /// What ranks them in the GPU MODE task, if all of its ranked shapes are among them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub challenge: Option<Ranking>,
}

/// A roofline and what arithmetic it is for.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct NamedRoofline {
    /// Kind of arithmetic, such as `int8` or `f32`.
    pub name: String,
    /// The rates.
    #[serde(flatten)]
    pub roofline: Roofline,
}

/// A column of a table: its head, and its cell for a measurement.
pub(crate) type Column<'a> = (&'static str, &'a dyn Fn(&Row) -> String);

impl Report {
    /// Measurements of one machine.
    pub fn new(rooflines: Vec<NamedRoofline>, rows: Vec<Row>) -> Self {
        let challenge = Ranking::of(&rows);
        Self { rooflines, rows, challenge }
    }

    /// A table for a terminal.
    pub fn to_table(&self) -> String {
        self.table(&[
            ("median µs", &|r| format!("{:.1}", r.timing.median_us)),
            ("p10", &|r| format!("{:.1}", r.timing.p10_us)),
            ("p90", &|r| format!("{:.1}", r.timing.p90_us)),
            ("floor µs", &|r| format!("{:.1}", r.floor_us)),
            ("of roof", &|r| format!("{:.0} %", r.roofline_fraction * 100.0)),
            ("bound", &|r| r.bound.to_string()),
            ("GFLOP/s", &|r| format!("{:.1}", r.gflops)),
            ("GB/s", &|r| format!("{:.1}", r.gbps)),
        ])
    }

    /// A line per measurement: problem, strategy and kernel, these columns, and the error. What needs an explanation follows,
    /// and the ranking comes last.
    pub(crate) fn table(&self, columns: &[Column<'_>]) -> String {
        let measured: [Column<'_>; 8] = [
            ("op", &|r| r.op.clone()),
            ("m", &|r| r.m.to_string()),
            ("n", &|r| r.n.to_string()),
            ("k", &|r| r.k.to_string()),
            ("a", &|r| r.a_format.clone()),
            ("out", &|r| r.out_dtype.clone()),
            ("strategy", &|r| r.subject.strategy.clone()),
            ("kernel", &|r| r.subject.kernel.clone()),
        ];
        let error: [Column<'_>; 1] = [("rel L2", &|r| r.rel_l2.map_or("-".into(), |e| format!("{e:.1e}")))];
        let columns = || measured.iter().chain(columns).chain(&error);
        let header = columns().map(|(head, _)| (*head).to_string()).collect();
        let cells = self.rows.iter().map(|r| columns().map(|(_, cell)| cell(r)).collect());
        let table = aligned(&std::iter::once(header).chain(cells).collect::<Vec<_>>());
        let above = self.rows.iter().find_map(|row| above_the_limit(row.roofline_fraction));
        let above = above.map_or(String::new(), |why| format!("{why}\n"));
        table + &above + &self.challenge.as_ref().map_or(String::new(), Ranking::to_table)
    }

    /// One line per measurement, comma-separated, with a header.
    pub fn to_csv(&self) -> String {
        self.csv(&[
            ("device", &|r| r.subject.device.clone()),
            ("driver", &|r| r.subject.driver.clone()),
            // The commit where the build was told of it, otherwise the version.
            ("build", &|r| r.subject.commit.clone()),
            ("m", &|r| r.m.to_string()),
            ("n", &|r| r.n.to_string()),
            ("k", &|r| r.k.to_string()),
            ("a_format", &|r| r.a_format.clone()),
            ("out_dtype", &|r| r.out_dtype.clone()),
            ("strategy", &|r| r.subject.strategy.clone()),
            ("kernel", &|r| r.subject.kernel.clone()),
            ("threads", &|r| r.subject.threads.to_string()),
            ("median_us", &|r| format!("{:.3}", r.timing.median_us)),
            ("p10_us", &|r| format!("{:.3}", r.timing.p10_us)),
            ("p90_us", &|r| format!("{:.3}", r.timing.p90_us)),
            ("floor_us", &|r| format!("{:.3}", r.floor_us)),
            ("roofline_fraction", &|r| format!("{:.4}", r.roofline_fraction)),
            ("bound", &|r| r.bound.to_string()),
            ("gflops", &|r| format!("{:.2}", r.gflops)),
            ("gbps", &|r| format!("{:.2}", r.gbps)),
            ("rel_l2", &|r| r.rel_l2.map_or(String::new(), |e| format!("{e:e}"))),
            ("op", &|r| r.op.clone()),
            ("between", &|r| r.between.clone().unwrap_or_default()),
        ])
    }

    fn csv(&self, columns: &[Column<'_>]) -> String {
        let header = columns.iter().map(|(head, _)| (*head).to_string()).collect();
        let rows = self.rows.iter().map(|row| columns.iter().map(|(_, cell)| csv_field(cell(row))).collect());
        let lines: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
        lines.iter().map(|line| line.join(",") + "\n").collect()
    }
}

/// A line per row in columns that are as wide as their widest cell, numbers to the right.
pub(crate) fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.first().map_or(0, Vec::len);
    let width = |c: usize| lines.iter().map(|line| line[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for line in lines {
        for (cell, width) in line.iter().zip(&widths) {
            let _ = write!(out, "{cell:>width$}  ");
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    out
}

/// Quotes a field that would otherwise break its line (RFC 4180).
fn csv_field(text: String) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use dualgemm_formats::BlockFormat;
    use dualgemm_gemm::AFormat;

    pub(crate) fn report() -> Report {
        let roofline = Roofline { flops_per_s: 400e9, bytes_per_s: 40e9 };
        let row = |m| {
            let desc = DualGemmDesc::new(m, 4096, 7168, AFormat::Nvfp4, BlockFormat::Nvfp4);
            let median_us = roofline.floor_us(&desc) * 2.0;
            let timing = Timing { median_us, p10_us: median_us, p90_us: median_us, runs: 3 };
            let subject = Subject {
                device: "a \"quoted\", CPU".into(),
                driver: String::new(),
                commit: "1.0".into(),
                strategy: "fused".into(),
                kernel: "k".into(),
                threads: 2,
            };
            Row::new(subject, &desc, &roofline, timing, Some(1e-7))
        };
        let rooflines = vec![NamedRoofline { name: "int8".into(), roofline }];
        Report::new(rooflines, vec![row(1), row(64), row(256)])
    }

    #[test]
    fn rates_follow_from_time() {
        let row = &report().rows[2];
        assert!((row.roofline_fraction - 0.5).abs() < 1e-12);
        assert!((row.gflops - 200.0).abs() < 1e-9, "{}", row.gflops);
    }

    #[test]
    fn csv_has_a_field_per_header_and_quotes_names() {
        let csv = report().to_csv();
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[1].starts_with("\"a \"\"quoted\"\", CPU\",,1.0,1,4096,7168,nvfp4,f32,fused,k,2,"));
        // The quoted name holds one comma.
        assert_eq!(lines[1].matches(',').count(), lines[0].matches(',').count() + 1);
    }

    #[test]
    fn the_table_is_aligned() {
        let table = report().to_table();
        let widths: Vec<usize> = table.lines().map(|line| line.chars().count()).collect();
        assert_eq!(widths.len(), 4);
        assert!(widths.windows(2).all(|w| w[0] == w[1]), "{table}");
        let mut report = report();
        report.rows[1].roofline_fraction = 1.01;
        let table = report.to_table();
        assert!(table.contains(" 101 %") && table.contains("\nfaster than the limits allow: "), "{table}");
    }

    #[test]
    fn json_is_flat_and_snake_case() {
        let json = serde_json::to_value(report()).unwrap();
        for key in
            ["device", "kernel", "median_us", "p10_us", "floor_us", "roofline_fraction", "rel_l2", "bound"]
        {
            assert!(json["rows"][0].get(key).is_some(), "{key}");
        }
        assert_eq!(json["rows"][0]["bound"], "memory");
        assert_eq!(json["rooflines"][0]["flops_per_s"], 400e9);
    }
}
