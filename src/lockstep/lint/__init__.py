"""Finding everything that is wrong with a config before anything is built from it."""

from __future__ import annotations

from lockstep.lint.check import check_config, find_faults
from lockstep.lint.parts import Fault

__all__ = ["Fault", "check_config", "find_faults"]
