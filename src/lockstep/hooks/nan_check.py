"""A hook that ends training with an explanation when the loss is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.dist import Handle, all_gather_object, all_reduce, get_comm_device
from lockstep.errors import caused_by, require_count
from lockstep.logging import read_scalars
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
    and are read together at intervals. If `interval` is a multiple of the `LoggerHook`'s, this comes right after that
    hook has waited for the device, and adds no wait.

    Args:
        interval: number of iterations from one check to the next; the end of an epoch and each checkpoint also make a
            check.

    **Cost**: per check, one read of the losses and one all_reduce of 8 bytes.

    Raises:
        FloatingPointError: on every rank, at the check. On the CPU with several ranks, after the next iteration,
            because the result is exchanged in the background.
    """

    priority = "LOW"

    def __init__(self, interval: int = 50) -> None:
        require_count("interval", interval)
        self.interval = interval
        # Iterations and their values; tensors stay on their device until the check.
        self._seen: list[tuple[int, Mapping[str, Any]]] = []
        # What the last check found here, and whether it found anything on any rank, with the collective in flight.
        self._looked: tuple[_Fault | None, Tensor, Handle | None] | None = None

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Store the losses; check them when it is time."""
        if self._looked is not None:
            self._judge(runner)
        iteration = runner.train_loop.iter + 1
        if outputs:
            self._seen.append((iteration, outputs))
        if iteration % self.interval == 0:
            self._look(runner)
            # Reading from an accelerator waits for it; LoggerHook may just have waited, so this is the best moment.
            if runner.world_size == 1 or get_comm_device().type != "cpu":
                self._judge(runner)

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Check the losses that are left."""
        self._look_at_once(runner)

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Check before anything is written."""
        self._look_at_once(runner)

    def _look_at_once(self, runner: Run) -> None:
        self._judge(runner)
        self._look(runner)
        self._judge(runner)

    def _look(self, runner: Run) -> None:
        """Check this rank's losses, and start to tell the other ranks."""
        fault = _first_fault(self._seen)
        self._seen.clear()
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


def _first_fault(seen: list[tuple[int, Mapping[str, Any]]]) -> _Fault | None:
    """Return the first iteration with a value that is not finite, and all such values in it."""
    losses = [
        (iteration, name, value)
        for iteration, values in seen
        for name, value in values.items()
        if "loss" in name and (isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1))
    ]
    numbers = read_scalars(value for _, _, value in losses)
    bad = [(loss, number) for loss, number in zip(losses, numbers, strict=True) if not math.isfinite(number)]
    if not bad:
        return None
    first = bad[0][0][0]
    return _Fault(first, {name: number for (iteration, name, _), number in bad if iteration == first})
