"""A small real model writes text without torch, by numpy and this package's operators, beside numpy in f64 on dequantized
weights: layer 14 of SmolLM2-135M between the embeddings of its first 256 tokens."""

import json

import ml_dtypes
import numpy as np
import pytest
from conftest import dequantized, rel_l2, tensors

import dualgemm
from dualgemm._dualgemm import DecoderLayer

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
LAYER = "model.layers.0"
PROMPT, COUNT = list(b"Count on"), 24


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x, cos, sin):
    low, high = np.split(x, 2, -1)
    return x * cos[:, None] + np.concatenate([-high, low], -1) * sin[:, None]


def attention(q, k, v):
    """Of q, the last rows, to all of k and v."""
    rows, heads, dim = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], 1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
    scores += np.triu(np.full((rows, len(k)), -np.inf), 1 + len(k) - rows)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(rows, heads * dim)


class Model:
    """In f64, on dequantized weights."""

    def __init__(self, path):
        config = json.loads((path / "config.json").read_text())
        self.heads, self.dim, self.eps = config["num_attention_heads"], config["head_dim"], config["rms_norm_eps"]
        self.kv_heads, self.theta = config["num_key_value_heads"], config["rope_parameters"]["rope_theta"]
        self.embeddings = tensors(path / "model.safetensors")["model.embed_tokens.weight"]
        self.weights = {name: w.astype(np.float64) for name, w in dequantized(path / "model.safetensors").items()}
        names = [f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm"]
        self.norms = [self.weights[f"{name}.weight"] for name in names]

    def linear(self, x, name):
        return x @ self.weights[f"{LAYER}.{name}.weight"].T

    def mlp(self, x):
        gate = self.linear(x, "mlp.gate_proj")
        return self.linear(gate / (1 + np.exp(-gate)) * self.linear(x, "mlp.up_proj"), "mlp.down_proj")

    def head(self, x):
        return x @ self.weights["model.embed_tokens.weight"].T

    def rotation(self, first, rows):
        angles = np.outer(np.arange(first, first + rows), self.theta ** -(np.arange(0, self.dim, 2) / self.dim))
        return [f(np.concatenate([angles, angles], -1)) for f in (np.cos, np.sin)]

    def layer(self, x, cache):
        """What the layer makes of rows that follow those whose keys and values ``cache`` holds; it gets theirs."""
        normed = norm(x, self.norms[0], self.eps)
        q, k, v = (self.linear(normed, f"self_attn.{p}").reshape(len(x), -1, self.dim) for p in PROJECTIONS[:3])
        q, k = (rotated(part, *self.rotation(len(cache[0]), len(x))) for part in (q, k))
        cache[:] = [np.concatenate([old, new]) for old, new in zip(cache, (k, v))]
        x = x + self.linear(attention(q, *cache), "self_attn.o_proj")
        return x + self.mlp(norm(x, self.norms[1], self.eps))

    def text(self, given=()):
        """Greedy tokens after the prompt, and the logits by which each was chosen; the next one is that of ``given``, if any."""
        cache, new, tokens, logits = [np.empty((0, self.kv_heads, self.dim))] * 2, PROMPT, [], []
        for at in range(COUNT):
            x = self.layer(self.embeddings[new].astype(np.float64), cache)
            logits.append(self.head(norm(x[-1:], self.norms[2], self.eps))[0])
            tokens.append(int(logits[-1].argmax()))
            new = [given[at] if given else tokens[-1]]
        return tokens, np.array(logits)


class Operators(Model):
    """By operators, which take and give ``dtype``."""

    def __init__(self, path, dtype):
        super().__init__(path)
        checkpoint, self.dtype = dualgemm.Checkpoint(path), dtype
        named = [f"self_attn.{p}" for p in PROJECTIONS]
        self.linears = {name: dualgemm.Linear.from_checkpoint(checkpoint, f"{LAYER}.{name}") for name in named}
        self.packed = dualgemm.Mlp.from_checkpoint(checkpoint, 0)

    def linear(self, x, name):
        return dualgemm.linear(x.astype(self.dtype), self.linears[name]).astype(np.float64)

    def mlp(self, x):
        return dualgemm.mlp(x.astype(self.dtype), self.packed).astype(np.float64)

    def head(self, x):
        return dualgemm.linear(x.astype(self.dtype), self.embeddings.astype(self.dtype)).astype(np.float64)


class OneCall(Operators):
    """After the prompt, a token goes through the layer in one call."""

    def layer(self, x, cache):
        if len(x) > 1:
            return super().layer(x, cache)
        held, given = len(cache[0]), lambda array: np.ascontiguousarray(array, self.dtype)
        room = [np.zeros((1, self.kv_heads, held + 1, self.dim), self.dtype) for _ in cache]
        for to, rows in zip(room, cache):
            to[0, :, :held] = rows.swapaxes(0, 1)
        norms, rotation = [(given(weight), self.eps) for weight in self.norms[:2]], [*map(given, self.rotation(held, 1))]
        layer = DecoderLayer([*self.linears.values()], self.packed, self.heads, self.dim)
        out = np.empty(x.shape, self.dtype)
        layer._run(given(x), norms, rotation, self.dim**-0.5, room, held, 0, out)
        cache[:] = [rows[0].swapaxes(0, 1).astype(np.float64) for rows in room]
        return out.astype(np.float64)


@pytest.mark.parametrize("kind", [Operators, OneCall])
@pytest.mark.parametrize("producer", ["modelopt-nvfp4", "compressed-tensors-nvfp4"])
def test_a_real_layer_writes_the_text_of_dequantized_weights_in_f64(layer14, producer, kind):
    want, truth = Model(layer14 / producer).text()
    tokens, logits = kind(layer14 / producer, np.float32).text()
    assert tokens == want and len(set(want)) > 3
    # By less than what the first two tokens differ by, anywhere.
    first, second = np.sort(truth, -1)[:, :-3:-1].T
    assert np.abs(logits - truth).max() < 1e-5 < (first - second).min() / 10
    _, logits = kind(layer14 / producer, ml_dtypes.bfloat16).text(want)
    assert rel_l2(logits, truth) < 1e-2
