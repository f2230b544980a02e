//! Measurements of several strategies on a card: each beside the floor and beside the best of its problem.

use std::fmt::Write as _;

use crate::report::csv_field;
use crate::{Report, Row};

const CSV_HEADER: &str = "card,driver,commit,m,n,k,a_format,out_dtype,strategy,kernel,median_us,p10_us,p90_us,floor_us,bound,rel_err";

impl Report {
    /// The fastest median of a row's problem, µs.
    fn best_us(&self, row: &Row) -> f64 {
        let problem = |r: &Row| (r.m, r.n, r.k, r.a_format.clone(), r.out_dtype.clone());
        let same = self.rows.iter().filter(|r| problem(r) == problem(row));
        same.map(|r| r.timing.median_us).fold(f64::INFINITY, f64::min)
    }

    /// A table for a terminal, a block per problem: every strategy with its time, how many times the floor and the best
    /// that is, what moved and how fast.
    pub fn to_card_table(&self) -> String {
        self.table(&[
            ("median µs", &|r| format!("{:.2}", r.timing.median_us)),
            ("p10", &|r| format!("{:.2}", r.timing.p10_us)),
            ("p90", &|r| format!("{:.2}", r.timing.p90_us)),
            ("× floor", &|r| format!("{:.2}", r.timing.median_us / r.floor_us)),
            ("× best", &|r| format!("{:.2}", r.timing.median_us / self.best_us(r))),
            ("MB moved", &|r| format!("{:.1}", r.gbps * r.timing.median_us * 1e-3)),
            ("TFLOP/s", &|r| format!("{:.1}", r.gflops * 1e-3)),
            ("GB/s", &|r| format!("{:.0}", r.gbps)),
            ("bound", &|r| r.bound.to_string()),
        ])
    }

    /// One line per measurement, comma-separated, with a header.
    pub fn to_card_csv(&self) -> String {
        let mut out = format!("{CSV_HEADER}\n");
        for r in &self.rows {
            let t = r.timing;
            let names = [&r.device, &r.driver, &r.commit].map(|s| csv_field(s)).join(",");
            let labels = [&r.a_format, &r.out_dtype, &r.strategy, &r.kernel].map(|s| csv_field(s)).join(",");
            let _ = writeln!(
                out,
                "{names},{},{},{},{labels},{:.3},{:.3},{:.3},{:.3},{},{}",
                r.m,
                r.n,
                r.k,
                t.median_us,
                t.p10_us,
                t.p90_us,
                r.floor_us,
                r.bound,
                r.rel_l2.map_or(String::new(), |e| format!("{e:.3e}"))
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn every_strategy_stands_beside_the_floor_and_the_best_of_its_problem() {
        let mut report = report();
        let mut slower = report.rows[1].clone();
        slower.strategy = "baseline".into();
        slower.timing.median_us *= 3.0;
        report.rows.push(slower);
        let table = report.to_card_table();
        let lines: Vec<&str> = table.lines().collect();
        // The report's rows take twice the floor.
        assert!(
            lines[4].contains("baseline") && lines[4].contains("6.00") && lines[4].contains("3.00"),
            "{table}"
        );
        assert!(lines[2].contains("2.00") && lines[2].contains("1.00"), "{table}");
        let widths: Vec<usize> = lines.iter().map(|line| line.chars().count()).collect();
        assert!(widths.windows(2).all(|w| w[0] == w[1]), "{table}");
    }

    #[test]
    fn csv_has_a_field_per_header() {
        let csv = report().to_card_csv();
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(lines[0], CSV_HEADER);
        assert!(lines[1].starts_with("\"a \"\"quoted\"\", CPU\",,1.0,1,4096,7168,nvfp4,f32,fused,k,"));
        // The quoted name holds one comma.
        assert_eq!(lines[1].matches(',').count(), CSV_HEADER.matches(',').count() + 1);
        assert!(lines[1].ends_with(",memory,1.000e-7"), "{}", lines[1]);
    }
}
