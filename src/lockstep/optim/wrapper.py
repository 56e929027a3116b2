"""`OptimWrapper`: everything between a loss and the updated parameters."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError, require_count, require_key, require_known, require_one_of, wrong_type
from lockstep.groups import this_rank
from lockstep.model import ModelWrapper
from lockstep.model.norm import BATCH_NORMS
from lockstep.model.shards import UPDATES_SHARDS, is_dtensor
from lockstep.optim.clipping import clip_by_norm, clip_by_value
from lockstep.optim.scheduler import number_in
from lockstep.optim.windows import Windows
from lockstep.registry import OPTIM_WRAPPERS
from lockstep.watch.failures import backend_errors_translated

_logger = logging.getLogger(__name__)
_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()
_WINDOWS = "windows"
_GRAPH_IS_USED = (
    "A backward pass has gone through this graph before. If two optimizers were given one loss, hand in one that is "
    "made of them. If a hidden state goes from batch to batch, detach() it. See docs/errors.md"
)


@OPTIM_WRAPPERS.register_module()
class OptimWrapper:
    """An optimizer with gradient accumulation and clipping.

    ```python
    with optim_wrapper.optim_context(model):
        loss = model(batch)
    optim_wrapper.update_params(loss)
    ```

    It owns an update: the forward pass runs in `optim_context`; `update_params` calls `scale_loss` and `backward`, and
    at the end of a window `step`, which clips, and `zero_grad`. Mixed precision and engines fill in these verbs; a
    model wrapper prepares backward passes, see `bind`.

    An optimizer with `train` and `eval`, as schedule-free ones have, trains other weights than it evaluates: the loops
    of a Runner and of a Session, and saves, call them; see `set_mode`.

    An optimizer that evaluates the loss itself, such as `LBFGS`, is for a `train_step` of the model's own:
    docs/recipes.md#lbfgs.

    Args:
        optimizer: the optimizer, built over the parameters in the form in which they are trained.
        accumulative_counts: number of calls of `update_params` whose gradients are averaged into one update (a window):
            of batches, if each of them calls it once. Only the last one synchronizes gradients between ranks.
        clip_grad: `dict(max_norm=...)` with the further arguments of `clip_by_norm`, or `dict(type="value",
            clip_value=...)` with those of `clip_by_value`.
        accumulate_across_epochs: whether a window goes on over the end of an epoch, as in MMEngine. False: the last
            window of each epoch ends with it, and is averaged over its own batches. A training that is given in
            iterations has no epochs.

    Attributes:
        optimizer: the optimizer.
        accumulate_across_epochs: as given.
        accumulative_counts: as given. It may be set to another number, on every rank alike, which holds from the next
            window on; a checkpoint does not have it.
        clip_grad: as given, with its `type`; None if gradients are not clipped.
    """

    _is_training = False
    _is_scaled = False  # whether `scale_loss` has been called for the present batch

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        accumulate_across_epochs: bool = True,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise wrong_type("optimizer", "a torch.optim.Optimizer", optimizer)
        require_count("accumulative_counts", accumulative_counts)
        self.optimizer = optimizer
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is closure.empty
        self.clip_grad = checked_clipping(clip_grad)
        self.accumulate_across_epochs = accumulate_across_epochs
        self._grad_norm: Tensor | None = None
        self._windows = Windows(accumulative_counts)
        self._no_sync: Callable[[], AbstractContextManager[Any]] | None = None
        self._wrapper: nn.Module | None = None  # around the model
        self._model: ModelWrapper | None = None  # the same, if it prepares backward passes
        self._with_gradient: nn.Parameter | None = None  # one that has a gradient of the window that is open

    if not TYPE_CHECKING:  # a checker of types still finds names that are wrong

        def __getattr__(self, name: str) -> Any:
            """Return what the optimizer alone has, such as its `state`, or `train` of a schedule-free one."""
            if name.startswith("_") or "optimizer" not in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.optimizer, name)

    @property
    def accumulative_counts(self) -> int:
        """Number of calls of `update_params` in the present window."""
        return self._windows.size

    @accumulative_counts.setter
    def accumulative_counts(self, counts: int) -> None:
        require_count("accumulative_counts", counts)
        self._windows.set_size(counts)

    def initialize_count_status(self, model: nn.Module, init_counts: int = 0, max_counts: int | None = None) -> None:
        """Set how many batches there have been and will be, so that a shorter last window is averaged correctly.

        Args:
            model: the model to be trained; only checked for layers whose result accumulation changes.
            init_counts: number of batches seen so far (after resuming).
            max_counts: number of batches in the whole training; the last batch ends with an update. A batch is one call
                of `update_params`, unless `begin_iteration` announces each batch.
        """
        was_open = self._windows.made  # a training before has ended inside a window
        lost = self._windows.restart(init_counts, max_counts)
        if was_open:
            self.zero_grad()
            self._with_gradient = None
        self._grad_norm = None
        if lost:
            _logger.warning(
                "training resumes after %d batches, inside an accumulation window: the gradients of its first %d "
                "backward passes are lost",
                init_counts, lost,
            )  # fmt: skip
        if self.accumulative_counts == 1:
            return
        norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
        if any(not norm.affine or norm.weight.requires_grad for norm in norms):  # those of a frozen part only evaluate
            _logger.warning(
                "gradients are accumulated over %d batches, but BatchNorm normalises within each "
                "of them: the result differs from that of one large batch",
                self.accumulative_counts,
            )

    def warn_of_open_window(self) -> None:
        """Warn at the end of a training of gradients that have not been used in an update."""
        if made := self._windows.made:
            _logger.warning(
                "the training ends inside an accumulation window of %d: the gradients of its last %d backward passes "
                "are not used. It ended early, or its last iteration made fewer backward passes than earlier ones",
                self.accumulative_counts, made,
            )  # fmt: skip

    def begin_iteration(self, index: int, epoch_end: int | None = None) -> None:
        """Announce the next batch, after `index` others, which may make several backward passes, or none.

        Args:
            index: the number of batches before it.
            epoch_end: the number of them when the epoch ends; None if there are no epochs.
        """
        self._windows.begin_iteration(index, None if self.accumulate_across_epochs else epoch_end)

    def count_samples(self, own: float, mean: float) -> None:
        """Set how many samples the next batch has, so that each sample has the same weight in the update.

        Without this call each batch of each rank has the same weight.

        Args:
            own: the number on this rank; 0 for a batch that must not change the update.
            mean: the mean over all ranks.
        """
        self._windows.own, self._windows.mean = own, mean
        self._is_scaled = False

    def bind(self, model: nn.Module) -> None:
        """Run each backward pass in the model wrapper's `backward_context(loss, syncs=...)`, if it prepares them.

        There the wrapper prepares the exchange of this loss's gradients, whatever was called to compute the loss, and
        gives the loss to run the pass on. Where a step of the model's own gives `optim_context` the bare model, the
        `no_sync` is the wrapper's.
        """
        self._wrapper = model
        self._model = model if isinstance(model, ModelWrapper) and model.prepares_backward else None

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context for the forward pass: `no_sync` if no update follows.

        `update_params` also runs the following backward pass in `no_sync`: DDP checks for it in the forward pass, FSDP
        in the backward pass.
        """
        synced = self._model or (model if hasattr(model, "no_sync") else self._wrapper)
        self._no_sync = None if self.should_sync() else getattr(synced, "no_sync", None)
        return _NO_CONTEXT if self._no_sync is None else self._no_sync()

    def update_params(
        self,
        loss: Tensor,
        step_kwargs: Mapping[str, Any] | None = None,
        zero_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Run the backward pass; at the end of a window update the parameters and clear the gradients.

        Args:
            loss: the scalar to minimise, of one batch, not divided by `accumulative_counts`.
            step_kwargs: passed on to the optimizer's `step`.
            zero_kwargs: passed on to the optimizer's `zero_grad`.

        Raises:
            RuntimeError: something else, such as `model.zero_grad()`, has cleared gradients within a window.
            TypeError: the optimizer evaluates the loss itself. Others: as `backward`.
        """
        if self.needs_closure:
            raise TypeError(
                f"{type(self.optimizer).__name__} evaluates the loss itself, but `update_params` was given one. Call "
                "optim_wrapper.optimizer.step(closure), in a `train_step` of the model's own or in a loop by hand, or "
                "use AdamW or SGD"
            )
        if self._with_gradient is not None and self._with_gradient.grad is None:
            self._require_window_closed("gradients", "are gone")
        no_sync, self._no_sync = self._no_sync, None
        scaled = self.scale_loss(loss)
        with _NO_CONTEXT if no_sync is None else no_sync():
            self.backward(scaled)
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))
            self._with_gradient = None
        elif self._with_gradient is None:
            parameters = (one for group in self.param_groups for one in group["params"])
            self._with_gradient = next((one for one in parameters if one.grad is not None), None)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide by the number of backward passes in a full window; see also `count_samples`."""
        weight = self._windows.weigh()
        self._is_scaled = True
        if weight != 1:
            loss = loss * weight
        return loss if self.accumulative_counts == 1 else loss / self.accumulative_counts

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a scaled loss, and count the batch.

        Raises:
            RuntimeError: this rank's batch counts otherwise than the mean rank's, but `scale_loss` was not called.
            ValueError: the loss requires no gradient.
        """
        if not self._is_scaled and not math.isclose(self._windows.own, self._windows.mean):
            raise RuntimeError(
                f"a loss that `backward` is given must be weighted where batches differ: this one counts for "
                f"{self._windows.own:g}, that of the mean rank for {self._windows.mean:g} ({this_rank()}). Call "
                "backward(scale_loss(loss)), both of the same optim wrapper; or update_params(loss), which does both"
            )
        if not loss.requires_grad:
            raise ValueError(
                f"the loss must depend on the model's parameters, but requires no gradient ({this_rank()}). It may be "
                "detached, computed under torch.no_grad(), or come from frozen parameters alone. For a batch that must "
                "count for nothing, multiply its loss by 0"
            )
        try:
            if self._model is None:
                self._run_backward(loss, **kwargs)
            else:
                with self._model.backward_context(loss, syncs=self.should_sync()) as prepared:
                    self._run_backward(prepared, **kwargs)
        except RuntimeError as error:
            if "a second time" in str(error):  # torch's words for a graph that a pass has freed
                error.add_note(_GRAPH_IS_USED)
            group = getattr(self._wrapper, "process_group", None)  # torch's DDP has it too
            with backend_errors_translated(group):  # entered here alone, because every step would pay for it
                raise
        self._windows.add()
        self._no_sync = None  # of a pass that `update_params` would have run

    def _run_backward(self, loss: Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients, then let the optimizer update the parameters.

        Raises:
            RuntimeError: a window is open: its gradients are those of some of its batches.
        """
        self._even_out()
        self._clip_grad()
        self._update(self.optimizer.step, **kwargs)

    def _update(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            step(*args, **kwargs)
        except Exception as error:
            sharded = any(is_dtensor(one) for group in self.param_groups for one in group["params"])
            if sharded and not isinstance(error, torch.OutOfMemoryError):
                error.add_note(UPDATES_SHARDS)
            raise

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients.

        Raises:
            RuntimeError: a window is open: gradients of its batches would be lost.
        """
        self._require_window_closed("zero_grad")
        self.optimizer.zero_grad(**kwargs)

    def should_sync(self) -> bool:
        """Return whether the gradients of the next batch will be averaged over ranks."""
        return self.accumulative_counts == 1 or self._windows.next_completes

    def should_update(self) -> bool:
        """Return whether the last counted batch ends a window."""
        return self.accumulative_counts == 1 or self._windows.is_complete

    @property
    def has_open_window(self) -> bool:
        """Whether gradients of a window wait for the batches that complete it."""
        return self.accumulative_counts > 1 and not self._windows.is_complete

    def left_out(self, model: nn.Module) -> list[str]:
        """Return the names of parameters of `model` that require a gradient but are in no parameter group."""
        held = {parameter for group in self.param_groups for parameter in group["params"]}
        return [name for name, own in model.named_parameters() if own.requires_grad and own not in held]

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the gradients before clipping, at the last update that was not skipped; None without `max_norm`."""
        return self._grad_norm

    @property
    def has_modes(self) -> bool:
        """Whether an optimizer has `train` and `eval`: it trains other weights than it evaluates."""
        return any(_has_modes(optimizer) for optimizer in self.optimizers)

    @property
    def is_training(self) -> bool:
        """Whether the model has the weights that are trained, of such an optimizer."""
        return any(group.get("train_mode", self._is_training) for group in self.param_groups)

    def set_mode(self, *, training: bool) -> None:
        """Let the model have the weights that are trained, or those that are to be evaluated and saved."""
        self._is_training = training
        for optimizer in self.optimizers:
            if _has_modes(optimizer):
                optimizer.train() if training else optimizer.eval()  # type: ignore[attr-defined]

    @property
    def has_skipped(self) -> bool:
        """Whether the last update was skipped."""
        return False

    @property
    def inner_count(self) -> int:
        """Number of backward passes so far."""
        return self._windows.count

    @property
    def optimizers(self) -> list[Optimizer]:
        """A list of the one optimizer."""
        return [self.optimizer]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer."""
        return self.optimizer.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Let the optimizer update further parameters, such as those that are unfrozen during the training."""
        self.optimizer.add_param_group(param_group)

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that the optimizer's parameter groups have by default."""
        return self.optimizer.defaults

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rate of every parameter group, as `{"lr": [...]}`; NaN where the optimizer sets it."""
        return {"lr": [number_in(group.get("lr")) for group in self.param_groups]}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return the momentum (Adam's first beta) of every parameter group, as `{"momentum": [...]}`; 0 if none."""
        groups = self.param_groups
        return {"momentum": [number_in(g.get("momentum", g.get("betas", (0,))[0])) for g in groups]}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def extra_state(self) -> dict[str, Any]:
        """Return what resuming needs besides the optimizer's state, in JSON values; the same on every rank."""
        return {_WINDOWS: self._windows.state()}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `extra_state` returned; the counts hold from the next `initialize_count_status` on."""
        windows = state.get(_WINDOWS, {})
        if (size := windows.get("size", self.accumulative_counts)) != self.accumulative_counts:
            _logger.info(
                "accumulative_counts is %d now, and was %s: windows begin here", self.accumulative_counts, size
            )
        self._windows.load(windows)

    def __repr__(self) -> str:
        clipping = f", clip_grad={self.clip_grad}" if self.clip_grad else ""
        return (
            f"{type(self).__name__}({type(self.optimizer).__name__}, "
            f"accumulative_counts={self.accumulative_counts}{clipping})"
        )

    def _require_window_closed(self, what: str, does: str = "comes") -> None:
        if self._windows.made:
            raise RuntimeError(
                f"the {what} of {type(self.optimizer).__name__} {does} within a window of accumulation, of which "
                f"{self._windows.made} of {self.accumulative_counts} backward passes have been made ({this_rank()}). "
                "Call session.step(loss), or optim_wrapper.update_params(loss) in a train_step: each steps and clears "
                "at the end of a window, without any other step or zero_grad of yours"
            )

    def _even_out(self) -> None:
        """Rescale the gradients to those of the mean over all samples of a window, which must be complete."""
        self._require_window_closed("step")
        factor = self._windows.correction()
        if factor != 1:
            self._multiply_gradients(factor)

    def _multiply_gradients(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _clip_grad(self) -> None:
        if self.clip_grad is None:
            return
        params = [own for group in self.param_groups for own in group["params"] if own.grad is not None]
        kwargs = {name: value for name, value in self.clip_grad.items() if name != "type"}
        if params and self.clip_grad["type"] == "norm":
            self._grad_norm = clip_by_norm(params, **kwargs)
        elif params:
            clip_by_value(params, **kwargs)


def _has_modes(optimizer: Optimizer) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def checked_clipping(clip_grad: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `clip_grad` with its `type`, or raise what is wrong with it."""
    if clip_grad is None:
        return None
    if not isinstance(clip_grad, Mapping):
        raise TypeError(f"`clip_grad` must be a dict such as dict(max_norm=1.0) or None, but is {clip_grad!r}")
    kwargs = {"type": "norm", **clip_grad}
    require_one_of("clip_grad['type']", kwargs["type"], ("norm", "value"))
    by_norm = kwargs["type"] == "norm"
    limit = "max_norm" if by_norm else "clip_value"
    require_key("clip_grad", clip_grad, limit)
    if not isinstance(clip_grad[limit], Real | Tensor):  # infinity only measures
        raise ConfigError(f"`clip_grad[{limit!r}]` must be a number, but is {clip_grad[limit]!r}")
    takes = inspect.signature(clip_by_norm if by_norm else clip_by_value).parameters
    require_known("clip_grad", clip_grad, {"type", *takes} - {"params"})
    return kwargs
