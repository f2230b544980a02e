//! Plan and run.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use dualgemm::device::Stream;
use dualgemm::formats::{BlockFormat, ScaleLayout, match_floats};
use dualgemm::gemm::{Activation, Epilogue, OutFormat, OutScale, OutputMut, QuantizeA, Routing};
use dualgemm::{
    AnyDesc, AnyPlan, AnyRunner, DeviceC, DeviceCall, DeviceRouting, GpuOptions, LayerCall, Plan, Target,
};

use crate::device;
use crate::status::{Failure, dualgemm_status, report};
use crate::types::{a_format, dualgemm_format, dualgemm_matrix, dualgemm_scale_layout, format, layout};
use crate::weights::{borrow, dualgemm_weights, give};

/// How A is quantized to nvfp4 on the way in: not at all.
pub const DUALGEMM_QUANTIZE_A_NO: f32 = 0.0;
/// How A is quantized to nvfp4 on the way in: with a tensor scale from A. Any positive number is the tensor scale.
pub const DUALGEMM_QUANTIZE_A_DYNAMIC: f32 = -1.0;

/// A problem, known before any tensor is: A `[m, k]`, C `[m, n]`, and what the weights say that C is of A.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct dualgemm_desc {
    /// Rows of A at most.
    pub m: usize,
    /// A `dualgemm_format`: that of A.
    pub a_format: u32,
    /// A `dualgemm_format`: that of C. Nvfp4 re-quantizes C for the down projection.
    pub c_format: u32,
    /// DUALGEMM_QUANTIZE_A_NO, DUALGEMM_QUANTIZE_A_DYNAMIC, or the tensor scale.
    pub quantize_a: f32,
    /// A `dualgemm_scale_layout`: that of an Nvfp4 C.
    pub c_scale_layout: u32,
    /// Tensor scale of an Nvfp4 C; 0 for one from C.
    pub c_global_scale: f32,
    /// A `dualgemm_scale_layout`: that of an Nvfp4 A in the memory of a GPU. On the processor every A may have its own.
    pub a_scale_layout: u32,
    /// The function of both products: silu, clamped-silu(:LIMIT), swiglustep(:LIMIT), swigluoai(:ALPHA,BETA,LIMIT),
    /// gelu-tanh, relu, relu2 or identity. Null for the one that the weights' checkpoint states, or silu for weights from
    /// tensors. Not kept.
    pub activation: *const c_char,
    /// A `dualgemm_format`: that between the products of a whole MLP or a mixture. A GPU takes F16, Bf16 and Nvfp4.
    pub between_format: u32,
    /// Tensor scale of an Nvfp4 between the products; 0 for one from its values, on the processor.
    pub between_global_scale: f32,
    /// Experts of each token of a mixture.
    pub top_k: usize,
}

/// A problem planned for weights of one shape.
#[derive(Debug)]
pub struct dualgemm_plan {
    plan: AnyPlan,
    desc: AnyDesc,
    text: CString,
    /// On the processor, buffers of runs that have ended; calls that overlap have one each.
    runners: Mutex<Vec<AnyRunner>>,
    /// On a GPU, the scratch memory of each stream. Launches of one call are not mixed with those of another.
    launchers: Mutex<Vec<(Stream, Arc<Mutex<AnyRunner>>)>>,
}

impl dualgemm_plan {
    /// The scratch memory of a stream.
    fn launcher(&self, stream: Stream) -> Result<Arc<Mutex<AnyRunner>>, Failure> {
        let mut launchers = self.launchers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, runner)) = launchers.iter().find(|(of, _)| *of == stream) {
            return Ok(runner.clone());
        }
        let runner = Arc::new(Mutex::new(self.plan.runner()?));
        launchers.push((stream, runner.clone()));
        Ok(runner)
    }
}

fn out_format(name: &str, (of, scale_layout, scale): (u32, u32, f32)) -> Result<OutFormat, Failure> {
    Ok(match_floats!(format(of)?, dualgemm_format => OutFormat,
        dualgemm_format::Nvfp4 => OutFormat::Nvfp4 {
            scale_layout: layout(scale_layout)?,
            global_scale: if scale == 0.0 { OutScale::Dynamic } else { OutScale::Static(scale) },
        },
        dualgemm_format::Mxfp4 => {
            return Err(Failure::argument(format!("{name}: is Mxfp4; F32, F16, Bf16 or Nvfp4 is needed")));
        }
    ))
}

