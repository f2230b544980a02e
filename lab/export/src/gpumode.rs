//! `submission.py` for the GPU MODE task `nvfp4_dual_gemm`: one file with kernels as PTX text and launches as data, which
//! needs nothing but PyTorch and the driver.
//!
//! The task's ten-tuple has codes row by row and scales in 128x4 order, which the kernels read as they are:
//!
//! | architecture | launches |
//! |---|---|
//! | sm_100a | the fused kernel of Blackwell |
//! | sm_90a | A to f16 in scratch memory, then the kernel without prepack |
//!
//! Its rules: nothing that depends on data is kept between calls, work goes to the default queue, and the file must not
//! contain the word for queues that CUDA uses. Source: <https://github.com/gpu-mode/reference-kernels>,
//! `problems/nvidia/nvfp4_dual_gemm`.

use std::fmt::Write as _;

use dualgemm_bench::Shape;
use dualgemm_bench::challenge::{RANKED, TESTS};
use dualgemm_device::{Device as _, DeviceInfo, DevicePtr, LaunchSpec};
use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::{AFormat, Activation, DualGemmDesc, OutFormat, Program};
use dualgemm_kernels::fused::{Config, Fused, FusedArgs, Weights};
use dualgemm_kernels::generic::expand::{Codes, Expand};
use dualgemm_kernels::parts::operand::{Format, Formats, Operand};
use dualgemm_kernels::parts::rows::Output;
use dualgemm_kernels::parts::variant::Variant;
use dualgemm_kernels::plain::order::SPAN;
use dualgemm_kernels::sm90a::decode::WEIGHT_FACTOR;
use dualgemm_kernels::{Error as KernelError, plain};
use dualgemm_plan::blackwell::Estimate;
use dualgemm_plan::strategy;
use dualgemm_ptx::Target;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::report::Card;
use serde_json::{Value, json};

use crate::{Argument, Error, Launch, Recorder, Recording};

/// The program of the file, with places for kernels and launches.
const PROGRAM: &str = include_str!("submission.py");

/// What is exported for.
pub const ARCHES: [Target; 2] = [Target::Sm100a, Target::Sm90a];

/// A file that computes the task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submission {
    /// Its text.
    pub python: String,
    /// Kernels and launches, of all shapes behind each other.
    pub recording: Recording,
    /// Each shape with what its launches need and where they are.
    pub shapes: Vec<ShapeLaunches>,
}

/// The launches of a shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapeLaunches {
    /// The shape.
    pub shape: Shape,
    /// Name of the fused kernel's configuration.
    pub config: String,
    /// Bytes of scratch memory.
    pub scratch: usize,
    /// Which of the recording's launches.
    pub launches: std::ops::Range<usize>,
}

