"""What a model takes while it is loaded. Skipped, visibly, where torch or transformers is missing."""

import subprocess
import sys

import pytest
from test_model import llama, saved

import dualgemm

#: After a small model, for which transformers imports what it computes with: by how much a process grows at most.
PROGRAM = """
import pathlib, sys

import torch
from transformers import AutoModelForCausalLM

import dualgemm.hf

def status(entry):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(entry)))

def from_pretrained(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)

def grown(what, *given):
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    kept = what(*given)
    print(status("VmHWM") - before)
    return kept

small, large = map(pathlib.Path, sys.argv[1:])
dualgemm.hf.register()
from_pretrained(small / "q")
model = grown(from_pretrained, large / "q")
floats = from_pretrained(large / "floats")
report = grown(dualgemm.nn.patch_model, floats, large / "q")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
def test_a_model_is_never_there_twice(tmp_path):
    large = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "head_dim": 64, "vocab_size": 16384}
    for name, config in (("small", {}), ("large", {**large, "intermediate_size": 3072})):
        floats = saved(llama(tie_word_embeddings=True, **config), tmp_path / name / "floats")
        dualgemm.quantize_model(floats, tmp_path / name / "q")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    grown = [int(line) for line in done.stdout.split()]
    q = (tmp_path / "large" / "q" / "model.safetensors").stat().st_size
    in_floats = 2 * 16384 * 1024
    assert grown[0] <= 1.25 * q and grown[1] <= 1.25 * (q - in_floats), (grown, q)
