"""A hook that records model FLOPs utilization."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lockstep.device import get_device
from lockstep.errors import ConfigError, require_count
from lockstep.hooks.flops import StepFlops
from lockstep.hooks.peak_flops import PeakFlops, peak_flops
from lockstep.hooks.timer import IterTimerHook
from lockstep.model import unwrap_model
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import TrainRun
from lockstep.tree import tree_leaves

_Shapes: TypeAlias = tuple[torch.Size, ...]


@HOOKS.register_module()
class MFUHook(Hook):
    """Record how much of the devices' peak FLOP/s training uses: model FLOPs utilization (MFU).

    Records get `flops_per_second`, the model FLOPs of all ranks per second, and `mfu`: that divided by the sum of the
    ranks' peaks, a fraction of 1. The time is that of whole iterations, with the wait for data and the update.

    The FLOPs of a step are counted while it runs, the first time that a batch has these shapes; see
    `lockstep.hooks.flops.StepFlops` for what counts. They depend on the model and the batch alone, not on activation
    checkpointing, compilation, accumulation or the strategy. All steps with batches of the same shapes are taken to be
    alike; give `flops_of` if they are not. After a change of what requires a gradient, counting begins anew with the
    next epoch.

    Args:
        peak_flops: peak FLOP/s of one rank's device in the dtype of the training; `"measure"` to measure it by a large
            product. By default it comes from the data sheet of the device, in the dtype of most FLOPs, and is measured
            if that is not known, as on a CPU.
        flops_of: a function that returns the model FLOPs of one batch, forward and backward, instead of counting:
            where ranks split products (tensor and pipeline parallelism), or a kernel has no formula. `peak_flops` must
            then be a number.
        max_shapes: how many shapes are counted. A batch of yet another shape takes the FLOPs of the counted one that
            is nearest in its number of elements, in proportion to that number.

    **Cost**: a counted step runs each operator through Python, uncompiled, which takes about 30 us more for each. A
    measurement takes half a second, once, or some seconds in a dtype that the device is slow in; it is left out of the
    records' times. Any other step takes some microseconds more.

    Raises:
        ConfigError: ranks compute on the same samples together, and `flops_of` is not given; or arguments contradict
            each other.

    **Source**: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B.
    """

    priority = "ABOVE_NORMAL"  # ends the count before other hooks act, and is inside the timer's iteration

    def __init__(
        self,
        peak_flops: float | Literal["measure"] | None = None,
        flops_of: Callable[[Any], float] | None = None,
        max_shapes: int = 16,
    ) -> None:
        given = None if peak_flops is None or peak_flops == "measure" else _positive(peak_flops)
        if flops_of is not None and not callable(flops_of):
            raise ConfigError(f"`flops_of` must be a function of a batch or None, but is {flops_of!r}")
        if flops_of is not None and given is None:
            raise ConfigError(
                f"`peak_flops` must be a number of FLOP/s where `flops_of` is given, but is {peak_flops!r}: without "
                "counting, the dtype of the products is not known"
            )
        require_count("max_shapes", max_shapes)
        self.max_shapes = max_shapes
        self._flops_of = flops_of
        self._measure = peak_flops == "measure"
        self._peak = None if given is None else PeakFlops(given, "given")
        self._counting: StepFlops | None = None
        self._began = 0.0
        self._shapes: _Shapes = ()
        self._counted: dict[_Shapes, float] = {}
        self._scaled: dict[_Shapes, float] = {}
        self._trained: list[bool] = []
        self._unseen: set[str] = set()

    def before_train(self, runner: TrainRun) -> None:
        """Check that FLOPs can be counted."""
        if self._flops_of is None and runner.data_shard.size < runner.world_size:
            raise ConfigError(
                f"`flops_of` of MFUHook must be given where several ranks compute on the same samples: there are "
                f"{runner.world_size} ranks and {runner.data_shard.size} data shards, and none of them runs a whole "
                "step that could be counted. It returns the FLOPs of a batch, for instance 6 per parameter and token"
            )

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Count anew if other parameters are trained than before."""
        trained = [parameter.requires_grad for parameter in unwrap_model(runner.model).parameters()]
        if trained != self._trained:
            self._trained, self._counted, self._scaled = trained, {}, {}

    def before_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None) -> None:
        """Begin to count, if the batch has new shapes."""
        if self._flops_of is not None:
            return
        self._shapes = _shapes_of(data_batch)
        if self._shapes not in self._counted and len(self._counted) < self.max_shapes:
            self._began = perf_counter()
            self._counting = StepFlops()
            self._counting.__enter__()

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Record the FLOPs of the iteration."""
        if self._counting is not None:
            counted = self._counting
            self.close()
            self._keep(counted, runner)
        if self._flops_of is not None:
            flops = float(self._flops_of(data_batch))
        else:
            is_counted = self._shapes in self._counted
            flops = self._counted[self._shapes] if is_counted else self._in_proportion(runner)
        hub = runner.message_hub
        # A batch that counts for nothing repeats the last one, while other ranks have more.
        hub.update_scalar("amounts/flops", flops if runner.train_loop.samples else 0.0)
        if self._peak is not None:
            hub.update_info("peak_flops", self._peak.value)

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Drop the count of a step that a loop has left early."""
        self.close()

    def close(self) -> None:
        """Stop counting, also where a step has failed."""
        if self._counting is not None:
            counting, self._counting = self._counting, None
            counting.__exit__(None, None, None)
            if (error := sys.exception()) is not None:
                error.add_note(
                    "while MFUHook counted the FLOPs of this step. If the step succeeds without the hook, give its "
                    "FLOPs by MFUHook(flops_of=...)"
                )

    def _keep(self, counted: StepFlops, runner: TrainRun) -> None:
        seconds = perf_counter() - self._began
        is_first = not self._counted
        self._counted[self._shapes] = counted.total
        if new := counted.unseen - self._unseen:
            self._unseen |= new
            runner.logger.warning(
                "no FLOPs are counted for %s: if these multiply matrices, MFU is higher than recorded. Register "
                "formulas with torch.utils.flop_counter.register_flop_formula, or use MFUHook(flops_of=...)",
                ", ".join(sorted(new)),
            )
        if self._peak is None and counted.by_dtype:
            self._find_peak(max(counted.by_dtype, key=counted.by_dtype.__getitem__), runner)
        if is_first:
            peak = "unknown" if self._peak is None else f"{self._peak.value / 1e12:.4g} TFLOP/s ({self._peak.source})"
            runner.logger.info(
                "a step of each rank takes %.4g GFLOP, counted in %.2f s; peak of its device: %s",
                counted.total / 1e9, seconds, peak,
            )  # fmt: skip

    def _find_peak(self, dtype: torch.dtype, runner: TrainRun) -> None:
        if get_device() != "cpu":
            torch.accelerator.synchronize()  # what is left of the step is no part of the measurement
        start = perf_counter()
        self._peak = peak_flops(dtype, measure=self._measure)
        for hook in runner.hooks:
            if isinstance(hook, IterTimerHook):
                hook.leave_out(perf_counter() - start)

    def _in_proportion(self, runner: TrainRun) -> float:
        """Return the FLOPs of shapes that are not counted, from those that are."""
        if self._shapes not in self._scaled:
            if not self._scaled:
                runner.logger.info(
                    "batches have more than %d shapes: the FLOPs of further ones follow from their number of elements",
                    self.max_shapes,
                )
            own = _elements(self._shapes)
            nearest = min(self._counted, key=lambda shapes: abs(_elements(shapes) - own))
            self._scaled[self._shapes] = self._counted[nearest] * own / (_elements(nearest) or 1)
        return self._scaled[self._shapes]


def _positive(peak_flops: Any) -> float:
    is_number = isinstance(peak_flops, int | float) and not isinstance(peak_flops, bool)
    if not is_number or not 0 < peak_flops < float("inf"):
        raise ConfigError(f"`peak_flops` must be a positive number of FLOP/s, 'measure' or None, but is {peak_flops!r}")
    return float(peak_flops)


def _shapes_of(batch: Any) -> _Shapes:
    """Return the shapes of all tensors; on the containers of most batches it is ten times as fast as `tree_leaves`."""
    if isinstance(batch, Tensor):
        return (batch.shape,)
    if isinstance(batch, str | int | float | None):
        return ()
    if isinstance(batch, Mapping | list | tuple):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        return tuple(shape for part in parts for shape in _shapes_of(part))
    return tuple(leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _elements(shapes: _Shapes) -> int:
    return sum(shape.numel() for shape in shapes)
