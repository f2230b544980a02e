//! candle tensors against the facade and against candle's own arithmetic on decoded weights.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Module, Result, Tensor};
use dualgemm::candle::{GatedMlp, Linear, Mixture, Mlp, Options, SwiGlu};
use dualgemm::checkpoint::{Checkpoint, OpenOptions};
use dualgemm::gemm::{Activation, Epilogue, GateUp, GatedMlp as GatedWeights, QuantizeA, RouterWeights};

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/smollm2-135m-layer14/modelopt-nvfp4")
}

fn x(shape: &[usize]) -> Result<Tensor> {
    let len: usize = shape.iter().product();
    let values: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

fn values(t: &Tensor) -> Result<Vec<f32>> {
    t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

fn rel_l2(got: &Tensor, want: &Tensor) -> Result<f32> {
    let norm = |t: &Tensor| t.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
    Ok(norm(&(got.to_dtype(DType::F32)? - want)?)? / norm(want)?)
}

fn swiglu(options: &Options) -> SwiGlu {
    let checkpoint = Checkpoint::open(&path(), &OpenOptions::default()).unwrap();
    let weights = checkpoint.gate_up(0).unwrap();
    SwiGlu::new(&weights, options).unwrap()
}

fn decoded(gate: bool) -> Result<Tensor> {
    let checkpoint = Checkpoint::open(&path(), &OpenOptions::default()).unwrap();
    let weights = checkpoint.gate_up(0).unwrap();
    let m = if gate { &weights.gate } else { &weights.up };
    let values: Vec<f32> =
        (0..m.rows()).flat_map(|r| (0..m.k()).map(move |k| m.value(r, k) as f32)).collect();
    Tensor::from_vec(values, (m.rows(), m.k()), &Device::Cpu)
}

#[test]
fn types_of_tensors_close() -> Result<()> {
    let (op, x) = (swiglu(&Options::default()), x(&[3, 576])?);
    let gate = x.matmul(&decoded(true)?.t()?)?;
    let want = ((gate.silu()?) * x.matmul(&decoded(false)?.t()?)?)?;
    for (dtype, limit) in [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let c = op.forward(&x.to_dtype(dtype)?)?;
        assert_eq!((c.dtype(), c.dims()), (dtype, &[3, 1536][..]));
        let error = rel_l2(&c, &want)?;
        assert!(error < limit, "{dtype:?}: {error}");
    }
    Ok(())
}

#[test]
fn leading_dimensions_and_strides_exact() -> Result<()> {
    let (op, x) = (swiglu(&Options::default()), x(&[6, 576])?);
    let want = values(&op.forward(&x)?)?;
    let c = op.forward(&x.reshape((2, 3, 576))?)?;
    assert_eq!(c.dims(), [2, 3, 1536]);
    assert_eq!(values(&c)?, want);
    let transposed = x.t()?.contiguous()?.t()?;
    assert!(!transposed.is_contiguous());
    assert_eq!(values(&op.forward(&transposed)?)?, want);
    assert_eq!(op.forward(&x.narrow(0, 0, 0)?)?.dims(), [0, 1536]);
    let part = x.narrow(0, 2, 3)?;
    assert_eq!(values(&op.forward(&part)?)?, values(&op.forward(&part.copy()?)?)?);
    Ok(())
}

#[test]
fn misuse_is_refused_with_a_reason() -> Result<()> {
    let op = swiglu(&Options::default());
    let message = |x: &Tensor| op.forward(x).unwrap_err().to_string();
    assert!(message(&x(&[2, 64])?).contains("[..., 576] is needed"));
    assert!(message(&x(&[2, 576])?.to_dtype(DType::F64)?).contains("F32, F16 or BF16"));
    let missing = GatedMlp::from_checkpoint("no-such.gguf".as_ref(), 0, DType::F32, &Options::default());
    assert!(missing.unwrap_err().to_string().contains("no-such.gguf"));
    Ok(())
}

#[test]
fn the_module_computes_the_activation_of_the_checkpoint_exact() -> Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::copy(path().join("model.safetensors"), dir.path().join("model.safetensors"))?;
    let config = std::fs::read_to_string(path().join("config.json"))?;
    let relu2 = Epilogue { activation: Activation::Relu2, ..Epilogue::default() };
    let asked = Options { epilogue: Some(relu2), ..Options::default() };
    std::fs::write(dir.path().join("config.json"), config.replace("\"silu\"", "\"relu2\""))?;
    let mlp = GatedMlp::from_checkpoint(dir.path(), 0, DType::F32, &Options::default())?;
    let x = x(&[3, 576])?;
    assert_eq!(values(&mlp.gate_up().forward(&x)?)?, values(&swiglu(&asked).forward(&x)?)?);
    Ok(())
}

#[test]
fn the_module_computes_the_whole_mlp_close() -> Result<()> {
    let mlp = GatedMlp::from_checkpoint(&path(), 0, DType::F32, &Options::default())?;
    let x = x(&[1, 4, 576])?;
    let y = mlp.forward(&x)?;
    assert_eq!(y.dims(), [1, 4, 576]);
    let checkpoint = Checkpoint::open(&path(), &OpenOptions::default()).unwrap();
    let down = checkpoint.down(0).unwrap().weight;
    let c = values(&mlp.gate_up().forward(&x)?)?;
    let want: Vec<f32> = c
        .chunks(1536)
        .flat_map(|c| {
            let row = |r: usize| (0..1536).map(|k| down.value(r, k) * f64::from(c[k])).sum::<f64>() as f32;
            (0..576).map(row).collect::<Vec<f32>>()
        })
        .collect();
    let want = Tensor::from_vec(want, (1, 4, 576), &Device::Cpu)?;
    assert!(rel_l2(&y, &want)? < 1e-5);
    fn shared<T: Send + Sync>(_: &T) {}
    shared(&mlp);
    Ok(())
}

const MODULE: &str = "model.layers.0.mlp.down_proj";

/// x through the down projection, in f64.
fn down_of(x: &Tensor) -> Result<Tensor> {
    let checkpoint = Checkpoint::open(&path(), &OpenOptions::default()).unwrap();
    let down = checkpoint.down(0).unwrap().weight;
    let rows = values(x)?.into_iter().map(f64::from).collect::<Vec<_>>();
    let row =
        |x: &[f64], r: usize| x.iter().enumerate().map(|(k, x)| down.value(r, k) * x).sum::<f64>() as f32;
    let y: Vec<f32> =
        rows.chunks(1536).flat_map(|x| (0..576).map(|r| row(x, r)).collect::<Vec<_>>()).collect();
    Tensor::from_vec(y, (rows.len() / 1536, 576), &Device::Cpu)
}

#[test]
fn a_linear_layer_in_every_type_of_tensor_close() -> Result<()> {
    let layer = Linear::from_checkpoint(&path(), MODULE, &Options::default())?;
    assert_eq!((layer.n(), layer.k()), (576, 1536));
    for (dtype, limit) in [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::BF16, 1e-2)] {
        let x = x(&[2, 3, 1536])?.to_dtype(dtype)?;
        let y = layer.forward(&x)?;
        assert_eq!((y.dtype(), y.dims()), (dtype, &[2, 3, 576][..]));
        let error = rel_l2(&y.reshape((6, 576))?, &down_of(&x)?)?;
        assert!(error < limit, "{dtype:?}: {error}");
    }
    // A bias is added; an epilogue is of gate and up.
    let checkpoint = Checkpoint::open(&path(), &OpenOptions::default()).unwrap();
    let mut operand = checkpoint.linear(MODULE).unwrap();
    operand.bias = Some((0..576).map(|n| n as f32).collect::<Vec<_>>().into());
    let (x, with_bias) = (x(&[1, 1536])?, Linear::new(&operand, &Options::default())?);
    let difference = values(&(with_bias.forward(&x)? - layer.forward(&x)?)?)?;
    assert!(difference.iter().enumerate().all(|(n, d)| (d - n as f32).abs() < 1e-3));
    let relu2 = Options {
        epilogue: Some(Epilogue { activation: Activation::Relu2, ..Epilogue::default() }),
        ..Options::default()
    };
    let message = |r: Result<Linear>| r.err().unwrap().to_string();
    assert!(
        message(Linear::from_checkpoint(&path(), MODULE, &relu2)).contains("an epilogue is for gate and up")
    );
    assert!(message(Linear::from_checkpoint(&path(), "no.such", &Options::default())).contains("no.such"));
    Ok(())
}

