//! The product on arrays in a GPU's memory: addresses in, a launch on the caller's stream, nothing waited for.

use std::sync::{Arc, Mutex, PoisonError};

use dualgemm::device::{DevicePtr, Stream};
use dualgemm::formats::{BlockFormat, ScaleLayout};
use dualgemm::gemm::{AFormat, Activation, DualGemmDesc, Epilogue, OutScale, QuantizeA};
use dualgemm::{DeviceA, DeviceC, DeviceCall, DeviceGateUp, DualGemm, GpuId, GpuOptions, Runner, Target};
use pyo3::prelude::*;

use crate::array::{Array, Dtype, Place};
use crate::destination::Destination;
use crate::error::{Kind, facade};
use crate::facts::Facts;
use crate::operand::{Quantized, Source};
use crate::options::device_name;
use crate::weights::Weights;

/// Runners by problem, order of A's scales and stream. They stay for as long as the weights: a recorded graph uses
/// their memory. M is rounded up to a power of two, so that there are few.
#[derive(Debug, Default)]
pub struct Launchers(Mutex<Vec<Launcher>>);

#[derive(Debug)]
struct Launcher {
    desc: DualGemmDesc,
    layout: ScaleLayout,
    stream: u64,
    /// Launches of one call are not mixed with those of another.
    runner: Arc<Mutex<Runner>>,
}

fn pointer(array: &Array<'_>) -> DevicePtr {
    DevicePtr(array.pointer.addr() as u64)
}

impl Weights {
    /// As `_run`, for arrays on a GPU.
    pub fn run_device(
        &self,
        py: Python<'_>,
        source: &Source<'_>,
        destination: &Destination<'_>,
        quantize_a: QuantizeA,
        epilogue: Epilogue,
        stream: u64,
    ) -> PyResult<Option<f32>> {
        let place = source.place();
        let here = match (&self.target, place) {
            (Target::Gpu(GpuId::Cuda(own), _), Place::Cuda(found)) => {
                found.is_none_or(|n| n == i64::from(*own))
            }
            _ => false,
        };
        if !here {
            let own = device_name(&self.target);
            return Err(Kind::Operand.raise(format!(
                "a: is on {place} and the weights are on {own}; make them with device=\"cuda:N\" or move a"
            )));
        }
        let (a, format, m, k, layout) = on_device(source)?;
        if k != self.facts.k {
            let message = format!("a: is [{m}, {k}]; [..., {}] is needed", self.facts.k);
            return Err(Kind::Operand.raise(message));
        }
        destination.check(source, m, self.facts.n)?;
        if destination.arrays().iter().any(|array| !array.is_dense() || !array.writable) {
            return Err(Kind::Operand.raise("out: is not contiguous row by row, or read-only"));
        }
        let c = match destination {
            Destination::Float(array) => match array.dtype {
                Dtype::F32 | Dtype::F16 | Dtype::Bf16 => DeviceC::Float(pointer(array)),
                other => {
                    let message = format!("out: is {other}; float32, float16 or bfloat16 is needed");
                    return Err(Kind::Operand.raise(message));
                }
            },
            Destination::Nvfp4 { codes, scales, scale_out, .. } => DeviceC::Nvfp4 {
                codes: pointer(codes),
                scales: pointer(scales),
                global_scale: scale_out.as_ref().map_or(DevicePtr(0), pointer),
            },
        };
        let desc = DualGemmDesc {
            quantize_a,
            out: destination.format(),
            epilogue,
            ..DualGemmDesc::new(
                m.next_power_of_two().max(16),
                self.facts.n,
                self.facts.k,
                format,
                self.facts.format,
            )
        };
        let call = DeviceCall { m, a, c };
        py.detach(|| {
            let runner = self.launcher(&desc, layout, stream)?;
            let runner = runner.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: the arrays say what they are and live as long as their owner, who keeps them until the stream, which
            // is the library's own, has done the call; a runner is for one stream.
            unsafe { runner.run_device(&call, &self.packed, Stream::raw(stream)) }
        })
        .map_err(facade)?;
        Ok(match destination {
            Destination::Nvfp4 { scale: OutScale::Static(scale), .. } => Some(*scale),
            _ => None,
        })
    }

