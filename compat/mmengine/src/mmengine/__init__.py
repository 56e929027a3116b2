"""MMEngine's names, on lockstep.

This is not MMEngine: the distribution lockstep-mmengine offers its import name to code that was written for it. What
only MMEngine does lives here; everything else is lockstep's, under MMEngine's names.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mmengine._alone import refuse_mmengine
from mmengine.version import __version__, version_info

refuse_mmengine()

# Whose names are also names of the package itself.
_SUBPACKAGES = ("config", "fileio", "logging", "registry", "utils")

__all__ = ["__version__", "version_info"]


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for room in _SUBPACKAGES:
            module = import_module(f"mmengine.{room}")
            if name == room:
                return module
            if name in module.__all__:
                return getattr(module, name)
        if find_spec(f"mmengine.{name}") is not None:
            return import_module(f"mmengine.{name}")
    raise AttributeError(f"module 'mmengine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for room in _SUBPACKAGES for name in import_module(f"mmengine.{room}").__all__)})
