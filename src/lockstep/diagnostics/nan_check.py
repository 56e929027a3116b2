"""A hook that ends training with an explanation when the loss is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.device import get_device
from lockstep.dist import all_gather_object, all_reduce
from lockstep.errors import caused_by, require_count
from lockstep.logging import Reading
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun


class _NonFinite(NamedTuple):
    """The first iteration of a rank whose loss was not finite."""

    iteration: int
    values: dict[str, float]


@HOOKS.register_module()
class NaNCheckHook(Hook):
    """End training on every rank when a loss is infinite or not a number on any of them.

    The error names the first such iteration, its ranks, and the values of their losses. No checkpoint is written after
    it. Where a rank's batch counts for nothing, because its `batch_size_of` is 0, its losses may be anything.

    Losses are not read at each step, because the host would have to wait for an accelerator. They stay on their device
    and are copied together at intervals; the host looks at them an iteration later, and at what other ranks have found
    yet another one later, so that nothing waits.

    Args:
        interval: number of iterations from one check to the next; the end of an epoch and each checkpoint also make a
            check.

    **Cost**: per check, one read of the losses and one all_reduce of 8 bytes.

    Raises:
        FloatingPointError: on every rank: at the check, in one process on the CPU; else one iteration later, or on
            accelerators two, because the losses are copied, and the result is exchanged, in the background.
    """

    priority = "LOW"

    def __init__(self, interval: int = 50) -> None:
        require_count("interval", interval)
        self.interval = interval
        # Iterations and their values; tensors stay on their device until the check.
        self._seen: list[tuple[int, Mapping[str, Any]]] = []
        self._check: Iterator[None] = iter(())  # what is left of the last check
        self._error: FloatingPointError | None = None

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Store the losses; check them when it is time."""
        next(self._check, None)
        iteration = runner.train_loop.iter + 1
        if outputs and runner.train_loop.samples:  # a batch that counts for nothing may have any loss
            self._seen.append((iteration, outputs))
        if iteration % self.interval == 0:
            self._complete()
            self._begin(runner)
            if get_device() == "cpu":
                next(self._check)
                if runner.world_size == 1:
                    self._complete()

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Check the losses that are left."""
        self._check_at_once(runner)

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Check before anything is written, also if a check has failed already: a session may save when it closes."""
        if self._error is not None:
            raise self._error
        self._check_at_once(runner)

    def _check_at_once(self, runner: Run) -> None:
        self._complete()
        self._begin(runner)
        self._complete()

    def _begin(self, runner: Run) -> None:
        """Begin a check: this rank's losses are on their way from their device."""
        self._check = self._check_in_parts(runner)
        next(self._check)

    def _complete(self) -> None:
        """Complete the last check."""
        for _ in self._check:
            pass

    def _check_in_parts(self, runner: Run) -> Iterator[None]:
        """Check the losses in three parts, between which training goes on; raise an error if any rank has a fault.

        The first `next` begins to copy the losses to the host, the second begins to exchange the result, and the
        third waits for it.
        """
        losses = _losses_in(self._seen)
        self._seen.clear()
        numbers = Reading(value for _, _, value in losses)
        yield
        fault = _first_fault(losses, numbers())
        found = torch.tensor(int(fault is not None), device="cpu")
        handle = all_reduce(found, op="max", async_op=True) if runner.world_size > 1 else None
        yield
        if handle is not None:
            handle.wait()
        if int(found):
            self._error = _error_of(fault, runner.world_size)
            raise self._error


def _error_of(fault_here: _NonFinite | None, world_size: int) -> FloatingPointError:
    """Return the same error on every rank. **Collective**: every rank, with the fault that it has found, if any."""
    faults = [(rank, fault) for rank, fault in enumerate(all_gather_object(fault_here)) if fault is not None]
    first = min(fault.iteration for _, fault in faults)
    values = [
        f"rank {rank} of {world_size}: " + ", ".join(f"{name} = {value:g}" for name, value in fault.values.items())
        for rank, fault in faults
        if fault.iteration == first
    ]
    error = FloatingPointError(
        f"the loss must be finite, but is not in iteration {first}, counted from 1: {'; '.join(values)}. "
        "Lower the learning rate, clip gradients (clip_grad=dict(max_norm=1.0)), or look at the batch: a mean over "
        "labels that are all left out (-100) is nan, and counts for nothing where `batch_size_of` counts labels; "
        "torch.autograd.set_detect_anomaly(True) shows where it begins"
    )
    return caused_by(error, [rank for rank, fault in faults if fault.iteration == first])


def _losses_in(seen: list[tuple[int, Mapping[str, Any]]]) -> list[tuple[int, str, Any]]:
    """Return each loss with its iteration and name."""
    return [
        (iteration, name, value)
        for iteration, values in seen
        for name, value in values.items()
        if "loss" in name and (isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1))
    ]


def _first_fault(losses: list[tuple[int, str, Any]], numbers: list[float]) -> _NonFinite | None:
    """Return the first iteration with a value that is not finite, and all such values in it."""
    bad = [(loss, number) for loss, number in zip(losses, numbers, strict=True) if not math.isfinite(number)]
    if not bad:
        return None
    first = bad[0][0][0]
    return _NonFinite(first, {name: number for (iteration, name, _), number in bad if iteration == first})
