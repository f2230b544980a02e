"""Test data and a reader of safetensors files that needs only numpy."""

import json
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest

if not os.path.exists("/dev/nvidiactl"):
    # Triton asks when it is imported, which torch and transformers do before test_peers; on a card torch.compile needs it as it is.
    os.environ.setdefault("TRITON_INTERPRET", "1")

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


#: Values of the sixteen codes.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2, np.float32) * np.repeat([1, -1], 8).astype(np.float32)


def dequantized(path):
    """The tensors of a checkpoint of ModelOpt or compressed-tensors in f32, by the names of the float model."""
    t, out = tensors(path), {}
    for name, x in t.items():
        module = name.removesuffix(".weight_packed").removesuffix(".weight")
        if x.dtype == np.uint8:
            divisor = t.get(f"{module}.weight_global_scale")
            scale = t[f"{module}.weight_scale_2"] if divisor is None else 1 / divisor.astype(np.float32)
            codes = np.stack([x & 15, x >> 4], -1).reshape(x.shape[0], -1)
            blocks = t[f"{module}.weight_scale"].astype(np.float32) * np.float32(np.ravel(scale)[0])
            out[f"{module}.weight"] = E2M1[codes] * np.repeat(blocks, 16, 1)
        elif "_scale" not in name:
            out[name] = x.astype(np.float32)
    return out


def said_by_both(ours, theirs):
    """Whether all that ours says theirs says, too: llm-compressor adds the names of its observers and what is null."""
    if isinstance(ours, dict):
        return all(key in theirs and said_by_both(value, theirs[key]) for key, value in ours.items())
    return ours == theirs


def configs(path):
    """What the files say of the quantization, but for who wrote them."""
    found = [json.loads((path / "config.json").read_text())["quantization_config"]]
    if (path / "hf_quant_config.json").exists():
        found.append(json.loads((path / "hf_quant_config.json").read_text()))
    for config in found:
        config.pop("producer", None)
    return found


def same_files(theirs, ours):
    """How many tensors there are: each is the same bit by bit, and so is the configuration."""
    want, got = (tensors(path / "model.safetensors") for path in (theirs, ours))
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape), name
        assert got[name].tobytes() == x.tobytes(), name
    want, got = configs(theirs), configs(ours)
    assert len(got) == len(want) and all(map(said_by_both, got, want))
    return len(tensors(ours / "model.safetensors"))


def rel_l2(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.fixture
def registered():
    """transformers knows dualgemm's layers until the test ends."""
    from transformers.quantizers import auto

    from dualgemm import hf

    mappings = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    before = [dict(mapping) for mapping in mappings]
    hf.register()
    yield
    for mapping, old in zip(mappings, before):
        mapping.clear()
        mapping.update(old)
