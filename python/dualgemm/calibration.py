"""What goes into each linear layer of a model while it runs on a text, for the input scales of W4A4. Needs torch."""

import functools
import json
import os
import re
import warnings

import torch

from ._names import in_file
from ._plain import gated
from .errors import OperandError
from .nn import Packed

#: As the command spells them.
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class Calibration(dict):
    """The largest magnitude of what went into each module, by its name in the model's files, which transformers renames
    some of; ``dtype`` is the type of the activations.
    ``unseen`` lists experts that no token went to: they have the largest number of their block, as ModelOpt gives them."""

    def __init__(self, amax, dtype, unseen=()):
        super().__init__(amax)
        self.dtype, self.unseen = dtype, list(unseen)

    def save(self, path):
        """Writes the file that ``dualgemm quantize --calibration`` reads."""
        # Under another name first: whoever reads finds the whole file or none.
        part = f"{os.fspath(path)}.{os.getpid()}.part"
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"dtype": self.dtype, "amax": dict(self)}, file, indent=1)
        os.replace(part, path)

    def __repr__(self):
        unseen = f", {len(self.unseen)} experts unseen" if self.unseen else ""
        return f"<Calibration of {len(self)} modules in {self.dtype}{unseen}>"


class _Observer:
    """Hooks at the modules of a model."""

    def __init__(self, model):
        self.amax, self.experts, self.dtypes, self.handles = {}, {}, set(), []
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                self.handles.append(module.register_forward_pre_hook(self.linear(name)))
            elif all(getattr(getattr(module, p, None), "ndim", 0) == 3 for p in ("gate_up_proj", "down_proj")):
                self.experts[name] = module.gate_up_proj.shape[0]
                self.handles.append(module.register_forward_pre_hook(self.block(name), with_kwargs=True))

    def remove(self):
        for handle in self.handles:
            handle.remove()

    def see(self, name, x):
        if x.numel():
            self.dtypes.add(x.dtype)
            largest = x.detach().abs().amax().float()
            before = self.amax.get(name)
            # NaN stays: torch.maximum hands it on.
            self.amax[name] = largest if before is None else torch.maximum(before, largest)

    def linear(self, name):
        return lambda module, args: self.see(name, args[0])

    def block(self, name):
        """transformers compute a block of experts in one module: what enters each of its products is computed here."""

        def hook(module, args, kwargs):
            tokens, *ids = (*args, *kwargs.values())
            count = module.gate_up_proj.shape[0]
            if ids:
                rows = [(ids[0] == expert).any(-1) for expert in range(count)]
            else:
                # Llama 4: a copy of all tokens for each expert, of zeros where the router chose others.
                every = tokens.reshape(count, -1, tokens.shape[-1])
            for expert in range(count):
                x = tokens[rows[expert]] if ids else every[expert][every[expert].any(-1)]
                if not len(x):
                    continue
                for projection in ("gate_proj", "up_proj"):
                    self.see(f"{name}.{expert}.{projection}", x)
                self.see(f"{name}.{expert}.down_proj", _hidden(module, x, expert))

        return hook


def _hidden(module, x, expert):
    """What enters an expert's down projection."""
    weight = module.gate_up_proj[expert]
    bias = getattr(module, "gate_up_proj_bias", None)
    product = torch.nn.functional.linear(x, weight if weight.shape[1] == x.shape[1] else weight.T)
    if bias is not None:
        product = product + bias[expert]
    return gated(module, product)


def _in_files(model, names):
    """What the model's files call each module: several where transformers makes one of them, such as a block of experts."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    files = functools.cache(lambda parameter: in_file(model, parameter, parameters[parameter].shape))
    modules = {}
    for name in names:
        expert = re.fullmatch(r"(.*)\.(\d+)\.(gate|up|down)_proj", name)
        if f"{name}.weight" in parameters:
            tensors = files(f"{name}.weight")
        elif expert:
            both = files(f"{expert[1]}.{'down' if expert[3] == 'down' else 'gate_up'}_proj")
            tensors = [tensor for tensor in both if f".experts.{expert[2]}." in tensor]
        else:
            tensors = []
        modules[name] = [tensor.removesuffix(".weight") for tensor in tensors] or [name]
    return modules


def calibrate(model, batches):
    """Runs a model in floats on ``batches`` and returns a :class:`Calibration`: the largest magnitude of what goes into each
    linear layer and into each expert's projections, from which ModelOpt and llm-compressor make their input scales.

    A batch is a tensor of token numbers, a dictionary of the model's arguments, or a tuple of them. ``quantize_model(...,
    calibration=...)`` writes the scales; checkpoints with them can be used with ``quantize_a="static"``. The model is left as
    it was.

    ModelOpt runs a model as it is; llm-compressor has it attend by ``eager``, whatever it was loaded with. In bf16 the two
    round differently, so load it with ``attn_implementation="eager"`` for llm-compressor's scales bit by bit.
    """
    if isinstance(batches, (str, bytes, torch.Tensor, dict)):
        raise TypeError(f"batches is a {type(batches).__name__}; several are needed, as in [batch]")
    if any(isinstance(module, Packed) for module in model.modules()):
        raise OperandError("the model is already patched; calibrate the model in floats")
    observer = _Observer(model)
    try:
        count = 0
        with torch.no_grad():
            for batch in batches:
                count += 1
                if isinstance(batch, torch.Tensor):
                    model(batch)
                elif isinstance(batch, tuple):
                    model(*batch)
                elif hasattr(batch, "keys"):
                    model(**batch)
                else:
                    kind = type(batch).__name__
                    raise TypeError(f"a batch is a {kind}; a tensor, a dictionary or a tuple is needed")
    finally:
        observer.remove()
    if not count:
        raise OperandError("batches: there is none")
    amax = {name: value.item() for name, value in observer.amax.items()}
    unseen = []
    for block, experts in observer.experts.items():
        for projection in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{block}.{expert}.{projection}" for expert in range(experts)]
            seen = [amax[name] for name in names if name in amax]
            if seen:
                unseen += [n for n in names if n not in amax and projection == "down_proj"]
                amax.update({name: max(seen) for name in names if name not in amax})
    for name, value in amax.items():
        if not 0 < value < float("inf"):
            raise OperandError(f"{name}: what went in has a largest magnitude of {value}; a positive finite one is needed")
    dtypes = [DTYPES[dtype] for dtype in DTYPES if dtype in observer.dtypes]
    if not dtypes:
        raise OperandError(f"{type(model).__name__}: no linear layer of it ran on float32, float16 or bfloat16")
    modules = _in_files(model, amax)
    if unseen:
        warnings.warn(
            f"no token reached {len(unseen)} of {sum(observer.experts.values())} experts: each gets the largest magnitude of "
            "its block; calibrate on more text if there are many (calibration.unseen lists them)",
            stacklevel=3,
        )
    in_files = {module: value for name, value in amax.items() for module in modules[name]}
    return Calibration(in_files, dtypes[-1], [modules[name][0].rpartition(".")[0] for name in unseen])
