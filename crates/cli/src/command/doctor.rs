//! `doctor`: what this machine has, which kernel would run for each format, why not another, and what would run on GPUs
//! that it has not.

use std::fmt;

use clap::Args;
use dualgemm::cpu::{CpuOptions, Isa};
use dualgemm::device::Device as _;
use dualgemm::formats::BlockFormat;
use dualgemm::gemm::{AFormat, DualGemmDesc, OutFormat};
use dualgemm::strategies::blackwell::Estimate;
use dualgemm::strategies::{Error as GpuError, Gpu, STRATEGIES, Strategy};
use dualgemm::{DualGemm, GpuId, Target};
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::registry::seen_on;
use dualgemm_kernels::{sm80, sm90a, sm120a};
use serde::Serialize;

use super::Verdict;
use crate::machine::Machine;
use crate::report::{Bytes, Output, Table};

/// Rows whose kernels are listed: one token, a small batch, many.
const ROWS: [usize; 3] = [1, 16, 512];
/// Rows of the problem that strategies of GPUs are asked about: what all of them take.
const GPU_ROWS: usize = 64;
/// Features and K of the problem that is planned; kernels do not depend on them.
const FEATURES_AND_K: (usize, usize) = (4096, 4096);

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    #[serde(flatten)]
    machine: Machine,
    devices: Vec<Device>,
    strategies: Vec<StrategyReport>,
    instruction_sets: Vec<IsaReport>,
    kernels: Vec<Kernel>,
    gpu_kernels: Vec<GpuKernel>,
}

/// The fused kernel of an architecture of GPUs, whether this machine has one or not.
#[derive(Debug, Serialize)]
struct GpuKernel {
    arch: &'static str,
    cards: &'static str,
    m: usize,
    kernel: String,
    /// The cards that this kernel was seen on, which may be others than those it is for.
    seen_on: Vec<&'static str>,
}

/// A strategy on a GPU.
#[derive(Debug, Serialize)]
struct StrategyReport {
    device: String,
    strategy: &'static str,
    available: bool,
    why: String,
}

/// Something that can compute.
#[derive(Debug, Serialize)]
struct Device {
    name: String,
    available: bool,
    why: String,
}

#[derive(Debug, Serialize)]
struct IsaReport {
    isa: Isa,
    available: bool,
    chosen: bool,
    why: String,
}

#[derive(Debug, Serialize)]
struct Kernel {
    a_format: AFormat,
    m: usize,
    kernel: String,
    threads: usize,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { cpu_model, arch, threads, memory_bytes, memory_available_bytes, nodes } = &self.machine;
        writeln!(f, "dualgemm {}", self.version)?;
        writeln!(f, "  processor  {cpu_model} ({arch}), {threads} threads")?;
        let size = |bytes: &Option<u64>| bytes.map_or("unknown".into(), |b| Bytes(b).to_string());
        writeln!(f, "  memory     {}, {} available", size(memory_bytes), size(memory_available_bytes))?;
        for node in nodes {
            let (processors, memory) = (&node.processors, size(&node.memory_bytes));
            writeln!(f, "  node {:<6}processors {processors}, {memory}", node.node)?;
        }
        let mark = |yes: bool| if yes { "yes" } else { "no" }.to_string();
        let mut table = Table::new(&["device", "usable", "why"]);
        for d in &self.devices {
            table.row([d.name.clone(), mark(d.available), d.why.clone()]);
        }
        write!(f, "\n{table}")?;
        if !self.strategies.is_empty() {
            let mut table = Table::new(&["device", "strategy", "usable", "why"]);
            for s in &self.strategies {
                table.row([s.device.clone(), s.strategy.into(), mark(s.available), s.why.clone()]);
            }
            write!(f, "\n{table}")?;
        }
        let mut table = Table::new(&["instruction set", "usable", "why"]);
        for i in &self.instruction_sets {
            table.row([i.isa.to_string(), mark(i.available), i.why.clone()]);
        }
        write!(f, "\n{table}")?;
        let mut table = Table::new(&["A", "M", "kernel", "threads"]);
        for k in &self.kernels {
            table.row([k.a_format.to_string(), k.m.to_string(), k.kernel.clone(), k.threads.to_string()]);
        }
        write!(f, "\n{table}")?;
        let mut table = Table::new(&["GPU", "for", "M", "fused kernel", "tried"]);
        for k in &self.gpu_kernels {
            let tried = match k.seen_on.as_slice() {
                [] => "simulated, not yet run on silicon".into(),
                cards => format!("on {}", cards.join(", ")),
            };
            table.row([k.arch.into(), k.cards.into(), k.m.to_string(), k.kernel.clone(), tried]);
        }
        write!(f, "\n{table}")
    }
}

