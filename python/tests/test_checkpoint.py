"""The real checkpoint's layer, from each convention, against the outputs that were computed in f64 from its bytes."""

import pickle

import ml_dtypes
import numpy as np
import pytest
from conftest import rel_l2, tensors

import dualgemm

CHECKPOINTS = ["modelopt-nvfp4", "compressed-tensors-nvfp4", "compressed-tensors-nvfp4a16"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_five_lines_give_the_layer_close(layer14, hidden, name):
    w = dualgemm.Weights.from_checkpoint(layer14 / name, layer=0, device=None)
    c = dualgemm.swiglu(hidden.astype(np.float32), w)
    want = tensors(layer14 / f"expected-{name}.safetensors")["c_w4a16"]
    assert c.dtype == np.float32 and c.shape == (64, 1536) == (64, w.shape[0])
    assert rel_l2(c, want) < 1e-6


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantized_hidden_states_give_the_layer_close(layer14, name):
    expected = tensors(layer14 / f"expected-{name}.safetensors")
    w = dualgemm.Weights.from_checkpoint(layer14 / name)
    a = dualgemm.Quantized(expected["a_packed"], expected["a_scale"], expected["a_scale_2"].item())
    assert rel_l2(dualgemm.swiglu(a, w), expected["c_w4a4"]) < 1e-6
    half = dualgemm.swiglu(a, w, out_dtype=np.float16)
    assert half.dtype == np.float16 and rel_l2(half, expected["c_w4a4"]) < 1e-3


def test_gguf_and_modelopt_hold_the_same_weights_exact(layer14, hidden):
    a = [
        dualgemm.swiglu(hidden, dualgemm.Weights.from_checkpoint(layer14 / name))
        for name in ("modelopt-nvfp4", "mlp-nvfp4.gguf")
    ]
    assert a[0].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(a[0].view(np.uint16), a[1].view(np.uint16))


def test_weights_say_what_they_are(layer14):
    w = dualgemm.Weights.from_checkpoint(layer14 / "modelopt-nvfp4", 0)
    assert (w.shape, w.format, w.activation) == ((1536, 576), "nvfp4", "silu")
    assert w.names == ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    assert w.input_scale > 0 and w.output_scale > 0
    assert w.nbytes >= 2 * 1536 * 576 * 9 // 16
    assert "2 x [1536, 576] nvfp4" in repr(w)
    assert dualgemm.Weights.from_checkpoint(layer14 / "compressed-tensors-nvfp4a16").input_scale is None


def test_static_and_dynamic_activation_scales_close(layer14, hidden):
    w = dualgemm.Weights.from_checkpoint(layer14 / "modelopt-nvfp4")
    want = tensors(layer14 / "expected-modelopt-nvfp4.safetensors")["c_w4a16"]
    errors = {how: rel_l2(dualgemm.swiglu(hidden, w, quantize_a=how), want) for how in ("static", "dynamic")}
    # Quantizing activations to 4 bits costs about this much on real data; a wrong scale costs far more.
    assert all(0.01 < error < 0.2 for error in errors.values()), errors
    by_number = dualgemm.swiglu(hidden, w, quantize_a=w.input_scale)
    np.testing.assert_array_equal(
        by_number.view(np.uint16), dualgemm.swiglu(hidden, w, quantize_a="static").view(np.uint16)
    )


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_together_give_the_whole_exact(layer14, hidden, world):
    path = layer14 / "modelopt-nvfp4"
    whole = dualgemm.swiglu(hidden, dualgemm.Weights.from_checkpoint(path), quantize_a="static", out_dtype="float32")
    parts = []
    for rank in range(world):
        w = dualgemm.Weights.from_checkpoint(path, rank=rank, world=world)
        assert w.shape == (1536 // world, 576)
        parts.append(dualgemm.swiglu(hidden, w, quantize_a="static", out_dtype="float32"))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_a_split_block_or_a_rank_outside_is_refused(layer14):
    path = layer14 / "modelopt-nvfp4"
    with pytest.raises(dualgemm.OperandError, match=r"K = 1536 cannot be split over 5 ranks"):
        dualgemm.Weights.from_checkpoint(path, rank=0, world=5)
    with pytest.raises(dualgemm.OperandError, match="rank 2 of 2 does not exist"):
        dualgemm.Weights.from_checkpoint(path, rank=2, world=2)
    with pytest.raises(dualgemm.ArgumentError, match="rank is needed where world is 2; valid are 0 to 1"):
        dualgemm.Weights.from_checkpoint(path, world=2)


def test_arrays_in_the_place_of_quantized_matrices_are_refused():
    with pytest.raises(dualgemm.OperandError, match="gate is of type ndarray; a dualgemm.Quantized is needed"):
        dualgemm.Weights.from_tensors(gate=np.ones((16, 16)), up=np.ones((16, 16)))


def test_re_quantized_results_feed_the_down_projection_close(layer14, hidden):
    w = dualgemm.Weights.from_checkpoint(layer14 / "modelopt-nvfp4")
    c = dualgemm.swiglu(hidden, w, out_dtype="float32")
    for scale in (None, w.output_scale):
        q = dualgemm.swiglu(hidden, w, out_dtype="nvfp4", out_scale=scale)
        assert q.codes.shape == (64, 768) and q.scales.dtype == ml_dtypes.float8_e4m3fn
        assert scale is None or q.global_scale == scale
        assert rel_l2(dualgemm.dequantize(q), c) < 0.15
    swizzled = dualgemm.swiglu(hidden, w, out_dtype="nvfp4", out_scale=w.output_scale, out_scale_layout="128x4")
    np.testing.assert_array_equal(dualgemm.dequantize(swizzled), dualgemm.dequantize(q))


def test_a_name_that_no_mlp_has_is_said_to_be_that(layer14):
    with pytest.raises(dualgemm.CheckpointError, match="in no layer .no MLP has a name that begins with `nope`, as `within` asks"):
        dualgemm.Mlp.from_checkpoint(layer14 / "modelopt-nvfp4", 0, within="nope")


@pytest.mark.parametrize("opened", [False, True])
def test_pickled_weights_are_read_again_exact(layer14, hidden, opened, monkeypatch):
    monkeypatch.chdir(layer14.parent)
    path = f"{layer14.name}/modelopt-nvfp4"
    path = dualgemm.Checkpoint(path, unusable_input_scale_is_one=True) if opened else path
    made = [
        (dualgemm.swiglu, dualgemm.Weights.from_checkpoint(path, layer=0, rank=1, world=2)),
        (dualgemm.mlp, dualgemm.Mlp.from_checkpoint(path, 0)),
        (dualgemm.linear, dualgemm.Linear.from_checkpoint(path, "model.layers.0.mlp.up_proj")),
    ]
    data = pickle.dumps([w for _, w in made])
    assert len(data) < 1000
    # Somewhere else, as another process may be.
    monkeypatch.chdir("/")
    for (operation, before), after in zip(made, pickle.loads(data)):
        assert after is not before and repr(after) == repr(before) and after.shape == before.shape
        assert np.array_equal(operation(hidden, after), operation(hidden, before))
    if opened:
        again = pickle.loads(pickle.dumps(path))
        assert again.path == layer14 / "modelopt-nvfp4" and again.modules() == path.modules()
    q = dualgemm.quantize(np.ones((16, 32), np.float32))
    with pytest.raises(dualgemm.UnsupportedError, match="Linear: made of tensors.* from a checkpoint alone can be pickled"):
        pickle.dumps(dualgemm.Linear.from_tensors(q))
