"""Preprocessing a batch: from the data loader to the model's device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.registry import MODELS
from lockstep.tree import is_tensordict, map_children


@MODELS.register_module()
class BaseDataPreprocessor(nn.Module):
    """Move whatever the data loader yields to the device of the model that owns this module.

    Subclasses stack, normalise or augment the batch in `forward`, after `cast_data`.

    Args:
        non_blocking: let the host go on while a batch is copied to an accelerator.
    """

    def __init__(self, non_blocking: bool = True) -> None:
        super().__init__()
        self._non_blocking = non_blocking
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """Where batches go: wherever the module itself was last moved."""
        return self._device

    def cast_data(self, data: Any) -> Any:
        """Return `data` with every tensor on this module's device; containers keep their type."""
        return move_to_device(data, self._device, self._non_blocking)

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the batch to pass to the model's `forward`.

        Args:
            data: what the data loader yielded.
            training: whether the batch is for training; a subclass may then augment it.
        """
        return self.cast_data(data)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BaseDataPreprocessor:
        # Every way of moving a module (to, cuda, cpu, to_empty) ends here. Passing a tensor to `fn` shows the device; a
        # buffer would also show it, but DDP would broadcast that in every step.
        self._device = fn(torch.empty(0, device=self._device)).device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def move_to_device(data: Any, device: torch.device, non_blocking: bool = True) -> Any:
    """Return `data` with its tensors, and whatever else has a `.to` method, on `device`.

    Dicts, lists, tuples, named tuples, dataclasses and `TreeNode`s are rebuilt with their own type, unless they have a
    `.to`, as a `TensorDict` and a `PackedSequence` have; dicts always. Other leaves, such as names of files, are
    returned unchanged.

    Args:
        data: a batch.
        device: where it goes.
        non_blocking: let the host go on while tensors are copied to an accelerator, which uses them after the copy.
            Copies to the CPU always end before this returns.
    """
    return _moved(data, device, non_blocking and device.type != "cpu")


def _moved(data: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(data, Tensor):
        return data if data.device == device else data.to(device, non_blocking=non_blocking)
    if type(data) is tuple or type(data) is list:  # most batches are; the tests below take longer
        for value in data:
            if not (isinstance(value, Tensor) and value.device == device):
                return type(data)([_moved(value, device, non_blocking) for value in data])
        return type(data)(data)
    if isinstance(data, str | bytes | int | float | type | None):
        return data
    if not has_own_to(data):
        return map_children(lambda value: _moved(value, device, non_blocking), data)
    kind: type = type(data)
    return data.to(device, non_blocking=True) if non_blocking and _takes_non_blocking(kind) else data.to(device)


def has_own_to(data: Any) -> bool:
    """Return whether an object is moved by its `.to`: a `PackedSequence` keeps a part on the CPU. Dicts never are."""
    return callable(getattr(data, "to", None)) and (is_tensordict(data) or not isinstance(data, Mapping))


@cache
def _takes_non_blocking(kind: type) -> bool:
    try:
        return "non_blocking" in inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError, AttributeError):  # of code without a signature, or an attribute of the object's own
        return False
