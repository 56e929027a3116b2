"""Test distributed code on real ranks: ``@ranks(2)`` above a test function, or ``run_ranks(2, body)`` inside one.

Both send a module-level function to a pool of rank processes that share a process group; see ``docs/testing.md``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.testing.messages import RankFailure as RankFailure
    from lockstep.testing.messages import RankReport as RankReport
    from lockstep.testing.plugin import ranks as ranks
    from lockstep.testing.pool import close_pools as close_pools
    from lockstep.testing.pool import run_ranks as run_ranks

_HOMES = {
    "ranks": "lockstep.testing.plugin",
    "close_pools": "lockstep.testing.pool",
    "run_ranks": "lockstep.testing.pool",
    "RankFailure": "lockstep.testing.messages",
    "RankReport": "lockstep.testing.messages",
}

__all__ = ["RankFailure", "RankReport", "close_pools", "ranks", "run_ranks"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lockstep.testing' has no attribute {name!r}")
