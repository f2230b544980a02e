"""Every fault is an exception of a class that says whose fault it is, with the command's message."""

import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest

import dualgemm
from dualgemm import ArgumentError, OperandError, Quantized, Weights

N, K = 32, 64


@pytest.fixture(scope="module")
def weights():
    gate, up = (dualgemm.quantize(np.ones((N, K), np.float32) * i) for i in (1, 2))
    return Weights.from_tensors(gate=gate, up=up)


def a(rows=2, k=K, dtype=np.float32):
    return np.ones((rows, k), dtype)


def test_classes_have_the_bases_that_python_users_catch():
    assert issubclass(dualgemm.CheckpointFileError, (dualgemm.CheckpointError, OSError))
    for name in ("CheckpointError", "OperandError", "ArgumentError"):
        assert issubclass(getattr(dualgemm, name), ValueError)
    assert issubclass(dualgemm.UnsupportedError, NotImplementedError)
    for name in dualgemm.__all__:
        item = getattr(dualgemm, name)
        if isinstance(item, type) and issubclass(item, Exception):
            assert issubclass(item, dualgemm.Error)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: a(k=80), r"^a: shape \[2, 80\]; the weights need \[\.\.\., 64\]$"),
        (lambda: a(dtype=np.float64), "a: is float64; .*round it"),
        (lambda: a(dtype=np.int32), "a: is int32; .*round it"),
        (lambda: a(dtype=np.complex64), "a: its type is complex64"),
        (lambda: a(dtype=">f4"), "a: its type is >f4"),
        (lambda: a(dtype=ml_dtypes.float8_e4m3fn), "a: is float8_e4m3fn; .*with their scales"),
        (lambda: np.float32(1), r"a: shape \[\]; the weights need \[\.\.\., 64\]"),
        (lambda: (a(), a()), "a: a tuple of 2"),
        (lambda: np.ma.masked_array(a(), mask=a() > 0), r"^a: is a masked array; filled\(\) makes"),
        (lambda: np.ma.masked_array(a()), "a: is a masked array"),
        (lambda: Quantized(np.ma.ones((2, 32), np.uint8), a(2, 4)), "a codes: is a masked array"),
        (lambda: Quantized(np.zeros((2, 32), np.float32), np.zeros((2, 4), np.uint8)), "codes are float32"),
        (lambda: Quantized(np.zeros((2, 32), np.uint8), a(2, 4)), "scales are float32; uint8 or float8_e4m3fn"),
        (lambda: Quantized(np.zeros((2, 32), np.uint8), np.zeros((2, 3), np.uint8)), "scales hold 6 bytes; .* 8"),
        (lambda: Quantized(np.zeros((2, 32), np.uint8), np.zeros((4, 2), np.uint8)), r"\[4, 2\]; \[2, 4\] is needed"),
        (lambda: Quantized(np.zeros((2, 32), np.uint8), np.zeros(8, np.uint8)), r"\[8\]; \[2, 4\] is needed"),
        (lambda: Quantized(np.zeros((2, 7), np.uint8), np.zeros((2, 1), np.uint8)), r"a: shape \[2, 14\]; the weights need"),
        (lambda: Quantized(np.zeros((2, 32), np.uint8), np.full((2, 4), 0x7F, np.uint8)), "NaN"),
        (lambda: Quantized(np.zeros((2, 32), np.uint8), np.full((2, 4), 0x80, np.uint8)), "negative"),
        (lambda: Quantized(np.zeros((2, 32), np.uint8), np.zeros((2, 4), np.uint8), float("nan")), "tensor scale NaN"),
        (lambda: Quantized(np.zeros((2, 32), np.uint8), np.zeros((2, 4), np.uint8), -1.0), "tensor scale -1"),
        (lambda: Quantized(np.zeros(32, np.uint8), np.zeros((2, 4), np.uint8)), "a matrix is needed"),
        (lambda: Quantized(np.zeros((2, 64), ml_dtypes.float4_e2m1fn), a(2, 2)), "one code per byte"),
    ],
)
def test_wrong_operands(weights, make, message):
    with pytest.raises(OperandError, match=message):
        dualgemm.swiglu(make(), weights)


