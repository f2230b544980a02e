//! The operations in [candle](https://github.com/huggingface/candle): [`SwiGlu`], [`Linear`], [`Mlp`] and [`Mixture`], operators on
//! tensors, and [`GatedMlp`], a module with a down projection in floats. All are cheap to clone, `Send` and `Sync`, and all but
//! [`Mixture`], which takes three tensors, are [`Module`]s.
//!
//! With the feature `candle`, for candle-core 0.11; with `candle-cuda` also on CUDA tensors in f16 and bf16, which are read
//! and written where they lie, on candle's stream. Building candle for CUDA takes NVIDIA's compiler and libraries. Mixtures are for
//! the processor.
//!
//! Tested with candle-core 0.11.1 on the processor and, built against CUDA 13.0, on an H100: `cargo test -p dualgemm --features
//! candle-cuda --test candle -- --include-ignored`.
//!
//! ```no_run
//! use candle_core::{Device, Module, Tensor};
//! use dualgemm::candle::{Mlp, Options};
//!
//! # fn main() -> candle_core::Result<()> {
//! let mlp = Mlp::from_checkpoint("model-nvfp4".as_ref(), 0, &Options::default())?;
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
pub use mixture::Mixture;

use crate::checkpoint::{Checkpoint, MlpKind, OpenOptions, Which};
use crate::formats::{FloatMatrix, FloatType, Matrix};
use crate::gemm::{self, AOperand, Epilogue, GateUp, OutputMut, QuantizeA, Routing, Weight};
use crate::{AnyDesc, AnyPlan, AnyRunner, LayerCall, PackedLayer, Target};

#[cfg(feature = "candle-cuda")]
mod cuda;
mod mixture;
#[cfg(all(test, feature = "sim"))]
mod tests;

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

#[derive(Debug)]
struct Packed {
    layer: PackedLayer,
    epilogue: Epilogue,
    quantize_a: QuantizeA,
    /// M is rounded up to a power of two, so that there are few.
    runners: Mutex<Vec<Kept>>,
}

/// A runner that no call is using. Calls on one stream may share its scratch memory, calls on two may not.
#[derive(Debug)]
struct Kept {
    desc: AnyDesc,
    stream: u64,
    runner: AnyRunner,
}

macro_rules! operator {
    ($(#[$doc:meta])* $name:ident, $text:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $name(Arc<Packed>);

        impl $name {
            /// Features of C.
            pub fn n(&self) -> usize {
                self.0.layer.shape.ends().0
            }

            /// Elements of a row of x.
            pub fn k(&self) -> usize {
                self.0.layer.shape.k
            }
        }

        impl Module for $name {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.contiguous()?.apply_op1_no_bwd(self)
            }
        }

        impl CustomOp1 for $name {
            fn name(&self) -> &'static str {
                $text
            }

            fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
                self.0.forward(storage, layout, None)
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
    };
}

operator!(
    /// `C = act(x · gateᵀ, x · upᵀ)` on the last dimension of a tensor, in the type of that tensor: f32, f16 or bf16.
    SwiGlu,
    "dualgemm-swiglu"
);
operator!(
    /// `C = x · Wᵀ`, plus the bias where there is one, in the type of x.
    Linear,
    "dualgemm-linear"
);
operator!(
    /// `C = act(x · gateᵀ, x · upᵀ) · downᵀ` with all three matrices in 4 bits, in the type of x, as is what is between the
    /// products.
    Mlp,
    "dualgemm-mlp"
);

impl SwiGlu {
    /// Packs gate and up for a device.
    ///
    /// # Errors
    /// If the halves do not belong together, or the device is not there.
    pub fn new(weights: &GateUp<'_>, options: &Options) -> Result<Self> {
        let layer = PackedLayer::product(weights, options.target()?).map_err(Error::wrap)?;
        Ok(Self(Packed::new(layer, options)))
    }
}

impl Linear {
    /// Packs a linear layer for a device.
    ///
    /// # Errors
    /// If the bias does not fit, the options ask for an epilogue, or the device is not there.
    pub fn new(layer: &gemm::Linear<'_>, options: &Options) -> Result<Self> {
        if options.epilogue.is_some() {
            candle_core::bail!("an epilogue is for gate and up; {} is a linear layer", layer.weight.name());
        }
        let layer = PackedLayer::product(layer, options.target()?).map_err(Error::wrap)?;
        Ok(Self(Packed::new(layer, options)))
    }

