//! What a launch did, in the terms of a card: time at the peak of each resource, and which one is the bound.

use super::{Card, Counters};
use crate::gpu::Outcome;
use std::fmt;

/// What an assembler said about a kernel, if it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Assembled {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of spill stores and loads.
    pub spills: u32,
}

/// Warps of a CTA that executed the same mix of instructions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Role {
    /// First and last warp.
    pub warps: (u32, u32),
    /// Warp instructions of all of them.
    pub instructions: u64,
    /// Opcodes with their counts, most frequent first.
    pub mix: Vec<(String, u64)>,
}

/// Everything known about a launch without a card.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Report {
    /// The kernel.
    pub kernel: String,
    /// Virtual registers declared: 64-bit ones count twice, predicates not.
    pub declared_registers: u32,
    /// `.maxnreg`
    pub maxnreg: Option<u32>,
    /// What the assembler said.
    pub assembled: Option<Assembled>,
    /// Static and dynamic shared memory, bytes.
    pub shared: (u32, u32),
    /// Most columns of tensor memory allocated at once in one CTA.
    pub tmem_columns: u32,
    /// CTAs and threads of each.
    pub size: (u32, u32),
    /// What the warps did.
    pub roles: Vec<Role>,
    /// What was counted.
    pub counters: Counters,
}

