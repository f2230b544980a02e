"""Linear layers, whole MLPs and mixtures of experts against the formula on dequantized weights, in f64."""

import json
import pickle
import shutil
import struct
import threading

import ml_dtypes
import numpy as np
import pytest
from conftest import rel_l2, tensors

import dualgemm

RNG = np.random.default_rng(7)


def matrix(rows, k, scale=0.2):
    return dualgemm.quantize((RNG.standard_normal((rows, k)) * scale).astype(np.float32))


def wide(q):
    return dualgemm.dequantize(q).astype(np.float64)


def silu(x):
    return x / (1 + np.exp(-x))


def mlp_of(n, k, h, biases=False):
    t = {"gate": matrix(n, k), "up": matrix(n, k), "down": matrix(h, n)}
    if biases:
        t |= {f"{name}_bias": RNG.standard_normal(size).astype(np.float32) for name, size in (("gate", n), ("up", n), ("down", h))}
    return t


def reference(a, t):
    """In f64."""
    bias = {name: t.get(f"{name}_bias", 0.0) for name in ("gate", "up", "down")}
    gate, up = (a @ wide(t[name]).T + bias[name] for name in ("gate", "up"))
    return (silu(gate) * up) @ wide(t["down"]).T + bias["down"]


@pytest.fixture(scope="module")
def path(layer14):
    return layer14 / "modelopt-nvfp4"


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_linear_layer_is_the_product_plus_its_bias_close(rows):
    q, bias = matrix(80, 96), RNG.standard_normal(80).astype(np.float32)
    a = RNG.standard_normal((rows, 96)).astype(np.float32)
    for w, want in (
        (dualgemm.Linear.from_tensors(q), a @ wide(q).T),
        (dualgemm.Linear.from_tensors(q, bias=bias), a @ wide(q).T + bias),
    ):
        c = dualgemm.linear(a, w)
        assert c.dtype == np.float32 and c.shape == (rows, 80) == (rows, w.shape[0])
        assert rel_l2(c, want) < 1e-6
        out = np.empty((rows, 80), np.float16)
        assert dualgemm.linear(a, w, out) is out and rel_l2(out, want) < 1e-3
    assert w.has_bias and w.name == "weight" and "[80, 96] nvfp4" in repr(w)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_weights_in_floats_are_multiplied_where_they_lie_close(rows, dtype):
    # Rows of a larger array, with NaN beside them.
    whole = np.full((80, 99), np.nan, dtype)
    whole[:, :97] = RNG.standard_normal((80, 97))
    a, w, bias = RNG.standard_normal((2, rows, 97)).astype(dtype), whole[:, :97], RNG.standard_normal(80).astype(np.float32)
    want = a.astype(np.float64) @ w.astype(np.float64).T + bias
    c = dualgemm.linear(a, w, bias=bias, out_dtype="float32")
    assert c.shape == (2, rows, 80) and c.dtype == np.float32
    assert rows == 0 or rel_l2(c, want) < 1e-6
    assert dualgemm.linear(a, w, bias=bias).dtype == dtype
    # The array is read at each call.
    whole[:, :97] = 0
    assert (dualgemm.linear(a, w, bias=bias, out_dtype="float32") == bias).all()


def test_weights_in_floats_that_do_not_fit_are_named():
    a, w = np.ones((2, 32), np.float32), np.ones((5, 32), np.float32)
    for call, message in (
        (lambda: dualgemm.linear(a, w[:, :31]), r"a: shape \[2, 32\]; the weights need \[..., 31\]"),
        (lambda: dualgemm.linear(a, w, bias=a[0, :4]), r"bias: has 4 values; w is \[5, 32\]"),
        (lambda: dualgemm.linear(a[:0], w, bias=a[0, :4]), r"bias: has 4 values; w is \[5, 32\]"),
        (lambda: dualgemm.linear(a, w, quantize_a="dynamic"), "quantize_a is for weights in 4 bits"),
        (lambda: dualgemm.linear(a, w.astype(np.int8)), "w: is .*int8; float32, float16 or bfloat16 is needed"),
        (lambda: dualgemm.linear(a, w, w.reshape(-1)[:10].reshape(2, 5)), "out: shares memory with w"),
        (lambda: dualgemm.linear(a, dualgemm.Linear.from_tensors(matrix(16, 32)), bias=a[0]), "bias is for an array of floats"),
    ):
        with pytest.raises((dualgemm.OperandError, dualgemm.UnsupportedError), match=message):
            call()
    with pytest.raises(TypeError, match="a dualgemm.Linear or an array of floats is needed"):
        dualgemm.linear(a, "w")


