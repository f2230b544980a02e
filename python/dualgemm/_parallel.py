"""Parts of layers on the ranks of a process group of torch.distributed. Needs torch."""

import functools
import hashlib
import json
import mmap
import os

import torch

from ._dualgemm import Checkpoint
from .errors import Error, OperandError


def check_group(group):
    """Raises if something is no group of processes that this one is in."""
    if group is None:
        return
    distributed = torch.distributed
    if not distributed.is_available():
        raise OperandError("group: this torch has no torch.distributed")
    if not isinstance(group, distributed.ProcessGroup):
        if group == distributed.GroupMember.NON_GROUP_MEMBER:
            raise OperandError("group: this process is not in it; the group's processes alone call this")
        found = f"{group!r}, a {type(group).__name__}"
        raise TypeError(f"group: is {found}; a process group of torch.distributed is needed, such as torch.distributed.group.WORLD")


def rank_of(group):
    """This rank's number in a group and the group's size, as :meth:`from_checkpoint` of weights takes them."""
    check_group(group)
    if group is None:
        return {}
    return {"rank": torch.distributed.get_rank(group), "world": torch.distributed.get_world_size(group)}


#: Of a tensor, this many pieces of this many bytes say whether two files hold the same.
PIECES, PIECE = 8, 64


def _sampled(data, begin, end, *more):
    """A digest of pieces of some bytes, or of all if they are few."""
    count = end - begin
    digest = hashlib.blake2b(repr((count, *more)).encode(), digest_size=8)
    if count <= PIECES * PIECE:
        digest.update(data[begin:end])
    else:
        for i in range(PIECES):
            at = begin + (count - PIECE) * i // (PIECES - 1)
            digest.update(data[at : at + PIECE])
    return digest.hexdigest()


def _tensors_of(path, number):
    """Digests of a file's tensors by name; of a file of another kind than safetensors, of its stretches."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = int.from_bytes(data[:8], "little")
        if data[8:9] == b"{" and length <= len(data) - 8:
            header = json.loads(data[8 : 8 + length])
            header.pop("__metadata__", None)
            places = {name: [x + 8 + length for x in entry["data_offsets"]] for name, entry in header.items()}
            return {name: _sampled(data, *at, header[name]["dtype"], header[name]["shape"]) for name, at in places.items()}
        # Names and numbers of a model come first, and all of them count.
        starts = [*(max(1 << 20, len(data) * i // 1024) for i in range(1024)), len(data)]
        stretches = {f"byte {a} of file {number}": (a, b) for a, b in zip(starts, starts[1:]) if a < b}
        first = {f"byte 0 of file {number}": hashlib.blake2b(data[: 1 << 20], digest_size=8).hexdigest()}
        return first | {name: _sampled(data, *at) for name, at in stretches.items()}


def tensors_of(files):
    """Digests of samples of all tensors of a checkpoint's files."""
    tensors = {}
    for number, path in enumerate(files):
        tensors |= _tensors_of(path, number)
    return dict(sorted(tensors.items()))


@functools.lru_cache(64)
def _digest(files):
    tensors = tensors_of([path for path, *_ in files])
    return hashlib.blake2b(json.dumps(tensors).encode(), digest_size=16).hexdigest()


def files_of(checkpoint):
    """A checkpoint's files; none if it cannot be opened, which its reader reports."""
    if checkpoint is None:
        return []
    try:
        checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    except (Error, TypeError):
        return []
    return sorted(map(str, checkpoint._paths()))


def gathered(group, what):
    """What each rank of a group has of something."""
    of_ranks = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(of_ranks, what, group=group)
    return of_ranks


def first_difference(group, ours):
    """The first name at which two ranks differ: the name, the other rank, this rank, and what each has."""
    own, of_ranks = torch.distributed.get_rank(group), gathered(group, ours)
    for rank, theirs in enumerate(of_ranks):
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                return name, rank, own, theirs.get(name, "nothing"), ours.get(name, "nothing")
    raise AssertionError("ranks that differ have no difference")


def together(group, make, checkpoint=None):
    """Makes a rank's part of a module or a model, on all ranks of a group at once. What fails on one is an error on all, and so
    are parts of different ones or of different files: else the others would wait for that rank in their first sum, or add what
    does not belong together."""
    check_group(group)
    if group is None:
        return make()
    try:
        return _agreed(group, make, checkpoint)
    except Exception as error:
        # Whoever makes several parts at once does not tell the others again.
        error.is_told = True
        raise


def _agreed(group, make, checkpoint):
    module = error = None
    try:
        module = make()
        said, files = module.part(), files_of(getattr(module, "checkpoint", checkpoint))
        digest = _digest(tuple((path, stat.st_size, stat.st_mtime_ns) for path in files for stat in [os.stat(path)]))
    except Exception as raised:  # noqa: BLE001 — it is raised below, after the others know.
        if getattr(raised, "is_told", False):
            raise
        error, said, digest = raised, str(raised) or repr(raised), None
    text = said if isinstance(said, str) else hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()
    all_said = gathered(group, (error is not None, text, digest))
    if error is not None:
        raise error
    world = len(all_said)
    for rank, (failed, why, _) in enumerate(all_said):
        if failed:
            raise OperandError(f"rank {rank} of {world} has no part: {why}")
    # All see the same, so all gather more.
    if len({text for _, text, _ in all_said}) > 1:
        said = {"": said} if isinstance(said, str) else said
        name, rank, own, theirs, ours = first_difference(group, said)
        if not name:
            raise OperandError(f"rank {rank} of {world} has {theirs}, rank {own} has {ours}; parts of one are needed")
        raise OperandError(
            f"{name}: rank {rank} of {world} has {theirs}, rank {own} has {ours}; all ranks need the same model, checkpoint and "
            "arguments"
        )
    if len({digest for *_, digest in all_said}) > 1:
        name, rank, own, *_ = first_difference(group, tensors_of(files))
        where = gathered(group, files[0] if len(files) == 1 else os.path.dirname((files or ["nothing"])[0]))
        raise OperandError(
            f"{name}: the checkpoints of ranks differ, here first: rank {rank} of {world} reads {where[rank]}, rank {own} reads "
            f"{where[own]}; all ranks need the same files"
        )
    return module


def experts_of(checkpoint, layer, group):
    """The numbers of a rank's experts of a layer, in order and evenly; the layer; and how many the layer has."""
    layers = sorted({number for number, kind, _ in checkpoint.mlps() if kind == "experts"})
    if layer is None and len(layers) == 1:
        layer = layers[0]
    if layer not in layers:
        raise OperandError(f"layer: is {layer}; {checkpoint.path} has experts in {', '.join(map(str, layers)) or 'no layer'}")
    count = checkpoint._check_mlp(layer, "experts", None, None)[0]
    of = rank_of(group)
    rank, world = of["rank"], of["world"]
    if count < world:
        raise OperandError(
            f'layer {layer} has {count} experts for {world} ranks; each needs one, or a part of all, by split="features"'
        )
    return list(range(rank * count // world, (rank + 1) * count // world)), layer, count
