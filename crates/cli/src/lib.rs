//! The `dualgemm` command: reads arguments, runs one subcommand, turns its outcome into an exit code. The Python
//! package runs the same subcommands through [`document`].
//!
//! Flow: [`args`] → one file of `command` → `report`. Exit codes: 0 done, 1 the thing checked is wrong, 2 bad
//! input or usage, 3 not supported here. Diagnostics are one line on stderr; stdout holds only the report.

pub mod args;
pub mod layer;
pub mod machine;

mod activation;
mod calibration;
mod command;
mod computation;
mod diagnosis;
mod failure;
mod files;
#[cfg(test)]
mod flips;
mod gpu;
mod interrupt;
mod limits;
mod operation;
mod report;
mod result;
mod routing;
mod scales;
mod simulated;
mod tolerance;

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use crate::args::Cli;
use crate::command::Verdict;
use crate::report::Output;

pub use crate::failure::Unsupported;

/// Runs the command that this process was started with.
pub fn main() -> ExitCode {
    ExitCode::from(run(std::env::args_os().collect()))
}

/// Runs the command on its arguments, the program's name first, and returns its exit code.
pub fn run(args: Vec<OsString>) -> u8 {
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        // Help and version are no failures: clap prints them on stdout.
        Err(error) if !error.use_stderr() => {
            return error.print().map_or(failure::USAGE, |()| 0);
        }
        Err(error) => {
            let output = Output::new(args.iter().any(|arg| arg == "--json"));
            return output.fail(&failure::usage_line(&error, &args), failure::USAGE);
        }
    };
    init_tracing(cli.verbose);
    interrupt::remove_uncommitted_on_signals();
    let output = Output::new(cli.json);
    // Said before the work, not when its report cannot be written.
    if let Some(arg) = args.iter().find(|arg| cli.json && arg.to_str().is_none()) {
        let line =
            format!("{}: is not UTF-8, which JSON holds alone; give another name", arg.to_string_lossy());
        return output.fail(&line, failure::USAGE);
    }
    // The hook keeps the backtrace off the terminal; the message goes out as one line like any other.
    panic::set_hook(Box::new(|_| ()));
    match panic::catch_unwind(AssertUnwindSafe(|| command::run(&cli.command, &output))) {
        Ok(Ok(Verdict::Right)) => 0,
        Ok(Ok(Verdict::Wrong)) => failure::CHECK_FAILED,
        Ok(Err(error)) if report::is_broken_pipe(&error) => 0,
        Ok(Err(error)) => output.fail(&failure::line(&error), failure::exit_code(&error)),
        Err(payload) => output.fail(&failure::panic_line(payload.as_ref()), failure::PANIC),
    }
}

/// What a subcommand reports.
#[derive(Debug)]
pub struct Document {
    /// The report, as `--json` prints it.
    pub json: String,
    /// Whether the thing checked is as it should be; true for subcommands that check nothing.
    pub right: bool,
}

/// Why a subcommand has no report.
#[derive(Debug)]
pub struct Failure {
    /// The line that the command prints.
    pub line: String,
    /// What went wrong; `None` if the arguments could not be read.
    pub error: Option<anyhow::Error>,
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self { line: failure::line(&error), error: Some(error) }
    }
}

/// Runs a subcommand, given as the arguments after the program's name, and returns its report instead of printing
/// it. Fails if the command would end with an exit code above 1.
pub fn document(args: impl IntoIterator<Item = OsString>) -> Result<Document, Failure> {
    let args: Vec<OsString> = std::iter::once("dualgemm".into()).chain(args).collect();
    let cli = Cli::try_parse_from(&args)
        .map_err(|error| Failure { line: failure::usage_line(&error, &args), error: None })?;
    let output = Output::document();
    let verdict = command::run(&cli.command, &output)?;
    Ok(Document { json: output.into_document(), right: verdict == Verdict::Right })
}

/// The options of a subcommand, each with whether it is a flag and what its help says; none if there is no such subcommand.
pub fn options(subcommand: &str) -> Vec<(String, bool, String)> {
    let command = Cli::command();
    let arguments = command.find_subcommand(subcommand).into_iter().flat_map(clap::Command::get_arguments);
    let named = |arg: &clap::Arg| {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        Some((arg.get_long()?.to_owned(), !arg.get_action().takes_values(), help))
    };
    arguments.filter_map(named).collect()
}

fn init_tracing(verbose: u8) {
    let filter = match (tracing_subscriber::EnvFilter::try_from_env("DUALGEMM_LOG"), verbose) {
        (Ok(filter), _) => filter,
        (Err(_), 0) => return,
        (Err(_), 1) => "info".into(),
        (Err(_), 2) => "debug".into(),
        (Err(_), _) => "trace".into(),
    };
    let colored =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colored).with_writer(std::io::stderr).init();
}

/// The README's Rust compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_returned_as_the_document_that_json_prints() {
        let run = |args: &[&str]| document(args.iter().map(OsString::from));
        let list = run(&["bench", "--list"]).unwrap();
        assert!(
            list.right && list.json.starts_with('{') && list.json.contains("\"challenge\""),
            "{}",
            list.json
        );
        let failure = run(&["inspect", "no-such-file.gguf"]).unwrap_err();
        assert!(failure.line.contains("no-such-file.gguf") && failure.error.is_some(), "{}", failure.line);
        let failure = run(&["inspect", "--no-such-option"]).unwrap_err();
        assert!(failure.line.contains("--no-such-option") && failure.error.is_none(), "{}", failure.line);
    }
}
