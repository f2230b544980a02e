"""The operation over every kind of array, layout and misuse, against the f64 reference."""

import copy
import ctypes
import os
import signal
import threading
import warnings

import ml_dtypes
import numpy as np
import pytest
from conftest import rel_l2

import dualgemm
from dualgemm import Quantized, Weights, _dualgemm

M, N, K = 5, 48, 64


def matrix(rows, cols, seed):
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


@pytest.fixture(scope="module")
def pair():
    # Tensor scales that differ: one used for both would show.
    gate = dualgemm.quantize(matrix(N, K, 1))
    up = dualgemm.quantize(2.14 * matrix(N, K, 2))
    return gate, up


@pytest.fixture(scope="module")
def weights(pair):
    return Weights.from_tensors(gate=pair[0], up=pair[1])


def reference(a, pair, activation="silu"):
    c = np.empty((a.shape[0], N))
    _dualgemm.reference(a, *pair, c, activation)
    return c


def silu(x):
    return x / (1 + np.exp(-x))


def test_the_reference_is_the_formula_close(pair):
    a = matrix(M, K, 3)
    gate, up = (dualgemm.dequantize(q).astype(np.float64) for q in pair)
    # Decoded weights are rounded to float32; the reference's are not.
    assert rel_l2(reference(a, pair), silu(a @ gate.T) * (a @ up.T)) < 1e-6


@pytest.mark.parametrize(
    "dtype,limit", [("float32", 1e-6), ("float16", 1e-3), ("bfloat16", 8e-3)], ids=lambda x: str(x)
)
def test_float_types_close(pair, weights, dtype, limit):
    a = matrix(M, K, 3).astype(getattr(ml_dtypes, dtype, dtype))
    c = dualgemm.swiglu(a, weights)
    assert c.dtype == a.dtype and rel_l2(c, reference(a, pair)) < limit
    c = dualgemm.swiglu(a, weights, out_dtype="float32")
    assert c.dtype == np.float32 and rel_l2(c, reference(a, pair)) < 1e-6


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors", "torchao", "te", "ggml"])
def test_quantized_a_close(pair, weights, producer):
    a = dualgemm.quantize(matrix(M, K, 3), producer=producer)
    c = dualgemm.swiglu(a, weights)
    assert rel_l2(c, reference(a, pair)) < 1e-6


def test_layouts_of_scales_give_the_same_exact(pair, weights):
    x = matrix(M, K, 3)
    linear = dualgemm.swiglu(dualgemm.quantize(x), weights)
    for layout in ("128x4", "8x4"):
        q = dualgemm.quantize(x, scale_layout=layout)
        assert q.scale_layout == layout
        np.testing.assert_array_equal(dualgemm.swiglu(q, weights), linear)
        # What lies in the padding is never read.
        scales = np.array(q.scales).view(np.uint8)
        scales[scales == 0] = 0x7F
        np.testing.assert_array_equal(dualgemm.swiglu(q._replace(scales=scales), weights), linear)


def test_strides_of_every_kind_give_the_same_exact(weights):
    a = matrix(M, K, 3)
    want = dualgemm.swiglu(a, weights)
    wide = np.zeros((M, K + 24), np.float32)
    wide[:, 8 : K + 8] = a
    every_other = np.repeat(a, 2, axis=0)[::2]
    backwards = a[::-1].copy()[::-1]
    unaligned = np.frombuffer(b"\0" + a.tobytes(), np.uint8)[1:].view(np.float32).reshape(a.shape)
    for name, view in {
        "part of wider rows": wide[:, 8 : K + 8],
        "transposed": np.asfortranarray(a),
        "every other row": every_other,
        "rows backwards": backwards,
        "unaligned": unaligned,
        "read-only": np.frombuffer(a.tobytes(), np.float32).reshape(a.shape),
    }.items():
        np.testing.assert_array_equal(dualgemm.swiglu(view, weights), want, err_msg=name)
    one_row = np.broadcast_to(a[0], (3, K))
    np.testing.assert_array_equal(dualgemm.swiglu(one_row, weights), dualgemm.swiglu(one_row.copy(), weights))


