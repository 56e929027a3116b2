"""An end with an explanation where the loss is no number any more."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.dist import Handle, all_gather_object, all_reduce, get_comm_device
from lockstep.logging import read_scalars
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun


class _Fault(NamedTuple):
    """The first iteration of a rank whose loss was not finite."""

    iteration: int
    values: dict[str, float]


class _Seen(NamedTuple):
    """One value of one iteration; a tensor stays on its device until somebody looks."""

    iteration: int
    name: str
    value: float | Tensor


@HOOKS.register_module()
class NaNCheckHook(Hook):
    """End training on every rank when a loss is infinite or not a number on any of them.

    The error names the first such iteration, its ranks, and the values of their losses. No checkpoint is written after
    it.

    Losses are not read at each step, which would make the host wait for an accelerator. They are put aside on their
    device, and read in one go now and then: right after `LoggerHook` has waited for the device, where the interval
    is a multiple of its own, so that there is nothing left to wait for.

    Args:
        interval: number of iterations from one look to the next; the end of an epoch and each checkpoint make one,
            too.

    **Cost**: per look one read of the losses, and one all_reduce of 8 bytes.

    Raises:
        FloatingPointError: on every rank, at the look; on the CPU, where what the ranks tell each other travels while
            they go on, after the next iteration.
    """

    priority = "LOW"

    def __init__(self, interval: int = 50) -> None:
        if interval < 1:
            raise ValueError(f"`interval` must be at least 1, but is {interval}")
        self.interval = interval
        self._seen: list[_Seen] = []
        # What the last look has found here; and whether it has found anything on any rank, which is on its way.
        self._looked: tuple[_Fault | None, Tensor, Handle | None] | None = None

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Put the losses aside; look at them when it is time."""
        if self._looked is not None:
            self._judge(runner)
        iteration = runner.iter + 1
        for name, value in (outputs or {}).items():
            if "loss" in name and (isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)):
                self._seen.append(_Seen(iteration, name, value))
        if iteration % self.interval == 0:
            self._look(runner)
            # To read from an accelerator is to wait for it, which is best done where somebody has just done so.
            if runner.world_size == 1 or get_comm_device().type != "cpu":
                self._judge(runner)

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Look at what is left."""
        self._look_at_once(runner)

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Look before anything is written."""
        self._look_at_once(runner)

    def _look_at_once(self, runner: Run) -> None:
        self._judge(runner)
        self._look(runner)
        self._judge(runner)

    def _look(self, runner: Run) -> None:
        """Look at this rank's losses, and tell the others."""
        fault = _first_fault(self._seen)
        self._seen.clear()
        found = torch.tensor(int(fault is not None))
        telling = all_reduce(found, op="max", async_op=True) if runner.world_size > 1 else None
        self._looked = fault, found, telling

    def _judge(self, runner: Run) -> None:
        """Raise where a rank has found something at the last look."""
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
        raise FloatingPointError(
            f"the loss must be finite, but is not in iteration {first}, counted from 1: {'; '.join(told)}. "
            "Lower the learning rate, clip gradients (clip_grad=dict(max_norm=1.0)), or look at the batch: "
            "torch.autograd.set_detect_anomaly(True) shows where it begins"
        )


def _first_fault(seen: list[_Seen]) -> _Fault | None:
    """Return the first iteration with a value that is not finite, and all such values in it."""
    numbers = read_scalars(item.value for item in seen)
    bad = [(item, number) for item, number in zip(seen, numbers, strict=True) if not math.isfinite(number)]
    if not bad:
        return None
    first = bad[0][0].iteration
    return _Fault(first, {item.name: number for item, number in bad if item.iteration == first})
