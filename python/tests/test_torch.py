"""Torch tensors, the operator, the module and the patching of a model. Skipped, visibly, where torch is missing."""

import copy
import warnings

import numpy as np
import pytest
from conftest import rel_l2, tensors

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
nn = pytest.importorskip("dualgemm.nn")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from dualgemm import _torch, gpumode  # noqa: E402


@pytest.fixture(scope="module")
def path(layer14):
    return layer14 / "modelopt-nvfp4"


@pytest.fixture(scope="module")
def weights(path):
    return dualgemm.Weights.from_checkpoint(path)


@pytest.fixture(scope="module")
def x(hidden):
    return torch.from_numpy(hidden.astype(np.float32)).bfloat16()


def bits(t):
    return t.view(torch.int16).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tensors_equal_arrays_exact(weights, x, dtype, layer14):
    a = x.to(dtype)
    c = dualgemm.swiglu(a, weights)
    assert c.dtype == dtype and c.shape == (64, 1536)
    wide = torch.zeros(64, 600, dtype=dtype)
    wide[:, 8:584] = a
    for view in (wide[:, 8:584], a.t().contiguous().t()):
        assert torch.equal(dualgemm.swiglu(view, weights), c)
    assert torch.equal(dualgemm.swiglu(a.reshape(4, 16, 576), weights).reshape(64, 1536), c)
    out = torch.empty(4, 16, 1536, dtype=dtype)
    assert dualgemm.swiglu(a.reshape(4, 16, 576), weights, out=out) is out
    assert torch.equal(out.reshape(64, 1536), c)
    want = tensors(layer14 / "expected-modelopt-nvfp4.safetensors")["c_w4a16"]
    assert rel_l2(c.float().numpy(), want) < 5e-3


def test_quantized_tensors_of_torchs_own_types_exact(weights, x):
    q = dualgemm.quantize(x)
    assert q.scales.dtype == torch.float8_e4m3fn
    c = dualgemm.swiglu(q, weights)
    assert c.dtype == torch.float32
    packed = q._replace(codes=q.codes.view(torch.float4_e2m1fn_x2))
    assert torch.equal(dualgemm.swiglu(packed, weights), c)
    assert rel_l2(dualgemm.dequantize(packed, torch.float32), x.float()) < 0.12
    from_numpy = dualgemm.swiglu(q._replace(codes=q.codes.numpy(), scales=q.scales.view(torch.uint8).numpy()), weights)
    np.testing.assert_array_equal(c.numpy(), from_numpy)
    again = dualgemm.swiglu(x, weights, out_dtype="nvfp4")
    assert again.codes.dtype == torch.uint8 and again.scales.dtype == torch.float8_e4m3fn


def test_devices_without_memory_are_refused(weights):
    with pytest.raises(dualgemm.UnsupportedError, match="device meta"):
        dualgemm.swiglu(torch.empty(2, 576, device="meta"), weights)


def test_the_operators_pass_torchs_own_checks(weights, path, x):
    operators, head = torch.ops.dualgemm, (1536, torch.bfloat16)
    args = (x[:4], _torch.handle(weights), *head, "static", "", False)
    torch.library.opcheck(operators.swiglu, args)
    assert torch.equal(operators.swiglu(*args), dualgemm.swiglu(x[:4], weights, quantize_a="static"))
    head = (576, torch.bfloat16)
    layer = dualgemm.Linear.from_checkpoint(path, "model.layers.0.self_attn.q_proj")
    args = (x[:4], _torch.handle(layer), *head, "static")
    torch.library.opcheck(operators.linear, args)
    assert torch.equal(operators.linear(*args), dualgemm.linear(x[:4], layer, quantize_a="static"))
    mlp = dualgemm.Mlp.from_checkpoint(path)
    args = (x[:4], _torch.handle(mlp), *head, "", "dynamic")
    torch.library.opcheck(operators.mlp, args)
    assert torch.equal(operators.mlp(*args), dualgemm.mlp(x[:4], mlp, quantize_hidden="dynamic"))
    three = [dualgemm.quantize(torch.randn(n, k)) for n, k in ((32, 576), (32, 576), (576, 32))]
    experts = dualgemm.Experts.from_tensors([dict(zip(("gate", "up", "down"), three)), None])
    ids, shares = torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    args = (x[:4], _torch.handle(experts), *head, ids, shares, "", "")
    torch.library.opcheck(operators.experts, args)
    assert torch.equal(operators.experts(*args), dualgemm.experts(x[:4], ids, shares, experts))
    a = x[:2].clone().requires_grad_()
    with pytest.raises(dualgemm.UnsupportedError, match="dualgemm.mlp has no derivative"):
        dualgemm.mlp(a, mlp).float().sum().backward()
    with pytest.raises(dualgemm.OperandError, match="out, stream and nvfp4 results are not available"):
        dualgemm.linear(a, layer, torch.empty(2, 576))


