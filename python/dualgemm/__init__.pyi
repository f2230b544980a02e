from os import PathLike
from typing import Any, Literal, NamedTuple, Sequence, Union

from . import errors as errors
from ._dualgemm import Checkpoint as Checkpoint
from ._dualgemm import Experts as Experts
from ._dualgemm import Linear as Linear
from ._dualgemm import Mlp as Mlp
from ._dualgemm import Weights as Weights
from .calibration import Calibration as _Calibration
from .calibration import calibrate as calibrate
from .errors import ArgumentError as ArgumentError
from .errors import CheckpointError as CheckpointError
from .errors import CheckpointFileError as CheckpointFileError
from .errors import Error as Error
from .errors import OperandError as OperandError
from .errors import UnsupportedError as UnsupportedError

__version__: str

_Path = Union[str, "PathLike[str]"]
_ScaleLayout = Literal["linear", "128x4", "8x4"]
_Format = Literal["nvfp4", "mxfp4"]
_QuantizeA = Union[None, Literal["static", "dynamic"], float]

class Quantized(NamedTuple):
    codes: Any
    scales: Any
    global_scale: float = ...
    scale_layout: str = ...
    format: str = ...
    @property
    def shape(self) -> tuple[int, int]: ...

class Report(dict[str, Any]):
    right: bool
    def to_pandas(self) -> Any: ...

def swiglu(
    a: Any,
    w: Weights,
    out: Any = ...,
    stream: Any = ...,
    *,
    out_dtype: Any = ...,
    quantize_a: _QuantizeA = ...,
    activation: str | None = ...,
    round_gate_up_to_bf16: bool = ...,
    out_scale: float | None = ...,
    out_scale_layout: _ScaleLayout = ...,
) -> Any: ...
def linear(
    a: Any, w: Linear | Any, out: Any = ..., *, bias: Any = ..., out_dtype: Any = ..., quantize_a: _QuantizeA = ...
) -> Any: ...
def mlp(
    a: Any,
    w: Mlp,
    out: Any = ...,
    *,
    out_dtype: Any = ...,
    quantize_a: _QuantizeA = ...,
    quantize_hidden: _QuantizeA = ...,
) -> Any: ...
def experts(
    a: Any,
    topk_ids: Any,
    topk_weights: Any,
    w: Experts,
    out: Any = ...,
    *,
    out_dtype: Any = ...,
    quantize_a: _QuantizeA = ...,
    quantize_hidden: _QuantizeA = ...,
    add: bool = ...,
) -> Any: ...
def set_num_threads(threads: int) -> None: ...
def get_num_threads() -> int: ...
def quantize(
    x: Any,
    *,
    format: _Format = ...,
    producer: Literal["modelopt", "compressed-tensors", "torchao", "te", "ggml"] = ...,
    search: Literal["plain", "mse"] = ...,
    global_scale: float | None = ...,
    scale_layout: _ScaleLayout = ...,
) -> Quantized: ...
def dequantize(q: tuple[Any, ...], dtype: Any = ..., *, out: Any = ...) -> Any: ...
def inspect(checkpoint: _Path, *, tensors: bool = ..., **reading: Any) -> Report: ...
def validate(checkpoint: _Path, **reading: Any) -> Report: ...
def quantize_model(
    model: _Path,
    out: _Path,
    *,
    producer: Literal["modelopt", "compressed-tensors", "torchao", "te", "ggml"] = ...,
    search: Literal["mse"] | None = ...,
    separate_scales: bool = ...,
    skip: str | Sequence[str] = ...,
    calibration: _Path | _Calibration | None = ...,
    force: bool = ...,
    **options: Any,
) -> Report: ...
def convert(
    checkpoint: _Path,
    out: _Path,
    to: Literal["modelopt", "compressed-tensors", "gguf"],
    *,
    mlp_only: bool = ...,
    force: bool = ...,
    **reading: Any,
) -> Report: ...
def run(checkpoint: _Path, layer: int | None = ..., **options: Any) -> Report: ...
def bench(shapes: str | Sequence[str] = ..., *, peers: bool = ..., **options: Any) -> Report: ...
def simulate(arch: str, shape: str | tuple[int, int, int], **options: Any) -> Report: ...
