"""lockstep: plain and trustworthy distributed training for PyTorch.

The names below are imported on first use, so that ``import lockstep`` costs next to nothing and the command line can
print its help without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.config import Config as Config
    from lockstep.dist import get_dist_info as get_dist_info
    from lockstep.dist import init_dist as init_dist
    from lockstep.registry import Registry as Registry
    from lockstep.runner import Runner as Runner
    from lockstep.session import Session as Session

_HOMES = {
    "Runner": "lockstep.runner",
    "Session": "lockstep.session",
    "Config": "lockstep.config",
    "Registry": "lockstep.registry",
    "init_dist": "lockstep.dist",
    "get_dist_info": "lockstep.dist",
}
_PACKAGES = frozenset({
    "checkpoint", "config", "dataset", "device", "diagnostics", "dist", "errors", "evaluator", "hooks", "lint",
    "logging", "model", "optim", "registry", "runner", "session", "strategy", "testing", "topology", "tree",
    "visualization", "weights",
})  # fmt: skip

__all__ = ["Config", "Registry", "Runner", "Session", "__version__", "get_dist_info", "init_dist"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return import_module(f"lockstep.{name}")
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