def test_a_gradient_is_refused_where_it_is_asked_for(weights, x):
    a = x[:2].clone().requires_grad_()
    c = dualgemm.swiglu(a, weights)
    with pytest.raises(dualgemm.UnsupportedError, match="has no derivative"):
        c.float().sum().backward()
    # Torch lets forward derivatives of operators be zero.
    with pytest.raises(dualgemm.UnsupportedError, match="a: has a tangent"):
        torch.func.jvp(lambda a: dualgemm.swiglu(a, weights), (x[:2],), (x[:2],))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[:2], x[:2])
        args = (_torch.handle(weights), 1536, torch.bfloat16, "", "", False)
        with pytest.raises(dualgemm.UnsupportedError, match="a: has a tangent"):
            torch.ops.dualgemm.swiglu(dual, *args)
        assert torch.equal(dualgemm.swiglu(x[:2], weights), c)


def test_outputs_are_written_as_torchs_own_operators_write(weights, x):
    out = torch.zeros(2, 1536)
    leaf = torch.ones(2, 1536, requires_grad=True)
    kept = leaf * out
    dualgemm.swiglu(x[:2].float(), weights, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    with pytest.raises(dualgemm.OperandError, match="out: requires a gradient"):
        dualgemm.swiglu(x[:2].float(), weights, out=leaf)
    # Where nothing is differentiated, there is nothing to refuse.
    with torch.no_grad():
        a = x[:2].float().requires_grad_()
        assert torch.equal(dualgemm.swiglu(a, weights, out=leaf), out)


def test_the_module_compiles_in_one_graph_exact(path, x):
    module = nn.NVFP4GatedMLP.from_checkpoint(path, 0)
    want = module(x)
    assert want.shape == (64, 576) and want.dtype == torch.bfloat16
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), want)
        # Another number of rows: the fake implementation gives the shapes.
        assert torch.equal(compiled(x[:7]), module(x[:7]))


def test_a_module_names_the_shape_that_its_weights_need(path, x):
    mlp = nn.NVFP4GatedMLP.from_checkpoint(path)
    for call in (mlp, torch.compile(mlp, fullgraph=True, backend="aot_eager")):
        with pytest.raises(dualgemm.OperandError, match=r"a: shape \[2, 3, 100\]; the weights need \[\.\.\., 576\]"):
            call(torch.ones(2, 3, 100).bfloat16())


def test_the_function_compiles_in_one_graph_exact(path, x):
    whole = dualgemm.Weights.from_checkpoint(path)
    halves = [dualgemm.Weights.from_checkpoint(path, rank=rank, world=2) for rank in (0, 1)]
    for options in ({}, {"quantize_a": "static"}, {"out_dtype": torch.float32, "activation": "relu2"}):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda a, w, options=options: dualgemm.swiglu(a, w, **options), fullgraph=True, backend="aot_eager"
        )
        for w in (whole, *halves):
            for rows in (8, 3):
                assert torch.equal(compiled(x[:rows], w), dualgemm.swiglu(x[:rows], w, **options))


