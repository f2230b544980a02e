//! `tcgen05`
use super::{Cx, Result};
use crate::decode::tcgen05::Tcgen05;
/// x
pub fn execute(op: &Tcgen05, _: &mut Cx<'_, '_>) -> Result {
    match *op {}
}
