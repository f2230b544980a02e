"""The replacement of every quantized layer of a Hugging Face model. Needs torch."""

import functools
import sys

import torch

from ._attention import take_attention
from ._ops import Weights
from ._parallel import together
from ._plan import DOWN, Plan, Step, check_biases, opened, planned, unsupported
from ._plain import is_plain_mlp
from .errors import OperandError, UnsupportedError


class PatchReport:
    """What :func:`patch_model` did: ``replaced`` and ``left`` say of modules by name what they are now and why they stayed;
    ``unused`` lists modules of the checkpoint that the model has no place for; ``attention`` is "dualgemm" if transformers'
    ``sdpa`` is :func:`dualgemm._attention.attend` now, None if that stayed; ``layers`` is how many decoder layers take a token in one call."""

    def __init__(self):
        self.replaced, self.left, self.unused, self.attention, self.layers = {}, {}, [], None, 0

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
        if self.layers:
            text += f"; {self.layers} layers take a token in one call"
        return text + ">"


def replace(model, name, new):
    """Puts a module in the place of the one of this name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def patch_model(model, checkpoint, *, quantize_a=None, devices=None, other_model=False, group=None, **reading):
    """Replaces every linear layer, gated MLP and block of experts of a Hugging Face model that a checkpoint holds in 4 bits,
    and returns a :class:`PatchReport` of what it replaced and what it left and why.

    ``checkpoint`` is a path, read as ``reading`` says, or a :class:`dualgemm.Checkpoint`. ``quantize_a`` is that of the
    modules: None uses activations as they are (W4A16), ``"static"`` or ``"dynamic"`` quantizes them (W4A4). A module goes
    where its weights are, or to the device that ``devices`` gives to its name or to the beginning of it, ``""`` of all.

    All is read and checked first: a fault, such as a shape that the model has not, names the layer and leaves the model as it
    was. Then one module after another is packed and takes the place of the old one, whose memory is free if nobody else
    keeps it; so the model is never there twice. On a GPU, modules in float32 stay, and what its kernels do not compute. On the
    processor, linear layers and blocks of experts whose weights stay in 16 bits become :class:`FloatLinear` and
    :class:`FloatExperts`, with the same parameters. transformers' attention by torch becomes one that computes the same, but
    one token faster. A checkpoint whose config.json has another ``model_type``, ``hidden_size`` or other heads is refused, unless
    ``other_model`` is true.

    With a process ``group`` of torch.distributed, whose ranks all call this, each rank takes a part: heads of an attention
    whose four layers are in 4 bits, where transformers' own plan for several GPUs splits them, features of an MLP, experts of a
    mixture, or their features where it has fewer experts than there are ranks. All else is whole on each, and so is, named in
    ``left``, an attention, MLP or mixture that the ranks do not divide. Ranks that plan something else, or whose files differ in
    samples of any tensor, get an error that names the first difference.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; a torch.nn.Module is needed")
    how = quantize_a, devices, other_model, group
    plan = together(group, lambda: planned(model, opened(checkpoint, reading), *how))
    report = PatchReport()
    report.left = plan.left
    report.unused = [module for module in plan.names if module not in plan.taken]

    def packed():
        for step in plan.steps:
            replace(model, step.name, step.make())
            report.replaced[step.name] = step.what
        return plan

    # Of a layer that is whole on each rank, too, all hear if one has no memory for it.
    together(group, packed)
    report.attention = take_attention(model)
    if "transformers.modeling_utils" in sys.modules:
        from .decoder import take_layers

        report.layers = take_layers(model)
    return report