def test_graphs_know_weights_that_are_gone_from_new_ones(path, x):
    w = dualgemm.Weights.from_checkpoint(path)
    graph = make_fx(lambda a: dualgemm.swiglu(a, w))(x[:2])
    assert torch.equal(graph(-x[:2]), dualgemm.swiglu(-x[:2], w))
    del w
    # Many, so that one takes the place in memory.
    others = [dualgemm.Weights.from_checkpoint(path) for _ in range(4)]
    assert len({_torch.handle(other) for other in others}) == 4
    with pytest.raises(dualgemm.OperandError, match="is that of none that live"):
        graph(x[:2])


def test_whoever_follows_tensors_sees_the_operator(weights, x):
    with FakeTensorMode():
        c = dualgemm.swiglu(torch.empty(3, 576, dtype=torch.float16), weights)
        assert c.shape == (3, 1536) and c.dtype == torch.float16

    def product(a):
        return dualgemm.swiglu(a, weights)

    with warnings.catch_warnings():
        # torch.jit is deprecated.
        warnings.simplefilter("ignore")
        for traced in (make_fx(product)(x[:2]), torch.jit.trace(product, x[:2])):
            assert torch.equal(traced(-x[:2]), product(-x[:2]))


def test_copies_share_the_weights_exact(path, x):
    module = nn.NVFP4GatedMLP.from_checkpoint(path, 0)
    copied = copy.deepcopy(module)
    assert copied is not module and copied.weights is module.weights
    assert torch.equal(copied(x), module(x))
    assert "2 x [1536, 576] nvfp4, silu, [576, 1536] nvfp4" in repr(module)


class Mlp(torch.nn.Module):
    """As in transformers' models."""

    def __init__(self):
        super().__init__()
        self.gate_proj = torch.nn.Linear(576, 1536, bias=False)
        self.up_proj = torch.nn.Linear(576, 1536, bias=False)
        self.down_proj = torch.nn.Linear(1536, 576, bias=False)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def model():
    layer = torch.nn.Module()
    layer.mlp = Mlp()
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([layer])
    return model.bfloat16()


@pytest.mark.parametrize("down", ["keep", "checkpoint"])
def test_a_models_mlps_are_replaced_close(layer14, path, x, down):
    names = ("gate_proj", "up_proj", "down_proj")
    real = tensors(layer14 / "mlp-bf16.safetensors")
    m = model()
    for name in names:
        (key,) = [k for k in real if name in k]
        value = torch.from_numpy(real[key].astype(np.float32))
        getattr(m.layers[0].mlp, name).weight.data = value.bfloat16()
    with torch.no_grad():
        before = m.layers[0].mlp(x)
        assert nn.patch_mlp(m, path, down=down) == ["layers.0.mlp"]
        after = m.layers[0].mlp(x)
    assert isinstance(m.layers[0].mlp, nn.NVFP4GatedMLP)
    with pytest.raises(dualgemm.OperandError, match="layers.0.mlp: is a NVFP4GatedMLP; the model is already patched"):
        nn.patch_mlp(m, path)
    # Four bits cost this much; a wrong scale or order costs far more.
    assert 0.01 < rel_l2(after.float(), before.float()) < 0.25


def test_a_vision_tower_keeps_its_mlps(path):
    """Of the same number, and of the same shape: its name is not in the checkpoint."""
    m = model()
    m.visual = torch.nn.Module()
    m.visual.layers = torch.nn.ModuleList([copy.deepcopy(m.layers[0])])
    assert nn.patch_mlp(m, path) == ["layers.0.mlp"]
    del m.layers
    with pytest.raises(dualgemm.OperandError, match="Module: no gated MLP of it, such as visual.layers.0.mlp, is in 4 bits in"):
        nn.patch_mlp(m, path)


def test_a_patched_model_is_not_saved_without_its_weights(path):
    m = model()
    nn.patch_mlp(m, path)
    with pytest.raises(dualgemm.UnsupportedError, match=r"layers.0.mlp: .*gate_proj.* cannot be saved; .* patch_mlp again"):
        m.state_dict()