def test_modules_of_a_checkpoint_are_their_dequantized_weights_close(path, hidden):
    t = tensors(path / "model.safetensors")
    for module in ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"):
        w = dualgemm.Linear.from_checkpoint(path, module)
        q = dualgemm.Quantized(
            t[f"{module}.weight"], t[f"{module}.weight_scale"], float(t[f"{module}.weight_scale_2"])
        )
        a = RNG.standard_normal((5, w.shape[1])).astype(np.float32)
        assert w.name == f"{module}.weight" and w.input_scale > 0
        assert rel_l2(dualgemm.linear(a, w), a @ wide(q).T) < 1e-6


def test_an_mlp_of_a_checkpoint_is_its_three_products_close(path, hidden):
    checkpoint = dualgemm.Checkpoint(path)
    gate_up = dualgemm.Weights.from_checkpoint(checkpoint, 0)
    down = dualgemm.Linear.from_checkpoint(checkpoint, "model.layers.0.mlp.down_proj")
    w = dualgemm.Mlp.from_checkpoint(checkpoint, 0)
    assert w.shape == (576, 576) and w.hidden == 1536 and w.activation == "silu"
    assert w.input_scales == (gate_up.input_scale, down.input_scale)
    x = hidden.astype(np.float32)
    want = dualgemm.linear(dualgemm.swiglu(x, gate_up), down)
    np.testing.assert_array_equal(dualgemm.mlp(x, w), want)
    # What is between the products has the type of A.
    want = dualgemm.linear(dualgemm.swiglu(hidden, gate_up), down)
    np.testing.assert_array_equal(dualgemm.mlp(hidden, w).view(np.uint16), want.view(np.uint16))
    static = dualgemm.mlp(x, w, quantize_a="static", quantize_hidden="static")
    assert 0.01 < rel_l2(static, dualgemm.mlp(x, w)) < 0.3
    q = dualgemm.swiglu(x, gate_up, quantize_a="static", out_dtype="nvfp4", out_scale=gate_up.output_scale)
    np.testing.assert_array_equal(static, dualgemm.linear(q, down))


def test_what_an_mlp_has_beyond_its_matrices_is_refused(path, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    file = copy / "model.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, tensors = json.loads(data[8 : 8 + size]), data[8 + size :]
    norm = {"dtype": "F32", "shape": [1536], "data_offsets": [len(tensors), len(tensors) + 6144]}
    header["model.layers.0.mlp.ffn_sub_norm.weight"] = norm
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + tensors + bytes(6144))
    with pytest.raises(dualgemm.UnsupportedError, match="ffn_sub_norm"):
        dualgemm.Mlp.from_checkpoint(copy)
    # Gate and up alone are what they are.
    dualgemm.Weights.from_checkpoint(copy, 0)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_an_mlp_add_up_close(path, hidden, world):
    whole = dualgemm.mlp(hidden.astype(np.float32), dualgemm.Mlp.from_checkpoint(path))
    parts = [dualgemm.Mlp.from_checkpoint(path, rank=rank, world=world) for rank in range(world)]
    assert parts[0].hidden == 1536 // world
    assert rel_l2(sum(dualgemm.mlp(hidden.astype(np.float32), w) for w in parts), whole) < 1e-6