/// Time at the peak rate of each resource of a card, seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Floor {
    /// The card.
    pub card: Card,
    /// `(resource, time)`
    pub times: [(&'static str, f64); 5],
}

impl Floor {
    /// The resource that takes longest, and its time: no run can be faster.
    pub fn bound(&self) -> (&'static str, f64) {
        self.times.into_iter().fold(self.times[0], |a, b| if b.1 > a.1 { b } else { a })
    }
}

impl Report {
    /// The report of a launch.
    pub fn new(outcome: &Outcome, assembled: Option<Assembled>) -> Report {
        let kernel = &outcome.kernel;
        Report {
            kernel: kernel.name.clone(),
            declared_registers: kernel.rows[0] + 2 * kernel.rows[1],
            maxnreg: kernel.maxnreg,
            assembled,
            shared: (kernel.static_shared, outcome.dynamic_shared),
            tmem_columns: outcome.counters.tmem_columns,
            size: (outcome.grid.iter().product(), outcome.block.iter().product()),
            roles: roles(&outcome.counters, &kernel.opcodes),
            counters: outcome.counters.clone(),
        }
    }

    /// The time the launch takes on a card if one resource after the other were the only limit.
    pub fn floor(&self, card: Card) -> Floor {
        let data = card.data();
        let c = &self.counters;
        // A grid smaller than the card leaves multiprocessors idle.
        let used = f64::from(self.size.0.min(data.sm_count));
        let share = used / f64::from(data.sm_count);
        let clock = data.clock_ghz * 1e9;
        let tensor: f64 =
            c.tensor_ops.iter().zip(data.tensor_rate).map(|(&ops, rate)| ops as f64 / rate).sum();
        let shared = (c.shared_read + c.shared_written) as f64;
        Floor {
            card,
            times: [
                ("tensor cores", tensor / share),
                ("global memory", c.unique_bytes as f64 / data.memory_rate),
                ("L2 cache", (c.global_read + c.global_written) as f64 / data.l2_rate),
                ("shared memory", shared / (data.shared_per_clock * clock * used)),
                ("instruction issue", c.total() as f64 / (data.issue_per_clock * clock * used)),
            ],
        }
    }
}

fn roles(counters: &Counters, opcodes: &[String]) -> Vec<Role> {
    // Warps belong together if they executed the same opcodes, whatever the counts.
    let kind = |row: &[u64]| row.iter().map(|n| *n != 0).collect::<Vec<_>>();
    let mut roles: Vec<(Vec<bool>, u32, u32, Vec<u64>)> = Vec::new();
    for (w, row) in counters.instructions.iter().enumerate() {
        let (w, k) = (w as u32, kind(row));
        match roles.last_mut() {
            Some((same, _, last, sum)) if *same == k => {
                *last = w;
                sum.iter_mut().zip(row).for_each(|(a, b)| *a += b);
            }
            _ => roles.push((k, w, w, row.clone())),
        }
    }
    roles
        .into_iter()
        .map(|(_, first, last, sum)| {
            let mut mix: Vec<_> =
                opcodes.iter().cloned().zip(sum.iter().copied()).filter(|(_, n)| *n != 0).collect();
            mix.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
            Role { warps: (first, last), instructions: sum.iter().sum(), mix }
        })
        .collect()
}

/// Opcodes printed per role.
const SHOWN: usize = 8;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "kernel {}: {} CTAs of {} threads", self.kernel, self.size.0, self.size.1)?;
        write!(f, "  PTX registers: {} (virtual)", self.declared_registers)?;
        if let Some(n) = self.maxnreg {
            write!(f, ", .maxnreg {n}")?;
        }
        if let Some(a) = self.assembled {
            write!(f, ", {} assembled, {} bytes spilled", a.registers, a.spills)?;
        }
        writeln!(f)?;
        writeln!(f, "  shared memory: {} bytes static, {} dynamic", self.shared.0, self.shared.1)?;
        if self.tmem_columns != 0 {
            writeln!(f, "  tensor memory: {} columns", self.tmem_columns)?;
        }
        let c = &self.counters;
        let [b16, b8, b4] = c.tensor_ops;
        writeln!(f, "  tensor operations: {b16} of 16 bits, {b8} of 8, {b4} of 4")?;
        writeln!(
            f,
            "  global memory: {} bytes touched, {} read, {} written",
            c.unique_bytes, c.global_read, c.global_written
        )?;
        writeln!(f, "  shared memory traffic: {} bytes read, {} written", c.shared_read, c.shared_written)?;
        if self.tmem_columns != 0 {
            writeln!(f, "  tensor memory traffic: {} bytes read, {} written", c.tmem_read, c.tmem_written)?;
        }
        for role in &self.roles {
            match role.warps {
                (first, last) if first == last => write!(f, "  warp {first}")?,
                (first, last) => write!(f, "  warps {first}-{last}")?,
            }
            write!(f, ": {} instructions:", role.instructions)?;
            for (opcode, n) in role.mix.iter().take(SHOWN) {
                write!(f, " {opcode} {n}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for Floor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bound, time) = self.bound();
        write!(f, "{}: at least {:.2} µs, bound by {bound} (", self.card.data().name, time * 1e6)?;
        for (i, (what, t)) in self.times.iter().enumerate() {
            write!(f, "{}{what} {:.2}", if i == 0 { "" } else { ", " }, t * 1e6)?;
        }
        f.write_str(" µs)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_resource_is_the_bound_exact() {
        let mut counters = Counters::new(1, 1);
        counters.tensor_ops = [989_400_000_000, 0, 0];
        counters.unique_bytes = 3_350_000;
        let report = Report { size: (132, 128), counters, ..Report::default() };
        let e = report.floor(Card::H100);
        let (what, time) = e.bound();
        assert_eq!(what, "tensor cores");
        assert!((time - 1e-3).abs() < 1e-9);
        assert!((e.times[1].1 - 1e-6).abs() < 1e-12);
        // Half of the card: half of the rate.
        let half = Report { size: (66, 128), ..report };
        assert!((half.floor(Card::H100).bound().1 - 2e-3).abs() < 1e-9);
    }

    #[test]
    fn warps_with_the_same_opcodes_are_one_role_exact() {
        let counters =
            Counters { instructions: vec![vec![3, 0], vec![4, 0], vec![1, 9]], ..Counters::default() };
        let r = roles(&counters, &["add".into(), "mma".into()]);
        assert_eq!(r.len(), 2);
        assert_eq!((r[0].warps, r[0].instructions), ((0, 1), 7));
        assert_eq!((r[1].warps, r[1].mix[0].clone()), ((2, 2), ("mma".into(), 9)));
    }
}
