//! Prepack: gate and up, a linear layer, a whole MLP or the experts of a mixture in the order of the kernels, from a checkpoint
//! or from memory.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

use dualgemm::checkpoint::{Checkpoint, MlpKind, OpenOptions, Which};
use dualgemm::device::Stream;
use dualgemm::gemm::{Activation, GateUp, GatedMlp, Linear, RouterWeights};
use dualgemm::{DeviceGateUp, LayerShape, PackedLayer, Target};

use crate::device;
use crate::status::{Failure, dualgemm_status, report};
use crate::types::{block_format, dualgemm_matrix, layout};

/// Gate and up of one gated MLP, a linear layer, a whole MLP or the experts of a mixture, packed for a target.
#[derive(Debug)]
pub struct dualgemm_weights {
    pub(crate) layer: PackedLayer,
    /// That of the checkpoint, SiLU of tensors. One that is not known or not implemented matters to plans that ask for it.
    pub(crate) activation: Result<Activation, Failure>,
}

impl From<PackedLayer> for dualgemm_weights {
    /// Of no checkpoint that states an activation.
    fn from(layer: PackedLayer) -> Self {
        Self { layer, activation: Ok(Activation::default()) }
    }
}

/// A whole MLP, or a mixture of them by where the router's weights multiply, which all have the shape of the first.
fn pack_mlps(
    mlps: Vec<GatedMlp<'_>>,
    mixture: Option<RouterWeights>,
    target: Target,
) -> Result<PackedLayer, Failure> {
    let Some(first) = mlps.first() else {
        return Err(Failure::argument("experts: are 0; at least 1 is needed".into()));
    };
    Ok(match mixture {
        None => PackedLayer::mlp(first, target)?,
        Some(router) => {
            let (shape, each) = (LayerShape::mlp(first), mlps.into_iter().map(Ok::<_, dualgemm::Error>));
            PackedLayer::mixture(shape, router, each, target)?
        }
    })
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
        let pack = |checkpoint: &Checkpoint, target| {
            let source = checkpoint.gate_up_source(layer, Which::Dense)?;
            // The features are columns of the down projection, whose blocks are never split.
            let down = format!("the down projection of layer {layer}");
            let features = source.gate.block_format()?.shard(&down, source.n(), rank, world)?;
            let activation = activation_of(checkpoint, layer, MlpKind::Dense);
            Ok(dualgemm_weights { layer: PackedLayer::gate_up(&source, features, target)?, activation })
        };
        // SAFETY: strings or null, and `out` can be written, by the caller's word.
        unsafe { give_packed(target, path, out, pack) }
    })
}

/// Opens a checkpoint and hands what `pack` makes of it for a target to C.
///
/// # Safety
/// `path` and `target` are null or strings that end with a zero; `out` is null or can be written.
unsafe fn give_packed(
    target: *const c_char,
    path: *const c_char,
    out: *mut *mut dualgemm_weights,
    pack: impl FnOnce(&Checkpoint, Target) -> Result<dualgemm_weights, Failure>,
) -> Result<(), Failure> {
    // SAFETY: null, strings, and a place that can be written, by the caller's word.
    unsafe {
        let (path, target) = (text("path", path)?, device::target(target)?);
        let open = || Checkpoint::open(Path::new(path), &OpenOptions::default());
        give("out", out, || pack(&open()?, target))
    }
}

/// The activation that a checkpoint states.
fn activation_of(checkpoint: &Checkpoint, layer: usize, kind: MlpKind) -> Result<Activation, Failure> {
    Ok(checkpoint.activation(layer, kind)?.activation)
}

/// A string from C.
///
/// # Safety
/// `string` is null or a string that ends with a zero and stays for `'a`.
unsafe fn text<'a>(name: &str, string: *const c_char) -> Result<&'a str, Failure> {
    if string.is_null() {
        return Err(Failure::argument(format!("{name}: is null")));
    }
    // SAFETY: not null, so a string, by the caller's word.
    let string = unsafe { CStr::from_ptr(string) };
    string.to_str().map_err(|e| Failure::argument(format!("{name}: is not UTF-8: {e}")))
}

/// Packs a linear layer of a checkpoint, by the name of its module. Plans for it compute A · Wᵀ, plus its bias.
///
/// # Safety
/// `path` and `module` are strings that end with a zero, `target` too or null; `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_linear_from_checkpoint(
    target: *const c_char,
    path: *const c_char,
    module: *const c_char,
    out: *mut *mut dualgemm_weights,
) -> dualgemm_status {
    report(|| {
        // SAFETY: `module` is a string or null, by the caller's word.
        let module = unsafe { text("module", module) }?;
        let pack = |checkpoint: &Checkpoint, target| {
            Ok(PackedLayer::product(&checkpoint.linear(module)?, target)?.into())
        };
        // SAFETY: strings or null, and `out` can be written, by the caller's word.
        unsafe { give_packed(target, path, out, pack) }
    })
}

