//! Measurements of several strategies on a card: each beside the floor and beside the best of its problem.

use crate::{Report, Row};

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
}

#[cfg(test)]
mod tests {
    use crate::report::tests::report;

    #[test]
    fn every_strategy_stands_beside_the_floor_and_the_best_of_its_problem() {
        let mut report = report();
        let mut slower = report.rows[1].clone();
        slower.subject.strategy = "baseline".into();
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
}
