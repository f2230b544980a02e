//! The GPU MODE "NVFP4 dual GEMM" task as data: its shapes, generator, tolerance and ranking.
//!
//! `C = silu(A·B1ᵀ) · (A·B2ᵀ)` in f16, block scales e4m3 (the task text says e4m3fnuz, its code uses e4m3fn, and
//! e4m3fn is right), no tensor scale. The reference multiplies in f32 and rounds once, at the end.
//! Source: the public repository gpu-mode/reference-kernels, `problems/nvidia/nvfp4_dual_gemm`.

use dualgemm_formats::{BlockFormat, Error, GlobalScale, QuantizedMatrix};
use half::f16;

use crate::inputs::{CodeSet, Inputs, ScaleSet};
use crate::report::aligned;
use crate::{Row, Shape};

/// A shape that counts for the ranking, with the task's speed of light on a B200 at 1.5 GHz.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Ranked {
    /// The shape.
    pub shape: Shape,
    /// Speed of light in µs.
    pub speed_of_light_us: f64,
    /// The best time that was published for the task's harness on a B200, µs; its authors' numbers, not ours.
    pub best_public_us: f64,
}

/// The ranked shapes.
pub const RANKED: [Ranked; 4] = [
    Ranked { shape: Shape::new(256, 4096, 7168), speed_of_light_us: 4.708, best_public_us: 12.4 },
    Ranked { shape: Shape::new(512, 4096, 7168), speed_of_light_us: 8.714, best_public_us: 16.4 },
    Ranked { shape: Shape::new(256, 3072, 4096), speed_of_light_us: 2.125, best_public_us: 9.43 },
    Ranked { shape: Shape::new(512, 3072, 7168), speed_of_light_us: 6.535, best_public_us: 16.3 },
];

/// The ranked shapes as one machine computed them: nvfp4 by nvfp4 to f16, each by the fastest strategy measured.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Ranking {
    /// The ranked shapes.
    pub shapes: Vec<RankedTime>,
    /// What ranks a submission, µs.
    pub geometric_mean_us: f64,
    /// The same of the speed of light, µs.
    pub speed_of_light_geometric_mean_us: f64,
}

/// The time that a ranked shape took.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RankedTime {
    /// The shape.
    #[serde(flatten)]
    pub shape: Shape,
    /// The least median, µs.
    pub median_us: f64,
    /// The task's speed of light on a B200 at 1.5 GHz, µs.
    pub speed_of_light_us: f64,
}

impl Ranking {
    /// The ranking's numbers, if all of its shapes were measured in the task's formats.
    pub fn of(rows: &[Row]) -> Option<Self> {
        let time = |ranked: &Ranked| {
            let of_task = |r: &&Row| {
                let formats = r.op == "gate-up" && r.a_format == "nvfp4" && r.out_dtype == "f16";
                // What rounds operands further, as fp8 does by 4 %, is measured to compare with and would not pass.
                let exact = r.rel_l2.is_none_or(|error| error < 0.01);
                Shape::new(r.m, r.n, r.k) == ranked.shape && formats && exact
            };
            let median_us = rows.iter().filter(of_task).map(|r| r.timing.median_us).reduce(f64::min)?;
            let Ranked { shape, speed_of_light_us, .. } = *ranked;
            Some(RankedTime { shape, median_us, speed_of_light_us })
        };
        let shapes = RANKED.iter().map(time).collect::<Option<Vec<_>>>()?;
        let mean = |of: fn(&RankedTime) -> f64| geometric_mean(&shapes.iter().map(of).collect::<Vec<_>>());
        let geometric_mean_us = mean(|t| t.median_us);
        let speed_of_light_geometric_mean_us = mean(|t| t.speed_of_light_us);
        Some(Self { shapes, geometric_mean_us, speed_of_light_geometric_mean_us })
    }

