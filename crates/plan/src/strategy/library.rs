//! What the strategies around NVIDIA's library share: dequantized weights, two products, the activation kernel.
//!
//! ```text
//! A ─► prologue ─► 16-bit A ─┬─► product with B1 ─► gate ─┐
//! B1, B2 ─► dequantize ──────┴─► product with B2 ─► up ───┴─► act(gate, up) ─► C
//! ```
//!
//! Dequantized values are `code · scale`, which 16 bits hold exactly; tensor scales are the products' alpha, so that
//! 16-bit gate and up neither overflow nor lose small values.

use dualgemm_cuda::{HalfType, Matmul};
use dualgemm_device::{Device, DevicePtr, LaunchSpec, Stream};
use dualgemm_formats::{BlockFormat, FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::{DualGemmDesc, OutFormat, OutScale, QuantizeA};
use dualgemm_kernels::generic::dequantize::Dequantize;
use dualgemm_kernels::generic::quantize::Out;
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::generic::silu_mul::{Products, SiluMul};

use crate::prologue::{Image, Order, Prologue, compute_type, overlapping};
use crate::{Buffer, DeviceC, DeviceCall, DeviceWeights, Error, Gpu, GpuPlan};

/// Scratch that the library may use; what its fast Hopper kernels ask for.
const WORKSPACE: usize = 32 << 20;

/// Whether a problem is one for the library.
pub(super) fn supports(strategy: &'static str, desc: &DualGemmDesc) -> Result<(), Error> {
    let unsupported = |reason: String| Err(Error::Unsupported { strategy, reason });
    if let Err(reason) = compute_type(desc) {
        return unsupported(reason);
    }
    if desc.b != BlockFormat::Nvfp4 {
        return unsupported(format!("the weights are {}; GPU kernels take nvfp4", desc.b));
    }
    if desc.quantize_a == QuantizeA::Dynamic {
        return unsupported(
            "A is quantized with a dynamic scale; products of 16 bits need it before they are stored".into(),
        );
    }
    if !desc.n.is_multiple_of(8) {
        return unsupported(format!("N = {}; the library's fast kernels want a multiple of 8", desc.n));
    }
    if let OutFormat::Nvfp4 { global_scale: OutScale::Dynamic, .. } = desc.out {
        return unsupported("C is re-quantized with a dynamic scale; a static one is needed".into());
    }
    Ok(())
}

/// Both products and the activation.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    dequantize: Dequantize,
    matmul: Matmul,
    act: SiluMul,
    products: [Buffer; 2],
    workspaces: [Buffer; 2],
}

impl Library {
    pub(super) fn new(gpu: &'static Gpu, plan: &GpuPlan) -> Result<Self, Error> {
        let desc = plan.desc;
        let strategy = plan.strategy()?.name();
        let ty = compute_type(&desc).map_err(|reason| Error::Unsupported { strategy, reason })?;
        let half = if ty == FloatType::Bf16 { HalfType::Bf16 } else { HalfType::F16 };
        let device: &dyn Device = gpu;
        let sink = match desc.out {
            OutFormat::F32 => Sink::Float(FloatType::F32),
            OutFormat::F16 => Sink::Float(FloatType::F16),
            OutFormat::Bf16 => Sink::Float(FloatType::Bf16),
            OutFormat::Nvfp4 { scale_layout, .. } => Sink::Codes(scale_layout),
        };
        let program = desc.epilogue.activation.program();
        let round = desc.epilogue.round_gate_up_to_bf16;
        let product = || Buffer::new(gpu, desc.m * desc.n * 2);
        let workspace = || Buffer::new(gpu, WORKSPACE);
        Ok(Self {
            gpu,
            desc,
            prologue: Prologue::new(gpu, &desc, plan.a_scale_layout, Order::Rows)?,
            dequantize: Dequantize::new(device, ScaleLayout::Linear, ty)?,
            matmul: gpu.blas()?.matmul(half, (desc.m, desc.n, desc.k), WORKSPACE)?,
            act: SiluMul::new(device, (ty, false, round), sink, &program, true)?,
            products: [product()?, product()?],
            workspaces: [workspace()?, workspace()?],
        })
    }

    /// Room for both dequantized matrices.
    pub(super) fn room(&self) -> Result<[Buffer; 2], Error> {
        let half = || Buffer::new(&self.gpu, self.desc.n * self.desc.k * 2);
        Ok([half()?, half()?])
    }

    /// Launches the dequantization of both matrices.
    pub(super) fn dequantize(
        &self,
        weights: &DeviceWeights,
        out: [DevicePtr; 2],
        stream: Stream,
    ) -> Result<(), Error> {
        for (half, out) in weights.plain()?.iter().zip(out) {
            self.launch(self.dequantize.spec(half, 1.0, out, 2 * self.desc.k)?, stream)?;
        }
        Ok(())
    }

    /// 16-bit A. The library's products are made for one M and for dense rows.
    pub(super) fn image(&self, call: &DeviceCall, stream: Stream) -> Result<Image, Error> {
        let (m, k) = (self.desc.m, self.desc.k);
        let image = self.prologue.run(call.m, &call.a, stream)?;
        if (call.m, image.pitch) != (m, 2 * k) {
            return Err(Error::Operand {
                tensor: "A",
                found: format!("[{}, {k}], rows {} bytes apart", call.m, image.pitch),
                expected: format!("[{m}, {k}], dense, as the library's products were made for"),
            });
        }
        Ok(image)
    }

    /// The product with gate (0) or up (1).
    pub(super) fn product(
        &self,
        half: usize,
        a: &Image,
        weights: &DeviceWeights,
        dequantized: DevicePtr,
        stream: Stream,
    ) -> Result<(), Error> {
        let alpha = [self.desc.epilogue.alpha_gate, self.desc.epilogue.alpha_up][half];
        let alpha = alpha * a.scale * weights.alpha()[half];
        let operands = [a.values, dequantized, self.products[half].ptr()];
        Ok(self.matmul.launch(stream, alpha, operands, self.workspaces[half].ptr())?)
    }

    /// The activation of both products, into C.
    pub(super) fn activate(
        &self,
        call: &DeviceCall,
        weights: &DeviceWeights,
        stream: Stream,
    ) -> Result<(), Error> {
        let (m, n) = (call.m, self.desc.n);
        let [gate, up] = [self.products[0].ptr(), self.products[1].ptr()];
        let (pitch, bias, a_scale) = (2 * n, weights.bias(), DevicePtr::NULL);
        let products = Products { m, n, gate, up, pitch, alpha: [1.0; 2], a_scale, bias };
        let (out, scale) = match (self.desc.out, call.c) {
            (
                OutFormat::Nvfp4 { global_scale: OutScale::Static(scale), .. },
                DeviceC::Nvfp4 { codes, scales, .. },
            ) => (Out::Codes { codes, scales }, GlobalScale::multiplier(scale)),
            (out, DeviceC::Float(values)) => {
                let pitch = n * out.bits_per_element() as usize / 8;
                (Out::Image { values, pitch }, GlobalScale::ONE)
            }
            (out, DeviceC::Nvfp4 { .. }) => {
                return Err(Error::Operand { tensor: "C", found: "nvfp4".into(), expected: out.to_string() });
            }
        };
        self.launch(self.act.spec(&products, &out, scale)?, stream)
    }

    fn launch(&self, spec: LaunchSpec, stream: Stream) -> Result<(), Error> {
        Ok(self.gpu.launch_on(stream, &overlapping(self.gpu.info(), spec))?)
    }
}
