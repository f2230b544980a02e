//! NVIDIA's library on Blackwell, which multiplies nvfp4 itself: two products into 16 bits and the activation kernel.
//!
//! Written by the library's documentation (block scaling, "1D Block Scaling Factors Layout"
//! <https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout>), not yet run on silicon.

use std::sync::Arc;

use dualgemm_cuda::{HalfType, Matmul};
use dualgemm_device::{Device, DeviceInfo, DevicePtr, LaunchSpec, Stream};
use dualgemm_formats::FloatType;
use dualgemm_gemm::{AFormat, DualGemmDesc, Operation};
use dualgemm_kernels::generic::silu_mul::{Products, SiluMul};

use super::launched::sum_factors;
use super::library::{WORKSPACE, destination, sink, supports};
use super::scaled::Prologue;
use super::{Launches, Prepared, Rounding, Strategy};
use crate::prologue::overlapping;
use crate::{Buffer, DeviceCall, DeviceWeights, Error, Gpu, GpuPlan, WeightForm};

/// See the [module](self).
#[derive(Debug)]
pub struct LibraryNvfp4;

impl Strategy for LibraryNvfp4 {
    fn name(&self) -> &'static str {
        "library-nvfp4"
    }

    fn doc(&self) -> &'static str {
        "two cuBLASLt products of nvfp4 operands, an activation kernel; not yet run on silicon"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Atoms
    }

    fn rounding(&self) -> Rounding {
        Rounding::Products
    }

    fn needs_library(&self) -> bool {
        true
    }

    fn launches(&self) -> Launches {
        Launches::Eager
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        supports(self.name(), desc)?;
        let unsupported = |reason: String| Err(Error::Unsupported { strategy: self.name(), reason });
        if info.arch.major < 10 {
            return unsupported(format!(
                "the library multiplies nvfp4 from sm_100 on; this is {}, {}",
                info.name, info.arch
            ));
        }
        if desc.a_compute() != AFormat::Nvfp4 || !desc.k.is_multiple_of(32) {
            return unsupported(format!(
                "A is {} with K = {}; it takes nvfp4, and floats to be quantized, with K a multiple of 32",
                desc.a, desc.k
            ));
        }
        Ok(vec!["cublaslt".into()])
    }

    fn estimate_us(&self, _: &DualGemmDesc, _: usize, _: &DeviceInfo, _: &str) -> Option<f64> {
        None
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let desc = plan.desc;
        let &DualGemmDesc { m, n, k, out, epilogue, .. } = &desc;
        let (program, round) = (epilogue.activation.program(), epilogue.round_gate_up_to_bf16);
        let mut matmul = gpu.blas()?.matmul_nvfp4(HalfType::F16, (m, n, k), WORKSPACE)?;
        let products = Buffer::new(gpu, 2 * m * n * 2)?;
        let workspace = Buffer::new(gpu, WORKSPACE)?;
        let zeros = |rows: usize| -> Result<[Buffer; 2], Error> {
            let scales = dualgemm_formats::ScaleLayout::Sf128x4.len(rows, k / 16);
            Ok([Buffer::zeroed(gpu, rows * k / 2)?, Buffer::zeroed(gpu, scales)?])
        };
        let ([a, a_scales], [b, b_scales]) = (zeros(m)?, zeros(n)?);
        let operands = [a.ptr(), b.ptr(), products.ptr()];
        let scales = [a_scales.ptr(), b_scales.ptr()];
        // SAFETY: all of them are here, as large as the product wants them.
        unsafe { matmul.choose_nvfp4(operands, scales, workspace.ptr()) }?;
        let act = SiluMul::new(gpu, (FloatType::F16, false, round), sink(out), &program, true)?;
        let prologue = Prologue::new(gpu, plan)?;
        Ok(Box::new(Ready { gpu, desc, prologue, matmul, act, products, workspace }))
    }
}

#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    matmul: Matmul,
    act: SiluMul,
    /// `[m, n]` of gate and `[m, n]` of up.
    products: Buffer,
    workspace: Buffer,
}

impl Ready {
    /// # Safety
    /// As [`Device::launch_on`].
    unsafe fn launch(&self, spec: LaunchSpec, stream: Stream) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.gpu.launch_on(stream, &overlapping(self.gpu.info(), spec)) }?)
    }
}

impl Prepared for Ready {
    unsafe fn run(
        &self,
        call: &DeviceCall,
        weights: &Arc<DeviceWeights>,
        stream: Stream,
    ) -> Result<(), Error> {
        let &DualGemmDesc { m, n, k, epilogue, .. } = &self.desc;
        if call.m != m {
            let (found, expected) =
                (format!("[{}, {k}]", call.m), format!("[{m}, {k}], which the products are for"));
            return Err(Error::Operand { tensor: "A", found, expected });
        }
        let mut specs = Vec::new();
        let a = self.prologue.specs(call.m, &call.a, None, &mut specs)?;
        // SAFETY: the caller vouches for the call, and the rest is this plan's.
        specs.into_iter().try_for_each(|spec| unsafe { self.launch(spec, stream) })?;
        let alpha = sum_factors(weights.alpha(), &epilogue, a.scale)?;
        let (gate, workspace) = (self.products.ptr(), self.workspace.ptr());
        let up = gate.offset((2 * m * n) as u64);
        for ((b, c), alpha) in weights.atoms(Operation::GateUp)?.into_iter().zip([gate, up]).zip(alpha) {
            let (operands, scales) = ([a.operand.codes, b.codes, c], [a.operand.scales, b.scales]);
            // SAFETY: as above.
            unsafe { self.matmul.launch_nvfp4(stream, alpha, operands, scales, workspace) }?;
        }
        let (bias, a_scale) = (weights.bias(), DevicePtr::NULL);
        let products = Products { m, n, gate, up, pitch: 2 * n, alpha: [1.0; 2], a_scale, bias };
        let (out, scale) = destination(&self.desc, call)?;
        // SAFETY: as above.
        unsafe { self.launch(self.act.spec(&products, &out, scale)?, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::h100;
    use dualgemm_device::Arch;
    use dualgemm_formats::BlockFormat;

    #[test]
    fn it_is_for_nvfp4_on_blackwell_with_rows_at_multiples_of_16_bytes() {
        let info = |major, minor| DeviceInfo { name: "card".into(), arch: Arch { major, minor }, ..h100() };
        let desc = |a, n, k| DualGemmDesc::new(64, n, k, a, BlockFormat::Nvfp4);
        let ask = |desc: &DualGemmDesc, info: &DeviceInfo| {
            LibraryNvfp4.kernels(desc, info).map_err(|e| e.to_string())
        };
        assert!(ask(&desc(AFormat::Nvfp4, 128, 256), &info(10, 0)).is_ok());
        assert!(ask(&desc(AFormat::Nvfp4, 128, 256), &info(12, 0)).is_ok());
        for (desc, card, message) in [
            (desc(AFormat::Nvfp4, 128, 256), info(9, 0), "from sm_100 on; this is card, sm_90"),
            (desc(AFormat::F16, 128, 256), info(10, 0), "A is f16"),
            (desc(AFormat::Nvfp4, 128, 272), info(10, 0), "K = 272"),
            (desc(AFormat::Nvfp4, 124, 256), info(10, 0), "N = 124"),
        ] {
            let found = ask(&desc, &card).unwrap_err();
            assert!(found.contains(message), "{found}");
        }
    }
}
