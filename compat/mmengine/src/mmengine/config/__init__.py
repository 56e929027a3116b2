"""Configs."""

from __future__ import annotations

from mmengine.config.config import Config, ConfigDict, DictAction, read_base

__all__ = ["Config", "ConfigDict", "DictAction", "read_base"]
