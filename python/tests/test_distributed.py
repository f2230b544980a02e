"""Parts of layers on the ranks of a process group: two and three processes over gloo, against one. Skipped, visibly, where torch
is missing."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

K, N, EXPERTS = 96, 192, 5

#: What each rank runs: `check(group, rank, world, path)` of this file by name; what it returns is written down.
RUN = """
import json, sys, torch
sys.path.insert(0, {tests!r})
import test_distributed as tests
rank, world = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[3] + "/store", rank=rank, world_size=world)
said = getattr(tests, sys.argv[4])(torch.distributed.group.WORLD, rank, world, sys.argv[3])
torch.distributed.barrier()
torch.distributed.destroy_process_group()
open(f"{{sys.argv[3]}}/said.{{rank}}", "w").write(json.dumps(said))
"""


@pytest.fixture
def path(tmp_path):
    """A layer with biases, an MLP and a mixture, quantized as ModelOpt does."""
    values = torch.Generator().manual_seed(0)
    matrix = lambda rows, columns: torch.randn(rows, columns, generator=values) / columns**0.5
    of_mlp = {"gate_proj": (N, K), "up_proj": (N, K), "down_proj": (K, N)}
    state = {f"model.layers.0.mlp.{part}.weight": matrix(*shape) for part, shape in of_mlp.items()}
    for e in range(EXPERTS):
        state |= {f"model.layers.1.mlp.experts.{e}.{part}.weight": matrix(*shape) for part, shape in of_mlp.items()}
    state["model.layers.0.self_attn.q_proj.weight"] = matrix(N, K)
    state["model.layers.0.self_attn.q_proj.bias"] = torch.randn(N, generator=values)
    state["model.layers.0.self_attn.o_proj.weight"] = matrix(K, N)
    state["model.layers.0.self_attn.o_proj.bias"] = torch.randn(K, generator=values)
    (tmp_path / "floats").mkdir()
    safetensors.save_file(state, tmp_path / "floats" / "model.safetensors")
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "floats" / "config.json").write_text(json.dumps(config))
    dualgemm.quantize_model(tmp_path / "floats", tmp_path / "q")
    return tmp_path


def on_ranks(world, check, path):
    """What a function of this file returns on each of so many ranks."""
    program = RUN.format(tests=str(pathlib.Path(__file__).parent))
    arguments = lambda rank: [sys.executable, "-c", program, str(rank), str(world), str(path), check.__name__]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen(arguments(r), stderr=subprocess.PIPE, text=True, env=environment) for r in range(world)]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(errors)
    return [json.loads((path / f"said.{rank}").read_text()) for rank in range(world)]


def close(got, want):
    return float((got - want).norm() / want.norm())


def parts_add_up(group, rank, world, path):
    from dualgemm import nn

    q, errors = f"{path}/q", {}
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(-1, EXPERTS, (7, 2), generator=torch.Generator().manual_seed(2))
    weights = torch.rand(7, 2, generator=torch.Generator().manual_seed(3))
    name = "model.layers.0.self_attn."
    for quantize_a in (None, 0.02):
        alone, ours = (
            [
                nn.NVFP4Linear.from_checkpoint(q, f"{name}q_proj", quantize_a=quantize_a, **out),
                nn.NVFP4Linear.from_checkpoint(q, f"{name}o_proj", quantize_a=quantize_a, **into),
                nn.NVFP4GatedMLP.from_checkpoint(q, 0, quantize_a=quantize_a, group=of),
                *(nn.NVFP4Experts.from_checkpoint(q, 1, quantize_a=quantize_a, group=of, **how) for how in mixtures),
            ]
            for of, out, into, mixtures in (
                (None, {}, {}, [{}] * 2),
                (group, {"split": "out", "group": group}, {"split": "in", "group": group}, [{}, {"split": "features"}]),
            )
        )
        own = slice(rank * N // world, (rank + 1) * N // world)
        hidden = alone[0](x)
        # The two as attention has them: what is split on the way out goes into the other as it is.
        errors[f"out {quantize_a}"] = close(ours[0](x), hidden[:, own])
        errors[f"in {quantize_a}"] = close(ours[1](hidden[:, own]), alone[1](hidden))
        errors[f"mlp {quantize_a}"] = close(ours[2](x), alone[2](x))
        for how, one, part in zip(("experts", "features"), alone[3:], ours[3:]):
            errors[f"{how} {quantize_a}"] = close(part(x, ids, weights), one(x, ids, weights))
    held = [ours[2].weights.hidden, ours[0].weights.shape[0], ours[1].weights.shape[1], len(ours[3].weights.here)]
    return {"errors": errors, "held": held, "summed": torch.equal(*(ours[3](x, ids, weights) for _ in range(2)))}


@pytest.mark.parametrize("world", [2, 3])
def test_parts_on_ranks_add_up_to_the_whole_close(path, world):
    said = on_ranks(world, parts_add_up, path)
    for one in said:
        # Sums in f32, in another order. Of 4-bit activations the scales are the same.
        assert max(one["errors"].values()) < 1e-5, one["errors"]
        assert one["held"][:3] == [N // world] * 3 and one["summed"]
    experts = [one["held"][3] for one in said]
    assert sum(experts) == EXPERTS and max(experts) - min(experts) <= 1


def what_does_not_divide(group, rank, world, path):
    from dualgemm import nn

    q, name = f"{path}/q", "model.layers.0.self_attn."
    attempts = {
        "in": lambda: nn.NVFP4Linear.from_checkpoint(q, f"{name}q_proj", split="in", group=group),
        "out": lambda: nn.NVFP4Linear.from_checkpoint(q, f"{name}o_proj", split="out", group=group),
        "mlp": lambda: nn.NVFP4GatedMLP.from_checkpoint(q, 0, group=group),
        "features": lambda: nn.NVFP4Experts.from_checkpoint(q, 1, split="features", group=group),
        "experts": lambda: nn.NVFP4Experts.from_checkpoint(q, 1, group=group),
        "layer": lambda: nn.NVFP4Experts.from_checkpoint(q, 7, group=group),
        "split": lambda: nn.NVFP4Linear.from_checkpoint(q, f"{name}q_proj", group=group),
        "another": lambda: nn.NVFP4Linear.from_checkpoint(q, f"{name}{'o' if rank else 'q'}_proj", split="out", group=group),
        "scale": lambda: nn.NVFP4GatedMLP.from_checkpoint(q, 0, quantize_a=0.1 + rank, group=group),
        "one": lambda: nn.NVFP4GatedMLP.from_checkpoint(q if rank != 1 else f"{path}/nowhere", 0, group=group),
    }
    said = {}
    for what, attempt in attempts.items():
        try:
            attempt()
        except dualgemm.Error as error:
            said[what] = f"{type(error).__name__}: {error}"
    return said


def test_what_does_not_divide_is_named_on_each_rank(path):
    name = "model.layers.0.self_attn."
    for rank, one in enumerate(on_ranks(7, what_does_not_divide, path)):
        assert f"{name}q_proj.weight: K = {K} cannot be split over 7 ranks" in one["in"]
        assert f"{name}o_proj.weight: {K} rows cannot be split evenly over 7 ranks" in one["out"]
        assert f"the down projection of layer 0: K = {N} cannot be split over 7 ranks" in one["mlp"]
        assert f"the down projection of layer 1: K = {N} cannot be split over 7 ranks" in one["features"]
        assert 'layer 1 has 5 experts for 7 ranks; each needs one, or a part of all, by split="features"' in one["experts"]
        assert "layer: is 7" in one["layer"] and "has experts in 1" in one["layer"]
        assert 'split is None; with a group it is "out" or "in"' in one["split"]


def test_ranks_that_disagree_are_named_on_each_rank(path):
    for rank, one in enumerate(on_ranks(2, what_does_not_divide, path)):
        assert one.keys() == {"layer", "split", "another", "scale", "one"}
        assert "q_proj" in one["another"] and "o_proj" in one["another"] and "parts of one are needed" in one["another"]
        assert "quantize_a=0.1" in one["scale"] and "quantize_a=1.1" in one["scale"]
        assert "nowhere" in one["one"] and ("rank 1 of 2 has no part" in one["one"]) == (rank == 0)


def config_of(family):
    import transformers

    small = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 96, "tie_word_embeddings": False, "intermediate_size": 96,
    }  # fmt: skip
    more = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
    return {
        "llama": lambda: transformers.LlamaConfig(**small),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**small, **more, num_experts=5),
        "few experts": lambda: transformers.Qwen3MoeConfig(**small, **more | {"num_experts_per_tok": 1}, num_experts=1),
        "keys": lambda: transformers.LlamaConfig(**small | {"num_key_value_heads": 1}),
        "features": lambda: transformers.LlamaConfig(**small | {"intermediate_size": 48}),
        "few features": lambda: transformers.Qwen3MoeConfig(
            **small, **more | {"num_experts_per_tok": 1, "moe_intermediate_size": 48}, num_experts=1
        ),
    }[family]()


def quantized(path, family, seed=0, name=None):
    """Writes a model of random weights in floats and in 4 bits."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
    for p in model.parameters():
        p.data = torch.randn_like(p) * (0.3 if p.dim() > 1 else 1)
    model.save_pretrained(path / f"floats.{name or family}")
    dualgemm.quantize_model(path / f"floats.{name or family}", path / f"q.{name or family}")


