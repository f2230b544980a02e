//! Stands in for plots in builds without the feature `plot`: every call says so.

use std::path::Path;

use crate::{Error, Report};

/// As with the feature.
///
/// # Errors
/// Always [`Error::NoPlots`].
pub fn format(_path: &Path) -> Result<&str, Error> {
    Err(Error::NoPlots)
}

/// As with the feature.
///
/// # Errors
/// Always [`Error::NoPlots`].
pub fn roofline(_report: &Report, _path: &Path) -> Result<(), Error> {
    Err(Error::NoPlots)
}