    fn launcher(
        &self,
        desc: &DualGemmDesc,
        layout: ScaleLayout,
        stream: u64,
    ) -> Result<Arc<Mutex<Runner>>, dualgemm::Error> {
        let mut known = self.launchers.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(l) = known.iter().find(|l| l.desc == *desc && l.layout == layout && l.stream == stream) {
            return Ok(l.runner.clone());
        }
        let target = match &self.target {
            Target::Gpu(id, options) => {
                Target::Gpu(id.clone(), GpuOptions { a_scale_layout: layout, ..options.clone() })
            }
            other => other.clone(),
        };
        let runner = DualGemm::plan(desc, &target)?.runner(1)?;
        runner.warm(&self.packed)?;
        let runner = Arc::new(Mutex::new(runner));
        known.push(Launcher { desc: *desc, layout, stream, runner: runner.clone() });
        Ok(runner)
    }

    /// Packs weights that are in a GPU's memory on that GPU.
    pub fn of_device_pair(
        py: Python<'_>,
        (gate, up): (&Quantized<'_>, &Quantized<'_>),
        bias: [Option<Vec<f32>>; 2],
        activation: Activation,
        input_scale: Option<f32>,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        let Place::Cuda(ordinal) = gate.place() else {
            return Err(Kind::Operand.raise("gate: is not on a CUDA device"));
        };
        if up.place() != gate.place() {
            let (gate, up) = (gate.place(), up.place());
            return Err(
                Kind::Operand.raise(format!("gate is on {gate} and up on {up}; one device is needed"))
            );
        }
        let (g, u) = (gate.on_device("gate")?, up.on_device("up")?);
        if (g.format, g.rows, g.k, g.layout) != (u.format, u.rows, u.k, u.layout) {
            return Err(facade(dualgemm::gemm::Error::HalvesDiffer {
                gate: format!("gate is {} [{}, {}], scales {}", g.format, g.rows, g.k, g.layout),
                up: format!("up is {} [{}, {}], scales {}", u.format, u.rows, u.k, u.layout),
            }));
        }
        let target = Target::cuda(i32::try_from(ordinal.unwrap_or(0)).unwrap_or(0));
        let pair = DeviceGateUp {
            format: g.format,
            n: g.rows,
            k: g.k,
            codes: [g.codes, u.codes],
            scales: [g.scales, u.scales],
            layout: g.layout,
            global_scales: [g.global_scale, u.global_scale],
            bias: [bias[0].as_deref(), bias[1].as_deref()],
        };
        let packed = py
            .detach(|| {
                let plan = DualGemm::plan_for_packing((g.rows, g.k), g.format, &target)?;
                // SAFETY: the arrays say what they are and live to the end of this call, which waits; the stream is the
                // library's own.
                unsafe { plan.prepack_device(&pair, Stream::raw(stream.unwrap_or(0))) }
            })
            .map_err(facade)?;
        let facts = Facts {
            names: vec!["gate".into(), "up".into()],
            n: g.rows,
            k: g.k,
            format: g.format,
            global_scales: vec![g.global_scale, u.global_scale],
            input_scale,
        };
        Ok(Self::new(packed, target, facts, activation, None))
    }
}

/// A as a call takes it, its format, M, K and the order of its block scales.
fn on_device(source: &Source<'_>) -> PyResult<(DeviceA, AFormat, usize, usize, ScaleLayout)> {
    let array = match source {
        Source::Quantized(quantized) => {
            let q = quantized.on_device("a")?;
            let (codes, scales, global_scale) = (q.codes, q.scales, q.global_scale);
            let (a, format) = match q.format {
                BlockFormat::Nvfp4 => (DeviceA::Nvfp4 { codes, scales, global_scale }, AFormat::Nvfp4),
                BlockFormat::Mxfp4 => (DeviceA::Mxfp4 { codes, scales, global_scale }, AFormat::Mxfp4),
            };
            return Ok((a, format, q.rows, q.k, q.layout));
        }
        Source::Float(array) => array,
    };
    let format = match array.dtype {
        Dtype::F32 => AFormat::F32,
        Dtype::F16 => AFormat::F16,
        Dtype::Bf16 => AFormat::Bf16,
        other => {
            let message = format!("a: is {other}; float32, float16 or bfloat16 is needed");
            return Err(Kind::Operand.raise(message));
        }
    };
    let (m, k) = array.matrix("a")?;
    let row = match array.strides[0] {
        _ if m == 1 => k,
        stride => usize::try_from(stride).unwrap_or(0),
    };
    if row < k || (k > 1 && array.strides[1] != 1) {
        return Err(Kind::Operand.raise("a: on a GPU, its elements have to lie side by side, row after row"));
    }
    let a = DeviceA::Float { values: pointer(array), pitch: row * array.dtype.size() };
    Ok((a, format, m, k, ScaleLayout::Linear))
}
