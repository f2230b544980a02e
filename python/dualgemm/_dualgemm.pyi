from os import PathLike
from typing import Any, Literal, Sequence

from typing_extensions import Self

__version__: str

_Path = str | PathLike[str]

class Checkpoint:
    def __init__(
        self,
        path: _Path,
        *,
        activation: str | None = ...,
        convention: str | None = ...,
        gate_up_order: str | None = ...,
        nibble_order: Literal["lo-hi", "hi-lo"] | None = ...,
        scale_layout: Literal["linear", "128x4", "8x4"] | None = ...,
        within: str | None = ...,
        unusable_input_scale_is_one: bool = ...,
    ) -> None: ...
    @property
    def path(self) -> Any: ...
    @property
    def convention(self) -> str: ...
    def modules(self) -> list[str]: ...
    def mlps(self) -> list[tuple[int, Literal["dense", "shared", "experts"], str]]: ...
    def _within(self, name: str) -> Checkpoint: ...
    def _paths(self) -> list[Any]: ...
    def _activation(self, layer: int, kind: str) -> str: ...
    def _has_bias(self, module: str) -> bool: ...
    def _decode(self, module: str, out: Any) -> None: ...
    def _config(self) -> str | None: ...
    def _check_linear(self, module: str, quantize_a: Any) -> tuple[int, int, bool]: ...
    def _check_mlp(
        self, layer: int, kind: str, quantize_a: Any, quantize_hidden: Any
    ) -> tuple[int, list[int], list[bool]]: ...
    def __copy__(self) -> Checkpoint: ...
    def __deepcopy__(self, memo: Any) -> Checkpoint: ...

class Packed:
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def device(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def _number(self) -> int: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, memo: Any) -> Self: ...

class Gated(Packed):
    @property
    def hidden(self) -> int: ...
    @property
    def formats(self) -> tuple[str, str]: ...
    @property
    def activation(self) -> str: ...
    @property
    def input_scales(self) -> tuple[float | None, float | None]: ...
    def _check(self, quantize_a: Any, quantize_hidden: Any) -> None: ...

