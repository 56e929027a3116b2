"""`LogProcessor`: which values of a run are shown, smoothed over which window, and how a line of the log reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from mmengine.device import get_max_cuda_memory
from mmengine.logging import HistoryBuffer
from mmengine.registry import LOG_PROCESSORS

__all__ = ["LogProcessor"]

_NEEDED = ("data_src", "method_name")


@LOG_PROCESSORS.register_module()
class LogProcessor:
    """Makes the values and the text that are logged, from the histories in a run's message hub.

    In a run, `LoggerHook` calls it at its interval, and shows what it returns beside lockstep's own records.

    Args:
        window_size: over how many iterations values are smoothed.
        by_epoch: whether lines count epochs; otherwise iterations.
        custom_cfg: further values: dicts with `data_src` (the name of a history, without `train/`), `method_name` (a
            statistic of `HistoryBuffer`), its arguments such as `window_size` (a number, `"epoch"` or `"global"`), and
            the `log_name` under which the value is shown; without it, the value replaces that of `data_src`.
        num_digits: digits behind the point.
        log_with_hierarchy: name values with their mode, as in `train/loss`.
        mean_pattern: the names of values that are smoothed over the window; of the others, the last one is shown.

    Raises:
        AssertionError: an entry of `custom_cfg` lacks a key, asks for `"epoch"` without `by_epoch`, or has the name of
            another.
    """

    def __init__(
        self,
        window_size: int = 10,
        by_epoch: bool = True,
        custom_cfg: Sequence[Mapping[str, Any]] | None = None,
        num_digits: int = 4,
        log_with_hierarchy: bool = False,
        mean_pattern: str = r".*(loss|time|data_time|grad_norm).*",
    ) -> None:
        self.window_size, self.by_epoch, self.num_digits = window_size, by_epoch, num_digits
        self.custom_cfg = [dict(one) for one in custom_cfg or ()]
        self.log_with_hierarchy = log_with_hierarchy
        self.mean_pattern = re.compile(mean_pattern)
        self._check()

    def get_log_after_iter(self, runner: Any, batch_idx: int, mode: str) -> tuple[dict[str, Any], str]:
        """Return the values after an iteration, and the line that shows them.

        Args:
            runner: the run.
            batch_idx: index of the batch, from 0.
            mode: `"train"`, `"val"` or `"test"`.
        """
        tag = self._values(runner, batch_idx, mode)
        lr = {name: value for name, value in tag.items() if name.rpartition("/")[2].endswith("lr")}
        parts = [f"{name}: {value:.{self.num_digits}e}" for name, value in lr.items()]
        if (left := self._left(runner, batch_idx, mode)) is not None:
            parts.append(f"eta: {left}")
        times = {name: tag.get(self._named(name, mode)) for name in ("time", "data_time")}
        parts += [f"{name}: {value:.{self.num_digits}f}" for name, value in times.items() if value is not None]
        if torch.cuda.is_available():
            tag["memory"] = get_max_cuda_memory()
            parts.append(f"memory: {tag['memory']}")
        if mode == "train":
            shown = {*lr, "memory", *(self._named(name, mode) for name in times)}
            parts += [f"{name}: {self._text(value)}" for name, value in tag.items() if name not in shown]
        return tag, self._head(runner, batch_idx + 1, mode) + "  ".join(parts)

    def get_log_after_epoch(
        self, runner: Any, batch_idx: int, mode: str, with_non_scalar: bool = False
    ) -> tuple[dict[str, Any], str]:
        """Return the values after a validation or a test, and the line that shows them.

        Args:
            runner: the run.
            batch_idx: number of batches.
            mode: `"val"` or `"test"`.
            with_non_scalar: also return the values that are no numbers.
        """
        if mode not in ("val", "test"):
            raise AssertionError(f"`mode` must be val or test, but is {mode!r}")
        tag = self._values(runner, batch_idx - 1, mode)
        infos = runner.message_hub.runtime_info.items()
        others = {self._named(key.partition("/")[2], mode): value for key, value in infos if key.startswith(f"{mode}/")}
        times = {self._named("time", mode), self._named("data_time", mode)}
        shown = {name: self._text(value) for name, value in {**tag, **others}.items() if name not in times}
        shown |= {name.rpartition("/")[2]: self._text(tag[name]) for name in sorted(times) if name in tag}
        text = "  ".join(f"{name}: {value}" for name, value in shown.items())
        return {**tag, **(others if with_non_scalar else {})}, self._head(runner, batch_idx, mode) + text

    def _check(self) -> None:
        names: list[str] = []
        for one in self.custom_cfg:
            if missing := [key for key in _NEEDED if key not in one]:
                raise AssertionError(f"an entry of `custom_cfg` must have the key `{missing[0]}`, but is {one}")
            if not self.by_epoch and one.get("window_size") == "epoch":
                raise AssertionError(f"`window_size` must not be 'epoch' without `by_epoch`, but is in {one}")
            names.append(one.get("log_name", one["data_src"]))
        if repeated := {name for name in names if names.count(name) > 1}:
            raise AssertionError(f"`custom_cfg` must give each value one name, but gives {sorted(repeated)} twice")

    def _values(self, runner: Any, batch_idx: int, mode: str) -> dict[str, Any]:
        """Return the smoothed or last values of a mode, by the names under which they are shown."""
        histories = {key: one for key, one in runner.message_hub.log_scalars.items() if key.startswith(f"{mode}/")}
        tag: dict[str, Any] = {}
        if mode == "train" and not any(key.endswith("lr") for key in histories):
            tag |= {self._named(name, mode): one[0] for name, one in runner.optim_wrapper.get_lr().items()}
        for key, history in histories.items():
            if self.mean_pattern.fullmatch(key):
                value = history.mean(self._window(self.window_size, runner, batch_idx))
            else:
                value = history.current()
            tag[self._named(key.partition("/")[2], mode)] = value
        for one in self.custom_cfg if mode == "train" else ():
            arguments = dict(one)
            source, method = (arguments.pop(key) for key in _NEEDED)
            name = arguments.pop("log_name", source)
            if "window_size" in arguments:
                arguments["window_size"] = self._window(arguments["window_size"], runner, batch_idx)
            if f"{mode}/{source}" in histories:
                history = HistoryBuffer(*histories[f"{mode}/{source}"].data)  # which knows registered statistics
                tag[self._named(name, mode)] = history.statistics(method, **arguments)
        return tag

    def _window(self, size: int | str, runner: Any, batch_idx: int) -> int:
        """Return how many of the last values a window covers."""
        if size == "epoch":
            return batch_idx + 1
        if size == "global":
            return int(runner.iter) + 1
        if not isinstance(size, int):
            raise TypeError(f"`window_size` must be an int, 'epoch' or 'global', but is {size!r}")
        return size

    def _named(self, name: str, mode: str) -> str:
        return f"{mode}/{name}" if self.log_with_hierarchy else name

    def _text(self, value: Any) -> str:
        return f"{value:.{self.num_digits}f}" if isinstance(value, float) else str(value)

    def _head(self, runner: Any, done: int, mode: str) -> str:
        """Return the beginning of a line: where the run is."""
        if mode == "train" and not self.by_epoch:
            return f"Iter(train) {_of(runner.iter + 1, runner.max_iters)}  "
        total = len(_dataloader(runner, mode))
        if mode == "train":
            epochs = len(str(runner.max_epochs))
            return f"Epoch(train)  [{runner.epoch + 1:>{epochs}}]{_of(done, total)}  "
        if not self.by_epoch or mode == "test":
            return f"{'Epoch' if self.by_epoch else 'Iter'}({mode}) {_of(done, total)}  "
        return f"Epoch({mode}) [{runner.epoch or 1}]{_of(done, total)}  "

    def _left(self, runner: Any, batch_idx: int, mode: str) -> timedelta | None:
        """Return the time that is left, from the mean of all times so far."""
        history = runner.message_hub.log_scalars.get(f"{mode}/time")
        if history is None:
            return None
        left = runner.max_iters - runner.iter if mode == "train" else len(_dataloader(runner, mode)) - batch_idx
        return timedelta(seconds=int(history.mean() * max(left - 1, 0)))


def _of(done: int, total: int) -> str:
    return f"[{done:>{len(str(total))}}/{total}]"


def _dataloader(runner: Any, mode: str) -> Any:
    loader = getattr(runner, f"{mode}_dataloader", None)
    return getattr(runner, f"{mode}_loop").dataloader if loader is None or isinstance(loader, Mapping) else loader
