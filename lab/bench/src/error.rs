//! What can go wrong while reporting.

use std::path::PathBuf;

/// A report that cannot be made or written.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An unknown shape set.
    #[error("no shape set is called `{name}`; there are: {known}")]
    UnknownShapeSet {
        /// What was asked for.
        name: String,
        /// What exists, comma-separated.
        known: String,
    },
    /// A plot in a format that is not drawn.
    #[error("{}: plots are written as .svg or .png", path.display())]
    PlotFormat {
        /// The file asked for.
        path: PathBuf,
    },
    /// A build that draws no plots.
    #[error("this build draws no plots; dualgemm-bench has the feature `plot` for that")]
    NoPlots,
    /// Nothing to plot.
    #[error("there is no measurement to plot")]
    NothingToPlot,
    /// Drawing failed.
    #[error("{}: {reason}", path.display())]
    Draw {
        /// The file being written.
        path: PathBuf,
        /// What the drawing library says.
        reason: String,
    },
}