def test_wrong_outputs(weights):
    for out, message in [
        (np.empty((2, N + 1), np.float32), r"shape \[2, 33\]; \[2, 32\]"),
        (np.empty((2, N), np.int16), "int16"),
        (np.empty((2, N), np.float64), "out: is float64"),
        (np.empty((N, 2), np.float32).T, "not contiguous"),
        (np.empty((2, 2 * N), np.float32)[:, ::2], "not contiguous"),
        (np.broadcast_to(np.float32(0), (2, N)), "read-only"),
        (np.ndarray((2, N), np.float32, bytearray(8 * N + 1), offset=1), "no multiple of 4 bytes"),
    ]:
        with pytest.raises(OperandError, match=message):
            dualgemm.swiglu(a(), weights, out=out)
    with pytest.raises(OperandError, match="out_dtype asks for float16"):
        dualgemm.swiglu(a(), weights, out=np.empty((2, N), np.float32), out_dtype="float16")
    with pytest.raises(OperandError, match="valid are float32, float16 and bfloat16, and nvfp4 for swiglu"):
        dualgemm.swiglu(a(), weights, out_dtype="int8")
    with pytest.raises(OperandError, match="out_dtype is nvfp4; valid are float32, float16 and bfloat16, and nvfp4 for swiglu"):
        dualgemm.linear(a(), np.ones((4, K), np.float32), out_dtype="nvfp4")


def test_outputs_with_leading_dimensions_are_not_copied_unseen(weights):
    for out in (np.asfortranarray(np.empty((2, 3, N), np.float32)), np.empty((3, 2, N), np.float32).swapaxes(0, 1)):
        with pytest.raises(OperandError, match=r"out: shape \[2, 3, 32\] is not contiguous row by row"):
            dualgemm.swiglu(np.ones((2, 3, K), np.float32), weights, out=out)
    for out in (dualgemm.quantize(a()), (1, 2)):
        with pytest.raises(OperandError, match="out is a tuple"):
            dualgemm.swiglu(a(), weights, out=out)


def test_what_is_wrong_with_rows_is_wrong_without(weights):
    for make, message in [
        (lambda: a(0, 80), r"a: shape \[0, 80\]; the weights need \[\.\.\., 64\]"),
        (lambda: a(0, dtype=np.float64), "a: is float64"),
        (lambda: Quantized(np.empty((0, 8), np.uint8), np.empty((0, 1), np.uint8)), r"a: shape \[0, 16\]; the weights need"),
    ]:
        with pytest.raises(OperandError, match=message):
            dualgemm.swiglu(make(), weights)
    with pytest.raises(OperandError, match=r"out: shape \[5, 5\]; \[0, 32\] is needed"):
        dualgemm.swiglu(a(0), weights, out=np.empty((5, 5), np.float32))
    with pytest.raises(OperandError, match="out: is float64"):
        dualgemm.swiglu(a(0), weights, out=np.empty((0, N), np.float64))
    for options in ({"activation": "zzz"}, {"quantize_a": "zzz"}):
        with pytest.raises(ArgumentError, match="zzz"):
            dualgemm.swiglu(a(0), weights, **options)


def test_options_that_would_do_nothing_are_refused(weights):
    for options in ({"out_scale": 2.0}, {"out_scale_layout": "128x4"}):
        with pytest.raises(OperandError, match='are for out_dtype="nvfp4"'):
            dualgemm.swiglu(a(), weights, **options)
    for options in ({"global_scale": 3.0}, {"search": "mse"}):
        with pytest.raises(dualgemm.ArgumentError, match="are for nvfp4"):
            dualgemm.quantize(a(), format="mxfp4", **options)
    q = dualgemm.quantize(a())
    with pytest.raises(OperandError, match="out is float32; dtype asks for float16"):
        dualgemm.dequantize(q, np.float16, out=np.empty((2, K), np.float32))
    with pytest.raises(OperandError, match="dtype is int8; valid are float32, float16 and bfloat16"):
        dualgemm.dequantize(q, np.int8)


def test_matrices_are_needed_where_matrices_are_converted():
    for shape in ((K,), (1, 2, K)):
        with pytest.raises(OperandError, match="x: shape .* a matrix is needed"):
            dualgemm.quantize(np.ones(shape, np.float32))
    with pytest.raises(TypeError, match="x is a list"):
        dualgemm.quantize([[1.0] * 16])
    with pytest.raises(OperandError, match="q codes: shape .* a matrix is needed"):
        dualgemm.dequantize(Quantized(np.zeros(8, np.uint8), np.zeros(1, np.uint8)))
    with pytest.raises(TypeError, match="q is a ndarray; a dualgemm.Quantized is needed"):
        dualgemm.dequantize(np.ones((3, 3)))


