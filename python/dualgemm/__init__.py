"""Language models on 4-bit weights: gated MLPs, mixtures of experts and linear layers.

>>> w = dualgemm.Mlp.from_checkpoint("model-nvfp4", layer=0)
>>> y = dualgemm.mlp(a, w)

``a`` is a numpy array, a torch tensor, anything with DLPack or ``__cuda_array_interface__``, or a :class:`Quantized`;
the result is a torch tensor where ``a`` is one, else a numpy array. Torch is never imported here; ``dualgemm.nn``,
``dualgemm.hf`` and :func:`calibrate` need it.
"""

from . import errors
from ._arrays import Quantized
from ._dualgemm import Checkpoint, __version__
from ._ops import Experts, Linear, Mlp, Weights, dequantize, experts, linear, mlp, quantize, swiglu
from ._threads import get_num_threads, set_num_threads
from ._tools import Report, bench, convert, inspect, quantize_model, run, simulate, validate
from .errors import (
    ArgumentError,
    CheckpointError,
    CheckpointFileError,
    Error,
    OperandError,
    UnsupportedError,
)


def calibrate(model, batches):
    """The largest magnitude of what goes into each linear layer of a model; see :mod:`dualgemm.calibration`. Needs torch."""
    # Torch is not imported unasked.
    from . import calibration

    return calibration.calibrate(model, batches)


__all__ = [
    "ArgumentError",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFileError",
    "Error",
    "Experts",
    "Linear",
    "Mlp",
    "OperandError",
    "Quantized",
    "Report",
    "UnsupportedError",
    "Weights",
    "__version__",
    "bench",
    "calibrate",
    "convert",
    "dequantize",
    "errors",
    "experts",
    "get_num_threads",
    "inspect",
    "linear",
    "mlp",
    "quantize",
    "quantize_model",
    "run",
    "set_num_threads",
    "simulate",
    "swiglu",
    "validate",
]
