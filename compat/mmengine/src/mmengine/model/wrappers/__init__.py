"""Wrappers that distribute a model: lockstep's. The one for FSDP is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.model import MMDistributedDataParallel, MMSeparateDistributedDataParallel, is_model_wrapper

if TYPE_CHECKING:
    from lockstep.model import MMFullyShardedDataParallel

__all__ = [
    "MMDistributedDataParallel",
    "MMFullyShardedDataParallel",
    "MMSeparateDistributedDataParallel",
    "is_model_wrapper",
]


def __getattr__(name: str) -> Any:
    if name == "MMFullyShardedDataParallel":
        import lockstep.model

        return lockstep.model.MMFullyShardedDataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
