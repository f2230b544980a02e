//! A layer's gated MLP on candle tensors:
//!
//! ```sh
//! cargo run --release -p dualgemm --features candle --example candle -- testdata/smollm2-135m-layer14/modelopt-nvfp4
//! cargo run --release -p dualgemm --features candle-cuda --example candle -- CHECKPOINT cuda
//! ```

use candle_core::{DType, Device, Module, Result, Tensor};
use dualgemm::candle::{GatedMlp, Options};

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1);
    let Some(path) = args.next() else { candle_core::bail!("usage: candle CHECKPOINT [cuda]") };
    let device = if args.next().is_some() { Device::new_cuda(0)? } else { Device::Cpu };
    let options = Options { device: device.clone(), ..Options::default() };
    let mlp = GatedMlp::from_checkpoint(path.as_ref(), 0, DType::BF16, &options)?;
    let x = Tensor::randn(0f32, 1.0, (4, mlp.gate_up().k()), &device)?.to_dtype(DType::BF16)?;
    println!("{}", mlp.forward(&x)?);
    Ok(())
}
