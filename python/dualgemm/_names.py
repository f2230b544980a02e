"""Names of modules in files and in models of transformers, which renames some as it loads. Needs torch."""

import torch

#: Parts of names that are there in one file and not in the other, and parts that have two names.
SKIPPED = {"model", "language_model", "text_model", "transformer"}
RENAMED = {"block_sparse_moe": "mlp"}


def normal(name):
    """A name without what models and files put before it."""
    return ".".join(RENAMED.get(part, part) for part in name.split(".") if part not in SKIPPED)


def _transforms(model):
    """What transformers does to names of this model's files: renamings, and conversions of several tensors to others."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:
        # No transformers, or one before 5, whose models have the names of their files.
        return [], []
    transforms = get_model_conversion_mapping(model)
    of_several = [t for t in transforms if isinstance(t, WeightConverter)]
    return [t for t in transforms if not isinstance(t, WeightConverter)], of_several


def in_model(model, modules):
    """For modules of a file, what the model calls that which becomes of each, and whether it is taken over as it is."""
    renamings, converters = _transforms(model)
    names = {}
    for module in modules:
        # A linear layer has a weight; experts in one tensor are a parameter.
        for ending in (".weight", ""):
            name, converter = module + ending, None
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)
            for candidate in converters:
                name, source = candidate.rename_source_key(name)
                if source is not None:
                    converter = candidate
                    break
            if converter or name != module + ending:
                break
        first, *more = converter.target_patterns if converter else [""]
        made = [name, *(name.replace(first, other) for other in more)]
        names[module] = [target.removesuffix(".weight") for target in made], converter is None
    return names


def in_file(model, parameter, shape):
    """What the file calls the tensors that a parameter of this shape is made from."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return [parameter]
    return list(revert_weight_conversion(model, {parameter: torch.empty(shape, device="meta")}))