def test_strided_codes_give_the_same_exact(pair):
    gate, up = pair
    wide = np.zeros((N, K), np.uint8)
    wide[:, 4 : 4 + K // 2] = gate.codes
    a = matrix(M, K, 3)
    want = dualgemm.swiglu(a, Weights.from_tensors(gate=gate, up=up))
    for codes in (wide[:, 4 : 4 + K // 2], np.asfortranarray(gate.codes), gate.codes.view(np.int8)):
        w = Weights.from_tensors(gate=gate._replace(codes=codes), up=up)
        np.testing.assert_array_equal(dualgemm.swiglu(a, w), want)
    scales = np.asfortranarray(np.asarray(gate.scales))
    w = Weights.from_tensors(gate=gate._replace(scales=scales), up=up)
    np.testing.assert_array_equal(dualgemm.swiglu(a, w), want)


def test_leading_dimensions_are_kept_exact(weights):
    a = matrix(12, K, 3)
    want = dualgemm.swiglu(a, weights)
    c = dualgemm.swiglu(a.reshape(2, 2, 3, K), weights)
    assert c.shape == (2, 2, 3, N)
    np.testing.assert_array_equal(c.reshape(12, N), want)
    out = np.empty((2, 6, N), np.float32)
    with warnings.catch_warnings():
        # From 2.5 on numpy warns where the shape of an array is set.
        warnings.simplefilter("error")
        assert dualgemm.swiglu(a.reshape(2, 6, K), weights, out=out) is out
    np.testing.assert_array_equal(out.reshape(12, N), want)
    # One row goes through other sums than twelve.
    assert rel_l2(dualgemm.swiglu(a[0], weights), want[0]) < 1e-6


def test_no_rows_are_no_work(weights):
    assert dualgemm.swiglu(np.empty((0, K), np.float32), weights).shape == (0, N)
    assert dualgemm.swiglu(np.empty((2, 0, K), np.float32), weights).shape == (2, 0, N)


class OnlyDlpack:
    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_and_buffers_exact(weights):
    a = matrix(M, K, 3)
    want = dualgemm.swiglu(a, weights)
    np.testing.assert_array_equal(dualgemm.swiglu(OnlyDlpack(a), weights), want)
    wide = np.zeros((M, K + 8), np.float32)
    wide[:, :K] = a
    np.testing.assert_array_equal(dualgemm.swiglu(OnlyDlpack(wide[:, :K]), weights), want)
    np.testing.assert_array_equal(dualgemm.swiglu(memoryview(a), weights), want)


def test_the_order_of_gate_and_up_matters_and_is_explicit(pair, weights):
    gate, up = pair
    a = matrix(M, K, 3)
    swapped = dualgemm.swiglu(a, Weights.from_tensors(gate=up, up=gate))
    assert rel_l2(swapped, dualgemm.swiglu(a, weights)) > 0.1
    with pytest.raises(TypeError):
        Weights.from_tensors(gate, up)
    with pytest.raises(TypeError):
        Weights.from_fused(gate)


@pytest.mark.parametrize("order", ["gate-up", "up-gate", "gate-up-rows", "up-gate-rows"])
def test_fused_orders_exact(pair, order):
    # Fused tensors have one tensor scale.
    gate, up = (q._replace(global_scale=0.01) for q in pair)
    halves = (gate, up) if order.startswith("gate") else (up, gate)
    joined = []
    for part in ("codes", "scales"):
        first, second = (np.asarray(getattr(q, part)).view(np.uint8) for q in halves)
        stack = np.concatenate if order in ("gate-up", "up-gate") else lambda x: np.stack(x, 1).reshape(2 * N, -1)
        joined.append(stack([first, second]))
    fused = Weights.from_fused(Quantized(*joined, 0.01), order=order)
    a = matrix(M, K, 3)
    np.testing.assert_array_equal(
        dualgemm.swiglu(a, fused), dualgemm.swiglu(a, Weights.from_tensors(gate=gate, up=up))
    )


@pytest.mark.parametrize(
    "activation", ["silu", "clamped-silu", "clamped-silu:0.5", "swiglustep", "swigluoai", "gelu-tanh", "relu", "relu2", "identity"]
)
def test_activations_close(pair, weights, activation):
    a = 3 * matrix(M, K, 3)
    c = dualgemm.swiglu(a, weights, activation=activation)
    assert rel_l2(c, reference(a, pair, activation)) < 1e-5
    own = Weights.from_tensors(gate=pair[0], up=pair[1], activation=activation)
    assert Weights.from_tensors(gate=pair[0], up=pair[1], activation=own.activation).activation == own.activation
    np.testing.assert_array_equal(dualgemm.swiglu(a, own), c)


def test_biases_are_added_before_the_activation_close(pair):
    a, bias = matrix(M, K, 3), matrix(2, N, 4)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        gate_bias, up_bias = bias.astype(dtype)
        w = Weights.from_tensors(gate=pair[0], up=pair[1], gate_bias=gate_bias, up_bias=up_bias)
        gate, up = (dualgemm.dequantize(q).astype(np.float64) for q in pair)
        want = silu(a @ gate.T + gate_bias.astype(float)) * (a @ up.T + up_bias.astype(float))
        assert rel_l2(dualgemm.swiglu(a, w), want) < 1e-6
    with pytest.raises(dualgemm.OperandError, match="bias has 47 values; N = 48"):
        Weights.from_tensors(gate=pair[0], up=pair[1], gate_bias=bias[0, 1:], up_bias=bias[0])


def test_threads_share_weights_exact(weights):
    inputs = [matrix(m, K, m) for m in (1, 2, 7, 16)]
    wants = [dualgemm.swiglu(a, weights, quantize_a="dynamic") for a in inputs]
    faults = []

    def work(a, want):
        for _ in range(50):
            if not np.array_equal(dualgemm.swiglu(a, weights, quantize_a="dynamic"), want):
                faults.append(a.shape)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wants) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_the_number_of_threads_changes_nothing_exact(weights):
    a = matrix(33, K, 3)
    before = dualgemm.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            dualgemm.set_num_threads(threads)
            assert dualgemm.get_num_threads() == threads
            results.append(dualgemm.swiglu(a, weights, quantize_a="dynamic"))
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])
    finally:
        dualgemm.set_num_threads(before)