/// Every shape that the task lists: those that are ranked, then those that only have to be right.
pub fn shapes() -> Vec<Shape> {
    let mut shapes: Vec<Shape> = RANKED.iter().map(|ranked| ranked.shape).collect();
    for shape in TESTS {
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    shapes
}

/// What a card says about itself.
pub(crate) fn info(card: Card) -> DeviceInfo {
    dualgemm_sim::Gpu::new(dualgemm_sim::Config::default().card(card)).info().clone()
}

/// Addresses of the operands, in the order of the file's slots.
struct Slots {
    codes: [DevicePtr; 3],
    scales: [DevicePtr; 3],
    c: DevicePtr,
    scratch: DevicePtr,
}

impl Slots {
    fn new(recorder: &Recorder) -> Result<Self, dualgemm_device::Error> {
        // Sizes differ from shape to shape; a recorder's slots have none.
        let next = || recorder.alloc(0);
        let [codes, scales] = [[next()?, next()?, next()?], [next()?, next()?, next()?]];
        Ok(Self { codes, scales, c: next()?, scratch: next()? })
    }
}

/// The file for an architecture and these shapes. Fails if there is no export for the architecture, or a kernel refuses
/// a shape.
pub fn submission(target: Target, shapes: &[Shape]) -> Result<Submission, Error> {
    let record = match target {
        Target::Sm100a => blackwell,
        Target::Sm90a => hopper,
        _ => {
            let valid = ARCHES.map(Target::as_str).join(", ");
            return Err(Error::Arch { found: target.to_string(), valid });
        }
    };
    let recorder = Recorder::new(info(if target == Target::Sm100a { Card::B200 } else { Card::H100 }));
    let memory = |e: dualgemm_device::Error| Error::Recording(e.to_string());
    let slots = Slots::new(&recorder).map_err(memory)?;
    let mut listed: Vec<ShapeLaunches> = Vec::new();
    for &shape in shapes {
        if listed.iter().any(|known| known.shape == shape) {
            continue;
        }
        let first = recorder.recording().launches.len();
        let (config, scratch, specs) = record(&recorder, &slots, shape)?;
        for spec in specs {
            // Both kernels wait for the one before themselves.
            // SAFETY: the recorder runs nothing.
            unsafe { recorder.launch(&spec.programmatic(true)) }.map_err(memory)?;
        }
        let launches = first..recorder.recording().launches.len();
        listed.push(ShapeLaunches { shape, config, scratch, launches });
    }
    let recording = recorder.recording();
    let python = python(target, &recording, &listed)?;
    Ok(Submission { python, recording, shapes: listed })
}

/// A configuration's name, bytes of scratch memory, launches.
type Launches = (String, usize, Vec<LaunchSpec>);

/// Codes and scales of A (0), gate and up as rows.
fn rows(slots: &Slots, i: usize, shape: (usize, usize)) -> Operand {
    Operand::new(Format::Block(BlockFormat::Nvfp4), shape, slots.codes[i], slots.scales[i])
}

fn blackwell(recorder: &Recorder, slots: &Slots, shape: Shape) -> Result<Launches, Error> {
    let Shape { m, n, k } = shape;
    let (config, _) = Estimate::best(Formats::NVFP4, (m, n, k))
        .map_err(|source| Error::Kernel { shape: shape.to_string(), source })?;
    let a = rows(slots, 0, (m, k));
    let spec = launch_of(recorder, slots, shape, (Config::Sm100a(config), a), 1.0)?;
    Ok((config.name(), 0, vec![spec]))
}

fn hopper(recorder: &Recorder, slots: &Slots, shape: Shape) -> Result<Launches, Error> {
    let Shape { m, k, .. } = shape;
    let refused = |source: KernelError| Error::Kernel { shape: shape.to_string(), source };
    let config = plain_config(shape, recorder.info())?;
    let pitch = 2 * k.next_multiple_of(SPAN);
    let expand = Expand::permuted(recorder, ScaleLayout::Sf128x4).map_err(refused)?;
    let codes = Codes { m, k, codes: slots.codes[0], pitch: k / 2, scales: slots.scales[0] };
    let first = expand.spec(&codes, slots.scratch, pitch).map_err(refused)?;
    let a = Operand::new(Format::Half(HalfFormat::F16), (m, k), slots.scratch, slots.scales[0]);
    let a = Operand { pitch, ..a };
    let second = launch_of(recorder, slots, shape, (Config::Plain(config), a), WEIGHT_FACTOR)?;
    Ok((config.name(), m * pitch, vec![first, second]))
}

/// The launch of a fused kernel on A.
fn launch_of(
    recorder: &Recorder,
    slots: &Slots,
    shape: Shape,
    (config, a): (Config, Operand),
    alpha: f32,
) -> Result<LaunchSpec, Error> {
    let Shape { m, n, k } = shape;
    let weights = Weights::Rows([1, 2].map(|i| rows(slots, i, (n, k))));
    let args = FusedArgs::new((m, n, k), a, weights, Output::new(slots.c, [alpha; 2]));
    let kernel = Fused::new(recorder, config, &Variant::new(program()).for_weights(n, k));
    let spec = kernel.and_then(|kernel| kernel.spec(&args));
    spec.map_err(|source| Error::Kernel { shape: shape.to_string(), source })
}

/// The tile that the cost model expects to be fastest, on scales in 128x4 order.
fn plain_config(shape: Shape, info: &DeviceInfo) -> Result<plain::config::Config, Error> {
    let Shape { m, n, k } = shape;
    let refused = |source| Error::Plan { shape: shape.to_string(), source };
    let plain = strategy("plain").map_err(refused)?;
    let desc = DualGemmDesc {
        out: OutFormat::F16,
        ..DualGemmDesc::new(m, n, k, AFormat::Nvfp4, BlockFormat::Nvfp4)
    };
    let time = |kernel: &String| plain.estimate_us(&desc, 1, info, kernel).unwrap_or(f64::INFINITY);
    let kernels = plain.kernels(&desc, 1, info).map_err(refused)?;
    let best = kernels.into_iter().min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or_default();
    let config = plain::config::Config::named(&best)
        .map_err(|source| Error::Kernel { shape: shape.to_string(), source })?;
    Ok(plain::config::Config { scale_layout: ScaleLayout::Sf128x4, ..config })
}

fn program() -> Program {
    Activation::Silu.program()
}

/// The text of the file. Numbers, strings and lists are written the same in JSON and in Python.
fn python(target: Target, recording: &Recording, shapes: &[ShapeLaunches]) -> Result<String, Error> {
    let status = match target {
        Target::Sm90a => "For an H100, to try the file where there is no B200.",
        _ => "Simulated, not yet run on silicon.",
    };
    let version = env!("CARGO_PKG_VERSION");
    let about =
        format!("Written by dualgemm {version} (dualgemm export --target gpumode --arch {target}). {status}");
    let (mut ptx, mut kernels, mut list) = (String::new(), String::new(), String::new());
    for text in &recording.modules {
        let _ = writeln!(ptx, "    r\"\"\"{text}\"\"\",");
    }
    for (index, (module, name)) in recording.kernels.iter().enumerate() {
        let shared = recording.launches.iter().filter(|l| l.kernel == index).map(|l| l.dynamic_shared);
        let _ = writeln!(kernels, "    {},", json!([module, name, shared.max()]));
    }
    for ShapeLaunches { shape: Shape { m, n, k }, config, scratch, launches } in shapes {
        let launches: Vec<Value> = recording.launches[launches.clone()].iter().map(launch).collect();
        let _ = writeln!(list, "    # {config}\n    ({m}, {n}, {k}): {},", json!([scratch, launches]));
    }
    let mut python = PROGRAM.to_string();
    for (place, text) in [("about", about), ("ptx", ptx), ("kernels", kernels), ("shapes", list)] {
        python = python.replacen(&format!("{{{place}}}"), text.trim_end(), 1);
    }
    Ok(python)
}

fn launch(launch: &Launch) -> Value {
    let Launch { kernel, grid, block, cluster, programmatic, args, .. } = launch;
    let args: Vec<Value> = args.iter().map(argument).collect();
    json!([kernel, grid, block, cluster, u8::from(*programmatic), args])
}

fn argument(argument: &Argument) -> Value {
    match argument {
        Argument::Bytes(bytes) => {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            json!(["bytes", hex])
        }
        Argument::Address(place) => json!(["address", place.slot, place.offset]),
        Argument::Map(place, map) => json!([
            "map",
            place.slot,
            place.offset,
            map.data_type as u8,
            map.dims,
            map.strides,
            map.box_dims,
            map.element_strides,
            map.interleave as u8,
            map.swizzle as u8,
            map.l2_promotion as u8,
            map.out_of_bounds as u8,
        ]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_kernels::generic::rowwise;
    use dualgemm_kernels::registry::KERNELS;
    use std::collections::HashSet;

    /// Texts of every configuration of a registered kernel.
    fn registered(name: &str, arch: Target) -> HashSet<String> {
        let kernel = KERNELS.iter().find(|k| (k.name, k.arch) == (name, arch)).unwrap();
        let text = |config: String| kernel.generate(&config, &program(), true).unwrap().to_string();
        kernel.configs().into_iter().map(text).collect()
    }

    #[test]
    fn the_texts_are_those_of_the_registry_exact() {
        let known = registered("fused", Target::Sm100a);
        let submission = submission(Target::Sm100a, &shapes()).unwrap();
        assert!(submission.recording.modules.iter().all(|text| known.contains(text)));

        let mut known = registered("plain", Target::Sm90a);
        known.extend(Expand::configs().iter().map(|config| {
            let module = rowwise::generate(config, &Activation::Identity.program(), Target::Sm90a);
            module.unwrap().to_string()
        }));
        let submission = super::submission(Target::Sm90a, &shapes()).unwrap();
        assert!(submission.recording.modules.iter().all(|text| known.contains(text)));
    }

    #[test]
    fn every_shape_of_the_task_has_its_launches_and_the_file_keeps_the_rules() {
        for target in [Target::Sm100a, Target::Sm90a] {
            let submission = submission(target, &shapes()).unwrap();
            let Submission { python, recording, shapes: listed } = &submission;
            assert_eq!(listed.len(), shapes().len());
            for s in listed {
                let Shape { m, n, k } = s.shape;
                assert!(python.contains(&format!("\n    ({m}, {n}, {k}): [{},", s.scratch)));
                assert!(!s.launches.is_empty() && s.launches.end <= recording.launches.len());
            }
            for text in &recording.modules {
                assert!(python.contains(text.as_str()));
            }
            // The task's server refuses files with this word.
            assert!(!python.to_lowercase().contains("stream"));
            assert!(!python.contains("{about}") && !python.contains("{shapes}"));
            let (first, again) = (python, super::submission(target, &shapes()).unwrap().python);
            assert_eq!(*first, again);
        }
    }

    #[test]
    fn other_architectures_and_shapes_that_kernels_refuse_are_errors() {
        let message = submission(Target::Sm80, &shapes()).unwrap_err().to_string();
        assert_eq!(message, "nothing is exported for sm_80; valid are sm_100a, sm_90a");
        let message = submission(Target::Sm90a, &[Shape::new(64, 64, 48)]).unwrap_err().to_string();
        assert!(message.starts_with("64x64x48: ") && message.contains("multiple of 32"), "{message}");
    }
}
