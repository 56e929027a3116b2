"""Tensors in a module's output where torch does not look for them.

FSDP learns from the tensors of a unit's output when to gather the unit again for its backward pass, and DDP with
`find_unused_parameters` what the loss depends on. torch finds them in dicts, lists, tuples and dataclasses alone. Of
another object, such as a `SimpleNamespace`, a distribution or a `TensorDict`, FSDP would train nothing, without a word,
or fail in the backward pass.

Where torch finds some tensors, it is left with these: a cache beside them may hold tensors of all units so far.

**Source**: `torch.distributed.fsdp._common_utils.collect_grad_tensors` and
`torch.nn.parallel.distributed._find_tensors` (2.13): what they look into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.tree import is_tensordict

_MOST_OBJECTS = 10_000  # that are looked into in one output
_WITHOUT_TENSORS = (str, bytes, Number, type, torch.dtype, torch.device, torch.Generator, nn.Module, type(None))
_SHOWN = object()  # the first of three, before an output and the tensors in it


def hidden_tensors(output: Any) -> list[Tensor]:
    """Return the tensors that a gradient flows through in an output in which torch finds none.

    They are looked for in attributes, and in the values of mappings. Parameters are left out.

    **Cost**: for a tensor none; else a walk over the objects in the output.

    Example:
        >>> from types import SimpleNamespace
        >>> x = torch.ones(2, requires_grad=True) * 2
        >>> len(hidden_tensors({"a": x})), len(hidden_tensors({"a": SimpleNamespace(b=[x])}))
        (0, 1)
    """
    if isinstance(output, Tensor):
        return []
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(output, False)]
    while waiting and len(seen) < _MOST_OBJECTS:
        value, is_hidden = waiting.pop()
        if isinstance(value, Tensor):
            if not is_hidden and value.requires_grad:
                return []
            if value.grad_fn is not None:
                found.append(value)
            continue
        if isinstance(value, _WITHOUT_TENSORS) or id(value) in seen:
            continue
        seen.add(id(value))
        is_hidden = is_hidden or not _is_looked_into(value)
        waiting += [(part, is_hidden) for part in _parts(value)]
    return found


def show_hidden(module: nn.Module, args: Any, output: Any) -> Any:
    """Put the hidden tensors of an output beside it, as a forward hook before torch's; see `without_shown`."""
    if torch.is_grad_enabled() and (hidden := hidden_tensors(output)):
        return _SHOWN, output, hidden
    return None


def without_shown(output: Any) -> Any:
    """Return an output as it was before `show_hidden`; None if there was none hidden, as a forward hook does."""
    if type(output) is tuple and len(output) == 3 and output[0] is _SHOWN:
        return output[1]
    return None


def _is_looked_into(value: Any) -> bool:
    return isinstance(value, dict | list | tuple) or (is_dataclass(value) and not is_tensordict(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping) or is_tensordict(value):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif is_dataclass(value):
        yield from (getattr(value, field.name) for field in fields(value))
    else:
        yield from getattr(value, "__dict__", {}).values()
        names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
        yield from (getattr(value, name) for name in names if hasattr(value, name))
