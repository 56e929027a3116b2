"""FSDP: the wrapper, its arguments, its units, what it does to parameters, and what ranks compare."""

from __future__ import annotations

from lockstep.model.fsdp.wrapper import MMFullyShardedDataParallel

__all__ = ["MMFullyShardedDataParallel"]
