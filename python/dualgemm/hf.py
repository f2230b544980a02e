"""transformers' own loading: after :func:`register`, ``from_pretrained`` of a directory in NVFP4, as ModelOpt or
llm-compressor write it, gives a model whose linear layers, gated MLPs and blocks of experts are those of ``dualgemm.nn``.

>>> import dualgemm.hf
>>> dualgemm.hf.register()
>>> model = AutoModelForCausalLM.from_pretrained(DIR)

transformers builds the model without memory, the quantized layers are replaced there, and only what stays in floats is
loaded by transformers. ``save_pretrained`` writes the tensors that were read. Needs torch and transformers.
"""

import pathlib
import re

import torch
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._dualgemm import Checkpoint
from .errors import UnsupportedError
from ._patch import unsupported
from .nn import Packed, patch_model

#: How transformers knows directories by what their ``quantization_config`` says in ``quant_method``.
METHODS = ("modelopt", "compressed-tensors")

_quantize_a = None


def is_nvfp4(config):
    """Whether a ``quantization_config`` is of NVFP4, whoever wrote it."""
    if config.get("quant_method") == "modelopt":
        algorithm, layers = str(config.get("quant_algo")), config.get("quantized_layers") or {}
        mixed = algorithm == "MIXED_PRECISION" and all("NVFP4" in str(l.get("quant_algo")) for l in layers.values())
        return mixed or "NVFP4" in algorithm
    return str(config.get("format")).startswith("nvfp4")


class Config(QuantizationConfigMixin):
    """A ``quantization_config`` as the file has it."""

    def __init__(self, **entries):
        self.__dict__.update(entries)


def set_loading(model, loading):
    """transformers asks the model for its state while it loads, and only then may what is in 4 bits be missing there."""
    for module in model.modules():
        if isinstance(module, Packed):
            module.loading = loading


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
        return device_map

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        root = pathlib.Path(checkpoint_files[0]).parent
        # One file may be a part; the directory has the configuration, too.
        self.checkpoint = Checkpoint(root)
        report = patch_model(model, self.checkpoint, quantize_a=_quantize_a, devices=self.devices)
        model.dualgemm_report = report
        floats = [f"{name} ({why})" for name, why in report.left.items() if " on cuda" in f" {why}"]
        if floats:
            # The directory has no floats to load in their place.
            raise UnsupportedError(f"{floats[0]}: its weights are in 4 bits alone; device_map='cpu' loads them")
        set_loading(model, True)
        known = {rf"^{re.escape(module)}\." for module in (*self.checkpoint.modules(), *report.replaced)}
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | known

    def update_weight_conversions(self, weight_conversions, model):
        """Experts that are here already are not to be read and put together once more."""
        if any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters()):
            return weight_conversions
        return [c for c in weight_conversions if not any("experts" in target for target in c.target_patterns)]

    def _process_model_after_weight_loading(self, model, **kwargs):
        set_loading(model, False)
        return model

    def get_state_dict_and_metadata(self, model):
        from safetensors.torch import load_file

        state = {}
        for file in sorted(pathlib.Path(self.checkpoint.path).glob("*.safetensors")):
            state.update(load_file(file))
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


def register(*, quantize_a=None):
    """Makes ``from_pretrained`` take NVFP4 directories; other formats stay with whom they were. ``quantize_a`` is that of the
    modules, as for :func:`dualgemm.nn.patch_model`. A second call changes ``quantize_a`` alone."""
    global _quantize_a
    _quantize_a = quantize_a
    for mapping, ours in (
        (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, Config),
        (auto.AUTO_QUANTIZER_MAPPING, Quantizer),
    ):
        for method in METHODS:
            before = mapping.get(method)
            if not isinstance(before, _Choice):
                mapping[method] = _Choice(ours, before)
