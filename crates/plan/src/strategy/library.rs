//! What the strategies around NVIDIA's library share: dequantized weights, two products, the activation kernel.
//!
//! ```text
//! A ─► prologue ─► 16-bit A ─┬─► product with B1 ─► gate ─┐
//! B1, B2 ─► dequantize ──────┴─► product with B2 ─► up ───┴─► act(gate, up) ─► C
//! ```
//!
//! Both products are one, with the rows of B1 and B2 behind each other, where a strategy does not need them apart: one
//! product of twice the features fills a card better. Dequantized values are `code · scale`, which 16 bits hold exactly;
//! tensor scales are the products' alpha, so that 16-bit gate and up neither overflow nor lose small values.

use dualgemm_cuda::{HalfType, Matmul};
use dualgemm_device::{Device, DeviceInfo, DevicePtr, LaunchSpec, Stream};
use dualgemm_formats::{BlockFormat, FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::{DualGemmDesc, OutFormat, OutScale, QuantizeA};
use dualgemm_kernels::generic::dequantize::Dequantize;
use dualgemm_kernels::generic::quantize::Out;
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::generic::silu_mul::{Products, SiluMul};

use super::launched::{Destination, sum_factors};
use super::{Launches, Prepared, Rounding, Strategy, float_out};
use crate::prologue::{Order, PreparedA, Prologue, compute_type, overlapping};
use crate::{Buffer, DeviceCall, DeviceWeights, Error, Gpu, GpuPlan, WeightForm};

/// Scratch that the library may use; what its fast Hopper kernels ask for.
pub(super) const WORKSPACE: usize = 32 << 20;

type Prepare = fn(&'static Gpu, &GpuPlan) -> Result<Box<dyn Prepared>, Error>;

/// A strategy around the library.
#[derive(Debug)]
pub struct OfLibrary {
    pub(super) name: &'static str,
    pub(super) doc: &'static str,
    pub(super) prepare: Prepare,
}

impl Strategy for OfLibrary {
    fn name(&self) -> &'static str {
        self.name
    }

    fn doc(&self) -> &'static str {
        self.doc
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Plain
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

    fn kernels(&self, desc: &DualGemmDesc, _: &DeviceInfo) -> Result<Vec<String>, Error> {
        supports(self.name, desc)?;
        Ok(vec!["cublaslt".into()])
    }

    fn estimate_us(&self, _: &DualGemmDesc, _: usize, _: &DeviceInfo, _: &str) -> Option<f64> {
        None
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        (self.prepare)(gpu, plan)
    }
}

/// Whether a problem is one for the library.
pub(super) fn supports(strategy: &'static str, desc: &DualGemmDesc) -> Result<(), Error> {
    let unsupported = |reason: String| Err(Error::Unsupported { strategy, reason });
    if let Err(reason) = compute_type(desc) {
        return unsupported(reason);
    }
    if desc.b != BlockFormat::Nvfp4 {
        return unsupported(format!("the weights are {}; it dequantizes nvfp4", desc.b));
    }
    if desc.quantize_a == QuantizeA::Dynamic {
        return unsupported(
            "A is quantized with a dynamic scale; products of 16 bits need it before they are stored".into(),
        );
    }
    if !desc.n.is_multiple_of(8) {
        return unsupported(format!("N = {}; the library's fast kernels want a multiple of 8", desc.n));
    }
    if desc.epilogue.alpha_gate == 0.0 {
        return unsupported("alpha of gate is 0, which up's is divided by".into());
    }
    if let OutFormat::Nvfp4 { global_scale: OutScale::Dynamic, .. } = desc.out {
        return unsupported("C is re-quantized with a dynamic scale; a static one is needed".into());
    }
    Ok(())
}

/// Where the activation's kernel writes.
pub(super) fn sink(out: OutFormat) -> Sink {
    match out {
        OutFormat::F32 => Sink::Float(FloatType::F32),
        OutFormat::F16 => Sink::Float(FloatType::F16),
        OutFormat::Bf16 => Sink::Float(FloatType::Bf16),
        OutFormat::Nvfp4 { scale_layout, .. } => Sink::Codes(scale_layout),
    }
}

/// C of a call, and its tensor scale.
pub(super) fn destination(desc: &DualGemmDesc, call: &DeviceCall) -> Result<(Out, GlobalScale), Error> {
    let Destination { c, scales, scale, .. } = Destination::of(call, desc)?;
    Ok(match float_out(desc.out) {
        None => (Out::Codes { codes: c, scales }, GlobalScale::multiplier(scale)),
        Some(_) => {
            let pitch = desc.n * desc.out.bits_per_element() as usize / 8;
            (Out::Image { values: c, pitch }, GlobalScale::ONE)
        }
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Gate and up, each for itself.
    Two,
    /// One of twice the features.
    One,
}

/// Both products and the activation.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    dequantize: Dequantize,
    shape: Shape,
    matmul: Matmul,
    act: SiluMul,
    /// `[m, n]` of gate and `[m, n]` of up, or `[m, 2n]`.
    products: Buffer,
    workspaces: [Buffer; 2],
}

impl Library {
    pub(super) fn new(gpu: &'static Gpu, plan: &GpuPlan, shape: Shape) -> Result<Self, Error> {
        let desc = plan.desc;
        let strategy = plan.strategy()?.name();
        let ty = compute_type(&desc).map_err(|reason| Error::Unsupported { strategy, reason })?;
        let half = if ty == FloatType::Bf16 { HalfType::Bf16 } else { HalfType::F16 };
        let device: &dyn Device = gpu;
        let program = desc.epilogue.activation.program();
        let round = desc.epilogue.round_gate_up_to_bf16;
        let features = if shape == Shape::One { 2 * desc.n } else { desc.n };
        let workspace = || Buffer::new(gpu, WORKSPACE);
        let mut this = Self {
            gpu,
            desc,
            shape,
            prologue: Prologue::new(gpu, plan, Order::Rows)?,
            dequantize: Dequantize::new(device, ScaleLayout::Linear, ty)?,
            matmul: gpu.blas()?.matmul(half, (desc.m, features, desc.k), WORKSPACE)?,
            act: SiluMul::new(device, (ty, false, round), sink(desc.out), &program, true)?,
            products: Buffer::new(gpu, desc.m * desc.n * 4)?,
            workspaces: [workspace()?, workspace()?],
        };
        // Zeros take the same time as other numbers as far as one algorithm stands to another.
        let (a, b) = (Buffer::zeroed(gpu, desc.m * desc.k * 2)?, Buffer::zeroed(gpu, 2 * this.half_bytes())?);
        let operands = [a.ptr(), b.ptr(), this.products.ptr()];
        // SAFETY: all of them are here, as large as the product wants them.
        unsafe { this.matmul.choose(operands, this.workspaces[0].ptr()) }?;
        Ok(this)
    }

    /// Room for both dequantized matrices, one behind the other.
    pub(super) fn room(&self) -> Result<Buffer, Error> {
        Ok(Buffer::new(self.gpu, 2 * self.half_bytes())?)
    }

    fn half_bytes(&self) -> usize {
        self.desc.n * self.desc.k * 2
    }

    /// Launches the dequantization of both matrices.
    ///
    /// # Safety
    /// As [`Prepared::run`](super::Prepared::run).
    pub(super) unsafe fn dequantize(
        &self,
        weights: &DeviceWeights,
        out: DevicePtr,
        stream: Stream,
    ) -> Result<(), Error> {
        for (half, at) in weights.plain()?.iter().zip([0, self.half_bytes()]) {
            let spec = self.dequantize.spec(half, 1.0, out.offset(at as u64), 2 * self.desc.k)?;
            // SAFETY: the caller's promise.
            unsafe { self.launch(spec, stream) }?;
        }
        Ok(())
    }

    /// 16-bit A. The library's products are made for one M and for dense rows.
    ///
    /// # Safety
    /// As [`Prepared::run`](super::Prepared::run).
    pub(super) unsafe fn image(&self, call: &DeviceCall, stream: Stream) -> Result<PreparedA, Error> {
        let (m, k) = (self.desc.m, self.desc.k);
        let mut specs = Vec::new();
        let image = self.prologue.specs(call.m, &call.a, None, &mut specs)?;
        // SAFETY: the caller's promise.
        specs.into_iter().try_for_each(|spec| unsafe { self.launch(spec, stream) })?;
        if (call.m, image.pitch) != (m, 2 * k) {
            return Err(Error::Operand {
                tensor: "A",
                found: format!("[{}, {k}], rows {} bytes apart", call.m, image.pitch),
                expected: format!("[{m}, {k}], dense, as the library's products were made for"),
            });
        }
        Ok(image)
    }

    /// The product with gate (0) or up (1), or with both.
    ///
    /// # Safety
    /// As [`Prepared::run`](super::Prepared::run).
    pub(super) unsafe fn product(
        &self,
        half: usize,
        a: &PreparedA,
        weights: &DeviceWeights,
        dequantized: DevicePtr,
        stream: Stream,
    ) -> Result<(), Error> {
        let c = self.products.ptr().offset((half * self.desc.m * self.desc.n * 2) as u64);
        let b = dequantized.offset((half * self.half_bytes()) as u64);
        let alpha = sum_factors(weights.alpha(), &self.desc.epilogue, a.scale)?[half];
        // SAFETY: the caller's promise.
        Ok(unsafe { self.matmul.launch(stream, alpha, [a.values, b, c], self.workspaces[half].ptr()) }?)
    }

    /// All products, one after the other.
    ///
    /// # Safety
    /// As [`Prepared::run`](super::Prepared::run).
    pub(super) unsafe fn products(
        &self,
        a: &PreparedA,
        weights: &DeviceWeights,
        dequantized: DevicePtr,
        stream: Stream,
    ) -> Result<(), Error> {
        let count = if self.shape == Shape::One { 1 } else { 2 };
        // SAFETY: the caller's promise.
        (0..count).try_for_each(|half| unsafe { self.product(half, a, weights, dequantized, stream) })
    }

    /// The activation of both products, into C.
    ///
    /// # Safety
    /// As [`Prepared::run`](super::Prepared::run).
    pub(super) unsafe fn activate(
        &self,
        call: &DeviceCall,
        weights: &DeviceWeights,
        stream: Stream,
    ) -> Result<(), Error> {
        let (m, n, gate) = (call.m, self.desc.n, self.products.ptr());
        let (bias, a_scale) = (weights.bias(), DevicePtr::NULL);
        let products = match self.shape {
            Shape::Two => {
                let up = gate.offset((2 * m * n) as u64);
                Products { m, n, gate, up, pitch: 2 * n, alpha: [1.0; 2], a_scale, bias }
            }
            // The one product was multiplied by gate's alpha.
            Shape::One => {
                let [of_gate, of_up] = weights.alpha().map(f64::from);
                let (epilogue, up) = (&self.desc.epilogue, gate.offset(2 * n as u64));
                let up_alpha = of_up * f64::from(epilogue.alpha_up);
                let ratio = (up_alpha / (of_gate * f64::from(epilogue.alpha_gate))) as f32;
                Products { m, n, gate, up, pitch: 4 * n, alpha: [1.0, ratio], a_scale, bias }
            }
        };
        let (out, scale) = destination(&self.desc, call)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(self.act.spec(&products, &out, scale)?, stream) }
    }

    /// # Safety
    /// As [`Device::launch_on`].
    unsafe fn launch(&self, spec: LaunchSpec, stream: Stream) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.gpu.launch_on(stream, &overlapping(self.gpu.info(), spec)) }?)
    }
}
