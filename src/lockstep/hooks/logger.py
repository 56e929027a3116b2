"""A hook that records the values and metrics of a run."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from time import perf_counter, sleep
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.device import get_device, peak_memory
from lockstep.diagnostics.slow_ranks import OwnWork, Sample, StragglerWatch, described
from lockstep.dist.objects import start_gather_bytes
from lockstep.errors import ConfigError, require_count, require_number
from lockstep.hooks.arguments import not_saved_by
from lockstep.logging.meters import Reading, Scalar
from lockstep.logging.sinks import placed, renamed
from lockstep.optim import OptimWrapper, OptimWrapperDict
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.options import digest_of, optimizer_options
from lockstep.runner.run import Run, TrainRun
from lockstep.transport.control import GatherHandle

_PREFIX = "train/"
# What a hook counts under `amounts/NAME` of the message hub, such as tokens, is recorded as `NAME_per_second`.
_AMOUNTS = "amounts/"
# What hooks record themselves, which a value of the same name that the model returns must not be mixed with.
_OWN = frozenset(
    ("comm_time", "data_time", "flops_per_second", "grad_norm", "lr", "memory_mib", "mfu", "samples",
     "samples_per_second", "time")
)  # fmt: skip
_KEY = "logger"
# Iterations after which rank 0 reads what the others have sent for a record. Ranks that exchange gradients have sent it
# by then, so that rank 0 need not wait; see docs/decisions/0009.
_READ_AFTER = 2
_LAST_WAIT_SECONDS = 0.2  # for the last record of a run that fails


class _Unwritten(NamedTuple):
    """A record that rank 0 has yet to write.

    Attributes:
        runner: the run.
        epoch: number of the epoch in which the record was made, counted from 1.
        iteration: number of complete iterations, including the one in which the record was made.
        length: number of iterations that the record covers.
        learning_rates: the first learning rate of each optimizer at that time.
        handle: the ranks' numbers, on their way to rank 0.
        due: the number of iterations after which rank 0 reads them.
    """

    runner: TrainRun
    epoch: int
    iteration: int
    length: int
    learning_rates: dict[str, float]
    handle: GatherHandle
    due: int


@dataclass
class _Sums:
    """Numbers that are added up over ranks and iterations.

    Attributes:
        parts: by name, a total and the sum of its weights, which for values that the model returned are samples, and
            for all others iterations. A weight of 0 marks an amount, to be divided by seconds.
        seconds: the time of these iterations.
        peak_flops: what all ranks can compute in a second; 0 if that is not known.
        memory_mib: the peak memory of any rank; 0 if that is not known.
    """

    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0
    peak_flops: float = 0.0
    memory_mib: float = 0.0

    def add(self, parts: Mapping[str, tuple[float, float]]) -> None:
        """Add the totals and weights of another rank, or of other iterations."""
        for name, (total, weight) in parts.items():
            before, weights = self.parts.get(name, (0.0, 0.0))
            self.parts[name] = before + total, weights + weight

    def means(self) -> dict[str, float]:
        """Return means, and amounts per second; of FLOPs, if the peak is known, their fraction of it, as `mfu`."""
        means = {name: total / weight for name, (total, weight) in self.parts.items() if weight}
        if self.memory_mib:
            means["memory_mib"] = self.memory_mib
        for name, (total, weight) in self.parts.items():
            if not weight and self.seconds:  # not known without `IterTimerHook`
                means[f"{name.removeprefix(_AMOUNTS)}_per_second"] = total / self.seconds
        if self.peak_flops and "flops_per_second" in means:
            means["mfu"] = means["flops_per_second"] / self.peak_flops
        return means


@HOOKS.register_module()
@dataclass(eq=False, repr=False)
class LoggerHook(Hook):
    """Record the values of training every few iterations, and the metrics of each validation.

    Records go to the run's `metrics.jsonl`, to its log file and to the visualizer. A training record holds means over
    all ranks and over the iterations since the last record (for the values that the model returns, means over samples);
    the total samples per second of all ranks, and whatever other hooks count under `amounts/NAME` of the message hub,
    as `NAME_per_second`; and the peak memory of any rank, where the device keeps count of it. Between records, values
    are only stored: nothing is sent, and no accelerator is synchronised. Rank 0 reads what the others send for a record
    two iterations later, on an accelerator three, and writes it; at the latest before the next record, a validation, a
    checkpoint and the end of an epoch, and when the run fails, unless the device does not complete its work then.

    With each record, the options of the optimizers are compared over ranks: a learning rate that only some ranks have
    changed ends the training. The own work of all ranks is compared, too: a step without the wait for slower ranks. A
    warning names a rank that keeps the others waiting, and at what: data or computing. `metrics.jsonl` gets a line for
    it, and the visualizer the number of slow ranks.

    Args:
        interval: number of iterations from one record to the next. The end of an epoch also makes one.
        ignore_last: make no record at the end of an epoch, when fewer than `interval` iterations are left over.
        log_metric_by_epoch: in an epoch-based loop, plot metrics over epochs in the visualizer. By default they are
            plotted over iterations, like the losses.
        slow_factor: warn of a rank whose own work takes so many times as long as the median of the others; None never.

    **Cost**: per record a message of 4 KiB from each rank to rank 0.

    Raises:
        ConfigError: an argument is out of range. On rank 0, when it reads a record:
            ranks have different options of the optimizers.
    """

    priority = "BELOW_NORMAL"

    interval: int = 10
    ignore_last: bool = False
    log_metric_by_epoch: bool = False
    slow_factor: float | None = 1.5

    def __post_init__(self) -> None:
        require_count("interval", self.interval)
        if self.slow_factor is not None:
            require_number("slow_factor", self.slow_factor, above=1)
        # Samples of each iteration since the last record; of each in which the model has returned a value, by its name.
        self._samples: list[float] = []
        self._returned: dict[str, list[float]] = {}
        self._are_sums: dict[
            str, bool
        ] = {}  # what is recorded in iterations: whether as sums, not as one value in each
        self._taken: dict[str, int] = {}  # how many values of each history are in records
        self._last_rates: tuple[int, dict[str, float]] = 0, {}  # of the last iteration of an epoch, and its number
        self._gathering: _Unwritten | None = None  # the last record, until rank 0 writes it
        # On an accelerator: sends this rank's numbers of the last record, once the next iteration is under way.
        self._unsent: tuple[Reading, Callable[[], None]] | None = None
        self._epoch = _Sums()
        self._is_open = False  # while a training writes records
        self._last_norms: dict[str, Tensor] = {}  # with accumulation, most iterations have none of their own
        self._work: OwnWork | None = None
        self._watch: StragglerWatch | None = None

    def before_train(self, runner: TrainRun) -> None:
        """Start to measure this rank's own work, and its wait for others."""
        runner.message_hub.keep(self.interval)  # a record is a mean over all of its iterations
        self._is_open = True
        self._taken.clear()
        self._take(runner)  # what the hub has of the run that this one goes on from is in no record of this one
        if runner.rank == 0 and runner.resume_from is not None:
            place = {"mode": "resumed", "epoch": runner.epoch, "iter": runner.iter}
            runner.records.write({**place, "path": str(runner.resume_from)})
        if runner.distributed:
            self._work = OwnWork(runner.model, self.interval)
            self._watch = None if self.slow_factor is None else StragglerWatch(self.slow_factor)

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Begin to measure."""
        if self._work is not None:
            self._work.begin()

    def before_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None) -> None:
        """Note the norms of the last updates."""
        self._last_norms = _norms(runner.optim_wrapper)

    def after_train_iter(
        self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Store the values; make a record when it is due."""
        hub, loop = runner.message_hub, runner.train_loop
        done = loop.iter + 1
        self._send()
        if self._gathering is not None and done >= self._gathering.due:
            self._finish_gathering()
        if outputs:
            for name, value in renamed(outputs, _OWN).items():
                hub.update_scalar(_PREFIX + name, value)
                self._returned.setdefault(name, []).append(loop.samples)
                own: list[str] = hub.get_info("own_values", [])
                if name not in own:  # they are shown beside the progress
                    hub.update_info("own_values", [*own, name])
        for name, norm in _norms(runner.optim_wrapper).items():
            if norm is not self._last_norms.get(name):
                hub.update_scalar(_PREFIX + name, norm)
        self._samples.append(loop.samples)
        if self._work is not None:
            self._work.note(done, hub)
        if done % self.interval == 0:
            self._make_record(runner, done, _first_learning_rates(runner))
        if done == loop.epoch_end:  # a loop by hand may step its schedules before the epoch ends
            self._last_rates = done, _first_learning_rates(runner)

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Record what is left, and the means of the whole epoch."""
        self._finish_gathering()
        at, rates = self._last_rates
        rates = rates if at == runner.iter else _first_learning_rates(runner)
        if self._samples and not self.ignore_last:
            self._make_record(runner, runner.iter, rates)
            self._finish_gathering()
        self._samples, self._returned = [], {}
        self._take(runner)
        if runner.rank == 0 and self._epoch.parts:
            means = {**self._epoch.means(), **rates}
            runner.message_hub.update_info("epoch_means", means)
            place = {"mode": "epoch", "epoch": runner.epoch + 1, "iter": runner.iter}
            runner.records.write(placed(place, means))
        self._epoch = _Sums()

    def before_val_epoch(self, runner: Run) -> None:
        """Write the last record, which comes before those of the validation."""
        self._finish_gathering()

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Record what is left, and save the sums of the epoch: a run that resumes from there would lack both."""
        if "iter" not in checkpoint["meta"]:  # weights alone are exported, as by `save_pretrained`
            return
        if self._samples and self._is_open:
            self._make_record(runner, checkpoint["meta"]["iter"], _first_learning_rates(runner))
        self._finish_gathering()
        sums = asdict(self._epoch) | {"parts": {name: [*part] for name, part in self._epoch.parts.items()}}
        of_step = dict(runner.train_loop.rates_of_step)
        by_rank = sorted(name for name, is_sum in self._are_sums.items() if not is_sum)
        checkpoint["meta"][_KEY] = {"epoch": sums, "rates": [*self._last_rates], "rates_of_step": of_step,
                                    "ranks": runner.world_size, "by_rank": by_rank}  # fmt: skip

    def after_load_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Restore the sums of the epoch."""
        self._epoch, self._last_rates = _Sums(), (0, {})
        if (saved := checkpoint["meta"].get(_KEY)) is None:
            return
        try:
            sums, (at, rates) = saved["epoch"], saved["rates"]
            # Each rank has counted what is recorded once in an iteration.
            factors = dict.fromkeys(saved.get("by_rank", ()), runner.world_size / saved.get("ranks", runner.world_size))
            parts = {
                name: (float(total) * factors.get(name, 1.0), float(weight) * factors.get(name, 1.0))
                for name, (total, weight) in sums["parts"].items()
            }
            self._are_sums = dict.fromkeys(factors, False)
            numbers = {name: float(sums[name]) for name in ("seconds", "peak_flops", "memory_mib")}
            self._epoch, self._last_rates = _Sums(parts, **numbers), (int(at), {**rates})
            runner.train_loop.rates_of_step = {**saved.get("rates_of_step", {})}  # a checkpoint may be older
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise not_saved_by("LoggerHook", _KEY, saved) from error

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Record the metrics of a validation; an iteration-based loop validates between two iterations."""
        if self._work is not None:
            self._work.begin()
        self._record_metrics(runner, "val", metrics or {})

    def after_test_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Record the metrics of a test."""
        self._record_metrics(runner, "test", metrics or {})

    def close(self) -> None:
        """Write what is left."""
        try:
            with suppress(RuntimeError):  # where the run has failed, the others may be gone
                self._finish_last_gathering()
        finally:
            self._is_open = False
            if self._work is not None:
                self._work.close()

    def _make_record(self, runner: TrainRun, iteration: int, rates: dict[str, float]) -> None:
        """Begin to gather each rank's numbers since the last record; one process computes them later."""
        samples, self._samples = self._samples, []
        returned, self._returned = self._returned, {}
        last, counts = self._take(runner)
        reading = Reading(chain.from_iterable(last.values()))
        peak_flops = runner.message_hub.get_info("peak_flops", 0.0)

        share = runner.data_shard.size / runner.world_size  # ranks that compute on the same samples count them once
        epoch = runner.epoch + 1
        self._finish_gathering()
        options = digest_of(optimizer_options(runner, reads_device=False)), rates
        is_on_cpu = get_device() == "cpu"

        def send() -> None:
            parts = self._parts_of_rank(last, counts, samples, returned, reading(), share)
            memory_mib = (peak_memory() or 0) / 2**20
            message = {"parts": parts, "peak_flops": peak_flops, "memory_mib": memory_mib, "options": options}
            if self._work is not None:
                # `take` returns the iterations that the device has completed. `reading` has waited for these.
                comm_time, message["samples"] = self._work.take()
                message["host"] = self._work.host
                if comm_time is not None:
                    parts["comm_time"] = comm_time * len(samples), len(samples)
                    self._are_sums.setdefault("comm_time", False)
            handle = start_gather_bytes(json.dumps(message).encode())
            due = iteration + (0 if is_on_cpu else 1) + _READ_AFTER
            self._gathering = _Unwritten(runner, epoch, iteration, len(samples), rates, handle, due)

        if is_on_cpu:
            send()
        else:
            # It is called after the next iteration, so that the host does not wait for the device now.
            self._unsent = reading, send

    def _take(self, runner: TrainRun) -> tuple[dict[str, list[Scalar]], dict[str, int]]:
        """Return the values that no record has yet, the latest first, and the sums of their counts."""
        taken, counts = {}, {}
        for key, buffer in runner.message_hub.log_scalars.items():
            if key.startswith((_PREFIX, _AMOUNTS)):
                taken[key] = buffer.tail(buffer.updates - self._taken.get(key, 0))
                counts[key] = sum(islice(reversed(buffer.counts), len(taken[key])))
                self._taken[key] = buffer.updates
        return taken, counts

    def _finish_gathering(self, *, checks_options: bool = True) -> None:
        """Wait until the numbers of the last record are on rank 0, which writes it. **Collective**: every rank."""
        self._send()
        if self._gathering is None:
            return
        record, self._gathering = self._gathering, None
        gathered = record.handle.wait()
        if gathered is not None:
            by_rank = [json.loads(one) for one in gathered]
            self._write_training(record, by_rank)
            if checks_options:
                _check_options([one["options"] for one in by_rank], record.iteration)
            self._report_stragglers(record.runner, by_rank)

    def _finish_last_gathering(self) -> None:
        """Finish the gathering at the end of a run, if the numbers arrive in time: other ranks may have failed."""
        end = perf_counter() + _LAST_WAIT_SECONDS
        while self._unsent is not None and not self._unsent[0].is_ready():  # a device may wait for a rank that is gone
            if perf_counter() > end:
                return
            sleep(0.01)
        self._send()
        while self._gathering is not None and not self._gathering.handle.is_completed():
            if perf_counter() > end:
                return
            sleep(0.01)
        self._finish_gathering(checks_options=False)  # a run that has failed has an error of its own

    def _send(self) -> None:
        if self._unsent is not None:
            (_, send), self._unsent = self._unsent, None
            send()

    def _report_stragglers(self, runner: TrainRun, by_rank: Sequence[Mapping[str, Any]]) -> None:
        """Compare the ranks' samples, and report each rank that has become slow, or is slow no longer."""
        if self._watch is None:
            return
        for slow in self._watch.add([[Sample(*one) for one in each["samples"]] for each in by_rank]):
            host = by_rank[slow.rank]["host"]
            log = runner.logger.info if slow.part is None else runner.logger.warning
            log("%s", described(slow, runner.world_size, host))
            place = {"mode": "straggler", "epoch": runner.epoch + 1, "iter": slow.end}
            runner.records.write({**place, **slow._asdict(), "host": host})
            runner.visualizer.add_scalars({"train/slow_ranks": len(self._watch.slow_ranks)}, step=slow.end)

    def _write_training(self, record: _Unwritten, ranks: Sequence[Mapping[str, Any]]) -> None:
        runner, sums, epoch = record.runner, _Sums(), self._epoch
        for numbers in ranks:
            sums.add(numbers["parts"])
        times = [numbers["parts"].get("time", (0.0, 1.0)) for numbers in ranks]
        sums.seconds = max(total / weight for total, weight in times) * record.length
        peaks = [numbers["peak_flops"] for numbers in ranks]
        sums.peak_flops = sum(peaks) if all(peaks) else 0.0
        sums.memory_mib = max(numbers["memory_mib"] for numbers in ranks)
        epoch.add(sums.parts)
        epoch.seconds += sums.seconds
        epoch.peak_flops, epoch.memory_mib = sums.peak_flops, max(epoch.memory_mib, sums.memory_mib)
        values = {**sums.means(), **record.learning_rates}
        place = {"epoch": record.epoch, "iter": record.iteration}
        self._write(runner, "train", place, values, record.iteration)

    def _parts_of_rank(
        self,
        last: Mapping[str, list[Scalar]],
        counts: Mapping[str, int],
        samples: list[float],
        returned: Mapping[str, list[float]],
        read_values: list[float],
        share: float,
    ) -> dict[str, tuple[float, float]]:
        """Return the totals and weights of this rank in the iterations since the last record; see `_Sums`.

        A value that some of them have counts in these alone; an amount, as if all had it. Of its amounts, it counts the
        part `share`.
        """
        parts = {_AMOUNTS + "samples": (sum(samples) * share, 0.0)}
        read = iter(read_values)
        for key, values in last.items():
            by_iteration = list(islice(read, len(values)))  # the latest first
            if key == "train/samples" or not by_iteration:  # `samples` has them already
                continue
            name, total, count = key.removeprefix(_PREFIX), sum(by_iteration), len(by_iteration)
            if key.startswith(_AMOUNTS):
                parts[key] = total / count * len(samples) * share, 0.0
            elif name not in returned:
                parts[name] = total, counts[key]
                self._are_sums[name] = self._are_sums.get(name, False) or counts[key] != count
            elif weight := sum(returned[name][-count:]):
                # What the model returned for a batch that counts for nothing may be anything.
                weighted = zip(reversed(returned[name]), by_iteration, strict=False)
                parts[name] = sum(number * value for number, value in weighted if number), weight
        return parts

    def _record_metrics(self, runner: Run, mode: str, metrics: dict[str, Any]) -> None:
        if runner.rank == 0 and metrics:  # `predict` has none
            is_epoch_based = runner.max_epochs is not None
            # Records count epochs from 1. An epoch-based loop validates after it has counted the epoch that has ended.
            place = {"epoch": runner.epoch, "iter": runner.iter, **runner.loaded}
            place["epoch"] += isinstance(runner, TrainRun) and not is_epoch_based
            step = place["epoch"] if self.log_metric_by_epoch and is_epoch_based else place["iter"]
            self._write(runner, mode, place, metrics, step)

    def _write(self, runner: Run, mode: str, place: dict[str, Any], values: dict[str, Any], step: int) -> None:
        runner.records.write(placed({"mode": mode, **place}, values))
        if runner.logger.isEnabledFor(logging.DEBUG):
            shown = "  ".join(f"{key} {_shown(value)}" for key, value in values.items())
            runner.logger.debug("%s  epoch %d  iter %d  %s", mode, place["epoch"], place["iter"], shown)
        numbers = {f"{mode}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        runner.visualizer.add_scalars(numbers, step=step)


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _first_learning_rates(runner: TrainRun) -> dict[str, float]:
    """Return each optimizer's first learning rate: `{"lr": ...}`, or, for several, `{"generator.lr": ..., ...}`.

    One that sets its rate itself has none. In a loop by hand, they are those with which the iteration has updated.
    """
    present = {name: rates[0] for name, rates in runner.optim_wrapper.get_lr().items() if not math.isnan(rates[0])}
    of_step: dict[str, float] = runner.train_loop.rates_of_step
    return present | of_step


def _norms(optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
    """Return the norm of the gradients of each optimizer's last update, if it clips them, named as the rates are."""
    several = optim_wrapper.items() if isinstance(optim_wrapper, OptimWrapperDict) else ()
    norms = {f"{name}.grad_norm": one.grad_norm for name, one in several} or {"grad_norm": optim_wrapper.grad_norm}
    return {name: norm for name, norm in norms.items() if norm is not None}


def _check_options(by_rank: Sequence[tuple[int, Mapping[str, float]]], iteration: int) -> None:
    """Refuse to go on if ranks update their weights by different options. The other ranks get the error from rank 0."""
    digest, rates = by_rank[0]
    for rank, (other, other_rates) in enumerate(by_rank):
        if other != digest:
            raise ConfigError(
                f"the options of the optimizer must be the same on all ranks, but are not after iteration {iteration}: "
                f"rank {rank} of {len(by_rank)} has the learning rates {dict(other_rates)}, and rank 0 has "
                f"{dict(rates)}, or another option differs. Change options in the same way on every rank"
            )
