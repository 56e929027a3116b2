"""A custom strategy: each rank trains on its own, and from time to time all ranks average their weights.

It communicates `interval` times less often than DDP, and optimizes something slightly different; see Stich, "Local SGD
Converges Fast and Communicates Little", 2018 (1805.09767).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from lockstep.device import get_device
from lockstep.dist import all_reduce_params, broadcast
from lockstep.errors import ConfigError
from lockstep.optim import OptimWrapper, build_optim_wrapper
from lockstep.registry import STRATEGIES
from lockstep.strategy import Strategy, read_optim_state, write_optim_state


@STRATEGIES.register_module(name=["LocalSGDStrategy", "local_sgd"])
class LocalSGDStrategy(Strategy):
    """Average the weights of all ranks every few updates, and never their gradients.

    Args:
        interval: number of updates between two averages.
    """

    def __init__(self, interval: int = 8) -> None:
        if interval < 1:
            raise ConfigError(f"`interval` must be at least 1, but is {interval}")
        self.interval = interval

    def parallelize(self, model: nn.Module, optim_wrapper: Any = None) -> tuple[nn.Module, OptimWrapper | None]:
        """Give all ranks the weights of rank 0, and average weights after every `interval` updates."""
        self.model = model.to(get_device())
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            broadcast(tensor.detach(), src=0)
        if optim_wrapper is None:
            return self.model, None
        self.optim_wrapper = build_optim_wrapper(self.model, optim_wrapper)
        self.updates = 0
        for optimizer in self.optim_wrapper.optimizers[:1]:
            optimizer.register_step_post_hook(self._after_step)
        return self.model, self.optim_wrapper

    def model_state(self) -> dict[str, Any]:
        """Average the weights of all ranks and return them, so that there is one model to save, not one per rank."""
        self._average()
        return get_model_state_dict(self.model)

    def optim_state(self) -> dict[str, Any]:
        """Return the optimizer's state with its moments averaged over all ranks."""
        state = read_optim_state(self.model, self.optim_wrapper.optimizers)
        moments = [x for one in state["state"].values() for x in one.values() if isinstance(x, torch.Tensor)]
        all_reduce_params([x for x in moments if x.is_floating_point()], op="mean")
        return state

    def load_state(self, model_state: dict[str, Any] | None = None, optim_state: dict[str, Any] | None = None) -> None:
        """Load states that any strategy has saved."""
        if model_state is not None:
            set_model_state_dict(self.model, model_state)
        if optim_state is not None:
            write_optim_state(self.model, self.optim_wrapper.optimizers, optim_state)

    def _after_step(self, *_: Any) -> None:
        self.updates += 1
        if self.updates % self.interval == 0:
            self._average()

    def _average(self) -> None:
        with torch.no_grad():
            all_reduce_params(self.model.parameters(), op="mean")
