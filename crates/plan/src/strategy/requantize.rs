//! C in nvfp4 by kernels of their own behind the product: under a dynamic tensor scale, which needs all of C first, the
//! product's f32, then its largest magnitude, then nvfp4 by it; under a static one, where the product's kernel writes floats
//! alone, f32 and then nvfp4.

use dualgemm_device::{DevicePtr, LaunchSpec};
use dualgemm_formats::{FloatType, GlobalScale};
use dualgemm_gemm::{DualGemmDesc, OutFormat, OutScale};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::quantize::{Floats, Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;

use super::launched::Destination;
use crate::{Buffer, Error, Gpu};

/// The kernels after the product, with their memory.
#[derive(Debug)]
pub(super) struct Requantize {
    n: usize,
    scratch: Buffer,
    /// What finds a dynamic scale, and the parts of the largest magnitude.
    amax: Option<(Amax, Buffer)>,
    quantize: Quantize,
}

impl Requantize {
    /// Those for a problem, if its C has a dynamic scale.
    pub(super) fn of(gpu: &'static Gpu, desc: &DualGemmDesc) -> Result<Option<Self>, Error> {
        if desc.out.is_dynamic() { Self::of_floats(gpu, desc) } else { Ok(None) }
    }

    /// Those for a problem, if its C is nvfp4 and the product's kernel writes floats alone.
    pub(super) fn of_floats(gpu: &'static Gpu, desc: &DualGemmDesc) -> Result<Option<Self>, Error> {
        let &DualGemmDesc { m, n, out, .. } = desc;
        let OutFormat::Nvfp4 { scale_layout, .. } = out else { return Ok(None) };
        let dynamic = out.is_dynamic();
        let amax =
            || Ok::<_, Error>((Amax::new(gpu, FloatType::F32)?, Buffer::new(gpu, 4 * MAX_PARTS as usize)?));
        Ok(Some(Self {
            n,
            scratch: Buffer::new(gpu, m * n * 4)?,
            amax: dynamic.then(amax).transpose()?,
            quantize: Quantize::new(gpu, FloatType::F32, Sink::Codes(scale_layout), dynamic)?,
        }))
    }

    /// The problem as the product's kernel sees it that writes floats alone.
    pub(super) fn float_problem(desc: &DualGemmDesc) -> DualGemmDesc {
        match desc.out {
            OutFormat::Nvfp4 { .. } => DualGemmDesc { out: OutFormat::F32, ..*desc },
            _ => *desc,
        }
    }

    /// Refuses rows in groups.
    ///
    /// # Errors
    /// If C has a dynamic scale.
    pub(super) fn check_grouped(strategy: &'static str, desc: &DualGemmDesc) -> Result<(), Error> {
        match desc.out {
            OutFormat::Nvfp4 { global_scale: OutScale::Dynamic, .. } => {
                let reason = "a dynamic scale of C would count rows of no group; use a static one".into();
                Err(Error::Unsupported { strategy, reason })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn product(&self) -> Destination {
        let null = DevicePtr::NULL;
        Destination { c: self.scratch.ptr(), scales: null, scale: 1.0, dynamic_scale: null }
    }

    /// Lists the launches that bring the product's `m` rows to C.
    ///
    /// # Errors
    /// If an address is misaligned.
    pub(super) fn specs(&self, m: usize, to: &Destination, specs: &mut Vec<LaunchSpec>) -> Result<(), Error> {
        let n = self.n;
        let c = Floats { m, k: n, values: self.scratch.ptr(), pitch: 4 * n };
        let out = Out::Codes { codes: to.c, scales: to.scales };
        let scale = match &self.amax {
            None => Scale::Static(GlobalScale::multiplier(to.scale)),
            Some((amax, parts)) => {
                specs.push(amax.spec(&c, parts.ptr(), None)?);
                Scale::Dynamic { parts: parts.ptr(), scale: to.dynamic_scale }
            }
        };
        specs.push(self.quantize.spec(&c, &out, &scale)?);
        Ok(())
    }
}
