"""Weights that are used where FSDP has not gathered them: which, instead of what a kernel says of DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from torch import nn

from lockstep.model.fsdp_consistency import Consistency

_MIXED = "mixed torch.Tensor and DTensor"


@contextmanager
def naming_sharded_weights(model: nn.Module, consistency: Consistency) -> Iterator[None]:
    """Name the units whose weights are used inside, by torch's functions, while they are sharded.

    Raises:
        RuntimeError: on every rank that uses them, from torch's error, which says `got mixed torch.Tensor and DTensor`.
    """
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        user = _innermost_module(error.__traceback__, model)
        used = consistency.sharded_units(user)
        names = ", ".join(f"`{name}`" for name in used[:4]) + (f" and {len(used) - 4} more" if len(used) > 4 else "")
        raise RuntimeError(
            f"weights must be used inside the forward pass of their unit under FSDP, but {type(user).__name__} uses "
            f"some outside, where they are sharded, which now are those of {names or 'none'}. Call that module as a "
            "whole, or leave it out of `auto_wrap_policy`, so that its weights are gathered with those around it; "
            "weight.full_tensor() is the whole of one for a penalty in a `train_step`"
        ) from error


def _innermost_module(traceback: TracebackType | None, model: nn.Module) -> nn.Module:
    """Return the module of `model` whose method was running when an error was raised."""
    inside, found = set(model.modules()), model
    while traceback is not None:
        running = traceback.tb_frame.f_locals.get("self")
        if isinstance(running, nn.Module) and running in inside:
            found = running
        traceback = traceback.tb_next
    return found
