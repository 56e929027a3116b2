"""`ColossalAIOptimWrapper` and `ColossalAIModelWrapper`, through which ColossalAI's optimizer and model are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.model import ModelWrapper, steps
from lockstep.model.written import DriftCheck
from lockstep.optim import OptimWrapper
from lockstep.registry import MODEL_WRAPPERS, OPTIM_WRAPPERS
from lockstep.strategy.colossalai.engine import full_numel, is_split
from lockstep.strategy.colossalai.pipeline import Pipeline
from lockstep.strategy.engine_parameters import FrozenParamsGuard, GradientPlaceholders, MasterWeights
from lockstep.strategy.gradient_flow import GradientFlow
from lockstep.strategy.own_steps import GuardedPasses, OwnStep, WholeParams


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
    masters: MasterWeights
    drift: DriftCheck
    held: GradientPlaceholders


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


@MODEL_WRAPPERS.register_module(name=["ColossalAIModelWrapper", "CollosalAIModelWrapper"])
class ColossalAIModelWrapper(ModelWrapper):
    """A model that `ColossalAIStrategy` has distributed over the ranks.

    Args:
        model_wrapper: the model returned by the booster.
        model: the user's own module inside it.
        booster: ColossalAI's booster. It owns the groups over which the model communicates, so it must live as long.
        no_sync: returns the context in which gradients are not averaged; None if the plugin has none.
        pipeline: its stages; None if it is not in stages.
        guard: stops the model's own `train_step` from using part of a parameter as the whole; see `OwnStep`.
        uses: stops the model's `forward` from using part of a parameter as the whole.
        drift: compares replicas after a step; None if the optim wrapper does before an update.
        may_go_round: whether such a step may call `loss.backward()` without the optim wrapper.
    """

    def __init__(
        self,
        model_wrapper: nn.Module,
        model: nn.Module,
        booster: Any = None,
        no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
        pipeline: Pipeline | None = None,
        guard: WholeParams | None = None,
        uses: WholeParams | None = None,
        drift: DriftCheck | None = None,
        *,
        may_go_round: bool = False,
    ) -> None:
        super().__init__()
        self.boosted = model_wrapper
        self.__dict__["module"] = model  # not as a child, which would list its parameters twice
        self._booster = booster
        self._no_sync = no_sync
        self._pipeline = pipeline
        self._drift = drift
        self.is_stage = pipeline is not None
        if self.is_stage or any(map(is_split, model.parameters())):
            self.partitioned = "ColossalAI's tensor parallelism and pipelines keep them in pieces. Use strategy 'fsdp'"
        self._guards = GuardedPasses(*([] if uses is None else [uses]))
        self._trainable = FrozenParamsGuard(model, "ColossalAI")
        self._own_step: OwnStep | None = None
        if pipeline is None and steps.defines_step(model, "train_step"):
            self._own_step = OwnStep(self, model, model_wrapper, guard, may_go_round=may_go_round)

    @property
    def num_parameters(self) -> int:
        """Number of elements of the parameters of all stages, counting split ones in full."""
        if self._pipeline is not None:
            return self._pipeline.stages.inventory.numel
        return sum(map(full_numel, self.module.parameters()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            RuntimeError: it is in stages, and a single stage cannot be called; call `train_step` or `val_step`.
            ConfigError: under tensor parallelism, the model uses a split parameter outside of the layer that holds it;
                checked in the first passes and every fiftieth.
        """
        if self._pipeline is not None:
            raise RuntimeError(
                "a model with `pp_size` above 1 must be used by its `train_step`, `val_step` and `test_step`, because "
                "this rank has only some of its layers, but was called"
            )
        with nullcontext() if self._own_step is None else self._own_step.forward(), self._guards.next():
            return self.boosted(*args, **kwargs)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Train on this rank's part of the batch, and return this rank's values to log.

        **Collective**: every rank, unless inside `no_sync`; with `pp_size` above 1 always every rank of the replica.
        """
        if self._pipeline is None:
            return super().train_step(data, optim_wrapper)
        self._trainable.check()
        return self._pipeline.train(self, data, optim_wrapper)

    @contextmanager
    def step_context(self, optim_wrapper: Any) -> Iterator[None]:
        """Let the booster take part in a step, also in one of the user's own.

        Raises:
            RuntimeError: the user's own step bypasses the optim wrapper.
            ConfigError: under tensor parallelism, it uses split parameters outside the model's `forward`; or parameters
                have been frozen or unfrozen since the model was prepared.
            DivergenceError: on every rank, if replicas differ.
        """
        self._trainable.check()
        drift = nullcontext() if self._drift is None else self._drift.step(lambda: True)
        with drift, nullcontext() if self._own_step is None else self._own_step.running(optim_wrapper):
            yield

    def val_step(self, data: Any) -> Any:
        """Return the module's predictions for this rank's batch.

        **Collective**: every rank that shares the replica, with `tp_size` or `pp_size` above 1.
        """
        return super().val_step(data) if self._pipeline is None else self._pipeline.predict(data)

    def test_step(self, data: Any) -> Any:
        """Return the module's predictions for this rank's batch, like `val_step`."""
        return super().test_step(data) if self._pipeline is None else self._pipeline.predict(data)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return the context in which gradients accumulate on their rank; a null context if the plugin has none.

        ZeRO 2 keeps only its shard of each gradient. It therefore averages gradients after every batch, with the same
        result.
        """
        return nullcontext() if self._no_sync is None else self._no_sync()
