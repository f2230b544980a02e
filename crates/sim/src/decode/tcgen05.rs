//! `tcgen05`
use super::{Ins, Op, Result};
/// x
#[derive(Debug, Clone)]
pub enum Tcgen05 {}
/// x
pub fn decode(i: &mut Ins<'_>) -> Result<Op> {
    i.error("tcgen05 is not executed")
}