#[test]
fn the_whole_mlp_is_one_operator_close() -> Result<()> {
    let mlp = Mlp::from_checkpoint(&path(), 0, &Options::default())?;
    assert_eq!((mlp.n(), mlp.k()), (576, 576));
    let (x, gate_up) = (x(&[4, 576])?, swiglu(&Options::default()));
    // In f32 nothing is rounded between the products; in 16 bits that is.
    for (dtype, limit) in [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let y = mlp.forward(&x.to_dtype(dtype)?)?;
        assert_eq!((y.dtype(), y.dims()), (dtype, &[4, 576][..]));
        let error = rel_l2(&y, &down_of(&gate_up.forward(&x)?)?)?;
        assert!(error < limit, "{dtype:?}: {error}");
    }
    let checkpoint = Checkpoint::open(&path(), &OpenOptions::default()).unwrap();
    let gate_up = checkpoint.gate_up(0).unwrap();
    let gate = dualgemm::gemm::Linear { weight: gate_up.gate.clone().into(), bias: None };
    let wrong = dualgemm::gemm::GatedMlp { gate_up, down: gate };
    let message = Mlp::new(&wrong, &Options::default()).unwrap_err().to_string();
    assert!(
        message.contains("the problem asks for K = 1536, the features of model.layers.0.mlp.gate_proj"),
        "{message}"
    );
    Ok(())
}

