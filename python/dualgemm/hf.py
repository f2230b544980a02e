"""transformers' own loading: after :func:`register`, ``from_pretrained`` of a directory in NVFP4, as ModelOpt or
llm-compressor write it, gives a model whose linear layers, gated MLPs and blocks of experts are those of ``dualgemm.nn``.

>>> import dualgemm.hf
>>> dualgemm.hf.register()
>>> model = AutoModelForCausalLM.from_pretrained(DIR)

transformers builds the model without memory, the quantized layers are replaced there, and only what stays in floats is
loaded by transformers. ``save_pretrained`` writes the tensors that were read. Needs torch and transformers.
"""

import os
import pathlib
import re
import zlib

import torch
from safetensors import safe_open
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._dualgemm import Checkpoint
from ._names import in_model, normal
from ._parallel import check_group
from ._plan import unsupported
from ._torch import quantize_a_text
from .decoder import take_layers
from .errors import CheckpointError, UnsupportedError
from .nn import Packed, patch_model

#: How transformers knows directories by what their ``quantization_config`` says in ``quant_method``.
METHODS = ("modelopt", "compressed-tensors")

#: What :func:`register` was told of the modules.
_how = {}

#: What transformers loads as it is.
FLOATS = ("F64", "F32", "F16", "BF16")


def is_nvfp4(config):
    """Whether all that a ``quantization_config`` quantizes is NVFP4, whoever wrote it."""
    layers = [str(layer.get("quant_algo")) for layer in (config.get("quantized_layers") or {}).values()]
    groups = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    if not all("NVFP4" in layer for layer in layers) or any(g.get("num_bits", 4) != 4 for g in groups):
        return False
    if config.get("quant_method") == "modelopt":
        algorithm = str(config.get("quant_algo"))
        return "NVFP4" in algorithm or algorithm == "MIXED_PRECISION" and bool(layers or groups)
    return str(config.get("format")).startswith("nvfp4")


