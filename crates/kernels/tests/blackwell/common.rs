//! Problems in every format, and launches of either kernel on them.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::{Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatType, GlobalScale, QuantizedMatrix};
use dualgemm_gemm::{AOperand, Activation, Comparison, Epilogue, GateUp, reference};
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::operand::{FusedArgs, Operand};
use dualgemm_kernels::parts::rows::{Out, Output, Variant};
use dualgemm_kernels::sm100a::config::Side;
use dualgemm_kernels::{Error, sm100a, sm120a};
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::{Card, Checks, Gpu};

/// A configuration of either kernel.
#[derive(Clone, Copy)]
pub enum Config {
    Sm100(sm100a::config::Config),
    Sm120(sm120a::config::Config),
}

impl Config {
    pub fn name(self) -> String {
        match self {
            Self::Sm100(config) => config.name(),
            Self::Sm120(config) => config.name(),
        }
    }

    pub fn formats(self) -> Formats {
        match self {
            Self::Sm100(config) => config.formats,
            Self::Sm120(config) => Formats::Scaled(config.format),
        }
    }

    fn card(self) -> Card {
        match self {
            Self::Sm100(_) => Card::B200,
            Self::Sm120(_) => Card::RtxPro6000,
        }
    }

    pub fn spec(self, gpu: &Gpu, variant: &Variant, n: usize, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        match self {
            Self::Sm100(config) => sm100a::host::Fused::new(gpu, config, variant, n)?.spec(args),
            Self::Sm120(config) => sm120a::host::Fused::new(gpu, config, variant, n)?.spec(args),
        }
    }
}

pub const TOKENS: sm100a::config::Config = sm100a::config::Config {
    formats: Formats::NVFP4,
    side: Side::Tokens,
    n: 64,
    cta_group: 1,
    split_k: 1,
    stages: 2,
    accumulators: 2,
};
pub const FEATURES: sm100a::config::Config =
    sm100a::config::Config { side: Side::Features, n: 8, accumulators: 1, ..TOKENS };
pub const WIDE: sm100a::config::Config =
    sm100a::config::Config { formats: Formats::Wide(HalfFormat::F16), n: 16, ..FEATURES };

/// One configuration of each way through the kernels.
pub fn every_way() -> [Config; 9] {
    let bf16 = Formats::Wide(HalfFormat::Bf16);
    let [sm120, ..] = sm120a::config::Config::MENU;
    [
        Config::Sm100(TOKENS),
        Config::Sm100(FEATURES),
        Config::Sm100(sm100a::config::Config { cta_group: 2, split_k: 2, accumulators: 1, ..TOKENS }),
        Config::Sm100(sm100a::config::Config { split_k: 2, ..FEATURES }),
        Config::Sm100(sm100a::config::Config { formats: Formats::MXFP4, side: Side::HalfAtoms, ..TOKENS }),
        Config::Sm100(WIDE),
        Config::Sm100(sm100a::config::Config { split_k: 2, formats: bf16, ..WIDE }),
        Config::Sm120(sm120),
        Config::Sm120(sm120a::config::Config { format: BlockFormat::Mxfp4, ..sm120 }),
    ]
}

/// A with a tensor scale of ½ if it has one, weights with different ones.
pub fn matrices(
    formats: Formats,
    seed: u64,
    (m, n, k): (usize, usize, usize),
) -> (AOperand<'static>, GateUp<'static>) {
    let mut inputs = Inputs::seeded(seed);
    let quantized = |inputs: &mut Inputs, name: &str, rows, scale| {
        let (format, sets) = (formats.weights(), (CodeSet::Full, ScaleSet::Unit));
        // Block scales of mxfp4 reach 2⁷ where those of nvfp4 stay below 1.
        let scale = if format == BlockFormat::Nvfp4 { scale } else { scale / 128.0 };
        inputs.quantized(name, format, (rows, k), sets, GlobalScale::multiplier(scale)).unwrap()
    };
    let a = match formats {
        Formats::Scaled(_) => AOperand::Quantized(quantized(&mut inputs, "A", m, 0.5)),
        Formats::Wide(HalfFormat::F16) => AOperand::Float(inputs.floats("A", FloatType::F16, m, k).unwrap()),
        Formats::Wide(HalfFormat::Bf16) => {
            AOperand::Float(inputs.floats("A", FloatType::Bf16, m, k).unwrap())
        }
    };
    let gate = quantized(&mut inputs, "gate", n, 0.011);
    (a, GateUp::new(gate, quantized(&mut inputs, "up", n, 0.023)))
}

