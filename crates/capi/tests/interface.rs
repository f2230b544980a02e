//! The interface as C calls it: operands from memory, every format of C, and misuse.

use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};

use dualgemm::checkpoint::{Checkpoint, OpenOptions, Which};
use dualgemm::formats::{FloatMatrix, Matrix, Producer, QuantizedMatrix, ScaleLayout, Search, quantize};
use dualgemm::gemm::{
    AFormat, AOperand, DualGemmDesc, GateUp, GatedMlp, Linear, OutFormat, OutputMut, RouterWeights, Routing,
};
use dualgemm::{AnyPlan, DualGemm, Error, LayerCall, LayerShape, PackedLayer, Target};
use dualgemm_c::device::*;
use dualgemm_c::plan::*;
use dualgemm_c::status::*;
use dualgemm_c::types::*;
use dualgemm_c::weights::*;

const N: usize = 48;
const K: usize = 64;
const CHECKPOINT: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/smollm2-135m-layer14/modelopt-nvfp4");

fn quantized(name: &str, rows: usize, step: f32) -> QuantizedMatrix<'static> {
    let values: Vec<f32> = (0..rows * K).map(|i| (i as f32 * step).sin()).collect();
    let x = FloatMatrix::F32(Matrix::new(name, rows, K, values).unwrap());
    quantize(name, &x, Producer::ModelOpt, Search::Plain).unwrap()
}

fn matrix(m: &QuantizedMatrix<'_>) -> dualgemm_matrix {
    dualgemm_matrix {
        format: dualgemm_format::Nvfp4 as u32,
        rows: m.rows(),
        k: m.k(),
        row_stride: 0,
        data: m.codes().as_ptr().cast(),
        scales: m.scales().as_ptr(),
        scale_layout: match m.scale_layout() {
            ScaleLayout::Linear => dualgemm_scale_layout::Linear as u32,
            ScaleLayout::Sf128x4 => dualgemm_scale_layout::Sf128x4 as u32,
            ScaleLayout::Sf8x4 => dualgemm_scale_layout::Sf8x4 as u32,
        },
        global_scale: m.global_scale().value(),
    }
}

fn desc(m: usize) -> dualgemm_desc {
    dualgemm_desc {
        m,
        a_format: dualgemm_format::Nvfp4 as u32,
        c_format: dualgemm_format::F32 as u32,
        quantize_a: DUALGEMM_QUANTIZE_A_NO,
        c_scale_layout: 0,
        c_global_scale: 0.0,
        a_scale_layout: 0,
        activation: null(),
        between_format: dualgemm_format::Bf16 as u32,
        between_global_scale: 0.0,
        top_k: 2,
    }
}

fn error() -> String {
    // SAFETY: never null, ends with a zero.
    unsafe { CStr::from_ptr(dualgemm_last_error()) }.to_str().unwrap().into()
}

#[track_caller]
fn ok(status: dualgemm_status) {
    assert_eq!(status, dualgemm_status::Ok, "{}", error());
}

/// A status with a line that has this text in it.
#[track_caller]
fn check(status: dualgemm_status, wanted: dualgemm_status, text: &str) {
    assert_eq!(status, wanted, "{text}: {}", error());
    assert!(error().contains(text), "{text}: {}", error());
}

fn weights(gate: &dualgemm_matrix, up: &dualgemm_matrix) -> *mut dualgemm_weights {
    let mut out = null_mut();
    // SAFETY: both describe matrices that are there.
    ok(unsafe { dualgemm_weights_from_tensors(null(), gate, up, &mut out) });
    out
}

fn plan(desc: &dualgemm_desc, weights: *const dualgemm_weights) -> *mut dualgemm_plan {
    let mut out = null_mut();
    // SAFETY: `desc` is a reference, `weights` a handle, and `out` can be written.
    ok(unsafe { dualgemm_plan_new(desc, weights, &mut out) });
    out
}

