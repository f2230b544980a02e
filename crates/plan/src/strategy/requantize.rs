//! C in nvfp4 under a dynamic tensor scale, which needs all of C first: behind the product, which writes f32, a kernel finds
//! its largest magnitude, and another makes nvfp4 by it.

use dualgemm_device::{DevicePtr, LaunchSpec};
use dualgemm_formats::FloatType;
use dualgemm_gemm::{DualGemmDesc, OutFormat, OutScale};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::quantize::{Floats, Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;

use super::operands::Destination;
use crate::{Buffer, Error, Gpu};

/// The kernels after the product, with their memory.
#[derive(Debug)]
pub(super) struct Requantize {
    n: usize,
    scratch: Buffer,
    /// What finds the scale, and the parts of the largest magnitude.
    amax: Amax,
    parts: Buffer,
    quantize: Quantize,
}

impl Requantize {
    /// Those for a problem, if its C has a dynamic scale. Fails if memory is lacking.
    pub(super) fn of(gpu: &'static Gpu, desc: &DualGemmDesc) -> Result<Option<Self>, Error> {
        let &DualGemmDesc { m, n, out, .. } = desc;
        let OutFormat::Nvfp4 { scale_layout, global_scale: OutScale::Dynamic } = out else { return Ok(None) };
        Ok(Some(Self {
            n,
            scratch: Buffer::new(gpu, m * n * 4)?,
            amax: Amax::new(gpu, FloatType::F32, false)?,
            parts: Buffer::new(gpu, 4 * MAX_PARTS as usize)?,
            quantize: Quantize::new(gpu, FloatType::F32, Sink::Codes(scale_layout), true)?,
        }))
    }

    pub(super) fn product(&self) -> Destination {
        let null = DevicePtr::NULL;
        Destination { c: self.scratch.ptr(), scales: null, scale: 1.0, dynamic_scale: null }
    }

    /// Lists the launches that bring the product's `m` rows to C. Fails if an address is misaligned.
    pub(super) fn specs(&self, m: usize, to: &Destination, specs: &mut Vec<LaunchSpec>) -> Result<(), Error> {
        let n = self.n;
        let c = Floats { m, k: n, values: self.scratch.ptr(), pitch: 4 * n };
        let out = Out::Codes { codes: to.c, scales: to.scales };
        specs.push(self.amax.spec(&c, self.parts.ptr(), None)?);
        let scale = Scale::Dynamic { parts: self.parts.ptr(), scale: to.dynamic_scale };
        specs.push(self.quantize.spec(&c, &out, &scale)?);
        Ok(())
    }
}
