"""The methods by which MMEngine's Runner builds its parts, for callers that use them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

import lockstep.evaluator
import lockstep.optim
from lockstep.dataset import build_dataloader
from lockstep.dist import broadcast_object, sync_random_seed
from lockstep.optim import OptimWrapper
from lockstep.runner import build
from lockstep.strategy import build_strategy
from mmengine.evaluator import Evaluator
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import EVALUATOR, LOG_PROCESSORS, LOOPS, MODELS, VISUALIZERS
from mmengine.runner.data import as_mmengine
from mmengine.visualization import Visualizer

__all__ = ["BuildsParts"]


class BuildsParts:
    """What `Runner` builds from configs. Objects that are given instead of configs are returned."""

    _log_processor: Any = None  # an object, or a config

    def build_model(self, model: nn.Module | Mapping[str, Any]) -> nn.Module:
        """Return the model that a config describes; its weights are not initialised yet."""
        built = MODELS.build(model) if isinstance(model, Mapping) else model
        if not isinstance(built, nn.Module):
            raise TypeError(f"`model` must be a module or the config of one, but is {model!r}")
        return built

    def wrap_model(self, model_wrapper_cfg: Mapping[str, Any] | None, model: nn.Module) -> nn.Module:
        """Return a model on this rank's device, and on several ranks in a wrapper. **Collective**: every rank."""
        runner: Any = self
        keys = {**runner.cfg, "model_wrapper_cfg": model_wrapper_cfg}
        strategy = build_strategy(build.strategy_of(replace(runner.args, cfg=keys)))
        wrapped, _ = strategy.prepare(build.with_norms(model, keys.get("sync_bn")))
        return wrapped

    def build_optim_wrapper(self, optim_wrapper: Any) -> OptimWrapper:
        """Return the optim wrapper that a config describes, over the parameters of this runner's model."""
        runner: Any = self
        return lockstep.optim.build_optim_wrapper(runner.model, optim_wrapper)

    def build_param_scheduler(self, scheduler: Any) -> list[Any] | dict[str, list[Any]]:
        """Return the schedules that a config describes; by the names of the optimizers, if there are several."""
        runner: Any = self
        wrapper, length = runner.optim_wrapper, {"max_epochs": runner.max_epochs, "max_iters": runner.max_iters}
        make = lockstep.optim.build_param_schedulers
        if not isinstance(wrapper, lockstep.optim.OptimWrapperDict):
            return make(wrapper.optimizer, scheduler, **length)
        is_shared = not isinstance(scheduler, Mapping) or "type" in scheduler
        return {
            name: make(wrapper[name].optimizer, scheduler if is_shared else scheduler.get(name), **length)
            for name in wrapper
        }

    def build_evaluator(self, evaluator: Any) -> Evaluator:
        """Return the evaluator of one or more metrics, of their configs, or of the config of an evaluator."""
        if isinstance(evaluator, lockstep.evaluator.Evaluator):
            return evaluator  # type: ignore[return-value]
        if isinstance(evaluator, Mapping) and "metrics" in evaluator:
            found: Evaluator = EVALUATOR.build({"type": "Evaluator", **evaluator})
            return found
        return Evaluator(evaluator)

    @staticmethod
    def build_dataloader(
        dataloader: DataLoader[Any] | Mapping[str, Any], seed: int | None = None, diff_rank_seed: bool = False
    ) -> DataLoader[Any]:
        """Return the data loader of this rank's share that a config describes.

        Args:
            dataloader: a data loader, which is returned, or the config of one.
            seed: for the order of the samples and for the workers; None for workers that seed themselves.
            diff_rank_seed: whether `seed` differs between ranks. They share one order, of which each takes its part, so
                that the seed of this order is then that of rank 0.

        **Collective**: every rank.
        """
        if isinstance(dataloader, DataLoader):
            return dataloader
        shared = broadcast_object(seed) if diff_rank_seed else seed
        return build_dataloader(as_mmengine(dataloader, seed), seed=sync_random_seed(shared))

    def build_train_loop(self, loop: Any) -> Any:
        """Return the training loop that a config describes, over this runner's data."""
        runner: Any = self
        return build.build_train_loop(loop, runner.built())

    def build_val_loop(self, loop: Any) -> Any:
        """Return the validation loop that a config describes, over this runner's data."""
        runner: Any = self
        return runner.val_loop if loop is None else _eval_loop(runner, "val", loop)

    def build_test_loop(self, loop: Any) -> Any:
        """Return the test loop that a config describes, over this runner's data."""
        runner: Any = self
        return runner.test_loop if loop is None else _eval_loop(runner, "test", loop)

    def build_log_processor(self, log_processor: Any) -> Any:
        """Return what a config describes; its text appears nowhere but where its user writes it."""
        if not isinstance(log_processor, Mapping):
            return log_processor
        return LOG_PROCESSORS.build({"type": "LogProcessor", **log_processor})

    @cached_property
    def log_processor(self) -> Any:
        """The log processor that `log_processor` describes."""
        return self.build_log_processor(self._log_processor or {})

    def build_logger(
        self, log_level: int | str = "INFO", log_file: str | Path | None = None, **kwargs: Any
    ) -> MMLogger:
        """Return the logger of this run's name, or a new one; its messages go where those of the run go."""
        runner: Any = self
        options = {"name": runner.experiment_name, "file_mode": "a", **kwargs}
        return MMLogger.get_instance(log_level=log_level, log_file=log_file, **options)

    def build_message_hub(self, message_hub: Mapping[str, Any] | None = None) -> MessageHub:
        """Return the hub of this name, by default the run's, or a new one."""
        runner: Any = self
        return MessageHub.get_instance(**{"name": runner.experiment_name, **(message_hub or {})})

    def build_visualizer(self, visualizer: Any = None) -> Any:
        """Return the visualizer that a config describes; by default it writes to the run's folder."""
        if visualizer is not None and not isinstance(visualizer, Mapping):
            return visualizer
        given = visualizer or {"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]}
        return VISUALIZERS.build(self._in_run_folder(given))

    def _in_run_folder(self, visualizer: Any) -> Any:
        """Return the config of a `Visualizer` with the run's name and folder, which its backends need; others as is."""
        runner: Any = self
        if not isinstance(visualizer, Mapping):
            return visualizer
        kind = visualizer.get("type")
        with VISUALIZERS.switch_scope_and_registry(visualizer.get("_scope_")) as there:
            kind = there.get(kind) if isinstance(kind, str) else kind
        if not (isinstance(kind, type) and issubclass(kind, Visualizer)):
            return visualizer
        return {"name": runner.experiment_name, "save_dir": str(runner.log_dir), **visualizer}


def _eval_loop(runner: Any, mode: Any, cfg: Any) -> Any:
    if not isinstance(cfg, Mapping):
        return cfg
    run = runner.built()
    loader, evaluator = (getattr(runner, f"{mode}_{part}") for part in ("dataloader", "evaluator"))
    kind = {"val": "ValLoop", "test": "TestLoop"}[mode]
    return LOOPS.build({"type": kind, **cfg, "runner": run, "dataloader": loader, "evaluator": evaluator})