/// Plans a problem for weights of the shape, format and target of `weights`. The plan does not keep them: it serves every
/// layer of that shape.
///
/// # Safety
/// `desc` points at a description whose activation is null or a string, `weights` is a handle, `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_plan_new(
    desc: *const dualgemm_desc,
    weights: *const dualgemm_weights,
    out: *mut *mut dualgemm_plan,
) -> dualgemm_status {
    report(|| {
        // SAFETY: `desc` points at a description and `weights` is a handle, by the caller's word.
        let (desc, weights) = unsafe { (borrow("desc", desc)?, borrow("weights", weights)?) };
        let activation = match desc.activation.is_null() {
            true => weights.activation.clone()?,
            // SAFETY: not null, so a string, by the caller's word.
            false => unsafe { CStr::from_ptr(desc.activation) }.to_string_lossy().parse()?,
        };
        // SAFETY: `out` can be written, by the caller's word.
        unsafe { give("out", out, || plan_for(desc, weights, activation)) }
    })
}

fn plan_for(
    desc: &dualgemm_desc,
    weights: &dualgemm_weights,
    activation: Activation,
) -> Result<dualgemm_plan, Failure> {
    let a = a_format(desc.a_format)?;
    let quantize_a = match desc.quantize_a {
        DUALGEMM_QUANTIZE_A_NO => QuantizeA::No,
        DUALGEMM_QUANTIZE_A_DYNAMIC => QuantizeA::Dynamic,
        scale => QuantizeA::Static(scale),
    };
    let epilogue = Epilogue { activation, ..Epilogue::default() };
    let out = out_format("c_format", (desc.c_format, desc.c_scale_layout, desc.c_global_scale))?;
    let linear = dualgemm_scale_layout::Linear as u32;
    let between = out_format("between_format", (desc.between_format, linear, desc.between_global_scale))?;
    let call = LayerCall { m: desc.m, a, quantize_a, epilogue, between, out, top_k: desc.top_k };
    let problem = weights.layer.shape.describe(&call);
    let a_scale_layout = layout(desc.a_scale_layout)?;
    let target = match weights.layer.target.clone() {
        Target::Gpu(id, options) => Target::Gpu(id, GpuOptions { a_scale_layout, ..options }),
        other => other,
    };
    let plan = AnyPlan::new(&problem, &target)?;
    let text = CString::new(plan.to_string()).unwrap_or_default();
    Ok(dualgemm_plan { plan, desc: problem, text, runners: Mutex::default(), launchers: Mutex::default() })
}

/// What the plan is, for people. It stays for as long as the plan; null for a plan that is null.
///
/// # Safety
/// `plan` is a handle or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_plan_text(plan: *const dualgemm_plan) -> *const c_char {
    // SAFETY: null or a handle, by the caller's word.
    unsafe { plan.as_ref() }.map_or(std::ptr::null(), |plan| plan.text.as_ptr())
}

/// Frees a plan; null is fine.
///
/// # Safety
/// `plan` is a handle that no call uses any more, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_plan_free(plan: *mut dualgemm_plan) {
    if !plan.is_null() {
        // SAFETY: `give` made it of a box, and no call uses it any more, by the caller's word.
        drop(unsafe { Box::from_raw(plan) });
    }
}

/// Takes the memory and loads the kernels that runs with these weights on `stream` need: the first run then allocates
/// nothing and can be recorded into a CUDA graph. Later runs never do. On the processor there is nothing to do.
///
/// # Safety
/// `plan` and `weights` are handles, `stream` is as for `dualgemm_run`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_plan_warm(
    plan: *const dualgemm_plan,
    weights: *const dualgemm_weights,
    stream: *mut c_void,
) -> dualgemm_status {
    report(|| {
        // SAFETY: both are handles, by the caller's word.
        let (plan, weights) = unsafe { (borrow("plan", plan)?, borrow("weights", weights)?) };
        if let Plan::Gpu { .. } = plan.plan.last() {
            // SAFETY: the header asks for a stream of the device.
            let runner = plan.launcher(unsafe { device::stream(stream) })?;
            runner.lock().unwrap_or_else(PoisonError::into_inner).warm(&weights.layer.weights)?;
        }
        Ok(())
    })
}

