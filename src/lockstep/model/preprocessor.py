"""Preprocessing a batch: from the data loader to the model's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.registry import MODELS


@MODELS.register_module()
class BaseDataPreprocessor(nn.Module):
    """Move whatever the data loader yields to the device of the model that owns this module.

    Subclasses stack, normalise or augment the batch in `forward`, after `cast_data`.

    Args:
        non_blocking: copy from pinned memory without waiting for the copy.
    """

    def __init__(self, non_blocking: bool = False) -> None:
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


def move_to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return `data` with its tensors, and whatever else has a `.to` method, on `device`.

    Dicts, lists, tuples and named tuples are rebuilt with their own type; other leaves, such as file names, are
    returned unchanged.
    """
    if isinstance(data, Tensor):
        return data if data.device == device else data.to(device, non_blocking=non_blocking)
    if type(data) is tuple or type(data) is list:  # most batches are; the tests below take longer
        return type(data)(
            [
                value
                if isinstance(value, Tensor) and value.device == device
                else move_to_device(value, device, non_blocking)
                for value in data
            ]
        )
    if isinstance(data, str | bytes | int | float | None):
        return data
    if isinstance(data, Mapping):
        moved = {key: move_to_device(value, device, non_blocking) for key, value in data.items()}
        return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_to_device(value, device, non_blocking) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(move_to_device(value, device, non_blocking) for value in data)
    if hasattr(data, "to"):
        return data.to(device)
    return data