/// Two experts: the MLP of the layer, and the same with gate and up exchanged.
fn experts(checkpoint: &Checkpoint) -> Vec<GatedWeights<'_>> {
    let (GateUp { gate, up, .. }, down) = (checkpoint.gate_up(0).unwrap(), checkpoint.down(0).unwrap());
    [GateUp::new(gate.clone(), up.clone()), GateUp::new(up, gate)]
        .map(|gate_up| GatedWeights { gate_up, down: down.clone() })
        .into()
}

#[test]
fn a_mixture_is_the_weighted_sum_of_its_experts_close() -> Result<()> {
    let checkpoint = Checkpoint::open(&path(), &OpenOptions::default()).unwrap();
    let all = experts(&checkpoint);
    let each = all.iter().map(|mlp| Mlp::new(mlp, &Options::default())).collect::<Result<Vec<_>>>()?;
    let mixture = Mixture::new(all, RouterWeights::Output, &Options::default())?;
    assert_eq!((mixture.n(), mixture.k()), (576, 576));
    let ids = Tensor::new(&[[[0i64, 1], [1, 1]], [[-1, 0], [-1, -1]]], &Device::Cpu)?;
    let weights = Tensor::new(&[[[0.5f32, 0.25], [2.0, -1.0]], [[9.0, 1.5], [9.0, 9.0]]], &Device::Cpu)?;
    // Of each expert, by token.
    let sums = [[0.5f32, 0.0, 1.5, 0.0], [0.25, 1.0, 0.0, 0.0]];
    let x = x(&[2, 2, 576])?;
    for (dtype, limit) in [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let x = x.to_dtype(dtype)?;
        let y = mixture.forward(&x, &ids, &weights)?;
        assert_eq!((y.dtype(), y.dims()), (dtype, x.dims()));
        let mut want = Tensor::zeros((4, 576), DType::F32, &Device::Cpu)?;
        for (expert, sums) in each.iter().zip(sums) {
            let y = expert.forward(&x)?.to_dtype(DType::F32)?.reshape((4, 576))?;
            let sums = Tensor::new(&sums, &Device::Cpu)?.reshape((4, 1))?;
            want = (want + y.broadcast_mul(&sums)?)?;
        }
        let error = rel_l2(&y.reshape((4, 576))?, &want)?;
        assert!(error < limit, "{dtype:?}: {error}");
    }
    // What a router's sort gives, of any strides.
    let (x, ids) = (x.narrow(0, 0, 1)?, Tensor::new(&[[[0u32, 1], [1, 1]]], &Device::Cpu)?);
    let weights = weights.narrow(0, 0, 1)?.to_dtype(DType::BF16)?;
    let y = mixture.forward(&x, &ids, &weights)?;
    let transposed = |t: &Tensor| t.t()?.contiguous()?.t();
    let again = mixture.forward(&x, &transposed(&ids.to_dtype(DType::I64)?)?, &transposed(&weights)?)?;
    assert_eq!(values(&y)?, values(&again)?);
    assert_eq!(
        mixture.forward(&x.narrow(1, 0, 0)?, &ids.narrow(1, 0, 0)?, &weights.narrow(1, 0, 0)?)?.dims(),
        [1, 0, 576]
    );
    Ok(())
}

