"""How many threads share the work: as many as torch has, where it is loaded, until somebody says otherwise."""

import sys

from . import _dualgemm

#: The number that was taken over from torch last, and whether a number was asked for here.
_torchs, _asked = None, False


def follow(torch):
    """Takes over the number of torch's threads if it has changed."""
    global _torchs
    if not _asked and (threads := torch.get_num_threads()) != _torchs:
        _dualgemm.set_num_threads(threads)
        _torchs = threads


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
