//! Strategies around NVIDIA's library: two products, or one of twice the features, and the activation kernel.
//!
//! ```text
//! A ─► prologue ─► 16-bit A ─┬─► product with B1 ─► gate ─┐
//! B1, B2 ─► dequantize ──────┴─► product with B2 ─► up ───┴─► act(gate, up) ─► C
//! ```
//!
//! Both products are one, with the rows of B1 and B2 behind each other, where a strategy does not need them apart: one
//! product of twice the features fills a card better. Dequantized values are `code · scale`, which 16 bits hold exactly;
//! tensor scales are the products' alpha, so that 16-bit gate and up neither overflow nor lose small values.
//!
//! On Blackwell the library multiplies nvfp4 itself. That is written by its documentation (block scaling, "1D Block Scaling
//! Factors Layout" <https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout>), not yet run on silicon.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dualgemm_cuda::{Cuda, Event, Graph, HalfType, Matmul, OwnedStream};
use dualgemm_device::{Device, DeviceInfo, DevicePtr, Error as DeviceError, LaunchSpec, Stream};
use dualgemm_formats::{FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::{AFormat, DualGemmDesc, Operation, OutFormat, QuantizeA};
use dualgemm_kernels::generic::expand::Expand;
use dualgemm_kernels::generic::quantize::Out;
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::generic::silu_mul::{Products, SiluMul};
use dualgemm_kernels::parts::operand::Operand;

use super::operands::{Destination, sum_factors};
use super::{Facts, Prepared, Rounding, Strategy};
use crate::prologue::{Order, PreparedA, Prologue, compute_type, overlapping};
use crate::{Buffer, DeviceCall, DeviceWeights, Error, Gpu, GpuPlan, WeightForm};

/// Scratch that the library may use; what its fast Hopper kernels ask for.
const WORKSPACE: usize = 32 << 20;
/// Recordings that are kept; one more, and all are dropped.
const MOST_GRAPHS: usize = 1024;

/// A strategy around the library.
#[derive(Debug)]
pub(super) struct OfLibrary {
    facts: Facts,
    /// One product of twice the features.
    one_product: bool,
    /// What is multiplied.
    weights: Form,
    calls: Calls,
}

/// What the library multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// 16-bit floats that every call dequantizes anew, so memory holds 4.5 bits per weight plus one layer's worth of 16.
    Dequantized,
    /// The same kept: four times the memory, and only products and activation per call.
    Kept,
    /// Rows of codes with 128x4 scales.
    Nvfp4,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Calls {
    /// On one stream.
    Plain,
    /// The second product on a stream of its own: it starts when A is ready, and the activation waits for both.
    TwoStreams,
    /// Recorded once for each set of operands and then replayed as one call to the driver.
    Recorded,
}

const fn around(name: &'static str, doc: &'static str) -> OfLibrary {
    let facts = Facts::new(name, doc, WeightForm::Plain);
    let facts = Facts { rounding: Rounding::Products, needs_library: true, ..facts };
    OfLibrary { facts, one_product: false, weights: Form::Kept, calls: Calls::Plain }
}

/// What one writes first.
pub(super) const BASELINE: OfLibrary = OfLibrary {
    weights: Form::Dequantized,
    ..around("baseline", "weights dequantized on each call, two cuBLASLt products, an activation kernel")
};
/// Dequantized weights kept.
pub(super) const CACHED_SCALES: OfLibrary = OfLibrary {
    one_product: true,
    ..around(
        "cached-scales",
        "weights dequantized once and kept as 16 bits, one cuBLASLt product with both, an activation kernel",
    )
};
/// The same with two products side by side.
pub(super) const PARALLEL_STREAMS: OfLibrary = OfLibrary {
    calls: Calls::TwoStreams,
    ..around("parallel-streams", "cached-scales with the gate and the up product on two streams")
};
/// The replay of its own recording is what is measured.
pub(super) const CUDA_GRAPH: OfLibrary = OfLibrary {
    one_product: true,
    calls: Calls::Recorded,
    ..around("cuda-graph", "cached-scales, recorded and replayed as one launch")
};
/// The library's own nvfp4.
pub(super) const NVFP4: OfLibrary = {
    let doc = "two cuBLASLt products of nvfp4 operands, an activation kernel; not yet run on silicon";
    let of = around("library-nvfp4", doc);
    OfLibrary { facts: Facts { form: WeightForm::Atoms, ..of.facts }, weights: Form::Nvfp4, ..of }
};

impl Strategy for OfLibrary {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn fitting(&self, desc: &DualGemmDesc, _: usize, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        supports(desc).map_err(|reason| self.unsupported(reason))?;
        if self.weights == Form::Nvfp4 {
            if info.arch.major < 10 {
                return Err(self.unsupported(format!(
                    "the library multiplies nvfp4 from sm_100 on; this is {}, {}",
                    info.name, info.arch
                )));
            }
            if desc.a_compute() != AFormat::Nvfp4 || !desc.k.is_multiple_of(32) {
                return Err(self.unsupported(format!(
                    "A is {} with K = {}; it takes nvfp4, and floats to be quantized, with K a multiple of 32",
                    desc.a, desc.k
                )));
            }
        }
        Ok(vec!["cublaslt".into()])
    }

    fn estimate_us(&self, _: &DualGemmDesc, _: usize, _: &DeviceInfo, _: &str) -> Option<f64> {
        None
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        Ok(Box::new(Ready::new(self, gpu, plan)?))
    }
}

/// Whether a problem is one for the library.
fn supports(desc: &DualGemmDesc) -> Result<(), String> {
    compute_type(desc)?;
    if desc.b != AFormat::Nvfp4 {
        return Err(format!("the weights are {}; it dequantizes nvfp4", desc.b));
    }
    if desc.quantize_a == QuantizeA::Dynamic {
        return Err(
            "A is quantized with a dynamic scale; products of 16 bits need it before they are stored".into(),
        );
    }
    if !desc.n.is_multiple_of(8) {
        return Err(format!("N = {}; the library's fast kernels want a multiple of 8", desc.n));
    }
    if desc.epilogue.alpha_gate == 0.0 {
        return Err("alpha of gate is 0, which up's is divided by".into());
    }
    if desc.out.is_dynamic() {
        return Err("C is re-quantized with a dynamic scale; a static one is needed".into());
    }
    Ok(())
}

/// Where weights are as they are multiplied.
#[derive(Debug)]
enum Multiplied {
    /// As they are given.
    Rows,
    /// Dequantized on each call, gate and then up.
    Each(Expand, Buffer),
    /// Dequantized once, found by the identity of the weights ([`DeviceWeights::id`]), which is never given out twice, and
    /// not by their address, which another tensor may have next. Dropped when the weights are.
    Kept(Expand, Mutex<HashMap<u64, (Weak<DeviceWeights>, Buffer)>>),
}

/// A recording holds addresses, so it is found by all addresses of the call and the identity of the weights; contents are read
/// anew by every replay.
type Graphs = Mutex<HashMap<(u64, [u64; 9]), Graph>>;

/// Both products and the activation.
#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    one_product: bool,
    prologue: Prologue,
    weights: Multiplied,
    matmul: Matmul,
    act: SiluMul,
    /// `[m, n]` of gate and `[m, n]` of up, or `[m, 2n]`.
    products: Buffer,
    workspaces: [Buffer; 2],
    /// A second stream; A is ready, and the product there is done.
    beside: Option<(OwnedStream, [Event; 2])>,
    graphs: Option<(Arc<Cuda>, Graphs)>,
}

