//! The operation in [candle](https://github.com/huggingface/candle): [`SwiGlu`], an operator on tensors, and [`GatedMlp`], a
//! module with the down projection. Both are [`Module`]s, cheap to clone, `Send` and `Sync`.
//!
//! With the feature `candle`, for candle-core 0.11; with `candle-cuda` also on CUDA tensors in f16 and bf16, which are read
//! and written where they lie, on candle's stream. Building candle for CUDA takes NVIDIA's compiler and libraries.
//!
//! Tested with candle-core 0.11.1 on the processor and, built against CUDA 13.0, on an H100: `cargo test -p dualgemm --features
//! candle-cuda --test candle -- --include-ignored`.
//!
//! ```no_run
//! use candle_core::{DType, Device, Module, Tensor};
//! use dualgemm::candle::{GatedMlp, Options};
//!
//! # fn main() -> candle_core::Result<()> {
//! let mlp = GatedMlp::from_checkpoint("model-nvfp4".as_ref(), 0, DType::F32, &Options::default())?;
//! let x = Tensor::randn(0f32, 1.0, (1, 8, 576), &Device::Cpu)?;
//! println!("{}", mlp.forward(&x)?);
//! # Ok(())
//! # }
//! ```

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, DType, Device, Error, Layout, Module, Result, Shape, Tensor, WithDType,
};
use half::{bf16, f16};

use crate::checkpoint::{Checkpoint, MlpKind, OpenOptions};
use crate::formats::{BlockFormat, FloatMatrix, Matrix, QuantizedMatrix};
use crate::gemm::{AFormat, AOperand, DualGemmDesc, Epilogue, GateUp, OutFormat, OutputMut, QuantizeA};
use crate::{DualGemm, PackedWeights, Runner, Target};

#[cfg(feature = "candle-cuda")]
mod cuda;

/// What is computed, and where.
#[derive(Debug, Clone)]
pub struct Options {
    /// The function of the two products; `None` takes the checkpoint's and, for weights without a checkpoint, SiLU.
    pub epilogue: Option<Epilogue>,
    /// Whether x is quantized on the way in.
    pub quantize_a: QuantizeA,
    /// Where the weights go and the tensors are.
    pub device: Device,
}

impl Default for Options {
    /// The function that goes with the weights, floats, the processor.
    fn default() -> Self {
        Self { epilogue: None, quantize_a: QuantizeA::No, device: Device::Cpu }
    }
}

impl Options {
    fn target(&self) -> Result<Target> {
        match &self.device {
            Device::Cpu => Ok(Target::default()),
            #[cfg(feature = "candle-cuda")]
            Device::Cuda(card) => Ok(cuda::target(card)),
            other => candle_core::bail!(
                "no kernels for {:?}; there are for the processor and, with the feature candle-cuda, for CUDA devices",
                other.location()
            ),
        }
    }
}

/// `C = act(x · gateᵀ, x · upᵀ)` on the last dimension of a tensor, in the type of that tensor: f32, f16 or bf16.
#[derive(Debug, Clone)]
pub struct SwiGlu(Arc<Packed>);

#[derive(Debug)]
struct Packed {
    weights: PackedWeights,
    target: Target,
    n: usize,
    k: usize,
    format: BlockFormat,
    epilogue: Epilogue,
    quantize_a: QuantizeA,
    /// M is rounded up to a power of two, so that there are few.
    runners: Mutex<Vec<Kept>>,
}

/// A runner that no call is using. Calls on one stream may share its scratch memory, calls on two may not.
#[derive(Debug)]
struct Kept {
    desc: DualGemmDesc,
    stream: u64,
    runner: Runner,
}

impl SwiGlu {
    /// Packs gate and up for a device.
    ///
    /// # Errors
    /// If the halves do not belong together, or the device is not there.
    pub fn new(weights: &GateUp<'_>, options: &Options) -> Result<Self> {
        Ok(Self(Arc::new(Packed::new(weights, options, options.target()?)?)))
    }

    /// Features (N) of each half.
    pub fn n(&self) -> usize {
        self.0.n
    }

    /// Elements per feature (K).
    pub fn k(&self) -> usize {
        self.0.k
    }
}

impl Module for SwiGlu {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op1_no_bwd(self)
    }
}

