//! `doctor`: what this machine has, which kernel would run for each format, why not another, and what would run on GPUs
//! that it has not.

use clap::Args;
use dualgemm::cpu::{CpuOptions, Isa};
use dualgemm::device::Device as _;
use dualgemm::formats::BlockFormat;
use dualgemm::gemm::{AFormat, DualGemmDesc, OutFormat};
use dualgemm::strategies::{Gpu, GpuOptions, STRATEGIES, Strategy};
use dualgemm::{DualGemm, Error, GpuId, SimArch, Target};
use dualgemm_kernels::registry::seen_on;
use dualgemm_kernels::sm80;
use serde_json::json;

use super::Verdict;
use crate::machine::Machine;
use crate::report::{Bytes, Listing, Output};

/// Rows whose kernels are listed: one token, a small batch, many.
const ROWS: [usize; 3] = [1, 16, 512];
/// Rows of the problem that strategies of GPUs are asked about: what all of them take.
const GPU_ROWS: usize = 64;
/// Features and K of the problem that is planned; kernels do not depend on them.
const FEATURES_AND_K: (usize, usize) = (4096, 4096);

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {}

fn yes_or_no(yes: bool) -> String {
    if yes { "yes" } else { "no" }.into()
}

/// The kernels that plans take on GPUs for one token, a small batch and many.
fn gpu_kernels() -> Listing {
    let archs = [
        ("sm_80", "A100, L40S, RTX 4090 and others", None),
        ("sm_90a", "H100, H200", Some(SimArch::Sm90a)),
        ("sm_100a", "B200, GB200", Some(SimArch::Sm100a)),
        ("sm_103a", "B300, GB300", Some(SimArch::Sm103a)),
        ("sm_120a", "RTX PRO 6000, RTX 5090", Some(SimArch::Sm120a)),
        ("sm_121a", "DGX Spark", Some(SimArch::Sm121a)),
    ];
    let choose = |arch, m| match arch {
        // A plan asks no more of a card than what it is.
        Some(arch) => {
            let target = Target::Gpu(GpuId::Sim(arch), GpuOptions::default());
            DualGemm::plan(&problem(m), &target).map_or_else(|e| e.to_string(), |plan| plan.kernel().into())
        }
        None => sm80::config::Config::for_tokens(m).name(),
    };
    let mut list = Listing::new(&["GPU", "for", "M", "kernel", "tried"]);
    for (arch, cards, simulated) in archs {
        for m in ROWS {
            let kernel: String = choose(simulated, m);
            // The cards that this kernel was seen on, which may be others than those it is for.
            let seen_on = seen_on(&kernel);
            let tried = match seen_on.as_slice() {
                [] => "simulated, not yet run on silicon".into(),
                seen_on => format!("on {}", seen_on.join(", ")),
            };
            let cells = [arch.into(), cards.into(), m.to_string(), kernel.clone(), tried];
            list.row(
                json!({ "arch": arch, "cards": cards, "m": m, "kernel": kernel, "seen_on": seen_on }),
                cells,
            );
        }
    }
    list
}

/// The problem of so many rows that GPUs are asked about.
fn problem(m: usize) -> DualGemmDesc {
    let (n, k) = FEATURES_AND_K;
    DualGemmDesc { out: OutFormat::F16, ..DualGemmDesc::new(m, n, k, AFormat::Nvfp4, BlockFormat::Nvfp4) }
}

/// Instruction sets, from the best one.
fn instruction_sets() -> anyhow::Result<Listing> {
    let chosen = Isa::detect()?;
    let forced = std::env::var_os(Isa::ENV).is_some();
    let mut list = Listing::new(&["instruction set", "usable", "why"]);
    for isa in Isa::ALL.into_iter().rev().filter(|isa| isa.native()) {
        let (is_chosen, available) = (isa == chosen, isa.available());
        let why = match (is_chosen, available) {
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
        };
        let object = json!({ "isa": isa, "available": available, "chosen": is_chosen, "why": why });
        list.row(object, [isa.to_string(), yes_or_no(available), why]);
    }
    Ok(list)
}