def patch_mlp(model, checkpoint, *, quantize_a=None, down="keep", group=None, other_model=False, **reading):
    """Replaces every gated MLP of a Hugging Face model of the Llama, Qwen or Mistral kind by :class:`dualgemm.nn.NVFP4GatedMLP` with the
    weights of the same layer of an NVFP4 checkpoint, and returns the names of the modules replaced.

    An MLP is a module with ``gate_proj``, ``up_proj`` and ``down_proj`` that computes nothing else, and whose name the
    checkpoint has; others stay, such as those of a vision tower. With ``down="keep"`` the model's own down projection stays;
    ``"checkpoint"`` decodes the checkpoint's instead. ``other_model`` is that of :func:`patch_model`.

    A patched model cannot be saved: ``state_dict`` and with it ``save_pretrained`` raise :class:`UnsupportedError`.
    """
    if down not in ("keep", "checkpoint"):
        raise OperandError(f"down is {down!r}; valid are keep, checkpoint")
    if group is not None and down == "keep":
        raise OperandError('with a group, down="checkpoint" is needed: the model holds the whole down projection')
    parts = {key: reading.pop(key) for key in ("rank", "world") if key in reading}

    def planned():
        plan = Plan(model, opened(checkpoint, reading), quantize_a, other_model=other_model)
        plan.steps = list(_mlps(model, plan, down, group, parts))
        return plan

    # Checked first, on all ranks: the others would wait for one that finds a fault.
    plan = together(group, planned, checkpoint)
    # All are loaded before one is replaced: a fault leaves the model as it was.
    replacements = [(step.name, step.make()) for step in plan.steps]
    for name, new in replacements:
        replace(model, name, new)
    return [name for name, _ in replacements]


def _mlps(model, plan, down, group, parts):
    """What :func:`patch_mlp` replaces, checked."""
    modules = list(model.named_modules())
    patched = [name for name, module in modules if isinstance(module, plan.nn.NVFP4GatedMLP)]
    if patched:
        raise OperandError(f"{patched[0]}: is a NVFP4GatedMLP; the model is already patched")
    gated = ("gate_proj", "up_proj", "down_proj")
    found = [(name, m) for name, m in modules if all(hasattr(m, part) for part in gated) and "experts" not in name]
    if not found:
        raise OperandError(f"{type(model).__name__}: no module has gate_proj, up_proj and down_proj")
    matched = [(name, old, plan.held(name, "shared" if "shared" in name else "dense")) for name, old in found]
    if not plan.met:
        raise OperandError(
            f"{type(model).__name__}: no gated MLP of it, such as {found[0][0]}, is in 4 bits in {plan.checkpoint.path}"
        )
    for name, old, held in matched:
        if held:
            yield Step(name, "MLPs", _replacement(plan, name, old, held, down, group, parts))


def _replacement(plan, name, old, held, down, group, parts):
    """Checks that a module is what the checkpoint holds, and returns what makes its replacement."""
    names = ("gate_proj", "up_proj", "down_proj")
    why = held.why_not(old, lambda activation: is_plain_mlp(old, names[:2], names[2], activation))
    if why:
        raise OperandError(f"{name}: {why}; patch_model replaces its linear layers one by one")
    checkpoint, layer, like = held.checkpoint, held.layer, old.down_proj.weight
    reading = {"shared_expert": held.kind == "shared", **parts}
    biases = [[checkpoint._has_bias(m) for m in held.modules if (m.rpartition(".")[2] in DOWN) == of] for of in (False, True)]
    ours, theirs = [old.gate_proj.bias is not None or old.up_proj.bias is not None], [any(biases[0])]
    if down == "checkpoint":
        ours, theirs = [*ours, old.down_proj.bias is not None], [*theirs, any(biases[1])]
        if any(biases[1]) and like.is_cuda and unsupported(like.device):
            raise UnsupportedError(f"{name}.down_proj: is decoded on {like.device}, and its bias is not")
    check_biases(name, ("gate_proj and up_proj", "down_proj"), ours, theirs)
    if down == "checkpoint":
        dtype = like.dtype if like.is_floating_point() and like.element_size() > 1 else torch.bfloat16
        how = {"dtype": dtype, "device": like.device, "quantize_a": plan.quantize_a, "group": group}
        return functools.partial(plan.nn.NVFP4GatedMLP.from_checkpoint, checkpoint, layer, **how, **reading)

    def make():
        weights = Weights.from_checkpoint(checkpoint, layer, device=like.device, **reading)
        n, k = weights.shape
        if getattr(old.down_proj, "in_features", n) != n or getattr(old.down_proj, "out_features", k) != k:
            found = [old.down_proj.out_features, old.down_proj.in_features]
            raise OperandError(f"{name}.down_proj: is {found}; the checkpoint's layer needs {[k, n]}")
        return plan.nn.NVFP4GatedMLP(weights, old.down_proj, quantize_a=plan.quantize_a)

    return make
