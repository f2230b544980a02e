//! Bytes from one place in device memory to another, as they are. For memory of others, which a driver's copy through
//! [`Device`] would refuse: kernels take any address.
//!
//! ```text
//! 256 threads of a CTA, 16 bytes each
//! ```

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;

use super::{load, module, take_turn, target_for};
use crate::Error;
use crate::error::refused;
use crate::limits::fits;

/// Name of the kernel in its module.
pub const ENTRY: &str = "copy";
const THREADS: u32 = 256;
/// Bytes of a thread.
const PIECE: u32 = 16;

/// Generates the kernel.
pub fn generate(target: Target) -> Result<Module, Error> {
    module(target, "bytes as they are", ENTRY, |k| {
        k.required_threads(THREADS);
        let (from, pieces, to) = (k.pointer("from"), k.param::<U32>("pieces"), k.pointer("to"));
        take_turn(k, target);
        let (cta, thread) = (k.special(Special::CtaidX), k.special(Special::TidX));
        let piece = k.eval(cta * THREADS + thread);
        let pieces = k.ld_param(&pieces);
        let inside = k.compare(Cmp::Lt, piece, pieces);
        let byte = k.eval(piece.mul_wide(PIECE));
        let [from, to] = [from, to].map(|pointer| {
            let start = k.ld_pointer(&pointer);
            k.offset(start, byte)
        });
        k.if_(inside, "copy", |k| {
            let words: [Reg<B32>; 4] = k.ld_vector(from);
            k.st_vector(to, &words);
        });
    })
}

/// The kernel, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    function: FunctionId,
}

impl Copy {
    /// Loads the kernel.
    pub fn new(device: &dyn Device) -> Result<Self, Error> {
        Ok(Self { function: load(device, &generate(target_for(device.info().arch))?, ENTRY)? })
    }

    /// The launch that copies so many bytes of `tensor`, which messages name.
    ///
    /// # Errors
    /// If they are none or too many for a grid, or they or an address are no multiple of 16.
    pub fn spec(
        &self,
        tensor: &str,
        (from, to): (DevicePtr, DevicePtr),
        bytes: usize,
    ) -> Result<LaunchSpec, Error> {
        let pieces = u32::try_from(bytes / PIECE as usize).unwrap_or(0);
        if pieces == 0 || !bytes.is_multiple_of(PIECE as usize) {
            return refused(tensor, format!("{bytes} bytes"), "a multiple of 16, less than 2^36");
        }
        fits(tensor, "address", from.0 as usize, 1, PIECE as usize)?;
        fits(tensor, "address of the copy", to.0 as usize, 1, PIECE as usize)?;
        let args = Args::new().ptr(from).u32(pieces).ptr(to);
        Ok(LaunchSpec::new(self.function, [pieces.div_ceil(THREADS), 1, 1], [THREADS, 1, 1]).args(args))
    }
}
