//! Whole subcommands of the command, for the functions that have one, and the command itself.

use std::ffi::OsString;

use pyo3::prelude::*;

use crate::{error, pool};

/// Runs a subcommand and returns its `--json` document and whether the thing checked is as it should be.
#[pyfunction]
pub fn command(py: Python<'_>, args: Vec<OsString>) -> PyResult<(String, bool)> {
    let document = pool::run(py, || dualgemm_cli::document(args))?;
    document.map(|d| (d.json, d.right)).map_err(|failure| error::failure(&failure))
}

/// The options of a subcommand as arguments: name, whether it is a flag, and help.
#[pyfunction]
pub fn options(subcommand: &str) -> Vec<(String, bool, String)> {
    let options = dualgemm_cli::options(subcommand).into_iter();
    let as_argument = |(name, is_flag, help): (String, bool, String)| {
        (name.replace('-', "_"), is_flag, error::as_arguments(&help))
    };
    options.map(as_argument).collect()
}

/// Runs the command, the program's name first, with its output on the terminal, and returns its exit code.
#[pyfunction]
pub fn main(py: Python<'_>, args: Vec<OsString>) -> PyResult<u8> {
    pool::run(py, || dualgemm_cli::run(args))
}