def test_parts_of_a_linear_layer_are_features_out_or_terms_of_the_sum(path, hidden):
    x, name = hidden.astype(np.float32), "model.layers.0.self_attn.k_proj"
    part = lambda split, rank: dualgemm.Linear.from_checkpoint(path, name, split=split, rank=rank, world=4)
    whole = dualgemm.linear(x, dualgemm.Linear.from_checkpoint(path, name))
    out = [dualgemm.linear(x, part("out", rank)) for rank in range(4)]
    assert np.array_equal(np.concatenate(out, 1), whole)
    into = [dualgemm.linear(x[:, 144 * rank : 144 * (rank + 1)], part("in", rank)) for rank in range(4)]
    assert rel_l2(sum(into), whole) < 1e-6
    again = pickle.loads(pickle.dumps(part("in", 3)))
    assert np.array_equal(dualgemm.linear(x[:, 432:], again), into[3])


def test_an_mlp_of_tensors_with_biases_and_another_width_out_close():
    t = mlp_of(48, 64, 80, biases=True)
    w = dualgemm.Mlp.from_tensors(**t)
    a = RNG.standard_normal((2, 3, 64)).astype(np.float32)
    y = dualgemm.mlp(a, w)
    assert y.shape == (2, 3, 80) and w.shape == (80, 64)
    assert rel_l2(y, reference(a.reshape(6, 64).astype(np.float64), t).reshape(2, 3, 80)) < 1e-6


def test_a_mixture_is_the_weighted_sum_of_its_experts_close():
    tables = [mlp_of(32, 64, 48) for _ in range(4)]
    a = RNG.standard_normal((7, 64)).astype(np.float32)
    ids = RNG.integers(-1, 4, (7, 2))
    weights = RNG.random((7, 2)).astype(np.float32)

    def want(here):
        y = np.zeros((7, 48))
        for t in range(7):
            for j in range(2):
                if ids[t, j] in here:
                    y[t] += weights[t, j] * reference(a[t : t + 1].astype(np.float64), tables[ids[t, j]])[0]
        return y

    w = dualgemm.Experts.from_tensors(tables)
    some = dualgemm.Experts.from_tensors([None, *tables[1:3], None])
    assert w.shape == (48, 64) and (some.count, some.here) == (4, [1, 2]) and "2 of 4" in repr(some)
    for kind in (np.int32, np.int64):
        assert rel_l2(dualgemm.experts(a, ids.astype(kind), weights, w), want(range(4))) < 1e-6
    part = dualgemm.experts(a, ids, weights, some)
    assert rel_l2(part, want([1, 2])) < 1e-6
    # The others' part is added to it.
    others = dualgemm.Experts.from_tensors([tables[0], None, None, tables[3]])
    assert dualgemm.experts(a, ids, weights, others, out=part, add=True) is part
    assert rel_l2(part, want(range(4))) < 1e-6
    before = dualgemm.Experts.from_tensors(tables, router_weights="input")
    scaled = dualgemm.experts(a, np.zeros((7, 1), np.int64), np.full((7, 1), 0.5, np.float32), before)
    assert rel_l2(scaled, reference(a.astype(np.float64) * 0.5, tables[0])) < 1e-6


def test_experts_of_a_checkpoint_all_and_some_exact(testdata):
    path = testdata / "producers" / "mlx-nvfp4-experts"
    w = dualgemm.Experts.from_checkpoint(path, 0)
    x = RNG.standard_normal((4, w.shape[1])).astype(np.float32)
    ones = np.ones((4, 1), np.float32)
    assert w.count == 2 == len(w.here)
    for expert in range(2):
        alone = dualgemm.Experts.from_checkpoint(path, 0, experts=[expert])
        assert alone.here == [expert]
        ids = np.full((4, 1), expert)
        y = dualgemm.experts(x, ids, ones, w)
        np.testing.assert_array_equal(y, dualgemm.experts(x, ids, ones, alone))
        one = dualgemm.Mlp.from_checkpoint(path, 0, expert=expert)
        np.testing.assert_array_equal(y, dualgemm.mlp(x, one))
    with pytest.raises(dualgemm.CheckpointError, match="expert 2"):
        dualgemm.Experts.from_checkpoint(path, 0, count=3)
    with pytest.raises(dualgemm.ArgumentError, match="experts is -1; a number from 0 is needed"):
        dualgemm.Experts.from_checkpoint(path, 0, experts=[-1])


