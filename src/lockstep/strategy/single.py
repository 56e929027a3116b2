"""One process, one device."""

from __future__ import annotations

from torch import nn

from lockstep.dist import get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.registry import STRATEGIES
from lockstep.strategy.native import NativeStrategy


@STRATEGIES.register_module(name=["SingleDeviceStrategy", "single"])
class SingleDeviceStrategy(NativeStrategy):
    """Train on one device of one process."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model as it is.

        Raises:
            ConfigError: there are several ranks, which would train apart from each other.
        """
        if get_world_size() > 1:
            raise ConfigError(
                "`strategy` must lay the model over all ranks, but is 'single' "
                f"(rank {get_rank()} of {get_world_size()}). Use 'ddp', or start one process"
            )
        return model