    /// A table for a terminal: a line per shape and the means.
    pub fn to_table(&self) -> String {
        let line = |name: String, median_us: f64, light_us: f64| {
            vec![name, format!("{median_us:.2}"), format!("{light_us:.3}")]
        };
        let header = ["ranked shape", "median µs", "light µs (B200, 1.5 GHz)"].map(String::from).to_vec();
        let shapes = self.shapes.iter().map(|t| line(t.shape.to_string(), t.median_us, t.speed_of_light_us));
        let means =
            line("geometric mean".into(), self.geometric_mean_us, self.speed_of_light_geometric_mean_us);
        aligned(&std::iter::once(header).chain(shapes).chain([means]).collect::<Vec<_>>())
    }
}

/// Seed of every test and benchmark in the task.
pub const SEED: u64 = 1111;

/// The shapes that only have to be right, as the task lists them (the first one comes twice there).
pub const TESTS: [Shape; 10] = [
    Shape::new(1536, 512, 7168),
    Shape::new(256, 512, 256),
    Shape::new(1536, 512, 7168),
    Shape::new(3072, 1024, 1536),
    Shape::new(7168, 1024, 256),
    Shape::new(7168, 2304, 2048),
    Shape::new(4608, 384, 7168),
    Shape::new(7168, 384, 2304),
    Shape::new(512, 768, 7168),
    Shape::new(4096, 768, 512),
];

/// Elementwise tolerance, relative and absolute.
pub const TOLERANCE: f64 = 1e-3;

/// The operands of one test.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// `[m, k]`.
    pub a: QuantizedMatrix<'static>,
    /// `[n, k]`, through silu.
    pub b1: QuantizedMatrix<'static>,
    /// `[n, k]`.
    pub b2: QuantizedMatrix<'static>,
}

/// Operands as the task makes them ([`CodeSet::Masked`]), or over the whole format ([`CodeSet::Full`]). Fails if K is
/// not a multiple of 16.
pub fn generate(shape: Shape, seed: u64, codes: CodeSet) -> Result<Case, Error> {
    let mut inputs = Inputs::seeded(seed);
    let mut matrix = |name, rows| {
        inputs.quantized(name, BlockFormat::Nvfp4, (rows, shape.k), (codes, ScaleSet::Unit), GlobalScale::ONE)
    };
    Ok(Case { a: matrix("a", shape.m)?, b1: matrix("b1", shape.n)?, b2: matrix("b2", shape.n)? })
}

/// The first element outside the tolerance: its index, the value found and the one wanted.
pub fn first_mismatch(got: &[f16], want: &[f64]) -> Option<(usize, f64, f64)> {
    let rounded = want.iter().map(|&w| f16::from_f64(w).to_f64());
    got.iter().map(|g| g.to_f64()).zip(rounded).enumerate().find_map(|(index, (g, w))| {
        // `<=` is false for NaN, so a NaN is always a mismatch; equal infinities are none.
        let close = (g - w).abs() <= TOLERANCE + TOLERANCE * w.abs() || g == w;
        (!close).then_some((index, g, w))
    })
}

