"""A hook that saves checkpoints, keeps the best ones and removes old ones."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from lockstep.checkpoint import is_checkpoint, remove
from lockstep.checkpoint.values import encode
from lockstep.dist import run_on_main
from lockstep.errors import ConfigError, metric_as_number, require_count, require_one_of
from lockstep.hooks.arguments import RULES, check_metrics, rule_of, unknown_metric
from lockstep.location import Location, absolute, locate
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook, is_due, require_epochs
from lockstep.runner.loops import DEFAULT_INTERVAL
from lockstep.runner.run import Run, TrainRun
from lockstep.strategy.native import NativeStrategy
from lockstep.weights.source import moved_with

_META_KEY = "checkpoint_hook"
_logger = logging.getLogger(__name__)


@HOOKS.register_module()
@dataclass(eq=False, repr=False)
class CheckpointHook(Hook):
    """Save the model, the optimizer and the progress of training.

    The message hub holds the infos `last_ckpt`, `best_ckpt` and `best_score`; with several metrics, `best_ckpt_NAME`
    and `best_score_NAME`.

    Args:
        interval: number of epochs, or iterations, between two checkpoints; -1 or 0 for only the last one. By default
            1 epoch; or, by iterations, as many as from one validation to the next, or 1000 in a loop by epochs.
        by_epoch: count epochs, else iterations; by default as the loop does.
        save_optimizer: save the optimizer's state; a run that resumes without it starts with a new optimizer state.
        out_dir: where checkpoints go instead of the run's folder: into `out_dir/WORK_DIR/RUN`, by the names of the
            work_dir and of the run's folder. Also a URL that fsspec can open, such as `s3://BUCKET/NAME`; the records
            of the run stay in the work_dir.
        max_keep_ckpts: the number of regular checkpoints to keep, of this run and of those from which it goes on in the
            same work_dir, up to where it does, with those of stops from which it has gone on; -1 for all.
        save_last: always save at the end of training, also of one that ends early.
        save_best: the name of a metric, or several names. The best checkpoint by each is kept in addition to the
            regular ones, see `Runner.best_checkpoint`; `"auto"` takes the first metric of the first validation that is
            a number. Of several validation sets, the name is that of the set and the metric, as in `clean/accuracy`. A
            value that is not finite is never the best. A metric must be in the first validation, and may be missing in
            later ones.
        rule: whether `"greater"` or `"less"` is better, for each metric or for all; by default inferred from the
            metric's name.
        greater_keys: parts of metric names, or one, for which greater is better, instead of the default ones.
        less_keys: the same for `"less"`.
        filename_tmpl: name of a regular checkpoint, with `{}` for the number; by default `"epoch_{}"` or `"iter_{}"`.
        save_begin: the epoch, or iteration, at which the first interval begins.
        on_save_error: `"raise"` to end training if a checkpoint can't be written, as on a full disk; `"warn"` to go on
            without it. What `save_last` saves is tried once more when the training has ended, and raises then.
        async_save: write checkpoints while training goes on, from a copy in the memory of the host; see
            `TrainRun.save_checkpoint`.
    """

    priority = "VERY_LOW"
    writes_checkpoints = True

    interval: int | None = None
    by_epoch: bool | None = None
    save_optimizer: bool = True
    out_dir: str | Path | None = None
    max_keep_ckpts: int = -1
    save_last: bool = True
    save_best: str | Sequence[str] | None = None
    rule: str | Sequence[str] | None = None
    greater_keys: Sequence[str] | None = None
    less_keys: Sequence[str] | None = None
    filename_tmpl: str | None = None
    save_begin: int = 0
    on_save_error: Literal["raise", "warn"] = "raise"
    async_save: bool = False

    def __post_init__(self) -> None:
        if self.interval is not None:
            require_count("interval", self.interval, least=-1)
        require_count("save_begin", self.save_begin, least=0)
        require_count("max_keep_ckpts", self.max_keep_ckpts, least=-1)
        if self.max_keep_ckpts == 0:
            raise ConfigError("`max_keep_ckpts` must be at least 1, or -1 for all, but is 0")
        require_one_of("on_save_error", self.on_save_error, ("raise", "warn"))
        if self.out_dir is not None:
            self.out_dir = str(absolute(locate(self.out_dir)))
        if self.filename_tmpl is not None and self.filename_tmpl.count("{}") != 1:
            raise ConfigError(f"`filename_tmpl` must have one {{}} for the number, but is {self.filename_tmpl!r}")
        if self.filename_tmpl is not None and Path(self.filename_tmpl).name != self.filename_tmpl:
            raise ConfigError(
                f"`filename_tmpl` must be the name of a folder in the run's, but is {self.filename_tmpl!r}"
            )
        self.rules = [self.rule] if isinstance(self.rule, str | None) else list(self.rule)
        for one in self.rules:
            require_one_of("rule", one, RULES)
        if len(self.rules) not in (1, len(self._best_by())):
            raise ConfigError(
                f"`rule` must be 'greater' or 'less', or one of them for each of {len(self._best_by())} metrics in "
                f"`save_best`, but is {self.rules}"
            )
        self._kept: list[str] = []
        self._is_checked = False  # whether the first update's state of the optimizer is one that can be saved
        self._saved = 0  # how many epochs, or iterations, the last regular checkpoint has
        # Of each run that this one goes on from, the oldest one first: the name of its folder as `run`, and the `epoch`
        # and `iter` from which the next one has gone on.
        self._former_runs: list[dict[str, Any]] = []
        # By metric: the best value, the path of its checkpoint, and its name if this run has saved it.
        self._best: dict[str, dict[str, Any]] = {}
        self._metrics: dict[str, Any] = {}
        self._seen: set[str] = set()  # names in `save_best` that some validation had

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save every few iterations, and after the last one; check after the first update what will be saved."""
        if not self._is_checked and not runner.optim_wrapper.has_open_window:
            self._is_checked = True
            self._require_savable(runner)  # the optimizer has its state now
        by_epoch, interval = self._cadence(runner)
        if by_epoch:
            return
        loop = runner.train_loop
        done = loop.iter + 1
        if is_due(done, interval, self.save_begin) or (self.save_last and done == loop.max_iters):
            self._save(runner, "iter_{}", done, epoch=loop.epoch, iteration=done)

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Save every few epochs, and after the last one."""
        by_epoch, interval = self._cadence(runner)
        if by_epoch and (
            self.every_n_epochs(runner, interval, self.save_begin)
            or (self.save_last and self.is_last_train_epoch(runner))
        ):
            self._save(runner, "epoch_{}", runner.epoch + 1, epoch=runner.epoch + 1, iteration=runner.iter)

    def after_train(self, runner: TrainRun) -> None:
        """Save a training that has ended early, or whose last checkpoint could not be written."""
        by_epoch, _ = self._cadence(runner)
        template, done = ("epoch_{}", runner.epoch) if by_epoch else ("iter_{}", runner.iter)
        runner.saving.finish()
        if self.save_last and done != self._saved:  # no training is left that could go on without it
            self._save(runner, template, done, epoch=runner.epoch, iteration=runner.iter, on_save_error="raise")

    def before_train(self, runner: TrainRun) -> None:
        """Raise an error for what can't be saved, or a metric that there won't be."""
        if self.by_epoch:
            require_epochs(runner, "CheckpointHook(by_epoch=False, interval=<iterations>)")
        names = [] if self.save_best == "auto" else self._best_by()
        check_metrics("save_best", names, runner)
        for name in names:
            self._rule(name)
        if isinstance(runner.strategy, NativeStrategy):
            encode(runner.strategy.model_state(), ("model",), {})
        self._is_checked = False
        self._require_savable(runner)

    def _require_savable(self, runner: TrainRun) -> None:
        saves = self.save_optimizer and (self._cadence(runner)[1] > 0 or self.save_last or self.save_best is not None)
        if saves and isinstance(runner.strategy, NativeStrategy):  # an engine's states are dear
            encode(runner.strategy.optim_state(), ("optimizer",), {})

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Keep the metrics until every hook has seen them, so that the checkpoint includes this validation."""
        self._metrics = metrics or {}

    def after_val(self, runner: Run) -> None:
        """Save a checkpoint if a metric is the best so far."""
        metrics, self._metrics = self._metrics, {}
        if self.save_best is None or not metrics or not isinstance(runner, TrainRun):
            return
        if self.save_best == "auto":
            numbers = [name for name, value in metrics.items() if _is_number(value)]
            if not numbers:
                raise ConfigError(
                    "`save_best` must be 'auto' only where a metric of the validation is a number, but none of "
                    f"{', '.join(metrics)} is. Let a metric return a number, or leave out `save_best`"
                )
            self.save_best = numbers[0]
        runner.saving.finish()  # which value is the best depends on whether the former one is saved
        for name in self._best_by():
            if name not in metrics and name not in self._seen:
                raise unknown_metric("save_best", name, metrics, runner)
            self._seen.add(name)
            value = metric_as_number("save_best", name, metrics.get(name, math.nan))
            if math.isfinite(value):
                self._save_if_best(runner, name, value)
            else:
                is_what = f"is {value}" if name in metrics else "is missing"
                _logger.warning("%s %s in this validation, which therefore is not the best one by it", name, is_what)

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Add the best values so far to the checkpoint."""
        own = {"best": {}, "former_runs": self._former_runs, "stopped": runner.saving.is_stopping}
        state = checkpoint["meta"].setdefault(_META_KEY, own)
        for name, best in self._best.items():  # another hook of this class may have added its own
            if name in self._best_by() or name not in state["best"]:
                state["best"][name] = best

    def after_load_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Restore the best values so far; their checkpoints stay in the previous run's folder."""
        meta = checkpoint["meta"]
        state = meta.get(_META_KEY, {})
        self._best, self._saved = {}, runner.epoch if self._cadence(runner)[0] else runner.iter
        if runner.resume_from is not None:
            here = {"run": runner.resume_from.parent.name, "epoch": meta["epoch"], "iter": meta["iter"]}
            here["stopped"] = state.get("stopped") is True
            self._former_runs = [*state.get("former_runs", []), here]
        for name, best in state.get("best", {}).items():
            self._seen.add(name)
            path = best["path"]
            if runner.resume_from is not None:
                path = run_on_main(partial(moved_with, runner.resume_from, path))
            self._best[name] = {"value": best["value"], "path": path}
            self._tell_best(runner, name)

    def _cadence(self, runner: TrainRun) -> tuple[bool, int]:
        """Return whether epochs are counted, and how many of them, or iterations, are from one save to the next."""
        by_epoch = runner.max_epochs is not None if self.by_epoch is None else self.by_epoch
        if self.interval is not None:
            return by_epoch, self.interval
        if by_epoch:
            return True, 1
        return False, DEFAULT_INTERVAL if runner.max_epochs is not None else runner.train_loop.val_interval

    def _save(self, runner: TrainRun, template: str, done: int, **how: Any) -> None:
        template = self.filename_tmpl or template
        name = template.replace("{}", str(done))
        when_ended = partial(self._keep, runner, template, name, done)
        self._write(runner, name, when_ended, is_last=True, **how)

    def _keep(self, runner: TrainRun, template: str, name: str, done: int, is_complete: bool) -> None:
        """Count a regular checkpoint that has been saved, and remove those that are too many."""
        if not is_complete:
            return
        self._saved = done
        folder = self._folder(runner)
        runner.message_hub.update_info("last_ckpt", str(folder / name))
        self._kept = [*(kept for kept in self._kept if kept != name), name]
        if self.max_keep_ckpts > 0 and runner.rank == 0:
            former = self._former_checkpoints(runner, template)
            kept = [*former, *(folder / one for one in self._kept)]
            for old in kept[: -self.max_keep_ckpts]:
                if old in former:
                    _logger.info("%s is removed, as max_keep_ckpts=%d says", old, self.max_keep_ckpts)
                _remove(old)
            self._kept = self._kept[-self.max_keep_ckpts :]

    def _former_checkpoints(self, runner: TrainRun, template: str) -> list[Location]:
        """Return the regular checkpoints from which this run goes on, and those of stops, the oldest one first.

        Those that another run has saved after this one had gone on from it are not among them, nor the one that
        `load_from` names: the same command shall find it again.
        """
        before, _, after = template.partition("{}")
        name = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
        stay = {str(one["path"]) for one in self._best.values()} | {runner.args.beginning}
        found: list[Location] = []
        by_epoch, _ = self._cadence(runner)
        for former in self._former_runs:
            run, last = former["run"], former["epoch" if by_epoch else "iter"]
            folder = self._folder(runner).parent / run
            if re.fullmatch(r"[\w.\-]*\d{8}_\d{6}[\w.\-]*", run) and folder.is_dir() and not folder.is_symlink():
                matches = [(name.fullmatch(path.name), path) for path in folder.iterdir() if str(path) not in stay]
                regular = sorted((int(match[1]), path) for match, path in matches if match and is_checkpoint(path))
                found += [path for done, path in regular if done <= last]
                stopped = folder / f"iter_{former['iter']}"  # by a signal, amid an epoch; else it is the user's own
                is_further = stopped not in found and str(stopped) not in stay
                if former.get("stopped") is True and is_further and is_checkpoint(stopped):
                    found.append(stopped)
        return found

    def _save_if_best(self, runner: TrainRun, metric: str, value: float) -> None:
        rule = self._rule(metric)
        former = self._best.get(metric)
        if former is not None and math.isfinite(former["value"]):
            is_better = value > former["value"] if rule == "greater" else value < former["value"]
            if not is_better:
                return
        when = f"iter_{runner.iter}" if runner.max_epochs is None else f"epoch_{runner.epoch}"
        checkpoint = f"best_{metric.replace('/', '_')}_{when}"
        when_ended = partial(self._replace_best, runner, metric, former)
        # Noted before the checkpoint is written, because it is part of the checkpoint.
        path = str(self._folder(runner) / checkpoint)
        self._best[metric] = {"value": value, "path": path, "checkpoint": checkpoint}
        self._write(runner, checkpoint, when_ended, epoch=runner.epoch, iteration=runner.iter, is_last=False)

    def _best_by(self) -> list[str]:
        return [self.save_best] if isinstance(self.save_best, str) else list(self.save_best or ())

    def _rule(self, metric: str) -> str:
        rule = self.rules[0] if len(self.rules) == 1 else self.rules[self._best_by().index(metric)]
        return rule or rule_of(metric, self.greater_keys, self.less_keys)

    def _replace_best(self, runner: TrainRun, metric: str, former: dict[str, Any] | None, is_complete: bool) -> None:
        """Remove the former best checkpoint by a metric when there is a better one; else it stays the best one."""
        if is_complete:
            self._tell_best(runner, metric)
            old = None if former is None else former.get("checkpoint")
            # It is also that of `a_b` where `a/b` has been as good at that time.
            is_needed = old in [best.get("checkpoint") for best in self._best.values()]
            if old is not None and not is_needed and runner.rank == 0:
                _remove(self._folder(runner) / old)
        elif former is None:
            del self._best[metric]
        else:
            self._best[metric] = former

    def _tell_best(self, runner: TrainRun, metric: str) -> None:
        suffix = f"_{metric}" if len(self._best_by()) > 1 else ""
        runner.message_hub.update_info(f"best_ckpt{suffix}", self._best[metric]["path"])
        runner.message_hub.update_info(f"best_score{suffix}", self._best[metric]["value"])

    def _write(self, runner: TrainRun, name: str, when_ended: Callable[[bool], None], **how: Any) -> None:
        how = {"on_save_error": self.on_save_error, **how}
        runner.save_checkpoint(
            self._folder(runner), name, save_optimizer=self.save_optimizer, async_save=self.async_save,
            when_ended=when_ended, **how,
        )  # fmt: skip

    def _folder(self, runner: TrainRun) -> Location:
        if self.out_dir is None:
            return runner.run_dir
        return locate(self.out_dir) / runner.work_dir.name / runner.run_dir.name


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or getattr(value, "ndim", None) == 0


def _remove(checkpoint: Location) -> None:
    """Remove a checkpoint, if that is possible."""
    try:
        remove(checkpoint)
    except OSError as error:
        _logger.warning("%s should be removed, but could not be: %s", checkpoint, error)
