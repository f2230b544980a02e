//! The subcommands, one file each: arguments, a report that is both JSON and text, and the function between.

pub mod bench;
pub mod completions;
#[cfg(feature = "lab")]
pub mod conformance;
pub mod convert;
pub mod doctor;
#[cfg(feature = "lab")]
pub mod estimate;
#[cfg(feature = "lab")]
pub mod export;
pub mod inspect;
pub mod ptx;
pub mod quantize;
pub mod run;
pub mod sim;
pub mod tune;
pub mod validate;
pub mod verify;

use crate::args::{Command, ReadArgs};
use crate::layer;
use crate::report::Output;

/// What a command found about the thing it was asked to check; commands that check nothing are `Right`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// As it should be.
    Right,
    /// Not as it should be; the report says how.
    Wrong,
}

impl From<bool> for Verdict {
    fn from(right: bool) -> Self {
        if right { Self::Right } else { Self::Wrong }
    }
}

/// Runs a subcommand.
pub fn run(command: &Command, output: &Output) -> anyhow::Result<Verdict> {
    let done = match command {
        Command::Run(args) => run::run(args, output),
        Command::Verify(args) => verify::run(args, output),
        Command::Inspect(args) => inspect::run(args, output),
        Command::Validate(args) => validate::run(args, output),
        Command::Quantize(args) => quantize::run(args, output),
        Command::Convert(args) => convert::run(args, output),
        Command::Bench(args) => bench::run(args, output),
        Command::Doctor(args) => doctor::run(args, output),
        Command::Tune(args) => tune::run(args, output),
        Command::Sim(args) => sim::run(args, output),
        Command::Ptx(args) => ptx::run(args, output),
        #[cfg(feature = "lab")]
        Command::Estimate(args) => estimate::run(args, output),
        #[cfg(feature = "lab")]
        Command::Export(args) => export::run(args, output),
        #[cfg(feature = "lab")]
        Command::Conformance(args) => conformance::run(args, output),
        Command::Completions(args) => completions::run(args, output),
    };
    done.map_err(|error| match other_convention(command) {
        Some(declared) => error.context(declared),
        None => error,
    })
}

/// Says which convention a checkpoint declares, where another one was asked for: a fault that is found under a wrong
/// convention is not the checkpoint's.
fn other_convention(command: &Command) -> Option<String> {
    let (path, read) = match command {
        Command::Run(args) => (&args.checkpoint, &args.problem.layer.read),
        Command::Verify(args) => (args.against.checkpoint.as_ref()?, &args.problem.layer.read),
        Command::Inspect(args) => (&args.checkpoint, &args.read),
        Command::Validate(args) => (args.checkpoint.as_ref()?, &args.read),
        Command::Convert(args) => (&args.input, &args.read),
        _ => return None,
    };
    let asked = read.convention.as_ref()?;
    let declaring = ReadArgs { convention: None, ..read.clone() };
    let declared = layer::open(path, &declaring, None).ok()?.convention().name;
    let leave_out =
        || format!("--convention {asked}: {} declares {declared}; leave the option out", path.display());
    (declared != asked).then(leave_out)
}