impl Packed {
    fn new(weights: &GateUp<'_>, options: &Options, target: Target) -> Result<Self> {
        let (n, k, format) = (weights.n(), weights.k(), weights.gate.format());
        let plan = DualGemm::plan_for_packing((n, k), format, &target);
        let weights = plan.and_then(|plan| plan.prepack(weights)).map_err(Error::wrap)?;
        let (epilogue, quantize_a) = (options.epilogue.unwrap_or_default(), options.quantize_a);
        let runners = Mutex::default();
        Ok(Self { weights, target, n, k, format, epilogue, quantize_a, runners })
    }

    /// Rows of x and the shape of C.
    fn shapes(&self, x: &Layout) -> Result<(usize, Shape)> {
        match x.dims().split_last() {
            Some((&k, lead)) if k == self.k => {
                Ok((lead.iter().product(), Shape::from([lead, &[self.n]].concat())))
            }
            _ => candle_core::bail!("x has shape {:?}; [..., {}] is needed", x.dims(), self.k),
        }
    }

    /// Calls `run` with a runner for so many rows of a type. `stream` is 0 on the processor.
    fn with_runner<T: Float, R>(
        &self,
        rows: usize,
        stream: u64,
        run: impl FnOnce(&mut Runner) -> std::result::Result<R, crate::Error>,
    ) -> Result<R> {
        let desc = DualGemmDesc {
            quantize_a: self.quantize_a,
            out: T::OUT,
            epilogue: self.epilogue,
            ..DualGemmDesc::new(rows.next_power_of_two(), self.n, self.k, T::A, self.format)
        };
        let kept = || self.runners.lock().unwrap_or_else(PoisonError::into_inner);
        let of_this = |kept: &Kept| kept.desc == desc && kept.stream == stream;
        let found = {
            let mut kept = kept();
            kept.iter().position(of_this).map(|at| kept.swap_remove(at).runner)
        };
        let mut runner = match found {
            Some(runner) => runner,
            None => {
                let plan = DualGemm::plan(&desc, &self.target).map_err(Error::wrap)?;
                let runner = plan.runner(1).map_err(Error::wrap)?;
                runner.warm(&self.weights).map_err(Error::wrap)?;
                runner
            }
        };
        let result = run(&mut runner).map_err(Error::wrap);
        kept().push(Kept { desc, stream, runner });
        result
    }

    /// C of a tensor of the processor.
    fn cpu<T: Float>(&self, x: &[T], layout: &Layout, rows: usize) -> Result<Vec<T>> {
        let mut c = vec![T::zero(); rows * self.n];
        if rows > 0 {
            let (start, end) = span(layout)?;
            let matrix = Matrix::new("x", rows, self.k, &x[start..end]).map_err(Error::wrap)?;
            let a = AOperand::Float(T::a(matrix));
            let run = |runner: &mut Runner| runner.run(&a, &self.weights, T::c(&mut c));
            self.with_runner::<T, _>(rows, 0, run)?;
        }
        Ok(c)
    }
}

/// Types of x and C.
trait Float: WithDType {
    const A: AFormat;
    const OUT: OutFormat;

    fn a(x: Matrix<'_, Self>) -> FloatMatrix<'_>;
    fn c(c: &mut [Self]) -> OutputMut<'_>;
}

macro_rules! float {
    ($type:ty, $variant:ident) => {
        impl Float for $type {
            const A: AFormat = AFormat::$variant;
            const OUT: OutFormat = OutFormat::$variant;

            fn a(x: Matrix<'_, Self>) -> FloatMatrix<'_> {
                FloatMatrix::$variant(x)
            }

            fn c(c: &mut [Self]) -> OutputMut<'_> {
                OutputMut::$variant(c)
            }
        }
    };
}

float!(f32, F32);
float!(f16, F16);
float!(bf16, Bf16);

/// Where the elements of x are.
fn span(x: &Layout) -> Result<(usize, usize)> {
    match x.contiguous_offsets() {
        Some(span) => Ok(span),
        None => candle_core::bail!("x is not contiguous; Module::forward makes it so"),
    }
}

impl CustomOp1 for SwiGlu {
    fn name(&self) -> &'static str {
        "dualgemm-swiglu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (packed, (rows, shape)) = (&*self.0, self.0.shapes(layout)?);
        let c = match storage {
            CpuStorage::F32(x) => CpuStorage::F32(packed.cpu(x, layout, rows)?),
            CpuStorage::F16(x) => CpuStorage::F16(packed.cpu(x, layout, rows)?),
            CpuStorage::BF16(x) => CpuStorage::BF16(packed.cpu(x, layout, rows)?),
            other => candle_core::bail!("x is {:?}; F32, F16 or BF16 is needed", other.dtype()),
        };
        Ok((c, shape))
    }

