"""A hook that averages a model's weights, and validates, tests and saves the average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lockstep.checkpoint.values import is_count
from lockstep.errors import ConfigError, require_count
from lockstep.hooks.arguments import not_saved_by
from lockstep.hooks.buffers import alike_on_all, average_buffers
from lockstep.model import ModelWrapper, unwrap_model
from lockstep.model.averaged import BaseAveragedModel
from lockstep.model.shards import reshard
from lockstep.model.wrapper import name_in_state
from lockstep.registry import HOOKS, MODELS
from lockstep.runner.hook import Hook
from lockstep.runner.run import Run, TrainRun
from lockstep.strategy import Strategy

_KEY = "ema"
_HALF = (torch.bfloat16, torch.float16)


class _Forgets:
    """Tells the hook that the user's own code, as in a Session, has loaded weights; in a copy of the model, nobody."""

    def __init__(self, hook: EMAHook | None = None) -> None:
        self._hook = None if hook is None else ref(hook)

    def __call__(self, *_: object) -> None:
        if self._hook is not None and (hook := self._hook()) is not None:
            hook.after_load_weights()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Forgets, ()


@HOOKS.register_module()
class EMAHook(Hook):
    """Average the model's weights during training; validate, test and save the average.

    * After each iteration the weights are added to the average. Replicas are equal, and so are their averages: nothing
      is sent between ranks.
    * During validation and testing, the average replaces the model's weights.
    * The model in a checkpoint is the average, that is, the model that was validated. The trained weights are saved
      next to it. A run that resumes continues from the trained weights, with this hook or without it.

    The first weights that are averaged are those after the first iteration, or after iteration `begin_iter`, as in
    MMEngine's hook and torch's `AveragedModel`. Weights in half precision are averaged in float32, because they would
    round away what a small momentum adds.

    Args:
        ema_type: the kind of average: `"ExponentialMovingAverage"`, `"MomentumAnnealingEMA"`,
            `"StochasticWeightAverage"` or another `BaseAveragedModel` in `MODELS`.
        strict_load: raise an error when resuming from a checkpoint without an average; else begin a new average.
        begin_iter: the iteration, counted from 1, whose weights are the first to be averaged.
        begin_epoch: the epoch, counted from 1, in which averaging begins, after its first iteration.
        **kwargs: arguments of the average: `momentum`, the weight of the present values in each iteration, also where
            several make an update; `interval`, in iterations; `update_buffers`; and others.

    Attributes:
        ema_model: the average; set when training begins.

    **Cost**: one pass over the weights per iteration, and memory for one copy of the weights; during validation, for
    one more. With `update_buffers`, per validation and checkpoint what an average of `SyncBuffersHook` costs.
    """

    ema_model: BaseAveragedModel
    src_model: nn.Module

    def __init__(
        self,
        ema_type: str = "ExponentialMovingAverage",
        strict_load: bool = False,
        begin_iter: int = 0,
        begin_epoch: int = 0,
        **kwargs: Any,
    ) -> None:
        require_count("begin_iter", begin_iter, least=0)
        require_count("begin_epoch", begin_epoch, least=0)
        if begin_iter and begin_epoch:
            raise ConfigError(
                "only one of `begin_iter` and `begin_epoch` must be above 0, but they are "
                f"{begin_iter} and {begin_epoch}"
            )
        self.strict_load = strict_load
        self.begin_iter = begin_iter
        self.begin_epoch = begin_epoch
        self.ema_cfg = {"type": ema_type, **kwargs}
        # The trained weights, while the average replaces them in the model.
        self._trained_weights: dict[str, Tensor] | None = None
        # The strategy under which the average was built: under another one, the model has other tensors.
        self._strategy: ref[Strategy] | None = None

    def before_train(self, runner: TrainRun) -> None:
        """Copy the model; its weights are already loaded."""
        self._build(runner)
        of_epochs = ("epoch", self.begin_epoch, runner.max_epochs)
        noun, begin, last = of_epochs if self.begin_epoch else ("iteration", self.begin_iter, runner.max_iters)
        if last is not None and begin > last:
            runner.logger.warning("EMAHook averages nothing: it begins in %s %d, but %d is the last", noun, begin, last)

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Add the weights to the average."""
        if runner.iter + 1 >= self.begin_iter and runner.epoch + 1 >= self.begin_epoch:
            self.ema_model.update_parameters(self.src_model)

    @torch.no_grad()
    def before_val_epoch(self, runner: Run) -> None:
        """Replace the model's weights by the average."""
        if self._trained_weights is not None or not self._has_average():
            return
        self._sync_buffers()
        weights = list(self._weights())
        # Tied ones are copied once.
        copies = {one: one.detach().clone() for one in {trained for *_, trained in weights}}
        self._trained_weights = {name: copies[trained] for name, _, trained in weights}
        for _, averaged, trained in weights:
            trained.copy_(averaged)

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Put the model's own weights back."""
        self.close()

    def after_val(self, runner: Run) -> None:
        """Put them back where no metrics follow, as after a pass through the data in the loop of a Session."""
        self.close()

    before_test_epoch, after_test_epoch = before_val_epoch, after_val_epoch

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Make the average the checkpoint's model, and add the trained weights."""
        if self._strategy is None:
            return
        checkpoint["meta"][_KEY] = {"steps": int(self.ema_model.steps)}
        if not self._has_average():
            return
        self._sync_buffers()
        model, trained = checkpoint["model"], checkpoint.setdefault(_KEY, {})
        for name, own_name, averaged in self._named_as_in(model):
            # The strategy's own weights if available: their dtype may be more precise than the model's.
            trained[name] = model[name] if self._trained_weights is None else self._trained_weights[own_name]
            model[name] = averaged

    def before_load_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Ask for both sets of weights.

        Raises:
            ConfigError: the checkpoint has no average, and `strict_load` is True.
        """
        if _KEY not in checkpoint["meta"]:
            if self.strict_load:
                raise ConfigError(
                    "the checkpoint has no average of weights, which `strict_load` of EMAHook asks for. Resume with "
                    "strict_load=False"
                )
            runner.logger.warning(
                "the checkpoint has no average of weights: EMAHook begins anew from the weights that it has"
            )
            return
        saved = checkpoint["meta"][_KEY]
        if not isinstance(saved, Mapping) or not is_count(saved.get("steps")):
            raise not_saved_by("EMAHook", _KEY, saved)
        if saved["steps"] == 0:  # saved before averaging began
            return
        self._build(runner)
        model, trained = checkpoint["model"], checkpoint.setdefault(_KEY, {})
        for name, _, averaged in self._named_as_in(model):
            trained[name] = torch.empty_like(model[name])
            # Read directly into the average: the model's dtype may be less precise and would round it.
            model[name] = averaged

    def after_load_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Restore the trained weights."""
        if _KEY not in checkpoint:
            return
        # Through the strategy, because its optimizer may hold its own copy of the weights (ZeRO).
        runner.strategy.load_state({**checkpoint["model"], **checkpoint[_KEY]})
        loop = runner.train_loop
        epochs = loop.epoch + (loop.iter > loop.epoch_begin)  # also the one that goes on
        if loop.iter < self.begin_iter or epochs < self.begin_epoch:  # which was earlier in the run that is resumed
            runner.logger.warning("EMAHook forgets the average of the checkpoint: averaging has not begun yet")
            return
        self.ema_model.steps.fill_(checkpoint["meta"][_KEY]["steps"])

    def after_load_weights(self, runner: Run | None = None) -> None:
        """Forget the average, and weights to put back: the model has others now."""
        self._trained_weights = None
        if self._strategy is not None:
            self.ema_model.steps.zero_()

    @torch.no_grad()
    def close(self) -> None:
        """Put the model's own weights back, even if a validation has failed."""
        if self._trained_weights is None:
            return
        for name, _, trained in self._weights():
            if name in self._trained_weights:  # but for buffers of which a forward pass has made the first use
                trained.copy_(self._trained_weights[name])
        self._trained_weights = None

    def _build(self, runner: Run) -> None:
        if self._strategy is not None and self._strategy() is runner.strategy:
            return
        if isinstance(runner.model, ModelWrapper) and runner.model.partitioned is not None:
            raise ConfigError(
                f"the model must have its weights in memory to be averaged, but {runner.model.partitioned}"
            )
        self.src_model = unwrap_model(runner.model)
        ema_model = MODELS.build(self.ema_cfg, model=self.src_model)
        if not isinstance(ema_model, BaseAveragedModel):
            raise ConfigError(f"`ema_type` must build a BaseAveragedModel, but built {type(ema_model).__name__}")
        self.ema_model = ema_model._apply(lambda x: x.float() if x.dtype in _HALF else x)
        self._strategy = ref(runner.strategy)
        self.src_model.register_load_state_dict_post_hook(_Forgets(self))  # type: ignore[no-untyped-call]

    def _has_average(self) -> bool:
        return self._strategy is not None and int(self.ema_model.steps) > 0

    def _sync_buffers(self) -> None:
        if self.ema_model.update_buffers:
            average_buffers(alike_on_all(self.ema_model.module).values())

    def _weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, average and value of each tensor that is averaged, tied ones under each of their names.

        A buffer that the model has extended or registered since, such as a table for longer inputs, has no average.
        """
        reshard(self.src_model)  # after a forward pass without a backward pass
        averaged = dict(self._tensors_of(self.ema_model.module))
        for name, trained in self._tensors_of(self.src_model):
            if (average := averaged.get(name)) is not None and average.shape == trained.shape:
                yield name, average, trained

    def _tensors_of(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        yield from model.named_parameters(remove_duplicate=False)
        if self.ema_model.update_buffers:
            buffers = model.named_buffers(remove_duplicate=False)
            yield from ((name, buffer) for name, buffer in buffers if buffer.is_floating_point())

    def _named_as_in(self, state: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
        """Yield of each weight that is in a model's state its name there, its own name, and the average."""
        for own_name, averaged, trained in self._weights():
            name = own_name if own_name in state else name_in_state(self.src_model, own_name)
            if name in state:
                yield name, own_name, averaged
            elif isinstance(trained, nn.Parameter):
                raise ConfigError(f"the checkpoint's model must have all parameters to be averaged, but lacks {name}")
