"""Tied weights: one tensor under several names."""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter or buffer that has several; first the one to keep.

    This is the first one, unless the model says, as those of transformers do, that it is filled in from another.

    Example:
        >>> model = nn.ModuleDict({"words": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
        >>> model["head"].weight = model["words"].weight
        >>> tied_names(model)
        [['words.weight', 'head.weight']]
    """
    names: dict[Tensor, list[str]] = {}
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        names.setdefault(tensor, []).append(name)
    filled = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in getattr(module, "all_tied_weights_keys", None) or ()
    }
    return [sorted(same, key=filled.__contains__) for same in names.values() if len(same) > 1]
