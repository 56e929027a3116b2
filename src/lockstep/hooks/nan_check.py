"""A hook that ends training with an explanation when the loss is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.device import get_device
from lockstep.dist import Handle, all_gather_object, all_reduce
from lockstep.errors import caused_by, require_count
from lockstep.logging import start_reading
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun


class _Fault(NamedTuple):
    """The first iteration of a rank whose loss was not finite."""

    iteration: int
    values: dict[str, float]


@HOOKS.register_module()
class NaNCheckHook(Hook):
    """End training on every rank when a loss is infinite or not a number on any of them.

    The error names the first such iteration, its ranks, and the values of their losses. No checkpoint is written after
    it.

    Losses are not read at each step, because the host would have to wait for an accelerator. They stay on their device
    and are copied together at intervals; the host looks at them an iteration later, so that nothing waits.

    Args:
        interval: number of iterations from one check to the next; the end of an epoch and each checkpoint also make a
            check.

    **Cost**: per check, one read of the losses and one all_reduce of 8 bytes.

    Raises:
        FloatingPointError: on every rank: at the check, in one process on the CPU; else after the next iteration,
            because the losses are copied, or the result is exchanged, in the background.
    """

    priority = "LOW"

    def __init__(self, interval: int = 50) -> None:
        require_count("interval", interval)
        self.interval = interval
        # Iterations and their values; tensors stay on their device until the check.
        self._seen: list[tuple[int, Mapping[str, Any]]] = []
        # The losses of the last check, while they are under way, each with its iteration and name.
        self._reading: tuple[list[tuple[int, str, Any]], Callable[[], list[float]]] | None = None
        # What the last check found here, and whether it found anything on any rank, with the collective in flight.
        self._looked: tuple[_Fault | None, Tensor, Handle | None] | None = None

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Store the losses; check them when it is time."""
        self._complete(runner)
        iteration = runner.train_loop.iter + 1
        if outputs:
            self._seen.append((iteration, outputs))
        if iteration % self.interval == 0:
            self._look()
            if get_device() == "cpu":
                self._tell(runner)
                if runner.world_size == 1:
                    self._judge(runner)

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Check the losses that are left."""
        self._look_at_once(runner)

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Check before anything is written."""
        self._look_at_once(runner)

    def _look_at_once(self, runner: Run) -> None:
        self._complete(runner)
        self._look()
        self._complete(runner)

    def _complete(self, runner: Run) -> None:
        """Complete the last check."""
        if self._reading is not None:
            self._tell(runner)
        self._judge(runner)

    def _look(self) -> None:
        """Start to read this rank's losses."""
        losses = _losses_in(self._seen)
        self._seen.clear()
        self._reading = losses, start_reading(value for _, _, value in losses)

    def _tell(self, runner: Run) -> None:
        """Check them, and start to tell the other ranks."""
        assert self._reading is not None
        (losses, numbers), self._reading = self._reading, None
        fault = _first_fault(losses, numbers())
        found = torch.tensor(int(fault is not None))
        telling = all_reduce(found, op="max", async_op=True) if runner.world_size > 1 else None
        self._looked = fault, found, telling

    def _judge(self, runner: Run) -> None:
        """Raise an error if any rank found something at the last check, of which nobody has heard yet."""
        if self._looked is None:
            return
        (own, found, telling), self._looked = self._looked, None
        if telling is not None:
            telling.wait()
        if not int(found):
            return
        faults = [(rank, fault) for rank, fault in enumerate(all_gather_object(own)) if fault is not None]
        first = min(fault.iteration for _, fault in faults)
        told = [
            f"rank {rank} of {runner.world_size}: "
            + ", ".join(f"{name} = {value:g}" for name, value in fault.values.items())
            for rank, fault in faults
            if fault.iteration == first
        ]
        error = FloatingPointError(
            f"the loss must be finite, but is not in iteration {first}, counted from 1: {'; '.join(told)}. "
            "Lower the learning rate, clip gradients (clip_grad=dict(max_norm=1.0)), or look at the batch: "
            "torch.autograd.set_detect_anomaly(True) shows where it begins"
        )
        raise caused_by(error, [rank for rank, fault in faults if fault.iteration == first])


def _losses_in(seen: list[tuple[int, Mapping[str, Any]]]) -> list[tuple[int, str, Any]]:
    """Return each loss with its iteration and name."""
    return [
        (iteration, name, value)
        for iteration, values in seen
        for name, value in values.items()
        if "loss" in name and (isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1))
    ]


def _first_fault(losses: list[tuple[int, str, Any]], numbers: list[float]) -> _Fault | None:
    """Return the first iteration with a value that is not finite, and all such values in it."""
    bad = [(loss, number) for loss, number in zip(losses, numbers, strict=True) if not math.isfinite(number)]
    if not bad:
        return None
    first = bad[0][0][0]
    return _Fault(first, {name: number for (iteration, name, _), number in bad if iteration == first})
