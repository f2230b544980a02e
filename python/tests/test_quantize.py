"""Quantizing against the bytes that the producers' own code makes, and decoding against the formula."""

import ml_dtypes
import numpy as np
import pytest
from conftest import rel_l2, same_files, tensors

import dualgemm

PRODUCERS = {"modelopt": "modelopt", "compressed_tensors": "compressed-tensors", "torchao": "torchao"}


def cases():
    import pathlib

    golden = pathlib.Path(__file__).parents[2] / "testdata" / "quantize-golden"
    for file, producer in PRODUCERS.items():
        t = tensors(golden / f"{file}.safetensors")
        for name in sorted({key.split(".")[0] for key in t}):
            yield pytest.param(producer, {k.split(".")[1]: v for k, v in t.items() if k.startswith(name + ".")}, id=f"{producer}-{name}")


@pytest.mark.parametrize("producer,case", list(cases()))
def test_producers_bytes_exact(producer, case):
    q = dualgemm.quantize(case["input"], producer=producer)
    np.testing.assert_array_equal(q.codes, case["codes"])
    np.testing.assert_array_equal(q.scales.view(np.uint8), case["block_scale"].view(np.uint8))
    if "global_scale" in case:
        assert np.float32(q.global_scale) == case["global_scale"].reshape(())
    else:
        assert np.float32(q.global_scale) == np.float32(1) / case["global_scale_divisor"].reshape(())


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_a_producers_whole_model_exact(tmp_path, testdata, producer):
    """With the input scales that it calibrated; test_producers.py compares with the packages themselves."""
    golden = testdata / "producers" / "llama"
    calibration = golden / producer / "calibration.json"
    dualgemm.quantize_model(golden / "floats", tmp_path / "q", producer=producer, calibration=calibration)
    assert same_files(golden / producer, tmp_path / "q") == 33


def test_all_codes_and_scales_decode_to_the_formula_exact():
    """All 16 codes under all 127 scales, against ml_dtypes' own reading of both types."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = np.arange(127, dtype=np.uint8).reshape(127, 1)
    got = dualgemm.dequantize(dualgemm.Quantized(packed, scales, 0.5))
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    want = values * scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.5)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_types_of_the_result():
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    q = dualgemm.quantize(x)
    assert q.shape == (4, 32) and q.format == "nvfp4" and q.scale_layout == "linear"
    assert dualgemm.dequantize(q).dtype == np.float32
    assert dualgemm.dequantize(q, "bfloat16").dtype == ml_dtypes.bfloat16
    assert dualgemm.dequantize(tuple(q), np.float16).dtype == np.float16
    out = np.empty((4, 32), np.float32)
    assert dualgemm.dequantize(q, out=out) is out
    np.testing.assert_array_equal(out, dualgemm.dequantize(q))


def test_search_is_better_and_a_given_scale_is_kept():
    x = np.random.default_rng(0).standard_normal((32, 256)).astype(np.float32)
    error = {s: rel_l2(dualgemm.dequantize(dualgemm.quantize(x, search=s)), x) for s in ("plain", "mse")}
    assert error["mse"] < error["plain"] < 0.12
    assert dualgemm.quantize(x, global_scale=0.25).global_scale == 0.25


def test_k_that_is_no_whole_block_is_refused():
    for k, format in [(24, "nvfp4"), (48, "mxfp4")]:
        with pytest.raises(dualgemm.OperandError, match=f"K = {k} is not a positive multiple"):
            dualgemm.quantize(np.zeros((2, k), np.float32), format=format)