def test_numbers_beside_weights():
    q = dualgemm.quantize(np.ones((N, K), np.float32))
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(OperandError, match="input_scale: is .* a positive finite number is needed"):
            Weights.from_tensors(gate=q, up=q, input_scale=scale)
        with pytest.raises(OperandError, match="input_scale: is "):
            Weights.from_fused(q, order="gate-up", input_scale=scale)
    with pytest.raises(OperandError, match=r"up_bias: shape \[2, 16\]; \[N\] is needed"):
        Weights.from_tensors(gate=q, up=q, up_bias=np.ones((2, N // 2), np.float32))


def test_numbers_of_threads():
    before = dualgemm.get_num_threads()
    for threads in (-1, 4097, 10**9):
        with pytest.raises(dualgemm.ArgumentError, match=f"threads is {threads}; valid are 0 to 4096"):
            dualgemm.set_num_threads(threads)
    assert dualgemm.get_num_threads() == before


def test_results_in_place_are_refused(weights):
    memory = np.ones(4 * K, np.float32)
    with pytest.raises(OperandError, match="shares memory with a"):
        dualgemm.swiglu(memory[: 2 * K].reshape(2, K), weights, out=memory[K : K + 2 * N].reshape(2, N))


def test_wrong_names(weights):
    for options, message in [
        ({"activation": "swish"}, "activation `swish` is unknown; valid are silu"),
        ({"quantize_a": "sometimes"}, "quantize_a `sometimes` is unknown"),
        ({"out_dtype": "nvfp4", "out_scale_layout": "4x4"}, "scale layout `4x4` is unknown; valid are linear"),
    ]:
        with pytest.raises(dualgemm.ArgumentError, match=message):
            dualgemm.swiglu(a(), weights, **options)
    for wrong in (True, False, np.True_, [1.0]):
        with pytest.raises(dualgemm.ArgumentError, match="quantize_a `.*` is unknown"):
            dualgemm.swiglu(a(), weights, quantize_a=wrong)
    with pytest.raises(OperandError, match="has no input scale"):
        dualgemm.swiglu(a(), weights, quantize_a="static")
    with pytest.raises(OperandError, match="stream is for CUDA arrays"):
        dualgemm.swiglu(a(), weights, stream=0)
    with pytest.raises(dualgemm.ArgumentError, match="producer `nvidia` is unknown"):
        dualgemm.quantize(a(), producer="nvidia")
    with pytest.raises(dualgemm.ArgumentError, match="search `best` is unknown"):
        dualgemm.quantize(a(), search="best")
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(OperandError, match="tensor scale"):
            dualgemm.swiglu(a(), weights, quantize_a=bad)


def test_what_is_no_array_is_a_type_error(weights):
    for thing in ("text", 3, None, [[1.0]]):
        with pytest.raises(TypeError):
            dualgemm.swiglu(thing, weights)
    with pytest.raises(TypeError):
        dualgemm.swiglu(a(), "weights")
    with pytest.raises(TypeError, match="unexpected keyword argument 'lyer'"):
        Weights.from_checkpoint("x", lyer=1)


class OnCuda:
    shape, dtype = (2, K), np.dtype(np.float32)
    __cuda_array_interface__ = {"shape": (2, K), "typestr": "<f4", "data": (4096, False), "version": 3}


def test_arrays_on_another_device_are_refused(weights):
    with pytest.raises(OperandError, match="a: is on a CUDA device and the weights are on cpu"):
        dualgemm.swiglu(OnCuda(), weights, out=np.empty((2, N), np.float32))
    with pytest.raises(OperandError, match="out is needed"):
        dualgemm.swiglu(OnCuda(), weights)
    with pytest.raises(OperandError, match="x: is on a CUDA device; an array on the processor"):
        dualgemm._dualgemm.quantize(OnCuda(), a(), a(), "nvfp4", "modelopt", "plain", None, "linear")


def test_outputs_in_the_memory_that_is_decoded_are_refused():
    q = dualgemm.quantize(np.ones((N, K), np.float32))
    out = np.zeros((N, K), np.float32)
    codes, scales = out.view(np.uint8)[:, : K // 2], out.view(np.uint8)[:, K // 2 : K // 2 + K // 16]
    for part in ({"codes": codes}, {"scales": scales}):
        with pytest.raises(OperandError, match="out: shares memory with q"):
            dualgemm.dequantize(q._replace(**part), out=out)


def test_copies_that_no_memory_holds_are_refused():
    def rows(array):
        return np.broadcast_to(array, (2**40, array.size))

    huge = Quantized(rows(np.zeros(K // 2, np.uint8)), rows(np.zeros(K // 16, np.uint8)))
    with pytest.raises(MemoryError, match=r"gate: a copy of shape \[1099511627776, 32\] does not fit"):
        Weights.from_tensors(gate=huge, up=huge)


def test_what_is_no_array_is_named(weights):
    for wrong in ([[1.0] * K], None, "text"):
        with pytest.raises(TypeError, match=f"a is a {type(wrong).__name__}"):
            dualgemm.swiglu(wrong, weights)
    q = dualgemm.quantize(a())
    for wrong in (None, "1", np.ones(2, np.float32)):
        with pytest.raises(TypeError, match="gate global_scale is .*; a number is needed"):
            Weights.from_tensors(gate=q._replace(global_scale=wrong), up=q)
    with pytest.raises(OperandError, match="stream is for matrices on a GPU"):
        Weights.from_tensors(gate=q, up=q, stream=1)


def test_devices_by_wrong_names():
    q = dualgemm.quantize(np.ones((N, K), np.float32))
    for device in ("gpu", "cuda:x", "sim:sm_1"):
        with pytest.raises(dualgemm.ArgumentError, match="no device is called"):
            Weights.from_tensors(gate=q, up=q, device=device)


def test_halves_that_differ_are_refused():
    gate = dualgemm.quantize(np.ones((N, K), np.float32))
    up = dualgemm.quantize(np.ones((N + 16, K), np.float32))
    with pytest.raises(OperandError, match=r"gate and up must have one format and shape"):
        Weights.from_tensors(gate=gate, up=up)
    with pytest.raises(OperandError, match="has 17 rows; order gate-up needs"):
        odd = dualgemm.quantize(np.ones((17, K), np.float32))
        Weights.from_fused(odd, order="gate-up")
    with pytest.raises(dualgemm.ArgumentError, match="gate/up order `gateup` is unknown"):
        Weights.from_fused(gate, order="gateup")


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(dualgemm.CheckpointFileError, match="no-such") as missing:
        Weights.from_checkpoint(tmp_path / "no-such")
    assert str(missing.value).count("os error 2") == 1
    with pytest.raises(OSError):
        Weights.from_checkpoint(str(tmp_path / "no-such"))
    text = tmp_path / "model.txt"
    text.write_text("hello")
    with pytest.raises(dualgemm.CheckpointFileError, match="unknown ending"):
        Weights.from_checkpoint(text)
    broken = tmp_path / "model.safetensors"
    broken.write_bytes(b"\xff" * 64)
    with pytest.raises(dualgemm.CheckpointError, match="header rule"):
        Weights.from_checkpoint(broken)


def test_faults_of_a_checkpoint_name_the_tensor(layer14, tmp_path):
    path = layer14 / "modelopt-nvfp4"
    with pytest.raises(dualgemm.CheckpointError, match="no gated MLP in layer 7; there is one in layer 0"):
        Weights.from_checkpoint(path, 7)
    with pytest.raises(dualgemm.ArgumentError, match="convention `gptq` is unknown"):
        Weights.from_checkpoint(path, convention="gptq")
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    file = copy / "model.safetensors"
    data = file.read_bytes().replace(b"gate_proj.weight_scale_2", b"gate_proj.weight_scaleX2")
    file.write_bytes(data)
    with pytest.raises(dualgemm.CheckpointError, match=r"gate_proj.weight_scaleX2"):
        Weights.from_checkpoint(copy)


@pytest.mark.parametrize("name", ["layer", "expert", "rank", "world"])
def test_numbers_below_zero_are_named(layer14, name):
    for wrong in (-1, 2**64):
        with pytest.raises(dualgemm.ArgumentError, match=f"{name} is {wrong}; a number from 0 is needed"):
            Weights.from_checkpoint(layer14 / "modelopt-nvfp4", **{name: wrong})


def test_errors_are_those_of_the_command(layer14):
    with pytest.raises(dualgemm.ArgumentError, match="unexpected argument 'no_such' found$"):
        dualgemm.bench(no_such=True)
    with pytest.raises(dualgemm.ArgumentError, match="^out_scale_layout: C has no block scales; they come with out_dtype nvfp4$"):
        dualgemm.run(layer14 / "modelopt-nvfp4", out_scale_layout="128x4")
    with pytest.raises(dualgemm.CheckpointFileError, match="^/no/--such/file.gguf"):
        dualgemm.inspect("/no/--such/file.gguf")
    with pytest.raises(dualgemm.CheckpointFileError):
        dualgemm.inspect(pathlib.Path("no-such-file.gguf"))
