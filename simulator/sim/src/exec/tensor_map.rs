//! `tensormap.replace` and `tensormap.cp_fenceproxy`: edits of the 128-byte record in memory.

use super::fence::fence;
use super::*;
use crate::decode::fence::Fence;
use crate::decode::tensor_map::TensorMapOp;
use crate::tensor_map::replace;

pub fn execute(op: &TensorMapOp, cx: &mut Cx<'_, '_>) -> Result {
    let mut bytes = [0; 128];
    match op {
        TensorMapOp::Replace { map, field, dimension, value } => {
            let (at, value) = (cx.addresses(map), cx.w.regs.r64(*value, cx.m));
            if cx.w.regs.bad.is_some() {
                return Ok(Flow::Next);
            }
            for l in lanes(cx.m) {
                cx.aligned_to(map.space, at[l], 64, l)?;
                cx.read_lane(map.space, at[l], l, Kind::READ, &mut bytes)?;
                replace(&mut bytes, *field, *dimension, value[l])
                    .map_err(|f| f.lane(l as u32).at(place(map.space, at[l])))?;
                cx.write_lane(map.space, at[l], l, Kind::WRITE, &bytes)?;
            }
        }
        TensorMapOp::Copy { to, from, scope } => {
            if let Some(flow) = cx.aligned()? {
                return Ok(flow);
            }
            let (dst, src) = (cx.addresses(to), cx.addresses(from));
            if cx.w.regs.bad.is_some() {
                return Ok(Flow::Next);
            }
            // The warp makes one copy.
            let l = cx.first_lane() as usize;
            cx.aligned_to(from.space, src[l], 128, l)?;
            cx.aligned_to(to.space, dst[l], 128, l)?;
            cx.read_lane(from.space, src[l], l, Kind::READ, &mut bytes)?;
            cx.write_lane(to.space, dst[l], l, Kind::WRITE, &bytes)?;
            return fence(&Fence::Memory { scope: *scope, acquire: false, release: true }, cx);
        }
    }
    Ok(Flow::Next)
}