pub fn gpu(config: Config) -> Gpu {
    Gpu::new(dualgemm_sim::Config::default().card(config.card()).checks(Checks::ALL))
}

pub fn f32_out() -> Variant {
    Variant { out: Out::F32, ..Variant::new(Activation::Silu.program()) }
}

/// A's tensor scale.
pub fn scale_of(a: &AOperand<'_>) -> f32 {
    match a {
        AOperand::Quantized(a) => a.global_scale().value(),
        AOperand::Float(_) => 1.0,
    }
}

pub fn alpha(a: &AOperand<'_>, weights: &GateUp<'_>) -> [f32; 2] {
    [&weights.gate, &weights.up].map(|w| scale_of(a) * w.global_scale().value())
}

pub fn upload(gpu: &Gpu, bytes: &[u8]) -> DevicePtr {
    let ptr = gpu.alloc(bytes.len()).unwrap();
    gpu.copy_to(ptr, bytes).unwrap();
    ptr
}

pub fn download(gpu: &Gpu, from: DevicePtr, bytes: usize) -> Vec<u8> {
    let mut to = vec![0; bytes];
    gpu.copy_from(&mut to, from).unwrap();
    to
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// A, gate and up on the device.
pub fn operands(gpu: &Gpu, a: &AOperand<'_>, weights: &GateUp<'_>) -> [Operand; 3] {
    let a = match a {
        AOperand::Quantized(a) => Operand::upload(gpu, a),
        AOperand::Float(a) => Operand::upload_floats(gpu, a),
    };
    let upload = |half: &QuantizedMatrix<'_>| Operand::upload(gpu, half).unwrap();
    [a.unwrap(), upload(&weights.gate), upload(&weights.up)]
}

/// Launches on one problem. C and what lies behind it are poisoned before.
pub fn run(config: Config, variant: &Variant, a: &AOperand<'_>, weights: &GateUp<'_>) -> Vec<u8> {
    let gpu = gpu(config);
    let [x, gate, up] = operands(&gpu, a, weights);
    let (m, n) = (a.rows(), weights.n());
    let bytes = m * variant.out.row_bytes(n);
    let c = upload(&gpu, &vec![0xEE; bytes + 256]);
    let output = Output::new(c, alpha(a, weights));
    let args = FusedArgs { a: x, gate, up, output, groups: None };
    let spec = config.spec(&gpu, variant, n, &args).unwrap();
    // SAFETY: the operands were allocated here, as large as the launch says.
    unsafe { gpu.launch(&spec) }.unwrap_or_else(|e| panic!("{}: {e}", config.name()));
    gpu.synchronize().unwrap();
    let mut c = download(&gpu, c, bytes + 256);
    assert!(c.split_off(bytes).iter().all(|&byte| byte == 0xEE), "{} wrote behind C", config.name());
    c
}

/// C against the reference.
pub fn check(config: Config, (m, n, k): (usize, usize, usize)) {
    let (a, weights) = matrices(config.formats(), 7, (m, n, k));
    let got = floats(&run(config, &f32_out(), &a, &weights));
    let want = reference(&Epilogue::default(), &a, 0..m, &weights);
    let comparison = Comparison::new(&got, &want, n).unwrap();
    assert!(comparison.rel_l2 < 1e-6, "{} {m}x{n}x{k}: {comparison:?}", config.name());
}