/// Packs a layer's whole dense MLP from a checkpoint. Plans for it compute act(A · gateᵀ, A · upᵀ) · downᵀ.
///
/// # Safety
/// As for `dualgemm_weights_from_checkpoint`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_mlp_from_checkpoint(
    target: *const c_char,
    path: *const c_char,
    layer: usize,
    out: *mut *mut dualgemm_weights,
) -> dualgemm_status {
    report(|| {
        let pack = |checkpoint: &Checkpoint, target| {
            checkpoint.check_whole(layer, MlpKind::Dense)?;
            let mlp = checkpoint.gated_mlp(layer, Which::Dense)?;
            let activation = activation_of(checkpoint, layer, MlpKind::Dense);
            Ok(dualgemm_weights { layer: PackedLayer::mlp(&mlp, target)?, activation })
        };
        // SAFETY: strings or null, and `out` can be written, by the caller's word.
        unsafe { give_packed(target, path, out, pack) }
    })
}

/// Packs all routed experts of a layer from a checkpoint, numbered from 0. Plans for them compute the weighted sum of each
/// token's experts; see `dualgemm_run_mixture`. The router's weights multiply what goes into experts where the model's family
/// does so (Llama 4), else what comes out. A shared expert is an MLP of its own.
///
/// # Safety
/// As for `dualgemm_weights_from_checkpoint`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_mixture_from_checkpoint(
    target: *const c_char,
    path: *const c_char,
    layer: usize,
    out: *mut *mut dualgemm_weights,
) -> dualgemm_status {
    report(|| {
        let pack = |checkpoint: &Checkpoint, target| {
            checkpoint.check_whole(layer, MlpKind::Experts)?;
            let count = checkpoint.experts(layer)?.last().map_or(0, |last| last + 1);
            let read = |expert| checkpoint.gated_mlp(layer, Which::Expert(expert));
            let mlps = (0..count).map(read).collect::<Result<Vec<_>, _>>()?;
            let activation = activation_of(checkpoint, layer, MlpKind::Experts);
            let layer = pack_mlps(mlps, Some(checkpoint.router_weights()), target)?;
            Ok(dualgemm_weights { layer, activation })
        };
        // SAFETY: strings or null, and `out` can be written, by the caller's word.
        unsafe { give_packed(target, path, out, pack) }
    })
}

/// Packs `experts` MLPs of three 4-bit matrices each, without biases: the experts of a mixture, or with 0 for `experts` the one
/// whole MLP that the lists then hold. Nothing refers to their memory, which is the host's, afterwards. A linear layer is
/// `dualgemm_linear_from_tensors`.
///
/// # Safety
/// The lists have `experts` descriptions, or one, of memory that is there; `target` is a string or null; `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_mlps_from_tensors(
    target: *const c_char,
    gate: *const dualgemm_matrix,
    up: *const dualgemm_matrix,
    down: *const dualgemm_matrix,
    experts: usize,
    out: *mut *mut dualgemm_weights,
) -> dualgemm_status {
    report(|| {
        if [gate, up, down].iter().any(|list| list.is_null()) {
            return Err(Failure::argument("gate, up or down: is null".into()));
        }
        let read = |at: usize| -> Result<GatedMlp<'_>, Failure> {
            // SAFETY: not null, so the lists have that many descriptions of memory that is there, by the caller's word.
            unsafe {
                let [gate, up, down] = [gate, up, down].map(|list| &*list.add(at));
                let gate_up = GateUp::new(gate.quantized("gate")?, up.quantized("up")?);
                Ok(GatedMlp { gate_up, down: Linear::new(down.quantized("down")?) })
            }
        };
        let mlps = (0..experts.max(1)).map(read).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: `target` is a string or null, by the caller's word.
        let target = unsafe { device::target(target) }?;
        let pack = || Ok(pack_mlps(mlps, (experts > 0).then_some(RouterWeights::Output), target)?.into());
        // SAFETY: `out` can be written, by the caller's word.
        unsafe { give("out", out, pack) }
    })
}

/// Packs a linear layer: a 4-bit matrix `[n, k]`, and `n` values of a bias or null.
///
/// # Safety
/// `weight` describes memory that is there, `bias` has as many values as it has rows or is null; `target` is a string or null;
/// `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_linear_from_tensors(
    target: *const c_char,
    weight: *const dualgemm_matrix,
    bias: *const f32,
    out: *mut *mut dualgemm_weights,
) -> dualgemm_status {
    report(|| {
        // SAFETY: null or a description of memory that is there until this call ends, by the caller's word.
        let weight = unsafe { borrow("weight", weight)?.quantized("weight")? };
        // SAFETY: not null, so a value for each row, by the caller's word.
        let bias = (!bias.is_null()).then(|| unsafe { std::slice::from_raw_parts(bias, weight.rows()) });
        let layer = Linear { weight: weight.into(), bias: bias.map(Into::into) };
        // SAFETY: `target` is a string or null, by the caller's word.
        let target = unsafe { device::target(target) }?;
        // SAFETY: `out` can be written, by the caller's word.
        unsafe { give("out", out, || Ok(PackedLayer::product(&layer, target)?.into())) }
    })
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
        let pack = || Ok(PackedLayer::product(&weights, target)?.into());
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
    // SAFETY: the caller's promise.
    Ok(unsafe { PackedLayer::gate_up_on_device(&pair, target, stream) }?.into())
}

/// The shape of what plans for the weights compute: `n` features of C, `k` elements of A. Either pointer may be null.
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
        let (features, elements) = weights.layer.shape.ends();
        for (to, value) in [(n, features), (k, elements)] {
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
