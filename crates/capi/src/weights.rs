//! Prepack: gate and up in the order of the kernels, from a checkpoint or from memory.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

use dualgemm::checkpoint::{Checkpoint, MlpKind, OpenOptions};
use dualgemm::device::Stream;
use dualgemm::formats::BlockFormat;
use dualgemm::gemm::{Activation, GateUp};
use dualgemm::{DeviceGateUp, DualGemm, PackedWeights, Target, formats};

use crate::device;
use crate::status::{Failure, dualgemm_status, report};
use crate::types::{block_format, dualgemm_matrix, layout};

/// Features that are read from a checkpoint at a time.
const RUN: usize = 1024;

/// Gate and up of one gated MLP, packed for a target.
#[derive(Debug)]
pub struct dualgemm_weights {
    pub(crate) packed: PackedWeights,
    pub(crate) target: Target,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) format: BlockFormat,
    /// That of the checkpoint, SiLU of tensors. One that is not known or not implemented matters to plans that ask for it.
    pub(crate) activation: Result<Activation, Failure>,
}

/// Hands a new object to C.
///
/// # Safety
/// `out` is null or can be written.
pub(crate) unsafe fn give<T>(
    name: &str,
    out: *mut *mut T,
    make: impl FnOnce() -> Result<T, Failure>,
) -> Result<(), Failure> {
    if out.is_null() {
        return Err(Failure::argument(format!("{name}: is null")));
    }
    // SAFETY: not null, so it can be written, by the caller's word. Null until there is something to give.
    unsafe { out.write(std::ptr::null_mut()) };
    let made = Box::into_raw(Box::new(make()?));
    // SAFETY: not null, so it can be written, by the caller's word.
    unsafe { out.write(made) };
    Ok(())
}

/// An object that C holds.
///
/// # Safety
/// `pointer` is null or came from [`give`] and was not freed.
pub(crate) unsafe fn borrow<'a, T>(name: &str, pointer: *const T) -> Result<&'a T, Failure> {
    // SAFETY: null, or an object of ours that lives, by the caller's word.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::argument(format!("{name}: is null")))
}

/// Packs gate and up of a layer's dense MLP from a checkpoint: a directory, a .safetensors, a .safetensors.index.json or
/// a .gguf file. Of the features, rank `rank` of `world` gets its share and reads no others; 0 of 1 is all of them. Plans
/// for these weights compute the activation that the checkpoint states, unless they are asked for another; where it states
/// none, they have to be asked for one.
///
/// `target` is where they are packed for: null or "cpu" for the processor, "cuda:N" for a GPU, to which they are then
/// copied, "sim:sm_90a" for a simulated one.
///
/// # Safety
/// `path` is a string that ends with a zero, `target` too or null; `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_weights_from_checkpoint(
    target: *const c_char,
    path: *const c_char,
    layer: usize,
    rank: usize,
    world: usize,
    out: *mut *mut dualgemm_weights,
) -> dualgemm_status {
    report(|| {
        if path.is_null() {
            return Err(Failure::argument("path: is null".into()));
        }
        // SAFETY: not null, so a string, by the caller's word.
        let path = unsafe { CStr::from_ptr(path) };
        let path = path.to_str().map_err(|e| Failure::argument(format!("path: is not UTF-8: {e}")))?;
        // SAFETY: `target` is a string or null, by the caller's word.
        let target = unsafe { device::target(target) }?;
        // SAFETY: `out` can be written, by the caller's word.
        unsafe { give("out", out, || from_checkpoint(target, Path::new(path), layer, rank, world)) }
    })
}

fn from_checkpoint(
    target: Target,
    path: &Path,
    layer: usize,
    rank: usize,
    world: usize,
) -> Result<dualgemm_weights, Failure> {
    let checkpoint = Checkpoint::open(path, &OpenOptions::default())?;
    let source = checkpoint.gate_up_source(layer)?;
    let (n, k, format) = (source.n(), source.k(), source.format());
    let tensor = || format!("the down projection of layer {layer}");
    if rank >= world {
        return Err(formats::Error::ShardRank { tensor: tensor(), rank, ranks: world }.into());
    }
    // The features are columns of the down projection, whose blocks are never split.
    let blocks = n / format.block_len();
    if world > 1 && !(n.is_multiple_of(format.block_len()) && blocks.is_multiple_of(world)) {
        return Err(formats::Error::ShardSplitsBlock { tensor: tensor(), k: n, ranks: world, format }.into());
    }
    let n = n / world;
    let (first, end) = (rank * n, (rank + 1) * n);
    let run = |at: usize| Ok(dualgemm::weights(source.features(at..end.min(at + RUN))?));
    let plan = DualGemm::plan_for_packing((n, k), format, &target)?;
    let packed = plan.prepack_runs((first..end).step_by(RUN).map(run))?;
    let activation = checkpoint.activation(layer, MlpKind::Dense);
    let activation = activation.map(|stated| stated.activation).map_err(Failure::from);
    Ok(dualgemm_weights { packed, target, n, k, format, activation })
}