class Linear(Packed):
    @staticmethod
    def from_checkpoint(
        path: _Path | Checkpoint,
        module: str,
        *,
        split: Literal["out", "in"] | None = ...,
        rank: int = ...,
        world: int = ...,
        device: Any = ...,
        convention: str | None = ...,
        nibble_order: Literal["lo-hi", "hi-lo"] | None = ...,
        scale_layout: Literal["linear", "128x4", "8x4"] | None = ...,
        unusable_input_scale_is_one: bool = ...,
    ) -> Linear: ...
    @staticmethod
    def from_tensors(
        weight: tuple[Any, ...], *, bias: Any = ..., input_scale: float | None = ..., device: Any = ...
    ) -> Linear: ...
    @property
    def format(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def input_scale(self) -> float | None: ...
    def _check(self, quantize_a: Any) -> None: ...
    def _run(self, a: Any, out: Any, quantize_a: Any, stream: int) -> None: ...

class Mlp(Gated):
    @staticmethod
    def from_checkpoint(
        path: _Path | Checkpoint,
        layer: int | None = ...,
        *,
        expert: int | None = ...,
        shared_expert: bool = ...,
        rank: int = ...,
        world: int = ...,
        device: Any = ...,
        **reading: Any,
    ) -> Mlp: ...
    @staticmethod
    def from_tensors(
        *,
        gate: tuple[Any, ...],
        up: tuple[Any, ...],
        down: tuple[Any, ...],
        gate_bias: Any = ...,
        up_bias: Any = ...,
        down_bias: Any = ...,
        input_scale: float | None = ...,
        down_input_scale: float | None = ...,
        activation: str = ...,
        device: Any = ...,
    ) -> Mlp: ...
    @property
    def names(self) -> list[str]: ...
    def _run(self, a: Any, out: Any, quantize_a: Any, quantize_hidden: Any, stream: int) -> None: ...

class Experts(Gated):
    @staticmethod
    def from_checkpoint(
        path: _Path | Checkpoint,
        layer: int | None = ...,
        *,
        experts: Sequence[int] | None = ...,
        count: int | None = ...,
        router_weights: Literal["output", "input"] | None = ...,
        rank: int = ...,
        world: int = ...,
        device: Any = ...,
        **reading: Any,
    ) -> Experts: ...
    @staticmethod
    def from_tensors(
        experts: Sequence[dict[str, Any] | None],
        *,
        activation: str = ...,
        router_weights: Literal["output", "input"] = ...,
        device: Any = ...,
    ) -> Experts: ...
    @property
    def name(self) -> str | None: ...
    @property
    def count(self) -> int: ...
    @property
    def here(self) -> list[int]: ...
    @property
    def _places(self) -> list[int]: ...
    def _run(
        self,
        a: Any,
        out: Any,
        topk_ids: Any,
        topk_weights: Any,
        quantize_a: Any,
        quantize_hidden: Any,
        add: bool,
        stream: int,
    ) -> None: ...

class FloatLinear:
    def __init__(self, weight: Any, bias: Any) -> None: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def _check(self) -> None: ...
    def _run(self, a: Any, out: Any, stream: int) -> None: ...

class Weights(Packed):
    @staticmethod
    def from_checkpoint(
        path: _Path | Checkpoint,
        layer: int | None = ...,
        *,
        expert: int | None = ...,
        shared_expert: bool = ...,
        rank: int = ...,
        world: int = ...,
        device: Any = ...,
        activation: str | None = ...,
        convention: str | None = ...,
        gate_up_order: str | None = ...,
        nibble_order: Literal["lo-hi", "hi-lo"] | None = ...,
        scale_layout: Literal["linear", "128x4", "8x4"] | None = ...,
        within: str | None = ...,
        unusable_input_scale_is_one: bool = ...,
    ) -> Weights: ...
    @staticmethod
    def from_tensors(
        *,
        gate: tuple[Any, ...],
        up: tuple[Any, ...],
        gate_bias: Any = ...,
        up_bias: Any = ...,
        activation: str = ...,
        input_scale: float | None = ...,
        device: Any = ...,
        stream: int | None = ...,
    ) -> Weights: ...
    @staticmethod
    def from_fused(
        gate_up: tuple[Any, ...],
        *,
        order: str,
        activation: str = ...,
        input_scale: float | None = ...,
        device: Any = ...,
    ) -> Weights: ...
    @property
    def format(self) -> str: ...
    @property
    def activation(self) -> str: ...
    @property
    def input_scale(self) -> float | None: ...
    @property
    def output_scale(self) -> float | None: ...
    @property
    def names(self) -> tuple[str, str]: ...
    @property
    def global_scales(self) -> tuple[float, float]: ...
    def _check(self, quantize_a: Any, activation_name: str | None) -> None: ...
    def _run(
        self,
        a: Any,
        out: Any,
        quantize_a: Any,
        activation_name: str | None,
        round_gate_up_to_bf16: bool,
        stream: int,
    ) -> float | None: ...

MOST_THREADS: int

def set_num_threads(threads: int, parallel: int = 0) -> None: ...
def get_num_threads() -> int: ...
def quantize(
    x: Any,
    codes: Any,
    scales: Any,
    format_name: str,
    producer: str,
    search: str,
    global_scale: float | None,
    scale_layout: str,
) -> float: ...
def scales_len(rows: int, k: int, format_name: str, scale_layout: str) -> int: ...
def dequantize(q: tuple[Any, ...], out: Any) -> None: ...
def down(out: Any, path: _Path | Checkpoint, layer: int | None = ..., **keywords: Any) -> None: ...
def challenge_operands(m: int, n: int, k: int, seed: int, full: bool) -> list[tuple[bytes, bytes]]: ...
def challenge_scales(scales: Any) -> bytes: ...
def reference(a: Any, gate: tuple[Any, ...], up: tuple[Any, ...], out: Any, activation: str) -> None: ...
def command(args: Sequence[str]) -> tuple[str, bool]: ...
def options(subcommand: str) -> list[tuple[str, bool, str]]: ...
def main(args: Sequence[str]) -> int: ...