def test_a_model_that_does_not_fit_is_left_as_it_was(path):
    with pytest.raises(dualgemm.OperandError, match="no module has gate_proj"):
        nn.patch_mlp(torch.nn.Linear(2, 2), path)
    m = model()
    m.layers[0].mlp.down_proj = torch.nn.Linear(64, 576)
    old = m.layers[0].mlp
    with pytest.raises(dualgemm.OperandError, match=r"down_proj: is \[576, 64\]"):
        nn.patch_mlp(m, path)
    assert m.layers[0].mlp is old


def test_the_task_on_torch_tensors():
    data = gpumode.generate_input(64, 32, 128, 2, device="cpu")
    assert data[0].dtype == torch.float4_e2m1fn_x2 and data[3].dtype == torch.float8_e4m3fn
    c = gpumode.custom_kernel(data)
    assert c is data[9] and gpumode.check_implementation(data, c) == (True, "")
    arrays = gpumode.generate_input(64, 32, 128, 2, device="numpy")
    for t, a in zip(data[3:9], arrays[3:9]):
        assert tuple(t.shape) == a.shape
        np.testing.assert_array_equal(t.view(torch.uint8).numpy(), a.view(np.uint8))


@pytest.mark.parametrize("world", [2])
def test_ranks_under_torchrun_equal_one_rank_close(path, world):
    """The example, as users start it; gloo on the processor."""
    import pathlib
    import subprocess
    import sys

    example = pathlib.Path(__file__).parents[2] / "examples" / "torchrun" / "mlp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--standalone"]
    done = subprocess.run([*command, str(example), str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{world} ranks on" in done.stdout


def test_tensors_without_memory_that_can_be_read_are_refused(weights):
    x = torch.randn(2, 576)
    # torch negates such views when somebody reads them through it.
    lazy = torch.complex(x, x).conj().imag
    assert lazy.is_neg()
    with pytest.raises(dualgemm.OperandError, match="a: is a view that torch has yet to negate"):
        dualgemm.swiglu(lazy, weights)
    assert torch.equal(dualgemm.swiglu(lazy.resolve_neg(), weights), dualgemm.swiglu(-x, weights))
    with pytest.raises(dualgemm.OperandError, match="a: a dense tensor is needed"):
        dualgemm.swiglu(x.to_sparse(), weights)
    # As sharded training does between steps.
    x.untyped_storage().resize_(0)
    with pytest.raises(dualgemm.OperandError, match=r"a: shape \[2, 576\] without memory"):
        dualgemm.swiglu(x, weights)


def test_options_where_torch_differentiates(weights):
    a = torch.randn(2, 576, requires_grad=True)
    assert dualgemm.swiglu(a, weights, out_dtype=np.float16).dtype == torch.float16
    with pytest.raises(dualgemm.OperandError, match="out_dtype is float99"):
        dualgemm.swiglu(a, weights, out_dtype="float99")
    for wrong in (True, "sometimes"):
        with pytest.raises(dualgemm.ArgumentError, match="quantize_a `.*` is unknown"):
            dualgemm.swiglu(a, weights, quantize_a=wrong)
    with pytest.raises(dualgemm.OperandError, match="out, stream and nvfp4 results are not available"):
        dualgemm.swiglu(a, weights, stream=0)


def test_outputs_of_other_orders_are_refused(weights):
    out = torch.empty(3, 2, 1536).transpose(0, 1)
    with pytest.raises(dualgemm.OperandError, match=r"out: shape \[2, 3, 1536\] is not contiguous"):
        dualgemm.swiglu(torch.randn(2, 3, 576), weights, out=out)


def test_weights_that_are_gone_are_named():
    with pytest.raises(dualgemm.OperandError, match="the number 12345 is that of none that live"):
        torch.ops.dualgemm.swiglu(torch.randn(2, 576), 12345, 1536, torch.float32, "", "", False)
