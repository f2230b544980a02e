"""How many threads share the work: as many as torch has, where it is loaded, until somebody says otherwise."""

import ctypes
import functools
import os
import sys

from . import _dualgemm

#: The number that was taken over from torch last, and whether a number was asked for here.
_torchs, _asked = None, False


def follow(torch):
    """Takes over torch's threads if their number has changed, as many of them as are valid here."""
    global _torchs
    if not _asked and (threads := torch.get_num_threads()) != _torchs:
        _dualgemm.set_num_threads(min(threads, _dualgemm.MOST_THREADS), _parallel(torch))
        _torchs = threads


@functools.cache
def _parallel(torch):
    """The address of the function by which compiled code starts threads of torch's OpenMP runtime; 0 where that is another one."""
    try:
        library = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cpu.so"))
        # As for torch's own code, what was preloaded comes before what torch brings.
        function = getattr(ctypes.CDLL(None), "GOMP_parallel", library.GOMP_parallel)
        return ctypes.cast(function, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return 0


def set_num_threads(threads):
    """Sets how many threads share the work from the next call on. 0 stands for as many as torch has (torch.set_num_threads),
    where it is loaded, and else for as many as there are processors; that is also where it begins."""
    global _torchs, _asked
    _dualgemm.set_num_threads(threads)
    _torchs, _asked = None, threads != 0


def get_num_threads():
    """How many threads share the work."""
    torch = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):
        follow(torch)
    return _dualgemm.get_num_threads()
