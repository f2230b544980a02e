//! A kernel that only reads: how many bytes per second a card's memory gives, which is one half of the roofline.

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::builder::*;

use crate::Error;

/// Name of the kernel in its module.
pub const ENTRY: &str = "read";
const THREADS: u32 = 512;
/// 16-byte loads that a thread has under way.
const LOADS: u32 = 8;
/// What a CTA reads at a time.
const CTA_BYTES: u32 = THREADS * LOADS * 16;

/// Generates the kernel: parameters are an address, how many pieces of 64 KiB to read from there on, and where to write
/// a number if everything read adds up to one that it does not add up to.
pub fn generate(target: Target) -> Result<Module, Error> {
    let mut module = Builder::new(target, target.since().max(Version::new(7, 1)));
    module.comment("reads memory and throws it away");
    module.kernel(ENTRY, |k| {
        k.required_threads(THREADS);
        let (start, pieces, out) = (k.pointer("start"), k.param::<U32>("pieces"), k.pointer("out"));
        let (start, pieces) = (k.ld_pointer(&start), k.ld_param(&pieces));
        let (thread, cta, ctas) =
            (k.special(Special::TidX), k.special(Special::CtaidX), k.special(Special::NctaidX));
        let own = k.eval(thread.mul_wide(16));
        let start = k.offset(start, own);
        let sum = k.mov::<U32>(0u32);
        let piece = k.mov::<U32>(cta);
        k.loop_("pieces", |k, this| {
            let done = k.compare(Cmp::Ge, piece, pieces);
            k.break_if(this, done);
            let byte = k.eval(piece.mul_wide(CTA_BYTES));
            let from = k.offset(start, byte);
            let loaded: Vec<[Reg<U32>; 4]> =
                (0..LOADS).map(|i| k.ld_vector(from.at(i * THREADS * 16))).collect();
            for word in loaded.into_iter().flatten() {
                k.to(sum).eval(sum + word);
            }
            k.to(piece).eval(piece + ctas);
        });
        k.comment("Never true of zeros, which is what is read; without it nothing would be.");
        let odd = k.compare(Cmp::Eq, sum, 1u32);
        let out = k.ld_pointer(&out);
        k.when(odd).st(out, sum);
    });
    Ok(module.finish()?)
}

/// The kernel, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct Read {
    function: FunctionId,
    ctas: u32,
}

impl Read {
    /// Loads the kernel.
    pub fn new(device: &dyn Device) -> Result<Self, Error> {
        let target = crate::generic::target_for(device.info().arch);
        let function = device.function(device.load(&generate(target)?.to_string())?, ENTRY)?;
        Ok(Self { function, ctas: device.info().sm_count * 4 })
    }

    /// The launch that reads the whole pieces of 64 KiB in `bytes` bytes of zeros from `start` on; `out` is one u32.
    pub fn spec(&self, start: DevicePtr, bytes: usize, out: DevicePtr) -> LaunchSpec {
        let args = Args::new().ptr(start).u32((bytes / CTA_BYTES as usize) as u32).ptr(out);
        LaunchSpec::new(self.function, [self.ctas, 1, 1], [THREADS, 1, 1]).args(args)
    }
}
