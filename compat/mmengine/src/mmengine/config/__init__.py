"""Configs: lockstep's, under the same names."""

from __future__ import annotations

from lockstep.config import Config, ConfigDict, DictAction, read_base

__all__ = ["Config", "ConfigDict", "DictAction", "read_base"]
