"""The replacement of every quantized layer of a Hugging Face model. Needs torch."""

import functools
import inspect
import re
import sys

import torch

from ._dualgemm import Checkpoint
from ._ops import Experts, Linear, Mlp, Weights
from .errors import OperandError, UnsupportedError

#: Parts of names that are there in one file and not in the other, and parts that have two names.
SKIPPED = {"model", "language_model", "text_model", "transformer"}
RENAMED = {"block_sparse_moe": "mlp"}
#: Children of a gated MLP: gate and up, or both in one, and down.
GATED = [(("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"), (("w1", "w3"), "w2")]
DOWN = {"down_proj", "w2", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "output_linear"}


class PatchReport:
    """What :func:`patch_model` did: ``replaced`` and ``left`` say of modules by name what they are now and why they stayed;
    ``unused`` lists modules of the checkpoint that the model has no place for; ``attention`` is the name by which transformers
    knows the function of attention now, None if that stayed."""

    def __init__(self):
        self.replaced, self.left, self.unused, self.attention = {}, {}, [], None

    def __repr__(self):
        counts = {}
        for what in self.replaced.values():
            counts[what] = counts.get(what, 0) + 1
        done = ", ".join(f"{count} {what}" for what, count in counts.items())
        text = f"<PatchReport: replaced {done or 'nothing'}"
        if self.left:
            some = [f"{name} ({why})" for name, why in list(self.left.items())[:2]]
            text += f"; left {len(self.left)}: {', '.join(some)}{', …' if len(self.left) > 2 else ''}"
        if self.unused:
            text += f"; unused {len(self.unused)} of the checkpoint: {self.unused[0]}{', …' if len(self.unused) > 1 else ''}"
        if self.attention:
            text += f"; attention by {self.attention}"
        return text + ">"


def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **more):
    """transformers' ``sdpa``, but for one token that needs no mask, whose heads that share keys are rows of one product. Asked
    to share keys (``enable_gqa``), torch takes five times as long for it on a processor, in bf16."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, rows, _ = query.shape
    grouped = heads > key.shape[1] and heads % key.shape[1] == 0
    plain = attention_mask is None and more.get("softcap") is None and more.get("position_bias") is None
    if torch.compiler.is_compiling() or rows != 1 or not (grouped and plain and query.is_cpu):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    query = query.reshape(batch, key.shape[1], heads // key.shape[1], query.shape[-1])
    c = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling)
    return c.reshape(batch, 1, heads, value.shape[-1]), None


def take_attention(model):
    """Makes a model of transformers on the processor use :func:`attend` in the place of ``sdpa``, and returns its name."""
    modeling = sys.modules.get("transformers.modeling_utils")
    config = getattr(model, "config", None)
    if modeling is None or not hasattr(model, "set_attn_implementation"):
        return None
    if getattr(config, "_attn_implementation", None) != "sdpa" or any(p.is_cuda for p in model.parameters()):
        return None
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    modeling.ALL_ATTENTION_FUNCTIONS.register("dualgemm", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("dualgemm", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("dualgemm")
    return "dualgemm"


def normal(name):
    """A name without what models and files put before it."""
    return ".".join(RENAMED.get(part, part) for part in name.split(".") if part not in SKIPPED)


def shape(module):
    """``[out, in]`` of a linear layer."""
    return [module.out_features, module.in_features]


@functools.cache
def unsupported(device):
    """Why linear layers are not computed on a GPU, None if they are: a layer of zeros tells."""
    zeros = torch.zeros(64, 32, dtype=torch.uint8), torch.zeros(64, 4, dtype=torch.uint8), 1.0
    try:
        Linear.from_tensors(zeros, device=device)
    except UnsupportedError as error:
        return f"on {device}: {error}"
    return None


class Step:
    """A module that will be replaced: what was checked, and how to make what takes its place."""

    def __init__(self, name, what, make):
        self.name, self.what, self.make = name, what, make


class Plan:
    """Matches modules of a model with those of a checkpoint, and checks all before anything is replaced."""

    def __init__(self, checkpoint, quantize_a, devices):
        from . import nn

        self.nn, self.checkpoint, self.quantize_a, self.devices = nn, checkpoint, quantize_a, devices
        self.modules = {normal(module): module for module in checkpoint.modules()}
        self.mlps = {(layer, kind): path for layer, kind, path in checkpoint.mlps()}
        self.taken, self.steps, self.left, self.below = set(), [], {}, ()

    def visit(self, name, module):
        if not name or name.startswith(self.below):
            return
        if isinstance(module, self.nn.Packed):
            raise OperandError(f"{name}: is a {type(module).__name__}; the model is already patched")
        step = self.experts(name, module) or self.mlp(name, module) or self.linear(name, module)
        if step:
            self.steps.append(step)
            self.below += (f"{name}.",)

    def device(self, name, weight):
        """Where a module goes: to the device of the longest name in ``devices`` that begins its own, or where its weight is; one
        without memory of its own goes to the processor."""
        named = [n for n in self.devices if n == "" or f"{name}.".startswith(f"{n}.")]
        if named:
            return torch.device(self.devices[max(named, key=len)])
        return weight.device if weight.is_cuda else torch.device("cpu")

    def left_on(self, device, weight):
        """Why a module on a device keeps its floats, None if it need not."""
        if device.type != "cuda":
            return None
        if weight.dtype not in (torch.float16, torch.bfloat16):
            dtype = str(weight.dtype).rpartition(".")[2]
            return f"{dtype} on {device}, where float16 and bfloat16 are multiplied"
        return unsupported(device)

    def held(self, name, kind):
        """The number of the layer and the checkpoint's modules of the MLP that a name means, None if it has none in 4 bits."""
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        layer = int(number.group(1)) if number else 0
        path = self.mlps.get((layer, kind))
        if path is None:
            return None
        names = {normal(name), re.sub(r"\.experts\.\d+$", ".experts", normal(name))}
        of_gguf = path == f"blk.{layer}" and any(n.startswith(f"layers.{layer}.") for n in names)
        if not of_gguf and normal(path) not in names:
            return None
        return layer, [m for m in self.modules.values() if m.startswith(f"{path}.")]

    def experts(self, name, module):
        """transformers' blocks: all experts' weights in two parameters of three dimensions."""
        gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if not all(isinstance(p, torch.nn.Parameter) and p.dim() == 3 for p in (gate_up, down)):
            return None
        found = self.held(name, "experts")
        if found is None:
            self.left[name] = "not in 4 bits in the checkpoint"
            return None
        if len(inspect.signature(module.forward).parameters) != 3:
            self.left[name] = f"{type(module).__name__} takes other arguments than tokens, experts and weights"
            return None
        device = self.device(name, gate_up)
        why = self.left_on(device, gate_up)
        if why is None and device.type == "cuda" and self.quantize_a is not None:
            why = f"on {device}, where mixtures take activations in 16 bits; quantize_a is {self.quantize_a!r}"
        if why:
            self.left[name] = why
            return None
        layer, modules = found
        held, h, n, k = self.checkpoint._check_mlp(layer, "experts")
        need = [gate_up.shape[0], sorted(gate_up.shape[1:]), sorted(down.shape[1:])]
        if [held, sorted((2 * n, k)), sorted((h, n))] != need:
            raise OperandError(
                f"{name}: the model has {gate_up.shape[0]} experts of {list(gate_up.shape[1:])} and "
                f"{list(down.shape[1:])}; the checkpoint has {held} of 2 x [{n}, {k}] and [{h}, {n}]"
            )
        self.taken.update(modules)

        def make():
            weights = Experts.from_checkpoint(self.checkpoint, layer, device=device)
            return self.nn.NVFP4Experts(weights, quantize_a=self.quantize_a)

        return Step(name, f"blocks of {held} experts", make)

    def mlp(self, name, module):
        """A module of linear layers that make a gated MLP."""
        for gates, down_name in GATED:
            children = [getattr(module, child, None) for child in (*gates, down_name)]
            if all(isinstance(child, torch.nn.Linear) for child in children):
                break
        else:
            return None
        *gate_up, down = children
        expert = re.search(r"\.experts\.(\d+)$", name)
        kind = "experts" if expert else "shared" if "shared" in name else "dense"
        found = self.held(name, kind)
        if found is None:
            return None
        layer, modules = found
        of_one = [m for m in modules if re.search(rf"\.{expert.group(1)}\.", m)] if expert else modules
        in_4_bits = {m.rpartition(".")[2] for m in of_one}
        if not in_4_bits - DOWN:
            # Down alone, which is a linear layer.
            return None
        device = self.device(name, down.weight)
        why = self.left_on(device, down.weight)
        if why is None and device.type == "cuda" and self.quantize_a == "dynamic":
            why = f'on {device}, where quantize_a="dynamic" is for what goes into gate and up alone'
        if not in_4_bits & DOWN:
            why = "not in 4 bits in the checkpoint"
        which = {"shared_expert": kind == "shared", "expert": int(expert.group(1)) if expert else None}
        need = [sum(g.out_features for g in gate_up) // 2, gate_up[0].in_features, *shape(down)]
        if in_4_bits & DOWN:
            _, h, n, k = self.checkpoint._check_mlp(layer, kind)
            if [n, k, h, n] != need:
                raise OperandError(
                    f"{name}: the model has gate and up of {need[:2]} and down of {need[2:]}; the checkpoint has "
                    f"{[n, k]} and {[h, n]}"
                )
        self.taken.update(of_one)

        def make():
            kind, rest = (Weights, down) if why else (Mlp, None)
            weights = kind.from_checkpoint(self.checkpoint, layer, device=device, **which)
            return self.nn.NVFP4GatedMLP(weights, rest, quantize_a=self.quantize_a)

        if why:
            self.left[f"{name}.{down_name}"] = why
        return Step(name, "MLPs but for their down projections" if why else "MLPs", make)

    def linear(self, name, module):
        if not isinstance(module, torch.nn.Linear):
            return None
        held = self.modules.get(normal(name))
        if held is None:
            # A class of its own does something else, too.
            if type(module) is torch.nn.Linear and module.weight.dtype in self.nn.HALVES and not module.weight.is_cuda:
                return Step(name, "linear layers in 16 bits", lambda: self.nn.FloatLinear.of(module))
            self.left[name] = "not in 4 bits in the checkpoint"
            return None
        device = self.device(name, module.weight)
        why = self.left_on(device, module.weight)
        if why:
            self.left[name] = why
            return None
        n, k, has_bias = self.checkpoint._check_linear(held)
        if [n, k] != shape(module) or has_bias != (module.bias is not None):
            with_bias = {True: "with a bias", False: "without a bias"}
            raise OperandError(
                f"{name}: the model has {shape(module)} {with_bias[module.bias is not None]}; the checkpoint has "
                f"{[n, k]} {with_bias[has_bias]}"
            )
        self.taken.add(held)

        def make():
            weights = Linear.from_checkpoint(self.checkpoint, held, device=device)
            return self.nn.NVFP4Linear(weights, quantize_a=self.quantize_a)

        return Step(name, "linear layers", make)


def patch_model(model, checkpoint, *, quantize_a=None, devices=None, **reading):
    """Replaces every linear layer, gated MLP and block of experts of a Hugging Face model that a checkpoint holds in 4 bits,
    and returns a :class:`PatchReport` of what it replaced and what it left and why.

    ``checkpoint`` is a path, read as ``reading`` says, or a :class:`dualgemm.Checkpoint`. ``quantize_a`` is that of the
    modules: None uses activations as they are (W4A16), ``"static"`` or ``"dynamic"`` quantizes them (W4A4). A module goes
    where its weights are, or to the device that ``devices`` gives to its name or to the beginning of it, ``""`` of all.

    All is read and checked first: a fault, such as a shape that the model has not, names the layer and leaves the model as it
    was. Then one module after another is packed and takes the place of the old one, whose memory is free if nobody else
    keeps it; so the model is never there twice. On a GPU, modules in float32 stay, and what its kernels do not compute. On the
    processor, linear layers whose weights stay in 16 bits become :class:`FloatLinear`, with the same parameters, and
    transformers' attention by torch is :func:`attend`, the same but faster for one token.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint, **reading)
    elif reading:
        raise OperandError(f"{next(iter(reading))} says how to read a file; it belongs where the Checkpoint is made")
    plan = Plan(checkpoint, quantize_a, devices or {})
    for name, module in model.named_modules():
        plan.visit(name, module)
    if not plan.taken:
        raise OperandError(
            f"{type(model).__name__}: no module has a counterpart in 4 bits in {checkpoint.path}, whose modules are "
            f"named like {next(iter(plan.modules.values()), 'nothing')}"
        )
    report = PatchReport()
    report.left = plan.left
    report.unused = [module for module in plan.modules.values() if module not in plan.taken]
    for step in plan.steps:
        parent, _, last = step.name.rpartition(".")
        setattr(model.get_submodule(parent), last, step.make())
        report.replaced[step.name] = step.what
    report.attention = take_attention(model)
    return report
