"""Test distributed code on real ranks: ``@ranks(2)`` above a test function, or ``run_ranks(2, body)`` inside one.

Both send a module-level function to a pool of rank processes that share a process group; see ``docs/testing.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.testing.messages import RankFailure, RankReport
from lockstep.testing.pool import close_pools, run_ranks

if TYPE_CHECKING:
    from lockstep.testing.plugin import ranks

__all__ = ["RankFailure", "RankReport", "close_pools", "ranks", "run_ranks"]


def __getattr__(name: str) -> Any:
    if name == "ranks":  # needs pytest
        from lockstep.testing import plugin

        return plugin.ranks
    raise AttributeError(f"module 'lockstep.testing' has no attribute {name!r}")
