//! How speed is measured: shapes, protocol, roofline, report.