/// What the facade computes.
fn wanted([a, gate, up]: [&QuantizedMatrix<'_>; 3], target: &Target) -> Vec<f32> {
    let desc = DualGemmDesc::new(9, N, K, AFormat::Nvfp4, gate.format());
    let plan = DualGemm::plan(&desc, target).unwrap();
    let packed = plan.prepack(&GateUp::new(gate.clone(), up.clone())).unwrap();
    plan.run_to_vec(&AOperand::Quantized(a.clone()), &packed).unwrap()
}

#[test]
fn operands_from_memory_in_every_layout_exact() {
    let (gate, up, a) = (quantized("gate", N, 0.7), quantized("up", N, 1.3), quantized("a", 5, 0.3));
    let want = wanted([&a, &gate, &up], &Target::default());
    for layout in ScaleLayout::ALL {
        let (gate, up, a) = (
            gate.clone().with_scale_layout(layout),
            up.clone().with_scale_layout(layout),
            a.clone().with_scale_layout(layout),
        );
        let w = weights(&matrix(&gate), &matrix(&up));
        let (mut n, mut k) = (0, 0);
        let p = plan(&desc(9), w);
        let mut c = vec![0f32; 5 * N];
        // SAFETY: handles live until they are freed, once each; A and C outlive the runs.
        unsafe {
            ok(dualgemm_weights_shape(w, &mut n, &mut k));
            for _ in 0..2 {
                c.fill(f32::NAN);
                let out = c.as_mut_ptr().cast::<c_void>();
                ok(dualgemm_run(p, &matrix(&a), w, out, null_mut(), null_mut(), null_mut()));
                assert_eq!(c, want);
            }
            assert!(CStr::from_ptr(dualgemm_plan_text(p)).to_str().unwrap().contains("silu"));
            dualgemm_plan_free(p);
            dualgemm_weights_free(w);
        }
        assert_eq!((n, k), (N, K));
    }
}

#[test]
fn a_re_quantized_c_comes_with_its_scales_close() {
    let (gate, up, a) = (quantized("gate", N, 0.7), quantized("up", N, 1.3), quantized("a", 3, 0.3));
    let want = wanted([&a, &gate, &up], &Target::default());
    let w = weights(&matrix(&gate), &matrix(&up));
    let p = plan(&dualgemm_desc { c_format: dualgemm_format::Nvfp4 as u32, ..desc(3) }, w);
    let (mut codes, mut scales, mut global) = (vec![0u8; 3 * N / 2], vec![0u8; 3 * N / 16], 0f32);
    // SAFETY: handles live; codes and scales have room for three rows of N features.
    ok(unsafe {
        let out = codes.as_mut_ptr().cast();
        dualgemm_run(p, &matrix(&a), w, out, scales.as_mut_ptr(), &mut global, null_mut())
    });
    let (linear, global) = (ScaleLayout::Linear, dualgemm::formats::GlobalScale::multiplier(global));
    let c = QuantizedMatrix::new("c", gate.format(), 3, N, codes, scales, linear, global).unwrap();
    let (mut off, mut all) = (0.0, 0.0);
    for (at, &want) in want.iter().enumerate() {
        off += (c.value(at / N, at % N) - f64::from(want)).powi(2);
        all += f64::from(want).powi(2);
    }
    assert!((off / all).sqrt() < 0.15, "{}", (off / all).sqrt());
    // SAFETY: given back once.
    unsafe {
        dualgemm_plan_free(p);
        dualgemm_weights_free(w);
    }
}

#[test]
fn misuse_is_a_status_and_a_line() {
    let (gate, up, a) = (quantized("gate", N, 0.7), quantized("up", N, 1.3), quantized("a", 3, 0.3));
    let w = weights(&matrix(&gate), &matrix(&up));
    let p = plan(&desc(3), w);
    let mut c = vec![0f32; 3 * N];
    let out = c.as_mut_ptr().cast::<c_void>();
    let mut none: *mut dualgemm_weights = null_mut();
    let run = |a: &dualgemm_matrix, c: *mut c_void, stream: *mut c_void| {
        // SAFETY: handles live; every pointer is null or at what the call asks for, which outlives it.
        unsafe { dualgemm_run(p, a, w, c, null_mut(), null_mut(), stream) }
    };
    let a = matrix(&a);
    use dualgemm_status::{Argument, Checkpoint, Operand, Unsupported};
    // SAFETY: every pointer is null or valid.
    unsafe {
        check(run(&a, null_mut(), null_mut()), Argument, "c: is null");
        check(run(&a, out, out), Unsupported, "stream: is for GPUs");
        check(run(&dualgemm_matrix { format: 9, ..a }, out, null_mut()), Argument, "format 9 is unknown");
        check(run(&dualgemm_matrix { data: null(), ..a }, out, null_mut()), Argument, "a data: is null");
        check(run(&dualgemm_matrix { scales: null(), ..a }, out, null_mut()), Argument, "a scales: is null");
        check(run(&dualgemm_matrix { scale_layout: 3, ..a }, out, null_mut()), Argument, "scale layout 3");
        check(run(&dualgemm_matrix { global_scale: -1.0, ..a }, out, null_mut()), Operand, "tensor scale -1");
        check(run(&dualgemm_matrix { k: 24, ..a }, out, null_mut()), Operand, "K = 24 is not");
        check(run(&dualgemm_matrix { k: 32, ..a }, out, null_mut()), Operand, "[3, 32]");
        check(run(&dualgemm_matrix { rows: usize::MAX, ..a }, out, null_mut()), Argument, "address space");
        check(run(&dualgemm_matrix { rows: 0, ..a }, out, null_mut()), Operand, "has 0 rows");
        let mut pack = |target: &CStr, gate: *const dualgemm_matrix, up| {
            dualgemm_weights_from_tensors(target.as_ptr(), gate, up, &mut none)
        };
        check(pack(c"cpu", null(), null()), Argument, "gate: is null");
        check(pack(c"cpu", &matrix(&gate), &a), Operand, "one format and shape");
        check(pack(c"gpu", &a, &a), Argument, "\"gpu\"; valid are cpu, cuda, cuda:N");
        check(dualgemm_weights_from_tensors(null(), &a, &a, null_mut()), Argument, "out: is null");
        let mut read = |path| dualgemm_weights_from_checkpoint(c"cpu".as_ptr(), path, 0, 0, 1, &mut none);
        check(read(null()), Argument, "path: is null");
        check(read(c"no.gguf".as_ptr()), Checkpoint, "no.gguf");
        let planned = |desc: dualgemm_desc| dualgemm_plan_new(&desc, w, &mut null_mut());
        check(planned(dualgemm_desc { m: 0, ..desc(1) }), Operand, "M is 0");
        check(planned(dualgemm_desc { c_format: 4, ..desc(1) }), Argument, "Mxfp4");
        check(planned(dualgemm_desc { quantize_a: f32::NAN, ..desc(1) }), Operand, "already");
    }
    assert!(none.is_null());
    // SAFETY: null is fine, and each handle is given back once.
    unsafe {
        assert!(dualgemm_plan_text(null()).is_null());
        dualgemm_plan_free(null_mut());
        dualgemm_weights_free(null_mut());
        dualgemm_plan_free(p);
        dualgemm_weights_free(w);
    }
}

#[test]
fn ranks_read_their_share_and_blocks_are_not_split() {
    let path = CString::new(CHECKPOINT).unwrap();
    let (mut w, mut n) = (null_mut(), 0);
    // SAFETY: `path` is a string, `w` and `n` can be written, and the handle is freed once.
    unsafe {
        ok(dualgemm_weights_from_checkpoint(null(), path.as_ptr(), 0, 1, 2, &mut w));
        dualgemm_weights_shape(w, &mut n, null_mut());
        assert_eq!(n, 768);
        dualgemm_weights_free(w);
        // In the end so many that as many blocks of features have no number.
        for (ranks, text) in
            [(5, "K = 1536 cannot be split over 5 ranks"), ((1 << 60) + 1, "cannot be split over")]
        {
            let status = dualgemm_weights_from_checkpoint(null(), path.as_ptr(), 0, 0, ranks, &mut w);
            check(status, dualgemm_status::Operand, text);
            assert!(w.is_null());
        }
    }
}

#[test]
fn the_activation_is_the_checkpoints_unless_one_is_asked_for() {
    let source = std::path::Path::new(CHECKPOINT);
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(source.join(file), dir.path().join(file)).unwrap();
    }
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let load = |act: &str, w: &mut *mut dualgemm_weights| {
        let config = config.replace("\"silu\"", act);
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let path = CString::new(dir.path().to_str().unwrap()).unwrap();
        // SAFETY: `path` is a string and `w` can be written.
        unsafe { dualgemm_weights_from_checkpoint(null(), path.as_ptr(), 0, 0, 1, w) }
    };
    let mut w = null_mut();
    ok(load("\"gelu_pytorch_tanh\"", &mut w));
    for (asked, act) in
        [(None, "gelu-tanh"), (Some(c"relu2"), "relu2"), (Some(c"clamped-silu:3"), "clamped-silu:3")]
    {
        let p = plan(&dualgemm_desc { activation: asked.map_or(null(), CStr::as_ptr), ..desc(1) }, w);
        // SAFETY: the plan is a handle, freed once after its text was looked at.
        unsafe {
            let text = CStr::from_ptr(dualgemm_plan_text(p)).to_str().unwrap();
            assert!(text.contains(act), "{text}");
            dualgemm_plan_free(p);
        }
    }
    let swish = dualgemm_desc { activation: c"swish".as_ptr(), ..desc(1) };
    // SAFETY: the description and the handle are there; the handle is freed once.
    unsafe {
        let status = dualgemm_plan_new(&swish, w, &mut null_mut());
        check(status, dualgemm_status::Argument, "activation `swish` is unknown; valid are silu");
        dualgemm_weights_free(w);
    }
    // One that is not implemented is a fault of plans that do not ask for another.
    ok(load("\"mish\"", &mut w));
    let asked = plan(&dualgemm_desc { activation: c"relu2".as_ptr(), ..desc(1) }, w);
    // SAFETY: the description and the handles are there; the handles are freed once.
    unsafe {
        dualgemm_plan_free(asked);
        let text = "config.json: hidden_act is \"mish\", which is not implemented; valid is silu";
        check(dualgemm_plan_new(&desc(1), w, &mut null_mut()), dualgemm_status::Checkpoint, text);
        dualgemm_weights_free(w);
    }
}

