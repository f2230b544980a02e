"""A mixture of experts whose experts stay in the host's memory, where the processor multiplies them, while attention and all else
is on a GPU.

    python examples/offload/experts.py make DIR            # Qwen3-MoE of real shapes and random weights, in 4 bits
    python examples/offload/experts.py run DIR --device cuda:0

Any directory of ModelOpt or llm-compressor in NVFP4 whose experts dualgemm computes can stand in the place of DIR. With
``--device cpu`` all is on the processor. Needs torch, transformers and accelerate.
"""

import argparse
import json
import shutil
import time

import torch
import transformers

import dualgemm
import dualgemm.hf
from dualgemm.nn import NVFP4Experts

#: Qwen3-30B-A3B, with fewer layers.
SHAPES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32768,
}


def make(args):
    """Writes floats beside DIR, quantizes them and deletes them."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{**SHAPES, **json.loads(args.shapes)}, norm_topk_prob=True)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(f"{args.directory}.floats")
    report = dualgemm.quantize_model(f"{args.directory}.floats", args.directory)
    shutil.rmtree(f"{args.directory}.floats")
    print(f"{len(report['tensors'])} layers in 4 bits in {args.directory}")


def load(directory, device):
    """The model on a device, its experts on the processor."""
    dualgemm.hf.register()
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    experts = [name for name, _ in skeleton.named_modules() if name.endswith(".experts")]
    device_map = {"": device, **dict.fromkeys(experts, "cpu")}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, device_map=device_map)


def seconds(device, work):
    """How long work takes, and its result."""
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finish()
    start = time.perf_counter()
    result = work()
    finish()
    return time.perf_counter() - start, result


def run(args):
    device = torch.device(args.device)
    model = load(args.directory, device).eval()
    experts = [module for module in model.modules() if isinstance(module, NVFP4Experts)]
    held = sum(module.weights.nbytes for module in experts)
    print(model.dualgemm_report)
    print(f"{len(experts)} blocks of experts, {held / 2**30:.2f} GiB on cpu; all else on {device}")
    vocabulary = model.config.get_text_config().vocab_size
    prompt = torch.randint(vocabulary, (1, args.prompt), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        # The first calls load kernels and take memory.
        model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0)
        prefill, _ = seconds(device, lambda: model(prompt, use_cache=True, logits_to_keep=1))
        more = {"min_new_tokens": args.tokens, "max_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0}
        whole, tokens = seconds(device, lambda: model.generate(prompt, **more))
    decode = (whole - prefill) / max(args.tokens - 1, 1)
    print(f"prefill of {args.prompt}: {args.prompt / prefill:.1f} tokens/s; decode: {1 / decode:.1f} tokens/s")
    print(tokens[0, args.prompt :].tolist())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.add_argument("directory")
    making.add_argument("--shapes", default="{}", help="entries of the configuration as JSON")
    making.set_defaults(command=make)
    running = commands.add_parser("run")
    running.add_argument("directory")
    running.add_argument("--device", default="cuda:0")
    running.add_argument("--prompt", type=int, default=512)
    running.add_argument("--tokens", type=int, default=64)
    running.set_defaults(command=run)
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