/// Computes C of the rows of `a`, up to the `m` of the plan, row-major without gaps into `c`: `rows · n` elements, or
/// `rows · n / 2` bytes of codes.
///
/// An Nvfp4 C needs `c_scales`, block scales in the layout of the plan with padding, and writes its tensor scale to
/// `c_global_scale`; for others both may be null.
///
/// On the processor all pointers are the host's, and `stream` is null. On a GPU all are device memory; only
/// addresses are looked at here: the run is put on `stream` (a `CUstream` or `cudaStream_t` of the GPU's primary context,
/// null for the legacy default stream), nothing is waited for, and operands must be there until it has ended. `c` is at a
/// multiple of 16 bytes; the padding of `c_scales` stays as it is; `c_global_scale` is not written where the plan fixes it.
/// Each stream has scratch memory of its own from its first run on, for as long as the plan lives: a stream must be
/// synchronized before it is destroyed, and CU_STREAM_PER_THREAD is for one thread.
///
/// # Safety
/// All pointers that are not null point at what is described above, in the memory of the plan's target; no operand lies in
/// the memory of C; `stream` is a stream of that target.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_run(
    plan: *const dualgemm_plan,
    a: *const dualgemm_matrix,
    weights: *const dualgemm_weights,
    c: *mut c_void,
    c_scales: *mut u8,
    c_global_scale: *mut f32,
    stream: *mut c_void,
) -> dualgemm_status {
    // SAFETY: the caller promises what `run` asks for.
    report(|| unsafe { run(plan, a, weights, (c, c_scales, c_global_scale), None, stream) })
}

/// As `dualgemm_run`, for the weights of a mixture: C of each token is the sum over its `top_k` experts, each multiplied by its
/// weight, in the order of the lists; with `add`, results are added to what C holds, as to a shared expert's. `topk_ids` and
/// `topk_weights` are `[rows, top_k]`, in the memory of the plan's target. -1 skips an expert. On the processor another number that is no expert's is an error; a GPU skips it.
///
/// # Safety
/// As for `dualgemm_run`, for the lists too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_run_mixture(
    plan: *const dualgemm_plan,
    a: *const dualgemm_matrix,
    topk_ids: *const i32,
    topk_weights: *const f32,
    weights: *const dualgemm_weights,
    c: *mut c_void,
    add: bool,
    stream: *mut c_void,
) -> dualgemm_status {
    report(|| {
        if topk_ids.is_null() || topk_weights.is_null() {
            return Err(Failure::argument("topk_ids or topk_weights: is null".into()));
        }
        let (lists, c) =
            (Some((topk_ids, topk_weights, add)), (c, std::ptr::null_mut(), std::ptr::null_mut()));
        // SAFETY: the caller promises what `run` asks for.
        unsafe { run(plan, a, weights, c, lists, stream) }
    })
}

