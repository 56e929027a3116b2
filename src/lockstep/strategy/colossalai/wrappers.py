"""`ColossalAIOptimWrapper` and `ColossalAIModelWrapper`, through which ColossalAI's optimizer and model are trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.registry import MODEL_WRAPPERS, OPTIM_WRAPPERS
from lockstep.strategy.engine_wrappers import EngineModelWrapper, EngineOptimWrapper


@OPTIM_WRAPPERS.register_module()
class ColossalAIOptimWrapper(EngineOptimWrapper):
    """The optim wrapper of `ColossalAIStrategy`, with the interface of `OptimWrapper`.

    Its `optimizer` is the configured one, and its learning rates are those in use, even if the engine has replaced its
    parameters by shards.

    Args:
        optimizer: the optimizer.
        accumulative_counts: number of batches whose gradients are averaged into one update.
        clip_grad: `dict(max_norm=...)`.
        accumulate_across_epochs: as for `OptimWrapper`.

    Attributes:
        sends_as_they_come: whether ZeRO sends gradients during the backward pass, in the order in which they arrive.
    """

    engine_name = "ColossalAI"
    half_option = "the plugin precision='bf16'"
    sends_as_they_come = False

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients."""
        self._require_window_closed("zero_grad")
        engine = self.engine  # raises if there is none
        self._placeholders.drop()  # the engine may write zeros into each `grad`
        engine.zero_grad(**kwargs)

    def _run_backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self.engine.require_grad_sync:
            if self.sends_as_they_come:
                # ZeRO sends what this pass reaches: without overlap_communication, also what earlier batches have left.
                loss = self._flow.reach_held(loss)
                self._flow.check_order(loss, "Use stage=1 with overlap_communication=False, or strategy 'ddp'")
            else:
                loss = self._flow.reach_alike(loss)
        self.engine.backward(loss, **kwargs)

    def _run_step(self, **kwargs: Any) -> None:
        self.engine.step(**kwargs)
        if self.clip_grad is not None:
            self._grad_norm = torch.tensor(float(self.engine.get_grad_norm()), device="cpu")

    def _multiply_gradients(self, factor: float) -> None:
        for index in range(len(self.engine.param_groups)):
            for gradient in self.engine.get_working_grads_by_group_id(index):
                gradient.mul_(factor)


@MODEL_WRAPPERS.register_module(name=["ColossalAIModelWrapper", "CollosalAIModelWrapper"])
class ColossalAIModelWrapper(EngineModelWrapper):
    """A model that `ColossalAIStrategy` has distributed over the ranks.

    Args:
        model_wrapper: the model returned by the booster.
        model: the user's own module inside it.
        booster: ColossalAI's booster. It owns the groups over which the model communicates, so it must live as long.
        no_sync: returns the context in which gradients are not averaged; None if the plugin has none.
    """

    def __init__(
        self,
        model_wrapper: nn.Module,
        model: nn.Module,
        booster: Any = None,
        no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        super().__init__(model, model_wrapper, "ColossalAI")
        self._booster = booster
        self._no_sync = no_sync

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return the context in which gradients accumulate on their rank; a null context if the plugin has none.

        ZeRO 2 keeps only its shard of each gradient. It therefore averages gradients after every batch, with the same
        result.
        """
        return nullcontext() if self._no_sync is None else self._no_sync()