/// The processor's kernels.
fn kernels() -> anyhow::Result<Listing> {
    let mut list = Listing::new(&["A", "M", "kernel", "threads"]);
    for a_format in [AFormat::Nvfp4, AFormat::Mxfp4, AFormat::F32, AFormat::F16, AFormat::Bf16] {
        for m in ROWS {
            let (n, k) = FEATURES_AND_K;
            let desc = DualGemmDesc::new(m, n, k, a_format, BlockFormat::Nvfp4);
            let plan = DualGemm::plan(&desc, &Target::Cpu(CpuOptions::default()))?;
            let (kernel, threads) = (plan.kernel().to_string(), plan.threads());
            let object = json!({ "a_format": a_format, "m": m, "kernel": kernel, "threads": threads });
            list.row(object, [a_format.to_string(), m.to_string(), kernel, threads.to_string()]);
        }
    }
    Ok(list)
}

/// Looks around.
pub fn run(_: &DoctorArgs, output: &Output) -> anyhow::Result<Verdict> {
    let machine = Machine::detect();
    let mut document = json!(machine);
    document["version"] = env!("CARGO_PKG_VERSION").into();
    let Machine { cpu_model, arch, threads, memory_bytes, memory_available_bytes, nodes } = machine;
    let size = |bytes: Option<u64>| bytes.map_or("unknown".into(), |b| Bytes(b).to_string());
    let [all, free] = [memory_bytes, memory_available_bytes].map(size);
    let mut text = format!(
        "dualgemm {}\n  processor  {cpu_model} ({arch}), {threads} threads\n  memory     {all}, {free} available\n",
        env!("CARGO_PKG_VERSION")
    );
    for node in nodes {
        let (processors, memory) = (&node.processors, size(node.memory_bytes));
        text += &format!("  node {:<6}processors {processors}, {memory}\n", node.node);
    }
    let (devices, strategies) = gpus();
    let (n, k) = FEATURES_AND_K;
    document["n"] = n.into();
    document["k"] = k.into();
    for (name, list, of) in [
        ("devices", devices, String::new()),
        ("strategies", strategies, format!("{GPU_ROWS}x{n}x{k}, nvfp4 A, f16 C:\n")),
        ("instruction_sets", instruction_sets()?, String::new()),
        ("kernels", kernels()?, format!("Mx{n}x{k} on this processor:\n")),
        ("gpu_kernels", gpu_kernels(), format!("Mx{n}x{k} on GPUs, nvfp4 A, f16 C:\n")),
    ] {
        if !list.rows.is_empty() {
            text += &format!("\n{of}{}", list.table);
        }
        document[name] = list.rows.into();
    }
    output.say(&document, &text)?;
    Ok(Verdict::Right)
}

/// The processor, and every GPU with what each strategy makes of it.
fn gpus() -> (Listing, Listing) {
    let mut devices = Listing::new(&["device", "usable", "why"]);
    let mut device = |name: String, available: bool, why: String| {
        let object = json!({ "name": name, "available": available, "why": why });
        devices.row(object, [name, yes_or_no(available), why]);
    };
    device("cpu".into(), true, "always there".into());
    let mut strategies = Listing::new(&["device", "strategy", "usable", "why"]);
    // Without a card, opening the first one says why.
    for ordinal in 0..dualgemm_cuda::Cuda::count().max(1) {
        let id = GpuId::Cuda(ordinal as i32);
        let name = id.to_string();
        let gpu = match id.open() {
            Ok(gpu) => gpu,
            Err(error) => {
                device(name, false, error.to_string());
                continue;
            }
        };
        let mut any = false;
        for s in STRATEGIES {
            let usable = usable(*s, &id, gpu);
            let (strategy, available) = (s.name(), usable.is_ok());
            any |= available;
            let why = match usable {
                Ok(kernel) => format!("{}; here by {kernel}", s.doc()),
                Err(error) => error.to_string(),
            };
            let object = json!({ "device": name, "strategy": strategy, "available": available, "why": why });
            strategies.row(object, [name.clone(), strategy.into(), yes_or_no(available), why]);
        }
        let info = gpu.info();
        let why = format!(
            "{} ({}), {} multiprocessors, {}, driver {}",
            info.name,
            info.arch,
            info.sm_count,
            Bytes(info.memory_bytes),
            gpu.driver()
        );
        device(name, any, why);
    }
    (devices, strategies)
}

/// The kernel by which a strategy computes a common problem on a GPU.
fn usable(s: &dyn Strategy, id: &GpuId, gpu: &'static Gpu) -> Result<String, Error> {
    let options = GpuOptions { strategy: Some(s.name().into()), ..GpuOptions::default() };
    let plan = DualGemm::plan(&problem(GPU_ROWS), &Target::Gpu(id.clone(), options))?;
    // A plan is made without the library that it runs by.
    if s.needs_library() {
        gpu.blas()?;
    }
    Ok(plan.kernel().into())
}