/// The fused kernel of every architecture for one token, a small batch and many.
fn gpu_kernels() -> Vec<GpuKernel> {
    let portable: Choose = |m| sm80::config::Config::for_tokens(m).name();
    let hopper: Choose = |m| sm90a::config::Config::for_tokens(m).name();
    let datacenter: Choose = |m| {
        let (n, k) = FEATURES_AND_K;
        Estimate::best(Formats::NVFP4, (m, n, k)).map_or_else(|e| e.to_string(), |(config, _)| config.name())
    };
    let workstation: Choose = |m| sm120a::config::Config::for_tokens(m).name();
    let archs: [(&str, &str, Choose); 6] = [
        ("sm_80", "A100, L40S, RTX 4090 and others", portable),
        ("sm_90a", "H100, H200", hopper),
        ("sm_100a", "B200, GB200", datacenter),
        ("sm_103a", "B300, GB300", datacenter),
        ("sm_120a", "RTX PRO 6000, RTX 5090", workstation),
        ("sm_121a", "DGX Spark", workstation),
    ];
    let rows = |(arch, cards, choose): (&'static str, &'static str, Choose)| {
        ROWS.map(|m| {
            let kernel = choose(m);
            GpuKernel { arch, cards, m, seen_on: seen_on(&kernel), kernel }
        })
    };
    archs.into_iter().flat_map(rows).collect()
}

/// The name of the configuration for so many rows.
type Choose = fn(usize) -> String;

/// Looks around.
pub fn run(_: &DoctorArgs, output: &Output) -> anyhow::Result<Verdict> {
    let chosen = Isa::detect()?;
    let forced = std::env::var_os(Isa::ENV).is_some();
    let instruction_sets = Isa::ALL
        .into_iter()
        .rev()
        .filter(|isa| isa.native())
        .map(|isa| IsaReport {
            isa,
            available: isa.available(),
            chosen: isa == chosen,
            why: match (isa == chosen, isa.available()) {
                (true, _) if forced => format!("chosen: {} asks for it", Isa::ENV),
                (true, _) => "chosen: the best one that this processor has".into(),
                (false, true) if isa > chosen && forced => {
                    format!("passed over: {} asks for {chosen}", Isa::ENV)
                }
                (false, true) if isa > chosen => format!("slower than {chosen} on this processor"),
                (false, true) => format!("{chosen} is faster; --isa {isa} forces it"),
                (false, false) if isa == Isa::AmxBf16 => {
                    "this processor lacks it, or the system does not permit its use (sandboxes often do not)"
                        .into()
                }
                (false, false) => "this processor lacks it".into(),
            },
        })
        .collect();
    let mut kernels = Vec::new();
    for a_format in [AFormat::Nvfp4, AFormat::Mxfp4, AFormat::F32, AFormat::F16, AFormat::Bf16] {
        for m in ROWS {
            let (n, k) = FEATURES_AND_K;
            let desc = DualGemmDesc::new(m, n, k, a_format, BlockFormat::Nvfp4);
            let plan = DualGemm::plan(&desc, &Target::Cpu(CpuOptions::default()))?;
            kernels.push(Kernel { a_format, m, kernel: plan.kernel().into(), threads: plan.threads() });
        }
    }
    let (devices, strategies) = gpus();
    output.emit(&Report {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::detect(),
        devices,
        strategies,
        instruction_sets,
        kernels,
        gpu_kernels: gpu_kernels(),
    })?;
    Ok(Verdict::Right)
}

/// The processor, and every GPU with what each strategy makes of it.
fn gpus() -> (Vec<Device>, Vec<StrategyReport>) {
    let mut devices = vec![Device { name: "cpu".into(), available: true, why: "always there".into() }];
    let mut strategies = Vec::new();
    // Without a card, opening the first one says why.
    for ordinal in 0..dualgemm_cuda::Cuda::count().max(1) {
        let id = GpuId::Cuda(ordinal as i32);
        let name = id.to_string();
        let gpu = match id.open() {
            Ok(gpu) => gpu,
            Err(error) => {
                devices.push(Device { name, available: false, why: error.to_string() });
                continue;
            }
        };
        let info = gpu.info();
        let why = format!(
            "{} ({}), {} multiprocessors, {}, driver {}",
            info.name,
            info.arch,
            info.sm_count,
            Bytes(info.memory_bytes),
            gpu.driver()
        );
        let before = strategies.len();
        strategies.extend(STRATEGIES.iter().map(|s| {
            let refused = usable(*s, gpu, GPU_ROWS).err();
            let why = refused.as_ref().map_or_else(|| s.doc().into(), ToString::to_string);
            StrategyReport { device: name.clone(), strategy: s.name(), available: refused.is_none(), why }
        }));
        let available = strategies[before..].iter().any(|s| s.available);
        devices.push(Device { name, available, why });
    }
    (devices, strategies)
}

/// Whether a strategy takes a common problem on a GPU.
fn usable(s: &dyn Strategy, gpu: &'static Gpu, m: usize) -> Result<(), GpuError> {
    let (n, k) = FEATURES_AND_K;
    let desc = DualGemmDesc {
        out: OutFormat::F16,
        ..DualGemmDesc::new(m, n, k, AFormat::Nvfp4, BlockFormat::Nvfp4)
    };
    s.kernels(&desc, gpu.info())?;
    if s.needs_library() {
        gpu.blas()?;
    }
    Ok(())
}