    /// A module of a checkpoint by its name.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if there is no such module in 4 bits, or a tensor breaks a rule.
    pub fn from_checkpoint(path: &Path, module: &str, options: &Options) -> Result<Self> {
        let checkpoint = open(path)?;
        Self::new(&checkpoint.linear(module).map_err(Error::wrap)?, options)
    }
}

impl Mlp {
    /// Packs an MLP for a device.
    ///
    /// # Errors
    /// If its parts do not belong together, or the device is not there.
    pub fn new(mlp: &gemm::GatedMlp<'_>, options: &Options) -> Result<Self> {
        let layer = PackedLayer::mlp(mlp, options.target()?).map_err(Error::wrap)?;
        Ok(Self(Packed::new(layer, options)))
    }

    /// A layer's dense MLP.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if there is no such layer, a tensor is missing or breaks a rule, or nothing states the
    /// activation and the options ask for none.
    pub fn from_checkpoint(path: &Path, layer: usize, options: &Options) -> Result<Self> {
        let checkpoint = open(path)?;
        let options = of_layer(&checkpoint, layer, MlpKind::Dense, options)?;
        Self::new(&checkpoint.gated_mlp(layer, Which::Dense).map_err(Error::wrap)?, &options)
    }
}

fn open(path: &Path) -> Result<Checkpoint> {
    Checkpoint::open(path, &OpenOptions::default()).map_err(Error::wrap)
}

/// Gate and up of a layer's dense MLP, and the options with its activation.
fn dense<'c>(checkpoint: &'c Checkpoint, layer: usize, options: &Options) -> Result<(GateUp<'c>, Options)> {
    let options = of_layer(checkpoint, layer, MlpKind::Dense, options)?;
    Ok((checkpoint.gate_up(layer).map_err(Error::wrap)?, options))
}

/// The options with the activation of a layer's MLPs, which are what they seem.
fn of_layer(checkpoint: &Checkpoint, layer: usize, kind: MlpKind, options: &Options) -> Result<Options> {
    checkpoint.check_whole(layer, kind).map_err(Error::wrap)?;
    let mut options = options.clone();
    if options.epilogue.is_none() {
        let activation = checkpoint.activation(layer, kind).map_err(Error::wrap)?.activation;
        options.epilogue = Some(Epilogue { activation, ..Epilogue::default() });
    }
    Ok(options)
}

impl Packed {
    fn new(layer: PackedLayer, options: &Options) -> Arc<Self> {
        let (epilogue, quantize_a) = (options.epilogue.unwrap_or_default(), options.quantize_a);
        Arc::new(Self { layer, epilogue, quantize_a, runners: Mutex::default() })
    }

    /// The problem of so many rows of a type; each is for `top_k` experts of a mixture.
    fn desc<T: Float>(&self, rows: usize, top_k: usize) -> AnyDesc {
        let &Self { epilogue, quantize_a, .. } = self;
        let call = LayerCall::new(rows.next_power_of_two(), T::TYPE.into(), T::TYPE.into());
        self.layer.shape.describe(&LayerCall { epilogue, quantize_a, between: T::TYPE.into(), top_k, ..call })
    }

    /// Rows of x and the shape of C.
    fn shapes(&self, x: &Layout) -> Result<(usize, Shape)> {
        let (n, k) = self.layer.shape.ends();
        match x.dims().split_last() {
            Some((&found, lead)) if found == k => {
                Ok((lead.iter().product(), Shape::from([lead, &[n]].concat())))
            }
            _ => candle_core::bail!("x has shape {:?}; [..., {k}] is needed", x.dims()),
        }
    }

