"""`ColossalAIOptimWrapper`: from a loss to updated parameters, partly by ColossalAI's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.model.drift import DriftCheck
from lockstep.optim import OptimWrapper
from lockstep.registry import OPTIM_WRAPPERS
from lockstep.strategy.gradient_flow import GradientFlow
from lockstep.strategy.held_gradients import HeldGradients
from lockstep.strategy.masters import Masters


class Drive(NamedTuple):
    """The parts that run an update.

    Attributes:
        engine: ColossalAI's optimizer.
        gradients: yields the gradients that its next step will use.
        clips: whether it clips gradients itself.
        in_pipeline: whether a pipeline runs forward and backward passes together, so there is no loss to call
            `backward` with.
        flow: finds the parameters that losses reach; needed with ZeRO.
        sends_as_they_come: whether ZeRO sends gradients during the backward pass, in the order in which they arrive.
        masters: its master weights.
        drift: compares replicas.
        held: stands for the gradients that ZeRO holds.
    """

    engine: Any
    gradients: Callable[[], Iterator[Tensor]]
    clips: bool
    in_pipeline: bool
    flow: GradientFlow | None
    sends_as_they_come: bool
    masters: Masters
    drift: DriftCheck
    held: HeldGradients


@OPTIM_WRAPPERS.register_module()
class ColossalAIOptimWrapper(OptimWrapper):
    """The optim wrapper of `ColossalAIStrategy`, with the interface of `OptimWrapper`.

    Its `optimizer` is the configured one, and its learning rates are those in use, even if the engine has replaced its
    parameters by shards.

    Args:
        optimizer: the optimizer.
        accumulative_counts: number of batches whose gradients are averaged into one update.
        clip_grad: `dict(max_norm=...)`; with the plugin `ddp`, everything that `OptimWrapper` accepts.
    """

    _drive: Drive | None = None
    _goes_on = False  # from a backward pass to the update, without code of the user's between

    @classmethod
    def of(cls, wrapper: OptimWrapper) -> ColossalAIOptimWrapper:
        """Return a wrapper of this class with the optimizer and settings of another wrapper.

        Raises:
            ConfigError: the other wrapper is not a plain `OptimWrapper`.
        """
        if isinstance(wrapper, cls):
            return wrapper
        if type(wrapper) is not OptimWrapper:
            raise ConfigError(
                "`optim_wrapper` must be an OptimWrapper with one optimizer under the strategy 'colossalai', but is of "
                f"type {type(wrapper).__name__}. For half precision give the plugin precision='bf16', or use "
                "plugin='ddp'; for several optimizers use strategy='ddp'"
            )
        return cls(wrapper.optimizer, wrapper.accumulative_counts, wrapper.clip_grad)

    def attach(self, drive: Drive) -> None:
        """Set ColossalAI's optimizer, which wraps this one's."""
        self._drive = drive

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a scaled loss, and count the batch.

        **Collective**: every rank, unless inside `no_sync`.

        Raises:
            ConfigError: ZeRO sends gradients as they arrive, and the ranks' losses reach different parameters, or the
                same ones in a different order; or the gradients of an earlier pass were changed.
            RuntimeError: the model is in stages, which have no loss to call `backward` with; call `train_step`.
        """
        drive = self._attached()
        if drive.in_pipeline:
            raise RuntimeError(
                "a model with `pp_size` above 1 must be trained by its `train_step`, because forward and backward "
                "passes of its stages are one, but `update_params` or `backward` was called"
            )
        drive.held.release()
        reached = [] if self._goes_on or drive.flow is None else drive.flow.reached(loss)
        if drive.flow is not None and drive.engine.require_grad_sync:
            if drive.sends_as_they_come:
                drive.flow.check_order(loss, "Use stage=1 with overlap_communication=False, or strategy 'ddp'")
            else:
                loss = drive.flow.reach_alike(loss)
        drive.engine.backward(loss, **kwargs)
        self._windows.add()
        drive.held.hold(reached)

    def update_params(
        self, loss: Tensor, step_kwargs: Mapping[str, Any] | None = None, zero_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Run the backward pass; at the end of a window update the parameters and clear the gradients."""
        self._goes_on = True
        try:
            super().update_params(loss, step_kwargs, zero_kwargs)
        finally:
            self._goes_on = False

    def update_by(self, model: nn.Module, run: Callable[[float], None]) -> None:
        """Do what `update_params` does, for a pipeline that runs forward and backward passes together.

        Args:
            model: the wrapper, for its `no_sync`.
            run: runs both, and adds the gradients of the loss times its argument.
        """
        factor = float(self.scale_loss(torch.ones((), dtype=torch.float64)))
        with self.optim_context(model):
            run(factor)
        self._no_sync = None
        self._windows.add()
        if self.should_update():
            self.step()
            self.zero_grad()

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients, then let the optimizer update the parameters.

        Raises:
            DivergenceError: on every rank with the same part of the model, if ranks have written other values into it.
        """
        drive = self._attached()
        drive.held.release()
        self._even_out()
        if self.clip_grad is not None and not drive.clips:
            self._clip_grad()
        drive.drift.before_update()
        drive.masters.follow()
        drive.engine.step(**kwargs)
        drive.masters.record()
        if self.clip_grad is not None and drive.clips:
            self._grad_norm = torch.tensor(float(drive.engine.get_grad_norm()))

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients."""
        drive = self._attached()
        drive.held.drop()
        drive.engine.zero_grad(**kwargs)

    def left_out(self, model: nn.Module) -> list[str]:
        """Return an empty list: the engine holds other tensors, and refuses parameters that it does not train."""
        return []

    def _multiply_gradients(self, factor: float) -> None:
        for gradient in self._attached().gradients():
            gradient.mul_(factor)

    def _attached(self) -> Drive:
        if self._drive is None:
            raise RuntimeError(
                "a ColossalAIOptimWrapper must be given to ColossalAIStrategy.prepare() before it is used"
            )
        return self._drive