impl Ready {
    fn new(strategy: &OfLibrary, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Self, Error> {
        let (desc, nvfp4) = (plan.desc, strategy.weights == Form::Nvfp4);
        let card = |call, reason: &str| match gpu.card() {
            Some(card) => Ok(card),
            None => Err(DeviceError::Driver { call, reason: reason.into() }),
        };
        let beside = (strategy.calls == Calls::TwoStreams).then(|| {
            let card = card("opening a second stream", "a simulated GPU has one stream")?;
            Ok::<_, Error>((card.new_stream()?, [card.event()?, card.event()?]))
        });
        let graphs = (strategy.calls == Calls::Recorded)
            .then(|| card("recording a graph", "a simulated GPU records none").cloned());
        let (beside, graphs) = (beside.transpose()?, graphs.transpose()?);
        let ty = compute_type(&desc).map_err(|reason| strategy.unsupported(reason))?;
        let half = if ty == FloatType::Bf16 { HalfType::Bf16 } else { HalfType::F16 };
        let sink = match (desc.out, AFormat::from(desc.out).float_type()) {
            (OutFormat::Nvfp4 { scale_layout, .. }, _) => Sink::Codes(scale_layout),
            (_, float) => Sink::Float(float.unwrap_or(ty)),
        };
        let (program, round) = (desc.epilogue.activation.program(), desc.epilogue.round_gate_up_to_bf16);
        let size = (desc.m, if strategy.one_product { 2 * desc.n } else { desc.n }, desc.k);
        let mut matmul = match nvfp4 {
            true => gpu.blas()?.matmul_nvfp4(half, size, WORKSPACE)?,
            false => gpu.blas()?.matmul(half, size, WORKSPACE)?,
        };
        let dequantize = || Expand::new(gpu, ScaleLayout::Linear, ty);
        let weights = match strategy.weights {
            Form::Nvfp4 => Multiplied::Rows,
            Form::Dequantized => Multiplied::Each(dequantize()?, Buffer::new(gpu, 2 * half_bytes(&desc))?),
            Form::Kept => Multiplied::Kept(dequantize()?, Mutex::default()),
        };
        let workspace = || Buffer::new(gpu, WORKSPACE);
        let (products, workspaces) = (Buffer::new(gpu, desc.m * desc.n * 4)?, [workspace()?, workspace()?]);
        // Zeros take the same time as other numbers as far as one algorithm stands to another.
        let element = if nvfp4 { 0.5 } else { 2.0 };
        let zeros = |rows: usize| Buffer::zeroed(gpu, (rows as f64 * desc.k as f64 * element) as usize);
        let of_scales = |rows| Buffer::zeroed(gpu, ScaleLayout::Sf128x4.len(rows, desc.k / 16));
        let (a, b) = (zeros(desc.m)?, zeros(size.1)?);
        let scales = if nvfp4 { Some([of_scales(desc.m)?, of_scales(size.1)?]) } else { None };
        let scale_ptrs = scales.as_ref().map(|scales| [scales[0].ptr(), scales[1].ptr()]);
        let operands = [a.ptr(), b.ptr(), products.ptr()];
        // SAFETY: all of them are here, as large as the product wants them.
        unsafe { matmul.choose(operands, scale_ptrs, workspaces[0].ptr()) }?;
        Ok(Self {
            gpu,
            desc,
            one_product: strategy.one_product,
            prologue: Prologue::new(gpu, plan, if nvfp4 { Order::Atoms } else { Order::Rows })?,
            weights,
            matmul,
            act: SiluMul::new(gpu, (ty, round), sink, &program)?,
            products,
            workspaces,
            beside,
            graphs: graphs.map(|card| (card, Graphs::default())),
        })
    }

    /// Gate and up as they are multiplied, and the launches that dequantize them on each call. What is kept is dequantized now,
    /// if it has not been.
    fn operands(
        &self,
        weights: &Arc<DeviceWeights>,
        specs: &mut Vec<LaunchSpec>,
    ) -> Result<[(DevicePtr, Option<DevicePtr>); 2], Error> {
        let halves = |at: DevicePtr| [(at, None), (at.offset(half_bytes(&self.desc) as u64), None)];
        match &self.weights {
            Multiplied::Rows => {
                let rows: [Operand; 2] = weights.parts().rows(WeightForm::Atoms, Operation::GateUp)?;
                Ok(rows.map(|half| (half.codes, Some(half.scales))))
            }
            Multiplied::Each(kernel, room) => {
                specs.extend(self.dequantize(kernel, weights, room.ptr())?);
                Ok(halves(room.ptr()))
            }
            Multiplied::Kept(kernel, kept) => {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some((_, known)) = kept.get(&weights.id()) {
                    return Ok(halves(known.ptr()));
                }
                kept.retain(|_, (of, _)| of.strong_count() > 0);
                let room = Buffer::new(self.gpu, 2 * half_bytes(&self.desc))?;
                let at = room.ptr();
                for spec in self.dequantize(kernel, weights, at)? {
                    // SAFETY: the room is that of both matrices, and the weights are this GPU's.
                    unsafe { self.launch(spec, Stream::Own) }?;
                }
                // Other streams do not wait for ours.
                self.gpu.synchronize()?;
                kept.insert(weights.id(), (Arc::downgrade(weights), room));
                Ok(halves(at))
            }
        }
    }

    /// Lists what brings both matrices to `out` as 16 bits.
    fn dequantize(
        &self,
        kernel: &Expand,
        weights: &DeviceWeights,
        out: DevicePtr,
    ) -> Result<Vec<LaunchSpec>, Error> {
        let spec = |(half, at)| Ok(kernel.spec(half, out.offset(at as u64), 2 * self.desc.k)?);
        weights.parts().plain()?.iter().zip([0, half_bytes(&self.desc)]).map(spec).collect()
    }

    /// A as it is multiplied, and the launches that make it. The library's products are made for one M and for dense rows.
    fn image(&self, call: &DeviceCall, specs: &mut Vec<LaunchSpec>) -> Result<PreparedA, Error> {
        let (m, k) = (self.desc.m, self.desc.k);
        let a = self.prologue.specs(call.m, &call.a, None, specs)?;
        let (pitch, dense) = (a.operand.pitch, a.operand.format.row_bytes(k));
        if (call.m, pitch) != (m, dense) {
            return Err(Error::Operand {
                tensor: "A",
                found: format!("[{}, {k}], rows {pitch} bytes apart", call.m),
                expected: format!("[{m}, {k}], dense, as the library's products were made for"),
            });
        }
        Ok(a)
    }

    /// The product with gate (0) or up (1), or with both.
    ///
    /// # Safety
    /// As [`Prepared::run`].
    unsafe fn product(
        &self,
        half: usize,
        a: &PreparedA,
        weights: &DeviceWeights,
        (b, scales): (DevicePtr, Option<DevicePtr>),
        stream: Stream,
    ) -> Result<(), Error> {
        let c = self.products.ptr().offset((half * self.desc.m * self.desc.n * 2) as u64);
        let alpha = sum_factors(weights.alpha(), &self.desc.epilogue, a.scale)?[half];
        let (operands, scales) = ([a.operand.codes, b, c], scales.map(|scales| [a.operand.scales, scales]));
        // SAFETY: the caller's promise.
        Ok(unsafe { self.matmul.launch(stream, alpha, operands, scales, self.workspaces[half].ptr()) }?)
    }

    /// The launch of the activation of both products, into C.
    fn activate(&self, call: &DeviceCall, weights: &DeviceWeights) -> Result<LaunchSpec, Error> {
        let (m, n, gate) = (call.m, self.desc.n, self.products.ptr());
        let bias = weights.bias();
        let products = match self.one_product {
            false => {
                let up = gate.offset((2 * m * n) as u64);
                Products { m, n, gate, up, pitch: 2 * n, alpha: [1.0; 2], bias }
            }
            // The one product was multiplied by gate's alpha.
            true => {
                let [of_gate, of_up] = weights.alpha().map(f64::from);
                let (epilogue, up) = (&self.desc.epilogue, gate.offset(2 * n as u64));
                let up_alpha = of_up * f64::from(epilogue.alpha_up);
                let ratio = (up_alpha / (of_gate * f64::from(epilogue.alpha_gate))) as f32;
                Products { m, n, gate, up, pitch: 4 * n, alpha: [1.0, ratio], bias }
            }
        };
        let Destination { c, scales, scale, .. } = Destination::of(call, &self.desc)?;
        let (out, scale) = match self.desc.out {
            OutFormat::Nvfp4 { .. } => (Out::Codes { codes: c, scales }, GlobalScale::multiplier(scale)),
            float => {
                let pitch = n * float.bits_per_element() as usize / 8;
                (Out::Image { values: c, pitch }, GlobalScale::ONE)
            }
        };
        Ok(self.act.spec(&products, &out, scale)?)
    }

    /// # Safety
    /// As [`Device::launch_on`].
    unsafe fn launch(&self, spec: LaunchSpec, stream: Stream) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.gpu.launch_on(stream, &overlapping(self.gpu.info(), spec)) }?)
    }

    /// A call, launch by launch.
    ///
    /// # Safety
    /// As [`Prepared::run`].
    unsafe fn launches(
        &self,
        call: &DeviceCall,
        weights: &Arc<DeviceWeights>,
        stream: Stream,
    ) -> Result<(), Error> {
        let mut before = Vec::new();
        let [gate, up] = self.operands(weights, &mut before)?;
        let (a, after) = (self.image(call, &mut before)?, self.activate(call, weights)?);
        // SAFETY: the caller vouches for the call, and the rest is this plan's.
        unsafe {
            before.into_iter().try_for_each(|spec| self.launch(spec, stream))?;
            match &self.beside {
                Some((beside, [ready, done])) => {
                    ready.record(stream)?;
                    ready.hold(beside.id())?;
                    self.product(0, &a, weights, gate, stream)?;
                    self.product(1, &a, weights, up, beside.id())?;
                    done.record(beside.id())?;
                    done.hold(stream)?;
                }
                None => {
                    self.product(0, &a, weights, gate, stream)?;
                    if !self.one_product {
                        self.product(1, &a, weights, up, stream)?;
                    }
                }
            }
            self.launch(after, stream)
        }
    }
}