def test_routing_that_is_wrong_is_refused():
    w = dualgemm.Experts.from_tensors([mlp_of(32, 64, 48)])
    a, ids, ones = np.ones((2, 64), np.float32), np.zeros((2, 1), np.int64), np.ones((2, 1), np.float32)
    for i, r, why in [
        (ids + 1, ones, r"topk_ids\[0, 0\].* 1"),
        (ids + (1 << 32), ones, r"topk_ids: 4294967296 is no number of an expert"),
        (ids, ones * np.nan, r"topk_weights\[0, 0\].*NaN"),
        (ids[:1], ones, r"topk_ids: shape \[1, 1\]; \[2, experts per token\]"),
        (ids, ones[:1], r"topk_weights: shape \[1, 1\]; \[2, 1\]"),
        (ones, ones, r"topk_ids: is float32; int32 or int64"),
        (ids.astype(np.int16), ones, r"topk_ids: its type is int16; int32 or int64 is needed"),
        (ids, ids, r"topk_weights: is int64; float32"),
    ]:
        with pytest.raises(dualgemm.OperandError, match=why):
            dualgemm.experts(a, i, r, w)
    with pytest.raises(dualgemm.OperandError, match="add needs out"):
        dualgemm.experts(a, ids, ones, w, add=True)


def test_routing_that_is_wrong_for_a_checkpoints_experts_names_the_layer(testdata):
    w, a = dualgemm.Experts.from_checkpoint(testdata / "producers" / "mlx-nvfp4-experts"), np.ones((1, 32), np.float32)
    for expert, weight, why in [
        (2, 1, r"topk_ids\[0, 0\] is 2; .* numbers below 2, or -1 for none"),
        (1 << 32, 1, "topk_ids: 4294967296 is no number of an expert"),
        (1, np.nan, r"topk_weights\[0, 0\] is NaN; .* finite numbers"),
    ]:
        with pytest.raises(dualgemm.OperandError, match=rf"^model\.layers\.0\.mlp\.switch_mlp: {why}"):
            dualgemm.experts(a, np.array([[expert]]), np.array([[weight]], np.float32), w)


