"""A hook that measures the time of iterations, and what they process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TypeAlias

from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun

TokensOf: TypeAlias = str | Callable[[Any], float | Tensor]


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Record the duration of every training iteration without evaluations, the wait for data, and the samples.

    They are the scalars `train/time` (s), `train/data_time` (s) and `train/samples` of the message hub. An accelerator
    is not synchronised: the time of a single iteration may be wrong, but the mean over many is right.

    Args:
        tokens_of: how many tokens a batch has, for tokens per second in the records: a function of the batch, as the
            loader yields it; or the name of an entry of the batch, each element of which is a token, padding included.
            By default tokens are not counted: only you know whether padding or a mask counts.

    Example:
        >>> hook = IterTimerHook(tokens_of=lambda batch: batch["attention_mask"].sum())  # without padding
        >>> hook = IterTimerHook(tokens_of="input_ids")  # with padding, which is computed too

    Raises:
        ConfigError: `tokens_of` is something else, or the batch has no such entry.
    """

    def __init__(self, tokens_of: TokensOf | None = None) -> None:
        if not (tokens_of is None or isinstance(tokens_of, str) or callable(tokens_of)):
            raise ConfigError(
                "`tokens_of` must be a function of a batch, the name of an entry of the batch or None, but is "
                f"{tokens_of!r}"
            )
        self._tokens_of = tokens_of
        self._iteration_began = 0.0
        self._evaluation_began: float | None = None
        self._evaluations: list[tuple[float, float]] = []  # since the iteration began: when each ended, and its seconds

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Start the clock."""
        self._iteration_began, self._evaluations = perf_counter(), []

    def before_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None) -> None:
        """Record how long the batch took to arrive."""
        began = max(self._iteration_began, runner.train_loop.iter_ended)  # not while hooks worked
        evaluated = sum(seconds for ended, seconds in self._evaluations if ended > began)
        runner.message_hub.update_scalar("train/data_time", perf_counter() - began - evaluated)

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Record how long the iteration took, including the wait for data."""
        now = perf_counter()
        hub, evaluated = runner.message_hub, sum(seconds for _, seconds in self._evaluations)
        hub.update_scalar("train/time", now - self._iteration_began - evaluated)
        hub.update_scalar("train/samples", runner.train_loop.samples)
        if self._tokens_of is not None:
            # A rank that has no more batches, while others do, repeats its last one, which counts as 0 samples.
            is_counted = runner.train_loop.samples > 0
            hub.update_scalar("amounts/tokens", _tokens(data_batch, self._tokens_of) if is_counted else 0)
        self._iteration_began, self._evaluations = now, []

    def before_val(self, runner: Run) -> None:
        """Stop the clock: an iteration-based loop validates between two iterations, a loop by hand also within one."""
        self._evaluation_began = perf_counter()

    def after_val(self, runner: Run) -> None:
        """Let the clock go on."""
        if self._evaluation_began is not None:  # not after the metrics alone, which a loop by hand records
            now = perf_counter()
            self._evaluations.append((now, now - self._evaluation_began))
            self._evaluation_began = None


def _tokens(batch: Any, tokens_of: TokensOf) -> Any:
    if not isinstance(tokens_of, str):
        return tokens_of(batch)
    entry = batch.get(tokens_of) if isinstance(batch, Mapping) else None
    if not isinstance(entry, Tensor):
        shown = f"has {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}"
        raise ConfigError(
            f"`tokens_of` must name a tensor in the batch, which {shown}, but is {tokens_of!r}. It may also be a "
            "function of the batch"
        )
    return entry.numel()