#[test]
fn what_is_no_mixture_is_refused_with_a_reason() -> Result<()> {
    let checkpoint = Checkpoint::open(&path(), &OpenOptions::default()).unwrap();
    let mixture = Mixture::new(experts(&checkpoint), RouterWeights::Output, &Options::default())?;
    let (x, ids, weights) =
        (x(&[1, 576])?, Tensor::new(&[[0i64]], &Device::Cpu)?, Tensor::new(&[[1f32]], &Device::Cpu)?);
    let cases = [
        (
            Tensor::new(&[[2i64]], &Device::Cpu)?,
            weights.clone(),
            "topk_ids[0, 0] is 2; the problem asks for numbers below 2",
        ),
        (
            Tensor::new(&[[1i64 << 40]], &Device::Cpu)?,
            weights.clone(),
            "1099511627776 is no number of an expert",
        ),
        (
            Tensor::new(&[[0f32]], &Device::Cpu)?,
            weights.clone(),
            "topk_ids is F32; U32, I32 or I64 is needed",
        ),
        (
            Tensor::new(&[0i64], &Device::Cpu)?,
            weights.clone(),
            "topk_ids has shape [1]; [1] and experts of a token are needed",
        ),
        (
            ids.clone(),
            Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?,
            "topk_weights has shape [1, 2]; [1, 1] is needed",
        ),
        (ids.clone(), Tensor::new(&[[1u32]], &Device::Cpu)?, "topk_weights is U32; floats are needed"),
        (ids.clone(), Tensor::new(&[[f32::NAN]], &Device::Cpu)?, "topk_weights[0, 0] is NaN"),
    ];
    for (ids, weights, want) in cases {
        let message = mixture.forward(&x, &ids, &weights).unwrap_err().to_string();
        assert!(message.contains(want), "{message}, want {want}");
    }
    let message = |r: Result<Mixture>| r.err().unwrap().to_string();
    let none = Mixture::new(Vec::new(), RouterWeights::Output, &Options::default());
    assert!(message(none).contains("at least one expert"));
    assert!(
        message(Mixture::from_checkpoint(&path(), 0, &Options::default()))
            .contains("there are no experts in it")
    );
    Ok(())
}

/// The layer's MLP as the one expert of a checkpoint.
#[test]
fn a_mixture_of_a_checkpoint_exact() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let bytes = std::fs::read(path().join("model.safetensors"))?;
    let (len, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header = String::from_utf8(header.to_vec()).unwrap().replace(".mlp.", ".mlp.experts.0.");
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    let parts = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
    std::fs::write(dir.path().join("model.safetensors"), parts)?;
    std::fs::copy(path().join("config.json"), dir.path().join("config.json"))?;
    let mixture = Mixture::from_checkpoint(dir.path(), 0, &Options::default())?;
    let (x, ids) = (x(&[3, 576])?, Tensor::zeros((3, 1), DType::U32, &Device::Cpu)?);
    let y = mixture.forward(&x, &ids, &Tensor::ones((3, 1), DType::F32, &Device::Cpu)?)?;
    assert_eq!(values(&y)?, values(&Mlp::from_checkpoint(&path(), 0, &Options::default())?.forward(&x)?)?);
    Ok(())
}

#[test]
fn x_is_quantized_on_the_way_in_close() -> Result<()> {
    let (floats, x) = (swiglu(&Options::default()), x(&[4, 576])?);
    let quantized = swiglu(&Options { quantize_a: QuantizeA::Dynamic, ..Options::default() });
    let (want, got) = (floats.forward(&x)?, quantized.forward(&x)?);
    let error = rel_l2(&got, &want)?;
    assert!((0.01..0.2).contains(&error), "{error}");
    Ok(())
}

#[test]
fn one_operator_serves_any_threads_and_shapes_exact() -> Result<()> {
    let op = swiglu(&Options::default());
    let inputs = (1..=9).map(|m| x(&[m, 576])).collect::<Result<Vec<_>>>()?;
    let want = inputs.iter().map(|x| values(&op.forward(x)?)).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for (x, want) in inputs.iter().zip(&want) {
                    assert_eq!(values(&op.forward(x).unwrap()).unwrap(), *want);
                }
            });
        }
    });
    Ok(())
}

#[cfg(feature = "candle-cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_tensors_close() -> Result<()> {
    let on = |device: &Device| {
        let options = Options { device: device.clone(), ..Options::default() };
        GatedMlp::from_checkpoint(&path(), 0, DType::F16, &options)
    };
    let (card, x) = (Device::new_cuda(0)?, x(&[2, 9, 576])?.to_dtype(DType::F16)?);
    let (here, there) = (on(&Device::Cpu)?, on(&card)?);
    for rows in [1, 4, 9] {
        let x = x.narrow(1, 0, rows)?;
        let want = here.gate_up().forward(&x)?.to_dtype(DType::F32)?;
        let c = there.gate_up().forward(&x.to_device(&card)?)?;
        let error = rel_l2(&c.to_device(&Device::Cpu)?, &want)?;
        assert!(error < 1e-3, "{rows}: {error}");
        let want = here.forward(&x)?.to_dtype(DType::F32)?;
        let error = rel_l2(&there.forward(&x.to_device(&card)?)?.to_device(&Device::Cpu)?, &want)?;
        assert!(error < 5e-3, "{rows}: {error}");
    }
    // Weights of one device do not serve the other.
    assert!(there.forward(&x).is_err());
    assert!(here.forward(&x.to_device(&card)?).is_err());
    Ok(())
}