const SIM: &CStr = c"sim:sm_90a";

/// Bytes in the simulator's memory.
fn on_device(bytes: &[u8]) -> *mut c_void {
    let mut out = null_mut();
    // SAFETY: the target is a string, `out` can be written, and `bytes` are as many as is said.
    unsafe {
        ok(dualgemm_device_alloc(SIM.as_ptr(), bytes.len(), &mut out));
        ok(dualgemm_device_write(SIM.as_ptr(), out, bytes.as_ptr().cast(), bytes.len()));
    }
    out
}

/// A matrix in the simulator's memory.
fn matrix_on_device(m: &QuantizedMatrix<'_>) -> dualgemm_matrix {
    let (data, scales) = (on_device(m.codes()), on_device(m.scales()));
    dualgemm_matrix { data, scales: scales.cast(), ..matrix(m) }
}

/// Weights from the host and from device memory, A and C in device memory, in every order of scales: what the facade
/// computes on the same GPU.
#[test]
fn operands_in_device_memory_in_every_layout_exact() {
    let (gate, up, a) = (quantized("gate", N, 0.7), quantized("up", N, 1.3), quantized("a", 5, 0.3));
    let target = Target::Gpu("sim:sm_90a".parse().unwrap(), dualgemm::GpuOptions::default());
    let want = wanted([&a, &gate, &up], &target);
    for layout in ScaleLayout::ALL {
        let [gate, up, a] = [&gate, &up, &a].map(|m| m.clone().with_scale_layout(layout));
        let on_gpu = [&gate, &up, &a].map(matrix_on_device);
        let c = on_device(&[0xEE; 4 * 5 * N + 4]);
        let (mut from_host, mut from_device) = (null_mut(), null_mut());
        let desc = dualgemm_desc { a_scale_layout: on_gpu[2].scale_layout, ..desc(9) };
        // SAFETY: handles live until they are freed; matrices and device memory outlive the runs; `got` has room.
        unsafe {
            ok(dualgemm_weights_from_tensors(SIM.as_ptr(), &matrix(&gate), &matrix(&up), &mut from_host));
            let [gate, up, a] = &on_gpu;
            ok(dualgemm_weights_from_device(SIM.as_ptr(), gate, up, null_mut(), &mut from_device));
            let p = plan(&desc, from_host);
            for w in [from_host, from_device] {
                ok(dualgemm_plan_warm(p, w, null_mut()));
                ok(dualgemm_run(p, a, w, c, null_mut(), null_mut(), null_mut()));
                let mut got = vec![0f32; 5 * N + 1];
                let bytes = 4 * got.len();
                let to = got.as_mut_ptr().cast();
                ok(dualgemm_device_synchronize(SIM.as_ptr()));
                ok(dualgemm_device_read(SIM.as_ptr(), to, c, bytes));
                assert_eq!(got[..5 * N], want);
                assert_eq!(got[5 * N].to_bits(), 0xEEEE_EEEE, "nothing is written behind C");
            }
            dualgemm_plan_free(p);
            dualgemm_weights_free(from_host);
            dualgemm_weights_free(from_device);
            for memory in on_gpu.iter().flat_map(|m| [m.data, m.scales.cast()]).chain([c.cast_const()]) {
                ok(dualgemm_device_free(SIM.as_ptr(), memory.cast_mut()));
            }
        }
    }
}