def whole_models(group, rank, world, path):
    """What each model writes whole and in parts, the difference of the logits, and what a rank has."""
    import transformers

    from dualgemm import hf, nn

    said, prompt = {}, torch.arange(8)[None] * 7 % 96
    for directory in sorted(pathlib.Path(path).glob("q.*")):
        load = lambda directory: transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        model = load(directory.with_name(directory.name.replace("q.", "floats.")))
        if directory.name == "q.llama":
            model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
        report = nn.patch_model(model, directory, group=group)
        logits, texts = [], []
        hf.register()
        whole = load(directory)
        hf.register(group=group)
        for one in (whole, model, load(directory)):
            with torch.no_grad():
                logits.append(one(prompt).logits)
                how = {"min_new_tokens": 24, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
                texts.append(one.generate(prompt, **how)[0].tolist())
        attention, mlps = model.model.layers[0].self_attn, [layer.mlp for layer in model.model.layers]
        held = [attention.q_proj.weights.shape[0], attention.k_proj.weights.shape[0], attention.o_proj.weights.shape[1]]
        held += [m.weights.hidden if hasattr(m, "weights") else [m.experts.split, len(m.experts.weights.here)] for m in mlps]
        errors = [close(one, logits[0]) for one in logits[1:]]
        said[directory.name[2:]] = {"errors": errors, "texts": texts, "held": held, "left": report.left}
    return said


def test_a_model_in_parts_writes_what_the_whole_one_writes(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    for family in ("llama", "qwen3_moe", "few experts", "keys", "features", "few features"):
        quantized(tmp_path, family)
    for rank, said in enumerate(on_ranks(2, whole_models, tmp_path)):
        for family, one in said.items():
            # Sums in f32, in another order.
            assert max(one["errors"]) < 1e-5, (family, one["errors"])
            assert one["texts"][0] == one["texts"][1] == one["texts"][2] and len(one["texts"][0]) == 32
        held = {family: one["held"] for family, one in said.items()}
        parted = [32, 16, 32]
        assert held == {
            "llama": [*parted, 48, 48],
            "qwen3_moe": [*parted, ["experts", 2 + rank], 48],
            "few experts": [*parted, ["features", 1], 48],
            "keys": [64, 16, 64, 48, 48],
            "features": [*parted, 48, 48],
            "few features": [*parted, [None, 1], 48],
        }
        why = "whole on each of 2 ranks: {}its 48 features are no multiple of 2 blocks of 16"
        left = {f"model.layers.{i}.mlp": why.format("") for i in (0, 1)}
        assert said["features"]["left"] == left | {"lm_head": "not in 4 bits in the checkpoint"}
        assert said["few features"]["left"]["model.layers.0.mlp.experts"] == why.format("it has fewer experts, 1, and ")
        why = "whole on each of 2 ranks: the heads of k_proj, 1, are no multiple of that"
        left = {f"model.layers.{i}.self_attn": why for i in (0, 1)}
        assert said["keys"]["left"] == left | {"lm_head": "not in 4 bits in the checkpoint"}
        why = "whole on each of 2 ranks: sinks is neither one of q_proj, k_proj, v_proj, o_proj nor of one head"
        assert said["llama"]["left"]["model.layers.1.self_attn"] == why and len(said["llama"]["left"]) == 2


def no_memory_on_the_last(group, rank, world, path):
    """What each rank says if the last one has no memory for a layer that is whole on each, and for its part of an MLP."""
    import transformers

    from dualgemm import nn

    def full(*args, **how):
        raise MemoryError

    said = []
    for kind, last in ((nn.NVFP4Linear, "model.layers.1.self_attn.k_proj"), (nn.Mlp, 0)):
        make = lambda path, of, kind=kind, last=last, **how: full() if of == last else kind.from_checkpoint(path, of, **how)
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{path}/floats.keys", dtype=torch.float32)
        theirs = getattr(nn, kind.__name__)
        if rank == world - 1:
            setattr(nn, kind.__name__, type(kind.__name__, (), {"from_checkpoint": staticmethod(make)}))
        try:
            nn.patch_model(model, f"{path}/q.keys", group=group)
        except (MemoryError, dualgemm.Error) as error:
            said.append(f"{type(error).__name__}: {error}")
        setattr(nn, kind.__name__, theirs)
    return said


def test_a_rank_without_memory_is_named_on_the_others(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    quantized(tmp_path, "keys")
    first, *_, last = on_ranks(2, no_memory_on_the_last, tmp_path)
    assert first == ["OperandError: rank 1 of 2 has no part: MemoryError()"] * 2 and last == ["MemoryError: "] * 2


def what_differs(group, rank, world, path):
    import transformers

    from dualgemm import hf, nn

    mine = lambda name: f"{path}/q.{name if rank else 'one'}"
    load = lambda dtype=torch.float32: transformers.AutoModelForCausalLM.from_pretrained(f"{path}/floats.one", dtype=dtype)
    model, other = load(), load(torch.bfloat16 if rank else torch.float32)
    fewer = load()
    fewer.model.layers = fewer.model.layers[: world - rank]
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    attempts = {
        "weights": lambda: nn.patch_model(model, mine("other"), group=group),
        "scale": lambda: nn.patch_model(model, mine("edited"), group=group),
        "layers": lambda: nn.patch_model(fewer, mine("one"), group=group),
        "dtype": lambda: nn.patch_model(other, mine("one"), group=group),
        "quantize_a": lambda: nn.patch_model(model, mine("one"), quantize_a="dynamic" if rank else None, group=group),
        "module": lambda: nn.NVFP4GatedMLP.from_checkpoint(mine("edited"), 1, group=group),
        "text": lambda: nn.patch_model(model, mine("one"), group="x"),
        "register": lambda: hf.register(group="x"),
        "outside": lambda: nn.patch_model(model, mine("one"), group=outside),
        "mlp": lambda: nn.NVFP4GatedMLP.from_checkpoint(mine("one"), 1, group=outside),
        "mlps": lambda: nn.patch_mlp(torch.nn.Linear(2, 2) if rank else model, mine("one"), down="checkpoint", group=group),
    }
    said = {}
    for what, attempt in attempts.items():
        try:
            attempt()
        except (dualgemm.Error, TypeError) as error:
            said[what] = f"{type(error).__name__}: {error}"
    said["packed"] = sum(isinstance(m, nn.Packed) for of in (model, other, fewer) for m in of.modules())
    return said


def test_ranks_whose_models_or_files_differ_are_told_where(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    quantized(tmp_path, "llama", name="one")
    quantized(tmp_path, "llama", seed=1, name="other")
    # A checkpoint but for one number.
    shutil.copytree(tmp_path / "q.one", tmp_path / "q.edited")
    (file,) = (tmp_path / "q.edited").glob("*.safetensors")
    state = safetensors.load_file(file)
    state["model.layers.1.mlp.down_proj.weight_scale_2"] *= 2
    safetensors.save_file(state, file)
    for rank, one in enumerate(on_ranks(2, what_differs, tmp_path)):
        # What rank 1 says or does, and rank 0: each is told of the other first.
        ranks = lambda *of: f"rank {1 - rank} of 2 {of[rank]}, rank {rank} {of[1 - rank]}"
        need = "all ranks need the same model, checkpoint and arguments"
        differ = "the checkpoints of ranks differ, here first:"
        read = lambda name: ranks(f"reads {tmp_path / name}", f"reads {tmp_path / 'q.one'}")
        assert differ in one["weights"] and read("q.other") in one["weights"].replace("/model.safetensors", "")
        name = "model.layers.1.mlp.down_proj.weight_scale_2"
        for what in ("scale", "module"):
            assert one[what].startswith(f"OperandError: {name}: {differ}")
            assert read("q.edited") in one[what].replace("/model.safetensors", "")
        layer = "model.layers.{}.self_attn.q_proj"
        whats = {"layers": layer.format(1), "dtype": layer.format(0), "quantize_a": "quantize_a"}
        for what, name in whats.items():
            assert one[what].startswith(f"OperandError: {name}: ") and one[what].endswith(need), one[what]
        assert ranks("has nothing", "has linear layers, [64, 64], torch.float32, split='out'") in one["layers"]
        assert ranks("has 'dynamic'", "has None") in one["quantize_a"]
        for what in ("text", "register"):
            assert one[what].startswith("TypeError: group: is 'x', a str; a process group of torch.distributed is needed")
        for what in ("outside", "mlp"):
            assert one[what].startswith("OperandError: group: this process is not in it")
        of_one = "rank 1 of 2 has no part: " if rank == 0 else ""
        assert one["mlps"] == f"OperandError: {of_one}Linear: no module has gate_proj, up_proj and down_proj"
        assert one["packed"] == 0
