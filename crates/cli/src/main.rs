//! The dualgemm command.
fn main() {}