def _types(files):
    """Names and types of all tensors."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_slice(name).get_dtype()


def _same(value, read):
    return value.shape == read.shape and torch.equal(value.cpu(), read.to(value.dtype))


def _as_read(model, names, packed):
    """Those of the files' tensors that the model has as they are, by the model's names; none of the modules that are packed."""
    names = [name for name in names if name.rpartition(".")[0] not in packed]
    modules = in_model(model, {name.rpartition(".")[0] for name in names})
    tensors = [(*modules[name.rpartition(".")[0]], name) for name in names]
    return {normal(f"{to[0]}.{name.rpartition('.')[2]}"): name for to, as_it_is, name in tensors if as_it_is}


def _digest(value):
    """Of what transformers makes of several tensors, which no file has to compare with."""
    return zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


class Config(QuantizationConfigMixin):
    """A ``quantization_config`` as the file has it."""

    def __init__(self, **entries):
        self.__dict__.update(entries)


def set_loading(model, loading):
    """transformers asks the model for its state while it loads, and only then may what is in 4 bits be missing there."""
    for module in model.modules():
        if isinstance(module, Packed):
            module.loading = loading


def without_hooks(model):
    """Takes accelerate's hooks, 20 a layer, from all but the model itself, if all that is not packed is in one place: what is
    packed elsewhere brings what goes in by itself. A token takes 7 % less time without them."""
    places = {tensor.device for of in (model.parameters(), model.buffers()) for tensor in of}
    if hasattr(model, "_hf_hook") and len(places) == 1:
        from accelerate.hooks import remove_hook_from_module

        for child in model.children():
            remove_hook_from_module(child, recurse=True)


def _stamp(path):
    """Tells a file from another one in its place; None of one that is gone."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class Quantizer(HfQuantizer):
    """Puts layers in 4 bits into the model that transformers is about to load."""

    checkpoint = None
    devices = {"": "cpu"}

    def validate_environment(self, device_map=None, **kwargs):
        devices = set(device_map.values()) if isinstance(device_map, dict) else {device_map} - {None}
        elsewhere = [device for device in devices if device == "disk" or str(device).startswith(("mps", "xpu"))]
        if elsewhere:
            raise UnsupportedError(f"device_map: names {elsewhere[0]}; dualgemm.hf loads to cpu and to CUDA devices")

    def update_device_map(self, device_map):
        if device_map == "auto":
            # Packed layers have one place; a model that does not fit one is spread by a map of its modules.
            on_card = torch.cuda.is_available() and unsupported(torch.device("cuda", 0)) is None
            device_map = {"": torch.device("cuda", 0) if on_card else "cpu"}
        if isinstance(device_map, dict):
            cuda = lambda device: torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            self.devices = {name: cuda(device) for name, device in device_map.items()}
            # Spelled alike: accelerate puts hooks everywhere if there are two words for one device.
            device_map = {name: str(device) for name, device in self.devices.items()}
        return device_map

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        root = pathlib.Path(checkpoint_files[0]).parent.absolute()
        # One file may be a part; the directory has the configuration, too.
        self.checkpoint = Checkpoint(root)
        theirs, ours = ({pathlib.Path(f).name for f in files} for files in (checkpoint_files, self.checkpoint._paths()))
        if theirs != ours:
            raise CheckpointError(
                f"{root}: transformers reads {', '.join(sorted(theirs))}, and the tensors in 4 bits would come from "
                f"{', '.join(sorted(ours))}; files of one model alone are needed"
            )
        self.stamps = {path: _stamp(path) for path in self.checkpoint._paths()}
        report = patch_model(model, self.checkpoint, devices=self.devices, **_how)
        model.dualgemm_report = report
        floats = [f"{name} ({why})" for name, why in report.left.items() if " on cuda" in f" {why}"]
        if floats:
            # The directory has no floats to load in their place.
            raise UnsupportedError(f"{floats[0]}: its weights are in 4 bits alone; device_map='cpu' loads them")
        set_loading(model, True)
        packed = [name for name in report.replaced if isinstance(model.get_submodule(name), Packed)]
        for name in packed:
            # From here transformers initializes weights of children that have none, in some models.
            parent = model.get_submodule(name.rpartition(".")[0])
            parent._is_hf_initialized = not parent._non_persistent_buffers_set
        # What has its own weight now is tied to no other.
        tied = model.all_tied_weights_keys
        model.all_tied_weights_keys = {k: v for k, v in tied.items() if k.rpartition(".")[0] not in packed}
        known = {m: rf"^{re.escape(m)}\b" for m in (*self.checkpoint.modules(), *packed)}
        expected = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = expected | set(known.values())
        left = {normal(name): why for name, why in report.left.items() if name not in report.replaced}
        used = [pattern for module, pattern in known.items() if module not in report.unused and normal(module) not in left]
        self._refuse_other_types(model, checkpoint_files, re.compile("|".join(used) or "(?!)"), left)
        self._refuse_missing(model)

    def _refuse_other_types(self, model, files, known, left):
        """transformers would take numbers of other formats for values, without their scales."""
        floats = {normal(name) for name, value in model.state_dict().items() if value.is_floating_point()}
        for name, dtype in _types(files):
            if dtype in FLOATS or known.match(name):
                continue
            module, _, last = name.rpartition(".")
            ((targets, _),) = in_model(model, [module]).values()
            if floats.isdisjoint(normal(name) for target in targets for name in (target, f"{target}.{last}")):
                continue
            if {module, name} & set(self.checkpoint.modules()):
                why = f"in 4 bits, and {left.get(normal(module), 'what the model makes of it is not computed by dualgemm')}"
            else:
                why = f"{dtype}; dualgemm.hf loads layers in NVFP4 and floats of 16, 32 and 64 bits"
            raise CheckpointError(f"{self.checkpoint.path}: {name} is {why}")

    def _refuse_missing(self, model):
        """transformers would give what the files have not random numbers, and say so in its log alone."""
        adjust = model._adjust_missing_and_unexpected_keys

        def adjust_and_refuse(loading_info):
            adjust(loading_info)
            missing = sorted(loading_info.missing_keys)
            if missing:
                raise CheckpointError(
                    f"{self.checkpoint.path}: has nothing for {len(missing)} tensors of {type(model).__name__}: "
                    f"{', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}"
                )

        model._adjust_missing_and_unexpected_keys = adjust_and_refuse

    def _process_model_after_weight_loading(self, model, **kwargs):
        set_loading(model, False)
        without_hooks(model)
        # Weights in 16 bits are there now.
        model.dualgemm_report.layers = take_layers(model)
        del model._adjust_missing_and_unexpected_keys
        # What is saved has the files' names already.
        model._weight_conversions = []
        names = [name for name, dtype in _types(self.checkpoint._paths()) if dtype in FLOATS]
        as_read = _as_read(model, names, set(self.checkpoint.modules()))
        made = {name: value for name, value in self._state(model).items() if normal(name) not in as_read}
        self.digests = {name: _digest(value) for name, value in made.items() if not value.is_meta}
        return model

    def _state(self, model):
        set_loading(model, True)
        try:
            return model.state_dict()
        finally:
            set_loading(model, False)

    def get_state_dict_and_metadata(self, model):
        from safetensors.torch import load_file

        now = self._state(model)
        state = {}
        for file, stamp in self.stamps.items():
            if _stamp(file) != stamp:
                raise UnsupportedError(f"{file}: has changed since it was read; save_pretrained writes the tensors that were read")
            state.update(load_file(file))
        names = [name for name, value in state.items() if value.is_floating_point()]
        as_read = _as_read(model, names, set(self.checkpoint.modules()))
        for name, value in now.items():
            held, digest = as_read.get(normal(name)), self.digests.get(name)
            changed = not _same(value, state[held]) if held else digest is not None and _digest(value) != digest
            if changed:
                raise UnsupportedError(
                    f"{name}: is no longer what was read; save_pretrained writes the tensors of {self.checkpoint.path}"
                )
        return state, {}

    def is_serializable(self):
        return True

    @property
    def is_trainable(self):
        return False

    @property
    def is_compileable(self):
        return True


class _Choice:
    """Ours for NVFP4, what was registered before for anything else."""

    def __init__(self, ours, theirs):
        self.ours, self.theirs = ours, theirs

    def from_dict(self, config, **kwargs):
        if is_nvfp4(config):
            return self.ours.from_dict(config, **kwargs)
        if self.theirs is None:
            raise UnsupportedError(
                f"quantization_config: quant_method {config.get('quant_method')!r} with {config.get('quant_algo')!r}; "
                "dualgemm.hf loads NVFP4"
            )
        return self.theirs.from_dict(config, **kwargs)

    def __call__(self, config, **kwargs):
        return (self.ours if isinstance(config, Config) else self.theirs)(config, **kwargs)


def register(*, quantize_a=None, group=None):
    """Makes ``from_pretrained`` take NVFP4 directories; other formats stay with whom they were. ``quantize_a`` and ``group`` are
    those of :func:`dualgemm.nn.patch_model`. A second call changes them alone."""
    quantize_a_text(quantize_a)
    check_group(group)
    _how.update(quantize_a=quantize_a, group=group)
    for mapping, ours in (
        (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, Config),
        (auto.AUTO_QUANTIZER_MAPPING, Quantizer),
    ):
        for method in METHODS:
            before = mapping.get(method)
            if not isinstance(before, _Choice):
                mapping[method] = _Choice(ours, before)
