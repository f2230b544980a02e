//! `validate CHECKPOINT`: every rule that the checkpoint breaks. Exit code 1 if one of them is an error.

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use dualgemm::checkpoint::Error;
use dualgemm::checkpoint::validate::{Finding, RULES, Severity};
use dualgemm::gemm::Activation;
use serde::Serialize;
use serde_json::json;

use super::Verdict;
use crate::args::{ReadArgs, read_with};
use crate::layer;
use crate::report::{Listing, Output, counted};

/// Arguments of `validate`.
#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// Directory, .safetensors, .safetensors.index.json or .gguf file.
    #[arg(required_unless_present = "rules")]
    pub checkpoint: Option<PathBuf>,
    #[command(flatten)]
    pub read: ReadArgs,
    /// Activation of the MLPs, if the checkpoint states none or one that is not understood; `dualgemm run --help` lists them.
    #[arg(long, value_name = "NAME")]
    pub activation: Option<Activation>,
    /// List the rules, and check nothing.
    #[arg(long, conflicts_with = "checkpoint")]
    pub rules: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    checkpoint: PathBuf,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    overrides: Vec<String>,
    valid: bool,
    errors: usize,
    warnings: usize,
    findings: Vec<Finding>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{} {}: {}", severity(finding.rule.severity), finding.rule.id, finding.message)?;
        }
        let verdict = if self.valid { "valid" } else { "INVALID" };
        let (errors, warnings) = (counted(self.errors, "error"), counted(self.warnings, "warning"));
        let read = read_with(&self.overrides);
        write!(f, "{}: {verdict}{read}, {errors}, {warnings}", self.checkpoint.display())
    }
}

fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

/// Checks.
pub fn run(args: &ValidateArgs, output: &Output) -> anyhow::Result<Verdict> {
    let Some(path) = &args.checkpoint else {
        let mut list = Listing::new(&["rule", "severity", "what must hold"]);
        for rule in RULES {
            list.row(json!(rule), [rule.id.into(), severity(rule.severity).into(), rule.doc.into()]);
        }
        output.say(&json!({ "rules": list.rows }), &list.table.to_string())?;
        return Ok(Verdict::Right);
    };
    let findings = match layer::open(path, &args.read, args.activation) {
        Ok(checkpoint) => checkpoint.validate(),
        // No such file, or a name that no convention knows: there is nothing to find faults in.
        Err(error @ (Error::Io { .. } | Error::Path { .. } | Error::Name { .. })) => return Err(error.into()),
        Err(error) => vec![Finding::from(&error)],
    };
    let count = |severity| findings.iter().filter(|f| f.rule.severity == severity).count();
    let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
    let (checkpoint, overrides, valid) = (path.clone(), args.read.overrides(), errors == 0);
    output.emit(&Report { checkpoint, overrides, valid, errors, warnings, findings })?;
    Ok((errors == 0).into())
}