    /// Calls `run` with a runner for a problem. `stream` is 0 on the processor.
    fn with_runner<R>(
        &self,
        desc: AnyDesc,
        stream: u64,
        run: impl FnOnce(&mut AnyRunner) -> std::result::Result<R, crate::Error>,
    ) -> Result<R> {
        let kept = || self.runners.lock().unwrap_or_else(PoisonError::into_inner);
        let of_this = |kept: &Kept| kept.desc == desc && kept.stream == stream;
        let found = {
            let mut kept = kept();
            kept.iter().position(of_this).map(|at| kept.swap_remove(at).runner)
        };
        let mut runner = match found {
            Some(runner) => runner,
            None => {
                let runner = AnyPlan::new(&desc, &self.layer.target).and_then(|plan| plan.runner());
                let runner = runner.map_err(Error::wrap)?;
                #[cfg(feature = "cuda")]
                runner.warm(&self.layer.weights).map_err(Error::wrap)?;
                runner
            }
        };
        let result = run(&mut runner).map_err(Error::wrap);
        kept().push(Kept { desc, stream, runner });
        result
    }

    fn forward(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        routing: Option<Routing<'_>>,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, shape) = self.shapes(layout)?;
        let c = match storage {
            CpuStorage::F32(x) => CpuStorage::F32(self.cpu(x, layout, rows, routing)?),
            CpuStorage::F16(x) => CpuStorage::F16(self.cpu(x, layout, rows, routing)?),
            CpuStorage::BF16(x) => CpuStorage::BF16(self.cpu(x, layout, rows, routing)?),
            other => candle_core::bail!("x is {:?}; F32, F16 or BF16 is needed", other.dtype()),
        };
        Ok((c, shape))
    }

    /// C of a tensor of the processor.
    fn cpu<T: Float>(
        &self,
        x: &[T],
        layout: &Layout,
        rows: usize,
        routing: Option<Routing<'_>>,
    ) -> Result<Vec<T>> {
        let (n, k) = self.layer.shape.ends();
        let mut c = vec![T::zero(); rows * n];
        if rows > 0 {
            let (start, end) = span(layout)?;
            let matrix = Matrix::new("x", rows, k, &x[start..end]).map_err(Error::wrap)?;
            let a = AOperand::Float(T::a(matrix));
            let run =
                |runner: &mut AnyRunner| runner.run(&a, &self.layer.weights, routing, (T::c(&mut c), false));
            let top_k = routing.map_or(1, |routing| routing.ids.len() / rows);
            self.with_runner(self.desc::<T>(rows, top_k), 0, run)?;
        }
        Ok(c)
    }
}

/// Types of x and C.
trait Float: WithDType {
    const TYPE: FloatType;

    fn a(x: Matrix<'_, Self>) -> FloatMatrix<'_>;
    fn c(c: &mut [Self]) -> OutputMut<'_>;
}

macro_rules! float {
    ($type:ty, $variant:ident) => {
        impl Float for $type {
            const TYPE: FloatType = FloatType::$variant;

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

/// `down(act(x · gateᵀ, x · upᵀ))`, gate and up in 4 bits, down decoded.
#[derive(Debug, Clone)]
pub struct GatedMlp {
    gate_up: SwiGlu,
    /// `[n, k]`.
    down: Tensor,
    bias: Option<Tensor>,
}

impl GatedMlp {
    /// A layer's dense MLP for tensors of a float type.
    ///
    /// # Errors
    /// If there is no such layer, a tensor is missing or breaks a rule, the device is not there, or nothing states the
    /// activation and the options ask for none.
    pub fn from_checkpoint(path: &Path, layer: usize, dtype: DType, options: &Options) -> Result<Self> {
        let checkpoint = open(path)?;
        let (weights, options) = dense(&checkpoint, layer, options)?;
        let down = checkpoint.down(layer).map_err(Error::wrap)?;
        let bias = down.bias.map(|bias| Tensor::new(&*bias, &options.device)?.to_dtype(dtype)).transpose()?;
        let down = decoded(&down.weight)?.to_dtype(dtype)?.to_device(&options.device)?;
        Ok(Self { gate_up: SwiGlu::new(&weights, &options)?, down: down.t()?, bias })
    }

    /// The product before the down projection.
    pub fn gate_up(&self) -> &SwiGlu {
        &self.gate_up
    }
}

fn decoded(m: &Weight<'_>) -> Result<Tensor> {
    let values: Vec<f32> =
        (0..m.rows()).flat_map(|row| (0..m.k()).map(move |k| m.value(row, k) as f32)).collect();
    Tensor::from_vec(values, (m.rows(), m.k()), &Device::Cpu)
}

impl Module for GatedMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.gate_up.forward(x)?.broadcast_matmul(&self.down)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}
