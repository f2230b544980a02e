//! Every case in the simulator and on a card, held against each other and against what is recorded.

use super::{Case, Difference, Error, Outcome, compare, load_all, run};
use dualgemm_device::Device;
use dualgemm_ptx::Target;
use std::fmt;

/// What became of one case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Result {
    /// Card, record and simulator agree bit for bit.
    Equal,
    /// Card and simulator agree within the case's tolerance, simulator and record bit for bit.
    Close,
    /// The simulator gives what is recorded; the card is of another generation (or there is none).
    SimulatorOnly,
    /// The simulator failed or gives something else than what is recorded.
    Simulator(String),
    /// The card failed.
    Card(String),
    /// Card and simulator differ.
    Differ(Vec<Difference>),
}

impl Result {
    /// Whether something disagrees.
    pub fn is_failure(&self) -> bool {
        matches!(self, Result::Simulator(_) | Result::Card(_) | Result::Differ(_))
    }

    /// One word.
    pub fn word(&self) -> &'static str {
        match self {
            Result::Equal => "equal",
            Result::Close => "close",
            Result::SimulatorOnly => "simulator only",
            Result::Simulator(_) => "simulator failed",
            Result::Card(_) => "card failed",
            Result::Differ(_) => "differ",
        }
    }
}

impl fmt::Display for Result {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())?;
        match self {
            Result::Simulator(text) | Result::Card(text) => write!(f, ": {text}"),
            Result::Differ(list) => list.iter().try_for_each(|d| write!(f, "\n  {d} (card, simulator)")),
            _ => Ok(()),
        }
    }
}

/// The devices to compare.
pub struct Devices<'a> {
    /// A simulator for modules of a target.
    pub simulator: &'a dyn Fn(Target) -> Box<dyn Device>,
    /// The card, if there is one. A failed kernel ends a CUDA context, so it is opened anew when asked for.
    pub card: Option<&'a dyn Fn() -> std::result::Result<Box<dyn Device>, dualgemm_device::Error>>,
    /// Only cases whose name contains this.
    pub only: &'a str,
}

/// Runs every case and gives each result to `each` as it comes.
///
/// # Errors
/// [`Error::Record`] if a text is not the one recorded; the card cannot be opened.
pub fn run_all(
    devices: &Devices<'_>,
    mut each: impl FnMut(&Case, &Result),
) -> std::result::Result<(), Error> {
    let open = |case: &str| match devices.card {
        Some(open) => {
            let device = open().map_err(|source| Error::Device { case: case.into(), launch: 0, source })?;
            Ok(Some(device))
        }
        None => Ok(None),
    };
    let mut card = open("before the first")?;
    for case in load_all()?.into_iter().filter(|c| c.name.contains(devices.only)) {
        let target = Target::from_name(case.target()).unwrap_or(Target::Sm90a);
        let simulated = run(&*(devices.simulator)(target), &case);
        let result = match (&simulated, &card) {
            (Err(error), _) => Result::Simulator(error.to_string()),
            (Ok(sim), _) if !sim.is_expected(&case) => {
                Result::Simulator("the result is not what is recorded".into())
            }
            (Ok(sim), Some(device)) if case.runs_on(device.info().arch.major) => {
                on_card(&**device, &case, sim)
            }
            (Ok(_), _) => Result::SimulatorOnly,
        };
        each(&case, &result);
        if matches!(result, Result::Card(_)) {
            drop(card.take());
            card = open(&case.name)?;
        }
    }
    Ok(())
}

fn on_card(device: &dyn Device, case: &Case, sim: &Outcome) -> Result {
    match run(device, case) {
        Err(error) => Result::Card(error.to_string()),
        Ok(card) if card == *sim => Result::Equal,
        Ok(card) => match compare(case, &card, sim) {
            list if list.is_empty() => Result::Close,
            list => Result::Differ(list),
        },
    }
}
