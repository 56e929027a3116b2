"""Activation checkpointing: activations are recomputed in the backward pass instead of being stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.model.parts import classes_in

Check: TypeAlias = Callable[[nn.Module], bool] | Iterable[str | type[nn.Module]]


def checkpoint_activations(model: nn.Module, check: Check) -> list[str]:
    """Make parts of a model store only their inputs for the backward pass, and recompute their activations.

    Each part's `forward` is replaced in place; names of parameters and classes do not change.

    Args:
        model: the model, before it is sharded.
        check: a function that says whether a module is such a part; or the classes of the parts, or their names. A part
            inside another one is recomputed with that one.

    Returns:
        The names of the parts.

    Raises:
        ValueError: no module is such a part.

    **Cost**: one more forward pass of the parts in each step.

    **Source**: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; `torch.utils.checkpoint` (2.13), the
    non-reentrant variant.
    """
    names = list(_outermost(model, "", _accepting(model, check)))
    for name in names:
        part = model.get_submodule(name)
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    if not names:
        raise ValueError(
            "`check` must accept at least one module, but accepts none of those in "
            f"{type(model).__name__}: {', '.join(sorted({type(m).__name__ for m in model.modules()}))}"
        )
    return names


def _outermost(module: nn.Module, name: str, accept: Callable[[nn.Module], bool]) -> Iterator[str]:
    if accept(module):
        yield name
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name, accept)


def _accepting(model: nn.Module, check: Check) -> Callable[[nn.Module], bool]:
    if isinstance(check, type) or not callable(check):
        kinds = classes_in(model, check, what="check")
        return lambda module: isinstance(module, kinds)
    return check