def test_weights_that_do_not_belong_together_are_refused(path):
    good = mlp_of(32, 64, 48)
    with pytest.raises(dualgemm.OperandError, match=r"down is \[48, 64\].* K = 32, the features of gate"):
        dualgemm.Mlp.from_tensors(**{**good, "down": matrix(48, 64)})
    with pytest.raises(TypeError, match="down is missing; a dualgemm.Quantized is needed"):
        dualgemm.Mlp.from_tensors(gate=good["gate"], up=good["up"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'dwon'"):
        dualgemm.Mlp.from_tensors(**good, dwon=good["down"])
    with pytest.raises(dualgemm.OperandError, match=r"expert 1: gate is nvfp4 \[16, 64\].*as of expert 0: gate"):
        dualgemm.Experts.from_tensors([good, mlp_of(16, 64, 48)])
    nan = good["down"]._replace(scales=np.full_like(good["down"].scales.view(np.uint8), 0x7F))
    with pytest.raises(dualgemm.OperandError, match="expert 0: down"):
        dualgemm.Experts.from_tensors([{**good, "down": nan}])
    with pytest.raises(dualgemm.CheckpointError, match="model.norm"):
        dualgemm.Linear.from_checkpoint(path, "model.norm")
    with pytest.raises(dualgemm.ArgumentError, match='split is missing; of 2 ranks it says "out" or "in"'):
        dualgemm.Linear.from_checkpoint(path, "model.layers.0.mlp.down_proj", rank=0, world=2)
    with pytest.raises(dualgemm.ArgumentError, match='split is `rows`; of 1 ranks it says "out" or "in"'):
        dualgemm.Linear.from_checkpoint(path, "model.layers.0.mlp.down_proj", split="rows")
    for wrong, call in (("Linear or an array of floats", dualgemm.linear), ("Mlp", dualgemm.mlp)):
        with pytest.raises(TypeError, match=f"w is a Weights; a dualgemm.{wrong} is needed"):
            call(np.ones((1, 576), np.float32), dualgemm.Weights.from_checkpoint(path))


def test_no_rows_are_no_work_and_wrong_shapes_are_wrong():
    w = dualgemm.Mlp.from_tensors(**mlp_of(32, 64, 48))
    assert dualgemm.mlp(np.ones((0, 64), np.float32), w).shape == (0, 48)
    with pytest.raises(dualgemm.OperandError, match="no input scale; quantize_hidden="):
        dualgemm.mlp(np.ones((0, 64), np.float32), w, quantize_hidden="static")
    with pytest.raises(dualgemm.OperandError, match=r"^a: shape \[2, 32\]; the weights need \[\.\.\., 64\]$"):
        dualgemm.mlp(np.ones((2, 32), np.float32), w)
    with pytest.raises(dualgemm.OperandError, match="out is a tuple; an array of floats is needed"):
        dualgemm.mlp(np.ones((2, 64), np.float32), w, (1, 2))


def test_a_checkpoint_is_opened_once_and_says_what_it_has(path):
    checkpoint = dualgemm.Checkpoint(path)
    assert checkpoint.convention == "modelopt" and "7 modules in 4 bits" in repr(checkpoint)
    assert checkpoint.mlps() == [(0, "dense", "model.layers.0.mlp")]
    assert "model.layers.0.self_attn.q_proj" in checkpoint.modules()
    with pytest.raises(dualgemm.ArgumentError, match="convention says how to read a file"):
        dualgemm.Weights.from_checkpoint(checkpoint, convention="modelopt")
    with pytest.raises(TypeError, match="unexpected keyword"):
        dualgemm.Checkpoint(path, conventoin="modelopt")


def test_threads_share_weights_and_runners_exact(path, hidden):
    w = dualgemm.Mlp.from_checkpoint(path)
    want = [dualgemm.mlp(hidden[:m], w).view(np.uint16) for m in range(1, 9)]
    wrong = []

    def call(m):
        for _ in range(20):
            if not np.array_equal(dualgemm.mlp(hidden[:m], w).view(np.uint16), want[m - 1]):
                wrong.append(m)

    threads = [threading.Thread(target=call, args=(m,)) for m in range(1, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_kernels_of_a_card_give_the_same_simulated_close():
    t = mlp_of(64, 64, 64)
    a = RNG.standard_normal((4, 64)).astype(np.float16)
    layer = [dualgemm.Linear.from_tensors(t["down"], device=device) for device in ("cpu", "sim:sm_90a")]
    assert layer[1].device == "sim:sm_90a"
    assert rel_l2(dualgemm.linear(a, layer[1]), dualgemm.linear(a, layer[0])) < 2e-3
    mlp = [dualgemm.Mlp.from_tensors(**t, device=device) for device in ("cpu", "sim:sm_90a")]
    assert rel_l2(dualgemm.mlp(a, mlp[1]), dualgemm.mlp(a, mlp[0])) < 2e-3


def test_bf16_arrays_in_and_out_close():
    q = matrix(32, 64)
    a = RNG.standard_normal((4, 64)).astype(ml_dtypes.bfloat16)
    c = dualgemm.linear(a, dualgemm.Linear.from_tensors(q))
    assert c.dtype == ml_dtypes.bfloat16
    assert rel_l2(c.astype(np.float64), a.astype(np.float64) @ wide(q).T) < 5e-3