/// What ranks a submission: the geometric mean over the ranked shapes, 0 for no times.
pub fn geometric_mean(times_us: &[f64]) -> f64 {
    if times_us.is_empty() {
        return 0.0;
    }
    (times_us.iter().map(|t| t.ln()).sum::<f64>() / times_us.len() as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Report, Timing};

    #[test]
    fn speed_of_light_is_flops_over_6_90_pflops_or_bytes_over_7_68_tbps() {
        for Ranked { shape: Shape { m, n, k }, speed_of_light_us, .. } in RANKED {
            let (m, n, k) = (m as f64, n as f64, k as f64);
            let compute = 4.0 * m * n * k / 6.90e9;
            let memory = ((m * k + 2.0 * n * k) * 0.5625 + 2.0 * m * n) / 7.68e6;
            let floor = compute.max(memory);
            assert!(
                (floor / speed_of_light_us - 1.0).abs() < 0.01,
                "{m}x{n}x{k}: {floor} vs {speed_of_light_us}"
            );
        }
        let geomean = geometric_mean(&RANKED.map(|r| r.speed_of_light_us));
        assert!((geomean - 4.886).abs() < 0.001, "{geomean}");
    }

    #[test]
    fn the_ranking_needs_all_shapes_in_the_tasks_formats_and_takes_the_fastest_right_one() {
        let row = crate::report::tests::report().rows.remove(0);
        let row = |Shape { m, n, k }: Shape, median_us| {
            let timing = Timing { median_us, ..row.timing };
            Row { m, n, k, out_dtype: "f16".into(), timing, ..row.clone() }
        };
        let [first, second, third, fourth] = RANKED.map(|ranked| ranked.shape);
        let mut rows =
            vec![row(first, 2.0), row(second, 4.0), row(Shape::new(1, 16, 16), 9.0), row(third, 8.0)];
        rows.push(Row { a_format: "bf16".into(), ..row(fourth, 1.0) });
        rows.push(Row { out_dtype: "f32".into(), ..row(fourth, 1.0) });
        rows.push(Row { rel_l2: Some(0.04), ..row(fourth, 1.0) });
        assert_eq!(Ranking::of(&rows), None);
        let report = Report::new(Vec::new(), rows.clone());
        assert!(serde_json::to_value(&report).unwrap().get("challenge").is_none());
        assert!(!report.to_table().contains("geometric mean"));

        rows.extend([row(fourth, 40.0), row(fourth, 16.0)]);
        let report = Report::new(Vec::new(), rows);
        let json = serde_json::to_value(&report).unwrap();
        let ranking = &json["challenge"];
        assert!((ranking["geometric_mean_us"].as_f64().unwrap() - 32f64.sqrt()).abs() < 1e-9, "{ranking}");
        let light = ranking["speed_of_light_geometric_mean_us"].as_f64().unwrap();
        assert!((light - 4.886).abs() < 0.001, "{light}");
        let last = serde_json::json!({
            "m": 512, "n": 3072, "k": 7168, "median_us": 16.0, "speed_of_light_us": 6.535 });
        assert_eq!(ranking["shapes"][3], last);
        for table in [report.to_table(), report.to_card_table()] {
            let lines: Vec<Vec<&str>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
            assert!(lines.contains(&vec!["512x3072x7168", "16.00", "6.535"]), "{table}");
            assert_eq!(lines.last().unwrap()[..], ["geometric", "mean", "5.66", "4.886"], "{table}");
        }
    }

    #[test]
    fn tolerance_is_relative_plus_absolute_and_refuses_nan() {
        let want = [1.0, 1000.0, 0.0];
        assert_eq!(first_mismatch(&want.map(f16::from_f64), &want), None);
        assert_eq!(first_mismatch(&[f16::from_f32(1.001)], &[1.0]), None);
        assert_eq!(first_mismatch(&[f16::ONE, f16::from_f32(1.01)], &[1.0, 1.0]).unwrap().0, 1);
        assert_eq!(first_mismatch(&[f16::NAN], &[1.0]).unwrap().0, 0);
        assert_eq!(first_mismatch(&[f16::INFINITY], &[1e9]), None);
    }

    #[test]
    fn generated_cases_are_seeded_and_masked() {
        let shape = Shape::new(4, 8, 64);
        assert_eq!(
            generate(shape, 1, CodeSet::Masked).unwrap(),
            generate(shape, 1, CodeSet::Masked).unwrap()
        );
        let case = generate(shape, 1, CodeSet::Masked).unwrap();
        assert!(case.b2.codes().iter().all(|byte| byte & 0b0100_0100 == 0));
        assert_eq!((case.a.rows(), case.b1.rows(), case.b2.k()), (4, 8, 64));
    }
}
