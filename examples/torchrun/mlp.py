"""A whole gated MLP tensor-parallel: gate and up split over N without communication, one all-reduce after down.

    torchrun --nproc-per-node 2 examples/torchrun/mlp.py testdata/smollm2-135m-layer14/modelopt-nvfp4

Each rank reads its features of gate and up and its columns of down, and no other bytes. On GPUs the ranks talk through
NCCL, else through gloo. Rank 0 compares the sum with the MLP computed on one rank.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist

from dualgemm.nn import NVFP4GatedMLP


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()

    # A card for each rank, or the processor for all.
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    mlp = NVFP4GatedMLP.from_checkpoint(args.checkpoint, args.layer, device=device, group=dist.group.WORLD)
    torch.manual_seed(0)
    x = torch.randn(args.tokens, mlp.weights.shape[1]).to(device, torch.bfloat16)
    with torch.no_grad():
        y = mlp(x)

    wrong = 0
    if rank == 0:
        with torch.no_grad():
            alone = NVFP4GatedMLP.from_checkpoint(args.checkpoint, args.layer, device=device)(x)
        error = ((y - alone).float().norm() / alone.float().norm()).item()
        # Partial sums are rounded to bf16 once per rank.
        wrong = int(not error < 1e-2)
        print(f"{world} ranks on {device.type}, {mlp.weights!r} each: relative L2 {error:.2e} against one rank")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
