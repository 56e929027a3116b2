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

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from numbers import Number
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.tree import is_tensordict

_MOST_OBJECTS = 10_000  # that are looked into in one output: one may lead to all others of a program
_WITHOUT_TENSORS = (str, bytes, Number, type, torch.dtype, torch.device, torch.Generator, nn.Module, type(None))
_SHOWN = object()  # marks what `show_hidden` returns


def hidden_tensors(output: Any) -> list[Tensor]:
    """Return the tensors that a gradient flows through in an output in which torch finds none.

    They are looked for in attributes, also those of `__slots__`, in the values of mappings, and in lists, tuples, sets
    and deques. Parameters are left out.

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
    seen: dict[int, Any] = {}  # holds the objects, as what a mapping makes anew could else get the id of a former one
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
        seen[id(value)] = value
        is_hidden = is_hidden or not _is_looked_into(value)
        waiting += [(part, is_hidden) for part in _parts(value)]
    return found


def show_hidden(module: nn.Module, args: Any, output: Any) -> Any:
    """Return an output together with its hidden tensors, where torch finds these; None if there are none.

    A forward hook, which runs before FSDP's; `without_shown`, in one that runs after it, takes the output back out.
    """
    if torch.is_grad_enabled() and (hidden := hidden_tensors(output)):
        return _SHOWN, output, hidden
    return None


def without_shown(output: Any) -> Any:
    """Return the output that `show_hidden` was given; None if it has returned None, as a forward hook does."""
    if type(output) is tuple and len(output) == 3 and output[0] is _SHOWN:
        return output[1]
    return None


def _is_looked_into(value: Any) -> bool:
    """Return whether torch looks into an object."""
    return isinstance(value, dict | list | tuple) or (is_dataclass(value) and not is_tensordict(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping) or is_tensordict(value):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    else:
        yield from getattr(value, "__dict__", {}).values()
        # By their descriptors: `__slots__` may be one string, or have names that begin with two underscores.
        slotted = [vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind)]
        names = [own.__name__ for one in slotted for own in one.values() if isinstance(own, MemberDescriptorType)]
        yield from (getattr(value, name) for name in names if hasattr(value, name))
