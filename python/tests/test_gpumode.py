"""The GPU MODE task on the processor: its ten-tuple, reference, checker and kernel."""

import importlib.util
import pathlib

import ml_dtypes
import numpy as np
import pytest

import dualgemm
from dualgemm import gpumode

M, N, K, L = 130, 48, 320, 2


@pytest.fixture(scope="module")
def data():
    return gpumode.generate_input(M, N, K, L, seed=7, device="numpy")


def test_the_ten_tuple_has_the_tasks_shapes_and_types(data):
    rows = [M, N, N]
    assert [x.shape for x in data[:3]] == [(r, K // 2, L) for r in rows]
    assert [x.shape for x in data[3:6]] == [(r, K // 16, L) for r in rows]
    assert [x.shape for x in data[6:9]] == [(32, 4, -(-r // 128), 4, K // 64, L) for r in rows]
    assert data[9].shape == (M, N, L) and data[9].dtype == np.float16
    assert all(x.dtype == ml_dtypes.float8_e4m3fn for x in data[3:9])
    # Memory order is that of the task: entries of the batch one after the other.
    assert data[0].strides == (K // 2, 1, M * K // 2)


def test_the_same_seed_gives_the_same_bytes_exact(data):
    again = gpumode.generate_input(M, N, K, L, seed=7, device="numpy")
    for x, y in zip(data[:9], again[:9]):
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
    # Entry 1 is what seed 8 gives alone.
    alone = gpumode.generate_input(M, N, K, 1, seed=8, device="numpy")
    np.testing.assert_array_equal(data[1][:, :, 1], alone[1][:, :, 0])
    # The very bytes, as dualgemm_bench::challenge promises them.
    first = gpumode.generate_input(8, 16, 64, 1, seed=1111, device="numpy")
    assert all((np.asarray(x) & 0b0100_0100 == 0).all() for x in first[:3])
    full = gpumode.generate_input(8, 16, 64, 1, seed=1111, device="numpy", full=True)
    np.testing.assert_array_equal(full[0] & 0b1011_1011, first[0])


def test_permuted_scales_are_the_linear_ones_exact(data):
    for linear, permuted in zip(data[3:6], data[6:9]):
        linear, permuted = linear.view(np.uint8), permuted.view(np.uint8)
        r, c, b = np.indices(linear.shape)
        np.testing.assert_array_equal(permuted[r % 32, r % 128 // 32, r // 128, c % 4, c // 4, b], linear)


def test_the_kernel_passes_the_checker(data):
    c = gpumode.custom_kernel(data)
    assert c is data[9]
    assert gpumode.check_implementation(data, c) == (True, "")


def test_the_reference_is_the_formula_exact():
    data = gpumode.generate_input(4, 8, 64, 1, seed=3, device="numpy", full=True)

    def decode(codes, scales):
        packed = np.ascontiguousarray(codes[:, :, 0])
        both = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        values = both.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        return values * np.repeat(scales[:, :, 0].astype(np.float64), 16, axis=1)

    a, b1, b2 = (decode(data[i], data[i + 3]) for i in range(3))
    gate, up = a @ b1.T, a @ b2.T
    want = (gate / (1 + np.exp(-gate)) * up).astype(np.float16)
    np.testing.assert_array_equal(gpumode.reference(data)[:, :, 0], want)


def test_the_checker_refuses_what_is_wrong(data):
    right = gpumode.reference(data)
    assert gpumode.check_implementation(data, right)[0]
    off = right.copy()
    off[3, 5, 1] = np.float16(float(off[3, 5, 1]) * 1.01 + 0.01)
    ok, message = gpumode.check_implementation(data, off)
    assert not ok and "1 elements differ" in message and "C[3, 5, 1]" in message
    nan = right.copy()
    nan[0, 0, 0] = np.nan
    assert not gpumode.check_implementation(data, nan)[0]
    assert "is needed" in gpumode.check_implementation(data, right[:, :, 0])[1]
    shuffled = list(data)
    shuffled[3] = data[3][::-1]
    assert not gpumode.check_implementation(tuple(shuffled), right)[0]


@pytest.fixture
def harness():
    path = pathlib.Path(__file__).parents[2] / "benchmarks/gpumode_harness.py"
    spec = importlib.util.spec_from_file_location("gpumode_harness", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_harness_reads_the_lists_of_a_task(harness):
    task = 'files:\n  - {"name": "a.py", "source": "../b.py"}\n\nlang: "py"\n\ntests:\n  - {"m": 1}\n  - {"m": 2}\n  \nranking_by: "geom"\n'
    assert harness.listed(task, "files") == [{"name": "a.py", "source": "../b.py"}]
    assert harness.listed(task, "tests") == [{"m": 1}, {"m": 2}]


def test_the_harnesss_product_is_that_of_the_decoded_operands_exact(harness):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    # Every code, every row and column of two tiles of scales.
    m, n, k = 130, 24, 128
    data = gpumode.generate_input(m, n, k, 1, seed=5, device="cpu", full=True)

    def blocked(scales):
        padded = np.zeros((-(-scales.shape[0] // 128) * 128, scales.shape[1]), np.uint8)
        padded[: scales.shape[0]] = scales[:, :, 0].view(torch.uint8).numpy()
        order = padded.reshape(-1, 4, 32, scales.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4)
        return torch.from_numpy(np.ascontiguousarray(order)).view(torch.float8_e4m3fn).flatten()

    a, b = (data[i][:, :, 0] for i in (0, 1))
    got = harness.scaled_mm(a, b.transpose(0, 1), blocked(data[3]), blocked(data[4]), out_dtype=torch.float32)
    floats = [dualgemm.dequantize(dualgemm.Quantized(q, s[:, :, 0])).double() for q, s in ((a, data[3]), (b, data[4]))]
    assert torch.equal(got, (floats[0] @ floats[1].T).float())


def test_shapes_without_a_task():
    for wrong, message in [({"l": 0}, "l is 0"), ({"m": 2**40, "n": 2**40, "k": 2**20}, "do not fit the memory")]:
        with pytest.raises(dualgemm.OperandError, match=message):
            gpumode.generate_input(**{"m": 4, "n": 4, "k": 16, "device": "numpy", **wrong})
