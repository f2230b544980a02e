//! Failures as one line and an exit code.

use std::any::Any;
use std::ffi::OsStr;

use clap::CommandFactory as _;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use dualgemm::cpu;

/// The thing checked is wrong; the report says how.
pub const CHECK_FAILED: u8 = 1;
/// Bad input or usage.
pub const USAGE: u8 = 2;
/// The input is fine, but this build or machine cannot do what was asked.
pub const UNSUPPORTED: u8 = 3;
/// Ctrl-C, as shells count it.
pub const INTERRUPTED: u8 = 130;
/// A bug in dualgemm.
pub const PANIC: u8 = 101;

/// What this build or machine cannot do.
#[derive(Debug, thiserror::Error)]
#[error("{what}; {instead}")]
pub struct Unsupported {
    /// What was asked for and why it is not to be had.
    pub what: String,
    /// What would work.
    pub instead: String,
}

/// Ctrl-C ended the command before it was done.
#[derive(Debug, thiserror::Error)]
#[error("interrupted: {0}")]
pub struct Interrupted(
    /// What was done.
    pub String,
);

/// The exit code of an error that ended a command.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<Interrupted>() {
        return INTERRUPTED;
    }
    let missing = |error: &cpu::Error| matches!(error, cpu::Error::IsaUnavailable { .. });
    let unsupported = error.chain().any(|cause| {
        cause.is::<Unsupported>()
            || cause.downcast_ref().is_some_and(missing)
            || matches!(cause.downcast_ref(), Some(dualgemm::Error::Cpu(error)) if missing(error))
    });
    if unsupported { UNSUPPORTED } else { USAGE }
}

/// An error and its causes on one line, `where: what: what would be valid`.
pub fn line(error: &anyhow::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        let text = one_line(&cause.to_string());
        // Transparent wrappers and sources that their parent has quoted already say nothing new.
        if !parts.iter().any(|part| part.contains(&text)) {
            parts.push(text);
        }
    }
    parts.join(": ")
}

/// clap's report of these wrong arguments on one line, without its usage block. An argument that it takes another for is said
/// only if they begin alike.
pub fn usage_line(error: &clap::Error, args: &[impl AsRef<OsStr>]) -> String {
    if let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand)
        && ["estimate", "export", "conformance"].contains(&name.as_str())
    {
        return format!("{name}: is not in this build; `cargo install --path crates/cli` has it");
    }
    let said = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.chars().take(6).collect::<String>(),
        _ => String::new(),
    };
    let alike = said(ContextKind::InvalidArg) == said(ContextKind::SuggestedArg);
    let likely = error.kind() != ErrorKind::UnknownArgument || alike;
    let text = error.to_string();
    let lines = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty() && (likely || !line.starts_with("tip:")));
    let line = lines.collect::<Vec<_>>().join(" ");
    let line = line.strip_prefix("error: ").unwrap_or(&line);
    let (command, mut args) = (crate::args::Cli::command(), args.iter().skip(1).map(AsRef::as_ref));
    let first = args.find(|arg| !arg.as_encoded_bytes().starts_with(b"-"));
    let subcommand = first.and_then(|name| command.find_subcommand(name));
    let subcommand = subcommand.map_or(String::new(), |found| format!(" {}", found.get_name()));
    format!("{}; see dualgemm{subcommand} --help", line.trim_end_matches('.'))
}

/// A panic on one line.
pub fn panic_line(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    format!("internal fault: {}: this is a bug in dualgemm, please report it", one_line(&text))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;
    use clap::Parser as _;

    #[test]
    fn what_a_build_lacks_is_named() {
        let args = ["dualgemm", "estimate"];
        let command = clap::Command::new(args[0]).subcommand(clap::Command::new("sim"));
        let error = command.try_get_matches_from(args).unwrap_err();
        let want = "estimate: is not in this build; `cargo install --path crates/cli` has it";
        assert_eq!(usage_line(&error, &args), want);
    }

    #[test]
    fn causes_are_joined_and_said_once() {
        let error =
            Err::<(), _>(std::io::Error::other("disk on\nfire")).context("a.safetensors").unwrap_err();
        assert_eq!(line(&error), "a.safetensors: disk on fire");
        let error = Err::<(), _>(std::io::Error::other("disk on fire"))
            .context("a.safetensors: disk on fire")
            .unwrap_err();
        assert_eq!(line(&error), "a.safetensors: disk on fire");
        assert_eq!(exit_code(&error), USAGE);
    }

    #[test]
    fn unsupported_has_its_own_exit_code_under_any_context() {
        let error =
            anyhow::Error::new(Unsupported { what: "no such device".into(), instead: "use cpu".into() });
        assert_eq!(exit_code(&error), UNSUPPORTED);
        assert_eq!(exit_code(&error.context("run")), UNSUPPORTED);
    }

    #[test]
    fn only_likely_guesses_are_said() {
        let said = |argument: &str| {
            let args = ["dualgemm", "bench", argument];
            usage_line(&crate::args::Cli::try_parse_from(args).unwrap_err(), &args)
        };
        assert!(said("--shape=1x16x16").contains("a similar argument exists: '--shapes'"));
        let unlike = said("--output=x");
        assert_eq!(unlike, "unexpected argument '--output' found; see dualgemm bench --help");
    }

    #[test]
    fn a_panic_is_one_line() {
        let payload: Box<dyn Any + Send> = Box::new(String::from("index out\nof bounds"));
        assert_eq!(
            panic_line(payload.as_ref()),
            "internal fault: index out of bounds: this is a bug in dualgemm, please report it"
        );
    }
}
