//! `completions SHELL`: a completion script on stdout.

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;
use serde_json::json;

use super::Verdict;
use crate::args::Cli;
use crate::report::Output;

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Prints the script.
pub fn run(args: &CompletionsArgs, output: &Output) -> anyhow::Result<Verdict> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "dualgemm", &mut script);
    let script = String::from_utf8(script)?;
    output.say(&json!({ "shell": args.shell.to_string(), "script": script }), &script)?;
    Ok(Verdict::Right)
}