#[test]
fn misuse_of_a_gpu_is_a_status_and_a_line() {
    use dualgemm_status::{Argument, Operand, Unsupported};
    let (gate, a) = (quantized("gate", N, 0.7), quantized("a", 5, 0.3));
    let (gate, a) = (matrix_on_device(&gate), matrix_on_device(&a));
    let c = on_device(&[0; 4 * 5 * N]);
    let sim = SIM.as_ptr();
    let mut none = null_mut();
    let mut memory = null_mut();
    let mut w = null_mut();
    // SAFETY: every pointer is null, valid or an address that is only looked at.
    unsafe {
        ok(dualgemm_weights_from_device(sim, &gate, &gate, null_mut(), &mut w));
        let pack = |g: &dualgemm_matrix, u: &dualgemm_matrix, out: *mut _| {
            dualgemm_weights_from_device(sim, g, u, null_mut(), out)
        };
        let strided = dualgemm_matrix { row_stride: K, ..gate };
        check(pack(&strided, &gate, &mut none), Unsupported, "gaps between rows");
        check(pack(&gate, &a, &mut none), Operand, "one format, shape");
        let mxfp4 = dualgemm_matrix { format: dualgemm_format::Mxfp4 as u32, ..gate };
        check(pack(&mxfp4, &mxfp4, &mut none), Unsupported, "mxfp4 weights in device memory");
        let unscaled = dualgemm_matrix { global_scale: f32::NAN, ..gate };
        check(pack(&gate, &unscaled, &mut none), Operand, "up: has the tensor scale NaN");
        let nowhere = dualgemm_matrix { scales: null(), ..gate };
        check(pack(&nowhere, &gate, &mut none), Argument, "null");
        let status = dualgemm_weights_from_device(null(), &gate, &gate, null_mut(), &mut none);
        check(status, Operand, "processor");
        assert!(none.is_null());

        let p = plan(&desc(5), w);
        let run = |a: &dualgemm_matrix, c: *mut c_void| {
            dualgemm_run(p, a, w, c, null_mut(), null_mut(), null_mut())
        };
        ok(run(&a, c));
        check(run(&a, null_mut()), Operand, "C is at");
        check(run(&dualgemm_matrix { k: 32, ..a }, c), Operand, "a: has K = 32");
        check(run(&dualgemm_matrix { rows: 6, ..a }, c), Operand, "[6, 64]");
        check(run(&dualgemm_matrix { scale_layout: 1, ..a }, c), Operand, "scales in the layout");
        check(run(&dualgemm_matrix { format: 1, ..a }, c), Operand, "a: is f16; the plan asks for nvfp4");
        check(run(&dualgemm_matrix { data: null(), ..a }, c), Argument, "a data: is null");
        let f32_a = dualgemm_desc { a_format: dualgemm_format::F32 as u32, ..desc(5) };
        check(dualgemm_plan_new(&f32_a, w, &mut null_mut()), Operand, "round it to f16");
        let unknown = dualgemm_desc { a_scale_layout: 9, ..desc(5) };
        check(dualgemm_plan_new(&unknown, w, &mut null_mut()), Argument, "scale layout 9");
        dualgemm_plan_free(p);
        dualgemm_weights_free(w);

        check(dualgemm_device_alloc(null(), 8, &mut memory), Argument, "is the processor");
        check(dualgemm_device_alloc(c"cuda:x".as_ptr(), 8, &mut memory), Argument, "cuda:x");
        check(dualgemm_device_alloc(sim, usize::MAX / 2, &mut memory), Unsupported, "are free");
        check(dualgemm_device_alloc(sim, 8, null_mut()), Argument, "out: is null");
        assert!(memory.is_null());
        let bytes = [0u8; 8];
        check(dualgemm_device_write(sim, c, null(), 8), Argument, "from: is null");
        let status = dualgemm_device_write(sim, null_mut(), bytes.as_ptr().cast(), 8);
        check(status, Unsupported, "device address");
        check(dualgemm_device_read(sim, null_mut(), c, 8), Argument, "to: is null");
        check(dualgemm_device_free(sim, c.wrapping_byte_add(1)), Unsupported, "live allocation");
        ok(dualgemm_device_free(sim, null_mut()));
    }
}

