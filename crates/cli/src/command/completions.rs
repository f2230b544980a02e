//! `completions SHELL`: a completion script on stdout.

use std::fmt;

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;
use serde::Serialize;

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

#[derive(Debug, Serialize)]
struct Report {
    shell: String,
    script: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.script)
    }
}

/// Prints the script.
pub fn run(args: &CompletionsArgs, output: &Output) -> anyhow::Result<Verdict> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "dualgemm", &mut script);
    output.emit(&Report { shell: args.shell.to_string(), script: String::from_utf8(script)? })?;
    Ok(Verdict::Right)
}
