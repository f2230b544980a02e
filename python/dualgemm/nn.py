"""The gated MLP as a torch module, and the replacement of those of a loaded model. Needs torch."""

import copy
import re

import torch

from . import _dualgemm, _torch
from ._ops import Weights
from .errors import OperandError, UnsupportedError

__all__ = ["NVFP4GatedMLP", "patch_mlp"]


class NVFP4GatedMLP(torch.nn.Module):
    """``down(SiLU(x·gateᵀ) ∘ (x·upᵀ))`` with gate and up in 4 bits.

    Without ``down_proj`` the result is the product of both, ``[..., N]``. With a process ``group`` of
    torch.distributed, weights and ``down_proj`` are this rank's shards and the results are summed over the ranks.
    """

    def __init__(self, weights, down_proj=None, *, quantize_a=None, group=None):
        super().__init__()
        self.weights = weights
        self.down_proj = down_proj
        self.quantize_a = quantize_a
        self.group = group
        self._handle, self._n = _torch.handle(weights), weights.shape[0]
        self._quantize_a = _torch.quantize_a_text(quantize_a)

    @classmethod
    def from_checkpoint(
        cls, path, layer=None, *, dtype=torch.bfloat16, device=None, quantize_a=None, group=None, **reading
    ):
        """A layer of a checkpoint on a ``device``, its down projection decoded to ``dtype``. ``reading`` is handed to
        :meth:`dualgemm.Weights.from_checkpoint`; ``group`` gives its rank and world."""
        device = torch.device(device or "cpu")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if group is not None:
            rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
            reading = {"rank": rank, "world": world, **reading}
        weights = Weights.from_checkpoint(path, layer, device=device, **reading)
        down = _down(path, layer, weights, dtype, reading).to(device=device)
        return cls(weights, down, quantize_a=quantize_a, group=group)

    def forward(self, x):
        c = torch.ops.dualgemm.swiglu(x, self._handle, self._n, x.dtype, self._quantize_a, "", False)
        if self.down_proj is None:
            return c
        c = self.down_proj(c)
        if self.group is not None:
            torch.distributed.all_reduce(c, group=self.group)
        return c

    def extra_repr(self):
        return f"{self.weights!r}, quantize_a={self.quantize_a!r}"

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        # Left out, gate and up would be missing from what is saved, and nobody would know before it is loaded.
        gate, up = self.weights.names
        raise UnsupportedError(
            f"{prefix.rstrip('.') or type(self).__name__}: {gate} and {up} are packed for kernels and cannot be saved; "
            "the checkpoint that they come from holds them: load the model and call patch_mlp again"
        )

    def __deepcopy__(self, memo):
        # Packed weights never change: a copy of the module shares them.
        down = copy.deepcopy(self.down_proj, memo)
        return type(self)(self.weights, down, quantize_a=self.quantize_a, group=self.group)


def _down(path, layer, weights, dtype, reading):
    n, k = weights.shape
    down = torch.nn.Linear(n, k, bias=False, dtype=dtype, device="cpu")
    down.weight.requires_grad_(False)
    _dualgemm.down(down.weight, path, layer, **{key: value for key, value in reading.items() if key != "activation"})
    return down


def patch_mlp(model, checkpoint, *, quantize_a=None, down="keep", group=None, **reading):
    """Replaces every gated MLP of a Hugging Face model of the Llama, Qwen or Mistral kind by :class:`NVFP4GatedMLP` with the
    weights of the same layer of an NVFP4 checkpoint, and returns the names of the modules replaced.

    An MLP is a module with ``gate_proj``, ``up_proj`` and ``down_proj``; its layer is the number in its name. With
    ``down="keep"`` the model's own down projection stays; ``"checkpoint"`` decodes the checkpoint's instead.

    A patched model cannot be saved: ``state_dict`` and with it ``save_pretrained`` raise :class:`UnsupportedError`.
    """
    if down not in ("keep", "checkpoint"):
        raise OperandError(f"down is {down!r}; valid are keep, checkpoint")
    if group is not None and down == "keep":
        raise OperandError('with a group, down="checkpoint" is needed: the model holds the whole down projection')
    found = [
        (name, module)
        for name, module in model.named_modules()
        if all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")) and "experts" not in name
    ]
    if not found:
        raise OperandError(f"{type(model).__name__}: no module has gate_proj, up_proj and down_proj")
    # All are loaded before one is replaced: a fault leaves the model as it was.
    replacements = [(name, _replacement(name, old, checkpoint, quantize_a, down, group, reading)) for name, old in found]
    for name, new in replacements:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
    return [name for name, _ in replacements]


def _replacement(name, old, checkpoint, quantize_a, down, group, reading):
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    layer = int(number.group(1)) if number else None
    like = old.down_proj.weight
    if down == "checkpoint":
        dtype = like.dtype if like.is_floating_point() and like.element_size() > 1 else torch.bfloat16
        return NVFP4GatedMLP.from_checkpoint(
            checkpoint, layer, dtype=dtype, device=like.device, quantize_a=quantize_a, group=group, **reading
        )
    weights = Weights.from_checkpoint(checkpoint, layer, device=like.device, **reading)
    n, k = weights.shape
    if getattr(old.down_proj, "in_features", n) != n or getattr(old.down_proj, "out_features", k) != k:
        found = [old.down_proj.out_features, old.down_proj.in_features]
        raise OperandError(f"{name}.down_proj: is {found}; the checkpoint's layer needs {[k, n]}")
    return NVFP4GatedMLP(weights, old.down_proj, quantize_a=quantize_a)