/// Linear layers, whole MLPs and mixtures of them are what the facade computes of the same matrices.
#[test]
fn the_other_operations_are_what_the_facade_computes_exact() {
    let (gate, up) = (quantized("gate", K, 0.7), quantized("up", K, 1.3));
    let (down, a) = (quantized("down", N, 0.9), quantized("a", 3, 0.3));
    let bias: Vec<f32> = (0..N).map(|i| i as f32 - 20.0).collect();
    let of_three = self::desc(3);
    let (ids, router) = ([1, 0, 0, -1, 1, 1], [0.5, 2.0, 1.0, 9.0, -1.0, 0.25]);
    let mlp = |gate: &QuantizedMatrix<'static>| GatedMlp {
        gate_up: GateUp::new(gate.clone(), up.clone()),
        down: Linear::new(down.clone()),
    };
    let experts = [mlp(&gate), mlp(&up)];
    let [gates, ups, downs] = [[&gate, &up], [&up, &up], [&down, &down]].map(|list| list.map(matrix));
    let layer = Linear { weight: down.clone().into(), bias: Some(bias.clone().into()) };
    let each = experts.iter().cloned().map(Ok::<_, Error>);
    let (shape, target) = (LayerShape::mlp(&experts[0]), Target::default);
    let layers = [
        PackedLayer::product(&layer, target()),
        PackedLayer::mlp(&experts[0], target()),
        PackedLayer::mixture(shape, RouterWeights::Output, each, target()),
    ];
    let call = LayerCall { top_k: 2, ..LayerCall::new(3, AFormat::Nvfp4, OutFormat::F32) };
    for (at, layer) in layers.map(Result::unwrap).into_iter().enumerate() {
        let any = AnyPlan::new(&layer.shape.describe(&call), &layer.target).unwrap();
        let routing = (at == 2).then_some(Routing { ids: &ids, weights: &router });
        let (mut want, operand) = (vec![0.0; 3 * N], AOperand::Quantized(a.clone()));
        let to = (OutputMut::F32(&mut want), false);
        any.runner().unwrap().run(&operand, &layer.weights, routing, to).unwrap();

        let (mut w, mut n, mut k, mut c) = (null_mut(), 0, 0, vec![1f32; 3 * N]);
        let out = c.as_mut_ptr().cast::<c_void>();
        // SAFETY: handles live until they are freed, once each; matrices, lists, A and C outlive the calls.
        unsafe {
            let (gate, up, down) = (gates.as_ptr(), ups.as_ptr(), downs.as_ptr());
            ok(match at {
                0 => dualgemm_linear_from_tensors(null(), down, bias.as_ptr(), &mut w),
                1 => dualgemm_mlps_from_tensors(null(), gate, up, down, 0, &mut w),
                _ => dualgemm_mlps_from_tensors(null(), gate, up, down, 2, &mut w),
            });
            ok(dualgemm_weights_shape(w, &mut n, &mut k));
            assert_eq!((n, k), (N, K));
            let p = plan(&of_three, w);
            let with = |add| {
                dualgemm_run_mixture(p, &matrix(&a), ids.as_ptr(), router.as_ptr(), w, out, add, null_mut())
            };
            let without = || dualgemm_run(p, &matrix(&a), w, out, null_mut(), null_mut(), null_mut());
            let (right, wrong) = if at == 2 { (with(false), without()) } else { (without(), with(false)) };
            assert_eq!((right, wrong), (dualgemm_status::Ok, dualgemm_status::Operand));
            assert!(error().contains("the weights is those of"), "{}", error());
            assert_eq!(c, want);
            if at == 2 {
                ok(with(true));
                assert!(c.iter().zip(&want).all(|(c, want)| *c == want + want));
            }
            dualgemm_plan_free(p);
            dualgemm_weights_free(w);
        }
    }
}