    #[cfg(feature = "candle-cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        self.0.cuda(storage, layout)
    }
}

/// `down(act(x · gateᵀ, x · upᵀ))`, gate and up in 4 bits, down decoded.
#[derive(Debug, Clone)]
pub struct GatedMlp {
    gate_up: SwiGlu,
    /// `[n, k]`.
    down: Tensor,
}

impl GatedMlp {
    /// A layer's dense MLP for tensors of a float type.
    ///
    /// # Errors
    /// If there is no such layer, a tensor is missing or breaks a rule, the device is not there, or nothing states the
    /// activation and the options ask for none.
    pub fn from_checkpoint(path: &Path, layer: usize, dtype: DType, options: &Options) -> Result<Self> {
        let checkpoint = Checkpoint::open(path, &OpenOptions::default()).map_err(Error::wrap)?;
        checkpoint.check_whole(layer, MlpKind::Dense).map_err(Error::wrap)?;
        let weights = crate::weights(checkpoint.gate_up(layer).map_err(Error::wrap)?);
        let down = checkpoint.down(layer).map_err(Error::wrap)?;
        let down = decoded(&down.weight)?.to_dtype(dtype)?.to_device(&options.device)?;
        let mut options = options.clone();
        if options.epilogue.is_none() {
            let activation = checkpoint.activation(layer, MlpKind::Dense).map_err(Error::wrap)?.activation;
            options.epilogue = Some(Epilogue { activation, ..Epilogue::default() });
        }
        Ok(Self { gate_up: SwiGlu::new(&weights, &options)?, down: down.t()? })
    }

    /// The product before the down projection.
    pub fn gate_up(&self) -> &SwiGlu {
        &self.gate_up
    }
}

fn decoded(m: &QuantizedMatrix<'_>) -> Result<Tensor> {
    let values: Vec<f32> =
        (0..m.rows()).flat_map(|row| (0..m.k()).map(move |k| m.value(row, k) as f32)).collect();
    Tensor::from_vec(values, (m.rows(), m.k()), &Device::Cpu)
}

impl Module for GatedMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.gate_up.forward(x)?.broadcast_matmul(&self.down)
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::formats::{Producer, Search, quantize};
    use crate::{GpuId, GpuOptions, SimArch};

    const N: usize = 48;
    const K: usize = 96;

    fn weights() -> GateUp<'static> {
        let half = |name: &str, step: f32| {
            let values: Vec<f32> = (0..N * K).map(|i| (i as f32 * step).sin()).collect();
            let matrix = FloatMatrix::F32(Matrix::new(name, N, K, values).unwrap());
            quantize(name, &matrix, Producer::Te, Search::Plain).unwrap()
        };
        GateUp::new(half("gate", 0.37), half("up", 0.53))
    }

    /// C of `rows` rows.
    fn c<T: Float>(packed: &Packed, rows: usize) -> Vec<f64> {
        let x: Vec<T> = (0..rows * K).map(|i| T::from_f64((i as f64 * 0.29).cos())).collect();
        let layout = Layout::contiguous((rows, K));
        let c = packed.cpu(&x, &layout, rows).unwrap_or_else(|e| panic!("{:?}: {e}", packed.target));
        c.into_iter().map(T::to_f64).collect()
    }

    fn rel_l2(got: &[f64], want: &[f64]) -> f64 {
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        norm(&mut got.iter().zip(want).map(|(got, want)| got - want)) / norm(&mut want.iter().copied())
    }

    /// Weights are packed once for whatever comes: plans of one card may read them in different orders.
    #[test]
    fn every_target_takes_every_type_of_tensor_close() {
        let weights = weights();
        for quantize_a in [QuantizeA::No, QuantizeA::Dynamic] {
            let options = Options { quantize_a, ..Options::default() };
            let packed = |target| Packed::new(&weights, &options, target).unwrap();
            let cpu = packed(Target::default());
            for arch in SimArch::ALL {
                let card = packed(Target::Gpu(GpuId::Sim(arch), GpuOptions::default()));
                for rows in [1, 5] {
                    let errors = [
                        rel_l2(&c::<f16>(&card, rows), &c::<f16>(&cpu, rows)),
                        rel_l2(&c::<bf16>(&card, rows), &c::<bf16>(&cpu, rows)),
                    ];
                    assert!(
                        errors[0] < 1e-3 && errors[1] < 8e-3,
                        "{arch:?} {quantize_a:?} {rows}: {errors:?}"
                    );
                }
            }
        }
    }
}