/// # Safety
/// As for `dualgemm_run` and `dualgemm_run_mixture`.
unsafe fn run(
    plan: *const dualgemm_plan,
    a: *const dualgemm_matrix,
    weights: *const dualgemm_weights,
    (c, c_scales, c_global_scale): (*mut c_void, *mut u8, *mut f32),
    lists: Option<(*const i32, *const f32, bool)>,
    stream: *mut c_void,
) -> Result<(), Failure> {
    // SAFETY: both are handles, by the caller's word.
    let (plan, weights) = unsafe { (borrow("plan", plan)?, borrow("weights", weights)?) };
    // SAFETY: null or a description, by the caller's word; what it describes is looked at below.
    let a = unsafe { borrow("a", a) }?;
    let (first, last) = (plan.desc.first(), plan.desc.last());
    if let Plan::Gpu { plan: gpu, .. } = plan.plan.products().0 {
        let on_device = a.on_device("a", (first.a, gpu.a_scale_layout))?;
        if a.k != first.k {
            return Err(Failure::operand(format!("a: has K = {}; the plan asks for {}", a.k, first.k)));
        }
        let c = match last.out {
            OutFormat::Nvfp4 { .. } => DeviceC::Nvfp4 {
                codes: device::address(c),
                scales: device::address(c_scales.cast()),
                global_scale: device::address(c_global_scale.cast()),
            },
            _ => DeviceC::Float(device::address(c)),
        };
        let call = DeviceCall { m: a.rows, a: on_device, c };
        let routing = lists.map(|(ids, weights, add)| {
            let (ids, weights) = (device::address(ids.cast()), device::address(weights.cast()));
            DeviceRouting { ids, weights, add }
        });
        // SAFETY: the header asks for a stream of the device.
        let stream = unsafe { device::stream(stream) };
        let runner = plan.launcher(stream)?;
        let runner = runner.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the header asks for operands of these sizes, there until the call has ended; a runner is for one stream.
        return Ok(unsafe { runner.run_device(&call, routing, &weights.layer.weights, stream) }?);
    }
    if !stream.is_null() {
        return Err(Failure::unsupported(
            "stream: is for GPUs; the plan is for the processor, null is needed".into(),
        ));
    }
    // SAFETY: what A describes is in the host's memory until this call ends, by the caller's word.
    let a = unsafe { a.operand("a") }?;
    // SAFETY: both are null or can be written for C, in which no operand lies, by the caller's word.
    let output = unsafe { output(last.out, a.rows(), last.n, c, c_scales) }?;
    let top_k = if let AnyDesc::Mixture(desc) = &plan.desc { desc.top_k } else { 0 };
    let routing = match lists {
        None => None,
        Some((ids, weights, _)) => {
            let len =
                a.rows().checked_mul(top_k).ok_or_else(|| Failure::argument("top_k: is too large".into()))?;
            // SAFETY: not null, so `rows · top_k` numbers of each are there, by the caller's word.
            let (ids, weights) =
                unsafe { (std::slice::from_raw_parts(ids, len), std::slice::from_raw_parts(weights, len)) };
            Some(Routing { ids, weights })
        }
    };
    let add = lists.is_some_and(|(.., add)| add);
    let kept = plan.runners.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let mut runner = kept.map_or_else(|| plan.plan.runner(), Ok)?;
    let scale = runner.run(&a, &weights.layer.weights, routing, (output, add))?;
    plan.runners.lock().unwrap_or_else(PoisonError::into_inner).push(runner);
    // SAFETY: null, or can be written, by the caller's word.
    let to = unsafe { c_global_scale.as_mut() };
    if let (Some(scale), Some(to)) = (scale, to) {
        *to = scale;
    }
    Ok(())
}

/// The memory of C.
///
/// # Safety
/// Pointers that are not null can be written for as much as rows, n and format say.
unsafe fn output<'a>(
    out: OutFormat,
    rows: usize,
    n: usize,
    c: *mut c_void,
    c_scales: *mut u8,
) -> Result<OutputMut<'a>, Failure> {
    /// # Safety
    /// A pointer that is not null can be written for `len` elements, which nothing else refers to.
    unsafe fn slice<'a, T>(name: &str, pointer: *mut c_void, len: usize) -> Result<&'a mut [T], Failure> {
        if pointer.is_null() || !pointer.addr().is_multiple_of(align_of::<T>()) {
            let align = align_of::<T>();
            return Err(Failure::argument(format!("{name}: is null or not aligned to {align} bytes")));
        }
        // SAFETY: not null and aligned, so `len` elements can be written, by the caller's word.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), len) })
    }
    let too_large = || Failure::argument(format!("c: {rows} rows of {n} do not fit the address space"));
    let len = rows.checked_mul(n).filter(|len| *len <= isize::MAX as usize / 4).ok_or_else(too_large)?;
    // SAFETY: each length is what rows, n and format say, for which the memory can be written, by the caller's word.
    unsafe {
        Ok(match_floats!(out, OutFormat => OutputMut(slice("c", c, len)?),
            OutFormat::Nvfp4 { scale_layout, .. } => OutputMut::Nvfp4 {
                codes: slice("c", c, len / 2)?,
                scales: slice("c_scales", c_scales.cast(), scales_len(scale_layout, rows, n))?,
            }
        ))
    }
}

fn scales_len(layout: ScaleLayout, rows: usize, n: usize) -> usize {
    layout.len(rows, n / BlockFormat::Nvfp4.block_len())
}