/// The checkpoint in the tree, and what it does not have.
#[test]
fn the_other_operations_are_read_from_checkpoints() {
    let path = CString::new(CHECKPOINT).unwrap();
    let path = path.as_ptr();
    let (mut w, mut n, mut k) = (null_mut(), 0, 0);
    // SAFETY: strings end with a zero; handles live until they are freed.
    unsafe {
        let module = c"model.layers.0.self_attn.k_proj".as_ptr();
        ok(dualgemm_linear_from_checkpoint(null(), path, module, &mut w));
        dualgemm_weights_shape(w, &mut n, &mut k);
        assert_eq!((n, k), (192, 576));
        dualgemm_weights_free(w);
        ok(dualgemm_mlp_from_checkpoint(null(), path, 0, &mut w));
        dualgemm_weights_shape(w, &mut n, &mut k);
        assert_eq!((n, k), (576, 576));
        dualgemm_weights_free(w);
        let status = dualgemm_linear_from_checkpoint(null(), path, c"lm_heat".as_ptr(), &mut w);
        assert!(w.is_null());
        check(status, dualgemm_status::Checkpoint, "lm_heat");
        let status = dualgemm_mixture_from_checkpoint(null(), path, 0, &mut w);
        check(status, dualgemm_status::Checkpoint, "no experts");
        let status = dualgemm_mlps_from_tensors(null(), null(), null(), null(), 1, &mut w);
        check(status, dualgemm_status::Argument, "gate, up or down: is null");
    }
}

