"""Telling a wrapper, which lays a model over ranks, from the model inside it."""

from __future__ import annotations

from functools import cache

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.registry import MODEL_WRAPPERS


def is_model_wrapper(model: nn.Module) -> bool:
    """Return whether `model` lays another module over ranks, which is then its `.module`.

    True of torch's `DistributedDataParallel` and `DataParallel`, and of every class in `MODEL_WRAPPERS`.
    """
    kind: type = type(model)
    return _wraps(kind, len(MODEL_WRAPPERS))


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own module under any number of wrappers."""
    while is_model_wrapper(model):
        inner = model.module
        assert isinstance(inner, nn.Module)
        model = inner
    return model


@cache  # every step asks; the number of wrappers tells whether another has been registered since
def _wraps(kind: type, _registered: int) -> bool:
    known = tuple(entry for entry in MODEL_WRAPPERS.module_dict.values() if isinstance(entry, type))
    return issubclass(kind, (DistributedDataParallel, nn.DataParallel, *known))
