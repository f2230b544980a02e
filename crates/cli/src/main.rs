//! The `dualgemm` command: reads arguments, runs one subcommand, turns its outcome into an exit code.
//!
//! Flow: [`args`] → one file of [`command`] → [`report`]. Exit codes: 0 done, 1 the thing checked is wrong, 2 bad
//! input or usage, 3 not supported here. Diagnostics are one line on stderr; stdout holds only the report.

mod activation;
mod args;
mod command;
mod diagnosis;
mod failure;
mod layer;
mod limits;
mod machine;
mod report;
mod result;
mod tolerance;

use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use clap::Parser as _;

use crate::args::Cli;
use crate::command::Verdict;
use crate::report::Output;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version are no failures: clap prints them on stdout.
        Err(error) if !error.use_stderr() => {
            return error.print().map_or(ExitCode::from(2), |()| ExitCode::SUCCESS);
        }
        Err(error) => {
            let output = Output::new(std::env::args_os().any(|arg| arg == "--json"));
            return output.fail(&failure::usage_line(&error), failure::USAGE);
        }
    };
    init_tracing(cli.verbose);
    let output = Output::new(cli.json);
    // The hook keeps the backtrace off the terminal; the message goes out as one line like any other.
    panic::set_hook(Box::new(|_| ()));
    match panic::catch_unwind(AssertUnwindSafe(|| command::run(cli.command, &output))) {
        Ok(Ok(Verdict::Right)) => ExitCode::SUCCESS,
        Ok(Ok(Verdict::Wrong)) => ExitCode::from(failure::CHECK_FAILED),
        Ok(Err(error)) if report::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Ok(Err(error)) => output.fail(&failure::line(&error), failure::exit_code(&error)),
        Err(payload) => output.fail(&failure::panic_line(payload.as_ref()), failure::PANIC),
    }
}

fn init_tracing(verbose: u8) {
    let level = match verbose {
        0 => return,
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("DUALGEMM_LOG").unwrap_or_else(|_| level.into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}
