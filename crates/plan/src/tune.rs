//! Finding the fastest kernel of each strategy on this card, by measurement.
//!
//! Every configuration that fits is a candidate, of the strategies that plans may take unasked or of those that are named;
//! those that the cost model expects to take much longer than the best are left out. A candidate is first compared with the f64 reference: one that is wrong is reported and never chosen.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use dualgemm_device::Device;

use crate::choices::Choice;
use crate::measure::{Measured, Problem, Protocol, Sets, measure};
use crate::plan::{ChosenBy, GpuPlan};
use crate::strategy::{STRATEGIES, Strategy};
use crate::{Error, Gpu, GpuOptions, WeightForm};

/// A candidate is left out if it is expected to take this many times as long as the best, and so many µs more.
const HOPELESS: (f64, f64) = (1.6, 4.0);

/// What was found about a candidate.
#[derive(Debug)]
pub struct Outcome {
    /// The strategy.
    pub strategy: &'static str,
    /// Its kernel.
    pub kernel: String,
    /// What the cost model expected, µs.
    pub expected_us: f64,
    /// Time and error, or why there are none.
    pub measured: Result<Measured, Error>,
}

/// All outcomes for one problem.
#[derive(Debug)]
pub struct Tuned {
    /// Measured candidates, the fastest first; then those that failed.
    pub outcomes: Vec<Outcome>,
    /// Candidates that the model left out.
    pub pruned: usize,
    /// Candidates that the budget left no time for.
    pub skipped: usize,
}

impl Tuned {
    /// What is worth remembering: the fastest kernel of every strategy.
    pub fn choices(&self) -> Vec<Choice> {
        let mut choices: Vec<Choice> = Vec::new();
        for outcome in &self.outcomes {
            let Ok(measured) = &outcome.measured else { continue };
            if choices.iter().all(|c| c.strategy != outcome.strategy) {
                let us = measured.timing.median_us;
                choices.push(Choice::of(&measured.plan.desc, outcome.strategy, &outcome.kernel, us));
            }
        }
        choices
    }
}

/// The candidates for a problem, the one expected to be fastest first, and how many were left out.
fn candidates(
    problem: &Problem<'_>,
    gpu: &Gpu,
    strategies: &[&'static dyn Strategy],
) -> (Vec<(f64, &'static dyn Strategy, String)>, usize) {
    let mut all: Vec<(f64, &'static dyn Strategy, String)> = Vec::new();
    for &s in strategies {
        for kernel in s.kernels(&problem.desc, 1, gpu.info()).unwrap_or_default() {
            if let Some(us) = s.estimate_us(&problem.desc, 1, gpu.info(), &kernel) {
                all.push((us, s, kernel));
            }
        }
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let best = all.first().map_or(0.0, |c| c.0);
    let before = all.len();
    all.retain(|c| c.0 <= best * HOPELESS.0 + HOPELESS.1);
    let pruned = before - all.len();
    (all, pruned)
}

/// Measures candidates until all are done or the budget is spent, at least one: those of `strategies`, or of all that
/// plans may take unasked. What is found about another one counts for plans that name it.
///
/// # Errors
/// If this is no card, or operands do not fit. A candidate's own failure is an outcome.
pub fn tune(
    gpu: &'static Gpu,
    problem: &Problem<'_>,
    strategies: Option<&[&'static dyn Strategy]>,
    budget: Duration,
    protocol: Protocol,
) -> Result<Tuned, Error> {
    let start = Instant::now();
    let automatic: Vec<&'static dyn Strategy> =
        STRATEGIES.iter().copied().filter(|s| s.automatic()).collect();
    let (candidates, pruned) = candidates(problem, gpu, strategies.unwrap_or(&automatic));
    let mut sets: HashMap<WeightForm, Sets> = HashMap::new();
    let (mut outcomes, mut skipped) = (Vec::new(), 0);
    for (expected_us, s, kernel) in candidates {
        if !outcomes.is_empty() && start.elapsed() > budget {
            skipped += 1;
            continue;
        }
        let options = GpuOptions {
            strategy: Some(s.name().into()),
            kernel: Some(kernel.clone()),
            ..GpuOptions::default()
        };
        let plan = GpuPlan { chosen_by: ChosenBy::Tuned, ..GpuPlan::new(&problem.desc, gpu, &options)? };
        let operands = match sets.entry(plan.weight_form()?) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(room) => room.insert(Sets::new(gpu, problem, &plan)?),
        };
        let measured = measure(gpu, problem, &plan, operands, protocol);
        if let Err(error) = &measured {
            tracing::warn!("{} by {kernel}: {error}", s.name());
        }
        outcomes.push(Outcome { strategy: s.name(), kernel, expected_us, measured });
    }
    let time = |o: &Outcome| o.measured.as_ref().map_or(f64::INFINITY, |m| m.timing.median_us);
    outcomes.sort_by(|a, b| time(a).total_cmp(&time(b)));
    Ok(Tuned { outcomes, pruned, skipped })
}
