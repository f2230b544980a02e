"""Parts of layers on the ranks of a process group of torch.distributed. Needs torch."""

import torch

from .errors import OperandError


def rank_of(group):
    """This rank's number in a group and the group's size, as :meth:`from_checkpoint` of weights takes them."""
    if group is None:
        return {}
    return {"rank": torch.distributed.get_rank(group), "world": torch.distributed.get_world_size(group)}


def together(group, make):
    """Makes a rank's part of a module or a model, on all ranks of a group at once. What fails on one is an error on all, and so
    are parts of different ones: else the others would wait for that rank in their first sum, or add what does not belong together."""
    if group is None:
        return make()
    module = error = None
    try:
        module = make()
        said = module.part()
    except Exception as raised:  # noqa: BLE001 — it is raised below, after the others know.
        error, said = raised, str(raised)
    world = torch.distributed.get_world_size(group)
    all_said = [None] * world
    torch.distributed.all_gather_object(all_said, (error is not None, said), group=group)
    if error is not None:
        raise error
    for rank, (failed, text) in enumerate(all_said):
        if failed:
            raise OperandError(f"rank {rank} of {world} has no part: {text}")
        if text != said:
            own = torch.distributed.get_rank(group)
            raise OperandError(f"rank {rank} of {world} has {text}, rank {own} has {said}; parts of one are needed")
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
