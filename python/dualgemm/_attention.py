"""Attention of transformers, by torch or :mod:`dualgemm`. Needs torch."""

import os
import sys

import torch

from . import _dualgemm
from ._arrays import is_followed
from ._threads import follow


def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **more):
    """transformers' ``sdpa``, but on a processor for one token that needs no mask, whose heads that share keys are rows of one
    product, and for a prompt in bf16 without a cache before it. Asked to share keys (``enable_gqa``), torch takes five times as
    long for the one in bf16, and for the other three times as long as :mod:`dualgemm`, where that has instructions for bf16. On a
    GPU, cuDNN is left out for one token."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, rows, _ = query.shape
    if rows == 1 and query.is_cuda and not torch.compiler.is_compiling() and torch.backends.cuda.cudnn_sdp_enabled():
        # On Hopper torch 2.11 asks it first, and for each number of keys it makes a plan, which takes 60 ms.
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
    grouped = heads > key.shape[1] and heads % key.shape[1] == 0
    plain = attention_mask is None and more.get("softcap") is None and more.get("position_bias") is None
    if plain and rows > 1 and not dropout and not torch.compiler.is_compiling():
        causal = more.get("is_causal")
        if getattr(module, "is_causal", True) if causal is None else causal:
            out = attend_prompt(query, key, value, scaling)
            if out is not None:
                return out, None
    if torch.compiler.is_compiling() or rows != 1 or not (grouped and plain and query.is_cpu):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    query = query.reshape(batch, key.shape[1], heads // key.shape[1], query.shape[-1])
    c = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling)
    return c.reshape(batch, 1, heads, value.shape[-1]), None


def attend_prompt(query, key, value, scaling):
    """Causal attention of all tokens that there are, ``[1, rows, heads, dim]``; None if torch has to compute it."""
    batch, heads, rows, dim = query.shape
    if batch != 1 or not query.is_cpu or any(is_followed(torch, t) for t in (query, key, value)):
        return None
    if heads % key.shape[1] or key.shape[1] != value.shape[1]:
        return None
    follow(torch)
    out = query.new_empty((1, rows, heads, dim))
    done = _dualgemm.attend_causal(query, key, value, dim**-0.5 if scaling is None else scaling, out)
    return out if done else None


def take_attention(model):
    """Makes transformers' ``sdpa`` :func:`attend`, for a model that uses it, and returns what the report says. The name stays:
    models ask for it. An ``sdpa`` that somebody else has put there stays, too."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if modeling.ALL_ATTENTION_FUNCTIONS["sdpa"] not in (sdpa_attention_forward, attend):
        return None
    modeling.ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)
    return "dualgemm"


def is_known(function):
    """Whether a function is transformers' own, or of this package: who changes what a family computes puts others in the place of
    these."""
    own = (sys.modules["transformers"].__file__, __file__)
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(tuple(os.path.dirname(path) + os.sep for path in own))
