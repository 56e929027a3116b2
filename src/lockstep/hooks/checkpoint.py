"""When checkpoints are saved, which of them is best, and which are removed."""

from __future__ import annotations

import shutil
from typing import Any

from lockstep.errors import ConfigError
from lockstep.hooks.hook import Hook
from lockstep.hooks.host import RunnerLike
from lockstep.hooks.rules import check_rule, rule_of
from lockstep.registry import HOOKS


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Save the model, the optimizer and how far the training is.

    Args:
        interval: number of epochs, or iterations, from one checkpoint to the next; -1 for none but the last.
        by_epoch: count epochs, else iterations.
        save_last: save at the end of training in any case.
        max_keep_ckpts: keep only so many of the regular checkpoints of this run; -1 for all.
        save_best: the name of a metric, whose best checkpoint is kept beside the regular ones; `"auto"` takes the first
            metric of the first validation.
        rule: whether `"greater"` or `"less"` is better; by default the metric's name tells.
    """

    priority = "VERY_LOW"

    def __init__(
        self,
        interval: int = 1,
        by_epoch: bool = True,
        save_last: bool = True,
        max_keep_ckpts: int = -1,
        save_best: str | None = None,
        rule: str | None = None,
    ) -> None:
        if max_keep_ckpts == 0 or max_keep_ckpts < -1:
            raise ConfigError(f"`max_keep_ckpts` must be at least 1, or -1 for all, but is {max_keep_ckpts}")
        check_rule(rule)
        self.interval = interval
        self.by_epoch = by_epoch
        self.save_last = save_last
        self.max_keep_ckpts = max_keep_ckpts
        self.save_best = save_best
        self.rule = rule
        self._kept: list[str] = []
        self._best: dict[str, Any] = {}

    def after_train_iter(
        self,
        runner: RunnerLike,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        """Save every few iterations."""
        if self.by_epoch:
            return
        if self.every_n_train_iters(runner, self.interval) or (self.save_last and self.is_last_train_iter(runner)):
            done = runner.iter + 1
            self._save(runner, f"iter_{done}", epoch=runner.epoch, iteration=done)

    def after_train_epoch(self, runner: RunnerLike) -> None:
        """Save every few epochs."""
        if not self.by_epoch:
            return
        if self.every_n_epochs(runner, self.interval) or (self.save_last and self.is_last_train_epoch(runner)):
            done = runner.epoch + 1
            self._save(runner, f"epoch_{done}", epoch=done, iteration=runner.iter)

    def before_train(self, runner: RunnerLike) -> None:
        """Refuse to wait for epochs in a loop that has none."""
        if self.by_epoch and runner.max_epochs is None:
            raise ConfigError(
                "`by_epoch` of CheckpointHook must be False in a loop by iterations, but is True. "
                "Use CheckpointHook(by_epoch=False, interval=<iterations>)"
            )

    def after_val_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Save again if a metric is better than ever before."""
        if self.save_best is None or not metrics:
            return
        name = next(iter(metrics)) if self.save_best == "auto" else self.save_best
        if name not in metrics:
            raise ConfigError(f"`save_best` must be one of the metrics {', '.join(metrics)}, but is {name!r}")
        value, former = float(metrics[name]), self._best
        if former and not self._is_better(name, value, former["value"]):
            return
        place = f"iter_{runner.iter}" if runner.max_epochs is None else f"epoch_{runner.epoch}"
        checkpoint = f"best_{name.replace('/', '_')}_{place}"
        self._best = {"metric": name, "value": value, "checkpoint": checkpoint}
        runner.save_checkpoint(checkpoint, epoch=runner.epoch, iteration=runner.iter, is_last=False)
        if former and "checkpoint" in former:
            _remove(runner, former["checkpoint"])

    def before_save_checkpoint(self, runner: RunnerLike, checkpoint: dict[str, Any]) -> None:
        """Note the best value so far."""
        checkpoint["meta"]["best"] = self._best

    def after_load_checkpoint(self, runner: RunnerLike, checkpoint: dict[str, Any]) -> None:
        """Go on from the best value so far; its checkpoint stays in the former run's folder."""
        best = checkpoint["meta"].get("best", {})
        self._best = {key: best[key] for key in ("metric", "value") if key in best}

    def _save(self, runner: RunnerLike, name: str, *, epoch: int, iteration: int) -> None:
        runner.save_checkpoint(name, epoch=epoch, iteration=iteration, is_last=True)
        self._kept = [*(kept for kept in self._kept if kept != name), name]
        while 0 < self.max_keep_ckpts < len(self._kept):
            _remove(runner, self._kept.pop(0))

    def _is_better(self, name: str, value: float, former: float) -> bool:
        rule = self.rule or rule_of(name)
        return value > former if rule == "greater" else value < former


def _remove(runner: RunnerLike, name: str) -> None:
    if runner.rank == 0:
        shutil.rmtree(runner.run_dir / name)
