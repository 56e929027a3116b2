"""Strategies that keep the whole model on every rank: a single device, or replicas with averaged gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.dist import get_rank, get_world_size, is_distributed
from lockstep.errors import ConfigError
from lockstep.registry import MODEL_WRAPPERS, STRATEGIES
from lockstep.strategy.native import NativeStrategy

_WRAPPER = "MMDistributedDataParallel"


@STRATEGIES.register_module(name=["SingleDeviceStrategy", "single"])
class SingleDeviceStrategy(NativeStrategy):
    """Train on one device of one process."""

    keeps_memory_format = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model unchanged.

        Raises:
            ConfigError: there are several ranks, which would train independently of each other.
        """
        if get_world_size() > 1:
            raise ConfigError(
                "`strategy` must lay the model over all ranks, but is 'single' "
                f"(rank {get_rank()} of {get_world_size()}). Use 'ddp', or start one process"
            )
        return model


@STRATEGIES.register_module(name=["DDPStrategy", "ddp"])
class DDPStrategy(NativeStrategy):
    """Train a replica of the model on every rank, with averaged gradients.

    Buffers, such as the running statistics of BatchNorm, stay each rank's own during an epoch.

    Args:
        model_wrapper: config of the wrapper, `MMDistributedDataParallel` by default.
        **kwargs: arguments of the wrapper, such as `find_unused_parameters`.
    """

    keeps_memory_format = True

    def __init__(self, model_wrapper: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._wrapper = {"type": _WRAPPER, "broadcast_buffers": False, **(model_wrapper or {}), **kwargs}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model, unless there is no process group or nothing to train."""
        trainable = any(parameter.requires_grad for parameter in model.parameters())
        if not is_distributed() or not trainable:
            return model
        wrapped: nn.Module = MODEL_WRAPPERS.build(self._wrapper, module=model)
        return wrapped
