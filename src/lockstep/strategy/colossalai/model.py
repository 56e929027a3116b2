"""`ColossalAIModelWrapper`: ColossalAI's model with the training and validation steps of the user's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from lockstep.model import ModelWrapper, steps
from lockstep.model.drift import DriftCheck
from lockstep.registry import MODEL_WRAPPERS
from lockstep.strategy.colossalai.engine import full_numel, is_split
from lockstep.strategy.colossalai.pipeline import Pipeline
from lockstep.strategy.own_steps import GuardedPasses, OwnStep, WholeParams
from lockstep.strategy.trainable import TrainableParams


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
        self._trainable = TrainableParams(model, "ColossalAI")
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
