"""A hook that shows the progress of a run: by a live bar on a terminal, by plain lines elsewhere."""

from __future__ import annotations

from datetime import timedelta
from time import perf_counter
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lockstep.dataset import length_of
from lockstep.evaluator import format_metrics
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun

_WINDOW = 20  # number of iterations in the mean shown during an epoch


@HOOKS.register_module()
class ProgressHook(Hook):
    """Show the progress of the run on rank 0: a live bar on a terminal, lines elsewhere.

    It shows the loss, the latest metrics, the samples per second of all ranks, tokens per second and MFU if they are
    recorded, and the time left. Each epoch leaves one line. During an epoch, the loss is that of rank 0.

    Args:
        period_seconds: time between two lines if there is no terminal.
    """

    priority = "BELOW_NORMAL"
    main_only: ClassVar[bool] = True

    def __init__(self, period_seconds: float = 30.0) -> None:
        self._period_seconds = period_seconds
        self._display: LiveDisplay | PlainDisplay | None = None
        self._due = 0.0
        self._started = 0.0
        self._first_iter = 0
        self._epoch_started = 0.0
        self._epoch_line = ""
        self._metrics = ""
        self._text = ""

    def before_train(self, runner: TrainRun) -> None:
        """Start the clock of the whole training."""
        self._started = perf_counter()
        self._first_iter = runner.iter

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Show a new bar."""
        self._print_epoch_line(runner)
        self._epoch_started = perf_counter()
        label = "training" if runner.max_epochs is None else _epoch_label(runner)
        loop = runner.train_loop
        total = runner.max_iters if runner.max_epochs is None else (loop.epoch_end or 0) - loop.epoch_begin
        self._begin(runner, label, total)

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Draw the bar, a few times per second."""
        if perf_counter() >= self._due:
            self._text = self._training_text(runner)
            self._show(batch_idx + 1 if runner.max_epochs is not None else runner.iter + 1)

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Prepare the line of the epoch; its metrics may follow."""
        means = runner.message_hub.get_info("epoch_means", {})
        parts = [f"iter {runner.iter}/{runner.max_iters}" if runner.max_epochs is None else _epoch_label(runner)]
        if "loss" in means:
            parts.append(f"loss {means['loss']:.4f}")
        parts.append("{metrics}")
        parts += _rates(*(means.get(name) for name in ("samples_per_second", "tokens_per_second", "mfu")))
        if "lr" in means:
            parts.append(f"lr {means['lr']:.3g}")
        self._epoch_line = "  ".join([*parts, f"{perf_counter() - self._epoch_started:.1f} s"])

    def after_train(self, runner: TrainRun) -> None:
        """Print the line of an epoch that no validation followed, and remove the bar."""
        self._print_epoch_line(runner)
        self.close()

    def before_val_epoch(self, runner: Run) -> None:
        """Show a bar for the validation."""
        self._begin(runner, "validating", length_of(runner.val_dataloader))

    def after_val_iter(self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Draw the bar, a few times per second."""
        if perf_counter() >= self._due:
            self._show(batch_idx + 1)

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Print the line of the epoch, or of the validation alone."""
        self._metrics = format_metrics(metrics or {}, runner.val_evaluator.units)
        if self._epoch_line:
            self._print_epoch_line(runner)
            return
        runner.logger.info("validation at iter %d  %s", runner.iter, self._metrics)
        if runner.max_epochs is None and self._started:
            self._begin(runner, "training", runner.max_iters)

    def close(self) -> None:
        """Remove the bar."""
        if self._display is not None:
            self._display.close()
            self._display = None

    def _begin(self, runner: Run, label: str, total: int | None) -> None:
        if self._display is None:
            console = runner.console
            # Notebooks and CI set FORCE_COLOR, by which rich takes what it writes to for a terminal.
            live = console.is_terminal and console.file.isatty()
            self._display = LiveDisplay(console) if live else PlainDisplay(console, self._period_seconds)
        self._display.begin(label, total)
        self._due = 0.0

    def _show(self, done: int) -> None:
        if self._display is not None:
            self._due = perf_counter() + self._display.period_seconds
            self._display.show(done, self._text)

    def _print_epoch_line(self, runner: Run) -> None:
        if self._epoch_line:
            line, self._epoch_line = self._epoch_line, ""
            runner.logger.info(line.replace("{metrics}  ", f"{self._metrics}  ".lstrip()))

    def _training_text(self, runner: TrainRun) -> str:
        scalars = runner.message_hub.log_scalars
        parts = []
        if "train/loss" in scalars:
            parts.append(f"loss {scalars['train/loss'].mean(_WINDOW):.4f}")
        if self._metrics:
            parts.append(self._metrics)
        if "train/time" in scalars:
            # The ranks get equal numbers of samples, so this rank's number stands for all.
            per_second = runner.data_shard.size / scalars["train/time"].mean(_WINDOW)
            peak = runner.message_hub.get_info("peak_flops", 0.0) * runner.world_size
            samples, tokens, flops = (
                scalars[name].mean(_WINDOW) * per_second if name in scalars else None
                for name in ("train/samples", "amounts/tokens", "amounts/flops")
            )
            parts += _rates(samples, tokens, flops / peak if flops and peak else None)
        mean_seconds = (perf_counter() - self._started) / (runner.iter + 1 - self._first_iter)
        left_seconds = mean_seconds * (runner.max_iters - runner.iter - 1)
        parts.append(f"ETA {timedelta(seconds=round(left_seconds))}")
        return "  ".join(parts)


def _rates(samples: float | None, tokens: float | None, mfu: float | None) -> list[str]:
    """Return those of samples per second, tokens per second and MFU that are known, in words."""
    shown = {"{:,.0f} samples/s": samples, "{:,.0f} tokens/s": tokens, "MFU {:.1f} %": mfu and 100 * mfu}
    return [form.format(value) for form, value in shown.items() if value]


def _epoch_label(runner: Run) -> str:
    """Return a label of the same width in all epochs."""
    return f"epoch {runner.epoch + 1:>{len(str(runner.max_epochs))}}/{runner.max_epochs}"


class LiveDisplay:
    """A progress bar at the bottom of a terminal, below all other output.

    It is drawn only when `show` is called: a drawing thread would interrupt training at arbitrary moments.
    """

    period_seconds = 0.2

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),  # metrics have names of the user's
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("", total=None, text="")
        self._label_width = 0

    def begin(self, label: str, total: int | None) -> None:
        """Replace the bar by a new one, with the text and the label width of the old one."""
        self._label_width = max(self._label_width, len(label))
        self._progress.start()
        self._progress.reset(self._task, description=label.ljust(self._label_width), total=total)

    def show(self, done: int, text: str) -> None:
        """Draw the bar."""
        self._progress.update(self._task, completed=done, text=text)
        self._progress.refresh()

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


class PlainDisplay:
    """Progress as plain lines at intervals, for a log that is read afterwards.

    Args:
        console: where the lines go.
        period_seconds: time from one line to the next, within a pass.
    """

    def __init__(self, console: Console, period_seconds: float = 30.0) -> None:
        self.period_seconds = period_seconds
        self._console = console
        self._label = ""
        self._total: int | None = None
        self._last_line = perf_counter()

    def begin(self, label: str, total: int | None) -> None:
        """Set the label and the total of the lines that follow."""
        self._label = label
        self._total = total
        self._last_line = perf_counter()

    def show(self, done: int, text: str) -> None:
        """Print a line if `period_seconds` have passed since the last one."""
        now = perf_counter()
        if now - self._last_line >= self.period_seconds:
            self._last_line = now
            of_total = "" if self._total is None else f"/{self._total}"
            self._console.print(f"{self._label}  {done}{of_total}  {text}", markup=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing: printed lines stay."""
