"""What a run records."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from lockstep.device import memory_stats
from lockstep.dist import gather_object
from lockstep.hooks.exchange import ExchangeTimer
from lockstep.hooks.hook import Hook
from lockstep.hooks.host import RunnerLike
from lockstep.hooks.rank_times import RankTimes
from lockstep.logging import MessageHub
from lockstep.registry import HOOKS

_PREFIX = "train/"


class _Share(NamedTuple):
    """What one rank knows of the iterations since the last record.

    Attributes:
        logged: means over its samples of what the model returned.
        means: means over iterations of all else.
    """

    logged: dict[str, float]
    means: dict[str, float]
    samples: float
    seconds: float
    memory_mib: float


class _EpochSums:
    """Adds up the records of an epoch: what the model returned by samples, all else by iterations."""

    def __init__(self) -> None:
        self.iters = 0
        self._samples = 0.0
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, values: Mapping[str, float], logged: Collection[str], *, samples: float, iters: int) -> None:
        """Add the means of a record."""
        for name, value in values.items():
            weight = samples if name in logged else iters
            total, weights = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + value * weight, weights + weight
        self.iters += iters
        self._samples += samples

    def means(self) -> dict[str, float]:
        """Return the means of the epoch, and its samples per second."""
        seconds = self._sums.get("time", (0.0, 0.0))[0]
        means = {name: total / (weights or 1.0) for name, (total, weights) in self._sums.items()}
        return {**means, "samples_per_second": self._samples / seconds if seconds else 0.0}


@HOOKS.register_module()
class LoggerHook(Hook):
    """Record the values of training every few iterations, and the metrics of each validation.

    Records go to the run's `metrics.jsonl`, to its log file and to the visualizer. A training record holds means over
    all ranks and over the iterations since the last record, of what the model returns over all samples; the samples per
    second of all ranks together; and the most memory that any rank has held. What each rank spends its time on goes to
    `ranks.jsonl`. Between records values are only put aside: nothing is sent, and an accelerator is not waited for.

    Args:
        interval: number of iterations from one record to the next. The end of an epoch makes one, too.
        ignore_last: make none at the end of an epoch, where fewer than `interval` iterations are left over.
        log_metric_by_epoch: give metrics the number of their epoch in the visualizer, in a loop by epochs. By default
            they have that of their iteration, so that they stand below the losses that they belong to.

    **Cost**: one small gather per record.
    """

    priority = "BELOW_NORMAL"

    def __init__(self, interval: int = 10, ignore_last: bool = False, log_metric_by_epoch: bool = False) -> None:
        if interval < 1:
            raise ValueError(f"`interval` must be at least 1, but is {interval}")
        self.interval = interval
        self.ignore_last = ignore_last
        self.log_metric_by_epoch = log_metric_by_epoch
        # Samples of each iteration since the last record, and the names of what the model returned.
        self._pending: list[int] = []
        self._logged: set[str] = set()
        self._epoch = _EpochSums()
        self._exchange: ExchangeTimer | None = None
        self._rank_times: RankTimes | None = None

    def before_train(self, runner: RunnerLike) -> None:
        """Begin to measure the exchange of gradients."""
        self._exchange = ExchangeTimer(runner.model, self.interval)
        if runner.rank == 0:
            self._rank_times = RankTimes(runner.run_dir / "ranks.jsonl")

    def before_train_epoch(self, runner: RunnerLike) -> None:
        """Forget the sums of the former epoch."""
        self._epoch = _EpochSums()

    def after_train_iter(
        self,
        runner: RunnerLike,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        """Put the values aside; make a record when it is time."""
        hub = runner.message_hub
        if outputs:
            for name, value in outputs.items():
                hub.update_scalar(_PREFIX + name, value)
            self._logged.update(outputs)
        norm = runner.optim_wrapper.grad_norm
        if norm is not None:
            hub.update_scalar("train/grad_norm", norm)
        self._pending.append(runner.train_loop.samples)
        if (runner.iter + 1) % self.interval == 0:
            self._record(runner, runner.iter + 1)

    def after_train_epoch(self, runner: RunnerLike) -> None:
        """Record what is left, and the means of the whole epoch."""
        if self._pending and not self.ignore_last:
            self._record(runner, runner.iter)
        self._pending = []
        if runner.rank == 0 and self._epoch.iters:
            means = {**self._epoch.means(), **_first_rates(runner)}
            runner.message_hub.update_info("epoch_means", means)
            place = {"epoch": runner.epoch + 1, "iter": runner.iter}
            runner.records.write({"mode": "epoch", **place, **means})

    def after_val_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Record the metrics of a validation."""
        self._record_metrics(runner, "val", metrics or {})

    def after_test_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Record the metrics of a test."""
        self._record_metrics(runner, "test", metrics or {})

    def close(self) -> None:
        """Write what is left of the times by rank."""
        if self._rank_times is not None:
            self._rank_times.close()

    def _record(self, runner: RunnerLike, iteration: int) -> None:
        samples, self._pending = self._pending, []
        count = len(samples)
        share = self._share_of(runner.message_hub, samples)
        shares = [share] if runner.world_size == 1 else gather_object(share)
        if shares is None:
            return
        values = _merge(shares)
        # Ranks that compute together have seen the same samples.
        total = sum(share.samples for share in shares) * runner.share.size / runner.world_size
        self._epoch.add(values, self._logged, samples=total, iters=count)
        seconds = max(share.seconds for share in shares)
        values.update(_first_rates(runner))
        values["samples_per_second"] = total / seconds if seconds else 0.0
        values["memory_mib"] = max(share.memory_mib for share in shares)
        if self._rank_times is not None:
            by_rank = [{**share.logged, **share.means, "memory_mib": share.memory_mib} for share in shares]
            self._rank_times.add(iteration, count, by_rank)
        self._write(runner, "train", runner.epoch + 1, iteration, values, step=iteration)

    def _share_of(self, hub: MessageHub, samples: list[int]) -> _Share:
        count = len(samples)
        buffers = {
            name.removeprefix(_PREFIX): buffer
            for name, buffer in hub.log_scalars.items()
            if name.startswith(_PREFIX) and name != "train/samples"
        }
        logged = [name for name in buffers if name in self._logged] if any(samples) else []
        is_even = len(set(samples)) == 1
        means = {name: buffer.mean(count) for name, buffer in buffers.items() if name not in self._logged}
        waited = None if self._exchange is None else self._exchange.mean_seconds(count)
        if waited is not None:
            means["comm_time"] = waited
        return _Share(
            {name: buffers[name].mean(count) if is_even else buffers[name].weighted_mean(samples) for name in logged},
            means,
            sum(samples),
            means.get("time", 0.0) * count,
            memory_stats().peak_bytes / 2**20,
        )

    def _record_metrics(self, runner: RunnerLike, mode: str, metrics: dict[str, Any]) -> None:
        if runner.rank == 0:
            # A loop by epochs has counted the epoch that it validates after.
            epoch = runner.epoch + (runner.max_epochs is None)
            step = epoch if self.log_metric_by_epoch and runner.max_epochs is not None else runner.iter
            self._write(runner, mode, epoch, runner.iter, metrics, step)

    def _write(
        self, runner: RunnerLike, mode: str, epoch: int, iteration: int, values: dict[str, Any], step: int
    ) -> None:
        runner.records.write({"mode": mode, "epoch": epoch, "iter": iteration, **values})
        shown = "  ".join(
            f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
        )
        runner.logger.debug("%s  epoch %d  iter %d  %s", mode, epoch, iteration, shown)
        runner.visualizer.add_scalars({f"{mode}/{name}": value for name, value in values.items()}, step=step)


def _first_rates(runner: RunnerLike) -> dict[str, float]:
    """Return each optimizer's first learning rate: `{"lr": ...}`, or of several `{"generator.lr": ..., ...}`."""
    return {name: rates[0] for name, rates in runner.optim_wrapper.get_lr().items()}


def _merge(shares: list[_Share]) -> dict[str, float]:
    """Return the mean over the ranks that have a value, by name; of what was logged, over their samples."""
    logged: dict[str, list[tuple[float, float]]] = {}
    merged: dict[str, list[float]] = {}
    for share in shares:
        for name, value in share.logged.items():
            logged.setdefault(name, []).append((value, share.samples))
        for name, value in share.means.items():
            merged.setdefault(name, []).append(value)
    weighted = {
        name: sum(value * samples for value, samples in values) / (sum(samples for _, samples in values) or 1.0)
        for name, values in logged.items()
    }
    return weighted | {name: sum(values) / len(values) for name, values in merged.items()}
