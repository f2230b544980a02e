from os import PathLike
from typing import Any, Literal, Sequence

__version__: str

class Weights:
    @staticmethod
    def from_checkpoint(
        path: str | PathLike[str],
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
    def device(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
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
    @property
    def nbytes(self) -> int: ...
    @property
    def _number(self) -> int: ...
    def __copy__(self) -> Weights: ...
    def __deepcopy__(self, memo: Any) -> Weights: ...
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

def set_num_threads(threads: int) -> None: ...
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
def down(out: Any, path: str | PathLike[str], layer: int | None = ..., **keywords: Any) -> None: ...
def challenge_operands(m: int, n: int, k: int, seed: int, full: bool) -> list[tuple[bytes, bytes]]: ...
def challenge_scales(scales: Any) -> bytes: ...
def reference(a: Any, gate: tuple[Any, ...], up: tuple[Any, ...], out: Any, activation: str) -> None: ...
def command(args: Sequence[str]) -> tuple[str, bool]: ...
