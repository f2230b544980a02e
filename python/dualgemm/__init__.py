"""The gated MLP of language models on 4-bit weights: ``C = SiLU(A·B1ᵀ) ∘ (A·B2ᵀ)``.

>>> w = dualgemm.Weights.from_checkpoint("model-nvfp4", layer=0)
>>> c = dualgemm.swiglu(a, w)

``a`` is a numpy array, a torch tensor, anything with DLPack or ``__cuda_array_interface__``, or a :class:`Quantized`;
``c`` is a torch tensor where ``a`` is one, else a numpy array. Torch is never imported here; ``dualgemm.nn`` needs it.
"""

from . import errors
from ._arrays import Quantized
from ._dualgemm import __version__, get_num_threads, set_num_threads
from ._ops import Weights, dequantize, quantize, swiglu
from ._tools import Report, bench, inspect, run, simulate, validate
from .errors import (
    ArgumentError,
    CheckpointError,
    CheckpointFileError,
    Error,
    OperandError,
    UnsupportedError,
)

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "CheckpointFileError",
    "Error",
    "OperandError",
    "Quantized",
    "Report",
    "UnsupportedError",
    "Weights",
    "__version__",
    "bench",
    "dequantize",
    "errors",
    "get_num_threads",
    "inspect",
    "quantize",
    "run",
    "set_num_threads",
    "simulate",
    "swiglu",
    "validate",
]
