# %% [markdown]
# # A layer, from floats to the roofline
#
# Quantizing, a real checkpoint's layer, its error, a GPU kernel without a GPU, and what this machine makes of it. Run it as
# a notebook (the cells of [`examples/notebook/tour.py`](../examples/notebook/tour.py) are Jupyter's and VS Code's percent
# format), as a program from the repository's root, or read it here with its output. It needs `pip install './python[plot,bf16]'`.

# %%
import dualgemm
import numpy as np

layer14 = "testdata/smollm2-135m-layer14"

# %% [markdown]
# ## Four bits
#
# nvfp4 keeps a 4-bit code per number, an 8-bit scale per sixteen and one scale for all: 4.5 bits. Weights are normally
# distributed more or less; rounding them costs about a tenth of their size. A search for better block scales gains a little.

# %%
rng = np.random.default_rng(0)
weights = rng.standard_normal((2, 1536, 576), np.float32) * 0.02


def relative(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


for search in ("plain", "mse"):
    gate, up = (dualgemm.quantize(half, producer="modelopt", search=search) for half in weights)
    print(f"{search:5} search: {relative(dualgemm.dequantize(gate), weights[0]):.3f} of gate lost")
print("codes", gate.codes.shape, gate.codes.dtype, "scales", gate.scales.shape, gate.scales.dtype, "times", gate.global_scale)

# %% [markdown]
# ## The operation
#
# `swiglu` decodes inside the product. With floats for A, what comes out is the f64 result of the *decoded* weights, as far
# as f32 goes: the kernel loses nothing, only the four bits do.

# %%
a = rng.standard_normal((16, 576), np.float32)


def formula(a, gate, up):
    g, u = a.astype(np.float64) @ gate.T.astype(np.float64), a.astype(np.float64) @ up.T.astype(np.float64)
    return g / (1 + np.exp(-g)) * u


c = dualgemm.swiglu(a, dualgemm.Weights.from_tensors(gate=gate, up=up))
print(f"from decoded weights  {relative(c, formula(a, dualgemm.dequantize(gate), dualgemm.dequantize(up))):.1e}")
print(f"from the weights      {relative(c, formula(a, *weights)):.1e}")

# %% [markdown]
# ## A layer of a real model
#
# Layer 14 of SmolLM2-135M, as ModelOpt writes it. Gate and up have a tensor scale each, which here are the same; a ratio
# far from 1 is how a known fault of merged checkpoints shows.

# %%
checkpoint = f"{layer14}/modelopt-nvfp4"
report = dualgemm.inspect(checkpoint)
pair = report["mlps"][0]["entries"][0]["pair"]
print(report["convention"], "convention,", report["tensor_count"], "tensors")
for half in ("gate", "up"):
    print(f"{half:5}", pair[half]["tensor"], [pair[half]["n"], pair[half]["k"]], "times", pair[half]["tensor_scale"])
print("ratio", pair["tensor_scale_ratio"])

# %%
w = dualgemm.Weights.from_checkpoint(checkpoint, layer=0)
x = rng.standard_normal((4, w.shape[1]), np.float32)
w4a16 = dualgemm.swiglu(x, w)
w4a4 = dualgemm.swiglu(x, w, quantize_a="dynamic")
print(f"rounding A to four bits as well costs {relative(w4a4, w4a16):.3f}")

# %% [markdown]
# `run` takes what really enters that layer, 64 tokens of text, as floats and rounded to nvfp4 with the checkpoint's input
# scale, and compares every element with the same product in f64: rounding A is the format's doing, not the kernel's.

# %%
for a_format in ("f32", "nvfp4"):
    checked = dualgemm.run(
        checkpoint, 0, input=f"{layer14}/hidden-states-f32.safetensors", a_format=a_format, no_roofline=True
    )
    print(f"A {a_format:5} {checked['kernel']}: relative L2 {checked['rel_l2']:.1e}, right: {checked.right}")

# %% [markdown]
# ## A Hopper kernel on a processor
#
# The PTX text that an H100 would get runs on the simulator, which looks for races, uninitialized reads, accesses out of
# bounds and misused barriers on the way, and says what a card's least time would be for what was executed.

# %%
simulated = dualgemm.simulate("sm_90a", (8, 64, 64))
launch = simulated["launch"]
print(f"{simulated['config']}: {launch['ctas']} CTAs, {launch['warp_instructions']} warp instructions, no fault")
print(f"relative L2 {simulated['rel_l2']:.1e}; at least {launch['least_us']:.2f} us on an {launch['card']}, by {launch['bound']}")

# %% [markdown]
# ## The roofline
#
# One token reads every weight for one multiplication and one addition, so bytes are the limit; many tokens reuse them, and
# arithmetic is. `bench` measures both limits of the machine and the kernels between them, weights coming from memory. The limits are
# measurements like the others: where a machine's speed wanders by a tenth, as that of the virtual one this page was made on
# does, a kernel can come out above its limit.

# %%
shapes = [f"{m}x2048x2048" for m in (1, 2, 4, 8, 16, 32, 64, 128)]
measured = dualgemm.bench(shapes, a_format=["nvfp4", "bf16"], budget=0.8)
print("   M  A      kernel                 GFLOP/s   GB/s  of the limit")
for row in measured["rows"]:
    rates = f"{row['gflops']:7.1f} {row['gbps']:6.2f} {row['roofline_fraction']:9.0%}"
    print(f"{row['m']:4}  {row['a_format']:6} {row['kernel']:22} {rates}")

# %%
from dualgemm import plot

plot.roofline(measured).figure.savefig("roofline.svg")
