"""A hook that shows the progress of a run: by a live bar on a terminal, by plain lines elsewhere."""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Mapping, Sequence
from datetime import timedelta
from itertools import chain, islice
from time import perf_counter
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lockstep.errors import require_number
from lockstep.evaluator import format_metrics
from lockstep.logging import Reading
from lockstep.logging.loggers import MAY_BE_CUT
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun

_MOST_VALUES = 5  # of the model's own
_WINDOW = 20  # number of iterations in the mean shown during an epoch


@HOOKS.register_module()
class ProgressHook(Hook):
    """Show the progress of the run on rank 0: a live bar on a terminal, lines elsewhere.

    It shows the loss, the time left of the whole training, up to four other values that the model or a loop by hand has
    given, such as further losses, the samples per second of all ranks, tokens per second and MFU if they are recorded,
    and the latest metrics of a validation, as `val/NAME`. A terminal that is too narrow shows the first of these. Each
    epoch leaves one line, the whole of which is in the log file. During an epoch, the values are those of rank 0, up to
    the iteration before. A `log_level` above INFO shows none of it.

    Args:
        period_seconds: time between two lines if there is no terminal.
    """

    priority = "BELOW_NORMAL"
    main_only: ClassVar[bool] = True

    def __init__(self, period_seconds: float = 30.0) -> None:
        require_number("period_seconds", period_seconds, 0)
        self._period_seconds = period_seconds
        self._display: Display | None = None
        self._due = 0.0
        self._started = 0.0
        self._first_iter = 0
        self._epoch_started = 0.0
        self._epoch_begin = 0  # the iteration with which this run has begun the epoch
        self._rest = ""  # says of an epoch that was resumed in its middle where that was
        self._epoch_line: tuple[list[str], list[str]] | None = None  # what stands before its metrics, and after them
        self._metrics: list[str] = []
        self._values: list[str] = []
        self._reading: tuple[list[tuple[str, int]], Reading] | None = (
            None  # values on their way to the host, to be drawn
        )

    def before_train(self, runner: TrainRun) -> None:
        """Start the clock of the whole training."""
        self._started = perf_counter()
        self._first_iter = runner.iter

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Show a new bar."""
        self._print_epoch_line(runner)
        self._epoch_started, self._epoch_begin = perf_counter(), runner.iter
        label = "training" if runner.max_epochs is None else _epoch_label(runner)
        loop = runner.train_loop
        total = runner.max_iters if runner.max_epochs is None else (loop.epoch_end or 0) - loop.epoch_begin
        is_rest = runner.max_epochs is not None and runner.iter > loop.epoch_begin
        self._rest = f" (resumed after iteration {runner.iter})" if is_rest else ""
        self._begin(runner, label, total)

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Draw the bar, a few times per second."""
        if self._reading is not None:
            counts, read = self._reading[0], iter(self._reading[1]())
            means = {name: sum(islice(read, count)) / count for name, count in counts}
            self._values, self._reading = self._training_values(runner, means), None
            self._show(batch_idx + 1 if runner.max_epochs is not None else runner.iter + 1)
        if self._is_due():
            # They are drawn an iteration later: to read them now would let the host wait for the device.
            scalars = runner.message_hub.log_scalars
            tails = {name: scalars[f"train/{name}"].tail(_WINDOW) for name in _own_values(runner, scalars, "train/")}
            self._reading = (
                [(name, len(tail)) for name, tail in tails.items() if tail],
                Reading(chain.from_iterable(tails.values())),
            )

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Prepare the line of the epoch; its metrics may follow. One that was resumed at its end has none."""
        if runner.iter == self._epoch_begin:
            return
        means = runner.message_hub.get_info("epoch_means", {})
        place = f"iter {runner.iter}/{runner.max_iters}" if runner.max_epochs is None else _epoch_label(runner)
        samples, tokens, mfu = (means.get(name) for name in ("samples_per_second", "tokens_per_second", "mfu"))
        rates = _rates(samples, tokens, mfu, counts=runner.train_loop.unit)
        rates += [f"lr {means['lr']:.3g}"] if "lr" in means else []
        rates.append(f"{perf_counter() - self._epoch_started:.1f} s")
        own = [_in_words(name, means[name]) for name in _own_values(runner, means)]
        self._epoch_line = [place + self._rest, *own], rates

    def after_train(self, runner: TrainRun) -> None:
        """Print the line of an epoch that no validation followed, and remove the bar."""
        self._print_epoch_line(runner)
        self.close()
        self._started = 0.0

    def before_val_epoch(self, runner: Run) -> None:
        """Show a bar for the validation, if it is not a pass of the user's own loop."""
        if runner.val_loop is not None and runner.val_loop.dataloader is not None:
            self._begin(runner, "validating", runner.val_loop.length)

    def after_val_iter(self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Draw the bar, a few times per second."""
        if self._is_due():
            self._show(batch_idx + 1)

    def before_test_epoch(self, runner: Run) -> None:
        """Show a bar for the test, or for what is predicted."""
        is_test = runner.predict_loop is None
        loop = runner.test_loop if is_test else runner.predict_loop
        if loop is not None:  # else it is a pass of the user's own code
            self._begin(runner, "testing" if is_test else "predicting", loop.length)

    after_test_iter = after_val_iter

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Print the line of the epoch, or of the validation alone."""
        names = sorted(metrics or {}, key="loss".__ne__)  # the loss first, beside that of training
        units = {} if runner.val_loop is None else runner.val_loop.units
        units = {f"val/{name}": unit for name, unit in units.items()}
        shown = [format_metrics({f"val/{name}": (metrics or {})[name]}, units) for name in names]
        self._metrics = [metric for metric in shown if metric]
        if self._epoch_line:
            self._print_epoch_line(runner, self._metrics)
            return
        runner.logger.info("  ".join([f"validation at iter {runner.iter}", *self._metrics]))
        if runner.max_epochs is None and self._started:
            self._begin(runner, "training", runner.max_iters)

    def close(self) -> None:
        """Remove the bar."""
        if self._display is not None:
            self._display.close()
            self._display = None
            self._values = []  # a test may follow

    def _begin(self, runner: Run, label: str, total: int | None) -> None:
        level = runner.args.log_level
        if (level if isinstance(level, int) else logging.getLevelNamesMapping()[level]) > logging.INFO:
            return  # what is shown here counts as messages of this level
        if self._display is None:
            self._due = math.inf
            console = runner.console
            # Notebooks and CI set FORCE_COLOR, by which rich takes what it writes to for a terminal.
            live = console.is_terminal and console.file.isatty()
            self._display = Display(console, None if live else self._period_seconds)
        self._display.begin(label, total)
        # A line of the training that is due comes also where validations begin more often.
        self._due = min(self._due, perf_counter() + self._display.period_seconds)
        self._reading = None

    def _show(self, done: int) -> None:
        if self._display is not None:
            self._display.show(done, self._values)

    def _is_due(self) -> bool:
        """Return whether the display is due again, and from then on count its period anew."""
        if self._display is None or perf_counter() < self._due:
            return False
        self._due = perf_counter() + self._display.period_seconds
        return True

    def _print_epoch_line(self, runner: Run, metrics: Sequence[str] = ()) -> None:
        if self._epoch_line is not None:
            (before, after), self._epoch_line = self._epoch_line, None
            runner.logger.info("  ".join([*before, *metrics, *after]), extra={MAY_BE_CUT: len(after)})

    def _training_values(self, runner: TrainRun, means: Mapping[str, float]) -> list[str]:
        """Return what is shown beside the bar, the most important first."""
        scalars = runner.message_hub.log_scalars
        mean_seconds = (perf_counter() - self._started) / (runner.iter + 1 - self._first_iter)
        left_seconds = mean_seconds * (runner.max_iters - runner.iter - 1)
        first, *others = [_in_words(name, mean) for name, mean in means.items()] or [""]
        values = [value for value in (first, f"ETA {timedelta(seconds=round(left_seconds))}", *others) if value]
        if "train/time" in scalars:
            # The ranks get equal numbers of samples, so this rank's number stands for all.
            per_second = runner.data_shard.size / scalars["train/time"].mean(_WINDOW)
            peak = runner.message_hub.get_info("peak_flops", 0.0) * runner.world_size
            samples, tokens, flops = (
                scalars[name].mean(_WINDOW) * per_second if name in scalars else None
                for name in ("train/samples", "amounts/tokens", "amounts/flops")
            )
            mfu = flops / peak if flops and peak else None
            values += _rates(samples, tokens, mfu, counts=runner.train_loop.unit)
        return [*values, *self._metrics]


def _own_values(runner: TrainRun, known: Container[str], prefix: str = "") -> list[str]:
    """Return the names of values to show that the model or a loop by hand has given and that are known: the loss first.

    Args:
        runner: the run.
        known: names with the prefix.
        prefix: what stands before each name there.
    """
    given: list[str] = runner.message_hub.get_info("own_values", [])
    names = sorted(dict.fromkeys(["loss", *given]), key="loss".__ne__)
    return [name for name in names if prefix + name in known][:_MOST_VALUES]


def _in_words(name: str, mean: float) -> str:
    """Return a value with at most six digits."""
    return f"{name} {mean:.4f}" if 0.01 <= abs(mean) < 100 else f"{name} {mean:.5g}"


def _rates(samples: float | None, tokens: float | None, mfu: float | None, counts: str = "samples") -> list[str]:
    """Return those of samples per second, or what else `counts`, tokens per second and MFU that are known, in words."""
    samples = None if samples == tokens else samples  # with `batch_size_of`, they may be tokens
    rates = [(counts, samples), ("tokens", tokens)]
    shown = [f"{rate:,.0f} {name}/s" if rate >= 10 else f"{rate:.2g} {name}/s" for name, rate in rates if rate]
    return [*shown, *([f"MFU {100 * mfu:.1f} %"] if mfu else [])]


def _epoch_label(runner: Run) -> str:
    """Return a label of the same width in all epochs."""
    return f"epoch {runner.epoch + 1:>{len(str(runner.max_epochs))}}/{runner.max_epochs}"


class Display:
    """A progress bar at the bottom of a terminal, below all other output; or plain lines, for a log.

    It is drawn only when `show` is called: a drawing thread would interrupt training at arbitrary moments.

    Args:
        console: where it is shown.
        period_seconds: time from one plain line to the next; None for a bar.
    """

    _BAR_WIDTH = 8  # at least

    def __init__(self, console: Console, period_seconds: float | None = None) -> None:
        self.period_seconds = 0.2 if period_seconds is None else period_seconds
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),  # metrics have names of the user's
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
            disable=period_seconds is not None,
        )
        self._task = self._progress.add_task("", total=None, text="")
        self._label_width = 0

    def begin(self, label: str, total: int | None) -> None:
        """Replace the bar by a new one, with the text and the label width of the old one."""
        self._label_width = max(self._label_width, len(label))
        self._progress.start()
        self._progress.reset(self._task, description=label.ljust(self._label_width))
        self._progress.tasks[0].total = total  # `reset` takes None for the old one

    def show(self, done: int, values: Sequence[str]) -> None:
        """Draw the bar, with those of the first values for which there is room; or print a line."""
        task = self._progress.tasks[0]
        if self._progress.disable:
            line = [task.description.rstrip(), f"{done}" if task.total is None else f"{done}/{task.total}", *values]
            self._progress.console.print("  ".join(line), markup=False, soft_wrap=True)
            return
        count = 2 * len(str(task.total or done)) + 1
        # There is a space between two columns.
        room = self._progress.console.width - self._label_width - self._BAR_WIDTH - count - 3
        text = ""
        for value in values:
            longer = f"{text}  {value}" if text else value
            if cell_len(longer) > room:
                break
            text = longer
        self._progress.update(self._task, completed=done, text=text)
        self._progress.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if not self._progress.disable:  # else it would print an empty line
            self._progress.stop()