@pytest.fixture(scope="module")
def shared_product():
    """A product that threads share: its weights, A and C."""
    gate, up = (dualgemm.quantize(matrix(512, 1024, seed)) for seed in (1, 2))
    weights, a = Weights.from_tensors(gate=gate, up=up), matrix(4, 1024, 3)
    return weights, a, dualgemm.swiglu(a, weights)


#: The type of OpenMP's function that starts threads.
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def test_products_run_on_the_threads_of_an_openmp_runtime(shared_product):
    (weights, a, want), teams = shared_product, []

    @PARALLEL
    def parallel(function, data, threads, flags):
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        team = [threading.Thread(target=function, args=(data,)) for _ in range(threads)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        teams.append((threads, flags))

    before = dualgemm.get_num_threads()
    try:
        _dualgemm.set_num_threads(3, ctypes.cast(parallel, ctypes.c_void_p).value)
        assert dualgemm.get_num_threads() == 3
        np.testing.assert_array_equal(dualgemm.swiglu(a, weights), want)
        assert set(teams) == {(3, 0)}
    finally:
        dualgemm.set_num_threads(before)


def in_a_fork(right):
    """Whether what a forked process computes is right, and comes within a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        done = False
        try:
            done = right()
        finally:
            os._exit(0 if done else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_computes_too(weights):
    a = matrix(33, K, 3)
    want = dualgemm.swiglu(a, weights, quantize_a="dynamic")
    assert in_a_fork(lambda: np.array_equal(dualgemm.swiglu(a, weights, quantize_a="dynamic"), want))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_as_many_threads():
    dualgemm.set_num_threads(5)
    try:
        assert in_a_fork(lambda: dualgemm.get_num_threads() == 5)
    finally:
        dualgemm.set_num_threads(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_leaves_openmp_alone(shared_product):
    """GNU's runtime would wait for threads that the parent had."""
    (weights, a, want), teams = shared_product, []

    @PARALLEL
    def parallel(function, data, threads, flags):
        teams.append(threads)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)

    def product():
        for _ in range(2):
            _dualgemm.set_num_threads(3, ctypes.cast(parallel, ctypes.c_void_p).value)
            if not np.array_equal(dualgemm.swiglu(a, weights), want):
                return False
        return not teams

    assert in_a_fork(product)


def test_mxfp4_weights_close(pair):
    gate, up = (dualgemm.quantize(matrix(N, K, i), format="mxfp4") for i in (1, 2))
    assert gate.scales.dtype == ml_dtypes.float8_e8m0fnu
    w = Weights.from_tensors(gate=gate, up=up)
    assert w.format == "mxfp4"
    a = matrix(M, K, 3)
    assert rel_l2(dualgemm.swiglu(a, w), reference(a, (gate, up))) < 1e-6


def test_copies_of_weights_are_the_weights(weights):
    assert copy.copy(weights) is weights and copy.deepcopy([weights])[0] is weights


def test_a_tensor_scale_may_be_an_array_of_one_exact(pair, weights):
    gate, up = (q._replace(global_scale=np.array([q.global_scale], np.float32)) for q in pair)
    a = matrix(M, K, 3)
    np.testing.assert_array_equal(dualgemm.swiglu(a, Weights.from_tensors(gate=gate, up=up)), dualgemm.swiglu(a, weights))
