"""Operands, the f64 reference and rows of measurements for products of torch on one CUDA device."""

import typing
import warnings

import torch

from .. import __version__
from .._arrays import Quantized

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Peer(typing.NamedTuple):
    """Something to be measured.

    ``prepare(operands)`` gives the call, which writes ``operands.c``; what depends on the weights alone is done before it
    returns, as at load time. ``weight_bits`` is the size of a weight in memory; a rotation has to be larger than
    the cache.
    """

    prepare: typing.Callable
    kernel: str
    weight_bits: float = 4.5


class Operands:
    """One copy of the operands: all sixteen codes, block scales from 2^-4 to 2^4, and C of about one."""

    def __init__(self, m, n, k, a_format, generator):
        self.a_format = a_format
        self.device = device = generator.device
        self.alpha = 2.0**-7 / k**0.5
        both = self._quantized(2 * n, k, generator)
        #: Gate above up, as one matrix of 2n rows.
        self.gate_up = both
        self.gate, self.up = (both._replace(codes=both.codes[i], scales=both.scales[i]) for i in self._halves(n))
        #: A as it is given if it is nvfp4.
        self.a_quantized = self._quantized(m, k, generator)._replace(global_scale=1.0)
        #: A in float16, as it is given or to be filled by each call.
        self.a = torch.randn(m, k, device=device, generator=generator).mul_(12).half()
        self.x = torch.empty(m, 2 * n, dtype=torch.float16, device=device)
        self.c = torch.empty(m, n, dtype=torch.float16, device=device)

    @staticmethod
    def _halves(n):
        return slice(0, n), slice(n, 2 * n)

    def _quantized(self, rows, k, generator):
        integers = lambda low, high, width: torch.randint(  # noqa: E731
            low, high, (rows, width), dtype=torch.uint8, generator=generator, device=self.device
        )
        return Quantized(integers(0, 256, k // 2), integers(0x18, 0x58, k // 16), self.alpha)

    def read_a(self):
        """What each call does first: A in float16."""
        if self.a_format == "nvfp4":
            from .kernels import expand

            expand(self.a_quantized, self.a)
        return self.a

    def want(self, rows):
        """Some rows of C in f64."""
        a = decoded(self.a_quantized, rows) if self.a_format == "nvfp4" else self.a[rows].double()
        gate, up = (a @ decoded(half).T for half in (self.gate, self.up))
        return torch.nn.functional.silu(gate) * up


def decoded(q, rows=slice(None)):
    """Values in f64."""
    codes, scales = q.codes[rows].int(), q.scales[rows].view(torch.float8_e4m3fn).double()
    table = torch.tensor(E2M1 + tuple(-x for x in E2M1), dtype=torch.float64, device=codes.device)
    values = torch.stack([table[codes & 15], table[codes >> 4]], dim=-1).flatten(-2)
    return values * scales.repeat_interleave(16, dim=-1) * q.global_scale


def error(operands):
    """Relative L2 error of C on first, middle and last row."""
    m = len(operands.c)
    rows = sorted({0, m // 2, m - 1})
    want = operands.want(rows)
    return ((operands.c[rows].double() - want).norm() / want.norm()).item()


def row(subject, shape, a_format, limits, timing, rel_l2):
    """A measurement as the rows of ``dualgemm.bench`` are."""
    (m, n, k), (median, p10, p90) = shape, timing
    flops = 4.0 * m * n * k
    moved = m * k * (2.0 if a_format == "f16" else 0.5625) + 2 * n * k * 0.5625 + 2.0 * m * n
    result = {
        **subject,
        "op": "gate-up",
        "m": m,
        "n": n,
        "k": k,
        "a_format": a_format,
        "out_dtype": "f16",
        "threads": 0,
        "median_us": median,
        "p10_us": p10,
        "p90_us": p90,
        "gflops": flops / median * 1e-3,
        "gbps": moved / median * 1e-3,
        "flops_per_byte": flops / moved,
        "rel_l2": rel_l2,
    }
    if limits:
        compute, memory = flops / limits["flops_per_s"] * 1e6, moved / limits["bytes_per_s"] * 1e6
        floor = max(compute, memory)
        bound = "compute" if compute >= memory else "memory"
        result.update(floor_us=floor, roofline_fraction=floor / median, bound=bound)
    return result


def measure(shapes, a_formats, peers, limits, machine):
    """A row for every shape, format of A and peer; a warning instead for what does not run."""
    from .timing import copies, time_calls

    rows = []
    for shape in shapes:
        for a_format in a_formats:
            for name, peer in peers.items():
                subject = {
                    "device": torch.cuda.get_device_name(),
                    "driver": machine.get("driver", ""),
                    "commit": machine.get("commit", __version__),
                    "strategy": name,
                    "kernel": peer.kernel,
                }
                try:
                    generator = torch.Generator("cuda").manual_seed(1)
                    count = copies(int(2 * shape[1] * shape[2] * peer.weight_bits / 8))
                    sets = [Operands(*shape, a_format, generator) for _ in range(count)]
                    calls = [peer.prepare(operands) for operands in sets]
                    for call in calls:
                        call()
                    rel_l2 = error(sets[0])
                    rows.append(row(subject, shape, a_format, limits, time_calls(calls), rel_l2))
                except Exception as reason:
                    warnings.warn(f"{name} on {shape}, A {a_format}: {reason}", RuntimeWarning, stacklevel=3)
                finally:
                    sets = calls = None
                    torch.cuda.empty_cache()
    return rows