/// Packs two 4-bit matrices `[n, k]`: `gate`, whose product goes through the activation, and `up`, whose product
/// multiplies it. Nothing refers to their memory, which is the host's, afterwards. `target` as for
/// `dualgemm_weights_from_checkpoint`.
///
/// # Safety
/// `gate` and `up` describe memory that is there; `target` is a string or null; `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_weights_from_tensors(
    target: *const c_char,
    gate: *const dualgemm_matrix,
    up: *const dualgemm_matrix,
    out: *mut *mut dualgemm_weights,
) -> dualgemm_status {
    report(|| {
        // SAFETY: both are null or point at descriptions, by the caller's word.
        let (gate, up) = unsafe { (borrow("gate", gate)?, borrow("up", up)?) };
        // SAFETY: what they describe is there until this call ends, by the caller's word.
        let weights = unsafe { GateUp::new(gate.quantized("gate")?, up.quantized("up")?) };
        // SAFETY: `target` is a string or null, by the caller's word.
        let target = unsafe { device::target(target) }?;
        let pack = || {
            let (n, k, format) = (weights.n(), weights.k(), weights.gate.format());
            let packed = DualGemm::plan_for_packing((n, k), format, &target)?.prepack(&weights)?;
            Ok(dualgemm_weights { packed, target, n, k, format, activation: Ok(Activation::default()) })
        };
        // SAFETY: `out` can be written, by the caller's word.
        unsafe { give("out", out, pack) }
    })
}

/// As `dualgemm_weights_from_tensors`, for matrices in the memory of a GPU: they are packed there, mxfp4 on Blackwell only,
/// after what `stream` (a `CUstream` of the GPU's primary context) was given before. Waits for it. Block scales are not
/// looked at: none may be NaN or negative.
///
/// # Safety
/// `gate` and `up` describe device memory that is there, `target` is a string, `stream` a stream of that GPU or null, `out`
/// can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_weights_from_device(
    target: *const c_char,
    gate: *const dualgemm_matrix,
    up: *const dualgemm_matrix,
    stream: *mut c_void,
    out: *mut *mut dualgemm_weights,
) -> dualgemm_status {
    report(|| {
        // SAFETY: both are null or point at descriptions, by the caller's word.
        let (gate, up) = unsafe { (borrow("gate", gate)?, borrow("up", up)?) };
        // SAFETY: `target` is a string, by the caller's word.
        let target = unsafe { device::target(target) }?;
        // SAFETY: `out` can be written, the stream and what gate and up describe are there, by the caller's word.
        unsafe { give("out", out, || from_device(target, gate, up, device::stream(stream))) }
    })
}

/// # Safety
/// `gate` and `up` describe device memory that is there.
unsafe fn from_device(
    target: Target,
    gate: &dualgemm_matrix,
    up: &dualgemm_matrix,
    stream: Stream,
) -> Result<dualgemm_weights, Failure> {
    let shape = |m: &dualgemm_matrix| (m.format, m.rows, m.k, m.scale_layout);
    if shape(gate) != shape(up) {
        return Err(Failure::operand("gate and up: are not of one format, shape and scale layout".into()));
    }
    let (n, k, format) = (gate.rows, gate.k, block_format("gate", gate.format)?);
    for (name, m) in [("gate", gate), ("up", up)] {
        if !(m.global_scale.is_finite() && m.global_scale > 0.0) {
            let message =
                format!("{name}: has the tensor scale {}; a positive number is needed", m.global_scale);
            return Err(Failure::operand(message));
        }
    }
    let [(gate_codes, gate_scales), (up_codes, up_scales)] =
        [gate.codes_on_device("gate")?, up.codes_on_device("up")?];
    let pair = DeviceGateUp {
        format,
        n,
        k,
        codes: [gate_codes, up_codes],
        scales: [gate_scales, up_scales],
        layout: layout(gate.scale_layout)?,
        global_scales: [gate.global_scale, up.global_scale],
        bias: [None; 2],
    };
    let plan = DualGemm::plan_for_packing((n, k), format, &target)?;
    // SAFETY: the caller's promise.
    let packed = unsafe { plan.prepack_device(&pair, stream) }?;
    Ok(dualgemm_weights { packed, target, n, k, format, activation: Ok(Activation::default()) })
}

/// The shape of each half: `n` features of `k` elements. Either pointer may be null.
///
/// # Safety
/// `weights` is a handle; `n` and `k` can be written or are null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_weights_shape(
    weights: *const dualgemm_weights,
    n: *mut usize,
    k: *mut usize,
) -> dualgemm_status {
    report(|| {
        // SAFETY: `weights` is a handle, by the caller's word.
        let weights = unsafe { borrow("weights", weights) }?;
        for (to, value) in [(n, weights.n), (k, weights.k)] {
            // SAFETY: null, or can be written, by the caller's word.
            if let Some(to) = unsafe { to.as_mut() } {
                *to = value;
            }
        }
        Ok(())
    })
}

/// Frees weights; null is fine.
///
/// # Safety
/// `weights` is a handle that no call uses any more, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_weights_free(weights: *mut dualgemm_weights) {
    if !weights.is_null() {
        // SAFETY: `give` made it of a box, and no call uses it any more, by the caller's word.
        drop(unsafe { Box::from_raw(weights) });
    }
}
