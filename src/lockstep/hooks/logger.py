"""What a run records."""

from __future__ import annotations

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
    """What one rank knows of the iterations since the last record."""

    means: dict[str, float]
    samples: float
    seconds: float
    memory_mib: float


@HOOKS.register_module()
class LoggerHook(Hook):
    """Record the values of training every few iterations, and the metrics of each validation.

    Records go to the run's `metrics.jsonl`, to its log file and to the visualizer. A training
    record holds means over all ranks and over the iterations since the last record, and the samples
    per second of all ranks together, and the most memory that any rank has held. What each rank
    spends its time on goes to `ranks.jsonl`. Between records values are only put aside: nothing is
    sent, and an accelerator is not waited for.

    Args:
        interval: number of iterations from one record to the next. The end of an epoch makes one,
            too.

    **Cost**: one small gather per record.
    """

    priority = "BELOW_NORMAL"

    def __init__(self, interval: int = 10) -> None:
        if interval < 1:
            raise ValueError(f"`interval` must be at least 1, but is {interval}")
        self.interval = interval
        self._pending = 0
        self._epoch_sums: dict[str, float] = {}
        self._epoch_iters = 0
        self._exchange: ExchangeTimer | None = None
        self._rank_times: RankTimes | None = None

    def before_train(self, runner: RunnerLike) -> None:
        """Begin to measure the exchange of gradients."""
        self._exchange = ExchangeTimer(runner.model, self.interval)
        if runner.rank == 0:
            self._rank_times = RankTimes(runner.run_dir / "ranks.jsonl")

    def before_train_epoch(self, runner: RunnerLike) -> None:
        """Forget the sums of the former epoch."""
        self._epoch_sums = {}
        self._epoch_iters = 0

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
        norm = runner.optim_wrapper.grad_norm
        if norm is not None:
            hub.update_scalar("train/grad_norm", norm)
        self._pending += 1
        if (runner.iter + 1) % self.interval == 0:
            self._record(runner, runner.iter + 1)

    def after_train_epoch(self, runner: RunnerLike) -> None:
        """Record what is left, and the means of the whole epoch."""
        if self._pending:
            self._record(runner, runner.iter)
        if runner.rank == 0 and self._epoch_iters:
            means = {name: value / self._epoch_iters for name, value in self._epoch_sums.items()}
            seconds = self._epoch_sums.get("time", 0.0)
            samples = means.pop("_samples", 0.0) * self._epoch_iters
            means["samples_per_second"] = samples / seconds if seconds else 0.0
            means.update(_first_rates(runner))
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
        count, self._pending = self._pending, 0
        share = _share_of(runner.message_hub, count, self._exchange)
        shares = [share] if runner.world_size == 1 else gather_object(share)
        if shares is None:
            return
        values = _merge(shares)
        samples = sum(share.samples for share in shares)
        for name, value in {**values, "_samples": samples / count}.items():
            self._epoch_sums[name] = self._epoch_sums.get(name, 0.0) + value * count
        self._epoch_iters += count
        seconds = max(share.seconds for share in shares)
        values.update(_first_rates(runner))
        values["samples_per_second"] = samples / seconds if seconds else 0.0
        values["memory_mib"] = max(share.memory_mib for share in shares)
        if self._rank_times is not None:
            by_rank = [{**share.means, "memory_mib": share.memory_mib} for share in shares]
            self._rank_times.add(iteration, count, by_rank)
        self._write(runner, "train", runner.epoch + 1, iteration, values)

    def _record_metrics(self, runner: RunnerLike, mode: str, metrics: dict[str, Any]) -> None:
        if runner.rank == 0:
            # A loop by epochs has counted the epoch that it validates after.
            epoch = runner.epoch + (runner.max_epochs is None)
            self._write(runner, mode, epoch, runner.iter, metrics)

    def _write(self, runner: RunnerLike, mode: str, epoch: int, iteration: int, values: dict[str, Any]) -> None:
        runner.records.write({"mode": mode, "epoch": epoch, "iter": iteration, **values})
        shown = "  ".join(
            f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
        )
        runner.logger.debug("%s  epoch %d  iter %d  %s", mode, epoch, iteration, shown)
        runner.visualizer.add_scalars({f"{mode}/{name}": value for name, value in values.items()}, step=iteration)


def _first_rates(runner: RunnerLike) -> dict[str, float]:
    """Return each optimizer's first learning rate: `{"lr": ...}`, or of several `{"generator.lr": ..., ...}`."""
    return {name: rates[0] for name, rates in runner.optim_wrapper.get_lr().items()}


def _share_of(hub: MessageHub, count: int, exchange: ExchangeTimer | None) -> _Share:
    means = {
        name.removeprefix(_PREFIX): buffer.mean(count)
        for name, buffer in hub.log_scalars.items()
        if name.startswith(_PREFIX)
    }
    samples = means.pop("samples", 0.0) * count
    waited = None if exchange is None else exchange.mean_seconds(count)
    if waited is not None:
        means["comm_time"] = waited
    return _Share(means, samples, means.get("time", 0.0) * count, memory_stats().peak_bytes / 2**20)


def _merge(shares: list[_Share]) -> dict[str, float]:
    """Return the mean over the ranks that have a value, by name."""
    merged: dict[str, list[float]] = {}
    for share in shares:
        for name, value in share.means.items():
            merged.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in merged.items()}
