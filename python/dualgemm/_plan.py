"""Which modules of a Hugging Face model a checkpoint replaces, checked before anything is. Needs torch."""

import collections.abc
import functools
import inspect
import json
import re
import sys

import torch

from ._dualgemm import Checkpoint
from ._names import in_model, normal
from ._ops import Linear, Mlp, Weights
from ._parallel import rank_of
from ._plain import are_plain_experts, is_plain_mlp, of_its_own
from .errors import Error, OperandError, UnsupportedError

#: Children of a gated MLP: gate and up, or both in one, and down.
GATED = [(("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"), (("w1", "w3"), "w2")]
#: Gate and up of experts, where they are apart.
APART = {"gate_proj", "up_proj", "w1", "w3", "ffn_gate_exps", "ffn_up_exps"}
DOWN = {"down_proj", "w2", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "output_linear"}
#: Layers whose model takes them apart: Mamba's time step, and DeepSeek's indexer.
READ = {"dt_proj", "weights_proj"}
#: Layers of an attention: what transformers' plans for several GPUs say of one that is split by heads, and what that is here.
HEADS = {part: ("colwise", "out") for part in ("q_proj", "k_proj", "v_proj")} | {"o_proj": ("rowwise", "in")}
#: What follows ffn_gate, ffn_up and ffn_down in GGUF, where all modules of a layer begin with its name.
GGUF = {"dense": "", "shared": "_shexp", "experts": "_exps"}


def is_compiled(module):
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def shape(module):
    """``[out, in]`` of a linear layer."""
    return [module.out_features, module.in_features]


@functools.cache
def unsupported(device):
    """Why linear layers are not computed on a GPU, None if they are: a layer of zeros tells."""
    # transformers builds models on the meta device.
    codes, scales = (torch.zeros(64, width, dtype=torch.uint8, device="cpu") for width in (32, 4))
    try:
        Linear.from_tensors((codes, scales, 1.0), device=device)
    except UnsupportedError as error:
        return f"on {device}: {error}"
    return None


#: Parts of a configuration that are about the language model.
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")


def check_same_model(model, checkpoint):
    """Raises if a checkpoint says that it is of another kind of model, or of another size: layers of the same shapes may do
    something else there."""
    own, held = getattr(model, "config", None), checkpoint._config()
    # GGUF calls several families by one name.
    if own is None or held is None or checkpoint.convention == "gguf":
        return
    wholes = own.to_dict() if hasattr(own, "to_dict") else vars(own), json.loads(held)
    parts = [[whole, *(whole[part] for part in TEXT if isinstance(whole.get(part), dict))] for whole in wholes]
    for entry in ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        ours, theirs = ({part[entry] for part in of if part.get(entry)} for of in parts)
        if ours and theirs and not ours & theirs:
            named = ["/".join(map(str, sorted(found))) for found in (ours, theirs)]
            raise OperandError(
                f"{entry}: the model's is {named[0]}, that of {checkpoint.path} {named[1]}; other_model=True takes the "
                "layers of another model where their names and shapes fit"
            )


def placed(model, devices):
    """``devices`` by name; the model has each name, and torch each device."""
    if not isinstance(devices, collections.abc.Mapping):
        raise TypeError(f'devices is a {type(devices).__name__}; a dictionary is needed, such as {{"": "cuda"}}')
    # transformers' maps name parameters, too.
    named = model.named_modules, model.named_parameters, model.named_buffers
    known, found = {name for of in named for name, _ in of(remove_duplicate=False)}, {}
    for name, device in devices.items():
        if name not in known:
            raise OperandError(f'devices: no module of the model is called "{name}" or begins with it')
        try:
            found[name] = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise OperandError(f'devices: "{name}" cannot go to {device!r}; {error}') from None
        cards = torch.cuda.device_count() if found[name].type == "cuda" else 0
        if found[name].type != "cpu" and (found[name].index or 0) >= cards:
            raise UnsupportedError(f'devices: "{name}" cannot go to {found[name]}; torch has cpu and {cards} CUDA devices here')
    return found


WITH_BIAS = {True: "with a bias", False: "without a bias"}


def check_biases(name, parts, in_model, in_checkpoint):
    """Raises if a bias is there on one side alone."""
    for part, ours, theirs in zip(parts, in_model, in_checkpoint):
        if ours != theirs:
            raise OperandError(
                f"{name}: the model has {part} {WITH_BIAS[ours]}; the checkpoint has it {WITH_BIAS[theirs]}"
            )


class Step:
    """A module that will be replaced: what was checked, and how to make what takes its place. ``said`` is what all ranks of a
    group have to say alike."""

    def __init__(self, name, what, make, *said):
        self.name, self.what, self.make = name, what, make
        self.said = ", ".join(map(str, (what, *said)))


class Held:
    """A gated MLP, a shared expert or the experts of a layer in the checkpoint."""

    def __init__(self, checkpoint, layer, kind, modules):
        self.checkpoint, self.layer, self.kind, self.modules = checkpoint, layer, kind, modules

    def why_not(self, module, is_plain):
        """Why a module is not this MLP, None if it is; ``is_plain`` is asked whether it is one with an activation."""
        if own := of_its_own(module):
            return own
        try:
            activation = self.checkpoint._activation(self.layer, self.kind)
        except Error as error:
            return str(error)
        if not is_plain(activation):
            return f"computes something else than gate, up, {activation} and down"
        return None


class Plan:
    """Matches modules of a model with those of a checkpoint, and checks all before anything is replaced."""

    def __init__(self, model, checkpoint, quantize_a, devices=None, other_model=False, group=None):
        from . import nn

        if any(isinstance(m, torch.nn.Linear) and m.weight.dtype == torch.float64 for m in model.modules()):
            raise OperandError("the model is in float64; float32, float16 or bfloat16 is needed: model.to(torch.bfloat16)")
        if not other_model:
            check_same_model(model, checkpoint)

        self.nn, self.checkpoint, self.quantize_a, self.group = nn, checkpoint, quantize_a, group
        self.world = rank_of(group).get("world", 1)
        config = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.of_ranks, self.splits = getattr(text, "base_model_tp_plan", None) or {}, {}
        self.devices = placed(model, {} if devices is None else devices)
        self.is_gguf = checkpoint.convention == "gguf"
        self.names = in_model(model, checkpoint.modules())
        self.modules, self.converted = {}, set()
        for module, (names, as_it_is) in self.names.items():
            if as_it_is:
                self.modules[normal(names[0])] = module
            else:
                self.converted.update(map(normal, names))
        self.mlps = self.mlps_by_name()
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self.tied = {ours.rpartition(".")[0]: theirs.rpartition(".")[0] for ours, theirs in tied.items()}
        self.taken, self.steps, self.left, self.below = set(), [], {}, ()
        # Whether any module, taken or left, has a counterpart.
        self.met = False

    @property
    def common(self):
        """What all modules are made with."""
        return {"quantize_a": self.quantize_a, "group": self.group}

    def part(self):
        """What all ranks of a group have to say alike."""
        return {"quantize_a": repr(self.quantize_a), **{step.name: step.said for step in self.steps}}

    def why_not_split(self, features, make):
        """Why features that go into a product are whole on each rank, None if they are not; ``make`` makes rank 0's part."""
        if self.world == 1:
            return None
        if features % (16 * self.world):
            return f"its {features} features are no multiple of {self.world} blocks of 16"
        if features % (32 * self.world):
            # Blocks have 16 or 32 elements.
            try:
                make(rank=0, world=self.world)
            except Error as error:
                return str(error)
        return None

    def whole(self, why):
        """What is said of a module that the ranks do not divide."""
        return f"whole on each of {self.world} ranks: {why}"

    def mlps_by_name(self):
        """The MLPs of the checkpoint by what the model calls them, and their kind."""
        mlps, all_mlps = {}, self.checkpoint.mlps()
        of_number = collections.Counter((layer, kind) for layer, kind, _ in all_mlps)
        for layer, kind, path in all_mlps:
            modules = [m for m in self.names if m.startswith(f"{path}.")]
            if self.is_gguf:
                modules = [m for m in modules if re.search(rf"\.ffn_(gate|up|gate_up|down){GGUF[kind]}$", m)]
            several = of_number[layer, kind] > 1
            held = Held(self.checkpoint._within(f"{path}.") if several else self.checkpoint, layer, kind, modules)
            for module in modules:
                parent = normal(self.names[module][0][0]).rpartition(".")[0]
                name = f"layers.{layer}" if self.is_gguf else re.sub(r"\.experts\.\d+$", ".experts", parent)
                mlps[name, kind] = held
        return mlps

    def visit(self, name, module):
        if not name or name.startswith(self.below):
            return
        if isinstance(module, self.nn.Packed):
            raise OperandError(f"{name}: is a {type(module).__name__}; the model is already patched")
        if is_compiled(module):
            raise OperandError(f"{name}: is compiled; patch the model first, then compile it")
        if self.group is not None:
            self.attention(name, module)
        step = self.experts(name, module) or self.mlp(name, module) or self.linear(name, module)
        if step:
            self.steps.append(step)
            self.below += (f"{name}.",)

    def device(self, name, weight):
        """Where a module goes: to the device of the longest name in ``devices`` that begins its own, or where its weight is; one
        without memory of its own goes to the processor."""
        named = [n for n in self.devices if n == "" or f"{name}.".startswith(f"{n}.")]
        if named:
            return self.devices[max(named, key=len)]
        return weight.device if weight.is_cuda else torch.device("cpu")

    def left_on(self, device, weight):
        """Why a module on a device keeps its floats, None if it need not."""
        if device.type != "cuda":
            return None
        if weight.dtype not in self.nn.HALVES:
            dtype = str(weight.dtype).rpartition(".")[2]
            return f"{dtype} on {device}, where float16 and bfloat16 are multiplied"
        return unsupported(device)

    def held(self, name, *kinds):
        """The MLP of the checkpoint that a name means, None if there is none in 4 bits."""
        name = re.sub(r"\.experts\.\d+$", ".experts", normal(name))
        if self.is_gguf:
            name = re.sub(r"^(layers\.\d+)\..*", r"\1", name)
        found = next((self.mlps[name, kind] for kind in kinds if (name, kind) in self.mlps), None)
        self.met |= found is not None
        return found

    def experts(self, name, module):
        """transformers' blocks: all experts' weights in two parameters of three dimensions."""
        gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if not all(isinstance(p, torch.nn.Parameter) and p.dim() == 3 for p in (gate_up, down)):
            return None
        found, device = self.held(name, "experts"), self.device(name, gate_up)
        if found is None:
            return self.float_experts(name, module)
        kind = self.nn.NVFP4SortedExperts if type(module).__name__ == "Llama4TextExperts" else self.nn.NVFP4Experts
        in_4_bits = {m.rpartition(".")[2] for m in found.modules}
        if len(inspect.signature(module.forward).parameters) != (1 if kind is self.nn.NVFP4SortedExperts else 3):
            self.left[name] = f"{type(module).__name__} takes other arguments than tokens, experts and weights"
        elif why := self.left_on(device, gate_up):
            self.left[name] = why
        elif in_4_bits <= DOWN or len(in_4_bits & APART) == 1:
            self.left[name] = "its gate and up are not both in 4 bits in the checkpoint"
        elif device.type == "cuda" and not in_4_bits & DOWN:
            self.left[name] = f"on {device}, where experts have no down projections in floats"
        elif device.type == "cuda" and self.quantize_a == "dynamic":
            self.left[name] = f'on {device}, where what goes into their down projections has no dynamic scale; quantize_a="static"'
        elif why := found.why_not(module, lambda activation: are_plain_experts(module, activation)):
            self.left[name] = why
        if name in self.left:
            return None
        held, (h, n, k), biases = found.checkpoint._check_mlp(found.layer, "experts", *self.nn.both(self.quantize_a))
        need = [gate_up.shape[0], sorted(gate_up.shape[1:]), sorted(down.shape[1:])]
        if [held, sorted((2 * n, k)), sorted((h, n))] != need:
            raise OperandError(
                f"{name}: the model has {gate_up.shape[0]} experts of {list(gate_up.shape[1:])} and "
                f"{list(down.shape[1:])}; the checkpoint has {held} of 2 x [{n}, {k}] and [{h}, {n}]"
            )
        parts = ("gate_up_proj", "down_proj")
        check_biases(name, parts, [getattr(module, f"{part}_bias", None) is not None for part in parts], biases)
        self.taken.update(found.modules)

        split, common = None if self.group is None else "experts" if held >= self.world else "features", self.common
        if split == "features":
            part = functools.partial(Mlp.from_checkpoint, found.checkpoint, found.layer, expert=0)
            if why := self.why_not_split(n, part):
                self.left[name], split, common = self.whole(f"it has fewer experts, {held}, and {why}"), None, {**common, "group": None}
        # The model's block does what else its family does with the router's weights.
        how = {"router_weights": "output", "device": device, "split": split}
        make = lambda: kind.from_checkpoint(found.checkpoint, found.layer, **how, **common)
        activation = found.checkpoint._activation(found.layer, "experts")
        return Step(name, f"blocks of {held} experts", make, [h, n, k], activation, gate_up.dtype, f"split={split!r}")

    def float_experts(self, name, module):
        """A block whose weights are not in 4 bits."""
        params = [module.gate_up_proj, module.down_proj]
        self.left[name] = self.absent(name)
        if any(p.dtype not in self.nn.HALVES or self.device(name, p).type == "cuda" for p in params):
            return None
        if why := of_its_own(module) or self.nn.FloatExperts.why_not(module):
            self.left[name] += f", and {why}"
            return None
        del self.left[name]
        return Step(name, "blocks of experts in 16 bits", lambda: self.nn.FloatExperts.of(module))

    def mlp(self, name, module):
        """A module of linear layers that make a gated MLP."""
        for gates, down_name in GATED:
            children = [getattr(module, child, None) for child in (*gates, down_name)]
            if all(isinstance(child, torch.nn.Linear) for child in children):
                break
        else:
            return None
        *gate_up, down = children
        expert = re.search(r"\.experts\.(\d+)$", name)
        kinds = ["experts"] if expert else ["shared", "dense"] if "shared" in name else ["dense", "shared"]
        found = self.held(name, *kinds)
        if found is None:
            return None
        of_one = [m for m in found.modules if re.search(rf"\.{expert.group(1)}\.", m)] if expert else found.modules
        in_4_bits = {m.rpartition(".")[2] for m in of_one}
        if not in_4_bits - DOWN:
            # Down alone, which is a linear layer.
            return None
        halves = [m for m in of_one if m.rpartition(".")[2] not in DOWN]
        if len(halves) == 1 and found.checkpoint._check_linear(halves[0], None)[0] != sum(g.out_features for g in gate_up):
            # Gate without up.
            return None
        if why := found.why_not(module, lambda activation: is_plain_mlp(module, gates, down_name, activation)):
            self.left[name] = f"its linear layers are replaced one by one: {why}"
            return None
        device = self.device(name, down.weight)
        if device.type == "cuda" and down.weight.dtype not in self.nn.HALVES:
            # Nor are gate and up multiplied there; each says so.
            return None
        why = self.left_on(device, down.weight)
        if why is None and device.type == "cuda" and self.quantize_a == "dynamic":
            why = f'on {device}, where quantize_a="dynamic" is for what goes into gate and up alone'
        in_16_bits = not in_4_bits & DOWN and self.is_in_16_bits(f"{name}.{down_name}", down)
        if not in_4_bits & DOWN:
            why = self.absent(f"{name}.{down_name}")
        quantize_a, quantize_hidden = self.nn.both(self.quantize_a)
        need = [sum(g.out_features for g in gate_up) // 2, gate_up[0].in_features, *shape(down)]
        biases = [any(g.bias is not None for g in gate_up), down.bias is not None]
        if in_4_bits & DOWN:
            how = quantize_a, None if why else quantize_hidden
            _, (h, n, k), held_biases = found.checkpoint._check_mlp(found.layer, found.kind, *how)
        else:
            parts = [found.checkpoint._check_linear(m, quantize_a) for m in of_one]
            n, k, h = sum(rows for rows, _, _ in parts) // 2, parts[0][1], down.out_features
            held_biases = [any(has_bias for _, _, has_bias in parts), biases[1]]
        if [n, k, h, n] != need:
            raise OperandError(
                f"{name}: the model has gate and up of {need[:2]} and down of {need[2:]}; the checkpoint has "
                f"{[n, k]} and {[h, n]}"
            )
        check_biases(name, (" and ".join(gates), down_name), biases, held_biases)
        self.taken.update(of_one)
        which = {"shared_expert": found.kind == "shared", "expert": int(expert.group(1)) if expert else None}

        common, split = self.common, not why and self.group is not None
        if split:
            part = functools.partial(Mlp.from_checkpoint, found.checkpoint, found.layer, **which)
            if not_split := self.why_not_split(n, part):
                self.left[name], common, split = self.whole(not_split), {**common, "group": None}, False

        def make():
            if not why:
                return self.nn.NVFP4GatedMLP.from_checkpoint(found.checkpoint, found.layer, device=device, **which, **common)
            weights = Weights.from_checkpoint(found.checkpoint, found.layer, device=device, **which)
            last = self.nn.FloatLinear.of(down) if in_16_bits else down
            return self.nn.NVFP4GatedMLP(weights, last, quantize_a=self.quantize_a)

        what = "MLPs with down projections in 16 bits" if in_16_bits else "MLPs"
        if why and not in_16_bits:
            self.left[f"{name}.{down_name}"], what = why, "MLPs but for their down projections"
        activation = found.checkpoint._activation(found.layer, found.kind)
        return Step(name, what, make, [h, n, k], activation, down.weight.dtype, "in parts" if split else "whole")

    def absent(self, name):
        """Why nothing of the checkpoint takes the place of a module."""
        if self.is_gguf:
            return "GGUF has names and orders of rows of its own; its MLPs alone are taken"
        name = normal(name)
        if any(held == name or held.startswith(f"{name}.") for held in (*self.modules, *self.converted)):
            return "in 4 bits in the checkpoint, in other tensors than the model has"
        return "not in 4 bits in the checkpoint"

    def attention(self, name, module):
        """Parts an attention by heads, if all ranks can have as many and transformers' plan for several GPUs does so."""
        layers = {part: getattr(module, part, None) for part in HEADS}
        if not all(isinstance(layer, torch.nn.Linear) for layer in layers.values()):
            return
        of_head = getattr(module, "head_dim", None)
        reasons = [self.why_whole(f"{name}.{part}", layer, part, of_head) for part, layer in layers.items()]
        for parameter, value in module.named_parameters():
            # A number for each head would have to be split, too.
            if parameter.partition(".")[0] not in HEADS and list(value.shape) != [of_head]:
                reasons.append(f"{parameter} is neither one of {', '.join(HEADS)} nor of one head")
        if why := next(filter(None, reasons), None):
            self.left[name] = self.whole(why)
        else:
            self.splits.update({f"{name}.{part}": split for part, (_, split) in HEADS.items()})

    def why_whole(self, name, layer, part, of_head):
        """Why a layer of an attention is not split by heads, None if it is."""
        if why := self.why_left(name, layer):
            return f"{part} is {why}"
        path = re.sub(r"\.\d+\.", ".*.", f".{name}")
        rule, _ = HEADS[part]
        if not of_head or rule not in (how for pattern, how in self.of_ranks.items() if path.endswith(f".{pattern}")):
            return f"transformers has no plan for several GPUs that splits {part} by heads"
        features = layer.in_features if part == "o_proj" else layer.out_features
        if features % (of_head * self.world):
            return f"the heads of {part}, {features // of_head}, are no multiple of that"
        if part == "o_proj":
            source = functools.partial(Linear.from_checkpoint, self.checkpoint, self.modules[normal(name)], split="in")
            if why := self.why_not_split(features, source):
                return f"{part}: {why}"
        return None

    def why_left(self, name, module):
        """Why a linear layer stays as it is, None if it need not."""
        if normal(name) not in self.modules:
            return self.absent(name)
        if name.rpartition(".")[2] in READ:
            return "its model reads its weights and bias by itself"
        return of_its_own(module) or self.left_on(self.device(name, module.weight), module.weight)

    def is_in_16_bits(self, name, module):
        """Whether a linear layer in floats can be a :class:`dualgemm.nn.FloatLinear`. A class of its own does something else, too."""
        in_16_bits = type(module) is torch.nn.Linear and module.weight.dtype in self.nn.HALVES
        return in_16_bits and self.device(name, module.weight).type != "cuda"

    def linear(self, name, module):
        if not isinstance(module, torch.nn.Linear):
            return None
        held, why = self.modules.get(normal(name)), self.why_left(name, module)
        self.met |= held is not None
        of = self.tied.get(name)
        if why and of:
            why += f"; its weights are those of {of}"
        if why:
            if held is None and self.is_in_16_bits(name, module):
                return Step(name, "linear layers in 16 bits", lambda: self.nn.FloatLinear.of(module))
            self.left[name] = why
            return None
        n, k, has_bias = self.checkpoint._check_linear(held, self.quantize_a)
        if [n, k] != shape(module) or has_bias != (module.bias is not None):
            raise OperandError(
                f"{name}: the model has {shape(module)} {WITH_BIAS[module.bias is not None]}; the checkpoint has "
                f"{[n, k]} {WITH_BIAS[has_bias]}"
            )
        self.taken.add(held)
        how = {"dtype": module.weight.dtype, "device": self.device(name, module.weight), "split": self.splits.get(name)}
        common = self.common if how["split"] else {**self.common, "group": None}
        make = lambda: self.nn.NVFP4Linear.from_checkpoint(self.checkpoint, held, **how, **common)
        what = f"linear layers no longer tied to {of}" if of else "linear layers"
        return Step(name, what, make, [n, k], how["dtype"], f"split={how['split']!r}")


def opened(checkpoint, reading):
    """The checkpoint at a path, or the one that is open."""
    if not isinstance(checkpoint, Checkpoint):
        return Checkpoint(checkpoint, **reading)
    if reading:
        raise OperandError(f"{next(iter(reading))} says how to read a file; it belongs where the Checkpoint is made")
    return checkpoint


def planned(model, checkpoint, *how):
    """What will be replaced, checked."""
    if is_compiled(model):
        raise OperandError("the model is compiled; patch it first, then compile it")
    plan = Plan(model, checkpoint, *how)
    for name, module in model.named_modules():
        plan.visit(name, module)
    if not plan.met:
        raise OperandError(
            f"{type(model).__name__}: no module has a counterpart in 4 bits in {plan.checkpoint.path}, whose modules are "
            f"named like {next(iter(plan.names), 'nothing')}"
        )
    return plan
