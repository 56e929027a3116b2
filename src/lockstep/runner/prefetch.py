"""`Prefetch`: copies of batches on a stream of their own, while the device still computes the step before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.model.preprocessor import move_to_device
from lockstep.tree import tree_map


class Prefetch:
    """Copies batches to an accelerator on a stream of their own.

    What the device has been given before goes on; what it is given afterwards waits for the copy. So the batch of a
    step arrives during the step before, as long as no step lets the host wait for the device. No batch is taken from
    the loader earlier than without this: its position, and the random numbers that it draws, stay those of the step.

    Args:
        device: the accelerator.

    **Cost**: memory for the batches of the steps that the host is ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device; what has a `.to` of its own is copied on the present stream."""
        copies: list[Tensor] = []

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_cpu:
                return leaf
            copies.append(leaf.to(self._device, non_blocking=True))
            return copies[-1]

        with self._stream:
            moved = tree_map(copied, batch)
        present = torch.accelerator.current_stream()
        present.wait_stream(self._stream)
        for copy in copies:
            copy.record_stream(present)  # else the memory might be given to a later batch too early
        return move_to_device(moved, self._device)
