//! What can go wrong while reporting.

use std::path::PathBuf;

/// A report that cannot be made or written.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    #[error("no shape set is called `{name}`; there are: {known}")]
    UnknownShapeSet { name: String, known: String },
    /// A plot in a format that is not drawn.
    #[error("{}: plots are written as .svg or .png", path.display())]
    PlotFormat { path: PathBuf },
    /// A build that draws no plots.
    #[error(
        "this build draws no plots (feature `plot` of dualgemm-cli); in Python, dualgemm.plot.roofline(report) does, by matplotlib"
    )]
    NoPlots,
    #[error("there is no measurement to plot")]
    NothingToPlot,
    /// Drawing failed.
    #[error("{}: {reason}", path.display())]
    Draw { path: PathBuf, reason: String },
}
