//! How speed is measured: shapes, inputs, protocol, roofline, report.
//!
//! In the order data flows: [`shapes`] or the [`challenge`] name the problems, [`inputs`] makes seeded operands,
//! [`protocol`] holds the host's stopwatch, [`roofline`] says what the machine allows, [`report`] and [`plot`] show
//! both. Nothing here knows a kernel: callers hand over closures.

mod cards;
pub mod challenge;
pub mod error;
pub mod inputs;
#[cfg_attr(not(feature = "plot"), path = "no_plot.rs")]
pub mod plot;
pub mod protocol;
pub mod report;
pub mod roofline;
pub mod shapes;

pub use error::Error;
pub use protocol::{Protocol, Timing};
pub use report::{Report, Row};
pub use roofline::{Bound, Roofline, Work};
pub use shapes::{SHAPE_SETS, Shape, ShapeSet};