/// Bytes of one dequantized matrix.
fn half_bytes(desc: &DualGemmDesc) -> usize {
    desc.n * desc.k * 2
}

impl Prepared for Ready {
    fn warm(&self, weights: &Arc<DeviceWeights>) -> Result<(), Error> {
        self.operands(weights, &mut Vec::new()).map(drop)
    }

    unsafe fn run(
        &self,
        call: &DeviceCall,
        weights: &Arc<DeviceWeights>,
        stream: Stream,
    ) -> Result<(), Error> {
        let Some((card, graphs)) = &self.graphs else {
            // SAFETY: the caller's promise.
            return unsafe { self.launches(call, weights, stream) };
        };
        let key = (weights.id(), call.key());
        let mut graphs = graphs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(graph) = graphs.get(&key) {
            // SAFETY: it was recorded of the same operands, for which the caller vouches.
            return Ok(unsafe { graph.replay_on(stream) }?);
        }
        self.warm(weights)?;
        // SAFETY: the caller vouches for the operands.
        let graph = card.record(|| unsafe { self.launches(call, weights, Stream::Own) })?;
        // SAFETY: the same.
        unsafe { graph.replay_on(stream) }?;
        if graphs.len() >= MOST_GRAPHS {
            graphs.clear();
        }
        graphs.insert(key, graph);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::h100;
    use dualgemm_device::Arch;

    #[test]
    fn its_nvfp4_is_for_blackwell_with_rows_at_multiples_of_16_bytes() {
        let info = |major, minor| DeviceInfo { name: "card".into(), arch: Arch { major, minor }, ..h100() };
        let desc = |a, n, k| DualGemmDesc::new(64, n, k, a, AFormat::Nvfp4);
        let ask =
            |desc: &DualGemmDesc, info: &DeviceInfo| NVFP4.kernels(desc, 1, info).map_err(|e| e.to_string());
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
