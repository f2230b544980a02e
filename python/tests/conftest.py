"""Test data and a reader of safetensors files that needs only numpy."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

DTYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def tensors(path):
    """All tensors of a file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    out = {}
    for name, t in header.items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            out[name] = np.frombuffer(body[begin:end], DTYPES[t["dtype"]]).reshape(t["shape"])
    return out


@pytest.fixture(scope="session")
def testdata():
    return pathlib.Path(__file__).parents[2] / "testdata"


@pytest.fixture(scope="session")
def layer14(testdata):
    return testdata / "smollm2-135m-layer14"


@pytest.fixture(scope="session")
def hidden(layer14):
    """What really enters the layer, rounded to bf16 as the expected outputs are made from."""
    x = tensors(layer14 / "hidden-states-f32.safetensors")["hidden_states"]
    return x.astype(ml_dtypes.bfloat16)


def rel_l2(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)