/// The layer in the tree as the one expert of a Llama 4, whose router's weights multiply A.
#[test]
fn a_family_that_weighs_the_input_does_so_exact() {
    let dir = tempfile::tempdir().unwrap();
    let from = |name: &str| std::fs::read(format!("{CHECKPOINT}/{name}")).unwrap();
    let config = String::from_utf8(from("config.json")).unwrap();
    let config = config.replace("\"model_type\": \"llama\"", "\"model_type\": \"llama4_text\"");
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let file = from("model.safetensors");
    let (length, rest) = file.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header = std::str::from_utf8(header).unwrap().replace(".mlp.", ".feed_forward.experts.0.");
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();

    let checkpoint = Checkpoint::open(dir.path(), &OpenOptions::default()).unwrap();
    let mlp = checkpoint.gated_mlp(0, Which::Expert(0)).unwrap();
    let x: Vec<f32> = (0..mlp.gate_up.k()).map(|i| (i as f32 * 0.7).sin()).collect();
    let weighted = x.iter().map(|x| x * 0.25).collect::<Vec<_>>();
    let call = LayerCall::new(1, AFormat::F32, OutFormat::F32);
    let packed = PackedLayer::mlp(&mlp, Target::default()).unwrap();
    let mut want = vec![0f32; mlp.down.n()];
    let any = AnyPlan::new(&packed.shape.describe(&call), &packed.target).unwrap();
    let a = AOperand::Float(FloatMatrix::F32(Matrix::new("a", 1, x.len(), weighted).unwrap()));
    any.runner().unwrap().run(&a, &packed.weights, None, (OutputMut::F32(&mut want), false)).unwrap();

    let path = CString::new(dir.path().to_str().unwrap()).unwrap();
    let (mut w, mut c) = (null_mut(), vec![0f32; want.len()]);
    let a = dualgemm_matrix {
        format: dualgemm_format::F32 as u32,
        rows: 1,
        k: x.len(),
        row_stride: 0,
        data: x.as_ptr().cast(),
        scales: null(),
        scale_layout: 0,
        global_scale: 0.0,
    };
    let desc = dualgemm_desc { a_format: dualgemm_format::F32 as u32, top_k: 1, ..desc(1) };
    // SAFETY: strings end with a zero; handles live until they are freed; A, the lists and C outlive the call.
    unsafe {
        ok(dualgemm_mixture_from_checkpoint(null(), path.as_ptr(), 0, &mut w));
        let p = plan(&desc, w);
        let (ids, weights, c) = ([0], [0.25], c.as_mut_ptr().cast());
        ok(dualgemm_run_mixture(p, &a, ids.as_ptr(), weights.as_ptr(), w, c, false, null_mut()));
        dualgemm_plan_free(p);
        dualgemm_weights_free(w);
    }
    assert_eq!(c, want);
}
